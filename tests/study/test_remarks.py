"""What is said about a finished sweep: edges with the range to try next, zero noise, lost trials."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from mupscale.study.space import Space, Sweep, Tried, joined_edges, sweep_remarks

LRS, NOISES = (0.1, 0.2, 0.4), (0.5, 1.0, 2.0, 4.0)
Loss = Callable[[float, float], float | None]


def sweep(loss: Loss, *, lrs: tuple[float, ...] = LRS, noises: tuple[float, ...] = NOISES, spread: float = 0) -> Sweep:
    """A grid with these losses; infinite for diverged, None for pruned. spread: between two seeds; 0: of one."""
    space, trials = Space(lrs, noises), []
    for cell in space.cells:
        value = loss(*cell)
        if value is None:
            trials.append(Tried(*cell, [9.0], budget=0.5))
        elif math.isinf(value):
            trials.append(Tried(*cell, [None]))
        else:
            trials.append(Tried(*cell, [value - spread / 2, value + spread / 2] if spread else [value]))
    return Sweep("sweep-2-width-64", trials, 128, 64, space)


def bowl(best_lr: float, best_noise: float, lost: tuple[float, float] | None = None) -> Loss:
    """Lowest, 1, at these; far above it without noise. lost: a cell that diverged."""

    def loss(lr: float, noise: float) -> float:
        away = math.log2(noise / best_noise) ** 2 if noise and best_noise else 9.0 * (noise != best_noise)
        return math.inf if (lr, noise) == lost else 1 + math.log2(lr / best_lr) ** 2 + away

    return loss


def near_zero(gap: float) -> Loss:
    """The best without noise is so far behind."""
    return lambda lr, noise: 1 + gap if (lr, noise) == (0.2, 0.0) else bowl(0.2, 1.0)(lr, noise)


def baselines(at: float, bend: float) -> Loss:
    """Without noise the best rate is another one."""
    return lambda lr, noise: 5 + bend * abs(lr - at) if noise == 0 else bowl(0.2, 1.0)(lr, noise)


OTHERS = "with other seeds or widths it may, too"
BESIDE = f"{OTHERS}; the best that is not, learning rate 0.2 and noise 0.5, has 2"


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (sweep(bowl(0.2, 1.0)), []),
        # edges, with the range to try next in the ratio at that edge; below the smallest noise there is zero
        (sweep(bowl(0.4, 1.0)), ["the best learning rate, 0.4, is the largest tried: try 0.4, 0.8, 1.6"]),
        (sweep(bowl(0.1, 1.0)), ["the best learning rate, 0.1, is the smallest tried: try 0.025, 0.05, 0.1"]),
        (sweep(bowl(0.2, 4.0)), ["the best noise, 4, is the largest tried: try 4, 8, 16"]),
        (sweep(bowl(0.4, 4.0)), ["the best learning rate, 0.4, is the largest…", "the best noise, 4, is the largest…"]),
        (sweep(bowl(3.0, 1.0), lrs=(0.1, 1.0, 3.0)), ["the best learning rate, 3, is the largest tried: try 3, 9, 27"]),
        (sweep(bowl(0.2, 3.0), noises=(3.0,)), ["the best noise, 3, is the largest tried: try 3, 6, 12"]),
        (sweep(bowl(0.2, 0.5)), []),
        (sweep(bowl(0.2, 0.0), lrs=(0.2,), noises=()), []),
        (
            Sweep("s", [Tried(0.37, 1.1, [1.0])], 128, 64, Space(LRS, NOISES), sampler="tpe"),
            ["the best learning rate, 0.37, lies next to 0.4, the largest tried: try 0.4, 0.8, 1.6"],
        ),
        # the row without noise, whose rate baselines have, where losses are not flat there
        (
            sweep(baselines(0.1, 1.0)),
            ["without noise, the best learning rate, 0.1, is the smallest tried: try 0.025,…"],
        ),
        (sweep(baselines(0.4, 1.0)), ["without noise, the best learning rate, 0.4, is the largest tried…"]),
        (sweep(baselines(0.4, 0.1)), []),
        # zero noise, within the spread between seeds or within what one seed cannot tell
        (sweep(bowl(0.2, 0.0)), ["the sweep selects zero noise: upscaling does not pay here: training on without…"]),
        (sweep(bowl(0.2, 0.0), noises=()), []),
        (
            sweep(near_zero(0.05), spread=0.06),
            ["the best trial without noise reaches 1.05, the best with noise 1, which is within…"],
        ),
        (sweep(near_zero(0.05), spread=0.04), []),
        (
            sweep(near_zero(0.009)),
            ["the best trial without noise reaches 1.009, the best with noise 1, 0.9% apart; with…"],
        ),
        (sweep(near_zero(0.011)), []),
        # divergence: beside the best, elsewhere, everywhere
        *(
            (
                sweep(bowl(0.2, 1.0, beyond)),
                [
                    f"the best trial is close to one that diverged (learning rate {beyond[0]:g} and noise "
                    f"{beyond[1]:g}): {BESIDE}",
                    "1 of 15 trials diverged",
                ],
            )
            for beyond in ((0.4, 1.0), (0.2, 2.0))
        ),
        *(
            (sweep(bowl(0.2, 1.0, away)), ["1 of 15 trials diverged"])
            for away in ((0.4, 2.0), (0.1, 1.0), (0.2, 0.5), (0.4, 0.0))
        ),
        (sweep(bowl(0.2, 0.0, (0.2, 0.5))), ["the sweep selects zero noise…", "1 of 15 trials diverged"]),
        (
            sweep(lambda lr, noise: 1.0 if lr == 0.1 else math.inf, lrs=(0.1, 0.2), noises=()),
            [
                f"the best trial is close to one that diverged (learning rate 0.2): {OTHERS}",
                "the best learning rate, 0.1, is the smallest tried…",
                "1 of 2 trials diverged",
            ],
        ),
        (sweep(lambda lr, noise: math.inf), ["15 of 15 trials diverged"]),
        (
            sweep(lambda lr, noise: math.inf if lr == 0.4 else None if noise == 4 else bowl(0.2, 1.0)(lr, noise)),
            ["the best trial is close…", "5 of 15 trials diverged", "2 of 15 trials stopped early by pruning"],
        ),
    ],
)
def test_what_is_said_of_a_sweep(made: Sweep, said: list[str]) -> None:
    """Those that matter most first; … stands for the rest of a sentence."""
    found = sweep_remarks(made)
    cut = [
        one[: len(wanted) - 1] + "…" if wanted.endswith("…") else one for one, wanted in zip(found, said, strict=True)
    ]
    assert cut == said


@pytest.mark.parametrize(("lr", "told"), [(0.21, True), (0.18, False)])
def test_samplers_may_find_divergence_nearer_than_a_grid_step(lr: float, told: bool) -> None:
    trials = [Tried(0.19, 1.0, [1.0]), Tried(lr, 1.0, [None])]
    found = sweep_remarks(Sweep("s", trials, 128, 64, Space(LRS, NOISES), sampler="tpe"))
    assert any("close to one that diverged" in said for said in found) == told


def test_edges_of_several_contenders_are_one_sentence_with_one_range() -> None:
    """Their grid is one, so that it is to be widened on both sides; the smallest noise is an edge where none is not."""
    rates: dict[str, Any] = {"continued": 0.1, "fresh": 0.4, "from-scratch": 0.4}
    found = [Sweep(name, sweep(bowl(lr, 0.0)).trials) for name, lr in rates.items()]
    assert joined_edges([*found, Sweep("copies", sweep(bowl(0.2, 1.0)).trials)]) == [
        "the best learning rate is at the edge of the grid (continued: 0.1 is the smallest tried; fresh, from-scratch: "
        "0.4 is the largest tried): set StudySettings.lrs to [0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6]"
    ]
    tried = [Tried(lr, noise, [bowl(0.2, 0.5)(lr, noise)]) for lr in LRS for noise in (0.5, 1.0, 2.0)]
    assert joined_edges([Sweep("copies", tried, lr=0.2, noise=0.5)]) == [
        "the best noise is at the edge of the grid (copies: 0.5 is the smallest tried): set StudySettings.noises to "
        "[0.125, 0.25, 0.5, 1, 2]"
    ]
