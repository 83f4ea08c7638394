"""A wide model that is built for a narrow one: what it takes from it besides weights, and what it needs memory for."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from mupscale.core import Plan, naming
from mupscale.planning import take_modes


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
