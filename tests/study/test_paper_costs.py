"""Costs and gains from runs' own metrics: the figures of the paper's 'Evaluation criteria', and known small curves."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mupscale.study import ContenderRuns, Curve
from mupscale.study.results import StageSpent
from mupscale.study.space import Sweep, Tried
from mupscale.study.verdict import compute_costs, compute_gain, cost_to_reach, mean_curve
from paper_runs import with_curves

STEPS = list(range(25, 1001, 25))
TERA = 1e12


def runs(
    name: str,
    *losses: Callable[[float], float],
    steps: Sequence[int] = STEPS,
    flops: float | None = 1.0,
    diverged: int = 0,
) -> ContenderRuns:
    """Several seeds, each with the loss that a function of the step gives; the first ones diverged."""
    curves = [
        Curve(seed, "diverged" if seed < diverged else "finished", list(steps), [loss(step) for step in steps])
        for seed, loss in enumerate(losses)
    ]
    return with_curves(name, curves, flops)


def flat(value: float) -> Callable[[float], float]:
    """One loss at every step."""
    return lambda step: value


def line(start: float, end: float, steps: int = 1000) -> Callable[[float], float]:
    """A straight line from before the first step to the last."""
    return lambda step: start + (end - start) * step / steps


def papers_run(base: float, reached: float, scratch: float, tuning: float = 0.0) -> dict[str, float | None]:
    """A run of these TFLOPs, whose upscaled curve is at the lowest loss from scratch where the paper's is."""
    share = reached / scratch
    curves = [
        runs("base", flat(1.0), flops=base * TERA / 1000),
        runs("from-scratch", line(2.0, 1.0), flops=scratch * TERA / 1000),
        runs("copies", lambda step: 1.0 - (step / 1000 - share), flops=scratch * TERA / 1000),
    ]
    return compute_costs(curves, [StageSpent("sweep-2-width-100", tuning * TERA, 1.0)], [])


@pytest.mark.parametrize(
    ("base", "reached", "scratch", "speedup"),
    [
        (740, 598, 11_326, 8.5),
        (740, 3_031, 11_326, 3.0),
        (66_547, 132_985, 265_970, 1.3),
        (10_615_488, 6_539_099, 37_929_809, 2.2),
    ],
)
def test_speedups_of_the_paper_with_the_base_model_charged(
    base: float, reached: float, scratch: float, speedup: float
) -> None:
    found = papers_run(base, reached, scratch)
    assert found["upscaled_to_scratch_loss"] == pytest.approx(reached * TERA)
    assert found["scratch_total"] == pytest.approx(scratch * TERA)
    assert found["base"] == pytest.approx(base * TERA)
    assert found["speedup_base_charged"] == pytest.approx(speedup, abs=0.05)
    assert found["speedup_sunk"] == pytest.approx(scratch / reached)


def test_gpt2_of_the_paper_with_tuning_charged_is_1_4() -> None:
    found = papers_run(10_615_488, 6_539_099, 37_929_809, tuning=19_679_775)
    assert found["speedup_tuning_charged"] == pytest.approx(37_929_809 / 26_218_874)
    assert found["speedup_tuning_charged"] == pytest.approx(1.4, abs=0.05)
    assert found["speedup_all_charged"] == pytest.approx(37_929_809 / (26_218_874 + 10_615_488))


def test_scratch_is_looked_at_for_as_many_steps_as_the_upscaled_model() -> None:
    longer = list(range(50, 2001, 50))
    found = compute_costs(
        [runs("from-scratch", line(2, 1), steps=longer, flops=3.0), runs("copies", flat(1.2))], [], []
    )
    assert found["scratch_min_loss"] == pytest.approx(1.0)
    assert found["scratch_total"] == 3000
    assert found["upscaled_to_scratch_loss"] is None
    assert found["speedup_sunk"] is None


def test_the_lowest_loss_is_not_the_last_and_is_of_the_mean_over_seeds() -> None:
    dip = runs("from-scratch", lambda step: 1.0 + abs(step - 500) / 1000, flat(2.0))
    assert compute_costs([dip, runs("copies", flat(1.0))], [], [])["scratch_min_loss"] == pytest.approx(1.5)


def test_tuning_is_sweeps_and_small_models() -> None:
    stages = [StageSpent(name, 10.0**i, 1.0) for i, name in enumerate(["sweep-1", "small-base", "sweep-2", "base"])]
    assert compute_costs([], stages, [])["tuning"] == 111
    assert compute_costs([], [*stages, StageSpent("sweep-3", None, 1.0)], [])["tuning"] is None


def test_tuning_speedup_is_that_of_a_step_whatever_the_seeds() -> None:
    trials = [Tried(0.1, 1.0, [1.0, 1.0], steps=100, cost=2 * 100 * 5.0), Tried(0.1, 0.0, [None, None])]
    small = Sweep("sweep-2-width-64", trials, 128, 64)
    first = Sweep("sweep-1-width-64", [Tried(0.1, 0.0, [1.0], steps=1, cost=99.0)], 64)
    found = compute_costs([runs("copies", flat(1.0), flops=118.0)], [], [first, small])
    assert found["tuning_speedup"] == pytest.approx(23.6)


def test_what_was_not_trained_or_cannot_be_counted_is_none() -> None:
    unknown = compute_costs(
        [runs("from-scratch", flat(1.0), flops=None), runs("copies", flat(0.5), flops=None)], [], []
    )
    assert {name for name, value in unknown.items() if value is not None} == {"tuning", "scratch_min_loss"}
    assert {value for name, value in compute_costs([], [], []).items() if name != "tuning"} == {None}


def test_diverged_seeds_are_left_out_of_the_mean_curve() -> None:
    two = runs("copies", flat(math.nan), flat(1.0), diverged=1)
    assert {loss for _, loss in mean_curve(two)} == {1.0}
    assert mean_curve(runs("copies", flat(1.0), diverged=1)) == []


def test_a_curve_is_crossed_between_its_points_and_never_before_the_first() -> None:
    curve = [(10, 3.0), (20, 1.0), (30, 2.0), (40, 0.5)]
    assert cost_to_reach(curve, 2.0, by="steps") == 15
    assert cost_to_reach(curve, 1.0, by="steps") == 20
    assert cost_to_reach(curve, 0.75, by="steps") == pytest.approx(30 + 10 * 1.25 / 1.5)
    assert cost_to_reach(curve, 5.0, by="steps") == 10
    assert cost_to_reach(curve, 0.4, by="steps") is None
    assert cost_to_reach([], 1.0, by="steps") is None


@given(st.lists(st.floats(0.1, 10.0), min_size=4, max_size=4))
def test_the_parts_of_the_gain_add_up(losses: list[float]) -> None:
    names = ("from-scratch", "from-scratch-changed", "copies-without-noise", "copies")
    found = compute_gain([runs(name, flat(loss), steps=[1000]) for name, loss in zip(names, losses, strict=True)])
    parts = [found[name] for name in ("learning_rate", "head_start", "noise")]
    assert math.fsum(part for part in parts if part is not None) == pytest.approx(losses[0] - losses[3], abs=1e-12)


def test_the_parts_of_the_gain_have_their_names() -> None:
    finals = {
        "from-scratch": 1.0,
        "from-scratch-changed": 0.9,
        "copies-without-noise": 0.7,
        "copies": 0.4,
        "continued": 0.6,
    }
    found = compute_gain([runs(name, flat(loss - 0.01), flat(loss + 0.01)) for name, loss in finals.items()])
    assert found["learning_rate"] == pytest.approx(0.1)
    assert found["head_start"] == pytest.approx(0.2)
    assert found["noise"] == pytest.approx(0.3)
    assert found["continued"] == pytest.approx(0.6)
    assert found["from-scratch-changed"] == pytest.approx(0.9)


def test_without_scratch_drop_the_head_start_is_against_scratch() -> None:
    found = compute_gain(
        [runs("from-scratch", flat(1.0)), runs("copies-without-noise", flat(0.7)), runs("copies", flat(0.4))]
    )
    assert found["learning_rate"] is None
    assert found["from-scratch-changed"] is None
    assert found["head_start"] == pytest.approx(0.3)


def test_missing_and_diverged_baselines_give_no_parts() -> None:
    found = compute_gain([runs("from-scratch", flat(1.0), diverged=1), runs("copies", flat(0.4))])
    assert {name for name, value in found.items() if value is not None} == {"copies"}
