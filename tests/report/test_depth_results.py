"""results/depth.py: its recipes are recipes, its verdict follows from losses, and the docs show what it found."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from mupscale.train import Recipe
from result_scripts import ROOT, load_script

yaml = pytest.importorskip("yaml")


@pytest.fixture(scope="module")
def script() -> Any:
    return load_script("depth")


@pytest.mark.parametrize("path", sorted((ROOT / "results").glob("depth-*/depth.yaml")), ids=lambda p: p.parent.name)
def test_recipes(path: Path) -> None:
    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    rates = values.pop("rates", None)
    recipe = Recipe.from_json(values)
    assert (rates is None) == bool(recipe.grow)


def test_verdict_follows_the_minimum(script: Any) -> None:
    """A parabola's minimum is found between the points of the grid; a run that diverged is no neighbour."""
    lrs = [0.001 * 2**i for i in range(6)]

    def losses(best: float) -> list[float]:
        return [1 + (place - best) ** 2 for place in range(6)]

    assert script.vertex(dict(enumerate(losses(2.3)))) == pytest.approx(2.3)
    assert script.vertex(dict(enumerate([3.0, 1.0, math.inf]))) == 1.0
    rules = {
        "none": [{"depth": 2, "losses": losses(4)}, {"depth": 64, "losses": losses(1)}],
        "complete": [{"depth": 2, "losses": losses(3)}, {"depth": 64, "losses": losses(3.1)}],
    }
    verdict = script.verdict(lrs, rules)
    assert "none: the best rate spans 3.0 steps" in verdict
    assert "complete: the best rate spans 0.1 steps" in verdict


@pytest.mark.parametrize("path", sorted((ROOT / "results").glob("depth-*/depth.json")), ids=lambda p: p.parent.name)
def test_docs_show_the_results(script: Any, path: Path) -> None:
    summary = json.loads(path.read_text(encoding="utf-8"))
    page = "depth-rates.md" if "rules" in summary else "depth.md"
    assert script.markdown(summary) in (ROOT / "docs" / "results" / page).read_text(encoding="utf-8")
