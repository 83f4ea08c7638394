"""The plan read off the computation: a zoo of awkward models, each exact over training steps, or refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mupscale as mu
from patterns import PATTERNS, Pattern

LIMITS = {
    "fused heads, dim and number grow, 1/d",
    "heads split and stacked along the batch",
    "experts, dense gate, their number grows",
    "outer product of units with themselves, flattened",
    "image, products of channels, flattened",
    "image, half of the channels pass, shuffled",
    "image, kernels mixed for each example, groups of the batch",
    "across units, a drawn order",
    "as the output, log of the mean of exp",
}
"""Models that could be widened exactly, and that the plan by running refuses: two sizes grow in one flattened axis, halves
that are copied in different orders, more operations in the wide model, units in an order that is drawn, or a constant
that is added and then taken off."""


def loss(model: nn.Module, batch: tuple[Any, ...]) -> Tensor:
    output = model(*batch)
    output = output[0] if isinstance(output, tuple) else output
    target = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)
    return (output - target).square().mean()


def doubled(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs)


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: pattern.name)
def test_exact_over_training_steps_or_refused(pattern: Pattern) -> None:
    torch.manual_seed(0)
    narrow, wide, inputs = pattern.build(1).double(), pattern.build(2).double(), doubled(pattern.inputs())
    if pattern.expected == "refused" or pattern.name in LIMITS:
        with pytest.raises(mu.MupscaleError, match="no copies|times|same operations|random|orders|grows along|wrong"):
            mu.plan(narrow, wide, inputs=inputs)
        return
    try:
        plan = mu.plan(narrow, wide, inputs=inputs)
    except mu.MupscaleError:
        if pattern.expected == "either":
            return
        raise
    wide = mu.widen(narrow, wide, plan)
    report = mu.verify(
        narrow,
        wide,
        plan,
        [inputs],
        loss,
        optimizer=torch.optim.AdamW,
        lr=1e-3,
        weight_decay=0.1,
        eps=1e-3,
        clip=0.5,
        steps=10,
        tolerance=1e-8,
    )
    assert report.ok, str(report)


def test_the_zoo_is_large() -> None:
    assert len(PATTERNS) >= 120
    assert len({pattern.name for pattern in PATTERNS}) == len(PATTERNS)
    assert {pattern.name for pattern in PATTERNS} >= LIMITS


def test_a_wrong_order_of_copies_is_not_let_through() -> None:
    """What the check at the end is for: heads copied unit by unit give other outputs."""
    from mupscale.planning.from_run import check_plan_by_running

    pattern = next(p for p in PATTERNS if p.name == "separate heads grow")
    narrow, wide, inputs = pattern.build(1), pattern.build(2), pattern.inputs()
    plan = mu.plan(narrow, wide, inputs=inputs)
    check_plan_by_running(narrow, wide, plan, inputs)
    name = next(name for name, entry in plan.parameters.items() if any(a.block > 1 for a in entry.axes.values()))
    entry = plan.parameters[name]
    from dataclasses import replace

    broken = replace(entry, axes={d: mu.Axis(axis.times) for d, axis in entry.axes.items()})
    wrong = replace(plan, parameters={**plan.parameters, name: broken})
    with pytest.raises(mu.MupscaleError, match="wrong"):
        check_plan_by_running(narrow, wide, wrong, inputs)


def test_the_models_are_not_changed() -> None:
    pattern = PATTERNS[0]
    narrow, wide = pattern.build(1), pattern.build(2)
    before = copy.deepcopy((narrow.state_dict(), wide.state_dict()))
    mu.plan(narrow, wide, inputs=pattern.inputs())
    for state, old in zip((narrow.state_dict(), wide.state_dict()), before, strict=True):
        assert all(torch.equal(value, old[name]) for name, value in state.items())
