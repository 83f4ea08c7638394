"""Is a wide tensor made of copies of a narrow one, in which order, and by which factor?"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from mupscale.core import Axis, Number, expand

Axes = Mapping[int, Axis]
_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}
_MOST_COMBINATIONS = 64


def growing_dims(narrow: Sequence[int], wide: Sequence[int]) -> tuple[int, ...] | None:
    """The dimensions along which a shape grows by a whole multiple; none where it does not fit.

    >>> growing_dims((2, 4), (2, 8)), growing_dims((2, 4), (2, 6))
    ((1,), None)
    """
    if len(narrow) != len(wide):
        return None
    dims = tuple(d for d, (n, m) in enumerate(zip(narrow, wide, strict=True)) if n != m)
    return dims if all(narrow[d] and wide[d] % narrow[d] == 0 for d in dims) else None


def possible_axes(n: int, wide: int, hints: Iterable[Axis] = ()) -> list[Axis]:
    """Every order in which n units can be copied to so many: the hints that fit first, then blocks of any length.

    >>> [axis.block for axis in possible_axes(4, 8)]
    [1, 2, 4]
    """
    times = wide // n
    fitting = [axis for axis in hints if axis.times == times and _fits(axis, n)]
    blocks = [Axis(times, block) for block in range(1, n + 1) if n % block == 0]
    return list(dict.fromkeys([*fitting, *blocks]))


def explanations(narrow: Tensor, wide: Tensor, hints: Iterable[Axis]) -> Iterator[tuple[dict[int, Axis], float]]:
    """Orders of copies, and factors, under which the wide tensor is the narrow one; most likely ones first.

    >>> x = torch.tensor([[1.0, 2.0], [3.0, 5.0]])
    >>> next(explanations(x, x.repeat_interleave(2, 1) * 3, []))
    ({1: Axis(times=2, block=1, sections=(), side='')}, 3.0)
    >>> next(explanations(torch.arange(1.0, 5), torch.tensor([1.0, 2, 1, 2, 3, 3, 4, 4]), []))  # in unequal blocks
    ({0: Axis(times=2, block=1, sections=((2, 2), (2, 1)), side='')}, 1.0)
    """
    dims = growing_dims(narrow.shape, wide.shape)
    if dims is None:
        return
    hints = list(hints)
    choices = [possible_axes(narrow.shape[d], wide.shape[d], hints) for d in dims]
    if dims and (narrow.numel() == 0 or bool((narrow == narrow.flatten()[0]).all())):
        choices = [each[:3] for each in choices]  # all alike: every order explains it
    tried = itertools.islice(itertools.product(*choices), _MOST_COMBINATIONS)
    some = torch.arange(0, wide.numel(), max(1, wide.numel() // 16))
    spots = torch.unravel_index(some, wide.shape) if wide.dim() else ()
    few = wide.detach()[tuple(spot.to(wide.device) for spot in spots)].flatten()
    for axes in itertools.chain(tried, _read_axes(narrow.detach(), wide.detach(), dims)):
        by_dim = dict(zip(dims, axes, strict=True))
        units = [_source(by_dim[d], narrow.shape[d])[spot] if d in by_dim else spot for d, spot in enumerate(spots)]
        if not _may_be_multiples(narrow.detach()[tuple(u.to(narrow.device) for u in units)].flatten(), few):
            continue
        factor = factor_between(expand(narrow.detach(), by_dim), wide.detach())
        if factor is not None:
            yield by_dim, factor


def _read_axes(narrow: Tensor, wide: Tensor, dims: Sequence[int]) -> Iterator[tuple[Axis, ...]]:
    """The orders that the values show: parts that were joined or split off may each have blocks of their own."""
    if not dims or not narrow.numel() or not narrow.is_floating_point():
        return
    shape = [1 if d in dims else n for d, n in enumerate(narrow.shape)]
    push = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(narrow)
    axes = []
    for dim in dims:
        grown = [d for d in dims if d != dim]  # along which the mean is the same, whatever the order

        def number(t: Tensor, dim: int = dim, grown: list[int] = grown) -> Tensor:
            """One for each unit."""
            pushed = (t.mean(grown, keepdim=True) if grown else t) * push
            return pushed.movedim(dim, 0).reshape(t.shape[dim], -1).sum(1)

        ours, theirs = number(narrow), number(wide)
        ordered, places = (ours * (theirs.mean() / ours.mean())).sort()
        nearest = torch.bucketize(theirs, (ordered[1:] + ordered[:-1]) / 2)
        axis = axis_of_units(places[nearest].cpu(), len(ours), len(theirs) // len(ours))
        if axis is None:
            return
        axes.append(axis)
    yield tuple(axes)


def axis_of_units(units: Tensor, n: int, times: int, borders: Collection[int] = ()) -> Axis | None:
    """The axis that copies n units in this order (the narrow unit of each wide one); None where none does.

    borders: where a part with blocks of its own may end, so that parts are told apart even where blocks are equal.

    >>> axis_of_units(torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 4, 4, 5, 5]), 6, 2)
    Axis(times=2, block=1, sections=((4, 4), (2, 1)), side='')
    """
    sections: list[tuple[int, int]] = []
    start = 0
    while start < n:
        ahead = units[start * times :]
        again = (ahead[1:] == start).nonzero()
        block = int(again[0]) + 1 if len(again) else 0
        copies = torch.arange(start, start + block).repeat(times)
        if not block or not torch.equal(ahead[: len(copies)], copies):
            return None
        if sections and sections[-1][1] == block and start not in borders:
            sections[-1] = (sections[-1][0] + block, block)
        else:
            sections.append((block, block))
        start += block
    blocks = {block for _, block in sections}
    return Axis(times, blocks.pop()) if len(blocks) == 1 else Axis(times, sections=tuple(sections))


def factor_between(expected: Tensor, actual: Tensor) -> float | None:
    """By what the actual tensor is a multiple of the expected one; none where it is no multiple.

    >>> factor_between(torch.tensor([1.0, 2.0]), torch.tensor([2.0, 4.0]))
    2.0
    """
    if expected.shape != actual.shape or expected.dtype != actual.dtype:
        return None
    if not expected.is_floating_point():
        return 1.0 if torch.equal(expected, actual) else None
    if are_close(expected, actual):
        return 1.0
    finite = expected.isfinite() & actual.isfinite()
    a, b = expected[finite].double(), actual[finite].double()
    size = float(a @ a)
    factor = float(a @ b) / size if size else 0.0
    if factor and math.isfinite(factor) and are_close(expected * factor, actual):
        return factor
    return None


@lru_cache(maxsize=4096)
def _source(axis: Axis, n: int) -> Tensor:
    return axis.source(n)


def _may_be_multiples(a: Tensor, b: Tensor) -> bool:
    """Whether a few entries have the ratio of the largest; cheap, and enough for most that are no multiples."""
    if a.dtype != b.dtype or not a.is_floating_point():
        return a.dtype == b.dtype and torch.equal(a, b)
    largest = a.abs().argmax() if len(a) else 0
    if not len(a) or not bool(a.isfinite().all() & b.isfinite().all()) or not bool(a[largest]):
        return True  # the long way will tell
    return are_close(a * (b[largest] / a[largest]), b, loosened=1e3)


def are_close(expected: Tensor, actual: Tensor, loosened: float = 1.0, size: float = 0.0) -> bool:
    """Whether two tensors are equal up to the rounding of one operation on numbers of their size, or of this one.

    >>> are_close(torch.tensor([1.0, 1e-9]), torch.tensor([1.0, 0.0]))
    True
    """
    tolerance = loosened * _TOLERANCE.get(expected.dtype, 3e-2)
    allowed = tolerance * max(size, largest_number(expected)) + 1e-300
    if expected.shape == actual.shape:
        difference = largest_number(actual - expected, nan=math.inf)
        if difference <= allowed or 2 * allowed < difference < math.inf:  # between them, it depends on the entry's size
            return difference <= allowed
    return bool(torch.allclose(actual, expected, rtol=tolerance, atol=allowed, equal_nan=True))


def largest_number(tensor: Tensor, nan: float | None = None) -> float:
    """The largest absolute value in a tensor; where there are nan or inf, of the others, or `nan` where given.

    >>> largest_number(torch.tensor([1.0, -2.0, math.inf]))
    2.0
    """
    if not tensor.numel():
        return 0.0
    largest = float(torch.linalg.vector_norm(tensor, math.inf))
    if math.isfinite(largest):
        return largest
    return nan if nan is not None else largest_number(tensor[tensor.isfinite()])


def copies_of_each(axes: Axes) -> Number:
    """How many copies there are of each narrow entry.

    >>> copies_of_each({0: Axis(2), 1: Axis(3)})
    6
    """
    return math.prod((axis.times for axis in axes.values()), start=1)


def _fits(axis: Axis, n: int) -> bool:
    if axis.sections:
        return sum(length for length, _ in axis.sections) == n and all(length % b == 0 for length, b in axis.sections)
    return n % axis.block == 0
