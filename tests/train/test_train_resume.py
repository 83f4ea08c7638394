"""Going on: a run that was killed, at any moment, ends as one that never was; and somebody's checkpoint, upscaled."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from contextlib import chdir
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import mupscale as mu
import small_runs
from mupscale import checkpoint
from mupscale.cli import main
from mupscale.system.errors import Interrupted, MupscaleError
from mupscale.system.seeds import derive
from mupscale.train import (
    Checkpoints,
    Evaluation,
    Growth,
    Recipe,
    Schedule,
    Seeds,
    Spec,
    TrainingRun,
    catch_stop_signals,
    run_recipe,
)
from small_runs import (
    ADAMW,
    SGD,
    Child,
    assert_same_run,
    by_hand,
    checkpoints,
    column,
    copies,
    metrics,
    recipe,
    step,
    tensors,
)

EVENTS = [
    Growth(17, 16, noise=0.5, lr=0.01),
    Growth(31, 32, noise=0.3, noise_unit="theory"),
    Growth(42, 64, noise=0.1, noise_unit="signal"),
]


def eventful(out: Path, **changes: Any) -> Recipe:
    """Growth three times, dropout, accumulation, clipping, a schedule, and no interval that fits another."""
    usual = {
        "steps": 50,
        "accumulate": 2,
        "clip": 0.3,
        "schedule": Schedule("cosine", warmup=5),
        "grow": EVENTS,
        "log_every": 5,
        "evaluation": Evaluation(every=9, batch=8),
        "checkpoints": Checkpoints(every=7),
        "seeds": Seeds(1, 2, 3, 4),
    }
    return recipe(out, "dropping", **{**usual, **changes})


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The eventful run, never interrupted."""
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("whole") / "run"
    run_recipe(eventful(out))
    return out


def test_the_eventful_run_is_eventful(whole: Path) -> None:
    assert [record["step"] for record in metrics(whole, "grow")] == [17, 31, 42]
    assert column(whole, "step") == list(range(5, 51, 5))
    assert checkpoints(whole) == [step(49), step(50)]


# ------------------------------------------------------------------------------------------------ kill -9


def test_a_signal_that_nobody_has_looked_at_is_raised_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where an error comes first, after which whoever called might try something else."""
    monkeypatch.setattr(TrainingRun, "_train_step", TrainingRun._train_step)  # to be put back
    small_runs.interrupt(4, signal.SIGTERM)
    with pytest.raises(Interrupted, match="interrupted after the last step of a run"):
        run_recipe(brief(tmp_path / "run"))
    assert metrics(tmp_path / "run", "end")[-1]["status"] == "finished"
    assert run_recipe(brief(tmp_path / "run"), resume=True).status == "finished"
    with pytest.raises(Interrupted, match="interrupted; meanwhile MupscaleError: full"), catch_stop_signals():  # noqa: PT012
        signal.raise_signal(signal.SIGINT)
        raise MupscaleError("full")


def brief(out: Path) -> Recipe:
    """Four steps with a growth right where a checkpoint is written."""
    often = {"checkpoints": Checkpoints(every=2, keep=1), "evaluation": Evaluation(), "log_every": 2}
    return recipe(out, steps=4, grow=[Growth(2, 16, noise=0.5)], **often)


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_before_changes_to_its_folder(tmp_path: Path, every: int) -> None:
    """Also where the line of a growth is to be written, and between a checkpoint's appearance and the old one's end."""
    run_recipe(brief(tmp_path / "whole"))
    deaths = 0
    while True:
        out = tmp_path / f"run{deaths}"
        child = Child(brief(out), tmp_path / "output", prepare=partial(small_runs.die_at, str(out), deaths + 1))
        child.words()
        if child.process.exitcode == 0:
            break
        assert child.process.exitcode == -signal.SIGKILL
        run_recipe(brief(out), resume=True)
        assert_same_run(out, tmp_path / "whole")
        deaths += every
    assert deaths >= 12


@pytest.mark.parametrize("survive", [False, True], ids=["killed", "full disk"])
def test_the_disk_is_full_in_the_middle_of_a_checkpoint(tmp_path: Path, survive: bool) -> None:
    """The checkpoint before stays whole, and the run goes on from it as if nothing had happened."""
    out = tmp_path / "run"
    what = recipe(out, grow=[Growth(7, 64, noise=0.5)], checkpoints=Checkpoints(every=5), log_every=3)
    run_recipe(replace(what, out=str(tmp_path / "whole")))
    size = (tmp_path / "whole" / "checkpoints" / step(20)).stat().st_size
    child = Child(what, tmp_path / "output", prepare=partial(small_runs.limit_files, size // 2, survive))
    said = child.words()
    if survive:
        (error,) = (line for line in said.splitlines() if line.startswith("error: "))
        assert f"{step(10)} could not be written" in error
        assert "File too large" in error
        assert "whole" in error

    else:
        assert child.process.exitcode == -signal.SIGXFSZ
        assert [name for name in checkpoints(out) if not name.startswith(".")] == [step(5)]
    assert tensors(out / "checkpoints" / step(5))
    run_recipe(what, resume=True)
    assert_same_run(out, tmp_path / "whole")


@pytest.mark.quick("newline", "brace", "much")
@pytest.mark.parametrize("cut", [1, 2, 30, -1], ids=["newline", "brace", "much", "all but the brace"])
def test_a_last_line_cut_anywhere(tmp_path: Path, cut: int) -> None:
    """Where the last record is one that the checkpoint comes before; a line without its end is no line."""
    what = recipe(tmp_path / "run", log_every=3, checkpoints=Checkpoints(every=4, keep=9))
    run_recipe(replace(what, out=str(tmp_path / "whole")))
    run_recipe(replace(what, steps=10))
    (tmp_path / "run" / "checkpoints" / step(10)).unlink()
    file = tmp_path / "run" / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    kept = [line for line in lines if json.loads(line)["step"] <= 9]
    last = kept.pop()
    file.write_text("".join(kept) + (last[:-cut] if cut > 0 else last[0]))
    run_recipe(what, resume=True)
    assert_same_run(tmp_path / "run", tmp_path / "whole")


# ------------------------------------------------------------------------------------------------ asked to stop


@pytest.mark.quick("15")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_asked_to_stop(tmp_path: Path, whole: Path, number: int) -> None:
    """A checkpoint at once, not at the next interval; the way to go on is printed, and goes on exactly."""
    out = tmp_path / "my run"
    what = eventful(out, checkpoints=Checkpoints(every=0))
    child = Child(what, tmp_path / "output", prepare=partial(small_runs.interrupt, 23, number))
    said = child.words()
    end = metrics(out, "end")[0]
    assert end["status"] == "interrupted"
    assert 17 < end["step"] < 31
    assert checkpoints(out) == [step(end["step"])]
    assert f"interrupted after step {end['step']}; go on with: mupscale resume '{out}'" in said
    assert f"interrupted at step {end['step']}" in said
    run_recipe(what, resume=True)
    assert_same_run(out, whole)


def test_a_second_ctrl_c_stops_at_once(tmp_path: Path) -> None:
    out = tmp_path / "run"
    what = recipe(out, checkpoints=Checkpoints(every=1))
    child = Child(what, tmp_path / "output", prepare=partial(small_runs.interrupt, 1, signal.SIGINT, signal.SIGINT))
    assert "stopped at once" in child.words()
    assert not checkpoints(out)


def test_a_termination_after_ctrl_c_does_not_hurry(tmp_path: Path) -> None:
    what = recipe(tmp_path / "run")
    child = Child(what, tmp_path / "output", prepare=partial(small_runs.interrupt, 1, signal.SIGINT, signal.SIGTERM))
    assert "interrupted at step" in child.words()


def test_signals_are_as_before_when_a_run_has_ended(tmp_path: Path) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    run_recipe(recipe(tmp_path / "run", steps=2))
    with pytest.raises(MupscaleError):
        run_recipe(recipe(tmp_path / "run", steps=2))
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


# ------------------------------------------------------------------------------------------------ checkpoints


@pytest.mark.slow
def test_checkpoints_by_the_clock(tmp_path: Path, whole: Path) -> None:
    """With no interval of steps, each of them good to go on from."""
    what = eventful(tmp_path / "run", checkpoints=Checkpoints(every=0, minutes=0.01 / 60, keep=99))
    run_recipe(what)
    found = checkpoints(tmp_path / "run")
    seconds = [checkpoint.load(tmp_path / "run" / "checkpoints" / name).extra["run"]["seconds"] for name in found]
    assert len(found) > 3
    assert all(later - earlier >= 0.01 for earlier, later in pairwise(seconds[:-1]))
    for name in (found[1], found[-2]):
        out = tmp_path / name
        (out / "checkpoints").mkdir(parents=True)
        os.link(tmp_path / "run" / "checkpoints" / name, out / "checkpoints" / name)
        (out / "metrics.jsonl").write_text((tmp_path / "run" / "metrics.jsonl").read_text())
        run_recipe(replace(what, out=str(out), checkpoints=Checkpoints(every=0)), resume=True)
        assert_same_run(out, whole)


@pytest.mark.parametrize(
    ("every", "keep", "expected"), [(4, 1, [20]), (4, 3, [12, 16, 20]), (7, 2, [14, 20]), (0, 2, [20])]
)
def test_the_last_few_are_kept(tmp_path: Path, every: int, keep: int, expected: list[int]) -> None:
    run_recipe(recipe(tmp_path, checkpoints=Checkpoints(every=every, keep=keep)))
    assert checkpoints(tmp_path) == [step(number) for number in expected]


def test_resuming_a_finished_run_changes_nothing(tmp_path: Path) -> None:
    what = recipe(tmp_path / "a", grow=[copies(5, 16)])
    run_recipe(what)
    run_recipe(replace(what, out=str(tmp_path / "b")))
    result = run_recipe(what, resume=True)
    assert (result.status, result.step, result.width) == ("finished", 20, 16)
    assert_same_run(tmp_path / "a", tmp_path / "b")


def test_a_longer_run_and_what_else_may_change(tmp_path: Path) -> None:
    """More steps, another interval, a growth later on: the steps are those of a run that was so from the start."""
    later = {"steps": 30, "log_every": 3, "evaluation": Evaluation(every=4), "accumulate": 2, "tensorboard": False}
    what = recipe(tmp_path / "run", grow=[Growth(5, 16, noise=0.5)])
    run_recipe(what)
    longer = replace(
        what, **later, grow=[*what.grow, Growth(25, 32, noise=0.5)], checkpoints=Checkpoints(every=11, keep=5)
    )  # type: ignore[arg-type]
    run_recipe(longer, resume=True)
    run_recipe(replace(longer, out=str(tmp_path / "whole")))
    ours, theirs = (tensors(tmp_path / name / "checkpoints" / step(30)) for name in ("run", "whole"))
    assert all(torch.allclose(ours[key], theirs[key], rtol=0, atol=1e-12) for key in theirs)
    assert metrics(tmp_path / "run", "end")[-1]["step"] == 30
    assert len(metrics(tmp_path / "run", "end")) == 1
    assert json.loads((tmp_path / "run" / "recipe.json").read_text())["steps"] == 30


def test_the_clock_goes_on(tmp_path: Path) -> None:
    what = recipe(tmp_path, data=Spec("small_runs.Slow", {"seconds": 0.02}), steps=10)
    start = time.perf_counter()
    run_recipe(what)
    before = metrics(tmp_path, "train")[-1]["seconds"]
    run_recipe(replace(what, steps=12), resume=True)
    seconds = column(tmp_path, "seconds")
    assert before >= 0.2
    assert before < seconds[-2] < seconds[-1]
    assert seconds[-1] <= time.perf_counter() - start


# ------------------------------------------------------------------------------------------------ --from


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run at width 16, grown there from 8, to start from."""
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("narrow") / "run"
    run_recipe(recipe(out, grow=[Growth(9, 16, noise=0.5)], clip=0.1))
    return out


def upscaled_by_hand(start: Path, what: Recipe, noise: float = 0.0, moments: bool = True) -> list[float]:
    """The losses of the first steps of a model from the checkpoint, upscaled with the library's parts alone."""
    family = what.family()
    model = family.build(16).double()
    hyper = {k: tuple(v) if isinstance(v, list) else v for k, v in what.optimizer.init_args.items()}
    optimizer = family.optimizer(model, what.optimizer_class(), **hyper)
    saved = checkpoint.load(start, model)
    if moments:
        assert saved.optimizer is not None
        mine = optimizer.state_dict()
        optimizer.load_state_dict({"state": saved.optimizer["state"], "param_groups": mine["param_groups"]})
    seed = derive(what.seeds.noise, "start")
    wide: Any = family.upscale(model, optimizer, width=what.width, noise=noise or None, exact=not noise, seed=seed)
    return by_hand(what, *wide, hyper["lr"], range(what.steps))


def other_adamw(**hyper: float) -> Spec:
    return Spec("torch.optim.AdamW", {**ADAMW.init_args, **hyper})


STARTS: dict[str, dict[str, Any]] = {
    "exactly": {},
    "with noise": {"noise": 0.5, "seeds": Seeds(noise=3)},
    "at the same width": {"width": 16},
    "at the same width, with noise": {"width": 16, "noise": 0.5},
    "with rates of its own": {"optimizer": other_adamw(lr=0.003, weight_decay=0.7, eps=1e-3)},
    "with a schedule and other data": {"schedule": Schedule("cosine", warmup=3), "seeds": Seeds(data=5)},
    "from another base": {"base": 8},
}


@pytest.mark.parametrize("changes", STARTS.values(), ids=STARTS.keys())
def test_start_from_a_run(tmp_path: Path, narrow: Path, changes: dict[str, Any]) -> None:
    """From its folder or from one of its files: moments carried over, rates from the new recipe."""
    file = narrow / "checkpoints" / step(20)
    start = file if changes else narrow
    new = recipe(tmp_path, **{"width": 48, "start": str(start), "how": "copies", "steps": 8, **changes})
    result = run_recipe(new)
    expected = upscaled_by_hand(file, new, new.noise)
    assert column(tmp_path, "loss") == pytest.approx(expected, rel=0, abs=1e-12)
    without = upscaled_by_hand(file, new, new.noise, moments=False)
    assert max(abs(a - b) for a, b in zip(expected, without, strict=True)) > 1e-6
    assert (result.width, metrics(tmp_path, "train")[0]["width"]) == (new.width, new.width)


def test_a_run_and_what_it_started_from_may_be_moved_and_called_by_other_paths(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that starts elsewhere is refused still, also by another name of the same form."""
    with chdir(tmp_path):
        run_recipe(recipe(Path("runs/base"), steps=2))
        first = recipe(Path("runs/wide"), width=16, start="runs/base", steps=3)
        run_recipe(first)
    stored = json.loads((tmp_path / "runs" / "wide" / "recipe.json").read_text())
    assert (stored["out"], stored["from"]) == (".", "../base")
    assert str(tmp_path).encode() not in next((tmp_path / "runs" / "wide" / "checkpoints").iterdir()).read_bytes()
    moved = Path(shutil.move(tmp_path / "runs", tmp_path / "moved"))
    longer = replace(first, out=str(moved / "wide"), start=str(moved / "base"), steps=4)
    assert run_recipe(longer, resume=True).step == 4
    assert main(["resume", str(moved / "wide"), "--steps", "5", "--trust", "small_runs"]) == 0
    again = ["train", str(moved / "wide" / "recipe.json")]
    assert main(again) == 1
    assert f"{moved / 'wide'} holds a run at step 5 already" in capsys.readouterr().err
    assert main([*again, "--out", str(moved / "again")]) == 0
    assert column(moved / "again", "loss") == column(moved / "wide", "loss")
    with chdir(moved), pytest.raises(MupscaleError, match=r"from is .*base there and base/\.\./wide here"):
        run_recipe(replace(longer, out="wide", start="base/../wide", steps=6), resume=True)


def test_start_without_noise_goes_on_as_the_narrow_model_would(tmp_path: Path, narrow: Path) -> None:
    losses = []
    for width in (16, 32, 80):
        out = tmp_path / str(width)
        run_recipe(recipe(out, width=width, start=str(narrow), how="copies", clip=0.1, steps=12))
        losses.append(column(out, "loss"))
    assert losses[1] == pytest.approx(losses[0], rel=0, abs=1e-12)
    assert losses[2] == pytest.approx(losses[0], rel=0, abs=1e-12)


@pytest.mark.parametrize(
    "optimizer",
    [SGD, Spec("torch.optim.SGD", {"lr": 0.1}), Spec("torch.optim.Adam", ADAMW.init_args)],
    ids=["momentum", "SGD", "Adam"],
)
def test_start_from_a_run_with_another_optimizer_takes_the_weights_alone(
    tmp_path: Path, narrow: Path, optimizer: Spec
) -> None:
    new = recipe(tmp_path, width=32, start=str(narrow), how="copies", optimizer=optimizer, steps=5)
    run_recipe(new)
    expected = upscaled_by_hand(narrow / "checkpoints" / step(20), new, moments=False)
    assert column(tmp_path, "loss") == pytest.approx(expected, rel=0, abs=1e-12)


@pytest.mark.parametrize("form", ["safetensors", "torch", "torch, under model", "torch, under state_dict", "ddp"])
def test_start_from_somebodys_weights(tmp_path: Path, narrow: Path, form: str) -> None:
    weights = checkpoint.load(narrow / "checkpoints" / step(20)).model
    path = tmp_path / ("weights.safetensors" if form == "safetensors" else "weights.pt")
    if form == "safetensors":
        save_file(weights, path)
    else:
        wrapped = {"module." + name: tensor for name, tensor in weights.items()} if form == "ddp" else weights
        torch.save({form[13:]: wrapped, "epoch": 3} if "under" in form else wrapped, path)
    new = recipe(
        tmp_path / "run", width=32, start=str(path), start_width=16, how="copies", steps=5, grow=[copies(3, 64)]
    )
    run_recipe(new)
    expected = upscaled_by_hand(narrow / "checkpoints" / step(20), replace(new, grow=[]), moments=False)
    assert column(tmp_path / "run", "loss") == pytest.approx(expected, rel=0, abs=1e-12)


@pytest.mark.slow
def test_start_with_several_widths_and_a_tied_readout(tmp_path: Path) -> None:
    old = recipe(tmp_path / "old", "gpt2-dims", clip=0.3)
    run_recipe(old)
    for times in (1, 3):
        wide = {"head_dim": 4 * times}
        run_recipe(replace(old, width=wide, start=str(tmp_path / "old"), how="copies", out=str(tmp_path / str(times))))
    ours, theirs = column(tmp_path / "3", "loss"), column(tmp_path / "1", "loss")
    assert ours == pytest.approx(theirs, rel=0, abs=1e-10)
    assert theirs[0] < column(tmp_path / "old", "loss")[0] - 0.3


def test_a_run_killed_before_its_first_checkpoint_says_that_it_starts_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = list[str]()
    monkeypatch.setattr("mupscale.train.callbacks.Progress.note", lambda self, text: notes.append(text))
    run = recipe(tmp_path / "run", steps=2)
    run_recipe(run, resume=True)
    assert not any("starting over" in note for note in notes)  # there was no run
    (tmp_path / "run" / "checkpoints" / step(2)).unlink()
    run_recipe(run, resume=True)
    assert f"{tmp_path / 'run'} has no checkpoint yet: starting over from step 0" in notes


def test_a_started_run_resumes(tmp_path: Path, narrow: Path) -> None:
    """Also where what it started from has gone."""
    (tmp_path / "start").mkdir()
    start = tmp_path / "start" / "a.safetensors"
    start.write_bytes((narrow / "checkpoints" / step(20)).read_bytes())
    new = recipe(tmp_path / "run", width=32, start=str(start), noise=0.5, checkpoints=Checkpoints(every=6, keep=9))
    run_recipe(new)
    run_recipe(replace(new, out=str(tmp_path / "whole")))
    start.unlink()
    for name in (18, 20):
        (tmp_path / "run" / "checkpoints" / step(name)).unlink()
    run_recipe(new, resume=True)
    assert_same_run(tmp_path / "run", tmp_path / "whole")


@pytest.mark.quick("AdamW")
@pytest.mark.parametrize("name", ["AdamW", "Adafactor", "NAdam"])
def test_moments_come_along_from_a_file_of_ones_own_and_from_a_run(tmp_path: Path, name: str) -> None:
    what = recipe(tmp_path / "run", steps=4, optimizer=Spec(f"torch.optim.{name}", {"lr": 1e-2}))
    result = run_recipe(what)
    path = mu.save(tmp_path / "own.safetensors", result.model, result.optimizer)
    for start, width in ((tmp_path / "run", None), (tmp_path / "run" / "checkpoints", None), (path, 8)):
        grown = run_recipe(replace(what, out=None, start=str(start), start_width=width, width=16))
        assert {float(state["step"]) for state in grown.optimizer.state.values()} == {8.0}, f"from {start}"
