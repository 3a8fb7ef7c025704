"""Small files that a kill, a full disk or a missing permission must not leave half written.

    write_atomic(output / "status.json", json.dumps(status))
"""

from __future__ import annotations

import errno
import json
import os
import stat
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from common.errors import UserError

Json = dict[str, Any]
BLOCK = 1 << 16
_KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket"}


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Tell what the file system refuses (no permission, no space) as the user's to mend."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot write ({error.strerror or error}); {path}; "
                        f"{remedy(error)}choose another folder (--output of a run)") from None


def remedy(error: OSError) -> str:
    """What to do about what the file system refuses, ahead of the way out that is always there: "mend …, or "."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "free some space, or "
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "mend its permissions, or "
    if error.errno == errno.ENOENT:
        return "make the folder that is not there, or "
    if error.errno in (errno.EEXIST, errno.ENOTDIR, errno.EISDIR):
        return "move away what is in its place, or "
    return ""


def write_atomic(path: Path, text: str) -> None:
    """Replace `path` by `text`, whole or not at all, even if the power fails. One process per path at a time."""
    temporary = path.with_name(f".{path.name}.tmp")
    with writing(path):
        try:
            with open(temporary, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except OSError:
            with suppress(OSError):
                temporary.unlink()
            raise


def write_shared(path: Path, text: str) -> None:
    """Replace `path` by `text`, whole or not at all; any number of processes may, at once. Raises OSError."""
    file = tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}.", delete=False, encoding="utf-8",
                                       errors="surrogateescape", newline="\n")
    try:
        with file:
            file.write(text)
        os.chmod(file.name, 0o644)
        os.replace(file.name, path)
    except BaseException:
        os.unlink(file.name)
        raise


def check_regular(path: str | Path) -> os.stat_result:
    """The status of a file that is about to be read. Raises OSError for what is none: a named pipe would let its reader
    wait for ever."""
    status = os.stat(path)
    kind = stat.S_IFMT(status.st_mode)
    if kind != stat.S_IFREG:
        raise OSError(errno.EINVAL, f"{_KINDS.get(kind, 'a device')}, not a file", str(path))
    return status


def regular(path: str, flags: int) -> int:
    """An opener for `open` that takes regular files alone."""
    check_regular(path)
    return os.open(path, flags)


def read_json(path: Path) -> Json:
    """The object in a JSON file; an empty one where the file is missing, torn or holds something else."""
    with suppress(OSError, ValueError):
        with open(path, encoding="utf-8", opener=regular) as file:
            value = json.load(file)
        if isinstance(value, dict):
            return value
    return {}


def append_rows(path: Path, rows: Iterable[Json]) -> None:
    """Add lines of JSON to a file, which one process at a time writes, less what a kill has torn at its end."""
    with writing(path):
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            cut_torn_line(file)
            lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
            if os.write(file, lines) < len(lines):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(file)


def cut_torn_line(file: int) -> None:
    """Cut off what stands after the last newline: the row during which a run was killed."""
    size = end = os.fstat(file).st_size
    while end > 0:
        start = max(end - BLOCK, 0)
        newline = os.pread(file, end - start, start).rfind(b"\n")
        if newline >= 0:
            end = start + newline + 1
            break
        end = start
    if end < size:
        os.ftruncate(file, end)
