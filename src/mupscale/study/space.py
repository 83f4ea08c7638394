"""What a sweep searches, learning rates and noise levels with zero always among them, and what it found.

Beside the optimum there is more to know: edges of the grid, divergence, zero noise, lost trials.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean
from typing import Annotated, Any, Literal, NamedTuple

from mupscale.data import Data
from mupscale.system import (
    NOT_EMPTY,
    Diverged,
    Finite,
    MupscaleError,
    Must,
    NotNegative,
    Positive,
    checks_arguments,
    recipe_entry,
)
from mupscale.train import MAY_CHANGE, Recipe


class Cell(NamedTuple):
    """One choice of hyperparameters; of a space whose second quantity is not the noise, that stands in its place."""

    lr: float
    noise: float


@checks_arguments
@dataclass(frozen=True)
class Space:
    """A grid of learning rates × noise levels, both in ascending order; or × factors of the embeddings' rate.

    Noise levels beside 0 are what Sweep 2 searches; 0 itself is always one of them, since it is training on without
    upscaling (the paper's 'Equivalence at zero noise'). A space with 0 alone is one of learning rates: Sweep 1.
    second: "embeddings" where `noises` are values of RuleSet.embeddings instead, all above 0.

    >>> from mupscale.study import Space
    >>> space = Space(lrs=(0.2, 0.1), noises=(1.0,))
    >>> space.noises
    (0.0, 1.0)
    >>> space.cells[0]
    Cell(lr=0.1, noise=0.0)
    """

    lrs: Annotated[tuple[Positive, ...], Must("one learning rate or more", bool)]
    noises: tuple[NotNegative, ...] = (0.0,)
    second: Literal["noise", "embeddings"] = "noise"

    def __post_init__(self) -> None:
        if not self.has_noise and (not self.noises or 0 in self.noises):
            raise MupscaleError("a sweep needs at least one factor of the embeddings' rate, and all of them above 0")
        zero = (0.0,) if self.has_noise else ()
        for name, values in (("lrs", self.lrs), ("noises", (*zero, *self.noises))):
            object.__setattr__(self, name, tuple(sorted({float(value) for value in values})))

    @property
    def has_noise(self) -> bool:
        """Whether the second quantity is the noise."""
        return self.second == "noise"

    @property
    def cells(self) -> list[Cell]:
        """Every cell of the grid, noise by noise."""
        return [Cell(lr, noise) for noise in self.noises for lr in self.lrs]


@dataclass(frozen=True)
class SweepJob:
    """What is swept: a space, and the recipes (one for each of the sweep's seeds) that a cell of it stands for.

    name: the sweep's. width: at which trials train. start: the width they are upscaled from, None from scratch.
    measure: whose loss is minimised. trials: how many random and tpe take. data: the recipes' own, where it is loaded
    already. key: what tells its study from others of the same name in a storage.
    """

    name: str
    width: Any
    start: Any
    space: Space
    recipes: Callable[[Cell], list[Recipe]]
    steps: int
    measure: Literal["train", "held-out"] = "train"
    sampler: Literal["grid", "random", "tpe"] = "grid"
    trials: int | None = None
    pruner: Literal["none", "median", "halving"] = "none"
    engine: Literal["auto", "vectorised", "serial"] = "auto"
    seed: int = 0
    data: Data | None = None
    key: str = ""

    @property
    def study_name(self) -> str:
        """What the storage calls it."""
        return f"{self.name}-{self.key}" if self.key else self.name

    def description(self) -> dict[str, Any]:
        """What a study of this name must agree in; folders may lie elsewhere."""
        recipes = self.recipes(self.space.cells[-1])
        free = {*MAY_CHANGE, "from", "noise", "seeds", "grow", "steps"}
        recipe = {name: value for name, value in recipes[0].to_json().items() if name not in free}
        recipe["optimizer"]["init_args"].pop("lr", None)
        searched = {"lrs": self.space.lrs, "noises": self.space.noises, "steps": self.steps, "measure": self.measure}
        seeds = [asdict(one.seeds) for one in recipes]
        if not self.space.has_noise:
            searched["second"] = self.space.second
        return {**searched, "width": self.width, "start": self.start, "recipe": recipe, "seeds": seeds}


# ------------------------------------------------------------------------------------------------ what it found


class BySeed:
    """What has a loss for each seed (None: diverged)."""

    losses: list[float | None]

    @property
    def finite(self) -> list[float]:
        """The losses of the seeds that did not diverge."""
        return [loss for loss in self.losses if loss is not None]

    @property
    def mean(self) -> float | None:
        """Over the seeds; None if one of them diverged."""
        return fmean(self.finite) if len(self.finite) == len(self.losses) else None


@dataclass(frozen=True)
class Tried(BySeed):
    """A learning rate and a noise that were tried, with the loss of each seed (None: diverged).

    budget: the part of the full budget after which these losses are; below 1 it was stopped there, far behind.
    curve: steps and the mean loss there. steps: how far it came. cost: of all seeds.
    """

    lr: Positive
    noise: Finite
    losses: Annotated[list[Finite | None], NOT_EMPTY]
    budget: Positive = 1.0
    curve: list[tuple[int, float]] = field(default_factory=list)
    steps: int = 0
    cost: Finite = 0.0

    @property
    def cell(self) -> Cell:
        """Its hyperparameters."""
        return Cell(self.lr, self.noise)

    @property
    def status(self) -> Literal["finished", "stopped", "diverged"]:
        """How it ended."""
        return "diverged" if self.mean is None else "stopped" if self.budget < 1 else "finished"

    @property
    def loss(self) -> float | None:
        """The mean at the full budget; None where it diverged or was stopped."""
        return self.mean if self.budget == 1 else None

    @property
    def spread(self) -> float:
        """Largest minus smallest loss over seeds; 0 for one seed."""
        return max(self.finite) - min(self.finite) if self.finite else 0.0


@dataclass(frozen=True)
class Sweep:
    """All that was tried in a sweep, or for a contender, and the values that are taken from it.

    name: sweep-1-width-64, sweep-2-width-64 …, or the contender's. width: at which trials train. start: the width they
    are upscaled from, None if they train from scratch. space: what was searched; the grid of its trials where it is not
    told. lr, noise: what was chosen, where that is not the lowest loss. remarks: sentences about it. label: what it is
    called, where that is not its name. measure: whose loss was minimised, training or held-out. seconds: of training.
    second: what is called noise here, where it is something else.

    >>> from mupscale.study import Space, Sweep, Tried
    >>> trials = [Tried(lr, 0.0, [loss]) for lr, loss in {0.1: 1.5, 0.2: 1.2, 0.4: None}.items()]
    >>> Sweep("sweep-1-width-64", trials, width=64).best.lr
    0.2
    """

    name: str
    trials: Annotated[list[Tried], NOT_EMPTY]
    width: Any = None
    start: Any = None
    space: Space | None = None
    lr: Positive | None = None
    noise: Finite | None = None
    remarks: list[str] = field(default_factory=list)
    label: str = ""
    measure: str = "held-out"
    sampler: str = "grid"
    seconds: Finite = 0.0
    second: str = "noise"

    @property
    def grid(self) -> Space:
        """What was searched."""
        return self.space or Space(tuple(one.lr for one in self.trials), tuple(one.noise for one in self.trials))

    @property
    def finished(self) -> list[tuple[float, Tried]]:
        """The trials that came to their end with their losses, the best first."""
        ended = [(trial.loss, trial) for trial in self.trials if trial.loss is not None]
        return sorted(ended, key=lambda one: (one[0], one[1].noise, one[1].lr))

    @property
    def best(self) -> Tried:
        """The trial that was chosen, which is the one with the lowest loss unless told; an error if none finished."""
        ended = [trial for _, trial in self.finished]
        if ended:
            return next((trial for trial in ended if trial.cell == (self.lr, self.noise)), ended[0])
        counts, lowest = Counter(trial.status for trial in self.trials), f"{min(self.grid.lrs):g}"
        if counts["stopped"]:
            raise MupscaleError(
                f"{self.name}: no trial finished ({counts['diverged']} diverged, {counts['stopped']} were "
                f"pruned), so there is nothing to choose: try rates below {lowest}, or no pruner"
            )
        raise Diverged(
            f"{self.name}: all {len(self.trials)} trials diverged, so there is nothing to choose: try learning "
            f"rates below {lowest}"
        )

    @property
    def best_without_noise(self) -> Tried | None:
        """The trial with the lowest loss among those that go on without new capacity; None where none finished."""
        return next((trial for _, trial in self.finished if trial.noise == 0), None)

    @property
    def flops(self) -> float:
        """Training FLOPs of all trials."""
        return math.fsum(trial.cost for trial in self.trials)

    def at(self, cell: Cell) -> Tried | None:
        """The trial of a cell, if it was trained."""
        return next((trial for trial in self.trials if trial.cell == cell), None)


# ------------------------------------------------------------------------------------------------ what to know of it

CLOSE = 0.01
"""A loss within this part of another is close to it, where one seed alone cannot tell the spread."""


def sweep_remarks(sweep: Sweep) -> list[str]:
    """What a person should know before they trust the optimum: sentences, those that matter most first."""
    ends = {"diverged": "diverged", "stopped": "stopped early by pruning"}
    counts = {how: sum(trial.status == status for trial in sweep.trials) for status, how in ends.items()}
    lost = [f"{count} of {len(sweep.trials)} trials {how}" for how, count in counts.items() if count]
    return [*(_remarks_on_best(sweep) if sweep.finished else ()), *lost]


def _remarks_on_best(sweep: Sweep) -> Iterator[str]:
    """Zero noise, divergence beside the optimum, edges of the grid."""
    loss, best = sweep.finished[0]
    zeros = [one for one in sweep.finished if one[1].noise == 0]
    # whether noise, and with it upscaling, pays at all: zero noise is training on (Equivalence at zero noise)
    if len(sweep.grid.noises) > 1 and zeros:
        zero_loss, zero = zeros[0]
        gap, spread = zero_loss - loss, max(zero.spread, best.spread)
        losses = f"the best trial without noise reaches {zero_loss:.4g}, the best with noise {loss:.4g}"
        if zero is best:
            yield "the sweep selects zero noise: upscaling does not pay here: training on without new capacity is best"
        elif len(best.losses) > 1 and gap <= spread:
            yield f"{losses}, which is within the spread between seeds ({spread:.2g}): noise may not pay here"
        elif len(best.losses) == 1 and gap < CLOSE * abs(loss):
            yield (
                f"{losses}, {gap / abs(loss):.1%} apart; with one seed the spread between seeds is unknown, so "
                f"noise may not pay here: try small_seeds 3"
            )

    def describe(trial: Tried) -> str:
        noise = f" and {sweep.second} {trial.noise:.3g}" if len(sweep.grid.noises) > 1 else ""
        return f"learning rate {trial.lr:.3g}{noise}"

    # a grid step away from a trial that diverged: another seed, or a wider model, may diverge at the optimum, too
    if (beyond := _diverged_beside(sweep, sweep.best)) is not None:
        safe = [(loss, trial) for loss, trial in sweep.finished if not _diverged_beside(sweep, trial)]
        other = f"; the best that is not, {describe(safe[0][1])}, has {safe[0][0]:.4g}" if safe else ""
        yield (
            f"the best trial is close to one that diverged ({describe(beyond)}): with other seeds or widths it may, "
            f"too{other}"
        )
    yield from _edge_remarks(sweep)
    # the same of the best trial without noise, whose learning rate baselines have; where losses are not flat there
    if zeros and zeros[0][1].lr != sweep.best.lr:
        zero_loss, zero = zeros[0]
        others = [other for other, trial in zeros if trial.lr != zero.lr]
        if not others or min(others) - zero_loss >= CLOSE * abs(zero_loss):
            alone = replace(sweep, trials=[zero], space=Space(sweep.grid.lrs))
            yield from (f"without noise, {remark}" for remark in _edge_remarks(alone))


def _diverged_beside(sweep: Sweep, trial: Tried) -> Tried | None:
    """A diverged trial with a larger learning rate, up to a grid step, or, if it has noise, with more noise."""
    space = sweep.grid
    lr, noise = _nearest(space.lrs, trial.lr), _nearest(space.noises, trial.noise)
    steps = {(0, 0), (1, 0), (0, 1)} if trial.noise else {(0, 0), (1, 0)}
    for other in sweep.trials:
        step = _nearest(space.lrs, other.lr) - lr, _nearest(space.noises, other.noise) - noise
        if other.status == "diverged" and step in steps and other.lr >= trial.lr and other.noise >= trial.noise:
            return other
    return None


class _Edge(NamedTuple):
    """An optimum on the edge of the grid, which goes on there in this ratio."""

    what: str
    best: float
    which: str
    edge: float
    ratio: float
    tried: tuple[float, ...]

    @property
    def where(self) -> str:
        """What the optimum is among the values that were tried."""
        by = f"is the {self.which} tried"
        return by if self.best == self.edge else f"lies next to {self.edge:.3g}, the {self.which} tried"

    def beyond(self, first: int = 1) -> list[float]:
        """The two values to try next; with 0 the edge before them."""
        return [self.edge * self.ratio**i for i in range(first, 3)]


def _listed(values: Iterable[float]) -> str:
    return ", ".join(f"{value:.3g}" for value in sorted(values))


def _edge_remarks(sweep: Sweep) -> Iterator[str]:
    """The optimum on the edge of the grid, and the range to try next."""
    for one in _edges(sweep):
        yield f"the best {one.what}, {one.best:.3g}, {one.where}: try {_listed(one.beyond(0))}"


def joined_edges(sweeps: Iterable[Sweep], lrs: str = "study.lrs", noises: str = "study.noises") -> list[str]:
    """The same of several sweeps over one grid: a sentence for all learning rates, and one for all noise levels.

    lrs, noises: the settings that hold the grid.
    """
    found, told = [(sweep.name, edge) for sweep in sweeps for edge in _edges(sweep)], []
    for what, setting in {"learning rate": lrs, "noise": noises}.items():
        edges = dict[_Edge, list[str]]()
        for name, edge in found:
            if edge.what == what:
                edges.setdefault(edge, []).append(name)
        if edges:
            whose = "; ".join(f"{', '.join(names)}: {edge.best:.3g} {edge.where}" for edge, names in edges.items())
            whole = _listed({value for edge in edges for value in (*edge.tried, *edge.beyond())})
            told.append(
                f"the best {what} is at the edge of the grid ({whose}): set {recipe_entry(setting)} to [{whole}]"
            )
    return told


def _edges(sweep: Sweep) -> Iterator[_Edge]:
    best, has_zero = sweep.best, any(trial.noise == 0 for trial in sweep.trials)  # which a space always has
    noises = [noise for noise in sweep.grid.noises if noise or has_zero]
    for what, value, tried in (("learning rate", best.lr, sweep.grid.lrs), (sweep.second, best.noise, noises)):
        at = _nearest(tried, value)
        if len(tried) > 1 and at == 0 < tried[0]:  # below no noise there is nothing
            yield _Edge(what, value, "smallest", tried[0], tried[0] / tried[1], tuple(tried))
        if len(tried) > 1 and at == len(tried) - 1:
            ratio = tried[-1] / tried[-2] if tried[-2] else 2.0
            yield _Edge(what, value, "largest", tried[-1], ratio, tuple(tried))


def _nearest(values: Sequence[float], value: float) -> int:
    """The index of the grid's value that is nearest: samplers other than the grid's leave it."""
    return min(range(len(values)), key=lambda index: abs(values[index] - value))
