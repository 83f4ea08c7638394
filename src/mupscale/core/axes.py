"""How n units become k·n: which narrow unit each wide unit is a copy of, or where the old ones lie beside new ones."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Literal

import torch
from torch import Tensor

from mupscale.core.rules import Number
from mupscale.system import MupscaleError, checks_arguments

_SHORT_RUN = 16  # below this many contiguous entries per copy, a broadcast copy is slower than strided ones
_CHUNK = 1 << 19  # output entries per thread and step, so that rows are duplicated while they are in cache


@dataclass(frozen=True, slots=True)
class Axis:
    """A width axis that grows by `times`, copied in whole blocks of `block` narrow units.

    `sections`, where given, lists (length, block) of the parts of a packed axis whose blocks differ, as in a
    fused q|k|v projection with grouped queries; parts with equal blocks need no sections. A part with a block of 0 does
    not grow: its units stay one each, as those of an input that is joined with a width do. last: beside fresh units, an
    old block is the last of those that come in its place, not the first (ALiBi's slopes are then its own). side:
    whether the units along it are outputs of the parameter that has it, inputs, or (empty) neither.

    >>> import mupscale as mu
    >>> mu.Axis(times=2, block=2).source(4)  # of two heads of two units, each is copied whole
    tensor([0, 1, 0, 1, 2, 3, 2, 3])
    >>> mu.Axis(times=2, sections=((3, 1), (1, 0))).source(4)  # the last unit stays
    tensor([0, 0, 1, 1, 2, 2, 3])
    """

    times: Number = 1
    block: int = 1
    sections: tuple[tuple[int, int], ...] = ()
    last: bool = field(default=False, repr=False)
    side: Literal["out", "in", ""] = ""

    def __post_init__(self) -> None:
        blocks = [block for _, block in self.sections]
        nothing_grows = bool(blocks) and not any(blocks)
        if nothing_grows or min((self.block, *(block for block in blocks if block))) < 1:
            raise MupscaleError(f"a block has at least one unit, but {self} has a smaller one")

    @property
    def copies(self) -> int:
        """The multiplier as a number of copies; a real one (μP) has none."""
        if self.times != int(self.times):
            raise MupscaleError(f"an axis that grows {self.times} times cannot be copied. Choose a whole multiple")
        return int(self.times)

    @property
    def staying(self) -> int:
        """How many units there are in parts that do not grow."""
        return sum(length for length, block in self.sections if not block)

    def wide(self, n: int) -> int:
        """How many units an axis of n units has when it is wide."""
        return int((n - self.staying) * Fraction(self.times)) + self.staying

    @property
    def layout(self) -> Axis:
        """How its units lie in blocks, whatever it grows by and whichever side it is."""
        return replace(self, times=1, side="")

    def at(self, units: int) -> Axis:
        """The axis with its sections as parts of so many units, whatever width they were told for.

        >>> Axis(sections=((32, 16), (16, 8), (16, 8))).at(128).sections
        ((64, 16), (32, 8), (32, 8))
        >>> Axis(sections=((32, 1), (1, 0))).at(65).sections
        ((64, 1), (1, 0))
        """
        whole = sum(length for length, block in self.sections if block)
        growing = units - self.staying
        if not whole or whole == growing:
            return self
        cut = any(length * growing % (whole * block) for length, block in self.sections if block)
        if cut or growing < 1:
            lengths, blocks = (", ".join(map(str, numbers)) for numbers in zip(*self.sections, strict=True))
            raise MupscaleError(
                f"an axis of {whole + self.staying} units is copied in parts of {lengths}, in blocks of {blocks}. An "
                f"axis of {units} units does not divide into such parts: choose a size that does"
            )
        parts = ((length * growing // whole if block else length, block) for length, block in self.sections)
        return replace(self, sections=tuple(parts))

    def source(self, n: int) -> Tensor:
        """For an axis of n units: the narrow unit that each of the wide units copies."""
        return expand(torch.arange(n), {0: self})

    def __mul__(self, other: Axis) -> Axis:
        """First this, then the other; copying in equal blocks twice is copying once."""
        times, side = self.times * other.times, self.side or other.side
        if self.times == 1 or other.times == 1:
            growing = other if self.times == 1 else self
            return replace(growing, times=times, side=side)
        grown = tuple((length * self.times if block else length, block) for length, block in self.sections)
        if self.block != other.block or grown != other.sections or self.last != other.last:
            first, then = (axis.sections or axis.block for axis in (self, other))
            raise MupscaleError(
                f"axes copied in blocks of {first} and then of {then} do not compose. Widen in one step"
            )
        return replace(self, times=times, side=side)


def multiplier(narrow: Number, wide: Number) -> Number:
    """wide / narrow, as an int where it is one and an exact fraction elsewhere."""
    ratio = Fraction(wide) / Fraction(narrow) if narrow else Fraction(1 if wide == 0 else 0)
    return ratio.numerator if ratio.denominator == 1 else ratio


def widened_shape(shape: Sequence[int], axes: Mapping[int, Axis]) -> tuple[int, ...]:
    """The shape that a tensor of this shape has when it is copied along its axes."""
    staying = {d: axis.staying for d, axis in axes.items()}
    return tuple((n - staying[d]) * axes[d].copies + staying[d] if d in axes else n for d, n in enumerate(shape))


@checks_arguments
def expand(
    narrow: Tensor,
    axes: Mapping[int, Axis],
    out: Tensor | None = None,
    scale: float = 1.0,
    shared: Collection[int] = (),
) -> Tensor:
    """`scale` times the narrow tensor, copied along its axes, in one pass over the output.

    It is written into `out` where that is given, and into new memory of the narrow tensor's dtype and device otherwise.
    shared: the dimensions among whose copies the scale shares each entry out. What stays there is not copied, and has
    nothing to share: it keeps the whole.

    >>> import mupscale as mu
    >>> mu.expand(torch.tensor([1.0, 2.0, 3.0, 4.0]), {0: mu.Axis(times=2)}, scale=0.5)
    tensor([0.5000, 0.5000, 1.0000, 1.0000, 1.5000, 1.5000, 2.0000, 2.0000])
    >>> mu.expand(torch.tensor([1, 2, 3, 4]), {0: mu.Axis(times=2, block=2)})  # two heads of two units
    tensor([1, 2, 1, 2, 3, 4, 3, 4])
    >>> joined = mu.Axis(times=2, sections=((2, 1), (1, 0)))
    >>> mu.expand(torch.tensor([2.0, 4.0, 6.0]), {0: joined}, scale=0.5, shared=[0])
    tensor([1., 1., 2., 2., 6.])
    """
    axes = {dim: axis for dim, axis in axes.items() if axis.times != 1}
    for dim in axes:
        if not 0 <= dim < narrow.dim():
            raise MupscaleError(f"a tensor of shape {tuple(narrow.shape)} has no dimension {dim} to widen")
    expected = widened_shape(narrow.shape, axes)
    if out is None:
        out = torch.empty(expected, dtype=narrow.dtype, device=narrow.device)
    if tuple(out.shape) != expected:
        raise MupscaleError(f"a tensor of shape {tuple(narrow.shape)} widens to {expected}, not to {tuple(out.shape)}")
    packed = [dim for dim, axis in axes.items() if axis.sections]
    if not packed:
        if out.numel():
            _copy(narrow, axes, out, scale)
        return out
    dim, axis, start, wide_start = packed[0], axes[packed[0]], 0, 0
    if sum(length for length, _ in axis.sections) != narrow.shape[dim]:
        raise MupscaleError(f"sections {axis.sections} do not add up to an axis of {narrow.shape[dim]} units")
    others = {d: other for d, other in axes.items() if d != dim}
    for length, block in axis.sections:
        part = narrow.narrow(dim, start, length)
        if block:
            wide = out.narrow(dim, wide_start, length * axis.copies)
            expand(part, {**axes, dim: Axis(axis.times, block)}, wide, scale, shared)
        else:
            wide = out.narrow(dim, wide_start, length)
            expand(part, others, wide, scale * axis.copies if dim in shared else scale, shared)
        start, wide_start = start + length, wide_start + wide.shape[dim]
    return out


def _copy(narrow: Tensor, axes: Mapping[int, Axis], out: Tensor, scale: float) -> None:
    """Split each copied axis n·k into (n/b, k, b); the narrow tensor then broadcasts over the k's."""
    source, target = narrow, out
    copied: list[int] = []
    for dim in sorted(axes, reverse=True):
        block, k = axes[dim].block, axes[dim].copies
        if narrow.shape[dim] % block:
            raise MupscaleError(
                f"an axis of {narrow.shape[dim]} units does not divide into blocks of {block}. Check the block"
            )
        source = source.unflatten(dim, (-1, 1, block))
        target = target.unflatten(dim, (-1, k, block))
        copied = [dim + 1] + [d + 2 for d in copied]
    if not target.is_cpu or not copied:
        target.copy_(source if scale == 1 else source * scale)
        return
    rows = max(1, _CHUNK * torch.get_num_threads() * target.shape[0] // target.numel())
    scratch = torch.empty_like(source[:rows]) if scale != 1 else source
    for start in range(0, target.shape[0], rows):
        part = source[start : start + rows]
        if scale != 1:
            part = torch.mul(part, scale, out=scratch[: part.shape[0]])
        _broadcast(part, target[start : start + rows], copied)


def _broadcast(source: Tensor, target: Tensor, copied: Sequence[int]) -> None:
    """target ← source, whose `copied` dimensions have size 1; short innermost runs go copy by copy."""
    inner = copied[-1]
    if math.prod(target.shape[inner + 1 :]) >= _SHORT_RUN:
        target.copy_(source)
        return
    first = target
    for dim in copied[:-1]:
        first = first.narrow(dim, 0, 1)
    if _are_pairs(source, first, inner):  # (x, x) is the complex number x + xi, which torch writes twice as fast
        x = source.squeeze(-1).squeeze(-1)
        torch.complex(x, x, out=torch.view_as_complex(first.squeeze(-1)))
    else:
        for copy in range(target.shape[inner]):
            first.narrow(inner, copy, 1).copy_(source)
    if len(copied) > 1:
        target.narrow(copied[0], 1, target.shape[copied[0]] - 1).copy_(first)
        for dim in copied[1:-1]:  # three or more copied axes (Bilinear): the first slab still lacks these
            slab = target.narrow(copied[0], 0, 1)
            slab.narrow(dim, 1, slab.shape[dim] - 1).copy_(first)


def _are_pairs(source: Tensor, target: Tensor, inner: int) -> bool:
    """Whether entries are written twice, side by side, as a complex tensor stores its two parts."""
    real = source.dtype == target.dtype and target.dtype in (torch.float32, torch.float64)
    side_by_side = inner == target.dim() - 2 and target.shape[inner:] == (2, 1) and target.stride(inner) == 1
    if not (real and side_by_side and target.storage_offset() % 2 == 0):
        return False
    # files are mapped into memory at any multiple of 8, and some CPUs write a pair only where its own size divides
    return target.data_ptr() % (2 * target.element_size()) == 0 and all(n % 2 == 0 for n in target.stride()[:inner])


def places(axis: Axis, n: int) -> Tensor:
    """For an axis of n old units: the place of each among the wide ones.

    >>> places(Axis(Fraction(3, 2)), 4)
    tensor([0, 1, 3, 4])
    >>> places(Axis(2, block=2), 4)  # two heads of two units become four: the old ones are the first and the third
    tensor([0, 1, 4, 5])
    >>> places(Axis(2, block=2, last=True), 4)
    tensor([2, 3, 6, 7])
    >>> places(Axis(2, sections=((2, 1), (1, 0))), 3)  # the last unit stays, behind the four that two become
    tensor([0, 2, 4])
    """
    parts, old, new, times = [], 0, 0, Fraction(axis.times)
    for length, block in axis.sections or ((n, axis.block),):
        if not block:
            parts.append(new + torch.arange(length))
            old, new = old + length, new + length
            continue
        numbers = torch.arange(length // block)
        first = numbers * times.numerator // times.denominator
        if axis.last:
            first = (numbers + 1) * times.numerator // times.denominator - 1
        parts.append(new + (first[:, None] * block + torch.arange(block)).flatten())
        old, new = old + length, new + whole_blocks(axis, length, block) * block
    if old != n:
        raise MupscaleError(f"sections {axis.sections} do not add up to an axis of {n} units")
    return torch.cat(parts)


def whole_blocks(axis: Axis, length: int, block: int) -> int:
    """How many blocks a part of an axis has when it is wide; an error where one would be cut."""
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
    """The index that picks these units of each dimension, all combinations of them; slices where that can be."""
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
    """Which of an axis's wide units are new, for n old ones."""
    new = torch.ones(axis.wide(n), dtype=torch.bool)
    new[places(axis, n)] = False
    return new
