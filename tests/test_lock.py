"""The lock that threads and processes share: exclusion, re-entrance, forks, killed holders, links of others."""

from __future__ import annotations

import fcntl
import os
import pickle
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from tqdm import tqdm

from common.errors import UserError
from common.lock import NodeLock, lock_path

ROOT = Path(__file__).resolve().parent.parent
HOLD = """import sys, time; from common.lock import NodeLock
lock = NodeLock(sys.argv[1])
lock.acquire()
print('held', flush=True)
time.sleep(60)
"""


def holder(path: Path) -> subprocess.Popen:
    """Another process that has the lock."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(path)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout and process.stdout.readline() == "held\n"
    return process


def is_free(path: Path) -> bool:
    """Whether somebody else could take it."""
    if not path.exists():
        return True
    with open(path, "r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            return False


def run_child(function) -> int:
    """The exit status of a forked child."""
    child = os.fork()
    if not child:
        signal.alarm(20)
        try:
            os._exit(function() or 0)
        finally:
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_the_file_is_private_and_the_lock_reentrant(tmp_path):
    lock = NodeLock(tmp_path / "lock")
    with lock, lock:
        assert not is_free(lock.path)
        lock.acquire()
        lock.release()
        assert not is_free(lock.path)
        assert stat.S_IMODE(lock.path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == []  # nothing is left behind


def test_threads_exclude_each_other(tmp_path):
    lock, inside, seen = NodeLock(tmp_path / "lock"), [0], []

    def work():
        for _ in range(20):
            with lock:
                inside[0] += 1
                time.sleep(0.0005)
                seen.append(inside[0])
                inside[0] -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [1] * 80


def test_processes_keep_blocks_whole(tmp_path):
    out = tmp_path / "out"
    code = ("import sys; from common.lock import NodeLock; lock = NodeLock(sys.argv[1])\n"
            "for _ in range(100):\n"
            "    with lock:\n"
            "        for line in range(5):\n"
            "            with open(sys.argv[2], 'a') as file: file.write(sys.argv[3] + '\\n')\n")
    command = [sys.executable, "-c", code, str(tmp_path / "lock"), str(out)]
    ranks = [subprocess.Popen([*command, str(rank)], cwd=ROOT) for rank in range(3)]
    assert [rank.wait(60) for rank in ranks] == [0, 0, 0]
    lines = out.read_text().split()
    assert len(lines) == 3 * 100 * 5
    assert all(len(set(lines[i : i + 5])) == 1 for i in range(0, len(lines), 5))


def test_a_killed_holder_lets_go(tmp_path):
    process, lock = holder(tmp_path / "lock"), NodeLock(tmp_path / "lock")
    try:
        assert not lock.acquire(blocking=False)
        started = time.monotonic()
        assert not lock.acquire(timeout=0.05)
        assert time.monotonic() - started >= 0.05
    finally:
        process.kill()
        process.wait()
    assert lock.acquire(timeout=20)
    lock.release()


def test_a_refused_lock_leaves_nothing_behind(tmp_path):
    process, lock = holder(tmp_path / "lock"), NodeLock(tmp_path / "lock")
    descriptors = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        assert not lock.acquire(blocking=False)
    assert len(os.listdir("/proc/self/fd")) == descriptors
    process.kill()
    process.wait()
    with lock:  # the threads' half was given back each time
        assert not is_free(lock.path)
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_child_forked_inside_the_block_does_not_own_it(tmp_path):
    lock = NodeLock(tmp_path / "lock")
    with lock:
        def child():
            if lock.acquire(blocking=False):
                return 1
            lock.release()  # as leaving the parent's block does
            return 2 if is_free(lock.path) else 0

        assert run_child(child) == 0
        assert not is_free(lock.path)
    assert run_child(lambda: 0 if lock.acquire(timeout=10) else 1) == 0


def test_a_child_forked_while_another_thread_holds_it_is_not_stuck(tmp_path):
    lock, held, done = NodeLock(tmp_path / "lock"), threading.Event(), threading.Event()

    def hold():
        with lock:
            held.set()
            done.wait(20)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    child = os.fork()
    if not child:
        signal.alarm(20)
        with lock:
            os._exit(0)
    done.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_child_of_a_killed_holder_does_not_keep_it(tmp_path):
    """The descriptor that a loader worker inherits would hold the lock after its rank's death."""
    code = ("import os, sys, time; from common.lock import NodeLock; lock = NodeLock(sys.argv[1]); lock.acquire()\n"
            "if os.fork(): print('held', flush=True)\n"
            "time.sleep(60)\n")
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "lock")], cwd=ROOT,
                               stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout and process.stdout.readline() == "held\n"
    time.sleep(0.2)  # the child has begun
    process.kill()
    process.wait()
    lock = NodeLock(tmp_path / "lock")
    try:
        assert lock.acquire(timeout=10)
        lock.release()
    finally:
        os.killpg(process.pid, signal.SIGKILL)


def test_a_copy_of_the_descriptor_keeps_neither_those_who_wait_nor_those_who_come(tmp_path):
    lock, taken = NodeLock(tmp_path / "lock"), []
    waiting = threading.Thread(target=lambda: taken.append(NodeLock(lock.path).acquire(timeout=20)))
    with lock:
        copy = os.dup(lock._file)  # as a child has that was forked at a bad moment
        waiting.start()
        time.sleep(0.2)
    waiting.join()
    assert taken == [True] and not is_free(lock.path)  # at a file of its own, the first one is gone
    os.close(copy)


def test_a_file_that_somebody_took_away_is_not_waited_at(tmp_path):
    """A cleaner of /tmp may remove the file under its holder, who then must not remove the one that came after it."""
    first, second = NodeLock(tmp_path / "lock"), NodeLock(tmp_path / "lock")
    with first:
        first.path.unlink()
        assert second.acquire(blocking=False)
    assert not is_free(second.path)
    second.release()


def test_only_the_holder_may_release(tmp_path):
    lock, errors = NodeLock(tmp_path / "lock"), []

    def release():
        try:
            lock.release()
        except RuntimeError as error:
            errors.append(error)

    with lock:
        thread = threading.Thread(target=release)
        thread.start()
        thread.join()
        assert len(errors) == 1 and not is_free(lock.path)


@pytest.mark.parametrize("target_exists", [True, False])
def test_no_link_is_followed(tmp_path, target_exists):
    target = tmp_path / "target"
    if target_exists:
        target.write_text("precious")
    (tmp_path / "lock").symlink_to(target)
    with pytest.raises(UserError, match="lock"):
        NodeLock(tmp_path / "lock").acquire()
    assert target.exists() == target_exists
    assert not NodeLock(tmp_path / "other").path.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_file_of_another_user_is_refused(tmp_path):
    (tmp_path / "lock").touch()
    os.chown(tmp_path / "lock", 12345, -1)
    lock = NodeLock(tmp_path / "lock")
    for _ in range(2):  # the threads' half is not left locked
        with pytest.raises(UserError, match="another user"):
            lock.acquire()


def test_it_serves_tqdm_and_travels_as_its_path(tmp_path):
    before, lock = tqdm.get_lock(), NodeLock(tmp_path / "lock")
    tqdm.set_lock(lock)
    try:
        with lock, open(os.devnull, "w") as nowhere:
            for _ in tqdm(range(3), file=nowhere):
                pass
            tqdm.write("text", file=nowhere)
    finally:
        tqdm.set_lock(before)
    assert is_free(lock.path)
    assert pickle.loads(pickle.dumps(lock)).path == lock.path


def test_runs_and_users_do_not_share_a_file(tmp_path, monkeypatch):
    assert lock_path(tmp_path / "a") != lock_path(tmp_path / "b")
    monkeypatch.chdir(tmp_path)
    assert lock_path("a") == lock_path(tmp_path / "a")
    assert f"-{os.geteuid()}-" in lock_path("a").name
