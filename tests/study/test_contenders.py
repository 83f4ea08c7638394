"""The table of contenders: whole, in order, and with every word and stage that its presets need."""

from __future__ import annotations

from operator import attrgetter

import pytest

from mupscale.plots import DARK_PAPER, PAPER, find_contrast, recolour_for_dark
from mupscale.study.contenders import (
    CONTENDERS,
    IN_PAPER,
    IN_PAY,
    USUAL_IN_PAPER,
    USUAL_IN_PAY,
    Contender,
    check_contenders,
    contender_named,
    contenders_named,
)
from mupscale.study.paper import STAGES, stage_of
from mupscale.system import MupscaleError


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


def test_contenders_are_found_by_name() -> None:
    assert all(contender_named(one.name) is one for one in CONTENDERS)
    with pytest.raises(MupscaleError, match="'luck' is not a contender: choose from base, from-scratch"):
        contender_named("luck")
    with pytest.raises(MupscaleError, match="'fresh' is not a contender here: choose from base"):
        check_contenders(["fresh"], "study.contenders", IN_PAPER)
