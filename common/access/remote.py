"""Shards from elsewhere: http and https by the standard library, s3 and gs by fsspec, commands by the shell.

A broken connection is taken up where it broke, with growing pauses; one that stalls is given up in time, by name.

    >>> with open_url("https://host/train-0000.tar", patience_seconds=60) as file: ...
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

from common.access.command import CommandStream
from common.access.retrying import NETWORK_ERRORS, Missing, Opened, RetryingStream, reason_of
from common.access.urls import COMPRESSED, is_command, parsed, shown
from common.access.web import web_opener
from common.errors import UserError

SCHEMES = ("http", "https", "s3", "gs")
PACKAGES = {"s3": "s3fs", "gs": "gcsfs"}
BUFFER = 1 << 18


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
    opener = web_opener if scheme.startswith("http") else _fsspec
    return io.BufferedReader(RetryingStream(url, opener(url, patience_seconds / 4), patience_seconds), BUFFER)


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
        parsed(url)
        if "*" in url or url.endswith("/"):
            raise UserError(f"{scheme} cannot be listed; {shown(url)}; name the shards with braces, such as "
                            "train-{0000..0019}.tar")
        return [url]
    if "*" not in url and "[" not in url and url.endswith((".tar", *COMPRESSED)):
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
        return Opened(_Translated(file), file.size, position)

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
    scheme, _, rest = url.partition("://")
    scheme = scheme.lower()
    if "@" in rest.partition("/")[0]:
        raise UserError(f"{scheme}:// takes no user and password; {shown(url)}; give them to {PACKAGES[scheme]}, in "
                        "its files or the environment")
    try:
        import fsspec

        limits = {"config_kwargs": {"connect_timeout": stall_seconds, "read_timeout": stall_seconds,
                                    "retries": {"max_attempts": 1}}} if scheme == "s3" else {}
        return fsspec.core.url_to_fs(url, **limits)
    except ImportError:
        package = PACKAGES.get(scheme, "fsspec")
        raise UserError(f"{scheme}:// needs a package that is not installed; {shown(url)}; pip install "
                        f"{package}") from None
