"""What a growth writes into the wide model: the contract of an operator, which copies and fresh units fulfil.

An operator writes weights, buffers and optimizer state, one tensor at a time. Parameter groups, clipping, schedules and
checks go by the plan and do not know which operator it was.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from mupscale.core import Axis, Entry, Plan, Shape, index_of_old
from mupscale.system import MupscaleError


@dataclass(frozen=True)
class Part:
    """What an operator is told of the parameter or buffer that it writes.

    name, entry: of the parameter in the plan. seed: of this growth; random numbers follow from it and the name alone.
    """

    name: str
    plan: Plan
    seed: int

    @property
    def entry(self) -> Entry:
        """Shapes, axes and the three numbers; where copies are stacked, from as many of them."""
        return self.plan[self.name].stacked


@dataclass(frozen=True)
class StatePart(Part):
    """What an operator is told of a tensor that an optimizer keeps for a parameter.

    narrow, axes: its own shape and the axes it has, which are fewer than the parameter's where it is reduced.
    start: gives what a fresh optimizer starts it with, which `initial` is.
    factor: from an entry to what such state is multiplied by where the parameter grows as that entry says.
    is_rate: whether it is a learning rate, which follows the rule of the wide width for all units.
    begins_at_mean: whether new units should start at the mean of old ones and not at `initial`, because the optimizer
    takes means over all units: with any other value, old units would take other steps.
    """

    key: str
    narrow: Shape
    axes: Mapping[int, Axis]
    start: Callable[[], float]
    factor: Callable[[Entry], float]
    is_rate: bool = False
    begins_at_mean: bool = False

    @property
    def initial(self) -> float:
        return self.start()


class Operator(ABC):
    """How the wide model is filled. A growth of your own is a class with the method `parameter`.

    needs_multiples: whether every axis must grow by a whole factor; where not, any wider width will do.
    Every method fills the whole of `out`, which has the wide shape and may hold anything before, except for buffers and
    for parameters that start as a pattern (`Plan.patterned`), which hold the wide model's own values. What is left
    unwritten is an error, and no model is changed then.

    >>> import torch, mupscale as mu
    >>> class Zeros(mu.Operator):  # new units start at zero
    ...     needs_multiples = False
    ...     def parameter(self, out, narrow, part):
    ...         out.zero_()
    ...         out[mu.index_of_old(part.entry.narrow, part.entry.axes)] = narrow
    >>> narrow, wide = torch.nn.Linear(2, 1, bias=False), torch.nn.Linear(3, 1, bias=False)
    >>> plan = mu.plan(narrow, wide, grow=Zeros(), roles={"weight": mu.Role(out=0, in_=1)})
    >>> _ = mu.upscale(narrow, wide, plan, grow=Zeros())
    >>> torch.equal(wide.weight[:, [0, 1]], narrow.weight), wide.weight[0, 2].item()
    (True, 0.0)
    """

    needs_multiples: bool = True

    def check(self, plan: Plan) -> None:  # noqa: B027
        """Raise an error where this operator cannot carry the plan out; nothing has been written yet."""

    @abstractmethod
    def parameter(self, out: Tensor, narrow: Tensor, part: Part) -> None:
        """Write the wide parameter into `out`."""

    def buffer(self, out: Tensor, narrow: Tensor, part: Part) -> None:
        """Write the wide buffer: by default old units keep their values, and new ones those of the wide model."""
        out[index_of_old(part.entry.narrow, part.entry.axes)] = narrow.to(out)

    def state(self, out: Tensor, narrow: Tensor, part: StatePart) -> None:
        """Write what the optimizer keeps for the wide parameter: by default what a fresh optimizer starts with."""
        out.fill_(part.initial)


def check_operator(operator: Operator, plan: Plan) -> None:
    """Refuse a plan that is for another operator, and what the operator itself refuses."""
    name = type(operator).__name__
    if plan.mup and operator.needs_multiples:
        raise MupscaleError(
            f"this plan is for fresh units or for μP, but {name} needs one for copies. Make it with "
            "mupscale.plan(narrow, wide)"
        )
    if not plan.mup and not operator.needs_multiples:
        raise MupscaleError(f"this plan is for copies: make it with mupscale.plan(…, grow={name}(…))")
    operator.check(plan)
