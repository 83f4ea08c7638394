"""A family under torchrun: two processes train every stretch together, and end where one process ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mupscale.study import FamilySettings, run_family
from mupscale.train import Recipe, Schedule, find_checkpoint
from paper_runs import quiet, read, written
from processes import DEADLINE, run_in_processes
from small_runs import recipe

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="torch.distributed with gloo is not available"
)
SETTINGS = FamilySettings(sizes=[4, 6], budget=8)


def small(**changes: Any) -> Recipe:
    schedule = Schedule(warmup=1)
    return recipe(**{"width": 4, "base": 4, "init_at": 4, "steps": 8, "schedule": schedule, **changes})


def train_together(rank: int, folder: Path) -> None:
    """As one of two processes, once with a whole model in each and once with shards."""
    torch.set_num_threads(1)
    place, timeout = f"file://{folder / 'rendezvous'}", timedelta(seconds=DEADLINE)
    dist.init_process_group("gloo", init_method=place, rank=rank, world_size=2, timeout=timeout)
    for mode in ("ddp", "fsdp"):
        summary = run_family(small(parallel=mode), SETTINGS, folder / mode, note=print)
        (folder / f"{mode}-{rank}.json").write_text(json.dumps(losses(summary)))
    dist.destroy_process_group()


def losses(summary: Any) -> list[float]:
    return [point.losses[0] for one in summary.large.contenders for point in one.points]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("together")
    run_in_processes(train_together, (folder,), 2)
    run_family(small(), SETTINGS, folder / "alone", note=quiet)
    return folder


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_two_processes_end_where_one_ends(ended: Path, mode: str) -> None:
    alone = losses(read(ended / "alone"))
    assert losses(read(ended / mode)) == pytest.approx(alone, rel=1e-10)
    for rank in range(2):
        assert json.loads((ended / f"{mode}-{rank}.json").read_text()) == losses(read(ended / mode))
    for size in ("4", "6"):
        assert find_checkpoint(str(ended / mode / "sizes" / size)).is_dir() == (mode == "fsdp")


def test_one_process_goes_on_with_what_two_have_trained(ended: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in ended.glob("fsdp/stretches/*/metrics.jsonl")}
    more = run_family(small(), FamilySettings(sizes=[4, 6, 8], budget=8), ended / "fsdp", note=quiet)
    assert before.items() <= {p: p.stat().st_mtime_ns for p in ended.glob("fsdp/stretches/*/metrics.jsonl")}.items()
    other = run_family(small(), FamilySettings(sizes=[4, 6, 8], budget=8), ended / "alone", note=quiet)
    assert losses(more) == pytest.approx(losses(other), rel=1e-10)


@pytest.mark.slow
def test_the_command_under_torchrun(tmp_path: Path) -> None:
    file = written(tmp_path / "recipe.yaml", small(precision="bf16", callbacks=["mupscale.train.JsonLines"]))
    words = ["family", str(file), "--sizes", "4,6", "--out", str(tmp_path / "run")]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    paths = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [*torchrun, "-m", "mupscale", *words],
        capture_output=True, text=True, timeout=DEADLINE, env={**os.environ, "PYTHONPATH": paths},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Report: ") == done.stdout.count("size 6 is finished") == 1
    assert losses(read(tmp_path / "run"))[0] > 0
