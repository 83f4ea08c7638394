"""What the weights of old units are multiplied by where new units are fresh, found by a run with the new ones silent.

Copies need a constant folded in where the width enters the forward pass: sums over copies grow by k (a tied readout),
and numbers that depend on the width change (1/√d). Fresh units need only the second part made up for. Which part is
which does not show in the fold, but in a wide model that has the old units alone.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from glob import escape
from typing import Any

import torch  # noqa: F401  # for the examples
from torch import nn

from mupscale.core import Entry, Role
from mupscale.planning.from_modules import build_plan, find_role
from mupscale.planning.silent_units import keeps_outputs
from mupscale.planning.trials import Trials
from mupscale.system import MupscaleError

_MOST_TRIALS = 64
_SUMS = (1, 0, 2, -1)  # over how many growing axes the copies are summed beside the weight itself


def with_keeps(narrow: nn.Module, wide: nn.Module, roles: Mapping[str, Role], inputs: Any) -> dict[str, Role]:
    """The roles, by pattern, with `keep` for each constant whose share a run of the models shows; others as they are.

    >>> class Readout(nn.Module):
    ...     def __init__(self, width):
    ...         super().__init__()
    ...         self.a, self.b = nn.Linear(3, width), nn.Linear(width, 2)
    ...     def forward(self, x):
    ...         return self.b(torch.tanh(self.a(x))) / self.b.in_features
    >>> roles = {"b.weight": Role(out=0, in_=1, fold=2.0), "b.bias": Role(fold=2.0)}
    >>> with_keeps(Readout(4), Readout(8), roles, torch.ones(1, 3))["b.weight"].keep
    2.0
    """
    trials = Trials.of(inputs)
    with suppress(MupscaleError):  # it cannot grow by fresh units, which is said where that is asked for
        plan = build_plan(narrow, wide, roles=roles, assume=True)
        lacking = {name: own for name in plan.parameters if (own := _lacking_keep(plan[name], roles))}
        folds = {name: float(plan[name].fold) for name in lacking}
        axes = [axis for entry in plan.parameters.values() for axis in entry.axes.values()]
        for keeps in _trials(folds, max((float(axis.times) for axis in axes), default=1.0)):
            told = {
                escape(alias): replace(role, keep=keep)
                for name, keep in keeps.items()
                for alias, role in lacking[name].items()
            }
            trial = told | {pattern: role for pattern, role in roles.items() if pattern not in told}
            if keeps_outputs(narrow, wide, build_plan(narrow, wide, roles=trial, how="fresh", assume=True), trials):
                return trial
    return dict(roles)


def _lacking_keep(entry: Entry, roles: Mapping[str, Role]) -> dict[str, Role]:
    """By all its names, the roles of a parameter with a constant and no word on what the old weights keep of it."""
    told = {alias: role for alias in entry.names if (role := find_role(roles, alias)) is not None}
    return told if entry.fold != 1 and all(role.keep is None for role in told.values()) else {}


def _trials(folds: Mapping[str, float], times: float) -> Iterator[dict[str, float]]:
    """Every way to tell the sums' share of each constant: equal constants with equal shares first, then one by one."""
    kinds = {name: (fold, re.sub(r"\d+", "#", name)) for name, fold in folds.items()}  # alike in all layers
    groupings: list[dict[str, Any]] = [dict(folds), kinds] if folds else []
    for groups in groupings:
        keys = sorted(set(groups.values()))
        for sums in itertools.islice(itertools.product(_SUMS, repeat=len(keys)), _MOST_TRIALS):
            share = dict(zip(keys, sums, strict=True))
            yield {name: fold * times ** share[groups[name]] for name, fold in folds.items()}
