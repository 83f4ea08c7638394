"""What the two ways of growing ask of an axis: copies want whole multiples, fresh units want whole blocks.

Under μP alone nothing is copied or placed, so any size will do.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from fractions import Fraction
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor, nn

from mupscale.core import Axis, Entry, Role, index_of_old, naming, whole_blocks
from mupscale.system import MupscaleError, as_asked, ways_out

How = Literal["copies", "fresh", "mup"]
"""What the wide model's other units are: copies of the old ones, fresh ones beside them, or all of them fresh."""


ONE_DEPTH = (
    "the two models must have the same class and depth; only widths may differ. To add blocks, use mupscale.deepen "
    "before or after the width grows, or a Family whose base names both: {'width': 64, 'depth': 4}"
)


def find_uneven(narrow: nn.Module, wide: nn.Module) -> str:
    """The first parameter with a size that is no whole multiple of the narrow model's, with both shapes; or nothing.

    >>> find_uneven(nn.Linear(4, 3, bias=False), nn.Linear(8, 5, bias=False))
    "'weight' of shape (3, 4) → (5, 8)"
    """
    theirs = naming.parameters(wide)
    pairs = [(name, p.shape, theirs[name].shape) for name, p in naming.parameters(narrow).items() if name in theirs]
    for name, small, large in pairs:
        if any(n and m % n for n, m in zip(small, large, strict=False)):
            return f"'{name}' of shape {tuple(small)} → {tuple(large)}"
    return ""


def check_axis(name: str, small: Tensor, large: Tensor, dim: int, role: Role, how: How) -> None:
    """Refuse an axis that cannot grow in this way from the narrow tensor to the wide one, with the reason.

    >>> check_axis("weight", torch.zeros(8), torch.zeros(12), 0, Role(out=0), "fresh")
    >>> check_axis("weight", torch.zeros(8), torch.zeros(12), 0, Role(out=0), "copies")
    Traceback (most recent call last):
    mupscale.system.errors.MupscaleError: 'weight' of shape (8,) → (12,): dimension 0 does not grow by a whole ...
    """
    n, wide = small.shape[dim], large.shape[dim]
    where = f"'{name}' of shape {tuple(small.shape)} → {tuple(large.shape)}"
    if how == "mup":
        return
    if wide < n:
        raise MupscaleError(f"{where}: dimension {dim} becomes narrower. The target must be at least as wide")
    if how == "copies" and (n == 0 or wide % n):
        fits = ", ".join(str(n * k) for k in (2, 3, 4)) if n else "none"
        raise MupscaleError(
            f"{where}: dimension {dim} does not grow by a whole multiple. Sizes that fit: {fits}, … (if the axis joins "
            "a width with a part that does not grow, none fits: give each part its own layer). Fresh units fit any "
            f"larger width: {as_asked('grow=mupscale.Fresh()', '--how fresh')}"
        )
    if n == 0:
        raise MupscaleError(f"{where}: dimension {dim} has no units to grow from")
    if role.uncopyable or (how == "fresh" and role.unplaceable):
        raise MupscaleError(f"{where}: {role.uncopyable or role.unplaceable}")


def check_blocks(entries: Mapping[str, Entry], how: How) -> None:
    """Refuse an axis whose blocks do not fit into it, or would be cut in the wide one, with sizes at which none is.

    >>> heads = Entry((64, 4), (80, 4), {0: Axis(Fraction(5, 4), block=32, side="out")})
    >>> check_blocks({"weight": heads}, "fresh")
    Traceback (most recent call last):
    mupscale.system.errors.MupscaleError: 'weight', dimension 0: 64 units in blocks of 32 cannot become 80: ...
    """
    growing = [(name, e.narrow[d], d, axis) for name, e in entries.items() for d, axis in e.axes.items()]
    for name, n, dim, axis in growing if how != "mup" else ():
        if axis.times == 1:
            continue
        if axis.sections and (whole := sum(length for length, _ in axis.sections)) != n:
            as_parts = "pass a batch, inputs=, to try them as parts of the whole"
            raise MupscaleError(
                f"'{name}': dimension {dim} has {n} units, but the sections of its role add up to {whole}. Give "
                f"sections for this width{ways_out(', or ', inputs=as_parts)}"
            )
        if how == "copies" and not axis.sections and n % axis.block:
            raise MupscaleError(f"'{name}': dimension {dim} of {n} units does not divide into blocks of {axis.block}")
        if how == "fresh":
            try:
                for length, block in _parts(n, axis):
                    whole_blocks(axis, length, block)
            except MupscaleError as error:
                alike = [(units, other) for _, units, _, other in growing if other.times == axis.times]
                raise MupscaleError(f"'{name}', dimension {dim}: {error}{_sizes_that_fit(n, alike)}") from None


def _parts(n: int, axis: Axis) -> Sequence[tuple[int, int]]:
    """An axis of n units as lengths, and the blocks that they lie in."""
    return axis.sections or ((n, axis.block),)


def _sizes_that_fit(n: int, alike: Sequence[tuple[int, Axis]]) -> str:
    """The sizes nearest to the one asked for, of an axis of n units, at which no axis that grows alike is cut."""
    parts = [part for units, axis in alike for part in _parts(units, axis)]
    if any(length % block for length, block in parts):
        return ""
    times, common = Fraction(alike[0][1].times), math.gcd(*(length // block for length, block in parts))
    factors = [Fraction(k, common) for k in (math.floor(times * common), math.ceil(times * common)) if k > common]
    width = min(units for units, _ in alike)
    fits, widths = (" or ".join(str(units * factor) for factor in factors) for units in (n, width))
    return f"; take {fits}" + (f", that is {widths} instead of {width * times}" if width != n else "")


def check_read_widths(
    entries: Mapping[str, Entry], told: Collection[str], buffers: Mapping[str, Entry] = MappingProxyType({})
) -> None:
    """Refuse an input axis that grows by a factor by which nothing in the model grows that could be read.

    A width that is joined with inputs that do not grow is such an axis: where its old units lie cannot be told.
    told: parameters whose roles the user gave, who knows better. buffers: which may write units, too.

    >>> entry = Entry(narrow=(4, 67), wide=(4, 99), axes={1: Axis(Fraction(99, 67), side="in")})
    >>> check_read_widths({"joined.weight": entry}, told=())
    Traceback (most recent call last):
    mupscale.system.errors.MupscaleError: 'joined.weight' reads 67 → 99 inputs, but nothing in the model grows ...
    """
    grown = {Fraction(e.axes[d].times) for e in (*entries.values(), *buffers.values()) for d in e.out if d in e.axes}
    for name, entry in entries.items():
        for d in entry.in_:
            if name not in told and entry.axes[d].times != 1 and Fraction(entry.axes[d].times) not in grown:
                raise MupscaleError(
                    f"'{name}' reads {entry.narrow[d]} → {entry.wide[d]} inputs, but nothing in the model grows by "
                    "that factor. Does it join a width with a part that does not grow? Give each part its own layer"
                )


def agrees_with_rebuilt(entry: Entry, small: Tensor, large: Tensor, how: How) -> bool:
    """Whether a buffer that the wide model computes by itself is what growing the narrow one's gives.

    >>> entry = Entry(narrow=(2,), wide=(4,), axes={0: Axis(2, side="out")})
    >>> agrees_with_rebuilt(entry, torch.tensor([1.0, 2.0]), torch.tensor([1.0, 1.0, 2.0, 2.0]), "copies")
    True
    >>> agrees_with_rebuilt(entry, torch.tensor([1.0, 2.0]), torch.tensor([1.0, 1.5, 2.0, 2.5]), "fresh")
    True
    """
    if how == "fresh":
        return torch.equal(small, large[index_of_old(entry.narrow, entry.axes)].to(small))
    copies = entry.widened(small, factor=entry.rule.weight)
    return torch.equal(copies, large.to(copies))
