"""Plots, with one look: matplotlib on the Agg backend, imported only when a picture is asked for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mupscale.errors import MupscaleError

if TYPE_CHECKING:
    from mupscale.coords import CoordCheck, Layer
    from mupscale.demo import Curve

COLORS = ("#4c566a", "#2a7fb8", "#d1495b", "#e0a030", "#3a9d6e", "#8e5ea2", "#8c6d46", "#17a2a2")
_FLAT, _ODD = "#9aa5b1", "#d8a48f"


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
    named = {layer.module: COLORS[1 + i] for i, layer in enumerate(odd[: len(COLORS) - 1])}
    drawn = list[float]()
    for layer in check.layers:
        values = [check.mean(layer.module, w, last, "change") for w in check.widths]
        values = [v if math.isfinite(v) and v > 0 else math.nan for v in values]
        drawn += [v for v in values if v == v]
        style: dict[str, Any] = {"lw": 0.9, "color": _FLAT if layer.flat else _ODD}
        if layer.module in named:
            style = {"lw": 1.6, "color": named[layer.module], "label": _coord_label(layer), "zorder": 3}
        ax.plot(check.widths, values, "o-", ms=3, **style)
    flat, more = len(check.layers) - len(odd), len(odd) - len(named)
    for count, color, text in ((more, _ODD, "more not flat"), (flat, _FLAT, "flat")):
        if count:
            ax.plot([], [], "o-", ms=3, lw=0.9, color=color, label=f"{count} {text}")
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xticks(check.widths, [f"{w:g}" for w in check.widths])
    ax.minorticks_off()
    low, high = (min(drawn), max(drawn)) if drawn else (1.0, 1.0)
    middle, half = math.sqrt(low * high), max(10.0, 1.3 * math.sqrt(high / low))
    ax.set_ylim(middle / half, middle * half)  # at least two decades, so that what is flat looks flat
    ax.set_xlabel("width")
    ax.set_ylabel(f"rms change of the layer's output after {last} steps")
    verdict = "flat" if check.ok else "not flat"
    ax.set_title(f"Coordinate check, {check.title}: {verdict}", loc="left", fontsize=11)
    beside = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5)}
    ax.legend(title="layers", frameon=False, fontsize=8, title_fontsize=8, alignment="left", **beside)
    return save(fig, path)


def _coord_label(layer: Layer) -> str:
    """The power that makes the layer not flat: of its change or, where that is flat, of its size."""
    from mupscale.coords import FLAT

    by_change = abs(layer.change_power) > FLAT
    power = layer.change_power if by_change else layer.size_power
    if math.isinf(power):
        return f"{layer.module} {'diverges' if power > 0 else 'vanishes'}"
    return f"{layer.module} {'∝' if by_change else 'size ∝'} width$^{{{power:+.2f}}}$"


def plot_demo(curves: Mapping[str, Curve], upscaled_at: int, gap: float, path: Path) -> Path:
    """The demonstration's curves, the exact wide model dotted on top of the narrow one."""
    fig, ax = figure(8, 4.6)
    before = curves["before"]
    ax.plot(before.steps, before.losses, color=COLORS[0], lw=1.6)
    styles: dict[str, dict[str, Any]] = {
        "narrow": {"color": COLORS[0], "lw": 1.6},
        "exact": {"color": COLORS[3], "lw": 3.0, "ls": (0, (0.1, 2.2)), "dash_capstyle": "round", "zorder": 5},
        "noisy": {"color": COLORS[2], "lw": 1.8},
        "scratch": {"color": COLORS[1], "lw": 1.6},
    }
    for name, style in styles.items():
        ax.plot(curves[name].steps, curves[name].losses, label=curves[name].label, **style)
    ax.axvline(upscaled_at, color="#9aa5b1", lw=0.8, ls="--", zorder=0)
    ax.annotate(
        "upscaled here",
        (upscaled_at, 0.97),
        xycoords=("data", "axes fraction"),
        xytext=(5, 0),
        textcoords="offset points",
        va="top",
        fontsize=8,
        color="#6b7683",
    )
    ax.set_yscale("log")
    ax.yaxis.set_major_formatter("{x:.2g}")
    ax.yaxis.set_minor_formatter("{x:.2g}")
    ax.tick_params(which="both", labelsize=8)
    ax.set_xlabel("step")
    ax.set_ylabel("training loss")
    ax.set_title(f"Upscaling in mid-training; (a) and (b) differ by {gap:.0e} at most", loc="left", fontsize=11)
    ax.legend(frameon=False, fontsize=9, loc="upper right")
    return save(fig, path)
