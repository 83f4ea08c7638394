"""Many runs, interrupted: asked to stop, killed, or out of disk, they go on and end as if nothing had happened."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from contextlib import chdir
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from test_engine import optimizer, rated, varied

import processes
import small_runs
from mupscale import checkpoint
from mupscale.engine import Outcome, train_many
from mupscale.system import Interrupted
from mupscale.system.errors import MupscaleError
from mupscale.train import Checkpoints, Evaluation, Recipe, Schedule, Spec, run_recipe
from slow_cases import with_slow
from small_runs import assert_same_run, copies, metrics, recipe, timeless

ALWAYS = Checkpoints(every=0, minutes=0.0)  # a stack is saved at every chance
SLOW = Spec("small_runs.Slow", {"seconds": 0.01})


def several(folder: Path | None, **changes: Any) -> list[Recipe]:
    """Four runs, one of which diverges on the way; no interval fits another."""
    usual = {
        "steps": 60,
        "schedule": Schedule("wsd", warmup=3, decay=9),
        "grow": [copies(at=25, width=8, lr=0.01)],
        "log_every": 7,
        "evaluation": Evaluation(every=11),
        "checkpoints": ALWAYS,
        "clip": 0.3,
        "optimizer": optimizer("SGD", lr=0.1, momentum=0.9, weight_decay=0.01),
    }
    recipes = varied(recipe(folder, **{**usual, **changes}), 4)
    recipes[2] = replace(recipes[2], grow=[copies(at=33, width=8, lr=1e200)], clip=recipes[0].clip)
    if folder is None:
        return recipes
    return [replace(one, out=str(folder / str(number))) for number, one in enumerate(recipes)]


def child(recipes: list[Recipe], output: Path, prepare: Callable[[], object] = int, **asked: Any) -> processes.Child:
    """A call of train_many in a process of its own; its words go to a file."""
    return processes.Child(output, _act, recipes, prepare, asked)


def _act(recipes: list[Recipe], prepare: Callable[[], object], asked: dict[str, Any]) -> None:
    prepare()
    try:
        found = train_many(recipes, note=lambda text: print(text, flush=True), **asked)
        print(f"{[outcome.status for outcome in found]}")
    except MupscaleError as error:
        print(f"{type(error).__name__}: {error}")


def signal_after(save: Path, step: int, number: int) -> None:
    """Send this process a signal when it has saved at this step or later, and is about to save again."""
    sent = False

    def look(event: str, args: tuple[Any, ...]) -> None:
        nonlocal sent
        if not sent and event == "os.rename" and str(args[1]) == str(save) and at_step(save) >= step:
            sent = True
            os.kill(os.getpid(), number)

    sys.addaudithook(look)


def at_step(save: Path) -> int:
    """The step of a saved stack; -1 if there is none."""
    return int(checkpoint.load(save).extra["stack"].get("step", -1)) if save.exists() else -1


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Outcome]]:
    """The runs, never interrupted."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("whole")
    return folder, train_many(several(folder), engine="vectorised")


def assert_as_if_nothing_had_happened(folder: Path, ours: list[Outcome], whole: tuple[Path, list[Outcome]]) -> None:
    """Bit for bit: curves, scores, metrics and checkpoints."""
    assert [o.status for o in ours] == ["finished", "finished", "diverged", "finished"]
    for mine, yours in zip(ours, whole[1], strict=True):
        assert {**vars(mine), "recipe": None} == {**vars(yours), "recipe": None}
    for name in "013":
        assert_same_run(folder / name, whole[0] / name)
    assert timeless(folder / "2") == timeless(whole[0] / "2")


@pytest.mark.parametrize("number", with_slow([signal.SIGINT, signal.SIGTERM, signal.SIGKILL], (signal.SIGKILL,)))
@pytest.mark.parametrize("after", [8, 40], ids=["before one diverges", "after"])
def test_interrupted_runs_end_as_if_nothing_had_happened(
    tmp_path: Path, whole: tuple[Path, list[Outcome]], number: int, after: int
) -> None:
    """Asked to stop, they are saved where they are; killed, they go on from the last save."""
    recipes, save = several(tmp_path / "runs"), tmp_path / "kept.safetensors"
    prepare = partial(signal_after, save, after, number)
    said = child(recipes, tmp_path / "output", prepare, save=save, engine="vectorised").words()
    stood = at_step(save)
    assert after <= stood < 60
    if number != signal.SIGKILL:
        assert f"Interrupted: interrupted after step {stood} of 60, and kept" in said
    notes: list[str] = []
    ours = train_many(recipes, save=save, note=notes.append, engine="vectorised")
    assert notes == [f"going on after step {stood} of 60 with {4 if stood <= 33 else 3} runs"]
    assert_as_if_nothing_had_happened(tmp_path / "runs", ours, whole)
    assert not save.exists()


@pytest.mark.slow
def test_killed_again_and_again(tmp_path: Path, whole: tuple[Path, list[Outcome]]) -> None:
    """In parts, too, where memory is short: what is done of one is not done again."""
    recipes, save, kills = several(tmp_path / "runs", data=SLOW), tmp_path / "kept.safetensors", 0
    asked: dict[str, Any] = {"save": save, "engine": "vectorised", "memory": 1 << 17, "resume": True}
    while kills < 4:
        process = child(recipes, tmp_path / "output", **asked).process
        process.join(0.25 + 0.1 * kills)
        process.kill()
        process.join()  # it may not have come as far as writing anything
        kills += 1
    ours = train_many(recipes, note=lambda text: None, **asked)
    assert [o.status for o in ours] == [o.status for o in whole[1]]
    for mine, yours in zip(ours, whole[1], strict=True):
        assert [at for at, _ in mine.curve] == [at for at, _ in yours.curve]
        assert [loss for _, loss in mine.curve] == pytest.approx([loss for _, loss in yours.curve], abs=1e-12)
    for name in "0123":
        mine, yours = (metrics(where / name) for where in (tmp_path / "runs", whole[0]))
        assert [(r["kind"], r["step"]) for r in mine] == [(r["kind"], r["step"]) for r in yours]


@pytest.mark.slow
def test_without_folders_and_at_a_rung(tmp_path: Path) -> None:
    """What was pruned before the interruption stays so, and points are told once each."""
    recipes, save = several(None), tmp_path / "kept.safetensors"

    def run(stop_at: int | None, heard: list[int], asked_at: list[int]) -> list[Outcome]:
        def tell(at: int, values: Any) -> None:
            heard.append(at)
            if at == stop_at:
                os.kill(os.getpid(), signal.SIGTERM)

        def decide(at: int, values: Any) -> list[int]:
            asked_at.append(at)
            return [1] if at == 20 else []

        asked: dict[str, Any] = {"points": 12, "rungs": [20, 40], "evaluate": True, "note": lambda text: None}
        return train_many(recipes, engine="vectorised", prune=decide, on_point=tell, save=save, **asked)

    heard, asked_at = list[int](), list[int]()
    with pytest.raises(Interrupted, match="interrupted after step 30 of 60, and kept"):
        run(30, heard, asked_at)
    ours = run(None, heard, asked_at)
    assert heard == list(range(5, 61, 5))
    assert asked_at == [20, 40]
    assert not save.exists()
    assert ours == run(None, [], [])
    assert [(o.status, o.step) for o in ours] == [("finished", 60), ("pruned", 20), ("diverged", 35), ("finished", 60)]


@pytest.mark.quick("other work", "damaged")
@pytest.mark.parametrize("what", ["other work", "damaged", "no checkpoint", "other shapes"])
def test_a_file_of_no_use_is_ignored(tmp_path: Path, what: str) -> None:
    recipes, save, notes = varied(recipe(steps=10)), tmp_path / "kept.safetensors", list[str]()
    expected = train_many(recipes, points=10)

    def stop(at: int, values: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted):
        train_many(varied(recipe(steps=10)), points=10, save=save, on_point=stop)
    content = save.read_bytes()
    asked = recipes
    if what == "other work":
        asked = rated(recipes[0], 0.5)
        expected = train_many(asked, points=10)
    elif what == "damaged":
        save.write_bytes(content[: len(content) // 2])
    elif what == "no checkpoint":
        save.write_text("something else")
    else:
        saved = checkpoint.load(save)
        smaller = {name: tensor[:, :1] for name, tensor in saved.model.items()}
        checkpoint.save_states(save, smaller, None, None, saved.extra)
    assert train_many(asked, points=10, save=save, note=notes.append) == expected
    assert not save.exists()
    assert [note.partition(":")[0] for note in notes] == (["starting over"] if what == "other shapes" else [])


def test_one_at_a_time_keeps_what_is_done(tmp_path: Path) -> None:
    """Runs that cannot be one program: those that have ended are not trained again."""
    recipes = varied(recipe(kind="dropping", data=Spec("small_runs.Rows"), steps=10))
    save, heard = tmp_path / "kept.safetensors", list[tuple[int, int]]()

    def tell(at: int, values: Any) -> None:
        (number,) = values
        heard.append((number, at))
        if heard.count((1, 6)) == 1 and (number, at) == (1, 6):
            os.kill(os.getpid(), signal.SIGTERM)

    asked: dict[str, Any] = {"engine": "serial", "points": 5, "save": save, "on_point": tell, "evaluate": True}
    with pytest.raises(Interrupted, match="interrupted after step 7 of 10"):
        train_many(recipes, **asked)
    ours = train_many(recipes, **asked)
    assert [at for number, at in heard if number == 0] == [2, 4, 6, 8, 10]
    assert [at for number, at in heard if number == 1] == [2, 4, 6, 2, 4, 6, 8, 10]
    assert ours == train_many(recipes, engine="serial", points=5, evaluate=True)


def test_what_is_kept_may_be_moved(tmp_path: Path) -> None:
    """A stack that starts from runs beside it goes on where it was, though it is called by another path."""

    def recipes(place: str) -> list[Recipe]:
        one = recipe(
            Path(place, "runs"), steps=6, log_every=1, checkpoints=ALWAYS, start=f"{place}/base", how="copies", width=16
        )
        return [replace(each, out=f"{place}/{number}") for number, each in enumerate(varied(one))]

    def tell(at: int, values: Any) -> None:
        if at == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    run_recipe(recipe(tmp_path / "here" / "base", steps=2))
    with chdir(tmp_path), pytest.raises(Interrupted):
        train_many(recipes("here"), save=Path("here/kept"), on_point=tell)
    (tmp_path / "here").rename(tmp_path / "there")
    notes: list[str] = []
    train_many(recipes(f"{tmp_path}/there"), save=tmp_path / "there" / "kept", note=notes.append)
    assert notes == ["going on after step 3 of 6 with 3 runs"]


@pytest.mark.quick("2-vectorised", "15-serial")
@pytest.mark.parametrize("engine", ["vectorised", "serial"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_asked_to_stop_in_the_last_step_it_stops_with_all_that_is_done(
    tmp_path: Path, number: int, engine: Any
) -> None:
    """Nobody looks any more, and whoever called would go on with the next stage; the same call trains nothing again."""
    recipes, save, heard = varied(recipe(steps=6, checkpoints=ALWAYS)), tmp_path / "kept", list[int]()

    def tell(at: int, values: Any) -> None:
        heard.append(at)
        if at == 6 and (engine != "serial" or len(recipes) - 1 in values):
            os.kill(os.getpid(), number)

    asked: dict[str, Any] = {"engine": engine, "points": 6, "save": save, "on_point": tell}
    with pytest.raises(Interrupted, match="interrupted after the last step of a run"):
        train_many(recipes, **asked)
    before = len(heard)
    assert train_many(recipes, **asked) == train_many(recipes, engine=engine, points=6)
    assert len(heard) == before
    assert not save.exists()


@pytest.mark.quick("a stack's file")
@pytest.mark.parametrize("folders", [False, True], ids=["a stack's file", "metrics and checkpoints"])
def test_a_full_disk_is_said_in_a_sentence_and_loses_nothing(tmp_path: Path, folders: bool) -> None:
    """The file that was there stays whole, and the same call goes on from it."""
    changes: dict[str, Any] = {"steps": 50}
    if folders:
        changes["checkpoints"] = Checkpoints(every=0)  # so that the run's own, at its end, is the first to be too large
    recipes = several(tmp_path / "runs" if folders else None, **changes)
    expected = train_many([replace(one, out=None) for one in recipes], points=50, note=lambda text: None)
    save = tmp_path / "kept.safetensors"
    with pytest.raises(Interrupted):
        train_many(recipes, save=save, points=50, on_point=lambda at, v: os.kill(os.getpid(), signal.SIGINT))
    stood, before = at_step(save), save.read_bytes()
    limit = 4000 if folders else len(before) // 2
    full = partial(small_runs.limit_files, limit, True)
    said = child(recipes, tmp_path / "output", full, save=save, points=50).words().splitlines()
    assert said[0].startswith(f"going on after step {stood}")
    assert said[1].startswith("MupscaleError: ")
    assert "File too large" in said[1]
    assert "what was there before is whole" in said[1]
    assert len(said) == 2
    assert save.read_bytes() == before
    ours = train_many(recipes, save=save, points=50, note=lambda text: None)
    assert [o.status for o in ours] == [o.status for o in expected]
    if not folders:
        assert ours == expected
