"""Draw docs/family.png: several sizes out of one run, beside each of them from scratch, from a stored result.

    python tools/draw_family.py [results/family-bpe] [docs/family.png]

Loss of every size against all FLOPs that were spent until it is there. The recipe's plan gives the FLOPs, on embedded
text with windows of the same length; they must be those of family.json.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from mupscale.plots import COLORS, EndLabel, add_end_labels, figure, save_figure
from mupscale.study.family_run import FamilySettings, make_planner
from mupscale.study.tree import list_stretches
from mupscale.train import Recipe, Spec

ROOT = Path(__file__).parents[1]


def count_flops(folder: Path, found: dict[str, Any]) -> tuple[list[float], list[float]]:
    """All that is spent until each size is there: out of one run, and one size after the other."""
    values = yaml.safe_load((folder / "family.yaml").read_text(encoding="utf-8"))
    values.pop("evidence", None)
    settings = FamilySettings(**values.pop("family"))
    recipe = Recipe.from_json(values)
    text = Spec("mupscale.data.Shakespeare", {"context": recipe.data.init_args["context"]})
    planner = make_planner(replace(recipe, data=text), settings)
    planned = planner.plan(settings.sizes, 1.0, 1.0, 0)
    counts = range(1, len(planned) + 1)
    together = [math.fsum(map(planner.ground.cost, list_stretches(p.leaf for p in planned[:n]))) for n in counts]
    alone = list(accumulate(one.budget for one in planned))
    if (together[-1], alone[-1]) != (found["cost"], found["cost_alone"]):
        raise SystemExit(f"{folder}/family.json has other FLOPs than its recipe: {found['cost']}, {together[-1]}")
    return together, alone


def mean(losses: Sequence[float | None]) -> float:
    """Over the seeds; infinite where one diverged."""
    return math.inf if None in losses else fmean(loss for loss in losses if loss is not None)


def choose_family(found: dict[str, Any]) -> dict[str, Any]:
    """The trunk that the two smallest sizes with the first seed would choose."""
    return dict(min(found["family"], key=lambda one: math.prod(one["losses"][size][0] or math.inf for size in (0, 1))))


def draw(folder: Path, picture: Path) -> Path:
    """Two lines: what one run gives, and what training each gives, at its best learning rate."""
    found = json.loads((folder / "family.json").read_text(encoding="utf-8"))
    together, alone = count_flops(folder, found)
    ours = list(map(mean, choose_family(found)["losses"]))
    theirs = [min(mean(one["losses"][i]) for one in found["scratch"]) for i in range(len(ours))]
    unit = 1e12
    fig, ax = figure(7.6, 3.9)
    lines = ((alone, theirs, COLORS[0], "each from scratch"), (together, ours, COLORS[1], "out of one run"))
    labels = []
    for costs, losses, color, name in lines:
        at = [cost / unit for cost in costs]
        ax.plot(at, losses, "o-", color=color, lw=2.2, ms=6)
        labels.append(EndLabel(f"{name}:\n{losses[-1]:.3f} after {at[-1]:,.0f} TFLOPs", color, (at[-1], losses[-1])))
    beside: dict[str, Any] = {"textcoords": "offset points", "fontsize": 9}
    sizes = ["×".join(re.findall(r"\d+", size)) for size in found["sizes"]]
    for size, cost, loss in zip(sizes[1:], together[1:], ours[1:], strict=True):
        ax.annotate(size, (cost / unit, loss), (-5, -5), ha="right", va="top", **beside)
    first = f"width × layers: {sizes[0]}" if "×" in sizes[0] else f"width {sizes[0]}"
    for size, cost, loss in zip([first, *sizes[1:-1]], alone[:-1], theirs[:-1], strict=True):
        ax.annotate(size, (cost / unit, loss), (6, 3), va="bottom", **beside)
    ax.annotate(sizes[-1], (alone[-1] / unit, theirs[-1]), (0, 7), ha="right", va="bottom", **beside)
    ax.set_xlabel("training FLOPs spent until that size is finished, in all (TFLOPs)")
    ax.set_ylabel("held-out loss")
    ax.set_xlim(0, 1.03 * alone[-1] / unit)
    ax.margins(y=0.1)
    add_end_labels(ax, labels)
    return save_figure(fig, picture)


if __name__ == "__main__":
    given = [Path(word) for word in sys.argv[1:]]
    places = [*given, *(ROOT / "results" / "family-bpe", ROOT / "docs" / "family.png")[len(given) :]]
    print(draw(*places))
