"""Linear networks in closed form: the paper's worked examples as printed, fresh units, and where conditions fail."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mupscale.system.errors import MupscaleError
from mupscale.theory import Limit, MLPSetup, Program, Stage, finite, run
from mupscale.theory.limit_study import fit_slope
from mupscale.theory.mlp_training import count_copies
from mupscale.theory.worked_examples import (
    Settings,
    closed_form,
    coefficients,
    example_1,
    linear_with_fresh_units,
    matched_learning_rate,
    measure_conditions,
    never_upscaled,
)

NOISE = {"A": 0.7, "B": 0.3, "C": 0.4, "D": 0.55}
LOSSES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Callable[[float], float]]] = {
    "quadratic": (lambda y, t: 0.5 * (y - t).square().sum(), lambda y: y - 1.0),
    "logistic": (lambda y, t: torch.nn.functional.softplus(-3 * y * t).sum(), lambda y: -3 / (1 + math.exp(3 * y))),
}


def setting(times: int = 2, loss: str = "quadratic", noise: dict[str, float] = NOISE) -> Settings:
    return Settings(LOSSES[loss][1], 0.1, 0.07, 4, 5, x=0.8, sigma=1.1, times=times, noise=tuple(noise.items()))


def fresh(steps: int, lr: float, times: float = 2, outgoing: float = 1.0) -> Stage:
    return Stage(steps, lr, times, how="fresh", outgoing=outgoing)


def trained(layers: int, program: Program, stages: Sequence[Stage], loss: str = "quadratic") -> Tensor:
    """What a linear network's output does; of 3 and 4 layers the outer ones are frozen, as in examples 1 and 2."""
    learns = [True] * 2 if layers == 2 else [False, *[True] * (layers - 2), False]
    mlp = MLPSetup(layers, "linear", 1.1, learns, loss=LOSSES[loss][0])
    return run(program, mlp, torch.tensor([[0.8]], dtype=torch.float64), torch.ones(1, 1), stages).outputs.flatten()


def closed(layers: int, stages: Sequence[Stage], loss: str = "quadratic") -> Tensor:
    return torch.tensor(linear_with_fresh_units(layers, LOSSES[loss][1], stages, 0.8, 1.1), dtype=torch.float64)


def close(found: Tensor, wanted: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(found, wanted.to(found), rtol=0, atol=tolerance)


# ------------------------------------------------------------------------ the limit is the closed form

TWICE = [Stage(2, 0.1), fresh(2, 0.08, 1.5), fresh(3, 0.06, 2, 0.7)]
CASES = {
    "copies": [*setting().stages(2)],
    "five copies": [*setting(5).stages(2)],
    "one copy": [*setting(1).stages(2)],
    "silent copies, then noise": [Stage(2, 0.1), Stage(1, 0.1, 2), Stage(2, 0.06, 3, [0.55, 0.4, 0.3, 0.7])],
    "a = ½": [Stage(4, 0.1), fresh(4, 0.07, 2, 0.5)],
    "r = 4": [Stage(3, 0.1), fresh(3, 0.03, 4)],
    "a = 0": [Stage(3, 0.1), fresh(3, 0.1, 1.25, 0)],
    "twice": TWICE,
    "fresh, then copies": [*TWICE[:2], Stage(2, 0.07, 2)],
    "copies, then fresh": [TWICE[0], Stage(2, 0.1, 2), TWICE[2]],
}


@pytest.mark.parametrize("layers", [2, 3, 4])
@pytest.mark.parametrize("name", CASES)
def test_the_limit_is_the_closed_form(name: str, layers: int) -> None:
    """The paper's worked examples, and a network of two layers that both learn, with a noise of its own per weight."""
    noises = {2: [0, 3], 3: [0, 1, 3], 4: [0, 1, 2, 3]}[layers]
    stages = [replace(s, noise=[s.noise[i] for i in noises]) if isinstance(s.noise, list) else s for s in CASES[name]]
    loss = "quadratic" if len(stages) == 2 else "logistic"
    found = trained(layers, Limit(150, count_copies(stages), device="cpu"), stages, loss)
    close(found, closed(layers, stages, loss))
    never = closed(layers, [Stage(s.steps, s.lr) for s in stages], loss)
    assert float((found - never).abs().max()) > 1e-3


def printed(s: Settings) -> tuple[list[float], list[tuple[float, ...]]]:
    """Example 2's outputs and its M, N, M′, N′ as the appendix prints them.

    Equations 'MN_bf_upscaling', 'MN_after_upscaling', 'final-recursion-bf-upscaling' and '…af_upscaling'; ①, ①′ and ②′
    are one sum, since M′ = N′ = 0 before.
    """
    square, (a, b, c, d) = s.sigma**2, (s.std(letter) ** 2 for letter in "ABCD")
    outputs, slopes, history = list[float](), list[float](), list[tuple[float, ...]]()
    early, late = s.lr * square, (s.upscaled_lr * (square + d), s.upscaled_lr * (square + a))
    for t in range(s.before + s.after + 1):
        start = s.before if t >= s.before else t

        def both(which: int, start: int = start, t: int = t) -> float:
            total = 0.0
            for i in range(t):
                for j in range(i):
                    rates = (early if i < start else late[0]) * (early if j < start else late[1])
                    total += s.x**2 * rates * slopes[i] * slopes[j] * history[j][which]
            return total

        def new(which: int, start: int = start, t: int = t) -> float:
            pairs = ((i, j) for i in range(start, t) for j in range(start, i))
            return s.x**2 * late[0] * late[1] * sum(slopes[i] * slopes[j] * history[j][which] for i, j in pairs)

        n = -(s.x**2) * early * sum(slopes[:start]) + both(1)
        now = (1 + both(0), n, 0.0, 0.0)
        if t >= s.before:
            now = (both(0), n, 1 + new(2), -(s.x**2) * late[0] * sum(slopes[start:t]) + new(3))
        met = []
        for slope, then in zip(slopes, history, strict=True):
            same = s.x**2 * (then[0] + then[2]) * (now[0] + now[2]) + (then[1] + then[3]) * (now[1] + now[3])
            forward = then[2] * now[2] * (square * d / s.times + square * c + c * d) * s.x**2
            backward = then[3] * now[3] * (square * a / s.times + square * b + a * b)
            met.append(slope * (square**2 * same + forward + backward))
        y = square**2 * (now[1] + now[3]) + (square * b + square * a / s.times + a * b) * now[3]
        y -= square * s.lr * sum(met[:start]) + (square + a) * s.upscaled_lr * sum(met[start:])
        outputs.append(y)
        slopes.append(s.slope(y))
        history.append(now)
    return outputs, history


@pytest.mark.parametrize(("times", "loss"), [(1, "logistic"), (2, "quadratic"), (3, "logistic")])
def test_both_recursions_are_those_that_the_paper_prints(times: int, loss: str) -> None:
    """Appendices 'Example: 3-layer MLP' and '4-layer MLP'."""
    s = setting(times, loss)
    outputs, history = printed(s)
    assert closed_form(2, s) == pytest.approx(outputs, abs=1e-12)
    for found, wanted in zip(coefficients(s), history, strict=True):
        assert found == pytest.approx(wanted, abs=1e-12)
    y, gains = 0.0, (s.lr * 1.1**4, s.upscaled_lr * (1.1**2 + NOISE["C"] ** 2) * (1.1**2 + NOISE["A"] ** 2))
    for t, found in enumerate(example_1(s)):
        assert found == pytest.approx(y, abs=1e-12)
        y -= 0.8**2 * gains[t >= s.before] * s.slope(y)


@pytest.mark.parametrize("example", [1, 2])
def test_no_noise_and_the_same_rate_go_on_as_before(example: int) -> None:
    s = replace(setting(noise={}), upscaled_lr=0.1)
    never = closed_form(example, never_upscaled(s))
    assert closed_form(example, s) == pytest.approx(never, abs=1e-12)
    assert closed_form(example, replace(s, before=0, after=9)) == pytest.approx(never, abs=1e-12)


def test_closed_forms_at_the_ends() -> None:
    """r → 1 is no growth. r → ∞ at a rate of γ/r is example 1 as before. a → 0 keeps the function."""
    before, rest = Stage(4, 0.1), (3, 0.1)
    for layers in (2, 3, 4):
        never = closed(layers, [before, Stage(*rest)])
        close(closed(layers, [before, fresh(*rest, times=1)]), never, 0)
        close(closed(layers, [before, fresh(*rest, times=1 + 1e-9)]), never, 1e-8)
    never = closed(3, [before, Stage(*rest)])
    close(closed(3, [before, fresh(3, 0.1 / 1e9, 1e9)]), never, 1e-8)
    for times, a in ((2, 1.0), (4, 0.5), (3, 0.0)):  # the rate that leaves example 1 unchanged
        close(closed(3, [before, fresh(3, 0.1 / (times + a**2 * (1 - 1 / times)), times, a)]), never)


# ------------------------------------------------------------------------ when noise leaves the limit unchanged


def test_a_matched_learning_rate_leaves_the_first_example_unchanged() -> None:
    """Its 'Conclusion': γ σ̄⁴ = γ↑ (σ̄² + σ_C²)(σ̄² + σ_A²), whatever the noise on B."""
    s = setting(3)
    s = replace(s, upscaled_lr=matched_learning_rate(s.lr, s.sigma, NOISE["C"], NOISE["A"]))
    assert example_1(s) == pytest.approx(example_1(never_upscaled(s)), abs=1e-12)


def test_the_printed_condition_of_the_second_example_is_not_enough() -> None:
    """γ↑²(σ̄²+σ_D²)(σ̄²+σ_A²) = γ²σ̄⁴ lets M + M′ and N + N′ drift; both factors must agree, hence σ_A = σ_D.

    And σ_B = σ_C = 0 alone does not turn ②′ into ①: the k⁻¹σ̄²σ_D²x² and k⁻¹σ̄²σ_A² terms stay, and fall with k.
    """
    s = Settings(lambda y: y - 1, 0.06, 0.06, 8, 8, noise=(("A", 0.8), ("B", 0.5), ("C", 0.4), ("D", 0.3)))
    same, matched, m_printed, n_printed, m_both, n_both, output, tenfold = (c.change for c in measure_conditions(s))
    assert same > 0.01
    assert (m_printed, n_printed, output) == pytest.approx((0.045, 0.10, 0.35), rel=0.05)  # docs/theory-examples.md
    assert max(matched, m_both, n_both) < 1e-12
    assert tenfold == pytest.approx(output / 10, rel=1e-9)
    equal = measure_conditions(replace(s, noise=(("A", 0.3), ("C", 0.4), ("D", 0.3))))
    assert max(equal[2].change, equal[3].change) < 1e-12  # where both noises agree, the printed condition is right


# ------------------------------------------------------------------------ finite networks converge

EXAMPLES = {number: replace(setting(2), before=1, after=1).stages(number) for number in (1, 2)}
slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("layers", "stages", "sizes", "dense", "allowed"),  # allowed are three to four standard errors of the slope
    [
        (3, EXAMPLES[1], {256: 40, 4096: 40}, False, 0.1),
        pytest.param(4, EXAMPLES[2], {256: 40, 4096: 40}, False, 0.13, marks=slow),
        (3, EXAMPLES[1], {32: 40, 256: 20}, True, 0.22),
        pytest.param(3, EXAMPLES[1], {256: 60, 1024: 30, 4096: 12}, True, 0.13, marks=slow),
        pytest.param(4, EXAMPLES[2], {256: 60, 1024: 30, 4096: 12}, True, 0.13, marks=slow),
        (3, [Stage(1, 0.1), fresh(1, 0.07, 2)], {64: 30, 4096: 30}, False, 0.15),
        pytest.param(
            3, [Stage(1, 0.1), fresh(1, 0.07, 2)], dict.fromkeys((64, 256, 1024, 4096), 200), False, 0.06, marks=slow
        ),
    ],
)
def test_master_theorem_finite_networks_converge_as_one_over_root_n(
    layers: int, stages: list[Stage], sizes: dict[int, int], dense: bool, allowed: float
) -> None:
    """Error against n has slope −1/2; dense=False reveals matrices where they act, at a cost linear in n."""
    wanted, errors, k = closed(layers, stages), [], count_copies(stages)
    for n, seeds in sizes.items():
        drawn = finite(lambda p: trained(layers, p, stages), n, k=k, seeds=seeds, dense=dense)
        errors.append(float((drawn.values - wanted).square().mean().sqrt()))
    assert fit_slope(list(sizes), errors) == pytest.approx(-0.5, abs=allowed)
    assert errors[-1] < (0.05 if n == 4096 else 0.2)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: setting(noise={"E": 0.1}), "'E' is not a weight"),
        (lambda: setting(0), "times= is 0, but must be a whole number, 1 or more"),
        (lambda: replace(setting(), before=-1), "before= is -1, but must be a whole number, 0 or more"),
        (lambda: replace(setting(), sigma=0.0), "sigma= is 0.0, but must be a number above 0"),
        (lambda: closed(5, []), "2, 3 and 4 layers.*, not for 5 layers"),
        (lambda: closed(3, [Stage(1, 0.1, 2, 0.5), fresh(1, 0.1)]), "one upscaling without fresh units.*noise in 1"),
    ],
)
def test_bad_settings_get_one_sentence(make: Callable[[], object], told: str) -> None:
    with pytest.raises(MupscaleError, match=told):
        make()
