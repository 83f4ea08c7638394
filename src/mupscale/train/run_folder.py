"""The folder of a run: its recipe, its metrics as JSON lines, and its last checkpoints."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from mupscale.system import (
    MupscaleError,
    RunLock,
    as_asked,
    clear_leftovers,
    make_folder,
    move,
    remove,
    replace_text,
    setting,
)
from mupscale.train.callbacks import TensorBoard
from mupscale.train.metrics import Record, append_line, read_lines
from mupscale.train.recipe import Recipe
from mupscale.train.stored_recipes import StoredRecipe, sign_run, stored_values

_CHECKPOINT = re.compile(r"step-(\d{9})(\.safetensors)?")


class RunFolder:
    """The files of a run: `recipe.json`, `metrics.jsonl` and `checkpoints/step-….safetensors` (shards under FSDP)."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.metrics = self.path / "metrics.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self.lock: RunLock | None = None
        self.board = TensorBoard()
        self.is_own = False  # begun by this user, here: see sign_run
        self.made: list[Path] = []  # folders that were not there before, innermost first, while nothing is in them

    # ------------------------------------------------------------------------------------------- while it trains

    def begin(self, resume: bool) -> None:
        """Make the folder and lock it, unless it holds a run that is not to be resumed, or that somebody trains."""
        last, over = self.last(), f"start over ({as_asked('overwrite=True', '--overwrite')})"
        other = f"choose another folder ({setting('out')})"
        if last is None and not resume and self.records():
            raise MupscaleError(f"{self.path} holds the history of a run without checkpoints: {other}, or {over}")
        if last is not None and not resume:
            raise MupscaleError(
                f"{self.path} holds a run at step {step_of(last)} already: resume it "
                f"({as_asked('resume=True', '--resume')}), {over}, or {other}"
            )
        self.made = [each for each in (self.checkpoints, self.path, *self.path.parents) if not each.exists()]
        self.lock = self.lock or RunLock(make_folder(self.path))
        try:
            for folder in (self.path, make_folder(self.checkpoints)):
                clear_leftovers(folder, alone=True)
            self.is_own = not (self.path / "recipe.json").exists()
            with suppress(OSError, MupscaleError):
                self.is_own = self.is_own or bool(StoredRecipe.read(self.path / "recipe.json").packages_if_own())
        except BaseException:
            self.release()
            raise

    def clear(self) -> None:
        """Remove the run that is there, and nothing that is no part of one."""
        files = [self.path / "recipe.json", self.metrics, *self.path.glob("events.out.tfevents.*"), *self.all()]
        for path in files:
            remove(path)
        self.is_own = True

    def go_on(self, recipe: Recipe, step: int) -> None:
        """Write the recipe, and drop the metrics that will come again after so many steps."""
        self.board.close()
        if recipe.tensorboard:
            self.board.open(self.path, step)
        self.made = []  # to stay
        if self.is_own:
            sign_run(self.path, recipe)
        replace_text(self.path / "recipe.json", json.dumps(stored_values(recipe, self.path), indent=2) + "\n")
        lines = [line for line, record in read_lines(self.metrics) if not _is_written_again(record, step)]
        replace_text(self.metrics, "".join(lines))

    def write(self, record: Record) -> None:
        append_line(self.metrics, record)
        self.board.metrics(None, record)

    def sync(self) -> None:
        """See to it that the metrics so far are on the disk, before the checkpoint that covers them."""
        if self.metrics.is_file():
            with open(self.metrics, "rb") as file:
                os.fsync(file.fileno())

    def set_aside(self, checkpoint: Path) -> None:
        """Keep a damaged checkpoint under another name, so that it is taken for none."""
        move(checkpoint, checkpoint.with_name(f"damaged-{checkpoint.name}"))

    def forget(self, keep: int) -> None:
        for path in self.all()[:-keep]:
            remove(path)

    def release(self) -> None:
        """Let others train in the folder; where nothing was written there, nothing is left of it."""
        self.board.close()
        if self.lock is not None:
            self.lock.release()
            self.lock = None
        with suppress(OSError):  # the first that is not empty
            for folder in self.made:
                folder.rmdir()

    # ------------------------------------------------------------------------------------------- what is there

    def checkpoint(self, step: int, *, sharded: bool = False) -> Path:
        """Where the checkpoint after so many steps belongs."""
        return self.checkpoints / f"step-{step:09d}{'' if sharded else '.safetensors'}"

    def all(self) -> list[Path]:
        """Every checkpoint, the newest last."""
        if not self.checkpoints.is_dir():
            return []
        paths = [path for path in self.checkpoints.iterdir() if _CHECKPOINT.fullmatch(path.name)]
        return sorted(paths, key=step_of)

    def last(self) -> Path | None:
        checkpoints = self.all()
        return checkpoints[-1] if checkpoints else None

    def records(self) -> list[dict[str, Any]]:
        """The metrics so far."""
        return list(self.each_record())

    def each_record(self) -> Iterator[dict[str, Any]]:
        return (record for _, record in read_lines(self.metrics))


def _is_written_again(record: Record, step: int) -> bool:
    """Whether the line came after the checkpoint of this step was written."""
    kind, at = record["kind"], int(record["step"])
    return at > step or kind == "end" or (kind in ("grow", "rewind") and at == step)


def step_of(checkpoint: Path) -> int:
    """The step in a checkpoint's name."""
    match = _CHECKPOINT.fullmatch(checkpoint.name)
    return int(match[1]) if match else 0


def find_checkpoint(path: str | Path) -> Path:
    """The file or shard folder that a path means: itself, or a run's newest checkpoint.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     run = RunFolder(folder)
    ...     run.begin(resume=False)
    ...     for step in (100, 200):
    ...         run.checkpoint(step).touch()
    ...     run.release()
    ...     find_checkpoint(folder).name
    'step-000000200.safetensors'
    """
    path = Path(path)
    if not path.exists():
        raise MupscaleError(f"there is no checkpoint at {path}")
    if path.name == "checkpoints":
        path = path.absolute().parent
    if path.is_file() or _CHECKPOINT.fullmatch(path.name) or (path / ".metadata").is_file():
        return path
    last = RunFolder(path).last()
    if last is None:
        raise MupscaleError(f"{path} is a folder without checkpoints of a run")
    return last
