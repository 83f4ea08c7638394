"""A plan read off the computation: guess, follow the units, and where that gets stuck, guess better."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn

from mupscale.core import Number, Plan, Role, check_same_names, naming, tidy
from mupscale.planning.better_guesses import refusal, suggestions
from mupscale.planning.copied_values import are_close, explanations, largest_number
from mupscale.planning.following import Follower
from mupscale.planning.full_size import check_at_full_size, is_large
from mupscale.planning.growth_checks import ONE_DEPTH, How
from mupscale.planning.guesses import Guess, Side, Stuck, Written, guess_with_roles
from mupscale.planning.memory_layouts import without_copies
from mupscale.planning.module_differences import first_differing_module
from mupscale.planning.output_gradients import outputs_and_gradients
from mupscale.planning.recorder import Recorder
from mupscale.planning.silent_changes import warn_of_kept_losses
from mupscale.planning.source_units import operations_before
from mupscale.planning.stronger_batches import EMPTY
from mupscale.planning.tracing import (
    Operation,
    RecordedRun,
    in_float64,
    record_run,
    run_in_float64,
    saved_tensors,
    why_random,
)
from mupscale.planning.trials import Trials
from mupscale.system import MupscaleError, ways_out

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

    >>> import torch
    >>> class Plain(nn.Module):
    ...     def __init__(self, width):
    ...         super().__init__()
    ...         self.a, self.b = nn.Parameter(torch.randn(3, width)), nn.Parameter(torch.randn(width, 2))
    ...     def forward(self, x):
    ...         return torch.tanh(x @ self.a) @ self.b
    >>> roles = roles_by_running(Plain(4), Plain(8), torch.randn(5, 3))
    >>> roles["a"].out, roles["b"].in_
    ((1,), (0,))
    """
    search = _Search(narrow, wide, inputs, how)
    sides = saved_tensors(search.small), saved_tensors(search.large)
    guess = guess_with_roles(_guess_of(walked), given or {}, *sides)
    error = None
    for products in (False, True):
        try:
            better = replace(guess, products=products, own_constants=own_constants)
            roles = {**_computed_buffers(search.small, search.large), **search.roles(better)}
            whole = naming.unwrap(narrow)
            named = [*whole.named_parameters(remove_duplicate=False), *whole.named_buffers(remove_duplicate=False)]
            tied = [group for group in naming.aliases(named) if group[0] in roles]
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
    """An error unless models with generic weights, one widened as planned, give equal outputs and gradients in float64.

    >>> import torch, mupscale as mu
    >>> check_plan_by_running(nn.Linear(2, 3), nn.Linear(4, 3), mu.Plan({}), torch.ones(1, 2))
    Traceback (most recent call last):
    mupscale.system.errors.MupscaleError: ...
    """
    trials = Trials.of(inputs)
    if reason := what_differs(narrow, wide, plan, trials):
        raise MupscaleError(f"the plan is wrong: {reason}{ways_out('; ', **_REMEDIES)}")
    if trials is not inputs:
        trials.warn()


@torch.enable_grad()
def what_differs(narrow: nn.Module, wide: nn.Module, plan: Plan, inputs: Any) -> str:
    """What `check_plan_by_running` finds wrong, in words; nothing where the plan is right.

    Large models are compared in float32, block by block.

    >>> import torch, mupscale as mu
    >>> narrow, wide = (nn.Sequential(nn.Linear(3, n), nn.Linear(n, 2)) for n in (4, 8))
    >>> what_differs(narrow, wide, mu.plan(narrow, wide), torch.ones(1, 3))
    ''
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
        self.narrow_run = record_run(self.small, self.batch)
        self.wide_run = record_run(self.large, self.batch)
        _check_own_weights(narrow, self.narrow_run)
        self.compared = _comparable(self.narrow_run, self.wide_run)
        self.has_recorded_again = False
        self.passes = 0

    def follow(self, guess: Guess, earlier: Follower | None = None) -> tuple[Follower, Stuck | None]:
        """One pass; where the wide model went another way (experts), again with the weights known by then.

        earlier: a pass under another guess, of which what does not depend on the difference is taken over.
        """
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
            if earlier is not None and not self.has_recorded_again:
                follower.go_on_from(earlier)
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
        self.wide_run = record_run(self.large, self.batch)
        self.has_recorded_again = True
        self.compared = _comparable(self.narrow_run, self.wide_run)
        return not _same_run(before, self.wide_run)

    def roles(self, guess: Guess) -> dict[str, Role]:
        """What a pass that came through says of every weight that met data."""
        follower = self.run(guess)
        return {
            name: _role(name, written, follower.guess)
            for name, written in follower.written.items()
            if name not in follower.unseen
        }

    def run(self, guess: Guess) -> Follower:
        """The pass that came through; an error where no guess helps."""
        self.passes = 0
        return self._get_past(*self.follow(guess), [guess])[0]

    def _get_past(
        self, follower: Follower, stuck: Stuck | None, tried: list[Guess], goal: int | None = None
    ) -> tuple[Follower, Stuck | None]:
        """Better guesses until one comes through, or past a position; an error where none does."""
        while stuck is not None and (goal is None or stuck.position <= goal):
            for better in suggestions(follower, stuck):
                if better in tried:
                    continue
                tried.append(better)
                other, where = self.follow(better, follower)
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


def _role(name: str, written: Written, guess: Guess) -> Role:
    fold, offset = guess.folds.get(name, (1.0, 0.0))
    inputs, outputs = ([written.axes[d] for d in dims] for dims in (written.inputs, written.outputs))
    if any(axis.sections for axis in inputs) or any(len(set(axes)) > 1 for axes in (inputs, outputs)):
        raise MupscaleError(f"'{name}' would be copied in several orders at once{ways_out(roles='pass roles= for it')}")
    return Role(
        out=written.outputs,
        in_=written.inputs,
        out_block=outputs[0].block if outputs else 1,
        in_block=inputs[0].block if inputs else 1,
        out_sections=outputs[0].sections if outputs else (),
        fold=_tidy(fold),
        offset=_tidy(offset),
    )


def _tidy(number: float) -> Number:
    fraction = Fraction(number).limit_denominator(4096)
    return tidy(fraction) if float(fraction) == number else number
