"""What kind of name a shard has: a path, a URL, a command; and how it is shown.

    >>> shown("https://user:secret@host/a/b.tar?token=abc")
    'https://host/a/b.tar'
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import SplitResult, urlsplit, urlunsplit

from common.errors import UserError

COMMAND = "pipe:"


def is_url(path: str) -> bool:
    """Whether `path` begins with a scheme and two slashes. A colon alone is part of a file's name."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", path) is not None


def is_command(path: str) -> bool:
    """Whether `path` is a shell command whose output is the shard."""
    return path.startswith(COMMAND)


COMPRESSED = (".gz", ".tgz", ".bz2", ".xz")  # how the names of compressed tars end


def is_remote(path: str) -> bool:
    """Whether `path` is no file."""
    return is_url(path) or is_command(path)


def shown(path: str) -> str:
    """The name for messages, traces and folders: without user, password and query, which may hold secrets."""
    if not is_url(path):
        return path
    parts = _split(path)
    if parts is None:  # nobody can say which part of it is the password
        return re.sub("://.*", "://…", path, flags=re.DOTALL) if "@" in path else re.split("[?#]", path)[0]
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def shown_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as they may be printed and kept: with each URL among them as `shown`."""
    def as_shown(value: Any) -> Any:
        return shown(value) if isinstance(value, str) else value

    return {name: tuple(map(as_shown, value)) if isinstance(value, tuple) else as_shown(value)
            for name, value in settings.items()}


def parsed(url: str) -> SplitResult:
    """The parts of a URL of the web. Raises UserError where it has no host, or one that cannot be."""
    parts = _split(url)
    if parts is None or not parts.hostname:
        raise UserError(f"not a URL, its host is malformed; {shown(url)}; correct --shard_path (in a password, "
                        "/ is %2F, ? is %3F and # is %23)")
    return parts


def sibling(url: str, name: str) -> str:
    """Another file of the same folder; on the web asked for as this one is, by the same user and with the same
    query."""
    parts = urlsplit(url)
    path = f"{parts.path.rpartition('/')[0]}/{name}"
    return urlunsplit((parts.scheme, parts.netloc, path, parts.query if parts.scheme.startswith("http") else "", ""))


def _split(url: str) -> SplitResult | None:
    try:
        parts = urlsplit(url)
        return parts if parts.port != -1 else None  # reading the port is what checks it
    except ValueError:
        return None
