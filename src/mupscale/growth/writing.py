"""From the smaller model's tensors to the larger one's: weights, buffers and noise, straight into their places.

Everything is checked before anything is written. What is half-written when something fails is void, and says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from mupscale.core import Plan, check_dtype, copy_into, gather_whole, index_of_old, is_sharded, local_part, naming
from mupscale.growth.copies import Copies, GaussianNoise, Noise, SignalNoise, add_noise, check_noise
from mupscale.growth.draws import standard_normal
from mupscale.growth.fresh import Fresh, no_pattern
from mupscale.growth.operators import Operator, Part, check_operator
from mupscale.planning import in_float64, run_on_batch, take_modes
from mupscale.system import MupscaleError, checks_arguments

SAME = 1e-9
_OURS = (Copies, Fresh)  # what these write has been checked before

Tensors = nn.Module | Mapping[str, Tensor]
"""The smaller model: a module or a state dict."""


@checks_arguments
@torch.no_grad()
def widen(narrow: Tensors, wide: nn.Module, plan: Plan) -> nn.Module:
    """Write the narrow model (a module or a state dict), copied, into the wide one in place, and return it.

    Step 1 of Meta-algorithm 'Upscaling procedure'. A wide model on the meta device is given memory first, on the narrow
    one's device.

    >>> import mupscale as mu
    >>> from mupscale.models import MLP
    >>> narrow, wide = MLP(3, 8, 2).double(), MLP(3, 32, 2).double()
    >>> x = torch.randn(5, 3, dtype=torch.float64)
    >>> torch.allclose(narrow(x), mu.widen(narrow, wide, mu.plan(narrow, wide))(x))
    True
    """
    check_operator(Copies(), plan)
    return write_grown(prepare_growth(narrow, wide, plan), wide, plan, Copies())


@checks_arguments
@torch.no_grad()
def perturb(wide: nn.Module, plan: Plan, noise: Noise, seed: int = 0) -> GaussianNoise:
    """Add noise to the wide model in place; returns the constants per parameter that it amounted to.

    Each parameter has streams of its own, drawn on the CPU from the seed and its name: the same for every device,
    number of processes and order. Zero noise changes no bit.

    >>> import mupscale as mu
    >>> narrow, wide = nn.Linear(8, 8), nn.Linear(16, 16)
    >>> plan = mu.plan(narrow, wide, fresh=lambda: nn.Linear(8, 8))
    >>> before = mu.widen(narrow, wide, plan).weight.clone()
    >>> mu.perturb(wide, plan, 0.5, seed=1)
    GaussianNoise(std={'weight': 0.5, 'bias': 0.5}, unit='init')
    >>> torch.equal(wide.weight, before)
    False
    """
    noise, parameters = check_noise(noise, plan), plan.check(wide)
    with whole_or_void(wide):
        levels = {name: add_noise(p, name, plan, noise, seed) for name, p in parameters.items()}
    if isinstance(noise, SignalNoise):
        assert noise.effective is not None
        return noise.effective
    return GaussianNoise({name: level for name, level in levels.items() if level is not None}, noise.unit)


@torch.no_grad()
def prepare_growth(narrow: Tensors, wide: nn.Module, plan: Plan) -> dict[str, Tensor]:
    """The narrow model's tensors by the names of what is made of them, when all is checked."""
    sources = _sources(narrow, wide, plan)
    for name, target in plan.check(wide).items():
        for tensor in (sources[name], target):
            check_dtype(name, tensor)
    grown = [n for n, e in plan.buffers.items() if e.axes and n in sources and sources[n].is_floating_point()]
    refuse_nonfinite({plan.sources[name].name: sources[name] for name in (*plan.parameters, *grown)})
    statistics = _check_values_are_known(wide, sources, plan)
    if any(p.is_meta for p in wide.parameters()):
        materialize(wide, next(iter(sources.values())).device if sources else torch.device("cpu"))
        for module in statistics:
            module.reset_running_stats()
    return sources


def _sources(narrow: Tensors, wide: nn.Module, plan: Plan) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    if isinstance(narrow, nn.Module):
        plan.check(narrow, "narrow")
        tensors = {**naming.buffers(narrow), **naming.parameters(narrow)}
    else:
        for name, stored in naming.without_ddp(narrow, plan.old_names).items():
            if name in plan.old_names:
                tensors[plan.old_names[name]] = narrow[stored]
            elif isinstance(narrow[stored], Tensor):
                raise MupscaleError(f"the state dict has '{name}', which the plan's narrow model does not have")
        saved = {naming.canonical(name) for name in naming.unwrap(wide).state_dict()}
        for name in (*(name for name in plan.buffers if name in saved), *plan.parameters):
            source, what = tensors.get(plan.sources[name].name), "the buffer " if name in plan.buffers else ""
            if source is None:
                raise MupscaleError(
                    f"the state dict lacks {what}'{name}': it does not belong to the plan's narrow model"
                )
            if not what and tuple(source.shape) != plan[name].narrow:
                raise MupscaleError(
                    f"'{name}' has shape {tuple(source.shape)} in the state dict and {plan[name].narrow} in the plan"
                )
    made = {name: source.name for name, source in plan.sources.items() if source.name in tensors}
    return tensors | {name: tensors[source] for name, source in made.items()}


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


def _check_values_are_known(wide: nn.Module, sources: Mapping[str, Tensor], plan: Plan) -> list[_NormBase]:
    """An error where a wide model without memory holds what neither a plan nor the narrow model has values for.

    Returns norms with statistics of new units, which are to be given their initial values when they have memory.
    """
    modules, buffers = naming.modules(wide), naming.buffers(wide)
    without = {n for n, tensor in {**naming.parameters(wide), **buffers}.items() if tensor.is_meta}
    if new := [name for name, source in plan.sources.items() if name in without and not source.is_taken]:
        raise MupscaleError(
            f"'{new[0]}' of the deep model is on the meta device, but new blocks keep the values that the model is "
            "built with. Build it on a real device"
        )
    if plan.mup and (patterned := [name for name in plan.patterned if name in without]):
        raise no_pattern(patterned[0])
    if unsaved := [name for name in buffers if name in without and name not in sources]:
        raise MupscaleError(
            f"the wide model has no memory, and the buffer '{unsaved[0]}' is not in the state dict (persistent=False), "
            "so its values are unknown. Pass the narrow model itself, or build the wide one on a real device"
        )
    if plain := naming.plain_tensors_without_memory(wide):
        raise MupscaleError(
            f"the wide model has no memory, and '{plain[0]}' is a plain tensor, neither a parameter nor a buffer, so "
            "its values are unknown. Make it a buffer, or build the wide model on a real device"
        )
    growing = [n for n, e in plan.buffers.items() if plan.mup and n in without and e.narrow != e.wide]
    owners = {name: modules[name.rpartition(".")[0]] for name in growing}
    if odd := [name for name, owner in owners.items() if not isinstance(owner, _NormBase)]:
        raise MupscaleError(
            f"the buffer '{odd[0]}' grows, but a wide model without memory does not show its values for new units. "
            "Build the wide model on a real device"
        )
    return [owner for owner in owners.values() if isinstance(owner, _NormBase)]


def materialize(model: nn.Module, device: torch.device) -> None:
    """Memory for parameters and buffers on the meta device; tied ones stay tied (to_empty would untie them)."""
    replacements: dict[int, Any] = {}
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is None or not tensor.is_meta:
                    continue
                if id(tensor) not in replacements:
                    empty = torch.empty_like(tensor, device=device)
                    is_parameter = isinstance(tensor, nn.Parameter)
                    replacements[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
                    vars(replacements[id(tensor)]).update(vars(tensor))  # what the mup package keeps there
                held[name] = replacements[id(tensor)]


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
        error.add_note(
            "The larger model was being written: it is unusable now, and its numbers are NaN. Build it again"
        )
        raise


@torch.no_grad()
def write_grown(
    sources: Mapping[str, Tensor], wide: nn.Module, plan: Plan, operator: Operator, seed: int = 0
) -> nn.Module:
    """Have the operator write the narrow tensors that `prepare_growth` gave into the wide model, and return it.

    What an operator of the user's own writes is looked at first: where it is not whole, the model stays as it was. A
    model that was being written when something failed is void: its numbers are NaN, and the error says so.
    """
    targets, staged = {**naming.buffers(wide), **naming.parameters(wide)}, dict[str, Tensor]()
    drawn = {name: chosen for name in plan.parameters if (chosen := drawn_entries(name, plan)) is not None}
    kept = {name: targets[name].detach()[chosen] for name, chosen in drawn.items()}
    with whole_or_void(wide) if type(operator) in _OURS else nullcontext():
        for name in (*plan.parameters, *plan.buffers):
            if name in targets and name in sources and plan.sources[name].is_taken:
                out = _grown(sources[name], targets[name], Part(name, plan, seed), operator)
                if out is not None:
                    staged[name] = out
    with whole_or_void(wide):
        for name, tensor in staged.items():
            copy_into(targets[name], tensor)
        for name, values in kept.items():
            targets[name].detach()[drawn[name]] = values
        for name, source in plan.sources.items():
            if source.kind == "silent":
                targets[name].fill_(source.value)
            if isinstance(sources.get(name), nn.Parameter):
                targets[name].requires_grad_(sources[name].requires_grad)  # what is frozen stays so
    return wide


def _grown(source: Tensor, target: Tensor, part: Part, operator: Operator) -> Tensor | None:
    """What an operator of the user's own writes for one tensor; ours write it into the target, where that can be."""
    method = operator.parameter if part.name in part.plan.parameters else operator.buffer
    source = gather_whole(source.detach()).expand(part.entry.narrow)  # of stacked copies, a view of the one
    ours = type(operator) in _OURS
    if ours and not is_sharded(target) and source.device == target.device:
        method(target.detach(), source, part)
        return None
    if part.name in part.plan.buffers or part.name in part.plan.patterned:  # which have values
        out = gather_whole(target.detach()).to(source.device, copy=True)
    else:
        out = unwritten(part.entry.wide, target.dtype, source.device, operator)
    method(out, source, part)
    if ours:
        copy_into(target, out)
        return None
    check_written(part.name, out, operator)
    return out


def drawn_entries(name: str, plan: Plan) -> Tensor | None:
    """Of a parameter that is a copy in part, which entries are drawn afresh; None of any other. It goes by its name."""
    source, shape = plan.sources[name], plan[name].wide
    if source.kind != "expert" or not source.value:
        return None
    return standard_normal(shape, torch.float32, 0, f"drawn {name}") < NormalDist().inv_cdf(source.value)


def unwritten(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, operator: Operator) -> Tensor:
    """Memory for an operator to fill; NaN all over, where it is not one of ours."""
    if type(operator) in _OURS or not dtype.is_floating_point:
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.full(shape, float("nan"), dtype=dtype, device=device)


def check_written(name: str, out: Tensor, operator: Operator) -> None:
    """An error where an operator has left entries unwritten, or has written NaN."""
    if type(operator) not in _OURS and bool(out.isnan().any()):
        raise MupscaleError(
            f"{type(operator).__name__} left entries of '{name}' unwritten (or wrote NaN). An operator must fill the "
            "whole tensor. Nothing has been changed"
        )


def grown_in_float64(
    narrow: nn.Module, wide: nn.Module, plan: Plan, inputs: Any, operator: Operator
) -> tuple[nn.Module, nn.Module, Any]:
    """Copies of both models in float64, the wide one grown from the narrow one, and the batch for them."""
    small, batch = in_float64(narrow, inputs)
    large, _ = in_float64(wide, inputs)
    take_modes(large, narrow, plan)
    return small, write_grown(prepare_growth(small, large, plan), large, plan, operator), batch


def distance(before: Tensor, after: Tensor) -> float:
    """How far two tensors lie apart, by the size of the first; `SAME` is what rounding leaves in float64."""
    if before.shape != after.shape:
        return math.inf
    before, after = before.detach(), after.detach()
    return float((after - before).abs().max()) / (1 + float(before.abs().max())) if before.numel() else 0.0


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
        if isinstance(module, _NormBase) and module.track_running_stats
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
