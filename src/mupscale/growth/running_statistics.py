"""Running statistics of BatchNorms, measured again after a growth."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from mupscale.core import Plan, index_of_old, naming
from mupscale.planning import run_on_batch
from mupscale.system import checks_arguments


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
    norms: dict[str, Any] = {
        path: module
        for path, module in naming.modules(model).items()
        if isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats
    }
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
            for local, buffer in norm.named_buffers(recurse=False):
                name = f"{path}.{local}".strip(".")
                if buffer.dim() == 0:  # the count of batches
                    buffer.copy_(before[name])
                elif plan is not None and name in plan.buffers and plan.sources[name].is_taken:
                    entry = plan.buffers[name]
                    index = index_of_old(entry.narrow, entry.axes) if plan.mup else ...
                    buffer[index] = before[name][index]
    return model
