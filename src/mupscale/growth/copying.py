"""Widening: weights and buffers copied and rescaled as a plan says.

Step 1 of Meta-algorithm 'Upscaling procedure'. Everything is checked before anything is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mupscale.core import Entry, Plan, check_dtype, copy_into, gather_whole, is_sharded, naming
from mupscale.system import MupscaleError

Source = nn.Module | Mapping[str, Tensor]


@torch.no_grad()
def widen(narrow: Source, wide: nn.Module, plan: Plan) -> nn.Module:
    """Write the narrow model (a module or a state dict), widened, into the wide one in place, and return it.

    A wide model on the meta device is given memory first, on the narrow one's device.

    >>> import mupscale as mu
    >>> from mupscale.models import MLP
    >>> narrow, wide = MLP(3, 8, 2).double(), MLP(3, 32, 2).double()
    >>> x = torch.randn(5, 3, dtype=torch.float64)
    >>> torch.allclose(narrow(x), mu.widen(narrow, wide, mu.plan(narrow, wide))(x))
    True
    """
    return write_widened(prepare_widening(narrow, wide, plan), wide, plan)


@torch.no_grad()
def prepare_widening(narrow: Source, wide: nn.Module, plan: Plan) -> dict[str, Tensor]:
    """The narrow model's tensors by name, when all is checked; a wide model on the meta device then gets memory."""
    sources = _sources(narrow, wide, plan)
    for name, target in plan.check(wide).items():
        for tensor in (sources[name], target):
            check_dtype(name, tensor)
    grown = [n for n, e in plan.buffers.items() if e.axes and n in sources and sources[n].is_floating_point()]
    refuse_nonfinite({name: sources[name] for name in (*plan.parameters, *grown)})
    if any(p.is_meta for p in wide.parameters()):
        materialize(wide, next(iter(sources.values())).device if sources else torch.device("cpu"))
    return sources


@torch.no_grad()
def write_widened(sources: Mapping[str, Tensor], wide: nn.Module, plan: Plan) -> nn.Module:
    """Write the narrow tensors that `prepare_widening` gave, widened, into the wide model, and return it."""
    targets = naming.parameters(wide)
    for name, entry in plan.parameters.items():
        _write(sources[name], entry, targets[name])
    for name, buffer in naming.buffers(wide).items():
        if name in plan.buffers and name in sources:
            _write(sources[name], plan.buffers[name], buffer, factor=1.0)
    return wide


def _sources(narrow: Source, wide: nn.Module, plan: Plan) -> dict[str, Tensor]:
    if isinstance(narrow, nn.Module):
        return {**plan.check(narrow, "narrow"), **naming.buffers(narrow)}
    tensors = {canonical: narrow[name] for canonical, name in naming.without_ddp(narrow, plan.names).items()}
    strangers = [name for name in tensors if name not in plan.names and isinstance(tensors[name], Tensor)]
    if strangers:
        raise MupscaleError(f"the state dict has '{strangers[0]}', which the plan's narrow model lacks")
    saved = {naming.canonical(name) for name in naming.unwrap(wide).state_dict()}
    for name in plan.buffers:
        if name in saved and name not in tensors:
            raise MupscaleError(f"the state dict lacks the buffer '{name}': it is not of the plan's narrow model")
    sources = {}
    for name, entry in plan.parameters.items():
        alias = next((n for n in entry.names if n in tensors), None)
        if alias is None:
            raise MupscaleError(f"the state dict lacks '{name}': it is not of the plan's narrow model")
        sources[name] = tensors[alias]
        if tuple(tensors[alias].shape) != entry.narrow:
            raise MupscaleError(
                f"'{name}' has shape {tuple(tensors[alias].shape)} in the state dict and {entry.narrow} in the plan"
            )
    return {**sources, **{name: tensors[name] for name in plan.buffers if name in tensors}}


def refuse_nonfinite(tensors: Mapping[str, Tensor]) -> None:
    """An error that names the first tensor with NaN or infinite values.

    One sum per tensor and one look at all of them; entries are examined only where a sum is not finite.

    >>> refuse_nonfinite({"weight": torch.tensor([1.0, float("nan")])})
    Traceback (most recent call last):
    mupscale.system.errors.MupscaleError: 'weight' holds NaN or infinite values; load a checkpoint from before it ...
    """
    sums = {name: gather_whole(tensor.detach().sum(dtype=_sum_dtype(tensor))) for name, tensor in tensors.items()}
    if not sums or torch.stack([total.double() for total in sums.values()]).isfinite().all():
        return
    for name, total in sums.items():
        if not torch.isfinite(total) and not torch.isfinite(gather_whole(tensors[name])).all():
            raise MupscaleError(f"'{name}' holds NaN or infinite values; load a checkpoint from before it diverged")


def _sum_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _write(source: Tensor, entry: Entry, target: Tensor, factor: float | None = None) -> None:
    source = gather_whole(source.detach())
    if is_sharded(target) or source.device != target.device:
        out = torch.empty(entry.wide, dtype=target.dtype, device=source.device)
        copy_into(target, entry.widened(source, out, factor=factor))
    else:
        entry.widened(source, target.detach(), factor=factor)


def materialize(model: nn.Module, device: torch.device) -> None:
    """Memory for parameters and buffers on the meta device; tied ones stay tied (to_empty would untie them)."""
    replacements: dict[int, Any] = {}
    for module in model.modules():
        for name, p in list(module._parameters.items()):
            if p is not None and p.is_meta:
                empty = replacements.get(id(p))
                if empty is None:
                    empty = replacements[id(p)] = nn.Parameter(torch.empty_like(p, device=device), p.requires_grad)
                    keep_base_shape(p, empty)
                module._parameters[name] = empty
        for name, b in list(module._buffers.items()):
            if b is not None and b.is_meta:
                if id(b) not in replacements:
                    replacements[id(b)] = torch.empty_like(b, device=device)
                module._buffers[name] = replacements[id(b)]


def keep_base_shape(old: Tensor, new: Tensor) -> None:
    """Give the new parameter what the `mup` package keeps on the old one, for its readouts and optimizers.

    >>> old, new = torch.zeros(2), torch.zeros(2)
    >>> old.infshape = "base shape"
    >>> keep_base_shape(old, new)
    >>> new.infshape
    'base shape'
    """
    if hasattr(old, "infshape"):
        new.infshape = old.infshape  # type: ignore[attr-defined]
