"""The protocol as recipes: which widths, how long, from where; what is refused before anything is trained."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from mupscale.engine import Outcome
from mupscale.study import estimate_paper, training
from mupscale.study.contenders import COPIES
from mupscale.study.paper import Protocol, near_divisor, read_curve, thin_curve
from mupscale.study.systems import System
from mupscale.study.training import Speed, Stopwatch
from mupscale.system import rough_time
from mupscale.system.errors import MupscaleError
from mupscale.train import Evaluation, Growth, Recipe, Schedule, Seeds, Spec
from paper_runs import WIDE_STEPS, run_quietly, runs_of, settings, small
from small_runs import Rows


class Counted(Rows):
    """Data that knows how often it was loaded."""

    loaded = 0

    def __init__(self) -> None:
        super().__init__()
        Counted.loaded += 1


class OnlyFours(nn.Module):
    """A model of one's own with an opinion about widths."""

    def __init__(self, width: int) -> None:
        super().__init__()
        if width % 4:
            raise ValueError("fours only")
        self.first, self.last = nn.Linear(6, width), nn.Linear(width, 3)


def protocol(**changes: Any) -> Protocol:
    return Protocol(small(**changes), "train")


def system(made: Protocol) -> System:
    """From width 8 to 16, unless changed."""
    return made.system(settings())


# ------------------------------------------------------------------------------------------------ recipes


def test_trials_start_from_the_small_base_model_of_their_seed(tmp_path: Path) -> None:
    made = protocol(seeds=Seeds(init=3, data=4, noise=5, dropout=6))
    at_4 = system(made).smaller(4)
    base, trial = at_4.base_model(0.01, seed=2), made.recipe_of(at_4.leaf(COPIES, 0.01, 0.5, 0.25, 2), tmp_path)
    assert (trial.width, trial.steps, trial.noise, trial.noise_unit) == (8, WIDE_STEPS, 0.25, "init")
    assert trial.start == made.recipe_of(base, tmp_path).out == str(tmp_path / made.folder_name(base))
    assert trial.seeds == Seeds(init=5, data=10_006, noise=7, dropout=8)
    assert trial.optimizer.init_args["lr"] == 0.5
    assert trial.grow == []


@pytest.mark.parametrize(
    "changes",
    [
        {"batch": 4},
        {"seeds": Seeds(init=1)},
        {"growth": {"at": 300}},
        {"log_every": 5},
        {"evaluation": Evaluation(every=2)},
        {"optimizer": Spec("torch.optim.SGD", {"lr": 0.5})},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_another_recipe_trains_or_looks_at_elsewhere_has_another_folder(changes: dict[str, Any]) -> None:
    usual: dict[str, Any] = {"log_every": 20, "steps": 1000, "growth": {"at": 400}}
    ours, theirs = protocol(**usual), protocol(**{**usual, **changes})
    base = system(ours).base_model(0.5, 0)
    names = [
        {one.folder_name(system(one).base_model(0.5, 0)), one.folder_name(trial)}
        for one in (ours, theirs)
        for trial in [system(one).smaller(4).leaf(COPIES, 0.5, 0.5, 0.0, 0)]
    ]
    assert not names[0] & names[1]
    assert ours.folder_name(base) != Protocol(ours.recipe, "held-out").folder_name(base)


@pytest.mark.parametrize(
    ("base", "wide", "small_width", "expected"),
    [
        (8, 16, 4, 8),
        (8, 32, 6, 24),
        ({"heads": 2}, {"heads": 6}, {"heads": 1}, {"heads": 3}),
    ],
)
def test_small_systems_grow_as_many_times_as_the_large_one(
    base: Any, wide: Any, small_width: Any, expected: Any
) -> None:
    one = {"heads": 1} if isinstance(base, dict) else 4
    model = Spec("mupscale.models.GPT2", {"vocab": 11, "context": 6, "layers": 1, "head_dim": 4})
    changes = {"model": model} if isinstance(base, dict) else {}
    made = protocol(width=base, base=one, init_at=None, growth={"width": wide}, **changes)
    (found,) = made.small_systems(system(made), [small_width])
    assert found.wide == expected


@given(st.integers(1, 5000), st.integers(-3, 600))
def test_points_end_where_the_run_does_if_they_can(steps: int, most: int) -> None:
    every = near_divisor(steps, most)
    assert 1 <= every <= max(1, most)
    exact = [d for d in range(max(1, most) // 4 + 1, max(1, most) + 1) if steps % d == 0]
    assert every == (exact[-1] if exact else max(1, most))


def test_curves_have_points_enough_for_a_last_tenth() -> None:
    made = protocol(log_every=50, steps=1100, growth={"at": 100}, evaluation=Evaluation(every=300))
    assert made.points_apart == 25
    assert made.exact_is_a_beginning
    assert made.watch(system(made).base_model(0.1, 0))["log_every"] == 2
    assert made.watch(system(made).leaf(COPIES, 0.1, 0.1, 0.0, 0))["evaluation"].every == 250
    assert not protocol(schedule=Schedule("cosine")).exact_is_a_beginning
    assert not protocol(steps=1030, growth={"at": 21}, log_every=20).exact_is_a_beginning  # 1009 is a prime


def test_a_curve_read_off_a_longer_run_did_not_diverge_with_it(tmp_path: Path) -> None:
    recipe = replace(small(), out=str(tmp_path), steps=100, grow=[])
    outcome = Outcome(recipe, "diverged", 60, [(20, 1.0), (40, 0.5)])
    assert read_curve(outcome, 0, 40).status == "finished"
    assert read_curve(outcome, 0, 40).final() == 0.5
    assert read_curve(replace(outcome, step=41), 0, 40).status == "diverged"
    assert read_curve(outcome, 0, 100).status == "diverged"


def test_thinned_curves_keep_their_means_and_extremes() -> None:
    curve = [(step, float(step)) for step in range(1, 11)]
    evens, odds = [2, 4, 6, 8, 10], [1.0, 3.0, 5.0, 7.0, 9.0]
    assert [*thin_curve(curve, most=5).values()] == [evens, [1.5, 3.5, 5.5, 7.5, 9.5], odds, evens]
    assert [*thin_curve(curve).values()] == [[step for step, _ in curve], [loss for _, loss in curve]]
    few = thin_curve(curve[:9], most=4)
    assert [*few] == ["steps", "losses", "lowest", "highest"]
    assert [*few.values()] == [[3, 6, 9], [2.0, 5.0, 8.0], [1.0, 4.0, 7.0], [3.0, 6.0, 9.0]]
    assert [*thin_curve(curve, most=4).values()] == [[1, 4, 7, 10], [1, 3, 6, 9], [1, 2, 5, 8], [1, 4, 7, 10]]


def test_a_peak_of_one_step_in_a_hundred_thousand_is_in_the_summary(tmp_path: Path) -> None:
    losses = [2.0] * 100_000
    losses[33_333], losses[77_777], losses[-1] = 17.0, 0.25, 9.0
    recipe = replace(small(), out=str(tmp_path), steps=len(losses), grow=[])
    read = read_curve(Outcome(recipe, "finished", len(losses), list(enumerate(losses, 1))), 0, len(losses))
    assert len(read.steps) == 400
    assert (max(read.highest), min(read.lowest), read.highest[-1]) == (17.0, 0.25, 9.0)
    assert max(read.losses) < 2.1  # the mean of 250


# ------------------------------------------------------------------------------------------------ data and costs


@pytest.mark.slow
def test_the_data_is_loaded_once_for_all_stages(tmp_path: Path) -> None:
    """CoverType takes seconds to load, and a run has a dozen stages."""
    Counted.loaded = 0
    counted = small(data=Spec("test_protocol.Counted"), steps=12, growth={"at": 6})
    how = settings(seeds=1, contenders=["copies"], grown_lrs=[0.02], noises=[0.1])
    run_quietly(tmp_path / "run", counted, how)
    assert Counted.loaded == 1
    estimate_paper(counted, how, tmp_path / "dry")
    assert Counted.loaded == 2


@pytest.mark.slow
def test_a_model_whose_cost_is_unknown_is_compared_step_by_step(tmp_path: Path) -> None:
    unknown = small(model=Spec("paper_runs.Uncounted"), steps=12, growth={"at": 4})
    how = settings(seeds=1, grown_lrs=[0.05], noises=[0.1], contenders=["from-scratch"])
    table = estimate_paper(unknown, how, tmp_path / "dry")
    assert "FLOPs" not in table
    assert " steps " in table
    summary = run_quietly(tmp_path / "run", unknown, how)
    scratch = runs_of(summary, "from-scratch")
    assert (scratch.steps, scratch.cost_per_step) == (12, None)
    assert (summary.large.unit, summary.large.base_cost) == ("steps", None)
    assert {stage.cost for stage in summary.stages if not stage.name.startswith("sweep")} == {None}
    assert summary.answer["costs"]["tuning"] is None


def test_a_dry_run_tries_fewer_where_memory_is_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []
    stack = training.RunStack

    def cramped(recipes: list[Any], *others: Any) -> Any:
        tried.append(len(recipes))
        if len(recipes) > room:
            raise torch.OutOfMemoryError
        return stack(recipes, *others)

    monkeypatch.setattr(training, "RunStack", cramped)
    room, made = 3, protocol()
    seconds = Stopwatch(made, "auto").measure([system(made).base_model(0.1, seed) for seed in range(12)])
    assert [runs for runs in tried if runs > 1] == [12, 6, 3]  # one first, for what is slow once
    assert seconds is not None
    room = 0
    table = estimate_paper(small(), settings(seeds=1, contenders=["copies"]), tmp_path / "dry")
    assert "Too big: one run does not fit into memory, so use a smaller batch or width." in table


def test_a_dry_run_says_what_it_measures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(training, "_probe", lambda *_: Speed(0.01, 0.001))
    estimate_paper(small(), settings(seeds=1, contenders=["copies"]), tmp_path / "dry")
    assert re.match(r"To estimate the time: a few steps of width \d+ …", capsys.readouterr().err)


def test_times_for_people() -> None:
    times = {0.2: "1 s", 59: "59 s", 61: "2 min", 3600: "60 min", 7300: "2.0 h", 1e6: "277.8 h"}
    assert {seconds: rough_time(seconds) for seconds in times} == times


# ------------------------------------------------------------------------------------------------ mistakes


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"grow": []}, r"needs one growth event, but this recipe has 0: set grow"),
        (
            {"grow": [Growth(10, 16, how="copies"), Growth(20, 32, how="copies")]},
            r"needs one growth event, but this recipe has 2",
        ),
        ({"start": "somewhere"}, r"cannot start from a checkpoint \(from\)"),
        ({"grow": [Growth(10, 8, how="copies")]}, r"the recipe's growth event keeps the width at 8"),
        (
            {"grow": [Growth(10, 16, how="lossless")]},
            r"tunes the noise of copies, but the recipe grows with how: lossless",
        ),
    ],
)
def test_recipes_that_are_not_for_the_paper_s_comparison(tmp_path: Path, changes: dict[str, Any], why: str) -> None:
    with pytest.raises(MupscaleError, match=why):
        run_quietly(tmp_path / "run", replace(small(), **changes))
    assert not (tmp_path / "run").exists()


HEADS = small("gpt2-heads", width=8, base=4, init_at=None)
NAMED = small("gpt2-heads", model=Spec("mupscale.models.GPT2", {}), width={"heads": 2}, base={"heads": 1}, init_at=None,
              growth={"width": {"heads": 4}})  # fmt: skip


@pytest.mark.parametrize(
    ("of", "changes", "why"),
    [
        (small(), {"widths": [4, 4]}, r"small widths must differ"),
        (small(), {"widths": [0]}, r"StudySettings\.widths is 0, but widths are positive"),
        (small(), {"widths": [{"width": 4}]}, r"must be of the same form as the recipe's width 8"),
        (small(), {"contenders": ["fresh"]}, r"'fresh' is not a contender here: choose from base, from-scratch"),
        (HEADS, {"contenders": ["net2net"]}, r"a norm over the width.*: leave net2net out of StudySettings.contenders"),
        (HEADS, {"widths": [5]}, "GPT2 of width 5 cannot have"),
        (small(model=Spec("test_protocol.OnlyFours")), {"widths": [6]}, r"built at width 6: ValueError: fours only"),
        (NAMED, {"widths": [{"head_dim": 2}]}, "does not name the same arguments"),
    ],
)
def test_settings_that_cannot_be(of: Recipe, changes: dict[str, Any], why: str, tmp_path: Path) -> None:
    with pytest.raises(MupscaleError, match=why):
        run_quietly(tmp_path / "run", of, settings(**changes))
    assert not (tmp_path / "run").exists()  # before anything is trained


def test_the_time_of_a_large_size_is_measured_where_a_small_ones_is_all_overhead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """FLOPs alone would tell 256 times the small size's time."""
    probed: list[float] = []

    def probe(stretch: Any, ground: Any, engine: str, count: int) -> Speed:
        probed.append(ground.cost_per_step(stretch.width))
        return Speed(0.01, 0.004)

    monkeypatch.setattr(training, "_probe", probe)
    made = protocol()
    clock, base = Stopwatch(made, "auto"), system(made).base_model(0.1, 0)
    for width in (8, 128):
        clock.measure([replace(base, width=width)])
    assert len(probed) == 2
    assert set(clock.speeds.values()) == {(0.01, 0.004)}


def test_the_time_is_that_of_the_programs_which_train_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not of all runs of a size at once: small models share what a step takes, and here two pieces do not."""
    monkeypatch.setattr(training, "_probe", lambda *_: Speed(start=0.5, step=0.25))
    made = protocol()
    clock, base = Stopwatch(made, "auto"), [system(made).base_model(0.1, seed) for seed in range(3)]
    trunk, steps = 2 * 0.5 + 0.25 * base[0].steps, base[0].steps
    assert clock.measure(base) == trunk
    assert clock.measure([*base, *(one.decayed(steps) for one in base)]) == 2 * trunk
    assert clock.measure([replace(base[0], lr=float(number)) for number in range(1, 65)]) == 2 * trunk  # 32 are probed
