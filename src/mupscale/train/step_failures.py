"""Why a training step could not be taken: the model, the loss or the optimizer, and what they were given."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mupscale.system import MupscaleError, is_out_of_memory
from mupscale.train.loss_functions import find_logits
from mupscale.train.recipe import Recipe

_LONGEST = 300


@contextmanager
def explain_loss(recipe: Recipe, model: nn.Module, x: Tensor, y: Tensor) -> Iterator[None]:
    """While the loss of a batch is computed: an error tells whether model or loss failed, and on what.

    >>> from mupscale.train import Spec
    >>> model, data = Spec("mupscale.models.MLP", {"d_in": 54, "d_out": 7}), Spec("mupscale.data.CoverTypeSample")
    >>> recipe = Recipe(model, data, Spec("torch.optim.SGD", {"lr": 0.1}), width=8, base=8, steps=1, batch=2)
    >>> with explain_loss(recipe, nn.Identity(), torch.zeros(2, 7), torch.tensor([3, 9])):
    ...     nn.functional.cross_entropy(torch.zeros(2, 7), torch.tensor([3, 9]))
    Traceback (most recent call last):
    mupscale.system.errors.MupscaleError: the loss mupscale.train.cross_entropy cannot take outputs of shape (2, 7) ...
    """
    try:
        yield
    except Exception as error:
        if _is_no_mistake(error):
            raise
        raise MupscaleError(_which_failed(recipe, model, x, y, error)) from error


def check_loss(recipe: Recipe, loss: Any) -> None:
    """One number, which depends on the model's weights.

    >>> from mupscale.train import Spec
    >>> model, data = Spec("mupscale.models.MLP", {"d_in": 54, "d_out": 7}), Spec("mupscale.data.CoverTypeSample")
    >>> recipe = Recipe(model, data, Spec("torch.optim.SGD", {"lr": 0.1}), width=8, base=8, steps=1, batch=2)
    >>> check_loss(recipe, torch.zeros(3))
    Traceback (most recent call last):
    mupscale.system.errors.MupscaleError: the loss mupscale.train.cross_entropy gives shape (3,), not one number
    """
    if not isinstance(loss, Tensor):
        raise MupscaleError(f"the loss {recipe.loss} gives a {type(loss).__name__}, not a tensor of one number")
    if loss.dim():
        raise MupscaleError(f"the loss {recipe.loss} gives shape {tuple(loss.shape)}, not one number")
    if not loss.requires_grad:
        raise MupscaleError(
            f"the loss {recipe.loss} does not depend on the model's weights, so the model cannot learn from it"
        )


@contextmanager
def explain_step(recipe: Recipe, rate: float) -> Iterator[None]:
    """While the optimizer takes a step: an error names it and its learning rate.

    >>> from mupscale.train import Spec
    >>> model, data = Spec("mupscale.models.MLP", {"d_in": 54, "d_out": 7}), Spec("mupscale.data.CoverTypeSample")
    >>> recipe = Recipe(model, data, Spec("torch.optim.SGD", {"lr": 1e300}), width=8, base=8, steps=1, batch=2)
    >>> with explain_step(recipe, 1e300):
    ...     torch.zeros(1).add_(torch.ones(1), alpha=1e300)
    Traceback (most recent call last):
    mupscale.system.errors.MupscaleError: torch.optim.SGD cannot take a step with a learning rate of 1e+300: value ...
    """
    try:
        yield
    except Exception as error:
        if _is_no_mistake(error):
            raise
        raise MupscaleError(
            f"{recipe.optimizer.class_path} cannot take a step with a learning rate of {rate:g}: {_reason(error)}"
        ) from error


def _is_no_mistake(error: Exception) -> bool:
    """What is told as it is: sentences, memory and disks that are full, and devices that broke."""
    return isinstance(error, MupscaleError | OSError | torch.AcceleratorError) or is_out_of_memory(error)


def _which_failed(recipe: Recipe, model: nn.Module, x: Tensor, y: Tensor, error: Exception) -> str:
    if dist.is_available() and dist.is_initialized():  # the others would not call the model with this one
        return f"the loss {recipe.loss} of inputs {_shown(x)} and targets {_shown(y)} failed: {_reason(error)}"
    try:
        with torch.no_grad():
            outputs = model(x)
    except Exception:
        return f"the model {recipe.model.class_path} cannot take inputs {_shown(x)}: {_reason(error)}"
    logits = find_logits(outputs)
    given = f"a {type(outputs).__name__}" if logits is None else f"outputs of shape {tuple(logits.shape)}"
    return f"the loss {recipe.loss} cannot take {given} and targets {_shown(y)}: {_reason(error)}"


def _shown(values: Tensor) -> str:
    """A tensor's shape, and the range of whole numbers: labels and tokens may lie outside of what a model knows."""
    shape = f"of shape {tuple(values.shape)}"
    if values.is_floating_point() or not values.numel():
        return shape
    return f"{shape} from {int(values.min())} to {int(values.max())}"


def _reason(error: Exception) -> str:
    said = " ".join(str(error).split())[:_LONGEST]
    return f"{type(error).__name__}: {said}" if not isinstance(error, RuntimeError) else said or type(error).__name__
