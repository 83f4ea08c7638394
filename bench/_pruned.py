"""Pruned search against the whole grid: FLOPs of each, and where each finds its optimum.

Sweep 2 of the paper's MLP on the sample of Forest CoverType that ships with the package, from width 64 to 128.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

from mupscale.engine.many_runs import train_many
from mupscale.study import SweepJob, run_sweep
from mupscale.study.space import Cell, Space, Sweep, Tried
from mupscale.train import Checkpoints, Evaluation, Recipe, Seeds, Spec

SPACE = Space((0.001, 0.002, 0.004, 0.008, 0.016), (0.0, 1.0, 2.0, 4.0, 8.0, 16.0))
PRUNERS = ("halving", "median")
TARGETS = {"halving": "  (targets: ≤ 0.333 of the FLOPs, ≤ 1 step, ≤ +1 %)"}


def pruned_search(device: str = "auto", base_steps: int = 1000, steps: int = 1500, seed: int = 0) -> None:
    """Print what pruning saves, and what it costs."""
    with tempfile.TemporaryDirectory() as folder:
        base = _base(Path(folder), device, base_steps, seed)
        train_many([base])
        grid = _sweep(base, steps, "none", folder)
        best = grid.best
        print(f"seed {seed}, grid of {len(grid.trials)} trials: {grid.flops:.3g} FLOPs, best {_shown(grid)}")
        for pruner in PRUNERS:
            found = _sweep(base, steps, pruner, folder)
            away = grid_distance(found.best, best)
            more = (found.best.loss or 0.0) / (best.loss or 1.0) - 1
            cost = found.flops / grid.flops
            print(f"{pruner}: {found.flops:.3g} FLOPs, {cost:.3f} of the grid's, best {_shown(found)}")
            print(f"  {away} grid steps from the grid's optimum, loss {more:+.2%}{TARGETS.get(pruner, '')}")


def _base(folder: Path, device: str, steps: int, seed: int) -> Recipe:
    return Recipe(
        Spec("mupscale.models.MLP", {"d_in": 54, "d_out": 7}),
        Spec("mupscale.data.CoverTypeSample"),
        Spec("torch.optim.AdamW", {"lr": 0.008, "weight_decay": 0.01}),
        width=64,
        base=64,
        steps=steps,
        batch=200,
        clip=1.0,
        evaluation=Evaluation(every=0),
        checkpoints=Checkpoints(every=0),
        device=device,
        seeds=Seeds(init=seed, data=seed),
        out=str(folder / "base"),
    )


def _sweep(base: Recipe, steps: int, pruner: str, folder: str) -> Sweep:
    def recipes(cell: Cell) -> list[Recipe]:
        optimizer = Spec(base.optimizer.class_path, {**base.optimizer.init_args, "lr": cell.lr})
        wide = replace(base, width=128, start=base.out, out=None, noise=cell.noise, optimizer=optimizer, steps=steps)
        return [replace(wide, seeds=Seeds(data=1 + base.seeds.data, noise=1 + base.seeds.data))]

    task = SweepJob(f"sweep-2-{pruner}", 128, 64, SPACE, recipes, steps, pruner=pruner)  # type: ignore[arg-type]
    return run_sweep(task, f"{folder}/study.db")


def grid_distance(one: Tried, other: Tried) -> int:
    """Grid steps between two cells: the larger of those in learning rate and in noise."""
    rates = SPACE.lrs.index(one.lr) - SPACE.lrs.index(other.lr)
    noises = SPACE.noises.index(one.noise) - SPACE.noises.index(other.noise)
    return max(abs(rates), abs(noises))


def _shown(found: Sweep) -> str:
    return f"lr {found.best.lr:g}, noise {found.best.noise:g}, loss {found.best.loss:.4f}"


if __name__ == "__main__":
    pruned_search()
