"""docs/results/forecast.md says what results/comparison-* hold."""

from __future__ import annotations

from types import ModuleType

import pytest
import yaml

from mupscale.study import StudySettings
from mupscale.study.contenders import USUAL_IN_PAY
from mupscale.study.wording import FORECAST_RANGE
from mupscale.train import Recipe
from result_scripts import ROOT, load_script

PAGE = (ROOT / "docs" / "results" / "forecast.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def comparisons() -> ModuleType:
    return load_script("comparisons")


def test_the_table_is_that_of_the_stored_runs(comparisons: ModuleType) -> None:
    assert comparisons.markdown() in PAGE


def test_what_is_said_of_them(comparisons: ModuleType) -> None:
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
