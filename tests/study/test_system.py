"""The trees of a comparison: branches that add up to one schedule, equal costs; and the table of who takes part."""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mupscale.plots import DARK_PAPER, PAPER, find_contrast, recolour_for_dark
from mupscale.study.contenders import (
    CONTENDERS,
    IN_PAPER,
    IN_PAY,
    USUAL_IN_PAPER,
    USUAL_IN_PAY,
    Contender,
    contender_named,
    contenders_named,
)
from mupscale.study.paper import STAGES, Protocol, stage_of
from mupscale.study.pay import PayStudy
from mupscale.study.systems import System
from mupscale.study.tree import Stretch, branch_off, list_stretches, list_waves, plan_candidate
from mupscale.system import MupscaleError
from mupscale.train import Growth, Schedule
from paper_runs import compare_quietly, few, growing

PAY = [one for one in CONTENDERS if one.advice]
BUDGETS = [0.25, 0.5, 1.0]
FIRST = Stretch(width=8, steps=0, lr=0.1, order=1)


def study(**changes: object) -> PayStudy:
    return PayStudy(growing(**changes), few(), Path("run"), lambda text: None)


def large(**changes: object) -> System:
    return study(**changes).system


def multiples(leaf: Stretch) -> list[float]:
    """The learning rate's multiple at every step up to the end of a stretch."""
    return [each.schedule.at(step, each.steps) for each in leaf.path for step in range(each.steps)]


@given(st.integers(48, 400), st.integers(0, 5))
def test_every_budget_has_the_schedule_that_it_would_have_alone(steps: int, warmup: int) -> None:
    own = Schedule(warmup=warmup)
    for part, leaf in branch_off(FIRST, steps, BUDGETS, "wsd", own).items():
        total = round(part * steps)
        alone = Schedule("wsd", warmup=warmup, decay=total // 4)
        assert multiples(leaf) == [alone.at(step, total) for step in range(total)]


@given(st.integers(48, 400), st.integers(0, 5), st.sampled_from([0.25, 0.5]))
def test_a_candidate_has_the_same_schedule_whether_it_is_judged_early_or_not(
    steps: int, warmup: int, first: float
) -> None:
    own = Schedule(warmup=warmup)
    early, full = plan_candidate(FIRST, steps, first, "wsd", own)
    assert multiples(full) == multiples(plan_candidate(FIRST, steps, 1.0, "wsd", own).full)
    assert multiples(early) == multiples(plan_candidate(FIRST, round(first * steps), 1.0, "wsd", own).full)
    assert len({each.order for each in list_stretches([early, full])}) == 3


@pytest.mark.parametrize(("kind", "first"), [("cosine", 0.25), ("recipe", 0.25), ("wsd", 1.0)])
def test_nothing_is_judged_early_without_a_constant_phase_or_an_earlier_budget(kind: str, first: float) -> None:
    early, full = plan_candidate(FIRST, 100, first, kind, Schedule("cosine"))
    assert early is None
    assert [each.steps for each in full.path] == [100]


@pytest.mark.parametrize("unit", ["init", "theory", "signal"])
def test_noise_is_in_the_growth_s_unit_whatever_the_preset(unit: Literal["init", "theory", "signal"]) -> None:
    recipe, copies = growing(grow=[Growth(at=9, width=16, noise_unit=unit)]), contender_named("copies")
    systems = [study(grow=recipe.grow).small[0], Protocol(recipe, "train").system(few()).smaller(4)]
    leaves = [one.leaf(copies, 0.1, 0.1, 0.5, 0) for one in systems]
    grown = [next(each for each in leaf.path if each.is_grown) for leaf in leaves]
    assert [(each.noise, each.noise_unit) for each in grown] == [(0.5, unit)] * 2


def test_three_budgets_cost_little_more_than_one_and_no_two_stretches_see_the_same_batches() -> None:
    stretches = list_stretches(branch_off(FIRST, 1600, BUDGETS, "wsd", Schedule()).values())
    assert sum(each.steps for each in stretches) == 1600 * (1 + 1 / 8 + 1 / 16)
    orders = {each.order for each in stretches}
    assert len(orders) == len(stretches)
    assert 0 not in orders  # the base model's


@pytest.mark.parametrize("kind", ["cosine", "recipe"])
def test_other_schedules_run_every_budget_from_the_beginning(kind: str) -> None:
    own = Schedule("cosine", warmup=3, floor=0.1)
    leaves = branch_off(FIRST, 100, BUDGETS, kind, own).values()
    assert [(leaf.steps, leaf.parent, leaf.schedule) for leaf in leaves] == [(n, None, own) for n in (25, 50, 100)]


@pytest.mark.parametrize(("steps", "warmup"), [(8, 0), (40, 9)])
def test_a_budget_without_room_for_its_phases_is_refused(steps: int, warmup: int) -> None:
    with pytest.raises(MupscaleError, match=r"a budget of 0.25 is \d+ steps, too few"):
        branch_off(FIRST, steps, BUDGETS, "wsd", Schedule(warmup=warmup))


def test_identity_is_content() -> None:
    """Every field counts, and so does everything before; what is equal is trained once."""
    trunk = replace(FIRST, steps=10)
    leaf = trunk.then(steps=5)
    others = [replace(leaf, **change) for change in (
        {"width": 16}, {"steps": 6}, {"lr": 0.2}, {"schedule": Schedule("cosine")}, {"seed": 1}, {"order": 9},
        {"how": "fresh"}, {"noise": 0.5}, {"base": 4}, {"change": (2, 0.3)}, {"parent": replace(trunk, seed=1)},
        {"parent": None},
    )]  # fmt: skip
    assert len({leaf.key, *(other.key for other in others)}) == 1 + len(others)
    again = replace(FIRST, steps=10).then(steps=5)
    assert [each.steps for each in list_stretches([leaf, again, trunk.then(steps=7)])] == [10, 5, 7]
    assert [[each.steps for each in wave] for wave in list_waves([leaf, trunk.then(steps=7)])] == [[10], [5, 7]]


def test_another_recipe_is_another_folder_and_a_moved_one_the_same() -> None:
    leaf = replace(FIRST, steps=10).then(steps=5)
    names = [study(**change).ground.folder_name(leaf) for change in ({}, {"batch": 4}, {"log_every": 7}, {"out": "x"})]
    assert names[0] != names[1]
    assert names[0] == names[2] == names[3]


def test_all_contenders_cost_the_same_with_the_base_model_charged() -> None:
    system = large(steps=2500, grow=growing().grow)
    narrow, wide = system.ground.cost_per_step(8), system.ground.cost_per_step(16)
    budget = system.base_cost + system.grown_steps * wide
    for one in PAY:
        cost = system.steps(one) * (wide if one.is_wide else narrow) + (system.base_cost if one.from_base else 0)
        if not one.full_steps:
            assert cost == pytest.approx(budget, rel=1e-3)
    assert system.steps(contender_named("from-scratch-all-steps")) == 2500


def test_where_contenders_begin() -> None:
    own = study()
    system, stretches = own.system, Path("run") / "stretches"
    first = {
        one.name: next(iter(system.leaves(one, 0.02, 0.05, 0.5 * one.tunes_noise, 1).values())).path for one in PAY
    }
    recipes = {name: own.ground.recipe_of(path[0 if len(path) == 2 else 1], stretches) for name, path in first.items()}
    base = own.ground.recipe_of(system.base_model(0.02, 1), stretches)
    assert (base.width, base.steps, base.seeds.data, base.optimizer.init_args["lr"]) == (8, 9, 1, 0.02)
    assert {name for name, each in recipes.items() if each.start is None} == {"from-scratch", "from-scratch-all-steps"}
    assert {each.start for each in recipes.values()} == {None, base.out}
    assert {name: each.how for name, each in recipes.items() if each.how not in (None, "copies")} == {
        "fresh": "fresh",
        "fresh-trained": "fresh",
        "paired-noise": "paired",
        "net2net": "net2net",
        "naive-widening": "naive",
        "identity-blocks": "identity",
        "copied-blocks": "interleaved",
    }
    assert recipes["fresh-trained"].spread == "trained"
    assert {name: each.shrink for name, each in recipes.items() if each.shrink != 1} == {"copies-shrunk": 0.7}
    assert {name: each.width for name, each in recipes.items() if each.width == 8} == {"continued": 8}
    assert {each.seeds.data for each in recipes.values()} == {10_001}
    later = own.ground.recipe_of(first["fresh"][2], stretches)
    assert later.start == recipes["fresh"].out
    assert (later.how, later.noise) == ("copies", 0.0)  # it is wide already


def test_naive_widening_trains_with_the_narrow_models_rates() -> None:
    own, naive = study(), contender_named("naive-widening")
    narrow = own.recipe.family().plan(8).parameters
    for leaf in own.system.leaves(naive, 0.02, 0.05, 0.5, 1).values():
        for stretch in leaf.path[1:]:
            family = own.ground.recipe_of(stretch, Path("run")).family()
            wide = family.plan(16).parameters
            assert all(wide[name].rule == entry.rule for name, entry in narrow.items())
            assert family.init_at == own.recipe.family().init_at  # the unit of noise
    assert any(entry.rule.in_ == 2 for entry in narrow.values())


def test_a_model_that_a_contender_cannot_grow_is_refused(tmp_path: Path) -> None:
    gpt = growing(kind="gpt2-heads", init_at=None)
    with pytest.raises(MupscaleError, match=r"a norm over the width.*: leave net2net out of StudySettings\.contenders"):
        compare_quietly(tmp_path / "run", gpt, few(contenders=["continued", "net2net"]))
    assert not (tmp_path / "run").exists()
    names = ["continued", "fresh", "from-scratch-all-steps"]
    with pytest.raises(MupscaleError, match="uses the learning rate of from-scratch: add from-scratch"):
        compare_quietly(tmp_path / "run", how=few(contenders=names))


# ---------------------------------------------------------------------------------------------- who takes part


@pytest.mark.parametrize(
    ("names", "words"), [(IN_PAY, ("phrase", "advice")), (IN_PAPER, ("paper.subject",))], ids=["pay", "paper"]
)
def test_names_labels_and_looks_tell_the_contenders_of_a_comparison_apart(
    names: tuple[str, ...], words: tuple[str, ...]
) -> None:
    for field in ("name", "label", "short", "color", *words):
        values = [attrgetter(field)(one) for one in contenders_named(names)]
        assert all(values), field
        assert len(set(values)) == len(values), field


def test_who_takes_part_unless_asked_otherwise() -> None:
    assert USUAL_IN_PAY == ("from-scratch", "continued", "copies", "fresh")
    assert set(IN_PAPER) - set(USUAL_IN_PAPER) == {"net2net", "naive-widening"}
    assert {"from-scratch", "continued", "copies"} <= {*USUAL_IN_PAY} & {*USUAL_IN_PAPER}


def test_every_contender_of_the_paper_has_a_stage_behind_those_whose_runs_it_shares() -> None:
    stages = {one.name: stage_of(one) for one in contenders_named(IN_PAPER)}
    assert set(stages.values()) == set(STAGES)
    assert [name for name, stage in stages.items() if stage == STAGES[0]] == ["base"]
    assert stages["copies-own"] == stages["copies-plain"] == "copies"
    order = [STAGES.index(name) for name in ("from-scratch", "continued", "copies-without-noise", "copies")]
    assert order == sorted(order)


@pytest.mark.parametrize("one", CONTENDERS, ids=lambda one: one.name)
def test_lines_can_be_seen_on_a_bright_page_and_on_a_dark_one(one: Contender) -> None:
    assert find_contrast(one.color, PAPER) > 1.9
    assert find_contrast(recolour_for_dark(one.color), DARK_PAPER) > 1.9
