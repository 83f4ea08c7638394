"""Where the n old units of an axis lie among the N wide ones when new units are put beside them, not copies.

Old unit i lies at ⌊i·N/n⌋, in whole blocks. For N = k·n that is the place of its first copy; and at any other width
the equal parts of a packed axis (gates, q|k|v, gate|up, heads that grow inside, concatenated widths, conv groups)
stay where the wide module looks for them, since part p of n/P units begins at p·N/P.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

import torch
from torch import Tensor

from mupscale.core.axes import Axis
from mupscale.system import MupscaleError


def places(axis: Axis, n: int) -> Tensor:
    """For an axis of n old units: the place of each among the wide ones.

    >>> places(Axis(Fraction(3, 2)), 4)
    tensor([0, 1, 3, 4])
    >>> places(Axis(2, block=2), 4)  # two heads of two units become four: the old ones are the first and the third
    tensor([0, 1, 4, 5])
    """
    parts, old, new = [], 0, 0
    for length, block in axis.sections or ((n, axis.block),):
        parts.append(new + _places_of_blocks(Fraction(axis.times), length, block))
        old, new = old + length, new + whole_blocks(axis, length, block) * block
    if old != n:
        raise MupscaleError(f"sections {axis.sections} do not add up to an axis of {n} units")
    return torch.cat(parts)


def _places_of_blocks(times: Fraction, length: int, block: int) -> Tensor:
    first = torch.arange(length // block) * times.numerator // times.denominator
    return (first[:, None] * block + torch.arange(block)).flatten()


def whole_blocks(axis: Axis, length: int, block: int) -> int:
    """How many blocks a part of an axis has when it is wide; an error where one would be cut.

    >>> whole_blocks(Axis(Fraction(3, 2)), 64, 32)
    3
    >>> whole_blocks(Axis(Fraction(5, 4)), 64, 32)
    Traceback (most recent call last):
    mupscale.system.errors.MupscaleError: 64 units in blocks of 32 cannot become 80: that cuts a block; take 96
    """
    wide = length * Fraction(axis.times)
    if length % block:
        raise MupscaleError(f"an axis of {length} units does not divide into blocks of {block}; check the block")
    if wide % block:
        above = -(-wide // block) * block
        below = above - block
        near = f"{below} or {above}" if below > length else f"{above}"
        raise MupscaleError(f"{length} units in blocks of {block} cannot become {wide}: that cuts a block; take {near}")
    return int(wide // block)


def index_of_old(shape: tuple[int, ...], axes: Mapping[int, Axis]) -> tuple[Tensor | slice, ...]:
    """The index with which a wide tensor gives the part that belongs to old units on every axis.

    shape: of the narrow tensor.

    >>> wide = torch.arange(8).reshape(2, 4)
    >>> wide[index_of_old((2, 2), {1: Axis(2)})]
    tensor([[0, 2],
            [4, 6]])
    """
    growing = [d for d in sorted(axes) if axes[d].times != 1]
    index: list[Tensor | slice] = [slice(None)] * len(shape)
    for d in growing:
        place = places(axes[d], shape[d])
        step = _step(place)
        if step is not None:
            index[d] = slice(0, int(place[-1]) + 1, step)
        else:
            index[d] = place
    irregular = [d for d in growing if isinstance(index[d], Tensor)]
    if len(irregular) > 1 or (irregular and irregular != growing):  # several lists pick pairs, unless they are crossed
        for d in range(len(shape)):
            units = places(axes[d], shape[d]) if d in growing else torch.arange(shape[d])
            index[d] = units.reshape([-1 if e == d else 1 for e in range(len(shape))])
    return tuple(index)


def _step(place: Tensor) -> int | None:
    """The distance of equally distant places; none where they are not."""
    if len(place) < 2:
        return 1 if len(place) else None
    steps = place.diff()
    return int(steps[0]) if bool((steps == steps[0]).all()) else None


def is_new(axis: Axis, n: int) -> Tensor:
    """Which of an axis's wide units are new, for n old ones.

    >>> is_new(Axis(Fraction(3, 2)), 4)
    tensor([False, False,  True, False, False,  True])
    """
    new = torch.ones(int(n * Fraction(axis.times)), dtype=torch.bool)
    new[places(axis, n)] = False
    return new
