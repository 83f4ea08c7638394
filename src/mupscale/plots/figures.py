"""The look of every picture, and colours that can be read. matplotlib is imported only when one is asked for.

pyplot never is: it opens windows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mupscale.system import MupscaleError, make_folder, replacing, require

_BLACK, _WHITE = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
_STEPS = 50
Rgb = tuple[float, float, float]


def find_contrast(color: str, paper: str) -> float:
    """How far two colours lie apart in brightness: 1 for the same, 21 for black and white (as WCAG counts it)."""
    return _contrast(_rgb(color), _rgb(paper))


def with_contrast(color: str, paper: str, least: float = 4.5) -> str:
    """The same colour, as much darker or lighter as letters on this paper need; unchanged where it is legible as it is.

    >>> with_contrast("#c98a1b", "#ffffff"), with_contrast("#4c566a", "#ffffff"), with_contrast("#4c566a", "#171c23")
    ('#9d6c15', '#4c566a', '#7e8594')
    """
    own, ground = _rgb(color), _rgb(paper)
    if _contrast(own, ground) >= least:
        return color
    end = _BLACK if _brightness(ground) > 0.5 else _WHITE
    for step in range(1, _STEPS + 1):
        mixed = _rgb(_hex(_mix(own, end, step / _STEPS)))
        if _contrast(mixed, ground) >= least:
            return _hex(mixed)
    return _hex(end)


def _contrast(one: Rgb, other: Rgb) -> float:
    low, high = sorted((_brightness(one), _brightness(other)))
    return (high + 0.05) / (low + 0.05)


def _brightness(rgb: Rgb) -> float:
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in rgb)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _mix(one: Rgb, other: Rgb, share: float) -> Rgb:
    red, green, blue = (a + (b - a) * share for a, b in zip(one, other, strict=True))
    return red, green, blue


def _rgb(color: str) -> Rgb:
    red, green, blue = (int(color[at : at + 2], 16) / 255 for at in (1, 3, 5))
    return red, green, blue


def _hex(rgb: Rgb) -> str:
    return "#" + "".join(f"{round(255 * part):02x}" for part in rgb)


COLORS = ("#4c566a", "#2a7fb8", "#d1495b", "#e0a030", "#3a9d6e", "#8e5ea2", "#8c6d46", "#17a2a2")
GREY = "#9aa5b1"


def figure(width: float = 7.0, height: float = 4.2, columns: int = 1) -> tuple[Any, Any]:
    """A figure and its axes in the house style; several columns give an array of axes.

    >>> fig, ax = figure(width=4, height=3)
    >>> ax.spines["top"].get_visible()
    False
    """
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
