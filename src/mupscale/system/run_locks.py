"""One training in a folder: a lock that says which process has it, on which machine.

The system ends a lock together with its process. On a network drive the lock of another machine may not be seen; there
its file is looked at for a while, since whoever holds it touches it again and again.
"""

from __future__ import annotations

import json
import os
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Any

from mupscale.system.errors import MupscaleError
from mupscale.system.locks import is_at
from mupscale.system.machines import machine_name
from mupscale.system.writing import open_file, writing_into

_NAME = ".lock"
_TOUCH_EVERY = 10.0  # seconds
GRACE = 45.0
"""Seconds without a touch after which the lock of another machine is stale."""
_held: dict[int, RunLock] = {}
_guard = threading.Lock()
_thread: list[threading.Thread] = []


class RunLock:
    """The lock of a folder, once it is taken; the second who asks is refused with the process that has it.

    Whoever has it works in the folder: see `writing_into`.

    >>> import tempfile
    >>> from mupscale.system import RunLock
    >>> folder = tempfile.TemporaryDirectory()
    >>> lock = RunLock(Path(folder.name))
    >>> RunLock(Path(folder.name))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    mupscale.system.errors.MupscaleError: process ... of this machine is training in ...: wait for it, or stop it
    >>> lock.release()
    >>> RunLock(Path(folder.name)).release()
    >>> folder.cleanup()
    """

    def __init__(self, folder: Path, grace: float = GRACE) -> None:
        self.path = folder / _NAME
        with ExitStack() as held:
            held.enter_context(writing_into(folder))
            self.file: IO[str] | None = _lock_file(self.path)
            if self.file is None:
                raise MupscaleError(f"{_describe(_owner(self.path))} is training in {folder}: wait for it, or stop it")
            held.callback(self.file.close)
            self._wait_for_other_machine(folder, grace)
            self.file.truncate(0)
            self.file.write(json.dumps({"pid": os.getpid(), "machine": machine_name()}) + "\n")
            self.file.flush()
            self._held = held.pop_all()
        _keep_touching(self)

    def _wait_for_other_machine(self, folder: Path, grace: float) -> None:
        """The lock is ours, but its file names another machine, which may not see our lock, nor we its."""
        owner = _owner(self.path)
        if owner is None or owner["machine"] == machine_name():
            return  # nobody, or a process that is dead: the system would have kept its lock
        seen = self.path.stat().st_mtime_ns
        end = time.monotonic() + grace
        while time.monotonic() < end:
            time.sleep(min(1.0, grace / 10))
            if self.path.stat().st_mtime_ns != seen:
                raise MupscaleError(f"{_describe(owner)} is training in {folder}: wait for it, or stop it")

    def touch(self) -> None:
        """Show other machines that somebody is here."""
        with suppress(OSError):
            os.utime(self.file.fileno() if self.file and os.utime in os.supports_fd else self.path)

    def release(self) -> None:
        """Give the folder back."""
        with _guard:
            _held.pop(id(self), None)
        if self.file is not None:
            with suppress(OSError):
                self.path.unlink()
            self._held.close()
            self.file = None


def _lock_file(path: Path) -> IO[str] | None:
    """The file, open and locked; None where another process has it."""
    while True:
        file: IO[str] = open_file(path, "a+", encoding="utf-8")  # it is open as long as the lock is held
        try:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ImportError:  # Windows
            return file
        except OSError:
            file.close()
            return None
        if is_at(file, path):
            return file
        file.close()  # who had it before has removed it meanwhile


def _owner(path: Path) -> dict[str, Any] | None:
    try:
        owner = json.loads(path.read_text(encoding="utf-8"))
        return {"pid": int(owner["pid"]), "machine": str(owner["machine"])}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _describe(owner: dict[str, Any] | None) -> str:
    if owner is None:
        return "another process"
    where = "this machine" if owner["machine"] == machine_name() else owner["machine"].partition(" ")[0] or "another"
    return f"process {owner['pid']} of {where}"


def _keep_touching(lock: RunLock) -> None:
    """Touch the files of all locks that this process holds, from one thread."""
    with _guard:
        _held[id(lock)] = lock
        if not _thread or not _thread[0].is_alive():  # after a fork it is not
            _thread[:] = [threading.Thread(target=_touch_all, name="run-locks", daemon=True)]
            _thread[0].start()


def _touch_all() -> None:
    while True:
        time.sleep(_TOUCH_EVERY)
        with _guard:
            locks = list(_held.values())
            if not locks:
                _thread.clear()
                return
        for lock in locks:
            lock.touch()
