"""A wide model that is built for a narrow one: what it takes from it besides weights; statistics of new channels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mupscale.core import Plan, index_of_old, naming
from mupscale.planning import run_on_batch, take_modes
from mupscale.system import checks_arguments


def dress_like(wide: nn.Module, narrow: nn.Module, plan: Plan | None = None) -> None:
    """Give the wide model the narrow one's device, dtypes, frozen parameters and train or eval mode, part by part.

    plan: from one to the other, where new parts are as those that they come from.
    """
    for named in (naming.parameters, naming.buffers):
        ours: Mapping[str, Tensor] = named(narrow)
        for name, tensor in named(wide).items():
            origin = name if plan is None or name not in plan.sources else plan.sources[name].name
            if (source := ours.get(origin)) is not None:
                device = tensor.device if tensor.is_meta else source.device
                tensor.data = tensor.data.to(device, source.dtype)
                tensor.requires_grad_(source.requires_grad)
    take_modes(wide, narrow, plan)


def has_unsaved_widths(wide: nn.Module, narrow: nn.Module) -> bool:
    """Whether buffers without memory that no state dict holds may depend on the width."""
    ours, modules = naming.buffers(narrow), naming.modules(wide)
    for name, buffer in naming.buffers(wide).items():
        path, _, local = name.rpartition(".")
        unsaved = buffer.is_meta and local in modules[path]._non_persistent_buffers_set
        if unsaved and name in ours and (buffer.numel() == 1 or buffer.shape != ours[name].shape):
            return True
    return False


@checks_arguments
@torch.no_grad()
def measure_statistics(model: nn.Module, batches: Iterable[Any], plan: Plan | None = None) -> nn.Module:
    """Measure the running statistics of BatchNorms on a few batches, as the model is called with them, in place.

    plan: where given, old channels keep the statistics that they have, and only new ones are measured: right where the
    function is kept. Noise and new units move what old channels read, so leave the plan out there. A model without
    running statistics is left alone. Train or eval mode is afterwards what it was.

    >>> model = nn.Sequential(nn.BatchNorm1d(1))
    >>> measure_statistics(model, [torch.full((4, 1), 3.0)])[0].running_mean
    tensor([3.])
    """
    norms: dict[str, Any] = {path: m for path, m in naming.modules(model).items() if _has_statistics(m)}
    if not norms:
        return model
    modes = {module: module.training for module in model.modules()}
    momenta = {path: norm.momentum for path, norm in norms.items()}
    before = {name: buffer.clone() for name, buffer in naming.buffers(model).items()}
    model.eval()
    for norm in norms.values():
        norm.train()
        norm.reset_running_stats()
        norm.momentum = None  # the plain average over all batches
    try:
        for batch in batches:
            run_on_batch(model, batch)
    finally:
        for module, training in modes.items():
            module.training = training
        for path, norm in norms.items():
            norm.momentum = momenta[path]
            _put_back(norm, path, before, plan)
    return model


def _has_statistics(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats


def _put_back(norm: Any, path: str, before: dict[str, Tensor], plan: Plan | None) -> None:
    """Give old channels, their copies, and the count of batches, what they had."""
    for local, buffer in norm.named_buffers(recurse=False):
        name = f"{path}.{local}".strip(".")
        if buffer.dim() == 0:
            buffer.copy_(before[name])
        elif plan is not None and name in plan.buffers and plan.sources[name].is_taken:
            entry = plan.buffers[name]
            index = index_of_old(entry.narrow, entry.axes) if plan.mup else ...
            buffer[index] = before[name][index]
