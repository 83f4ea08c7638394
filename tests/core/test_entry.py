"""The one formula of widening: copied along the axes, times the weight's factor, plus the shift."""

from __future__ import annotations

from dataclasses import fields
from fractions import Fraction
from typing import Any

import pytest
import torch

from mupscale.core import Axis, Constants, Entry, Initial, Plan, expand

MATRIX = Entry((4, 6), (8, 18), {0: Axis(2, side="out"), 1: Axis(3, 2, side="in")})
GAIN = Entry((4,), (8,), {0: Axis(2, side="out")}, Constants(fold=0.25, offset=1))


def test_weights_are_copied_and_divided_by_the_copies_that_are_summed() -> None:
    narrow = torch.randn(4, 6, dtype=torch.float64)
    assert torch.equal(MATRIX.widened(narrow), expand(narrow, MATRIX.axes, scale=1 / 3))


def test_what_scales_is_the_stored_weight_with_its_offset() -> None:
    gain = torch.tensor([0.0, 1.0, -1.0, 3.0])
    wide = GAIN.widened(gain)
    assert torch.equal(1 + wide, expand(0.25 * (1 + gain), GAIN.axes))


@pytest.mark.parametrize("entry", [MATRIX, GAIN], ids=["matrix", "gain"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("target", [torch.float32, torch.bfloat16])
def test_memory_that_is_given_changes_no_bit(entry: Entry, dtype: torch.dtype, target: torch.dtype) -> None:
    narrow = torch.randn(entry.narrow).to(dtype)
    before = narrow.clone()
    out = torch.empty(entry.wide, dtype=target)
    assert entry.widened(narrow, out) is out
    assert torch.equal(narrow, before)
    assert torch.equal(out, entry.widened(narrow.clone(), torch.empty_like(out), overwrite=True))
    if dtype == target:
        assert torch.equal(out, entry.widened(narrow))


def test_pieces_make_up_the_whole() -> None:
    narrow = torch.randn(4, 6)
    rows = [MATRIX.widened(part, axes=MATRIX.axes) for part in narrow.split(1)]
    assert torch.equal(torch.cat(rows), MATRIX.widened(narrow))


def test_a_piece_that_is_not_copied_may_stay_where_it_is() -> None:
    narrow = torch.full((4, 6), 3.0)
    assert MATRIX.widened(narrow, narrow, axes={}, overwrite=True) is narrow
    assert torch.equal(narrow, torch.full((4, 6), 1.0))


def test_buffers_and_state_have_a_factor_of_their_own() -> None:
    assert torch.equal(GAIN.widened(torch.arange(4), factor=1), torch.arange(4).repeat_interleave(2))
    assert torch.equal(GAIN.widened(torch.ones(4), factor=0.5), torch.full((8,), 0.5))


def test_what_old_units_keep_composes_as_the_fold_does() -> None:
    first, second = (
        Entry((n,), (2 * n,), {0: Axis(2, side="out")}, Constants(fold=1 / k, keep=k)) for n, k in ((4, 2), (8, 3))
    )
    both = first.then(second)
    assert (both.keep, both.fold) == (6, pytest.approx(1 / 6))


def test_an_entry_has_six_fields_and_a_plan_five() -> None:
    """What a tensor is made of, its shapes, axes, constants and names; entries, what they start with, and evidence."""
    assert [one.name for one in fields(Entry)] == ["narrow", "wide", "axes", "constants", "names", "source"]
    assert [one.name for one in fields(Plan)] == ["parameters", "buffers", "initial", "mup", "tried_by"]


@pytest.mark.parametrize("number", [Fraction(2), Fraction(7, 3), Fraction(10**300, 7), 0.1, 3])
def test_every_number_survives_a_file(number: Any) -> None:
    """A ratio that is whole is still one."""
    entry = Entry((4,), (8,), {0: Axis(number, side="out")}, Constants(fold=number))
    again = Plan.from_json(Plan({"a": entry}).to_json())["a"]
    assert (again, type(again.fold), type(again.axes[0].times)) == (entry, type(number), type(number))


def test_what_is_known_of_initial_values_survives_a_file_and_a_growth() -> None:
    """Of a parameter that nothing is known of, nothing is stored; a wider one has another law, and the same norms."""
    assert Plan({"a": MATRIX}, {}, {"a": Initial()}) == Plan({"a": MATRIX})
    known, unread = Initial(0.1, (0.0, 1.0), "layer", (0,)), Initial(past_norms=())
    plan = Plan({"a": MATRIX, "b": MATRIX}, {}, {"a": known, "b": unread}, tried_by="copies")
    again = Plan.from_json(plan.to_json())
    assert (again, again.tried_by) == (plan, "copies")
    assert (again.fresh, again.means, again.norms) == ({"a": 0.1}, {"a": (0.0, 1.0)}, {"a": "layer"})
    forgotten = again.with_initial("std", None).with_initial("past_norms", None)
    assert forgotten.initial["a"] == Initial(None, (0.0, 1.0), "layer", None)
    later = Plan({name: Entry((8, 18), (8, 18)) for name in "ab"})
    assert (plan.then(later).initial, plan.then(later).tried_by) == (plan.initial, None)
    wider = Plan({name: Entry((8, 18), (16, 18), {0: Axis(2, side="out")}) for name in "ab"})
    assert plan.then(wider).initial == {"a": Initial(norm="layer", past_norms=(0,)), "b": unread}
