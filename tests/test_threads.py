"""Threads of torch: the cores of a node, shared by its ranks, unless somebody chose."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from common.launching.threads import chosen, fair_share
from tests.helpers import ROOT


@pytest.mark.parametrize("cores, neighbours, env, threads", [
    (range(8), [range(8)] * 2, {}, 4),
    (range(8), [range(8)] * 3, {}, 2),
    (range(2), [range(2)] * 4, {}, 1),  # never none
    (range(4), [range(4), range(4, 8)], {}, 4),  # bound to cores of their own
    (range(64), [range(64)] * 4, {"SLURM_CPUS_ON_NODE": "16"}, 4),  # not bound, but granted less than there is
    (range(8), [range(8)], {}, 8)])
def test_fair_share(cores: range, neighbours: list[range], env: dict[str, str], threads: int):
    assert fair_share(cores, neighbours, env) == threads


def test_who_sets_the_variable_decides():
    assert not chosen({}) and not chosen({"OMP_NUM_THREADS": ""})
    assert chosen({"OMP_NUM_THREADS": "1"}) and chosen({"OMP_NUM_THREADS": "3", "TORCHELASTIC_RUN_ID": "x"})


@pytest.mark.parametrize("started_with, result", [({}, "False"), ({"OMP_NUM_THREADS": "1"}, "True")])
def test_torchruns_own_choice_is_nobodys(started_with: dict[str, str], result: str):
    """The parent stands for torchrun: it sets the variable after its start."""
    child = ("import os, sys, types; sys.modules['torch'] = types.ModuleType('torch'); "  # slow to import, not needed
             "from common.launching.threads import chosen; print(chosen(os.environ))")
    parent = ("import os, subprocess, sys; os.environ.update(OMP_NUM_THREADS='1', TORCHELASTIC_RUN_ID='x'); "
              "sys.exit(subprocess.call([sys.executable, '-c', sys.argv[1]]))")
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    out = subprocess.run([sys.executable, "-c", parent, child], cwd=ROOT, env=env | started_with, timeout=60,
                         capture_output=True, text=True)
    assert out.stdout.strip() == result, out.stderr
