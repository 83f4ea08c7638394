"""What new blocks of a deeper model are: silent ones that learn, or copies of the old ones."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal, NamedTuple

from mupscale.system import MupscaleError, checks_arguments


class Place(NamedTuple):
    """A block of the deep model: the shallow model's block that it is, or, where it is new, is a copy of or like."""

    block: int
    is_new: bool


class DepthOperator(ABC):
    """How a deeper model is filled: which of its blocks are the old ones, and what the others are.

    copies: whether new blocks are copies of old ones, with their optimizer state. Where not, they are drawn afresh and
    write nothing into the residual stream, so that the function stays.
    """

    copies: bool = False

    @abstractmethod
    def places(self, shallow: int, deep: int) -> list[Place]:
        """Of each of the deep model's blocks, which block of the shallow one it is, or is made after."""


@checks_arguments
@dataclass(frozen=True)
class Identity(DepthOperator):
    """New blocks, freshly initialised, that write nothing into the residual stream yet: the function stays.

    Old block i of n lies at ⌊i·N/n⌋ among N, so that new ones come evenly spread behind them. at: where in the deep
    model the new blocks are instead, counted from 0.

    >>> [place.block if not place.is_new else None for place in Identity().places(2, 6)]
    [0, None, None, 1, None, None]
    >>> [place.block if not place.is_new else None for place in Identity(at=(0, 1)).places(2, 4)]
    [None, None, 0, 1]
    """

    at: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.at is not None:
            object.__setattr__(self, "at", tuple(self.at))

    def places(self, shallow: int, deep: int) -> list[Place]:
        """Old blocks where they are put, and behind each of them new ones that are like it."""
        return _around(_old_places(self.at, shallow, deep), deep)


@checks_arguments
@dataclass(frozen=True)
class Stack(DepthOperator):
    """New blocks are copies of the old ones, with their optimizer state. The function changes.

    order: 'appended', all blocks again on top of all blocks, as progressive stacking does it; or 'interleaved', each
    block's copies directly behind it. Where rates follow the depth, the projections into the residual stream are
    divided by the number of copies, as weights are where units are copied.

    >>> [place.block for place in Stack().places(2, 4)], [place.block for place in Stack("interleaved").places(2, 4)]
    ([0, 1, 0, 1], [0, 0, 1, 1])
    """

    order: Literal["appended", "interleaved"] = "appended"
    copies = True

    def places(self, shallow: int, deep: int) -> list[Place]:
        """The blocks in turn, or each as often as it fits."""
        if self.order == "interleaved":
            return _around(_old_places(None, shallow, deep), deep)
        return [Place(number % shallow, is_new=number >= shallow) for number in range(deep)]


def _old_places(at: tuple[int, ...] | None, shallow: int, deep: int) -> list[int]:
    if at is None:
        return [number * deep // shallow for number in range(shallow)]
    if len(set(at)) != deep - shallow or not all(0 <= number < deep for number in at):
        raise MupscaleError(
            f"at={at} must give the places of {deep - shallow} new blocks among {deep}: {deep - shallow} different "
            f"numbers from 0 to {deep - 1}"
        )
    return [number for number in range(deep) if number not in at]


def _around(old: list[int], deep: int) -> list[Place]:
    """Every new block goes with the old one before it; those before all old ones, with the first."""
    return [Place(max(0, sum(place <= n for place in old) - 1), is_new=n not in old) for n in range(deep)]
