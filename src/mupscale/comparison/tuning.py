"""Learning rates and noise, tuned at the smallest width.

One seed first. What lies far behind after the first budget goes no further. More seeds only where candidates are close.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from mupscale.comparison.contenders import CONTENDERS, Contender
from mupscale.comparison.results import Tried, TunedContender
from mupscale.comparison.stages import StageTrainer
from mupscale.comparison.system import Leg, System, TuningLegs
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
    trials = _Trials(system, trainer, base.lr)
    with trainer.stage("rates", f"learning rates and noise of the contenders, {label} → {Width.of(system.wide)}"):
        tuned = _try_values(trials, rates)
    with trainer.stage("close", "more seeds where candidates are close"):
        tuned = _settle(trials, tuned, seeds)
    return Tuning(base, tuned)


def _tune_base(system: System, trainer: StageTrainer, rates: Sequence[float]) -> TunedContender:
    trained = trainer.train([system.base_recipe(lr, 0) for lr in rates])
    alive = [lr for lr, loss in zip(rates, trained, strict=True) if loss is not None]
    decayed = dict(zip(alive, trainer.train([system.decayed_base(lr, 0) for lr in alive]), strict=True))
    return choose(_BASE, [Tried(lr, 0.0, [decayed.get(lr)]) for lr in rates])


class _Candidate(NamedTuple):
    """What a contender tries: one learning rate and noise, with one seed."""

    contender: Contender
    lr: float
    noise: float
    seed: int = 0


@dataclass(frozen=True)
class _Trials:
    """Trains candidates at the small width, from base models of one learning rate."""

    system: System
    trainer: StageTrainer
    base_lr: float

    def judge_early(self, candidates: Sequence[_Candidate]) -> dict[_Candidate, Tried]:
        """Those that go no further than the first budget, since they diverged or lie far behind."""
        stopped = self._start(candidates)
        firsts = [(one, first) for one in candidates if one not in stopped and (first := self._legs(one).first)]
        losses = dict(zip((one for one, _ in firsts), self._train(firsts), strict=True))
        for name in dict.fromkeys(one.contender.name for one in losses):
            own = [one for one in losses if one.contender.name == name]
            tried = [Tried(one.lr, one.noise, [losses[one]], self.system.settings.budgets[0]) for one in own]
            promising = list_promising(tried, self.system.settings.prune)
            stopped |= {one: cell for one, cell in zip(own, tried, strict=True) if cell not in promising}
        return stopped

    def finish(self, candidates: Sequence[_Candidate]) -> list[float | None]:
        """Final losses at the full budget; None: diverged. What has been trained of it already is read."""
        lost = self._start(candidates)
        alive = [one for one in candidates if one not in lost]
        losses = dict(zip(alive, self._train([(one, self._legs(one).rest) for one in alive]), strict=True))
        return [losses.get(one) for one in candidates]

    def _start(self, candidates: Sequence[_Candidate]) -> dict[_Candidate, Tried]:
        """Train the constant phase of the first budget, where there is one; those that diverge in it."""
        starts = [(one, start) for one in candidates if (start := self._legs(one).start) is not None]
        losses = self._train(starts)
        return {
            one: Tried(one.lr, one.noise, [None]) for (one, _), loss in zip(starts, losses, strict=True) if loss is None
        }

    def _train(self, legs: Sequence[tuple[_Candidate, Leg]]) -> list[float | None]:
        return self.trainer.train(
            [self.system.leg_recipe(one.contender, leg, self.base_lr, one.lr, one.noise, one.seed) for one, leg in legs]
        )

    def _legs(self, one: _Candidate) -> TuningLegs:
        return self.system.tuning_legs(one.contender)


def _try_values(trials: _Trials, rates: Sequence[float]) -> list[TunedContender]:
    settings = trials.system.settings
    candidates = [
        _Candidate(one, lr, noise)
        for one in asked_for(settings.contenders)
        if one.tuned_as is None
        for noise in (settings.noises if one.tunes_noise else [0.0])
        for lr in rates
    ]
    stopped = trials.judge_early(candidates)
    going_on = [one for one in candidates if one not in stopped]
    final = dict(zip(going_on, trials.finish(going_on), strict=True))
    tried: dict[str, list[Tried]] = {}
    for one in candidates:
        cell = stopped[one] if one in stopped else Tried(one.lr, one.noise, [final[one]])
        tried.setdefault(one.contender.name, []).append(cell)
    return [choose(name, cells) for name, cells in tried.items()]


def list_promising(tried: Sequence[Tried], margin: float) -> list[Tried]:
    """Those that may still win: within the margin of the best, or next to it in learning rate at its noise.

    The neighbours go on however far behind they are, so that the best one is known to lie between two others.

    >>> cells = [Tried(0.1, 0.0, [1.5]), Tried(0.2, 0.0, [1.3]), Tried(0.4, 0.0, [1.0]), Tried(0.8, 0.0, [1.02])]
    >>> [cell.lr for cell in list_promising(cells, 0.05)]
    [0.2, 0.4, 0.8]
    """
    means = {number: cell.mean for number, cell in enumerate(tried) if cell.mean is not None}
    if not means:
        return []
    best = min(means, key=lambda number: means[number])
    same_noise = [number for number, cell in enumerate(tried) if cell.noise == tried[best].noise]
    same_noise.sort(key=lambda number: tried[number].lr)
    place = same_noise.index(best)
    beside = same_noise[max(0, place - 1) : place + 2]
    limit = _limit(means[best], margin)
    return [tried[number] for number, mean in means.items() if mean <= limit or number in beside]


def _limit(lowest: float, margin: float) -> float:
    """The loss that lies so far behind the lowest, as a part of it."""
    return lowest + margin * abs(lowest)


def _settle(trials: _Trials, tuned: Sequence[TunedContender], seeds: int) -> list[TunedContender]:
    """Candidates within CLOSE of a contender's best get more seeds, and the best mean wins."""
    by_name = {one.name: one for one in CONTENDERS}
    close = {one.name: _close(one.tried) for one in tuned}
    more = [
        _Candidate(by_name[name], cell.lr, cell.noise, seed)
        for name, cells in close.items()
        for cell in cells
        for seed in range(1, seeds)
    ]
    trials.trainer.train([trials.system.base_recipe(trials.base_lr, seed) for seed in range(1, seeds)])
    losses = iter(trials.finish(more))
    settled = []
    for one in tuned:
        extra = {(cell.lr, cell.noise): [next(losses) for _ in range(1, seeds)] for cell in close[one.name]}
        tried = [replace(cell, losses=cell.losses + extra.get((cell.lr, cell.noise), [])) for cell in one.tried]
        settled.append(choose(one.name, tried, among=set(extra) or None))
    return settled


def _close(tried: Sequence[Tried]) -> list[Tried]:
    """The candidates that one seed cannot tell apart; none where the best stands alone."""
    finals = [(cell.final, cell) for cell in tried if cell.final is not None]
    if not finals:
        return []
    lowest = min(final for final, _ in finals)
    near = [cell for final, cell in finals if final <= _limit(lowest, CLOSE)]
    return near if len(near) > 1 else []


def choose(name: str, tried: Sequence[Tried], among: set[tuple[float, float]] | None = None) -> TunedContender:
    """The values with the lowest mean loss; next to divergence only if nothing as good is not.

    among: the cells that may be chosen, where only some have all seeds.

    >>> cells = [Tried(0.1, 0.0, [1.00, 1.04]), Tried(0.2, 0.0, [0.99, 1.03]), Tried(0.4, 0.0, [None])]
    >>> choose("fresh", cells).lr  # 0.2 is lower by less than the seeds differ, and 0.4 diverges
    0.1
    """
    means = {
        number: cell.final
        for number, cell in enumerate(tried)
        if cell.final is not None and (among is None or (cell.lr, cell.noise) in among)
    }
    if not means:
        raise MupscaleError(
            f"{name}: all {len(tried)} trials at the small width diverged, with learning rates from "
            f"{min(cell.lr for cell in tried):g} to {max(cell.lr for cell in tried):g}: give smaller ones "
            "(comparison.lrs; in an OwnLoop factors)"
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
