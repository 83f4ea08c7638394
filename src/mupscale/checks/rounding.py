"""Models in float64, and models that differ in their last bits."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import Optimizer

from mupscale.planning import in_double


def rounding_of(model: nn.Module) -> float:
    """The relative rounding of a model's least precise parameter; float32's where there is none.

    >>> rounding_of(nn.Linear(1, 1).bfloat16()) == 2**-7
    True
    """
    kinds = {p.dtype for p in model.parameters() if p.is_floating_point()}
    return max((torch.finfo(kind).eps for kind in kinds), default=torch.finfo(torch.float32).eps)


def can_double(model: nn.Module) -> bool:
    """Whether its device computes in float64.

    >>> can_double(nn.Linear(1, 1))
    True
    """
    return all(p.device.type != "mps" for p in model.parameters())


def into_double(model: nn.Module, optimizer: Optimizer | None = None) -> None:
    """Turn a model, and the state of an optimizer that holds its parameters, into float64, in place.

    >>> model = nn.Linear(1, 1)
    >>> into_double(model)
    >>> model.weight.dtype
    torch.float64
    """
    model.double()
    if optimizer is not None:
        for state in optimizer.state.values():
            state.update(in_double(dict(state)))


@torch.no_grad()
def move_by_rounding(model: nn.Module, seed: int = 0) -> None:
    """Change every parameter by its last bit, up or down at random, in place.

    >>> model = nn.Linear(1, 1, bias=False).double()
    >>> before = model.weight.item()
    >>> move_by_rounding(model)
    >>> 0 < abs(model.weight.item() / before - 1) < 1e-15
    True
    """
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        signs = torch.randint(0, 2, p.shape, generator=generator).to(p.device, p.dtype) * 2 - 1
        p.mul_(1 + torch.finfo(p.dtype).eps * signs)
