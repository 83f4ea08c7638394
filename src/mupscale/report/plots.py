"""Plots, with one look: matplotlib on the Agg backend, imported only when a picture is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from mupscale.errors import MupscaleError

if TYPE_CHECKING:
    from mupscale.coords import CoordCheck

COLORS = ("#4c566a", "#2a7fb8", "#d1495b", "#e0a030", "#3a9d6e", "#8e5ea2", "#8c6d46", "#17a2a2")


def figure(width: float = 7.0, height: float = 4.2, columns: int = 1) -> tuple[Any, Any]:
    """A figure and its axes in the house style."""
    try:
        import matplotlib
    except ImportError:
        raise MupscaleError("pictures need matplotlib: pip install 'mupscale[plots]'") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    fig, axes = plt.subplots(1, columns, figsize=(width, height), layout="constrained", dpi=150)
    for ax in axes if columns > 1 else (axes,):
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(alpha=0.25, linewidth=0.6)
    return fig, axes


def save(fig: Any, path: Path) -> Path:
    """Write the figure and free it."""
    import matplotlib.pyplot as plt

    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path)
    plt.close(fig)
    return path


def plot_coord_check(check: CoordCheck, path: Path) -> Path:
    """Change since initialisation against width, one line per layer; what is not flat in colour, with its power."""
    fig, ax = figure(7.5, 4.2)
    last = max(row.step for row in check.rows)
    odd = sorted((x for x in check.layers if not x.flat), key=lambda x: -abs(x.change_power))
    shown = {layer.module: COLORS[1 + i % 7] for i, layer in enumerate(odd[:7])}
    for layer in check.layers:
        values = [check.mean(layer.module, w, last, "change") for w in check.widths]
        color = shown.get(layer.module)
        label = f"{layer.module} ∝ width^{layer.change_power:+.2f}" if color else None
        ax.plot(check.widths, values, "o-", ms=3, lw=1.6 if color else 0.9, color=color or "#9aa5b1", label=label)
    rest = len(check.layers) - len(shown)
    if rest:
        word = "not shown by name" if len(odd) > len(shown) else "flat"
        ax.plot([], [], "o-", ms=3, lw=0.9, color="#9aa5b1", label=f"{rest} layers, {word}")
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xlabel("width")
    ax.set_ylabel(f"rms change of the layer's output after {last} steps")
    ax.set_title(f"Coordinate check: {check.title}", loc="left", fontsize=11)
    ax.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return save(fig, path)
