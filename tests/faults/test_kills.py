"""Twenty kills at random moments each, of everything that writes: what comes in the end is as if nothing had happened.

Which moments they are is printed as the seed of a generator, with which a failure can be repeated (MUPSCALE_SEED).
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from comparison_runs import compare_quietly, facts, few, growing, sit
from mupscale.sweep import Cell, Space, Sweep, SweepJob, run_sweep
from mupscale.train import Checkpoints, Evaluation, Growth, Recipe, Seeds, Spec, run_recipe
from processes import PROCESSES
from small_runs import ADAMW, DEADLINE, Child, assert_same_run, recipe

pytestmark = pytest.mark.faults
KILLS = 20


@pytest.fixture
def chance() -> random.Random:
    """Moments by chance."""
    seed = int(os.environ.get("MUPSCALE_SEED", random.randrange(10**6)))
    print(f"MUPSCALE_SEED={seed}")
    return random.Random(seed)


def kill_again_and_again(start: Callable[[], Any], chance: random.Random, longest: float) -> int:
    """Start a process and kill it after a while, twenty times; how often that was before its end."""
    kills = 0
    for _ in range(20 * KILLS):
        process = start()
        time.sleep(chance.uniform(0, longest))
        if process.is_alive():
            os.kill(process.pid, signal.SIGKILL)
        process.join(DEADLINE)
        kills += process.exitcode == -signal.SIGKILL
        if kills == KILLS:
            break
    return kills


def no_leftovers(folder: Path) -> bool:
    """Whether nothing half-written lies in a folder, nor the lock of a process that is dead."""
    return not [path for path in folder.rglob(".*") if path.name != ".lock" or path.parent.name == "checkpoints"]


@pytest.mark.parametrize("axis", ["width", "depth"])
def test_training_with_growth(axis: str, tmp_path: Path, chance: random.Random) -> None:
    small = {"width": 8, "layers": 2}
    deep = {
        "model": Spec("deep_models.ResidualTable", {"d_in": 6, "d_out": 3}),
        "width": small,
        "base": small,
        "grow": [Growth(10, depth=4, how="identity"), Growth(31, width=16, depth=6, noise=0.3, deepen="stack")],
    }
    wide = {"grow": [Growth(10, 16, 0.5), Growth(31, 32, 0.3)]}

    def eventful(out: Path) -> Recipe:
        slow = Spec("small_runs.Slow", {"seconds": 0.02})
        often = {"checkpoints": Checkpoints(every=3), "evaluation": Evaluation(every=5), "log_every": 2}
        return recipe(out, data=slow, steps=60, **often, **(deep if axis == "depth" else wide))

    run_recipe(eventful(tmp_path / "whole"))
    out = tmp_path / "run"

    def start() -> Any:
        return Child(eventful(out), tmp_path / "output", resume=True).process

    assert kill_again_and_again(start, chance, 1.5) >= KILLS // 2  # it may have come to its end before the twentieth
    run_recipe(eventful(out), resume=True)
    assert_same_run(out, tmp_path / "whole")
    assert no_leftovers(out)


def test_a_comparison(tmp_path: Path, chance: random.Random) -> None:
    whole = compare_quietly(tmp_path / "whole")

    def start() -> Any:
        process = PROCESSES.Process(target=sit, args=(tmp_path / "run", growing(), few(), int))
        process.start()
        return process

    assert kill_again_and_again(start, chance, 4.0) >= 1
    assert facts(compare_quietly(tmp_path / "run")) == facts(whole)
    assert no_leftovers(tmp_path / "run")


SPACE = Space((0.001, 0.01, 0.1), (0.0, 1.0))


def recipes(cell: Cell) -> list[Recipe]:
    """Two seeds of a cell."""
    made = Spec(ADAMW.class_path, {**ADAMW.init_args, "lr": cell.lr})
    slow = Spec("small_runs.Slow", {"seconds": 0.01})
    return [recipe(data=slow, optimizer=made, seeds=Seeds(init=seed), steps=40) for seed in range(2)]


def work(place: str, folder: Path, worker: bool) -> None:
    torch.set_num_threads(1)
    job = SweepJob("s", 8, None, SPACE, recipes, steps=40)
    run_sweep(job, place, worker=worker, folder=folder, at_once=2, note=lambda text: None)


@pytest.mark.parametrize("kind", ["sqlite", "journal"])
def test_a_sweep_with_two_workers(kind: str, tmp_path: Path, chance: random.Random) -> None:
    """One of the two is killed each time, now this one, now that one; the sweep is complete in the end."""
    whole = run_sweep(SweepJob("s", 8, None, SPACE, recipes, steps=40), str(tmp_path / "whole.db"), note=print)
    place = f"{'journal:' if kind == 'journal' else ''}{tmp_path}/study"
    both: list[Any] = [None, None]

    def begin(number: int) -> None:
        both[number] = PROCESSES.Process(target=work, args=(place, tmp_path / "run", bool(number)))
        both[number].start()

    for _ in range(KILLS):
        for number in (0, 1):
            if both[number] is None or not both[number].is_alive():
                begin(number)
        time.sleep(chance.uniform(0, 1.5))
        unlucky = both[chance.randrange(2)]
        if unlucky.is_alive():
            os.kill(unlucky.pid, signal.SIGKILL)
            unlucky.join(DEADLINE)
    for process in both:
        process.join(DEADLINE)
    found: Sweep = run_sweep(SweepJob("s", 8, None, SPACE, recipes, steps=40), place, note=print)
    assert [trial.cell for trial in found.trials] == SPACE.cells
    for one, other in zip(found.trials, whole.trials, strict=True):
        assert one.status == other.status == "finished"
        assert one.by_seed == pytest.approx(other.by_seed, rel=1e-9)


def widen(source: Path, out: Path) -> None:
    from mupscale import hf

    torch.set_num_threads(1)
    hf.upscale(source, out, times=2, seed=0, noise=0.5)


def test_upscale(tmp_path: Path, chance: random.Random) -> None:
    """There is no wide checkpoint, or the whole one; the next start clears what the killed one left."""
    transformers = pytest.importorskip("transformers")
    sizes = {"n_embd": 192, "n_head": 4, "n_layer": 4, "vocab_size": 4000, "n_positions": 64}
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).save_pretrained(tmp_path / "small")
    widen(tmp_path / "small", tmp_path / "whole")
    took = time.monotonic()
    widen(tmp_path / "small", tmp_path / "again")
    took = time.monotonic() - took
    out, kills = tmp_path / "wide", 0
    while kills < KILLS:
        process = PROCESSES.Process(target=widen, args=(tmp_path / "small", out))
        process.start()
        time.sleep(chance.uniform(0, 1.5 * took))
        if process.is_alive():
            os.kill(process.pid or 0, signal.SIGKILL)
        process.join(DEADLINE)
        kills += 1
        if out.exists():
            assert contents(out) == contents(tmp_path / "whole")
            shutil.rmtree(out)
    widen(tmp_path / "small", out)
    assert contents(out) == contents(tmp_path / "whole") == contents(tmp_path / "again")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "small", "whole", "wide"]


def contents(folder: Path) -> dict[str, bytes]:
    """All files of a folder but the model card."""
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir()) if p.is_file() and p.suffix != ".md"}
