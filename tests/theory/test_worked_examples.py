"""The paper's worked examples: closed forms, the limit and finite networks; and where the printed conditions fail."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mupscale.system.errors import MupscaleError
from mupscale.theory import Finite, Limit, MLPSetup, Program, Stage, finite, run
from mupscale.theory.limit_study import fit_slope
from mupscale.theory.worked_examples import (
    Settings,
    coefficients,
    coefficients_unchanged,
    example_1,
    example_2,
    matched_learning_rate,
    overlap,
    printed_condition,
)

NOISE = {"A": 0.7, "B": 0.3, "C": 0.4, "D": 0.55}
LOSSES = {
    "quadratic": (lambda y, t: 0.5 * (y - t).square().sum(), lambda y: y - 1.0),
    "logistic": (lambda y, t: torch.nn.functional.softplus(-3 * y * t).sum(), lambda y: -3 / (1 + math.exp(3 * y))),
}


def setting(times: int = 2, *, noise: dict[str, float] | None = None, loss: str = "quadratic") -> Settings:
    return Settings(
        slope=LOSSES[loss][1],
        lr=0.1,
        upscaled_lr=0.07,
        before=4,
        after=5,
        x=0.8,
        sigma=1.1,
        times=times,
        noise=tuple((NOISE if noise is None else noise).items()),
    )


def trained(example: int, s: Settings, program: Program, loss: str = "quadratic") -> Tensor:
    """The example as a network: letters of its layers from the input to the readout."""
    letters, learns = ("CBA", [False, True, False]) if example == 1 else ("DCBA", [False, True, True, False])
    mlp = MLPSetup(len(letters), "linear", s.sigma, learns, loss=LOSSES[loss][0])
    stages = [Stage(s.before, s.lr), Stage(s.after, s.upscaled_lr, s.times, [s.variance(c) ** 0.5 for c in letters])]
    found = run(program, mlp, torch.tensor([[s.x]], dtype=torch.float64), torch.ones(1, 1), stages)
    return found.outputs.flatten()


def closed_form(example: int, s: Settings) -> Tensor:
    return torch.tensor(example_1(s) if example == 1 else example_2(s), dtype=torch.float64)


@pytest.mark.parametrize(("times", "loss"), [(1, "logistic"), (2, "quadratic"), (3, "logistic"), (5, "logistic")])
@pytest.mark.parametrize("example", [1, 2])
def test_the_limit_is_the_closed_form(example: int, times: int, loss: str) -> None:
    """Appendices 'Example: 3-layer MLP' and '4-layer MLP': both recursions, with a different noise on every weight."""
    s = setting(times, loss=loss)
    found = trained(example, s, Limit(150, times, device="cpu"), loss)
    torch.testing.assert_close(found, closed_form(example, s), rtol=0, atol=1e-12)
    assert float((closed_form(example, setting(times, noise={}, loss=loss)) - found)[s.before :].abs().max()) > 0.03


@pytest.mark.parametrize("example", [1, 2])
def test_no_noise_and_the_same_rate_go_on_as_before(example: int) -> None:
    s = replace(setting(noise={}), upscaled_lr=0.1)
    torch.testing.assert_close(
        closed_form(example, s), closed_form(example, replace(s, before=9, after=0)), rtol=0, atol=1e-12
    )
    first = closed_form(example, replace(s, before=0, after=9))
    torch.testing.assert_close(closed_form(example, s), first, rtol=0, atol=1e-12)


@pytest.mark.parametrize("times", [2, 3])
def test_a_matched_learning_rate_leaves_the_first_example_unchanged(times: int) -> None:
    """Its 'Conclusion': γ σ̄⁴ = γ↑ (σ̄² + σ_C²)(σ̄² + σ_A²), whatever the noise on B."""
    s = setting(times)
    s = replace(s, upscaled_lr=matched_learning_rate(s.lr, s.sigma, NOISE["C"], NOISE["A"]))
    untouched = closed_form(1, replace(setting(1, noise={}), upscaled_lr=s.lr))
    torch.testing.assert_close(closed_form(1, s), untouched, rtol=0, atol=1e-12)
    torch.testing.assert_close(trained(1, s, Limit(100, times, device="cpu")), untouched, rtol=0, atol=1e-12)


def mismatch(s: Settings) -> tuple[float, float]:
    """By how much M + M′ and N + N′ of example 2 leave the recursion of before, where 𝓛′ is the same at all times."""
    pairs = list(zip(coefficients(s), coefficients(replace(s, noise=(), upscaled_lr=s.lr)), strict=True))
    return (
        max(abs(a.m + a.m_new - b.m - b.m_new) for a, b in pairs),
        max(abs(a.n + a.n_new - b.n - b.n_new) for a, b in pairs),
    )


def test_the_printed_condition_of_the_second_example_is_not_enough() -> None:
    """γ↑²(σ̄²+σ_D²)(σ̄²+σ_A²) = γ²σ̄⁴ lets M + M′ and N + N′ drift; both factors must agree, hence σ_A = σ_D."""
    s = Settings(slope=lambda _: -1.0, lr=0.1, upscaled_lr=0, before=5, after=5, noise=(("A", 0.8), ("D", 0.3)))
    s = replace(s, upscaled_lr=s.lr / math.sqrt((1 + 0.8**2) * (1 + 0.3**2)))
    assert printed_condition(s)
    assert not coefficients_unchanged(s)
    assert mismatch(s) == pytest.approx((0.05, 0.10), abs=0.02)
    both = replace(s, noise=(("A", 0.8), ("D", 0.8)), upscaled_lr=s.lr / (1 + 0.8**2))
    assert coefficients_unchanged(both)
    assert printed_condition(both)
    assert max(mismatch(both)) < 1e-15
    assert not coefficients_unchanged(replace(both, upscaled_lr=0.1))
    for letters in ("AD", "DA"):  # one factor alone agrees
        one = replace(both, noise={letters[0]: 0.8, letters[1]: 0.3})
        assert not coefficients_unchanged(one)


def test_quiet_hidden_layers_do_not_turn_2_prime_into_1() -> None:
    """σ_B = σ_C = 0 alone: the k⁻¹σ̄²σ_D²x² and k⁻¹σ̄²σ_A² terms stay, and the outputs differ."""
    s = setting(noise={"A": 0.6, "D": 0.6})
    s = replace(s, upscaled_lr=s.lr * s.sigma**2 / (s.sigma**2 + 0.36))
    assert coefficients_unchanged(s)
    found, silent = coefficients(s)[-1], coefficients(replace(s, noise=(), upscaled_lr=s.lr))[-1]
    assert overlap(s, found, found) != pytest.approx(overlap(replace(s, noise=()), silent, silent), rel=0.01)
    extra = overlap(s, found, found) - overlap(replace(s, noise=()), found, found)
    wanted = s.sigma**2 * 0.36 / 2 * (found.m_new**2 * s.x**2 + found.n_new**2)
    assert extra == pytest.approx(wanted, rel=1e-12)
    untouched = closed_form(2, replace(s, noise=(), upscaled_lr=s.lr))
    assert float((closed_form(2, s) - untouched).abs().max()) > 0.01
    found_limit = trained(2, s, Limit(150, 2, device="cpu"))
    torch.testing.assert_close(found_limit, closed_form(2, s), rtol=0, atol=1e-12)


# ------------------------------------------------------------------------ finite networks converge


@pytest.mark.parametrize("example", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_master_theorem_finite_networks_converge_as_one_over_root_n(example: int) -> None:
    """Error against n = 256 and 4096 has slope −1/2; matrices are revealed where they act, at a cost linear in n.

    Two widths, since the ends of a line tell its slope best.
    """
    s = replace(setting(2), before=1, after=1)
    wanted, errors = closed_form(example, s), []
    widths = {256: 40, 4096: 40}  # so many that the slope's own error is 0.04
    for n, seeds in widths.items():
        drawn = finite(lambda p: trained(example, s, p), n, k=2, seeds=seeds, dense=False)
        errors.append(float((drawn.values - wanted).square().mean().sqrt()))
    assert fit_slope(list(widths), errors) == pytest.approx(-0.5, abs=0.1)
    assert errors[-1] < 0.05


@pytest.mark.parametrize("example", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_networks_with_real_matrices_converge_too(example: int) -> None:
    s = replace(setting(2), before=2, after=2)
    wanted, errors = closed_form(example, s), []
    widths = {32: 40, 256: 20}
    for n, seeds in widths.items():
        drawn = finite(lambda p: trained(example, s, p), n, k=2, seeds=seeds, dtype=torch.float32)
        errors.append(float((drawn.values - wanted).square().mean().sqrt()))
    assert fit_slope(list(widths), errors) == pytest.approx(-0.5, abs=0.22)  # three standard errors


@pytest.mark.slow
@pytest.mark.parametrize("example", [1, 2])
def test_real_matrices_up_to_4096_converge_as_one_over_root_n(example: int) -> None:
    s = replace(setting(2), before=2, after=2)
    wanted, errors = closed_form(example, s), []
    widths = {256: 60, 1024: 30, 4096: 12}
    for n, seeds in widths.items():
        drawn = finite(lambda p: trained(example, s, p), n, k=2, seeds=seeds, dtype=torch.float32)
        errors.append(float((drawn.values - wanted).square().mean().sqrt()))
    found = fit_slope(list(widths), errors)
    print(f"example {example}: errors {[f'{e:.4f}' for e in errors]}, slope {found:.3f}")
    assert found == pytest.approx(-0.5, abs=0.1)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"noise": {"E": 0.1}}, "'E' is no weight"),
        ({"times": 0}, "not 4, 5 and 0"),
        ({"before": -1}, "not -1, 5 and 2"),
        ({"sigma": 0.0}, "above 0, not 0.0"),
    ],
)
def test_bad_settings_get_one_sentence(wrong: dict[str, object], words: str) -> None:
    with pytest.raises(MupscaleError, match=words):
        replace(setting(), **wrong)


def test_a_finite_example_is_a_plain_matrix_product() -> None:
    """Width n·k written out: y = A B C x / N with the updates of Appendix 'Example: 3-layer MLP'."""
    s = setting(2)
    found = trained(1, s, Finite(20, 2, 3, device="cpu"))
    p = Finite(20, 2, 3, device="cpu")
    c, a, b = s.sigma * p.vector(2, 1)[0], s.sigma * p.vector(2, 1)[0], s.sigma / 2 * p.matrix(2).full()
    c, a = c.reshape(-1), a.reshape(-1)
    outputs = []
    for t in range(10):
        if t == 4:
            c = c + NOISE["C"] * p.vector(1, 1)[0].reshape(-1)
            a = a + NOISE["A"] * p.vector(1, 1)[0].reshape(-1)
            b = b + NOISE["B"] / 2**0.5 * p.matrix(1).full()
        outputs.append(a @ b @ c * s.x / 40)
        b = b - (s.lr if t < 4 else s.upscaled_lr) * (outputs[-1] - 1) * s.x * torch.outer(a, c) / 40
    torch.testing.assert_close(found, torch.stack(outputs), rtol=0, atol=1e-12)
