"""The runs of a comparison: legs that add up to one schedule, and costs that are the same for all contenders."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from comparison_runs import compare_quietly, few, growing
from mupscale.comparison import CONTENDERS, contender_named
from mupscale.comparison.pipeline import ComparisonRun
from mupscale.comparison.system import Leg, System, plan_legs, plan_tuning_legs, whole_leg
from mupscale.system import MupscaleError
from mupscale.train import Schedule

BUDGETS = [0.25, 0.5, 1.0]


def large(**changes: object) -> System:
    return ComparisonRun(growing(**changes), few(), Path("run"), lambda text: None, forecast_only=False).large_system()


def multiples(legs: dict[str, Leg], last: Leg) -> list[float]:
    """The learning rate's multiple at every step up to the end of a leg."""
    before = [] if last.after is None else multiples(legs, legs[last.after])
    return before + [last.schedule.at(step, last.steps) for step in range(last.steps)]


@given(st.integers(48, 400), st.integers(0, 5))
def test_every_budget_has_the_schedule_that_it_would_have_alone(steps: int, warmup: int) -> None:
    own = Schedule(warmup=warmup)
    legs = {leg.name: leg for leg in plan_legs(steps, BUDGETS, "wsd", own)}
    for part in BUDGETS:
        total = round(part * steps)
        alone = Schedule("wsd", warmup=warmup, decay=total // 4)
        assert multiples(legs, legs[f"budget-{part:g}"]) == [alone.at(step, total) for step in range(total)]
    whole = whole_leg(steps, "wsd", own)
    assert [whole.schedule.at(step, steps) for step in range(steps)] == multiples(legs, legs["budget-1"])


@given(st.integers(48, 400), st.integers(0, 5), st.sampled_from([0.25, 0.5]))
def test_a_candidate_has_the_same_schedule_whether_it_is_judged_early_or_not(
    steps: int, warmup: int, first: float
) -> None:
    own = Schedule(warmup=warmup)
    early, whole = plan_tuning_legs(steps, first, "wsd", own), whole_leg(steps, "wsd", own)
    legs = {leg.name: leg for leg in early if leg is not None}
    assert multiples(legs, early.rest) == multiples({}, whole)
    assert early.first is not None
    assert multiples(legs, early.first) == multiples({}, whole_leg(round(first * steps), "wsd", own))
    assert len({leg.order for leg in legs.values()}) == 3


@pytest.mark.parametrize(("kind", "first"), [("cosine", 0.25), ("recipe", 0.25), ("wsd", 1.0)])
def test_nothing_is_judged_early_without_a_constant_phase_or_an_earlier_budget(kind: str, first: float) -> None:
    own = Schedule("cosine")
    assert plan_tuning_legs(100, first, kind, own) == (None, None, whole_leg(100, kind, own))


def test_three_budgets_cost_little_more_than_one() -> None:
    assert sum(leg.steps for leg in plan_legs(1600, BUDGETS, "wsd", Schedule())) == 1600 * (1 + 1 / 8 + 1 / 16)


@pytest.mark.parametrize("kind", ["cosine", "recipe"])
def test_other_schedules_run_every_budget_from_the_beginning(kind: str) -> None:
    own = Schedule("cosine", warmup=3, floor=0.1)
    legs = plan_legs(100, BUDGETS, kind, own)
    assert [(leg.steps, leg.after, leg.schedule) for leg in legs] == [(n, None, own) for n in (25, 50, 100)]


def test_no_two_legs_of_a_run_see_the_same_batches() -> None:
    orders = [leg.order for leg in plan_legs(80, BUDGETS, "wsd", Schedule())]
    assert len(set(orders)) == len(orders)
    assert 0 not in orders  # the base model's


@pytest.mark.parametrize(("steps", "warmup"), [(8, 0), (40, 9)])
def test_a_budget_without_room_for_its_phases_is_refused(steps: int, warmup: int) -> None:
    with pytest.raises(MupscaleError, match=r"a budget of 0.25 is \d+ steps, too few"):
        plan_legs(steps, BUDGETS, "wsd", Schedule(warmup=warmup))


def test_all_contenders_cost_the_same_with_the_base_model_charged() -> None:
    system = large(steps=2500, grow=growing().grow)
    assert system.base_cost is not None
    narrow, wide = system.costs.of(8), system.costs.of(16)
    budget = system.base_cost + system.grown_steps * wide
    for one in CONTENDERS:
        cost = system.steps(one) * (wide if one.is_wide else narrow) + (system.base_cost if one.from_base else 0)
        if not one.full_steps:
            assert cost == pytest.approx(budget, rel=1e-3)
    assert system.steps(contender_named("from-scratch-all-steps")) == 2500


def test_where_contenders_begin() -> None:
    system = large()
    recipes = {
        one.name: system.leg_recipe(one, system.legs(one)[0], 0.02, 0.05, 0.5 * one.tunes_noise, 1)
        for one in CONTENDERS
    }
    base = str(system.base_folder(0.02, 1))
    assert {name for name, each in recipes.items() if each.start is None} == {"from-scratch", "from-scratch-all-steps"}
    assert {each.start for each in recipes.values()} == {None, base}
    assert {name: each.how for name, each in recipes.items() if each.how != "copies"} == {
        "fresh": "fresh",
        "paired-noise": "paired",
        "net2net": "net2net",
        "naive-widening": "naive",
    }
    assert {name: each.width for name, each in recipes.items() if each.width == 8} == {"continued": 8}
    assert {each.seeds.data for each in recipes.values()} == {10_001}
    later = system.leg_recipe(contender_named("fresh"), system.legs(contender_named("fresh"))[1], 0.02, 0.05, 0.0, 1)
    assert later.start == recipes["fresh"].out
    assert (later.how, later.noise) == ("copies", 0.0)  # it is wide already


def test_naive_widening_trains_with_the_narrow_models_rates() -> None:
    system, naive = large(), contender_named("naive-widening")
    narrow = system.recipe.family().plan(8).parameters
    for leg in system.legs(naive):
        family = system.leg_recipe(naive, leg, 0.02, 0.05, 0.5, 1).family()
        wide = family.plan(16).parameters
        assert all(wide[name].rule == entry.rule for name, entry in narrow.items())
        assert family.init_at == system.recipe.family().init_at  # the unit of noise
    assert any(entry.rule.in_ == 2 for entry in narrow.values())


def test_a_model_that_a_contender_cannot_grow_is_refused(tmp_path: Path) -> None:
    gpt = growing(kind="gpt2-heads", init_at=None)
    with pytest.raises(MupscaleError, match=r"a norm over the width.*: leave net2net out of comparison\.contenders"):
        compare_quietly(tmp_path / "run", gpt, few(contenders=["continued", "net2net"]))
    assert not (tmp_path / "run").exists()
    with pytest.raises(MupscaleError, match="takes the learning rate of from-scratch: add that"):
        few(contenders=["continued", "fresh", "from-scratch-all-steps"])
