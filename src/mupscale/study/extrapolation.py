"""Extrapolating the best noise and learning rate from small widths to the large one.

Transfer as in the paper takes them as they are; with two small widths tuned, what is left of a drift can be seen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import linear_regression

from mupscale.sweep import Cell, Sweep
from mupscale.system import MupscaleError

LIMIT = 4.0
"""The largest factor between an extrapolated value and that of the largest small width, either way."""

_AXES = {"noise": "noise", "lr": "learning rate"}


@dataclass(frozen=True)
class Extrapolation:
    """What to use at the large width, beside what the largest small width alone would transfer (plain).

    A slope is the power of the width: for each doubling the value is multiplied by 2 to the slope.
    """

    lr: float
    noise: float
    plain_lr: float
    plain_noise: float
    lr_slope: float = 0.0
    noise_slope: float = 0.0
    sentences: list[str] = field(default_factory=list)


def extrapolate(sweeps: Sequence[tuple[float, Sweep]], width: float) -> Extrapolation:
    """The optimum of Sweep 2 at each small width, continued to `width` along a power of the width."""
    ordered = sorted(sweeps, key=lambda pair: pair[0])
    widths = [small for small, _ in ordered]
    if not widths or len(set(widths)) < len(widths):
        raise MupscaleError(f"small widths must differ from each other, but they are {widths}: give e.g. 64 and 128")
    bests = [sweep.best for _, sweep in ordered]
    plain = bests[-1].cell
    if len(widths) == 1:
        return Extrapolation(plain.lr, plain.noise, plain.lr, plain.noise)
    zeros = [small for small, best in zip(widths, bests, strict=True) if best.noise == 0]
    sentences = [_no_noise(zeros, plain)] if zeros else []
    if zeros and len(zeros) < len(widths):  # with and without noise are two different optima
        sentences += _gains(ordered, width)
        return Extrapolation(plain.lr, plain.noise, plain.lr, plain.noise, sentences=sentences)
    value, slope = {"noise": plain.noise, "lr": plain.lr}, {"noise": 0.0, "lr": 0.0}
    for axis in ["lr"] if zeros else ["noise", "lr"]:
        optima = [_between(sweep, axis) for _, sweep in ordered]
        power = linear_regression([math.log2(small) for small in widths], [math.log2(best) for best in optima]).slope
        value[axis], limited = _limited(optima[-1], power * math.log2(width / widths[-1]), ordered[-1][1], axis)
        slope[axis] = power
        sentences.append(
            f"from width {widths[0]:g} to {widths[-1]:g} the best {_AXES[axis]} goes from {optima[0]:.3g} to "
            f"{optima[-1]:.3g} (×{2**power:.2f} for each doubling); at width {width:g} that makes {value[axis]:.3g}"
            f"{limited}, where plain transfer has {getattr(plain, axis):.3g}"
        )
    sentences += _gains(ordered, width)
    return Extrapolation(value["lr"], value["noise"], plain.lr, plain.noise, slope["lr"], slope["noise"], sentences)


def _gains(sweeps: Sequence[tuple[float, Sweep]], width: float) -> list[str]:
    """What noise gains at each small width, and where that leads; it may fall, since wide models lack less capacity."""
    pairs = [(small, sweep.best.loss, sweep.best_without_noise) for small, sweep in sweeps]
    losses = {n: (best, zero.loss) for n, best, zero in pairs if best and zero is not None and zero.loss}
    gains = {n: 1 - best / zero for n, (best, zero) in losses.items() if best > 0 and zero > 0}
    if len(gains) < 2 or not any(gains.values()):
        return []
    line = linear_regression([math.log2(n) for n in gains], list(gains.values()))
    there = line.slope * math.log2(width) + line.intercept
    at_each = " and ".join(f"{gain:.1%} at width {n:g}" for n, gain in gains.items())
    end = "that does not fall with the width"
    if line.slope < 0:
        leads = f"{there:.0%} at width {width:g}" if there > 0 else f"nothing at width {width:g}"
        end = f"along the logarithm of the width that would make {leads}"
    return [f"noise lowers the best loss by {at_each}; {end}{'' if there > 0 else ', so widening may not pay there'}"]


def _between(sweep: Sweep, axis: str) -> float:
    """The optimum between grid values: of the parabola through the best trial and its neighbours, in the logarithm.

    The grid's own value at an edge, beside zero, and beside a trial that did not come to its end.
    """
    best = sweep.best
    here = getattr(best, axis)
    values = _values(sweep, axis)
    if here not in values or not 0 < values.index(here) < len(values) - 1:
        return float(here)
    around = values[values.index(here) - 1 : values.index(here) + 2]
    losses = [_loss(sweep, _moved(best.cell, axis, value)) for value in around]
    if around[0] <= 0 or None in losses:
        return float(here)
    (a, b, c), (fa, fb, fc) = (math.log(value) for value in around), (loss or 0.0 for loss in losses)
    left, right = (b - a) * (fb - fc), (b - c) * (fb - fa)
    if left == right:
        return float(here)
    return math.exp(b - 0.5 * ((b - a) * left - (b - c) * right) / (left - right))


def _limited(last: float, doublings: float, sweep: Sweep, axis: str) -> tuple[float, str]:
    """The last width's value times a power of two, kept within LIMIT and below what diverged there; and a remark."""
    wanted = last * 2.0 ** max(-64.0, min(64.0, doublings))
    value, remark = min(max(wanted, last / LIMIT), last * LIMIT), ""
    if value != wanted:
        remark = f" (limited to a factor of {LIMIT:g}: the line alone would lead to {wanted:.3g})"
    cell = sweep.best.cell
    values = _values(sweep, axis)
    diverged = [v for v in values if v > getattr(cell, axis) and _diverged(sweep, _moved(cell, axis, v))]
    safe = max((v for v in values if v < diverged[0]), default=value) if diverged else value
    if value > safe:
        value, remark = safe, f" (limited: {diverged[0]:.3g} diverged)"
    return value, remark


def _no_noise(zeros: Sequence[float], plain: Cell) -> str:
    where = " and ".join(f"{small:g}" for small in zeros)
    return f"at width {where} the best noise is 0, so it is not extrapolated: noise {plain.noise:.3g} is transferred"


def _values(sweep: Sweep, axis: str) -> tuple[float, ...]:
    return sweep.space.lrs if axis == "lr" else sweep.space.noises


def _moved(cell: Cell, axis: str, value: float) -> Cell:
    return Cell(value, cell.noise) if axis == "lr" else Cell(cell.lr, value)


def _loss(sweep: Sweep, cell: Cell) -> float | None:
    trial = sweep.at(cell)
    return trial.loss if trial is not None and trial.status == "finished" else None


def _diverged(sweep: Sweep, cell: Cell) -> bool:
    trial = sweep.at(cell)
    return trial is not None and trial.status == "diverged"
