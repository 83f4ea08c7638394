"""Words at the ends of lines instead of a legend: in a column to the right of the axes, none upon another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_LEADER = 13.0
"""Points between the axes and the words, crossed by a thin line from a curve's end."""
_APART = 3.0
"""Points between two labels at least."""


@dataclass(frozen=True)
class EndLabel:
    """Words for a line. end: where it ends, as x and y of the data; y alone is a part of the axes' height.

    >>> EndLabel("continued", "#c98a1b", end=(1e9, 0.61)).is_strong
    True
    """

    text: str
    color: str
    end: tuple[float, float] | float
    is_strong: bool = True


def add_end_labels(ax: Any, labels: Sequence[EndLabel], size: float = 8.5) -> list[Any]:
    """Write them, each as near to its line's end as the others leave room; the limits of the axes are final by now.

    >>> from mupscale.plots import figure
    >>> fig, ax = figure()
    >>> _ = ax.plot([1, 2], [1.0, 1.0]), ax.plot([1, 2], [1.2, 1.01])
    >>> ends = [EndLabel("first", "#2a7fb8", (2, 1.0)), EndLabel("second", "#c44e52", (2, 1.01))]
    >>> low, high = (text.get_window_extent() for text in add_end_labels(ax, ends))
    >>> bool(low.y1 < high.y0), bool(ax.get_ylim()[0] > 0.9)
    (True, True)
    """
    fig = ax.figure
    texts = [
        ax.annotate(
            label.text,
            (1.0, 0.5),
            xycoords="axes fraction",
            xytext=(_LEADER + 3, 0),
            textcoords="offset points",
            va="center",
            ha="left",
            linespacing=1.05,
            color=label.color,
            fontsize=size,
            fontweight="bold" if label.is_strong else "normal",
            annotation_clip=False,
        )
        for label in labels
    ]
    if not texts:
        return texts
    fig.draw_without_rendering()  # from here on the axes have the size that the words leave them
    box, point = ax.get_window_extent(), fig.dpi / 72
    wanted = [_height_of(ax, label.end) for label in labels]
    heights = [(text.get_window_extent().height + _APART * point) / box.height for text in texts]
    places = spread_apart(wanted, heights)
    for text, label, at in zip(texts, labels, places, strict=True):
        text.xy = (1.0, at)
        _add_leader(ax, label, at, _LEADER * point / box.width)
    return texts


def spread_apart(wanted: Sequence[float], sizes: Sequence[float], low: float = 0.0, high: float = 1.0) -> list[float]:
    """Centres of pieces of these sizes as near to the wanted ones as they can be without overlapping, in their order.

    Between low and high as long as there is room for all; then beyond high.

    >>> spread_apart([0.5, 0.5, 0.9], [0.2, 0.2, 0.2])
    [0.4, 0.6, 0.9]
    >>> spread_apart([0.0], [0.2])
    [0.1]
    """
    order = sorted(range(len(wanted)), key=lambda number: wanted[number])
    before, offsets = 0.0, []
    for number in order:
        offsets.append(before + sizes[number] / 2)
        before += sizes[number]
    levels = _rising([wanted[number] - offset for number, offset in zip(order, offsets, strict=True)])
    most = max(low, high - before)
    placed = [min(max(level, low), most) + offset for level, offset in zip(levels, offsets, strict=True)]
    by_number = dict(zip(order, placed, strict=True))
    return [round(by_number[number], 12) for number in range(len(wanted))]


def _rising(values: Sequence[float]) -> list[float]:
    """The nearest values that never fall: those that do are replaced by their mean."""
    groups: list[list[float]] = []
    for value in values:
        groups.append([value])
        while len(groups) > 1 and sum(groups[-2]) / len(groups[-2]) > sum(groups[-1]) / len(groups[-1]):
            groups[-2:] = [groups[-2] + groups[-1]]
    return [sum(group) / len(group) for group in groups for _ in group]


def _height_of(ax: Any, end: tuple[float, float] | float) -> float:
    """A part of the axes' height."""
    if not isinstance(end, tuple):
        return end
    return float((ax.transScale + ax.transLimits).transform(end)[1])


def _add_leader(ax: Any, label: EndLabel, at: float, width: float) -> None:
    """A thin line from the curve's end to its words."""
    from matplotlib.lines import Line2D

    if not isinstance(label.end, tuple):
        return
    x, y = (ax.transScale + ax.transLimits).transform(label.end)
    look: dict[str, Any] = {"lw": 0.7, "color": label.color, "alpha": 0.8, "clip_on": False}
    line = Line2D([x, 1.0, 1.0 + width], [y, y, at], transform=ax.transAxes, **look)
    line.set_in_layout(False)
    ax.add_artist(line)  # which leaves the limits of the axes as they are
