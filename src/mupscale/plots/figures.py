"""The look of every picture. matplotlib is imported only when one is asked for, and pyplot never: it opens windows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mupscale.system import MupscaleError, make_folder, replacing, require

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

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     save_figure(figure()[0], Path(folder, "pictures", "empty.png")).is_file()
    True
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
