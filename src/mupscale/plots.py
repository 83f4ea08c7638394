"""The drawing kit: pictures for a page and for a folder, heat maps, axes, words at the ends of lines.

It knows no model and no run. A picture is drawn once, written as PNG and SVG, and recoloured for a dark page.
matplotlib is imported only when one is asked for; pyplot never is: it opens windows.
"""

from __future__ import annotations

import math
import re
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise, product
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from mupscale.system import MupscaleError, make_folder, replace_text, replacing, require, words

Point = tuple[float, float]
"""Of a curve; or a heat map's cell: a value of the columns and one of the rows."""
COLORS = ("#4c566a", "#2a7fb8", "#d1495b", "#e0a030", "#3a9d6e", "#8e5ea2", "#8c6d46", "#17a2a2")
_ON_DARK = ("#c9d3e0", "#5fb0e6", "#ff7585", "#f0bd55", "#5ccb98", "#c39ad8", "#cfab7e", "#3fd0d0")
GREY = "#9aa5b1"
INK, PAPER, MUTED = "#1f2933", "#ffffff", "#66727f"
DARK_PAPER = "#171c23"
LEVELS = ("#2a7fb8", "#6f63b0", "#c2477f", "#d9603f", "#e0a030")
"""From low to high, legible on white and on black."""
GOOD, BAD = COLORS[4], COLORS[2]
_DARK = {
    INK: "#e4e8ee",
    PAPER: DARK_PAPER,
    MUTED: "#9aa7b5",
    "#000000": "#e4e8ee",
    **dict(zip(COLORS, _ON_DARK, strict=True)),
    "#b5538a": "#ea8cc0",
    "#6a5acd": "#a79cff",
    "#8c1c2e": "#ff9d8a",
    "#4f3a17": "#e8d3a8",
}
_STYLE: dict[str, Any] = {
    "text.usetex": False,
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"), INK),
    **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color", "hatch.color"), MUTED),
    **dict.fromkeys(("font.size", "axes.labelsize"), 9.5),
    **dict.fromkeys(("xtick.labelsize", "ytick.labelsize", "legend.fontsize"), 8.5),
    "legend.frameon": False,
    "hatch.linewidth": 0.7,
    "svg.fonttype": "path",
}


def find_contrast(color: str, paper: str) -> float:
    """How far two colours lie apart in brightness: 1 for the same, 21 for black and white (as WCAG counts it)."""
    low, high = sorted((_brightness(color), _brightness(paper)))
    return (high + 0.05) / (low + 0.05)


def with_contrast(color: str, paper: str, least: float = 4.5) -> str:
    """The same colour, as much darker or lighter as letters on this paper need; unchanged where it is legible as it is.

    >>> with_contrast("#c98a1b", "#ffffff"), with_contrast("#4c566a", "#ffffff"), with_contrast("#4c566a", "#171c23")
    ('#9d6c15', '#4c566a', '#7e8594')
    """
    from matplotlib.colors import to_hex, to_rgb

    end, mixed = 0.0 if _brightness(paper) > 0.5 else 1.0, color
    for step in range(51):
        red, green, blue = (part + (end - part) * step / 50 for part in to_rgb(color))
        mixed = to_hex((red, green, blue))
        if find_contrast(mixed, paper) >= least:
            break
    return mixed


def _brightness(color: str) -> float:
    from matplotlib.colors import to_rgb

    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in to_rgb(color))
    return float(0.2126 * red + 0.7152 * green + 0.0722 * blue)


def figure(width: float = 7.0, height: float = 4.2, columns: int = 1) -> tuple[Any, Any]:
    """A figure and its axes in the house style; several columns give an array of axes."""
    require("matplotlib", reason="pictures need matplotlib")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    fig = FigureCanvasAgg(Figure(figsize=(width, height), layout="constrained", dpi=150)).figure
    axes: Any = fig.subplots(1, columns)
    for ax in axes if columns > 1 else (axes,):
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(alpha=0.25, linewidth=0.6)
    return fig, axes


def save_figure(fig: Any, path: Path) -> Path:
    """Write the figure, in the format that the file's name says (PNG where it says none); an error names the file.

    A link of that name is replaced, and what it leads to stays.
    """
    path = path if path.suffix else path.with_suffix(".png")
    kind = path.suffix.removeprefix(".")
    matplotlib: Any = require("matplotlib", reason="pictures need matplotlib")
    for text in fig.findobj(lambda part: hasattr(part, "set_usetex")):
        text.set_usetex(False)  # a matplotlibrc in the current folder may ask for LaTeX, with its own code
    try:
        make_folder(path.parent)
        with replacing(path, durable=False) as temporary, matplotlib.rc_context({"text.usetex": False}):
            fig.savefig(temporary, format=kind, metadata={"Date": None} if kind == "svg" else None)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise MupscaleError(f"the picture {path} cannot be written: {reason}") from None
    return path


@dataclass(frozen=True)
class Picture:
    """A picture that is written to a folder, and its SVG for a page. alt says in words what it shows.

    dark: colours of its own for a dark page, by those of a light one.
    """

    name: str
    alt: str
    caption: str
    svg: str
    dark: Mapping[str, str] = field(default_factory=dict)

    def source(self, dark: bool = False) -> str:
        """The picture as a data: address, for the src of an <img>."""
        svg = recolour_for_dark(self.svg, self.dark) if dark else self.svg
        return "data:image/svg+xml;base64," + b64encode(svg.encode()).decode()


@dataclass
class Gallery:
    """A folder of pictures; each is drawn by a function of its axes."""

    folder: Path
    prefix: str = ""

    def draw(
        self,
        name: str,
        alt: str,
        caption: str,
        sketch: Callable[[Any], None],
        *,
        size: tuple[float, float] = (4.8, 3.5),
        dark: Mapping[str, str] | None = None,
    ) -> Picture:
        """Draw one pair of axes in the house style, and write it as PNG and SVG."""
        name = words.safe_file_name(f"{self.prefix}{name}")
        svg = self.folder / f"{name}.svg"
        with styled(name):
            fig, ax = figure(*size)
            sketch(ax)
            save_figure(fig, svg.with_suffix(".png"))
            fig.set_layout_engine(None)  # laid out by now; "none" would draw once more to find out
            save_figure(fig, svg)
        text = _shorter(svg.read_text(encoding="utf-8"))
        replace_text(svg, text)
        return Picture(name, alt, caption, text, dark or {})


def recolour_for_dark(svg: str, more: Mapping[str, str] | None = None) -> str:
    """The same picture for a dark page. more: colours beside the house's, or instead of them."""
    colors = {**_DARK, **(more or {})}
    return re.sub(r"#[0-9a-f]{6}\b", lambda match: colors.get(match[0], match[0]), svg)


def escape_text(text: str, longest: int = 40) -> str:
    """A text that matplotlib shows as it is, and not as a formula; long ones are cut.

    >>> escape_text("costs $5"), escape_text("a long label", longest=7)
    ('costs \\\\$5', 'a long…')
    """
    shown = text if len(text) <= longest else text[: longest - 1] + "…"
    return shown.replace("$", r"\$").lstrip("_")


def level_colors() -> Any:
    """The colours of a sequence of levels, from 0 for the lowest to 1 for the highest.

    >>> from matplotlib.colors import to_hex
    >>> to_hex(level_colors()(0.0)), to_hex(level_colors()(1.0))
    ('#2a7fb8', '#e0a030')
    """
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("levels", LEVELS, N=64)


def drop_partial_point(points: list[Point], status: str) -> list[Point]:
    """A curve without a last point that is the mean of far fewer steps than the others, and so jumps.

    One that diverged keeps it: it is where it ended.
    """
    if status == "diverged" or len(points) < 3:
        return points
    (first, _), (second, _), (before, _), (last, _) = *points[:2], *points[-2:]
    return points[:-1] if 2 * (last - before) < second - first else points


def set_log_axis_if_wide(ax: Any, losses: Sequence[float], factor: float = 5.0) -> bool:
    """Make the y axis logarithmic for losses that lie further apart than this factor; whether it is.

    >>> _, ax = figure()
    >>> set_log_axis_if_wide(ax, [1.0, 2.0]), set_log_axis_if_wide(ax, [0.01, 2.0]), ax.get_yscale()
    (False, True, 'log')
    """
    if not (losses and min(losses) > 0 and max(losses) > factor * min(losses)):
        return False
    from matplotlib.ticker import LogLocator, NullFormatter

    ax.set_yscale("log")
    ax.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    ax.yaxis.set_major_formatter("{x:.4g}")
    ax.yaxis.set_minor_formatter(NullFormatter())
    return True


def set_count_axis(ax: Any) -> None:
    """Whole numbers along x, such as steps, few enough to stand beside each other."""
    ax.xaxis.set_major_formatter("{x:,g}")
    ax.locator_params(axis="x", nbins=6)


def add_legend_below(ax: Any, columns: int = 2) -> None:
    """A legend under the axes, where it hides nothing."""
    handles, labels = ax.get_legend_handles_labels()
    if handles:
        ax.figure.legend(
            handles, labels, loc="outside lower center", ncols=columns, handlelength=2.2, columnspacing=1.4
        )


@contextmanager
def styled(salt: str) -> Iterator[None]:
    """The report's colours and letters. salt: for names inside an SVG."""
    matplotlib = require("matplotlib", reason="pictures need matplotlib")
    rc: Any = {**_STYLE, "svg.hashsalt": salt}
    with matplotlib.rc_context(rc):
        yield


def _shorter(svg: str) -> str:
    """Without what no viewer shows: metadata, comments, and digits of paths beyond a hundredth of a point."""
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", svg, flags=re.S)
    svg = re.sub(r"\s*\n\s*", "\n", svg)
    rounded = re.compile(r"(\.\d\d)\d+")
    return re.sub(r' d="[^"]*"', lambda path: rounded.sub(r"\1", path[0]), svg)


# ---------------------------------------------------------------------------------------------- lines and their axes

_ROW = 0.045  # of the axes' height, for a row of crosses


def set_value_axis(ax: Any, values: Sequence[float], part: float = 0.8) -> None:
    """Make x logarithmic, labelled at these values as far as there is room; to zero, where that is one, it is linear.

    part: of the figure's width, which all axes have together.
    """
    xs = sorted(set(values))
    positive = [x for x in xs if x > 0]
    if not positive:
        return
    if len(positive) < len(xs):
        ax.set_xscale("symlog", linthresh=positive[0], linscale=0.5)
    else:
        room = (xs[-1] / xs[0]) ** 0.04 if len(xs) > 1 else 2.0
        ax.set_xscale("log")
        ax.set_xlim(xs[0] / room, xs[-1] * room)
    # those values whose labels fit beside each other: the ends, and of the others as many as there is room for
    inches: float = part * ax.figure.get_figwidth() / len(ax.figure.axes)
    scaled: list[float] = ax.xaxis.get_transform().transform(xs).tolist()
    unit = inches / ((scaled[-1] - scaled[0]) or 1.0)
    at = {x: unit * place for x, place in zip(xs, scaled, strict=True)}
    wide = {x: 0.075 * (len(words.format_setting(x)) + 0.5) for x in xs}  # inches a letter, and half a one between two
    shown = {xs[0], xs[-1]}
    for x in xs[1:-1]:
        if all(abs(at[x] - at[other]) > (wide[x] + wide[other]) / 2 for other in shown):
            shown.add(x)
    ax.set_xticks(xs, [words.format_setting(x) if x in shown else "" for x in xs])
    ax.xaxis.minorticks_off()


def round_numbers(low: float, high: float, most: int) -> list[float]:
    """Round numbers between these for a logarithmic axis: as many as there is room for.

    >>> round_numbers(190, 1050, 4), round_numbers(3, 70000, 5)
    ([200.0, 500.0, 1000.0], [10.0, 100.0, 1000.0, 10000.0])
    """
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found: list[float] = []
    for heads in ((1,), (1, 2, 5), (1, 1.5, 2, 3, 5, 7), (1, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9)):
        numbers = [float(f"{head * 10.0**power:.3g}") for power in powers for head in heads]
        numbers = [number for number in numbers if low <= number <= high]
        if (found and len(numbers) > most) or (len(heads) > 6 and len(found) > 2):
            break
        found = numbers
    return found[:: max(1, -(-len(found) // most))]


def add_crosses(ax: Any, rows: Sequence[tuple[Sequence[float], Any]], below: float = 0.0) -> list[float]:
    """A × above all lines for everything that has no loss: a row of places and a colour for each line that has some.

    Gives the rows' heights, as parts of the axes'. below: the part that is to stay free below the lines.

    >>> _, ax = figure()
    >>> ax.set_ylim(0.0, 0.9) and add_crosses(ax, [([1.0, 2.0], "#2a7fb8"), ([2.0], "#c44e52")], below=0.01)
    [0.9775, 0.9325]
    >>> [round(float(limit), 3) for limit in ax.get_ylim()]
    [-0.01, 0.99]
    """
    apart = min(_ROW, 0.35 / max(1, len(rows)))
    is_log, inside = ax.get_yscale() == "log", 1 - below - apart * len(rows)
    low, high = (math.log(limit) if is_log else limit for limit in ax.get_ylim())
    whole = (high - low) / inside
    limits = (low - below * whole, high + apart * len(rows) * whole)
    ax.set_ylim(*(math.exp(limit) if is_log else limit for limit in limits))
    heights = [1 - apart * (row + 0.5) for row in range(len(rows))]
    for at, (xs, color) in zip(heights, rows, strict=True):
        ax.plot(xs, [at] * len(xs), "x", ms=5.5, mew=1.6, color=color, transform=ax.get_xaxis_transform(), zorder=5)
    return heights


def keep_extremes(low: Sequence[float], high: Sequence[float], most: int) -> list[int]:
    """Which points to draw: of every stretch the lowest and the highest, and the first and the last of all.

    >>> values = [1.0] * 50 + [9.0] + [1.0] * 49
    >>> [values[i] for i in keep_extremes(values, values, 6)]
    [1.0, 9.0, 1.0, 1.0]
    """
    count = len(low)
    if count <= most:
        return list(range(count))
    lows, highs = np.nan_to_num(np.asarray(low), nan=np.inf), np.nan_to_num(np.asarray(high), nan=-np.inf)
    edges = np.linspace(0, count, max(1, (most - 2) // 2) + 1).astype(int).tolist()
    kept = {0, count - 1}
    for start, end in pairwise(edges):
        kept |= {start + int(lows[start:end].argmin()), start + int(highs[start:end].argmax())}
    return sorted(kept)


_LEADER = 13.0  # points between the axes and the words, crossed by a thin line from a curve's end
_APART = 3.0  # points between two labels at least


@dataclass(frozen=True)
class EndLabel:
    """Words for a line. end: where it ends, as x and y of the data; y alone is a part of the axes' height."""

    text: str
    color: str
    end: tuple[float, float] | float
    is_strong: bool = True


def add_end_labels(ax: Any, labels: Sequence[EndLabel], size: float = 8.5) -> list[Any]:
    """Write them, each as near to its line's end as the others leave room; the limits of the axes are final by now.

    >>> fig, ax = figure()
    >>> _ = ax.plot([1, 2], [1.0, 1.0]), ax.plot([1, 2], [1.2, 1.01])
    >>> ends = [EndLabel("first", "#2a7fb8", (2, 1.0)), EndLabel("second", "#c44e52", (2, 1.01))]
    >>> low, high = (text.get_window_extent() for text in add_end_labels(ax, ends))
    >>> bool(low.y1 < high.y0), bool(ax.get_ylim()[0] > 0.9)
    (True, True)
    """
    from matplotlib.lines import Line2D

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
    places = ax.transScale + ax.transLimits  # from data to parts of the axes
    ends = [label.end for label in labels]
    wanted = [float(places.transform(end)[1]) if isinstance(end, tuple) else end for end in ends]
    heights = [(text.get_window_extent().height + _APART * point) / box.height for text in texts]
    for text, label, at in zip(texts, labels, spread_apart(wanted, heights), strict=True):
        text.xy = (1.0, at)
        if isinstance(label.end, tuple):  # a thin line from the curve's end to its words
            look: dict[str, Any] = {"lw": 0.7, "color": label.color, "alpha": 0.8, "clip_on": False}
            (x, y), end = places.transform(label.end), 1.0 + _LEADER * point / box.width
            line = Line2D([x, 1.0, end], [y, y, at], transform=ax.transAxes, **look)
            line.set_in_layout(False)
            ax.add_artist(line)  # which leaves the limits of the axes as they are
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
    groups: list[list[float]] = []  # the nearest levels that never fall: those that do are replaced by their mean
    for number, offset in zip(order, offsets, strict=True):
        groups.append([wanted[number] - offset])
        while len(groups) > 1 and fmean(groups[-2]) > fmean(groups[-1]):
            groups[-2:] = [groups[-2] + groups[-1]]
    levels = [fmean(group) for group in groups for _ in group]
    most = max(low, high - before)
    placed = [min(max(level, low), most) + offset for level, offset in zip(levels, offsets, strict=True)]
    by_number = dict(zip(order, placed, strict=True))
    return [round(by_number[number], 12) for number in range(len(wanted))]


# ---------------------------------------------------------------------------------------------- heat maps

STAR = {"marker": "*", "color": "#ff4d2e", "markeredgecolor": "#14181d", "markeredgewidth": 0.8}
"""The look of an optimum."""
_COLUMNS_WITH_TEXT = 8  # as many leave room for numbers


@dataclass(frozen=True)
class HeatMap:
    """What a heat map shows; a cell that is in none of numbers, crossed and hatched stays empty.

    reference: columns are also labelled as multiples of it, where there is room. Labels that are empty are left out. A
    first row of 0 is called none, and a line sets it apart.
    """

    columns: Sequence[float]
    rows: Sequence[float]
    numbers: Mapping[Point, float]
    crossed: AbstractSet[Point] = frozenset()
    hatched: AbstractSet[Point] = frozenset()
    best: Point | None = None
    reference: float | None = None
    column_label: str = ""
    reference_label: str = ""
    row_label: str = ""
    crossed_label: str = ""
    hatched_label: str = ""

    @property
    def with_text(self) -> bool:
        return len(self.columns) <= _COLUMNS_WITH_TEXT


def draw_heat_map(ax: Any, heat_map: HeatMap) -> None:
    """Draw cells, the best one's star, a legend, both axes and a colour bar.

    >>> _, ax = figure()
    >>> draw_heat_map(ax, HeatMap([0.1, 0.2], [0.0, 1.0], {(0.1, 0.0): 3.0, (0.2, 1.0): 2.0}, best=(0.2, 1.0)))
    >>> [text.get_text() for text in ax.texts], [label.get_text() for label in ax.get_yticklabels()]
    (['3.000', '2.000'], ['0 (none)', '1'])
    """
    from matplotlib.patches import Patch, Rectangle

    color = number_colors(list(heat_map.numbers.values()))
    columns, rows, reference = heat_map.columns, heat_map.rows, heat_map.reference
    for place in product(columns, rows):
        column, row = columns.index(place[0]), rows.index(place[1])
        corner = column - 0.5, row - 0.5
        if place in heat_map.crossed:
            ax.plot(column, row, "x", ms=5, color=BAD, mew=1)
        elif place in heat_map.hatched:
            ax.add_patch(Rectangle(corner, 1, 1, fc="none", ec=MUTED, hatch="////", lw=0))
        elif place in heat_map.numbers:
            face = color.to_rgba(heat_map.numbers[place])
            ax.add_patch(Rectangle(corner, 1, 1, fc=face, ec=PAPER, lw=1))
            if heat_map.with_text:
                dark_face = 0.3 * face[0] + 0.59 * face[1] + 0.11 * face[2] < 0.5
                style: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 7.5}
                at, ink = row - (0.2 if place == heat_map.best else 0), "#fdfdfd" if dark_face else "#101418"
                ax.text(column, at, words.format_loss(heat_map.numbers[place]), color=ink, **style)
    if heat_map.best is not None:
        column, row = columns.index(heat_map.best[0]), rows.index(heat_map.best[1])
        up, size = (0.22, 10) if heat_map.with_text else (0, 12)
        ax.plot(column, row + up, ms=size, ls="", zorder=5, label="optimum", **STAR)
    if heat_map.crossed_label:
        ax.plot([], [], "x", ms=5, color=BAD, label=heat_map.crossed_label)
    handles, labels = ax.get_legend_handles_labels()
    if heat_map.hatched_label:
        handles.append(Patch(fc="none", ec=MUTED, hatch="////", lw=0.5))
        labels.append(heat_map.hatched_label)
    if handles:
        ax.figure.legend(handles, labels, loc="outside lower center", ncols=3)
    ax.grid(False)
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0)
    ax.set_xlim(-0.5, len(columns) - 0.5)
    ax.set_ylim(-0.5, len(rows) - 0.5)
    ticks, label = [words.format_setting(value) for value in columns], heat_map.column_label
    if heat_map.with_text and words.is_finite_number(reference) and reference > 0:
        factors = [value / reference for value in columns]
        times = [f"÷{1 / factor:.2g}" if factor < 0.995 else f"×{factor:.2g}" for factor in factors]
        ticks, label = [f"{tick}\n{n}" for tick, n in zip(ticks, times, strict=True)], heat_map.reference_label
    ax.set_xlabel(label)
    ax.set_xticks(range(len(columns)), ticks, rotation=0 if heat_map.with_text else 45, fontsize=8)
    ax.set_yticks(range(len(rows)), ["0 (none)" if value == 0 else words.format_setting(value) for value in rows])
    ax.set_ylabel(heat_map.row_label)
    if rows[0] == 0 and len(rows) > 1:
        ax.axhline(0.5, color=INK, lw=1.2)
    add_color_bar(ax, color)


def number_colors(numbers: Sequence[float | None]) -> Any:
    """Colours of numbers, the lowest the brightest; None without any number.

    Far above the lowest all have one colour, so that differences near it can be seen.

    >>> [round(number, 2) for number in number_colors([1.0, 1.1, 1.2, 9.0]).get_clim()]
    [1.0, 1.45]
    """
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    finite = [number for number in numbers if words.is_finite_number(number)]
    if not finite:
        return None
    low, high = min(finite), max(finite)
    high = min(high, low + 3 * (median(finite) - low)) if len(finite) > 2 and median(finite) > low else high
    cmap: Any = colormaps["viridis_r"].copy()
    cmap.colorbar_extend = "max" if high < max(finite) else "neither"
    return ScalarMappable(Normalize(low, high if high > low else low + 1e-12), cmap)


def add_color_bar(ax: Any, color: Any, label: str = "loss") -> None:
    """A bar beside the axes that says which colour is which number; none where there are no colours.

    >>> _, ax = figure()
    >>> add_color_bar(ax, number_colors([1.0, 2.0]), "error")
    >>> ax.figure.axes[-1].get_title(loc="left")
    'error'
    """
    from matplotlib.ticker import ScalarFormatter

    if color is None:
        return
    digits = ScalarFormatter(useOffset=False)  # as many as tell the ticks apart, the same for all
    digits.set_scientific(False)
    bar = ax.figure.colorbar(color, ax=ax, pad=0.02, aspect=24)
    bar.solids.set_rasterized(True)
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=2, labelsize=8)
    bar.ax.yaxis.set_major_formatter(digits)
    low, high = color.get_clim()
    if high - low <= 1e-9 * abs(low):  # all numbers are the same
        bar.set_ticks([low], labels=[words.format_loss(low)])
    bar.ax.set_title(label, fontsize=8, loc="left", color=INK)
