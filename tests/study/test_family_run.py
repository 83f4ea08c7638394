"""One run, every size: what is charged to whom, what is trained once, finished models, kills, checks, the command."""

from __future__ import annotations

import html
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from commands import refused, told
from mupscale.cli import main
from mupscale.core import Width
from mupscale.growth import Copies
from mupscale.study import FamilySettings, StudySettings, StudySummary, estimate_family, run_family
from mupscale.study.family_run import Check, describe_disorder, list_sizes, make_planner, write_family_sentence
from mupscale.study.space import Sweep, Tried
from mupscale.study.tree import Stretch, list_stretches
from mupscale.system import MupscaleError, words
from mupscale.train import Growth, Recipe, Schedule, Spec, find_checkpoint, read_snapshot, run_recipe, values_in
from paper_runs import Sitting, count_whole, histories, quiet, read, results, written
from processes import DEADLINE, run_in_processes
from small_runs import KINDS, die_at, metrics, recipe

SIZES = [4, 6, 8]
ANY: dict[str, Any] = {"width": 4, "steps": 1, "lr": 0.1}


def small(**changes: Any) -> Recipe:
    return recipe(**{"width": 4, "base": 4, "init_at": 4, "steps": 40, "schedule": Schedule(warmup=2), **changes})


def settings(**changes: Any) -> FamilySettings:
    return FamilySettings(**{"sizes": SIZES, "check": [6], "check_lrs": [0.01, 0.02], "seeds": 2, **changes})


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    return count_whole(tmp_path_factory.mktemp("family"), small(), settings(), run_family)


# ------------------------------------------------------------------------------------------------ what is planned


@pytest.mark.parametrize("unit", ["steps", "tokens", "flops", "tokens_per_parameter"])
def test_every_size_spends_its_own_budget_with_the_trunk_charged(unit: str) -> None:
    numbers: dict[str, Any] = {"steps": 200.0, "tokens": 1600.0, "flops": [1e6, 2e6, 4e6], "tokens_per_parameter": 20.0}
    planner = make_planner(small(), settings(budget=numbers[unit], unit=unit))
    planned = planner.plan(SIZES, 0.01, 0.9, 0)
    for number, one in enumerate(planned):
        each = planner.ground.cost_per_step(one.size)
        charged = math.fsum(planner.ground.cost(stretch) for stretch in one.leaf.path)
        assert charged == one.spent == pytest.approx(one.budget, abs=1.01 * each)
        assert planner.ground.cost(one.leaf) == pytest.approx(0.25 * one.budget, abs=each)
        assert one.leaf.lr == one.trunk.lr == 0.01 * 0.9**number
        assert [stretch.width for stretch in one.trunk.path] == SIZES[: number + 1]
        assert {stretch.how for stretch in one.trunk.path[1:]} <= {"fresh"}
    together, alone = planner.costs(planned)
    assert together == math.fsum(planner.ground.cost(s) for s in list_stretches(one.leaf for one in planned))
    assert alone == math.fsum(one.budget for one in planned)
    assert len({stretch.order for stretch in list_stretches([planned[-1].leaf])}) == 4, "batches seen twice"


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
@pytest.mark.parametrize("ends", [0.5, 0.75, 1.0])
def test_the_trunk_may_grow_before_or_after_the_branch_leaves(ends: float, schedule: str) -> None:
    planner = make_planner(small(), settings(budget=200, ends=ends, schedule=schedule))
    planned = planner.plan(SIZES, 0.01, 1.0, 0)
    for one in planned:
        each = planner.ground.cost_per_step(one.size)
        spent, trunk = (math.fsum(map(planner.ground.cost, end.path)) for end in (one.leaf, one.trunk))
        assert spent == one.spent == pytest.approx(one.budget, abs=1.01 * each)
        if one is not planned[-1]:
            assert trunk == pytest.approx(ends * one.budget, abs=each)
        assert len({stretch.order for stretch in one.leaf.path}) == len(one.leaf.path)
    trunk_line = [*planned[-1].trunk.path, *planned[-1].leaf.path[len(planned[-1].trunk.path) :]]
    steps = sum(one.steps for one in trunk_line)
    rates = [one.lr * one.schedule.at(step, one.steps) for one in trunk_line for step in range(one.steps)]
    if schedule == "cosine":
        assert rates == [0.01 * Schedule("cosine", 2).at(step, steps) for step in range(steps)]
        first = planned[0].leaf
        assert first.lr == pytest.approx(rates[sum(one.steps for one in planned[0].branch[0].path)])
    else:
        assert rates[2 : -planned[-1].leaf.steps] == [0.01] * (steps - planned[-1].leaf.steps - 2)


def test_a_family_grows_by_every_setting_of_a_growth_event() -> None:
    """Through its stretches to their recipes; a branch that goes on has none of them."""
    given: list[dict[str, Any]] = [
        {"how": "fresh", "outgoing": 0.25},
        {"how": "copies", "noise": 0.5, "state": "reset"},
    ]
    for asked in given:
        planner = make_planner(small(), FamilySettings(sizes=[4, 8], **asked))
        grown = planner.plan([4, 8], 0.01, 1.0, 0)[1].trunk
        made = planner.ground.recipe_of(grown, Path())
        assert {name: getattr(made, name) for name in asked} == asked
        assert (grown.then(steps=1).build_operator(), grown.then(steps=1).state) == (Copies(0.0), "keep")


def test_a_size_whose_budget_is_spent_is_refused_with_the_nearest_that_works() -> None:
    with pytest.raises(MupscaleError, match=r"size 8 may spend .* give it a budget of at least [\d,]+ steps") as error:
        make_planner(small(), settings(budget=[100, 100, 30])).plan(SIZES, 0.01, 1.0, 0)
    found = re.search(r"at least ([\d,]+) steps", str(error.value))
    least = int(found[1].replace(",", ""))
    make_planner(small(), settings(budget=[100, 100, least])).plan(SIZES, 0.01, 1.0, 0)
    with pytest.raises(MupscaleError):
        make_planner(small(), settings(budget=[100, 100, least - 2])).plan(SIZES, 0.01, 1.0, 0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"sizes": [8]}, "needs two sizes or more"),
        ({"sizes": [8, 4]}, "rise"),
        ({"sizes": [4, 4]}, "4 twice"),
        ({"budget": [1.0]}, "1 values for 3 sizes"),
        ({"budget": -1.0}, "above 0"),
        ({"check": [5]}, "5, which is not one of the sizes"),
        ({"decay": 1.0}, "between 0 and 1"),
        ({"fall": 1.5}, "at most 1"),
        ({"ends": 0.0}, "FamilySettings.ends is 0.0"),
        ({"noise": 0.5}, "how: fresh takes no noise"),
        ({"how": "copies"}, "how is copies, and"),
    ],
)
def test_what_cannot_be_is_one_sentence(given: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(MupscaleError, match=message):
        run_family(small(), FamilySettings(**{"sizes": SIZES, **given}), tmp_path / "run", note=quiet)
    assert not (tmp_path / "run").exists()


# ------------------------------------------------------------------------------------------------ what is trained


def test_the_dry_run_costs_what_is_spent_to_the_last_digit(whole: tuple[Path, int]) -> None:
    summary = read(whole[0])
    planner = make_planner(small(), settings())
    trees = [planner.plan(SIZES, 0.02, 1.0, seed) for seed in range(2)]
    trained = list_stretches(one.leaf for tree in trees for one in tree)
    checks = list_stretches(
        planner.scratch(tree[1], lr, seed) for lr in (0.01, 0.02) for seed, tree in enumerate(trees)
    )
    spent = {stage.name: stage.cost for stage in summary.stages}
    assert spent["family"] == math.fsum(map(planner.ground.cost, trained))
    assert spent["checks"] == math.fsum(map(planner.ground.cost, checks))
    together, _ = planner.costs(trees[0])
    assert spent["family"] == 2 * together, "two seeds"
    folders = [planner.ground.folder_name(stretch) for stretch in trained]
    runs = [metrics(whole[0] / "stretches" / name, "end")[-1]["flops"] for name in folders]
    assert math.fsum(runs) == spent["family"], "what the runs have counted, step by step"
    shown = estimate_family(small(), settings())
    assert words.format_flops(together) in shown
    assert "All of it takes about " in shown
    added = [row[4] for row in list_sizes(planner, trees[0])[1]]
    assert added[0] == words.format_flops(trees[0][0].spent)
    assert all(one in shown for one in added)
    assert len(list((whole[0] / "stretches").iterdir())) == len(trained) + len(checks)


def test_a_size_tells_what_all_its_way_has_cost(whole: tuple[Path, int]) -> None:
    folder = whole[0] / "sizes" / str(SIZES[-1])
    told, branch = json.loads((folder / "size.json").read_text()), metrics(folder, "end")[-1]
    planned = make_planner(small(), settings()).plan(SIZES, 0.02, 1.0, 0)[-1]
    assert told["steps"] == sum(one.steps for one in planned.leaf.path) > branch["step"]
    assert told["flops"] == planned.spent > branch["flops"]


def test_a_check_is_the_best_rate_from_scratch_with_the_range_over_seeds() -> None:
    search, leaf = Sweep("64 from scratch", [Tried(0.1, 0.0, [1.1, 1.2]), Tried(0.2, 0.0, [1.0, 1.0])]), Stretch(**ANY)
    check = Check(search, [0.99, 1.0], [leaf])
    assert write_family_sentence("Four sizes", {"64": check}) == (
        "Four sizes; checked at 64: 0.5 % lower (-1 to 0 %) than from scratch."
    )
    alone = Check(Sweep("64 from scratch", [Tried(0.01, 0.0, [1.0])]), [0.99], [leaf])
    assert alone.difference == "1 % lower (one seed: no range)"


def test_a_check_of_negative_losses_tells_the_difference() -> None:
    leaf = Stretch(**ANY)
    check = Check(Sweep("64 from scratch", [Tried(0.1, 0.0, [-1.0, 0.0])]), [-0.75, 0.5], [leaf])
    assert check.difference == "0.38 higher (+0.25 to +0.5)"


@pytest.mark.usefixtures("pictures_without_pixels")
def test_a_family_of_which_nothing_is_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No headline about what it saved, and another exit status than that of an answer."""
    exploding = Spec("torch.optim.AdamW", {"lr": 1e30, "weight_decay": 1.0})
    file = written(tmp_path / "recipe.yaml", small(optimizer=exploding, steps=20))
    run = tmp_path / "run"
    assert main(["family", str(file), "--sizes", "4,6", "--out", str(run)]) == 3
    said = capsys.readouterr().out
    assert "Every size diverged, so there is no family: give a smaller learning rate" in " ".join(said.split())
    page = html.unescape((run / "report" / "index.html").read_text())
    assert "Every size diverged" in page
    assert "of the FLOPs of training each" not in page


def test_a_size_that_diverged_is_in_the_sentence() -> None:
    assert write_family_sentence("Two sizes", {}, ["size 6 diverged"]) == "Two sizes; size 6 diverged."


def test_a_finished_size_trains_on_as_any_run_does(whole: tuple[Path, int], tmp_path: Path) -> None:
    folder = shutil.copytree(whole[0], tmp_path / "run") / "sizes" / str(SIZES[-1])
    steps = metrics(folder, "eval")[-1]["step"]
    assert main(["resume", str(folder), "--steps", str(steps + 2), "--trust", "small_runs", "-q"]) == 0
    assert metrics(folder, "eval")[-1]["step"] == steps + 2


@pytest.mark.slow
def test_what_another_family_left_under_a_size_stays_beside_it(whole: tuple[Path, int], tmp_path: Path) -> None:
    run = shutil.copytree(whole[0], tmp_path / "run")
    (run / "sizes" / str(SIZES[0]) / "notes.txt").write_text("mine")
    run_family(small(), replace(settings(), seeds=1), run, note=lambda text: None)
    assert (run / "sizes" / str(SIZES[0]) / "notes.txt").read_text() == "mine"
    recipe = replace(small(), steps=small().steps + 40)
    run_family(recipe, replace(settings(), seeds=1, check=[]), run, note=lambda text: None)
    assert (run / "sizes" / f"{SIZES[0]}-before-1" / "notes.txt").read_text() == "mine"
    assert (run / "sizes" / f"{SIZES[0]}-seed-1").exists()


def test_every_size_is_an_ordinary_finished_run_at_the_loss_that_is_told(whole: tuple[Path, int]) -> None:
    summary = read(whole[0])
    for size in SIZES:
        runs = summary.large.get(f"size-{size}")
        for seed in range(2):
            folder = whole[0] / "sizes" / (f"{size}-seed-1" if seed else str(size))
            assert metrics(folder, "eval")[-1]["loss"] == runs.points[-1].losses[seed]
            state = read_snapshot(find_checkpoint(str(folder))).run
            assert state.width == size
    assert summary.sentences[0].startswith("Three sizes for 0.")
    assert "checked at 6: " in summary.sentences[0]
    tried = summary.tables[1]
    assert f"{tried.title}\n" in str(summary)
    assert tried.head == ["size", "at 0.01", "at 0.02"]
    assert tried.rows == [["6", *map(words.format_spread, summary.answer["checks"]["6"]["tried"].values())]]


def test_killed_anywhere_it_ends_the_same(whole: tuple[Path, int], tmp_path: Path) -> None:
    (folder, count), run = whole, tmp_path / "run"
    for part in (0.15, 0.4):
        prepare = partial(die_at, str(run), round(part * count))
        child = Sitting(run, small(), settings(), tmp_path / "log", prepare, run=run_family)
        assert child.wait() == -signal.SIGKILL
    child = Sitting(run, small(), settings(), tmp_path / "log", run=run_family)
    assert child.wait() == 0, (tmp_path / "log").read_text()
    assert results(read(run)) == results(read(folder))
    found, expected = (sorted((one / "sizes").iterdir()) for one in (run, folder))
    assert len(found) == len(expected) == 6
    for ours, theirs in zip(found, expected, strict=True):
        ended, whole = (read_snapshot(find_checkpoint(str(one))).content for one in (ours, theirs))
        assert ended.model.keys() == whole.model.keys()
        assert all(torch.equal(ended.model[name], whole.model[name]) for name in whole.model)
    assert not list(run.rglob(".*partial-*")), "a folder that is half written"


def test_one_more_size_trains_only_what_is_new(tmp_path: Path) -> None:
    run = tmp_path / "run"
    there: list[list[str]] = []

    def note(text: str) -> None:
        if "is finished" in text:
            there.append(sorted(path.name for path in (run / "sizes").iterdir() if not path.name.startswith(".")))

    first = run_family(small(), FamilySettings(sizes=[4, 6]), run, note=note)
    assert there == [["4"], ["4", "6"]], "a size is there while the trunk goes on"
    kept = histories(run)
    more = run_family(small(), FamilySettings(sizes=[4, 6, 8]), run, note=quiet)
    assert kept.items() <= histories(run).items()
    assert losses(more)[:2] == losses(first)
    assert len(losses(more)) == 3
    other = run_family(small(), FamilySettings(sizes=[4, 6], fall=0.5), run, note=quiet)
    assert losses(other)[1] != losses(first)[1]
    assert metrics(run / "sizes" / "6", "eval")[-1]["loss"] == losses(other)[1][0], "the first family's model"
    assert values_in(json.loads((run / "sizes" / "6" / "recipe.json").read_text()), run / "sizes" / "6")["from"] in {
        str(path.resolve()) for path in (run / "stretches").iterdir()
    }


def losses(summary: StudySummary) -> list[Any]:
    return [one.points[-1].losses for one in summary.large.contenders if one.name.startswith("size-")]


def test_rate_and_fall_are_tuned_on_the_two_smallest_sizes(tmp_path: Path) -> None:
    said = list[str]()
    asked, note = FamilySettings(sizes=[4, 6], tune=True, lrs=[1e-5, 0.01]), said.append
    chosen = run_family(small(), asked, tmp_path / "run", note=note)
    assert chosen.answer["lr"] == 0.01
    assert sum("is finished (the tuning stage trained it): loss" in line for line in said) == 2
    assert "set FamilySettings.lrs to [1e-05, 0.01, 10, 1e+04]" in chosen.notes[0]
    assert chosen.answer["fall"] in (0.7, 0.85, 1.0)
    (search,) = chosen.tuned
    assert len(search.trials) == 6
    assert " (without the tuning)" in chosen.sentences[0]
    assert re.fullmatch(r"tuning took [1-9]\S*× the family's FLOPs more", chosen.cards[0].more)
    assert [stage.label for stage in chosen.stages][1:] == ["One trunk, every size: what tuning has not trained"]
    assert chosen.stages[1].cost == 0, "both sizes were trained in the tuning"
    best = min(search.trials, key=lambda one: one.loss or math.inf)
    assert (best.lr, best.noise) == (search.lr, search.noise) == (chosen.answer["lr"], chosen.answer["fall"])
    said.clear()
    worse = run_family(small(), replace(asked, lrs=[1e-5]), tmp_path / "run", note=note)
    for number, (size, (before,), (after,)) in enumerate(zip([4, 6], losses(chosen), losses(worse), strict=True)):
        told = f"{size}-before-1 now. It ended at a held-out loss of {before:.4f}, the new one at {after:.4f}"
        assert sum(told in line for line in said) == 1
        assert worse.notes[number].endswith(f"{told}: the new one is worse")


def test_from_a_trained_model_whose_flops_are_charged_or_sunk(tmp_path: Path) -> None:
    run_recipe(small(steps=12, out=str(tmp_path / "base")))
    given = small(start=str(tmp_path / "base"))
    charged, sunk = (make_planner(given, FamilySettings(sizes=[6, 8], sunk=flag)) for flag in (False, True))
    assert charged.base_cost == 12 * charged.ground.cost_per_step(4)
    assert sunk.base_cost == 0
    less, more = (one.plan([6, 8], 0.01, 1.0, 0)[0] for one in (charged, sunk))
    assert less.trunk.steps < more.trunk.steps
    summary = run_family(given, FamilySettings(sizes=[6, 8]), tmp_path / "run", note=quiet)
    assert all(loss is not None for some in losses(summary) for loss in some)


def test_sizes_in_width_and_depth(tmp_path: Path) -> None:
    sizes: list[Any] = [{"width": 4, "layers": 1}, {"width": 8, "layers": 2}]
    gpt = KINDS["gpt2-heads"]
    model = replace(gpt["model"], init_args={k: v for k, v in gpt["model"].init_args.items() if k != "layers"})
    deep = small(model=model, data=gpt["data"], width=sizes[0], base=sizes[0], init_at=None)
    summary = run_family(deep, FamilySettings(sizes=sizes, budget=12), tmp_path / "run", note=quiet)
    assert Width.of(summary.large.wide) == Width.of(sizes[1])
    assert all(loss is not None for some in losses(summary) for loss in some)


@pytest.mark.usefixtures("pictures_without_pixels")
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path / "recipe.yaml", small())
    given = ["family", str(file), "--sizes", "4,6", "--out", str(tmp_path / "run")]
    said = told(capsys, [*given, "--dry-run", "--check", "none"])
    assert "Two sizes for 0." in said
    assert "checks from scratch" not in said
    assert "(grow)" not in said
    assert not (tmp_path / "run").exists()
    said = told(capsys, [*given, "--check", "all"])
    assert "size 6 is finished" in said
    assert said.strip().splitlines()[-1] == f"Report: {tmp_path / 'run' / 'report' / 'index.html'}"
    assert shlex.join(["mupscale", *given, "--check", "all"]) in refused(capsys, ["resume", str(tmp_path / "run")], 2)
    page = html.unescape((tmp_path / "run" / "report" / "index.html").read_text())
    again = tmp_path / "again.yaml"
    again.write_text("model:" + page.partition("<pre>model:")[2].partition("</pre>")[0])
    assert "Two sizes for 0." in told(capsys, ["family", str(again), "--dry-run"])
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert sorted(summary["answer"]["checks"]) == ["4", "6"]
    assert "give widths, such as 32,48,64" in refused(capsys, ["family", str(file), "--sizes", "4;6"], 2)
    (tmp_path / "more.yaml").write_text("grow: [{at: 9, width: 8}]\nnoise: 1\nhow: null\nstate: keep\n")
    said = told(capsys, [*given, str(tmp_path / "more.yaml"), "--dry-run", "--outgoing", "0.5"])
    assert said.startswith("Note: a family does not use these entries of the recipe: noise, grow. The trunk grows")


def test_a_model_that_cannot_take_the_data_is_refused_by_a_dry_run() -> None:
    """And not as one whose FLOPs cannot be counted; a dry run that shows a plan would promise a run."""
    wrong = Spec("mupscale.models.MLP", {"d_in": 11, "d_out": 7})
    with pytest.raises(MupscaleError, match=r"MLP at width 4 cannot take the data's .*set its number of inputs"):
        estimate_family(small(model=wrong), settings())


def hidden_model(hidden: int, classes: int = 3) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(6, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, classes))


def test_numbers_are_sizes_of_the_one_argument_that_the_width_names() -> None:
    own = Spec("test_family_run.hidden_model")
    grown = [Growth(at=10, width=8), Growth(at=20, width={"hidden": 12})]
    made = small(model=own, width={"hidden": 4}, init_at=6, grow=grown)
    assert (made.base, made.init_at) == ({"hidden": 4}, {"hidden": 6})
    assert [growth.width for growth in made.grow] == [{"hidden": 8}, {"hidden": 12}]
    planner = make_planner(made, settings())
    assert planner.settings.sizes == [{"hidden": 4}, {"hidden": 6}, {"hidden": 8}]
    assert planner.settings.check == [{"hidden": 6}]
    assert StudySettings(widths=[2]).small_widths(made.width, made.grow[0].width) == [{"hidden": 2}]
    deep = small(width={"width": 4, "layers": 2})
    assert (deep.base, deep.init_at) == ({"width": 4, "layers": 2}, {"width": 4, "layers": 2})
    with pytest.raises(MupscaleError, match=r"FamilySettings.sizes {'d': 4} does not name the same .* {'hidden': 4}"):
        make_planner(made, settings(sizes=[{"d": 4}, {"d": 6}], check=[]))
    with pytest.raises(
        MupscaleError, match=r"no argument called width; it has hidden, classes\. .* width: {hidden: 4}\."
    ):
        make_planner(small(model=own), settings())


def test_a_larger_size_that_ends_above_a_smaller_one_is_said() -> None:
    said = describe_disorder({"4": [1.0, 1.2], "6": [None, 9.0], "8": [1.4, 1.2], "10": [1.2, 1.2], "12": [1.0, 1.0]})
    assert [each.partition(":")[0] for each in said] == [
        "size 8 ended above size 4 (1.300 against 1.100)",
        "size 10 ended above size 4 (1.200 against 1.100)",
    ]
    assert all("another learning rate (family.tune)" in each for each in said)
    (tuned,) = describe_disorder({"4": [1.0], "8": [1.4]}, tuned=True)
    assert tuned.endswith("it may need a larger budget (family.budget), or more data")


# ------------------------------------------------------------------------------------------------ in two processes

TWO_SIZES = FamilySettings(sizes=[4, 6], budget=8)


def brief(**changes: Any) -> Recipe:
    return small(**{"steps": 8, "schedule": Schedule(warmup=1), **changes})


def first_seed(summary: StudySummary) -> list[Any]:
    return [point.losses[0] for one in summary.large.contenders for point in one.points]


def train_together(rank: int, folder: Path) -> None:
    """As one of two processes, once with a whole model in each and once with shards."""
    torch.set_num_threads(1)
    place, timeout = f"file://{folder / 'rendezvous'}", timedelta(seconds=DEADLINE)
    dist.init_process_group("gloo", init_method=place, rank=rank, world_size=2, timeout=timeout)
    for mode in ("ddp", "fsdp"):
        summary = run_family(brief(parallel=mode), TWO_SIZES, folder / mode, note=print)
        (folder / f"{mode}-{rank}.json").write_text(json.dumps(first_seed(summary)))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not (dist.is_available() and dist.is_gloo_available()):
        pytest.skip("torch.distributed with gloo is not available")
    folder = tmp_path_factory.mktemp("together")
    run_in_processes(train_together, (folder,), 2)
    run_family(brief(), TWO_SIZES, folder / "alone", note=quiet)
    return folder


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_two_processes_end_where_one_ends(ended: Path, mode: str) -> None:
    alone = first_seed(read(ended / "alone"))
    assert first_seed(read(ended / mode)) == pytest.approx(alone, rel=1e-10)
    for rank in range(2):
        assert json.loads((ended / f"{mode}-{rank}.json").read_text()) == first_seed(read(ended / mode))
    for size in ("4", "6"):
        assert find_checkpoint(str(ended / mode / "sizes" / size)).is_dir() == (mode == "fsdp")


def test_one_process_goes_on_with_what_two_have_trained(ended: Path) -> None:
    before = histories(ended / "fsdp")
    more = run_family(brief(), FamilySettings(sizes=[4, 6, 8], budget=8), ended / "fsdp", note=quiet)
    assert before.items() <= histories(ended / "fsdp").items()
    other = run_family(brief(), FamilySettings(sizes=[4, 6, 8], budget=8), ended / "alone", note=quiet)
    assert first_seed(more) == pytest.approx(first_seed(other), rel=1e-10)


@pytest.mark.slow
def test_the_command_under_torchrun(tmp_path: Path) -> None:
    file = written(tmp_path / "recipe.yaml", brief(precision="bf16", callbacks=["mupscale.train.JsonLines"]))
    words = ["family", str(file), "--sizes", "4,6", "--out", str(tmp_path / "run")]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    paths = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [*torchrun, "-m", "mupscale", *words],
        capture_output=True, text=True, timeout=DEADLINE, env={**os.environ, "PYTHONPATH": paths},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Report: ") == done.stdout.count("size 6 is finished") == 1
    assert first_seed(read(tmp_path / "run"))[0] > 0
