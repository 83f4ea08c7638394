"""Parameters and buffers of two models that should be equivalent and are not, and what usually causes it."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import nn

from mupscale.core import Entry, Plan, index_of_old, naming
from mupscale.growth import gain_factor
from mupscale.planning import Difference, relative_difference

_BUFFER = (
    "The outputs agree in training and will not in evaluation: usually blocks that were given for a norm's weight "
    "and bias and not for its running statistics, or buffers that were not widened."
)
_UPDATE = (
    "usually copies that receive different gradients (grouped-query heads not copied as whole groups), plain "
    "clipping instead of clip_grad_norm_ with the plan, or an optimizer registered with a wrong degree."
)
_MISPLACED = (
    "Its old units are not the narrow model's: it has been trained since, the plan is another, or it never grew."
)
_WEIGHTS = (
    "Usually noise, which makes copies differ on purpose (verify a growth without it, as mupscale.widen writes it, and "
    "add the noise then); or training since the growth, another plan, or a model that was never widened."
)


def why_no_copies(narrow: nn.Module, wide: nn.Module, plan: Plan, tolerance: float) -> str:
    """What usually causes it where the wide model does not hold what the plan writes into it; '' where it does."""
    off, name = _furthest(narrow, wide, plan, tolerance)
    if not name or math.isinf(off):  # what is not finite has another cause
        return ""
    return (
        f"Before any step, the wide model's weights are not the copies that the plan makes of the narrow one's: "
        f"'{name}' is off by {off:.1e}. {_WEIGHTS}"
    )


def worst_parameter(narrow: nn.Module, wide: nn.Module, plan: Plan, tolerance: float) -> Difference | None:
    """After a step: the parameter that is furthest from the copies it should consist of."""
    off, name = _furthest(narrow, wide, plan, tolerance)
    return Difference(name, "parameter", off, f"The models agreed until an update: {_UPDATE}") if name else None


def _furthest(narrow: nn.Module, wide: nn.Module, plan: Plan, tolerance: float) -> tuple[float, str]:
    """How far the worst parameter is from its copies, and its name; '' where all are within the tolerance."""
    worst: tuple[float, str] = (tolerance, "")
    theirs = naming.parameters(wide)
    for name, p, entry in _taken(narrow, plan):
        expected = entry.widened(p.detach(), torch.empty_like(theirs[name]))
        worst = max(worst, (relative_difference(expected, theirs[name].detach()), name))
    return worst


def _taken(narrow: nn.Module, plan: Plan) -> Iterator[tuple[str, nn.Parameter, Entry]]:
    """Of what the wide model has from the narrow one: its name in the wide one, the narrow parameter, and the entry."""
    for name, p in plan.check(narrow, "narrow").items():
        if plan.sources[name].is_taken:
            yield name, p, plan.parameters[name]


def misplaced_parameter(narrow: nn.Module, wide: nn.Module, plan: Plan, tolerance: float) -> Difference | None:
    """Of a growth by fresh units: the parameter whose old units are furthest from the narrow model's, if any are."""
    worst: tuple[float, str] = (tolerance, "")
    theirs = naming.parameters(wide)
    for name, p, entry in _taken(narrow, plan):
        old = theirs[name].detach()[index_of_old(entry.narrow, entry.axes)]
        gains = (1.0, gain_factor(name, plan))  # as fresh units, or lossless ones, leave them
        off = min(relative_difference(p.detach() * float(entry.keep) * gain, old) for gain in gains)
        worst = max(worst, (off, name))
    return Difference(worst[1], "parameter", worst[0], _MISPLACED) if worst[1] else None


def first_wrong_buffer(narrow: nn.Module, wide: nn.Module, plan: Plan, tolerance: float) -> Difference | None:
    """Before any update: a buffer that is not the copies it should be, which only evaluation would show."""
    ours, theirs = naming.buffers(narrow), naming.buffers(wide)
    for name, entry in plan.buffers.items():
        source, buffer = plan.sources[name], ours.get(plan.sources[name].name)
        if buffer is not None and buffer.is_floating_point() and source.is_taken:
            expected = entry.widened(buffer, torch.empty_like(theirs[name]), factor=entry.rule.weight)
            if not torch.allclose(expected, theirs[name], rtol=tolerance, atol=tolerance, equal_nan=True):
                return Difference(name, "buffer", relative_difference(expected, theirs[name]), _BUFFER)
    return None
