"""Studies at infinite width: networks meet their limit, copies drift apart, sweeps have a best cell."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mupscale.plots.figures import figure
from mupscale.plots.gallery import Gallery
from mupscale.sweep.space import Cell, Space, Sweep
from mupscale.system import MupscaleError, parse_record
from mupscale.theory import FewSamples, Finite, MLPSetup, Stage, limit_pictures
from mupscale.theory.limit_study import (
    Experiment,
    LimitComparison,
    compare_with_limit,
    fit_slope,
    gaussian_batch,
    save_results,
    sweep_limit,
    worked_example,
)
from mupscale.theory.mlp_training import mask_separated_copies
from mupscale.theory.worked_examples import Settings, measure_conditions

pytest.importorskip("matplotlib")

SETTINGS = Settings(
    slope=lambda y: y - 1.0,
    lr=0.1,
    upscaled_lr=0.06,
    before=3,
    after=3,
    times=3,
    noise=(("A", 0.8), ("B", 0.5), ("C", 0.4), ("D", 0.3)),
)


def experiment(*stages: Stage, activation: str = "tanh") -> Experiment:
    x, y = gaussian_batch(2, 3)
    return Experiment(MLPSetup(3, activation), x, y, stages or [Stage(2, 0.5), Stage(2, 0.5, 2, 0.7)])


@pytest.fixture(scope="module")
def met() -> LimitComparison:
    torch.set_num_threads(1)
    return compare_with_limit(experiment(), [512, 64], samples=1500, seeds=2, networks=8)


@pytest.fixture(scope="module")
def met_well() -> LimitComparison:
    """With so many networks that their slope is known."""
    torch.set_num_threads(1)
    return compare_with_limit(experiment(), [512, 64, 128, 256], samples=4000, seeds=3, networks=48)


def test_the_batch_has_inputs_of_length_one() -> None:
    x, y = gaussian_batch(5, 3, seed=1)
    assert x.shape == (5, 3)
    assert y.shape == (5, 1)
    assert torch.allclose(x.norm(dim=1), torch.ones(5, dtype=torch.float64))
    assert not torch.equal(x, gaussian_batch(5, 3, seed=2)[0])
    with pytest.raises(MupscaleError, match="not 0 and 3"):
        gaussian_batch(0, 3)


@pytest.mark.slow
def test_networks_come_closer_to_the_limit_with_the_square_root_of_n(met_well: LimitComparison) -> None:
    met = met_well
    assert met.widths == [64, 128, 256, 512]
    assert met.slope == pytest.approx(-0.5, abs=0.1)
    for gap, doubt in met.gaps:
        assert gap < 3 * doubt
    assert met.errors[0] > 5 * float(met.limit.outputs.standard_error.max())  # the limit's own error hides nothing


def test_the_slope_is_fitted_in_logarithms() -> None:
    assert fit_slope([10, 100, 1000], [3.0, 0.3, 0.03]) == pytest.approx(-1)
    assert fit_slope([1, 4], [1.0, 0.5]) == pytest.approx(-0.5)


@pytest.mark.slow
def test_the_slopes_error_is_what_other_draws_of_networks_give(met_well: LimitComparison) -> None:
    """The bootstrap, over networks of each width."""
    met, drawn = met_well, []
    for _ in range(300):
        errors = []
        for found in met.finite:
            values = found.outputs.values[torch.randint(48, (48,))]
            errors.append(float((values - met.limit.outputs.mean).square().mean().sqrt()))
        drawn.append(fit_slope(met.widths, errors))
    assert met.slope_error == pytest.approx(float(torch.tensor(drawn).std()), rel=0.25)
    assert met.slope_error is not None
    assert met.slope_error < 0.06


def test_copies_are_one_until_the_upscaling_and_differ_after_it(met: LimitComparison) -> None:
    assert met.upscaled == (2,)
    for found in (met.limit, *met.finite):
        assert torch.allclose(found.correlation[:2], torch.ones(2, dtype=torch.float64), atol=1e-5)
        assert (found.correlation[2:] < 0.9).all()
    assert torch.allclose(met.limit.correlation, met.finite[-1].correlation, atol=0.03)


def test_the_noise_adds_to_the_kernel_of_a_copy_with_itself_alone() -> None:
    """Linear, readout alone trained: ⟨h|h⟩ᵢⱼ = σ̄²(σ̄² + σ_U²/k) for i ≠ j, and σ̄_Δ²(σ̄² + σ_U²) more for i = j."""
    x, y = gaussian_batch(1, 3)
    mlp = MLPSetup(3, "linear", trained=[False, False, True])
    found = compare_with_limit(
        Experiment(mlp, x, y, [Stage(1, 0.1), Stage(1, 0.1, 2, 0.5)]), [], samples=500, seeds=2
    ).limit
    other = 1 + 0.25 / 2
    assert found.other.mean.tolist() == pytest.approx([1, other, other], abs=1e-12)
    assert found.same.mean.tolist() == pytest.approx([1, other + 0.25 * 1.25, other + 0.25 * 1.25], abs=1e-12)


def test_after_several_upscalings_copies_are_those_that_the_first_one_parts() -> None:
    """Linear, nothing trained but the readout, noise on the hidden matrix alone: ⟨h|h⟩ᵢⱼ stays 1 for i and j apart.

    The noise of the second upscaling is drawn for each of the six copies, that of the first for pairs of them.
    """
    x, y = gaussian_batch(1, 3)
    mlp = MLPSetup(3, "linear", trained=[False, False, True])
    stages = [Stage(1, 0.1), Stage(1, 0.1, 3, [0, 0.5, 0]), Stage(1, 0.1, 2, [0, 0.7, 0])]
    found = compare_with_limit(Experiment(mlp, x, y, stages), [64], samples=500, seeds=2, networks=8)
    assert found.limit.other.mean.tolist() == pytest.approx([1, 1, 1, 1], abs=1e-12)
    assert found.limit.same.mean.tolist() == pytest.approx([1, 1.25, 1.74, 1.74], abs=1e-12)
    assert torch.allclose(found.finite[0].correlation, found.limit.correlation, atol=0.05)
    groups = mask_separated_copies(stages)
    assert groups.tolist() == [[i // 2 != j // 2 for j in range(6)] for i in range(6)]
    assert mask_separated_copies(stages[:2]).tolist() == [[i != j for j in range(3)] for i in range(3)]
    assert not mask_separated_copies(stages[:1]).any()


def test_densities_are_densities_and_agree(met: LimitComparison) -> None:
    step = met.edges[1] - met.edges[0]
    for found in (met.limit, *met.finite):
        assert float(found.density.sum() * step) == pytest.approx(1, abs=0.01)
    distance = [float((found.density - met.limit.density).abs().sum() * step) for found in met.finite]
    assert distance[-1] < 0.1


def test_a_comparison_survives_a_file(met: LimitComparison, tmp_path: Path) -> None:
    path = save_results(tmp_path / "new" / "results.json", met.to_json())
    again = LimitComparison.from_json(json.loads(path.read_text()))
    assert again.to_json() == met.to_json()
    assert again.slope == met.slope
    assert torch.equal(again.limit.losses.standard_error, met.limit.losses.standard_error)


def test_results_that_cannot_be_written_are_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MupscaleError, match=r"results\.json cannot be written: .*; choose another folder"):
        save_results(tmp_path / "file" / "results.json", {})


def test_ticks_count_every_network_and_seed() -> None:
    ticks: list[int] = []
    compare_with_limit(experiment(), [8, 16], samples=500, seeds=2, networks=3, tick=lambda: ticks.append(1))
    assert len(ticks) == 2 + 2 * 3


@pytest.mark.parametrize("widths", [[0], [8, 8], [-1, 8]])
def test_widths_must_be_different_and_positive(widths: list[int]) -> None:
    with pytest.raises(MupscaleError, match="widths are distinct numbers of units"):
        compare_with_limit(experiment(), widths, samples=500, seeds=2)


# ------------------------------------------------------------------------------------------------ pictures


class Easel(Gallery):
    """Keeps the axes of a picture in the place of files."""

    def draw(self, name: str, alt: str, caption: str, sketch: Any, *, size: tuple[float, float] = (4.8, 3.5)) -> Any:
        fig, ax = figure(*size)
        sketch(ax)
        self.axes = fig.axes


@pytest.fixture
def easel(tmp_path: Path) -> Easel:
    return Easel(tmp_path)


def lines(ax: Any) -> dict[str, list[float]]:
    return {line.get_label(): [float(y) for y in line.get_ydata()] for line in ax.lines}


def test_losses_are_drawn_with_the_upscaling_marked(met: LimitComparison, easel: Easel) -> None:
    limit_pictures.draw_losses({"": met}, easel)
    above, below = easel.axes
    assert lines(above)["limit n → ∞"] == met.limit.losses.mean.tolist()
    assert lines(above)["n = 512"] == met.finite[-1].losses.mean.tolist()
    marks = [line.get_xdata()[0] for line in above.lines if line.get_label() == "upscaled, k = 2"]
    assert marks == [2]
    difference = (met.finite[0].losses.mean - met.limit.losses.mean).tolist()
    assert difference in [[float(y) for y in line.get_ydata()] for line in below.lines]


def test_errors_are_drawn_on_log_axes_with_the_line_of_slope_one_half(met: LimitComparison, easel: Easel) -> None:
    limit_pictures.draw_errors({"": met}, easel)
    (ax,) = easel.axes
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    points, line = ax.lines
    assert list(points.get_ydata()) == met.errors
    assert points.get_label() == f"slope −{-(met.slope or 0):.2f}"
    assert fit_slope(line.get_xdata(), line.get_ydata()) == pytest.approx(-0.5)
    level = float(line.get_ydata()[0] * line.get_xdata()[0] ** 0.5)
    apart = [math.log(e * n**0.5 / level) for n, e in zip(met.widths, met.errors, strict=True)]
    assert math.fsum(apart) == pytest.approx(0, abs=1e-12)  # it runs through the middle of the points, and beyond them
    assert line.get_xdata()[0] < met.widths[0] < met.widths[-1] < line.get_xdata()[-1]


def test_copies_and_preactivations_are_drawn(met: LimitComparison, easel: Easel) -> None:
    limit_pictures.draw_copies(met, easel)
    drawn = lines(easel.axes[0])
    assert drawn["a copy with itself, ⟨h|h⟩ᵢᵢ"] == met.limit.same.mean.tolist()
    assert drawn["two copies, ⟨h|h⟩ᵢⱼ"] == met.limit.other.mean.tolist()
    assert drawn["networks, n = 512"] == met.finite[-1].same.mean.tolist()
    limit_pictures.draw_preactivations(met, easel)
    assert lines(easel.axes[0])["limit n → ∞"] == met.limit.density.tolist()


def test_a_sweep_is_drawn_as_a_heat_map(swept: Sweep, easel: Easel) -> None:
    limit_pictures.draw_sweep(swept, easel, base_lr=0.5)
    (star,) = [line for line in easel.axes[0].lines if line.get_label() == "optimum"]
    assert star.get_xdata()[0] == swept.space.lrs.index(swept.best.lr)
    assert round(star.get_ydata()[0]) == swept.space.noises.index(swept.best.noise)


# ------------------------------------------------------------------------------------------------ worked examples


@pytest.mark.parametrize("number", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_worked_example_is_its_closed_form(number: int) -> None:
    worked = worked_example(number, SETTINGS, 1.0, [16, 256], samples=200, networks=12)
    assert worked.difference < 1e-12
    assert len(worked.closed) == 7
    assert worked.closed[:4] == worked.never[:4]
    assert abs(worked.closed[-1] - worked.never[-1]) > 1e-3
    assert worked.comparison.slope == pytest.approx(-0.5, abs=0.27)  # three standard errors
    assert json.loads(json.dumps(worked.to_json()))["closed_form"] == worked.closed


def test_the_conditions_that_leave_the_limit_unchanged_do_and_the_printed_one_does_not() -> None:
    same, matched, m_printed, n_printed, m_both, n_both, output, tenfold = measure_conditions(SETTINGS)
    assert same.change > 0.01
    assert matched.change < 1e-12
    assert min(m_printed.change, n_printed.change) > 0.01
    assert max(m_both.change, n_both.change) < 1e-12
    assert output.change > 0.01  # σ_B = σ_C = 0 is not enough, and what is left falls with k
    assert tenfold.change == pytest.approx(output.change / 10, rel=1e-9)


def test_the_printed_condition_is_right_where_both_noises_agree() -> None:
    found = measure_conditions(replace(SETTINGS, noise=(("A", 0.3), ("C", 0.4), ("D", 0.3))))
    assert max(found[2].change, found[3].change) < 1e-12


# ------------------------------------------------------------------------------------------------ sweeps


@pytest.fixture(scope="module")
def swept() -> Sweep:
    torch.set_num_threads(1)
    before = experiment(Stage(2, 0.5), activation="linear")
    return sweep_limit(before, Space((0.1, 0.5, 1e6), (1.0,)), times=2, after=3, samples=400, seeds=2)


def test_the_best_cell_is_the_lowest_loss(swept: Sweep) -> None:
    finished = {trial.cell: trial.loss for trial in swept.trials if trial.loss is not None}
    assert set(finished) == {Cell(lr, noise) for lr in (0.1, 0.5) for noise in (0.0, 1.0)}
    assert swept.best.loss == min(finished.values())
    assert (swept.name, swept.start, swept.width) == ("limit-times-2", "n", "2n")
    for trial in swept.trials:
        if trial.loss is not None:
            assert trial.loss == pytest.approx(trial.curve[-1][1])
            assert [step for step, _ in trial.curve] == [0, 1, 2, 3]


def test_trials_that_diverge_are_marked_and_the_others_go_on(swept: Sweep) -> None:
    assert {trial.cell for trial in swept.trials if trial.status == "diverged"} == {Cell(1e6, 0), Cell(1e6, 1.0)}


def test_a_loss_far_above_the_start_counts_as_diverged() -> None:
    found = sweep_limit(experiment(Stage(1, 0.5)), Space((300.0,)), after=1, samples=500)
    (trial,) = found.trials
    assert trial.status == "diverged"
    assert math.isfinite(trial.curve[-1][1])
    with pytest.raises(MupscaleError, match="all 1 trials diverged"):
        _ = found.best


@pytest.mark.parametrize("noise", [0.0, 1.0])
def test_a_trial_is_the_run_that_it_says(swept: Sweep, noise: float) -> None:
    """Upscaled twice, also where zero noise was run with one copy of each unit."""
    trial = swept.at(Cell(0.5, noise))
    whole = experiment(Stage(2, 0.5), Stage(3, 0.5, 2, noise), activation="linear")
    losses = compare_with_limit(whole, [], samples=400, seeds=2).limit.losses
    assert trial is not None
    assert trial.losses == pytest.approx(losses.values[:, -1].tolist(), abs=1e-12)


def test_a_sweep_says_where_latents_are_many() -> None:
    notes: list[str] = []
    sweep_limit(experiment(Stage(1, 0.5)), Space((0.5,), (1.0,)), after=2, samples=300, note=notes.append)
    (note,) = notes
    assert "latents are many for 300 samples" in note
    sweep_limit(experiment(Stage(1, 0.5)), Space((0.5,), (1.0,)), after=2, samples=1500, note=notes.append)
    assert len(notes) == 1
    with pytest.warns(FewSamples, match="latents are many for 300 samples") as warned:
        sweep_limit(experiment(Stage(1, 0.5)), Space((0.5,), (1.0, 2.0)), after=2, samples=300)
    assert len(warned) == 1
    with pytest.warns(FewSamples, match="latents are many for 300 samples"):
        compare_with_limit(experiment(), [], samples=300, seeds=2)


def test_a_network_of_zeros_has_equal_copies() -> None:
    x, y = gaussian_batch(2, 3)
    found = compare_with_limit(Experiment(MLPSetup(3, sigma=0.0), x, y, [Stage(1, 0.5, 2)]), [], samples=200, seeds=2)
    assert found.limit.correlation.tolist() == [1.0, 1.0]


def test_a_sweep_survives_a_file(swept: Sweep) -> None:
    assert parse_record(Sweep, json.loads(json.dumps(asdict(swept)))) == swept


def test_a_sweep_that_cannot_be_is_refused() -> None:
    with pytest.raises(MupscaleError, match="not 1 and 5"):
        sweep_limit(experiment(Stage(1, 0.5)), Space((0.5,)), times=1)


def test_a_finite_network_finds_what_the_sweep_says(swept: Sweep) -> None:
    """The linear network's best trial, on a real network of width 2 · 1000."""
    best = swept.best
    stages = [Stage(2, 0.5), Stage(3, best.lr, 2 if best.noise else 1, best.noise)]
    whole = experiment(*stages, activation="linear")
    losses = [float(whole(Finite(1000, whole.times, seed, device="cpu")).losses[-1]) for seed in range(4)]
    assert sum(losses) / 4 == pytest.approx(best.loss, abs=0.02)
