"""How a script begins and ends: one line for what the user can mend, the right exit code, no traceback of ours.

    if __name__ == "__main__":
        run_script(main)
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from common.config import UsageError
from common.distributed import PeerLost, World
from common.errors import UserError
from common.loader import die_with_parent
from common.run_folder import RunFolder


def run_script(main: Callable[[], None]) -> None:
    """Call `main` and exit: 0 when it returns, 1 for a UserError, 2 for bad usage; a bug keeps its traceback.

    torchrun's report gets the message too, as it would from `@record`, without a traceback.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent(signal.SIGTERM)  # a killed launcher is a stop: save and leave
    handler = get_error_handler()
    handler.initialize()
    try:
        main()
    except UserError as error:
        handler.record_exception(error)
        told = error.told if isinstance(error, PeerLost) else isinstance(error, UsageError) and os.environ.get("RANK", "0") != "0"
        if not told:
            print(f"error: {error}", file=sys.stderr, flush=True)
        _leave(2 if isinstance(error, UsageError) else 1)
    except Exception as error:
        handler.record_exception(error)
        raise


def _leave(code: int) -> None:
    """End at once: a rank must not wait at exit for peers, threads or workers that are in trouble too."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


@contextmanager
def recorded(folder: RunFolder, world: World) -> Iterator[None]:
    """Leave in status.json why a run failed. Rank 0 writes it; the others' reasons reach it as a lost peer."""
    try:
        yield
    except Exception as error:
        if world.is_main:
            folder.finish("failed", str(error) or type(error).__name__)
        raise
