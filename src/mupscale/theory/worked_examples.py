"""The paper's two worked examples in closed form, and when noise leaves their limit unchanged.

They are linear MLPs on one input, input and readout frozen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from mupscale.system import MupscaleError
from mupscale.theory.mlp_training import Stage

Slope = Callable[[float], float]
"""𝓛′, the derivative of the loss by the output."""


@dataclass(frozen=True)
class Settings:
    """What both examples share. noise: σ̄_Δ of each weight by its letter; those not named get none."""

    slope: Slope
    lr: float
    upscaled_lr: float
    before: int
    after: int
    x: float = 1.0
    sigma: float = 1.0
    times: int = 2
    noise: Mapping[str, float] | tuple[tuple[str, float], ...] = ()

    def __post_init__(self) -> None:
        if unknown := dict(self.noise).keys() - set("ABCD"):
            raise MupscaleError(f"'{min(unknown)}' is no weight of the examples, which are A, B, C and D")
        if self.before < 0 or self.after < 0 or self.times < 1:
            raise MupscaleError(
                f"updates before and after the upscaling are 0 or more and copies 1 or more, not {self.before}, "
                f"{self.after} and {self.times}"
            )
        _check_positive(self.sigma)

    def variance(self, letter: str) -> float:
        """σ̄_Δ² of a weight."""
        return dict(self.noise).get(letter, 0.0) ** 2


def never_upscaled(s: Settings) -> Settings:
    """The same run, all of its updates before the upscaling and at the first learning rate."""
    return replace(s, before=s.before + s.after, after=0, noise=())


def example_1(s: Settings) -> list[float]:
    """Appendix 'Example: 3-layer MLP': both recursions of the readout, one after the other."""
    gain = s.lr * s.x**2 * s.sigma**4
    upscaled = s.upscaled_lr * s.x**2 * (s.sigma**2 + s.variance("C")) * (s.sigma**2 + s.variance("A"))
    outputs = [0.0]
    for t in range(s.before + s.after):
        outputs.append(outputs[-1] - (gain if t < s.before else upscaled) * s.slope(outputs[-1]))
    return outputs


def matched_learning_rate(lr: float, sigma: float, noise_c: float, noise_a: float) -> float:
    """The learning rate with which example 1's limit goes on as if nothing had been added to A, B and C."""
    _check_positive(sigma)
    return lr * sigma**4 / ((sigma**2 + noise_c**2) * (sigma**2 + noise_a**2))


def _check_positive(sigma: float) -> None:
    if not sigma > 0:
        raise MupscaleError(f"σ̄ of the initial weights must be above 0, not {sigma}")


class Coefficients(NamedTuple):
    """|h²⟩ = M |C₀h¹⟩ + N |B₀ᵀdh³⟩ before, and with M′, N′ for the same of the noisy vectors after the upscaling."""

    m: float
    n: float
    m_new: float = 0.0
    n_new: float = 0.0


def example_2(s: Settings) -> list[float]:
    """Appendix 'Example: 4-layer MLP': the outputs."""
    return [output for output, _ in _example_2(s)]


def coefficients(s: Settings) -> list[Coefficients]:
    """Example 2's M, N, M′ and N′ over time."""
    return [coefficients for _, coefficients in _example_2(s)]


def overlap(s: Settings, then: Coefficients, now: Coefficients) -> float:
    """Tr⟨h²|h²⟩ / k of example 2 between two times: the paper's ①, ①′ and ②′ in one, since M′ = N′ = 0 before.

    σ_B = σ_C = 0 alone does not turn ②′ into ①: the terms with 1/k stay.
    """
    square = s.sigma**2
    a, b, c, d = map(s.variance, "ABCD")
    same = s.x**2 * (then.m + then.m_new) * (now.m + now.m_new) + (then.n + then.n_new) * (now.n + now.n_new)
    forward = then.m_new * now.m_new * (square * d / s.times + square * c + c * d) * s.x**2
    backward = then.n_new * now.n_new * (square * a / s.times + square * b + a * b)
    return square**2 * same + forward + backward


def coefficients_unchanged(s: Settings) -> bool:
    """Whether M + M′ and N + N′ of example 2 follow the recursion of before.

    The paper's condition γ↑²(σ̄²+σ_D²)(σ̄²+σ_A²) = γ²σ̄⁴ is not enough: both of its factors must agree, so σ_A = σ_D.
    """
    wanted = s.lr * s.sigma**2
    return all(abs(s.upscaled_lr * (s.sigma**2 + s.variance(x)) - wanted) <= 1e-12 * abs(wanted) for x in "AD")


def printed_condition(s: Settings) -> bool:
    """The condition that the paper prints for the same."""
    product = (s.sigma**2 + s.variance("A")) * (s.sigma**2 + s.variance("D"))
    wanted = s.lr**2 * s.sigma**4
    return abs(s.upscaled_lr**2 * product - wanted) <= 1e-12 * abs(wanted)


def _example_2(s: Settings) -> list[tuple[float, Coefficients]]:
    history: list[tuple[float, Coefficients]] = []
    slopes: list[float] = []
    for t in range(s.before + s.after + 1):
        upscaled = t >= s.before and (s.after > 0 or t > s.before)
        current = _after(s, slopes, history, t) if upscaled else _before(s, slopes, history, t)
        output = _output(s, slopes, history, current, t, upscaled)
        history.append((output, current))
        slopes.append(s.slope(output))
    return history


def _before(s: Settings, slopes: list[float], history: list[tuple[float, Coefficients]], t: int) -> Coefficients:
    """Equation 'MN_bf_upscaling'."""
    square, c = s.lr**2 * s.x**2 * s.sigma**4, [coefficients for _, coefficients in history]
    pairs = [(i, j) for i in range(t) for j in range(i)]
    m = 1 + square * sum(slopes[i] * slopes[j] * c[j].m for i, j in pairs)
    n = -s.lr * s.x**2 * s.sigma**2 * sum(slopes[:t]) + square * sum(slopes[i] * slopes[j] * c[j].n for i, j in pairs)
    return Coefficients(m, n)


def _after(s: Settings, slopes: list[float], history: list[tuple[float, Coefficients]], t: int) -> Coefficients:
    """Equation 'MN_after_upscaling'."""
    start, c = s.before, [coefficients for _, coefficients in history]
    old = s.lr * s.sigma**2
    forward = s.upscaled_lr * (s.sigma**2 + s.variance("D"))
    backward = s.upscaled_lr * (s.sigma**2 + s.variance("A"))
    early = [(i, j) for i in range(start) for j in range(i)]
    late = [(i, j) for i in range(start, t) for j in range(start, i)]
    across = [(i, j) for i in range(start, t) for j in range(start)]

    def both(value: Callable[[Coefficients], float]) -> float:
        return s.x**2 * (
            old**2 * sum(slopes[i] * slopes[j] * value(c[j]) for i, j in early)
            + forward * old * sum(slopes[i] * slopes[j] * value(c[j]) for i, j in across)
            + forward * backward * sum(slopes[i] * slopes[j] * value(c[j]) for i, j in late)
        )

    def new(value: Callable[[Coefficients], float]) -> float:
        return s.x**2 * forward * backward * sum(slopes[i] * slopes[j] * value(c[j]) for i, j in late)

    return Coefficients(
        m=both(lambda coefficients: coefficients.m),
        n=-(s.x**2) * old * sum(slopes[:start]) + both(lambda coefficients: coefficients.n),
        m_new=1 + new(lambda coefficients: coefficients.m_new),
        n_new=-(s.x**2) * forward * sum(slopes[start:t]) + new(lambda coefficients: coefficients.n_new),
    )


def _output(
    s: Settings,
    slopes: list[float],
    history: list[tuple[float, Coefficients]],
    now: Coefficients,
    t: int,
    upscaled: bool,
) -> float:
    """Equations 'final-recursion-bf-upscaling' and 'final_recursion_af_upscaling'."""
    square, a, b = s.sigma**2, s.variance("A"), s.variance("B")
    start = s.before if upscaled else t
    met = [slope * overlap(s, then, now) for slope, (_, then) in zip(slopes, history, strict=True)]
    output = square**2 * (now.n + now.n_new) + (square * b + square * a / s.times + a * b) * now.n_new
    return output - square * s.lr * sum(met[:start]) - (square + a) * s.upscaled_lr * sum(met[start:])


# ---------------------------------------------------------------------------------------- fresh units


def linear_with_fresh_units(
    layers: int, slope: Slope, stages: Sequence[Stage], x: float = 1.0, sigma: float = 1.0
) -> list[float]:
    """The output over time of a linear MLP on one input that grows by fresh units, in closed form.

    layers: 2 for y = ⟨A C x⟩ with both trained; 3 and 4 are the paper's examples 1 and 2, in which what is frozen is
    drawn for new units, too. The output is ⟨g|h⟩, where h is what the trained weights make of the input and g what they
    make of the readout, in units of 1/N. A step takes γ𝓛′q g from h and γ𝓛′p h from g, with numbers q and p, the mean
    squares of what is frozen. So ⟨h|h⟩, ⟨g|h⟩ and ⟨g|g⟩ follow from each other (docs/theory-fresh.md).

    >>> linear_with_fresh_units(3, lambda y: y - 1, [Stage(1, 0.1), Stage(1, 0.1, times=2, how="fresh", outgoing=0)])
    [0.0, 0.1, 0.28]
    """
    if layers not in (2, 3, 4) or any(stage.noise for stage in stages):
        raise MupscaleError(f"fresh units have closed forms for 2, 3 and 4 layers without noise, not for {layers}")
    square, drawn = sigma**2, sigma**2 * x**2
    q = x**2 if layers == 2 else drawn
    p = {2: 1.0, 3: 0.0, 4: square}[layers]
    hh = drawn if layers == 2 else square * drawn
    gg = square * square if layers == 4 else square
    gh, outputs = 0.0, list[float]()
    for stage in stages:
        if stage.how == "fresh":
            r, new, heard = stage.times, 1 - 1 / stage.times, stage.outgoing**2
            # On either side, old units have what they had and, times a, what fresh weights bring; new ones that alone.
            if layers == 2:
                hh, gg = hh / r + new * drawn, r * gg + heard * new * square
            else:
                hh = (hh + heard * new * square * drawn) / r + new * square * drawn
                back = 1.0 if layers == 3 else square * (1 / r + r * p / square + new)
                gg = r * gg + heard * new * square * back
                p = r * p + heard * new * square if layers == 4 else 0.0
        for _ in range(stage.steps):
            outputs.append(gh)
            alpha, beta = (stage.lr * slope(gh) * factor for factor in (q, p))
            hh, gh, gg = (
                hh - 2 * alpha * gh + alpha**2 * gg,
                gh - alpha * gg - beta * hh + alpha * beta * gh,
                gg - 2 * beta * gh + beta**2 * hh,
            )
    return [*outputs, gh]


class ConditionCheck(NamedTuple):
    """How far a choice of hyperparameters moves what it should leave unchanged from the run never upscaled."""

    choice: str
    what: str
    change: float


def measure_conditions(settings: Settings) -> list[ConditionCheck]:
    """When does noise leave the limit unchanged? The paper's conclusions, and the conditions that hold.

    The noise of A and D is the settings'; the loss of example 2 is linear, so that coefficients depend on nothing else.
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
