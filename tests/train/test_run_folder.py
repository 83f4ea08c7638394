"""What a run leaves on disk: the same JSON as ever, errors that name the field, whole files where power is lost."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mupscale import checkpoint
from mupscale.system import MupscaleError
from mupscale.train import Checkpoints, Growth, Recipe, RunState, read_snapshot, run_recipe
from refusals import refuses
from small_runs import recipe

NAMES = ["step", "width", "lr", "flops", "seconds", "losses", "norms", "recipe", "data", "threads"]
WHOLE: dict[str, Any] = {
    "step": 20,
    "width": {"head_dim": 8},
    "lr": 0.02,
    "flops": 1e6,
    "seconds": 1.5,
    "losses": [1.0, 0.5],
    "norms": [],
    "recipe": {"optimizer": {"class_path": "torch.optim.AdamW"}},
    "data": "0123abcd",
    "threads": 2,
}
FILE = Path("run/step-20.safetensors")


def test_plain_values_and_back() -> None:
    state = RunState.from_json(WHOLE, FILE)
    assert state.to_json() == WHOLE
    assert list(state.to_json()) == NAMES
    assert state.optimizer_class == "torch.optim.AdamW"


def test_a_checkpoint_with_fewer_fields() -> None:
    state = RunState.from_json({"width": 16, "somebody's own": 1}, FILE)
    assert state == RunState(width=16)
    assert state.to_json() == {"width": 16}
    assert state.optimizer_class is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"step": "20"},
        {"step": -1},
        {"step": True},
        {"width": 1.5},
        {"width": {"head_dim": "8"}},
        {"lr": "0.02"},
        {"losses": ["1"]},
        {"norms": {}},
        {"recipe": []},
    ],
    ids=str,
)
def test_a_field_of_the_wrong_type(wrong: dict[str, Any]) -> None:
    """The file and the field are named; and so is a run that is no mapping."""
    (field,) = wrong
    with pytest.raises(MupscaleError, match=rf"^{re.escape(str(FILE))}: run: '{field}.* is .*, but must be a"):
        RunState.from_json({**WHOLE, **wrong}, FILE)
    refuses("'it' is 'mine', but must be a mapping", RunState.from_json, "mine", FILE)


def test_what_a_run_writes(tmp_path: Path) -> None:
    """The keys, their order and their types are those of the format."""
    short = recipe(tmp_path / "run", steps=3, log_every=2)
    run_recipe(short)
    path = tmp_path / "run" / "checkpoints" / "step-000000003.safetensors"
    values = checkpoint.load(path).extra["run"]
    assert list(values) == NAMES
    assert [type(value) for value in values.values()] == [int, int, float, float, float, list, list, dict, str, int]
    assert Recipe.from_json(values["recipe"]) == replace(short, out=".")
    assert read_snapshot(path).run == RunState(**values)


def test_resuming_names_what_is_missing(tmp_path: Path) -> None:
    """All but the width, which the recipe says, too, and what need not be known."""
    short = recipe(tmp_path / "run", steps=3)
    run_recipe(short)
    path = tmp_path / "run" / "checkpoints" / "step-000000003.safetensors"
    saved = checkpoint.load(path)
    unneeded = {"width", "data", "threads"}
    for fields in ({field} for field in NAMES if field not in unneeded):
        keep_without(path, saved, fields)
        refuses(rf"{re.escape(str(path))} does not record the run's '{min(fields)}'", run_recipe, short, resume=True)
    keep_without(path, saved, unneeded)
    assert run_recipe(short, resume=True).status == "finished"


def keep_without(path: Path, saved: checkpoint.Checkpoint, fields: set[str]) -> None:
    values = {name: value for name, value in saved.extra["run"].items() if name not in fields}
    checkpoint.save_states(path, saved.model, saved.optimizer, saved.plan, {"run": values})


def test_a_model_without_a_run_says_nothing(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path / "model.safetensors", recipe().family().init(16))
    assert read_snapshot(path).run is None


Place = tuple[int, int]


class Disk:
    """Notes what is brought to the disk (os.fsync), and looks at every renaming (os.replace)."""

    def __init__(self, run: Path) -> None:
        self.metrics, self.fsync, self.replace = run / "metrics.jsonl", os.fsync, os.replace
        self.sizes: dict[Place, int] = {}  # of what was brought there, by device and inode
        self.waiting: dict[Place, Path] = {}  # folders whose names were not
        self.renamed: list[str] = []

    def sync(self, descriptor: int) -> None:
        status = os.fstat(descriptor)
        self.sizes[status.st_dev, status.st_ino] = status.st_size
        self.waiting.pop((status.st_dev, status.st_ino), None)
        self.fsync(descriptor)

    def rename(self, source: Any, target: Any) -> None:
        source, target = Path(source), Path(target)
        assert self.is_there(source), f"{target.name} appears before its bytes"
        if target.parent.name == "checkpoints":
            assert self.is_there(self.metrics), f"{target.name} appears before the metrics that it covers"
        assert not self.waiting, f"{target.name} appears before names in {list(self.waiting.values())}"
        self.replace(source, target)
        self.waiting[_place(target.parent)] = target.parent
        self.renamed.append(target.name)

    def is_there(self, path: Path) -> bool:
        return self.sizes.get(_place(path)) == path.stat().st_size


def _place(path: Path) -> Place:
    status = path.stat()
    return status.st_dev, status.st_ino


def test_bytes_come_before_names_and_metrics_before_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(tmp_path / "run")
    monkeypatch.setattr(os, "fsync", disk.sync)
    monkeypatch.setattr(os, "replace", disk.rename)
    grow = [Growth(4, 16, noise=0.5)]
    run_recipe(recipe(tmp_path / "run", steps=8, checkpoints=Checkpoints(every=2), log_every=1, grow=grow))
    assert {f"step-{step:09d}.safetensors" for step in (2, 4, 6, 8)} <= set(disk.renamed)
    assert "recipe.json" in disk.renamed
    assert not disk.waiting
