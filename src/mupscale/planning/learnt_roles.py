"""Roles that a run of two models shows, beside those that the user gave; and for all widths of a family."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from fnmatch import fnmatchcase
from glob import escape
from typing import Any

from torch import Tensor, nn

from mupscale.core import Entry, Number, Plan, Role, naming
from mupscale.planning.from_modules import build_plan, find_role
from mupscale.planning.from_run import roles_by_running, what_differs
from mupscale.planning.growth_checks import How
from mupscale.planning.trials import Trials
from mupscale.system import MupscaleError, ways_out

_MOST_SHOWN = 3  # roles named in a message


def learn_roles(
    narrow: nn.Module, wide: nn.Module, inputs: Any, given: Mapping[str, Role], how: How | None = None
) -> dict[str, Role]:
    """By pattern: the roles that were given, and for all else those that a run shows; an error where they do not hold.

    how: what they are for, which a refusal then gives advice for.

    >>> import torch
    >>> class Plain(nn.Module):
    ...     def __init__(self, width):
    ...         super().__init__()
    ...         self.a, self.b = nn.Parameter(torch.randn(3, width)), nn.Parameter(torch.randn(width, 2))
    ...     def forward(self, x):
    ...         return torch.tanh(x @ self.a) @ self.b
    >>> learn_roles(Plain(4), Plain(8), torch.randn(5, 3), {"a": Role(out=1)})["b"].in_
    (0,)
    >>> learn_roles(Plain(4), Plain(8), torch.randn(5, 3), {"b": Role(out=0)})
    Traceback (most recent call last):
    mupscale.system.errors.MupscaleError: the role given for 'b', Role(out=0), does not pass the check: output ...
    """
    pair = _Pair(narrow, wide, inputs, given, how)
    learnt = pair.learn()
    if reason := pair.what_differs(given, learnt):
        raise pair.refuse_given(learnt, reason)
    return _as_patterns(pair.merge(given, learnt), given)


def roles_for_any_width(narrow: nn.Module, wide: nn.Module, roles: Mapping[str, Role]) -> dict[str, Role]:
    """The roles, by pattern, with constants as powers of the multiplier where they were found as numbers.

    >>> pair = nn.LayerNorm(2), nn.LayerNorm(4)
    >>> roles_for_any_width(*pair, {"weight": Role(out=0, fold=0.5)})["weight"].fold(4, 1)
    0.25
    """
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
        groups = naming.aliases(_named(self.narrow))
        told = {group[0]: [role for name in group if (role := find_role(self.given, name))] for group in groups}
        return {first: roles[0] for first, roles in told.items() if roles}

    def merge(self, given: Mapping[str, Role], learnt: Mapping[str, Role]) -> dict[str, Role]:
        """By name, what was given, else what was learnt; of a tied tensor what was given for another name of it.

        But not where the other name was learnt to be used in another way, as a readout uses an embedding's weight.
        """
        named = _named(self.narrow)
        ndim = {naming.canonical(name): tensor.dim() for name, tensor in named}
        merged = dict(learnt)
        for group in naming.aliases(named):
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


def _named(model: nn.Module) -> list[tuple[str, Tensor]]:
    whole = naming.unwrap(model)
    return [*whole.named_parameters(remove_duplicate=False), *whole.named_buffers(remove_duplicate=False)]


def _listed(roles: Mapping[str, Role]) -> str:
    return "; for ".join(f"'{pattern}', {role}" for pattern, role in roles.items())
