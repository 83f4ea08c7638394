"""What to know of a finished sweep beside its optimum: edges of the grid, divergence, zero noise, lost trials."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from mupscale.sweep.space import Space, Sweep, Tried

CLOSE = 0.01
"""A loss within this part of another is close to it, where one seed alone cannot tell the spread."""


def sweep_remarks(sweep: Sweep) -> list[str]:
    """What a person should know before they trust the optimum: sentences, those that matter most first.

    >>> from mupscale.sweep import Sweep, Tried, sweep_remarks
    >>> trials = [Tried(0.1, 0.0, [1.5]), Tried(0.2, 0.0, [1.2])]
    >>> sweep_remarks(Sweep("sweep-1-width-64", trials))
    ['the best learning rate, 0.2, is the largest tried: try 0.2, 0.4, 0.8']
    """
    found: list[str] = []
    if sweep.finished:
        found = [*_zero_noise(sweep), *_near_divergence(sweep), *edge_remarks(sweep)]
        found += _edges_without_noise(sweep)
    ends = {"diverged": "diverged", "stopped": "stopped early by pruning"}
    counts = {how: sum(trial.status == status for trial in sweep.trials) for status, how in ends.items()}
    return found + [f"{count} of {len(sweep.trials)} trials {how}" for how, count in counts.items() if count]


def _zero_noise(sweep: Sweep) -> Iterator[str]:
    """Whether noise, and with it upscaling, pays at all: zero noise is training on (Equivalence at zero noise)."""
    loss, best = sweep.finished[0]
    zeros = [one for one in sweep.finished if one[1].noise == 0]
    if len(sweep.grid.noises) == 1 or not zeros:
        return
    zero_loss, zero = zeros[0]
    if zero is best:
        yield "the sweep selects zero noise: upscaling does not pay here: training on without new capacity is best"
        return
    gap, spread = zero_loss - loss, max(zero.spread, best.spread)
    losses = f"the best trial without noise reaches {zero_loss:.4g}, the best with noise {loss:.4g}"
    if len(best.losses) > 1 and gap <= spread:
        yield f"{losses}, which is within the spread between seeds ({spread:.2g}): noise may not pay here"
    elif len(best.losses) == 1 and gap < CLOSE * abs(loss):
        yield (
            f"{losses}, {gap / abs(loss):.1%} apart; with one seed the spread between seeds is unknown, so "
            f"noise may not pay here: try small_seeds 3"
        )


def _near_divergence(sweep: Sweep) -> Iterator[str]:
    """The optimum a grid step away from a trial that diverged: another seed, or a wider model, may diverge there."""
    beyond = _diverged_beside(sweep, sweep.best)
    if beyond is None:
        return

    def describe(trial: Tried) -> str:
        noise = f" and noise {trial.noise:.3g}" if len(sweep.grid.noises) > 1 else ""
        return f"learning rate {trial.lr:.3g}{noise}"

    safe = [(loss, trial) for loss, trial in sweep.finished if not _diverged_beside(sweep, trial)]
    other = f"; the best that is not, {describe(safe[0][1])}, has {safe[0][0]:.4g}" if safe else ""
    yield (
        f"the best trial is close to one that diverged ({describe(beyond)}): with other seeds or widths it may, "
        f"too{other}"
    )


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


def edge_remarks(sweep: Sweep) -> Iterator[str]:
    """The optimum on the edge of the grid, and the range to try next in the grid's own ratio."""
    rates, noises, best = sweep.grid.lrs, sweep.grid.noises, sweep.best
    if len(rates) > 1:
        at = _nearest(rates, best.lr)
        if at == 0:
            yield _edge("learning rate", best.lr, "smallest", rates[0], rates[0] / rates[1])
        if at == len(rates) - 1:
            yield _edge("learning rate", best.lr, "largest", rates[-1], rates[-1] / rates[-2])
    if len(noises) > 1 and _nearest(noises, best.noise) == len(noises) - 1:
        yield _edge("noise", best.noise, "largest", noises[-1], noises[-1] / noises[-2] if noises[-2] else 2.0)


def _edges_without_noise(sweep: Sweep) -> Iterator[str]:
    """The same of the best trial without noise, whose learning rate baselines have; where losses are not flat there."""
    zeros = [one for one in sweep.finished if one[1].noise == 0]
    if not zeros or zeros[0][1].lr == sweep.best.lr:  # said already
        return
    loss, zero = zeros[0]
    others = [other for other, trial in zeros if trial.lr != zero.lr]
    if not others or min(others) - loss >= CLOSE * abs(loss):
        alone = replace(sweep, trials=[zero], space=Space(sweep.grid.lrs))
        yield from (f"without noise, {remark}" for remark in edge_remarks(alone))


def _edge(what: str, best: float, which: str, edge: float, ratio: float) -> str:
    further = sorted(edge * ratio**i for i in range(3))
    where = f"is the {which} tried" if best == edge else f"lies next to {edge:.3g}, the {which} tried"
    return f"the best {what}, {best:.3g}, {where}: try {', '.join(f'{value:.3g}' for value in further)}"


def _nearest(values: Sequence[float], value: float) -> int:
    """The index of the grid's value that is nearest: samplers other than the grid's leave it."""
    return min(range(len(values)), key=lambda index: abs(values[index] - value))
