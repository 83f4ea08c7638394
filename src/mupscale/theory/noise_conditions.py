"""When does noise leave the limit of the worked examples unchanged? The paper's conclusions, and what holds."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from mupscale.theory.worked_examples import (
    Settings,
    coefficients,
    example_1,
    example_2,
    matched_learning_rate,
    never_upscaled,
)


class ConditionCheck(NamedTuple):
    """How far a choice of hyperparameters moves what it should leave unchanged from the run never upscaled."""

    choice: str
    what: str
    change: float


def measure_conditions(settings: Settings) -> list[ConditionCheck]:
    """When does noise leave the limit unchanged? The paper's conclusions, and the conditions that hold.

    The noise of A and D is the settings'; the loss of example 2 is linear, so that coefficients depend on nothing else.

    >>> settings = Settings(lambda y: y - 1, lr=0.1, upscaled_lr=0.1, before=2, after=2, noise=(("A", 0.5), ("C", 0.3)))
    >>> for check in measure_conditions(settings)[:2]:
    ...     print(check.choice, "unchanged" if check.change < 1e-9 else "changed")
    example 1, γ↑ = γ changed
    example 1, γ↑ = matched_learning_rate unchanged
    """
    a, c, d = (math.sqrt(settings.variance(letter)) for letter in "ACD")
    sigma, lr = settings.sigma, settings.lr
    first = replace(settings, noise=(("A", a), ("B", 1.0), ("C", c)))
    matched = replace(first, upscaled_lr=matched_learning_rate(lr, sigma, c, a))
    linear = replace(settings, slope=lambda y: -1.0)
    squares = (sigma**2 + a**2) * (sigma**2 + d**2)
    printed = replace(linear, upscaled_lr=lr * sigma**2 / math.sqrt(squares), noise=(("A", a), ("D", d)))
    both = replace(linear, upscaled_lr=lr * sigma**2 / (sigma**2 + a**2), noise=(("A", a), ("D", a)))
    tenfold = replace(both, times=10 * both.times)
    pair = f"σ_A = σ_D = {a:g}, γ↑(σ̄² + σ_A²) = γσ̄²"
    return [
        ConditionCheck("example 1, γ↑ = γ", "output", _change(replace(first, upscaled_lr=lr), example_1)),
        ConditionCheck("example 1, γ↑ = matched_learning_rate", "output", _change(matched, example_1)),
        ConditionCheck(
            f"example 2, printed condition, σ_A = {a:g}, σ_D = {d:g}", "M + M′", _change(printed, _sums_of_m)
        ),
        ConditionCheck(
            f"example 2, printed condition, σ_A = {a:g}, σ_D = {d:g}", "N + N′", _change(printed, _sums_of_n)
        ),
        ConditionCheck(f"example 2, {pair}", "M + M′", _change(both, _sums_of_m)),
        ConditionCheck(f"example 2, {pair}", "N + N′", _change(both, _sums_of_n)),
        ConditionCheck(f"example 2, {pair}, σ_B = σ_C = 0, k = {both.times}", "output", _change(both, example_2)),
        ConditionCheck(f"example 2, {pair}, σ_B = σ_C = 0, k = {tenfold.times}", "output", _change(tenfold, example_2)),
    ]


def _change(settings: Settings, values: Callable[[Settings], list[float]]) -> float:
    return max(abs(a - b) for a, b in zip(values(settings), values(never_upscaled(settings)), strict=True))


def _sums_of_m(settings: Settings) -> list[float]:
    return [each.m + each.m_new for each in coefficients(settings)]


def _sums_of_n(settings: Settings) -> list[float]:
    return [each.n + each.n_new for each in coefficients(settings)]
