"""One process at a time: a lock on a file, which the system ends together with the process that holds it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from mupscale.system.errors import MupscaleError
from mupscale.system.writing import open_file, writing_into


@contextmanager
def exclusive_lock(
    path: Path, *, refusal: str | None = None, before_waiting: Callable[[], object] = lambda: None
) -> Iterator[None]:
    """Hold the lock of this file, which is made if there is none; no other process holds it meanwhile.

    If one does, raise the refusal, or wait for it where none is given. before_waiting: called once, if it must wait.
    On Windows there is no such lock, and nobody waits. Whoever has it works in its folder: see `writing_into`.

    >>> import tempfile
    >>> from pathlib import Path
    >>> from mupscale.system import exclusive_lock
    >>> folder = tempfile.TemporaryDirectory()
    >>> path = Path(folder.name) / ".lock"
    >>> with exclusive_lock(path), exclusive_lock(path, refusal="somebody else is writing here"):
    ...     pass
    Traceback (most recent call last):
    mupscale.system.errors.MupscaleError: somebody else is writing here
    >>> folder.cleanup()
    """
    with writing_into(path.parent):
        yield from _locked(path, refusal, before_waiting)


def _locked(path: Path, refusal: str | None, before_waiting: Callable[[], object]) -> Iterator[None]:
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    waited = False
    while True:
        with open_file(path, "a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                if refusal is not None:
                    raise MupscaleError(refusal) from None
                if not waited:
                    before_waiting()
                waited = True
                fcntl.flock(file, fcntl.LOCK_EX)
            if is_at(file, path):
                yield
                return
            if refusal is not None:
                raise MupscaleError(refusal)


def is_at(file: IO[str], path: Path) -> bool:
    """Whether an open file is still there under its name: who held the lock before may have removed or moved it."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.lstat(path))
    except OSError:
        return False
