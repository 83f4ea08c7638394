"""A power law through measurements at several sizes, with how far its exponent is known."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

NOTHING = 1e-12  # below this a measurement counts as zero


@dataclass(frozen=True)
class Power:
    """An exponent and its standard error, infinite where one seed at two sizes leaves nothing to tell it from.

    An infinite exponent: finite at small sizes and not at large ones. NaN: not finite, and not by the size.
    freedom: the degrees of freedom that the error was estimated with.
    """

    exponent: float
    error: float = 0.0
    freedom: int = 0

    @property
    def margin(self) -> float:
        """Half of a 95 % interval: the standard error times Student's factor, which is large for few measurements.

        >>> round(Power(0.3, 0.1, freedom=2).margin, 2), round(Power(0.3, 0.1, freedom=60).margin, 2)
        (0.43, 0.2)
        """
        return self.error and self.error * (_FACTORS.get(self.freedom) or 1.96 + 2.7 / max(self.freedom, 1))

    def __str__(self) -> str:
        if not math.isfinite(self.exponent):
            return f"{self.exponent:+}" if math.isinf(self.exponent) else "not finite"
        return f"{self.exponent:+.2f} ± {'?' if math.isinf(self.error) else f'{self.error:.2f}'}"


_FACTORS = {1: 12.71, 2: 4.3, 3: 3.18, 4: 2.78}  # Student's 97.5 % quantiles, where the formula is off


def fit_power(values: Mapping[float, Sequence[float]]) -> Power:
    """The least-squares slope of log mean against log size; values: by size, in increasing order, one for each seed.

    Its standard error counts how far seeds are from the line, and so how far the means are from it, too.
    What is zero at all sizes has power 0.

    >>> print(fit_power({64: [1.0, 1.1], 128: [2.0, 1.9]}), fit_power({64: [1.0], 128: [2.0]}))
    +0.89 ± 0.08 +1.00 ± ?
    """
    means = [sum(several) / len(several) for several in values.values()]
    if not all(math.isfinite(mean) for mean in means):
        return Power(math.inf if math.isfinite(means[0]) and not math.isfinite(means[-1]) else math.nan)
    if min(means) < NOTHING:
        return Power(0.0 if max(means) < NOTHING else -math.inf)
    xs, ys = [math.log(size) for size in values], [math.log(mean) for mean in means]
    x0, y0 = sum(xs) / len(xs), sum(ys) / len(ys)
    slope = sum((x - x0) * (y - y0) for x, y in zip(xs, ys, strict=True)) / sum((x - x0) ** 2 for x in xs)
    points = [(x - x0, math.log(max(v, NOTHING))) for x, some in zip(xs, values.values(), strict=True) for v in some]
    if (freedom := len(points) - 2) < 1:
        return Power(slope, math.inf)
    squares = sum((y - y0 - slope * x) ** 2 for x, y in points)
    return Power(slope, math.sqrt(squares / freedom / sum(x * x for x, _ in points)), freedom)
