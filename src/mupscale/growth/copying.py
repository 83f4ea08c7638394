"""Widening: weights, buffers and optimizer state copied and rescaled as a plan says.

Step 1 and Step 3 of Meta-algorithm 'Upscaling procedure'. Everything is checked before anything is written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mupscale.core import Axis, Entry, Plan, check_dtype, dtensor, naming, widened_shape
from mupscale.optim import Traits, scale, traits
from mupscale.system import MupscaleError

Source = nn.Module | Mapping[str, Tensor]


@torch.no_grad()
def widen(narrow: Source, wide: nn.Module, plan: Plan) -> nn.Module:
    """Write the narrow model (a module or a state dict), widened, into the wide one in place, and return it.

    A wide model on the meta device is given memory first, on the narrow one's device.
    """
    return write(prepare(narrow, wide, plan), wide, plan)


@torch.no_grad()
def prepare(narrow: Source, wide: nn.Module, plan: Plan) -> dict[str, Tensor]:
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
def write(sources: Mapping[str, Tensor], wide: nn.Module, plan: Plan) -> nn.Module:
    """What `prepare` gave, widened, into the wide model."""
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
    given = {canonical: narrow[name] for canonical, name in naming.without_ddp(narrow, plan.names).items()}
    strangers = [name for name in given if name not in plan.names and isinstance(given[name], Tensor)]
    if strangers:
        raise MupscaleError(f"the state dict has '{strangers[0]}', which the plan's narrow model lacks")
    saved = {naming.canonical(name) for name in naming.unwrap(wide).state_dict()}
    for name in plan.buffers:
        if name in saved and name not in given:
            raise MupscaleError(f"the state dict lacks the buffer '{name}': it is not of the plan's narrow model")
    sources = {}
    for name, entry in plan.parameters.items():
        alias = next((n for n in entry.names if n in given), None)
        if alias is None:
            raise MupscaleError(f"the state dict lacks '{name}': it is not of the plan's narrow model")
        sources[name] = given[alias]
        if tuple(given[alias].shape) != entry.narrow:
            raise MupscaleError(
                f"'{name}' has shape {tuple(given[alias].shape)} in the state dict and {entry.narrow} in the plan"
            )
    return {**sources, **{name: given[name] for name in plan.buffers if name in given}}


def refuse_nonfinite(tensors: Mapping[str, Tensor]) -> None:
    """One sum per tensor and one look at all of them; entries are examined only where a sum is not finite."""
    wide = {torch.float64: torch.float64}
    sums = {n: dtensor.full(t.detach().sum(dtype=wide.get(t.dtype, torch.float32))) for n, t in tensors.items()}
    if not sums or torch.stack([total.double() for total in sums.values()]).isfinite().all():
        return
    for name, total in sums.items():
        if not torch.isfinite(total) and not torch.isfinite(dtensor.full(tensors[name])).all():
            raise MupscaleError(f"'{name}' holds NaN or infinite values; load a checkpoint from before it diverged")


def _write(source: Tensor, entry: Entry, target: Tensor, factor: float | None = None) -> None:
    source = dtensor.full(source.detach())
    if hasattr(target, "full_tensor") or source.device != target.device:
        out = torch.empty(entry.wide, dtype=target.dtype, device=source.device)
        dtensor.write(entry.widened(source, out, factor=factor), target)
    else:
        entry.widened(source, target.detach(), factor=factor)


def materialize(model: nn.Module, device: torch.device) -> None:
    """Memory for parameters and buffers on the meta device; tied ones stay tied (to_empty would untie them)."""
    made: dict[int, Any] = {}
    for module in model.modules():
        for name, p in list(module._parameters.items()):
            if p is not None and p.is_meta:
                empty = made.get(id(p))
                if empty is None:
                    empty = made[id(p)] = nn.Parameter(torch.empty_like(p, device=device), p.requires_grad)
                    keep_base_shape(p, empty)
                module._parameters[name] = empty
        for name, b in list(module._buffers.items()):
            if b is not None and b.is_meta:
                if id(b) not in made:
                    made[id(b)] = torch.empty_like(b, device=device)
                module._buffers[name] = made[id(b)]


def keep_base_shape(old: Tensor, new: Tensor) -> None:
    """What the `mup` package hangs on a parameter, which its readouts and optimizers ask for."""
    if hasattr(old, "infshape"):
        new.infshape = old.infshape  # type: ignore[attr-defined]


def widen_optimizer(
    optimizer: Optimizer | Mapping[str, Any],
    wide_optimizer: Optimizer,
    plan: Plan,
    *,
    narrow: nn.Module | None = None,
    wide: nn.Module | None = None,
) -> Optimizer:
    """Give the wide optimizer the narrow one's state (the optimizer itself or its saved state dict), widened.

    Hyperparameters are not touched: param_groups has scaled them. The models tell which parameter is which where
    neither names in the groups nor the order of the plan do.
    """
    if isinstance(optimizer, Optimizer) and type(optimizer) is not type(wide_optimizer):
        raise MupscaleError(
            f"state of {type(optimizer).__name__} cannot be carried over to {type(wide_optimizer).__name__}; "
            f"use one optimizer for both, or start the wide one without state"
        )
    known = traits(type(wide_optimizer))
    targets = dict(_targets(wide_optimizer, plan, wide))
    made = {}
    for name, state in _states(optimizer, plan, narrow):
        if name not in targets:
            raise MupscaleError(f"the wide optimizer does not hold '{name}', whose state the narrow one has")
        p, group = targets[name]
        if tuple(p.shape) != plan.parameters[name].wide:
            raise MupscaleError(
                f"this plan is for another model: '{name}' has shape {tuple(p.shape)} in the wide optimizer and the "
                f"plan's wide shape is {plan.parameters[name].wide}"
            )
        made[p] = _widen_state(name, state, plan.parameters[name], p, group, known)
    wide_optimizer.state.update(made)
    return wide_optimizer


def _targets(optimizer: Optimizer, plan: Plan, wide: nn.Module | None) -> Iterator[tuple[str, Any]]:
    tensors = [(p, group) for group in optimizer.param_groups for p in group["params"]]
    names = _resolve(optimizer.param_groups, [p for p, _ in tensors], plan, wide, "wide")
    return zip(names, tensors, strict=True)


def _states(
    optimizer: Optimizer | Mapping[str, Any], plan: Plan, narrow: nn.Module | None
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Pairs of name and state, of the parameters that have any."""
    if isinstance(optimizer, Optimizer):
        groups, states = optimizer.param_groups, optimizer.state
    else:
        try:
            groups, states = optimizer["param_groups"], optimizer["state"]
        except (KeyError, TypeError):
            raise MupscaleError("this is no optimizer state dict: it lacks 'param_groups' and 'state'") from None
    keys = [key for group in groups for key in group["params"]]
    shapes_known = isinstance(optimizer, Optimizer)
    for key, name in zip(keys, _resolve(groups, keys if shapes_known else None, plan, narrow, "narrow"), strict=True):
        if states.get(key):
            yield name, states[key]


def _resolve(
    groups: Sequence[Mapping[str, Any]],
    tensors: list[Tensor] | None,
    plan: Plan,
    model: nn.Module | None,
    side: str,
) -> list[str]:
    """Names of an optimizer's parameters: by identity, by the names in its groups, or by the order of the plan."""
    count = sum(len(group["params"]) for group in groups)
    if all("param_names" in group for group in groups):
        given = naming.without_ddp((name for group in groups for name in group["param_names"]), plan.names)
        return [_in_plan(name, plan, side) for name in given]
    if model is not None and tensors is not None:
        owned = {id(p): name for name, p in plan.check(model, side).items()}
        if all(id(t) in owned for t in tensors):
            return [owned[id(t)] for t in tensors]
    ordered = list(plan.parameters)
    in_order = len(groups) == 1 and count == len(ordered)
    if tensors is not None and in_order:
        in_order = all(
            tuple(t.shape) == getattr(plan.parameters[n], side) for t, n in zip(tensors, ordered, strict=True)
        )
    if in_order:
        return ordered
    remedy = f"pass {side}= the model" if tensors is not None else f"load it into the {side} optimizer and pass that"
    raise MupscaleError(
        f"which parameters the {side} optimizer holds in {len(groups)} group{'s' * (len(groups) != 1)} cannot be told: "
        f"{remedy}, or build its groups with mupscale.param_groups or from named_parameters()"
    )


def _in_plan(name: str, plan: Plan, side: str) -> str:
    """The plan's own name of a parameter that an optimizer may hold under another name of its own (tied)."""
    if name not in plan.names:
        raise MupscaleError(
            f"the plan has no parameter '{name}' that the {side} optimizer holds: it is of another model"
        )
    return plan.names[name]


def _widen_state(
    name: str, state: Mapping[str, Any], entry: Entry, p: Tensor, group: Mapping[str, Any], known: Traits
) -> dict[str, Any]:
    widened: dict[str, Any] = {}
    for key, value in state.items():
        factor = state_factor(name, key, entry, group, known)
        widened[key] = _widen_value(f"{name}/{key}", value, entry, p, group, factor)
    return widened


def state_factor(name: str, key: str, entry: Entry, group: Mapping[str, Any], known: Traits) -> float:
    """By what a state tensor of this key is rescaled."""
    if key in known.as_is:
        return 1.0
    if key not in known.state:
        raise MupscaleError(
            f"'{name}': optimizer state '{key}' is not known, so it cannot be rescaled; register "
            f"the optimizer with state={{'{key}': DEGREE}}"
        )
    factor: float = known.state[key](entry, group)
    return factor


def _widen_value(label: str, value: Any, entry: Entry, p: Tensor, group: Mapping[str, Any], factor: float) -> Any:
    if not isinstance(value, Tensor):
        return scale(value, factor) if isinstance(value, float) else value
    value = dtensor.full(value.detach())
    refuse_nonfinite({label: value})
    if is_scalar(value, entry):
        on_device = group.get("capturable") or group.get("fused")
        return scale(value, factor).to(p.device if on_device else "cpu")
    axes = axes_of_state(label, value, entry)
    dtype = p.dtype if tuple(value.shape) == entry.narrow else value.dtype
    out = torch.empty(widened_shape(value.shape, axes), dtype=dtype, device=value.device)
    state = entry.widened(value, out, factor=factor, axes=axes).to(p.device)
    return dtensor.like(state, p) if state.shape == p.shape else state


def is_scalar(value: Tensor, entry: Entry) -> bool:
    """Whether a state tensor is one number for the whole parameter, as `step` is."""
    return value.dim() == 0 or (value.numel() == 1 and tuple(value.shape) != entry.narrow)


def axes_of_state(label: str, value: Tensor, entry: Entry) -> dict[int, Axis]:
    """The parameter's axes along the dimensions that the state has, too; others are reduced to 1 (Adafactor)."""
    if value.dim() == len(entry.narrow) and all(
        size in (1, n) for size, n in zip(value.shape, entry.narrow, strict=True)
    ):
        return {d: axis for d, axis in entry.axes.items() if value.shape[d] == entry.narrow[d]}
    raise MupscaleError(
        f"optimizer state '{label}' has shape {tuple(value.shape)}, which does not fit the parameter's {entry.narrow}"
    )
