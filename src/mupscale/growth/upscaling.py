"""Upscaling: widen, carry the optimizer over, perturb. Steps 1–3 of Meta-algorithm 'Upscaling procedure'."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn
from torch.optim import Optimizer

from mupscale.core import Plan
from mupscale.growth.copying import prepare_widening, write_widened
from mupscale.growth.noise import Noise, check_noise, perturb
from mupscale.growth.optimizer_state import widen_optimizer
from mupscale.optim import widened_groups


def upscale(
    narrow: nn.Module,
    wide: nn.Module,
    plan: Plan,
    optimizer: Optimizer | None = None,
    *,
    noise: Noise = 0.0,
    lr: float | None = None,
    seed: int = 0,
) -> tuple[nn.Module, Optimizer | None]:
    """The wide model and its optimizer, ready to train on; with no noise they go on exactly as the narrow ones would.

    The wide optimizer has the narrow one's class, hyperparameters (as they are now) and state, all rescaled; `lr`
    replaces the learning rate, in the units of a group with lr_factor 1.

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
    noise = check_noise(noise, plan)
    sources = prepare_widening(narrow, wide, plan)
    grown = None if optimizer is None else grow_optimizer(optimizer, narrow, wide, plan, lr)
    write_widened(sources, wide, plan)
    perturb(wide, plan, noise, seed)
    return wide, grown


def grow_optimizer(
    optimizer: Optimizer, narrow: nn.Module, wide: nn.Module, plan: Plan, lr: float | None = None
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
    grown = type(optimizer)(groups, **_constructor_arguments(optimizer))
    return widen_optimizer(optimizer, grown, plan, narrow=narrow, wide=wide)


def _constructor_arguments(optimizer: Optimizer) -> dict[str, Any]:
    """Defaults that the optimizer's constructor takes, so that what it checks and sets up there happens again."""
    accepted = inspect.signature(type(optimizer).__init__).parameters
    return {name: value for name, value in optimizer.defaults.items() if name in accepted}
