"""One training in a folder: who has it, who is dead, and who is on another machine."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path

import pytest

from mupscale.system import MupscaleError, RunLock, clear_leftovers
from mupscale.system.files import _here
from processes import DEADLINE, PROCESSES, Script

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="there are no locks")
HOLD = """
import sys, time
from pathlib import Path
from mupscale.system import RunLock
lock = RunLock(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(600)
"""


def hold(folder: Path, output: Path) -> Script:
    """A process that has the lock."""
    script = Script(output, HOLD, folder)
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


def test_a_lock_of_another_machine_that_is_not_touched_any_more_is_stale(tmp_path: Path) -> None:
    elsewhere(tmp_path)
    lock = RunLock(tmp_path, grace=0.2)
    assert json.loads((tmp_path / ".lock").read_text())["pid"] == os.getpid()
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
