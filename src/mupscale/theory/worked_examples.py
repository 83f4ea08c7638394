"""Linear MLPs on one input in closed form, the paper's two worked examples among them.

The output is ⟨g|h⟩, where h is what the trained weights make of the input and g what they make of the readout, in units
of 1/N. A step takes γ𝓛′q g from h and γ𝓛′p h from g, with numbers q and p, the mean squares of what is frozen. So
⟨h|h⟩, ⟨g|h⟩ and ⟨g|g⟩ follow from each other, and a growth changes them (docs/theory-fresh.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, NamedTuple

from mupscale.system import MupscaleError, Must, Positive, checks_arguments
from mupscale.theory.mlp_training import Stage, per_layer

Slope = Callable[[float], float]
"""𝓛′, the derivative of the loss by the output."""
_Steps = Annotated[int, Must("a whole number, 0 or more", lambda value: value >= 0)]


@checks_arguments
@dataclass(frozen=True)
class Settings:
    """What both examples share. noise: σ̄_Δ of each weight by its letter; those not named get none."""

    slope: Slope
    lr: float
    upscaled_lr: float
    before: _Steps
    after: _Steps
    x: float = 1.0
    sigma: Positive = 1.0
    times: Annotated[int, Must("a whole number, 1 or more", lambda value: value > 0)] = 2
    noise: Mapping[str, float] | tuple[tuple[str, float], ...] = ()

    def __post_init__(self) -> None:
        if unknown := dict(self.noise).keys() - set("ABCD"):
            raise MupscaleError(f"'{min(unknown)}' is not a weight of the examples, which are A, B, C and D")

    def std(self, letter: str) -> float:
        return abs(dict(self.noise).get(letter, 0.0))

    def stages(self, example: int) -> list[Stage]:
        """Training as a network of `example` + 2 layers, with noise from the input's to the readout's."""
        noise = [self.std(letter) for letter in ("CBA", "DCBA")[example - 1]]
        return [Stage(self.before, self.lr), Stage(self.after, self.upscaled_lr, self.times, noise)]


def never_upscaled(s: Settings) -> Settings:
    """The same run, all of its updates before the upscaling and at the first learning rate."""
    return replace(s, before=s.before + s.after, after=0, noise=())


def closed_form(example: int, s: Settings) -> list[float]:
    return linear_with_fresh_units(example + 2, s.slope, s.stages(example), s.x, s.sigma)


def example_1(s: Settings) -> list[float]:
    """Appendix 'Example: 3-layer MLP': y = ⟨A B C x⟩ with B trained, both recursions one after the other."""
    return closed_form(1, s)


def example_2(s: Settings) -> list[float]:
    """Appendix 'Example: 4-layer MLP': y = ⟨A B C D x⟩ with B and C trained."""
    return closed_form(2, s)


@checks_arguments
def matched_learning_rate(lr: float, sigma: Positive, noise_c: float, noise_a: float) -> float:
    """The learning rate with which example 1's limit goes on as if nothing had been added to A, B and C."""
    return lr * sigma**4 / ((sigma**2 + noise_c**2) * (sigma**2 + noise_a**2))


def linear_with_fresh_units(
    layers: int, slope: Slope, stages: Sequence[Stage], x: float = 1.0, sigma: float = 1.0
) -> list[float]:
    """The output over time of a linear MLP on one input that grows by copies or by fresh units, in closed form.

    layers: 2 for y = ⟨A C x⟩ with both trained; 3 and 4 are the paper's examples 1 and 2, in which what is frozen is
    drawn for new units, too. One upscaling by copies may have noise, where there are no fresh units.

    >>> linear_with_fresh_units(3, lambda y: y - 1, [Stage(1, 0.1), Stage(1, 0.1, times=2, how="fresh", outgoing=0)])
    [0.0, 0.1, 0.28]
    """
    noisy = sum(stage.has_noise for stage in stages)
    if layers not in (2, 3, 4) or noisy > 1 or (noisy and any(stage.how == "fresh" for stage in stages)):
        raise MupscaleError(
            f"closed forms are for 2, 3 and 4 layers, and for noise in one upscaling without fresh units, not for "
            f"{layers} layers with noise in {noisy}"
        )
    square, drawn = sigma**2, sigma**2 * x**2
    q = x**2 if layers == 2 else drawn
    p = {2: 1.0, 3: 0.0, 4: square}[layers]
    hh = drawn if layers == 2 else square * drawn
    gg = square * square if layers == 4 else square
    gh, outputs, copies = 0.0, list[float](), 1
    for stage in stages:
        copies *= stage.copies
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
        else:
            first, *middle, last = (std**2 for std in per_layer(stage.noise, layers, "noise"))
            if layers == 2:
                hh, gg = hh + first * x**2, gg + last
            elif layers == 3:
                q, gg = q + first * x**2, gg + last  # ⟨h|h⟩ plays no part, since g is frozen
            else:
                # Copies share the trained matrices' initial entries, and so these meet the mean of their noise.
                hh += (square * first / copies + middle[0] * (square + first)) * x**2
                gg += square * last / copies + middle[1] * (square + last)
                q, p = q + first * x**2, p + last
        for _ in range(stage.steps):
            outputs.append(gh)
            alpha, beta = (stage.lr * slope(gh) * factor for factor in (q, p))
            hh, gh, gg = (
                hh - 2 * alpha * gh + alpha**2 * gg,
                gh - alpha * gg - beta * hh + alpha * beta * gh,
                gg - 2 * beta * gh + beta**2 * hh,
            )
    return [*outputs, gh]


# ---------------------------------------------------------------------------------------- when noise changes nothing


class Coefficients(NamedTuple):
    """|h²⟩ = M |C₀h¹⟩ + N |B₀ᵀdh³⟩ before, and with M′, N′ for the same of the noisy vectors after the upscaling."""

    m: float
    n: float
    m_new: float = 0.0
    n_new: float = 0.0


def coefficients(s: Settings) -> list[Coefficients]:
    """Example 2's M, N, M′ and N′ over time: Equations 'MN_bf_upscaling' and 'MN_after_upscaling', step by step."""
    h, g = [1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]
    q, p, lr, found = s.sigma**2 * s.x**2, s.sigma**2, s.lr, list[Coefficients]()
    for t, output in enumerate(example_2(s)):
        if t == s.before and s.after:  # from here on initial weights are the noisy ones
            h, g = [h[0] - 1, h[1], 1.0, 0.0], [g[0], g[1] - 1, 0.0, 1.0]
            q, p, lr = q + s.std("D") ** 2 * s.x**2, p + s.std("A") ** 2, s.upscaled_lr
        found.append(Coefficients(*h))
        alpha, beta = (lr * s.slope(output) * factor for factor in (q, p))
        h, g = [a - alpha * b for a, b in zip(h, g, strict=True)], [b - beta * a for a, b in zip(h, g, strict=True)]
    return found


class ConditionCheck(NamedTuple):
    """How far a choice of hyperparameters moves what it should leave unchanged from the run never upscaled."""

    choice: str
    what: str
    change: float


def measure_conditions(settings: Settings) -> list[ConditionCheck]:
    """When does noise leave the limit unchanged? The paper's conclusions, and the conditions that hold.

    For M + M′ and N + N′ the paper asks for γ↑²(σ̄²+σ_D²)(σ̄²+σ_A²) = γ²σ̄⁴, which is not enough: both of its factors
    must agree, so σ_A = σ_D. And σ_B = σ_C = 0 leaves terms with 1/k in the output.
    The noise of A and D is the settings'; the loss of example 2 is linear, so that coefficients depend on nothing else.
    """
    a, c, d = map(settings.std, "ACD")
    sigma, lr = settings.sigma, settings.lr
    first = replace(settings, upscaled_lr=lr, noise=(("A", a), ("B", 1.0), ("C", c)))
    matched = replace(first, upscaled_lr=matched_learning_rate(lr, sigma, c, a))
    linear = replace(settings, slope=lambda y: -1.0)
    squares = (sigma**2 + a**2) * (sigma**2 + d**2)
    printed = replace(linear, upscaled_lr=lr * sigma**2 / math.sqrt(squares), noise=(("A", a), ("D", d)))
    both = replace(linear, upscaled_lr=lr * sigma**2 / (sigma**2 + a**2), noise=(("A", a), ("D", a)))
    tenfold = replace(both, times=10 * both.times)
    as_printed = f"example 2, printed condition, σ_A = {a:g}, σ_D = {d:g}"
    pair = f"example 2, σ_A = σ_D = {a:g}, γ↑(σ̄² + σ_A²) = γσ̄²"
    return [
        ConditionCheck("example 1, γ↑ = γ", "output", _change(first, example_1)),
        ConditionCheck("example 1, γ↑ = matched_learning_rate", "output", _change(matched, example_1)),
        ConditionCheck(as_printed, "M + M′", _change(printed, _sums_of_m)),
        ConditionCheck(as_printed, "N + N′", _change(printed, _sums_of_n)),
        ConditionCheck(pair, "M + M′", _change(both, _sums_of_m)),
        ConditionCheck(pair, "N + N′", _change(both, _sums_of_n)),
        ConditionCheck(f"{pair}, σ_B = σ_C = 0, k = {both.times}", "output", _change(both, example_2)),
        ConditionCheck(f"{pair}, σ_B = σ_C = 0, k = {tenfold.times}", "output", _change(tenfold, example_2)),
    ]


def _change(settings: Settings, values: Callable[[Settings], list[float]]) -> float:
    return max(abs(a - b) for a, b in zip(values(settings), values(never_upscaled(settings)), strict=True))


def _sums_of_m(settings: Settings) -> list[float]:
    return [each.m + each.m_new for each in coefficients(settings)]


def _sums_of_n(settings: Settings) -> list[float]:
    return [each.n + each.n_new for each in coefficients(settings)]
