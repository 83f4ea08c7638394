"""What the weights of old units are multiplied by where new units are fresh, found by a run with the new ones silent.

Copies need a constant folded in where the width enters the forward pass: sums over copies grow by k (a tied readout),
and numbers that depend on the width change (1/√d). Fresh units need only the second part made up for. Which part is
which does not show in the fold, but in a wide model that has the old units alone.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from glob import escape
from typing import Any

import torch
from torch import Tensor, nn

from mupscale.core import Plan, Role, index_of_old, is_new, naming
from mupscale.planning.copied_values import are_close
from mupscale.planning.from_modules import build_plan
from mupscale.planning.tracing import in_float64, run_in_float64, saved_tensors, tensors_in
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


@torch.no_grad()
def keeps_outputs(narrow: nn.Module, wide: nn.Module, plan: Plan, inputs: Any) -> bool:
    """Whether a wide model with the old units in their places and zeros elsewhere gives the narrow one's outputs.

    plan: for fresh units. Norms over an axis that grows are taken over the old units alone.

    >>> import mupscale as mu
    >>> narrow, wide = (nn.Sequential(nn.Linear(3, n), nn.LayerNorm(n), nn.Linear(n, 2)) for n in (8, 12))
    >>> keeps_outputs(narrow, wide, mu.plan(narrow, wide, grow=mu.Fresh()), torch.ones(4, 3))
    True
    """
    small, batch = in_float64(narrow, inputs, generic=1)
    large, _ = in_float64(wide, inputs, like=narrow)
    kept, theirs = copy.deepcopy(small), saved_tensors(large)
    for name, weight in saved_tensors(kept).items():
        entry = plan[name]
        if name in plan.parameters and entry.keep != 1:
            weight.mul_(float(entry.keep)).add_(float(entry.offset) * (float(entry.keep) - 1))
        theirs[name].zero_()
        theirs[name][index_of_old(entry.narrow, entry.axes)] = weight
    look_at_old_units_alone(kept, large, plan)
    ours, outputs = (
        [t for t in tensors_in(run_in_float64(model, batch)) if t.is_floating_point()] for model in (small, large)
    )
    pairs = [(a, b) for a, b in zip(ours, outputs, strict=True) if a.shape == b.shape]
    return bool(pairs) and all(bool(a.isfinite().all()) and are_close(a, b, loosened=100) for a, b in pairs)


def look_at_old_units_alone(
    kept: nn.Module, large: nn.Module, plan: Plan, new_units: list[Tensor] | None = None
) -> None:
    """Let the norms of the wide model do to the old units what the narrow one's do, and give zeros for new ones.

    new_units: a list that what the norms are given for new units is put into as they are called.

    >>> import mupscale as mu
    >>> narrow, wide = nn.LayerNorm(2), nn.LayerNorm(4)
    >>> look_at_old_units_alone(narrow, wide, mu.plan(narrow, wide, grow=mu.Fresh()))
    >>> wide(torch.tensor([1.0, 5.0, 3.0, 5.0])).round()
    tensor([-1.,  0.,  1.,  0.], grad_fn=...)
    """
    ours, theirs = naming.modules(kept), naming.modules(large)
    for name, kind in plan.norms.items():
        path, entry = name.rpartition(".")[0], plan[name]
        if kind in ("layer", "rms"):
            index = index_of_old(entry.narrow, entry.axes)[0]
            new = is_new(entry.axes[0], entry.narrow[0]).nonzero()[:, 0]

            def old_units_alone(
                x: Tensor, norm: nn.Module = ours[path], index: Any = index, new: Tensor = new
            ) -> Tensor:
                if new_units is not None:
                    new_units.append(x[..., new])
                out = torch.zeros_like(x)
                out[..., index] = norm(x[..., index])
                return out

            theirs[path].forward = old_units_alone
