"""What a step computes: the loss of a batch in the recipe's precision, compiled or not; and the held-out loss.

And what a run does where a number is not finite: it stops, leaves the step out, or goes back and takes other data.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from mupscale.core import local_part
from mupscale.data import Data
from mupscale.system import MupscaleError, is_out_of_memory
from mupscale.train.processes import Processes
from mupscale.train.recipe import Recipe


def cross_entropy(outputs: Any, targets: Tensor) -> Tensor:
    """Mean cross-entropy of logits (…, classes) with integer targets (…).

    >>> import torch
    >>> round(float(cross_entropy(torch.zeros(2, 4), torch.tensor([0, 3]))), 4)  # four equal classes: log 4
    1.3863
    """
    logits = find_logits(outputs)
    if logits is None:
        raise MupscaleError(
            f"cross_entropy is for outputs that are a tensor, or have one as `logits`, not for a "
            f"{type(outputs).__name__}: give your own loss (loss: your.module.function)"
        )
    if targets.is_floating_point():
        raise MupscaleError(
            f"cross_entropy is for classes, but the targets are numbers ({targets.dtype}): for regression give a loss "
            f"such as loss: torch.nn.functional.mse_loss; for classes, targets of whole numbers"
        )
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def find_logits(outputs: Any) -> Tensor | None:
    """A model's output: a tensor, or an object that keeps it as `logits`, as transformers' models do."""
    logits = outputs if isinstance(outputs, Tensor) else getattr(outputs, "logits", None)
    return logits if isinstance(logits, Tensor) else None


def count_correct(outputs: Any, targets: Tensor) -> Tensor | None:
    """How many targets are the class with the largest logit; None where outputs are not logits of classes."""
    logits = find_logits(outputs)
    if logits is None or targets.is_floating_point() or logits.shape[:-1] != targets.shape:
        return None
    return (logits.argmax(-1) == targets).sum()


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
    loss, examples, right, targets = totals
    return {"loss": loss / examples, **({"accuracy": right / targets} if targets else {})}


class MetricSeries:
    """A number per step, fetched from the device and averaged over processes only when somebody looks."""

    def __init__(self, processes: Processes) -> None:
        self.processes = processes
        self.pending: list[Tensor] = []
        self.settled: list[float] = []
        self.finite = True  # whether everything fetched so far is

    def add(self, value: Tensor) -> None:
        self.pending.append(value)

    def settle(self) -> None:
        if self.pending:
            values = torch.stack([value.detach() for value in self.pending]).double().to(self.processes.device)
            settled = self.processes.mean(values).tolist()
            self.finite = self.finite and all(map(math.isfinite, settled))
            self.settled += settled
            self.pending = []

    def diverged_at(self, step: int) -> int:
        """The step whose number is the first that is not finite, if the last one is that of `step`; or the next."""
        first = next((i for i, value in enumerate(self.settled) if not math.isfinite(value)), len(self.settled))
        return step - len(self.settled) + first + 1

    def flush(self) -> float:
        """The mean of what is settled, which is then forgotten; no number where every step was left out."""
        mean = exact_mean(self.settled)
        self.settled = []
        return mean


def exact_mean(numbers: list[float]) -> float:
    """The mean to the last bit, whatever the order; no number of none."""
    return math.fsum(numbers) / len(numbers) if numbers else math.nan


MOST_IN_A_ROW = 10
"""Steps that may be left out, or times that a run may go back, without any progress between them."""


class NonfiniteSteps:
    """The rule of a recipe (`on_nonfinite`), and how often it has been needed since the last progress."""

    def __init__(self, rule: Literal["stop", "skip", "rewind"]) -> None:
        self.rule = rule
        self.in_a_row = 0
        self._reached = (-1, 0)  # the step that a run went back to, and the batches left out there

    @property
    def is_hopeless(self) -> bool:
        return self.rule == "skip" and self.in_a_row >= MOST_IN_A_ROW

    def keep_buffers(self, model: nn.Module) -> list[tuple[Tensor, Tensor]]:
        return [(buffer, buffer.clone()) for buffer in model.buffers()] if self.rule == "skip" else []

    @torch.no_grad()
    def must_skip(
        self, loss: Tensor, model: nn.Module, kept: Iterable[tuple[Tensor, Tensor]], processes: Processes
    ) -> bool:
        """Whether the rule "skip" leaves this step out; buffers are then as they were. It waits for the device."""
        # their squares, too: Adam keeps those, and they overflow first
        gradients = [local_part(p.grad) for p in model.parameters() if p.grad is not None]
        (broken,) = processes.any(not (loss.isfinite() and largest_entry(gradients).square().isfinite()))
        self.in_a_row = self.in_a_row + 1 if broken else 0
        if broken:
            for buffer, before in kept:
                buffer.copy_(before)
        return broken

    def may_rewind(self) -> bool:
        return self.rule == "rewind" and self.in_a_row < MOST_IN_A_ROW

    def note_rewind(self, bad: int, good: int, left_out: int) -> int:
        """Count a return from one step to another; how many batches of the data are left out from then on.

        left_out: those that were when the checkpoint was written. Back at the same place again, the run goes on behind
        all that it has tried there.
        """
        place, tried = self._reached
        if place == good:
            self.in_a_row, left_out = self.in_a_row + 1, max(left_out, tried)
        else:
            self.in_a_row = 1
        self._reached = (good, left_out + bad - good)
        return self._reached[1]


def largest_entry(tensors: Iterable[Tensor]) -> Tensor:
    """The size of the largest, which is finite where all are; some processes may hold nothing of a small tensor."""
    return nn.utils.get_total_norm([part for part in tensors if part.numel()], math.inf)


@torch.no_grad()
def has_finite_state(model: nn.Module, optimizer: Optimizer, processes: Processes) -> bool:
    """Whether all weights and optimizer state are finite, in every process; buffers may be masks, which are not."""
    parts: list[Tensor] = list(model.parameters())
    for values in optimizer.state.values():
        parts += [v for v in values.values() if isinstance(v, Tensor)] if isinstance(values, Mapping) else []
    local = (local_part(part.detach()) for part in parts if part.is_floating_point())
    (broken,) = processes.any(not largest_entry(local).isfinite())
    return not broken
