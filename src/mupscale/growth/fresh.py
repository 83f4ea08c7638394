"""The operator beyond the paper: the trained network stays as it is, and the new units are drawn at μP's initial scale.

GROWTH in one table, for a weight from inputs to outputs:

    old inputs, old outputs    the narrow weight (times Constants.keep, which undoes what the model itself divides by)
    any inputs, new outputs    fresh
    new inputs, old outputs    fresh, times `outgoing`

Learning rate, weight decay and eps are those of μP at the wide width: rules.py does not know of this.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from torch import Tensor

from mupscale.core import Constants, Entry, Plan, index_of_old
from mupscale.growth.fresh_tensor import FreshTensor, FreshValues
from mupscale.growth.lossless import gain_factor, is_written_by_mean, is_zero, keeps_outgoing
from mupscale.growth.operators import Operator, Part, StatePart
from mupscale.planning import means_of
from mupscale.system import MupscaleError, Must, checks_arguments


@checks_arguments
@dataclass(frozen=True)
class Fresh(Operator):
    """New units beside the old ones, drawn as μP draws them at the wide width; any wider width will do.

    outgoing: between 0 and 1, how much of its fresh weight a new unit has towards old ones. At 0 the function stays on
    every axis that no norm reads. lossless: the function stays on the axes that norms read, too, where a batch
    (inputs=) has shown who reads them; `upscale` tells by how much it does not.

    >>> import torch, mupscale as mu
    >>> from torch.nn import Linear, Sequential, Tanh
    >>> narrow, wide = (Sequential(Linear(3, n), Tanh(), Linear(n, 2)) for n in (8, 12))
    >>> plan = mu.plan(narrow, wide, fresh=narrow, grow=mu.Fresh())
    >>> _ = mu.upscale(narrow, wide, plan, grow=mu.Fresh(outgoing=0.0))
    >>> x = torch.randn(5, 3)
    >>> torch.allclose(narrow(x), wide(x), atol=1e-6)
    True
    """

    outgoing: Annotated[float, Must("a number between 0 and 1", lambda value: 0 <= value <= 1)] = 1.0
    lossless: bool = False
    needs_multiples = False

    def check(self, plan: Plan) -> None:
        """Refuse a plan that does not know the initialisation, or a growth that cannot be lossless."""
        for name, entry in plan.parameters.items():
            if _grows(entry):
                means_of(plan, name)
        if self.lossless:
            _refuse_growing_heads(plan)

    def parameter(self, out: Tensor, narrow: Tensor, part: Part) -> None:
        """Fresh values, and the old weight in its places."""
        FreshTensor(self.values(part)).fill(out, narrow)

    def values(self, part: Part) -> FreshValues:
        """What the wide parameter is filled with; `check` has seen the plan."""
        entry, plan, keep = part.entry, part.plan, self._keep(part)
        stream = f"fresh {part.name} {entry.narrow} {entry.wide}"
        if not _grows(entry):
            return FreshValues(entry, stream, part.seed, keep=keep)
        assert plan.fresh is not None
        std, means = plan.fresh[part.name], means_of(plan, part.name)
        if not self.lossless:
            return FreshValues(entry, stream, part.seed, std, means, keep, self.outgoing)
        silent = is_zero(part.name, entry, plan), is_written_by_mean(part.name, entry, plan)
        return FreshValues(
            entry,
            stream,
            part.seed,
            std,
            means,
            keep,
            outgoing=float(keeps_outgoing(part.name, entry, plan)),
            new_outputs="zero" if silent[0] else "mean" if silent[1] else "drawn",
        )

    def state(self, out: Tensor, narrow: Tensor, part: StatePart) -> None:
        """What a fresh optimizer has, and the old state in its places."""
        keep = self._keep(part)
        kept = part.entry if part.is_rate else Entry(part.entry.narrow, part.entry.narrow, constants=Constants(keep))
        out.fill_(part.initial)
        out[index_of_old(part.narrow, part.axes)] = narrow.to(out) * part.factor(kept)

    def _keep(self, part: Part) -> float:
        """What the old weight is multiplied by."""
        return float(part.entry.keep) * (gain_factor(part.name, part.plan) if self.lossless else 1.0)


def _grows(entry: Entry) -> bool:
    return any(axis.times != 1 for axis in entry.axes.values())


def _refuse_growing_heads(plan: Plan) -> None:
    for name, entry in plan.parameters.items():
        if entry.keep != 1 and entry.out_is_width and entry.in_is_width:
            raise MupscaleError(
                f"'{name}': head_dim grows, which cannot be lossless: queries and keys of new units would both start "
                "at zero and stay there. Grow the number of heads, or leave out lossless="
            )
