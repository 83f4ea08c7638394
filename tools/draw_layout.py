"""Draw docs/layout.png, the packages and how things flow through them: python tools/draw_layout.py

Boxes stand on the floors that tests/test_layout.py holds; the counts below them are read off the sources.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "mupscale"

INK, MUTED, PAPER = "#2e3440", "#6b7685", "#ffffff"
CORE, TRAIN, BESIDE, FACE = "#2a7fb8", "#3a9d6e", "#8e5ea2", "#4c566a"

BOXES = {  # name: (column, row, colour, what it is)
    "system": (0, 0, FACE, "errors, files,\nmemory, terminal"),
    "core": (0, 1, CORE, "width, rule, axis,\nrole, plan"),
    "planning": (0, 2, CORE, "how a plan is found"),
    "optim": (1, 2, CORE, "traits, groups,\nclipping, schedules"),
    "growth": (0.5, 3, CORE, "copies, noise,\nstate, upscale"),
    "checks": (0, 4, CORE, "verify,\ncoordinates"),
    "checkpoint": (1, 4, CORE, "one safetensors\nfile"),
    "family": (0.5, 5, CORE, "one architecture\nat every width"),
    "plots": (2.5, 0, BESIDE, "style, words,\npictures"),
    "models": (2.2, 1, BESIDE, "mlp, resnet,\ngpt2, flops"),
    "data": (3.2, 1, BESIDE, "tables, images,\ntext"),
    "train": (2.7, 2, TRAIN, "recipe, loop,\ngrowth events"),
    "engine": (2.7, 3, TRAIN, "many runs as\none program"),
    "sweep": (2.7, 4, TRAIN, "space, study,\nworkers"),
    "method": (2.7, 5, TRAIN, "contenders, tuning,\nverdict"),
    "report": (2.7, 6, TRAIN, "the page and\nits pictures"),
    "hf": (1.5, 6, BESIDE, "Hugging Face\ncheckpoints"),
    "theory": (3.9, 5, BESIDE, "infinite width"),
    "cli": (2.1, 7, FACE, "one table: command\nto function"),
}
ARROWS = [
    ("core", "planning"),
    ("core", "optim"),
    ("planning", "growth"),
    ("optim", "growth"),
    ("growth", "checks"),
    ("growth", "checkpoint"),
    ("checks", "family"),
    ("checkpoint", "family"),
    ("family", "train"),
    ("models", "train"),
    ("data", "train"),
    ("train", "engine"),
    ("engine", "sweep"),
    ("sweep", "method"),
    ("method", "report"),
    ("report", "cli"),
    ("family", "hf"),
    ("hf", "cli"),
    ("sweep", "theory"),
]
WIDTH, HEIGHT, ACROSS, UP = 0.86, 0.62, 1.0, 1.0


def main() -> None:
    """Draw it."""
    figure, axes = plt.subplots(figsize=(9.6, 9.2), dpi=150)
    for start, end in ARROWS:
        _arrow(axes, start, end)
    for name, (column, row, colour, text) in BOXES.items():
        _box(axes, name, column, row, colour, text)
    axes.set_xlim(-0.6, 4.4)
    axes.set_ylim(-0.5, 7.6)
    axes.axis("off")
    path = ROOT / "docs" / "layout.png"
    figure.savefig(path, bbox_inches="tight", facecolor=PAPER)
    print(path.relative_to(ROOT))


def _box(axes: Any, name: str, column: float, row: float, colour: str, text: str) -> None:
    x, y = column * ACROSS, row * UP
    corner = (x - WIDTH / 2, y - HEIGHT / 2)
    style = "round,pad=0,rounding_size=0.07"
    axes.add_patch(FancyBboxPatch(corner, WIDTH, HEIGHT, boxstyle=style, fc=PAPER, ec=colour, lw=1.6, zorder=2))
    suffix = "/" if (SOURCE / name).is_dir() else ".py"
    axes.text(x, y + 0.17, name + suffix, ha="center", va="center", fontsize=11, weight="bold", color=colour, zorder=3)
    axes.text(x, y - 0.1, text, ha="center", va="center", fontsize=8, color=INK, zorder=3, linespacing=1.25)


def _arrow(axes: Any, start: str, end: str) -> None:
    (x0, y0, *_), (x1, y1, *_) = BOXES[start], BOXES[end]
    if y1 * UP > y0 * UP:
        ends = (x0 * ACROSS, y0 * UP + HEIGHT / 2), (x1 * ACROSS, y1 * UP - HEIGHT / 2)
    else:
        ends = (x0 * ACROSS + WIDTH / 2, y0 * UP), (x1 * ACROSS - WIDTH / 2, y1 * UP)
    bend = "arc3,rad=-0.25" if (start, end) == ("family", "train") else "arc3"  # around what lies between them
    look = {
        "connectionstyle": bend,
        "arrowstyle": "-|>",
        "mutation_scale": 11,
        "color": MUTED,
        "lw": 1.1,
        "shrinkA": 1,
        "shrinkB": 1,
    }
    axes.add_patch(FancyArrowPatch(*ends, zorder=1, **look))


if __name__ == "__main__":
    main()
