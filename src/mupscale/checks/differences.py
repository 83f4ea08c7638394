"""Parameters and buffers of two models that should be equivalent and are not, and what usually causes it."""

from __future__ import annotations

import torch
from torch import nn

from mupscale.core import Plan, naming
from mupscale.planning import Difference, relative_difference

_BUFFER = (
    "The outputs agree in training and will not in evaluation: usually blocks that were given for a norm's weight "
    "and bias and not for its running statistics, or buffers that were not widened."
)
_UPDATE = (
    "usually copies that receive different gradients (grouped-query heads not copied as whole groups), plain "
    "clipping instead of clip_grad_norm_ with the plan, or an optimizer registered with a wrong degree."
)


def worst_parameter(narrow: nn.Module, wide: nn.Module, plan: Plan, tolerance: float) -> Difference | None:
    """After a step: the parameter that is furthest from the copies it should consist of."""
    worst: tuple[float, str] = (tolerance, "")
    theirs = naming.parameters(wide)
    for name, p in naming.parameters(narrow).items():
        entry = plan.parameters[name]
        expected = entry.widened(p.detach(), torch.empty_like(theirs[name]))
        worst = max(worst, (relative_difference(expected, theirs[name].detach()), name))
    if not worst[1]:
        return None
    return Difference(worst[1], "parameter", worst[0], f"The models agreed until an update: {_UPDATE}")


def first_wrong_buffer(narrow: nn.Module, wide: nn.Module, plan: Plan, tolerance: float) -> Difference | None:
    """Before any update: a buffer that is not the copies it should be, which only evaluation would show."""
    theirs = naming.buffers(wide)
    for name, buffer in naming.buffers(narrow).items():
        if name in plan.buffers and buffer.is_floating_point():
            entry = plan.buffers[name]
            expected = entry.widened(buffer, torch.empty_like(theirs[name]), factor=entry.rule.weight)
            if not torch.allclose(expected, theirs[name], rtol=tolerance, atol=tolerance, equal_nan=True):
                return Difference(name, "buffer", relative_difference(expected, theirs[name]), _BUFFER)
    return None
