"""Gradient clipping by a norm that does not depend on the width, and loops that go on without it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mupscale.core import Plan, gather_whole, is_sharded, naming
from mupscale.optim.groups import NORM_FACTOR
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


def watch_first_steps(optimizer: Optimizer) -> None:
    """Say it once if a loop goes on as before the growth: it clips by torch's norm, or sets one rate for all groups.

    Nothing tells who has written into a gradient; but clipping that binds leaves one norm, step after step, and that is
    a number which somebody typed. A norm for each of a few steps is all it costs.
    """
    if all(math.isclose(group.get(NORM_FACTOR, 1.0), 1, rel_tol=1e-6) for group in optimizer.param_groups):
        return  # at a family's base both norms are one, up to rounding of the factors
    norms, is_rate_known = list[float](), _has_one_rate(optimizer)

    @torch.no_grad()
    def look(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        nonlocal is_rate_known
        if torch.compiler.is_compiling() or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
            return
        if not is_rate_known and _has_one_rate(optimizer):
            is_rate_known = True
            warn(
                f"all groups have the learning rate {optimizer.param_groups[0]['lr']:g}, but since the growth each has "
                'a rate of its own. If your loop sets it, write group["lr"] = lr * group.get("lr_factor", 1.0)'
            )
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if any(is_sharded(g) or g.is_sparse for g in gradients):
            return
        norms.append(float(nn.utils.get_total_norm(gradients)))
        last, typed = norms[-_ALIKE:], float(f"{norms[-1]:.3g}")
        is_clipped = len(last) == _ALIKE and typed > 0 and all(math.isclose(n, typed, rel_tol=1e-5) for n in last)
        if is_clipped:
            warn(
                f"gradients have a norm of {typed:g} at every step, as after torch's clip_grad_norm_. In a model that "
                f"has grown, that norm depends on the width. Clip with mupscale.clip_grad_norm_(model, {typed:g}, "
                "optimizer)"
            )
        if is_clipped or len(norms) >= _WATCHED:
            hook.remove()

    hook = optimizer.register_step_pre_hook(look)


def _has_one_rate(optimizer: Optimizer) -> bool:
    rates = {group.get("lr") for group in optimizer.param_groups}
    factors = [group.get("lr_factor", 1.0) for group in optimizer.param_groups]
    return len(rates) == 1 and rates.isdisjoint({0, None}) and max(factors) > min(factors) * (1 + 1e-6)
