"""What grow= says: an operator for width, one for depth, or a pair of the two; and the default."""

from __future__ import annotations

from mupscale.core import Plan
from mupscale.growth.copies import Copies, Noise, as_noise
from mupscale.growth.depth_plans import DepthOperator, Identity
from mupscale.growth.experts import Experts
from mupscale.growth.fresh import Fresh
from mupscale.growth.operators import Operator
from mupscale.system import MupscaleError, as_asked

Grow = Operator | DepthOperator | Experts | tuple[Operator | DepthOperator, ...]
"""How a model grows: in width, in depth, in both, or in experts."""


def choose_operator(
    grow: Operator | None, noise: Noise | None = None, *, exact: bool = False, plan: Plan | None = None
) -> Operator:
    """The operator that is meant. What a growth does if nothing is said is decided here, for all of the library.

    grow: said by name. noise: copies with this noise. exact: copies without. plan: what a given one was made for.
    """
    if grow is not None and noise not in (None, 0.0):
        raise MupscaleError("noise= and grow= exclude each other: write grow=Copies(noise=…)")
    if exact and (noise not in (None, 0.0) or grow not in (None, Copies())):
        exact_, other = as_asked("exact=True", "--exact"), as_asked("grow= and noise=", "--how and --noise")
        raise MupscaleError(f"{exact_} copies every unit without noise: leave out {other}, or {exact_}")
    if grow is not None:
        return grow
    is_copied = exact or noise is not None or (plan is not None and not plan.mup)
    return Copies(0.0 if noise is None else noise) if is_copied else Fresh()


def split_operators(
    grow: Grow | None, noise: Noise | None = None, *, exact: bool = False, plan: Plan | None = None
) -> tuple[Operator, DepthOperator]:
    """What is meant for width, and for depth: if nothing is said, fresh units, and blocks that start as identity."""
    parts = grow if isinstance(grow, tuple) else () if grow is None or isinstance(grow, Experts) else (grow,)
    wider = [part for part in parts if isinstance(part, Operator)]
    deeper = [part for part in parts if isinstance(part, DepthOperator)]
    if len(wider) > 1 or len(deeper) > 1 or len(wider) + len(deeper) != len(parts):
        raise MupscaleError(
            f"grow= takes an operator for width, such as mupscale.Fresh(), one for depth, such as mupscale.Identity(), "
            f"or a pair of the two, not {grow!r}"
        )
    return choose_operator(wider[0] if wider else None, noise, exact=exact, plan=plan), (deeper or [Identity()])[0]


def refuse_idle_operator(grow: Grow | None, noise: Noise | None, *, wider: bool, deeper: bool) -> None:
    """An error if new units, or new blocks, are said to be filled somehow in a growth that has none of them."""
    said = Copies(noise) if grow is None and noise is not None and not as_noise(noise).is_none else grow
    if isinstance(said, Operator) and not wider:
        raise MupscaleError(
            f"only the depth grows, so there are no new units for {said!r} to fill: leave out noise= and grow=, choose "
            f"the new blocks (grow=mupscale.Identity() or mupscale.Stack()), or grow the width as well"
        )
    if isinstance(said, DepthOperator) and not deeper:
        raise MupscaleError(
            f"only the width grows, so there are no new blocks for {said!r} to fill: leave out grow=, choose the new "
            f"units (grow=mupscale.Copies() or mupscale.Fresh()), or grow the depth as well"
        )
