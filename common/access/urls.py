"""What kind of name a shard has: a path, a URL, a command; and how it is shown.

    >>> shown("https://user:secret@host/a/b.tar?token=abc")
    'https://host/a/b.tar'
"""

from __future__ import annotations

import re
from urllib.parse import urlsplit

COMMAND = "pipe:"


def is_url(path: str) -> bool:
    """Whether `path` begins with a scheme and two slashes. A colon alone is part of a file's name."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", path) is not None


def is_command(path: str) -> bool:
    """Whether `path` is a shell command whose output is the shard."""
    return path.startswith(COMMAND)


def is_remote(path: str) -> bool:
    """Whether `path` is no file."""
    return is_url(path) or is_command(path)


def shown(path: str) -> str:
    """The name for messages, traces and folders: without user, password and query, which may hold secrets."""
    if not is_url(path):
        return path
    parts = urlsplit(path)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
