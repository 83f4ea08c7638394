"""Final loss against cost, a line for every contender: its name where the line ends, and break-even marked."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from mupscale.plots import (
    INK,
    MUTED,
    PAPER,
    EndLabel,
    Gallery,
    Picture,
    add_crosses,
    add_end_labels,
    escape_text,
    round_numbers,
    set_log_axis_if_wide,
    words,
)
from mupscale.report.looks import Look, add_line, dark_colors, find_looks
from mupscale.study import ContenderRuns, SystemRuns, contender_or_stranger, find_cost_unit, format_widths, loss_at

_CUT, _MARGIN = 6.0, 0.05
"""How many times the distance from the lowest loss to the median a picture shows, and the room beyond what it shows."""


@dataclass(frozen=True)
class Shape:
    """A picture's size in inches, how many letters a label's line has, and how many numbers fit along the axis."""

    size: tuple[float, float]
    letters: int
    ticks: int


WIDE, HALF, NARROW = Shape((8.8, 4.5), 30, 7), Shape((4.8, 3.7), 17, 4), Shape((3.75, 3.9), 16, 4)


@dataclass(frozen=True)
class Mark:
    """A break-even: from this cost on the grown model is lower than a rival, and the loss that both have there."""

    rival: str
    cost: float
    loss: float


def draw_system(
    runs: SystemRuns, gallery: Gallery, name: str, measure: str, answer: Mapping[str, Any], shape: Shape = HALF
) -> tuple[Picture, Picture]:
    """The picture of one base model and one wide width, and the same for a narrow page.

    measure: what the loss is called. answer: tells the break-evens.
    """
    marks = find_marks(runs, answer)
    caption, alt = _caption(runs, measure), _alt(runs, measure, marks)
    dark = dark_colors(find_looks(runs.contenders).values())

    def draw(shape: Shape, end: str) -> Picture:
        def sketch(ax: Any) -> None:
            sketch_system(ax, runs, measure, shape, marks)

        return gallery.draw(f"{name}{end}", alt, caption, sketch, size=shape.size, dark=dark)

    return draw(shape, ""), draw(NARROW, "-narrow")


def find_marks(runs: SystemRuns, answer: Mapping[str, Any]) -> list[Mark]:
    """Break-evens within the measured costs, with the base model charged if its cost is known."""
    marks = []
    for rival, ways in answer.get("break_even", {}).items():
        even = ways.get("charged") or ways.get("there")
        if even is None or even["kind"] != "from":
            continue
        loss = loss_at(runs.curve(answer["grown"]), even["cost"])
        if loss is not None:
            marks.append(Mark(contender_or_stranger(rival).brief_phrase, even["cost"], loss))
    return sorted(marks, key=lambda mark: mark.cost)


def sketch_system(ax: Any, runs: SystemRuns, measure: str, shape: Shape, marks: Sequence[Mark]) -> None:
    """Lines, axes, crosses for what diverged, break-evens, and names at the ends."""
    costs = [cost for one in runs.contenders for cost in _costs(runs, one)]
    (size, name), looks = find_cost_unit(runs), find_looks(runs.contenders)
    unit = size, escape_text(name)
    labels = []
    for one in runs.contenders:
        look = looks[one.name]
        if curve := runs.curve(one.name):
            _add_line(ax, one, curve, look)
        if one.final is not None:
            text = _wrap(f"{words.format_loss(one.final)} {one.shown}", shape)
            labels.append(EndLabel(text, look.color, curve[-1], look.contender.is_usual))
    _set_cost_axis(ax, min(costs), max(costs), unit, shape.ticks)
    base = "base model included" if runs.base_cost is not None else "base model not included"
    if runs.base_cost == 0:  # each cost is all that was spent
        ax.set_xlabel(f"cost, {unit[1]}")
    else:
        ax.set_xlabel(f"cost, {base}, {unit[1]}" if shape is not NARROW else f"cost, {unit[1]},\n{base}")
    ax.set_ylabel(f"final {measure}")
    losses = [loss for one in runs.contenders for point in one.points for loss in point.losses if loss is not None]
    top = find_top(runs)
    set_log_axis_if_wide(ax, [loss for loss in losses if loss <= top])
    if losses and max(losses) > top:
        ax.set_ylim(min(losses) - _MARGIN * (top - min(losses)), top)
    if not losses:
        ax.set_yticks([])
    rows = 2 if shape is NARROW else 1
    heights = [(8.5 * 1.3 * rows + 7) / (0.75 * 72 * shape.size[1]) for _ in marks]
    lost = {one.name: one for one in runs.contenders if any(point.mean is None for point in one.points)}
    crosses = [(_lost_costs(runs, one), looks[name].color) for name, one in lost.items()]
    for one, at in zip(lost.values(), add_crosses(ax, crosses, sum(heights)), strict=True):
        if one.final is None:
            look = looks[one.name]
            labels.append(EndLabel(_wrap(f"diverged: {one.shown}", shape), look.color, at, look.contender.is_usual))
    add_end_labels(ax, labels, 8.5 if shape is not NARROW else 8.0)
    _add_marks(ax, marks, heights, unit, rows)


def find_top(runs: SystemRuns) -> float:
    """The highest loss that is shown: where one far above the others would leave these no room, the picture is cut."""
    means = [loss for one in runs.contenders for _, loss in runs.curve(one.name)]
    if not means:
        return math.inf
    low, high = min(means), max(means)
    usual = _CUT * (median(means) - low)
    if high - low <= 1.3 * usual:
        return math.inf
    finals = [one.final for one in runs.contenders if one.final is not None]
    top = max(loss for loss in means if loss <= low + usual or loss in finals)
    return top + _MARGIN * (top - low)


def _costs(runs: SystemRuns, one: ContenderRuns) -> list[float]:
    return [runs.charge(one) + point.cost for point in one.points]


def _add_line(ax: Any, one: ContenderRuns, curve: Sequence[tuple[float, float]], look: Look) -> None:
    """Mean over the seeds and their range; points at which a seed diverged are left out."""
    strong = {"lw": 2.2, "ms": 4.5, "zorder": 4} if look.contender.is_usual else {"lw": 1.1, "ms": 3.0, "zorder": 3}
    losses = [[loss for loss in point.losses if loss is not None] for point in one.points if point.mean is not None]
    add_line(ax, [cost for cost, _ in curve], losses, look.color, marker="o", **strong)


def _wrap(text: str, shape: Shape) -> str:
    return "\n".join(textwrap.wrap(escape_text(text), shape.letters, break_long_words=False))


def _lost_costs(runs: SystemRuns, one: ContenderRuns) -> list[float]:
    """Where a seed of a contender diverged."""
    return [cost for cost, point in zip(_costs(runs, one), one.points, strict=True) if point.mean is None]


# ---------------------------------------------------------------------------------------------- axes


def _set_cost_axis(ax: Any, low: float, high: float, unit: tuple[float, str], most: int) -> None:
    """Logarithmic, labelled at round numbers."""
    ax.set_xscale("log")
    room = (high / low) ** 0.03 if high > low else 1.1
    ax.set_xlim(low / room, high * room)
    ticks = round_numbers(low / room / unit[0], high * room / unit[0], most)
    ax.set_xticks([tick * unit[0] for tick in ticks], [f"{tick:,.10g}" for tick in ticks])
    ax.xaxis.minorticks_off()


def _add_marks(ax: Any, marks: Sequence[Mark], heights: Sequence[float], unit: tuple[float, str], rows: int) -> None:
    """A tick where two lines cross, and words for it below all lines."""
    box = ax.get_window_extent()
    bottom = 0.0
    for mark, height in zip(marks, heights, strict=True):
        x, y = (ax.transScale + ax.transLimits).transform((mark.cost, mark.loss))
        place = {"transform": ax.transAxes, "color": INK, "solid_capstyle": "butt"}
        ax.plot([x, x], [y - 0.035, y + 0.035], lw=1.8, zorder=6, **place)
        ax.plot([x, x], [bottom + height, y - 0.035], lw=0.9, ls=(0, (1, 2)), zorder=1, **{**place, "color": MUTED})
        text = f"break-even with{chr(10) if rows > 1 else ' '}{_mark_words(mark, unit)}"
        style: dict[str, Any] = {"ha": "left", "va": "center", "fontsize": 8.5, "color": INK, "zorder": 6}
        style["bbox"] = {"fc": PAPER, "ec": "none", "pad": 1.0}
        said = ax.text(0, bottom + height / 2, text, transform=ax.transAxes, linespacing=1.1, **style)
        width = said.get_window_extent().width / box.width
        said.set_x(min(max(x - width / 2, 0.03), max(0.03, 0.99 - width)))
        bottom += height


# --------------------------------------------------------------------------------------------- words


def _mark_words(mark: Mark, unit: tuple[float, str]) -> str:
    return f"{mark.rival}: {words.format_setting(mark.cost / unit[0])} {unit[1]}"


def _caption(runs: SystemRuns, measure: str) -> str:
    over = f"mean and range over {runs.seeds} seeds" if runs.seeds > 1 else "one seed"
    highest, top = (
        max((loss for one in runs.contenders for _, loss in runs.curve(one.name)), default=0.0),
        find_top(runs),
    )
    cut = f". Losses above {words.format_loss(top)} are not shown." if highest > top else ""
    return f"{measure.capitalize()} at the end of each budget, against cost; width {format_widths(runs)}; {over}{cut}"


def _alt(runs: SystemRuns, measure: str, marks: Sequence[Mark]) -> str:
    ends = [
        f"{one.shown} {'diverged' if one.final is None else words.format_loss(one.final)}" for one in runs.contenders
    ]
    unit = find_cost_unit(runs)
    marked = "".join(f" Break-even with {_mark_words(mark, unit)}." for mark in marks)
    return f"Final {measure} against cost. At the full budget: {', '.join(ends)}.{marked}"
