"""What the weights of old units are multiplied by where new units are fresh, found by a run with the new ones silent.

Copies need a constant folded in where the width enters the forward pass: sums over copies grow by k (a tied readout),
and numbers that depend on the width change (1/√d). Fresh units need only the second part made up for. Which part is
which does not show in the fold, but in a wide model that has the old units alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from glob import escape
from typing import Any

import torch  # noqa: F401  # for the examples
from torch import nn

from mupscale.core import Role
from mupscale.planning.from_modules import build_plan
from mupscale.planning.silent_units import keeps_outputs
from mupscale.system import MupscaleError

_MOST_TRIALS = 27
_SUMS = (1, 0, 2)  # over how many growing axes the copies are summed beside the weight itself


def with_keeps(narrow: nn.Module, wide: nn.Module, roles: Mapping[str, Role], inputs: Any) -> dict[str, Role]:
    """The roles, with `keep` for each constant whose share a run of the models shows; others as they are.

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
    folds = {name: float(role.fold) for name, role in roles.items() if _lacks_keep(role) and not callable(role.fold)}
    given = {escape(name): role for name, role in roles.items()}
    if not folds:
        return dict(roles)
    try:
        entries = build_plan(narrow, wide, roles=given, assume=True).parameters.values()
        times = max(float(axis.times) for entry in entries for axis in entry.axes.values())
        for keeps in _trials(folds, times):
            told = {name: replace(roles[name], keep=keep) for name, keep in keeps.items()}
            trial = given | {escape(name): role for name, role in told.items()}
            if keeps_outputs(narrow, wide, build_plan(narrow, wide, roles=trial, how="fresh", assume=True), inputs):
                return {**roles, **told}
    except MupscaleError:  # it cannot grow by fresh units, which is said where that is asked for
        pass
    return dict(roles)


def _lacks_keep(role: Role) -> bool:
    return role.fold != 1 and role.keep is None


def _trials(folds: Mapping[str, float], times: float) -> Iterator[dict[str, float]]:
    """Every way to tell the sums' share of each constant; equal constants have equal shares."""
    values = sorted(set(folds.values()))
    for sums in itertools.islice(itertools.product(_SUMS, repeat=len(values)), _MOST_TRIALS):
        share = dict(zip(values, sums, strict=True))
        yield {name: fold * times ** share[fold] for name, fold in folds.items()}
