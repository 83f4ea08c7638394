"""Files and folders that are, at every moment, the old one or the new one, whatever is killed or full."""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import time
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mupscale.system.errors import MupscaleError
from mupscale.system.json_files import read_json
from mupscale.system.locks import exclusive_lock
from mupscale.system.machines import is_process_alive, machine_name
from mupscale.system.writing import check_links, make_folder, open_file, remove, sync_folder

_MARK = ".mupscale-"  # torch.save writes the name before the last dot into its file: that must always be the same
_LONG = 86_400.0  # seconds after which what is half-written is nobody's any more
_TEMPORARY = re.compile(
    r"\..+\.mupscale-(?P<place>[0-9a-f]{6})-(?P<pid>\d+)(-[0-9a-f]{8})?"
    r"|\..+\.tmp|\.tmp[A-Za-z0-9]{6}"  # of safetensors
)


@contextmanager
def replacing(path: Path, durable: bool = True) -> Iterator[Path]:
    """A temporary path beside this one; what is written there takes its place when it is whole and on the disk.

    A link of this name is replaced, and what it leads to stays. durable: whether to wait for the disk.

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
    check_links(path.parent)
    temporary = path.with_name(f".{path.name}{_MARK}{_here()}-{os.getpid()}-{secrets.token_hex(4)}")
    try:
        yield temporary
        if durable:
            with open(temporary, "rb") as file:
                os.fsync(file.fileno())
        os.replace(temporary, path)
        if durable:
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
        make_folder(path.parent)
        replace_text(path, json.dumps(values, indent=1) + "\n")
    except OSError as error:
        raise MupscaleError(f"{path} cannot be written: {error.strerror or error}") from None
    return path


@contextmanager
def appearing(path: Path) -> Iterator[Path]:
    """A hidden folder beside this path that one process alone has; it takes the name when all in it is on the disk.

    If anything goes wrong it goes away. Nobody can foresee its name; a file beside it, which is locked meanwhile, keeps
    it in mind, and what a killed process has left is cleared by the next one.

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
    place = path.absolute()
    memory = place.with_name(f".{place.name}.mupscale-partial.json")
    make_folder(place.parent)
    refusal = f"another run is writing {path} at this moment: wait for it, or choose another name"
    with exclusive_lock(memory, refusal=refusal):
        _clear_partial(memory)
        hidden = place.with_name(f".{place.name}.mupscale-partial-{secrets.token_hex(8)}")
        try:
            _remember(memory, hidden)
            hidden.mkdir()
            _remember(memory, hidden)
            yield hidden
            _sync(hidden)
            with suppress(FileNotFoundError):  # an empty folder may stand there
                place.rmdir()
            os.rename(hidden, place)
            sync_folder(place.parent)
        except BaseException:
            with suppress(OSError):
                remove(hidden)
            raise
        finally:
            memory.unlink(missing_ok=True)


def _remember(memory: Path, partial: Path) -> None:
    """Write down which folder is being written, and its number on the disk once it has one."""
    number = partial.lstat().st_ino if partial.exists() else None
    with open_file(memory, "w", encoding="utf-8") as file:
        file.write(json.dumps({"folder": partial.name, "number": number}) + "\n")


def _clear_partial(memory: Path) -> None:
    """Remove the folder that a killed process has written down: that very one, and none that somebody named so."""
    try:
        values = read_json(memory)
        partial, number = memory.with_name(str(values["folder"])), values["number"]
    except (OSError, MupscaleError, ValueError, KeyError, TypeError):
        return  # a new file, or nobody's note
    is_ours = re.fullmatch(re.escape(memory.stem) + "-[0-9a-f]{16}", partial.name) and not partial.is_symlink()
    if is_ours and partial.is_dir() and number in (None, partial.lstat().st_ino):
        partial.rmdir() if number is None else remove(partial)  # None: it was killed before there was a file in it


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
            with suppress(OSError):  # it is in nobody's way
                remove(path)


def _is_abandoned(path: Path, match: re.Match[str]) -> bool:
    place, pid = match["place"], match["pid"]
    if pid is not None and (place is None or place == _here()) and not is_process_alive(int(pid)):
        return True
    try:
        return time.time() - path.lstat().st_mtime > _LONG
    except OSError:
        return False


def _here() -> str:
    return hashlib.sha256(machine_name().encode()).hexdigest()[:6]


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
