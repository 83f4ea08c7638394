"""A plan read off the computation: guess, follow the units, and where that gets stuck, guess better; then check it.

What is found are roles, beside those that the user gave, and for all widths of a family. Where a plan is wrong, the
first module that differs is named; what a right one may still change without a word is said.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from fractions import Fraction
from glob import escape
from typing import Any

import torch
from torch import Tensor, nn

from mupscale.core import Entry, Number, Plan, Role, check_same_names, naming, tidy
from mupscale.planning.following import (
    Follower,
    Guess,
    Side,
    Stuck,
    Written,
    are_close,
    explanations,
    guess_with_roles,
    largest_number,
    operations_before,
    refusal,
    suggestions,
)
from mupscale.planning.from_modules import ONE_DEPTH, How, build_plan, find_role
from mupscale.planning.initial import all_tensors
from mupscale.planning.large_models import check_at_full_size, is_large
from mupscale.planning.tracing import (
    Operation,
    RecordedRun,
    Recorder,
    in_float64,
    outputs_and_gradients,
    record_run,
    run_in_float64,
    saved_tensors,
    tensors_in,
    why_random,
    without_copies,
)
from mupscale.planning.trials import EMPTY, Trials
from mupscale.system import MupscaleError, warn, ways_out

ROUNDING = 1e-5
"""Differences below it may be float32's."""


@dataclass(frozen=True)
class Difference:
    """The first place where the two models differ, and what usually causes it there."""

    name: str
    kind: str
    relative: float
    advice: str

    def __str__(self) -> str:
        return f"{self.kind} '{self.name}' differs first (by {self.relative:.1e}). {self.advice}"


def relative_difference(ours: Tensor, theirs: Tensor) -> float:
    """‖ours − theirs‖ / ‖ours‖, in double precision; infinite if either is not finite."""
    a, b = ours.double(), theirs.double()
    norm = float(a.norm())
    difference = float((a - b).norm())
    value = difference / norm if norm else difference
    return value if value == value else float("inf")


def first_differing_module(
    ours: Recorder, theirs: Recorder, plan: Plan, tolerance: float, *, may_round: bool = True
) -> Difference | None:
    """The first module, in the order in which they run, whose output in the wide model is not the narrow one's.

    may_round: whether modules may have computed in float32, which is then said of small differences.
    """
    for path, output in ours.outputs.items():
        if path in theirs.outputs:
            expected, actual = _as_copies(output, theirs.outputs[path])
            relative = _up_to_folds(expected, actual, plan, path)
            if not relative <= tolerance:
                advice = _constant_factor(expected, actual, tolerance) or _advice(
                    path, naming.modules(ours.model)[path]
                )
                if may_round and relative < ROUNDING:
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
        "Usually a flatten before it: after convolutions flattened to C·H·W, its input is copied in blocks of H·W "
        "units (in_block of its Role). Otherwise heads that were not recognised, a tied weight, a bare parameter on "
        "the input side (Role(in_=DIM)), or a constant in forward that depends on the width."
    ),
    "factor": (
        "Usually a constant in forward that depends on the width, such as a division by √width, or a tied readout "
        "whose 1/k no norm takes."
    ),
    "constant": "Usually a constant in forward that depends on the width, such as a division by √width, or an eps.",
    "other": (
        "Usually heads that were not recognised, a flatten that needs a block, a tied weight used in two roles, a bare "
        "parameter on the input side (Role(in_=DIM)), or a constant in forward that depends on the width."
    ),
    "rounding": (
        "A difference this small may be rounding in a module that always computes in float32, as norms of "
        "transformers do. If so, pass tolerance=1e-4."
    ),
}


Sizes = tuple[int, int]


def warn_of_growing_outputs(
    narrow: nn.Module,
    wide: nn.Module,
    plan: Plan,
    inputs: Any,
    roles: Mapping[str, Role] | None = None,
    shapes: Sequence[Sequence[tuple[int, ...]]] = (),
) -> None:
    """Warn where an output grows that nothing in the model reads, as a number of classes does by mistake.

    Hidden units that a model hands out are read by its own layers. roles: of the user, who knows what has one.
    shapes: of the two models' outputs, where they are known.
    """
    unread = _unread(plan.parameters)
    if not unread:
        return
    shapes = shapes or [_shapes(*in_float64(model, inputs, like=narrow)) for model in (narrow, wide)]
    for number, (before, after) in enumerate(zip(*shapes, strict=False)):
        for sizes in zip(before, after, strict=False):
            writers = unread.get(sizes, [])
            told = any(find_role(roles or {}, alias) for name in writers for alias in plan.parameters[name].names)
            if writers and not told:
                warn(_growing_output(number, sizes, writers, plan))


def _shapes(model: nn.Module, batch: Any) -> list[tuple[int, ...]]:
    return [tuple(t.shape) for t in tensors_in(run_in_float64(model, batch))]


def _unread(entries: Mapping[str, Entry]) -> dict[Sizes, list[str]]:
    """Sizes that grow and that no parameter has as inputs, with the parameters that have them as outputs."""
    written: dict[Sizes, list[str]] = {}
    read = set[Sizes]()
    for name, entry in entries.items():
        for d, axis in entry.axes.items():
            sizes = entry.narrow[d], entry.wide[d]
            if d in entry.in_:
                read |= {sizes, (sizes[0] // axis.block, sizes[1] // axis.block)}  # as channels are, after a flatten
            elif axis.times != 1:
                written.setdefault(sizes, []).append(name)
    return {sizes: names for sizes, names in written.items() if sizes not in read}


def _growing_output(number: int, sizes: Sizes, writers: list[str], plan: Plan) -> str:
    others = "new ones are drawn" if plan.mup else "each is there several times"
    name = max(writers, key=lambda name: len(plan[name].narrow))
    role = Role(out=plan[name].out, in_=plan[name].in_)
    return (
        f"output {number} of the model grows from {sizes[0]} to {sizes[1]}, written by '{name}', and nothing in the "
        f"model reads it. If these are classes or tokens, build the wide model with {sizes[0]}: otherwise {others}, "
        "which changes what the model says. If they are features for other code, say that they are meant to grow: "
        f"roles={{'{name}': mupscale.{role}}}"
    )


def warn_of_kept_losses(narrow: nn.Module, wide: nn.Module) -> None:
    """Warn where modules keep a number of their last run that can be differentiated and is not the same at both widths.

    It may be a part of the loss that is not in the outputs, which then weighs more the wider the model is.
    """
    theirs = dict(_kept_numbers(wide))
    for name, number in _kept_numbers(narrow):
        if name in theirs and not are_close(number.detach(), theirs[name].detach(), loosened=100):
            before, after = float(number.detach()), float(theirs[name].detach())
            warn(
                f"'{name}', which the model computes besides its outputs, is {before:.4g} in the narrow model and "
                f"{after:.4g} in the wide one. If it is part of the loss, training differs. Make it a mean over units "
                "instead of a sum, or give it less weight in the wide model's loss"
            )


def _kept_numbers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Numbers that modules keep as attributes, alone or in lists and dicts, with the graph that they come from."""
    for path, module in naming.modules(model).items():
        for attribute, value in vars(module).items():
            if attribute in ("_parameters", "_buffers", "_modules"):
                continue
            for place, tensor in enumerate(tensors_in(value)):
                if tensor.numel() == 1 and tensor.grad_fn is not None and tensor.is_floating_point():
                    yield f"{path}.{attribute}".lstrip(".") + (f"[{place}]" if tensor is not value else ""), tensor


_MOST_PASSES = 25
_STRONGER = " (a stronger batch of the same kind: yours leaves parts of the model unseen)"
_REMEDIES = {
    "inputs": "make the plan by running the models, plan(narrow, wide, inputs=…)",
    "roles": "pass roles= for what it gets wrong",
}


def roles_by_running(
    narrow: nn.Module,
    wide: nn.Module,
    inputs: Any,
    walked: Plan | None = None,
    given: Mapping[str, Role] | None = None,
    how: How | None = None,
    *,
    own_constants: bool = False,
) -> dict[str, Role]:
    """The role of every parameter and saved buffer that the models use on this batch, under all their names.

    inputs: what the models are called with: a tensor, a tuple of arguments, or a dict of keywords.
    walked: a plan to start from, as the modules' types and names suggest it. given: roles by name, to start from, too.
    how: what the roles are for, which a refusal then gives advice for. own_constants: as in Guess.
    """
    search = _Search(narrow, wide, inputs, how)
    sides = saved_tensors(search.small), saved_tensors(search.large)
    guess = guess_with_roles(_guess_of(walked), given or {}, *sides)
    error = None
    for products in (False, True):
        try:
            better = replace(guess, products=products, own_constants=own_constants)
            roles = {**_computed_buffers(search.small, search.large), **search.roles(better)}
            tied = [group for group in naming.aliases(all_tensors(narrow).items()) if group[0] in roles]
            return roles | {alias: roles[group[0]] for group in tied for alias in group}
        except MupscaleError as refused:
            error = error or refused
    raise error or AssertionError("no error, and no roles")


def _computed_buffers(small: nn.Module, large: nn.Module) -> dict[str, Role]:
    """Buffers that no state dict holds and that the wide model computes itself, where they are copies all the same."""
    saved, theirs = saved_tensors(small), naming.buffers(large)
    roles = {}
    for name, buffer in naming.buffers(small).items():
        if name not in saved and name in theirs and buffer.shape != theirs[name].shape:
            axes = next((axes for axes, factor in explanations(buffer, theirs[name], []) if factor == 1.0), {})
            if len(set(axes.values())) == 1:
                roles[name] = Role(out=tuple(axes), out_block=next(iter(axes.values())).block)
    return roles


def check_plan_by_running(narrow: nn.Module, wide: nn.Module, plan: Plan, inputs: Any) -> None:
    """An error unless models with generic weights, one widened as planned, agree in outputs and gradients."""
    trials = Trials.of(inputs)
    if reason := what_differs(narrow, wide, plan, trials):
        raise MupscaleError(f"the plan is wrong: {reason}{ways_out('; ', **_REMEDIES)}")
    if trials is not inputs:
        trials.warn()


@torch.enable_grad()
def what_differs(narrow: nn.Module, wide: nn.Module, plan: Plan, inputs: Any) -> str:
    """What `check_plan_by_running` finds wrong, in words; nothing where the plan is right.

    Large models are compared in float32, block by block.
    """
    trials = Trials.of(inputs)
    if is_large(narrow, wide):
        found = [check_at_full_size(narrow, wide, plan, batch) for batch in trials.look(narrow, wide).batches]
        trials.shapes = found[0].shapes
        return next((one.reason for one in found if one.reason), "")
    small, _ = in_float64(narrow, (), generic=1)
    large, _ = in_float64(wide, (), like=narrow)
    with torch.no_grad():
        theirs = saved_tensors(large)
        for name, weight in saved_tensors(small).items():
            entry = plan[name]
            entry.widened(weight, theirs[name], factor=None if name in plan.parameters else entry.rule.weight)
    reason, gradients = _difference(small, large, plan, trials.given)
    trials.look(narrow, wide, gradients)
    if not reason and trials.strong is not None:
        del gradients
        reason, _ = _difference(small, large, plan, trials.strong)
        reason += _STRONGER if reason else ""
    return reason


def _difference(small: nn.Module, large: nn.Module, plan: Plan, batch: Any) -> tuple[str, dict[str, Tensor]]:
    """In which output or gradient two models differ on a batch, in words, and the narrow one's gradients."""
    for p in (*small.parameters(), *large.parameters()):
        p.grad = None
    ours, theirs = outputs_and_gradients(small, large, batch)
    _check_numbers(ours[0])
    _check_numbers([*ours[1].values()])
    for number, (a, b) in enumerate(zip(ours[0], theirs[0], strict=True)):
        if a.shape != b.shape:
            continue  # hidden units, which are copied
        if not are_close(a, b, loosened=5):
            return (
                f"output {number} of the wide model differs from the narrow one's by "
                f"{float((a - b).norm() / a.norm()):.1e} on the batch{_first_module(small, large, plan, batch)}"
            ), ours[1]
    largest = max(map(largest_number, ours[1].values()), default=0.0)
    for name, gradient in ours[1].items():
        entry = plan.parameters[name]
        expected = entry.widened(gradient, factor=entry.rule.gradient())
        if name in theirs[1] and not are_close(
            expected, theirs[1][name], loosened=1000, size=1e-3 * largest * entry.rule.gradient()
        ):
            return f"the copies of '{name}' do not each get their share of its gradient on the batch", ours[1]
    warn_of_kept_losses(small, large)
    return "", ours[1]


def _first_module(small: nn.Module, large: nn.Module, plan: Plan, batch: Any) -> str:
    """The module in which two models begin to differ, in words; none where no module's output shows it.

    What draws random numbers may differ for that alone.
    """
    if random := why_random(small, batch):
        return f" ({random})"
    with torch.no_grad(), Recorder(small) as ours, Recorder(large) as theirs:
        for model in (small, large):
            run_in_float64(model, batch)
    first = first_differing_module(ours, theirs, plan, 1e-8)
    return "" if first is None else f", and '{first.name}' is the first module that does (by {first.relative:.1e})"


def _check_numbers(tensors: Sequence[Tensor]) -> None:
    """What is nan on both sides looks equal, and so does nothing at all: there must be numbers to compare."""
    if tensors and not any(tensor.numel() for tensor in tensors):
        raise MupscaleError(EMPTY)
    for tensor in tensors:
        if tensor.isnan().all() and tensor.numel():
            raise MupscaleError(
                "the narrow model computes nan on the batch, so the check cannot tell whether copies are exact. Pass "
                "inputs on which outputs and gradients are finite"
            )


class _Search:
    """Pass after pass over the two runs, each under a better guess."""

    def __init__(self, narrow: nn.Module, wide: nn.Module, inputs: Any, how: How | None) -> None:
        self.how = how
        self.small, self.batch = in_float64(narrow, inputs, generic=0)
        self.large, _ = in_float64(wide, inputs, like=narrow)
        ours, theirs = saved_tensors(self.small), saved_tensors(self.large)
        check_same_names("the narrow model", ours, "the wide model", theirs, ONE_DEPTH, what="parameter or buffer")
        self.narrow_run = record_run(self.small, self.batch).run
        self.wide_run = record_run(self.large, self.batch).run
        _check_own_weights(narrow, self.narrow_run)
        self.compared = _comparable(self.narrow_run, self.wide_run)
        self.passes = 0

    def follow(self, guess: Guess) -> tuple[Follower, Stuck | None]:
        """One pass; where the wide model went another way (experts), again with the weights known by then."""
        self.passes += 1
        reached = -1
        while True:
            narrow_run, wide_run, shared = self.compared
            small, large = (
                Side(
                    replace(run, operations=run.operations[:shared]),
                    dict(saved_tensors(model)),
                    naming.parameters(model),
                )
                for run, model in ((narrow_run, self.small), (wide_run, self.large))
            )
            follower = Follower(small, large, guess)
            stuck = follower.follow()
            is_whole = shared == max(len(narrow_run.operations), len(wide_run.operations))
            is_fixed = is_whole and not any(op.depends_on_values for op in narrow_run.operations)
            if is_fixed or (is_whole and stuck is None) or len(follower.written) <= reached:
                break
            reached = len(follower.written)
            if not self._record_again(follower):
                break
        if stuck is None and not is_whole:
            raise _different_operations(narrow_run.operations, wide_run.operations, shared)
        return follower, stuck

    def _record_again(self, follower: Follower) -> bool:
        """Run the wide model with what is known of its weights; whether it did something else."""
        before = self.wide_run
        with torch.no_grad():
            for name, weight in saved_tensors(self.large).items():
                if name in follower.written:
                    weight.copy_(follower.large.weights[name])
        self.wide_run = record_run(self.large, self.batch).run
        self.compared = _comparable(self.narrow_run, self.wide_run)
        return not _same_run(before, self.wide_run)

    def roles(self, guess: Guess) -> dict[str, Role]:
        """What the pass that came through says of every weight that met data; an error where no guess helps.

        Nothing of a weight that is copied in several orders at once, as a recurrent layer's: its module knows it.
        """
        self.passes = 0
        follower, _ = self._get_past(*self.follow(guess), [guess])
        seen = {name: written for name, written in follower.written.items() if name not in follower.unseen}
        roles = {name: _role(name, written, follower.guess) for name, written in seen.items()}
        return {name: role for name, role in roles.items() if role is not None}

    def _get_past(
        self, follower: Follower, stuck: Stuck | None, tried: list[Guess], goal: int | None = None
    ) -> tuple[Follower, Stuck | None]:
        """Better guesses until one comes through, or past a position; an error where none does."""
        while stuck is not None and (goal is None or stuck.position <= goal):
            for better in suggestions(follower, stuck):
                if better in tried:
                    continue
                tried.append(better)
                other, where = self.follow(better)
                if where is not None and self._is_elsewhere(follower, stuck, where):
                    with suppress(MupscaleError):
                        other, where = self._get_past(other, where, tried, stuck.position)
                if where is None or where.position > stuck.position:
                    follower, stuck = other, where
                    break
                if self.passes > _MOST_PASSES:
                    raise refusal(follower, stuck, self.how)
            else:
                raise refusal(follower, stuck, self.how)
        return follower, stuck

    def _is_elsewhere(self, follower: Follower, stuck: Stuck, where: Stuck) -> bool:
        """Whether what makes an output right is wrong for another reader of the same units, such as a second head."""
        if stuck.factor is None or where.factor is not None:
            return False
        return where.position not in operations_before(follower, stuck.position)


def _check_own_weights(model: nn.Module, run_of_copy: RecordedRun) -> None:
    """An error where a copy of the model computes with weights of the model that it is a copy of."""
    originals = {id(p): name for name, p in naming.parameters(model).items()}
    for leaf in run_of_copy.leaves.values():
        if id(leaf) in originals:
            raise MupscaleError(
                f"a copy of the model still uses '{originals[id(leaf)]}' of the original: a function in the model "
                "refers to the model itself, and copy.deepcopy does not see "
                f"that{ways_out(forward='refer to it in forward instead', no_inputs='leave out inputs=')}"
            )


def _same_run(ours: RecordedRun, theirs: RecordedRun) -> bool:
    """Whether two runs of one model did the same, with the same constants."""
    steps = ([(op.function, op.args, op.kwargs) for op in run.operations] for run in (ours, theirs))
    constants = ({n: leaf for n, leaf in run.leaves.items() if n not in run.names} for run in (ours, theirs))
    first, second = constants
    return next(steps) == next(steps) and all(n in second and torch.equal(leaf, second[n]) for n, leaf in first.items())


def _comparable(ours: RecordedRun, theirs: RecordedRun) -> tuple[RecordedRun, RecordedRun, int]:
    """The two runs, and how many operations they have in common; without copies in memory if that is more."""
    shared = _count_shared_operations(ours.operations, theirs.operations)
    if shared == max(len(ours.operations), len(theirs.operations)):
        return ours, theirs, shared
    plain = without_copies(ours), without_copies(theirs)
    return *plain, _count_shared_operations(plain[0].operations, plain[1].operations)


def _count_shared_operations(ours: list[Operation], theirs: list[Operation]) -> int:
    """How many operations the two models have in common before they part."""
    for position, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        if a.function is not b.function or a.refs != b.refs or a.results != b.results:
            return position
    return min(len(ours), len(theirs))


def _different_operations(ours: list[Operation], theirs: list[Operation], position: int) -> MupscaleError:
    op = (ours if position < len(ours) else theirs)[position]
    return MupscaleError(
        f"the two models do not run the same operations: they differ from '{op.module or 'the model'}' on "
        f"({op.name}){ways_out('; ', build='build them alike but for their widths', no_inputs='leave out inputs=')}"
    )


def _guess_of(plan: Plan | None) -> Guess:
    if plan is None:
        return Guess()
    entries = {**plan.buffers, **plan.parameters}
    return Guess(
        {(name, d): axis for name, entry in entries.items() for d, axis in entry.axes.items() if axis.times != 1}
    )


def _role(name: str, written: Written, guess: Guess) -> Role | None:
    fold, offset = guess.folds.get(name, (1.0, 0.0))
    inputs, outputs = ([written.axes[d] for d in dims] for dims in (written.inputs, written.outputs))
    if any(axis.sections for axis in inputs) or any(len(set(axes)) > 1 for axes in (inputs, outputs)):
        return None
    return Role(
        out=written.outputs,
        in_=written.inputs,
        out_block=outputs[0] if outputs else 1,
        in_block=inputs[0] if inputs else 1,
        fold=_tidy(fold),
        offset=_tidy(offset),
    )


def _tidy(number: float) -> Number:
    fraction = Fraction(number).limit_denominator(4096)
    return tidy(fraction) if float(fraction) == number else number


_MOST_SHOWN = 3  # roles named in a message


def learn_roles(
    narrow: nn.Module, wide: nn.Module, inputs: Any, given: Mapping[str, Role], how: How | None = None
) -> dict[str, Role]:
    """By pattern: the roles that were given, and for all else those that a run shows; an error where they do not hold.

    how: what they are for, which a refusal then gives advice for.
    """
    pair = _Pair(narrow, wide, inputs, given, how)
    learnt = pair.learn()
    if reason := pair.what_differs(given, learnt):
        raise pair.refuse_given(learnt, reason)
    return _as_patterns(pair.merge(given, learnt), given)


def roles_for_any_width(narrow: nn.Module, wide: nn.Module, roles: Mapping[str, Role]) -> dict[str, Role]:
    """The roles, by pattern, with constants as powers of the multiplier where they were found as numbers."""
    plan = build_plan(narrow, wide, roles=roles, assume=True)
    made: dict[tuple[str, Role], Role] = {}  # one for all names of a tied tensor, which are to have equal roles
    for name, first in plan.names.items():
        role = find_role(roles, name)
        if role is not None and (first, role) not in made:
            made[first, role] = _for_any_width(name, role, plan[first])
    names = {
        name: made[first, role] for name, first in plan.names.items() if (role := find_role(roles, name)) is not None
    }
    return _as_patterns(names, roles)


def _for_any_width(name: str, role: Role, entry: Entry) -> Role:
    if all(constant is None or constant == 1 or callable(constant) for constant in (role.fold, role.keep)):
        return role
    times = float(entry.rule.in_ if entry.rule.in_ != 1 else entry.rule.out)
    if times == 1:
        pair = "plan the pair of models instead, with plan(narrow, wide, inputs=…)"
        raise MupscaleError(
            f"a constant that depends on the width would have to be stored in '{name}', which has no width. Remove "
            f"that constant from the model{ways_out(', or ', no_inputs=pair)}"
        )
    by_input = entry.rule.in_ != 1

    def as_power(constant: Number) -> Callable[[Number, Number], Number]:
        power = round(4 * math.log(float(constant)) / math.log(times)) / 4
        return lambda out, in_: float(in_ if by_input else out) ** power

    fold = role.fold if callable(role.fold) or role.fold == 1 else as_power(role.fold)
    keep = role.keep if role.keep is None or callable(role.keep) else as_power(role.keep)
    return replace(role, fold=fold, keep=keep)


def _as_patterns(by_name: Mapping[str, Role], given: Mapping[str, Role]) -> dict[str, Role]:
    """The roles by name first; what was given comes behind, so that patterns which name nothing are found."""
    exact = {escape(name): role for name, role in by_name.items()}
    return exact | {pattern: role for pattern, role in given.items() if pattern not in exact}


def _sides(role: Role, ndim: int, dims: Collection[int]) -> list[set[int]]:
    """Which of these dimensions are outputs, and which are inputs."""
    return [{*side} & {*dims} for side in role.dims(ndim)]


class _Pair:
    """Two models and a batch, and the roles that were given for them."""

    def __init__(
        self, narrow: nn.Module, wide: nn.Module, inputs: Any, given: Mapping[str, Role], how: How | None
    ) -> None:
        self.narrow, self.wide, self.given, self.how = narrow, wide, given, how
        self.trials = Trials.of(inputs).look(narrow, wide)

    def learn(self) -> dict[str, Role]:
        """What a run shows, by name; it begins with what the modules and the given roles say."""
        try:
            walked = build_plan(self.narrow, self.wide, roles=self.given, assume=True)
        except MupscaleError:
            walked = None
        if self.trials.strong is not None and self.trials.given_shows_all:  # a small batch, which is followed sooner
            with suppress(MupscaleError):
                roles = self._run(self.trials.given, walked)
                if not self.what_differs(self.given, roles):
                    return roles
        try:
            return self._run(self.trials.best, walked)
        except MupscaleError as error:
            if not self.given:
                raise
            with suppress(MupscaleError):  # where they are wrong, they mislead the search
                return roles_by_running(self.narrow, self.wide, self.trials.best)
            if walked is None:
                raise
            reason = what_differs(self.narrow, self.wide, walked, self.trials)
            raise MupscaleError(
                f"{error}. The roles given for {_listed(self.given)}, with the modules' roles for the rest, fail the "
                f"check, too: {reason}"
            ) from None

    def _run(self, batch: Any, walked: Plan | None) -> dict[str, Role]:
        told, fresh = self._given_by_name(), self.how == "fresh"
        return roles_by_running(self.narrow, self.wide, batch, walked, told, self.how, own_constants=fresh)

    def _given_by_name(self) -> dict[str, Role]:
        """Of a tied tensor under its first name, as it is saved."""
        groups = naming.aliases(all_tensors(self.narrow).items())
        told = {group[0]: [role for name in group if (role := find_role(self.given, name))] for group in groups}
        return {first: roles[0] for first, roles in told.items() if roles}

    def merge(self, given: Mapping[str, Role], learnt: Mapping[str, Role]) -> dict[str, Role]:
        """By name, what was given, else what was learnt; of a tied tensor what was given for another name of it.

        But not where the other name was learnt to be used in another way, as a readout uses an embedding's weight.
        """
        named = all_tensors(self.narrow)
        ndim = {name: tensor.dim() for name, tensor in named.items()}
        merged = dict(learnt)
        for group in naming.aliases(named.items()):
            told = {name: role for name in group if (role := find_role(given, name)) is not None}
            merged |= told
            for name in group if told else ():
                if name in learnt and name not in told:
                    own = learnt[name]
                    dims = [d for side in own.dims(ndim[name]) for d in side]
                    sides = _sides(own, ndim[name], dims)
                    alike = (role for role in told.values() if _sides(role, ndim[name], dims) == sides)
                    merged[name] = next(alike, own)
        return merged

    def what_differs(self, given: Mapping[str, Role], learnt: Mapping[str, Role]) -> str:
        """Why the plan that these roles make is wrong; nothing where it is right."""
        roles = _as_patterns(self.merge(given, learnt), given)
        return what_differs(
            self.narrow, self.wide, build_plan(self.narrow, self.wide, roles=roles, assume=True), self.trials
        )

    def _stand(self, given: Mapping[str, Role], learnt: Mapping[str, Role]) -> bool:
        with suppress(MupscaleError):
            return not self.what_differs(given, learnt)
        return False

    def refuse_given(self, learnt: Mapping[str, Role], reason: str) -> MupscaleError:
        """Which of the given roles is wrong, and what a run shows in its place."""
        without = {wrong: {p: role for p, role in self.given.items() if p != wrong} for wrong in self.given}
        wrong = [pattern for pattern, others in without.items() if self._stand(others, learnt)]
        if not wrong and self.given and self._stand({}, learnt):
            wrong = list(self.given)
        if not wrong:
            said = ways_out("; ", roles="pass roles=")
            return MupscaleError(f"the plan is wrong, and so is the one that a run of the models shows: {reason}{said}")
        shown = {name: role for name, role in learnt.items() if any(fnmatchcase(name, pattern) for pattern in wrong)}
        instead = "; ".join(f"{role} for '{name}'" for name, role in list(shown.items())[:_MOST_SHOWN])
        advice = f"A run of the models shows {instead}: use that, or leave" if instead else "Leave"
        given = _listed({pattern: self.given[pattern] for pattern in wrong})
        one = len(wrong) == 1
        return MupscaleError(
            f"the {'role' if one else 'roles'} given for {given}, {'does' if one else 'do'} not pass the check: "
            f"{reason}. {advice} {'it' if one else 'them'} out"
        )


def _listed(roles: Mapping[str, Role]) -> str:
    return "; for ".join(f"'{pattern}', {role}" for pattern, role in roles.items())
