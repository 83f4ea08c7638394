"""Losses and gradients that are not finite: a run stops, leaves the step out, or goes back; what it keeps is finite."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mupscale.data.stream import Batch
from mupscale.engine import train_many
from mupscale.system.errors import MupscaleError
from mupscale.train import Checkpoints, Growth, Recipe, Seeds, Spec, run_recipe
from refusals import refuses
from small_runs import Rows, assert_same_run, checkpoints, column, copies, metrics, recipe, step, tensors

BATCH = 8


class Poisoned(Rows):
    """Data with a batch that no optimizer survives at these positions of the stream of seed `of`.

    What is huge has a finite loss and a finite gradient, whose square is not finite.
    """

    def __init__(self, at: list[int], huge: bool = False, of: int = 0) -> None:
        super().__init__()
        self.at, self.factor, self.of = at, 1e25 if huge else float("nan"), of

    def batch(self, seed: int, start: int, count: int) -> Batch:
        x, y = super().batch(seed, start, count)
        bad = seed == self.of and start // BATCH in self.at
        return (x * self.factor if bad else x), y


def poisoned(out: Path | None, at: list[int], rule: str, **changes: Any) -> Recipe:
    init = {name: changes.pop(name) for name in ("huge", "of") if name in changes}
    data = Spec("test_nonfinite.Poisoned", {"at": at, **init})
    every = {"precision": "fp32", "checkpoints": Checkpoints(every=4), **changes}
    return recipe(out, data=data, batch=BATCH, on_nonfinite=rule, **every)


def are_finite(out: Path) -> bool:
    paths = [path for path in (out / "checkpoints").iterdir() if path.suffix == ".safetensors"]
    return bool(paths) and all(bool(t.isfinite().all()) for path in paths for t in tensors(path).values())


def test_a_checkpoint_is_kept_only_if_the_optimizer_s_state_is_finite(tmp_path: Path) -> None:
    result = run_recipe(poisoned(tmp_path / "run", [9], "stop", huge=True))
    assert result.status == "diverged"
    assert checkpoints(tmp_path / "run") == [step(4), step(8)]
    assert are_finite(tmp_path / "run")
    again = run_recipe(poisoned(tmp_path / "run", [9], "skip", huge=True), resume=True)
    assert again.status == "finished"


@pytest.mark.parametrize("huge", [False, True])
def test_a_step_that_is_left_out_changes_nothing(huge: bool, tmp_path: Path) -> None:
    out = tmp_path / "run"
    result = run_recipe(poisoned(out, [4], "skip", huge=huge, steps=5))
    before = run_recipe(poisoned(None, [], "stop", steps=4))
    assert (result.status, result.step) == ("finished", 5)
    assert column(out, "step", "skip") == [5]
    for ours, theirs in zip(result.model.parameters(), before.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert are_finite(out)


def test_going_back_leaves_the_data_out_and_can_be_resumed(tmp_path: Path) -> None:
    what = poisoned(tmp_path / "whole", [10], "rewind", precision="fp64", grow=[Growth(6, 16, noise=0.5)])
    assert run_recipe(what).status == "finished"
    (line,) = metrics(tmp_path / "whole", "rewind")
    assert (line["step"], line["from"], line["left_out"]) == (8, 11, 3)
    assert column(tmp_path / "whole", "step") == list(range(1, 21))
    assert are_finite(tmp_path / "whole")
    short = replace(what, out=str(tmp_path / "cut"), steps=14)
    run_recipe(short)
    for path in (tmp_path / "cut" / "checkpoints").iterdir():
        if path.name > step(12):
            path.unlink()  # killed after the checkpoint of step 12, which has left out three batches
    run_recipe(replace(short, steps=20), resume=True)
    assert_same_run(tmp_path / "cut", tmp_path / "whole")


def test_going_back_without_a_checkpoint_begins_again(tmp_path: Path) -> None:
    result = run_recipe(poisoned(None, [2, 3], "rewind"))
    assert (result.status, result.step) == ("finished", 20)


@pytest.mark.quick("skip")
@pytest.mark.parametrize("rule", ["skip", "rewind"])
def test_where_nothing_helps_it_has_diverged(rule: str, tmp_path: Path) -> None:
    result = run_recipe(poisoned(tmp_path / "run", list(range(5, 10_000)), rule, steps=40))
    assert result.status == "diverged"
    assert metrics(tmp_path / "run")[-1]["status"] == "diverged"
    assert are_finite(tmp_path / "run")


@pytest.mark.quick("True")
@pytest.mark.parametrize("huge", [False, True])
def test_in_a_stack_each_run_is_judged_by_itself(huge: bool, tmp_path: Path) -> None:
    def runs(rule: str, name: str) -> list[Recipe]:
        more: Any = {"huge": huge, "of": 1, "precision": "fp64" if not huge else "fp32"}
        return [poisoned(tmp_path / f"{name}{s}", [9], rule, seeds=Seeds(data=s), **more) for s in range(3)]

    stopped = train_many(runs("stop", "stop"), engine="vectorised")
    assert [outcome.status for outcome in stopped] == ["finished", "diverged", "finished"]
    together = train_many(runs("skip", "together"), engine="vectorised")
    apart = train_many(runs("skip", "apart"), engine="serial")
    assert [outcome.status for outcome in together] == ["finished"] * 3
    assert column(tmp_path / "together1", "step", "skip") == column(tmp_path / "apart1", "step", "skip") == [10]
    for one, other in zip(together, apart, strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-3 if huge else 1e-9)
    for first, other in ((together[0], stopped[0]), (together[2], stopped[2])):
        assert first.loss == pytest.approx(other.loss, rel=1e-3 if huge else 1e-9)


def test_a_run_of_a_stack_that_leaves_out_too_much(tmp_path: Path) -> None:
    data = {"of": 1}
    runs = [poisoned(None, list(range(5, 999)), "skip", seeds=Seeds(data=s), **data) for s in range(2)]
    assert [outcome.status for outcome in train_many(runs, engine="vectorised")] == ["finished", "diverged"]


def test_a_growth_that_fails_writes_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise MupscaleError("no memory for the wide model, say")

    monkeypatch.setattr("mupscale.train.training_run.grow_model", fail)
    refuses("no memory for the wide model", run_recipe, recipe(tmp_path / "run", grow=[copies(6, 16)]))
    end = metrics(tmp_path / "run")[-1]
    assert (end["kind"], end["status"], end["step"]) == ("end", "failed", 6)
    assert end["error"] == "no memory for the wide model, say"
