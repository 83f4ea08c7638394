"""A comparison from end to end: what it trains, what it says, kills, checkpoints of one's own, and bad input."""

from __future__ import annotations

import json
import re
import shutil
import signal
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from mupscale import checkpoint
from mupscale.cli import main
from mupscale.cli.studies import RUN, read_study
from mupscale.engine import read_outcome
from mupscale.engine.many_runs import StackRun
from mupscale.study import contender_named, run_pay
from mupscale.study.pay import PayStudy
from mupscale.system import MupscaleError
from mupscale.train import Growth, Recipe, Schedule, Spec, StoredRecipe, run_recipe
from paper_runs import compare_quietly, few, growing, histories, least, read, results, written
from slow_cases import with_slow

HOW = few(seeds=1)
BRIEF: dict[str, Any] = {"contenders": ["continued", "fresh"], "budgets": [1.0]}
"""Where two contenders tell enough."""


class Commanded(NamedTuple):
    """A comparison with one seed of the large models, run by the command: its folder, recipe, and what was printed."""

    folder: Path
    recipe: Recipe
    forecast: str
    whole: str


@pytest.fixture(scope="module")
def commanded(tmp_path_factory: pytest.TempPathFactory) -> Commanded:
    place = tmp_path_factory.mktemp("commanded")
    path, run, said = written(place / "recipe.yaml", growing(), HOW), place / "run", list[str]()
    for flags in (["--forecast"], []):
        with redirect_stdout(StringIO()) as output, pytest.MonkeyPatch.context() as patch:
            patch.setattr("mupscale.report.page.make_page", lambda *given: "")  # whose tests draw it
            assert main(["run", str(path), "--out", str(run), *flags]) == 0
        said.append(output.getvalue())
    recipe = read_study(RUN, [str(path)]).recipe
    return Commanded(run, recipe, *said)


@pytest.fixture
def own_copy(commanded: Commanded, tmp_path: Path) -> Path:
    """Its folder, to go on with."""
    return Path(shutil.copytree(commanded.folder, tmp_path / "run"))


def test_every_stage_says_how_far_the_whole_is(commanded: Commanded) -> None:
    """By cost; what was there already counts as done, with the time that it took."""
    for text in (commanded.forecast, commanded.whole):
        stages = [line for line in text.splitlines() if re.match(r"\d/\d ", line)]
        told = [re.search(r"\(about (\d+)% of all the training is done(, about .* left)?\)$", line) for line in stages]
        assert all((one[2] is None) == (int(one[1]) < 20) for one in told if one and one[1] != "20")
        shares = [int(one[1]) for one in told[1:] if one]
        assert len(shares) == len(stages) - 1 > 2
        assert shares == sorted(shares)
        assert 0 < shares[0] < shares[-1] < 100


def test_what_is_in_the_summary(commanded: Commanded) -> None:
    summary = read(commanded.folder)
    assert [one.name for one in summary.tuned] == ["base", "from-scratch", "continued", "copies", "fresh"]
    assert [len(one.trials) for one in summary.tuned] == [2, 2, 2, 2, 2]
    for system, narrow, seeds in ((summary.small[0], 4, 2), (summary.large, 8, 1)):
        assert (system.narrow, system.wide, system.unit) == (narrow, 2 * narrow, "FLOPs")
        assert [one.name for one in system.contenders] == ["from-scratch", "continued", "copies", "fresh"]
        for one in system.contenders:
            assert [point.budget for point in one.points] == [0.5, 1.0]
            assert all(len(point.losses) == seeds and None not in point.losses for point in one.points)
            chosen = next(tuned for tuned in summary.tuned if tuned.name == one.name)
            assert (one.lr, one.noise) == (chosen.lr, chosen.noise)
    own = PayStudy(commanded.recipe, HOW, commanded.folder, lambda text: None)
    before = read_outcome(own.ground.recipe_of(own.system.base_model(summary.base["lr"], 0), own.folder / "stretches"))
    assert before is not None
    assert summary.base["losses"] == [before.scores["loss"]]
    assert summary.answer["sentence"].endswith(".")
    assert {row["what"] for row in summary.forecast["held"]} >= {"lowest loss"}
    assert [stage.name for stage in summary.stages] == [
        "base-rates",
        "rates",
        "close",
        "forecast-4",
        "base",
        "contenders",
    ]
    assert all(stage.cost >= 0 for stage in summary.stages)


@pytest.mark.slow
def test_what_lies_far_behind_goes_no_further(tmp_path: Path) -> None:
    """Learning rates from far too small to right; stopped or not, the same ones are chosen."""
    rates = [2e-6, 2e-5, 0.02, 0.04]
    how = few(lrs=rates, small_seeds=1, contenders=["from-scratch", "continued", "fresh"])
    pruned, whole = (
        compare_quietly(tmp_path / str(prune), forecast_only=True, how=replace(how, prune=prune))
        for prune in (0.001, 0.0)
    )
    for ours, theirs in zip(pruned.tuned, whole.tuned, strict=True):
        assert (ours.lr, ours.noise) == (theirs.lr, theirs.noise)
        assert not any(cell.status == "stopped" for cell in theirs.trials)
    from_scratch = next(one for one in pruned.tuned if one.name == "from-scratch")
    assert [cell.lr for cell in from_scratch.trials if cell.status == "stopped"][:1] == rates[:1]
    runs = [path.name.split("-")[6] for path in (tmp_path / "0.001" / "stretches").glob("width-8-lr-2e-06-steps-*")]
    assert sorted(runs) == ["2", "2", "8"], "the first budget's constant phase and decay, and the grown model's decay"
    costs = [next(stage.cost for stage in one.stages if stage.name == "rates") for one in (pruned, whole)]
    assert costs[0] < costs[1]


def test_a_budget_is_what_one_run_with_its_schedule_gives(commanded: Commanded, tmp_path: Path) -> None:
    """The base model continued for the half budget: constant phase and branch are two recipes that anybody can run."""
    run = commanded.folder
    summary, own = read(run), PayStudy(commanded.recipe, HOW, run, lambda text: None)
    values = next(one for one in summary.tuned if one.name == "continued")
    leaf = own.system.leaves(contender_named("continued"), summary.base["lr"], values.lr, 0.0, 0)[0.5]
    folders = [run / "stretches" / own.ground.folder_name(stretch) for stretch in leaf.path[1:]]
    first, second = (StoredRecipe.read(folder / "recipe.json").load(["small_runs"]) for folder in folders)
    assert first.schedule == Schedule()
    assert second.schedule == Schedule("wsd", decay=second.steps)
    assert second.steps == (first.steps + second.steps) // 4
    run_recipe(replace(first, out=str(tmp_path / "first")))
    result = run_recipe(replace(second, out=str(tmp_path / "second"), start=str(tmp_path / "first")))
    continued = summary.large.get("continued")
    assert result.status == "finished"
    records = [json.loads(line) for line in (tmp_path / "second" / "metrics.jsonl").read_text().splitlines()]
    held_out = next(record["loss"] for record in reversed(records) if record["kind"] == "eval")
    assert held_out == pytest.approx(continued.points[0].losses[0], rel=1e-4)


def test_asked_to_stop_in_a_last_step_it_trains_no_further_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    finish = StackRun._finish

    def finish_and_terminate(run: StackRun) -> None:
        finish(run)
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(StackRun, "_finish", finish_and_terminate)
    path = written(tmp_path / "recipe.yaml", growing())
    assert main(["run", str(path), "--out", str(tmp_path / "run"), "--study.widths", "[4]"]) == 130
    said = capsys.readouterr()
    assert "1/6" in said.out
    assert "2/6" not in said.out
    assert said.err.endswith("run the same command again to continue where it stopped\n")


@pytest.mark.parametrize("called", with_slow(["run", "../there/run", "{}/run", "{}/link/run"], ["{}/link/run"]))
def test_its_folder_may_be_moved_and_called_by_any_path(
    commanded: Commanded, called: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, whole = tmp_path / "there", results(read(commanded.folder))
    run = Path(shutil.copytree(commanded.folder, there / "run"))
    (there / "link").symlink_to(there)
    monkeypatch.chdir(there)
    before = histories(run)
    assert results(compare_quietly(Path(called.format(there)), commanded.recipe, HOW)) == whole
    assert histories(run) == before
    stored = [file for file in run.glob("**/*") if file.suffix in (".json", ".jsonl", ".safetensors")]
    assert len(stored) > 50
    assert not [file for file in stored if str(commanded.folder.parent).encode() in file.read_bytes()]
    shutil.rmtree(next(run.glob("stretches/width-16-lr-*-seed-0-*")))
    assert results(compare_quietly(Path(called.format(there)), commanded.recipe, HOW)) == whole
    assert histories(run).keys() == before.keys()


def test_more_seeds_train_only_what_is_new(commanded: Commanded, own_copy: Path) -> None:
    before, kept = read(own_copy), histories(own_copy)
    after = compare_quietly(own_copy, commanded.recipe, few(seeds=2))
    assert kept.items() < histories(own_copy).items()
    for ours, theirs in zip(after.large.contenders, before.large.contenders, strict=True):
        for mine, old in zip(ours.points, theirs.points, strict=True):
            assert mine.losses[:1] == old.losses
            assert len(mine.losses) == 2


@pytest.mark.slow
def test_a_width_that_is_no_multiple_is_for_fresh_units_alone(tmp_path: Path) -> None:
    recipe = growing(grow=[Growth(at=9, width=12, how="fresh")])
    summary = compare_quietly(tmp_path / "run", recipe, least(budgets=[1.0]), forecast_only=True)
    assert [one.name for one in summary.small[0].contenders] == ["from-scratch", "continued", "fresh"]
    assert any("copies are left out" in note for note in summary.notes)


@pytest.mark.slow
def test_thin_lines_on_request_and_a_forecast_alone(tmp_path: Path) -> None:
    names = ["continued", "fresh", "copies-without-noise", "net2net", "naive-widening", "from-scratch"]
    names.append("from-scratch-all-steps")
    said = list[str]()
    how = least(contenders=names, budgets=[1.0])
    summary = run_pay(growing(), how, tmp_path / "run", note=said.append, forecast_only=True)
    assert summary.sentences[0] not in said  # the command says it, once
    assert summary.large is None
    assert not summary.answer
    assert not list((tmp_path / "run" / "stretches").glob("width-16-*"))
    (small,) = summary.small
    assert {one.name for one in small.contenders} == set(names)
    steps = {one.name: one.points[-1].steps for one in small.contenders}
    assert steps["from-scratch-all-steps"] == 25
    exact, continued = small.get("copies-without-noise"), small.get("continued")
    assert exact.points[-1].cost == pytest.approx(continued.points[-1].cost, rel=0.05)


@pytest.mark.slow
def test_copies_without_noise_are_the_base_model_continued_for_fewer_steps(tmp_path: Path) -> None:
    """With costs in steps both have equally many, and are the same function."""
    names = ["continued", "copies-without-noise", "fresh"]
    recipe = growing(model=Spec("paper_runs.Uncounted"), precision="fp64")
    how = least(contenders=names, budgets=[1.0])
    summary = compare_quietly(tmp_path / "run", recipe, how, forecast_only=True)
    (small,) = summary.small
    assert small.unit == "steps"
    assert any("FLOPs cannot be counted, so costs are steps" in note for note in summary.notes)
    exact, continued = small.get("copies-without-noise"), small.get("continued")
    for ours, theirs in zip(exact.points, continued.points, strict=True):
        assert ours.steps == theirs.steps
        assert ours.losses == pytest.approx(theirs.losses, rel=1e-10)


# ------------------------------------------------------------------------------------------------ from a checkpoint


@pytest.fixture(scope="module")
def base_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the user's own."""
    folder = tmp_path_factory.mktemp("own") / "base"
    run_recipe(growing(steps=9, grow=[], out=str(folder)))
    return folder


def from_checkpoint(path: Path, **changes: Any) -> Recipe:
    return growing(**{"width": 16, "grow": [], "steps": 16, "start": str(path), **changes})


@pytest.mark.slow
def test_from_a_run_folder(base_run: Path, tmp_path: Path) -> None:
    summary = compare_quietly(tmp_path / "run", from_checkpoint(base_run), least())
    assert summary.base["steps"] == 9
    assert summary.base["from"] == str(base_run)
    assert (summary.large.narrow, summary.large.wide) == (8, 16)
    assert summary.large.base_cost is not None
    assert not list((tmp_path / "run" / "stretches").glob("width-8-lr-*-steps-9-*")), "a base model was trained"
    assert summary.notes == [note for note in summary.notes if "optimizer state" not in note]


@pytest.mark.slow
def test_from_a_checkpoint_of_ones_own_loop(base_run: Path, tmp_path: Path) -> None:
    """mu.save without a run: the width and the steps are asked for, one sentence each."""
    recipe = from_checkpoint(tmp_path / "mine.safetensors")
    family = recipe.family()
    model = family.init(8)
    optimizer = family.optimizer(model, torch.optim.AdamW, lr=0.02)
    x = torch.randn(4, 6)
    model(x).sum().backward()
    optimizer.step()
    checkpoint.save(tmp_path / "mine.safetensors", model, optimizer)
    with pytest.raises(MupscaleError, match="give from_width"):
        compare_quietly(tmp_path / "run", recipe)
    recipe, how = replace(recipe, start_width=8), least(base_steps=9, **BRIEF)
    with pytest.raises(MupscaleError, match=r"how many steps its model has trained.*StudySettings\.base_steps"):
        compare_quietly(tmp_path / "run", recipe)
    summary = compare_quietly(tmp_path / "other", recipe, how)
    assert summary.large.base_cost is not None
    assert not any("optimizer state" in note for note in summary.notes)
    (tmp_path / "other").rename(tmp_path / "moved")  # away from the checkpoint, which lies elsewhere by now
    before = histories(tmp_path / "moved")
    (tmp_path / "mine.safetensors").rename(tmp_path / "yours.safetensors")
    again = replace(recipe, start=str(tmp_path / "yours.safetensors"))
    assert compare_quietly(tmp_path / "moved", again, how).large == summary.large
    assert histories(tmp_path / "moved") == before
    (tmp_path / "yours.safetensors").rename(tmp_path / "mine.safetensors")
    (tmp_path / "moved").rename(tmp_path / "other")
    checkpoint.save(tmp_path / "mine.safetensors", model)
    bare = compare_quietly(tmp_path / "other", recipe, how)
    assert any("holds no optimizer state" in note for note in bare.notes)
    assert results(bare)["large"] != results(summary)["large"], "another checkpoint was taken for the first"


def test_a_decayed_checkpoint_is_said_to_be(tmp_path: Path) -> None:
    folder = tmp_path / "base"
    run_recipe(growing(steps=9, grow=[], out=str(folder), schedule=Schedule("cosine")))
    study = PayStudy(from_checkpoint(folder), least(), tmp_path / "run", lambda text: None)
    assert any("has fallen already" in note for note in study.notes)


# ------------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("changes", "settings", "message"),
    [
        ({"grow": []}, {}, "a comparison needs one growth event, but this recipe has 0"),
        ({"grow": [Growth(at=9, width=8, how="copies")]}, {}, "keeps the width at 8"),
        ({"steps": 12}, {}, "a budget of 0.5 is .* steps, too few"),
        ({}, {"widths": [{"d": 4}]}, "must be of the same form"),
        ({}, {"lrs": [1e20]}, "all 1 trials at the small width diverged"),
        ({"width": 1, "grow": [Growth(at=9, width=2)]}, {"widths": []}, "no small width to tune at was found"),
        (
            {"width": 64, "grow": [Growth(at=9, width=100, how="fresh")]},
            {"widths": [8]},
            r"small model of width 8 .* from 64 to 100, and a width of 12.5 is not a whole number of units: "
            "give other small widths",
        ),
    ],
)
def test_what_cannot_be_compared_is_one_sentence(
    changes: dict[str, Any], settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(MupscaleError, match=message):
        compare_quietly(tmp_path / "run", growing(**changes), few(**settings))


def test_a_base_model_wider_than_the_target_is_refused(base_run: Path, tmp_path: Path) -> None:
    for width in (8, 4):
        with pytest.raises(MupscaleError, match=rf"holds a model of width 8, and the width to grow to is {width}"):
            compare_quietly(tmp_path / "run", from_checkpoint(base_run, width=width))


def test_a_checkpoint_of_another_model_is_refused(base_run: Path, tmp_path: Path) -> None:
    with pytest.raises(MupscaleError, match="the checkpoint belongs to another model"):
        compare_quietly(tmp_path / "run", from_checkpoint(base_run, model=Spec("small_runs.Dropping")))
    assert not (tmp_path / "run").exists(), "refused after it had trained small models"


# ------------------------------------------------------------------------------------------------ the command


def test_the_command_says_the_sentence_and_where_the_page_is(commanded: Commanded) -> None:
    assert "4/4 the contenders small, 4 → 8: the forecast" in commanded.forecast
    assert commanded.forecast.count("Forecast from width 4:") >= 1
    assert "Growing does not beat the best size" in commanded.forecast
    assert commanded.forecast.count("are tuned at width 4") == 1
    assert "6/6 the contenders, 8 → 16" in commanded.whole
    assert read(commanded.folder).answer["sentence"] in commanded.whole
    assert commanded.whole.strip().splitlines()[-1] == f"Report: {commanded.folder / 'report' / 'index.html'}"


def test_a_dry_run_prints_a_table_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, run = written(tmp_path / "recipe.yaml", growing(), least()), tmp_path / "run"
    assert main(["run", str(path), "--out", str(run), "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition("  ")[0] for line in lines[:4]] == [
        "tuning, 4 → 8",
        "forecast, 4 → 8",
        "large, 8 → 16",
        "together",
    ]
    assert lines[3].split()[-1] in ("s", "min"), "about how long it takes"
    assert lines[4].startswith("Times are estimates for this machine")
    said = "\n".join(lines[5:])
    assert "Steps at the full budget, 8 → 16: from scratch " in said
    assert "Tuning costs less if candidates stop early: those that are 10 % behind after 0.5 of" in said
    assert main(["run", str(path), "--out", str(run), "--dry-run", "--forecast"]) == 0
    assert [line.partition("  ")[0] for line in capsys.readouterr().out.splitlines()[:3]] == [
        "tuning, 4 → 8",
        "forecast, 4 → 8",
        "together",
    ]
    assert not run.exists()
