"""What a shell command writes, as a file."""

from __future__ import annotations

import io
import os
import select
import signal
import subprocess
from contextlib import suppress
from typing import Any

from common.access.urls import COMMAND
from common.errors import UserError


class CommandStream(io.RawIOBase):
    """What a shell command writes. A command that fails is an error; one that is not read to its end is not."""

    def __init__(self, url: str, patience_seconds: float):
        self.url, self.patience_seconds, self.is_ended = url, patience_seconds, False
        self.process = subprocess.Popen(url.removeprefix(COMMAND), shell=True, stdout=subprocess.PIPE,
                                        stdin=subprocess.DEVNULL, bufsize=0,
                                        start_new_session=True)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill a part of `buffer`; 0 at the end."""
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], self.patience_seconds)[0]:
            raise UserError(f"the command wrote nothing for {self.patience_seconds:g} s; {self.url}; run it by hand to "
                            "see why")
        num_bytes = self.process.stdout.readinto(buffer)  # type: ignore[attr-defined]
        if not num_bytes:
            self.is_ended = True
            if self.process.wait() != 0:
                raise UserError(f"the command failed (exit {self.process.returncode}); {self.url}; run it by hand to "
                                "see why")
        return num_bytes

    def close(self) -> None:
        if not self.closed:
            if not self.is_ended and self.process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(self.process.pid, signal.SIGKILL)
            if self.process.stdout:
                self.process.stdout.close()
            self.process.wait()
        super().close()
