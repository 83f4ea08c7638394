"""In which precision a run computes: matrix products, inputs, the model and its loss."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mupscale.train.recipe import Recipe


@contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """Let float32 matrix products use TF32 for the recipe's tf32 and bf16; as it was before, afterwards.

    >>> with matmul_precision("tf32"):
    ...     torch.get_float32_matmul_precision()
    'high'
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision in ("tf32", "bf16") else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def cast_input(x: Tensor, recipe: Recipe) -> Tensor:
    """Continuous inputs in the precision of the weights, whatever the data gives; whole numbers stay as they are.

    >>> from mupscale.train import Spec
    >>> recipe = Recipe(
    ...     model=Spec("mupscale.models.MLP", {"d_in": 54, "d_out": 7}),
    ...     data=Spec("mupscale.data.CoverTypeSample"),
    ...     optimizer=Spec("torch.optim.AdamW", {"lr": 1e-3}),
    ...     width=64,
    ...     base=64,
    ...     steps=1,
    ...     batch=1,
    ...     precision="fp64",
    ... )
    >>> cast_input(torch.ones(1), recipe).dtype, cast_input(torch.arange(3), recipe).dtype
    (torch.float64, torch.int64)
    """
    return x.to(recipe.dtype()) if x.is_floating_point() else x


def make_objective(
    runner: nn.Module, loss: Callable[[Any, Tensor], Tensor], recipe: Recipe, device: torch.device
) -> Callable[[Tensor, Tensor], Tensor]:
    """The loss of the model's outputs as a function of inputs and targets: autocast and compiled as the recipe says."""
    bf16 = recipe.precision == "bf16"

    def objective(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=bf16):
            return loss(runner(x), y)

    mode = recipe.compile_mode()
    return objective if mode is None else compile_quietly(objective, mode=mode)


def compile_quietly(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """torch.compile without its advice: the recipe says the precision, and softmax is as fast as it gets.

    Nor does it warn of the empty graph with which torch's own CUDA graphs begin.

    >>> compile_quietly(max).__name__
    'max'
    """
    for advice in (r"\s*Online softmax is disabled", "TensorFloat32 tensor cores", "The CUDA Graph is empty"):
        warnings.filterwarnings("ignore", advice, UserWarning)
    compiled: Callable[..., Any] = torch.compile(function, **options)
    return compiled
