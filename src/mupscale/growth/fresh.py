"""The operator beyond the paper: the trained network stays as it is, and the new units are drawn at μP's initial scale.

GROWTH in one table, for a weight from inputs to outputs:

    old inputs, old outputs    the narrow weight (times Entry.keep, which undoes what the model itself divides by)
    any inputs, new outputs    fresh
    new inputs, old outputs    fresh, times `outgoing`

Learning rate, weight decay and eps are those of μP at the wide width: rules.py does not know of this.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mupscale.core import Entry, Plan, index_of_old, is_new
from mupscale.growth.lossless import gain_factor, is_written_by_mean, is_zero, keeps_outgoing
from mupscale.growth.noise import draw_normal
from mupscale.growth.operators import Operator, Part, StatePart
from mupscale.planning import means_of
from mupscale.system import MupscaleError

_AT_A_TIME = 1 << 24  # entries that are drawn before they are moved


@dataclass(frozen=True)
class Fresh(Operator):
    """New units beside the old ones, drawn as μP draws them at the wide width; any wider width will do.

    outgoing: between 0 and 1, how much of its fresh weight a new unit has towards old ones. At 0 the function stays on
    every axis that no norm reads. lossless: the function stays on the axes that norms read, too; `upscale` tells where
    that cannot be.

    >>> import torch, mupscale as mu
    >>> from torch.nn import Linear, Sequential, Tanh
    >>> narrow, wide = (Sequential(Linear(3, n), Tanh(), Linear(n, 2)) for n in (8, 12))
    >>> plan = mu.plan(narrow, wide, fresh=narrow, grow=mu.Fresh())
    >>> _ = mu.upscale(narrow, wide, plan, grow=mu.Fresh(outgoing=0.0))
    >>> x = torch.randn(5, 3)
    >>> torch.allclose(narrow(x), wide(x), atol=1e-6)
    True
    """

    outgoing: float = 1.0
    lossless: bool = False
    needs_multiples = False

    def __post_init__(self) -> None:
        if isinstance(self.outgoing, bool) or not isinstance(self.outgoing, int | float) or not 0 <= self.outgoing <= 1:
            raise MupscaleError(f"outgoing= is a number between 0 and 1, not {self.outgoing!r}")
        if not isinstance(self.lossless, bool):
            raise MupscaleError(f"lossless= is True or False, not {self.lossless!r}")

    def check(self, plan: Plan) -> None:
        """Refuse a plan that does not know the initialisation, or a growth that cannot be lossless."""
        for name, entry in plan.parameters.items():
            if _grows(entry):
                means_of(plan, name)
        if self.lossless:
            _refuse_growing_heads(plan)

    def parameter(self, out: Tensor, narrow: Tensor, part: Part) -> None:
        """Fresh values, and the old weight in its places."""
        entry, plan = part.entry, part.plan
        index = index_of_old(entry.narrow, entry.axes)
        keep = self._keep(part)
        old = narrow if keep == 1 else narrow * keep + float(entry.offset) * (keep - 1)
        if not _grows(entry):
            out.copy_(old)
            return
        assert plan.fresh is not None  # `check` has seen to it
        _draw(out, part, plan.fresh[part.name], means_of(plan, part.name))
        _keep_zero_rows(out, narrow, entry)
        keeps = keeps_outgoing(entry, plan) if self.lossless else False
        amplitude = self.outgoing if not self.lossless else float(keeps)
        if amplitude != 1:
            _scale_outgoing(out, entry, amplitude)
        out[index] = old.to(out)
        if self.lossless and is_zero(part.name, entry, plan):
            _fill_new_outputs(out, entry, mean=False)
        elif self.lossless and is_written_by_mean(part.name, entry, plan):
            _fill_new_outputs(out, entry, mean=True)

    def state(self, out: Tensor, narrow: Tensor, part: StatePart) -> None:
        """What a fresh optimizer has, and the old state in its places."""
        keep = self._keep(part)
        kept = part.entry if part.is_rate else Entry(part.entry.narrow, part.entry.narrow, fold=keep)
        out.fill_(part.initial)
        out[index_of_old(part.narrow, part.axes)] = narrow.to(out) * part.factor(kept)

    def _keep(self, part: Part) -> float:
        """What the old weight is multiplied by."""
        return float(part.entry.keep) * (gain_factor(part.name, part.plan) if self.lossless else 1.0)


def _grows(entry: Entry) -> bool:
    return any(axis.times != 1 for axis in entry.axes.values())


def _draw(out: Tensor, part: Part, std: float, means: tuple[float, ...]) -> None:
    """Fill `out` with fresh values, which depend on the seed, the name and the wide shape alone."""
    if std == 0:
        out.zero_()
    else:
        stream = f"fresh {part.name} {part.entry.narrow} {part.entry.wide}"
        rows = max(1, _AT_A_TIME // max(1, math.prod(out.shape[1:])))
        drawn = torch.float64 if out.dtype == torch.float64 else torch.float32
        start = 0
        for chunk in out.split(rows) if out.dim() else ():
            flat = torch.empty(chunk.numel(), dtype=drawn)
            draw_normal(flat, start, out.numel(), part.seed, stream)
            chunk.copy_(flat.mul_(std).reshape(chunk.shape))
            start += chunk.numel()
    if any(means):
        parts = out.chunk(len(means)) if len(means) > 1 else (out,)
        for piece, mean in zip(parts, means, strict=True):
            piece.add_(mean)


def _keep_zero_rows(out: Tensor, narrow: Tensor, entry: Entry) -> None:
    """A row of an embedding that is zero throughout stands for padding, and stays zero."""
    rows = [d for d in range(narrow.dim()) if d not in entry.axes]
    if entry.in_ or len(rows) != 1 or narrow.dim() != 2:
        return
    (row,) = rows
    zero = (narrow == 0).all(dim=1 - row)
    if bool(zero.any()) and not bool(zero.all()):
        out.index_fill_(row, zero.nonzero().flatten().to(out.device), 0.0)


def _scale_outgoing(out: Tensor, entry: Entry, amplitude: float) -> None:
    """Multiply what leads from new inputs to old outputs."""
    new = torch.zeros((1,) * out.dim(), dtype=torch.bool)
    for d in entry.in_:
        new = new | _along(is_new(entry.axes[d], entry.narrow[d]), d, out.dim())
    for d in entry.out:
        new = new & ~_along(is_new(entry.axes[d], entry.narrow[d]), d, out.dim())
    if bool(new.any()):
        out.mul_(torch.where(new, amplitude, 1.0).to(out))


def _fill_new_outputs(out: Tensor, entry: Entry, *, mean: bool) -> None:
    """Give new outputs the mean of the old ones, or zero."""
    (dim,) = entry.out
    new = is_new(entry.axes[dim], entry.narrow[dim]).to(out.device)
    kept = out.index_select(dim, (~new).nonzero().flatten())
    value = kept.double().mean(dim, keepdim=True).to(out) if mean else torch.zeros_like(kept.narrow(dim, 0, 1))
    indices = new.nonzero().flatten()
    shape = list(out.shape)
    shape[dim] = len(indices)
    out.index_copy_(dim, indices, value.expand(shape))


def _along(units: Tensor, dim: int, ndim: int) -> Tensor:
    return units.reshape([-1 if d == dim else 1 for d in range(ndim)])


def _refuse_growing_heads(plan: Plan) -> None:
    for name, entry in plan.parameters.items():
        if entry.keep != 1 and entry.out_is_width and entry.in_is_width:
            raise MupscaleError(
                f"'{name}': head_dim grows, which cannot be lossless, since the queries and keys of new units would "
                f"both have to start at zero and could not leave it; grow the number of heads, or leave out lossless="
            )
