"""A plan between two models: from their modules, or, where there is a batch, read off the computation.

That is: guess, follow the units, and where that gets stuck, guess better; then check it. What is found are roles,
beside those that the user gave, and for all widths of a family.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from fnmatch import fnmatchcase
from fractions import Fraction
from glob import escape
from typing import Any, Protocol, runtime_checkable

from torch import nn

from mupscale.core import Entry, Number, Plan, Role, naming
from mupscale.planning.comparing import Shapes, compare_copies, in_full_precision, is_large
from mupscale.planning.following import roles_by_running
from mupscale.planning.from_modules import How, build_plan, find_role, find_uneven, joins_what_stays
from mupscale.planning.initial_values import initial_std, measure_laws, with_laws
from mupscale.planning.miniatures import Resizing, find_miniatures, roles_of
from mupscale.planning.silent_units import check_silent_units, find_past_norms, keeps_outputs, with_keeps
from mupscale.planning.tracing import all_tensors, in_float64, run_in_float64, tensors_in
from mupscale.planning.trials import Trials
from mupscale.system import MupscaleError, checks_arguments, not_advising, seeded, warn, ways_out


@runtime_checkable
class GrowsBy(Protocol):
    """What a plan has to know of the operator that it is for: whether it wants whole multiples."""

    needs_multiples: bool


@checks_arguments
def plan(
    narrow: nn.Module,
    wide: nn.Module,
    *,
    roles: Mapping[str, Role] | None = None,
    fresh: nn.Module | Callable[[], nn.Module] | None = None,
    grow: GrowsBy | None = None,
    inputs: Any = None,
) -> Plan:
    """How `narrow` widens to `wide`, two modules of one class; `wide` may be on the meta device.

    inputs: a small batch, as the models are called with it (a tensor, a tuple of arguments, a dict of keywords). Both
    models are run on it, and the plan is read off what they compute, whatever their modules are; it is checked before
    it is returned. A batch that does not show all of the models, such as zeros, is tried beside a stronger one of its
    kind; what neither shows is named in a warning. Without a batch module types and attribute names decide.
    roles: by name pattern (`{"head.weight": Role(out=0, in_=1, in_block=49)}`), for what the modules cannot tell.
    fresh: a freshly built narrow model, or the function that builds it. Noise can then be given in units of the
    model's own initialisation, and fresh units can be drawn from it.
    grow: what is to be done with the plan, `Copies()` if nothing is said; with `Fresh()` any wider width will do.

    >>> import mupscale as mu
    >>> from mupscale.models import MLP
    >>> mu.plan(MLP(3, 8, 2), MLP(3, 32, 2))["layers.1.weight"].rule
    Rule(out=4, in_=4, fold=1)
    """
    how: How = "copies" if grow is None or grow.needs_multiples else "fresh"
    if inputs is None:
        widening = build_plan(narrow, wide, roles=roles, how=how)
    else:
        with not_advising("inputs"):  # which are given
            found = plan_by_miniature(narrow, wide, inputs, roles or {}, how) if is_large(narrow, wide) else None
            widening, trials = found or plan_and_look(narrow, wide, inputs, roles or {}, how)
        trials.warn(roles)
        warn_of_growing_outputs(narrow, wide, widening, inputs, roles, trials.shapes)
    warn_of_staying_inputs(widening)
    return widening if fresh is None else with_initial_of(widening, fresh)


def warn_of_staying_inputs(plan: Plan) -> None:
    """Warn where one tensor reads inputs that grow and inputs that stay.

    An optimizer has one rate for it, and the two want different ones: that of inputs that grow is divided by their
    multiplier, that of inputs that stay is not. Weights, gradients and optimizer state are exact all the same: copies
    train as the narrow model does, to 1e-15, if each step of the columns that stay is multiplied by the multiplier.
    Without that, a graph network of two layers at twice its width is off by 5e-2 (Adam) to 1e-1 (SGD with momentum)
    within 20 steps, relative to its outputs; its loss after 500 steps was no worse.
    """
    if not plan.joined:
        return
    first, *others = plan.joined
    and_more = f" (and {len(others)} more)" if others else ""
    warn(
        f"'{first}'{and_more} reads inputs that grow and inputs that do not. A parameter has one learning rate, so "
        "that all of its inputs train at the rate of those that grow. That is too slow for the others, and copies do "
        "not train exactly as the narrow model does. If it matters, give the inputs that do not grow a layer of their "
        "own, and add what the two layers give"
    )


def plan_and_look(
    narrow: nn.Module, wide: nn.Module, inputs: Any, roles: Mapping[str, Role], how: How
) -> tuple[Plan, Trials]:
    """The plan that runs of the two models show, in float64, and what they were tried on."""
    trials = Trials(inputs)
    with in_full_precision():
        try:
            widening = _plan_by_running(narrow, wide, trials, dict(roles), how)
        except MupscaleError:
            _check_that_the_wide_one_runs(narrow, wide, inputs)
            raise
        if widening.norms:
            widening = widening.with_initial("past_norms", find_past_norms(narrow, wide, widening, trials.best))
    return widening, trials


def _check_that_the_wide_one_runs(narrow: nn.Module, wide: nn.Module, inputs: Any) -> None:
    """An error where the narrow model runs on the batch and the wide one does not: then no plan is to blame."""
    for model in (narrow, wide):
        try:
            run_in_float64(*in_float64(model, inputs, like=narrow))
        except MupscaleError as error:
            if model is narrow or (cause := error.__cause__) is None:
                return
            said = " ".join(f"{type(cause).__name__}: {cause}".split())
            raise MupscaleError(
                f"the wide model itself does not run on the batch ({said}), and the narrow one does: build one that "
                "runs"
            ) from cause


def plan_by_miniature(
    narrow: nn.Module, wide: nn.Module, inputs: Any, roles: Mapping[str, Role], how: How
) -> tuple[Plan, Trials] | None:
    """The same for large models: as a miniature of theirs shows it, if that holds for the models themselves.

    None where there is no miniature, or where it misleads. What a miniature is refused for, the models are, too.
    """
    error: MupscaleError | None = None
    for mini in find_miniatures(narrow, wide, inputs):
        try:
            shown, trials = plan_and_look(mini.narrow, mini.wide, mini.inputs, mini.given(roles), how)
        except MupscaleError as refused:
            error = error or refused
            continue
        with suppress(Exception):  # whatever the models raise that the miniature did not: then they are looked at
            learnt = mini.patterns({escape(name): role for name, role in roles_of(shown).items()}, roles)
            planned = replace(build_plan(narrow, wide, roles=learnt, how=how, assume=True), tried_by=shown.tried_by)
            if shown.past_norms is not None:
                planned = planned.with_initial("past_norms", mini.by_original(shown.past_norms))
            trials.renamed(mini.originals)
            if planned.mup and find_uneven(narrow, wide):
                holds = keeps_outputs(narrow, wide, planned, trials)
            else:
                exact = {escape(name): role for name, role in roles_of(planned).items()}
                copies = build_plan(narrow, wide, roles=exact, assume=True) if planned.mup else planned
                holds = not what_differs(narrow, wide, copies, trials)
            if holds:
                return planned, trials
        return None
    if error is not None:
        raise error
    return None


def with_initial_of(widening: Plan, fresh: nn.Module | Callable[[], nn.Module]) -> Plan:
    """The plan with the initial values of a freshly built narrow model, or of those that a function builds."""
    draws = [fresh] if isinstance(fresh, nn.Module) else []
    for seed in range(0 if isinstance(fresh, nn.Module) else 2):
        with seeded(seed):  # so that what grows by it is the same, too
            draws.append(fresh())
    for draw in draws:
        widening.check(draw, "narrow", is_fresh=True)
    initial = [naming.parameters(draw) for draw in draws]
    laws = measure_laws(initial, initial_std(initial), lambda name: widening[name].axes)
    return with_laws(widening, widening.parameters, laws)


def _plan_by_running(narrow: nn.Module, wide: nn.Module, trials: Trials, roles: dict[str, Role], how: How) -> Plan:
    """The plan that the modules suggest, if it stands the check; else the one that the run shows."""
    is_uneven = bool(find_uneven(narrow, wide))
    if how == "fresh" and is_uneven:
        return _plan_with_silent_units(narrow, wide, trials, roles)
    is_joined = is_uneven and joins_what_stays(narrow, wide)  # a run may show what stays
    if is_uneven and not is_joined:
        build_plan(narrow, wide, roles=roles, assume=True)  # it says which size is none, where a run could not
    stands = False
    with suppress(Exception):  # whatever the modules mislead to; then the run may tell
        stands = not what_differs(narrow, wide, build_plan(narrow, wide, roles=roles, assume=True), trials)
    if not stands:
        try:
            roles = learn_roles(narrow, wide, trials, roles, how)
        except MupscaleError:
            _check_vocabulary(narrow, wide, roles)
            if how == "fresh":  # which may do where no copies are exact
                with suppress(MupscaleError):
                    return _plan_with_silent_units(narrow, wide, trials, roles)
                with suppress(MupscaleError):
                    return _plan_between_constants(narrow, wide, trials, roles)
                roles_by_running(narrow, wide, trials.best, roles, how)  # it names constants that are no copies
            if is_joined:
                build_plan(narrow, wide, roles=roles, assume=True)
            raise
    roles = with_keeps(narrow, wide, roles, trials) if how == "fresh" else roles
    return replace(build_plan(narrow, wide, roles=roles, how=how, assume=True), tried_by="copies")


def _check_vocabulary(narrow: nn.Module, wide: nn.Module, roles: Mapping[str, Role]) -> None:
    """An error where a table has another number of rows, which a run would tell as units that are no copies."""
    theirs = naming.modules(wide)
    for path, module in naming.modules(narrow).items():
        few, many = (getattr(one, "num_embeddings", None) for one in (module, theirs.get(path)))
        if few and many and few != many and not roles:
            raise MupscaleError(
                f"'{path}' is a table of {few} rows in the narrow model and of {many} in the wide one: that is the "
                "vocabulary or a number of positions, not a width. Keep that size"
            )


def _plan_with_silent_units(narrow: nn.Module, wide: nn.Module, trials: Trials, roles: dict[str, Role]) -> Plan:
    """For fresh units where there are no copies to follow: from the modules, tried with the new units silent.

    Where these mislead, roles are learnt at twice the size. They have to hold at the size that was asked for: with the
    new units silent, or, where a norm that is no module sees those, for copies of the wide model's own units.
    """
    try:
        planned = build_plan(narrow, wide, roles=roles, how="fresh")
        check_silent_units(narrow, wide, planned, trials)
    except MupscaleError as error:
        if error.__cause__ is not None:  # the model does not run on the batch
            raise
        try:
            return _plan_from_twice(narrow, wide, trials, roles)
        except MupscaleError as refused:
            if refused.__cause__ is not None:  # it is the model at twice the size that does not run, and not the user's
                raise error from None
            both = f"{refused}. That is from a run at twice the size. By the modules alone: {error}"
            raise type(error)(str(error) if str(refused) in str(error) else both) from None
    return replace(planned, tried_by="silent units")


def _plan_from_twice(narrow: nn.Module, wide: nn.Module, trials: Trials, roles: dict[str, Role]) -> Plan:
    sizes = Resizing(narrow, wide)
    twice = sizes.copy(narrow, Fraction(2))
    learnt = with_keeps(narrow, twice, learn_roles(narrow, twice, trials, roles, "fresh"), trials)
    learnt = roles_for_any_width(narrow, twice, learnt)
    planned = build_plan(narrow, wide, roles=learnt, how="fresh", assume=True)
    if keeps_outputs(narrow, wide, planned, trials):
        return replace(planned, tried_by="silent units")
    if keeps_outputs(narrow, twice, build_plan(narrow, twice, roles=learnt, how="fresh", assume=True), trials):
        raise MupscaleError("a constant follows no power of the width")
    wider = sizes.copy(wide, Fraction(2))
    check_plan_by_running(wide, wider, build_plan(wide, wider, roles=learnt, assume=True), trials)
    return replace(planned, tried_by="copies")


def _plan_between_constants(narrow: nn.Module, wide: nn.Module, trials: Trials, given: dict[str, Role]) -> Plan:
    """For fresh units where the wide model's constants are no copies, but the narrow one's are among them.

    So are ALiBi's slopes, those of n heads among those of 2n, if old heads are the last of those in their place.
    """
    shown = roles_by_running(narrow, wide, trials.best, None, "fresh", own_constants=True)
    for last in (True, False):  # of the blocks that come in the place of an old one
        roles = {
            name: replace(role, out_block=replace(role.out_axis, last=last), in_block=replace(role.in_axis, last=last))
            for name, role in (shown | given).items()
        }
        planned = build_plan(narrow, wide, roles=with_keeps(narrow, wide, roles, trials), how="fresh", assume=True)
        if keeps_outputs(narrow, wide, planned, trials):
            return replace(planned, tried_by="silent units")
    raise MupscaleError("the wide model has constants among which those of the narrow one do not lie")


def warn_of_growing_outputs(
    narrow: nn.Module,
    wide: nn.Module,
    plan: Plan,
    inputs: Any,
    roles: Mapping[str, Role] | None = None,
    shapes: Sequence[Shapes] = (),
) -> None:
    """Warn where an output grows that nothing in the model reads, as a number of classes does by mistake.

    Hidden units that a model hands out are read by its own layers. roles: of the user, who knows what has one.
    shapes: of the two models' outputs, where they are known.
    """
    entries = plan.parameters
    read = set[tuple[int, int]]()
    for entry in entries.values():
        for d in entry.in_:
            n, wide_n, block = entry.narrow[d], entry.wide[d], entry.axes[d].block
            read |= {(n, wide_n), (n // block, wide_n // block)}  # as channels are, after a flatten
    unread: dict[tuple[int, int], list[str]] = {}
    for name, entry in entries.items():
        for d in entry.out:
            if entry.axes[d].times != 1 and (sizes := (entry.narrow[d], entry.wide[d])) not in read:
                unread.setdefault(sizes, []).append(name)
    if not unread:
        return
    models = (in_float64(model, inputs, like=narrow) for model in (narrow, wide))
    shapes = shapes or [[tuple(t.shape) for t in tensors_in(run_in_float64(*pair))] for pair in models]
    for number, (before, after) in enumerate(zip(*shapes, strict=False)):
        for sizes in zip(before, after, strict=False):
            writers = unread.get(sizes, [])
            if writers and not any(find_role(roles or {}, alias) for name in writers for alias in entries[name].names):
                name = max(writers, key=lambda name: len(entries[name].narrow))
                warn(
                    f"output {number} of the model grows from {sizes[0]} to {sizes[1]}, written by '{name}', and "
                    f"nothing in the model reads it. If these are classes or tokens, build the wide model with "
                    f"{sizes[0]}: otherwise {'new ones are drawn' if plan.mup else 'each is there several times'}, "
                    "which changes what the model says. If they are features for other code, say that they are meant "
                    f"to grow: roles={{'{name}': mupscale.{Role(out=entries[name].out, in_=entries[name].in_)}}}"
                )


_STRONGER = " (a stronger batch of the same kind: yours leaves parts of the model unseen)"


def check_plan_by_running(narrow: nn.Module, wide: nn.Module, plan: Plan, inputs: Any) -> None:
    """An error unless models with generic weights, one widened as planned, agree in outputs and gradients."""
    trials = Trials.of(inputs)
    if reason := what_differs(narrow, wide, plan, trials):
        run = "make the plan by running the models, plan(narrow, wide, inputs=…)"
        ways = ways_out("; ", inputs=run, roles="pass roles= for what it gets wrong")
        raise MupscaleError(f"the plan is wrong: {reason}{ways}")
    if trials is not inputs:
        trials.warn()


def what_differs(narrow: nn.Module, wide: nn.Module, plan: Plan, trials: Trials) -> str:
    """What `check_plan_by_running` finds wrong, in words; nothing where the plan is right."""
    found = compare_copies(narrow, wide, plan, trials.given)
    if is_large(narrow, wide):
        trials.shapes = found.shapes
    if found.reason:
        return found.reason
    trials.look(narrow, wide, found.gradients or None)
    reason = "" if trials.strong is None else compare_copies(narrow, wide, plan, trials.strong).reason
    return f"{reason}{_STRONGER}" if reason else ""


_MOST_SHOWN = 3  # roles named in a message


def learn_roles(
    narrow: nn.Module, wide: nn.Module, inputs: Any, given: Mapping[str, Role], how: How | None = None
) -> dict[str, Role]:
    """By pattern: the roles that were given, and for all else those that a run shows; an error where they do not hold.

    how: what they are for, which a refusal then gives advice for.
    """
    trials = Trials.of(inputs).look(narrow, wide)

    def differs(given: Mapping[str, Role], learnt: Mapping[str, Role]) -> str:
        roles = _merged(narrow, given, learnt)
        return what_differs(narrow, wide, build_plan(narrow, wide, roles=roles, assume=True), trials)

    def learn(start: Mapping[str, Role] | None) -> dict[str, Role]:
        return roles_by_running(narrow, wide, trials.best, start, how, own_constants=how == "fresh")

    try:
        learnt = learn(given)
    except MupscaleError as error:
        if not given:
            raise
        try:  # where they are wrong, they mislead the search
            learnt = learn(None)
        except MupscaleError:
            raise error from None
    if reason := differs(given, learnt):
        raise _refuse_given(given, learnt, reason, differs)
    return _merged(narrow, given, learnt)


def _merged(narrow: nn.Module, given: Mapping[str, Role], learnt: Mapping[str, Role]) -> dict[str, Role]:
    """By pattern, what was given, else what was learnt; of a tied tensor what was given for another name of it.

    But not where the other name was learnt to be used in another way, as a readout uses an embedding's weight.
    """
    named, merged = all_tensors(narrow), dict(learnt)
    for group in naming.aliases(named.items()):
        told = {name: role for name in group if (role := find_role(given, name)) is not None}
        merged |= told
        for name in group if told else ():
            if name in learnt and name not in told:
                sides = learnt[name].dims(named[name].dim())
                used = sum(sides, ())
                for role in reversed(told.values()):
                    theirs = role.dims(named[name].dim())
                    if tuple(tuple(d for d in side if d in used) for side in theirs) == sides:
                        merged[name] = role
    return _as_patterns(merged, given)


def _refuse_given(
    given: Mapping[str, Role], learnt: Mapping[str, Role], reason: str, differs: Callable[..., str]
) -> MupscaleError:
    """Which of the given roles is wrong, and what a run shows in its place."""

    def stand(others: Mapping[str, Role]) -> bool:
        with suppress(MupscaleError):
            return not differs(others, learnt)
        return False

    wrong = [pattern for pattern in given if stand({p: role for p, role in given.items() if p != pattern})]
    if not wrong and given and stand({}):
        wrong = list(given)
    if not wrong:
        said = ways_out("; ", roles="pass roles=")
        return MupscaleError(
            f"no plan was found for this pair of models: with the roles that a run of the models shows, {reason}{said}"
        )
    shown = {name: role for name, role in learnt.items() if any(fnmatchcase(name, pattern) for pattern in wrong)}
    instead = "; ".join(f"{role} for '{name}'" for name, role in list(shown.items())[:_MOST_SHOWN])
    advice = f"A run of the models shows {instead}: use that, or leave" if instead else "Leave"
    listed, one = "; for ".join(f"'{pattern}', {given[pattern]}" for pattern in wrong), len(wrong) == 1
    return MupscaleError(
        f"the {'role' if one else 'roles'} given for {listed}, {'does' if one else 'do'} not pass the check: "
        f"{reason}. {advice} {'it' if one else 'them'} out"
    )


def roles_for_any_width(narrow: nn.Module, wide: nn.Module, roles: Mapping[str, Role]) -> dict[str, Role]:
    """The roles, by pattern, with constants as powers of the multiplier where they were found as numbers."""
    plan = build_plan(narrow, wide, roles=roles, assume=True)
    made: dict[tuple[str, Role], Role] = {}  # one for all names of a tied tensor, which are to have equal roles
    names = {}
    for name, first in plan.names.items():
        if (role := find_role(roles, name)) is not None:
            names[name] = made.get((first, role)) or _for_any_width(name, role, plan[first])
            made[first, role] = names[name]
    return _as_patterns(names, roles)


def _for_any_width(name: str, role: Role, entry: Entry) -> Role:
    constants = {"fold": role.fold, "keep": role.keep}
    numbers: dict[str, Any] = {key: c for key, c in constants.items() if c is not None and not callable(c)}
    if all(constant == 1 for constant in numbers.values()):
        return role
    by_input = entry.rule.in_ != 1
    times = float(entry.rule.in_ if by_input else entry.rule.out)
    if times == 1:
        pair = "plan the pair of models instead, with plan(narrow, wide, inputs=…)"
        raise MupscaleError(
            f"a constant that depends on the width would have to be stored in '{name}', which has no width. Remove "
            f"that constant from the model{ways_out(', or ', no_inputs=pair)}"
        )

    def as_power(constant: Number) -> Callable[[Number, Number], Number]:
        power = round(4 * math.log(float(constant)) / math.log(times)) / 4
        return lambda out, in_: float(in_ if by_input else out) ** power

    powers: dict[str, Any] = {key: as_power(c) for key, c in numbers.items() if key == "keep" or c != 1}
    return replace(role, **powers)


def _as_patterns(by_name: Mapping[str, Role], given: Mapping[str, Role]) -> dict[str, Role]:
    """The roles by name first; what was given comes behind, so that patterns which name nothing are found."""
    exact = {escape(name): role for name, role in by_name.items()}
    return exact | {pattern: role for pattern, role in given.items() if pattern not in exact}
