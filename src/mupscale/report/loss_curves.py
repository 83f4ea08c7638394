"""Losses during training: mean and min–max band over seeds, smoothed, against steps and against total cost."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from statistics import median
from typing import Any, Literal

import numpy as np

from mupscale.plots import (
    MUTED,
    Gallery,
    Picture,
    add_legend_below,
    drop_partial_point,
    escape_text,
    keep_extremes,
    set_count_axis,
    set_log_axis_if_wide,
)
from mupscale.report.looks import Look, dark_colors, find_looks
from mupscale.study import ContenderRuns, Curve, SystemRuns
from mupscale.system import words

Against = Literal["step", "flops"]
What = Literal["training", "held-out", "accuracy"]
_MOST, _SMOOTH = 300, 64
"""Points a line is drawn with, and the part of a curve on either side that a point of it is the mean of."""
AXES: dict[What, str] = {"training": "training loss", "held-out": "held-out loss", "accuracy": "held-out accuracy"}


@dataclass(frozen=True)
class CurveLine:
    """A model's curve, as arrays: x, mean, low and high over the seeds that finished, all but x smoothed.

    lowest, highest: of the single measurements of all seeds. diverged: x and values of others, as far as each came.
    """

    runs: ContenderRuns
    look: Look
    xs: Any
    mean: Any
    low: Any
    high: Any
    lowest: Any
    highest: Any
    diverged: list[Any] = field(kw_only=True)

    @property
    def has_extremes(self) -> bool:
        """Whether single measurements lie beyond the points."""
        return not (np.array_equal(self.lowest, self.low) and np.array_equal(self.highest, self.high))

    def moved(self, start: float, scale: float) -> CurveLine:
        """The same line on another scale of x."""
        diverged = [np.stack([start + scale * xs, values]) for xs, values in self.diverged]
        return replace(self, xs=start + scale * self.xs, diverged=diverged)

    @property
    def label(self) -> str:
        """Its name, and what became of it."""
        lost = sum(curve.status == "diverged" for curve in self.runs.curves)
        return escape_text(self.look.short) + (f" ({lost} of {len(self.runs.curves)} diverged)" if lost else "")


def draw_loss_curves(system: SystemRuns, gallery: Gallery, answer: Mapping[str, Any]) -> Iterator[Picture]:
    """Training loss against steps and cost, whole and zoomed, then what was measured on held-out data.

    answer: may tell a loss for reference. Where no model has two points there is no picture.
    """
    against: Against
    for against in ("step", "flops"):
        drawn = collect_lines(system, "training", against)
        for zoom in (False, True) if any(line.xs.size for line in drawn) else (False,):
            yield from _draw(gallery, drawn, "training", against, zoom, answer)
    measured: tuple[What, ...] = ("held-out", "accuracy")
    for what in measured:
        drawn, charged = collect_lines(system, what, "step"), collect_lines(system, what, "flops")
        if len(charged) == len(drawn):  # all costs are known
            yield from _draw(gallery, charged, what, "flops", True, answer)
        else:
            yield from _draw(gallery, drawn, what, "step", True, answer)


def _draw(
    gallery: Gallery, drawn: Sequence[CurveLine], what: What, against: Against, zoom: bool, answer: Mapping[str, Any]
) -> Iterator[Picture]:
    xs = [xs for line in drawn for xs in (line.xs, *(lost[0] for lost in line.diverged))]
    if not any(len(some) > 1 for some in xs):
        return
    is_training, is_part = what == "training", zoom and what == "training"
    largest = max(float(some.max(initial=0)) for some in xs)
    unit, unit_name = words.choose_flops_unit(largest) if against == "flops" else (1.0, "")

    def sketch(ax: Any) -> None:
        for line in drawn:
            _add_line(ax, line.moved(0.0, 1 / unit))
        if zoom and (limits := _zoom(drawn, what)):
            log = what == "held-out" and set_log_axis_if_wide(ax, limits)
            ax.set_ylim(*_with_room(*limits, log=log, most=1.0 if what == "accuracy" and limits[1] <= 1 else math.inf))
        elif what != "accuracy":
            shown = [[line.lowest, line.highest, *(values for _, values in line.diverged)] for line in drawn]
            set_log_axis_if_wide(ax, np.concatenate([one for some in shown for one in some]).tolist())
        ax.set_xlabel(f"training cost, {unit_name}" if against == "flops" else "steps of its own training")
        ax.set_ylabel(AXES[what] + (", zoomed" if is_part else ""))
        set_count_axis(ax)
        if is_part and (reference := answer.get("reference")):
            label = escape_text(reference["label"])
            ax.axhline(reference["loss"], color=MUTED, lw=0.9, ls=(0, (1, 2)), zorder=1, label=label)
        add_legend_below(ax, columns)

    columns = 2 if max(len(line.label) for line in drawn) <= 31 else 1  # as many as fit below a picture
    size = 4.8, 3.2 + 0.19 * -(-(len(drawn) + 1) // columns)
    ends = [f"{line.look.short} {words.format_loss(line.mean[-1]) if line.mean.size else 'diverged'}" for line in drawn]
    caption = title = f"{AXES[what].capitalize()} against {'total cost' if against == 'flops' else 'steps'}"
    if is_part:
        caption = "The same, zoomed in on the end of training"
    elif is_training and against == "flops":
        caption += "; grown and continued models start where the base model ended"
    elif is_training:
        caption += "; every model from its own first step, mean and min–max over seeds"
        if any(line.has_extremes for line in drawn):
            caption += ", smoothed; the faint band shows unsmoothed extremes"
    alt = f"{title}. At the end: {', '.join(ends)}.{' Zoom.' if is_part else ''}"
    name = f"training-{against}{'-zoom' if zoom else ''}" if is_training else what
    yield gallery.draw(name, alt, caption, sketch, size=size, dark=dark_colors(line.look for line in drawn))


# ------------------------------------------------------------------------------------------------- lines


def collect_lines(system: SystemRuns, what: What, against: Against) -> list[CurveLine]:
    """Every model that has such a curve. Against FLOPs those whose cost is known.

    A model that starts from the base model starts where its cost ended.
    """
    looks, lines = find_looks(system.contenders), []
    for runs in system.contenders:
        line = _line(runs, looks[runs.name], what)
        if not line.xs.size and not line.diverged:
            continue
        if against == "step":
            lines.append(line)
        elif runs.cost_per_step is not None and not (line.look.contender.from_base and system.base_cost is None):
            lines.append(line.moved(system.charge(runs), runs.cost_per_step))
    return lines


def _line(runs: ContenderRuns, look: Look, what: What) -> CurveLine:
    tables = [(curve.status == "diverged", _table(curve, what)) for curve in runs.curves]
    lost = [_with_extremes(table) for is_lost, table in tables if is_lost and table.size]
    ended = [table for is_lost, table in tables if not is_lost and table.size]
    if not ended:
        return CurveLine(runs, look, *[np.empty(0)] * 6, diverged=lost)
    steps = reduce(np.intersect1d, [table[0] for table in ended])  # those that all seeds have
    values = np.stack([table[1:, np.searchsorted(table[0], steps)] for table in ended])
    means, lowest, highest = _smooth(values[:, 0]), values[:, 1].min(0), values[:, 2].max(0)
    kept = keep_extremes(lowest, highest, _MOST)
    shown = (steps, means.mean(0), means.min(0), means.max(0), lowest, highest)
    return CurveLine(runs, look, *(row[kept] for row in shown), diverged=lost)


def _smooth(values: Any) -> Any:
    """Every value the mean of its neighbours, of as many on both sides, fewer near the ends; along the last axis."""
    count = values.shape[-1]
    at = np.arange(count)
    reach = np.minimum(count // _SMOOTH, np.minimum(at, count - 1 - at))
    if not reach.any():
        return values
    sums = np.concatenate([np.zeros_like(values[..., :1]), values.cumsum(-1)], -1)
    return (sums[..., at + reach + 1] - sums[..., at - reach]) / (2 * reach + 1)


def _table(curve: Curve, what: What) -> Any:
    """Steps that rise, and at each the value and the lowest and highest that it stands for; four rows of numbers."""
    extremes: tuple[list[float], list[float]] = ([], [])
    if what == "training":
        steps, values, extremes = curve.steps, curve.losses, (curve.lowest, curve.highest)
    else:
        steps, values = curve.held_out_steps, curve.accuracy if what == "accuracy" else curve.held_out_losses
    row = np.array(values, dtype=float)[: len(steps)]
    columns = [row, *(np.array(one, dtype=float) if one else row for one in extremes)]
    table = np.stack([np.array(steps[: len(row)], dtype=float), *columns])
    table = table[:, np.isfinite(table).all(0)]
    table = table[:, np.unique(table[0], return_index=True)[1]]
    return _without_partial_point(table) if what == "training" and curve.status != "diverged" else table


def _without_partial_point(table: Any) -> Any:
    """Without a last point of far fewer steps, see `drop_partial_point`; its extremes go to the point before it."""
    ends = [(step, 0.0) for step in table[0, [0, 1, -2, -1]].tolist()] if table.shape[1] > 2 else []
    if len(drop_partial_point(ends, "")) == len(ends):
        return table
    table[2, -2], table[3, -2] = table[2, -2:].min(), table[3, -2:].max()
    return table[:, :-1]


def _with_extremes(table: Any) -> Any:
    """Some points of one run, with the lowest and highest that any of them stands for in the place of its mean."""
    steps, values, lowest, highest = table.copy()
    values[highest.argmax()], values[lowest.argmin()] = highest.max(), lowest.min()
    return np.stack([steps, values])[:, keep_extremes(values, values, _MOST)]


# ------------------------------------------------------------------------------------------------ pictures


def _add_line(ax: Any, line: CurveLine) -> None:
    color = line.look.contender.color
    dots = {"marker": "o", "ms": 2.5} if 0 < len(line.xs) <= 25 else {}
    weight = {"lw": 2.0, "zorder": 4} if line.look.contender.kind == "grown" else {"lw": 1.6, "zorder": 3}
    ax.plot(line.xs, line.mean, label=line.label, **weight, **line.look.line, **dots)
    if sum(curve.status != "diverged" for curve in line.runs.curves) > 1:
        ax.fill_between(line.xs, line.low, line.high, color=color, alpha=0.18, lw=0, zorder=2)
    if line.has_extremes:  # a peak is as thin as its edge
        edge: dict[str, Any] = {"facecolor": (color, 0.09), "edgecolor": (color, 0.3), "lw": 0.4}
        ax.fill_between(line.xs, line.lowest, line.highest, zorder=1, **edge)
    for xs, values in line.diverged:
        ax.plot(xs, values, lw=0.7, color=color, alpha=0.7)
        ax.plot(xs[-1], values[-1], "x", ms=6, color=color)


def _zoom(drawn: Sequence[CurveLine], what: What) -> tuple[float, float] | None:
    """From the best value to the worst that a compared model had after its first quarter, or ends at.

    That is where the comparison is decided; a single jump, or a model that is there to be worse, does not count.
    """
    shown = [line for line in drawn if line.xs.size]
    looked_at = [(line, line.look.contender) for line in shown]
    compared = [line for line, one in looked_at if one.kind != "base" and not one.keeps_rates] or shown
    if not compared:
        return None
    means = [line.mean.tolist() for line in compared]
    typical = [value for mean in means for value in (mean[len(mean) // 4], median(mean[-max(1, len(mean) // 10) :]))]
    if what == "accuracy":
        bottom, top = min(typical), max(float(line.high.max()) for line in compared)
    else:
        bottom, top = min(float(line.low.min()) for line in compared), max(typical)
    return (bottom, top) if top > bottom else None


def _with_room(bottom: float, top: float, *, log: bool, most: float) -> tuple[float, float]:
    """Limits of an axis for values between these: a little further, but not to where none can be."""
    if log:
        room = (top / bottom) ** 0.08
        return bottom / room, top * room
    room = 0.08 * (top - bottom)
    return max(0.0, bottom - room) if bottom >= 0 else bottom - room, min(most, top + room)
