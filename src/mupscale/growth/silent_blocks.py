"""What a batch shows of new blocks that write nothing yet: that they leave the function as it is."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from mupscale.core import Plan, is_sharded
from mupscale.growth.fresh import Fresh
from mupscale.growth.sources import prepare_growth
from mupscale.growth.writing import write_grown
from mupscale.planning import in_float64, run_in_float64, take_modes, tensors_in
from mupscale.system import MupscaleError

_SAME = 1e-9  # of the size of outputs, in float64


@torch.no_grad()
def check_silent_blocks(shallow: nn.Module, deep: nn.Module, plan: Plan, inputs: Any) -> None:
    """An error where the deep model would compute something else although its new blocks write nothing.

    The growth is done on copies in float64; the models stay as they are.

    >>> from mupscale.growth import plan_depth
    >>> from mupscale.models import GPT2
    >>> shallow, deep = (GPT2(11, 8, width=8, head_dim=4, layers=n) for n in (1, 2))
    >>> tokens = torch.zeros(1, 8, dtype=torch.int64)
    >>> check_silent_blocks(shallow, deep, plan_depth(shallow, deep, inputs=tokens), tokens)
    """
    tensors = [*shallow.parameters(), *deep.parameters()]
    if len({t.device for t in tensors}) > 1 or any(t.is_meta or is_sharded(t) for t in tensors):
        return  # which cannot be copied and run on one batch
    small, batch = in_float64(shallow, inputs)
    large, _ = in_float64(deep, inputs)
    take_modes(large, shallow, plan)
    write_grown(prepare_growth(small, large, plan), large, plan, Fresh())

    def outputs(model: nn.Module, seed: int) -> list[Tensor]:
        return [t for t in tensors_in(run_in_float64(model, batch, seed)) if t.is_floating_point()]

    before, after = outputs(small, 0), outputs(large, 0)
    if len(before) != len(after):  # what there is of each block, such as a cache, beside the output
        before, after = before[:1], after[:1]
    far = max(map(_far, before, after), default=0.0)
    if far <= _SAME or max(map(_far, before, outputs(small, 1))) > _SAME:
        return  # what draws random numbers while it runs cannot be compared
    raise MupscaleError(
        f"the deep model's outputs differ by {far:.1g}, although its new blocks write nothing into the residual "
        "stream. Something depends on the number of blocks, or on what a block computes besides its output. Grow by "
        "Stack(), which copies blocks and changes the function"
        if math.isfinite(far)
        else "the deep model's outputs are not finite: it divides by the norm of a weight that is zero in new blocks. "
        "Grow by Stack(), which copies blocks and changes the function"
    )


def _far(before: Tensor, after: Tensor) -> float:
    """How far two tensors lie apart, by the size of the first."""
    if before.shape != after.shape:
        return math.inf
    return float((after - before).abs().max()) / (1 + float(before.abs().max())) if before.numel() else 0.0
