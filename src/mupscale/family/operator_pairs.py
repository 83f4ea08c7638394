"""What grow= of a family says: an operator for width, one for depth, or a pair of the two."""

from __future__ import annotations

from mupscale.growth import DepthOperator, Identity, Noise, Operator, choose_operator
from mupscale.system import MupscaleError

Grow = Operator | DepthOperator | tuple[Operator | DepthOperator, ...]
"""How a model grows: in width, in depth, or in both."""


def split_operators(
    grow: Grow | None, noise: Noise | None = None, *, exact: bool = False
) -> tuple[Operator, DepthOperator]:
    """What is meant for width, and what for depth: what is not said is fresh units, and blocks that start as identity.

    >>> split_operators(Identity())
    (Fresh(outgoing=1.0, lossless=False), Identity(at=None))
    """
    parts = grow if isinstance(grow, tuple) else () if grow is None else (grow,)
    wider = [part for part in parts if isinstance(part, Operator)]
    deeper = [part for part in parts if isinstance(part, DepthOperator)]
    if len(wider) > 1 or len(deeper) > 1 or len(wider) + len(deeper) != len(parts):
        raise MupscaleError(
            f"grow= takes an operator for width, such as mupscale.Fresh(), one for depth, such as mupscale.Identity(), "
            f"or a pair of the two, not {grow!r}"
        )
    return choose_operator(wider[0] if wider else None, noise, exact=exact), (deeper or [Identity()])[0]


def refuse_idle_operator(grow: Grow | None, *, wider: bool, deeper: bool) -> None:
    """An error if new units, or new blocks, are said to be filled somehow in a growth that has none of them.

    A pair says both, just in case.

    >>> import mupscale as mu
    >>> refuse_idle_operator(mu.Copies(1.0), wider=False, deeper=True)
    Traceback (most recent call last):
    mupscale.system.errors.MupscaleError: only the depth grows, so there are no new units for Copies(...
    """
    if isinstance(grow, Operator) and not wider:
        raise MupscaleError(
            f"only the depth grows, so there are no new units for {grow!r} to fill: leave out noise= and grow=, choose "
            f"the new blocks (grow=mupscale.Identity() or mupscale.Stack()), or grow the width as well"
        )
    if isinstance(grow, DepthOperator) and not deeper:
        raise MupscaleError(
            f"only the width grows, so there are no new blocks for {grow!r} to fill: leave out grow=, choose the new "
            f"units (grow=mupscale.Copies() or mupscale.Fresh()), or grow the depth as well"
        )
