"""Shards from elsewhere: http and https by the standard library, s3 and gs by fsspec, commands by the shell.

A broken connection is taken up where it broke, with growing pauses; one that stalls is given up in time, by name.

    >>> with open_url("https://host/train-0000.tar", patience_seconds=60) as file: ...
"""

from __future__ import annotations

import io
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

from common.access.command import CommandStream
from common.access.retrying import NETWORK_ERRORS, Missing, Opened, RetryingStream, reason_of
from common.access.urls import is_command, shown
from common.errors import UserError

SCHEMES = ("http", "https", "s3", "gs")
PACKAGES = {"s3": "s3fs", "gs": "gcsfs"}
BUFFER = 1 << 18
PASSING = (408, 425, 429, 500, 502, 503, 504)


def open_url(url: str, patience_seconds: float) -> io.BufferedReader:
    """The bytes of a URL or a command from front to back. Raises UserError, now or while reading, that names it.

    `patience_seconds` without progress are too many.
    """
    if is_command(url):
        return io.BufferedReader(CommandStream(url, patience_seconds), BUFFER)
    scheme = url.partition("://")[0].lower()
    if scheme not in SCHEMES:
        raise UserError(f"no way to read {scheme}://; {shown(url)}; --shard_path takes {', '.join(SCHEMES)}, or a "
                        "mounted folder")
    open_at = _http(url, patience_seconds / 4) if scheme.startswith("http") else _fsspec(url, patience_seconds / 4)
    return io.BufferedReader(RetryingStream(url, open_at, patience_seconds), BUFFER)


def read_small(url: str, patience_seconds: float, limit: int) -> bytes | None:
    """The bytes of a small file, at most `limit`; None where it does not exist."""
    try:
        with open_url(url, patience_seconds) as file:
            return file.read(limit)
    except Missing:
        return None


def listed(url: str) -> list[str]:
    """The URLs that a glob pattern or a folder in s3 or gs holds. Over http a name is a name."""
    scheme = url.partition("://")[0].lower()
    if scheme.startswith("http") or scheme not in SCHEMES:
        if "*" in url or url.endswith("/"):
            raise UserError(f"{scheme} cannot be listed; {shown(url)}; name the shards with braces, such as "
                            "train-{0000..0019}.tar")
        return [url]
    if "*" not in url and "[" not in url and url.endswith((".tar", ".tgz", ".gz", ".bz2", ".xz")):
        return [url]
    system, path = _file_system(url, 30.0)
    try:
        found = sorted(system.glob(path if "*" in path or "[" in path else path.rstrip("/") + "/*.tar"))
    except Exception as error:
        raise UserError(f"cannot be listed ({reason_of(error)}); {shown(url)}; check its name and your access to "
                        "it") from None
    if not found:
        raise UserError(f"no shards (*.tar); {shown(url)}; --shard_path takes a folder of tars or a pattern")
    return [f"{scheme}://{path}" for path in found]


def _http(url: str, stall_seconds: float) -> Callable[[int], Opened]:
    tags: set[str] = set()

    def open_at(position: int) -> Opened:
        headers = {"User-Agent": "shardwise", "Accept-Encoding": "identity"}
        if position:
            headers["Range"] = f"bytes={position}-"
        try:
            response = urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=stall_seconds)
        except urllib.error.HTTPError as error:
            error.close()
            if error.code in PASSING:
                raise OSError(f"HTTP {error.code} {error.reason}") from None
            kind = Missing if error.code in (404, 410) else UserError
            raise kind(f"HTTP {error.code} {error.reason}; {shown(url)}; check its name and your access to "
                       "it") from None
        except urllib.error.URLError as error:
            if isinstance(error.reason, ssl.SSLCertVerificationError):
                raise UserError(f"{error.reason.verify_message}; {shown(url)}; check the server's "
                                "certificate") from None
            raise error.reason if isinstance(error.reason, OSError) else OSError(str(error.reason)) from None
        except ValueError as error:
            raise UserError(f"not a URL ({error}); {shown(url)}; correct --shard_path") from None
        tags.update(filter(None, [response.headers.get("ETag")]))
        if len(tags) > 1:
            raise UserError(f"it changed while it was read; {shown(url)}; start again")
        length = response.headers.get("Content-Length")
        skipped = 0 if response.status == 206 else position
        size = None if length is None or not length.isdecimal() else int(length) + (position - skipped)
        _leave_out(response, skipped)
        return Opened(response, size)

    return open_at


def _leave_out(response: Any, num_bytes: int) -> None:
    """From a server that begins anew instead of where it was asked to."""
    while num_bytes:
        data = response.read(min(num_bytes, BUFFER))
        if not data:
            raise EOFError("the connection ended again")
        num_bytes -= len(data)


def _fsspec(url: str, stall_seconds: float) -> Callable[[int], Opened]:
    def open_at(position: int) -> Opened:
        system, path = _file_system(url, stall_seconds)
        try:
            file = system.open(path, "rb", block_size=1 << 22, cache_type="readahead")
            file.seek(position)
        except FileNotFoundError:
            raise Missing(f"no such object; {shown(url)}; check its name") from None
        except PermissionError as error:
            raise UserError(f"no access ({reason_of(error)}); {shown(url)}; check your credentials") from None
        except NETWORK_ERRORS:
            raise
        except Exception as error:  # each of the libraries below has a zoo of its own
            raise OSError(reason_of(error)) from None
        return Opened(_Translated(file), file.size)

    return open_at


class _Translated:
    """A file whose errors are all OSErrors."""

    def __init__(self, file: Any):
        self.file = file

    def read(self, size: int) -> bytes:
        try:
            return self.file.read(size)
        except NETWORK_ERRORS:
            raise
        except Exception as error:
            raise OSError(reason_of(error)) from None

    def close(self) -> None:
        self.file.close()


def _file_system(url: str, stall_seconds: float) -> tuple[Any, str]:
    scheme = url.partition("://")[0].lower()
    try:
        import fsspec

        limits = {"config_kwargs": {"connect_timeout": stall_seconds, "read_timeout": stall_seconds,
                                    "retries": {"max_attempts": 1}}} if scheme == "s3" else {}
        return fsspec.core.url_to_fs(url, **limits)
    except ImportError:
        package = PACKAGES.get(scheme, "fsspec")
        raise UserError(f"{scheme}:// needs a package that is not installed; {shown(url)}; pip install "
                        f"{package}") from None
