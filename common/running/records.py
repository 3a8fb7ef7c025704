"""What a run leaves in its folder and says of itself: config.json, status.json, the reports, the skipped samples.

    with keep_records(world, folder, plan, state, config) as records:
        records.finish(fit(...))
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from common import __version__
from common.access.urls import shown_settings
from common.distributed import World
from common.launching.failure import RankError, SharedError
from common.lock import NodeLock, lock_path
from common.plan import Plan
from common.processes import available_cpus
from common.report import Report, ReportSettings
from common.running.error_log import ErrorLog, listed
from common.running.run_folder import RunFolder
from common.running.state import State
from common.sampling import Progress, num_steps


@dataclass
class Records:
    """The records of one start of a run. `attempt` counts the starts."""

    folder: RunFolder
    world: World
    attempt: int
    report: Report
    lock: NodeLock  # one object per process: it is re-entrant, two of them would wait for each other
    errors: ErrorLog
    state: State
    description: dict[str, Any]  # what every checkpoint says of the run

    def finish(self, outcome: str) -> None:
        """Record how the run ended: "complete" or "stopped". Every rank calls it."""
        self.report.flush()
        self.world.on_main(lambda: self.folder.finish(outcome))
        skipped = self.errors.skipped()
        if skipped:
            self.report.note(f"skipped {skipped}; {self.errors.path}")
        advice = "; --resume auto goes on with it" if outcome == "stopped" else ""
        self.report.note(f"{outcome}: {self.folder.path}{advice}")
        if outcome == "complete" and "save" in self.description["config"]["trace"] and self.world.is_main:
            self._draw_trace()

    def _draw_trace(self) -> None:
        """Show in TensorBoard who read what. Some seconds at most, however long the trace is."""
        from common.tracing.plot import figure  # loads matplotlib

        try:
            self.report.figure("train/trace", figure(self.folder.path), self.state.progress.global_step)
        except Exception as error:  # whatever goes wrong while drawing, the run itself is complete
            self.report.note(f"note: no picture of the trace ({error})")


@contextmanager
def keep_records(world: World, folder: RunFolder, plan: Plan, state: State,
                 config: Mapping[str, Any]) -> Iterator[Records]:
    """Count this start, write config.json, print the plan; and if the run fails, leave the reason in status.json.

    Every rank calls it; rank 0 writes. A failure on another rank reaches rank 0 as a lost peer, with that rank's words.
    """
    config = shown_settings(config)
    description = {"version": __version__, "script": folder.script, "config": config, "plan": plan.as_dict()}

    attempt = world.on_main(lambda: folder.start_attempt(asdict(state.progress)))
    try:
        world.on_main(lambda: folder.write_config(description))
        lock = NodeLock(lock_path(folder.path))
        report = Report(ReportSettings(
            output=folder.path, num_epochs=plan.num_epochs, steps_per_epoch=plan.steps_per_epoch,
            is_main=world.is_main, attempt=attempt, start=state.progress,
            first_epoch_steps=_steps_of_open_epoch(plan, state.progress), report_seconds=config["report_s"],
            report_growth=config["report_growth"], lock=lock))
        with report:
            _introduce(report, world, folder, plan, state)
            report.config(config)
            path = folder.path / "errors.jsonl"
            earlier = world.on_main(lambda: listed(path)) if state.progress != Progress() else {}
            errors = ErrorLog(path, world, config["max_errors"], attempt, earlier)
            yield Records(folder, world, attempt, report, lock, errors, state, description)
    except Exception as error:
        explained = world.explain(error)
        # Rank 0 may not come to it: where another rank is gone, it waits for its GPU until the launcher ends it.
        is_told = isinstance(explained, SharedError) or isinstance(explained, RankError) and explained.told
        if world.is_main or not is_told:
            folder.finish("failed", str(explained) or type(explained).__name__)
        if explained is error:
            raise
        raise explained from error


def _introduce(report: Report, world: World, folder: RunFolder, plan: Plan, state: State) -> None:
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", world.size)) if world.size > 1 else 1  # process_group sets it
    for line in plan.lines(local_ranks):
        report.note(line)
    report.note(f"run: {folder.path}, device {world.device}, {available_cpus()} cores")
    if state.progress != Progress():
        at = state.progress
        report.note(f"resumed: epoch {at.epoch}, step {at.step}, {at.position} samples of the epoch done; "
                    f"{at.global_step} steps since the start")


def _steps_of_open_epoch(plan: Plan, progress: Progress) -> int | None:
    """Steps of the epoch that a resumed run goes on with: other than usual if the batch has changed."""
    if plan.sampling != "exact" or not progress.step:
        return None
    return progress.step + num_steps(plan.epoch_samples - progress.position, plan.global_batch)
