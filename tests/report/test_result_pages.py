"""docs/results/operators*.md say what results/growth-* hold, and results/growth.py trains them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from mupscale.data import covtype_sample
from mupscale.study import StudySettings
from mupscale.study.contenders import USUAL_IN_PAY
from mupscale.study.wording import FORECAST_RANGE
from mupscale.train import Recipe
from result_scripts import ROOT, load_script

PAGES = sorted((ROOT / "docs" / "results").glob("operators*.md"))
TEXT = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)


@pytest.fixture(scope="module")
def growth() -> ModuleType:
    return load_script("growth")


def test_the_tables_are_those_of_the_stored_runs(growth: ModuleType) -> None:
    summaries = growth.stored()
    assert len(summaries) >= 16
    for summary in summaries:
        assert f"## {summary['name']}\n\n{growth.markdown(summary)}" in TEXT, summary["name"]


def test_what_is_said_of_them(growth: ModuleType) -> None:
    """The sentences of the pages, counted."""
    summaries = [summary for summary in growth.stored() if not growth.has_points(summary)]
    first = [growth.rows(summary)[0][0] for summary in summaries]
    assert first.count("base model continued") == len(first) - 1 == 13
    halved, outgoing_one = 0, set()
    for summary in summaries:
        factors = {kind: factor for kind, _, _, factor in growth.rows(summary)}
        losses = {kind: sum(each) / len(each) for kind, _, each, _ in growth.rows(summary)}
        halved += factors["fresh"] == 0.5
        if losses["fresh"] <= min(losses["fresh, outgoing 0"], losses["fresh, lossless"]):
            outgoing_one.add(summary["name"])
        kinds = [losses[kind] for kind in ("fresh", "fresh, outgoing 0", "fresh, lossless")]
        assert max(kinds) / min(kinds) < 1.04
    assert halved == 11
    assert {summary["name"] for summary in summaries} - outgoing_one == {"bpe-256-512", "resnet-32-64"}


def test_the_rule_of_thumb(growth: ModuleType) -> None:
    """docs/choosing.md, counted: of copies the best noise and learning rate, and how fresh units compare with them."""
    noises, with_adam, with_sgd, quadrupled = [], [], [], []
    for summary in growth.stored():
        arms = {} if growth.has_points(summary) else {row[0]: row[1:] for row in growth.rows(summary)}
        if "copies with noise" not in arms:
            continue
        noise, losses, factor = arms["copies with noise"]
        noises.append(float(noise.removeprefix("noise ")))
        optimizer = summary["recipe"]["optimizer"]["class_path"]
        (with_sgd if optimizer == "torch.optim.SGD" else with_adam).append(factor)
        copies_over_fresh = sum(losses) / sum(arms["fresh"][1])
        width = summary["recipe"]["width"]
        if summary["recipe"]["grow"][0]["width"] == 4 * width:
            quadrupled.append(copies_over_fresh < 1)
        elif "resnet" not in summary["name"]:
            assert abs(1 - copies_over_fresh) < 0.006, summary["name"]
    assert (len(noises), sum(0.5 <= noise <= 2 for noise in noises), max(noises)) == (13, 12, 4)
    assert sorted(with_adam) == [1] * 6 + [2] * 3
    assert sorted(with_sgd) == [0.5] * 3 + [2]
    assert quadrupled == [True] * 7


def test_what_is_said_of_when_to_grow(growth: ModuleType) -> None:
    """Continuing is best up to 6,000 steps, and growing from 24,000 on."""
    points: dict[int, dict[str, list[float]]] = {}
    for summary in filter(growth.has_points, growth.stored()):
        points |= growth.by_point(summary)
    means = {point: {kind: sum(each) / len(each) for kind, each in kinds.items()} for point, kinds in points.items()}
    assert set(means) == {1500, 3000, 6000, 12000, 24000, 48000}
    for point, losses in means.items():
        continued, grown = losses.pop("base model continued"), losses
        if point <= 6000:
            assert continued < min(grown.values())
        if point >= 24000:
            assert continued > max(grown.values())


@pytest.mark.parametrize("path", sorted((ROOT / "results").glob("growth-*/growth.yaml")), ids=lambda p: p.parent.name)
def test_every_experiment_is_a_recipe(path: Path) -> None:
    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    values.pop("experiment", None)
    recipe = Recipe.from_json(values)
    assert [event.how for event in recipe.grow] == ["fresh"]
    stored = path.parent / "growth.json"
    if stored.exists():
        assert Recipe.from_json(json.loads(stored.read_text(encoding="utf-8"))["recipe"]) == recipe


@pytest.mark.slow
def test_an_experiment_from_end_to_end(
    growth: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tiny, and stopped once by its clock; the second call goes on."""
    values = yaml.safe_load((ROOT / "results" / "growth-covtype-adamw-64-256" / "growth.yaml").read_text())
    values |= {"width": 8, "steps": 6, "batch": 8, "grow": [{"at": 3, "width": 12, "how": "fresh"}]}
    values |= {"precision": "fp32", "compile": False, "device": "cpu", "experiment": {"seeds": 2}}
    values["data"] = {"class_path": "mupscale.data.CoverTypeSample", "init_args": {}}
    assert covtype_sample()
    (tmp_path / "growth-tiny").mkdir()
    (tmp_path / "growth-tiny" / "growth.yaml").write_text(yaml.safe_dump(values))
    monkeypatch.setattr(growth, "HERE", tmp_path)
    words = ["tiny", "--work", str(tmp_path / "work"), "--out", str(tmp_path)]
    assert growth.main([*words, "--seconds", "-1"]) == 1
    assert "no time left before base" in capsys.readouterr().out
    assert growth.main(words) == 0
    summary = json.loads((tmp_path / "growth-tiny" / "growth.json").read_text())
    kinds = [kind for kind, *_ in growth.rows(summary)]
    assert {"fresh", "fresh, lossless", "from scratch, equal FLOPs", "base model continued"} <= set(kinds)
    assert not any("copies" in kind for kind in kinds)  # 12 is no multiple of 8


# ---------------------------------------------------------------------------------------------- depth


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


# ---------------------------------------------------------------------------------------------- forecasts

PAGE = (ROOT / "docs" / "results" / "forecast.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def comparisons() -> ModuleType:
    return load_script("comparisons")


def test_the_table_is_that_of_the_stored_runs(comparisons: ModuleType) -> None:
    assert comparisons.markdown() in PAGE


def test_what_is_said_of_forecasts(comparisons: ModuleType) -> None:
    """The sentences of the page, counted."""
    summaries = comparisons.stored().values()
    assert len(summaries) == 4
    assert {one.answer["decision"] for one in summaries} == {"continued"}
    assert sorted(str(one.forecast["winner"]) for one in summaries) == ["None", "None", "continued", "continued"]
    ranges = [row["held"] for one in summaries for row in one.forecast["held"] if isinstance(row["forecast"], dict)]
    assert (len(ranges), sum(ranges)) == (28, 24)
    assert "24 of 28" in FORECAST_RANGE
    for what, low, high in (
        (("base-rates", "rates", "close"), 0.04, 0.18),
        (("forecast-16", "forecast-32"), 0.08, 0.23),
    ):
        shares = [
            sum(s.cost or 0 for s in one.stages if s.name in what) / sum(s.cost or 0 for s in one.stages)
            for one in summaries
        ]
        assert [round(min(shares), 2), round(max(shares), 2)] == [low, high]


def test_the_summaries_are_of_the_recipes_beside_them(comparisons: ModuleType) -> None:
    for name, summary in comparisons.stored().items():
        values = yaml.safe_load(
            (ROOT / "results" / f"comparison-{name}" / "comparison.yaml").read_text(encoding="utf-8")
        )
        settings = StudySettings(**values.pop("study")).resolved(USUAL_IN_PAY, "held-out")
        assert settings == StudySettings(**summary.settings)  # a later setting has its default
        assert Recipe.from_json(values) == Recipe.from_json(summary.recipe)
