"""The preset `transfer`: do the best learning rate and noise stay where they are as widths grow?

The paper's 'Verification of hyperparameter transfer': base models of several widths n are grown to k·n, with one
hyperparameter varied and the other fixed. Models grow as the recipe's do; without noise, as by fresh units, only the
learning rate is varied.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from mupscale.core import WholeWidth, Width
from mupscale.engine import Engine
from mupscale.growth import OPERATORS
from mupscale.study.contenders import COPIES
from mupscale.study.dry_run import describe_stages
from mupscale.study.paper import Protocol
from mupscale.study.settings import StudySettings
from mupscale.study.space import Cell, Space, check_learning_rates
from mupscale.study.systems import System
from mupscale.study.training import Note, Trainer
from mupscale.study.tree import Stretch
from mupscale.study.wording import count_of
from mupscale.system import MupscaleError, write_json, writes_into
from mupscale.train import Recipe

TRANSFER_FILE = "transfer-check.json"


@writes_into("out")
def transfer_check(
    recipe: Recipe,
    *,
    widths: Sequence[WholeWidth],
    lrs: Sequence[float],
    noises: Sequence[float] = (),
    lr: float,
    noise: float = 0.0,
    out: Path,
    seeds: int = 3,
    base_lr: float | None = None,
    engine: Engine = "auto",
    note: Note | None = None,
) -> dict[str, Any]:
    """Loss against learning rate at the fixed noise, and against noise at the fixed learning rate, at each width.

    The recipe's growth says how models grow, how many times wider they become, how long base models train and how long
    grown ones do. The result is also written to `out`; trials that are there already are not trained again.

    Args:
        recipe: a recipe with one growth event
        widths: base widths to compare, two or more
        lrs, noises: what is varied; lr, noise: what the other one is fixed at meanwhile. For growths that take no
            noise, leave noises and noise out
        base_lr: the base models' learning rate; none takes the optimizer's
        note: is told what is done, line by line; without one, nothing shows how far it is
    """
    asked = TransferCheck(recipe, widths, lrs, lr, noises, noise, seeds, base_lr)
    trainer = Trainer(asked.protocol, Path(out), "transfer", engine, note or (lambda text: None), stages=0)
    trainer.visible = note is not None
    large, lines, systems = asked.large, asked.lines, asked.systems
    values: dict[str, Any] = {
        "times": Width.of(large.wide).size / Width.of(large.narrow).size,
        "steps": large.grown_steps,
        "fixed": {"lr": lr, "noise": noise},
        "unit": large.noise_unit,
        "growth": asked.contender.how,
        "lr": [],
        "noise": [],
    }
    with trainer.alone():
        for system in systems:
            width, cells = Width.of(system.narrow), asked.cells
            with trainer.stage(f"base-{width.label}", f"width {width}: {count_of(seeds, 'base model')}"):
                if None in trainer.train([system.base_model(asked.base_rate, seed) for seed in range(seeds)]):
                    raise MupscaleError(
                        f"the base model of width {width} diverged at learning rate {asked.base_rate:g}: take a "
                        f"smaller one (--optimizer.lr)"
                    )
            about = f"width {system.label}: {count_of(len(cells), 'trial')} × {count_of(seeds, 'seed')}"
            with trainer.stage(f"trials-{width.label}", about):
                ends = iter(trainer.train(asked.trials(system), keep=False))
            losses = {cell: [next(ends) for _ in range(seeds)] for cell in cells}
            for axis, line in lines.items():
                points = [{"x": getattr(cell, axis), "losses": losses[cell]} for cell in line]
                values[axis].append({"width": system.wide, "from": system.narrow, "points": points})
        values["verdict"] = judge_transfer(values)
        write_json(Path(out) / TRANSFER_FILE, values)
    return values


@dataclass
class TransferCheck:
    """What `transfer_check` trains; its arguments are those of that function.

    lines: what is tried, with one hyperparameter varied and the other fixed. cells: all of it, each once.
    """

    recipe: Recipe
    widths: Sequence[WholeWidth]
    lrs: Sequence[float]
    lr: float
    noises: Sequence[float] = ()
    noise: float = 0.0
    seeds: int = 3
    base_lr: float | None = None

    def __post_init__(self) -> None:
        if self.seeds < 1:
            raise MupscaleError(f"seeds is {self.seeds}, but a transfer check needs at least 1")
        if not self.widths:
            raise MupscaleError("a transfer check needs base widths, two or more, such as [64, 128]")
        self.protocol = Protocol(self.recipe, "train")
        self.large = self.protocol.system(StudySettings())  # refuses recipes with more growth events than one, or none
        self.growth = self.recipe.grow[0]
        if not self.growth.takes_noise and (self.noise or any(self.noises)):
            raise MupscaleError(
                f"the recipe grows by {self.growth.words}, which take no noise: leave noises and noise out, or grow by "
                f"copies (how: copies)"
            )
        how = self.growth.how if self.growth.how in OPERATORS else COPIES.how
        self.contender = replace(COPIES, name=how, how=how)
        space = Space(tuple(self.lrs), (*self.noises, self.noise))  # which refuses values that cannot be
        check_learning_rates([self.lr])
        self.lines = {"lr": [Cell(x, float(self.noise)) for x in space.lrs]}
        if self.growth.takes_noise:
            self.lines["noise"] = [Cell(float(self.lr), x) for x in sorted({float(x) for x in self.noises})]
        self.cells = list(dict.fromkeys(cell for line in self.lines.values() for cell in line))
        self.systems = self.protocol.small_systems(self.large, self.widths, self.growth.build_operator())
        self.base_rate = float(self.recipe.optimizer.init_args["lr"] if self.base_lr is None else self.base_lr)

    def trials(self, system: System) -> list[Stretch]:
        """The grown models at a width: every cell with every seed."""
        return [
            system.leaf(self.contender, self.base_rate, *cell, seed)
            for cell in self.cells
            for seed in range(self.seeds)
        ]

    def describe(self, engine: Engine = "auto") -> str:
        """A table of what is trained at each width, its cost and time."""
        return describe_stages({one.label: self.trials(one) for one in self.systems}, self.protocol, engine)


# ---------------------------------------------------------------------------------------------- what it says


_MOST_EXTRA = 0.05  # of the loss: what transferring may cost for an optimum to be said to transfer


def what_was_measured(values: Mapping[str, Any]) -> str:
    """Which widths, and which losses, a check is about.

    >>> what_was_measured({"times": 4.0, "steps": 300, "growth": "fresh"})[:98]
    "Models grow by fresh units. Widths are those of the grown models, 4 times their base models'. Loss"
    """
    how = values.get("growth")
    by = "" if how is None else f"Models grow by {how}{'' if how == 'copies' else ' units'}. "
    times = f", {values['times']:g} times their base models'" if "times" in values else ""
    after = f" after {values['steps']:,} more steps" if "steps" in values else ""
    return f"{by}Widths are those of the grown models{times}. Losses are training losses{after}, and not held-out ones."


def judge_transfer(values: Mapping[str, Any]) -> list[str]:
    """What transferring the best learning rate and the best noise costs, and how far they move over the widths.

    Sentences, with what it costs first: an optimum may move by several grid steps where the loss hardly depends on it.
    """
    return [*_moves(values["lr"], "learning rate"), *_moves(values["noise"], "noise")]


@dataclass(frozen=True)
class WidthLine:
    """One width's losses by seed, at the values where no seed diverged; diverged: the other values.

    seeds: at every value, the losses of the seeds that did not diverge.
    """

    width: Any
    losses: dict[float, list[float]]
    diverged: list[float]
    seeds: dict[float, list[float]]

    def __str__(self) -> str:
        return str(Width.of(self.width))

    @property
    def best(self) -> float:
        """The value with the lowest mean."""
        return min(self.losses, key=self.loss)

    def loss(self, x: float) -> float:
        """The mean at a value."""
        return fmean(self.losses[x])

    def tells_apart(self, x: float) -> bool:
        """Whether every seed, with its own base model, does worse at x than at the best."""
        return x not in self.losses or all(a > b for a, b in zip(self.losses[x], self.losses[self.best], strict=True))


def read_width_line(entry: Mapping[str, Any]) -> WidthLine:
    """One line of a check, as it is stored."""
    points = {float(point["x"]): point["losses"] for point in sorted(entry["points"], key=lambda one: float(one["x"]))}
    diverged = [x for x, losses in points.items() if None in losses or not losses]
    seeds = {x: [loss for loss in losses if loss is not None] for x, losses in points.items()}
    return WidthLine(entry["width"], {x: some for x, some in seeds.items() if x not in diverged}, diverged, seeds)


def _moves(entries: Sequence[Mapping[str, Any]], what: str) -> list[str]:
    grid = sorted({float(point["x"]) for entry in entries for point in entry["points"]})
    if len(grid) < 2:
        return []
    lines = [read_width_line(entry) for entry in entries]
    said = [f"at width {line} every {what} tried diverged" for line in lines if not line.losses]
    lines = [line for line in lines if line.losses]
    if len(lines) < 2:
        return [*said, f"whether the best {what} transfers cannot be seen at {len(lines)} width(s): give two or more"]
    small, large, at = lines[0], lines[-1], [grid.index(line.best) for line in lines]
    # the optimum may lie beyond the grid; below no noise at all there is nothing
    on_edge = [line for line in lines if line.best == grid[-1] or 0 < line.best == grid[0]]
    moved, over = max(at) - min(at), f"over grown widths {small} … {large}"
    steps = [(grid[i], grid[i + 1]) for i in range(min(at), max(at))]
    ratios = {f"{after / before:.3g}" if before > 0 else "" for before, after in steps}
    ratio = f" (×{ratios.pop()}{' each' if moved > 1 else ''})" if len(ratios) == 1 and "" not in ratios else ""
    taken = f"taking the best {what} of width {small}, {small.best:.3g}, to width {large}"
    if moved and small.best == large.best:
        said.append(f"the best {what} of width {small}, {small.best:.3g}, is the best at width {large}, too")
    elif moved and small.best not in large.losses:
        said.append(f"{taken} diverges there")
    elif moved:
        said.append(f"{taken} costs {_extra_loss(small, large):.1%} of the loss there")
    if moved == 0:
        end = "whether it transfers cannot be seen on the edge" if on_edge else "it transfers"
        said.append(f"the best {what}, {small.best:.3g}, does not move {over}: {end}")
    elif moved == 1:
        end = "the optimum transfers"
        if on_edge:
            end = "whether it transfers cannot be seen on the edge"
        elif max(_extra_loss(small, line) for line in lines) > _MOST_EXTRA:
            end = f"the optimum does not transfer, since that costs more than {_MOST_EXTRA:.0%} of the loss"
        said.append(f"the best {what} moves by at most 1 grid step{ratio} {over}: {end}")
    else:
        path = ", ".join(f"{line.best:.3g} at {line}" for line in lines)
        apart = any(line.tells_apart(small.best) for line in lines)
        end = "the optimum does not transfer" if apart else "but not every seed agrees, so the optimum may transfer"
        said.append(f"the best {what} moves by {moved} grid steps{ratio} {over} ({path}): {end}")
    if on_edge:
        where = ", ".join(map(str, on_edge))
        said.append(f"the best {what} lies on the edge of the grid at width {where}: try a wider range")
    return said


def _extra_loss(small: WidthLine, large: WidthLine) -> float:
    """By how much of the lowest loss the small width's best value ends above it."""
    if small.best == large.best:
        return 0.0
    lowest = large.loss(large.best)
    return large.loss(small.best) / lowest - 1 if small.best in large.losses and lowest else math.inf
