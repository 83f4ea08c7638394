"""What a pattern is, and how one is written down: see patterns.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Generator, Tensor, nn

Draw = Callable[[Generator], Tensor]
Build = TypeVar("Build", bound=Callable[[int], nn.Module])

REGISTERED: list[Pattern] = []


@dataclass(frozen=True)
class Pattern:
    """A small model that shows one awkward habit of real code.

    `expected` is "exact" where an exact widening by copying units exists: every wide unit is a copy of a narrow one,
    weights are divided by the number of copies on their input side, constants that depend on the width are folded into
    a weight, and the wide model then computes the same function, and goes on doing so in training. It is "refused"
    where there is none, "either" where there is one that asks for more than that (`reason` says what), and "warned"
    where the function is kept and training is not, which the plan has to say.
    """

    name: str
    build: Callable[[int], nn.Module]
    inputs: Callable[[], tuple[Tensor, ...]]
    expected: str = "exact"
    reason: str = ""


def floats(*shape: int) -> Draw:
    """Standard normal ones."""
    return lambda generator: torch.randn(shape, generator=generator)


def tokens(vocabulary: int, *shape: int) -> Draw:
    """Whole numbers below `vocabulary`."""
    return lambda generator: torch.randint(0, vocabulary, shape, generator=generator)


def add(
    name: str,
    build: Callable[[int], nn.Module],
    *inputs: Draw,
    refused: str = "",
    either: str = "",
    warned: str = "",
) -> None:
    """Put a pattern on the list; refused, either, warned: the reason why that is expected."""

    def draw() -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(0)
        return tuple(one(generator) for one in inputs)

    reasons = {"refused": refused, "either": either, "warned": warned}
    expected = next((what for what, reason in reasons.items() if reason), "exact")
    REGISTERED.append(Pattern(name, build, draw, expected, refused or either or warned))


def pattern(name: str, *inputs: Draw, **reason: str) -> Callable[[Build], Build]:
    """Put models on the list that are made from the multiplier alone: by a class, or by what `toy` gives."""

    def register(made: Build) -> Build:
        add(name, made, *inputs, **reason)
        return made

    return register


class Network(nn.Module):
    """Whose parts `make` makes, from the multiplier and what else there is to say."""

    def __init__(self, k: int, *more: Any, **named: Any) -> None:
        super().__init__()
        self.make(k, *more, **named)


def weight(*shape: int, size: float = 0.5) -> nn.Parameter:
    """A bare parameter, normal with this standard deviation."""
    return nn.Parameter(size * torch.randn(shape))
