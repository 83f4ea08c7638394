"""A run of the method may be cut anywhere and goes on where it was: in the end its summary is the same, bit for bit."""

from __future__ import annotations

import json
import os
import shutil
import signal
from contextlib import chdir
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from method_runs import (
    Commanded,
    Sitting,
    count_changes,
    die_after_words,
    facts,
    quiet,
    run_quietly,
    settings,
    small,
    written,
)
from mupscale.cli.method import read_method
from mupscale.method.method_run import MethodRun
from mupscale.method.pipeline import run_method, run_sweeps
from mupscale.method.settings import Method
from mupscale.method.summary import Summary
from mupscale.system.errors import MupscaleError
from mupscale.train import Recipe, Spec
from small_runs import die_at, limit_files

PLACES = (0.15, 0.45)  # where a run is killed, one sitting after another; in the slow test, everywhere


def short() -> Recipe:
    """All stages, in few steps."""
    return small(steps=24, growth={"at": 10})


def few(**changes: object) -> Method:
    """One learning rate, so that little is trained."""
    usual = {"upscaled_lrs": [0.05], "noises": [1.0], "lrs": [0.01], "baselines": ["scratch", "continued"]}
    return settings(**{**usual, **changes})


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """An uninterrupted run, and how often it changed something in its folder."""
    place = tmp_path_factory.mktemp("whole")
    prepare = partial(count_changes, str(place / "run"), str(place / "count"))
    assert Sitting(place / "run", short(), few(), place / "log", prepare).wait() == 0, (place / "log").read_text()
    return place / "run", int((place / "count").read_text())


def facts_in(folder: Path) -> object:
    return facts(Summary.load(folder))


def kill_and_go_on(folder: Path, place: int, times: int) -> None:
    """Kill it where it is about to make its so-many-th change, that often, and run it to its end."""
    log = folder.parent / "log"
    for _ in range(times):
        Sitting(folder, short(), few(), log, partial(die_at, str(folder), place)).wait()
    assert Sitting(folder, short(), few(), log).wait() == 0, log.read_text()


def test_killed_anywhere_it_ends_the_same(whole: tuple[Path, int], tmp_path: Path) -> None:
    folder, count = whole
    run, log = tmp_path / "run", tmp_path / "log"
    for part in PLACES:
        died = Sitting(run, short(), few(), log, partial(die_at, str(run), round(part * count))).wait()
        assert died == -signal.SIGKILL
    assert Sitting(run, short(), few(), log).wait() == 0, log.read_text()
    assert facts_in(run) == facts_in(folder)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(40))
def test_killed_at_any_change_of_its_folder_it_ends_the_same(
    whole: tuple[Path, int], tmp_path: Path, part: int
) -> None:
    folder, count = whole
    kill_and_go_on(tmp_path / "run", 1 + part * count // 40, times=2)
    assert facts_in(tmp_path / "run") == facts_in(folder)


@pytest.mark.slow
def test_killed_three_times_in_a_sweep_no_trial_is_given_up(tmp_path: Path) -> None:
    """Whoever starts a run again has not found a trial that kills its worker."""
    method = few(lrs=[])
    for number in range(3):
        log = tmp_path / f"log-{number}"
        die = partial(die_after_words, "sweep-2", 5)
        assert Sitting(tmp_path / "run", short(), method, log, die).wait() == -signal.SIGKILL, log.read_text()
        assert "sweep-2" in log.read_text()
        assert "base:" not in log.read_text()
    (ours,) = run_sweeps(short(), method, tmp_path / "run", note=quiet).sweeps
    (theirs,) = run_sweeps(short(), method, tmp_path / "other", note=quiet).sweeps
    assert len(ours.trials) == 2
    assert ours.trials == theirs.trials


@pytest.mark.slow
def test_ctrl_c_is_one_sentence_and_the_same_command_goes_on(whole: tuple[Path, int], tmp_path: Path) -> None:
    slow = replace(short(), data=Spec("small_runs.Slow", {"seconds": 0.01}))
    words = [str(written(tmp_path / "recipe.yaml", slow, few())), "--out", str(tmp_path / "run")]
    for number, stage in enumerate(("small", "base:")):
        log = tmp_path / f"log-{number}"
        assert Commanded(["run", "--paper", *words], log, interrupt_at=stage).wait() == 130
        said = log.read_text().splitlines()[-1]
        assert said.startswith("mupscale run: interrupted")
        assert said.endswith("run the same command again, and it goes on where it was")
    asked = read_method("run", "", words, lambda parser: None)
    ours, theirs = run_quietly(tmp_path / "run", asked.recipe, asked.method), Summary.load(whole[0])
    assert facts(replace(ours, recipe={})) == facts(replace(theirs, recipe={}))


@pytest.mark.slow
def test_a_full_disk_is_one_sentence_and_nothing_is_lost(tmp_path: Path) -> None:
    wide = small(steps=16, width=200, growth={"at": 8, "width": 400})
    method = few(seeds=1, baselines=["scratch"])
    full, limit = tmp_path / "full", partial(limit_files, 1_500_000, True)
    assert Sitting(full, wide, method, tmp_path / "log", limit).wait() == 1
    said = (tmp_path / "log").read_text()
    assert said.splitlines()[-1].startswith(f"error: the checkpoint {full / 'scratch'}")
    assert "File too large" in said
    assert "Traceback" not in said
    again: list[str] = []
    run_method(wide, method, full, note=again.append)
    assert sum("done already" in text for text in again) == 4
    assert facts_in(full) == facts(run_quietly(tmp_path / "other", wide, method))


# ------------------------------------------------------------------------------------------------ in one process


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, called by a path that leads nowhere when it is looked at again."""
    with chdir(tmp_path_factory.mktemp("finished")):
        run_quietly(Path("run"), short(), few())
        return Path("run").resolve()


@pytest.fixture
def done(finished: Path, tmp_path: Path) -> Path:
    """A copy of it to work on, elsewhere and called by its absolute path."""
    return Path(shutil.copytree(finished, tmp_path / "elsewhere" / "run"))


def files(folder: Path) -> dict[str, tuple[int, bytes]]:
    """What runs have left: times and contents."""
    found = [path for path in folder.rglob("seed-*/**/*") if path.is_file()]
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in found}


def test_what_is_done_is_read_and_takes_no_time(done: Path) -> None:
    before, summary = files(done), Summary.load(done)
    said: list[str] = []
    again = run_method(short(), few(), done, note=said.append)
    assert files(done) == before
    assert again.to_json() == {**summary.to_json(), "coords": again.to_json()["coords"]}
    stages = [text for text in said if not text.startswith(" ")]
    assert len(stages) == len(again.stages)
    assert all(text.endswith(": done already") for text in stages)


@pytest.mark.slow
def test_more_seeds_and_another_baseline_train_only_what_is_new(done: Path, tmp_path: Path) -> None:
    before = files(done)
    said: list[str] = []
    more = few(seeds=3, baselines=["scratch", "scratch-drop", "continued"])
    summary = run_method(short(), more, done, note=said.append)
    now = files(done)
    assert {name: now[name] for name in before} == before
    assert any(text.startswith("base: 3 runs, 1 of them left") for text in said)
    assert any(text.startswith("scratch: 6 runs (scratch, scratch-drop), 4 of them left") for text in said)
    assert all("seed-2" in name or "scratch-drop" in name for name in now.keys() - before.keys())
    straight = run_quietly(tmp_path / "straight", short(), more)
    assert [runs.name for runs in summary.runs] == [runs.name for runs in straight.runs]
    for ours, theirs in zip(summary.runs, straight.runs, strict=True):
        for curve, other in zip(ours.curves, theirs.curves, strict=True):
            assert curve.losses == pytest.approx(other.losses, rel=0, abs=1e-12)


def test_fewer_baselines_are_not_charged_for_the_others(done: Path) -> None:
    summary = run_quietly(done, short(), few(baselines=["continued"]))
    assert "scratch" not in [stage.name for stage in summary.stages]
    assert summary.get("scratch") is None


@pytest.mark.parametrize(
    ("recipe", "method", "why"),
    [
        ({"batch": 4}, {}, "batch is 8 there and 4 here"),
        ({"steps": 30, "growth": {"at": 10}}, {}, "steps is 24 there and 30 here"),
        ({"steps": 24, "growth": {"at": 12}}, {}, r"grow is \[.*'at': 10.* there and .*'at': 12.* here"),
        ({}, {"noises": [2.0]}, r"method.noises is \[1.0\] there and \[2.0\] here"),
        ({}, {"widths": [2]}, r"method.widths is \[4\] there and \[2\] here"),
    ],
)
def test_another_recipe_in_the_same_folder_is_refused(
    whole: tuple[Path, int], recipe: dict[str, object], method: dict[str, object], why: str
) -> None:
    before = (whole[0] / "method.json").read_text()
    other = small(**{"steps": 24, "growth": {"at": 10}, **recipe})
    with pytest.raises(MupscaleError, match=rf"holds a run of another recipe: {why}; choose another folder"):
        run_quietly(whole[0], other, few(**method))
    assert (whole[0] / "method.json").read_text() == before


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "method.json").write_text("{}")
    with pytest.raises(MupscaleError, match="is damaged"):
        run_quietly(tmp_path, short(), few())


def test_a_file_where_the_folder_belongs(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(MupscaleError, match=r"method\.json cannot be written"):
        run_quietly(tmp_path / "run", short(), few())


def test_a_damaged_record_of_stages_costs_the_clock_alone(done: Path) -> None:
    before = facts_in(done)
    (done / "stages.json").write_text(json.dumps({"base": {"seconds": 1.0}})[:-4])
    assert facts(run_quietly(done, short(), few())) == before
    assert os.path.exists(done / "summary.json")


@pytest.mark.slow
def test_what_a_stage_took_is_kept_while_no_other_worker_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """stages.json is read and written as a whole, so two at once would lose what one of them kept."""
    fcntl, keep, kept = pytest.importorskip("fcntl"), MethodRun._record, []

    def watched(run: MethodRun, stage: str, **values: float | None) -> None:
        with open(run.folder / ".lock") as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        kept.append(stage)
        keep(run, stage, **values)

    monkeypatch.setattr(MethodRun, "_record", watched)
    run_quietly(tmp_path / "run", short(), few())
    assert {"base", "scratch", "continued", "upscaled"} <= set(kept)
