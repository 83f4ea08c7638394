"""Pictures of models: final loss against cost, losses during training, and what the gain is made of.

Contenders look the same in all of them: colours that can be read on light and dark pages, dashes, names.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from statistics import fmean, median
from typing import Any, Literal

import numpy as np

from mupscale import plots
from mupscale.plots import EndLabel, Gallery, Picture
from mupscale.study import (
    CONTENDERS,
    Contender,
    ContenderRuns,
    Curve,
    Sweep,
    SystemRuns,
    contender_named,
    contender_or_stranger,
    find_cost_unit,
    format_widths,
    loss_at,
)
from mupscale.system import words


@dataclass(frozen=True)
class Look:
    """A contender, and what it is called where there is little room."""

    contender: Contender
    short: str

    @property
    def color(self) -> str:
        """Dark enough for letters on a light page."""
        return plots.with_contrast(self.contender.color, plots.PAPER)

    @property
    def dark_color(self) -> str:
        """The same for a dark page: the house's own where it has one, which tells greys apart."""
        return plots.with_contrast(plots.recolour_for_dark(self.contender.color), plots.DARK_PAPER, 6.0)

    @property
    def line(self) -> dict[str, Any]:
        """Colour and dashes of a line that no letters are beside."""
        return {"color": self.contender.color, "ls": self.contender.dashes}


def find_looks(shown: Sequence[ContenderRuns | Sweep]) -> dict[str, Look]:
    """By name; those that are strangers to the table of contenders get colours in turn."""
    looks: dict[str, Look] = {}
    strangers = 0
    for one in shown:
        contender = one.contender if isinstance(one, ContenderRuns) else contender_or_stranger(one.name)
        if contender not in CONTENDERS:
            contender = replace(contender, color=plots.COLORS[(1 + strangers) % len(plots.COLORS)])
            strangers += 1
        with_letter = contender.paper.letter and one.label.startswith(contender.paper.letter)
        looks[one.name] = Look(contender, contender.short if with_letter else one.label or contender.label)
    return looks


def add_line(ax: Any, xs: Sequence[float], losses: Sequence[Sequence[float]], color: Any, **style: Any) -> None:
    """A line of the means over seeds, and a band of their range where there are several."""
    ax.plot(xs, [fmean(some) for some in losses], color=color, **style)
    if any(len(some) > 1 for some in losses):
        low, high = [min(some) for some in losses], [max(some) for some in losses]
        ax.fill_between(xs, low, high, color=color, alpha=0.16, lw=0, zorder=2)


def dark_colors(looks: Iterable[Look]) -> dict[str, str]:
    """What becomes of their colours on a dark page."""
    return {color: look.dark_color for look in looks for color in (look.color, look.contender.color)}


# ---------------------------------------------------------------------------------------------- loss against cost

_CUT, _MARGIN = 6.0, 0.05
"""How many times the distance from the lowest loss to the median a picture shows, and the room beyond what it shows."""


@dataclass(frozen=True)
class Shape:
    """A picture's size in inches, how many letters a label's line has, and how many numbers fit along the axis."""

    size: tuple[float, float]
    letters: int
    ticks: int

    def with_room_for(self, labels: int) -> Shape:
        """The same shape, taller where so many labels would not fit beside it."""
        width, height = self.size
        return replace(self, size=(width, height + _INCHES_A_LABEL * max(0, labels - _MOST_LABELS)))

    @property
    def is_narrow(self) -> bool:
        return self.letters == NARROW.letters


_MOST_LABELS, _INCHES_A_LABEL = 11, 0.35
"""Labels that stand beside any picture, two lines each, and the room that another one takes."""
WIDE, HALF, NARROW = Shape((8.8, 4.5), 30, 7), Shape((4.8, 3.7), 17, 4), Shape((3.75, 3.9), 16, 4)


@dataclass(frozen=True)
class Mark:
    """A break-even: from this cost on the grown model is lower than a rival, and the loss that both have there."""

    rival: str
    cost: float
    loss: float

    def words(self, unit: tuple[float, str]) -> str:
        return f"{self.rival}: {words.format_setting(self.cost / unit[0])} {unit[1]}"


def draw_system(
    runs: SystemRuns, gallery: Gallery, name: str, measure: str, answer: Mapping[str, Any], shape: Shape = HALF
) -> tuple[Picture, Picture]:
    """The picture of one base model and one wide width, and the same for a narrow page.

    measure: what the loss is called. answer: tells the break-evens.
    """
    marks, unit = find_marks(runs, answer), find_cost_unit(runs)
    over = f"mean and range over {runs.seeds} seeds" if runs.seeds > 1 else "one seed"
    caption = f"{measure.capitalize()} at the end of each budget, against cost; width {format_widths(runs)}; {over}"
    if (top := find_top(runs)) < math.inf:
        caption += f". Losses above {words.format_loss(top)} are not shown."
    finals = {one.shown: "diverged" if one.final is None else words.format_loss(one.final) for one in runs.contenders}
    ends = ", ".join(f"{shown} {final}" for shown, final in finals.items())
    alt = f"Final {measure} against cost. At the full budget: {ends}."
    alt += "".join(f" Break-even with {mark.words(unit)}." for mark in marks)
    dark = dark_colors(find_looks(runs.contenders).values())

    def draw(usual_shape: Shape, end: str) -> Picture:
        shape = usual_shape.with_room_for(len(runs.contenders))
        sketch = partial(sketch_system, runs=runs, measure=measure, shape=shape, marks=marks)
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
    """Lines of means with their range over seeds, axes, crosses for what diverged, break-evens, names at the ends."""
    (size, name), looks = find_cost_unit(runs), find_looks(runs.contenders)
    unit = size, plots.escape_text(name)
    costs: list[float] = []
    labels: list[EndLabel] = []
    lost: dict[str, list[float]] = {}
    for one in runs.contenders:
        look, spent = looks[one.name], [runs.charge(one) + point.cost for point in one.points]
        costs += spent
        usual = look.contender.is_usual
        strong = {"lw": 2.2, "ms": 4.5, "zorder": 4} if usual else {"lw": 1.1, "ms": 3.0, "zorder": 3}
        alive = [(cost, point.finite) for cost, point in zip(spent, one.points, strict=True) if point.mean is not None]
        if alive:
            add_line(ax, [cost for cost, _ in alive], [some for _, some in alive], look.color, marker="o", **strong)
        if len(alive) < len(spent):
            lost[one.name] = [cost for cost, point in zip(spent, one.points, strict=True) if point.mean is None]
        if one.final is not None:
            text = _wrap(f"{words.format_loss(one.final)} {one.shown}", shape)
            labels.append(EndLabel(text, look.color, (spent[-1], one.final), usual))
    low, high = min(costs), max(costs)
    room = (high / low) ** 0.03 if high > low else 1.1
    ax.set_xscale("log")
    ax.set_xlim(low / room, high * room)
    ticks = plots.round_numbers(low / room / unit[0], high * room / unit[0], shape.ticks)
    ax.set_xticks([tick * unit[0] for tick in ticks], [f"{tick:,.10g}" for tick in ticks])
    ax.xaxis.minorticks_off()
    base = "base model included" if runs.base_cost is not None else "base model not included"
    if runs.base_cost == 0:  # each cost is all that was spent
        ax.set_xlabel(f"cost, {unit[1]}")
    else:
        ax.set_xlabel(f"cost, {base}, {unit[1]}" if not shape.is_narrow else f"cost, {unit[1]},\n{base}")
    ax.set_ylabel(f"final {measure}")
    losses = [loss for one in runs.contenders for point in one.points for loss in point.finite]
    top = find_top(runs)
    plots.set_log_axis_if_wide(ax, [loss for loss in losses if loss <= top])
    if losses and max(losses) > top:
        ax.set_ylim(min(losses) - _MARGIN * (top - min(losses)), top)
    if not losses:
        ax.set_yticks([])
    rows = 2 if shape.is_narrow else 1
    heights = [(8.5 * 1.3 * rows + 7) / (0.75 * 72 * shape.size[1]) for _ in marks]
    crosses = plots.add_crosses(ax, [(at, looks[name].color) for name, at in lost.items()], sum(heights))
    for one, height in zip(filter(None, map(runs.get, lost)), crosses, strict=True):
        if one.final is None:
            look = looks[one.name]
            labels.append(EndLabel(_wrap(f"diverged: {one.shown}", shape), look.color, height, look.contender.is_usual))
    plots.add_end_labels(ax, labels, 8.0 if shape.is_narrow else 8.5)
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
    return top + _MARGIN * (top - low) if high > top else math.inf


def _wrap(text: str, shape: Shape) -> str:
    return "\n".join(textwrap.wrap(plots.escape_text(text), shape.letters, break_long_words=False))


def _add_marks(ax: Any, marks: Sequence[Mark], heights: Sequence[float], unit: tuple[float, str], rows: int) -> None:
    """A tick where two lines cross, and words for it below all lines."""
    box = ax.get_window_extent()
    bottom = 0.0
    for mark, height in zip(marks, heights, strict=True):
        x, y = (ax.transScale + ax.transLimits).transform((mark.cost, mark.loss))
        place = {"transform": ax.transAxes, "solid_capstyle": "butt"}
        ax.plot([x, x], [y - 0.035, y + 0.035], lw=1.8, zorder=6, color=plots.INK, **place)
        low = [bottom + height, y - 0.035]
        ax.plot([x, x], low, lw=0.9, ls=(0, (1, 2)), zorder=1, color=plots.MUTED, **place)
        text = f"break-even with{chr(10) if rows > 1 else ' '}{mark.words(unit)}"
        style: dict[str, Any] = {"ha": "left", "va": "center", "fontsize": 8.5, "color": plots.INK, "zorder": 6}
        style["bbox"] = {"fc": plots.PAPER, "ec": "none", "pad": 1.0}
        said = ax.text(0, bottom + height / 2, text, transform=ax.transAxes, linespacing=1.1, **style)
        width = said.get_window_extent().width / box.width
        said.set_x(min(max(x - width / 2, 0.03), max(0.03, 0.99 - width)))
        bottom += height


# ---------------------------------------------------------------------------------------------- losses during training

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
        return not (np.array_equal(self.lowest, self.low) and np.array_equal(self.highest, self.high))

    def moved(self, start: float, scale: float) -> CurveLine:
        diverged = [np.stack([start + scale * xs, values]) for xs, values in self.diverged]
        return replace(self, xs=start + scale * self.xs, diverged=diverged)

    @property
    def label(self) -> str:
        lost = sum(curve.status == "diverged" for curve in self.runs.curves)
        return plots.escape_text(self.look.short) + (f" ({lost} of {len(self.runs.curves)} diverged)" if lost else "")


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
            _add_curve(ax, line.moved(0.0, 1 / unit))
        if zoom and (limits := _zoom(drawn, what)):
            log = what == "held-out" and plots.set_log_axis_if_wide(ax, limits)
            ax.set_ylim(*_with_room(*limits, log=log, most=1.0 if what == "accuracy" and limits[1] <= 1 else math.inf))
        elif what != "accuracy":
            shown = [[line.lowest, line.highest, *(values for _, values in line.diverged)] for line in drawn]
            plots.set_log_axis_if_wide(ax, np.concatenate([one for some in shown for one in some]).tolist())
        ax.set_xlabel(f"training cost, {unit_name}" if against == "flops" else "steps of its own training")
        ax.set_ylabel(AXES[what] + (", zoomed" if is_part else ""))
        plots.set_count_axis(ax)
        if is_part and (reference := answer.get("reference")):
            label = plots.escape_text(reference["label"])
            ax.axhline(reference["loss"], color=plots.MUTED, lw=0.9, ls=(0, (1, 2)), zorder=1, label=label)
        plots.add_legend_below(ax, columns)

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
    kept = plots.keep_extremes(lowest, highest, _MOST)
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
    if len(plots.drop_partial_point(ends, "")) == len(ends):
        return table
    table[2, -2], table[3, -2] = table[2, -2:].min(), table[3, -2:].max()
    return table[:, :-1]


def _with_extremes(table: Any) -> Any:
    """Some points of one run, with the lowest and highest that any of them stands for in the place of its mean."""
    steps, values, lowest, highest = table.copy()
    values[highest.argmax()], values[lowest.argmin()] = highest.max(), lowest.min()
    return np.stack([steps, values])[:, plots.keep_extremes(values, values, _MOST)]


def _add_curve(ax: Any, line: CurveLine) -> None:
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


# ---------------------------------------------------------------------------------------------- the gain

Gain = Mapping[str, float | None]
_EFFECTS = (("learning_rate", "learning\nrate"), ("head_start", "head\nstart"), ("noise", "noise"))
START, END = contender_named("from-scratch"), contender_named("copies")
_IN_WATERFALL = (START.name, "from-scratch-changed", END.name)


def draw_gain(gain: Gain, gallery: Gallery) -> Iterator[Picture]:
    """A waterfall, where both ends of it are known. gain: final losses by contender, and each effect's part."""
    start, end = gain.get(START.name), gain.get(END.name)
    if words.is_finite_number(start) and words.is_finite_number(end):
        alt = f"From scratch {words.format_loss(start)}, upscaled {words.format_loss(end)}. {describe_gain(gain)}"
        caption = "What lowers the final loss at equal cost, from training from scratch to the upscaled model"
        for what, found in {", and to that": _others(gain, "grown"), "; the line:": _alternative(gain)}.items():
            for one, value in found:
                alt = f"{alt.strip()} {one.label.capitalize()}: {words.format_loss(value)}."
                caption += f"{what} {one.label}"
        dark = dark_colors(Look(one, one.short) for one in CONTENDERS)
        yield gallery.draw("gain", alt.strip(), caption, lambda ax: _waterfall(ax, gain), size=(4.8, 3.3), dark=dark)


def describe_gain(gain: Gain) -> str:
    """How much each effect takes off the loss."""
    effects = [(name.replace("_", " "), gain.get(name)) for name, _ in _EFFECTS]
    changes = [f"{name} {_signed(value, gain)}" for name, value in effects if words.is_finite_number(value)]
    return f"Change in loss from each effect: {', '.join(changes)}." if changes else ""


def _signed(value: float, gain: Gain) -> str:
    """A gain lowers the loss; with three digits of the loss that is taken apart."""
    whole, digits = gain.get(START.name), 3
    if words.is_finite_number(whole) and whole > 0:
        digits = max(3, 2 - math.floor(math.log10(whole)))
    shown = f"{abs(value):.{digits}f}"
    return f"{'±' if not float(shown) else '−' if value > 0 else '+'}{shown}"


def _alternative(gain: Gain) -> list[tuple[Contender, float]]:
    """What growing competes with, and is not in the waterfall: the best baseline of these, if there is one."""
    return sorted(_others(gain, "baseline"), key=lambda pair: pair[1])[:1]


def _others(gain: Gain, kind: str) -> Iterator[tuple[Contender, float]]:
    """Contenders of a kind that are not in the waterfall itself, and their losses."""
    for one in CONTENDERS:
        if one.kind == kind and one.name not in _IN_WATERFALL and words.is_finite_number(value := gain.get(one.name)):
            yield one, value


def _waterfall(ax: Any, gain: Gain) -> None:
    start, end = gain[START.name], gain[END.name]
    assert start is not None
    assert end is not None
    names, level, seen = ["from\nscratch"], start, [start, end]
    for key, name in _EFFECTS:
        value = gain.get(key)
        if not words.is_finite_number(value):
            continue
        at = len(names)
        ax.bar(at, -value, bottom=level, width=0.62, color=plots.GOOD if value >= 0 else plots.BAD, zorder=3)
        ax.plot([at - 1 + (0.31 if at > 1 else 0.2), at + 0.31], [level, level], color=plots.MUTED, lw=0.8, zorder=2)
        _number(ax, at, max(level, level - value), _signed(value, gain))
        level -= value
        seen.append(level)
        names.append(name)
    ax.plot([len(names) - 1 + 0.31, len(names)], [level, end], color=plots.MUTED, lw=0.8, zorder=2)
    ends = [(0, start, START), (len(names), end, END)]
    names.append("upscaled")
    for one, value in _others(gain, "grown"):
        ends.append((len(names), value, one))
        seen.append(value)
        names.append(f"upscaled\n{one.paper.letter}")
    for at, value, one in ends:
        ax.plot(at, value, "D", ms=8, color=Look(one, one.short).color, zorder=4)
        _number(ax, at, value, words.format_loss(value), 7)
    for one, value in _alternative(gain):
        seen.append(value)
        ax.axhline(value, lw=1.2, zorder=1, label=one.label, **Look(one, one.short).line)
        ax.legend(loc="upper right")
    room = max(seen) - min(seen) or abs(start) or 1.0
    lowest = min(seen) - 0.15 * room
    ax.set_ylim(max(0.0, lowest) if min(seen) >= 0 else lowest, max(seen) + 0.3 * room)
    ax.set_xlim(-0.5, len(names) - 0.5)
    ax.set_xticks(range(len(names)), names)
    ax.grid(axis="x", visible=False)
    ax.set_ylabel("final loss")


def _number(ax: Any, x: float, y: float, text: str, above: float = 3) -> None:
    at: dict[str, Any] = {"textcoords": "offset points", "ha": "center", "va": "bottom"}
    ground = {"fc": plots.PAPER, "ec": "none", "pad": 0.8}
    ax.annotate(text, (x, y), xytext=(0, above), fontsize=8.5, zorder=5, bbox=ground, **at)
