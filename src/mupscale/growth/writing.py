"""Writing the larger model: every parameter and buffer by the operator, straight into its place where that can be."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor, nn

from mupscale.core import Plan, copy_into, gather_whole, is_sharded, naming
from mupscale.growth.copies import Copies
from mupscale.growth.draws import standard_normal
from mupscale.growth.fresh import Fresh
from mupscale.growth.operators import Operator, Part, check_operator
from mupscale.growth.sources import Tensors, prepare_growth, whole_or_void
from mupscale.planning import in_float64, take_modes
from mupscale.system import MupscaleError, checks_arguments

SAME = 1e-9
_OURS = (Copies, Fresh)  # what these write has been checked before


@checks_arguments
@torch.no_grad()
def widen(narrow: Tensors, wide: nn.Module, plan: Plan) -> nn.Module:
    """Write the narrow model (a module or a state dict), copied, into the wide one in place, and return it.

    Step 1 of Meta-algorithm 'Upscaling procedure'. A wide model on the meta device is given memory first, on the narrow
    one's device.

    >>> import mupscale as mu
    >>> from mupscale.models import MLP
    >>> narrow, wide = MLP(3, 8, 2).double(), MLP(3, 32, 2).double()
    >>> x = torch.randn(5, 3, dtype=torch.float64)
    >>> torch.allclose(narrow(x), mu.widen(narrow, wide, mu.plan(narrow, wide))(x))
    True
    """
    check_operator(Copies(), plan)
    return write_grown(prepare_growth(narrow, wide, plan), wide, plan, Copies())


@torch.no_grad()
def write_grown(
    sources: Mapping[str, Tensor], wide: nn.Module, plan: Plan, operator: Operator, seed: int = 0
) -> nn.Module:
    """Have the operator write the narrow tensors that `prepare_growth` gave into the wide model, and return it.

    What an operator of the user's own writes is looked at first: where it is not whole, the model stays as it was. A
    model that was being written when something failed is void: its numbers are NaN, and the error says so.
    """
    targets, staged = {**naming.buffers(wide), **naming.parameters(wide)}, dict[str, Tensor]()
    kept = {
        name: targets[name].detach()[chosen]
        for name in plan.parameters
        if (chosen := drawn_entries(name, plan)) is not None
    }
    with whole_or_void(wide) if type(operator) in _OURS else nullcontext():
        for name in (*plan.parameters, *plan.buffers):
            method = operator.parameter if name in plan.parameters else operator.buffer
            if name in targets and name in sources and plan.sources[name].is_taken:
                _write(sources[name], targets[name], Part(name, plan, seed), operator, method, staged)
    with whole_or_void(wide):
        for name, tensor in staged.items():
            copy_into(targets[name], tensor)
        for name, values in kept.items():
            targets[name].detach()[drawn_entries(name, plan)] = values
        for name, source in plan.sources.items():
            if source.kind == "silent":
                targets[name].fill_(source.value)
            if isinstance(sources.get(name), nn.Parameter):
                targets[name].requires_grad_(sources[name].requires_grad)  # what is frozen stays so
    return wide


def _write(
    source: Tensor,
    target: Tensor,
    part: Part,
    operator: Operator,
    method: Callable[[Tensor, Tensor, Part], None],
    staged: dict[str, Tensor],
) -> None:
    source = gather_whole(source.detach()).expand(part.entry.narrow)  # of stacked copies, a view of the one
    ours = type(operator) in _OURS
    if ours and not is_sharded(target) and source.device == target.device:
        method(target.detach(), source, part)
        return
    has_values = part.name in part.plan.buffers or part.name in part.plan.patterned
    out = (
        gather_whole(target.detach()).to(source.device, copy=True)
        if has_values
        else unwritten(part.entry.wide, target.dtype, source.device, operator)
    )
    method(out, source, part)
    if ours:
        copy_into(target, out)
    else:
        check_written(part.name, out, operator)
        staged[part.name] = out


def drawn_entries(name: str, plan: Plan) -> Tensor | None:
    """Of a parameter that is a copy in part, which entries are drawn afresh; None of any other. It goes by its name."""
    source, shape = plan.sources[name], plan[name].wide
    if source.kind != "expert" or not source.value:
        return None
    return standard_normal(shape, torch.float32, 0, f"drawn {name}") < NormalDist().inv_cdf(source.value)


def unwritten(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, operator: Operator) -> Tensor:
    """Memory for an operator to fill; NaN all over, where it is not one of ours."""
    if type(operator) in _OURS or not dtype.is_floating_point:
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.full(shape, float("nan"), dtype=dtype, device=device)


def check_written(name: str, out: Tensor, operator: Operator) -> None:
    """An error where an operator has left entries unwritten, or has written NaN."""
    if type(operator) not in _OURS and bool(out.isnan().any()):
        raise MupscaleError(
            f"{type(operator).__name__} left entries of '{name}' unwritten (or wrote NaN). An operator must fill the "
            "whole tensor. Nothing has been changed"
        )


def grown_in_float64(
    narrow: nn.Module, wide: nn.Module, plan: Plan, inputs: Any, operator: Operator, generic: int | None = None
) -> tuple[nn.Module, nn.Module, Any]:
    """Copies of both models in float64, the wide one grown from the narrow one, and the batch for them.

    The models themselves stay as they are. generic: the seed of weights that no symmetry is in.
    """
    small, batch = in_float64(narrow, inputs, generic=generic)
    large, _ = in_float64(wide, inputs)
    take_modes(large, narrow, plan)
    return small, write_grown(prepare_growth(small, large, plan), large, plan, operator), batch


def distance(before: Tensor, after: Tensor) -> float:
    """How far two tensors lie apart, by the size of the first; `SAME` is what rounding leaves in float64."""
    if before.shape != after.shape:
        return math.inf
    before, after = before.detach(), after.detach()
    return float((after - before).abs().max()) / (1 + float(before.abs().max())) if before.numel() else 0.0
