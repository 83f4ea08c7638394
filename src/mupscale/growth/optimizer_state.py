"""Optimizer state, copied and rescaled as its parameters are: Step 3 of Meta-algorithm 'Upscaling procedure'."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mupscale.core import Axis, Entry, Plan, Shape, gather_whole, laid_out_like, naming
from mupscale.growth.copies import Copies
from mupscale.growth.fresh import Fresh
from mupscale.growth.operators import Operator, Part, StatePart
from mupscale.growth.writing import check_written, drawn_entries, refuse_nonfinite, unwritten
from mupscale.optim import Traits, known_traits, scale, traits_of
from mupscale.system import MupscaleError, checks_arguments

_PLAIN_STEP = {"foreach": None, "fused": None, "capturable": False, "differentiable": False}  # as any machine takes it


@checks_arguments
def widen_optimizer(
    optimizer: Optimizer | Mapping[str, Any],
    wide_optimizer: Optimizer,
    plan: Plan,
    *,
    narrow: nn.Module | None = None,
    wide: nn.Module | None = None,
    grow: Operator | None = None,
) -> Optimizer:
    """Give the wide optimizer the narrow one's state (the optimizer itself or its saved state dict), widened.

    Hyperparameters are not touched: param_groups has scaled them. narrow, wide: the models, which tell which parameter
    is which where the optimizers' groups hold no names (those of param_groups do). grow: the operator that fills the
    wide model; `Copies()`, or `Fresh()` of a plan for fresh units, if nothing is said.

    >>> import mupscale as mu
    >>> narrow, wide = nn.Linear(2, 2, bias=False), nn.Linear(4, 4, bias=False)
    >>> plan = mu.plan(narrow, wide)
    >>> optimizer = torch.optim.SGD(narrow.parameters(), lr=0.1, momentum=0.9)
    >>> narrow.weight.grad = torch.ones(2, 2)
    >>> optimizer.step()
    >>> wide_optimizer = mu.make_optimizer(wide, plan, torch.optim.SGD, lr=0.1, momentum=0.9)
    >>> mu.widen_optimizer(optimizer, wide_optimizer, plan).state[wide.weight]["momentum_buffer"][0]
    tensor([0.5000, 0.5000, 0.5000, 0.5000])
    """
    if isinstance(optimizer, Optimizer) and type(optimizer) is not type(wide_optimizer):
        raise MupscaleError(
            f"state of {type(optimizer).__name__} cannot be carried over to {type(wide_optimizer).__name__}. Use one "
            "optimizer class for both, or start the wide one without state"
        )
    grow = grow or (Fresh() if plan.mup else Copies())  # what the plan was made for
    traits = traits_of(type(wide_optimizer))
    saved = vars(optimizer) if isinstance(optimizer, Optimizer) else optimizer
    try:
        groups, states = saved["param_groups"], saved["state"]
    except (KeyError, TypeError):
        raise MupscaleError("this is not an optimizer state dict: it lacks 'param_groups' and 'state'") from None
    if not any(states.values()):
        return wide_optimizer
    targets = [(p, group) for group in wide_optimizer.param_groups for p in group["params"]]
    held = dict(zip(_names(wide_optimizer.param_groups, plan, wide, "wide"), targets, strict=True))
    keys = [key for group in groups for key in group["params"]]
    named = {n: states.get(key) for n, key in zip(_names(groups, plan, narrow, "narrow"), keys, strict=True)}
    grown = {}
    for name, entry in plan.parameters.items():
        source = plan.sources[name]
        if not (state := named.get(source.name)) or not source.is_taken:
            continue
        if name not in held:
            raise MupscaleError(f"the wide optimizer does not hold '{name}', whose state the narrow one has")
        p, group = held[name]
        if tuple(p.shape) != entry.wide:
            raise MupscaleError(
                f"this plan is for a different model: '{name}' has shape {tuple(p.shape)} in the wide optimizer and "
                f"the plan's wide shape is {entry.wide}"
            )
        part = Part(name, plan, seed=0)
        grown[p] = {
            key: grow_state(key, value, part, p, group, traits, grow, wide_optimizer) for key, value in state.items()
        }
    wide_optimizer.state.update(grown)
    return wide_optimizer


def _names(groups: Sequence[Mapping[str, Any]], plan: Plan, model: nn.Module | None, side: str) -> list[str]:
    """Names of an optimizer's parameters: by those in its groups, by identity, or by their shapes where all differ."""
    own = plan.names if side == "wide" else plan.old_names  # a tied parameter may be held under another of its names
    if all("param_names" in group for group in groups):
        names = naming.without_ddp((name for group in groups for name in group["param_names"]), own)
        if strangers := [name for name in names if name not in own]:
            raise MupscaleError(
                f"the plan has no parameter '{strangers[0]}' that the {side} optimizer holds: it is for a different "
                "model"
            )
        return [own[name] for name in names]
    held = [key for group in groups for key in group["params"]]
    are_tensors = any(isinstance(key, Tensor) for key in held)
    if model is not None and are_tensors:
        owned = {id(p): own[name] for name, p in naming.parameters(model).items() if name in own}
        if all(id(p) in owned for p in held):
            return [owned[id(p)] for p in held]
    by_name = {(name if side == "wide" else plan.sources[name].name): e for name, e in plan.parameters.items()}
    ordered, shapes = list(by_name), [getattr(entry, side) for entry in by_name.values()]
    told_apart = len(groups) == 1 and len(held) == len(ordered) == len(set(shapes))
    if told_apart and (not are_tensors or [tuple(p.shape) for p in held] == shapes):
        return ordered
    remedy = f"pass {side}= the model" if are_tensors else f"load it into the {side} optimizer and pass that"
    raise MupscaleError(
        f"the library cannot tell which parameter is which in the {side} optimizer ({len(held)} in {len(groups)} "
        f"group{'s' * (len(groups) != 1)}, {len(set(shapes))} different shapes): {remedy}, or build its groups with "
        "mupscale.param_groups or from named_parameters()"
    )


def state_factor(name: str, key: str, entry: Entry, group: Mapping[str, Any], traits: Traits) -> float:
    if key in traits.as_is:
        return 1.0
    if key not in traits.state:
        raise MupscaleError(
            f"'{name}': optimizer state '{key}' is unknown, so it cannot be rescaled. Register the optimizer with "
            f"state={{'{key}': DEGREE}}"
        )
    factor: float = traits.state[key](entry, group)
    return factor


def grow_state(
    key: str,
    value: Any,
    part: Part,
    p: Tensor,
    group: Mapping[str, Any],
    traits: Traits,
    operator: Operator,
    optimizer: Optimizer,
) -> Any:
    """What an optimizer keeps under this key for the wide parameter `p`, from the narrow one's value.

    group: its hyperparameters. optimizer: of the class, which tells what new entries start with.
    """
    entry, label = part.entry, f"{part.name}/{key}"
    factor = state_factor(part.name, key, entry, group, traits)
    if not isinstance(value, Tensor):
        return scale(value, factor) if isinstance(value, float) else value
    value = gather_whole(value.detach())
    is_plain = type(value) in (Tensor, nn.Parameter) and (value.dtype.is_floating_point or value.dtype.is_complex)
    if not is_plain and factor != 1 and not is_scalar(value, entry):
        kind = str(value.dtype) if type(value) in (Tensor, nn.Parameter) else type(value).__name__
        raise MupscaleError(
            f"optimizer state '{label}' is stored as {kind}, as 8-bit optimizers store it, and such numbers cannot be "
            "rescaled. Grow the model without optimizer=, and start the wide optimizer without state "
            "(mupscale.make_optimizer)"
        )
    refuse_nonfinite({label: value})
    if is_scalar(value, entry):
        on_device = group.get("capturable") or group.get("fused")
        return scale(value, factor).to(p.device if on_device else "cpu")
    value = value.expand(*entry.narrow[: len(entry.narrow) - value.dim()], *value.shape)  # of stacked copies
    axes, shape = axes_of_state(label, value, entry), shape_of_state(label, tuple(value.shape), entry)
    dtype = p.dtype if tuple(value.shape) == entry.narrow else value.dtype
    out = unwritten(shape, dtype, value.device, operator)
    state = StatePart(
        part.name,
        part.plan,
        part.seed,
        key,
        tuple(value.shape),
        axes,
        lambda: initial_state(optimizer, group, len(shape)).get(key, 0.0),
        lambda entry: state_factor(part.name, key, entry, group, traits),
        key in traits.rates,
        key in traits.begins_at_mean,
    )
    operator.state(out, value, state)
    check_written(label, out, operator)
    drawn = drawn_entries(part.name, part.plan)
    if drawn is not None and out.shape == drawn.shape:
        out[drawn] = state.initial
    grown = out.to(p.device)
    return laid_out_like(grown, p) if grown.shape == p.shape else grown


def constructor_arguments(optimizer: Optimizer) -> dict[str, Any]:
    """Defaults that the optimizer's constructor takes, so that what it checks and sets up there happens again."""
    accepted = inspect.signature(type(optimizer).__init__).parameters
    return {name: value for name, value in optimizer.defaults.items() if name in accepted}


def initial_state(optimizer: Optimizer, group: Mapping[str, Any], ndim: int) -> dict[str, float]:
    """The value that each state tensor of a new parameter has before its first step.

    Where an optimizer does not show it (of torch's, SGD), what a step without a gradient leaves.

    >>> optimizer = torch.optim.Adagrad([torch.zeros(1)], lr=0.1, initial_accumulator_value=0.5)
    >>> initial_state(optimizer, optimizer.param_groups[0], ndim=2)
    {'step': 0.0, 'sum': 0.5}
    """
    p = nn.Parameter(torch.zeros((1,) * ndim))
    own = ("params", "param_names", *_PLAIN_STEP)
    defaults = constructor_arguments(optimizer)
    hyper = {k: v for k, v in {**defaults, **group}.items() if k in defaults and k not in own}
    p.grad = torch.zeros_like(p)
    fresh, found = type(optimizer)([p], **hyper), dict[str, float]()

    def look(result: Any = None) -> Any:
        for key, value in fresh.state[p].items():
            if isinstance(value, Tensor | float | int):
                found.setdefault(key, float(value))
        return result

    if (begin := getattr(fresh, "_init_group", None)) is not None:  # all of torch's make their state in it
        fresh._init_group = lambda *args, **kwargs: look(begin(*args, **kwargs))  # type: ignore[attr-defined]
    fresh.step()
    look()
    return found


def what_is_foreign(saved: Mapping[str, Any], optimizer: Optimizer) -> str:
    """In words, what shows that a state dict is another optimizer's than this one; nothing where it may be its own.

    Shown by a step of this optimizer with the saved hyperparameters: what it asks for, and what it keeps.
    """
    name, traits = type(optimizer).__name__, known_traits(type(optimizer))
    kept: dict[tuple[int, int], set[str] | str | None] = {}
    for number, (group, own) in enumerate(zip(saved["param_groups"], optimizer.param_groups, strict=False)):
        for key, p in zip(group["params"], own["params"], strict=False):
            if (number, p.dim()) not in kept:
                kept[number, p.dim()] = _kept_after_a_step(optimizer, group, own, p.dim())
            expected = kept[number, p.dim()]
            if isinstance(expected, str):
                return f"{name} takes no step with its hyperparameters ({expected})"
            state = saved["state"].get(key, {})
            if expected is None or not state:
                continue
            if missing := expected - state.keys():
                return f"its state number {key} has no '{min(missing)}', which {name} keeps"
            if traits is not None and (more := state.keys() - traits.state.keys() - expected):
                return f"its state number {key} has '{min(more)}', which {name} does not keep"
    return ""


def _kept_after_a_step(
    optimizer: Optimizer, group: Mapping[str, Any], own: Mapping[str, Any], ndim: int
) -> set[str] | str | None:
    """The keys of the state that a step with a saved group leaves; the error that it ends in, if not with its own."""

    def step(hyper: Mapping[str, Any]) -> set[str]:
        p = nn.Parameter(torch.zeros((1,) * ndim))
        p.grad = torch.zeros_like(p)
        fresh = type(optimizer)([p], **constructor_arguments(optimizer))
        fresh.load_state_dict({"state": {}, "param_groups": [{**hyper, "params": [0], **_PLAIN_STEP}]})
        fresh.step()
        return set(fresh.state[p])

    try:
        return step(group)
    except Exception as error:  # whatever an optimizer raises
        with suppress(Exception):
            step(own)
            return f"{type(error).__name__}: {error}"
    return None


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


def shape_of_state(label: str, shape: Shape, entry: Entry) -> Shape:
    """What a state tensor of this shape becomes; `entry` stacks copies where the parameter does."""
    sketch = torch.empty(shape, device="meta")
    if is_scalar(sketch, entry):
        return shape
    sketch = sketch.expand(*entry.narrow[: len(entry.narrow) - len(shape)], *shape)
    axes = axes_of_state(label, sketch, entry)
    return tuple(wide if d in axes else n for d, (n, wide) in enumerate(zip(sketch.shape, entry.wide, strict=True)))
