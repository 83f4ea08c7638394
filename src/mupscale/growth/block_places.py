"""Which block of a deep model is which of the shallow one, where their shapes differ from block to block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from mupscale.growth.depth_operators import DepthOperator, Identity, Place
from mupscale.planning import BlockList
from mupscale.system import MupscaleError

Shapes = dict[str, tuple[int, ...]]
"""The tensors of a block, by the names that they have in it."""


def fitting_places(
    one: BlockList, operator: DepthOperator, tensors: Mapping[str, Tensor], deeper: Mapping[str, Tensor]
) -> list[Place]:
    """The operator's places, as far as shapes allow them.

    Old blocks that are to be spread evenly go to the nearest places where the deep model's blocks have their shapes:
    the last block of some models has less in it, and every second one of others has a mask. A new block goes with the
    nearest old one that is shaped as it is, or, where there is none, that has all of its tensors, in whatever shapes.

    >>> import torch
    >>> a, b = torch.ones(1), torch.ones(2)
    >>> one = BlockList("h.*", ("h.0", "h.1"), ("h.0", "h.1", "h.2", "h.3"))
    >>> deeper = {"h.0.w": a, "h.1.w": a, "h.2.w": a, "h.3.w": b}
    >>> fitting_places(one, Identity(), {"h.0.w": a, "h.1.w": b}, deeper)[3]
    Place(block=1, is_new=False)
    """
    ours = [_below(path, tensors) for path in one.shallow]
    theirs = [_below(path, deeper) for path in one.deep]
    places = operator.places(len(ours), len(theirs))
    if operator == Identity():
        old = _where_they_fit(ours, theirs, [n for n, place in enumerate(places) if not place.is_new])
        new = tuple(n for n in range(len(theirs)) if n not in old)
        places = Identity(at=new).places(len(ours), len(theirs)) if old else places
    return [_fitting(one, operator, number, place, ours, theirs[number]) for number, place in enumerate(places)]


def _below(path: str, tensors: Mapping[str, Tensor]) -> Shapes:
    return {n.removeprefix(f"{path}."): tuple(t.shape) for n, t in tensors.items() if n.startswith(f"{path}.")}


def _where_they_fit(ours: Sequence[Shapes], theirs: Sequence[Shapes], wanted: Sequence[int]) -> tuple[int, ...]:
    """Places in rising order at which the old blocks' shapes are, nearest to the wanted ones; else none."""
    best: dict[int, tuple[int, tuple[int, ...]]] = {-1: (0, ())}  # by the last place that is taken
    for block, shapes in enumerate(ours):
        ends = [n for n, there in enumerate(theirs) if there == shapes]
        best = {
            end: min((cost + abs(end - wanted[block]), (*taken, end)) for cost, taken in before)
            for end in ends
            if (before := [way for last, way in best.items() if last < end])
        }
    return min(best.values())[1] if best else ()


def _fitting(
    one: BlockList, operator: DepthOperator, number: int, place: Place, ours: Sequence[Shapes], theirs: Shapes
) -> Place:
    """The place, or that of a new block with another old one."""
    if ours[place.block] == theirs:
        return place
    if place.is_new and not operator.copies:
        candidates = [i for i, block in enumerate(ours) if block == theirs]
        candidates = candidates or [i for i, block in enumerate(ours) if theirs.keys() <= block.keys()]
        if candidates:
            return Place(min(candidates, key=lambda i: abs(i - place.block)), is_new=True)
    odd = next((n for n in (*theirs, *ours[place.block]) if theirs.get(n) != ours[place.block].get(n)), "")
    raise MupscaleError(
        f"'{one.deep[number]}' cannot come from '{one.shallow[place.block]}': '{odd}' has shape {theirs.get(odd)} in "
        f"the deep model and {ours[place.block].get(odd)} in the shallow one. Depth grows by blocks of one shape. Use "
        "Identity(at=…) to say where new blocks go"
    )
