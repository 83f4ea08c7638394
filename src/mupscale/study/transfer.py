"""The preset `transfer`: do the best learning rate and noise stay where they are as widths grow?

The paper's 'Verification of hyperparameter transfer': base models of several widths n are grown to k·n, with one
hyperparameter varied and the other fixed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from mupscale.core import WholeWidth, Width
from mupscale.engine import Engine
from mupscale.study.paper import Protocol
from mupscale.study.training import Note, Trainer
from mupscale.study.tree import Stretch
from mupscale.sweep import Cell, Space, check_learning_rates
from mupscale.system import MupscaleError, write_json, writes_into
from mupscale.train import Recipe

FILE = "transfer-check.json"


@writes_into("out")
def transfer_check(
    recipe: Recipe,
    *,
    widths: Sequence[WholeWidth],
    lrs: Sequence[float],
    noises: Sequence[float],
    lr: float,
    noise: float,
    out: Path,
    seeds: int = 3,
    base_lr: float | None = None,
    engine: Engine = "auto",
    note: Note | None = None,
) -> dict[str, Any]:
    """Loss against learning rate at the fixed noise, and against noise at the fixed learning rate, at each width.

    The recipe's growth says how many times wider models become, how long base models train and how long grown ones
    do. The result is also written to `out`; trials that are there already are not trained again.

    Args:
        recipe: a recipe with one growth event
        widths: base widths to compare, two or more
        lrs, noises: what is varied; lr, noise: what the other one is fixed at meanwhile
        base_lr: the base models' learning rate; none takes the optimizer's
        note: is told what is done, line by line; without one, nothing shows how far it is

    >>> from mupscale.train import Growth, Recipe, Spec
    >>> recipe = Recipe(
    ...     model=Spec("mupscale.models.MLP", {"d_in": 54, "d_out": 7}),
    ...     data=Spec("mupscale.data.CoverTypeSample"),
    ...     optimizer=Spec("torch.optim.SGD", {"lr": 0.1}),
    ...     width=8, base=4, steps=12, batch=10, grow=[Growth(at=4, width=16, how="copies")],
    ... )
    >>> transfer_check(recipe, widths=[], lrs=[0.05, 0.1], noises=[0.3], lr=0.05, noise=0.3, out=Path("runs/check"))
    Traceback (most recent call last):
    mupscale.system.errors.MupscaleError: a transfer check needs base widths, two or more, such as [64, 128]
    """
    protocol = Protocol(recipe, "train")
    if seeds < 1:
        raise MupscaleError(f"seeds is {seeds}, but a transfer check needs at least 1")
    if not widths:
        raise MupscaleError("a transfer check needs base widths, two or more, such as [64, 128]")
    lines = _cells_by_axis(lrs, noises, lr, noise)
    for width in widths:
        protocol.check_small(width)
    rate = float(recipe.optimizer.init_args["lr"] if base_lr is None else base_lr)
    trainer = Trainer(protocol, Path(out), "transfer", engine, note or (lambda text: None), stages=0)
    trainer.visible = note is not None
    values: dict[str, Any] = {
        "times": Width.of(protocol.wide).size / Width.of(recipe.width).size,
        "steps": protocol.wide_steps,
        "fixed": {"lr": lr, "noise": noise},
        "unit": protocol.growth.unit,
        **{axis: [] for axis in lines},
    }
    with trainer.alone():
        for width in sorted(widths, key=lambda width: Width.of(width).size):
            bases = [protocol.small(width, rate, seed) for seed in range(seeds)]
            losses = _train_width(trainer, bases, list(dict.fromkeys(cell for line in lines.values() for cell in line)))
            for axis, line in lines.items():
                points = [{"x": getattr(cell, axis), "losses": losses[cell]} for cell in line]
                values[axis].append({"width": protocol.upscaled_width(width), "from": width, "points": points})
        values["verdict"] = judge_transfer(values)
        write_json(Path(out) / FILE, values)
    return values


def _cells_by_axis(lrs: Sequence[float], noises: Sequence[float], lr: float, noise: float) -> dict[str, list[Cell]]:
    """What is tried, with one hyperparameter varied and the other fixed; a space refuses values that cannot be."""
    space = Space(tuple(lrs), (*noises, noise))
    check_learning_rates([lr])
    return {
        "lr": [Cell(x, float(noise)) for x in space.lrs],
        "noise": [Cell(float(lr), x) for x in sorted({float(x) for x in noises})],
    }


def _train_width(trainer: Trainer, bases: Sequence[Stretch], cells: Sequence[Cell]) -> dict[Cell, list[float | None]]:
    """The final training losses of each cell by seed; None for those that diverged."""
    protocol, width = trainer.ground, Width.of(bases[0].width)
    assert isinstance(protocol, Protocol)
    with trainer.stage(f"base-{width.label}", f"width {width}: {_count(len(bases), 'base model')}"):
        if None in trainer.train(bases):
            raise MupscaleError(
                f"the base model of width {width} diverged at learning rate {bases[0].lr:g}: take a smaller one "
                f"(--optimizer.lr)"
            )
    wide = Width.of(protocol.upscaled_width(bases[0].width))
    about = f"width {width} → {wide}: {_count(len(cells), 'trial')} × {_count(len(bases), 'seed')}"
    with trainer.stage(f"trials-{width.label}", about):
        trials = [protocol.trial(base, cell) for cell in cells for base in bases]
        losses = iter(trainer.train(trials, keep=False))
        return {cell: [next(losses) for _ in bases] for cell in cells}


def _count(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


# ---------------------------------------------------------------------------------------------- what it says


def judge_transfer(values: Mapping[str, Any]) -> list[str]:
    """What transferring the best learning rate and the best noise costs, and how far they move over the widths.

    Sentences, with what it costs first: an optimum may move by several grid steps where the loss hardly depends on it.

    >>> def line(width: int, losses: list[float]) -> dict[str, Any]:
    ...     points = [{"x": x, "losses": [loss]} for x, loss in zip((0.1, 0.2, 0.4), losses)]
    ...     return {"width": width, "points": points}
    >>> judge_transfer({"lr": [line(64, [3.0, 1.0, 2.0]), line(128, [3.0, 0.9, 2.0])], "noise": []})
    ['the best learning rate, 0.2, does not move over widths 64 … 128: it transfers']
    """
    return [*_moves(values["lr"], "learning rate"), *_moves(values["noise"], "noise")]


@dataclass(frozen=True)
class WidthLine:
    """One width's losses by seed, at the values where no seed diverged."""

    width: str
    losses: dict[float, list[float]]

    @property
    def best(self) -> float:
        return min(self.losses, key=lambda x: fmean(self.losses[x]))

    def loss(self, x: float) -> float:
        return fmean(self.losses[x])

    def tells_apart(self, x: float) -> bool:
        """Whether every seed, with its own base model, does worse at x than at the best."""
        return x not in self.losses or all(a > b for a, b in zip(self.losses[x], self.losses[self.best], strict=True))


def _moves(entries: Sequence[Mapping[str, Any]], what: str) -> list[str]:
    grid = sorted({float(point["x"]) for entry in entries for point in entry["points"]})
    if len(grid) < 2:
        return []
    lines = [read_width_line(entry) for entry in entries]
    lost = [f"at width {line.width} every {what} tried diverged" for line in lines if not line.losses]
    lines = [line for line in lines if line.losses]
    if len(lines) < 2:
        return [
            *lost,
            f"whether the best {what} transfers cannot be seen at {len(lines)} width(s): give two or more",
        ]
    at = [grid.index(line.best) for line in lines]
    moved = max(at) - min(at)
    over = f"over widths {lines[0].width} … {lines[-1].width}"
    if moved == 0:
        end = "whether it transfers cannot be seen on the edge" if _on_edge(lines[0], grid) else "it transfers"
        movement = f"the best {what}, {grid[at[0]]:.3g}, does not move {over}: {end}"
    elif moved == 1:
        movement = f"the best {what} moves by at most 1 grid step{_ratio(grid, at)} {over}: the optimum transfers"
    else:
        path = ", ".join(f"{line.best:.3g} at {line.width}" for line in lines)
        apart = any(line.tells_apart(lines[0].best) for line in lines)
        end = "the optimum does not transfer" if apart else "but not every seed agrees, so the optimum may transfer"
        movement = f"the best {what} moves by {moved} grid steps{_ratio(grid, at)} {over} ({path}): {end}"
    price = _price(lines[0], lines[-1], what) if moved else []
    return [*lost, *price, movement, *_edges(lines, grid, what)]


def _price(small: WidthLine, large: WidthLine, what: str) -> list[str]:
    """What transferring from the smallest width costs at the largest."""
    if small.best == large.best:
        return [f"the best {what} of width {small.width}, {small.best:.3g}, is the best at width {large.width}, too"]
    taken = f"taking the best {what} of width {small.width}, {small.best:.3g}, to width {large.width}"
    if small.best not in large.losses:
        return [f"{taken} diverges there"]
    more = large.loss(small.best) / large.loss(large.best) - 1 if large.loss(large.best) else math.inf
    return [f"{taken} costs {more:.1%} of the loss there"]


def _edges(lines: Sequence[WidthLine], grid: Sequence[float], what: str) -> list[str]:
    where = [line.width for line in lines if _on_edge(line, grid)]
    if not where:
        return []
    return [f"the best {what} lies on the edge of the grid at width {', '.join(where)}: try a wider range"]


def _on_edge(line: WidthLine, grid: Sequence[float]) -> bool:
    """The optimum may lie beyond the grid; below no noise at all there is nothing."""
    return line.best == grid[-1] or 0 < line.best == grid[0]


def read_width_line(entry: Mapping[str, Any]) -> WidthLine:
    """A width's line, without the values at which a seed diverged.

    >>> entry = {"width": 64, "points": [{"x": 0.1, "losses": [1.0, 1.5]}, {"x": 0.2, "losses": [0.5, None]}]}
    >>> line = read_width_line(entry)
    >>> line.best, line.loss(0.1), sorted(line.losses)
    (0.1, 1.25, [0.1])
    """
    points = {float(point["x"]): list(point["losses"]) for point in entry["points"]}
    sound = {x: losses for x, losses in points.items() if losses and None not in losses}
    return WidthLine(str(Width.of(entry["width"])), sound)


def _ratio(grid: Sequence[float], at: Sequence[int]) -> str:
    """The factor of a grid step, where all those that the optimum moved over have the same."""
    steps = [(grid[i], grid[i + 1]) for i in range(min(at), max(at))]
    ratios = {f"{after / before:.3g}" for before, after in steps if before > 0}
    uniform = len(ratios) == 1 and all(before > 0 for before, _ in steps)
    return f" (×{ratios.pop()}{' each' if len(steps) > 1 else ''})" if uniform else ""
