"""The look of every picture: matplotlib on the Agg backend, imported only when a picture is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mupscale.system import MupscaleError, require

COLORS = ("#4c566a", "#2a7fb8", "#d1495b", "#e0a030", "#3a9d6e", "#8e5ea2", "#8c6d46", "#17a2a2")
GREY = "#9aa5b1"


def figure(width: float = 7.0, height: float = 4.2, columns: int = 1) -> tuple[Any, Any]:
    """A figure and its axes in the house style; several columns give an array of axes.

    >>> import matplotlib.pyplot as plt
    >>> fig, ax = figure(width=4, height=3)
    >>> ax.spines["top"].get_visible()
    False
    >>> plt.close(fig)
    """
    matplotlib = require("matplotlib", extra="plots", reason="pictures need matplotlib")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    fig, axes = plt.subplots(1, columns, figsize=(width, height), layout="constrained", dpi=150)
    for ax in axes if columns > 1 else (axes,):
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(alpha=0.25, linewidth=0.6)
    return fig, axes


def save_figure(fig: Any, path: Path) -> Path:
    """Write the figure, in the format that the file's name says, and free it.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     save_figure(figure()[0], Path(folder, "pictures", "empty.png")).is_file()
    True
    """
    import matplotlib.pyplot as plt

    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        fig.savefig(path)
    except ValueError as error:
        raise MupscaleError(f"the picture {path} cannot be written: {error}") from None
    finally:
        plt.close(fig)
    return path
