"""Loss against cost: who is lower where, from which cost on, and what the same loss costs.

A curve is a list of costs and losses, costs rising. Between two points a loss goes as a straight line over the
logarithm of the cost. Nothing is said about costs beyond the measured ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class BreakEven:
    """From which cost on one contender is lower than another.

    kind: always (at the lowest cost that both have, too), from (from `cost` on), never (not at the highest either), or
    unknown (they have no costs in common).
    """

    kind: Literal["always", "from", "never", "unknown"]
    cost: float | None = None


@dataclass(frozen=True)
class CostRatio:
    """What one contender costs, over another, to the same loss: that of the one which ends higher.

    bound: '' for the value itself; 'at most' or 'at least' where the lower one is there already at its lowest cost.
    """

    value: float
    bound: Literal["", "at most", "at least"] = ""


def loss_at(points: Points, cost: float) -> float | None:
    """The loss at a cost; None outside the measured ones.

    >>> loss_at([(1.0, 3.0), (4.0, 1.0)], 2.0)
    2.0
    """
    if not points or not points[0][0] <= cost <= points[-1][0]:
        return None
    for (low, above), (high, below) in pairwise(points):
        if low <= cost <= high:
            return above + (below - above) * math.log(cost / low) / math.log(high / low)
    return points[0][1]


def cost_to_reach(points: Points, loss: float) -> float | None:
    """The cost at which the loss first is as low as this; None if it never is.

    >>> cost_to_reach([(1.0, 3.0), (4.0, 1.0)], 2.0)
    2.0
    """
    if points and points[0][1] <= loss:
        return points[0][0]
    for (low, above), (high, below) in pairwise(points):
        if below <= loss:
            return float(low * (high / low) ** ((above - loss) / (above - below)))
    return None


def compare_costs(points: Points, other: Points) -> CostRatio | None:
    """What the first costs over the second, to the loss that the worse of them ends with; None where one has no loss.

    >>> small, large = [(1.0, 3.0), (4.0, 1.0)], [(2.0, 3.0), (8.0, 2.0)]
    >>> compare_costs(small, large)
    CostRatio(value=0.25, bound='')
    >>> compare_costs(large, small)
    CostRatio(value=4.0, bound='')
    """
    if not points or not other:
        return None
    if points[-1][1] <= other[-1][1]:
        cost = cost_to_reach(points, other[-1][1])
        assert cost is not None
        return CostRatio(cost / other[-1][0], "at most" if cost == points[0][0] else "")
    cost = cost_to_reach(other, points[-1][1])
    assert cost is not None
    return CostRatio(points[-1][0] / cost, "at least" if cost == other[0][0] else "")


def find_break_even(points: Points, other: Points) -> BreakEven:
    """From which cost on the first is lower, up to the highest cost that both have.

    >>> find_break_even([(1.0, 3.0), (4.0, 1.0)], [(1.0, 2.5), (4.0, 1.5)])
    BreakEven(kind='from', cost=2.0)
    """
    costs = sorted({cost for cost, _ in (*points, *other)})
    gaps = [
        (cost, ours - theirs)
        for cost in costs
        if (ours := loss_at(points, cost)) is not None and (theirs := loss_at(other, cost)) is not None
    ]
    if not gaps:
        return BreakEven("unknown")
    if gaps[-1][1] >= 0:
        return BreakEven("never")
    last = max((number for number, (_, gap) in enumerate(gaps) if gap >= 0), default=None)
    if last is None:
        return BreakEven("always", gaps[0][0])
    (low, above), (high, below) = gaps[last], gaps[last + 1]
    return BreakEven("from", low * (high / low) ** (above / (above - below)))
