"""How large a model's parameters are when it is freshly built, measured on models that its author initialised."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


def initial_std(draws: list[dict[str, nn.Parameter]]) -> dict[str, float]:
    """Std of each parameter over freshly initialised models; 0 where it is constant, or the same in every draw.

    >>> draws = [dict(nn.LayerNorm(4).named_parameters()) for _ in range(2)]
    >>> initial_std(draws)  # a norm starts with gain 1 and bias 0
    {'weight': 0.0, 'bias': 0.0}
    """
    stds = {}
    for name, first in draws[0].items():
        if len(draws) > 1 and all(torch.equal(first, draw[name]) for draw in draws[1:]):
            stds[name] = 0.0
        else:
            stds[name] = math.sqrt(sum(_variance(draw[name]) for draw in draws) / len(draws))
    return stds


def _variance(p: Tensor) -> float:
    return float(p.detach().double().var(correction=0)) if p.numel() else 0.0
