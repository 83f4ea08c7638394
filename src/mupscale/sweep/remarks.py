"""What to know of a finished sweep beside its optimum: edges of the grid, divergence, zero noise, lost trials."""

from __future__ import annotations

from collections.abc import Sequence

from mupscale.engine import Status
from mupscale.sweep.space import Cell, Space, Sweep, Trial

CLOSE = 0.01
"""A loss within this part of another is close to it, where one seed alone cannot tell the spread."""


def sweep_remarks(sweep: Sweep) -> list[str]:
    """What a person should know before they trust the optimum: sentences, those that matter most first.

    >>> from mupscale.sweep import Space, Sweep, Trial, sweep_remarks
    >>> losses = {0.1: 1.5, 0.2: 1.2}
    >>> trials = [Trial(lr, 0.0, "finished", loss) for lr, loss in losses.items()]
    >>> sweep_remarks(Sweep("sweep-1-width-64", 64, None, Space((0.1, 0.2)), trials))
    ['the best learning rate, 0.2, is the largest tried: try 0.2, 0.4, 0.8']
    """
    if not sweep.finished:
        return _lost_trials(sweep)
    best = sweep.best
    return [
        *_zero_noise(sweep, best),
        *_near_divergence(sweep, best),
        *_edges(sweep.space, best),
        *_edges_without_noise(sweep, best),
        *_lost_trials(sweep),
    ]


def grid_distance(space: Space, a: Cell, b: Cell) -> int:
    """Grid steps between two cells: the larger of those in learning rate and in noise. 1 or less: grid_distance."""
    rates = abs(_nearest(space.lrs, a.lr) - _nearest(space.lrs, b.lr))
    noises = abs(_nearest(space.noises, a.noise) - _nearest(space.noises, b.noise))
    return max(rates, noises)


def _zero_noise(sweep: Sweep, best: Trial) -> list[str]:
    """Whether noise, and with it upscaling, pays at all: zero noise is training on (Equivalence at zero noise)."""
    if len(sweep.space.noises) == 1:
        return []
    if best.noise == 0:
        return ["the sweep selects zero noise: upscaling does not pay here: training on without new capacity is best"]
    zero = sweep.best_without_noise
    if zero is None:
        return []
    gap, spread = _loss(zero) - _loss(best), max(zero.spread, best.spread)
    losses = f"the best trial without noise reaches {_loss(zero):.4g}, the best with noise {_loss(best):.4g}"
    if sweep.seeds > 1 and gap <= spread:
        return [f"{losses}, which is within the spread between seeds ({spread:.2g}): noise may not pay here"]
    if sweep.seeds == 1 and gap < CLOSE * abs(_loss(best)):
        return [
            f"{losses}, {gap / abs(_loss(best)):.1%} apart; with one seed the spread between seeds is unknown, so "
            f"noise may not pay here: try small_seeds 3"
        ]
    return []


def _near_divergence(sweep: Sweep, best: Trial) -> list[str]:
    """The optimum a grid step away from a trial that diverged: another seed, or a wider model, may diverge there."""
    beyond = _diverged_beside(sweep, best)
    if beyond is None:
        return []
    diverged = _describe(sweep, beyond)
    remark = f"the best trial is close to one that diverged ({diverged}): with other seeds or widths it may, too"
    safe = [trial for trial in sweep.finished if not _diverged_beside(sweep, trial)]
    if not safe:
        return [remark]
    other = min(safe, key=_loss)
    return [f"{remark}; the best that is not, {_describe(sweep, other)}, has {_loss(other):.4g}"]


def _describe(sweep: Sweep, trial: Trial) -> str:
    noise = f" and noise {trial.noise:.3g}" if len(sweep.space.noises) > 1 else ""
    return f"learning rate {trial.lr:.3g}{noise}"


def _diverged_beside(sweep: Sweep, trial: Trial) -> Trial | None:
    """A diverged trial with a larger learning rate, up to a grid step, or, if it has noise, with more noise."""
    space = sweep.space
    lr, noise = _nearest(space.lrs, trial.lr), _nearest(space.noises, trial.noise)
    steps = {(0, 0), (1, 0), (0, 1)} if trial.noise else {(0, 0), (1, 0)}
    for other in sweep.trials:
        step = _nearest(space.lrs, other.lr) - lr, _nearest(space.noises, other.noise) - noise
        if other.status == "diverged" and step in steps and other.lr >= trial.lr and other.noise >= trial.noise:
            return other
    return None


def _edges(space: Space, best: Trial) -> list[str]:
    """The optimum on the edge of the grid, and the range to try next in the grid's own ratio."""
    remarks = []
    if len(space.lrs) > 1:
        at = _nearest(space.lrs, best.lr)
        if at == 0:
            further = _further(space.lrs[0], space.lrs[0] / space.lrs[1])[::-1]
            remarks.append(_edge("learning rate", best.lr, "smallest", space.lrs[0], further))
        if at == len(space.lrs) - 1:
            further = _further(space.lrs[-1], space.lrs[-1] / space.lrs[-2])
            remarks.append(_edge("learning rate", best.lr, "largest", space.lrs[-1], further))
    if len(space.noises) > 1 and _nearest(space.noises, best.noise) == len(space.noises) - 1:
        below = space.noises[-2]
        further = _further(space.noises[-1], space.noises[-1] / below if below else 2.0)
        remarks.append(_edge("noise", best.noise, "largest", space.noises[-1], further))
    return remarks


def _edges_without_noise(sweep: Sweep, best: Trial) -> list[str]:
    """The same of the best trial without noise, whose learning rate baselines have; where losses are not flat there."""
    zero = sweep.best_without_noise
    if zero is None or zero.lr == best.lr:  # said already
        return []
    others = [_loss(trial) for trial in sweep.finished if trial.noise == 0 and trial.lr != zero.lr]
    if others and min(others) - _loss(zero) < CLOSE * abs(_loss(zero)):
        return []
    return [f"without noise, {remark}" for remark in _edges(Space(sweep.space.lrs), zero)]


def _edge(what: str, best: float, which: str, edge: float, further: list[float]) -> str:
    values = ", ".join(f"{value:.3g}" for value in further)
    where = f"is the {which} tried" if best == edge else f"lies next to {edge:.3g}, the {which} tried"
    return f"the best {what}, {best:.3g}, {where}: try {values}"


def _further(edge: float, ratio: float) -> list[float]:
    return [edge * ratio**i for i in range(3)]


def _lost_trials(sweep: Sweep) -> list[str]:
    """How many trials did not come to their end."""
    statuses: list[tuple[Status, str]] = [("diverged", "diverged"), ("pruned", "stopped early by pruning")]
    counts = [(sum(trial.status == status for trial in sweep.trials), how) for status, how in statuses]
    return [f"{count} of {len(sweep.trials)} trials {how}" for count, how in counts if count]


def _nearest(values: Sequence[float], value: float) -> int:
    """The index of the grid's value that is nearest: samplers other than the grid's leave it."""
    return min(range(len(values)), key=lambda index: abs(values[index] - value))


def _loss(trial: Trial) -> float:
    assert trial.loss is not None
    return trial.loss
