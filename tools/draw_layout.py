"""Draw docs/layout.png, the packages and how they stand on each other: python tools/draw_layout.py

Where boxes stand is said here; the arrows between them are the imports, read off the sources. Those that a longer way
implies are left out, and so are those from what all may use.
"""

from __future__ import annotations

import ast
from functools import cache
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
    "system": (0.5, 0, FACE, "errors, files,\nmemory, terminal"),
    "plots": (3.6, 0, BESIDE, "style,\npictures"),
    "core": (0.5, 1, CORE, "width, rule, axis,\nrole, plan"),
    "planning": (0, 2, CORE, "how a plan is found"),
    "optim": (1, 2, CORE, "traits, groups,\nclipping, schedules"),
    "checkpoint": (2, 4, CORE, "one safetensors\nfile"),
    "growth": (0.5, 3, CORE, "copies, noise,\nstate, upscale"),
    "checks": (0, 4, CORE, "verify,\ncoordinates"),
    "family": (1, 4, CORE, "one architecture\nat every width"),
    "models": (2.9, 4, BESIDE, "mlp, resnet,\ngpt2, flops"),
    "data": (3.8, 4, BESIDE, "tables, images,\ntext"),
    "train": (2.2, 5, TRAIN, "recipe, loop,\ngrowth events"),
    "engine": (2.2, 6, TRAIN, "many runs as\none program"),
    "study": (2.2, 7, TRAIN, "trees of stretches,\nsweeps, tuning"),
    "hf": (0, 7, BESIDE, "Hugging Face\ncheckpoints"),
    "theory": (3.6, 9, BESIDE, "infinite width"),
    "report": (1.9, 9, TRAIN, "the page and\nits pictures"),
    "cli": (2.4, 10, FACE, "one table: command\nto function"),
}
FOR_ALL = ("system", "plots")
"""What all may use."""
WIDTH, HEIGHT, ACROSS, UP = 0.86, 0.62, 1.0, 1.0


def main() -> None:
    """Draw it."""
    figure, axes = plt.subplots(figsize=(9.6, 11.4), dpi=150)
    for start, end in arrows():
        _arrow(axes, start, end)
    for name, (column, row, colour, text) in BOXES.items():
        _box(axes, name, column, row, colour, text)
    axes.set_xlim(-0.6, 4.4)
    axes.set_ylim(-0.5, 10.5)
    axes.axis("off")
    path = ROOT / "docs" / "layout.png"
    figure.savefig(path, bbox_inches="tight", facecolor=PAPER)
    print(path.relative_to(ROOT))


@cache
def imported_by(room: str) -> frozenset[str]:
    """The packages and files directly below mupscale that one of them imports from."""
    path = SOURCE / room
    names = set[str]()
    for file in path.glob("**/*.py") if (path / "__init__.py").is_file() else [path.with_suffix(".py")]:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module:
                names |= {f"{node.module}.{alias.name}" for alias in node.names}
            elif isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
    ours = {name.split(".")[1] for name in names if name.startswith("mupscale.")}
    return frozenset(ours & BOXES.keys() - {room})


@cache
def below(room: str) -> frozenset[str]:
    """All that a room stands on, at whatever distance."""
    return imported_by(room).union(*(below(other) for other in imported_by(room)))


def arrows() -> list[tuple[str, str]]:
    """From each room to those that are built on it straight."""
    return [
        (lower, room)
        for room in BOXES
        for lower in sorted(imported_by(room))
        if lower not in FOR_ALL and not any(lower in below(other) for other in imported_by(room))
    ]


def _box(axes: Any, name: str, column: float, row: float, colour: str, text: str) -> None:
    x, y = column * ACROSS, row * UP
    corner = (x - WIDTH / 2, y - HEIGHT / 2)
    style = "round,pad=0,rounding_size=0.07"
    axes.add_patch(FancyBboxPatch(corner, WIDTH, HEIGHT, boxstyle=style, fc=PAPER, ec=colour, lw=1.6, zorder=2))
    suffix = "/" if (SOURCE / name / "__init__.py").is_file() else ".py"
    axes.text(x, y + 0.17, name + suffix, ha="center", va="center", fontsize=11, weight="bold", color=colour, zorder=3)
    axes.text(x, y - 0.1, text, ha="center", va="center", fontsize=8, color=INK, zorder=3, linespacing=1.25)


def _arrow(axes: Any, start: str, end: str) -> None:
    (x0, y0, *_), (x1, y1, *_) = BOXES[start], BOXES[end]
    if y1 * UP > y0 * UP:
        ends = (x0 * ACROSS, y0 * UP + HEIGHT / 2), (x1 * ACROSS, y1 * UP - HEIGHT / 2)
    else:
        ends = (x0 * ACROSS + WIDTH / 2, y0 * UP), (x1 * ACROSS - WIDTH / 2, y1 * UP)
    bend = "arc3,rad=-0.2" if (start, end) == ("hf", "cli") else "arc3"  # around what lies between them
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
