"""What a machine that loses its power leaves: names of whole files alone, and metrics up to every checkpoint."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from mupscale.train import Checkpoints, Growth, run_recipe
from small_runs import recipe

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
