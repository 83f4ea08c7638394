"""The protocol as recipes: which widths, how long, from where; what is refused before anything is trained."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from method_runs import BASE_STEPS, WIDE_STEPS, run_quietly, settings, small
from mupscale.engine.outcomes import Outcome
from mupscale.method import dry_run
from mupscale.method.contender_training import read_curve, thin_curve
from mupscale.method.dry_run import PlannedStage, measure_step, short_flops
from mupscale.method.protocol import Protocol, near_divisor
from mupscale.method.summary import Summary
from mupscale.sweep.space import Cell
from mupscale.system import rough_time
from mupscale.system.errors import MupscaleError
from mupscale.train import Evaluation, Growth, Schedule, Seeds, Spec
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


class NeedsValues(nn.Module):
    """A model whose cost cannot be counted."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, width), nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits, after a look at a number, which vmap does not have; not where torch counts."""
        if _get_current_dispatch_mode() is not None:
            raise RuntimeError("kernels of its own")
        hidden = self.first(x).tanh()
        return self.last(hidden if float(hidden.detach().sum()) < 1e9 else hidden * 0)


def protocol(tmp_path: Path, **changes: Any) -> Protocol:
    return Protocol(small(**changes), tmp_path)


# ------------------------------------------------------------------------------------------------ recipes


def test_trials_start_from_the_small_base_model_of_their_seed(tmp_path: Path) -> None:
    made = protocol(tmp_path, seeds=Seeds(init=3, data=4, noise=5, dropout=6)).trial(4, Cell(0.5, 0.25), 2)
    assert (made.width, made.steps, made.noise, made.noise_unit) == (8, WIDE_STEPS, 0.25, "init")
    assert made.start == str(tmp_path / "small" / "width-4" / "seed-2")
    assert made.seeds == Seeds(init=5, data=10_006, noise=7, dropout=8)
    assert made.optimizer.init_args["lr"] == 0.5
    assert made.out is None
    assert made.grow == []


def test_base_models_train_up_to_the_growth_and_have_folders(tmp_path: Path) -> None:
    made = protocol(tmp_path).fresh(8, 0.5, BASE_STEPS, 1, "base")
    assert (made.width, made.steps, made.start) == (8, BASE_STEPS, None)
    assert made.out == str(tmp_path / "base" / "seed-1")


@pytest.mark.parametrize(
    ("base", "wide", "small_width", "expected"),
    [
        (8, 16, 4, 8),
        (8, 32, 6, 24),
        ({"heads": 2}, {"heads": 6}, {"heads": 1}, {"heads": 3}),
    ],
)
def test_small_systems_grow_as_many_times_as_the_large_one(
    tmp_path: Path, base: Any, wide: Any, small_width: Any, expected: Any
) -> None:
    one = {"heads": 1} if isinstance(base, dict) else 4
    model = Spec("mupscale.models.GPT2", {"vocab": 11, "context": 6, "layers": 1, "head_dim": 4})
    changes = {"model": model} if isinstance(base, dict) else {}
    made = protocol(tmp_path, width=base, base=one, init_at=None, growth={"width": wide}, **changes)
    assert made.upscaled_width(small_width) == expected
    made.check_small(small_width)


@given(st.integers(1, 5000), st.integers(-3, 600))
def test_points_end_where_the_run_does_if_they_can(steps: int, most: int) -> None:
    every = near_divisor(steps, most)
    assert 1 <= every <= max(1, most)
    exact = [d for d in range(max(1, most) // 4 + 1, max(1, most) + 1) if steps % d == 0]
    assert every == (exact[-1] if exact else max(1, most))


def test_curves_have_points_enough_for_a_last_tenth(tmp_path: Path) -> None:
    made = protocol(tmp_path, log_every=50, steps=1100, growth={"at": 100}, evaluation=Evaluation(every=300))
    assert made.points_apart == 25
    assert made.evaluations_apart == 250
    assert made.exact_is_a_beginning
    assert made.fresh(8, 0.1, 100, 0).log_every == 2
    assert not protocol(tmp_path, schedule=Schedule("cosine")).exact_is_a_beginning
    assert not protocol(tmp_path, steps=1030, growth={"at": 21}, log_every=20).exact_is_a_beginning  # 1009 is a prime


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
    assert thin_curve(curve, most=5) == (evens, [1.5, 3.5, 5.5, 7.5, 9.5], odds, evens)
    assert thin_curve(curve) == ([step for step, _ in curve], [loss for _, loss in curve], [], [])
    assert thin_curve(curve[:9], most=4) == ([3, 6, 9], [2.0, 5.0, 8.0], [1.0, 4.0, 7.0], [3.0, 6.0, 9.0])
    assert thin_curve(curve, most=4) == ([1, 4, 7, 10], [1.0, 3.0, 6.0, 9.0], [1.0, 2.0, 5.0, 8.0], [1, 4, 7, 10])


def test_a_peak_of_one_step_in_a_million_is_in_the_summary(tmp_path: Path) -> None:
    losses = [2.0] * 1_000_000
    losses[333_333], losses[777_777], losses[-1] = 77.0, 0.25, 9.0
    recipe = replace(small(), out=str(tmp_path), steps=len(losses), grow=[])
    read = read_curve(Outcome(recipe, "finished", len(losses), list(enumerate(losses, 1))), 0, len(losses))
    assert len(read.steps) == 400
    assert (max(read.highest), min(read.lowest), read.highest[-1]) == (77.0, 0.25, 9.0)
    assert max(read.losses) < 2.1  # the mean of 2,500


# ------------------------------------------------------------------------------------------------ data and costs


@pytest.mark.slow
def test_the_data_is_loaded_once_for_all_stages(tmp_path: Path) -> None:
    """CoverType takes seconds to load, and a run has a dozen stages."""
    Counted.loaded = 0
    counted = small(data=Spec("test_protocol.Counted"), steps=24, growth={"at": 10})
    run_quietly(tmp_path / "run", counted, settings(lrs=[0.01], seeds=1))
    assert Counted.loaded == 1
    dry_run.estimate_run(counted, settings(seeds=1), tmp_path / "dry")
    assert Counted.loaded == 2


def test_steps_at_another_width_for_the_same_cost(tmp_path: Path) -> None:
    made = protocol(tmp_path)
    narrow, wide = made.flops_per_step(8), made.flops_per_step(16)
    assert narrow is not None
    assert wide is not None
    assert made.equal_cost(WIDE_STEPS, 16, 8) == round(WIDE_STEPS * wide / narrow)
    assert made.equal_cost(1, 4, 16) == 1


def test_a_model_whose_cost_is_unknown_is_compared_step_by_step(tmp_path: Path) -> None:
    unknown = small(model=Spec("test_protocol.NeedsValues"), steps=12, growth={"at": 4})
    method = settings(seeds=1, upscaled_lrs=[0.05], noises=[0.1])
    assert "unknown" in dry_run.estimate_run(unknown, method, tmp_path / "dry")
    summary = run_quietly(tmp_path / "run", unknown, method)
    scratch = summary.get("scratch")
    assert scratch is not None
    assert scratch.steps == 12
    assert scratch.flops_per_step is None
    assert {stage.flops for stage in summary.stages if stage.name == "base"} == {None}


def test_a_dry_run_tries_fewer_where_memory_is_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []
    stack = dry_run.RunStack

    def cramped(recipes: list[Any], *others: Any) -> Any:
        tried.append(len(recipes))
        if len(recipes) > room:
            raise torch.OutOfMemoryError
        return stack(recipes, *others)

    monkeypatch.setattr(dry_run, "RunStack", cramped)
    room = 3
    planned = PlannedStage("sweep-2-width-4", 12, 8, 40)
    seconds = measure_step(protocol(tmp_path), planned, settings())
    assert tried == [12, 6, 3]
    assert seconds is not None
    room = 0
    table = dry_run.estimate_run(small(), settings(seeds=1, baselines=[]), tmp_path)
    assert "too big" in table
    assert table.splitlines()[-1] == "too big: one run does not fit into memory, so take a smaller batch or width"


def test_numbers_for_people() -> None:
    assert [short_flops(flops) for flops in (0, 12, 5870, 5.87e9, 1e21, 1e25)] == [
        "0",
        "12",
        "5.87 k",
        "5.87 G",
        "1 Z",
        "1e+04 Z",
    ]
    assert [rough_time(seconds) for seconds in (0.2, 59, 61, 3600, 7300, 1e6)] == [
        "1 s",
        "59 s",
        "2 min",
        "60 min",
        "2.0 h",
        "277.8 h",
    ]


# ------------------------------------------------------------------------------------------------ mistakes


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"grow": []}, r"needs one growth event, and this one has 0: write grow"),
        ({"grow": [Growth(10, 16), Growth(20, 32)]}, r"needs one growth event, and this one has 2"),
        ({"start": "somewhere"}, r"cannot start from a checkpoint \(from\)"),
        ({"grow": [Growth(10, 8)]}, r"the recipe's growth keeps the width at 8"),
    ],
)
def test_recipes_that_are_not_for_the_method(tmp_path: Path, changes: dict[str, Any], why: str) -> None:
    with pytest.raises(MupscaleError, match=why):
        run_quietly(tmp_path / "run", replace(small(), **changes))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"widths": []}, r"method\.widths needs at least one small width"),
        ({"widths": [4, 4]}, r"small widths must differ"),
        ({"widths": [0]}, r"the small width is 0, but widths are positive"),
        ({"widths": [{"width": 4}]}, r"must be of the same form as the recipe's width 8"),
        ({"sampler": "tpe"}, r"method\.sampler tpe needs method\.trials"),
        ({"sampler": "random", "trials": 0}, r"method\.sampler random needs method\.trials"),
        ({"seeds": 0}, r"method\.seeds is 0, but must be at least 1"),
        ({"sweep_seeds": 0}, r"method\.sweep_seeds is 0"),
        ({"upscaled_lrs": []}, r"needs at least one learning rate"),
        ({"lrs": [0.0]}, r"needs at least one learning rate, and all of them above 0"),
        ({"noises": [-1.0]}, r"-1\.0 is no noise level"),
        ({"pruner": "hatchet"}, r"method\.pruner: 'hatchet' is none of none, median, halving"),
        (
            {"baselines": ["scratch", "luck"]},
            r"method\.baselines: 'luck' is none of scratch, scratch-drop, continued, net2net",
        ),
    ],
)
def test_settings_that_cannot_be(tmp_path: Path, changes: dict[str, Any], why: str) -> None:
    with pytest.raises(MupscaleError, match=why):
        run_quietly(tmp_path / "run", small(), settings(**changes))
    assert not (tmp_path / "run").exists()


def test_small_widths_that_cannot_be_built(tmp_path: Path) -> None:
    gpt = small("gpt2-heads")
    with pytest.raises(MupscaleError, match="GPT2 of width 10 cannot have"):
        run_quietly(tmp_path / "run", gpt, settings(widths=[5]))
    own = small(model=Spec("test_protocol.OnlyFours"))
    with pytest.raises(MupscaleError, match=r"cannot be built at the small width 6 and at 12: ValueError: fours only"):
        run_quietly(tmp_path / "run", own, settings(widths=[6]))
    made = protocol(tmp_path, model=Spec("mupscale.models.GPT2", {}), width={"heads": 2}, base={"heads": 1},
                    init_at=None, growth={"width": {"heads": 4}})  # fmt: skip
    with pytest.raises(MupscaleError, match="does not name the same arguments"):
        made.check_small({"head_dim": 2})


def test_a_summary_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(MupscaleError, match="holds no finished run of the method"):
        Summary.load(tmp_path)
    (tmp_path / "summary.json").write_text("{")
    with pytest.raises(MupscaleError, match="is damaged"):
        Summary.load(tmp_path)
    (tmp_path / "summary.json").write_text("{}")
    with pytest.raises(MupscaleError, match="no summary written by mupscale run"):
        Summary.load(tmp_path)
