"""Which parameters write units that no norm reads, and which read units past the norms, as a run of both models shows.

A growth that keeps the function starts new units that a norm reads at zero or at the mean of the old ones. Whoever
reads them behind the norm sees zeros; whoever reads them past it, as a head that reads the residual stream itself,
sees that mean. And units that no norm reads may be drawn, however wide they are. Shapes tell none of this.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from mupscale.core import Entry, Plan, copy_model, index_of_old, is_new, naming, places
from mupscale.planning.output_gradients import differentiated
from mupscale.planning.silent_units import look_at_old_units_alone
from mupscale.planning.tracing import in_float64, run_in_float64, saved_tensors, tensors_in
from mupscale.system import MupscaleError

_ROUNDING = 1e-12


def find_past_norms(narrow: nn.Module, wide: nn.Module, plan: Plan, inputs: Any) -> dict[str, tuple[int, ...]] | None:
    """By parameter, the growing dimensions whose units no norm reads (outputs) or made (inputs); None if it is unclear.

    plan: for fresh units. Units that are zero where they are read count as made by a norm.

    >>> import mupscale as mu
    >>> class Net(nn.Module):
    ...     def __init__(self, width):
    ...         super().__init__()
    ...         self.embed, self.norm = nn.Linear(3, width), nn.LayerNorm(width)
    ...         self.block, self.head = nn.Linear(width, width), nn.Linear(width, 2)
    ...     def forward(self, x):
    ...         x = self.embed(x)
    ...         return self.head(x + self.block(self.norm(x)))
    >>> narrow, wide = Net(8), Net(12)
    >>> find_past_norms(narrow, wide, mu.plan(narrow, wide, grow=mu.Fresh()), torch.ones(4, 3))
    {'block.weight': (0,), 'block.bias': (0,), 'head.weight': (1,)}
    """
    with suppress(MupscaleError):  # the models do not run in float64, which does not keep them from growing
        trial = _Trial(narrow, wide, plan, inputs)
        writers = trial.find_writers()
        if writers is None:
            return None
        return trial.past_norms(writers, trial.find_direct_readers(writers))
    return None


class _Trial:
    """Both models in float64 with generic weights; norms look at the old units alone, and new inputs weigh nothing."""

    def __init__(self, narrow: nn.Module, wide: nn.Module, plan: Plan, inputs: Any) -> None:
        self.plan = plan
        small, self.batch = in_float64(narrow, inputs, generic=1)
        self.large, _ = in_float64(wide, inputs, like=narrow)
        self.kept = copy_model(small)
        for name, weight in saved_tensors(self.kept).items():
            entry = plan[name]
            if name in plan.parameters and entry.keep != 1:
                weight.mul_(float(entry.keep)).add_(float(entry.offset) * (float(entry.keep) - 1))
        self.norms = [name for name, kind in plan.norms.items() if kind in ("layer", "rms")]
        self.new_units: list[Tensor] = []
        look_at_old_units_alone(self.kept, self.large, plan, self.new_units)

    def find_writers(self) -> set[str] | None:
        """Parameters whose new outputs some norm reads; None where a norm was not called as a module."""
        self._fill(writers=())

        def found() -> set[str] | None:
            self._run()
            return None if len(self.new_units) < len(self.norms) else self._with_gradient(self.new_units, "out")

        return differentiated(found, [self.large])

    def find_direct_readers(self, writers: Collection[str]) -> set[str]:
        """Parameters whose new inputs are not zero, where new units start as a lossless growth has them."""
        self._fill(writers)
        return differentiated(lambda: self._with_gradient(self._run(), "in_"), [self.large])

    def past_norms(self, writers: Collection[str], direct: Collection[str]) -> dict[str, tuple[int, ...]]:
        past: dict[str, tuple[int, ...]] = {}
        for name, entry in self.plan.parameters.items():
            if name in self.plan.norms or name not in self.used:
                continue
            unread = _growing(entry, entry.out) if name not in writers else ()
            if dims := (*unread, *(_growing(entry, entry.in_) if name in direct else ())):
                past[name] = dims
        return past

    def _run(self) -> list[Tensor]:
        self.new_units.clear()
        for p in self.large.parameters():
            p.requires_grad_(True)
            p.grad = None
        return [t for t in tensors_in(run_in_float64(self.large, self.batch)) if t.is_floating_point()]

    def _with_gradient(self, results: list[Tensor], side: str) -> set[str]:
        """The parameters whose new units, on this side, change the results."""
        generator = torch.Generator().manual_seed(0)
        loss = torch.zeros((), dtype=torch.float64)
        for result in results:
            if result.requires_grad:
                push = torch.randn(result.shape, generator=generator, dtype=result.dtype)
                loss = loss + (result * push.to(result.device)).sum().cpu()
        if not loss.requires_grad:
            return set()
        loss.backward()
        gradients = {name: p.grad for name, p in naming.parameters(self.large).items() if p.grad is not None}
        largest = max((float(g.abs().max()) for g in gradients.values() if g.numel()), default=0.0)
        self.used = set(gradients)
        return {
            name
            for name, gradient in gradients.items()
            if _largest_at_new_units(gradient, self.plan.parameters[name], side) > _ROUNDING * largest
        }

    @torch.no_grad()
    def _fill(self, writers: Collection[str]) -> None:
        """Old units in their places; new ones drawn, and of the writers zero or the mean of the old ones."""
        theirs, parameters = saved_tensors(self.large), naming.parameters(self.large)
        generator = torch.Generator().manual_seed(2)
        for name, weight in saved_tensors(self.kept).items():
            entry, target, old = (
                self.plan[name],
                theirs[name],
                index_of_old(self.plan[name].narrow, self.plan[name].axes),
            )
            if name in parameters:
                size = float(weight.square().mean().sqrt()) if weight.numel() else 0.0
                target.copy_(torch.randn(target.shape, generator=generator, dtype=torch.float64) * size)
                for d in _growing(entry, entry.in_):
                    target.masked_fill_(_new(entry, d).to(target.device), 0.0)
            target[old] = weight
            if name in writers and len(entry.out) == 1:
                self._start_new_outputs(target, entry)

    def _start_new_outputs(self, target: Tensor, entry: Entry) -> None:
        (dim,) = entry.out
        units = (entry.narrow[dim], entry.wide[dim])
        kinds = {self.plan.norms[n] for n in self.norms if _sizes(self.plan.parameters[n]) == units}
        new = _new(entry, dim).to(target.device)
        if kinds == {"rms"}:
            target.masked_fill_(new, 0.0)
        elif kinds:
            old = places(entry.axes[dim], entry.narrow[dim]).to(target.device)
            target.copy_(torch.where(new, target.index_select(dim, old).mean(dim, keepdim=True), target))


def _sizes(entry: Entry) -> tuple[int, int]:
    return entry.narrow[0], entry.wide[0]


def _growing(entry: Entry, dims: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(d for d in dims if entry.axes[d].times != 1)


def _new(entry: Entry, dim: int) -> Tensor:
    """Which units along a dimension are new, to be broadcast over the others."""
    new = is_new(entry.axes[dim], entry.narrow[dim])
    return new.reshape([-1 if d == dim else 1 for d in range(len(entry.wide))])


def _largest_at_new_units(gradient: Tensor, entry: Entry, side: str) -> float:
    """The largest gradient of new outputs from old inputs (out), or of old outputs from new inputs (in_)."""
    ours, others = (entry.out, entry.in_) if side == "out" else (entry.in_, entry.out)
    where = torch.zeros((1,) * gradient.dim(), dtype=torch.bool)
    for d in _growing(entry, ours):
        where = where | _new(entry, d)
    for d in _growing(entry, others):
        where = where & ~_new(entry, d)
    return float((gradient.abs() * where.to(gradient)).max()) if gradient.numel() else 0.0
