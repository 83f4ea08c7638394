"""Pictures of runs: their losses over steps, FLOPs or time, and where they grew."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal

from mupscale.core import Width
from mupscale.plots import COLORS, GREY, figure, keep_extremes, round_numbers, save_figure
from mupscale.system import MupscaleError, show
from mupscale.train.run_folder import RunFolder

Against = Literal["step", "flops", "seconds"]
Loss = Literal["training", "held-out"]
_MOST = 2000
"""Points a line is drawn with."""
_LABELS = {"step": "step", "flops": "training FLOPs", "seconds": "seconds"}


def draw_curves(runs: list[str], out: str = "curves.png", against: Against = "step", loss: Loss = "training") -> Path:
    """Draw the losses of runs into one picture. A training loss is the mean since the point before, and stands midway.

    Args:
        runs: folders of runs
        out: the picture, .png or .svg
        against: what is on the horizontal axis: step, flops or seconds
        loss: which loss: training or held-out

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     run = RunFolder(f"{folder}/run")
        ...     run.begin(resume=False)
        ...     for step, value in enumerate([1.0, 0.5, 0.4]):
        ...         run.write({"kind": "train", "step": step, "loss": value})
        ...     run.release()
        ...     draw_curves([str(run.path)], f"{folder}/curves.svg").name
        'curves.svg'
    """
    held_out = loss == "held-out"
    kind = "eval" if held_out else "train"
    lines, spacings = [], set[int]()
    for run in runs:
        records = [record for record in RunFolder(run).each_record() if record.get(against) is not None]
        drawn = [record for record in records if record["kind"] == kind]
        if not drawn:
            sizes = f": name its sizes, {run}/sizes/*" if (Path(run) / "sizes").is_dir() else ""
            raise MupscaleError(f"{run} has no {loss} loss against {against} to draw{sizes}")
        values = [math.nan if record["loss"] is None else record["loss"] for record in drawn]
        ends = [record[against] for record in drawn]
        starts = ends if held_out else [0, *ends]
        places = [(min(start, end) + end) / 2 for start, end in zip(starts, ends, strict=False)]  # a rewind goes back
        spacings.add(drawn[0]["step"])
        points = [(places[i], values[i]) for i in keep_extremes(values, values, _MOST)]
        lines.append((points, [record for record in records if record["kind"] == "grow"]))
    if len(spacings) > 1 and not held_out:
        hint = "training losses are means over a different number of steps (log_every): to compare, use --loss held-out"
        show(f"Note: {hint}", stream="stderr")
    fig, ax = figure(8, 4.6)
    from matplotlib.ticker import EngFormatter

    for number, (run, (points, growths)) in enumerate(zip(runs, lines, strict=True)):
        color = COLORS[number % len(COLORS)]
        style = {"color": color, "lw": 1.6, "marker": "o" if held_out else None, "ms": 3}
        ax.plot(*zip(*points, strict=True), label=Path(run).resolve().name, **style)
        for growth in growths:
            at = growth[against]
            ax.axvline(at, color=GREY, lw=0.8, ls="--", zorder=0)
            ax.annotate(
                f"→ {Width.of(growth['width']).phrase}",
                (at, 0.97 - 0.05 * number),  # on a line of its own for every run
                xycoords=("data", "axes fraction"),
                xytext=(4, 0),
                textcoords="offset points",
                va="top",
                fontsize=8,
                color=color,
            )
    low, high = ax.get_ylim()
    lowest = min((loss for points, _ in lines for _, loss in points if math.isfinite(loss)), default=0.0)
    if lowest > 0 and (low <= 0 or high > 3 * low):  # else a linear axis has more round numbers, and looks the same
        ax.set_yscale("log")
        low, high = ax.get_ylim()
        ticks = round_numbers(low, high, 9)
        ax.set_yticks(ticks, [f"{tick:.3g}" for tick in ticks])
        ax.yaxis.minorticks_off()
    if against == "flops":  # 2 G, where matplotlib writes 2, and 1e9 in the corner
        ax.xaxis.set_major_formatter(EngFormatter())
    ax.tick_params(labelsize=8)
    ax.set_xlabel(_LABELS[against])
    ax.set_ylabel("held-out loss" if held_out else "training loss, mean since the point before")
    ax.legend(frameon=False, fontsize=9, loc="upper right")
    return save_figure(fig, Path(out))
