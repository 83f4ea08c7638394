"""Whether a wide model goes on exactly as the narrow one does, for models that take and give whatever they like."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import mupscale as mu
from mupscale.checks.equivalence import Report
from mupscale.planning import call_arguments, tensors_in


def distance_to_a_line(model: nn.Module, batch: Any) -> Tensor:
    """The mean square distance of the first output to numbers from -1 to 1, as a loss."""
    args, kwargs = call_arguments(batch)
    output = next(t for t in tensors_in(model(*args, **kwargs)) if t.is_floating_point())
    target = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)
    return (output - target).square().mean()


def assert_exact(narrow: nn.Module, wide: nn.Module, plan: mu.Plan, inputs: Any) -> None:
    """Widen, and compare over five steps of AdamW with decay, eps and clipping that matter, in float64."""
    wide = mu.widen(narrow, wide, plan)
    adamw = {"optimizer": torch.optim.AdamW, "lr": 1e-3, "weight_decay": 0.1, "eps": 1e-3}
    report = mu.verify(narrow, wide, plan, [inputs], distance_to_a_line, clip=0.5, steps=5, tolerance=1e-8, **adamw)
    assert report.ok, str(report)
    assert report.losses[0] != report.losses[-1], "nothing was trained"


def train_and_widen(
    narrow: nn.Module,
    wide: nn.Module,
    batches: list[Any],
    loss: Callable[[nn.Module, Any], Tensor],
    optimizer: type[torch.optim.Optimizer],
    *,
    hyper: dict[str, float],
    static: bool = False,
    **plan: Any,
) -> Report:
    """Train, widen, and train both on for six steps, or only compare outputs; every parameter plays a part in it."""
    made = optimizer(narrow.parameters(), **hyper)
    for batch in batches[:4]:
        made.zero_grad()
        loss(narrow, batch).backward()
        for name, p in narrow.named_parameters():
            assert p.grad is not None, name
            assert p.grad.abs().max() > 1e-9, f"'{name}' plays no part in this test"
        made.step()
    planned = mu.plan(narrow, wide, **plan)
    mu.widen(narrow, wide, planned)
    return mu.verify(narrow, wide, planned, batches, loss, optimizer=None if static else made, steps=6)


def assert_goes_on(report: Report) -> None:
    """The wide model trains as the narrow one does, whose outputs change visibly meanwhile."""
    assert len(report.differences) == 7
    assert abs(report.losses[0][0] - report.losses[4][0]) > 1e-4 * report.losses[0][0], "the model does not learn"
    assert report.max_relative_difference <= 1e-10, str(report)
