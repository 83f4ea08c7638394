"""In which precision a run computes: matrix products, inputs, the model and its loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mupscale.train.recipe import Recipe


@contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """TF32 where it is asked for, or where autocast leaves something in float32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision in ("tf32", "bf16") else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def cast_input(x: Tensor, recipe: Recipe) -> Tensor:
    """Continuous inputs in the precision of the weights, whatever the data gives; whole numbers stay as they are."""
    return x.to(recipe.dtype()) if x.is_floating_point() else x


def make_objective(
    runner: nn.Module, loss: Callable[[Any, Tensor], Tensor], recipe: Recipe, device: torch.device
) -> Callable[[Tensor, Tensor], Tensor]:
    """The loss of the model's outputs as a function of inputs and targets: autocast and compiled as the recipe says."""
    bf16 = recipe.precision == "bf16"

    def objective(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=bf16):
            return loss(runner(x), y)

    mode = recipe.compile
    return torch.compile(objective, mode="default" if mode is True else mode) if mode else objective
