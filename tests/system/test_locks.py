"""The lock on a file, between processes and within one."""

import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from mupscale.system import MupscaleError, exclusive_lock, files
from processes import Script

linux = pytest.mark.skipif(sys.platform == "win32", reason="there are no locks")


@linux
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


@linux
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


@linux
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


@linux
def test_the_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    script = (
        "import sys, time, pathlib\nfrom mupscale.system import exclusive_lock\n"
        "with exclusive_lock(pathlib.Path(sys.argv[1])):\n    print('held', flush=True)\n    time.sleep(3600)"
    )
    other, log = Script(tmp_path / "log", script, path), tmp_path / "log"
    while other.process.is_alive() and not (log.exists() and log.read_text() == "held\n"):
        time.sleep(0.01)
    with pytest.raises(MupscaleError, match="taken"), exclusive_lock(path, refusal="taken"):
        pass
    other.process.kill()
    assert other.wait() == -signal.SIGKILL
    with exclusive_lock(path, refusal="taken"):
        pass


def test_what_goes_wrong_inside_is_raised_and_the_lock_freed(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), exclusive_lock(tmp_path / ".lock"):
        _ = 1 / 0
    with exclusive_lock(tmp_path / ".lock", refusal="taken"):
        pass


def test_where_there_are_no_locks_nobody_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "fcntl", None)
    with exclusive_lock(tmp_path / ".lock"), exclusive_lock(tmp_path / ".lock", refusal="taken"):
        assert not (tmp_path / ".lock").exists()
