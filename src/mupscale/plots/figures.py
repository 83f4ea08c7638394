"""The look of every picture, and colours that can be read. matplotlib is imported only when one is asked for.

pyplot never is: it opens windows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mupscale.system import MupscaleError, make_folder, replacing, require

_STEPS = 50


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
    for step in range(_STEPS + 1):
        red, green, blue = (part + (end - part) * step / _STEPS for part in to_rgb(color))
        mixed = to_hex((red, green, blue))
        if find_contrast(mixed, paper) >= least:
            break
    return mixed


def _brightness(color: str) -> float:
    from matplotlib.colors import to_rgb

    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in to_rgb(color))
    return float(0.2126 * red + 0.7152 * green + 0.0722 * blue)


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
