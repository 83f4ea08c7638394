"""Does the wide model compute, and go on computing, what the narrow one does? And if not, where does it begin?

A static check never suffices (grouped-query heads copied wrongly pass it), so equivalence is shown over
optimizer steps: Theorem 'Dynamic equivalence' as a test that anyone can run on their own model.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from mupscale.checks.differences import (
    ROUNDING,
    Difference,
    first_differing_module,
    first_wrong_buffer,
    relative_difference,
    worst_parameter,
)
from mupscale.checks.recorder import Recorder
from mupscale.core import Plan, naming
from mupscale.growth import grow_optimizer, keep_base_shape
from mupscale.optim import clip_grad_norm_
from mupscale.planning import silence_dropout
from mupscale.system import MupscaleError

Loss = Callable[[nn.Module, Any], Tensor]
_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}


@dataclass(frozen=True)
class Report:
    """Relative output differences before each step, both losses, and the first difference if there is one."""

    differences: list[float]
    losses: list[tuple[float, float]]
    tolerance: float
    first: Difference | None = None

    @property
    def max_relative_difference(self) -> float:
        """The largest over all steps."""
        return max(self.differences)

    @property
    def ok(self) -> bool:
        """Whether the two models agree at every step, in their buffers, too."""
        return self.max_relative_difference <= self.tolerance and self.first is None

    def __str__(self) -> str:
        steps = len(self.differences) - 1
        verdict = "equivalent" if self.ok else "NOT equivalent"
        head = (
            f"{verdict}: largest relative output difference {self.max_relative_difference:.1e} over {steps} steps "
            f"(tolerance {self.tolerance:.0e}), loss {self.losses[0][0]:.4g} → {self.losses[-1][0]:.4g}"
        )
        return head if self.first is None else f"{head}\n{self.first}"


def verify(
    narrow: nn.Module,
    wide: nn.Module,
    plan: Plan,
    batches: Iterable[Any],
    loss: Loss,
    *,
    optimizer: Optimizer | type[Optimizer] | None = None,
    steps: int = 20,
    clip: float | None = None,
    schedule: Callable[[Optimizer], LRScheduler] | None = None,
    tolerance: float | None = None,
    **hyper: Any,
) -> Report:
    """Train copies of both models side by side and compare their outputs before every step and after the last.

    loss(model, batch) gives the training loss; batches are used in turn, again from the start if they run out.
    optimizer: the narrow model's own (its state goes along), or a class with its hyperparameters; None checks the
    outputs only. clip: width-invariant clipping in both. The models given are not changed.

    >>> import mupscale as mu
    >>> from mupscale.models import MLP
    >>> narrow, wide, x = MLP(3, 4, 1).double(), MLP(3, 8, 1).double(), torch.ones(2, 3, dtype=torch.float64)
    >>> plan = mu.plan(narrow, wide)
    >>> loss = lambda model, batch: model(batch).square().mean()
    >>> wide = mu.widen(narrow, wide, plan)
    >>> mu.verify(narrow, wide, plan, [x], loss, optimizer=torch.optim.Adam, lr=0.01, steps=3).ok
    True
    """
    data = list(itertools.islice(batches, steps + 1))
    if not data:
        raise MupscaleError("verify needs at least one batch")
    pair = _Pair.of(narrow, wide, plan, optimizer, schedule, hyper)
    tolerance = _tolerance(pair.small) if tolerance is None else tolerance
    differences, losses = list[float](), list[tuple[float, float]]()
    first: Difference | None = None
    for step in range((steps if pair.optimizers else 0) + 1):
        batch = data[step % len(data)]
        with Recorder(pair.small) as ours, Recorder(pair.large) as theirs:
            values = loss(pair.small, batch), loss(pair.large, batch)
        differences.append(_output_difference(ours, theirs))
        losses.append((values[0].item(), values[1].item()))
        if first is None:
            first = _first_difference(pair, ours, theirs, step, differences[-1], tolerance)
        if pair.optimizers and step < steps:
            pair.step(values, clip)
    return Report(differences, losses, tolerance, first)


@dataclass(frozen=True)
class _Pair:
    """Copies of both models, without dropout, that are trained side by side; no optimizers where none is given."""

    small: nn.Module
    large: nn.Module
    plan: Plan
    optimizers: Sequence[Optimizer]
    schedulers: Sequence[LRScheduler]

    @classmethod
    def of(
        cls,
        narrow: nn.Module,
        wide: nn.Module,
        plan: Plan,
        optimizer: Optimizer | type[Optimizer] | None,
        schedule: Callable[[Optimizer], LRScheduler] | None,
        hyper: dict[str, Any],
    ) -> _Pair:
        plan.check(narrow, "narrow")
        plan.check(wide)
        if isinstance(optimizer, Optimizer):
            small, small_optimizer = _copy(narrow, optimizer)
        else:
            small, _ = _copy(narrow)
            small_optimizer = None if optimizer is None else optimizer(small.parameters(), **hyper)
        large, _ = _copy(wide)
        for model in (small, large):
            silence_dropout(model)
        optimizers = list[Optimizer]()
        if small_optimizer is not None:
            optimizers = [small_optimizer, grow_optimizer(small_optimizer, small, large, plan)]
        schedulers = [schedule(each) for each in optimizers] if schedule is not None else []
        return cls(small, large, plan, optimizers, schedulers)

    def step(self, losses: Sequence[Tensor], clip: float | None) -> None:
        """One step of both optimizers and schedulers."""
        for model, optimizer, loss in zip((self.small, self.large), self.optimizers, losses, strict=True):
            optimizer.zero_grad()
            loss.backward()
            if clip is not None:
                _clip(model, clip, self.plan, wide=model is self.large)
            optimizer.step()
        for scheduler in self.schedulers:
            scheduler.step()


def _copy(model: nn.Module, optimizer: Optimizer | None = None) -> tuple[nn.Module, Optimizer | None]:
    """Copies of a model and of the optimizer that holds its parameters; deepcopy leaves out base shapes."""
    original = naming.unwrap(model)
    copied, its_optimizer = copy.deepcopy((original, optimizer))
    for old, new in zip(original.parameters(), copied.parameters(), strict=True):
        keep_base_shape(old, new)
    return copied, its_optimizer


def _clip(model: nn.Module, max_norm: float, plan: Plan, *, wide: bool) -> None:
    if wide:
        clip_grad_norm_(model, max_norm, plan)
    else:
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)


def _tolerance(model: nn.Module) -> float:
    dtype = next((p.dtype for p in model.parameters()), torch.float32)
    return _TOLERANCE.get(dtype, 5e-2)


def _output_difference(small: Recorder, large: Recorder) -> float:
    """Of the two models' own outputs."""
    if "" not in small.outputs or "" not in large.outputs:
        raise MupscaleError("loss(model, batch) must call the model, and the model must return a tensor first")
    ours, theirs = small.outputs[""], large.outputs[""]
    if ours.shape != theirs.shape:
        raise MupscaleError(
            f"the models' outputs have shapes {tuple(ours.shape)} and {tuple(theirs.shape)}; "
            f"verify needs models whose output does not grow with the width"
        )
    return relative_difference(ours, theirs)


def _first_difference(
    pair: _Pair, ours: Recorder, theirs: Recorder, step: int, difference: float, tolerance: float
) -> Difference | None:
    """Where the models begin to differ, if their outputs (by `difference`) or, before any update, their buffers do."""
    if not difference <= tolerance:
        worst = worst_parameter(pair.small, pair.large, pair.plan, tolerance) if step else None
        level = max(tolerance, min(ROUNDING, difference / 1000))  # not the first that merely rounds
        first = worst or first_differing_module(ours, theirs, pair.plan, level)
        if first is not None:
            return first
    return None if step else first_wrong_buffer(pair.small, pair.large, pair.plan, tolerance)
