"""Synthetic sweeps whose optimum moves by a known power of the width are continued; and the better size at a budget."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mupscale.study import ContenderRuns, load_summary
from mupscale.study.forecast import extrapolate, forecast_size, write_size
from mupscale.study.results import BudgetPoint, SystemRuns
from mupscale.study.space import Cell, Space, Sweep, Tried

SPACE = Space(tuple(0.01 * 2**i for i in range(8)), tuple(0.125 * 2**i for i in range(8)))


def bowl(lr: float, noise: float, *, space: Space = SPACE, lost: dict[Cell, str] | None = None) -> Sweep:
    """Losses with their lowest at these; the bowl is steeper on one side, as real ones are. Noise 0 is bad or best."""
    trials = []
    for cell in space.cells:
        x = math.log2(cell.lr / lr)
        y = cell.noise if noise == 0 else math.log2(cell.noise / noise) if cell.noise else 9.0
        loss = 0.5 + 0.02 * (x * x + 0.05 * x**3) + 0.03 * (y * y + 0.02 * y**3)
        status = (lost or {}).get(cell, "finished")
        trials.append(Tried(*cell, [loss if status == "finished" else None]))
    return Sweep("sweep-2", trials, 128, 64, space)


def tuned(widths: list[float], lr_power: float, noise_power: float) -> list[tuple[float, Sweep]]:
    """Sweeps at these widths, with optima that are a power of the width: 0.11 and 1.3 at width 64."""
    return [(n, bowl(0.11 * (n / 64) ** lr_power, 1.3 * (n / 64) ** noise_power)) for n in widths]


@pytest.mark.parametrize("widths", [[64, 128], [64, 96], [32, 64, 128]])
@pytest.mark.parametrize(("lr_power", "noise_power"), [(-0.5, 0.3), (0.4, -0.5), (0.0, 0.0)])
def test_a_known_drift_is_recovered(widths: list[float], lr_power: float, noise_power: float) -> None:
    drift, _ = extrapolate(tuned(widths, lr_power, noise_power), 256)
    assert drift.lr == pytest.approx(0.11 * 4**lr_power, rel=0.08)
    assert drift.noise == pytest.approx(1.3 * 4**noise_power, rel=0.08)


def test_what_moved_is_said_beside_plain_transfer_whatever_the_order() -> None:
    """Plain transfer takes the grid optimum of the largest small width."""
    sweeps = tuned([64, 128], -0.5, 0.5)
    best = sweeps[1][1].best
    for order in (sweeps, sweeps[::-1]):
        drift, said = extrapolate(order, 512)
        assert said[0].startswith("from width 64 to 128 the best noise goes from 1.29 to 1.83 (×1.41 for each")
        assert "the best learning rate goes from 0.109 to 0.0765" in said[1]
        assert f"plain transfer has {best.lr:.3g}" in said[1]
    assert drift.lr < best.lr
    assert drift.noise > best.noise


def test_the_optimum_lies_between_grid_values() -> None:
    exact = Space((0.05, 0.1, 0.3), (1.0,))  # neighbours at unequal distances
    low = math.log(0.13)
    trials = [Tried(lr, 1.0, [1 + (math.log(lr) - low) ** 2]) for lr in exact.lrs]
    found = [(n, Sweep("s", trials, 2, 1, exact)) for n in (64.0, 128.0)]
    assert extrapolate(found, 512)[0].lr == pytest.approx(0.13, rel=1e-9)


BEST = bowl(0.11, 1.3).best.cell
PLAIN = {
    "one width": [bowl(0.11, 1.3)],
    **{
        f"beside trials that {status}": 2 * [bowl(0.11, 1.3, lost={BEST._replace(**at): status for at in beside})]
        for beside in [({"lr": 2 * BEST.lr}, {"noise": 2 * BEST.noise})]
        for status in ("diverged", "pruned")
    },
    "at an edge, and beside zero": 2 * [bowl(5.0, 0.11)],
    "zero noise at one width alone": [bowl(0.11, 0), bowl(0.05, 1.3)],
}


@pytest.mark.parametrize("case", PLAIN)
def test_where_the_grids_own_value_is_taken(case: str) -> None:
    sweeps = PLAIN[case]
    drift, said = extrapolate(list(zip((64, 128), sweeps, strict=False)), 256)
    assert drift == sweeps[-1].best.cell
    if case == "one width":  # transfer as in the paper
        assert said == []
    if case == "at an edge, and beside zero":
        assert drift == (SPACE.lrs[-1], SPACE.noises[1])
    if case == "zero noise at one width alone":
        assert said[0] == "at width 64 the best noise is 0, so it is not extrapolated: noise 1 is transferred"
        assert said[1].startswith("noise lowers the best loss by 0.0% at width 64 and 8")
        assert len(said) == 2


@pytest.mark.parametrize(("power", "factor"), [(1.5, 4.0), (-1.5, 0.25)])
def test_extrapolation_goes_no_further_than_a_factor_of_four(power: float, factor: float) -> None:
    drift, sentences = extrapolate(tuned([64, 128], power / 2, power / 2), 64 * 2**9)
    assert drift.noise == pytest.approx(1.3 * 2 ** (power / 2) * factor, rel=0.05)
    assert any("limited to a factor of 4" in said for said in sentences)


def test_extrapolation_stays_below_what_diverged() -> None:
    sweeps = tuned([64, 128], 0.5, 0.0)
    best = sweeps[1][1].best
    above = {cell: "diverged" for cell in SPACE.cells if cell.lr > 2.5 * best.lr}
    drift, sentences = extrapolate([sweeps[0], (128, bowl(0.11 * 2**0.5, 1.3, lost=above))], 64 * 2**9)
    assert drift.lr == max(lr for lr in SPACE.lrs if lr < 2.5 * best.lr)
    assert any("diverged" in said for said in sentences)


def test_zero_noise_at_every_width_leaves_the_learning_rate_to_extrapolate() -> None:
    drift, sentences = extrapolate([(64, bowl(0.11, 0)), (128, bowl(0.08, 0))], 256)
    assert drift.noise == 0
    assert drift.lr == pytest.approx(0.11 * (0.08 / 0.11) ** 2, rel=0.08)
    assert "the best noise is 0" in sentences[0]


def gaining(*parts: float) -> list[tuple[float, Sweep]]:
    """Sweeps at widths 32, 64 … in which noise lowers the best loss by these parts."""
    tried = [[Tried(0.1, 0, [2.0]), Tried(0.1, 1, [2 * (1 - part)])] for part in parts]
    return [(32 * 2**i, Sweep("s", some, 4, 2, SPACE)) for i, some in enumerate(tried)]


@pytest.mark.parametrize(
    ("parts", "end"),
    [
        (
            (0.5, 0.4),
            "noise lowers the best loss by 50.0% at width 32 and 40.0% at width 64; along the logarithm of the "
            "width that would make 10% at width 512",
        ),
        ((0.5, 0.3, 0.1), "that would make nothing at width 512, so widening may not pay there"),
        ((0.5, 0.9), "50.0% at width 32 and 90.0% at width 64; that does not fall with the width"),
    ],
)
def test_what_noise_gains_is_followed_to_the_large_width(parts: tuple[float, ...], end: str) -> None:
    """New capacity helps a wide model less: at n₀ it may pay, and at n no more."""
    assert extrapolate(gaining(*parts), 512)[1][-1].endswith(end)


def test_without_two_trials_without_noise_nothing_is_said_of_its_gain() -> None:
    (small, first), (large, second) = gaining(0.5, 0.4)
    lost = replace(second, trials=[replace(second.trials[0], losses=[None]), second.trials[1]])
    assert not any("lowers" in said for said in extrapolate([(small, first), (large, lost)], 512)[1])


# ------------------------------------------------------------------------------------------ the better size at a budget

STORED = sorted((Path(__file__).parents[2] / "results").glob("comparison-*"))


def crossing_at(narrow: int, meet: float, slopes: tuple[float, float] = (-0.1, -0.5)) -> SystemRuns:
    """Two sizes whose losses are powers of the cost, and equal at one cost."""
    runs = []
    for name, slope in zip(("continued", "from-scratch"), slopes, strict=True):
        points = [BudgetPoint(c, 1, c, [(c / meet) ** slope, (c / meet) ** slope]) for c in (1.0, 2.0, 4.0)]
        runs.append(ContenderRuns(name, narrow, 0.1, 0.0, points))
    return SystemRuns(narrow, 2 * narrow, 0.0, "FLOPs", runs)


def square(width: Any) -> float:
    """What a step costs."""
    return float(width**2)


def test_sizes_by_name_are_not_called_widths() -> None:
    told = {"narrow": {"dim": 8}, "wide": {"dim": 16}, "budget": 2e9, "best": {"dim": 8}, "overtakes": {}}
    assert write_size(told).startswith("At 2 GFLOPs in all, dim 8 is a better size than dim 16. The small runs show no")


@pytest.mark.parametrize(("budget", "best"), [(10.0, 8), (100.0, None), (200.0, 16)])
def test_the_range_goes_over_both_rules(budget: float, best: int | None) -> None:
    told = forecast_size([crossing_at(2, 1.0), crossing_at(4, 8.0)], 8, 16, budget, square)
    assert told["overtakes"]["low"] == pytest.approx(8.0 * 8)  # along the line: 8 times as much for every doubling
    assert told["overtakes"]["high"] == pytest.approx(8.0 * 16)  # as the square of what a step costs
    assert told["best"] == best
    words = {8: "width 8 is a better size than 16", 16: "width 16 is a better size than 8", None: "too close to call"}
    assert words[best] in told["sentence"]


def test_one_seed_has_no_range_and_no_definite_answer() -> None:
    one_seed = [crossing_at(2, 1.0), crossing_at(4, 8.0)]
    for runs in one_seed:
        for contender in runs.contenders:
            for point in contender.points:
                del point.losses[1:]
    told = forecast_size(one_seed, 8, 16, 200.0, square)
    assert told["overtakes"]["low"] == told["overtakes"]["value"] == told["overtakes"]["high"]
    assert (
        "width 16 may be a better size than 8. Width 16 is better from about 90.5 FLOPs on. That is from one seed, "
        in (told["sentence"].replace("\N{NO-BREAK SPACE}", " "))
    )


def test_lines_that_do_not_meet() -> None:
    told = forecast_size([crossing_at(2, 1.0, (-0.5, -0.1))], 8, 16, 100.0, square)
    assert told["best"] == 8
    assert "The small runs show no budget at which width 16 is better" in told["sentence"]


@pytest.mark.parametrize("folder", STORED, ids=lambda path: path.name)
def test_stored_comparisons_came_out_as_it_says_or_it_does_not_say(folder: Path) -> None:
    summary = load_summary(folder)
    large = summary.large
    cost = {}
    for runs in (*summary.small, large):
        for name, width in (("continued", runs.narrow), ("from-scratch", runs.wide)):
            one = runs.get(name)
            cost[str(width)] = one.points[-1].cost / one.points[-1].steps
    budget = large.curve("continued")[-1][0]
    told = forecast_size(summary.small, large.narrow, large.wide, budget, lambda width: cost[str(width)])
    ends = {large.curve("continued")[-1][1]: large.narrow, large.curve("from-scratch")[-1][1]: large.wide}
    assert told["best"] in (None, ends[min(ends)])
