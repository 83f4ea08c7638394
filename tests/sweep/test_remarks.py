"""What is said about a finished sweep: edges with the range to try next, zero noise, lost trials."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from mupscale.sweep import Space, Sweep, Tried, joined_edges, sweep_remarks

LRS, NOISES = (0.1, 0.2, 0.4), (0.5, 1.0, 2.0, 4.0)


def sweep(
    loss: Callable[[float, float], float | None],
    *,
    lrs: tuple[float, ...] = LRS,
    noises: tuple[float, ...] = NOISES,
    spread: float = 0.0,
    seeds: int = 1,
) -> Sweep:
    """A grid with these losses; infinite for diverged, None for pruned."""
    space, trials = Space(lrs, noises), []
    for cell in space.cells:
        value = loss(*cell)
        if value is None:
            trials.append(Tried(*cell, [9.0], budget=0.5))
        elif math.isinf(value):
            trials.append(Tried(*cell, [None]))
        else:
            trials.append(Tried(*cell, [value - spread / 2, value + spread / 2] if seeds > 1 else [value]))
    return Sweep("sweep-2-width-64", trials, 128, 64, space)


def bowl(best_lr: float, best_noise: float, height: float = 1.0) -> Callable[[float, float], float]:
    """Lowest, 1, at these; far above it without noise."""

    def loss(lr: float, noise: float) -> float:
        away = math.log2(noise / best_noise) ** 2 if noise and best_noise else 9.0 * (noise != best_noise)
        return 1 + height * (math.log2(lr / best_lr) ** 2 + away)

    return loss


def test_an_optimum_inside_the_grid_has_nothing_to_be_said() -> None:
    assert sweep_remarks(sweep(bowl(0.2, 1.0))) == []


@pytest.mark.parametrize(
    ("lr", "noise", "said"),
    [
        (0.4, 1.0, "the best learning rate, 0.4, is the largest tried: try 0.4, 0.8, 1.6"),
        (0.1, 1.0, "the best learning rate, 0.1, is the smallest tried: try 0.025, 0.05, 0.1"),
        (0.2, 4.0, "the best noise, 4, is the largest tried: try 4, 8, 16"),
    ],
)
def test_each_edge_is_named_with_the_range_to_try_next(lr: float, noise: float, said: str) -> None:
    assert sweep_remarks(sweep(bowl(lr, noise))) == [said]


def test_both_edges_of_a_corner_are_named() -> None:
    assert len(sweep_remarks(sweep(bowl(0.4, 4.0)))) == 2


def test_the_range_goes_on_in_the_ratio_at_that_edge() -> None:
    (said,) = sweep_remarks(sweep(bowl(3.0, 1.0), lrs=(0.1, 1.0, 3.0)))
    assert said.endswith("try 3, 9, 27")


def test_the_smallest_noise_above_zero_is_no_edge_since_zero_is_beyond_it() -> None:
    assert sweep_remarks(sweep(bowl(0.2, 0.5))) == []


def test_the_smallest_noise_is_an_edge_where_none_was_not_tried() -> None:
    tried = [Tried(lr, noise, [bowl(0.2, 0.5)(lr, noise)]) for lr in LRS for noise in (0.5, 1.0, 2.0)]
    best = Sweep("copies", tried, lr=0.2, noise=0.5)
    said = (
        "the best noise is at the edge of the grid (copies: 0.5 is the smallest tried): set study.noises to [0.125, "
        "0.25, 0.5, 1, 2]"
    )
    assert joined_edges([best]) == [said]


def test_edges_of_several_contenders_are_one_sentence_with_one_range() -> None:
    """Their grid is one, so that it is to be widened on both sides."""
    rates = {"continued": 0.1, "fresh": 0.4, "from-scratch": 0.4}
    found = [Sweep(name, sweep(bowl(lr, 0.0)).trials) for name, lr in rates.items()]
    assert joined_edges([*found, Sweep("copies", sweep(bowl(0.2, 1.0)).trials)]) == [
        "the best learning rate is at the edge of the grid (continued: 0.1 is the smallest tried; fresh, from-scratch: "
        "0.4 is the largest tried): set study.lrs to [0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6]"
    ]


def test_grids_of_one_value_have_no_edges() -> None:
    assert sweep_remarks(sweep(bowl(0.2, 0.0), lrs=(0.2,), noises=())) == []


def test_a_single_noise_level_beside_zero_goes_on_by_twos() -> None:
    (said,) = sweep_remarks(sweep(bowl(0.2, 3.0), noises=(3.0,)))
    assert said == "the best noise, 3, is the largest tried: try 3, 6, 12"


def test_values_off_the_grid_belong_to_the_nearest_edge() -> None:
    found = Sweep("s", [Tried(0.37, 1.1, [1.0])], 128, 64, Space(LRS, NOISES), sampler="tpe")
    assert sweep_remarks(found) == [
        "the best learning rate, 0.37, lies next to 0.4, the largest tried: try 0.4, 0.8, 1.6",
    ]


def test_a_sweep_that_selects_zero_noise_says_that_upscaling_does_not_pay() -> None:
    (said,) = sweep_remarks(sweep(bowl(0.2, 0.0)))
    assert "upscaling does not pay here: training on without new capacity is best" in said


def test_a_sweep_of_learning_rates_alone_says_nothing_of_noise() -> None:
    assert sweep_remarks(sweep(bowl(0.2, 0.0), noises=())) == []


@pytest.mark.parametrize(("spread", "told"), [(0.06, True), (0.04, False)])
def test_zero_noise_within_the_spread_between_seeds_is_told(spread: float, told: bool) -> None:
    found = sweep_remarks(sweep(lambda lr, noise: _near_zero(lr, noise, 0.05), spread=spread, seeds=2))
    assert [("within the spread between seeds" in said) for said in found] == [True] * told


@pytest.mark.parametrize(("gap", "told"), [(0.009, True), (0.011, False)])
def test_with_one_seed_a_small_difference_is_called_unknown(gap: float, told: bool) -> None:
    found = sweep_remarks(sweep(lambda lr, noise: _near_zero(lr, noise, gap)))
    assert [("with one seed the spread between seeds is unknown" in said) for said in found] == [True] * told


def _near_zero(lr: float, noise: float, gap: float) -> float:
    return 1 + gap if (lr, noise) == (0.2, 0.0) else bowl(0.2, 1.0)(lr, noise)


@pytest.mark.parametrize(
    ("at", "said"), [(0.1, "the smallest tried: try 0.025, 0.05, 0.1"), (0.4, "the largest tried")]
)
def test_the_edge_of_the_row_without_noise_is_named_too(at: float, said: str) -> None:
    """Baselines are trained with its learning rate."""
    (found,) = sweep_remarks(sweep(lambda lr, noise: 5 + abs(lr - at) if noise == 0 else bowl(0.2, 1.0)(lr, noise)))
    assert found.startswith(f"without noise, the best learning rate, {at}, is {said}")
    assert (
        sweep_remarks(sweep(lambda lr, noise: 5 + 0.1 * abs(lr - at) if noise == 0 else bowl(0.2, 1.0)(lr, noise)))
        == []
    )


def test_lost_trials_are_counted() -> None:
    def loss(lr: float, noise: float) -> float | None:
        if lr == 0.4:
            return math.inf
        return None if noise == 4.0 else bowl(0.2, 1.0)(lr, noise)

    assert sweep_remarks(sweep(loss))[1:] == ["5 of 15 trials diverged", "2 of 15 trials stopped early by pruning"]


@pytest.mark.parametrize("beyond", [(0.4, 1.0), (0.2, 2.0)])
def test_an_optimum_beside_divergence_is_told_with_the_best_that_is_not(beyond: tuple[float, float]) -> None:
    found = sweep(lambda lr, noise: math.inf if (lr, noise) == beyond else bowl(0.2, 1.0)(lr, noise))
    assert sweep_remarks(found) == [
        f"the best trial is close to one that diverged (learning rate {beyond[0]:g} and noise {beyond[1]:g}): with "
        f"other seeds or widths it may, too; the best that is not, learning rate 0.2 and noise 0.5, has 2",
        "1 of 15 trials diverged",
    ]


@pytest.mark.parametrize("away", [(0.4, 2.0), (0.1, 1.0), (0.2, 0.5), (0.4, 0.0)])
def test_divergence_elsewhere_is_only_counted(away: tuple[float, float]) -> None:
    found = sweep(lambda lr, noise: math.inf if (lr, noise) == away else bowl(0.2, 1.0)(lr, noise))
    assert sweep_remarks(found) == ["1 of 15 trials diverged"]


def test_where_all_that_finished_lie_beside_divergence_there_is_no_other_to_name() -> None:
    found = sweep(lambda lr, noise: 1.0 if lr == 0.1 else math.inf, lrs=(0.1, 0.2), noises=())
    assert sweep_remarks(found)[0] == (
        "the best trial is close to one that diverged (learning rate 0.2): with other seeds or widths it may, too"
    )


def test_without_noise_divergence_with_noise_does_not_matter() -> None:
    found = sweep_remarks(sweep(lambda lr, noise: math.inf if (lr, noise) == (0.2, 0.5) else bowl(0.2, 0.0)(lr, noise)))
    assert not any("close to one" in said for said in found)


@pytest.mark.parametrize(("lr", "told"), [(0.21, True), (0.18, False)])
def test_samplers_may_find_divergence_nearer_than_a_grid_step(lr: float, told: bool) -> None:
    trials = [Tried(0.19, 1.0, [1.0]), Tried(lr, 1.0, [None])]
    found = sweep_remarks(Sweep("s", trials, 128, 64, Space(LRS, NOISES), sampler="tpe"))
    assert any("close to one that diverged" in said for said in found) == told


def test_if_everything_diverged_that_is_all_there_is_to_say() -> None:
    assert sweep_remarks(sweep(lambda lr, noise: math.inf)) == ["15 of 15 trials diverged"]
