"""Where a command writes: `--out none` writes nothing, and what was written is said in a last line."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import wraps
from pathlib import Path

from mupscale.cli.arguments import separate_options
from mupscale.system import show

NOTHING = ("none", "null")
_thrown_away: list[Path] = []


def says_nothing_is_written(out: object) -> bool:
    """Whether a value of --out asks for no files at all."""
    return out is None or str(out).lower() in NOTHING


def may_write_nothing(run: Callable[[list[str]], int]) -> Callable[[list[str]], int]:
    """For a command with an option --out: with `none` it works in a folder that is gone when it ends."""

    @wraps(run)
    def command(words: list[str]) -> int:
        given = [value for name, value in separate_options(words, run.line.flags)[1] if name == "--out"]  # type: ignore[attr-defined]
        if not given or str(given[-1]).lower() not in NOTHING:
            return run(words)
        with tempfile.TemporaryDirectory(prefix="mupscale-") as folder:
            _thrown_away.append(Path(folder))
            try:
                return run([*words, "--out", str(Path(folder, "out"))])
            finally:
                _thrown_away.pop()

    return command


def print_place(what: str, path: str | Path) -> None:
    """Tell where something was written, unless it is not kept."""
    if not any(Path(path).absolute().is_relative_to(folder) for folder in _thrown_away):
        show(f"{what}: {path}")
