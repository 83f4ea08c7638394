"""Where a command writes: `--out none` writes nothing, and what was written is said in a last line."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mupscale.system import show

_thrown_away: list[Path] = []


def says_nothing_is_written(out: object) -> bool:
    """Whether a value of --out asks for no files at all."""
    return out is None or str(out).lower() in ("none", "null")


@contextmanager
def folder_to_write(out: str | None) -> Iterator[Path]:
    """The folder to write into; where nothing is to be written, one that is gone in the end."""
    if not says_nothing_is_written(out):
        yield Path(str(out))
        return
    with tempfile.TemporaryDirectory(prefix="mupscale-") as folder:
        _thrown_away.append(Path(folder))
        try:
            yield Path(folder, "out")
        finally:
            _thrown_away.pop()


def print_place(what: str, path: str | Path) -> None:
    """Tell where something was written, unless it is not kept."""
    if not any(Path(path).absolute().is_relative_to(folder) for folder in _thrown_away):
        show(f"{what}: {path}")
