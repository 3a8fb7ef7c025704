"""How a script begins and ends: one line for what the user can mend, the right exit code, no traceback of ours.

    if __name__ == "__main__":
        run_script(main)
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress

from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from common.errors import UsageError, UserError, one_line
from common.launching.failure import RankError, SharedError
from common.launching.launch_env import is_first


def run_script(main: Callable[[], None], has_ranks: bool = False) -> None:
    """Call `main` and exit: 0 when it returns, 1 for a UserError, 2 for bad usage; a bug keeps its traceback.

    torchrun's report gets the message too, as it would from `@record`, without a traceback. With `has_ranks` the
    processes that a launcher starts are one run, and one of them tells; else each is a run of its own.
    """
    handler = get_error_handler()
    handler.initialize()
    try:
        if not has_ranks:
            _refuse_torchrun()
        main()
    except UserError as error:
        _record(str(error))
        if not (has_ranks and _is_told(error)):
            print(f"error: {one_line(error)}", file=sys.stderr, flush=True)
        _leave(2 if isinstance(error, UsageError) else 1)
    except Exception as error:
        handler.record_exception(error)
        traceback.print_exc()
        _leave(1)


def _refuse_torchrun() -> None:
    """Several of torchrun's processes would be runs in one folder: they do not know of each other."""
    size = os.environ.get("WORLD_SIZE", "1")
    if "TORCHELASTIC_RUN_ID" in os.environ and size != "1":
        script = os.path.basename(sys.argv[0])
        raise UsageError(f"{script} is a run of one process, and torchrun started {size} of it; --nproc_per_node; "
                         "start it with python, or train_ddp.py with torchrun")

def _record(message: str) -> None:
    """Leave a line for torchrun's report where it looks for one; `record_exception` would leave a traceback."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        details = {"py_callstack": message, "timestamp": str(int(time.time()))}
        with suppress(OSError), open(path, "w") as file:
            json.dump({"message": {"message": message, "extraInfo": details}}, file)


def _is_told(error: UserError) -> bool:
    """Whether another rank prints this error. What fails before the ranks have met fails on a whole node at least."""
    if isinstance(error, RankError):
        return error.told
    everywhere = isinstance(error, SharedError | UsageError)
    return not is_first(os.environ, on_node=not everywhere)


def _leave(code: int) -> None:
    """End at once: a rank must not wait at exit for peers, threads or workers that are in trouble too."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
