"""The smaller model's tensors, and memory for the larger one's. Everything is checked before anything is written.

What is half-written when something fails is void, and says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mupscale.core import Plan, check_dtype, gather_whole, local_part, naming
from mupscale.planning import no_pattern
from mupscale.system import MupscaleError

Tensors = nn.Module | Mapping[str, Tensor]
"""The smaller model: a module or a state dict."""


@torch.no_grad()
def prepare_growth(narrow: Tensors, wide: nn.Module, plan: Plan) -> dict[str, Tensor]:
    """The narrow model's tensors by the names of what is made of them, when all is checked.

    A wide model on the meta device then gets memory.
    """
    sources = _sources(narrow, wide, plan)
    for name, target in plan.check(wide).items():
        for tensor in (sources[name], target):
            check_dtype(name, tensor)
    grown = [n for n, e in plan.buffers.items() if e.axes and n in sources and sources[n].is_floating_point()]
    refuse_nonfinite({plan.sources[name].name: sources[name] for name in (*plan.parameters, *grown)})
    _refuse_values_that_cannot_be_told(wide, sources, plan)
    if any(p.is_meta for p in wide.parameters()):
        statistics = _empty_statistics(wide, plan)
        materialize(wide, next(iter(sources.values())).device if sources else torch.device("cpu"))
        for module in statistics:
            module.reset_running_stats()
    return sources


def _refuse_values_that_cannot_be_told(wide: nn.Module, sources: Mapping[str, Tensor], plan: Plan) -> None:
    """A wide model without memory may hold what neither a plan nor the narrow model has values for."""
    targets = {**naming.parameters(wide), **naming.buffers(wide)}
    if new := [n for n, source in plan.sources.items() if n in targets and targets[n].is_meta and not source.is_taken]:
        raise MupscaleError(
            f"'{new[0]}' of the deep model is on the meta device, but new blocks keep the values that the model is "
            "built with. Build it on a real device"
        )
    if plan.mup and (patterned := [name for name in plan.patterned if targets[name].is_meta]):
        raise no_pattern(patterned[0])
    unsaved = [name for name, buffer in naming.buffers(wide).items() if buffer.is_meta and name not in sources]
    if unsaved:
        raise MupscaleError(
            f"the wide model has no memory, and the buffer '{unsaved[0]}' is not in the state dict (persistent=False), "
            "so its values are unknown. Pass the narrow model itself, or build the wide one on a real device"
        )
    if plain := naming.plain_tensors_without_memory(wide):
        raise MupscaleError(
            f"the wide model has no memory, and '{plain[0]}' is a plain tensor, neither a parameter nor a buffer, so "
            "its values are unknown. Make it a buffer, or build the wide model on a real device"
        )


def _empty_statistics(wide: nn.Module, plan: Plan) -> list[nn.modules.batchnorm._NormBase]:
    """Norms on the meta device with statistics of new units, which have to be given their initial values.

    Copies have none: all they need comes from the narrow model.
    """
    if not plan.mup:
        return []
    modules, norms = naming.modules(wide), []
    for name, buffer in naming.buffers(wide).items():
        owner = modules[name.rpartition(".")[0]]
        if not buffer.is_meta or name not in plan.buffers or plan.buffers[name].narrow == plan.buffers[name].wide:
            continue
        if not isinstance(owner, nn.modules.batchnorm._NormBase):
            raise MupscaleError(
                f"the buffer '{name}' grows, but a wide model without memory does not show its values for new units. "
                "Build the wide model on a real device"
            )
        norms.append(owner)
    return norms


def _sources(narrow: Tensors, wide: nn.Module, plan: Plan) -> dict[str, Tensor]:
    if isinstance(narrow, nn.Module):
        old = naming.buffers(narrow)
        buffers = {name: old[plan.sources[name].name] for name in plan.buffers if plan.sources[name].name in old}
        return {**plan.check(narrow, "narrow"), **old, **buffers}
    tensors = {canonical: narrow[name] for canonical, name in naming.without_ddp(narrow, plan.old_names).items()}
    strangers = [name for name in tensors if name not in plan.old_names and isinstance(tensors[name], Tensor)]
    if strangers:
        raise MupscaleError(f"the state dict has '{strangers[0]}', which the plan's narrow model does not have")
    tensors = {plan.old_names[name]: tensor for name, tensor in tensors.items() if name in plan.old_names}
    saved = {naming.canonical(name) for name in naming.unwrap(wide).state_dict()}
    for name in plan.buffers:
        if name in saved and plan.sources[name].name not in tensors:
            raise MupscaleError(
                f"the state dict lacks the buffer '{name}': it does not belong to the plan's narrow model"
            )
    sources = {}
    for name, entry in plan.parameters.items():
        if (tensor := tensors.get(plan.sources[name].name)) is None:
            raise MupscaleError(f"the state dict lacks '{name}': it does not belong to the plan's narrow model")
        sources[name] = tensor
        if tuple(tensor.shape) != entry.narrow:
            raise MupscaleError(
                f"'{name}' has shape {tuple(tensor.shape)} in the state dict and {entry.narrow} in the plan"
            )
    held = {name: plan.sources[name].name for name in plan.buffers}
    return {**sources, **{name: tensors[source] for name, source in held.items() if source in tensors}}


def refuse_nonfinite(tensors: Mapping[str, Tensor]) -> None:
    """An error that names the first tensor with NaN or infinite values.

    One sum per tensor and one look at all of them; entries are examined only where a sum is not finite.
    """
    dtypes = {n: torch.float64 if tensor.dtype == torch.float64 else torch.float32 for n, tensor in tensors.items()}
    sums = {name: gather_whole(tensor.detach().sum(dtype=dtypes[name])) for name, tensor in tensors.items()}
    if not sums or torch.stack([total.double() for total in sums.values()]).isfinite().all():
        return
    for name, total in sums.items():
        if not torch.isfinite(total) and not torch.isfinite(gather_whole(tensors[name])).all():
            raise MupscaleError(f"'{name}' holds NaN or infinite values. Load a checkpoint from before it diverged")


def materialize(model: nn.Module, device: torch.device) -> None:
    """Memory for parameters and buffers on the meta device; tied ones stay tied (to_empty would untie them)."""
    replacements: dict[int, Any] = {}
    for module in model.modules():
        for name, p in list(module._parameters.items()):
            if p is not None and p.is_meta:
                empty = replacements.get(id(p))
                if empty is None:
                    empty = replacements[id(p)] = nn.Parameter(torch.empty_like(p, device=device), p.requires_grad)
                    vars(empty).update(vars(p))  # what the mup package keeps there, for its readouts and optimizers
                module._parameters[name] = empty
        for name, b in list(module._buffers.items()):
            if b is not None and b.is_meta:
                if id(b) not in replacements:
                    replacements[id(b)] = torch.empty_like(b, device=device)
                module._buffers[name] = replacements[id(b)]


@contextmanager
def whole_or_void(model: nn.Module) -> Iterator[None]:
    """While a model is written: if that fails, its numbers become NaN and the error says that the model is void."""
    try:
        yield
    except BaseException as error:
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                if tensor.is_floating_point() and not tensor.is_meta:
                    local_part(tensor).fill_(math.nan)
        error.add_note("The larger model was being written: it is void now, and its numbers are NaN. Build it again")
        raise
