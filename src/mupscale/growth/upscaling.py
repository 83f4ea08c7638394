"""Growth in one call: the wide model and its optimizer. Steps 1–3 of Meta-algorithm 'Upscaling procedure'."""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn
from torch.optim import Optimizer

from mupscale.core import Plan
from mupscale.growth.copies import Copies
from mupscale.growth.fresh import Fresh
from mupscale.growth.lossless import warn_of_loss
from mupscale.growth.noise import Noise
from mupscale.growth.operators import Operator, check_operator
from mupscale.growth.optimizer_state import constructor_arguments, widen_optimizer
from mupscale.growth.sources import prepare_growth
from mupscale.growth.writing import write_grown
from mupscale.optim import widened_groups
from mupscale.planning import check_plan_by_running
from mupscale.system import MupscaleError, UncheckedPlan

UNCHECKED = (
    "this growth has not been tried: its plan follows from module types and names. Pass inputs=, a small batch as the "
    "model is called with it, and it is checked first; or make the plan with plan(narrow, wide, inputs=…)"
)


def upscale(
    narrow: nn.Module,
    wide: nn.Module,
    plan: Plan,
    optimizer: Optimizer | None = None,
    *,
    noise: Noise = 0.0,
    grow: Operator | None = None,
    lr: float | None = None,
    seed: int = 0,
    inputs: Any = None,
) -> tuple[nn.Module, Optimizer | None]:
    """The wide model and its optimizer, ready to train on.

    grow: how the wide model is filled. `Copies(noise)`, for which `noise=` is short, goes on exactly as the narrow
    model would if there is no noise; `Fresh()` keeps the trained units and draws new ones; or an Operator of your own.
    The wide optimizer has the narrow one's class, hyperparameters (as they are now) and state, all rescaled.
    lr: another learning rate from now on, in the units of a group with lr_factor 1; a schedule carried over by
    `widen_scheduler` goes on from there, with all its rates in that ratio.
    inputs: a small batch, as in `plan`. Copies by this plan are then checked on it before anything is changed: outputs
    and gradients in float64, with generic weights. `Fresh(lossless=True)` is measured on it: a warning says by how much
    the outputs differ, where they do.

    >>> import torch
    >>> import mupscale as mu
    >>> from mupscale.models import MLP
    >>> narrow = MLP(3, 8, 2)
    >>> optimizer = torch.optim.AdamW(narrow.parameters(), lr=0.01)
    >>> plan = mu.plan(narrow, MLP(3, 32, 2), fresh=lambda: MLP(3, 8, 2))
    >>> wide, wide_optimizer = mu.upscale(narrow, MLP(3, 32, 2), plan, optimizer, noise=1.0)
    >>> wide.layers[1].weight.shape, {group["lr"] for group in wide_optimizer.param_groups} == {0.01, 0.0025}
    (torch.Size([32, 32]), True)
    """
    operator = choose_operator(grow, noise)
    check_operator(operator, plan)
    if inputs is not None and operator.needs_multiples:
        check_plan_by_running(narrow, wide, plan, inputs)
    elif operator.needs_multiples and not plan.checked:
        warnings.warn(UNCHECKED, UncheckedPlan, stacklevel=2)
    sources = prepare_growth(narrow, wide, plan)
    grown = None if optimizer is None else grow_optimizer(optimizer, narrow, wide, plan, lr, operator)
    write_grown(sources, wide, plan, operator, seed)
    if isinstance(operator, Fresh) and operator.lossless:
        warn_of_loss(narrow, wide, plan, inputs)
    return wide, grown


def choose_operator(grow: Operator | None, noise: Noise) -> Operator:
    """The operator that is meant: `grow`, or copies with this noise.

    >>> choose_operator(None, 0.5)
    Copies(noise=0.5, paired=False)
    """
    if grow is not None and noise != 0.0:
        raise MupscaleError("noise= and grow= are two ways to say one thing; write grow=Copies(noise=…)")
    return Copies(noise) if grow is None else grow


def grow_optimizer(
    optimizer: Optimizer,
    narrow: nn.Module,
    wide: nn.Module,
    plan: Plan,
    lr: float | None = None,
    grow: Operator | None = None,
) -> Optimizer:
    """An optimizer of the same class for the wide model, with rescaled hyperparameters and state.

    >>> import torch
    >>> import mupscale as mu
    >>> narrow, wide = nn.Linear(8, 8, bias=False), nn.Linear(32, 32, bias=False)
    >>> optimizer = torch.optim.Adam(narrow.parameters(), lr=0.1)
    >>> grow_optimizer(optimizer, narrow, wide, mu.plan(narrow, wide)).param_groups[0]["lr"]
    0.025
    """
    groups = widened_groups(optimizer, narrow, wide, plan, lr)
    grown = type(optimizer)(groups, **constructor_arguments(optimizer))
    return widen_optimizer(optimizer, grown, plan, narrow=narrow, wide=wide, grow=grow)
