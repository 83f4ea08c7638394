"""Where the n old units of an axis lie among the N wide ones when new units are put beside them, not copies.

Old unit i lies at ⌊i·N/n⌋, in whole blocks. For N = k·n that is the place of its first copy. At any other width, too,
the equal parts of a packed axis stay where the wide module looks for them: part p of P begins at p·N/P. Such parts are
gates, q|k|v, gate|up, heads that grow inside, concatenated widths, and groups of a convolution.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction

import torch
from torch import Tensor

from mupscale.core.axes import Axis
from mupscale.system import MupscaleError, checks_arguments


def places(axis: Axis, n: int) -> Tensor:
    """For an axis of n old units: the place of each among the wide ones.

    >>> places(Axis(Fraction(3, 2)), 4)
    tensor([0, 1, 3, 4])
    >>> places(Axis(2, block=2), 4)  # two heads of two units become four: the old ones are the first and the third
    tensor([0, 1, 4, 5])
    >>> places(Axis(2, block=2, last=True), 4)
    tensor([2, 3, 6, 7])
    """
    parts, old, new = [], 0, 0
    for length, block in axis.sections or ((n, axis.block),):
        parts.append(new + _places_of_blocks(axis, length, block))
        old, new = old + length, new + whole_blocks(axis, length, block) * block
    if old != n:
        raise MupscaleError(f"sections {axis.sections} do not add up to an axis of {n} units")
    return torch.cat(parts)


def _places_of_blocks(axis: Axis, length: int, block: int) -> Tensor:
    times, numbers = Fraction(axis.times), torch.arange(length // block)
    first = numbers * times.numerator // times.denominator
    if axis.last:
        first = (numbers + 1) * times.numerator // times.denominator - 1
    return (first[:, None] * block + torch.arange(block)).flatten()


def whole_blocks(axis: Axis, length: int, block: int) -> int:
    """How many blocks a part of an axis has when it is wide; an error where one would be cut.

    >>> whole_blocks(Axis(Fraction(3, 2)), 64, 32)
    3
    >>> whole_blocks(Axis(Fraction(5, 4)), 64, 32)
    Traceback (most recent call last):
    mupscale.system.errors.MupscaleError: 64 units in blocks of 32 cannot become 80: that cuts a block
    """
    wide = length * Fraction(axis.times)
    if length % block:
        raise MupscaleError(f"an axis of {length} units does not divide into blocks of {block}. Check the block")
    if wide % block:
        raise MupscaleError(f"{length} units in blocks of {block} cannot become {wide}: that cuts a block")
    return int(wide // block)


@checks_arguments
def index_of_old(shape: tuple[int, ...], axes: Mapping[int, Axis]) -> tuple[Tensor | slice, ...]:
    """The index with which a wide tensor gives the part that belongs to old units on every axis.

    shape: of the narrow tensor.

    >>> wide = torch.arange(8).reshape(2, 4)
    >>> wide[index_of_old((2, 2), {1: Axis(2)})]
    tensor([[0, 2],
            [4, 6]])
    """
    grown = {d: axis for d, axis in axes.items() if axis.times != 1}
    units = [places(grown[d], n) if d in grown else torch.arange(n) for d, n in enumerate(shape)]
    return index_of_units(units)


def index_of_units(units: Sequence[Tensor]) -> tuple[Tensor | slice, ...]:
    """The index that picks these units of each dimension, all combinations of them; slices where that can be.

    >>> torch.arange(12).reshape(3, 4)[index_of_units([torch.tensor([0, 2]), torch.tensor([0, 1, 3])])]
    tensor([[ 0,  1,  3],
            [ 8,  9, 11]])
    """
    index: list[Tensor | slice] = [_slice_of(one) or one for one in units]
    irregular = [d for d, one in enumerate(index) if isinstance(one, Tensor)]
    if len(irregular) > 1:  # several lists pick pairs, unless they are crossed
        return tuple(one.reshape([-1 if e == d else 1 for e in range(len(units))]) for d, one in enumerate(units))
    return tuple(index)


def _slice_of(units: Tensor) -> slice | None:
    """Equally distant units as a slice; none where they are not."""
    if len(units) == 0:
        return None
    steps = units.diff()
    if len(steps) and not bool((steps == steps[0]).all()):
        return None
    return slice(int(units[0]), int(units[-1]) + 1, int(steps[0]) if len(steps) else 1)


def is_new(axis: Axis, n: int) -> Tensor:
    """Which of an axis's wide units are new, for n old ones.

    >>> is_new(Axis(Fraction(3, 2)), 4)
    tensor([False, False,  True, False, False,  True])
    """
    new = torch.ones(int(n * Fraction(axis.times)), dtype=torch.bool)
    new[places(axis, n)] = False
    return new
