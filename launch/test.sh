#!/usr/bin/env bash
# All checks: ruff, mypy and pytest, in .venv, which is made if need be.
#
#   bash launch/test.sh [pytest arguments]        # two files at a time: most of a test is waiting for processes to start
set -euo pipefail
cd "$(dirname "$0")/.."
source launch/setup.sh
set_up requirements.txt tests/requirements.txt

.venv/bin/ruff check .
.venv/bin/mypy
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec .venv/bin/python -m pytest -n 2 --dist loadfile "$@"
