"""The registry of contenders: whole, in order, and with every word and stage that it uses."""

from __future__ import annotations

from typing import get_args

import pytest

from mupscale.method.contenders import (
    CONTENDERS,
    DEFAULT_BASELINES,
    RANKED,
    STAGES,
    Baseline,
    find_contender,
    has_own_rates,
)
from mupscale.plots import GOOD
from mupscale.plots.gallery import recolour_for_dark


def test_names_labels_and_looks_tell_contenders_apart() -> None:
    for field in ("name", "key", "label", "short", "phrase", "color"):
        values = [getattr(one, field) for one in CONTENDERS]
        assert len(set(values)) == len(values), field


def test_the_words_of_baselines_are_those_that_ask_for_a_contender() -> None:
    words = list(dict.fromkeys(one.asked_by for one in CONTENDERS if one.asked_by is not None))
    assert words == list(get_args(Baseline))
    baselines = {one.asked_by for one in CONTENDERS if one.kind == "baseline"}
    assert set(DEFAULT_BASELINES) == baselines


def test_every_stage_has_contenders_and_the_base_model_comes_first() -> None:
    assert {one.stage for one in CONTENDERS} == set(STAGES)
    assert STAGES[0] == "base"
    assert [one.name for one in CONTENDERS if one.stage == "base"] == ["base"]


def test_a_stage_comes_after_those_whose_runs_it_shares() -> None:
    order = [STAGES.index(name) for name in ("scratch", "continued", "exact", "upscaled")]
    assert order == sorted(order)


def test_tables_of_final_losses_begin_with_the_upscaled_models() -> None:
    names = [one.name for one in RANKED if one.heading]
    assert names[:3] == ["upscaled", "upscaled-own", "upscaled-plain"]
    assert names[-1] == "base"
    assert [one.name for one in RANKED if one.on_card] == ["upscaled", "upscaled-own", "scratch"]


@pytest.mark.parametrize("one", CONTENDERS, ids=lambda one: one.name)
def test_colours_are_legible_on_a_dark_page(one: object) -> None:
    """Each has another one there, or is grey enough for both."""
    color = one.color  # type: ignore[attr-defined]
    assert recolour_for_dark(color) != color or color == "#9aa5b1"
    assert recolour_for_dark(GOOD) != GOOD


def test_contenders_are_found_by_name() -> None:
    assert all(find_contender(one.name) is one for one in CONTENDERS)
    assert find_contender("of another version") is None
    assert not has_own_rates([])
