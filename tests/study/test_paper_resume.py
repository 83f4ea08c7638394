"""A run of the paper's comparison may be cut anywhere and goes on where it was: in the end its summary is the same."""

from __future__ import annotations

import json
import shutil
import signal
from contextlib import chdir
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mupscale.cli.studies import RUN, read_study
from mupscale.study import StudySettings, run_paper, run_sweeps
from mupscale.study.training import Trainer
from mupscale.system.errors import MupscaleError
from mupscale.train import Growth, Recipe, Seeds, Spec
from paper_runs import (
    Commanded,
    Sitting,
    count_whole,
    die_after_words,
    facts,
    names_of,
    quiet,
    read,
    run_quietly,
    runs_of,
    settings,
    small,
    written,
)
from small_runs import die_at, limit_files

PLACES = (0.15, 0.45)  # where a run is killed, one sitting after another; in the slow test, everywhere


def short() -> Recipe:
    """All stages, in few steps."""
    return small(steps=24, growth={"at": 10})


def few(**changes: Any) -> StudySettings:
    """One learning rate, so that little is trained."""
    usual = {"grown_lrs": [0.05], "noises": [1.0], "contenders": ["from-scratch", "continued", "copies-without-noise"]}
    return settings(**{**usual, **changes})


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    return count_whole(tmp_path_factory.mktemp("whole"), short(), few())


@pytest.mark.slow
def test_killed_anywhere_it_ends_the_same(whole: tuple[Path, int], tmp_path: Path) -> None:
    folder, count = whole
    run, log = tmp_path / "run", tmp_path / "log"
    for part in PLACES:
        died = Sitting(run, short(), few(), log, partial(die_at, str(run), round(part * count))).wait()
        assert died == -signal.SIGKILL
    assert Sitting(run, short(), few(), log).wait() == 0, log.read_text()
    assert facts(read(run)) == facts(read(folder))


@pytest.mark.slow
def test_killed_three_times_in_a_sweep_no_trial_is_given_up(tmp_path: Path) -> None:
    """Whoever starts a run again has not found a trial that kills its worker."""
    for number in range(3):
        log = tmp_path / f"log-{number}"
        die = partial(die_after_words, "sweep-2", 5)
        assert Sitting(tmp_path / "run", short(), few(), log, die).wait() == -signal.SIGKILL, log.read_text()
        assert "sweep-2" in log.read_text()
        assert "base:" not in log.read_text()
    (ours,) = run_sweeps(short(), few(), tmp_path / "run", note=quiet).sweeps
    (theirs,) = run_sweeps(short(), few(), tmp_path / "other", note=quiet).sweeps
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
        assert said.endswith("run the same command again to continue where it stopped")
    asked = read_study(RUN, words)
    ours, theirs = run_paper(asked.recipe, asked.settings, tmp_path / "run", note=quiet), read(whole[0])
    assert facts(replace(ours, recipe={})) == facts(replace(theirs, recipe={}))


@pytest.mark.slow
def test_a_full_disk_is_one_sentence_and_nothing_is_lost(tmp_path: Path) -> None:
    wide = small(steps=16, width=200, growth={"at": 8, "width": 400})
    how = few(seeds=1, contenders=["from-scratch"])
    full, limit = tmp_path / "full", partial(limit_files, 1_500_000, True)
    assert Sitting(full, wide, how, tmp_path / "log", limit).wait() == 1
    said = (tmp_path / "log").read_text()
    assert said.splitlines()[-1].startswith(f"error: the checkpoint {full / 'stretches' / 'width-400-lr-'}")
    assert "File too large" in said
    assert "Traceback" not in said
    again: list[str] = []
    run_paper(wide, how, full, note=again.append)
    assert sum("done already" in text for text in again) == 3
    assert facts(read(full)) == facts(run_quietly(tmp_path / "other", wide, how))


# ------------------------------------------------------------------------------------------------ in one process


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, from whose recipes its folder is seen as `run`, wherever it lies."""
    with chdir(tmp_path_factory.mktemp("finished")):
        run_quietly(Path("run"), short(), few())
        return Path("run").resolve()


@pytest.fixture
def done(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it to work on."""
    shutil.copytree(finished, tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    return Path("run")


def files(folder: Path) -> dict[str, tuple[int, bytes]]:
    """What runs have left: times and contents."""
    found = [path for path in folder.rglob("stretches/**/*") if path.is_file()]
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in found}


@pytest.mark.slow
def test_what_is_done_is_read_and_takes_no_time(done: Path) -> None:
    before, summary = files(done), read(done)
    said: list[str] = []
    again = run_paper(short(), replace(few(), storage="journal:run/study.log"), done, note=said.append)
    assert files(done) == before
    assert again == summary
    stages = [text for text in said if not text.startswith(" ")]
    assert len(stages) == len(again.stages)
    assert all(text.endswith(": done already") for text in stages)


@pytest.mark.slow
def test_more_seeds_and_another_contender_train_only_what_is_new(done: Path, tmp_path: Path) -> None:
    before, said = files(done), list[str]()
    more = few(seeds=3, contenders=["from-scratch", "from-scratch-changed", "continued"])
    summary = run_paper(short(), replace(more, storage="journal:run/study.log"), done, note=said.append)
    now = files(done)
    assert {name: now[name] for name in before} == before
    assert any(text.startswith("base: 3 runs, 1 of them left") for text in said)
    assert any(
        text.startswith("from-scratch: 6 runs (from-scratch, from-scratch-changed), 4 of them left") for text in said
    )
    straight = run_quietly(tmp_path / "straight", short(), more)
    assert names_of(summary) == names_of(straight)
    assert {stage.name: stage.cost for stage in summary.stages} == {s.name: s.cost for s in straight.stages}
    for name in names_of(straight):
        for curve, other in zip(runs_of(summary, name).curves, runs_of(straight, name).curves, strict=True):
            assert curve.losses == pytest.approx(other.losses, rel=0, abs=1e-12)


@pytest.mark.slow
def test_fewer_contenders_are_not_charged_for_the_others(done: Path) -> None:
    summary = run_quietly(done, short(), few(contenders=["continued"]))
    assert [stage.name for stage in summary.stages] == [
        "small-width-4",
        "sweep-2-width-4",
        "base",
        "continued",
        "copies",
    ]
    assert names_of(summary) == ["base", "continued", "copies"]


def test_another_recipe_in_the_same_folder_is_trained_and_never_taken_for_the_first(done: Path, tmp_path: Path) -> None:
    first, other, how = facts(read(done)), replace(short(), batch=4), few(contenders=["copies"], seeds=1)
    second = facts(run_quietly(done, other, how))
    assert second == facts(run_quietly(tmp_path / "alone", other, how)) != first
    assert facts(run_quietly(done, short(), few())) == first


@pytest.mark.quick("lrs")
@pytest.mark.parametrize(
    ("of", "how"),
    [
        ({"grow": [Growth(at=12, width=16, how="copies")], "steps": 26}, {}),  # as many steps after it
        ({}, {"lrs": [0.02]}),  # another base model, and the same trials
        ({}, {"noises": [2.0]}),
        ({"seeds": Seeds(init=5)}, {}),
    ],
    ids=["grow", "lrs", "noises", "seeds"],
)
def test_a_sweep_of_another_recipe_is_another_one(
    done: Path, tmp_path: Path, of: dict[str, Any], how: dict[str, Any]
) -> None:
    found = [
        run_sweeps(replace(short(), **of), few(**how, storage=f"journal:{kept}"), folder, note=quiet).sweeps[0].trials
        for folder, kept in ((done, done / "study.log"), (tmp_path / "alone", tmp_path / "study.log"))
    ]
    assert found[0] == found[1]
    assert [trial.losses for trial in found[0]] != [trial.losses for trial in read(done).tuned[0].trials]


def test_a_file_where_the_folder_belongs(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(MupscaleError, match=r"run cannot be written: File exists"):
        run_quietly(tmp_path / "run", short(), few())


def test_a_damaged_record_of_seconds_costs_the_clock_alone(done: Path) -> None:
    before = facts(read(done))
    (kept,) = done.glob("seconds-paper-*.json")
    assert {"base", "from-scratch", "continued", "copies"} <= json.loads(kept.read_text()).keys()
    kept.write_text(kept.read_text()[:-4])
    again = run_quietly(done, short(), few())
    assert facts(again) == before
    assert {stage.seconds for stage in again.stages if not stage.name.startswith("sweep")} == {0.0}


def test_what_a_stage_took_is_kept_while_no_other_worker_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is read and written as a whole, so two at once would lose what one of them kept."""
    fcntl, keep, kept = pytest.importorskip("fcntl"), Trainer._keep_seconds, []

    def watched(trainer: Trainer, seconds: float) -> None:
        with open(trainer.folder / ".lock") as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        kept.append(trainer.name)
        keep(trainer, seconds)

    monkeypatch.setattr(Trainer, "_keep_seconds", watched)
    run_sweeps(short(), few(storage=f"journal:{tmp_path}/study.log"), tmp_path / "run", note=quiet)
    assert kept == ["small-width-4"]
