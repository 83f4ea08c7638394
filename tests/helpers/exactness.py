"""Whether a wide model goes on exactly as the narrow one does, for models that take and give whatever they like."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import mupscale as mu
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
