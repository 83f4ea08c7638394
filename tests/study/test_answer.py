"""The answer's sentence in every case, its numbers, what forecasts say, and which values a contender is given."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import comparisons
from mupscale.study import StudySettings, SystemRuns, Tried, contender_named
from mupscale.study.forecast import LOSS_ROW, check_forecast, make_forecast
from mupscale.study.pay import PayStudy, choose, list_promising
from mupscale.study.results import BreakEven
from mupscale.study.verdict import CostRatio, answer_comparison, compare_costs, cost_to_reach, find_break_even, loss_at
from mupscale.study.wording import LOSS, break_evens
from mupscale.system import MupscaleError
from paper_runs import few, growing, system_of

Losses = dict[str, list[list[float | None]]]


def flat(value: float, seeds: int = 2, spread: float = 0.001) -> list[float | None]:
    return [value + spread * seed for seed in range(seeds)]


def falling(end: float, by: float = 0.1) -> list[list[float | None]]:
    """Losses at three budgets, each lower than the one before by as much."""
    return [flat(end + 2 * by), flat(end + by), flat(end)]


def four(scratch: float, continued: float, copies: float, fresh: float, /, **last: list[float | None]) -> Losses:
    """Contenders that end there; last: losses by seed at the full budget that are others."""
    ends = {"from-scratch": scratch, "continued": continued, "copies": copies, "fresh": fresh}
    return {name: [*falling(end)[:2], last.get(name.removeprefix("from-"), flat(end))] for name, end in ends.items()}


def one_seed(losses: Losses) -> Losses:
    return {name: [each[:1] for each in budgets] for name, budgets in losses.items()}


def test_growing_pays() -> None:
    answer = answer_comparison(system_of(four(1.05, 1.02, 1.03, 1.0)))
    assert answer["winner"] == answer["grown"] == "fresh"
    assert answer["sentence"].startswith("Grow it, with fresh units: the same loss for 0.7")
    assert "continuing the base model ends 2 % higher, at every budget" in answer["sentence"]
    charged, there = answer["cost_charged"]["value"], answer["cost_there"]["value"]
    # fresh is 0.05 below from scratch at the full cost, halfway between its budgets of 1/2 and 1
    assert charged == pytest.approx(math.sqrt((100 + 200) * (100 + 400)) / 500)
    assert there == pytest.approx(math.sqrt(200 * 400) / 500)
    assert answer["break_even"]["continued"]["charged"]["kind"] == "always"


def lowered(losses: Losses, by: float) -> Losses:
    """The same losses, each lower by as much: those of densities, say, may be negative."""
    return {
        name: [[loss if loss is None else loss - by for loss in seeds] for seeds in budgets]
        for name, budgets in losses.items()
    }


@pytest.mark.parametrize("by", [1.0, 1.02, 3.0])
def test_losses_of_any_sign_are_compared_by_their_difference(by: float) -> None:
    """Per cent would be turned round below zero, and a loss of 0 has none: by 1 the lowest is 0, by 1.02 its rival."""
    losses = lowered(four(1.05, 1.02, 1.03, 1.0), by)
    answer = answer_comparison(system_of(losses))
    assert (answer["winner"], answer["gap"]) == ("fresh", "difference")
    assert answer["above_continued"] == pytest.approx(-0.02)
    assert "continuing the base model ends 0.02 higher, at every budget" in answer["sentence"]
    assert answer_comparison(system_of(one_seed(losses)))["sentence"] == (
        "With one seed, growing with fresh units ends lowest, continuing the base model 0.02 higher: more seeds tell "
        "whether that holds."
    )
    small = [system_of(losses, narrow=width) for width in (32, 64)]
    forecast = make_forecast(small, 256)
    assert forecast["above_continued"]["fresh"]["value"] == pytest.approx(-0.02)
    assert "growing with fresh units ends lowest, -0.02 in loss (-0.02 to -0.02)" in forecast["sentence"]
    rows = check_forecast(forecast, system_of(losses), answer)
    measured = {row["what"]: row["measured"] for row in rows}
    assert measured[contender_named("fresh").label + LOSS_ROW] == pytest.approx(-0.02)


def test_shares_that_were_forecast_of_losses_that_become_negative() -> None:
    forecast = make_forecast([system_of(four(1.05, 1.02, 1.03, 1.0), narrow=width) for width in (32, 64)], 256)
    large = system_of(lowered(four(1.05, 1.02, 1.03, 1.0), 3.0))
    row = next(one for one in check_forecast(forecast, large, answer_comparison(large)) if LOSS_ROW in one["what"])
    assert (row["held"], row["gap"]) == (None, "difference")
    assert "no_rule" in row["forecast"]


def test_a_page_of_negative_losses_has_no_per_cent_of_them() -> None:
    below_zero = {name: tuple(loss - 1 for loss in ends) for name, ends in comparisons.FINALS.items()}
    summary = comparisons.comparison(large=comparisons.system(256, finals=below_zero))
    card = next(one for one in summary.cards if one.what == LOSS)
    assert re.fullmatch(r"0\.0\d+ lower", card.number)
    row = next(row for row in summary.tables[0].rows if LOSS_ROW in row[0])
    assert row[1:3] == ["no forecast", row[2]]
    assert re.fullmatch(r"[−+]0\.\d+", row[2])


def test_cards_say_which_way_a_ratio_points_and_what_time_tuning_took() -> None:
    summary = comparisons.comparison()
    for card in summary.cards:
        if card.number.endswith("×"):
            way = "less" if float(card.number[:-1]) < 1 else "more"
            assert f"so growing costs {way}" in card.more
    forecast = comparisons.forecast_only(summary)
    cost = next(card for card in forecast.cards if "growing costs" in card.more)
    assert "1×" in cost.more
    loss = next(card for card in forecast.cards if card.what == LOSS)
    assert "− means that growing ends at a lower loss" in loss.more
    assert any(
        re.search(r"Tuning took 2 % of the total cost and 8 % of the time, .* 11 %", one) for one in summary.measured
    )


def test_a_forecast_from_data_gone_over_again_and_again_says_so(tmp_path: Path) -> None:
    often = PayStudy(growing(batch=500), few(), tmp_path, lambda text: None)
    assert any("overfit" in note and "times" in note for note in often.notes)
    once = PayStudy(growing(batch=2), few(), tmp_path, lambda text: None)
    assert not any("overfit" in note for note in once.notes)


def test_lower_at_every_budget_says_where_seeds_cross() -> None:
    losses = four(1.05, 1.02, 1.03, 1.0)
    losses["fresh"][0] = [1.19, 1.225]  # at a quarter of the budget, against 1.22 and 1.221
    runs = system_of(losses)
    said = list(break_evens(answer_comparison(runs), runs))
    mean = " on the mean, though seeds do not tell them apart at smaller budgets"
    assert f"At every budget, growing with fresh units ends lower than continuing{mean}." in said


def test_growing_pays_from_a_budget_on() -> None:
    losses = four(1.5, 1.02, 1.4, 1.0) | {"fresh": [flat(1.5), flat(1.2), flat(1.0)]}
    answer = answer_comparison(system_of(losses))
    assert answer["sentence"].endswith(
        "continuing the base model ends 2 % higher, though it is lower at small budgets."
    )
    at = answer["break_even"]["continued"]["charged"]
    assert at["kind"] == "from"
    assert 300 < at["cost"] < 500


@pytest.mark.parametrize(
    ("losses", "winner", "begins"),
    [
        (
            four(1.2, 1.0, 1.1, 1.05),
            "continued",
            "Continue the base model: at the same cost growing with fresh units ends 5 % higher.",
        ),
        (
            four(1.0, 1.2, 1.1, 1.15),
            "from-scratch",
            "Start over: at the same cost growing from copies ends 10 % higher.",
        ),
        (four(1.2, 1.0, 1.1, 1.0001), "continued", "Continue the base model"),
        # what seeds cannot tell apart
        (
            four(1.5, 1.0, 1.4, 1.0, fresh=[1.0, 1.1], continued=[1.05, 1.06]),
            None,
            "Too close to call: growing with fresh units and continuing",
        ),
        # those of one base model are compared seed by seed: ranges overlap, seeds agree
        (four(1.5, 1.0, 1.4, 1.0, fresh=[1.0, 1.2], continued=[1.01, 1.21]), "fresh", "Grow it, with fresh units"),
        (four(1.5, 1.0, 1.4, 1.0, fresh=[1.0, 1.2], scratch=[1.01, 1.21], continued=[2.0, 2.0]), None, "Too close"),
        (
            one_seed(four(1.5, 1.2, 1.1, 1.0)),
            None,
            "With one seed, growing with fresh units ends lowest, growing from copies 10 % higher",
        ),
        # of what diverged nothing is said
        (
            four(1.5, 1.2, 1.1, 1.0, scratch=[None, 1.0]),
            "fresh",
            "Grow it, with fresh units: continuing the base model ends 20 % higher",
        ),
        (
            four(1.2, 1.0, 1.1, 1.05, fresh=[None, 1.0], copies=[None, None]),
            "continued",
            "Continue the base model: every grown model diverged.",
        ),
    ],
)
def test_what_is_advised(losses: Losses, winner: str | None, begins: str) -> None:
    answer = answer_comparison(system_of(losses))
    assert answer["winner"] == winner
    assert answer["sentence"].startswith(begins)
    assert (answer["cost_charged"] is None) == (None in losses["from-scratch"][-1] or answer["grown"] is None)


def test_two_ways_to_grow_that_end_alike_are_both_growing() -> None:
    answer = answer_comparison(system_of(four(1.5, 1.2, 1.0, 1.0, fresh=[1.0, 1.1], copies=[1.1, 1.0])))
    assert (answer["winner"], answer["decision"]) == (None, "grow")
    ways = ["with fresh units", "from copies"][:: 1 if answer["grown"] == "fresh" else -1]
    told = f"Grow it, {' or '.join(ways)} (the seeds do not tell them apart). Growing {ways[0]}: the same loss"
    assert answer["sentence"].startswith(told)


def test_the_ceiling_costs_more_and_takes_no_part_in_the_answer() -> None:
    runs = system_of(four(1.2, 1.0, 1.1, 1.05) | {"from-scratch-all-steps": falling(0.5)})
    assert answer_comparison(runs)["decision"] == "continued"
    assert make_forecast([runs, replace(runs, narrow=128)], 256)["winner"] == "continued"


def test_a_diverged_contender_is_left_out_and_named() -> None:
    answer = answer_comparison(system_of(four(1.2, 1.0, 1.1, 1.05, fresh=[None, 1.0])))
    assert (answer["diverged"], answer["grown"]) == (["fresh"], "copies")
    gone = {name: [[None]] for name in four(1.0, 1.0, 1.0, 1.0)}
    with pytest.raises(MupscaleError, match=r"every contender diverged.*StudySettings\.lrs"):
        answer_comparison(system_of(gone))  # type: ignore[arg-type]


def test_without_the_base_models_cost_only_one_way_of_charging_is_left() -> None:
    answer = answer_comparison(system_of(four(1.05, 1.02, 1.03, 1.0), base_cost=None))
    assert answer["cost_charged"] is None
    assert answer["cost_there"] is not None
    assert "not counting the base model" in answer["sentence"]
    assert set(answer["break_even"]["continued"]) == {"there"}


# ---------------------------------------------------------------------------------------------- forecasts


def growing_gap(*gaps: tuple[int, float]) -> list[SystemRuns]:
    """Small systems in which fresh units end so much above continuing, and the others far above."""
    return [system_of(four(3.0, 1.0, 2.0, 1.0 + gap), narrow=width) for width, gap in gaps]


def test_one_width_foretells_itself_but_no_winner() -> None:
    """Nobody knows the trend, so no difference at all is within the range."""
    forecast = make_forecast(growing_gap((8, -0.1)), 64)
    one = forecast["above_continued"]["fresh"]
    assert one["value"] == pytest.approx(-0.1, abs=1e-3)
    assert one["low"] < -0.18
    assert 0 < one["high"] < 0.01
    assert forecast["winner"] is None


def test_two_widths_that_agree_foretell_a_winner() -> None:
    forecast = make_forecast(growing_gap((8, -0.1), (16, -0.1)), 64)
    assert forecast["winner"] == "fresh"
    begins = "Forecast from width 8 and 16: growing with fresh units ends lowest, -10"
    assert forecast["sentence"].startswith(begins)


def test_a_line_is_followed_and_widens_the_range() -> None:
    one, nearer = (
        make_forecast(growing_gap((8, -0.3), (16, gap)), 32)["above_continued"]["fresh"] for gap in (-0.2, -0.3)
    )
    expected = 2 * math.log(0.8) - math.log(0.7)
    assert math.log1p(one["value"]) == pytest.approx(expected, abs=2e-3)
    assert one["high"] - one["low"] > 0.15
    assert nearer["high"] - nearer["low"] < 0.01


AGAINST, ONE_SEED = "small widths contradict each other", "one seed says nothing about the range"


@pytest.mark.parametrize(
    ("small", "no_rule", "said"),
    [
        (growing_gap((8, -0.3), (16, 0.3)), AGAINST, f": none for growing with fresh units, because {AGAINST}: "),
        (
            [system_of(one_seed(four(3.0, 1.0, 2.0, 0.9)), narrow=8)],
            "one seed says nothing about the range",
            "one seed",
        ),
        ([system_of(four(3.0, 1.0, 2.0, 1.1) | {"fresh": [[None, None]] * 3}, narrow=8)], "it diverged at width 8", ""),
        ([system_of(four(3.0, 1.0, 2.0, 1.0, fresh=[0.9, 1.05]), narrow=8)], "", "too close to call between"),
    ],
)
def test_what_cannot_be_foretold(small: list[SystemRuns], no_rule: str, said: str) -> None:
    forecast = make_forecast(small, 32)
    assert forecast["winner"] is None
    assert no_rule in forecast["above_continued"]["fresh"].get("no_rule", "")
    assert said in forecast["sentence"]


def test_all_whose_ranges_overlap_are_named_where_the_ranking_flips() -> None:
    """Fresh units are best at one width and worst at the next; copies stay far behind."""
    small = {8: four(1.2, 1.0, 4.0, 0.9), 16: four(1.01, 1.0, 4.0, 1.0, fresh=[0.95, 1.25])}
    runs = [system_of(losses, narrow=width) for width, losses in small.items()]
    said = make_forecast(runs, 32)["sentence"].partition("too close to call between ")[2]
    named = ["continuing the base model", "growing with fresh units", "starting over"]
    assert sorted(re.split(", | and ", said.rstrip("."))) == named


@pytest.mark.parametrize(("outcome", "held"), [(-0.1, True), (0.2, False)])
def test_forecast_against_outcome(outcome: float, held: bool) -> None:
    forecast = make_forecast(growing_gap((8, -0.1), (16, -0.1)), 64)
    runs = system_of(four(3.0, 1.0, 2.0, 1.0 + outcome))
    rows: dict[str, Any] = {row["what"]: row for row in check_forecast(forecast, runs, answer_comparison(runs))}
    row = rows["grown with fresh units, loss compared with continuing"]
    assert row["measured"] == pytest.approx(outcome, abs=1e-3)
    assert row["held"] is held
    assert rows["lowest loss"]["held"] is held
    assert rows["grown from copies, cost compared with starting over, base model included"]["held"] is True


def test_one_budget_measures_no_cost_to_the_same_loss() -> None:
    forecast = make_forecast(growing_gap((8, -0.1), (16, -0.1)), 64)
    runs = system_of({name: losses[-1:] for name, losses in four(3.0, 1.0, 2.0, 0.9).items()})
    rows = [row["what"] for row in check_forecast(forecast, runs, answer_comparison(runs))]
    assert [what for what in rows if "loss" in what]
    assert not [what for what in rows if "cost" in what]


# ---------------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seeds": 0}, r"StudySettings\.seeds is 0, but must be at least 1"),
        ({"small_seeds": 0}, r"StudySettings\.small_seeds is 0"),
        ({"budgets": [0.5]}, r"StudySettings\.budgets is \[0\.5\]"),
        ({"budgets": [1.0, 0.5]}, r"StudySettings\.budgets"),
        ({"budgets": []}, r"StudySettings\.budgets"),
        ({"lrs": [-1.0]}, r"StudySettings\.lrs holds -1\.0"),
        ({"grown_lrs": [0.0]}, r"StudySettings\.grown_lrs holds 0\.0, but must be numbers above 0"),
        ({"noises": [math.inf]}, r"StudySettings\.noises holds inf, but must be numbers 0 or more"),
        ({"sampler": "tpe"}, r"StudySettings\.sampler tpe needs a number of trials"),
        ({"sampler": "random", "trials": 0}, r"StudySettings\.sampler random needs a number of trials"),
        ({"pruner": "hatchet"}, "pruner= is 'hatchet', but must be 'none', 'median' or 'halving'"),
        ({"measure": "luck"}, "measure= is 'luck', but must be 'held-out' or 'train'"),
        ({"contenders": ["continued"]}, "at least one grown model to compare it with"),
        ({"contenders": ["fresh", "from-scratch"]}, "needs `continued` and"),
        ({"contenders": ["winner"]}, "'winner' is not a contender: choose from base, from-scratch"),
        ({"schedule": "linear"}, "schedule= is 'linear', but must be 'wsd', 'cosine' or 'recipe'"),
        ({"prune": -0.1}, r"StudySettings\.prune is -0\.1, but must be a number of at least 0"),
    ],
)
def test_settings_that_cannot_be_are_one_sentence(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(MupscaleError, match=message):
        PayStudy(growing(), few(**changes), Path("run"), lambda text: None)


def test_small_widths_by_themselves() -> None:
    assert StudySettings().small_widths(64, 256) == [8, 16]
    assert StudySettings().small_widths(32, 128) == [8, 16]  # 4 would be a poor guide
    assert StudySettings().small_widths(12, 24) == [3, 6]
    named: Any = {"d_model": 64, "head_dim": 16}
    assert StudySettings().small_widths(named, {"d_model": 128, "head_dim": 16}) == [
        {"d_model": 8, "head_dim": 16},
        {"d_model": 16, "head_dim": 16},
    ]
    with pytest.raises(MupscaleError, match=r"1/4 and 1/2 of width 5 are not whole.*StudySettings\.widths"):
        StudySettings().small_widths(5, 10)


def test_a_small_width_that_the_model_can_have_is_found_far_from_the_usual_ones() -> None:
    """As of a model with few key/value heads: its small width, and the one after growth, are multiples of much."""

    def why_not(width: Any) -> str:
        return f"{width} leaves half a head" if width % 2048 else ""

    assert StudySettings().small_widths(4096, 6144, why_not) == [2048]
    assert StudySettings().small_widths(8192, 12288, why_not) == [2048]
    with pytest.raises(MupscaleError, match=r"no small width to tune at was found: 1024 leaves half a head$"):
        StudySettings().small_widths(2048, 3072, why_not)


def test_a_small_width_is_no_larger_than_the_base_model() -> None:
    with pytest.raises(MupscaleError, match=r"StudySettings\.widths has 12, but is for .* smaller than .*, 8, where"):
        PayStudy(growing(), few(widths=[4, 12]), Path("run"), lambda text: None)
    own = "has the base model's own width, 8: tuning there costs"
    study = PayStudy(growing(), few(widths=[8]), Path("run"), lambda text: None)
    assert sum(own in note for note in study.notes) == 1
    assert not any(own in note for note in PayStudy(growing(), few(), Path("run"), lambda text: None).notes)


# ---------------------------------------------------------------------------------------------- loss against cost

FALLING = [(1.0, 4.0), (10.0, 2.0), (100.0, 1.0)]
tenths = st.integers(1, 100).map(lambda number: number / 10)  # two costs a rounding apart have nothing between them


@given(st.lists(tenths, min_size=2, max_size=5, unique=True), st.lists(tenths, min_size=5, max_size=5, unique=True))
def test_what_a_loss_costs_is_where_the_curve_has_it(costs: list[float], losses: list[float]) -> None:
    curve = list(zip(sorted(costs), sorted(losses, reverse=True), strict=False))
    for (low, above), (high, below) in pairwise(curve):
        middle = (above + below) / 2
        cost = cost_to_reach(curve, middle)
        assert low <= cost <= high * (1 + 1e-12)
        assert loss_at(curve, min(cost, curve[-1][0])) == pytest.approx(middle)


def test_nothing_is_said_beyond_what_was_measured() -> None:
    assert [loss_at(FALLING, 0.5), loss_at(FALLING, 200.0)] == [None, None]
    assert [cost_to_reach(FALLING, 0.5), cost_to_reach([], 1.0)] == [None, None]
    assert loss_at([(3.0, 1.0)], 3.0) == 1.0


def test_a_ratio_of_costs_is_a_bound_where_the_lower_one_is_there_at_its_lowest_cost() -> None:
    later, low = [(10 * cost, loss) for cost, loss in FALLING], [(1.0, 1.0), (10.0, 0.5)]
    assert compare_costs(FALLING, later) == CostRatio(pytest.approx(0.1))  # type: ignore[arg-type]
    assert compare_costs(later, FALLING) == CostRatio(pytest.approx(10.0))  # type: ignore[arg-type]
    assert compare_costs(low, FALLING) == CostRatio(0.01, "at most")
    assert compare_costs(FALLING, low) == CostRatio(100.0, "at least")
    assert compare_costs([], FALLING) is None


def test_break_even() -> None:
    flat = [(1.0, 3.0), (100.0, 3.0)]
    assert find_break_even(FALLING, flat) == BreakEven("from", pytest.approx(math.sqrt(10)))  # type: ignore[arg-type]
    assert find_break_even(flat, FALLING) == BreakEven("early")  # it is lower at the lowest cost
    assert find_break_even([(cost, loss + 9) for cost, loss in flat], FALLING) == BreakEven("never")
    assert find_break_even([(cost, loss - 5) for cost, loss in flat], FALLING) == BreakEven("always", 1.0)
    assert find_break_even(FALLING, [(1000.0, 1.0)]) == BreakEven("unknown")
    wavy = [(1.0, 1.0), (2.0, 3.0), (4.0, 1.0)]  # overtaken again: the last crossing counts
    assert find_break_even(wavy, [(1.0, 2.0), (4.0, 2.0)]).cost == pytest.approx(2 * math.sqrt(2))


# --------------------------------------------------------------------------------------- which values a contender takes

LAST = "fresh: the best learning rate, 0.2, is the last before divergence"


@pytest.mark.parametrize(
    ("tried", "lr", "remarks"),
    [
        ({0.1: [2.0], 0.2: [1.0], 0.4: [3.0]}, 0.2, []),
        # next to divergence the lowest loses to what is as good, and to nothing else
        ({0.05: [3.0, 3.0], 0.1: [1.1, 1.25], 0.2: [1.0, 1.2], 0.4: [None, 1.0]}, 0.1, []),
        ({0.05: [3.0, 3.0], 0.1: [1.6, 1.7], 0.2: [1.0, 1.2], 0.4: [None, 1.0]}, 0.2, [LAST]),
    ],
)
def test_the_lowest_mean_wins(tried: dict[float, list[float | None]], lr: float, remarks: list[str]) -> None:
    tuned = choose("fresh", [Tried(rate, 0.0, losses) for rate, losses in tried.items()])
    assert (tuned.lr, tuned.noise, tuned.remarks) == (lr, 0.0, remarks)


def test_what_is_no_candidate_is_not_chosen() -> None:
    """Nor does divergence at another noise count, or what was stopped early as diverged."""
    cells = [Tried(0.1, 1.0, [1.0]), Tried(0.2, 2.0, [None]), Tried(0.2, 1.0, [2.0]), Tried(0.05, 1.0, [2.0])]
    assert choose("copies", [*cells, Tried(0.1, 0.5, [2.0])]).remarks == []
    cells = [Tried(0.1, 0.0, [0.9]), Tried(0.2, 0.0, [1.0, 1.0]), Tried(0.4, 0.0, [1.5, 1.5])]
    assert choose("fresh", cells, among={(0.2, 0.0), (0.4, 0.0)}).lr == 0.2  # those that have all seeds
    tuned = choose("fresh", [Tried(0.1, 0.0, [1.2]), Tried(0.2, 0.0, [1.0]), Tried(0.4, 0.0, [0.5], budget=0.25)])
    assert (tuned.lr, tuned.remarks) == (0.2, [])
    with pytest.raises(MupscaleError, match=r"from-scratch: all 2 trials .* diverged.*0.1 to 0.2.*StudySettings.lrs"):
        choose("from-scratch", [Tried(0.1, 0.0, [None]), Tried(0.2, 0.0, [None])])


def test_those_within_the_margin_and_beside_the_best_go_on() -> None:
    def four(noise: float, losses: list[float]) -> list[Tried]:
        return [Tried(lr, noise, [loss]) for lr, loss in zip((1, 2, 4, 8), losses, strict=True)]

    far, left, best, right = four(1.0, [2.0, 1.9, 1.0, 1.8])
    near, other = Tried(8, 2.0, [1.05]), Tried(4, 2.0, [1.2])
    assert list_promising([near, far, best, right, left, other], 0.1) == [near, best, right, left]
    cells = four(0.0, [-2.0, -1.0, -1.9, -1.95])  # a margin below zero is as wide
    assert [[cell.lr for cell in list_promising(cells, part)] for part in (0.06, 0.03)] == [[1, 2, 4, 8], [1, 2, 8]]
    assert list_promising([Tried(1, 0.0, [None]), Tried(2, 0.0, [None])], 0.1) == []
