"""Files and folders that are, at every moment, the old one or the new one, whatever is killed or full."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mupscale.system.errors import MupscaleError
from mupscale.system.locks import exclusive_lock
from mupscale.system.machines import is_process_alive, machine_name

_LOCK = ".lock"
_MARK = ".mupscale-"  # torch.save writes the name before the last dot into its file: that must always be the same
_LONG = 86_400.0  # seconds after which what is half-written is nobody's any more
_TEMPORARY = re.compile(
    r"\..+\.mupscale-(?P<place>[0-9a-f]{6})-(?P<pid>\d+)"
    r"|\..+\.(?P<old_pid>\d+)\.tmp|\..+\.tmp|\.tmp[A-Za-z0-9]{6}"  # of earlier versions, and of safetensors
)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path beside this one; what is written there takes its place when it is whole and on the disk.

    >>> import tempfile
    >>> from pathlib import Path
    >>> from mupscale.system import replacing
    >>> folder = tempfile.TemporaryDirectory()
    >>> path = Path(folder.name) / "weights"
    >>> with replacing(path) as temporary:
    ...     size = temporary.write_bytes(b"12345")
    ...     path.exists()
    False
    >>> path.read_bytes()
    b'12345'
    >>> folder.cleanup()
    """
    temporary = path.with_name(f".{path.name}{_MARK}{_here()}-{os.getpid()}")
    try:
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def replace_text(path: Path, text: str) -> None:
    """Write a text file that is, at every moment, the old one or the new one.

    >>> import tempfile
    >>> from pathlib import Path
    >>> from mupscale.system import replace_text
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     replace_text(Path(folder) / "notes", "one line")
    ...     (Path(folder) / "notes").read_text()
    'one line'
    """
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="\n")


def write_json(path: Path, values: Any) -> Path:
    """Write plain values as a JSON file, whole or not at all, in a folder that is made; an error names the file.

    >>> import tempfile
    >>> from pathlib import Path
    >>> from mupscale.system import write_json
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_json(Path(folder) / "values.json", {"width": 8}).read_text()
    '{\\n "width": 8\\n}\\n'
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, json.dumps(values, indent=1) + "\n")
    except OSError as error:
        raise MupscaleError(f"{path} cannot be written: {error.strerror or error}") from None
    return path


@contextmanager
def appearing(path: Path) -> Iterator[Path]:
    """A hidden folder beside this path that one process alone has; it takes the name when all in it is on the disk.

    If anything goes wrong it goes away, and what a killed process has left is cleared by the next one.

    >>> import tempfile
    >>> from pathlib import Path
    >>> from mupscale.system import appearing
    >>> folder = tempfile.TemporaryDirectory()
    >>> path = Path(folder.name) / "model"
    >>> with appearing(path) as hidden:
    ...     size = (hidden / "config.json").write_text("{}")
    ...     path.exists()
    False
    >>> [file.name for file in path.iterdir()]
    ['config.json']
    >>> folder.cleanup()
    """
    hidden = path.absolute().with_name(f".{path.absolute().name}.mupscale-partial")
    hidden.mkdir(parents=True, exist_ok=True)
    refusal = f"another run is writing {path} at this moment: wait for it, or choose another name"
    with exclusive_lock(hidden / _LOCK, refusal=refusal):
        try:
            _clear(hidden)
            yield hidden
            _sync(hidden)
            with suppress(FileNotFoundError):  # an empty folder may stand there
                path.rmdir()
            os.rename(hidden, path)
            sync_folder(path.parent)
            (path / _LOCK).unlink(missing_ok=True)  # not before, or another run could take the folder and clear it
        except BaseException:
            shutil.rmtree(hidden, ignore_errors=True)
            raise


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


def clear_leftovers(folder: Path, alone: bool = False) -> None:
    """Remove what killed processes have left in a folder half-written, of this version and of earlier ones.

    alone: whether nobody else writes there at this moment; else only what a process of this machine left that is dead,
    or what is older than a day.

    >>> import tempfile
    >>> from mupscale.system import clear_leftovers
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     (Path(folder) / ".weights.12345.tmp").touch()
    ...     clear_leftovers(Path(folder), alone=True)
    ...     list(Path(folder).iterdir())
    []
    """
    if not folder.is_dir():
        return
    for path in folder.iterdir():
        match = _TEMPORARY.fullmatch(path.name)
        if match is not None and (alone or _is_abandoned(path, match)):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def _is_abandoned(path: Path, match: re.Match[str]) -> bool:
    place, pid = match["place"], match["pid"] or match["old_pid"]
    if pid is not None and (place is None or place == _here()) and not is_process_alive(int(pid)):
        return True
    try:
        return time.time() - path.stat().st_mtime > _LONG
    except OSError:
        return False


def _here() -> str:
    return hashlib.sha256(machine_name().encode()).hexdigest()[:6]


def _clear(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != _LOCK:
            path.unlink()


def _sync(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        elif path.is_dir():
            sync_folder(path)
    sync_folder(folder)


def fingerprint_files(paths: Iterable[Path]) -> str:
    """Eight digits that change with any byte of the files, in their order.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "weights")
    ...     _ = path.write_bytes(b"weights")
    ...     fingerprint_files([path])
    '1ad27358'
    """
    total = 0
    for path in paths:
        with open(path, "rb") as file:
            while part := file.read(1 << 20):
                total = zlib.crc32(part, total)
    return f"{total:08x}"
