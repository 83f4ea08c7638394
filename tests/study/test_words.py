"""What the presets say of a study and of its sweeps: cards, sentences, tables, and numbers as people read them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from comparisons import ALL, comparison, forecast_only, system
from mupscale import MupscaleError
from mupscale.study import StudySummary, format_width
from mupscale.study.results import Card, PageTable
from mupscale.study.space import Space, Sweep, Tried, joined_edges, sweep_remarks
from mupscale.study.wording import COST, COST_THERE, LOSS, write_pay_words
from mupscale.system import words
from summaries import all_runs, diverged, example, stored


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (words.format_loss(0.41234), "0.412"),
        (words.format_loss(0.01234), "0.0123"),
        (words.format_loss(4.2e-7), "4.2e-7"),
        (words.format_loss(1234.5), "1,234.5"),
        (words.format_loss(None), "–"),
        (words.format_loss(math.nan), "–"),
        (words.format_loss(math.inf), "∞"),
        (words.format_factor(1.3333), "1.3×"),
        (words.format_factor(23.64), "23.6×"),
        (words.format_factor(1250), "1,250×"),
        (words.format_flops(598e12), "598 TFLOPs"),
        (words.format_flops(37_929_809e12), "37,929,809 TFLOPs"),
        (words.format_flops(8.3e11), "0.83 TFLOPs"),
        (words.format_flops(2e9), "2 GFLOPs"),
        (words.format_setting(0.0040000001), "0.004"),
        (words.format_setting(1e-5), "1e-5"),
        (words.format_duration(0.84), "0.8 s"),
        (words.format_duration(59.7), "1 min"),
        (words.format_duration(123), "2 min 3 s"),
        (words.format_duration(3840), "1 h 4 min"),
        (words.format_duration(3 * 86400 + 7200), "3 d 2 h"),
        (words.format_duration(3599.9), "1 h"),
        (format_width(1024), "1,024"),
        (format_width({"head_dim": 32, "heads": 4}), "head_dim 32, heads 4"),
        (words.format_spread([0.4, 0.5, 0.6]), "0.500 (0.400 to 0.600)"),
        (words.format_spread([0.4]), "0.400"),
        (words.format_spread([]), "–"),
        (words.safe_file_name("../../etc/passwd"), "etc-passwd"),
        (words.safe_file_name("…"), "unnamed"),
    ],
)
def test_numbers_for_people(shown: str, expected: str) -> None:
    assert shown == expected


def cards(summary: StudySummary) -> dict[str, tuple[str, str]]:
    """Number and what else is said, by what it is about, in plain spaces."""
    return {card.what: (plain(card.number), plain(card.more)) for card in summary.cards}


def plain(text: str) -> str:
    return " ".join(text.split())


def rows(table: PageTable) -> list[str]:
    return [plain(" ".join(row)) for row in table.rows]


RATES = (
    "Learning rate found for the large model, at the base width: 0.008 grown with fresh units; "
    "0.008 grown from copies; 0.008 from scratch."
)


# ------------------------------------------------------------------------------------------------ does growing pay


def test_where_growing_pays_in_words() -> None:
    """Where continuing is better, results/ has it word for word, and tests/report/test_results.py holds that."""
    summary = comparison(2)
    assert summary.sentences == [
        summary.answer["sentence"],
        "From 58.4 GFLOPs on (base model's cost included), growing with fresh units ends lower than continuing.",
        "At every budget, growing with fresh units ends lower than starting over.",
        RATES,
    ]
    assert cards(summary)[LOSS][0] == "5.5 % lower"
    held = summary.tables[0]
    assert held.about == [summary.forecast["sentence"], "8 of 8 forecasts were right."]
    size = {**summary.forecast, "size": {"sentence": "Width 16 is a better size than 64."}}
    sized, *_ = write_pay_words(replace(summary, forecast=size)).tables
    assert sized.about == [held.about[0], "Width 16 is a better size than 64.", held.about[1]]


def test_numbers_are_the_answer_s_own() -> None:
    changed = {
        **comparison().answer,
        "sentence": "Nobody knows.",
        "cost_charged": {"value": 0.1234, "bound": "at most"},
        "cost_there": None,
        "above_continued": 0.25,
    }
    summary = comparison(answer=changed)
    assert summary.sentences[0] == "Nobody knows."
    assert cards(summary)[COST][0] == "at most 0.12×"
    assert cards(summary)[COST_THERE] == ("unknown", "training from scratch diverged, or was left out")
    assert cards(summary)[LOSS][0] == "25 % higher"


def test_plain_words_in_short_sentences() -> None:
    for summary in (comparison(3, ALL), forecast_only(comparison())):
        said = [*summary.sentences, *summary.measured, *(one for table in summary.tables for one in table.about)]
        assert "upscaled" not in " ".join(said)
        for sentence in re.split(r"(?<=[.:;]) ", " ".join(said)):
            assert len(sentence.split()) <= 30, sentence


def test_forecast_alone() -> None:
    summary = forecast_only(comparison())
    assert summary.sentences == [
        summary.forecast["sentence"],
        "This is only a forecast: the large models were not trained.",
        RATES,
    ]
    way = "below 1×, so growing costs less"
    said = f"{way}; base model's cost included; growing with fresh units; in the middle 0.58×"
    assert cards(summary)[COST] == ("0.51× to 0.65×", said)
    assert re.fullmatch(r"−\S+ % to −\S+ %", cards(summary)[LOSS][0])
    assert any(one.startswith("Seeds of small models: 3") for one in summary.measured)
    assert [table.title for table in summary.tables] == [
        "The forecast",
        "Small contenders at the full budget, width 32 → 64",
        "Small contenders at the full budget, width 64 → 128",
    ]


def test_forecast_without_a_rule() -> None:
    summary = forecast_only(comparison())
    why = {"no_rule": "small widths contradict each other"}
    above = dict.fromkeys(summary.forecast["above_continued"], why)
    summary = forecast_only(replace(summary, forecast={**summary.forecast, "above_continued": above, "cost": {}}))
    assert cards(summary)[LOSS] == ("no forecast", "growing from copies; small widths contradict each other")
    assert cards(summary)[COST] == ("unknown", "growing from copies; training from scratch was left out")


def test_diverged_contenders_are_named() -> None:
    summary = comparison(3, lost={"copies": 1, "from-scratch": 3})
    *_, second, last = rows(summary.tables[1])
    assert re.fullmatch(r"grown from copies .* 0\.5\d\d \(0\.5\d\d to 0\.5\d\d\) 1 of 3 seeds diverged", last)
    assert second.endswith("diverged")
    assert plain(summary.tables[2].rows[-2][2]) == "diverged at 67 GFLOPs"
    assert (
        "Growing with fresh units and starting over were not measured at a common cost, so they cannot be compared."
        in summary.sentences
    )
    none = comparison(2, lost={"copies": 2, "fresh": 2})
    assert set(cards(none).values()) == {("unknown", "every grown model diverged")}


@pytest.mark.parametrize(
    ("losses", "schedule", "told"),
    [
        ([0.7, None, 0.8], "wsd", ["0.750 (0.700 to 0.800), at a learning rate that has not fallen yet"]),
        ([0.7], "recipe", ["0.700"]),
        ([None], "wsd", []),
    ],
)
def test_where_growing_starts_from(losses: list[float | None], schedule: str, told: list[str]) -> None:
    summary = comparison()
    settings, base = {**summary.settings, "schedule": schedule}, {**summary.base, "losses": losses}
    table = write_pay_words(replace(summary, base=base, settings=settings)).tables[1]
    assert table.about == [f"Before growth, the base model's held-out loss is {one}." for one in told]


def test_one_budget_has_no_table_of_budgets() -> None:
    runs = system()
    alone = replace(runs, contenders=[replace(one, points=one.points[-1:]) for one in runs.contenders])
    assert [table.title for table in comparison(large=alone).tables] == [one.title for one in comparison().tables[:2]]


def test_one_seed_and_a_base_model_of_unknown_cost() -> None:
    runs = replace(system(seeds=1), base_cost=None, unit="steps")
    base = {"from": "gpt2.pt", "steps": None, "lr": 0.1, "width": 256}
    summary = comparison(1, large=runs, base=base)
    assert "Seeds: one, so the variation between seeds is unknown." in summary.measured
    assert "The base model is gpt2.pt, trained for an unknown number of steps." in summary.measured
    assert cards(summary)[COST] == ("unknown", "the base model's steps are unknown")


# ------------------------------------------------------------------------------------------- the paper's comparison


def test_the_paper_s_comparison_where_something_is_missing() -> None:
    costs = {"speedup_base_charged": None, "scratch_total": 1.0}
    lost = example(runs=[diverged(one) for one in all_runs()], costs=costs)
    assert lost.cards[0] == Card("Speed-up to the from-scratch model's lowest loss", "not reached")
    assert cards(lost)["Final loss, upscaled"] == ("diverged", "")
    unknown = example(costs=dict.fromkeys(("speedup_base_charged", "speedup_sunk", "scratch_total")))
    assert unknown.cards[0].number == "unknown"
    assert "reference" not in unknown.answer
    noise = {"fc.weight": 0.1}
    choice = {**stored().answer["choice"], "unit": "signal", "plain": (7.77, 0.00123), "constants": noise}
    constants = example(choice=choice, runs=[replace(one, noise=noise) for one in all_runs()])
    assert cards(constants)["Chosen noise"][1].endswith("plain transfer: 7.77")
    assert cards(constants)["Chosen learning rate"][1].endswith("plain transfer: 0.00123")
    assert (constants.tables[-1].rows, constants.tables[-1].folded) == ([["fc.weight", "0.1"]], True)
    assert "per parameter" in rows(constants.tables[0])[0]


def test_a_table_has_a_cell_for_every_column() -> None:
    with pytest.raises(MupscaleError, match="the table 'x' has 2 columns, but a row of 1"):
        PageTable("x", ["a", "b"], [["1"]])


# ---------------------------------------------------------------------------------------------- what is said of a sweep

LRS, NOISES = (0.1, 0.2, 0.4), (0.5, 1.0, 2.0, 4.0)
Loss = Callable[[float, float], float | None]


def tried(loss: Loss, *, lrs: tuple[float, ...] = LRS, noises: tuple[float, ...] = NOISES, spread: float = 0) -> Sweep:
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
        (tried(bowl(0.2, 1.0)), []),
        # edges, with the range to try next in the ratio at that edge; below the smallest noise there is zero
        (tried(bowl(0.4, 1.0)), ["the best learning rate, 0.4, is the largest tried: try 0.4, 0.8, 1.6"]),
        (tried(bowl(0.1, 1.0)), ["the best learning rate, 0.1, is the smallest tried: try 0.025, 0.05, 0.1"]),
        (tried(bowl(0.2, 4.0)), ["the best noise, 4, is the largest tried: try 4, 8, 16"]),
        (tried(bowl(0.4, 4.0)), ["the best learning rate, 0.4, is the largest…", "the best noise, 4, is the largest…"]),
        (tried(bowl(3.0, 1.0), lrs=(0.1, 1.0, 3.0)), ["the best learning rate, 3, is the largest tried: try 3, 9, 27"]),
        (tried(bowl(0.2, 3.0), noises=(3.0,)), ["the best noise, 3, is the largest tried: try 3, 6, 12"]),
        (tried(bowl(0.2, 0.5)), []),
        (tried(bowl(0.2, 0.0), lrs=(0.2,), noises=()), []),
        (
            Sweep("s", [Tried(0.37, 1.1, [1.0])], 128, 64, Space(LRS, NOISES), sampler="tpe"),
            ["the best learning rate, 0.37, lies next to 0.4, the largest tried: try 0.4, 0.8, 1.6"],
        ),
        # the row without noise, whose rate baselines have, where losses are not flat there
        (
            tried(baselines(0.1, 1.0)),
            ["without noise, the best learning rate, 0.1, is the smallest tried: try 0.025,…"],
        ),
        (tried(baselines(0.4, 1.0)), ["without noise, the best learning rate, 0.4, is the largest tried…"]),
        (tried(baselines(0.4, 0.1)), []),
        # zero noise, within the spread between seeds or within what one seed cannot tell
        (tried(bowl(0.2, 0.0)), ["the sweep selects zero noise: upscaling does not pay here: training on without…"]),
        (tried(bowl(0.2, 0.0), noises=()), []),
        (
            tried(near_zero(0.05), spread=0.06),
            ["the best trial without noise reaches 1.05, the best with noise 1, which is within…"],
        ),
        (tried(near_zero(0.05), spread=0.04), []),
        (
            tried(near_zero(0.009)),
            ["the best trial without noise reaches 1.009, the best with noise 1, 0.9% apart; with…"],
        ),
        (tried(near_zero(0.011)), []),
        # divergence: beside the best, elsewhere, everywhere
        *(
            (
                tried(bowl(0.2, 1.0, beyond)),
                [
                    f"the best trial is close to one that diverged (learning rate {beyond[0]:g} and noise "
                    f"{beyond[1]:g}): {BESIDE}",
                    "1 of 15 trials diverged",
                ],
            )
            for beyond in ((0.4, 1.0), (0.2, 2.0))
        ),
        *(
            (tried(bowl(0.2, 1.0, away)), ["1 of 15 trials diverged"])
            for away in ((0.4, 2.0), (0.1, 1.0), (0.2, 0.5), (0.4, 0.0))
        ),
        (tried(bowl(0.2, 0.0, (0.2, 0.5))), ["the sweep selects zero noise…", "1 of 15 trials diverged"]),
        (
            tried(lambda lr, noise: 1.0 if lr == 0.1 else math.inf, lrs=(0.1, 0.2), noises=()),
            [
                f"the best trial is close to one that diverged (learning rate 0.2): {OTHERS}",
                "the best learning rate, 0.1, is the smallest tried…",
                "1 of 2 trials diverged",
            ],
        ),
        (tried(lambda lr, noise: math.inf), ["15 of 15 trials diverged"]),
        (
            tried(lambda lr, noise: math.inf if lr == 0.4 else None if noise == 4 else bowl(0.2, 1.0)(lr, noise)),
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
    found = [Sweep(name, tried(bowl(lr, 0.0)).trials) for name, lr in rates.items()]
    assert joined_edges([*found, Sweep("copies", tried(bowl(0.2, 1.0)).trials)]) == [
        "the best learning rate is at the edge of the grid (continued: 0.1 is the smallest tried; fresh, from-scratch: "
        "0.4 is the largest tried): set StudySettings.lrs to [0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6]"
    ]
    cells = [Tried(lr, noise, [bowl(0.2, 0.5)(lr, noise)]) for lr in LRS for noise in (0.5, 1.0, 2.0)]
    assert joined_edges([Sweep("copies", cells, lr=0.2, noise=0.5)]) == [
        "the best noise is at the edge of the grid (copies: 0.5 is the smallest tried): set StudySettings.noises to "
        "[0.125, 0.25, 0.5, 1, 2]"
    ]
