"""Pictures for a page and for a folder: drawn once, written as PNG and SVG, and recoloured for a dark page.

matplotlib is imported only when one is asked for; pyplot never is: it opens windows.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mupscale.system import MupscaleError, make_folder, replace_text, replacing, require, words

Point = tuple[float, float]
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
    names: set[str] = field(default_factory=set)

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
        wanted, number = words.safe_file_name(f"{self.prefix}{name}"), 2
        name = wanted
        while name in self.names:
            name, number = f"{wanted}-{number}", number + 1
        self.names.add(name)
        png, svg = self.folder / f"{name}.png", self.folder / f"{name}.svg"
        try:
            with styled(name):
                fig, ax = figure(*size)
                sketch(ax)
                save_figure(fig, png)
                fig.set_layout_engine(None)  # laid out by now; "none" would draw once more to find out
                save_figure(fig, svg)
            text = _shorter(svg.read_text(encoding="utf-8"))
            replace_text(svg, text)
        except OSError as error:
            raise MupscaleError(f"{error.filename or png} cannot be written ({error.strerror})") from None
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
