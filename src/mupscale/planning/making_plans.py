"""A plan between two models: from their modules, or, where there is a batch, by running them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from glob import escape
from typing import Any, Protocol, runtime_checkable

from torch import nn

from mupscale.core import Plan, Role, gather_whole, naming
from mupscale.planning.comparing import in_full_precision, is_large
from mupscale.planning.from_modules import How, build_plan, find_uneven
from mupscale.planning.from_run import (
    check_plan_by_running,
    learn_roles,
    roles_by_running,
    roles_for_any_width,
    warn_of_growing_outputs,
    what_differs,
)
from mupscale.planning.initial import initial_means, initial_std, with_initial
from mupscale.planning.miniatures import Resizing, find_miniatures, roles_of
from mupscale.planning.silent_units import check_silent_units, find_past_norms, keeps_outputs, with_keeps
from mupscale.planning.trials import Trials
from mupscale.system import MupscaleError, checks_arguments, not_advising, seeded


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
    return widening if fresh is None else with_initial_of(widening, fresh)


def plan_and_look(
    narrow: nn.Module, wide: nn.Module, inputs: Any, roles: Mapping[str, Role], how: How
) -> tuple[Plan, Trials]:
    """The plan that runs of the two models show, in float64, and what they were tried on."""
    trials = Trials(inputs)
    with in_full_precision():
        widening = _plan_by_running(narrow, wide, trials, dict(roles), how)
        if widening.norms:
            widening = widening.with_initial("past_norms", find_past_norms(narrow, wide, widening, trials.best))
    return widening, trials


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
            planned = mini.at_full_size(shown, narrow, wide, roles, how)
            trials.renamed(mini.originals)
            if _holds_at_full_size(narrow, wide, planned, trials):
                return planned, trials
        return None
    if error is not None:
        raise error
    return None


def _holds_at_full_size(narrow: nn.Module, wide: nn.Module, planned: Plan, trials: Trials) -> bool:
    if planned.mup and find_uneven(narrow, wide):
        return keeps_outputs(narrow, wide, planned, trials)
    if planned.mup:
        roles = {escape(name): role for name, role in roles_of(planned).items()}
        planned = build_plan(narrow, wide, roles=roles, assume=True)
    return not what_differs(narrow, wide, planned, trials)


def with_initial_of(widening: Plan, fresh: nn.Module | Callable[[], nn.Module]) -> Plan:
    """The plan with the initial values of a freshly built narrow model, or of those that a function builds."""
    draws = [fresh] if isinstance(fresh, nn.Module) else []
    for seed in range(0 if isinstance(fresh, nn.Module) else 2):
        with seeded(seed):  # so that what grows by it is the same, too
            draws.append(fresh())
    for draw in draws:
        widening.check(draw, "narrow")
    initial = [naming.parameters(draw) for draw in draws]
    stds = initial_std(initial)
    return with_initial(widening, widening.parameters, stds, initial_means(initial, stds))


def with_initial_of_wide(widening: Plan, wide: nn.Module) -> Plan:
    """The plan with the initial values of the wide model, as its author built it; unchanged where it has no memory."""
    values = {name: gather_whole(p.detach()) for name, p in naming.parameters(wide).items()}
    if any(value.is_meta or not value.isfinite().all() for value in values.values()):
        return widening
    draw = {name: nn.Parameter(value, requires_grad=False) for name, value in values.items()}
    stds = initial_std([draw])
    return widening.with_initial("std", stds).with_initial("means", initial_means([draw], stds))


def _plan_by_running(narrow: nn.Module, wide: nn.Module, trials: Trials, roles: dict[str, Role], how: How) -> Plan:
    """The plan that the modules suggest, if it stands the check; else the one that the run shows."""
    is_uneven = bool(find_uneven(narrow, wide))
    if how == "fresh" and is_uneven:
        return _plan_with_silent_units(narrow, wide, trials, roles)
    if is_uneven:
        build_plan(narrow, wide, roles=roles, assume=True)  # it says which size is none, where a run could not
    stands = False
    with suppress(Exception):  # whatever the modules mislead to; then the run may tell
        stands = not what_differs(narrow, wide, build_plan(narrow, wide, roles=roles, assume=True), trials)
    if not stands:
        try:
            roles = learn_roles(narrow, wide, trials, roles, how)
        except MupscaleError:
            check_vocabulary(narrow, wide, roles)
            if how == "fresh":  # which may do where no copies are exact
                with suppress(MupscaleError):
                    return _plan_with_silent_units(narrow, wide, trials, roles)
                with suppress(MupscaleError):
                    return _plan_between_constants(narrow, wide, trials, roles)
            raise
    roles = with_keeps(narrow, wide, roles, trials) if how == "fresh" else roles
    return replace(build_plan(narrow, wide, roles=roles, how=how, assume=True), tried_by="copies")


def check_vocabulary(narrow: nn.Module, wide: nn.Module, roles: Mapping[str, Role]) -> None:
    """An error where a table has another number of rows, which a run would tell as units that are no copies."""
    theirs = naming.modules(wide)
    for path, module in naming.modules(narrow).items():
        other = theirs.get(path)
        if isinstance(module, nn.Embedding) and isinstance(other, nn.Embedding) and not roles:
            few, many = module.num_embeddings, other.num_embeddings
            if few != many:
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
            raise type(error)(f"{error}. A run at twice the narrow model's size does not show it: {refused}") from None
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
