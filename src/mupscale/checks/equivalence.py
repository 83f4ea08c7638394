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
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from mupscale import planning
from mupscale.core import Plan, index_of_old, keep_attributes, naming
from mupscale.growth import gain_factor, grow_optimizer, widen
from mupscale.optim import clip_grad_norm_
from mupscale.system import MupscaleError, checks_arguments, html_table, text_table, wrap_text

Loss = Callable[[nn.Module, Any], Tensor]
_REPORT_HEADER = ("step", "difference", "allowed", "loss (narrow)", "loss (wide)")
_ROWS_SHOWN = 7
_DOUBLE, _SINGLE = torch.finfo(torch.float64).eps, torch.finfo(torch.float32).eps
_EXACT = 1e-10
_MAY_ROUND = 1e-5  # differences below it may be float32's
_MANY_ROUNDINGS = 100  # a widened sum has more terms than the narrow one's
_FEW_ROUNDINGS = 4  # of the weights that a plan writes
_SAME = 1e-12  # of weights that the same arithmetic made
_MOST_ALLOWED = 1e-2  # where rounding goes further, nothing is shown

_OWN = "that of the models' own precision"
_NOT_WRITTEN = f"{_OWN}, since the wide one is not what the plan writes"
_UNMOVED = "No weight moved in these steps (is the learning rate 0?), so nothing is shown of training."
_USUALLY = (
    "Usually heads that were not recognised: if their number grows, whole heads must be copied "
    "(Role(out_block=head_dim), in_block for the output projection); if head_dim grows, attention must scale as "
    "1/head_dim. Or a flatten before it: channels of H·W positions are copied in blocks of H·W (in_block). Otherwise a "
    "tied weight used in two roles, a bare parameter on the input side (Role(in_=DIM)), or a constant in forward that "
    "depends on the width, such as a division by √width or ALiBi's slopes."
)
_FACTOR = (
    "Usually a constant in forward that depends on the width, such as a division by √width, or a tied readout whose "
    "1/k no norm takes."
)
_ROUNDS = (
    "A difference this small may be rounding in a module that always computes in float32, as norms of transformers do. "
    "If so, pass tolerance=1e-4."
)
_BUFFER = (
    "The outputs agree in training and will not in evaluation: usually blocks that were given for a norm's weight "
    "and bias and not for its running statistics, or buffers that were not widened."
)
_UPDATE = (
    "The models agreed until an update: usually copies that receive different gradients (grouped-query heads not "
    "copied as whole groups), plain clipping instead of clip_grad_norm_ with the plan, or an optimizer registered with "
    "a wrong degree."
)
_STAYING = (
    "It reads inputs that grow and inputs that do not. A parameter has one learning rate, that of those that grow, so "
    "such copies cannot train exactly as the narrow model does: give the other inputs a layer of their own."
)
_MISPLACED = (
    "Its old units are not the narrow model's: it has been trained since, the plan is another, or it never grew."
)
_WEIGHTS = (
    "Usually noise, which makes copies differ on purpose (verify a growth without it, as mupscale.widen writes it, and "
    "add the noise then); or training since the growth, another plan, or a model that was never widened."
)


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
    def verdict(self) -> str:
        """In a sentence, and the first difference in another."""
        if self.fresh:
            (losses,) = self.losses
            placed = "" if self.first is None else f"; {self.first}"
            which = (
                "Copies"
                if self.copyable
                else "Between models whose sizes are whole multiples, as these are not, copies"
            )
            return (
                f"grown by fresh units: the old ones are {'as they were' if self.ok else f'NOT as they were{placed}'}. "
                f"With the new ones the outputs differ by {self.max_relative_difference:.1e}, and the loss goes from "
                f"{losses[0]:.4g} to {losses[1]:.4g}; such models train differently, so steps are not compared. "
                f"{which} show over steps that the plan is right: upscale(…, exact=True)"
            )
        steps, more = len(self.differences) - 1, ""
        if self.rounding and self.ok:
            more = f", {max(self.rounding):.0e} where rounding alone goes so far"
        verdict = "equivalent" if self.ok else "NOT equivalent"
        head = (
            f"{verdict}: largest relative output difference {self.max_relative_difference:.1e} over {steps} steps "
            f"(tolerance {self.tolerance:.0e}{self.reason and f', {self.reason}'}{more}), "
            f"loss {self.losses[0][0]:.4g} → {self.losses[-1][0]:.4g}{', without dropout' * self.dropout}"
        )
        return "\n".join([head, *([str(self.first)] if self.first else []), *([_UNMOVED] if self.unmoved else [])])

    def __str__(self) -> str:
        table = text_table(_REPORT_HEADER, self._table_rows(), left=0)
        return f"{table}\n{wrap_text(self.verdict)}"

    def _repr_html_(self) -> str:
        return html_table(_REPORT_HEADER, self._table_rows(), self.verdict)

    def _table_rows(self) -> list[tuple[str, ...]]:
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
        return _compare_old_units(_Pair(narrow, wide, plan), data[0], loss)
    training = _Training(narrow, wide, plan, data, loss, optimizer, steps, clip, schedule, hyper)
    pair = training.make_pair(in_float64)
    if pair.in_double:
        try:  # the loss may hold tensors of its own
            with torch.no_grad():
                loss(_copy(pair.small)[0], planning.in_double(data[0]))
        except RuntimeError:
            in_float64, pair = False, training.make_pair(False)
    allowed = pair.tolerance if tolerance is None else tolerance
    report = replace(training.compare(pair, allowed), reason=pair.reason if tolerance is None else "")
    if tolerance is None and not report.ok and (report.first is None or report.first.kind != "buffer"):
        explained = replace(report, rounding=training.measure_rounding(in_float64, allowed), first=None)
        return explained if explained.ok else report
    return report


@torch.no_grad()
def _compare_old_units(pair: _Pair, batch: Any, loss: Loss) -> Report:
    """What can be said of a growth by fresh units."""
    off, name = pair.furthest(pair.off_place, _FEW_ROUNDINGS * pair.rounding)
    first = Difference(name, "parameter", off, _MISPLACED) if name else None
    with planning.Recorder(pair.small) as ours, planning.Recorder(pair.large) as theirs:
        losses = float(loss(pair.small, batch)), float(loss(pair.large, batch))
    moved = _output_difference(ours, theirs)
    axes = [axis for entry in pair.plan.parameters.values() for axis in entry.axes.values()]
    copyable = all(axis.times == int(axis.times) for axis in axes)
    return Report([moved], [losses], math.inf, first, dropout=pair.dropout, fresh=True, copyable=copyable)


class _Pair:
    """Copies of both models, without dropout, and of the optimizer that holds the narrow one's parameters.

    tolerance, reason: what float64 has; where it is not float64's, why not. changed: what to say where the wide model
    is not what the plan writes. in_double: whether they are compared in float64.
    """

    def __init__(self, narrow: nn.Module, wide: nn.Module, plan: Plan, optimizer: Optimizer | None = None) -> None:
        plan.check(narrow, "narrow")
        plan.check(wide)
        self.plan = plan
        self.small, self.own = _copy(narrow, optimizer)
        self.large, _ = _copy(wide)
        planning.take_modes(self.large, self.small, plan)
        self.dropout = planning.silence_dropout(self.small) | planning.silence_dropout(self.large)
        kinds = {p.dtype for p in self.small.parameters() if p.is_floating_point()} or {torch.float32}
        self.rounding = max(torch.finfo(kind).eps for kind in kinds)  # of the least precise parameter
        self.tolerance = _EXACT if self.rounding <= _DOUBLE else 1e-4 if self.rounding <= _SINGLE else 5e-2
        self.reason = _OWN if self.rounding > _DOUBLE else ""
        self.changed, self.in_double = "", False
        self.optimizers, self.schedulers = list[Optimizer](), list[LRScheduler]()

    def furthest(self, off: Callable[[str, Tensor, Tensor], float], tolerance: float) -> tuple[float, str]:
        """How far off the worst parameter is of those that the wide model has from the narrow one; '' where none is."""
        worst, theirs = (tolerance, ""), naming.parameters(self.large)
        for name, p in self.plan.check(self.small, "narrow").items():
            if self.plan.sources[name].is_taken:
                worst = max(worst, (off(name, p.detach(), theirs[name].detach()), name))
        return worst

    def off_copies(self, name: str, p: Tensor, theirs: Tensor) -> float:
        """How far a parameter is from the copies it should consist of."""
        return planning.relative_difference(self.plan.parameters[name].widened(p, torch.empty_like(theirs)), theirs)

    def off_place(self, name: str, p: Tensor, theirs: Tensor) -> float:
        """Of a growth by fresh units: how far a parameter's old units are from the narrow model's."""
        entry = self.plan.parameters[name]
        old = theirs[index_of_old(entry.narrow, entry.axes)]
        gains = (1.0, gain_factor(name, self.plan))  # as fresh units, or lossless ones, leave them
        return min(planning.relative_difference(p * float(entry.keep) * gain, old) for gain in gains)

    def first_wrong_buffer(self, tolerance: float) -> Difference | None:
        """Before any update: a buffer that is not the copies it should be, which only evaluation would show."""
        ours, theirs = naming.buffers(self.small), naming.buffers(self.large)
        for name, entry in self.plan.buffers.items():
            source = self.plan.sources[name]
            buffer = ours.get(source.name)
            if buffer is not None and buffer.is_floating_point() and source.is_taken:
                expected = entry.widened(buffer, torch.empty_like(theirs[name]), is_buffer=True)
                if not torch.allclose(expected, theirs[name], rtol=tolerance, atol=tolerance, equal_nan=True):
                    return Difference(name, "buffer", planning.relative_difference(expected, theirs[name]), _BUFFER)
        return None

    def turn_into_double(self) -> None:
        """Both, and the optimizer's state, in place; what the plan wrote is written once more, without the rounding."""
        is_written = not self.furthest(self.off_copies, _SAME)[1] and self.first_wrong_buffer(_SAME) is None
        self.small.double()
        self.large.double()
        for state in self.own.state.values() if self.own is not None else ():
            state.update(planning.in_double(dict(state)))
        self.reason = _NOT_WRITTEN
        if is_written:
            widen(self.small, self.large, self.plan)
            self.tolerance, self.reason = _EXACT, ""

    def step(self, losses: Sequence[Tensor], clip: float | None) -> None:
        """One step of both optimizers and schedulers, or of the narrow one's where there is one loss."""
        for model, optimizer, loss in zip((self.small, self.large), self.optimizers, losses, strict=False):
            optimizer.zero_grad()
            loss.backward()
            if clip is not None and model is self.large:
                clip_grad_norm_(model, clip, self.plan)
            elif clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
        for scheduler in self.schedulers[: len(losses)]:
            scheduler.step()


@dataclass(frozen=True)
class _Training:
    """How copies of both models are trained."""

    narrow: nn.Module
    wide: nn.Module
    plan: Plan
    data: Sequence[Any]
    loss: Loss
    optimizer: Optimizer | type[Optimizer] | None
    steps: int
    clip: float | None
    schedule: Callable[[Optimizer], LRScheduler] | None
    hyper: dict[str, Any]

    def make_pair(self, in_float64: bool) -> _Pair:
        """Copies with optimizers, if there are any, as they are before the first step."""
        given = self.optimizer if isinstance(self.optimizer, Optimizer) else None
        pair = _Pair(self.narrow, self.wide, self.plan, given)
        off, name = pair.furthest(pair.off_copies, _FEW_ROUNDINGS * pair.rounding)
        if name and math.isfinite(off):  # what is not finite has another cause
            pair.changed = (
                f"Before any step, the wide model's weights are not the copies that the plan makes of the narrow "
                f"one's: '{name}' is off by {off:.1e}. {_WEIGHTS}"
            )
        pair.in_double = in_float64 and all(p.device.type != "mps" for p in pair.small.parameters())  # it has none
        if pair.in_double:
            planning.use_plain_kernels(pair.small)
            planning.use_plain_kernels(pair.large)
        if pair.in_double and pair.rounding > _DOUBLE:
            pair.turn_into_double()
        own = self.optimizer(pair.small.parameters(), **self.hyper) if isinstance(self.optimizer, type) else pair.own
        if own is not None:
            pair.optimizers = [own, grow_optimizer(own, pair.small, pair.large, self.plan)]
        pair.schedulers = [self.schedule(each) for each in pair.optimizers] if self.schedule is not None else []
        return pair

    def run(self, pair: _Pair, *models: nn.Module) -> Iterator[tuple[list[planning.Recorder], list[Tensor]]]:
        """What these models compute before each step and after the last, with their losses."""
        with planning.KeepDouble() if pair.in_double else nullcontext():
            for step in range((self.steps if pair.optimizers else 0) + 1):
                batch = self.data[step % len(self.data)]
                batch = planning.in_double(batch) if pair.in_double else batch
                with ExitStack() as stack:
                    recorders = [stack.enter_context(planning.Recorder(model)) for model in models]
                    losses = [self.loss(model, batch) for model in models]
                yield recorders, losses
                if pair.optimizers and step < self.steps:
                    pair.step(losses, self.clip)

    def compare(self, pair: _Pair, tolerance: float) -> Report:
        differences, losses = list[float](), list[tuple[float, float]]()
        first: Difference | None = None
        before = [p.detach().clone() for p in pair.small.parameters()]
        for step, ((ours, theirs), (narrow, wide)) in enumerate(self.run(pair, pair.small, pair.large)):
            differences.append(_output_difference(ours, theirs))
            losses.append((narrow.item(), wide.item()))
            first = first or _first_difference(pair, ours, theirs, step, differences[-1], tolerance)
        unmoved = bool(pair.optimizers) and self.steps > 0 and all(map(torch.equal, before, pair.small.parameters()))
        return Report(differences, losses, tolerance, first, dropout=pair.dropout, unmoved=unmoved)

    def measure_rounding(self, in_float64: bool, tolerance: float) -> list[float]:
        """The differences that are allowed before each step: many times the effect of last bits, or the tolerance."""
        outputs, generator = [], torch.Generator().manual_seed(0)
        for is_moved in (False, True):
            pair = self.make_pair(in_float64)
            for p in pair.small.parameters() if is_moved else ():  # by the last bit, up or down at random
                signs = torch.randint(0, 2, p.shape, generator=generator).to(p.device, p.dtype) * 2 - 1
                p.detach().mul_(1 + torch.finfo(p.dtype).eps * signs)
            outputs.append([ours.outputs[""] for (ours,), _ in self.run(pair, pair.small)])
        apart = map(planning.relative_difference, *outputs)
        return [max(tolerance, min(_MANY_ROUNDINGS * each, _MOST_ALLOWED)) for each in apart]


def _copy(model: nn.Module, optimizer: Optimizer | None = None) -> tuple[nn.Module, Optimizer | None]:
    original = naming.unwrap(model)
    copied, its_optimizer = copy.deepcopy((original, optimizer), planning.computed_tensors(original))
    keep_attributes(original, copied)
    return copied, its_optimizer


def _output_difference(small: planning.Recorder, large: planning.Recorder) -> float:
    if "" not in small.outputs or "" not in large.outputs:
        raise MupscaleError("loss(model, batch) must call the model, and the model must return a tensor first")
    ours, theirs = small.outputs[""], large.outputs[""]
    if ours.shape != theirs.shape:
        raise MupscaleError(
            f"the models' outputs have shapes {tuple(ours.shape)} and {tuple(theirs.shape)}; "
            f"verify needs models whose output does not grow with the width"
        )
    return planning.relative_difference(ours, theirs)


def _first_difference(
    pair: _Pair, ours: planning.Recorder, theirs: planning.Recorder, step: int, difference: float, tolerance: float
) -> Difference | None:
    """Where the models begin to differ, if their outputs (by `difference`) or, before any update, their buffers do."""
    if not difference <= tolerance:
        off, name = pair.furthest(pair.off_copies, tolerance) if step else (0.0, "")
        level = max(tolerance, min(_MAY_ROUND, difference / 1000))  # not the first that merely rounds
        first = (
            Difference(name, "parameter", off, _STAYING if name in pair.plan.joined else _UPDATE)
            if name
            else first_differing_module(ours, theirs, pair.plan, level, may_round=not pair.in_double)
        )
        if first is not None:
            return replace(first, advice=pair.changed) if pair.changed else first
    return None if step else pair.first_wrong_buffer(tolerance)


def first_differing_module(
    ours: planning.Recorder, theirs: planning.Recorder, plan: Plan, tolerance: float, *, may_round: bool = True
) -> Difference | None:
    """The first module, in the order in which they run, whose output in the wide model is not the narrow one's.

    may_round: whether modules may have computed in float32, which is then said of small differences.
    """
    for path, output in ours.outputs.items():
        if path not in theirs.outputs:
            continue
        expected, actual = (t.double() for t in _as_copies(output, theirs.outputs[path]))
        if expected.shape != actual.shape:
            return Difference(path or type(ours.model).__name__, "module", math.inf, _USUALLY)
        folds = {1.0, *(float(e.fold) for n, e in plan.parameters.items() if path and n.startswith(f"{path}."))}
        relative = min(planning.relative_difference(expected * fold, actual) for fold in folds)
        if not relative <= tolerance:
            advice, size = _USUALLY, float((expected * expected).sum())
            factor = float((expected * actual).sum()) / size if size else 0.0
            if factor and factor == factor and planning.relative_difference(expected * factor, actual) <= tolerance:
                advice = f"Its output is {factor:.4g} times what it should be. {_FACTOR}"
            if may_round and relative < _MAY_ROUND:
                advice = f"{_ROUNDS} {advice}"
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
