"""Gradient clipping by a norm that does not depend on the width, and loops that go on without it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from mupscale.core import Plan, gather_whole, is_sharded, naming
from mupscale.optim.groups import FROM_GROUP, NORM_FACTOR
from mupscale.system import MupscaleError, checks_arguments, warn

_WATCHED = 50  # steps after a growth in which plain clipping is noticed
_ALIKE = 3  # norms one after another, equal and round, that no training has by accident


@checks_arguments
@torch.no_grad()
def clip_grad_norm_(
    model: nn.Module,
    max_norm: float,
    optimizer: Optimizer | Plan,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """torch's clip_grad_norm_ with every gradient weighted so that the norm is what the narrow model's would be.

    Plain clipping breaks equivalence: copied gradients have another norm. Returns the invariant norm.
    optimizer: the model's, which knows how the model grew, whether it has grown yet, once or often; max_norm is then
    for the width at which the optimizer's rates were chosen. Or a plan from the width at which max_norm was chosen to
    the model, and not from its last width: after growing twice `first.then(second)`, after `deepen`
    `plan(base, model, inputs=…)`, with base as deep as the model.

    >>> import mupscale as mu
    >>> narrow, wide = nn.Linear(1, 1, bias=False), nn.Linear(4, 4, bias=False)
    >>> optimizer = torch.optim.SGD(narrow.parameters(), lr=0.1)
    >>> plan = mu.plan(narrow, wide)
    >>> wide, optimizer = mu.upscale(narrow, wide, plan, optimizer, exact=True)
    >>> wide.weight.grad = torch.full((4, 4), 3 / 4)  # what a gradient of 3 becomes in the wide model
    >>> mu.clip_grad_norm_(wide, 1.0, optimizer)
    tensor(3.)
    """
    if isinstance(optimizer, Plan):
        parameters, weights = optimizer.check(model), optimizer.norm_weights(norm_type)
    else:
        parameters = naming.parameters(model)
        weights = _weights_of(optimizer, parameters, norm_type)
    by_weight: dict[float, list[Tensor]] = {}
    for name, p in parameters.items():
        if p.grad is not None:
            by_weight.setdefault(weights[name], []).append(p.grad)
    if not by_weight:
        return torch.tensor(0.0)
    norms = {w: gather_whole(nn.utils.get_total_norm(g, norm_type, False, foreach)) for w, g in by_weight.items()}
    device = next(iter(norms.values())).device
    if math.isinf(norm_type):
        total = torch.stack([norm.to(device) * w for w, norm in norms.items()]).max()
    else:
        parts = [norm.to(device).pow(norm_type) * w for w, norm in norms.items()]
        total = torch.stack(parts).sum().pow(1 / norm_type)
    if error_if_nonfinite and not torch.isfinite(total):
        raise MupscaleError(f"the gradients' total norm is {float(total)}, so they cannot be clipped")
    nn.utils.clip_grads_with_norm_(parameters.values(), max_norm, total, foreach)
    return total


def _weights_of(optimizer: Optimizer, parameters: dict[str, nn.Parameter], norm_type: float) -> dict[str, float]:
    if norm_type != 2:
        raise MupscaleError(
            f"an optimizer knows only the norm of type 2, but norm_type= is {norm_type}. Pass a plan from the width at "
            "which max_norm was chosen to this model"
        )
    factors = dict[int, float]()
    for group in optimizer.param_groups:
        if NORM_FACTOR not in group and "lr_factor" in group:
            raise MupscaleError(
                "this optimizer's groups have an lr_factor, but do not say how their gradients enter a "
                "norm. Pass a plan from the width at which max_norm was chosen to this model"
            )
        factors.update((id(p), group.get(NORM_FACTOR, 1.0)) for p in group["params"])
    if strangers := [name for name, p in parameters.items() if p.grad is not None and id(p) not in factors]:
        raise MupscaleError(
            f"'{strangers[0]}' has a gradient, but this optimizer does not hold it. Pass the optimizer of the whole "
            "model, or a plan from the width at which max_norm was chosen to this model"
        )
    return {name: factors.get(id(p), 1.0) for name, p in parameters.items()}


@dataclass
class _Watch:
    """What the steps since a growth have shown of a training loop.

    is_rate_known: whether one rate for all groups has been told, or was there before the loop could set it. norms: of
    all gradients, step by step. largest: the size of their largest entry, step by step.
    """

    is_rate_known: bool
    norms: list[float] = field(default_factory=list)
    largest: list[float] = field(default_factory=list)


_WATCHES: WeakKeyDictionary[Optimizer, _Watch | None] = WeakKeyDictionary()  # None: it has been watched long enough


def watch_first_steps(optimizer: Optimizer) -> None:
    """Say it once if a loop goes on as before the growth: it clips as torch does, or sets one rate for all groups.

    Nothing tells who has written into a gradient; but clipping that binds leaves one norm, or one largest entry, step
    after step, and that is a number which somebody typed. Two norms for each of a few steps are all it costs.
    """
    if _depends_on_width(optimizer):
        _WATCHES[optimizer] = _Watch(is_rate_known=_has_one_rate(optimizer))


def _depends_on_width(optimizer: Optimizer) -> bool:
    """Whether a norm of the gradients differs from the narrow model's, by more than rounding of the factors."""
    return any(not math.isclose(group.get(NORM_FACTOR, 1.0), 1, rel_tol=1e-6) for group in optimizer.param_groups)


def _watch_of(optimizer: Optimizer) -> _Watch | None:
    """The watch that is kept on this optimizer, or begins now because its groups come from a growth."""
    if optimizer not in _WATCHES:
        has_grown = any(FROM_GROUP in group for group in optimizer.param_groups)
        if not has_grown or not _depends_on_width(optimizer):
            return None  # it may be given other groups later
        _WATCHES[optimizer] = _Watch(is_rate_known=False)
    return _WATCHES[optimizer]


@torch.no_grad()
def _look_before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Look at the rates and gradients with which a step is about to be taken."""
    if torch.compiler.is_compiling() or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        return
    watch = _watch_of(optimizer)
    if watch is None:
        return
    if not watch.is_rate_known and _has_one_rate(optimizer):
        watch.is_rate_known = True
        warn(
            f"all groups have the learning rate {optimizer.param_groups[0]['lr']:g}, but since the growth each has "
            'a rate of its own. If your loop sets it, write group["lr"] = lr * group.get("lr_factor", 1.0)'
        )
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if any(is_sharded(g) or g.is_sparse for g in gradients):
        return
    message = _clipped_by_norm(watch, gradients) or _clipped_by_value(watch, gradients)
    if message:
        warn(message)
    if message or len(watch.norms) >= _WATCHED:
        _WATCHES[optimizer] = None


def _clipped_by_norm(watch: _Watch, gradients: list[Tensor]) -> str:
    """What to say if the gradients of the last steps have one round norm; nothing otherwise."""
    watch.norms.append(float(nn.utils.get_total_norm(gradients)))
    last, typed = watch.norms[-_ALIKE:], _as_typed(watch.norms[-1])
    if len(last) < _ALIKE or typed == 0 or not all(math.isclose(norm, typed, rel_tol=1e-5) for norm in last):
        return ""
    return (
        f"gradients have a norm of {typed:g} at every step, as after torch's clip_grad_norm_. In a model that "
        f"has grown, that norm depends on the width. Clip with mupscale.clip_grad_norm_(model, {typed:g}, "
        "optimizer)"
    )


def _clipped_by_value(watch: _Watch, gradients: list[Tensor]) -> str:
    """What to say if the largest entries of the last steps' gradients are one round number; nothing otherwise.

    It must be the largest entry of two gradients: a loss such as the mean of |x| gives one bias a gradient of 1.
    """
    watch.largest.append(float(nn.utils.get_total_norm(gradients, math.inf)))
    last, typed = watch.largest[-_ALIKE:], _as_typed(watch.largest[-1])
    if len(last) < _ALIKE or typed == 0 or not all(math.isclose(entry, typed, rel_tol=1e-2) for entry in last):
        return ""
    are_at_bound = 0
    for gradient in gradients:
        bound = float(torch.tensor(typed, dtype=gradient.dtype))  # as clamping rounds it
        are_at_bound += bool(float(gradient.abs().max()) == bound)
    if are_at_bound < 2 or len({*last}) > 1:
        return ""
    return (
        f"the largest entries of gradients are {typed:g} at every step, as after torch's clip_grad_value_. In a model "
        "that has grown, the size of single entries depends on the width, so that other ones are cut than before. "
        "Clip by the norm of all gradients, with mupscale.clip_grad_norm_(model, max_norm, optimizer)"
    )


def _as_typed(number: float) -> float:
    """The number with three digits, as a user may have written it."""
    return float(f"{number:.3g}")


def _has_one_rate(optimizer: Optimizer) -> bool:
    rates = {group.get("lr") for group in optimizer.param_groups}
    factors = [group.get("lr_factor", 1.0) for group in optimizer.param_groups]
    return len(rates) == 1 and rates.isdisjoint({0, None}) and max(factors) > min(factors) * (1 + 1e-6)


# on every optimizer, because a hook of its own is lost where one is copied, or its state is loaded into another
register_optimizer_step_pre_hook(_look_before_step)
