"""The README is true: its commands run as pasted, its flags are the scripts', the quickstart does what it says."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from common.flag_table import markdown
from tests.helpers import ROOT, end, start

README = (ROOT / "README.md").read_text()
LATER = ("bash launch/", "sbatch ", "srun ")  # these have tests of their own


def commands() -> list[str]:
    """Every command of every bash block, in order."""
    blocks = re.findall(r"```bash\n(.*?)```", README, re.S)
    lines = [line.partition(" #")[0].strip() for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [line for line in lines if line and not line.startswith(LATER)]


@pytest.mark.slow
def test_commands_run_as_pasted(tmp_path: Path) -> None:
    """In a copy of the project with a folder of images, one after the other, exit 0 each."""
    copy = tmp_path / "copy"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".venv", ".git", "runs", "demo", ".*_cache"))
    draw = [sys.executable, "-m", "common.demo_data", "images", "--images", "320"]
    subprocess.run(draw, cwd=copy, check=True, timeout=120)
    paths = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "PYTHONPATH": str(copy)}
    shown = commands()
    assert len(shown) >= 8
    for line in shown:
        line = line.replace("torchrun --nproc", "torchrun --standalone --nproc")  # a free port: others run here, too
        end(start(["bash", "-c", line], cwd=copy, CUDA_VISIBLE_DEVICES="", **paths), 180).check()


def test_the_table_of_flags_is_that_of_the_scripts() -> None:
    """`python -m common.flag_table` prints it."""
    assert markdown() in README


def test_it_says_nothing_of_machines() -> None:
    """No path or host of the machine that it was written on."""
    assert not re.search(r"(?<![\w.<>*/-])/[a-z]+/|https?://\w", README)


@pytest.mark.slow
def test_quickstart_trains_to_ninety_percent_and_reuses_what_is_there(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".venv", ".git", "runs", "demo", ".*_cache"))
    (copy / ".venv").symlink_to(Path(sys.executable).parent.parent)
    line = ["bash", "launch/quickstart.sh"]
    first = end(start(line, cwd=copy, CUDA_VISIBLE_DEVICES=""), 900).check()
    found = re.search(r"validation top-1: ([\d.]+) %", first.out)
    assert found and float(found[1]) >= 90
    folder = re.search(r"files of the run: (\S+)", first.out)
    assert folder and (copy / folder[1] / "best.pt").exists()
    shards = {path: path.stat().st_mtime_ns for path in (copy / "demo").rglob("*.tar")}
    end(start([*line, "--max_steps", "2"], cwd=copy, CUDA_VISIBLE_DEVICES=""), 300).check()
    assert shards == {path: path.stat().st_mtime_ns for path in (copy / "demo").rglob("*.tar")}
