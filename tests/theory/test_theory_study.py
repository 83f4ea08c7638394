"""Studies at infinite width: networks meet their limit, copies drift apart, ways to grow have a best one."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mupscale.plots import Gallery, figure
from mupscale.system import MupscaleError
from mupscale.theory import Draws, FewSamples, Limit, MLPSetup, Stage, WayToGrow, best_way, limit_pictures
from mupscale.theory.limit_study import (
    Experiment,
    LimitComparison,
    compare_ways_to_grow,
    compare_with_limit,
    fit_slope,
    gaussian_batch,
    list_ways,
    save_results,
    sweep_limit,
    worked_example,
)
from mupscale.theory.mlp_training import mask_separated_copies
from mupscale.theory.worked_examples import Settings
from refusals import refuses

pytest.importorskip("matplotlib")

NOISE = (("A", 0.8), ("B", 0.5), ("C", 0.4), ("D", 0.3))
SETTINGS = Settings(lambda y: y - 1.0, lr=0.1, upscaled_lr=0.06, before=3, after=3, times=3, noise=NOISE)


def experiment(*stages: Stage, activation: str = "tanh", **mlp: Any) -> Experiment:
    x, y = gaussian_batch(2, 3)
    return Experiment(MLPSetup(3, activation, **mlp), x, y, stages or [Stage(2, 0.5), Stage(2, 0.5, 2, 0.7)])


@pytest.fixture(scope="module")
def met() -> LimitComparison:
    torch.set_num_threads(1)
    return compare_with_limit(experiment(), [512, 64], Draws(1500, 2, 8))


def test_the_batch_has_inputs_of_length_one() -> None:
    x, y = gaussian_batch(5, 3, seed=1)
    assert x.shape == (5, 3)
    assert y.shape == (5, 1)
    assert torch.allclose(x.norm(dim=1), torch.ones(5, dtype=torch.float64))
    assert not torch.equal(x, gaussian_batch(5, 3, seed=2)[0])
    refuses("not 0 and 3", gaussian_batch, 0, 3)


@pytest.mark.slow
def test_networks_come_closer_to_the_limit_with_the_square_root_of_n() -> None:
    """And the slope's error is what other draws of networks give: the bootstrap, over networks of each width."""
    met = compare_with_limit(experiment(), [512, 64, 128, 256], Draws(4000, 3, 48))
    assert met.widths == [64, 128, 256, 512]
    assert met.slope == pytest.approx(-0.5, abs=0.1)
    for gap, doubt in met.gaps:
        assert gap < 3 * doubt
    assert met.errors[0] > 5 * float(met.limit.outputs.standard_error.max())  # the limit's own error hides nothing
    drawn = []
    for _ in range(300):
        several = [found.outputs.values[torch.randint(48, (48,))] for found in met.finite]
        errors = [float((values - met.limit.outputs.mean).square().mean().sqrt()) for values in several]
        drawn.append(fit_slope(met.widths, errors))
    assert met.slope_error == pytest.approx(float(torch.tensor(drawn).std()), rel=0.25)
    assert met.slope_error < 0.06


def test_copies_are_one_until_the_upscaling_and_differ_after_it(met: LimitComparison) -> None:
    assert met.upscaled == (2,)
    for found in (met.limit, *met.finite):
        assert torch.allclose(found.correlation[:2], torch.ones(2, dtype=torch.float64), atol=1e-5)
        assert (found.correlation[2:] < 0.9).all()
    assert torch.allclose(met.limit.correlation, met.finite[-1].correlation, atol=0.03)
    silent = compare_with_limit(experiment(Stage(1, 0.5, 2), sigma=0.0), [], Draws(200))
    assert silent.limit.correlation.tolist() == [1.0, 1.0]  # 0/0


def test_noise_adds_to_the_kernel_of_a_copy_with_itself_alone() -> None:
    """Linear, readout alone trained: ⟨h|h⟩ᵢⱼ = σ̄²(σ̄² + σ_U²/k) for i ≠ j, and σ̄_Δ²(σ̄² + σ_U²) more for i = j.

    After several upscalings copies i and j are those that the first one parts. The noise of the second, on the hidden
    matrix, is drawn for each of the six copies, that of the first for pairs of them.
    """

    def kernels(*stages: Stage, widths: tuple[int, ...] = ()) -> LimitComparison:
        linear = experiment(*stages, activation="linear", trained=[False, False, True])
        return compare_with_limit(replace(linear, inputs=linear.inputs[:1], targets=linear.targets[:1]), widths, draws)

    draws = Draws(500, 2, 8)
    found, other = kernels(Stage(1, 0.1), Stage(1, 0.1, 2, 0.5)).limit, 1 + 0.25 / 2
    assert found.other.mean.tolist() == pytest.approx([1, other, other], abs=1e-12)
    assert found.same.mean.tolist() == pytest.approx([1, other + 0.25 * 1.25, other + 0.25 * 1.25], abs=1e-12)
    stages = [Stage(1, 0.1), Stage(1, 0.1, 3, [0, 0.5, 0]), Stage(1, 0.1, 2, [0, 0.7, 0])]
    twice = kernels(*stages, widths=(64,))
    assert twice.limit.other.mean.tolist() == pytest.approx([1, 1, 1, 1], abs=1e-12)
    assert twice.limit.same.mean.tolist() == pytest.approx([1, 1.25, 1.74, 1.74], abs=1e-12)
    assert torch.allclose(twice.finite[0].correlation, twice.limit.correlation, atol=0.05)
    assert mask_separated_copies(stages).tolist() == [[i // 2 != j // 2 for j in range(6)] for i in range(6)]
    assert mask_separated_copies(stages[:2]).tolist() == [[i != j for j in range(3)] for i in range(3)]
    assert not mask_separated_copies(stages[:1]).any()


def test_densities_are_densities_and_agree(met: LimitComparison) -> None:
    step = met.edges[1] - met.edges[0]
    for found in (met.limit, *met.finite):
        assert float(found.density.sum() * step) == pytest.approx(1, abs=0.01)
    assert float((met.finite[-1].density - met.limit.density).abs().sum() * step) < 0.1


def test_a_comparison_with_fresh_units_counts_units_by_their_share_and_is_written_to_a_file(tmp_path: Path) -> None:
    stages = Stage(1, 0.3), Stage(1, 0.3, 1.5, how="fresh"), Stage(1, 0.3, 2, 0.5)
    found = compare_with_limit(experiment(*stages), [20], Draws(300, 2, 2))
    assert (found.times, found.wider, found.upscaled) == (2, 3.0, (1, 2))
    for measured in (found.limit, *found.finite):
        assert float(measured.density.sum() * (found.edges[1] - found.edges[0])) == pytest.approx(1, abs=0.01)
    values = json.loads(save_results(tmp_path / "new" / "results.json", found.to_json()).read_text())
    assert (values["wider"], values["upscaled"], values["errors"]) == (3.0, [1, 2], found.errors)
    assert values["finite"][0]["losses"] == found.finite[0].losses.values.tolist()
    (tmp_path / "file").write_text("")
    with pytest.raises(MupscaleError, match=r"results\.json cannot be written: .*; choose another folder"):
        save_results(tmp_path / "file" / "results.json", {})


def test_ticks_count_every_network_and_seed() -> None:
    ticks: list[int] = []
    draws = Draws(500, 2, 3, tick=lambda: ticks.append(1))
    compare_with_limit(experiment(), [8, 16], draws)
    assert len(ticks) == 2 + 2 * 3
    compare_ways_to_grow(experiment(Stage(1, 0.5)), [Stage(1, 0.5, 2, 0.1)], draws, width=8)
    assert len(ticks) == 8 + 2 + 3


@pytest.mark.parametrize("widths", [[0], [8, 8], [-1, 8]])
def test_widths_must_be_different_and_positive(widths: list[int]) -> None:
    refuses("widths must be distinct numbers of units", compare_with_limit, experiment(), widths, Draws(500))


@pytest.mark.parametrize("number", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_worked_example_is_its_closed_form(number: int) -> None:
    worked = worked_example(number, SETTINGS, 1.0, [16, 256], Draws(200, 2, 12))
    assert worked.difference < 1e-12
    assert len(worked.closed) == 7
    assert worked.closed[:4] == pytest.approx(worked.never[:4], abs=1e-15)
    assert abs(worked.closed[-1] - worked.never[-1]) > 1e-3
    assert worked.comparison.slope == pytest.approx(-0.5, abs=0.27)  # three standard errors
    assert json.loads(json.dumps(worked.to_json()))["closed_form"] == worked.closed


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


# ------------------------------------------------------------------------------------------------ ways to grow


@pytest.fixture(scope="module")
def swept() -> list[WayToGrow]:
    torch.set_num_threads(1)
    before = experiment(Stage(2, 0.5), activation="linear")
    return sweep_limit(before, (0.5, 0.1, 1e6), (1.0,), times=2, after=3, draws=Draws(400))


def test_a_sweep_tries_every_cell_and_marks_those_that_diverge(swept: list[WayToGrow], easel: Easel) -> None:
    cells = [(way.stage.lr, way.stage.noise) for way in swept]
    assert cells == [(lr, noise) for noise in (0.0, 1.0) for lr in (0.1, 0.5, 1e6)]
    assert [way.loss is None for way in swept] == [False, False, True] * 2
    finished = [way for way in swept if way.limit is not None]
    assert all(way.limit.values.shape == (2, 4) and way.loss == way.limit.mean[-1] for way in finished if way.limit)
    best = best_way(swept)
    assert best.loss == min(way.loss for way in finished if way.loss is not None)
    limit_pictures.draw_sweep(swept, easel, 0.5, "limit-times-2", "n → 2n")
    (star,) = [line for line in easel.axes[0].lines if line.get_label() == "optimum"]
    assert star.get_xdata()[0] == [0.1, 0.5, 1e6].index(best.stage.lr)
    assert round(star.get_ydata()[0]) == [0.0, 1.0].index(best.stage.noise)
    assert len([line for line in easel.axes[0].lines if line.get_marker() == "x" and len(line.get_xdata())]) == 2


def test_a_loss_far_above_the_start_counts_as_diverged() -> None:
    before = experiment(Stage(1, 0.5))
    (cell,) = sweep_limit(before, (300.0,), after=1, draws=Draws(500))
    assert cell.loss is None
    assert torch.isfinite(before.then(cell.stage)(Limit(500, 2)).losses).all()
    assert best_way([cell]) is None


def test_ways_to_grow_are_the_runs_that_they_say() -> None:
    """Also where zero noise was run with one copy of each unit."""
    base = experiment(Stage(2, 0.3), activation="linear")
    stages = list_ways(2, 2, 0.3, [0.5], [0.0, 0.5], [0.0, 1.0])
    lost = Stage(1, 1e9, 2, how="fresh")
    *ways, gone = compare_ways_to_grow(base, [*stages, lost], Draws(300, 2, 2), width=40)
    names = ["copies, no noise", "copies, noise 0.5", "fresh units, a = 0", "fresh units, a = 1"]
    assert [way.name for way in ways] == names
    assert gone.limit is gone.networks is None
    for way in ways:
        whole = base.then(way.stage)
        assert way.limit.mean.shape == way.networks.mean.shape == (3,)
        again = whole(Limit(300, whole.times, 0)).losses[2:].cpu()
        torch.testing.assert_close(way.limit.values[0], again, rtol=0, atol=1e-12)
    silent, grown = ways[0].limit, ways[2].limit
    torch.testing.assert_close(silent.mean[0], grown.mean[0], rtol=0, atol=1e-12)  # a = 0 keeps the function
    for how in ("copies", "fresh"):
        best = best_way(ways, how)
        assert best.loss == min(way.loss for way in ways if way.loss is not None and way.stage.how == how)
    assert json.loads(json.dumps(ways[1].to_json()))["stage"]["noise"] == 0.5
    refuses("more than 1 time the width", list_ways, 1, 2, 0.1, [1], [], [1])


def test_a_sweep_says_once_where_latents_are_many() -> None:
    before = experiment(Stage(1, 0.5))
    assert {way.note for way in sweep_limit(before, (0.5,), (1.0,), after=2, draws=Draws(1500))} == {""}
    with pytest.warns(FewSamples, match="latents are many for 300 samples") as warned:
        noisiest = sweep_limit(before, (0.5,), (1.0, 2.0), after=2, draws=Draws(300))[-1]
    assert [str(each.message) for each in warned] == [noisiest.note]
    with pytest.warns(FewSamples, match="latents are many for 300 samples"):
        compare_with_limit(experiment(), [], Draws(300))
