"""Shards from a server that fails in every way, from commands, and through a cache that several processes share."""

from __future__ import annotations

import base64
import gzip
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path

import pytest
from moto.server import ThreadedMotoServer

from common.access import remote
from common.access.cache import Cache
from common.access.copies import Promised
from common.access.remote import open_url
from common.access.storage import Storage
from common.assembly import open_shards
from common.distributed import World
from common.errors import UserError
from common.fields import Fields
from common.shards import ShardIndex
from tests.helpers import ROOT, TINY, run, trace, write_shards
from tests.tars import by_position, by_stream, files, write_tar

LOGIN = base64.b64encode(b"us er:s3cret@/").decode()
KEYS = [f"{number:02d}" for number in range(12)]


class Server(ThreadingHTTPServer):
    """Serves a folder. A path may begin with a fault: /cut/…, /stall/…, /503/…, /norange/…, /page/…, /trickle/…,
    /slow/…, /once/…, /drip/…, /again/…, /wrong/…; or with /login/…, /token/…, and redirects: /moved/…, /away/…"""

    daemon_threads = True

    def __init__(self, folder: Path):
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder, self.asked, self.over = folder, [], threading.Event()
        self.url = f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: object, address: object) -> None:
        pass  # clients that leave


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.0"
    server: Server

    def log_message(self, *words: object) -> None:
        pass

    def do_GET(self) -> None:
        start = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").removesuffix("-"))
        self.server.asked.append((self.path, start))
        attempt = sum(path == self.path for path, _ in self.server.asked)
        _, fault, *rest = self.path.partition("?")[0].split("/")
        path = self.server.folder.joinpath(*(rest if rest else [fault]))
        if fault == "stall":
            self.server.over.wait(20)
            return
        if fault == "page":
            return self._send(200, b"<!DOCTYPE html><html>Please log in</html>" * 50)
        if fault in ("moved", "away"):
            self.send_response(302)
            host = f"localhost:{self.server.server_port}" if fault == "away" else self.headers["Host"]
            self.send_header("Location", f"http://{host}/login/{rest[0]}")
            return self.end_headers()
        if fault == "login" and self.headers.get("Authorization") != f"Basic {LOGIN}":
            return self._send(401, b"who?")
        if fault == "token" and not self.path.endswith("?token=s3cret"):
            return self._send(403, b"no")
        if fault == "503" and attempt < 3:
            return self._send(503, b"busy")
        if not path.exists():
            return self._send(404, b"<html>no</html>")
        data = path.read_bytes()
        if fault in ("norange", "again", "wrong") or not start:
            start, status = 0, 200
        else:
            status = 206
        if fault == "wrong" and attempt > 1:
            return self._send(206, data, "extent")
        self._send(status, data[start:], fault, attempt)

    def _send(self, status: int, data: bytes, fault: str = "", attempt: int = 1) -> None:
        self.send_response(status)
        if fault == "extent":
            self.send_header("Content-Range", f"bytes 0-{len(data) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(data)))
        if fault == "drip":
            self.wfile.write(b"".join(self._headers_buffer))
            return self._trickle(b"X-Drip: " + b"a" * 400)
        self.end_headers()
        if fault in ("cut", "norange") and attempt < 4:
            data = data[: attempt * 3000]
        if fault in ("break", "wrong"):
            data = data[:700]
        if fault == "again" and attempt == 1:
            data = data[:9000]
        if fault == "halt" or fault == "once" and attempt == 1:
            self.wfile.write(data[:5000])
            self.server.over.wait(20)
        elif fault == "trickle" or fault == "again" and attempt > 1:
            self._trickle(data[:400])
        else:
            for place in range(0, len(data), 10_000):
                self.wfile.write(data[place : place + 10_000])
                time.sleep(0.05 if fault == "slow" else 0)


    def _trickle(self, data: bytes) -> None:
        for byte in data:
            self.wfile.write(bytes([byte]))
            time.sleep(0.02)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    folder = write_shards(tmp_path / "served", (5, 3, 4))
    ShardIndex.open([str(folder)])
    entries = [{"name": path.name, "samples": size} for path,
               size in zip(sorted(folder.glob("*.tar")), (5, 3, 4), strict=True)]
    (folder / "info.json").write_text(json.dumps({"dataset size": 12, "num_classes": 2, "shards": entries}))
    found = Server(folder)
    thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield found
    found.over.set()
    found.shutdown()
    thread.join()
    found.server_close()


def read(url: str, patience: float = 8.0) -> bytes:
    with open_url(url, patience) as file:
        return file.read()


@pytest.mark.parametrize("fault", ["fine", "cut", "norange", "503", "slow"])
def test_what_passes_is_read_whole(server: Server, fault: str) -> None:
    """Connections that break are taken up where they broke, if the server can; a busy one is asked again."""
    assert read(f"{server.url}/{fault}/test-0000.tar?token=x") == (server.folder / "test-0000.tar").read_bytes()
    starts = [start for _, start in server.asked]
    assert starts == {"fine": [0], "slow": [0], "503": [0, 0, 0], "cut": [0, 3000, 9000, 18000],
                      "norange": [0, 3000, 6000, 9000]}[fault]


def test_what_does_not_pass_is_told_in_time(server: Server) -> None:
    """A stall, at once or half-way, a trickle, even of the header or of what is known, a missing file, another range
    than asked for: the URL is named, its secrets are not."""
    started = time.monotonic()
    for fault, words in {"stall": "stalled", "halt": "stalled", "trickle": "bytes came in",
                         "break": "ended after 3500 of", "drip": "stalled", "again": "bytes came in",
                         "wrong": r"the server sent bytes 0-\d+/\d+ when it was asked for bytes 700-"}.items():
        with pytest.raises(UserError, match=rf"{words}.*; {server.url}/{fault}/test-0000.tar;"):
            read(f"{server.url}/{fault}/test-0000.tar?token=secret", patience=1.0)
    assert time.monotonic() - started < 40
    with pytest.raises(remote.Missing, match=r"HTTP 404 .*/fine/nothing.tar;"):
        read(f"{server.url}/fine/nothing.tar")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        with pytest.raises(UserError, match="Connection refused"):
            read(f"http://127.0.0.1:{free.getsockname()[1]}/x.tar", patience=0.5)


def test_a_login_and_a_token(server: Server) -> None:
    """Sent with the shard and its info.json, and on to the same host alone; never shown."""
    secret = server.url.replace("//", "//us%20er:s3cret%40%2F@")
    for url in (f"{secret}/login", f"{secret}/moved", f"{server.url}/token"):
        pattern = f"{url}/test-{{0000..0002}}.tar" + "?token=s3cret" * url.endswith("token")
        index = ShardIndex.open([pattern])
        assert index.num_samples == len(by_stream(index)) == 12 and index.names[0] == "test-0000"
    for url in (f"{server.url}/login", f"{secret}/away", secret.replace("s3cret", "guess") + "/login"):
        with pytest.raises(UserError, match=rf"HTTP 401 Unauthorized; {url.replace(secret, server.url)}/info.json;" if
                           "guess" not in url else "HTTP 401"):
            ShardIndex.open([f"{url}/test-0000.tar"])
    assert read(f"{server.url}/fine/test-0000.tar?a b=é") == (server.folder / "test-0000.tar").read_bytes()
    assert server.asked[-1][0] == "/fine/test-0000.tar?a%20b=%C3%A9"


@pytest.mark.parametrize(("url", "named"), [
    ("http://[::1/x-{0000..0001}.tar?s3cret", "http://[::1/x-0000.tar"), ("http:///x.tar?s3cret", "http:///x.tar"),
    ("http://u:s3cret/@h/x.tar", "http://…"), ("http://h:x/x.tar#s3cret", "http://h:x/x.tar"),
    ("http://u:s3cret@h o/x.tar", "http://h o/"), ("http://u:s3cret@h/{0..x.tar", "http://h/{0..x.tar"),
    ("s3://u:s3cret@bucket/x.tar", "s3://bucket/"),
])
def test_what_is_no_url(url: str, named: str) -> None:
    """Told at once, in one line without what may be a secret."""
    with pytest.raises(UserError) as caught:
        ShardIndex.open([url])
    assert f"; {named}" in str(caught.value) and not {"s3cret", "\n"} & set(re.findall("s3cret|\n", str(caught.value)))


def test_a_page_is_not_a_tar(server: Server, tmp_path: Path) -> None:
    index = ShardIndex.open([f"{server.url}/fine/test-0000.tar"])
    broken = ShardIndex((f"{server.url}/page/test-0000.tar",), ("test-0000",), index.sizes, 2)
    with pytest.raises(UserError, match="not a tar, a web page.*/page/test-0000.tar"):
        by_stream(broken)
    cache = Storage(cache_dir=str(tmp_path / "cache"))
    with pytest.raises(UserError, match="not a tar, a web page.*/page/test-0000.tar"):
        cache.acquire(f"{server.url}/page/test-0000.tar")
    assert not [path for path in (tmp_path / "cache").iterdir() if not path.name.endswith(".lock")]
    with pytest.raises(UserError, match="not readable as JSON .*/page/info.json"):
        ShardIndex.open([f"{server.url}/page/test-0000.tar"])


def test_an_index_over_http(server: Server, tmp_path: Path) -> None:
    """info.json says what is there; without it nothing is assumed. Streams need no cache, positions do."""
    pattern = f"{server.url}/fine/test-{{0000..0002}}.tar"
    index = ShardIndex.open([pattern])
    assert index.sizes.tolist() == [5, 3, 4] and index.names == ("test-0000", "test-0001", "test-0002")
    keys = [sample.key for sample in by_position(ShardIndex.open([str(server.folder)]))]
    assert [sample.key for sample in by_stream(index)] == keys
    with pytest.raises(UserError, match="remote shard cannot be read by position; .*test-0000.tar; --cache_dir"):
        world = World(0, 1, 0, __import__("torch").device("cpu"))
        open_shards(world, (pattern,), Fields(), Storage())
    cached = ShardIndex.open([pattern], storage=Storage(cache_dir=str(tmp_path / "cache")))
    assert [sample.key for sample in by_position(cached)] == [sample.key for sample in by_stream(cached)] == keys
    server.asked.clear()
    assert [sample.key for sample in by_position(cached)] == keys and not server.asked
    (server.folder / "info.json").unlink()
    with pytest.raises(UserError, match=r"nobody says how many samples .*test-0000.tar; put the info.json"):
        ShardIndex.open([pattern])
    with pytest.raises(UserError, match=r"no-such.tar"):
        ShardIndex.open([f"{server.url}/fine/no-such.tar"])
    counted = ShardIndex.open([pattern], storage=Storage(cache_dir=str(tmp_path / "cache")))
    assert (counted.sizes.tolist(), counted.num_classes) == ([5, 3, 4], 2)


@pytest.mark.parametrize("kind", ["ustar", "gnu", "pax", "gz", "exact"])
def test_what_the_cache_takes(tmp_path: Path, kind: str) -> None:
    """Any tar, compressed or not, also one whose size is a multiple of what is read at a time."""
    formats = {"gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}
    tar = write_tar(tmp_path / "a.tar", files(KEYS), format=formats.get(kind, tarfile.USTAR_FORMAT))
    data = tar.read_bytes()
    if kind == "exact":
        data = data.ljust(1 << 22, b"\0")
    stored = gzip.compress(data) if kind == "gz" else data
    (tmp_path / "stored").write_bytes(stored)
    path, file = Cache(str(tmp_path / "cache")).acquire("https://h/a.tar", lambda: open(tmp_path / "stored", "rb"))
    os.close(file)
    assert Path(path).read_bytes() == data


def test_commands(tmp_path: Path) -> None:
    """Only where they are allowed; ended early without a word; a failure is told. The cache tells them apart."""
    one, two = write_tar(tmp_path / "a" / "x.tar", files(KEYS)), write_tar(tmp_path / "b" / "x.tar", files(KEYS[:3]))
    with pytest.raises(UserError, match="a command .*--allow_pipe"):
        ShardIndex.open([f"pipe:cat {one}"])
    with pytest.raises(UserError, match="a command .*--allow_pipe"):
        Storage().open(f"pipe:cat {one}")
    for cache in (None, str(tmp_path / "cache")):
        index = ShardIndex.open([f"pipe:cat {one}", f"pipe:cat {two}"], storage=Storage(cache, allow_pipe=True))
        assert index.sizes.tolist() == [12, 3] and index.names == ("a/x", "b/x")
        assert [sample.key for sample in by_stream(index)] == KEYS + KEYS[:3]
    assert [sample.key for sample in by_position(index)] == KEYS + KEYS[:3]
    with open_url("pipe:yes", 5.0) as file:
        assert file.read(2) == b"y\n"
    with pytest.raises(UserError, match=r"the command failed \(exit 3\); pipe:exit 3"):
        read("pipe:exit 3")
    with pytest.raises(UserError, match="wrote nothing for 0.2 s; pipe:sleep 20"):
        read("pipe:sleep 20", patience=0.2)


def test_a_missing_package_and_scheme() -> None:
    if not find_spec("gcsfs"):
        with pytest.raises(UserError, match="gs:// needs a package .*; gs://bucket/a.tar; pip install gcsfs"):
            read("gs://bucket/a.tar")
    with pytest.raises(UserError, match="no way to read gopher://; gopher://h/a.tar"):
        read("gopher://h/a.tar")


def test_s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket on this machine: a folder, a pattern, a stream and the cache."""
    service = ThreadedMotoServer(port=0)
    service.start()
    try:
        host, port = service.get_host_and_port()
        for name, value in {"AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_ACCESS_KEY_ID": "x",
                            "AWS_SECRET_ACCESS_KEY": "x",
                            "AWS_DEFAULT_REGION": "us-east-1"}.items():
            monkeypatch.setenv(name, value)
        bucket, _ = remote._file_system("s3://bucket", 5.0)
        bucket.mkdir("bucket")
        folder = write_shards(tmp_path / "s", (5, 3))
        info = {"num_classes": 2, "shards": [{"name": f"test-000{i}.tar", "samples": n} for i, n in enumerate((5, 3))]}
        (folder / "info.json").write_text(json.dumps(info))
        for path in folder.iterdir():
            bucket.put_file(str(path), f"bucket/a/{path.name}")
        keys = [sample.key for sample in by_position(ShardIndex.open([str(folder)]))]
        for pattern in ("s3://bucket/a/", "s3://bucket/a/*.tar", "s3://bucket/a/test-000{0..1}.tar"):
            index = ShardIndex.open([pattern])
            assert index.paths == ("s3://bucket/a/test-0000.tar", "s3://bucket/a/test-0001.tar")
            assert index.sizes.tolist() == [5, 3]
        assert [sample.key for sample in by_stream(index)] == keys
        cached = ShardIndex.open([pattern], storage=Storage(str(tmp_path / "c")))
        assert [sample.key for sample in by_position(cached)] == keys
        with pytest.raises(UserError, match="no such object; s3://bucket/a/no.tar"):
            read("s3://bucket/a/no.tar")
    finally:
        service.stop()


def test_the_limit_holds_and_what_is_open_stays(tmp_path: Path) -> None:
    tars = {f"https://h/{name}.tar": write_tar(tmp_path / f"{name}.tar",
                                               files([f"{name}{i:03d}" for i in range(30)])) for name in "abcd"}
    size = max(tar.stat().st_size for tar in tars.values())
    limit = int(2.5 * size)
    cache = Cache(str(tmp_path / "cache"), limit, patience_seconds=0.3)

    def used() -> int:
        return sum(path.stat().st_size for path in (tmp_path / "cache").iterdir())

    held = {}
    for url in list(tars)[:2]:
        path, held[url] = cache.acquire(url, lambda url=url: open(tars[url], "rb"))  # type: ignore[misc]
        assert Path(path).read_bytes() == tars[url].read_bytes() and used() <= limit
    a, b, c, d = tars
    with pytest.raises(UserError, match="the cache is full of shards in use .*--cache_size"):
        cache.acquire(c, lambda: open(tars[c], "rb"))
    os.close(held[a])
    _, held[c] = cache.acquire(c, lambda: open(tars[c], "rb"))
    names = {path.name.rpartition("-")[2] for path in (tmp_path / "cache").glob("*.tar")}
    assert names == {"b.tar", "c.tar"} and used() <= limit and not list((tmp_path / "cache").glob("*.part"))
    with pytest.raises(UserError, match="larger than the whole cache"):
        Cache(str(tmp_path / "small"), 1000).acquire(d, lambda: open(tars[d], "rb"))
    index = ShardIndex.open([str(tar) for tar in tars.values()])
    gz = [shutil.copy(tar, tar.with_suffix(".tgz")) for tar in tars.values()]
    for path in gz:
        Path(path).write_bytes(gzip.compress(Path(path).read_bytes()))
    small = ShardIndex.open(list(map(str, gz)), storage=Storage(str(tmp_path / "c2"), limit / 1e9))
    assert [sample.key for sample in by_position(small)] == [sample.key for sample in by_position(index)]
    assert sum(path.stat().st_size for path in (tmp_path / "c2").iterdir()) <= limit


def describe(folder: Path, sizes: tuple[int, ...]) -> None:
    entries = [{"name": path.name, "samples": size, "bytes": path.stat().st_size}
               for path, size in zip(sorted(folder.glob("*.t*")), sizes, strict=True)]
    (folder / "info.json").write_text(json.dumps({"num_classes": 2, "shards": entries}))


@pytest.mark.parametrize("suffix", [".tar", ".tgz"])
def test_a_copy_that_contradicts_its_description_is_fetched_anew(server: Server, tmp_path: Path, suffix: str) -> None:
    """Other bytes, another number of samples, a copy cut short: once each. What cannot be compared stays."""
    folder, cache = tmp_path / "served", Storage(cache_dir=str(tmp_path / "cache"))
    shutil.rmtree(folder)

    def serve(keys: list[str], padding: int = 0) -> None:
        tar = write_tar(tmp_path / "x.tar", [*files(keys), ("z.txt", bytes(padding))])
        folder.mkdir(exist_ok=True)
        (folder / f"x{suffix}").write_bytes(tar.read_bytes() if suffix == ".tar" else gzip.compress(tar.read_bytes()))
        describe(folder, (len(keys) + 1,))
        server.asked.clear()

    def found() -> list[str]:
        index = ShardIndex.open([f"{server.url}/fine/x{suffix}"], storage=cache)
        keys = [sample.key for sample in by_position(index)]
        assert [sample.key for sample in by_stream(index)] == keys
        return keys[:-1]

    def num_fetched() -> int:
        return sum(path.endswith(suffix) for path, _ in server.asked)

    for keys, padding in ((KEYS[:8], 0), (KEYS[2:10], 30_000), (KEYS, 30_000)):
        serve(keys, padding)
        assert (found(), found(), num_fetched()) == (keys, keys, 1)
    copy, = (tmp_path / "cache").glob("*.tar")
    os.truncate(copy, 9000)
    assert (found(), num_fetched()) == (KEYS, 2)
    (folder / "info.json").write_text(json.dumps({"num_classes": 2, "shards": [{"name": f"x{suffix}", "samples": 13}]}))
    assert (found(), num_fetched()) == (KEYS, 2)
    (folder / "info.json").write_text(json.dumps({"num_classes": 2, "shards": [
        {"name": f"x{suffix}", "samples": 13, "bytes": 77}]}))
    with pytest.raises(UserError, match=rf"info.json promises 77 bytes, \d+ came; shard .*/fine/x{suffix}; it was cut"):
        found()
    serve(KEYS[:3])
    (folder / "info.json").write_text(json.dumps({"num_classes": 2, "shards": [{"name": f"x{suffix}", "samples": 13}]}))
    with pytest.raises(UserError, match=r"13 samples were promised, the tar (holds|gave) 4"):
        found()
    assert num_fetched() == 1


def test_a_copy_that_is_out_of_date_stays_as_long_as_it_is_read(server: Server, tmp_path: Path) -> None:
    cache, url = Cache(str(tmp_path / "cache"), patience_seconds=0.2), "https://h/a.tar"
    tar = write_tar(tmp_path / "a.tar", files(KEYS))
    path, held = cache.acquire(url, lambda: open(tar, "rb"))
    with pytest.raises(UserError, match=rf"out of date, and another run is reading it; {path}; wait"):
        cache.acquire(url, lambda: open(tar, "rb"), promised=Promised(samples=5))
    os.close(held)
    assert cache.acquire(url, lambda: open(tar, "rb"), promised=Promised(samples=5))[0] == path


READ = """
import sys
from common.access.storage import Storage
with Storage(cache_dir=sys.argv[1]).held(sys.argv[2]) as (path, file):
    print(len(open(path, "rb").read()))
"""


def start_reader(cache: Path, url: str) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", READ, cache, url], cwd=ROOT, text=True, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE)


def test_four_processes_on_one_cold_cache(server: Server, tmp_path: Path) -> None:
    """One downloads, all read; after a kill in the middle the leftovers go and nothing partial is read."""
    cache, url = tmp_path / "cache", f"{server.url}/once/test-0000.tar"
    size = (server.folder / "test-0000.tar").stat().st_size
    first = start_reader(cache, url)
    while first.poll() is None and not list(cache.glob(".*.part")):
        time.sleep(0.01)
    assert not list(cache.glob("*.tar"))
    first.kill()
    first.communicate()
    Cache(str(cache)).clean()
    assert not list(cache.glob(".*.part"))
    (cache / f".{next(cache.glob('.*.lock')).name[1:-5]}.1.part").write_bytes(b"partial")  # of a process that is gone
    num_asked = len(server.asked)
    readers = [start_reader(cache, url) for _ in range(4)]
    results = [reader.communicate(timeout=60) for reader in readers]
    assert results == [(f"{size}\n", "")] * 4
    assert len(server.asked) == num_asked + 1
    assert len(list(cache.glob("*.tar"))) == 1 and not list(cache.glob(".*.part"))


@pytest.mark.slow
def test_training_from_http(server: Server, tmp_path: Path) -> None:
    """Two ranks: streaming in split; exact through a cold cache; a stall is told before the process group gives up."""
    pattern = f"{server.url}/cut/test-{{0000..0002}}.tar"
    common = (*TINY, "-b", 2, "-w", 1, "--n_epochs", 1, "--trace", "save")
    run("train_single.py", "-s", f"{pattern}?token=s3cret", *common, "--sampling", "split", "--output",
        tmp_path / "split").check()
    kept = [path for path in (tmp_path / "split").rglob("*") if path.is_file()]
    assert len(kept) > 4 and not any(b"s3cret" in path.read_bytes() for path in kept)
    run("train_ddp.py", "-s", pattern, *common, "--sampling", "exact", "--cache_dir", tmp_path / "cache", "--output",
        tmp_path / "exact", ranks=2).check()
    keys = sorted(key for lines in trace(tmp_path / "exact").values() for row in lines for key in row["key"])
    assert keys == [f"{number:06d}" for number in range(12)]
    assert run("common.trace", tmp_path / "exact").code == 0
    started = time.monotonic()
    failed = run("train_single.py", "-s", f"{server.url}/stall/test-0000.tar", *common, "--sampling", "split",
                 "--timeout", 6,
                 "--output", tmp_path / "stall").check(1)
    assert f"{server.url}/stall/info.json" in failed.err.splitlines()[-1] and time.monotonic() - started < 60
