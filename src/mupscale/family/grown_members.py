"""A member of a family grown into a larger one: built, planned, tried on a batch if there is one, and written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from mupscale.core import Plan, WidthLike, naming
from mupscale.family.width_members import WidthMembers
from mupscale.growth import Operator, choose_operator, dress_like, has_unsaved_widths, upscale_by_plan
from mupscale.planning import all_tensors, check_not_empty, check_plan_by_running, check_silent_units

Deepening = Callable[[nn.Module], tuple[nn.Module, Plan]]
"""From a model, which may be without memory, to the one with more blocks, and the plan of these."""


def grow_member(
    family: WidthMembers,
    model: nn.Module,
    optimizer: Optimizer | None,
    width: WidthLike | None,
    deepen: Deepening | None,
    grow: Operator,
    lr: float | None,
    seed: int,
    place: Callable[[nn.Module], nn.Module] | None,
    inputs: Any,
) -> tuple[nn.Module, Optimizer | None]:
    """The model and its optimizer at this width, and with more blocks; the other arguments are `Family.upscale`'s.

    family: of the widths at the model's depth. The width comes first, so that new blocks are drawn at the new one.
    """
    check_not_empty(inputs)
    narrow, plan = naming.unwrap(model), None
    large = narrow
    if width is not None:
        large, plan = _wider(family, model, width, grow, inputs)
        if deepen is None and plan.mup and plan.patterned:
            large = family.init_untried(width, seed)
        if deepen is None:  # copies have been tried on the batch
            inputs = None if grow.needs_multiples else family.inputs if inputs is None else inputs
    if deepen is not None:
        large, blocks = deepen(large)
        plan = blocks if plan is None else replace(plan.then(blocks), tried_by=plan.tried_by)
        grow = grow if width is not None else choose_operator(None, plan=blocks)
    assert plan is not None
    dress_like(large, narrow, None if deepen is None else plan)
    if place is not None:
        large = place(large)
    return upscale_by_plan(narrow, large, plan, optimizer, grow, lr, seed, inputs)


def _wider(
    family: WidthMembers, model: nn.Module, width: WidthLike, grow: Operator, inputs: Any
) -> tuple[nn.Module, Plan]:
    """The wide model, without memory if that will do, and the plan, tried on a batch if there is one."""
    wide = family.sketch(width)
    fresh = not grow.needs_multiples and _has_growing_buffers(wide, model)
    if fresh or naming.plain_tensors_without_memory(wide) or has_unsaved_widths(wide, model):  # which lacks values
        wide = _with_memory(family, width)
    plan = family.widening(model, wide, grow=grow)
    if inputs is not None and (grow.needs_multiples or not plan.checked):
        has_memory = not any(tensor.is_meta for tensor in all_tensors(wide).values())
        check = check_plan_by_running if grow.needs_multiples else check_silent_units
        check(model, wide if has_memory else _with_memory(family, width), plan, inputs)
        plan = replace(plan, tried_by="copies" if grow.needs_multiples else "silent units")
    return wide, plan


def _has_growing_buffers(wide: nn.Module, narrow: nn.Module) -> bool:
    """Whether buffers grow whose values for new units a model with memory alone shows; statistics start anew."""
    ours, modules = naming.buffers(narrow), naming.modules(wide)
    growing = [n for n, b in naming.buffers(wide).items() if b.is_meta and n in ours and b.shape != ours[n].shape]
    return any(not isinstance(modules[n.rpartition(".")[0]], nn.modules.batchnorm._NormBase) for n in growing)


def _with_memory(family: WidthMembers, width: WidthLike) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        return family.build(width)
