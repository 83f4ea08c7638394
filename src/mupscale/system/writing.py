"""The one door for writing and deleting: below a folder that a person named, no link is followed.

The folder of a run may be somebody else's, and a link in it may lead anywhere: a lock that is a link to a letter would
empty the letter. Whoever works in a folder says so (`writing_into`; taking its lock does), and until the end all that
is written or removed below it is looked at, part by part of its path. What a person names may itself be a link.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from inspect import signature
from pathlib import Path
from typing import IO, Any, ParamSpec, TypeVar

from mupscale.system.errors import MupscaleError

_P = ParamSpec("_P")
_T = TypeVar("_T")
_named: list[str] = []


@contextmanager
def writing_into(folder: str | Path) -> Iterator[None]:
    """Until the end, no link below this folder is followed to write or to remove.

    >>> import tempfile
    >>> from mupscale.system import open_file, writing_into
    >>> with tempfile.TemporaryDirectory() as folder, writing_into(folder):
    ...     Path(folder, "notes").symlink_to("/etc/passwd")
    ...     open_file(Path(folder, "notes"), "a")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    mupscale.system.errors.MupscaleError: .../notes is a link to /etc/passwd, and no link inside ... is followed ...
    """
    place = os.path.abspath(folder)
    _named.append(place)
    try:
        yield
    finally:
        _named.remove(place)


def writes_into(argument: str) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """For a function that works in the folder which is its argument of this name: `writing_into`, all the while.

    >>> from mupscale.system import writes_into
    >>> @writes_into("out")
    ... def train(steps, out): ...
    """

    def decorate(function: Callable[_P, _T]) -> Callable[_P, _T]:
        parameters = signature(function)

        @wraps(function)
        def inside(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            with writing_into(parameters.bind(*args, **kwargs).arguments[argument]):
                return function(*args, **kwargs)

        return inside

    return decorate


def check_links(path: Path) -> bool:
    """Whether a path is below a folder that is written into; an error if any part of it there is a link.

    >>> from mupscale.system import check_links
    >>> check_links(Path("nowhere"))
    False
    """
    place = os.path.abspath(path)
    folders = [folder for folder in _named if place.startswith(os.path.join(folder, ""))]
    if not folders:
        return False
    folder = part = min(folders, key=len)  # of those inside each other the outermost was named by a person
    for name in os.path.relpath(place, folder).split(os.sep):
        part = os.path.join(part, name)
        if os.path.islink(part):
            raise MupscaleError(
                f"{part} is a link to {os.readlink(part)}, and no link inside {folder} is followed to write or to "
                f"remove: put a file or folder of its own there, or name the place itself"
            )
    return True


def open_file(path: Path, mode: str, **options: Any) -> IO[Any]:
    """A file to write into, as `open` gives it; below a folder that is written into, an ordinary one and no link.

    >>> import tempfile
    >>> from mupscale.system import open_file
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with open_file(Path(folder, "notes"), "w") as file:
    ...         file.write("one line")
    8
    """
    is_below = check_links(path)

    def opener(name: str, flags: int) -> int:
        handle = os.open(name, flags | (_UNMOVED if is_below else 0), 0o666)  # a link that came a moment ago included
        if is_below and not stat.S_ISREG(os.fstat(handle).st_mode):
            os.close(handle)
            raise MupscaleError(f"{path} is no ordinary file, so nothing is written into it")
        return handle

    return open(path, mode, opener=opener, **options)


_UNMOVED = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)  # nor is a pipe waited for


def make_folder(path: Path) -> Path:
    """The folder, made with those that it lies in where there is none.

    >>> import tempfile
    >>> from mupscale.system import make_folder
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     make_folder(Path(folder, "runs", "first")).is_dir()
    True
    """
    check_links(path)
    path.mkdir(parents=True, exist_ok=True)
    return path


def remove(path: Path) -> None:
    """Remove a file, a folder with all that is in it, or a link itself; nothing where there is none.

    >>> import tempfile
    >>> from mupscale.system import make_folder, remove
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     remove(make_folder(Path(folder, "runs", "first")).parent)
    ...     list(Path(folder).iterdir())
    []
    """
    check_links(path.parent)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def move(path: Path, target: Path) -> None:
    """Give a file or folder another name, in place of what has it, and see to it that this is on the disk.

    >>> import tempfile
    >>> from mupscale.system import make_folder, move
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     move(make_folder(Path(folder, "first")), Path(folder, "second"))
    ...     [path.name for path in Path(folder).iterdir()]
    ['second']
    """
    for parent in {path.parent, target.parent}:
        check_links(parent)
    os.replace(path, target)
    sync_folder(target.parent)


def sync_folder(folder: Path) -> None:
    """See to it that what was renamed in a folder is on the disk; nothing where folders cannot be synced.

    >>> import tempfile
    >>> from mupscale.system import sync_folder
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     sync_folder(Path(folder))
    """
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
