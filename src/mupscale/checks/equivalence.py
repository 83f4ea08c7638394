"""Does the wide model compute, and go on computing, what the narrow one does? And if not, where does it begin?

A static check never suffices (grouped-query heads copied wrongly pass it), so equivalence is shown over
optimizer steps: Theorem 'Dynamic equivalence' as a test that anyone can run on their own model.
"""

from __future__ import annotations

import copy
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from mupscale.core import Entry, Plan, index_of_old, keep_attributes, naming
from mupscale.growth import gain_factor, grow_optimizer, widen
from mupscale.optim import clip_grad_norm_
from mupscale.planning import (
    ROUNDING,
    Difference,
    KeepDouble,
    Recorder,
    computed_tensors,
    first_differing_module,
    in_double,
    relative_difference,
    silence_dropout,
    take_modes,
)
from mupscale.system import MupscaleError, checks_arguments, html_table, text_table, wrap_text


def rounding_of(model: nn.Module) -> float:
    """The relative rounding of a model's least precise parameter; float32's where there is none.

    >>> rounding_of(nn.Linear(1, 1).bfloat16()) == 2**-7
    True
    """
    kinds = {p.dtype for p in model.parameters() if p.is_floating_point()}
    return max((torch.finfo(kind).eps for kind in kinds), default=torch.finfo(torch.float32).eps)


def can_double(model: nn.Module) -> bool:
    """Whether its device computes in float64.

    >>> can_double(nn.Linear(1, 1))
    True
    """
    return all(p.device.type != "mps" for p in model.parameters())


def into_double(model: nn.Module, optimizer: Optimizer | None = None) -> None:
    """Turn a model, and the state of an optimizer that holds its parameters, into float64, in place.

    >>> model = nn.Linear(1, 1)
    >>> into_double(model)
    >>> model.weight.dtype
    torch.float64
    """
    model.double()
    if optimizer is not None:
        for state in optimizer.state.values():
            state.update(in_double(dict(state)))


@torch.no_grad()
def move_by_rounding(model: nn.Module, seed: int = 0) -> None:
    """Change every parameter by its last bit, up or down at random, in place.

    >>> model = nn.Linear(1, 1, bias=False).double()
    >>> before = model.weight.item()
    >>> move_by_rounding(model)
    >>> 0 < abs(model.weight.item() / before - 1) < 1e-15
    True
    """
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        signs = torch.randint(0, 2, p.shape, generator=generator).to(p.device, p.dtype) * 2 - 1
        p.mul_(1 + torch.finfo(p.dtype).eps * signs)


_BUFFER = (
    "The outputs agree in training and will not in evaluation: usually blocks that were given for a norm's weight "
    "and bias and not for its running statistics, or buffers that were not widened."
)
_UPDATE = (
    "usually copies that receive different gradients (grouped-query heads not copied as whole groups), plain "
    "clipping instead of clip_grad_norm_ with the plan, or an optimizer registered with a wrong degree."
)
_MISPLACED = (
    "Its old units are not the narrow model's: it has been trained since, the plan is another, or it never grew."
)
_WEIGHTS = (
    "Usually noise, which makes copies differ on purpose (verify a growth without it, as mupscale.widen writes it, and "
    "add the noise then); or training since the growth, another plan, or a model that was never widened."
)


def why_no_copies(narrow: nn.Module, wide: nn.Module, plan: Plan, tolerance: float) -> str:
    """What usually causes it where the wide model does not hold what the plan writes into it; '' where it does."""
    off, name = _furthest(narrow, wide, plan, tolerance)
    if not name or math.isinf(off):  # what is not finite has another cause
        return ""
    return (
        f"Before any step, the wide model's weights are not the copies that the plan makes of the narrow one's: "
        f"'{name}' is off by {off:.1e}. {_WEIGHTS}"
    )


def worst_parameter(narrow: nn.Module, wide: nn.Module, plan: Plan, tolerance: float) -> Difference | None:
    """After a step: the parameter that is furthest from the copies it should consist of."""
    off, name = _furthest(narrow, wide, plan, tolerance)
    return Difference(name, "parameter", off, f"The models agreed until an update: {_UPDATE}") if name else None


def _furthest(narrow: nn.Module, wide: nn.Module, plan: Plan, tolerance: float) -> tuple[float, str]:
    """How far the worst parameter is from its copies, and its name; '' where all are within the tolerance."""
    worst: tuple[float, str] = (tolerance, "")
    theirs = naming.parameters(wide)
    for name, p, entry in _taken(narrow, plan):
        expected = entry.widened(p.detach(), torch.empty_like(theirs[name]))
        worst = max(worst, (relative_difference(expected, theirs[name].detach()), name))
    return worst


def _taken(narrow: nn.Module, plan: Plan) -> Iterator[tuple[str, nn.Parameter, Entry]]:
    """Of what the wide model has from the narrow one: its name in the wide one, the narrow parameter, and the entry."""
    for name, p in plan.check(narrow, "narrow").items():
        if plan.sources[name].is_taken:
            yield name, p, plan.parameters[name]


def misplaced_parameter(narrow: nn.Module, wide: nn.Module, plan: Plan, tolerance: float) -> Difference | None:
    """Of a growth by fresh units: the parameter whose old units are furthest from the narrow model's, if any are."""
    worst: tuple[float, str] = (tolerance, "")
    theirs = naming.parameters(wide)
    for name, p, entry in _taken(narrow, plan):
        old = theirs[name].detach()[index_of_old(entry.narrow, entry.axes)]
        gains = (1.0, gain_factor(name, plan))  # as fresh units, or lossless ones, leave them
        off = min(relative_difference(p.detach() * float(entry.keep) * gain, old) for gain in gains)
        worst = max(worst, (off, name))
    return Difference(worst[1], "parameter", worst[0], _MISPLACED) if worst[1] else None


def first_wrong_buffer(narrow: nn.Module, wide: nn.Module, plan: Plan, tolerance: float) -> Difference | None:
    """Before any update: a buffer that is not the copies it should be, which only evaluation would show."""
    ours, theirs = naming.buffers(narrow), naming.buffers(wide)
    for name, entry in plan.buffers.items():
        source, buffer = plan.sources[name], ours.get(plan.sources[name].name)
        if buffer is not None and buffer.is_floating_point() and source.is_taken:
            expected = entry.widened(buffer, torch.empty_like(theirs[name]), factor=entry.rule.weight)
            if not torch.allclose(expected, theirs[name], rtol=tolerance, atol=tolerance, equal_nan=True):
                return Difference(name, "buffer", relative_difference(expected, theirs[name]), _BUFFER)
    return None


Loss = Callable[[nn.Module, Any], Tensor]
_REPORT_HEADER = ("step", "difference", "allowed", "loss (narrow)", "loss (wide)")
_ROWS_SHOWN = 7
_DOUBLE = torch.finfo(torch.float64).eps
_MANY_ROUNDINGS = 100  # a widened sum has more terms than the narrow one's
_FEW_ROUNDINGS = 4  # of the weights that a plan writes
_SAME = 1e-12  # of weights that the same arithmetic made
_NOT_WRITTEN = "that of the models' own precision, since the wide one is not what the plan writes"
_UNMOVED = "No weight moved in these steps (is the learning rate 0?), so nothing is shown of training."
_MOST_ALLOWED = 1e-2  # where rounding goes further, nothing is shown


@dataclass(frozen=True)
class Report:
    """Relative output differences before each step, both losses, and the first difference if there is one.

    rounding: what is allowed at each step, where rounding alone was measured to exceed the tolerance. dropout: whether
    there was any, which was switched off, since masks at two widths are not the same. reason: why the tolerance is not
    float64's, where it was not given. unmoved: whether there was an optimizer that moved no weight. fresh: whether the
    wide model has fresh units, which make it another model: then it is the old units that are compared. copyable:
    whether all sizes are whole multiples, so that copies could be compared as well.
    """

    differences: list[float]
    losses: list[tuple[float, float]]
    tolerance: float
    first: Difference | None = None
    rounding: list[float] = field(default_factory=list)
    dropout: bool = False
    reason: str = ""
    unmoved: bool = False
    fresh: bool = False
    copyable: bool = True

    @property
    def max_relative_difference(self) -> float:
        """The largest difference over all steps."""
        return max(self.differences)

    @property
    def ok(self) -> bool:
        """Whether the two models agree at every step, in their buffers, too."""
        limits = self.rounding or [self.tolerance] * len(self.differences)
        return all(map(operator.le, self.differences, limits)) and self.first is None

    @property
    def _more_allowed(self) -> str:
        return f", {max(self.rounding):.0e} where rounding alone goes so far" if self.rounding and self.ok else ""

    @property
    def verdict(self) -> str:
        """In a sentence, and the first difference in another."""
        if self.fresh:
            (losses,) = self.losses
            placed = "" if self.first is None else f"; {self.first}"
            copies = (
                "Copies"
                if self.copyable
                else "Between models whose sizes are whole multiples, as these are not, copies"
            )
            return (
                f"grown by fresh units: the old ones are {'as they were' if self.ok else f'NOT as they were{placed}'}. "
                f"With the new ones the outputs differ by {self.max_relative_difference:.1e}, and the loss goes from "
                f"{losses[0]:.4g} to {losses[1]:.4g}; such models train differently, so steps are not compared. "
                f"{copies} show over steps that the plan is right: upscale(…, exact=True)"
            )
        steps = len(self.differences) - 1
        verdict = "equivalent" if self.ok else "NOT equivalent"
        head = (
            f"{verdict}: largest relative output difference {self.max_relative_difference:.1e} over {steps} steps "
            f"(tolerance {self.tolerance:.0e}{self.reason and f', {self.reason}'}{self._more_allowed}), "
            f"loss {self.losses[0][0]:.4g} → {self.losses[-1][0]:.4g}{', without dropout' * self.dropout}"
        )
        return "\n".join([head, *([str(self.first)] if self.first else []), *([_UNMOVED] if self.unmoved else [])])

    def __str__(self) -> str:
        table = text_table(_REPORT_HEADER, self._table_rows(), left=0)
        return f"{table}\n{wrap_text(self.verdict)}"

    def _repr_html_(self) -> str:
        """For a notebook."""
        return html_table(_REPORT_HEADER, self._table_rows(), self.verdict)

    def _table_rows(self) -> list[tuple[str, ...]]:
        """Some of the steps, the first and the last among them."""
        last = len(self.differences) - 1
        shown = sorted({round(i * last / _ROWS_SHOWN) for i in range(_ROWS_SHOWN + 1)})
        limits = self.rounding or [self.tolerance] * (last + 1)
        numbers = ((self.differences[i], limits[i], *self.losses[min(i, len(self.losses) - 1)]) for i in shown)
        return [
            (str(i), f"{off:.1e}", f"{limit:.0e}", f"{a:.6g}", f"{b:.6g}")
            for i, (off, limit, a, b) in zip(shown, numbers, strict=True)
        ]


@checks_arguments
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
    in_float64: bool = True,
    **hyper: Any,
) -> Report:
    """Train copies of both models side by side and compare their outputs before every step and after the last.

    After a growth by fresh units, which goes on as another model, it tells whether all old units are as they were, and
    how far outputs and loss have moved.
    loss(model, batch) gives the training loss; batches are used in turn, again from the start if they run out.
    optimizer: the narrow model's own (its state goes along), or a class with its hyperparameters; None checks the
    outputs only. clip: width-invariant clipping in both. The models given are not changed.
    in_float64: copies of less precise models are compared in float64, where what is wrong cannot hide in rounding;
    False leaves them as they are. tolerance: 1e-10 in float64, unless rounding alone, measured on the narrow model and
    one that differs from it in last bits, goes further. Where the wide model is not what the plan writes (after noise),
    or the loss or the device cannot do with float64, that of the models' own precision: 1e-4 for float32, 5e-2 below.

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
    if plan.mup:
        return _compare_old_units(narrow, wide, plan, data[0], loss)
    make_pair = partial(_Pair.of, narrow, wide, plan, optimizer, schedule, hyper)
    pair = make_pair(in_float64)
    if pair.in_double and not _takes_double(pair, data[0], loss):
        in_float64, pair = False, make_pair(False)
    training = _Training(data, loss, steps, clip)
    allowed = pair.tolerance if tolerance is None else tolerance
    report = replace(training.compare(pair, allowed), reason=pair.reason if tolerance is None else "")
    if tolerance is None and not report.ok and (report.first is None or report.first.kind != "buffer"):
        rounding = training.measure_rounding(make_pair(in_float64), make_pair(in_float64), allowed)
        explained = replace(report, rounding=rounding, first=None)
        return explained if explained.ok else report
    return report


@torch.no_grad()
def _compare_old_units(narrow: nn.Module, wide: nn.Module, plan: Plan, batch: Any, loss: Loss) -> Report:
    """What can be said of a growth by fresh units."""
    plan.check(narrow, "narrow")
    plan.check(wide)
    (small, _), (large, _) = _copy(narrow), _copy(wide)
    take_modes(large, small, plan)
    dropout = [silence_dropout(model) for model in (small, large)]
    first = misplaced_parameter(small, large, plan, _FEW_ROUNDINGS * rounding_of(small))
    with Recorder(small) as ours, Recorder(large) as theirs:
        losses = float(loss(small, batch)), float(loss(large, batch))
    moved = _output_difference(ours, theirs)
    axes = [axis for entry in plan.parameters.values() for axis in entry.axes.values()]
    copyable = all(axis.times == int(axis.times) for axis in axes)
    return Report([moved], [losses], math.inf, first, dropout=any(dropout), fresh=True, copyable=copyable)


def _takes_double(pair: _Pair, batch: Any, loss: Loss) -> bool:
    """Whether the loss can be computed in float64; it may hold tensors of its own."""
    try:
        with torch.no_grad():
            loss(_copy(pair.small)[0], in_double(batch))
    except RuntimeError:
        return False
    return True


@dataclass(frozen=True)
class _Training:
    """What both models are trained on."""

    data: Sequence[Any]
    loss: Loss
    steps: int
    clip: float | None

    def batches(self, pair: _Pair) -> Iterator[Any]:
        """A batch for each comparison, of which there is one more than there are steps."""
        for step in range((self.steps if pair.optimizers else 0) + 1):
            batch = self.data[step % len(self.data)]
            yield in_double(batch) if pair.in_double else batch

    def compare(self, pair: _Pair, tolerance: float) -> Report:
        """Train both models side by side."""
        differences, losses = list[float](), list[tuple[float, float]]()
        first: Difference | None = None
        before = [p.detach().clone() for p in pair.small.parameters()]
        with KeepDouble() if pair.in_double else nullcontext():
            for step, batch in enumerate(self.batches(pair)):
                with Recorder(pair.small) as ours, Recorder(pair.large) as theirs:
                    values = self.loss(pair.small, batch), self.loss(pair.large, batch)
                differences.append(_output_difference(ours, theirs))
                losses.append((values[0].item(), values[1].item()))
                if first is None:
                    first = _first_difference(pair, ours, theirs, step, differences[-1], tolerance)
                if pair.optimizers and step < self.steps:
                    pair.step(values, self.clip)
        unmoved = bool(pair.optimizers) and self.steps > 0 and all(map(torch.equal, before, pair.small.parameters()))
        return Report(differences, losses, tolerance, first, dropout=pair.dropout, unmoved=unmoved)

    def measure_rounding(self, pair: _Pair, same: _Pair, tolerance: float) -> list[float]:
        """The differences that are allowed before each step: many times the effect of last bits, or the tolerance."""
        move_by_rounding(same.small)
        apart = map(relative_difference, self.outputs_of_narrow(pair), self.outputs_of_narrow(same))
        return [max(tolerance, min(_MANY_ROUNDINGS * each, _MOST_ALLOWED)) for each in apart]

    def outputs_of_narrow(self, pair: _Pair) -> list[Tensor]:
        """The narrow model's outputs before each step, when it is trained alone."""
        outputs = []
        with KeepDouble() if pair.in_double else nullcontext():
            for step, batch in enumerate(self.batches(pair)):
                with Recorder(pair.small) as recorder:
                    value = self.loss(pair.small, batch)
                outputs.append(recorder.outputs[""])
                if pair.optimizers and step < self.steps:
                    pair.step([value], self.clip)
        return outputs


@dataclass(frozen=True)
class _Pair:
    """Copies of both models, without dropout, that are trained side by side; no optimizers where none is given.

    reason: why the tolerance is not float64's. changed: what to say where the wide model is not what the plan writes.
    """

    small: nn.Module
    large: nn.Module
    plan: Plan
    optimizers: Sequence[Optimizer]
    schedulers: Sequence[LRScheduler]
    tolerance: float
    reason: str
    changed: str
    in_double: bool
    dropout: bool

    @classmethod
    def of(
        cls,
        narrow: nn.Module,
        wide: nn.Module,
        plan: Plan,
        optimizer: Optimizer | type[Optimizer] | None,
        schedule: Callable[[Optimizer], LRScheduler] | None,
        hyper: dict[str, Any],
        in_float64: bool,
    ) -> _Pair:
        plan.check(narrow, "narrow")
        plan.check(wide)
        small, own = _copy(narrow, optimizer if isinstance(optimizer, Optimizer) else None)
        large, _ = _copy(wide)
        take_modes(large, small, plan)
        dropout = [silence_dropout(model) for model in (small, large)]
        eps = rounding_of(small)
        tolerance, changed = _tolerance(eps), why_no_copies(small, large, plan, _FEW_ROUNDINGS * eps)
        in_double = in_float64 and can_double(small)
        reason = "that of the models' own precision" if eps > _DOUBLE else ""
        if in_double and eps > _DOUBLE:
            written, reason = _is_written_by(plan, small, large), _NOT_WRITTEN
            into_double(small, own)
            into_double(large)
            if written:  # once more, without the rounding
                widen(small, large, plan)
                tolerance, reason = _tolerance(_DOUBLE), ""
        if isinstance(optimizer, type):
            own = optimizer(small.parameters(), **hyper)
        optimizers = [] if own is None else [own, grow_optimizer(own, small, large, plan)]
        schedulers = [schedule(each) for each in optimizers] if schedule is not None else []
        return cls(small, large, plan, optimizers, schedulers, tolerance, reason, changed, in_double, any(dropout))

    def step(self, losses: Sequence[Tensor], clip: float | None) -> None:
        """One step of both optimizers and schedulers, or of the narrow one's where there is one loss."""
        for model, optimizer, loss in zip((self.small, self.large), self.optimizers, losses, strict=False):
            optimizer.zero_grad()
            loss.backward()
            if clip is not None:
                _clip(model, clip, self.plan, wide=model is self.large)
            optimizer.step()
        for scheduler in self.schedulers[: len(losses)]:
            scheduler.step()


def _copy(model: nn.Module, optimizer: Optimizer | None = None) -> tuple[nn.Module, Optimizer | None]:
    """Copies of a model and of the optimizer that holds its parameters."""
    original = naming.unwrap(model)
    copied, its_optimizer = copy.deepcopy((original, optimizer), computed_tensors(original))
    keep_attributes(original, copied)
    return copied, its_optimizer


def _clip(model: nn.Module, max_norm: float, plan: Plan, *, wide: bool) -> None:
    if wide:
        clip_grad_norm_(model, max_norm, plan)
    else:
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)


def _tolerance(eps: float) -> float:
    """For models of this rounding: 1e-10 in float64, 1e-4 in float32, 5e-2 below."""
    return 1e-10 if eps <= _DOUBLE else 1e-4 if eps <= torch.finfo(torch.float32).eps else 5e-2


def _is_written_by(plan: Plan, small: nn.Module, large: nn.Module) -> bool:
    """Whether the wide model holds what this plan makes of the narrow one, as its precision has it."""
    parts = worst_parameter(small, large, plan, _SAME), first_wrong_buffer(small, large, plan, _SAME)
    return parts == (None, None)


def _output_difference(small: Recorder, large: Recorder) -> float:
    """The relative difference of the two models' own outputs."""
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
        first = worst or first_differing_module(ours, theirs, pair.plan, level, may_round=not pair.in_double)
        if first is not None:
            return replace(first, advice=pair.changed) if pair.changed else first
    return None if step else first_wrong_buffer(pair.small, pair.large, pair.plan, tolerance)
