"""Gradient clipping by a norm that does not depend on the width."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from mupscale.core import Plan, gather_whole
from mupscale.system import MupscaleError, checks_arguments


@checks_arguments
@torch.no_grad()
def clip_grad_norm_(
    model: nn.Module,
    max_norm: float,
    plan: Plan,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """torch's clip_grad_norm_ with every gradient weighted so that the norm is what the narrow model's would be.

    Plain clipping breaks equivalence: copied gradients have another norm. Returns the invariant norm.
    plan: from the width at which max_norm was chosen to the model, and not from its last width. After growing twice it
    is `first.then(second)`. After `deepen` it is `plan(base, model, inputs=…)`, with base as deep as the model.

    >>> import mupscale as mu
    >>> narrow, wide = nn.Linear(1, 1, bias=False), nn.Linear(4, 4, bias=False)
    >>> plan = mu.plan(narrow, wide)
    >>> wide.weight.grad = torch.full((4, 4), 3 / 4)  # what a gradient of 3 becomes in the wide model
    >>> mu.clip_grad_norm_(wide, 1.0, plan)
    tensor(3.)
    """
    parameters, weights = plan.check(model), plan.norm_weights(norm_type)
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
