"""What a step computes: the loss of a batch in the recipe's precision, compiled or not; and the held-out loss."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mupscale.data import Data
from mupscale.system import MupscaleError, is_out_of_memory
from mupscale.train.loss_functions import count_correct, find_logits
from mupscale.train.processes import Processes
from mupscale.train.recipe import Recipe

_LONGEST = 300  # characters of somebody else's error


@contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """Let float32 matrix products use TF32 for the recipe's tf32 and bf16; as it was before, afterwards."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision in ("tf32", "bf16") else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def cast_input(x: Tensor, recipe: Recipe) -> Tensor:
    """Continuous inputs in the precision of the weights, whatever the data gives; whole numbers stay as they are."""
    return x.to(recipe.dtype()) if x.is_floating_point() else x


def _autocast(recipe: Recipe, device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=recipe.precision == "bf16")


def make_objective(runner: nn.Module, recipe: Recipe, device: torch.device) -> Callable[[Tensor, Tensor], Tensor]:
    """The loss of the model's outputs as a function of inputs and targets; where it fails it says model or loss."""
    loss = recipe.loss_function()

    def compute(x: Tensor, y: Tensor) -> Tensor:
        with _autocast(recipe, device):
            return loss(runner(x), y)

    mode = recipe.compile_mode()
    compiled = compute if mode is None else compile_quietly(compute, mode=mode)

    def objective(x: Tensor, y: Tensor) -> Tensor:
        x = cast_input(x, recipe)
        with explaining(lambda: _what_failed(recipe, runner, x, y)):
            value = compiled(x, y)
        if not isinstance(value, Tensor):
            raise MupscaleError(f"the loss {recipe.loss} gives a {type(value).__name__}, not a tensor of one number")
        if value.dim():
            raise MupscaleError(f"the loss {recipe.loss} gives shape {tuple(value.shape)}, not one number")
        if not value.requires_grad:
            raise MupscaleError(
                f"the loss {recipe.loss} does not depend on the model's weights, so the model cannot learn from it"
            )
        return value

    return objective


def compile_quietly(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """torch.compile without its advice: the recipe says the precision, and softmax is as fast as it gets.

    Nor does it warn of the empty graph with which torch's own CUDA graphs begin.
    """
    for advice in (r"\s*Online softmax is disabled", "TensorFloat32 tensor cores", "The CUDA Graph is empty"):
        warnings.filterwarnings("ignore", advice, UserWarning)
    compiled: Callable[..., Any] = torch.compile(function, **options)
    return compiled


@contextmanager
def explaining(what: Callable[[], str]) -> Iterator[None]:
    """Say what failed before an error's own words, unless it is a sentence, or of memory, a disk or a device."""
    try:
        yield
    except Exception as error:
        if isinstance(error, MupscaleError | OSError | torch.AcceleratorError) or is_out_of_memory(error):
            raise
        said = " ".join(str(error).split())[:_LONGEST]
        kind = type(error).__name__
        reason = said or kind if isinstance(error, RuntimeError) else f"{kind}: {said}"
        raise MupscaleError(f"{what()}: {reason}") from error


def _what_failed(recipe: Recipe, model: nn.Module, x: Tensor, y: Tensor) -> str:
    """The model or the loss, and what it was given."""
    if dist.is_available() and dist.is_initialized():  # the others would not call the model with this one
        return f"the loss {recipe.loss} of inputs {_shown(x)} and targets {_shown(y)} failed"
    try:
        with torch.no_grad():
            outputs = model(x)
    except Exception:
        return f"the model {recipe.model.class_path} cannot take inputs {_shown(x)}"
    logits = find_logits(outputs)
    given = f"a {type(outputs).__name__}" if logits is None else f"outputs of shape {tuple(logits.shape)}"
    return f"the loss {recipe.loss} cannot take {given} and targets {_shown(y)}"


def _shown(values: Tensor) -> str:
    """A tensor's shape, and the range of whole numbers: labels and tokens may lie outside of what a model knows."""
    shape = f"of shape {tuple(values.shape)}"
    if values.is_floating_point() or not values.numel():
        return shape
    return f"{shape} from {int(values.min())} to {int(values.max())}"


@torch.no_grad()
def evaluate(model: nn.Module, data: Data, recipe: Recipe, processes: Processes) -> dict[str, float]:
    """Mean loss over the evaluation set, and the accuracy where targets are classes; every process has its part."""
    loss_of, device = recipe.loss_function(), processes.device
    totals = torch.zeros(4, dtype=torch.float64, device=device)  # loss, examples, correct, targets
    processes.share_buffers(model)
    model.eval()
    try:
        for x, y in data.evaluation(recipe.evaluation.batch or recipe.batch):
            mine = slice(len(x) * processes.rank // processes.world, len(x) * (processes.rank + 1) // processes.world)
            part_x, part_y, weight = x[mine], y[mine], 1.0
            if not len(part_x):  # all processes must take part, those without an example, too
                part_x, part_y, weight = x[:1], y[:1], 0.0
            with _autocast(recipe, device):
                outputs = model(cast_input(part_x, recipe))
                loss = loss_of(outputs, part_y)
            right = count_correct(outputs, part_y)
            answers = (0, 0) if right is None else (right, part_y.numel())
            counts = [loss.double() * len(part_x), len(part_x), *answers]
            totals += weight * torch.stack([torch.as_tensor(c, dtype=torch.float64, device=device) for c in counts])
    finally:
        model.train()
        processes.reshard(model)
    return scores_of(processes.sum(totals).tolist())


def scores_of(totals: list[float]) -> dict[str, float]:
    """The mean loss and the accuracy, from the sums of losses and examples, of right answers and of targets."""
    loss, examples, right, targets = totals
    return {"loss": loss / examples, **({"accuracy": right / targets} if targets else {})}
