"""A URL read to its end over connections that break: taken up where it broke, with growing pauses, given up in time."""

from __future__ import annotations

import http.client
import io
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from common.access.urls import shown
from common.errors import UserError

MAX_ATTEMPTS = 5  # without a MB of progress between them
PROGRESS = 1 << 20
LEAST_BYTES = 1 << 14  # fewer in `patience_seconds` are a stall, too
NETWORK_ERRORS = (OSError, http.client.HTTPException, EOFError)


class Missing(UserError):
    """There is no such thing under this URL."""


class Opened(NamedTuple):
    """A connection that gives the bytes from `start` on. `size` is that of the whole, where it is known."""

    file: Any
    size: int | None
    start: int


class RetryingStream(io.RawIOBase):
    """Reads on where a broken connection broke. `open_at(position)` makes a connection, which may begin before that."""

    def __init__(self, url: str, open_at: Callable[[int], Opened], patience_seconds: float):
        self.url, self.open_at, self.patience_seconds = url, open_at, patience_seconds
        self.position = 0
        self.size: int | None = None
        self._connection: Any = None
        self._next, self._received = 0, 0  # byte of this connection; bytes of all connections
        self._num_failures, self._failed_at = 0, 0
        self._mark_seconds, self._mark_received = time.monotonic(), 0
        with suppress(StopIteration):
            self._until_done(self._connect)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill a part of `buffer`; 0 at the end."""
        return self._until_done(lambda: self._read(memoryview(buffer).cast("B")))

    def tell(self) -> int:
        """How many bytes have come."""
        return self.position

    def close(self) -> None:
        self._disconnect()
        super().close()

    def _until_done(self, action: Callable[[], int]) -> int:
        while True:
            try:
                return action()
            except UserError:
                raise
            except NETWORK_ERRORS as error:
                self._disconnect()
                self._fail(error)

    def _connect(self) -> int:
        if self._connection is None:
            self._connection, self.size, self._next = self.open_at(self.position)
        return 0

    def _read(self, buffer: memoryview) -> int:
        self._connect()
        while self._next < self.position:  # the server begins anew instead of where it was asked to
            if not self._receive(min(self.position - self._next, len(buffer))):
                raise EOFError("the connection ended again")
        data = self._receive(len(buffer))
        if not data and self.size is not None and self.position < self.size:
            raise EOFError(f"the connection ended after {self.position} of {self.size} bytes")
        self.position = self._next
        buffer[: len(data)] = data
        return len(data)

    def _receive(self, size: int) -> bytes:
        """The next bytes of the connection, at most one packet where there is a choice."""
        data = (getattr(self._connection, "read1", None) or self._connection.read)(size)
        self._next += len(data)
        self._received += len(data)
        now, received = time.monotonic(), self._received - self._mark_received
        if data and now - self._mark_seconds > self.patience_seconds:
            if received < LEAST_BYTES:
                raise UserError(f"only {received} bytes came in {self.patience_seconds:g} s; {shown(self.url)}; "
                                "check the server and the network")
            self._mark_seconds, self._mark_received = now, self._received
        return data

    def _fail(self, error: BaseException) -> None:
        """Wait before the next attempt, or give up."""
        if self.position - self._failed_at > PROGRESS:
            self._num_failures, self._mark_seconds = 0, time.monotonic()
        self._failed_at = self.position
        self._num_failures += 1
        waited = time.monotonic() - self._mark_seconds
        if self._num_failures >= MAX_ATTEMPTS or waited > self.patience_seconds:
            raise UserError(f"cannot be read, {self._num_failures} attempts ({reason_of(error)}); {shown(self.url)}; "
                            "check the server and the network")
        time.sleep(min(0.2 * 3 ** (self._num_failures - 1), self.patience_seconds / 8))

    def _disconnect(self) -> None:
        if self._connection is not None:
            with suppress(Exception):
                self._connection.close()
        self._connection = None


def reason_of(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "no answer: it stalled"
    return " ".join(str(error).split())[:200] or type(error).__name__
