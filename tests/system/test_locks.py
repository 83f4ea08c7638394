"""The lock on a file, between processes and within one; and of one training in a folder: who has it, who is dead."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from mupscale.system import MupscaleError, RunLock, clear_leftovers, exclusive_lock
from mupscale.system.files import _here
from processes import DEADLINE, PROCESSES, Script

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="there are no locks")


def test_one_refuses_while_another_has_it(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    with (
        exclusive_lock(path),
        pytest.raises(MupscaleError, match="it is taken"),
        exclusive_lock(path, refusal="it is taken"),
    ):
        pass
    with exclusive_lock(path, refusal="it is taken"):
        pass


def test_one_waits_and_says_so_once(tmp_path: Path) -> None:
    path, order = tmp_path / ".lock", list[str]()

    def wait() -> None:
        with exclusive_lock(path, before_waiting=lambda: order.append("waits")):
            order.append("second")

    with exclusive_lock(path, before_waiting=lambda: order.append("never")):
        other = threading.Thread(target=wait)
        other.start()
        while not order:
            time.sleep(0.001)
        order.append("first")
    other.join()
    assert order == ["waits", "first", "second"]


def test_one_that_waited_for_a_file_that_is_gone_takes_the_new_one(tmp_path: Path) -> None:
    """Who has the lock may remove its file: the next must not hold one that nobody else can see."""
    path, waits = tmp_path / ".lock", threading.Event()
    order = list[str]()

    def wait() -> None:
        with exclusive_lock(path, before_waiting=waits.set):
            order.append("second")
            assert path.exists()
            with pytest.raises(MupscaleError, match="taken"), exclusive_lock(path, refusal="taken"):
                pass

    with exclusive_lock(path):
        other = threading.Thread(target=wait)
        other.start()
        waits.wait()
        time.sleep(0.05)
        order.append("first")
        path.unlink()
    other.join()
    assert order == ["first", "second"]


HOLD = """
import sys, time
from pathlib import Path
from mupscale.system import RunLock
lock = RunLock(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(600)
"""


def hold(place: Path, output: Path) -> Script:
    """A process that has the lock."""
    script = Script(output, HOLD, place)
    while "held" not in (output.read_text() if output.exists() else ""):
        assert script.process.is_alive(), output.read_text()
    return script


def test_the_second_is_refused_with_the_pid_of_the_first_and_the_dead_are_stale(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    other = hold(tmp_path / "run", tmp_path / "said")
    with pytest.raises(MupscaleError, match=rf"process {other.process.pid} of this machine is training in .*run"):
        RunLock(tmp_path / "run")
    assert other.process.pid is not None
    os.kill(other.process.pid, signal.SIGKILL)
    other.wait()
    assert (tmp_path / "run" / ".lock").exists()  # what it left
    RunLock(tmp_path / "run").release()
    assert not list((tmp_path / "run").iterdir())


def elsewhere(folder: Path) -> Path:
    """The lock's file as another machine leaves it."""
    path = folder / ".lock"
    path.write_text(json.dumps({"pid": 12, "machine": "far-away pid:[1]"}))
    return path


def test_a_lock_of_another_machine_that_is_not_touched_any_more_is_stale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is held is touched."""
    monkeypatch.setattr("mupscale.system.files._TOUCH_EVERY", 0.01)
    path = elsewhere(tmp_path)
    lock = RunLock(tmp_path, grace=0.2)
    assert json.loads(path.read_text())["pid"] == os.getpid()
    os.utime(path, (0, 0))
    while path.stat().st_mtime == 0:
        time.sleep(0.001)
    lock.release()


def test_a_lock_that_another_machine_touches_is_not(tmp_path: Path) -> None:
    path, stop = elsewhere(tmp_path), threading.Event()

    def touch() -> None:
        moment = 0
        while not stop.wait(0.02):
            moment += 1
            os.utime(path, (moment, moment))

    thread = threading.Thread(target=touch)
    thread.start()
    try:
        with pytest.raises(MupscaleError, match="process 12 of far-away is training in"):
            RunLock(tmp_path, grace=DEADLINE)
    finally:
        stop.set()
        thread.join()


def test_only_what_nobody_writes_any_more_is_cleared(tmp_path: Path) -> None:
    dead = PROCESSES.Process(target=int)
    dead.start()
    dead.join()
    left = [f".{name}.json.mupscale-{_here()}-{pid}-0123abcd" for name, pid in (("a", dead.pid), ("b", os.getpid()))]
    for name in (*left, "c.tmp", ".lock", ".hidden"):
        (tmp_path / name).touch()
    clear_leftovers(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == [left[1], ".hidden", ".lock", "c.tmp"]
    clear_leftovers(tmp_path, alone=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".hidden", ".lock", "c.tmp"]
