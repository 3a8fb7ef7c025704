"""How a `python -m common.…` ends: with its status, in one line after Ctrl-C, quietly where nobody reads (`| head`).

    if __name__ == "__main__":
        run_tool(main)
"""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn


class _Stdout(io.FileIO):
    """Ends the tool when its reader has left. An OSError would look like a disk or a worker in trouble."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())  # for what is written on the way out
            sys.exit(128 + signal.SIGPIPE)  # as a shell tells of a command that SIGPIPE has ended


def run_tool(main: Callable[[], int | None]) -> NoReturn:
    """Call `main` and exit with what it returns; with 130 after Ctrl-C, with 141 where stdout was closed before."""
    if sys.stdout is not None:
        file = io.BufferedWriter(_Stdout(sys.stdout.fileno(), "w", closefd=False))
        sys.stdout = io.TextIOWrapper(file, sys.stdout.encoding, sys.stdout.errors, line_buffering=True)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
