"""The better size at a budget: the crossing of a law that is known, and the comparisons that are stored in results/."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mupscale.study import ContenderRuns, load_summary
from mupscale.study.forecast import forecast_size, write_size
from mupscale.study.results import BudgetPoint, SystemRuns

STORED = sorted((Path(__file__).parents[2] / "results").glob("comparison-*"))


def system(narrow: int, meet: float, slopes: tuple[float, float] = (-0.1, -0.5)) -> SystemRuns:
    """Two sizes whose losses are powers of the cost, and equal at one cost."""
    runs = []
    for name, slope in zip(("continued", "from-scratch"), slopes, strict=True):
        points = [BudgetPoint(c, 1, c, [(c / meet) ** slope, (c / meet) ** slope]) for c in (1.0, 2.0, 4.0)]
        runs.append(ContenderRuns(name, narrow, 0.1, 0.0, points))
    return SystemRuns(narrow, 2 * narrow, 0.0, "FLOPs", runs)


def square(width: Any) -> float:
    """What a step costs."""
    return float(width**2)


def test_sizes_by_name_are_not_called_widths() -> None:
    told = {"narrow": {"dim": 8}, "wide": {"dim": 16}, "budget": 2e9, "best": {"dim": 8}, "overtakes": {}}
    assert write_size(told).startswith("At 2 GFLOPs in all, dim 8 is a better size than dim 16. The small runs show no")


@pytest.mark.parametrize(("budget", "best"), [(10.0, 8), (100.0, None), (200.0, 16)])
def test_the_range_goes_over_both_rules(budget: float, best: int | None) -> None:
    told = forecast_size([system(2, 1.0), system(4, 8.0)], 8, 16, budget, square)
    assert told["overtakes"]["low"] == pytest.approx(8.0 * 8)  # along the line: 8 times as much for every doubling
    assert told["overtakes"]["high"] == pytest.approx(8.0 * 16)  # as the square of what a step costs
    assert told["best"] == best
    words = {8: "width 8 is a better size than 16", 16: "width 16 is a better size than 8", None: "too close to call"}
    assert words[best] in told["sentence"]


def test_one_seed_has_no_range_and_no_definite_answer() -> None:
    one_seed = [system(2, 1.0), system(4, 8.0)]
    for runs in one_seed:
        for contender in runs.contenders:
            for point in contender.points:
                del point.losses[1:]
    told = forecast_size(one_seed, 8, 16, 200.0, square)
    assert told["overtakes"]["low"] == told["overtakes"]["value"] == told["overtakes"]["high"]
    assert (
        "width 16 may be a better size than 8. Width 16 is better from about 90.5 FLOPs on. That is from one seed, "
        in (told["sentence"].replace("\N{NO-BREAK SPACE}", " "))
    )


def test_lines_that_do_not_meet() -> None:
    told = forecast_size([system(2, 1.0, (-0.5, -0.1))], 8, 16, 100.0, square)
    assert told["best"] == 8
    assert "The small runs show no budget at which width 16 is better" in told["sentence"]


@pytest.mark.parametrize("folder", STORED, ids=lambda path: path.name)
def test_stored_comparisons_came_out_as_it_says_or_it_does_not_say(folder: Path) -> None:
    summary = load_summary(folder)
    large = summary.large
    cost = {}
    for runs in (*summary.small, large):
        for name, width in (("continued", runs.narrow), ("from-scratch", runs.wide)):
            one = runs.get(name)
            cost[str(width)] = one.points[-1].cost / one.points[-1].steps
    budget = large.curve("continued")[-1][0]
    told = forecast_size(summary.small, large.narrow, large.wide, budget, lambda width: cost[str(width)])
    ends = {large.curve("continued")[-1][1]: large.narrow, large.curve("from-scratch")[-1][1]: large.wide}
    assert told["best"] in (None, ends[min(ends)])
