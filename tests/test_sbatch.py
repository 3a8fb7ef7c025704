"""The .sbatch files under stand-ins for Slurm's commands and for python: what they start, and when they go on."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from common.running.run_folder import RunFolder
from tests.helpers import ROOT

SRUN = r"""
while [[ $1 == -* ]]; do shift; done
[[ $1 == getent ]] && { echo "${ADDRESS:-10.0.0.1} STREAM $3"; exit; }
SLURMD_NODENAME=node1 SLURM_NODEID=0 exec "$@"
"""
SCONTROL = r"""
[[ $1 == show ]] && { echo node1; echo node2; exit; }
echo "$@" >>"$TOLD/scontrol"
[[ -z ${REFUSE:-} ]] || exit 1
kill -TERM $PPID
"""
# A training script that ends at once, or waits for a stop, and leaves what it is told to.
PYTHON = r"""
[[ $1 != -c ]] || exec "$REAL_PYTHON" "$@"
printf '%s\n' "$@" >"$TOLD/python"
[[ -n ${OUTPUT:-} ]] || exit 0
touch "$OUTPUT/running"
for ((i = 0; i < 200 && ${WAITS:-0}; i++)); do [[ -e $OUTPUT/stop || -e $OUTPUT/term ]] && break; sleep 0.05; done
if [[ -e $OUTPUT/stop ]]; then # once it is taken for an older one
    rm "$OUTPUT/stop"
    for ((i = 0; i < 200; i++)); do [[ -e $OUTPUT/stop ]] && touch "$TOLD/stopped" && break; sleep 0.05; done
fi
sleep 0.02
[[ -z ${STATE:-} ]] || echo '{"state": "'$STATE'", "attempt": 0, "reason": null}' >"$OUTPUT/status.json"
[[ -z ${SAVES:-} ]] || touch "$OUTPUT/last.pt"
exit ${CODE:-0}
"""
SBATCH = 'printf "%s\\n" "$@" >"$TOLD/sbatch"'


class Job:
    """A project's folder with the launch files, and the stand-ins first on PATH."""

    def __init__(self, folder: Path):
        self.folder, self.told = folder / "project", folder / "told"
        shutil.copytree(ROOT / "launch", self.folder / "launch")
        for path in (self.told, folder / "bin", self.folder / ".venv/bin"):
            path.mkdir(parents=True)
        (self.folder / ".venv/bin/activate").touch()
        for name, body in {"srun": SRUN, "scontrol": SCONTROL, "python": PYTHON, "sbatch": SBATCH}.items():
            path = folder / "bin" / name
            path.write_text("#!/usr/bin/env bash\n" + body)
            path.chmod(0o755)
        self.env = {"PATH": f"{folder}/bin:{os.environ['PATH']}", "TOLD": str(self.told), "REAL_PYTHON": sys.executable,
                    "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "node[1-2]",
                    "SLURM_SUBMIT_DIR": str(self.folder), "SLURM_GPUS_ON_NODE": "3", "SLURM_CPUS_PER_TASK": "4"}

    def start(self, script: str, *arguments: str, **env: str) -> subprocess.Popen:
        return subprocess.Popen(["bash", f"launch/{script}", *arguments], cwd=self.folder, env=self.env | env,
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)

    def run(self, script: str, *arguments: str, **env: str) -> tuple[int, str]:
        process = self.start(script, *arguments, **env)
        out, _ = process.communicate(timeout=60)
        return process.returncode, out

    def lines(self, name: str) -> list[str]:
        path = self.told / name
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


OUTPUT = "runs/train_ddp/slurm-7"


def test_ddp_starts_one_torchrun_a_node(job: Job):
    job.run("ddp.sbatch", "-s", "shards with blanks", "--lr", "0.1", OUTPUT=OUTPUT, STATE="complete")
    argv = job.lines("python")
    script = argv.index("train_ddp.py")
    assert argv[:2] == ["-m", "torch.distributed.run"] and (ROOT / argv[script]).exists()
    assert argv[script + 1 :] == ["-s", "shards with blanks", "--lr", "0.1", "--output", OUTPUT]
    options = dict(zip(argv[2:script:2], argv[3:script:2], strict=True))
    assert options["--nnodes"] == "2" and options["--nproc-per-node"] == "3" and options["--rdzv-conf"] == "is_host=1"
    assert options["--rdzv-endpoint"] == "node1:15007" and options["--log-dir"] == f"{OUTPUT}/logs/node1"


@pytest.mark.parametrize("script", ["ddp", "single", "dp"])
@pytest.mark.parametrize("arguments", [["--output=x/y"], ["--output", "x/y"]])
def test_a_folder_that_was_named_is_taken(job: Job, script: str, arguments: list[str]):
    code, out = job.run(f"{script}.sbatch", *arguments, OUTPUT="x/y", STATE="complete")
    assert code == 0 and "the run is complete" in out, out
    argv = job.lines("python")
    assert argv[argv.index(f"train_{script}.py") + 1 :] == arguments


@pytest.mark.parametrize("code, env, exits, requeued, says", [
    (0, {"STATE": "complete"}, 0, False, "complete"),
    (1, {"STATE": "complete"}, 0, False, "complete"),
    (1, {"STATE": "failed", "SAVES": "1"}, 1, False, "failed"),
    (1, {"STATE": "stopped", "SAVES": "1"}, 0, True, "queued again"),  # a signal to the launchers: preemption
    (0, {"STATE": "stopped", "SAVES": "1"}, 0, False, "goes on with"),  # somebody made a file `stop`
    (137, {"STATE": "running", "SAVES": "1"}, 0, True, "queued again"),
    (1, {"STATE": "stopped"}, 1, False, "saved nothing"),
    (1, {"STATE": "stopped", "SAVES": "1", "SLURM_RESTART_COUNT": "99"}, 0, True, "queued again"),
    (1, {"STATE": "stopped", "SAVES": "1", "SLURM_RESTART_COUNT": "100"}, 1, False, "started again 100 times"),
    (1, {"STATE": "stopped", "SAVES": "1", "REFUSE": "1"}, 1, True, "refuses"),
    (2, {}, 2, False, "did not begin"),
    (0, {}, 1, False, "did not begin")])
def test_when_a_job_is_queued_again(job: Job, code: int, env: dict[str, str], exits: int, requeued: bool, says: str):
    output = job.folder / OUTPUT
    output.mkdir(parents=True)
    (output / "status.json").write_text('{"state": "stopped"}')  # of an earlier job: says nothing of this one
    (output / "last.pt").touch()
    for name in ("status.json", "last.pt"):
        os.utime(output / name, (1, 1))
    found, out = job.run("ddp.sbatch", OUTPUT=OUTPUT, CODE=str(code), **env)
    assert (found, job.lines("scontrol")) == (exits, ["requeue 7"] if requeued else []), out
    assert says in out


@pytest.mark.parametrize("script", ["ddp", "single", "dp"])
def test_the_warning_becomes_a_stop_and_the_job_goes_on(job: Job, script: str):
    output = job.folder / f"runs/train_{script}/slurm-7"
    process = job.start(f"{script}.sbatch", OUTPUT=str(output), WAITS="1", STATE="stopped", SAVES="1")
    wait_for(output / "running")
    process.send_signal(signal.SIGUSR1)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 0 and job.lines("scontrol") == ["requeue 7"], out
    assert (job.told / "stopped").exists() and not (output / "stop").exists()


def test_a_cancelled_job_does_not_go_on(job: Job):
    output = job.folder / OUTPUT
    process = job.start("ddp.sbatch", OUTPUT=str(output), WAITS="1", STATE="stopped", SAVES="1", CODE="1")
    wait_for(output / "running")
    process.send_signal(signal.SIGTERM)
    time.sleep(0.2)
    assert process.poll() is None  # it waits for the ranks to save
    (output / "term").touch()
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 1 and not job.lines("scontrol"), out


def test_a_stop_that_is_left_over_does_not_stop_the_next_start(job: Job):
    (job.folder / OUTPUT).mkdir(parents=True)
    (job.folder / OUTPUT / "stop").touch()
    job.run("ddp.sbatch", OUTPUT=OUTPUT, STATE="complete")
    assert not (job.folder / OUTPUT / "stop").exists()


def test_loopback_address_of_the_first_node(job: Job):
    code, out = job.run("ddp.sbatch", ADDRESS="127.0.1.1")
    assert code == 1 and not job.lines("python")
    assert "error: the first node is a loopback address (127.0.1.1) on the others; node1; mend" in out


@pytest.mark.parametrize("name", ["ddp", "dp", "single", "make_shards"])
def test_help_says_what_to_edit_and_nothing_else_is_of_a_site(name: str):
    file = ROOT / "launch" / f"{name}.sbatch"
    env = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    out = subprocess.run(["bash", str(file), "--help"], capture_output=True, text=True, cwd="/", env=env, timeout=20)
    lines = file.read_text().splitlines()
    marked = [number for number, line in enumerate(lines, 1) if "EDIT" in line and "marked EDIT" not in line]
    assert out.returncode == 0 and f"sbatch launch/{name}.sbatch" in out.stdout
    assert [int(number) for number in re.findall(r"^  line (\d+):", out.stdout, re.M)] == marked
    assert marked and marked[-1] < lines.index(next(line for line in lines if line.startswith("set -")))
    assert "/home" not in file.read_text() and "conda" not in file.read_text()


def test_parts_of_shards_and_the_job_that_finishes(job: Job):
    array = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_MIN": "0", "SLURM_ARRAY_TASK_MAX": "2",
             "SLURM_ARRAY_TASK_COUNT": "3"}
    code, out = job.run("make_shards.sbatch", "images", "shards", **array, SLURM_ARRAY_TASK_ID="2")
    assert code == 0 and not job.lines("sbatch"), out
    assert job.lines("python") == ["-m", "common.make_shards", "images", "shards", "-w", "4", "--part", "2/3"]
    job.run("make_shards.sbatch", "images", "shards", **array, SLURM_ARRAY_TASK_ID="0")
    assert {"--dependency=afterok:7", "--array=0", "--finish", "images", "shards"} < set(job.lines("sbatch"))
    one = array | {"SLURM_ARRAY_TASK_MAX": "0", "SLURM_ARRAY_TASK_COUNT": "1"}
    job.run("make_shards.sbatch", "--finish", "images", "shards", **one, SLURM_ARRAY_TASK_ID="0")
    assert job.lines("python") == ["-m", "common.make_shards", "--finish", "images", "shards"]
    code, out = job.run("make_shards.sbatch", "images", "shards", **array | {"SLURM_ARRAY_TASK_MIN": "1"},
                        SLURM_ARRAY_TASK_ID="1")
    assert code == 2 and "--array=1-2" in out


def wait_for(path: Path) -> None:
    for _ in range(400):
        if path.exists():
            return
        time.sleep(0.05)
    raise AssertionError(f"{path} did not appear")


def test_the_state_that_the_shell_reads_is_the_one_that_a_run_writes(tmp_path: Path):
    folder = RunFolder.open("train_ddp", tmp_path, resume=False, env={})
    folder.start_attempt({"epoch": 0, "step": 0, "global_step": 0, "position": 0})
    folder.finish("failed", 'a reason with "state": "complete" in it')
    (pattern,) = re.findall(r"sed -n '(.*state.*)' ", (ROOT / "launch/slurm.sh").read_text())
    out = subprocess.run(["sed", "-n", pattern, tmp_path / "status.json"], capture_output=True, text=True, timeout=20)
    assert out.stdout.strip() == "failed"
