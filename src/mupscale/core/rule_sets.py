"""Named choices on top of the table: what practice does otherwise over width, depth, batch and duration.

The table (`rules`) says what copies need to go on exactly. A `RuleSet` says, by name, what rates and decays do instead.
Weights never depend on it, but for the depth's residual multiplier.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from fractions import Fraction
from typing import Any, Literal, get_args

from mupscale.core.rules import Number
from mupscale.system import MupscaleError

DecayRule = Literal["invariant", "sqrt", "fixed", "inverse"]
"""What decoupled weight decay λ does over width: lr·λ stays, λ ∝ √width, λ stays, or lr·λ ∝ 1/width."""

DepthRule = Literal["none", "complete", "sqrt"]
"""How rates follow the depth L: not at all, as under a residual multiplier of 1/L (CompleteP), or of 1/√L."""

DEPTH_POWERS: Mapping[str, Fraction] = {"complete": Fraction(1), "sqrt": Fraction(1, 2)}
"""The power α of a residual multiplier L^-α."""


@dataclass(frozen=True)
class RuleSet:
    """A choice for each question that the table leaves to practice; the defaults are those with which copies are exact.

    Args:
        decay: decoupled weight decay over width: invariant (lr·λ stays, so λ grows as rates fall), sqrt (λ ∝ √width),
            fixed (λ stays) or inverse (lr·λ ∝ 1/width)
        depth: rates over depth: none, complete (residual multiplier 1/L) or sqrt (1/√L)
        embeddings: factor of the embeddings' learning rate, the same at every width
        batch: what Adam's hyperparameters do for another batch: sqrt (lr ∝ √batch, β2 counts tokens) or none
        duration: the power p of lr ∝ duration^-p

    Example:
        >>> RuleSet.of("decay=fixed, embeddings=4")
        RuleSet(decay='fixed', depth='none', embeddings=4.0, batch='sqrt', duration=0.0)
        >>> str(RuleSet(decay="sqrt")), str(RuleSet())
        ('decay=sqrt', 'default')
    """

    decay: DecayRule = "invariant"
    depth: DepthRule = "none"
    embeddings: float = 1.0
    batch: Literal["sqrt", "none"] = "sqrt"
    duration: float = 0.0

    def __post_init__(self) -> None:
        choices = {"decay": get_args(DecayRule), "depth": get_args(DepthRule), "batch": ("sqrt", "none")}
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise MupscaleError(f"rules.{name} is {getattr(self, name)!r}: choose from {', '.join(known)}")
        for name, least in {"embeddings": 0.0, "duration": -math.inf}.items():
            value = getattr(self, name)
            if not (isinstance(value, int | float) and math.isfinite(value) and value > least):
                raise MupscaleError(f"rules.{name} is {value!r}, but must be a {'positive ' * (least == 0)}number")

    def __str__(self) -> str:
        told = [f"{f.name}={getattr(self, f.name)}" for f in fields(self) if getattr(self, f.name) != f.default]
        return ",".join(told) or "default"

    @classmethod
    def of(cls, text: str) -> RuleSet:
        """The rule set that a text such as 'decay=sqrt, embeddings=4' or 'default' names."""
        values: dict[str, Any] = {}
        for part in text.replace(" ", "").split(",") if text.strip() not in ("", "default") else ():
            name, _, value = part.partition("=")
            if name not in cls.__dataclass_fields__ or not value:
                known = ", ".join(f"{f.name}={f.default}" for f in fields(cls))
                raise MupscaleError(f"'{text}' is not a rule set: write default, or some of {known}")
            try:
                values[name] = float(value) if isinstance(cls.__dataclass_fields__[name].default, float) else value
            except ValueError:
                raise MupscaleError(f"'{text}' is not a rule set: {name} takes a number, not '{value}'") from None
        return cls(**values)

    def at(self, hyper: Mapping[str, Any], *, batch: float = 1.0, duration: float = 1.0) -> dict[str, Any]:
        """Adam's hyperparameters for another batch and duration, given as multiples; the others stay as they are.

        lr ∝ √batch · duration^-p. The decay follows it so that its time scale, as a share of the run, stays:
        τ = batch / (lr · λ · duration). β2 forgets over the same number of tokens, but never faster than β1, where Adam
        would not be stable. Duration counts tokens, not steps.

        >>> RuleSet(duration=0.5).at({"lr": 1e-3, "weight_decay": 0.1, "betas": (0.5, 0.95)}, batch=4, duration=16)
        {'lr': 0.0005, 'weight_decay': 0.05, 'betas': (0.5, 0.8145062499999999)}
        """
        if not (batch > 0 and duration > 0):
            raise MupscaleError(f"batch={batch} and duration={duration} are multiples, which must be positive")
        follows = batch if self.batch == "sqrt" else 1.0
        rate = math.sqrt(follows) * duration**-self.duration
        scaled = {**hyper, "lr": hyper["lr"] * rate}
        if hyper.get("weight_decay"):
            scaled["weight_decay"] = hyper["weight_decay"] * follows / (rate * duration)
        if "betas" in hyper:
            first, second = hyper["betas"]
            scaled["betas"] = (first, max(second**follows, min(first, second)))
        return scaled


def decay_change(rule: str, rate: float, width: Number) -> float:
    """By what a decay differs from the one with which copies are exact.

    rate: by what the learning rate changes with the width alone. width: by how much the input axis grows.
    """
    changes = {"invariant": 1.0, "sqrt": math.sqrt(rate), "fixed": rate, "inverse": float(1 / width)}
    if rule not in changes:
        raise MupscaleError(f"there is no rule {rule!r} for weight decay: choose from {', '.join(changes)}")
    return changes[rule]
