"""The paper's comparison: the answer in words, warnings, costs and gains, for runs whose answer is known."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mupscale.study import ContenderRuns, Curve
from mupscale.study.results import StageSpent
from mupscale.study.space import Space, Sweep, Tried
from mupscale.study.verdict import compute_costs, compute_gain, cost_to_reach, mean_curve, write_verdict, write_warnings
from summaries import with_curves

STEPS = list(range(10, 101, 10))


def runs(name: str, *finals: float | None, start: float = 2.0, counted: bool = True) -> ContenderRuns:
    """A seed for each final loss (None: diverged), straight down to it; a wide step costs 4, a narrow one 1."""
    narrow = name in ("base", "continued", "continued-own", "continued-late")
    curves = []
    for seed, final in enumerate(finals):
        losses = [start + ((final or 0) - start) * min(1.0, step / 90) for step in STEPS]
        curves.append(Curve(seed, "diverged" if final is None else "finished", STEPS, losses))
    flops = (1.0 if narrow else 4.0) if counted else None
    return with_curves(ContenderRuns(name, 128, 0.1, 0.0, [], cost_per_step=flops), curves)


def said(*trained: ContenderRuns) -> list[str]:
    return write_verdict(trained, compute_costs(trained, [], []), compute_gain(trained))


BASE = runs("base", 1.0)


def test_widening_pays_against_the_best_baseline() -> None:
    first, *rest = said(
        BASE,
        runs("from-scratch", 0.9, 0.92),
        runs("from-scratch-changed", 0.7, 0.72),
        runs("continued", 0.8, 0.82),
        runs("copies", 0.5, 0.52),
    )
    assert first == (
        "Growing pays here: at equal FLOPs the upscaled model ends at a loss of 0.51 (0.5 to 0.52), and the best "
        "alternative, training from scratch with the same change of the learning rate, at 0.71 (0.7 to 0.72)."
    )
    # scratch-drop costs 400; upscaled is at 0.71 after 90 * 1.29 / 1.49 steps of 4, and the base model before it 100
    assert rest[0].startswith(f"The upscaled model reaches that final loss {400 / (100 + 4 * 90 * 1.29 / 1.49):.2f}×")
    assert not any("one seed" in sentence for sentence in rest)


def test_widening_does_not_pay_where_a_cheaper_way_is_better() -> None:
    first, second, *_ = said(
        BASE, runs("from-scratch", 0.9, 0.92), runs("continued", 0.4, 0.42), runs("copies", 0.5, 0.5)
    )
    assert first.startswith("Growing does not pay here: ")
    assert "simply continuing the base model" in first
    assert second.startswith("That reaches the upscaled model's final loss ")
    assert "× cheaper" in second


def test_the_base_model_may_change_its_rate_halfway_as_the_upscaled_one_may() -> None:
    others = runs("from-scratch-own", 0.7, 0.71), runs("continued-own", 0.6, 0.61), runs("copies", 0.65, 0.66)
    assert said(BASE, *others, runs("copies-own", 0.5, 0.51))[0].startswith("Growing pays here: ")
    first, *_ = said(BASE, *others, runs("copies-own", 0.5, 0.51), runs("continued-late", 0.4, 0.41))
    assert first.startswith("Growing does not pay here: ")
    assert (
        "continuing the base model, changed halfway to the learning rate that is best without noise, at 0.405" in first
    )


def by_seed(*trained: ContenderRuns) -> list[str]:
    return [text for text in said(BASE, *trained) if text.startswith("Seed by seed")]


@pytest.mark.parametrize("name", ["copies", "copies-own"])
def test_seeds_from_the_same_base_models_are_compared_one_by_one_where_their_ranges_overlap(name: str) -> None:
    """What the base models differ by is in both, and hides what widening does."""
    others = runs("copies", 0.99, 0.99, 0.99), runs("from-scratch", 0.9, 0.9, 0.9)
    ours, continued = runs(name, 0.59, 0.54, 0.47), runs("continued", 0.6, 0.55, 0.5)
    first, second, *_ = said(BASE, *others[name == "copies" :], continued, ours)
    assert first.startswith("Growing makes no difference beyond the spread between seeds: ")
    sentence = "Seed by seed, both from the same base model, the upscaled one differs by "
    assert second == f"{sentence}−0.03 to −0.01 (lower with 3 of 3 seeds)."
    (mixed,) = by_seed(runs("continued", 0.6, 0.53, 0.47), runs("copies", 0.59, 0.54, 0.47))
    assert mixed.endswith(" −0.01 to 0.01 (lower with 1 of 3 seeds).")  # one of them even


def test_seed_by_seed_held_out_losses_are_compared_too() -> None:
    def held(made: ContenderRuns, *last: float) -> ContenderRuns:
        ends = zip(made.curves, last, strict=True)
        return replace(made, curves=[replace(c, held_out_steps=[50, 100], held_out_losses=[9, x]) for c, x in ends])

    (text,) = by_seed(held(runs("continued", 0.6, 0.5), 0.7, 0.7), held(runs("copies", 0.59, 0.52), 0.6, 0.65))
    assert text.endswith(
        " −0.01 to 0.02 (lower with 1 of 2 seeds), and held out by −0.1 to −0.05 (lower with 2 of 2 seeds)."
    )


def test_seed_by_seed_only_where_there_is_something_to_say() -> None:
    upscaled = runs("copies", 0.59, 0.54, 0.49)
    assert not by_seed(runs("continued", 0.7, 0.8, 0.9), upscaled)  # the ranges say it
    assert not by_seed(runs("from-scratch", 0.6, 0.55, 0.5), upscaled)  # no base model in common
    assert not by_seed(runs("continued", 0.5, 0.6), runs("copies", None, 0.55))  # one seed
    assert not by_seed(runs("continued", 0.5, 0.6), runs("copies", 0.5, None))
    assert by_seed(runs("continued", 0.6, 0.7), runs("copies", 0.5, 0.6))  # ranges that touch are not apart
    assert by_seed(runs("continued", 0.5, 0.6), runs("copies", 0.6, 0.7))


def test_seeds_are_paired_by_number_where_one_diverged() -> None:
    (text,) = by_seed(runs("continued", None, 0.55, 0.5), runs("copies", 0.52, 0.54, 0.49))
    assert text.endswith(" −0.01 to −0.01 (lower with 2 of 2 seeds).")


def test_the_best_is_of_scratch_and_continued_alone() -> None:
    first, *rest = said(
        runs("from-scratch", 0.9), runs("copies-without-noise", 0.3), runs("net2net", 0.1), runs("copies", 0.5)
    )
    assert first.startswith("Growing pays here: ")
    assert "For comparison: Net2Net ends at 0.1." in rest


def test_the_upscaled_model_is_taken_with_the_better_of_its_learning_rates() -> None:
    others = BASE, runs("from-scratch-own", 0.6, 0.62), runs("copies", 0.7, 0.72)
    first, second, *rest = said(*others, runs("from-scratch", 0.9, 0.92), runs("copies-own", 0.5, 0.52))
    assert first == (
        "Growing pays here: at equal FLOPs the upscaled model, changed halfway to the learning rate that is best "
        "without noise, ends at a loss of 0.51 (0.5 to 0.52), and the best alternative, training from scratch, changed "
        "to the learning rate that is best without noise, at 0.61 (0.6 to 0.62)."
    )
    assert second.startswith("The upscaled model reaches that final loss ")
    assert rest[0] == (
        "Without the change halfway the upscaled model ends at 0.71 (0.7 to 0.72); what follows is about that one."
    )
    assert rest[1].startswith("As the paper counts: ")
    assert said(*others, runs("copies-own", 0.8, 0.82)) == said(*others)
    assert said(*others, runs("copies-own", None, None)) == said(*others)
    assert said(*others, runs("copies-own", 0.5, None)) == said(*others)


def test_where_the_upscaled_model_diverges_but_for_the_change_that_is_said() -> None:
    trained = BASE, runs("from-scratch", 0.9, 0.92), runs("copies", None, None), runs("copies-own", 0.5, 0.52)
    first, *rest = said(*trained)
    assert first.startswith("Growing pays here: at equal FLOPs the upscaled model, changed halfway")
    assert "Without the change halfway, all 2 runs of the upscaled model diverged." in rest
    assert not any("As the paper counts" in sentence for sentence in rest)


@pytest.mark.parametrize(
    ("finals", "parts"),
    [
        (
            (1.0, 0.9, 0.7, 0.5),
            "Of the gain of 0.5 over training from scratch, 0.1 (20%) is the learning rate, 0.2 (40%) is the head "
            "start and 0.2 (40%) is the noise.",
        ),
        (  # signs, and no shares
            (0.5, 0.4, 0.6, 0.7),
            "Of the difference of −0.2 over training from scratch, 0.1 is the learning rate, −0.2 is the head start "
            "and −0.1 is the noise.",
        ),
        (  # parts that outweigh the whole are no shares of it
            (0.6, 0.6, 0.9, 0.5),
            "Of the gain of 0.1 over training from scratch, 0 is the learning rate, −0.3 is the head start and 0.4 is "
            "the noise.",
        ),
    ],
)
def test_the_gain_is_taken_apart(finals: tuple[float, ...], parts: str) -> None:
    names = ("from-scratch", "from-scratch-changed", "copies-without-noise", "copies")
    sentences = said(*map(runs, names, finals))
    assert [sentence for sentence in sentences if sentence.startswith("Of the ")] == [parts]
    hurts = finals[3] > finals[2]
    assert any(sentence.startswith("Noise does not help here") for sentence in sentences) == hurts


def test_speedups_are_told_as_the_paper_counts() -> None:
    trained = [BASE, runs("from-scratch", 1.0), runs("copies", 0.5, start=1.5)]
    # at 1.0 after 45 steps of 4, of which scratch takes 100
    assert any(
        "1, is 2.2× if you already have the base model, 1.4× with its cost included" in sentence
        for sentence in said(*trained)
    )
    never = said(BASE, runs("from-scratch", 0.4), runs("copies", 0.5))
    assert any("in its 100 steps the upscaled model does not reach" in sentence for sentence in never)


SHORT: list[tuple[list[ContenderRuns], str, str]] = [
    ([runs("from-scratch", 0.9), runs("copies", 0.5)], "Growing pays here: ", "one seed"),
    ([runs("from-scratch", 0.9, 0.91), runs("copies", 0.5, None)], "", "one seed"),
    ([BASE, runs("from-scratch", 0.6, 0.5), runs("copies", 0.49, 0.51)], "Growing makes no difference beyond the ", ""),
    *(
        ([runs("from-scratch", 0.9), runs("copies", *[None] * seeds)], f"Growing does not pay here: {who} of the", "")
        for seeds, who in {3: "all 3 runs", 1: "the one run"}.items()
    ),
    ([runs("copies", 0.5)], "", "there is no baseline"),
    ([runs("from-scratch", None), runs("copies", 0.5)], "", "from-scratch diverged"),
    ([runs("from-scratch", 0.5)], "", "no upscaled model"),
    ([runs("from-scratch", 0.9, counted=False), runs("copies", 0.5, counted=False)], "Growing pays here: ", ""),
]


@pytest.mark.parametrize(("trained", "begins", "ends"), SHORT)
def test_where_little_is_known_little_is_said(trained: list[ContenderRuns], begins: str, ends: str) -> None:
    first, *_ = told = said(*trained)
    assert first.startswith(begins)
    assert ends in told[-1]
    if "does not pay" in begins:
        assert told == [first]
    if trained[0].cost_per_step is None:
        assert not any("×" in sentence for sentence in told)


# ---------------------------------------------------------------------------------------------- warnings


def sweep(width: Any, start: Any, name: str = "sweep-2") -> Sweep:
    return Sweep(name, [Tried(0.2, 0.0, [1.0])], width, start, Space((0.1, 0.2, 0.4)))


@pytest.mark.parametrize(
    ("width", "start", "told"),
    [(64, None, 0), (63, None, 1), (128, 32, 1), (256, 64, 0), ({"head_dim": 16, "d": 256}, None, 0)],
)
def test_a_small_width_that_is_too_small_is_warned_of(width: Any, start: Any, told: int) -> None:
    found = write_warnings([sweep(width, start)], [])
    assert len(found) == told
    assert all("the paper advises about 100 units and more" in warning for warning in found)


def test_each_warning_is_told_once_and_by_name() -> None:
    (only,) = write_warnings([sweep(32, None, "sweep-1"), sweep(64, 32), sweep({"head_dim": 8}, None)], [])
    assert only.startswith("the small width 32 may be too small")  # of heads of 8 nobody knows how many there are
    edge = Sweep("sweep-1-width-64", [Tried(0.2, 0.0, [1.0])], 64, None, Space((0.1, 0.2)))
    assert write_warnings([edge], [runs("from-scratch", 0.9, None, 0.8), runs("copies", None)]) == [
        "sweep-1-width-64: the best learning rate, 0.2, is the largest tried: try 0.2, 0.4, 0.8",
        "from-scratch: 1 of 3 seeds diverged; means are over the others",
        "copies: 1 of 1 seeds diverged",
    ]


def held_out(of: ContenderRuns, *losses: float) -> ContenderRuns:
    steps = [20 * (i + 1) for i in range(len(losses))]
    curves = [replace(c, held_out_steps=steps, held_out_losses=list(losses)) for c in of.curves]
    return replace(of, curves=curves)


def test_held_out_each_model_is_taken_where_it_does_best() -> None:
    """What fits the training set best may be worse on other data."""
    trained = [
        held_out(runs("from-scratch", 0.9), 1.0, 0.7),
        held_out(runs("continued", 0.1), 0.75, 1.9),
        held_out(runs("copies-without-noise", 0.2), 0.6, 0.6),
        held_out(runs("copies", 0.5), 0.72, 0.8),
    ]
    assert (
        "On held-out data the upscaled model's loss comes down to 0.72, that of the best alternative, training from "
        "scratch, to 0.7."
    ) in said(*trained)
    changed = held_out(runs("copies-own", 0.6), 0.69, 0.71)
    assert any("model's loss (changed halfway) comes down to 0.69, that" in one for one in said(*trained, changed))
    assert not any(
        "held-out" in one for one in said(runs("from-scratch", 0.9), held_out(runs("copies", 0.5), 0.7, 0.8))
    )


def test_held_out_loss_that_rises_while_training_loss_falls_is_warned_of() -> None:
    upscaled = runs("copies", 0.5, 0.52)
    (only,) = write_warnings([], [held_out(upscaled, 1.0, 0.8, 0.9)])
    assert "rises from 0.8 at step 40 to 0.9" in only
    assert write_warnings([], [held_out(upscaled, 1.0, 0.8, 0.805)]) == []
    assert write_warnings([], [held_out(runs("copies", 2.5, start=2.0), 1.0, 0.8, 0.9)]) == []


def test_held_out_loss_above_that_of_the_best_baseline_is_warned_of() -> None:
    scratch, upscaled = held_out(runs("from-scratch", 0.9), 1.0, 0.7), held_out(runs("copies", 0.5), 1.0, 0.75)
    (only,) = write_warnings([], [scratch, upscaled])
    assert "higher held-out loss than training from scratch (0.75 against 0.7)" in only
    assert write_warnings([], [held_out(scratch, 1.0, 0.76), upscaled]) == []


# ---------------------------------------------------------------------------------- costs, and what the gain is made of

TERA = 1e12
Loss = Callable[[float], float]


def trained(name: str, *losses: Loss, each: int = 25, flops: float | None = 1.0, lost: int = 0) -> ContenderRuns:
    """Several seeds, each with the loss that a function of the step gives, at 40 steps; the first ones diverged."""
    steps = list(range(each, 40 * each + 1, each))
    ended = enumerate([[loss(step) for step in steps] for loss in losses])
    curves = [Curve(n, "diverged" if n < lost else "finished", steps, some) for n, some in ended]
    return with_curves(ContenderRuns(name, 128, 0.1, 0.0, [], cost_per_step=flops), curves)


def costs(*runs: ContenderRuns, stages: Sequence[StageSpent] = (), sweeps: Sequence[Sweep] = ()) -> dict[str, Any]:
    return compute_costs(runs, stages, sweeps)


def flat(value: float) -> Loss:
    """One loss at every step."""
    return lambda step: value


def line(start: float, end: float) -> Loss:
    """A straight line from before the first step to the thousandth."""
    return lambda step: start + (end - start) * step / 1000


@pytest.mark.parametrize(
    ("base", "reached", "scratch", "speedup", "tuning"),
    [
        (740, 598, 11_326, 8.5, 0),
        (740, 3_031, 11_326, 3.0, 0),
        (66_547, 132_985, 265_970, 1.3, 0),
        (10_615_488, 6_539_099, 37_929_809, 2.2, 19_679_775),  # GPT-2, where it is 1.4 with tuning alone charged
    ],
)
def test_speedups_of_the_paper(base: float, reached: float, scratch: float, speedup: float, tuning: float) -> None:
    """Runs of so many TFLOPs, whose upscaled curve is at the lowest loss from scratch where the paper's is."""
    found = costs(
        trained("base", flat(1.0), flops=base * TERA / 1000),
        trained("from-scratch", line(2.0, 1.0), flops=scratch * TERA / 1000),
        trained("copies", lambda step: 1.0 - (step / 1000 - reached / scratch), flops=scratch * TERA / 1000),
        stages=[StageSpent("sweep-2-width-100", tuning * TERA, 1.0)],
    )
    assert found["upscaled_to_scratch_loss"] == pytest.approx(reached * TERA)
    assert found["scratch_total"] == pytest.approx(scratch * TERA)
    assert found["base"] == pytest.approx(base * TERA)
    assert found["speedup_base_charged"] == pytest.approx(speedup, abs=0.05)
    assert found["speedup_sunk"] == pytest.approx(scratch / reached)
    assert found["speedup_tuning_charged"] == pytest.approx(scratch / (reached + tuning))
    assert found["speedup_all_charged"] == pytest.approx(scratch / (reached + tuning + base))
    if tuning:
        assert found["speedup_tuning_charged"] == pytest.approx(1.4, abs=0.05)


def test_scratch_is_looked_at_for_as_many_steps_as_the_upscaled_model() -> None:
    found = costs(trained("from-scratch", line(2, 1), each=50, flops=3.0), trained("copies", flat(1.2)))
    assert found["scratch_min_loss"] == pytest.approx(1.0)
    assert found["scratch_total"] == 3000
    assert found["upscaled_to_scratch_loss"] is None
    assert found["speedup_sunk"] is None


def test_the_lowest_loss_is_not_the_last_and_is_of_the_mean_over_seeds_that_ended() -> None:
    dip = trained("from-scratch", lambda step: 1.0 + abs(step - 500) / 1000, flat(2.0))
    assert costs(dip, trained("copies", flat(1.0)))["scratch_min_loss"] == pytest.approx(1.5)
    two = trained("copies", flat(math.nan), flat(1.0), lost=1)
    assert {loss for _, loss in mean_curve(two)} == {1.0}
    assert mean_curve(trained("copies", flat(1.0), lost=1)) == []


def test_tuning_is_sweeps_and_small_models_and_its_speedup_that_of_a_step_whatever_the_seeds() -> None:
    stages = [StageSpent(name, 10.0**i, 1.0) for i, name in enumerate(["sweep-1", "small-base", "sweep-2", "base"])]
    assert costs(stages=stages)["tuning"] == 111
    assert costs(stages=[*stages, StageSpent("sweep-3", None, 1.0)])["tuning"] is None
    trials = [Tried(0.1, 1.0, [1.0, 1.0], steps=100, cost=2 * 100 * 5.0), Tried(0.1, 0.0, [None, None])]
    small = Sweep("sweep-2-width-64", trials, 128, 64)
    first = Sweep("sweep-1-width-64", [Tried(0.1, 0.0, [1.0], steps=1, cost=99.0)], 64)
    found = costs(trained("copies", flat(1.0), flops=118.0), sweeps=[first, small])
    assert found["tuning_speedup"] == pytest.approx(23.6)


def test_what_was_not_trained_or_cannot_be_counted_is_none() -> None:
    unknown = costs(trained("from-scratch", flat(1.0), flops=None), trained("copies", flat(0.5), flops=None))
    assert {name for name, value in unknown.items() if value is not None} == {"tuning", "scratch_min_loss"}
    assert {value for name, value in costs().items() if name != "tuning"} == {None}


def test_a_curve_is_crossed_between_its_points_and_never_before_the_first() -> None:
    curve = [(10, 3.0), (20, 1.0), (30, 2.0), (40, 0.5)]
    at = {2.0: 15, 1.0: 20, 0.75: pytest.approx(30 + 10 * 1.25 / 1.5), 5.0: 10, 0.4: None}
    assert {loss: cost_to_reach(curve, loss, by="steps") for loss in at} == at
    assert cost_to_reach([], 1.0, by="steps") is None


@given(st.lists(st.floats(0.1, 10.0), min_size=4, max_size=4))
def test_the_parts_of_the_gain_add_up(losses: list[float]) -> None:
    names = ("from-scratch", "from-scratch-changed", "copies-without-noise", "copies")
    found = compute_gain([trained(name, flat(loss)) for name, loss in zip(names, losses, strict=True)])
    parts = [found[name] for name in ("learning_rate", "head_start", "noise")]
    assert math.fsum(part for part in parts if part is not None) == pytest.approx(losses[0] - losses[3], abs=1e-12)


ENDS = {"from-scratch": 1.0, "from-scratch-changed": 0.9, "copies-without-noise": 0.7, "copies": 0.4, "continued": 0.6}


@pytest.mark.parametrize(
    ("left_out", "parts"),
    [
        ((), {"learning_rate": 0.1, "head_start": 0.2, "noise": 0.3}),
        (("from-scratch-changed",), {"head_start": 0.3, "noise": 0.3}),  # which is then against from scratch
        (("from-scratch", "from-scratch-changed", "copies-without-noise"), {}),
    ],
)
@pytest.mark.parametrize("diverged", [False, True])
def test_the_parts_of_the_gain_that_are_known(left_out: Sequence[str], parts: dict[str, float], diverged: bool) -> None:
    ended = {name: loss for name, loss in ENDS.items() if name not in left_out}
    runs = [trained(name, flat(loss - 0.01), flat(loss + 0.01)) for name, loss in ended.items()]
    runs += [trained(name, flat(1.0), lost=1) for name in left_out if diverged]
    assert {name: value for name, value in compute_gain(runs).items() if value is not None} == pytest.approx(
        ended | parts
    )
