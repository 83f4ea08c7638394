"""When to grow: one trunk off which every arm branches, all at the same cost; what it says; the command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mupscale.cli import main
from mupscale.study import ContenderRuns, StudySummary, estimate_when, run_when
from mupscale.study.results import BudgetPoint
from mupscale.study.training import Ground
from mupscale.study.tree import list_stretches
from mupscale.study.when import PARTS, Arm, plan_when, rank_arms
from mupscale.system import MupscaleError
from mupscale.train import Growth, Recipe, Schedule, Spec, with_absent_data_replaced
from paper_runs import quiet, read, settings, small, written
from small_runs import metrics

LABELS = ["wide from scratch", "grown after 10%", "grown after 25%", "grown after 50%", "never grown"]
SETTINGS = settings(contenders=[])


def short(**changes: Any) -> Recipe:
    """A budget of some fifty narrow steps."""
    return small(**{"steps": 24, "growth": {"at": 10, "noise": 0.0}, "schedule": Schedule(warmup=2), **changes})


def plan(recipe: Recipe) -> tuple[Ground, list[Arm]]:
    ground = Ground(recipe)
    return ground, plan_when(recipe, SETTINGS, ground)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("when")
    run_when(short(), SETTINGS, folder, note=quiet)
    return folder


# ------------------------------------------------------------------------------------------------ the tree


def test_all_arms_cost_the_same_within_a_step() -> None:
    ground, arms = plan(short())
    budget = 10 * ground.cost_per_step(8) + 14 * ground.cost_per_step(16)
    assert [arm.label for arm in arms] == LABELS
    for arm in arms:
        for leaf in arm.leaves:
            spent = sum(ground.cost(stretch) for stretch in leaf.path)
            assert abs(spent - budget) <= ground.cost_per_step(arm.width) / 2, arm.label
            assert leaf.schedule.kind == "wsd"
            assert leaf.schedule.decay == leaf.steps


def test_arms_grow_off_one_trunk_after_their_part_of_the_budget() -> None:
    ground, arms = plan(short())
    for seed in range(2):
        trunks = [arm.leaves[seed].path for arm in arms[1:]]
        for length, path in enumerate(trunks[:-1], 1):
            assert [stretch.key for stretch in path[:length]] == [stretch.key for stretch in trunks[-1][:length]]
            before = sum(ground.cost(stretch) for stretch in path[:length])
            whole = sum(ground.cost(stretch) for stretch in path)
            assert before / whole == pytest.approx(PARTS[length - 1], abs=ground.cost_per_step(16) / whole)
            assert [stretch.width for stretch in path[length:]] == [16, 16]
            assert (path[length].is_grown, path[length].how) == (True, "fresh")
    every = list_stretches(leaf for arm in arms for leaf in arm.leaves)
    assert len(every) == 2 * (2 + 3 + 3 * 2 + 2)  # scratch; the trunk; three that grow; the last piece and its decay


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"grow": []}, "when to grow needs one growth event, but this recipe has 0"),
        ({"grow": [Growth(10, 8, how="copies")]}, "the recipe's growth event keeps the width at 8"),
        ({"start": "somewhere"}, r"cannot start from a checkpoint \(from\)"),
        ({"schedule": Schedule(warmup=9)}, "10% of the FLOPs are 5 steps of the narrow model, too few to grow after"),
        ({"growth": {"at": 1}, "steps": 3, "schedule": Schedule()}, "too few"),
    ],
)
def test_what_has_no_when_is_refused_in_a_sentence(changes: dict[str, Any], why: str, tmp_path: Path) -> None:
    with pytest.raises(MupscaleError, match=why):
        run_when(short(**changes), SETTINGS, tmp_path / "run", note=quiet)
    assert not (tmp_path / "run").exists()


# ------------------------------------------------------------------------------------------------ a run


def test_every_prefix_is_trained_once_and_losses_are_those_of_the_leaves(whole: Path) -> None:
    ground, arms = plan(short())
    every = list_stretches(leaf for arm in arms for leaf in arm.leaves)
    folders = {path.name for path in (whole / "stretches").iterdir()}
    assert folders == {ground.folder_name(stretch) for stretch in every}
    summary = read(whole)
    for arm, runs in zip(arms, summary.large.contenders, strict=True):
        (point,) = runs.points
        ends = [metrics(whole / "stretches" / ground.folder_name(leaf), "eval")[-1]["loss"] for leaf in arm.leaves]
        assert point.losses == ends
        assert (runs.shown, runs.width, runs.contender.name) == (arm.label, arm.width, arm.like)
    assert summary.sentences == [summary.answer["sentence"]]
    assert summary.answer["losses"] == {runs.shown: runs.points[0].losses for runs in summary.large.contenders}


def test_the_sentence_names_the_lowest_first_and_all_others(whole: Path) -> None:
    summary = read(whole)
    finals = {runs.shown: runs.final for runs in summary.large.contenders}
    order = sorted(finals, key=lambda label: finals[label] or 9.0)
    (sentence,) = summary.sentences
    assert sentence.lower().startswith(f"{order[0]} ends lowest, at {finals[order[0]]:.4g} (")
    assert [part.split(" ends ")[0] for part in sentence.split("; ")[1:]] == order[1:]


def test_a_dry_run_costs_what_is_spent_to_the_last_digit(whole: Path) -> None:
    ground, arms = plan(short())
    (stage,) = read(whole).stages
    assert stage.cost == sum(ground.cost(one) for one in list_stretches(leaf for arm in arms for leaf in arm.leaves))
    lines = estimate_when(short(), SETTINGS).splitlines()
    assert [line.split("  ")[0] for line in lines[:-2]] == [*LABELS, "together"]
    assert f" {stage.cost:.3g} FLOPs" in lines[-3]
    assert lines[-2].startswith("Times are estimates for this machine")
    assert " epochs over " in lines[-1]


FILES = {
    "mupscale.data.CoverType": ({"path": "absent.gz"}, (3, 54)),
    "mupscale.data.CIFAR100": ({"path": "absent.tar.gz"}, (3, 3, 32, 32)),
    "mupscale.data.Text": ({"tokens": "absent", "context": 16, "source": "absent.txt"}, (3, 16)),
}


@pytest.mark.parametrize("name", FILES)
def test_a_plan_needs_none_of_the_datas_files(name: str) -> None:
    arguments, shape = FILES[name]
    recipe, said = with_absent_data_replaced(short(data=Spec(name, arguments)))
    assert said == f"the files of {name} are not there, so random examples of the same shape stand in for this plan"
    data = recipe.make_data()
    assert data.batch(seed=0, start=0, count=3)[0].shape == shape
    assert bool(data.describe_epochs(10**9)) == (name != "mupscale.data.Text")  # whose length nobody knows


def test_data_that_is_there_is_the_plans_own() -> None:
    assert with_absent_data_replaced(short()) == (short(), "")


def test_a_dry_run_without_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = Spec("mupscale.models.MLP", {"d_in": 54, "d_out": 7})
    recipe = short(model=model, data=Spec("mupscale.data.CoverType", {"path": "absent.gz"}))
    file = written(tmp_path / "recipe.yaml", recipe, settings(seeds=1))
    assert main(["run", str(file), "--when", "--dry-run", "--out", str(tmp_path / "run")]) == 0
    said = capsys.readouterr().out
    assert said.startswith("Note: the files of mupscale.data.CoverType are not there")
    assert "\ntogether" in said


def ended(*losses: float | None) -> ContenderRuns:
    return ContenderRuns("fresh", 64, 0.1, 0.0, [BudgetPoint(1.0, 9, 9.0, [*losses])])


def test_negative_losses_are_compared_by_their_difference() -> None:
    said = rank_arms({"grown after 10%": ended(-1.0), "grown after 50%": ended(-0.5)})
    assert said == "Grown after 10% ends lowest, at -1; grown after 50% ends 0.5 higher."


def test_a_study_of_which_nothing_is_left_exits_as_a_run_that_diverged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = StudySummary("x", "x", "when", {}, {}, sentences=["Every model diverged."], diverged=True)
    monkeypatch.setattr("mupscale.report.write_report", lambda folders: folders[0])
    monkeypatch.setattr("mupscale.study.run_when", lambda *arguments, **named: summary)
    file = written(tmp_path / "recipe.yaml", short(), settings(seeds=1))
    assert main(["run", str(file), "--when", "--out", str(tmp_path / "run")]) == 3
    assert "Every model diverged." in capsys.readouterr().out


@pytest.mark.usefixtures("pictures_without_pixels")
@pytest.mark.slow
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, run = written(tmp_path / "recipe.yaml", short(), settings(seeds=1)), tmp_path / "run"
    assert main(["run", str(file), "--when", "--dry-run", "--out", str(run)]) == 0
    assert "\ntogether" in capsys.readouterr().out
    assert not run.exists()
    assert main(["run", str(file), "--when", "--paper", "--out", str(run)]) == 2
    assert capsys.readouterr().err == (
        "mupscale run: --forecast, --paper and --when exclude each other: give one of them\n"
    )
    assert main(["run", str(file), "--when", "--out", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "1/1 one trunk that grows after 10, 25 and 50 % of the FLOPs, 8 → 16"
    assert " ".join(lines).count(" ends lowest, at ") == 1
    assert lines[-1] == f"Report: {run / 'report' / 'index.html'}"
