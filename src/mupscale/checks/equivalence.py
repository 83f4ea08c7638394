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

from mupscale.checks.recorder import Recorder, silence_dropout
from mupscale.core import Plan, naming
from mupscale.growth import grow_optimizer, keep_base_shape
from mupscale.optim import clip_grad_norm_
from mupscale.system import MupscaleError

Loss = Callable[[nn.Module, Any], Tensor]
_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}
_ROUNDING = 1e-5  # differences below it may be float32's


@dataclass(frozen=True)
class Difference:
    """The first place where the two models differ, and what usually causes it there."""

    name: str
    kind: str
    relative: float
    advice: str

    def __str__(self) -> str:
        return f"{self.kind} '{self.name}' differs first (by {self.relative:.1e}). {self.advice}"


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


def relative_difference(ours: Tensor, theirs: Tensor) -> float:
    """‖ours − theirs‖ / ‖ours‖, in double precision; infinite if either is not finite."""
    a, b = ours.double(), theirs.double()
    norm = float(a.norm())
    difference = float((a - b).norm())
    value = difference / norm if norm else difference
    return value if value == value else float("inf")


def _first_difference(
    pair: _Pair, ours: Recorder, theirs: Recorder, step: int, difference: float, tolerance: float
) -> Difference | None:
    """Where the models begin to differ, if their outputs (by `difference`) or, before any update, their buffers do."""
    if not difference <= tolerance:
        worst = _worst_parameter(pair.small, pair.large, pair.plan, tolerance) if step else None
        level = max(tolerance, min(_ROUNDING, difference / 1000))  # not the first that merely rounds
        first = worst or first_differing_module(ours, theirs, pair.plan, level)
        if first is not None:
            return first
    return None if step else _first_wrong_buffer(pair.small, pair.large, pair.plan, tolerance)


def _worst_parameter(small: nn.Module, large: nn.Module, plan: Plan, tolerance: float) -> Difference | None:
    """After a step: the parameter that is furthest from the copies it should consist of."""
    worst: tuple[float, str] = (tolerance, "")
    theirs = naming.parameters(large)
    for name, p in naming.parameters(small).items():
        entry = plan.parameters[name]
        expected = entry.widened(p.detach(), torch.empty_like(theirs[name]))
        worst = max(worst, (relative_difference(expected, theirs[name].detach()), name))
    if not worst[1]:
        return None
    return Difference(worst[1], "parameter", worst[0], f"The models agreed until an update: {_ADVICE['update']}")


def _first_wrong_buffer(small: nn.Module, large: nn.Module, plan: Plan, tolerance: float) -> Difference | None:
    """Before any update: a buffer that is not the copies it should be, which only evaluation would show."""
    theirs = naming.buffers(large)
    for name, buffer in naming.buffers(small).items():
        if name in plan.buffers and buffer.is_floating_point():
            expected = plan.buffers[name].widened(buffer, torch.empty_like(theirs[name]), factor=1.0)
            if not torch.allclose(expected, theirs[name], rtol=tolerance, atol=tolerance, equal_nan=True):
                return Difference(name, "buffer", relative_difference(expected, theirs[name]), _ADVICE["buffer"])
    return None


def first_differing_module(ours: Recorder, theirs: Recorder, plan: Plan, tolerance: float) -> Difference | None:
    """The first module, in the order in which they run, whose output in the wide model is not the narrow one's."""
    for path, output in ours.outputs.items():
        if path in theirs.outputs:
            expected, found = _as_copies(output, theirs.outputs[path])
            relative = _up_to_folds(expected, found, plan, path)
            if not relative <= tolerance:
                advice = _constant_factor(expected, found, tolerance) or _advice(path, naming.modules(ours.model)[path])
                if relative < _ROUNDING:
                    advice = f"{_ADVICE['rounding']} {advice}"
                return Difference(path or type(ours.model).__name__, "module", relative, advice)
    return None


def _as_copies(narrow: Tensor, wide: Tensor) -> tuple[Tensor, Tensor]:
    """Copies of the narrow output and the wide output, both in order of size, so that they agree in whatever order."""
    if narrow.dim() != wide.dim():
        return narrow, wide
    expected = narrow
    for d in range(narrow.dim()):
        if narrow.shape[d] and wide.shape[d] % narrow.shape[d] == 0 and wide.shape[d] != narrow.shape[d]:
            expected = expected.repeat_interleave(wide.shape[d] // narrow.shape[d], d).sort(dim=d).values
            wide = wide.sort(dim=d).values
    return expected, wide


def _up_to_folds(expected: Tensor, wide: Tensor, plan: Plan, path: str) -> float:
    if expected.shape != wide.shape:
        return float("inf")
    folds = {1.0, *(float(e.fold) for n, e in plan.parameters.items() if path and n.startswith(f"{path}."))}
    return min(relative_difference(expected * fold, wide) for fold in folds)


def _constant_factor(expected: Tensor, wide: Tensor, tolerance: float) -> str:
    """Advice where the wide output is right up to one factor."""
    if expected.shape != wide.shape:
        return ""
    a, b = expected.double().flatten(), wide.double().flatten()
    factor = float(a @ b / (a @ a)) if float(a @ a) else 0.0
    if factor and factor == factor and relative_difference(a * factor, b) <= tolerance:
        return f"Its output is {factor:.4g} times what it should be. {_ADVICE['factor']}"
    return ""


def _advice(path: str, module: nn.Module) -> str:
    name, place = type(module).__name__.lower(), path.lower()
    if any(word in name or (word in place and not isinstance(module, nn.Linear)) for word in ("attention", "attn")):
        key = "heads"
    elif isinstance(module, nn.Linear):
        key = "flatten"
    elif "norm" in name:
        key = "constant"
    else:
        key = "other"
    return _ADVICE[key]


_ADVICE = {
    "heads": (
        "Usually heads: if their number grows, whole heads must be copied (Role(out_block=head_dim), in_block for the "
        "output projection); if head_dim grows, attention must scale as 1/head_dim. A bias that depends on the number "
        "of heads (ALiBi's slopes) cannot be copied at all."
    ),
    "flatten": (
        "Usually a flatten before it: after convolutions flattened to C·H·W its input is copied in blocks, "
        "roles={'NAME.weight': Role(out=0, in_=1, in_block=H*W)}; else heads that were not "
        "recognised, a tied weight, a bare parameter on the input side (Role(in_=DIM)), or a constant in forward that "
        "depends on the width."
    ),
    "factor": (
        "Usually a constant in forward that depends on the width, such as a division by √width, or a tied readout "
        "whose 1/k is folded into no norm."
    ),
    "constant": "Usually a constant in forward that depends on the width, such as a division by √width, or an eps.",
    "other": (
        "Usually heads that were not recognised, a flatten that needs a block, a tied weight used in two roles, a bare "
        "parameter on the input side (Role(in_=DIM)), or a constant in forward that depends on the width."
    ),
    "rounding": (
        "So small a difference may be rounding in a module that computes in float32 whatever it is given (norms of "
        "transformers do): pass tolerance=1e-4 then."
    ),
    "buffer": (
        "The outputs agree in training and will not in evaluation: usually blocks that were given for a norm's weight "
        "and bias and not for its running statistics, or buffers that were not widened."
    ),
    "update": (
        "usually copies that receive different gradients (grouped-query heads not copied as whole groups), plain "
        "clipping instead of clip_grad_norm_ with the plan, or an optimizer registered with a wrong degree."
    ),
}
