"""A script of ours, disturbed at a chosen place: started in its stead, with what to do in the environment.

    DISTURB='{"rank": 1, "at": "step", "number": 3, "do": "TERM"}' torchrun ... tests/disturbed.py train_ddp.py FLAGS

Places: start (before the imports), batch (a batch is waited for), step (its gradients are there), validation, save
(rank 0's), worker (each of the rank's loader workers makes a batch). `number` counts visits from 0. Deeds: TERM, INT,
USR1, KILL (a signal to itself), bug (an exception), sleep (10 s). Every save prints a line. A restart by torchrun is
not disturbed again.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def main() -> None:
    """Put the disturbance in, then run the script as if it had been started itself."""
    plan = json.loads(os.environ["DISTURB"])
    mine = int(os.environ.get("RANK", "0")) == plan["rank"] and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    visits = 0

    def visit(place: str) -> None:
        nonlocal visits
        if not mine or place != plan["at"]:
            return
        visits += 1
        if visits - 1 != plan["number"]:
            return
        if plan["do"] == "bug":
            raise ValueError("a bug")
        if plan["do"] == "sleep":
            time.sleep(10)
        else:
            os.kill(os.getpid(), getattr(signal, "SIG" + plan["do"]))
            time.sleep(0.2)  # it is heard by now

    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    import common.stop as stop

    listening = stop.StopSignals.listen()  # the script's own comes after the imports that `disturb` needs
    stop.StopSignals.listen = lambda: listening  # type: ignore[method-assign,assignment]
    visit("start")
    disturb(visit)
    runpy.run_path(sys.argv[0], run_name="__main__")


def disturb(visit: Callable[[str], None]) -> None:
    """Put `visit` into the places."""
    from common import batch_dataset, checkpoint, evaluation, loop, step

    def before(function: Callable[..., Any], place: str) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            visit(place)
            return function(*arguments, **named)
        return call

    def saving(*arguments: Any) -> None:
        print(f"saving {arguments[0].name}", flush=True)
        visit("save")
        save(*arguments)

    save, checkpoint.save = checkpoint.save, saving
    loop._timed = before(loop._timed, "batch")
    batch_dataset.BatchDataset._fill = before(batch_dataset.BatchDataset._fill, "worker")  # type: ignore[method-assign]
    step.Stepper._update = before(step.Stepper._update, "step")  # type: ignore[method-assign]
    evaluation._sums = before(evaluation._sums, "validation")


if __name__ == "__main__":
    main()
