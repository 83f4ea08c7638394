"""Learning rates and noise, tuned at the smallest width: one seed first, more only where candidates are close."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mupscale.comparison.contenders import CONTENDERS, Contender
from mupscale.comparison.results import Tried, TunedContender
from mupscale.comparison.stages import StageTrainer
from mupscale.comparison.system import System
from mupscale.core import Width
from mupscale.system import MupscaleError

CLOSE = 0.01  # candidates within so much of the lowest loss are tried with more seeds
_BASE = "the base model"


@dataclass(frozen=True)
class Tuning:
    """What the small width told: the base model's learning rate, and the values of every contender."""

    base: TunedContender
    contenders: list[TunedContender]

    def of(self, contender: Contender) -> TunedContender:
        """The values of a contender, or of the one that it is tuned as."""
        wanted = contender.tuned_as or contender.name
        return next(one for one in self.contenders if one.name == wanted)


def asked_for(names: Sequence[str]) -> list[Contender]:
    """These contenders, in the registry's order."""
    return [one for one in CONTENDERS if one.name in names]


def tune_contenders(system: System, trainer: StageTrainer, seeds: int) -> Tuning:
    """Tune the base model's rate, then every contender's values from the base model that it gives."""
    settings = system.settings
    rates = settings.rates(float(system.recipe.optimizer.init_args["lr"]))
    label = Width.of(system.narrow)
    with trainer.stage("base-rates", f"the base model's learning rate, at width {label}"):
        base = _tune_base(system, trainer, rates)
    with trainer.stage("rates", f"learning rates and noise of the contenders, {label} → {Width.of(system.wide)}"):
        tuned = _try_values(system, trainer, base.lr, rates)
    with trainer.stage("close", "more seeds where candidates are close"):
        tuned = _settle(system, trainer, base.lr, tuned, seeds)
    return Tuning(base, tuned)


def _tune_base(system: System, trainer: StageTrainer, rates: Sequence[float]) -> TunedContender:
    trained = trainer.train([system.base_recipe(lr, 0) for lr in rates])
    alive = [lr for lr, loss in zip(rates, trained, strict=True) if loss is not None]
    decayed = dict(zip(alive, trainer.train([system.decayed_base(lr, 0) for lr in alive]), strict=True))
    return choose(_BASE, [Tried(lr, 0.0, [decayed.get(lr)]) for lr in rates])


def _try_values(system: System, trainer: StageTrainer, base_lr: float, rates: Sequence[float]) -> list[TunedContender]:
    contenders = [one for one in asked_for(system.settings.contenders) if one.tuned_as is None]
    cells = [
        (one, lr, noise)
        for one in contenders
        for noise in (system.settings.noises if one.tunes_noise else [0.0])
        for lr in rates
    ]
    losses = _train_cells(system, trainer, base_lr, [(one, lr, noise, 0) for one, lr, noise in cells])
    tried: dict[str, list[Tried]] = {}
    for (one, lr, noise), loss in zip(cells, losses, strict=True):
        tried.setdefault(one.name, []).append(Tried(lr, noise, [loss]))
    return [choose(name, some) for name, some in tried.items()]


def _train_cells(
    system: System, trainer: StageTrainer, base_lr: float, cells: Sequence[tuple[Contender, float, float, int]]
) -> list[float | None]:
    """Final losses at the full budget: contender, learning rate, noise and seed of each cell."""
    return trainer.train(
        [system.leg_recipe(one, system.whole_leg(one), base_lr, lr, noise, seed) for one, lr, noise, seed in cells]
    )


def _settle(
    system: System, trainer: StageTrainer, base_lr: float, tuned: Sequence[TunedContender], seeds: int
) -> list[TunedContender]:
    """Candidates within CLOSE of a contender's best get more seeds, and the best mean wins."""
    by_name = {one.name: one for one in CONTENDERS}
    close = {one.name: _close(one.tried) for one in tuned}
    more = [
        (by_name[name], cell.lr, cell.noise, seed)
        for name, cells in close.items()
        for cell in cells
        for seed in range(1, seeds)
    ]
    trainer.train([system.base_recipe(base_lr, seed) for seed in range(1, seeds)])
    losses = iter(_train_cells(system, trainer, base_lr, more))
    settled = []
    for one in tuned:
        extra = {(cell.lr, cell.noise): [next(losses) for _ in range(1, seeds)] for cell in close[one.name]}
        tried = [replace(cell, losses=cell.losses + extra.get((cell.lr, cell.noise), [])) for cell in one.tried]
        settled.append(choose(one.name, tried, among=set(extra) or None))
    return settled


def _close(tried: Sequence[Tried]) -> list[Tried]:
    """The candidates that one seed cannot tell apart; none where the best stands alone."""
    means = [(cell.mean, cell) for cell in tried if cell.mean is not None]
    if not means:
        return []
    lowest = min(mean for mean, _ in means)
    near = [cell for mean, cell in means if mean <= lowest * (1 + CLOSE)]
    return near if len(near) > 1 else []


def choose(name: str, tried: Sequence[Tried], among: set[tuple[float, float]] | None = None) -> TunedContender:
    """The values with the lowest mean loss; next to divergence only if nothing as good is not.

    among: the cells that may be chosen, where only some have all seeds.

    >>> cells = [Tried(0.1, 0.0, [1.00, 1.04]), Tried(0.2, 0.0, [0.99, 1.03]), Tried(0.4, 0.0, [None])]
    >>> choose("fresh", cells).lr  # 0.2 is lower by less than the seeds differ, and 0.4 diverges
    0.1
    """
    means = {
        number: cell.mean
        for number, cell in enumerate(tried)
        if cell.mean is not None and (among is None or (cell.lr, cell.noise) in among)
    }
    if not means:
        raise MupscaleError(
            f"{name}: all {len(tried)} trials at the small width diverged, with learning rates from "
            f"{min(cell.lr for cell in tried):g} to {max(cell.lr for cell in tried):g}: give smaller ones "
            f"(comparison.lrs)"
        )
    best = min(means, key=lambda number: means[number])
    remarks = []
    if _is_next_to_divergence(tried[best], tried):
        limit = means[best] + max(_spread(tried[number]) for number in means)
        safe = [n for n in means if means[n] <= limit and not _is_next_to_divergence(tried[n], tried)]
        if safe:
            best = min(safe, key=lambda number: means[number])
        else:
            remarks.append(f"{name}: the best learning rate, {tried[best].lr:g}, is the last before divergence")
    lr, rates = tried[best].lr, sorted({cell.lr for cell in tried})
    if len(rates) > 1 and lr in (rates[0], rates[-1]):
        side, word = ("lowest", "lower") if lr == rates[0] else ("highest", "higher")
        remarks.append(f"{name}: the best learning rate, {lr:g}, is the {side} tried; {word} ones may be better")
    return TunedContender(name, lr, tried[best].noise, list(tried), remarks)


def _spread(cell: Tried) -> float:
    """How far its seeds lie apart."""
    finite = [loss for loss in cell.losses if loss is not None]
    return max(finite) - min(finite) if finite else 0.0


def _is_next_to_divergence(cell: Tried, tried: Sequence[Tried]) -> bool:
    """Whether the next larger learning rate at the same noise diverged."""
    larger = [other for other in tried if other.noise == cell.noise and other.lr > cell.lr]
    return bool(larger) and min(larger, key=lambda other: other.lr).mean is None
