"""A file over http or https, by the standard library: from any byte on, in time, and with the login that its URL holds.

    >>> open_at = web_opener("https://user:password@host/train-0000.tar?token=abc", stall_seconds=15)
    >>> open_at(0).file.read1(512)
"""

from __future__ import annotations

import base64
import functools
import http.client
import io
import re
import socket
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from common.access.retrying import Missing, Opened
from common.access.urls import parsed, shown
from common.errors import UserError

PASSING = (408, 425, 429, 500, 502, 503, 504)
SAFE = "!$%&'()*+,/:;=?@[]~"  # in a path or a query; what is neither this nor a letter or a number is quoted


def web_opener(url: str, stall_seconds: float) -> Callable[[int], Opened]:
    """What opens `url` at a position. A header, and then each packet, that is not there whole after `stall_seconds` is
    a TimeoutError."""
    tags: set[str] = set()
    sizes: set[int] = set()

    def open_at(position: int) -> Opened:
        deadline = _Deadline(stall_seconds)
        response = _respond(url, position, deadline)
        start, size = _extent(response, position)
        tags.update(filter(None, [response.headers.get("ETag")]))
        sizes.update([] if size is None else [size])
        if len(tags) > 1 or len(sizes) > 1:
            raise UserError(f"it changed while it was read; {shown(url)}; start again")
        return Opened(_Timely(response, deadline), size, start)

    return open_at


def _respond(url: str, position: int, deadline: _Deadline) -> Any:
    """The server's answer, its header read. Raises UserError for one that another attempt would not change."""
    opener = urllib.request.build_opener(_Handler(deadline), _Redirects())
    try:
        return opener.open(_request(url, position), timeout=deadline.seconds)
    except urllib.error.HTTPError as error:
        error.close()
        words = "a redirect that leads nowhere" if 300 <= error.code < 400 else error.reason  # urllib's names a URL
        reason = f"HTTP {error.code} {' '.join(str(words).split())[:200]}"
        if error.code in PASSING:
            raise OSError(reason) from None
        kind = Missing if error.code in (404, 410) else UserError
        raise kind(f"{reason}; {shown(url)}; check its name and your access to it") from None
    except urllib.error.URLError as error:
        if isinstance(error.reason, ssl.SSLCertVerificationError):
            raise UserError(f"{error.reason.verify_message}; {shown(url)}; check the server's certificate") from None
        raise error.reason if isinstance(error.reason, OSError) else OSError(str(error.reason)) from None
    except (ValueError, http.client.InvalidURL):  # whose words may hold a secret
        raise UserError(f"not a URL, or the server leads to what is none; {shown(url)}; correct --shard_path") from None


def _request(url: str, position: int) -> urllib.request.Request:
    """The login goes into a header, and blanks and foreign letters are quoted."""
    parts = parsed(url)
    login, has_login, host = parts.netloc.rpartition("@")
    path, query = (quote(text, SAFE, errors="surrogateescape") for text in (parts.path, parts.query))
    request = urllib.request.Request(urlunsplit((parts.scheme, host, path, query, "")), headers={
        "User-Agent": "shardwise", "Accept-Encoding": "identity"})
    if position:
        request.add_header("Range", f"bytes={position}-")
    if has_login:
        user, _, password = login.partition(":")
        words = base64.b64encode(f"{unquote(user)}:{unquote(password)}".encode()).decode()
        request.add_unredirected_header("Authorization", f"Basic {words}")
    return request


def _extent(response: Any, position: int) -> tuple[int, int | None]:
    """At which byte the answer begins, and how large the whole is, where that is known."""
    length, extent = response.headers.get("Content-Length") or "", response.headers.get("Content-Range")
    if response.status != 206:
        return 0, int(length) if length.isdecimal() else None
    if extent is not None:
        match = re.match(r"bytes (\d+)-\d+/(\d+|\*)\s*$", extent)
        if match is None or int(match[1]) != position:
            raise OSError(f"the server sent {extent[:60]} when it was asked for bytes {position}-")
        if match[2] != "*":
            return position, int(match[2])
    return position, int(length) + position if length.isdecimal() else None


class _Redirects(urllib.request.HTTPRedirectHandler):
    """A login is sent on to its own host alone."""

    def redirect_request(self, req: Any, fp: Any, code: Any, msg: Any, headers: Any, newurl: str) -> Any:
        request, login = super().redirect_request(req, fp, code, msg, headers, newurl), req.get_header("Authorization")
        before, after = urlsplit(req.full_url), urlsplit(newurl)
        is_own = (after.hostname, after.port) == (before.hostname, before.port)
        if request is not None and login and is_own and after.scheme in (before.scheme, "https"):
            request.add_unredirected_header("Authorization", login)
        return request


class _Deadline:
    """When what is being waited for must be there as a whole: what drips in would keep a socket's own timeout from
    ever coming."""

    def __init__(self, seconds: float):
        self.seconds = seconds
        self.start()

    def start(self) -> None:
        self.ends = time.monotonic() + self.seconds

    def left(self) -> float:
        left = self.ends - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left


class _TimelySocket(io.RawIOBase):
    """The raw bytes that a socket receives until the deadline."""

    def __init__(self, raw: Any, sock: socket.socket, deadline: _Deadline):
        self.raw, self.sock, self.deadline = raw, sock, deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill a part of `buffer`; 0 at the end."""
        self.sock.settimeout(self.deadline.left())
        return self.raw.readinto(buffer)

    def close(self) -> None:
        self.raw.close()
        super().close()


class _Response(http.client.HTTPResponse):
    """An answer whose header, those of redirects included, comes before the deadline."""

    def __init__(self, sock: socket.socket, *args: Any, deadline: _Deadline, **named: Any):
        super().__init__(sock, *args, **named)
        self.fp = io.BufferedReader(_TimelySocket(self.fp.detach(), sock, deadline))


class _Handler(urllib.request.HTTPHandler, urllib.request.HTTPSHandler):
    """Makes connections whose answers keep the deadline."""

    def __init__(self, deadline: _Deadline):
        super().__init__()
        self.deadline = deadline

    def http_open(self, req: Any) -> Any:
        return self.do_open(functools.partial(self._connection, http.client.HTTPConnection), req)

    def https_open(self, req: Any) -> Any:
        return self.do_open(functools.partial(self._connection, http.client.HTTPSConnection), req)

    def _connection(self, kind: Any, host: str, **named: Any) -> Any:
        connection = kind(host, **named)
        connection.response_class = functools.partial(_Response, deadline=self.deadline)
        return connection


class _Timely:
    """The body of an answer: each packet has a deadline of its own."""

    def __init__(self, response: Any, deadline: _Deadline):
        self.response, self.deadline = response, deadline

    def read1(self, size: int) -> bytes:
        self.deadline.start()
        return self.response.read1(size)

    def close(self) -> None:
        self.response.close()
