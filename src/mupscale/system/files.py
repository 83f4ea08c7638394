"""Files and folders that are, at every moment, the old one or the new one, whatever is killed or full."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mupscale.system.errors import MupscaleError
from mupscale.system.locks import exclusive_lock

_LOCK = ".lock"


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
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
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
            (path / _LOCK).unlink(missing_ok=True)  # not before, or another run could take the folder and clear it
        except BaseException:
            shutil.rmtree(hidden, ignore_errors=True)
            raise


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
