"""The folder of a run: its recipe, its metrics as JSON lines, and its last checkpoints."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mupscale.system import MupscaleError, replace_text
from mupscale.train.recipe import Recipe

_CHECKPOINT = re.compile(r"step-(\d{9})(\.safetensors)?")


class RunFolder:
    """The files of a run: `recipe.json`, `metrics.jsonl` and `checkpoints/step-….safetensors` (shards under FSDP).

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     run = RunFolder(folder)
    ...     run.write({"kind": "train", "step": 10, "loss": 0.5})
    ...     run.records()
    [{'kind': 'train', 'step': 10, 'loss': 0.5}]
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.metrics = self.path / "metrics.jsonl"
        self.checkpoints = self.path / "checkpoints"

    def begin(self, resume: bool) -> None:
        """Make the folder, unless it holds a run that is not to be resumed."""
        last = self.last()
        if last is None and not resume and self.records():
            raise MupscaleError(
                f"{self.path} holds the history of a run without checkpoints: choose another folder (--out), or start "
                f"over (--overwrite)"
            )
        if last is not None and not resume:
            raise MupscaleError(
                f"{self.path} holds a run at step {step_of(last)} already: resume it (--resume), start over "
                f"(--overwrite), or choose another folder (--out)"
            )
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        for unfinished in self.checkpoints.glob(".*.tmp"):
            _remove(unfinished)

    def clear(self) -> None:
        """Remove the run that is there, and nothing that is no part of one."""
        files = [self.path / "recipe.json", self.metrics, *self.path.glob("events.out.tfevents.*"), *self._all()]
        for path in files:
            if path.exists():
                _remove(path)

    def go_on(self, recipe: Recipe, step: int) -> None:
        """Write the recipe, and drop the metrics that will come again after so many steps."""
        replace_text(self.path / "recipe.json", json.dumps(recipe.to_json(), indent=2) + "\n")
        lines = [line for line, record in self._lines() if not _is_written_again(record, step)]
        replace_text(self.metrics, "".join(lines))

    def checkpoint(self, step: int, *, sharded: bool) -> Path:
        """Where the checkpoint after so many steps belongs."""
        return self.checkpoints / f"step-{step:09d}{'' if sharded else '.safetensors'}"

    def last(self) -> Path | None:
        """The newest checkpoint."""
        checkpoints = self._all()
        return checkpoints[-1] if checkpoints else None

    def forget(self, keep: int) -> None:
        """Remove all checkpoints but the newest."""
        for path in self._all()[:-keep]:
            _remove(path)

    def _all(self) -> list[Path]:
        if not self.checkpoints.is_dir():
            return []
        paths = [path for path in self.checkpoints.iterdir() if _CHECKPOINT.fullmatch(path.name)]
        return sorted(paths, key=step_of)

    def write(self, record: dict[str, Any]) -> None:
        """Append one line of metrics, whole whenever the process is killed; JSON has null for what is not finite."""
        record = {name: None if _is_not_finite(value) else value for name, value in record.items()}
        with open(self.metrics, "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def records(self) -> list[dict[str, Any]]:
        """The metrics so far."""
        return [record for _, record in self._lines()]

    def _lines(self) -> Iterator[tuple[str, dict[str, Any]]]:
        if not self.metrics.exists():
            return
        with open(self.metrics, encoding="utf-8", errors="replace") as file:
            for line in file:
                try:
                    record = json.loads(line)
                except json.JSONDecodeError:
                    continue
                if line.endswith("\n") and isinstance(record, dict) and {"kind", "step"} <= record.keys():
                    yield line, record  # and not the line that a kill cut short


def _is_not_finite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _is_written_again(record: dict[str, Any], step: int) -> bool:
    """Whether the line came after the checkpoint of this step was written."""
    kind, at = record["kind"], int(record["step"])
    return at > step or kind == "end" or (kind == "grow" and at == step)


def step_of(checkpoint: Path) -> int:
    """The step in a checkpoint's name.

    >>> step_of(Path("runs/mine/checkpoints/step-000002000.safetensors"))
    2000
    """
    match = _CHECKPOINT.fullmatch(checkpoint.name)
    return int(match[1]) if match else 0


def find_checkpoint(path: str | Path) -> Path:
    """The file or shard folder that a path means: itself, or a run's newest checkpoint.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     run = RunFolder(folder)
    ...     run.begin(resume=False)
    ...     for step in (100, 200):
    ...         run.checkpoint(step, sharded=False).touch()
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


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
