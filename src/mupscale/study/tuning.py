"""Learning rates and noise, tuned at the smallest width.

One seed first. What lies far behind after the first budget goes no further. More seeds only where candidates are close.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from mupscale.core import Width
from mupscale.study.contenders import BASE, Contender, contender_named, contenders_named
from mupscale.study.results import Tuning
from mupscale.study.systems import System
from mupscale.study.training import Trainer
from mupscale.study.tree import Candidate
from mupscale.sweep import Sweep, Tried
from mupscale.system import MupscaleError

CLOSE = 0.01  # candidates within so much of the lowest loss are tried with more seeds


def tune_contenders(system: System, trainer: Trainer, lr: float) -> Tuning:
    """Tune the base model's rate, then every contender's values from the base model that it gives. lr: the recipe's."""
    rates, label = system.settings.rates(lr), Width.of(system.narrow)
    with trainer.stage("base-rates", f"the base model's learning rate, at width {label}"):
        losses = trainer.train([system.decayed_base(rate, 0) for rate in rates])
        tried = [Tried(rate, 0.0, [loss]) for rate, loss in zip(rates, losses, strict=True)]
        base = replace(choose("the base model", tried), name=BASE.name)
    trials = ValueTrials(system, trainer, base.best.lr)
    with trainer.stage("rates", f"learning rates and noise of the contenders, {system.label}"):
        tuned = try_values(trials, rates, contenders_named(system.settings.contenders))
    with trainer.stage("close", "more seeds where candidates are close"):
        tuned = _settle(trials, tuned, system.settings.small_seeds)
    return Tuning(base, tuned)


class _Values(NamedTuple):
    """What a contender tries: one learning rate and noise, with one seed."""

    contender: Contender
    lr: float
    noise: float
    seed: int = 0


@dataclass(frozen=True)
class ValueTrials:
    """Trains candidates at the small width, from base models of one learning rate."""

    system: System
    trainer: Trainer
    base_lr: float

    def judge_early(self, tried: Sequence[_Values]) -> dict[_Values, Tried]:
        """Those that go no further than the first budget, since they diverged or lie far behind."""
        early = {one: leaf for one in tried if (leaf := self._candidate(one).early) is not None}
        losses = dict(zip(early, self.trainer.train(list(early.values())), strict=True))
        stopped: dict[_Values, Tried] = {}
        for name in dict.fromkeys(one.contender.name for one in losses):
            own = [one for one in losses if one.contender.name == name]
            cells = [Tried(one.lr, one.noise, [losses[one]], self.system.settings.budgets[0]) for one in own]
            promising = list_promising(cells, self.system.settings.prune)
            for one, cell in zip(own, cells, strict=True):
                if cell.mean is None:
                    stopped[one] = Tried(one.lr, one.noise, [None])
                elif cell not in promising:
                    stopped[one] = cell
        return stopped

    def finish(self, tried: Sequence[_Values]) -> list[float | None]:
        """Final losses at the full budget; None: diverged. What has been trained of it already is read."""
        return self.trainer.train([self._candidate(one).full for one in tried])

    def _candidate(self, one: _Values) -> Candidate:
        return self.system.candidate(one.contender, self.base_lr, one.lr, one.noise, one.seed)


def list_candidates(system: System, contenders: Sequence[Contender], rates: Sequence[float]) -> list[_Values]:
    """What contenders try that are not tuned as another one."""
    return [
        _Values(one, lr, noise)
        for one in contenders
        if one.tuned_as is None
        for noise in (system.settings.noises if one.tunes_noise else [0.0])
        for lr in rates
    ]


def try_values(trials: ValueTrials, rates: Sequence[float], contenders: Sequence[Contender]) -> list[Sweep]:
    """The best values of every contender, with one seed."""
    tried = list_candidates(trials.system, contenders, rates)
    stopped = trials.judge_early(tried)
    going_on = [one for one in tried if one not in stopped]
    final = dict(zip(going_on, trials.finish(going_on), strict=True))
    cells: dict[str, list[Tried]] = {}
    for one in tried:
        cell = stopped[one] if one in stopped else Tried(one.lr, one.noise, [final[one]])
        cells.setdefault(one.contender.name, []).append(cell)
    return [choose(name, some) for name, some in cells.items()]


def list_promising(tried: Sequence[Tried], margin: float) -> list[Tried]:
    """Those that may still win: within the margin of the best, or next to it in learning rate at its noise.

    The neighbours go on however far behind they are, so that the best one is known to lie between two others.
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


def _settle(trials: ValueTrials, tuned: Sequence[Sweep], seeds: int) -> list[Sweep]:
    """Candidates within CLOSE of a contender's best get more seeds, and the best mean wins."""
    close = {one.name: _close(one.trials) for one in tuned}
    more = [
        _Values(contender_named(name), cell.lr, cell.noise, seed)
        for name, cells in close.items()
        for cell in cells
        for seed in range(1, seeds)
    ]
    losses = iter(trials.finish(more))
    settled = []
    for one in tuned:
        extra = {(cell.lr, cell.noise): [next(losses) for _ in range(1, seeds)] for cell in close[one.name]}
        tried = [replace(cell, losses=cell.losses + extra.get((cell.lr, cell.noise), [])) for cell in one.trials]
        settled.append(choose(one.name, tried, among=set(extra) or None))
    return settled


def _close(tried: Sequence[Tried]) -> list[Tried]:
    """The candidates that one seed cannot tell apart; none where the best stands alone."""
    finals = [(cell.loss, cell) for cell in tried if cell.loss is not None]
    if not finals:
        return []
    lowest = min(final for final, _ in finals)
    near = [cell for final, cell in finals if final <= _limit(lowest, CLOSE)]
    return near if len(near) > 1 else []


def choose(name: str, tried: Sequence[Tried], among: set[tuple[float, float]] | None = None) -> Sweep:
    """The values with the lowest mean loss; next to divergence only if nothing as good is not.

    among: the cells that may be chosen, where only some have all seeds.
    """
    means = {
        number: cell.loss
        for number, cell in enumerate(tried)
        if cell.loss is not None and (among is None or (cell.lr, cell.noise) in among)
    }
    if not means:
        raise MupscaleError(
            f"{name}: all {len(tried)} trials at the small width diverged, with learning rates from "
            f"{min(cell.lr for cell in tried):g} to {max(cell.lr for cell in tried):g}: give smaller ones "
            "(study.lrs)"
        )
    best = min(means, key=lambda number: means[number])
    remarks = []
    if _is_next_to_divergence(tried[best], tried):
        limit = means[best] + max(tried[number].spread for number in means)
        safe = [n for n in means if means[n] <= limit and not _is_next_to_divergence(tried[n], tried)]
        if safe:
            best = min(safe, key=lambda number: means[number])
        else:
            remarks.append(f"{name}: the best learning rate, {tried[best].lr:g}, is the last before divergence")
    lr, rates = tried[best].lr, sorted({cell.lr for cell in tried})
    if len(rates) > 1 and lr in (rates[0], rates[-1]):
        side, word = ("lowest", "lower") if lr == rates[0] else ("highest", "higher")
        remarks.append(f"{name}: the best learning rate, {lr:g}, is the {side} tried; {word} ones may be better")
    return Sweep(name, list(tried), lr=lr, noise=tried[best].noise, remarks=remarks)


def _is_next_to_divergence(cell: Tried, tried: Sequence[Tried]) -> bool:
    """Whether the next larger learning rate at the same noise diverged."""
    larger = [other for other in tried if other.noise == cell.noise and other.lr > cell.lr]
    return bool(larger) and min(larger, key=lambda other: other.lr).mean is None
