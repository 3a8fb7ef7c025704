"""OUTPUT, the folder of one run: which one it is, how often it was started, how it ended.

Global rank 0 alone calls what is here, and broadcasts what the others must know. Every file appears whole
or not at all, so a kill at any moment leaves a folder that the next start can read.

    cat runs/train_single/20250131-120000/status.json      # {"state": "stopped", "attempt": 1, ...}
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path

from common.errors import UserError
from common.files import Json, read_json, write_atomic, write_shared, writing
from common.processes import age_seconds
from common.running.relaunch import agent_name, find_folder, is_restart, remember_folder

RUN_FILES = ("config.json", "status.json", "last.pt", "last.prev.pt")  # any of them: the folder holds a run
TAIL_BYTES = 1 << 20  # enough for the last row of a trace with thousands of keys


class RunFolder:
    """The folder of a run. `restarted`: a launcher has started this run before, so it goes on without --resume."""

    def __init__(self, path: Path, restarted: bool = False, agent: str = "", script: str = ""):
        self.path, self.restarted, self.agent, self.script = path, restarted, agent, script
        self._status: Json = {}

    @classmethod
    def open(cls, script: str, output: str | Path | None, resume: bool, *, env: Mapping[str, str] = os.environ,
             command: Sequence[str] | None = None, agents: Sequence[str] = (), counted: bool = False) -> RunFolder:
        """Make or find OUTPUT: `output`, or `runs/<script>/<date-time>` where it is None.

        `resume` is whether the user asked to go on; `command` (sys.argv) tells apart the runs of one Slurm job.
        `agents` and `counted` are what the other ranks know of a restart: torchrun's agents, and whether one counts it.
        Raises UserError for a folder that holds a run and is not to be resumed, and for one that cannot be written.
        """
        agent, counted = agent_name(env), counted or is_restart(env)
        agents, command = [agent, *agents], sys.argv if command is None else command
        if output is None:
            before = find_folder(Path("runs") / script, env, command, agents, counted)
            path, restarted = before or _new_folder(Path("runs") / script), before is not None
            if not restarted:
                remember_folder(path, env, command)
        else:
            path = Path(output)
            restarted = counted or read_json(path / "status.json").get("agent", "") in filter(None, agents)
        with writing(path):
            path.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=path).close()  # fails now rather than after the first epoch
        found = [name for name in RUN_FILES if (path / name).exists()]
        if found and not resume and not restarted and not _came_to_nothing(path):
            raise UserError(f"the folder already holds a run ({found[0]}); --output {path}; "
                            "add --resume auto to go on with it, or choose another --output")
        return cls(path, restarted, agent, script)

    @property
    def attempt(self) -> int:
        """How often this run was started before. Known after `start_attempt`."""
        return int(self._status["attempt"])

    def start_attempt(self, progress: Json) -> int:
        """Count this start and keep where it begins: epoch, step, global_step, position. Returns the attempt.

        A torn status.json stops nothing: config.json has the same list, and no attempt that left rows is counted again.
        """
        begun = _places(self.path / "status.json")
        if begun is None:
            begun = _places(self.path / "config.json") or []
            # What is lost counts as begun here, so that it replaces no rows of the attempts before it.
            begun += [progress] * (self._attempts_seen() - len(begun))
        begun.append(dict(progress))
        self._status = {"state": "running", "attempt": len(begun) - 1, "reason": None, "attempts": begun}
        if self.agent:
            self._status["agent"] = self.agent
        self._write_status()
        self._drop_old_stop()
        return self.attempt

    def _drop_old_stop(self) -> None:
        """Take away a file `stop` from before this launch, which meant an earlier one. Later ones count.

        They count also if they came while the run was starting, or before torchrun or Slurm started it again.
        status.json, just written, tells the time of the file system, whose clock may be another machine's.
        """
        stop = self.path / "stop"
        with suppress(OSError):
            age = age_seconds(os.getppid() if self.agent else None)
            if not self.restarted and stop.stat().st_mtime < (self.path / "status.json").stat().st_mtime - age:
                stop.unlink()
                print(f"{stop} was there before this run: taken away", flush=True)

    def finish(self, state: str, reason: str | None = None) -> None:
        """Record how the run ended: stopped, complete or failed. A `stop` file that came too late is taken away.

        After a failure it stays: torchrun may start the run again, which is to stop then. Before `start_attempt`
        only an older run's status changes: a folder in which nothing began holds no run. Rank 0 calls it, and after a
        failure the rank that tells of it, too.
        """
        if state != "failed":
            with suppress(OSError):
                (self.path / "stop").unlink()
        status = self._status or read_json(self.path / "status.json")
        if not status:
            return
        try:
            if self._status:
                self._status |= {"state": state, "reason": reason}
                self._write_status()
            else:  # another rank than 0, or another run
                with writing(self.path):
                    write_shared(self.path / "status.json", json.dumps({**status, "state": state, "reason": reason}))
        except UserError:
            if state != "failed":  # else the failure itself is what the user must see
                raise

    def write_config(self, config: Json) -> None:
        """Write config.json after `start_attempt`: `config` has "script", "config" and "plan".

        "plans" keeps the plan of every attempt and whether it was traced, "attempts" a copy of the list in status.json.
        """
        traced = "save" in config.get("config", {}).get("trace", ())
        plans = read_json(self.path / "config.json").get("plans")
        plans = plans[: self.attempt] if isinstance(plans, list) else []
        plans += [{**config["plan"], "traced": traced}] * (self.attempt + 1 - len(plans))
        whole = {**config, "plans": plans, "attempts": self._status["attempts"]}
        lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in whole.items()]
        write_atomic(self.path / "config.json", "{\n" + ",\n".join(lines) + "\n}\n")

    def take_stop_file(self) -> bool:
        """Take away the file `stop`; returns whether somebody had put one here. Called once a second."""
        path = f"{self.path}/stop"
        if not os.path.exists(path):
            return False
        with suppress(OSError):
            os.unlink(path)
        return True

    def _write_status(self) -> None:
        write_atomic(self.path / "status.json", json.dumps(self._status) + "\n")

    def _attempts_seen(self) -> int:
        """How many attempts have left plans or rows."""
        plans = read_json(self.path / "config.json").get("plans")
        seen = len(plans) if isinstance(plans, list) else 0
        for path in (self.path / "metrics.jsonl", *self.path.glob("trace/rank*.jsonl")):
            seen = max(seen, _last_attempt(path) + 1)
        return seen


def _came_to_nothing(path: Path) -> bool:
    """Whether a run failed before its first step was reported: there is nothing to lose, and nothing to go on from."""
    status, records = read_json(path / "status.json"), (path / "metrics.jsonl", *path.glob("trace/rank*.jsonl"))
    return status.get("state") == "failed" and not any(path.glob("*.pt")) and all(_last_attempt(p) < 0 for p in records)


def _places(path: Path) -> list[Json] | None:
    """Where each attempt began, as a file has it; None where it cannot be told."""
    places = read_json(path).get("attempts")
    whole = isinstance(places, list) and all(isinstance(place, dict) for place in places)
    return places if whole else None


def _last_attempt(path: Path) -> int:
    """The attempt of the last whole row of a file of JSON lines; -1 where there is none."""
    with suppress(OSError):
        with open(path, "rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            lines = file.read().splitlines()
        for line in reversed(lines):
            with suppress(ValueError, TypeError, KeyError):
                return int(json.loads(line)["attempt"])
    return -1


def _new_folder(parent: Path) -> Path:
    """Make a folder that nobody has: a suffix tells apart runs started in one second."""
    now = time.strftime("%Y%m%d-%H%M%S")
    with writing(parent):
        parent.mkdir(parents=True, exist_ok=True)
        for number in count():
            path = parent / (f"{now}-{number}" if number else now)
            with suppress(FileExistsError):
                path.mkdir()
                return path
    raise AssertionError("unreachable")
