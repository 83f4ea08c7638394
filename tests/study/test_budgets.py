"""Loss against cost: interpolation, the cost of the same loss, and break-evens."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mupscale.study.results import BreakEven
from mupscale.study.verdict import CostRatio, compare_costs, cost_to_reach, find_break_even, loss_at

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
    assert loss_at(FALLING, 0.5) is None
    assert loss_at(FALLING, 200.0) is None
    assert cost_to_reach(FALLING, 0.5) is None
    assert cost_to_reach([], 1.0) is None
    assert loss_at([(3.0, 1.0)], 3.0) == 1.0


def test_the_same_loss_costs_a_tenth_where_a_curve_lies_a_decade_to_the_left() -> None:
    later = [(10 * cost, loss) for cost, loss in FALLING]
    assert compare_costs(FALLING, later) == CostRatio(pytest.approx(0.1))  # type: ignore[arg-type]
    assert compare_costs(later, FALLING) == CostRatio(pytest.approx(10.0))  # type: ignore[arg-type]


def test_a_ratio_is_a_bound_where_the_lower_one_is_there_at_its_lowest_cost() -> None:
    low = [(1.0, 1.0), (10.0, 0.5)]
    assert compare_costs(low, FALLING) == CostRatio(0.01, "at most")
    assert compare_costs(FALLING, low) == CostRatio(100.0, "at least")
    assert compare_costs([], FALLING) is None


def test_break_even() -> None:
    flat = [(1.0, 3.0), (100.0, 3.0)]
    at = find_break_even(FALLING, flat)
    assert at.kind == "from"
    assert at.cost == pytest.approx(math.sqrt(10))
    assert find_break_even(flat, FALLING) == BreakEven("early")  # it is lower at the lowest cost
    assert find_break_even([(cost, loss + 9) for cost, loss in flat], FALLING) == BreakEven("never")
    assert find_break_even([(cost, loss - 5) for cost, loss in flat], FALLING) == BreakEven("always", 1.0)
    assert find_break_even(FALLING, [(1000.0, 1.0)]) == BreakEven("unknown")


def test_a_curve_that_is_overtaken_again_breaks_even_at_the_last_crossing() -> None:
    wavy = [(1.0, 1.0), (2.0, 3.0), (4.0, 1.0)]
    assert find_break_even(wavy, [(1.0, 2.0), (4.0, 2.0)]).cost == pytest.approx(2 * math.sqrt(2))
