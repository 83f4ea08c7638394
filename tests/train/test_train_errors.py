"""What goes wrong in a run is one sentence that says what to do, and nothing is lost by it."""

from __future__ import annotations

import math
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import mupscale as mu
import small_runs
from hostile_folders import Harmful
from mupscale.system.errors import MupscaleError
from mupscale.train import (
    Checkpoints,
    Evaluation,
    Growth,
    Recipe,
    Schedule,
    Seeds,
    Spec,
    TrainingRun,
    join_processes,
    run_recipe,
)
from small_runs import ADAMW, assert_same_run, checkpoints, column, copies, metrics, recipe, refused, step, tensors

# ------------------------------------------------------------------------------------------------ divergence


def diverging_at(out: Path, number: int, **changes: Any) -> Any:
    """A run whose loss is not finite at this step: a growth before it brings a rate that no model survives."""
    grow = [copies(number - 2, 16, lr=1e200)]
    return recipe(out, **{"grow": grow, "checkpoints": Checkpoints(every=4), **changes})


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With its history, the last good checkpoint and the step at which it happened, and without an exception."""
    plain = recipe(tmp_path / "plain", checkpoints=Checkpoints(every=4))
    run_recipe(plain)
    out = tmp_path / "run"
    result = run_recipe(diverging_at(out, 11))
    assert (result.status, result.step) == ("diverged", 11)
    end = metrics(out)[-1]
    assert (end["kind"], end["status"], end["step"], end["at"]) == ("end", "diverged", 11, 11)
    assert column(out, "step") == list(range(1, 11))
    assert column(out, "loss")[:9] == pytest.approx(column(tmp_path / "plain", "loss")[:9], abs=1e-10)
    assert checkpoints(out) == [step(4), step(8)]
    assert all(torch.isfinite(tensor).all() for tensor in tensors(out / "checkpoints" / step(8)).values())
    assert "diverged: the loss of step 11 is not finite; the history is kept" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "latest", "kept"),
    [
        ({"log_every": 4, "checkpoints": Checkpoints(every=5)}, 8, [step(5)]),
        ({"log_every": 1000, "checkpoints": Checkpoints(every=5)}, 10, [step(5)]),
        ({"log_every": 50, "checkpoints": Checkpoints(every=0)}, 7, []),
        ({"steps": 500, "log_every": 500, "checkpoints": Checkpoints(0), "evaluation": Evaluation()}, 110, []),
    ],
    ids=["a line", "a checkpoint", "an evaluation", "nothing"],
)
def test_divergence_is_noticed_where_something_is_due_or_before_long(
    tmp_path: Path, changes: dict[str, Any], latest: int, kept: list[str]
) -> None:
    """It is told of the step where it was; nothing that comes after it is evaluated, logged or saved."""
    result = run_recipe(diverging_at(tmp_path, 6, **changes))
    assert (result.status, metrics(tmp_path)[-1]["at"]) == ("diverged", 6)
    assert result.step <= latest
    assert checkpoints(tmp_path) == kept
    assert all(number <= 5 for number in column(tmp_path, "step"))
    assert all(math.isfinite(loss) for loss in column(tmp_path, "loss", "eval"))


def test_divergence_before_a_growth(tmp_path: Path) -> None:
    """What has diverged is not widened, and that is no error."""
    events = [copies(4, 16, lr=1e200), copies(8, 32)]
    result = run_recipe(
        recipe(tmp_path, grow=events, log_every=50, checkpoints=Checkpoints(0), evaluation=Evaluation())
    )
    assert (result.status, result.width, metrics(tmp_path)[-1]["at"]) == ("diverged", 16, 6)
    assert [record["step"] for record in metrics(tmp_path, "grow")] == [4]


class Cracked(small_runs.Rows):
    """One infinite number among those to evaluate on."""

    def __init__(self) -> None:
        super().__init__()
        self.split.test_x[3, 2] = math.inf


def test_an_evaluation_that_is_not_finite_is_null(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """JSON knows no other way; the training itself is well."""
    assert run_recipe(recipe(tmp_path, data=Spec("test_train_errors.Cracked"), steps=5)).status == "finished"
    assert metrics(tmp_path, "eval")[0]["loss"] is None
    assert "held-out loss nan" in capsys.readouterr().out


@pytest.mark.parametrize("clip", [None, 1.0])
def test_weights_that_are_not_finite_are_not_saved(tmp_path: Path, clip: float | None) -> None:
    """The gradient may be infinite where the loss is still fine; the checkpoint before must outlive that."""
    what = recipe(
        tmp_path, loss="test_train_errors.cliff", clip=clip, checkpoints=Checkpoints(every=1, keep=1), steps=30
    )
    result = run_recipe(what)
    assert result.status == "diverged"
    (last,) = checkpoints(tmp_path)
    assert all(torch.isfinite(tensor).all() for tensor in tensors(tmp_path / "checkpoints" / last).values())
    end = metrics(tmp_path)[-1]
    assert 1 < end["step"] == end["at"] - 1 < 30  # the next loss would not have been finite
    assert last == step(end["step"] - 1)
    assert all(record["step"] < end["step"] for record in metrics(tmp_path, "eval"))


class _Cliff(torch.autograd.Function):
    """The identity, whose gradient is infinite as soon as the value is small."""

    @staticmethod
    def forward(context: Any, value: Tensor) -> Tensor:  # type: ignore[override]
        context.save_for_backward(value)
        return value.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (value,) = context.saved_tensors
        return torch.where(value < 1.0, math.inf, 1.0) * gradient


def cliff(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss that is finite where its gradient is not."""
    made: Tensor = _Cliff.apply(nn.functional.cross_entropy(outputs, targets))
    return made


def test_a_run_that_diverged_resumes_where_it_was_good(tmp_path: Path) -> None:
    """With a growth that is gentler, since what comes after the checkpoint may change."""
    run_recipe(diverging_at(tmp_path / "run", 10))
    assert checkpoints(tmp_path / "run")[-1] == step(8)
    gentler = diverging_at(tmp_path / "run", 10, grow=[copies(8, 16, lr=0.01)])
    assert run_recipe(gentler, resume=True).status == "finished"
    run_recipe(replace(gentler, out=str(tmp_path / "whole")))
    assert_same_run(tmp_path / "run", tmp_path / "whole")


# ------------------------------------------------------------------------------------------------ resuming


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints at 12, 16 and 20, grown after 9 steps."""
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("finished") / "run"
    run_recipe(same(out))
    return out


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """The same, to be damaged."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


def same(out: Path, **changes: Any) -> Any:
    """The recipe of that run, changed."""
    return recipe(out, **{"grow": [Growth(9, 16, noise=0.5)], "checkpoints": Checkpoints(every=4, keep=3), **changes})


def test_a_folder_that_holds_a_run_is_not_overwritten(run: Path) -> None:
    with refused(run, "holds a run at step 20", "resume=True", "overwrite=True", "out=", leaves=run):
        run_recipe(same(run))


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        (
            {"optimizer": Spec(ADAMW.class_path, {**ADAMW.init_args, "lr": 0.5}), "clip": 1.0},
            ("another recipe: optimizer", "0.02", "0.5", "(out=)"),
        ),
        ({"grow": [Growth(9, 16, noise=0.25)]}, ("another recipe: grow", "'noise': 0.5", "'noise': 0.25")),
        ({"grow": []}, ("another recipe: grow", "[{'at': 9", "[] here")),
        ({"steps": 15}, ("is already at step 20, but you asked for 15 steps", "(steps=)")),
    ],
    ids=["rate", "growth", "growth that was not", "fewer steps than are done"],
)
def test_a_checkpoint_of_another_recipe(run: Path, changes: dict[str, Any], parts: tuple[str, ...]) -> None:
    """The first field is named with both values, and all files are as they were: also the recipe that was right."""
    with refused(run, *parts, leaves=run):
        run_recipe(same(run, **changes), resume=True)


def flipped(data: bytes, place: float) -> bytes:
    at = int(place * len(data))
    return data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "truncated": lambda data: data[:-100],
    "a bit of the header": lambda data: flipped(data, 0.001),
    "a bit of a tensor": lambda data: flipped(data, 0.6),
    "the last bit": lambda data: flipped(data, 0.999),
    "nothing is left": lambda data: b"",
    "little is left": lambda data: data[:1000],
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_checkpoint(
    run: Path, finished: Path, damage: Callable[[bytes], bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    """One sentence names it, and the run goes on from the one before; without one it says so, and changes nothing."""
    path = run / "checkpoints" / step(20)
    damaged = damage(path.read_bytes())
    path.write_bytes(damaged)
    alone = Path(shutil.copytree(run, run.with_name("alone")))
    for other in set(checkpoints(alone)) - {step(20)}:
        (alone / "checkpoints" / other).unlink()
    with refused(alone / "checkpoints" / step(20), "remove it to start over", leaves=alone):
        run_recipe(same(alone), resume=True)
    run_recipe(same(run), resume=True)
    assert f"kept as damaged-{path.name}, and {step(16)} is taken instead" in capsys.readouterr().out
    assert path.with_name(f"damaged-{path.name}").read_bytes() == damaged
    assert_same_run(run, finished)


def test_data_that_has_changed(run: Path) -> None:
    said = "the data has changed since the run", "restore the data", "(start="
    with refused(*said, leaves=run), begun(same(run)) as training:
        training.data.split.train_x[0] += 1.0  # type: ignore[attr-defined]
        training.begin(resume=True)


@contextmanager
def begun(what: Recipe) -> Iterator[TrainingRun]:
    """A run that is made, and closed in the end."""
    with join_processes("cpu", "ddp") as processes:
        training = TrainingRun(what, processes)
        try:
            yield training
        finally:
            training.close()


def test_a_second_training_in_the_same_folder(tmp_path: Path) -> None:
    """Refused with the process of the first, which goes on undisturbed."""
    with begun(recipe(tmp_path / "run")) as training:
        training.begin(resume=False)
        training.advance()
        said = f"process {os.getpid()} of this machine is training in {tmp_path / 'run'}: wait for it"
        with refused(said, leaves=tmp_path / "run"):
            run_recipe(recipe(tmp_path / "run"), resume=True)


def test_other_threads_and_a_finished_run_are_said(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        run_recipe(same(run), resume=True)
    finally:
        torch.set_num_threads(threads)
    said = capsys.readouterr().out
    assert f"it ran with {threads} threads and goes on with {threads + 1}" in said
    assert "it is finished" in said


def test_files_have_the_mode_that_the_user_wants(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        run_recipe(recipe(tmp_path / "run", steps=2))
    finally:
        os.umask(before)
    assert {oct(path.stat().st_mode & 0o777) for path in (tmp_path / "run").rglob("*") if path.is_file()} == {"0o640"}


def test_what_a_killed_run_left_half_written_is_cleared(run: Path) -> None:
    for name in (".step-000000024.safetensors.mupscale-abcdef-1", ".tmpAbC123", ".step-000000024.tmp"):
        (run / "checkpoints" / name).touch()
    (run / ".recipe.json.4194000.tmp").touch()
    run_recipe(same(run), resume=True)
    assert not list(run.rglob(".*"))


def test_a_checkpoint_that_is_not_of_a_run(run: Path) -> None:
    mu.save(run / "checkpoints" / step(24), recipe().family().init(16))
    with refused(step(24), "does not belong to a run"):
        run_recipe(same(run), resume=True)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with refused(tmp_path / "file" / "run"):
        run_recipe(recipe(tmp_path / "file" / "run"))
    with refused(tmp_path / "file"):
        run_recipe(recipe(tmp_path / "file"))


def test_a_full_disk_while_metrics_are_written(tmp_path: Path) -> None:
    """The history up to there stays, and the run goes on."""
    out = tmp_path / "run"
    what = recipe(out, steps=150, checkpoints=Checkpoints(every=50), evaluation=Evaluation())
    run_recipe(replace(what, out=str(tmp_path / "whole")))
    size = (tmp_path / "whole" / "checkpoints" / step(100)).stat().st_size + 500
    assert size < (tmp_path / "whole" / "metrics.jsonl").stat().st_size
    said = small_runs.Child(what, tmp_path / "output", prepare=partial(small_runs.limit_files, size, True)).words()
    (error,) = (line for line in said.splitlines() if line.startswith("error: "))
    assert str(out / "metrics.jsonl") in error
    assert "File too large" in error
    assert "Traceback" not in said
    run_recipe(what, resume=True)
    assert_same_run(out, tmp_path / "whole")


def test_a_recipe_that_json_cannot_hold(tmp_path: Path) -> None:
    """It can be run, but not written."""
    slow = Spec("small_runs.Slow", {"seconds": torch.tensor(0.0)})
    assert run_recipe(recipe(data=slow, steps=2)).status == "finished"
    with refused("small_runs.Slow", "seconds", "Tensor"):
        run_recipe(recipe(tmp_path / "run", data=slow))
    assert not (tmp_path / "run" / "recipe.json").exists()


# ------------------------------------------------------------------------------------------------ models and data


class Bounded(small_runs.Dropping):
    """A model with a largest width."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        if width > 16:
            raise MupscaleError(f"{width} is too wide for me")


def test_a_growth_that_the_model_cannot_do_is_refused_before_the_first_step(tmp_path: Path) -> None:
    what = recipe(tmp_path, model=Spec("test_train_errors.Bounded"), init_at=8, grow=[copies(5, 16), copies(9, 32)])
    with refused("32 is too wide for me"):
        run_recipe(what)
    assert not (tmp_path / "metrics.jsonl").exists()


class Empty(small_runs.Rows):
    """Nothing is held out."""

    def evaluation(self, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(())


def test_tensorboard_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with refused("mupscale[plots]"):
        run_recipe(recipe(tmp_path, tensorboard=True))
    assert not (tmp_path / "recipe.json").exists()


# ------------------------------------------------------------------------------------------------ --from


@pytest.fixture
def weights(tmp_path: Path) -> dict[str, Tensor]:
    """Of a model of width 16."""
    return {name: tensor.clone() for name, tensor in recipe().family().init(16).state_dict().items()}


def started(out: Path, path: Path, **changes: Any) -> None:
    run_recipe(recipe(out / "run", **{"start": str(path), "width": 32, "steps": 2, **changes}))


def test_a_start_that_is_not_there_leaves_no_run(tmp_path: Path) -> None:
    """So that the next try needs neither another folder nor an explanation."""
    with refused("no checkpoint at", tmp_path / "nothing"):
        started(tmp_path / "runs" / "mine", tmp_path / "nothing")
    assert not list(tmp_path.iterdir())
    (tmp_path / "run").mkdir()
    with refused(tmp_path, "without checkpoints"):
        started(tmp_path, tmp_path)
    assert not list((tmp_path / "run").iterdir())  # the user's own folder stays
    run_recipe(recipe(tmp_path / "run", steps=2))


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"start_width": None}, ("does not record the width", "from_width")),
        ({"width": 40, "how": "copies"}, ("40", "not a multiple of 16", "32 or 48")),
        ({"width": 8, "how": "copies"}, ("8", "narrower than 16")),
        ({"start_width": 8}, ("another model", "(16, 6)", "(8, 6)")),
        ({"extra": torch.zeros(2)}, ("another model", "'extra'")),
        ({"layers.1.weight": torch.full((16, 16), math.nan)}, ("'layers.1.weight'", "NaN")),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, dict) else "",
)
def test_a_start_that_does_not_fit(
    tmp_path: Path, weights: dict[str, Tensor], changes: dict[str, Any], parts: tuple[str, ...]
) -> None:
    held = {name: changes.pop(name) for name in [*changes] if isinstance(changes[name], Tensor)}
    save_file({**weights, **held}, tmp_path / "weights.safetensors")
    with refused(*parts):
        started(tmp_path, tmp_path / "weights.safetensors", **{"start_width": 16, **changes})


def test_a_pickle_with_code_is_refused(tmp_path: Path, weights: dict[str, Tensor]) -> None:
    for saved in ({**weights, "bomb": Harmful(tmp_path)}, recipe().family().init(16)):  # a whole model is code, too
        torch.save(saved, tmp_path / "weights.pt")
        with refused("weights.pt", "code", "state_dict"):
            started(tmp_path, tmp_path / "weights.pt", start_width=16)
    assert not (tmp_path / "ran").exists()


def test_starts_that_hold_no_weights(tmp_path: Path, weights: dict[str, Tensor]) -> None:
    torch.save([1, 2], tmp_path / "list.pt")
    torch.save({"a": 1}, tmp_path / "numbers.pt")
    (tmp_path / "text.safetensors").write_text("no tensors at all")
    torch.save(weights, tmp_path / "cut.pt")
    (tmp_path / "cut.pt").write_bytes((tmp_path / "cut.pt").read_bytes()[:500])
    save_file(weights, tmp_path / "cut.safetensors")
    (tmp_path / "cut.safetensors").write_bytes((tmp_path / "cut.safetensors").read_bytes()[:-8])
    for name in ("list.pt", "numbers.pt", "text.safetensors", "cut.pt", "cut.safetensors"):
        with refused(tmp_path / name):
            started(tmp_path, tmp_path / name, start_width=16)


def test_a_start_whose_optimizer_kept_less(tmp_path: Path) -> None:
    """Moments of Adam do for AMSGrad but for its maximum: they are left out as a whole rather than in part."""
    run_recipe(recipe(tmp_path / "old", steps=3))
    amsgrad = Spec(ADAMW.class_path, {**ADAMW.init_args, "amsgrad": True})
    assert (
        run_recipe(recipe(tmp_path / "new", start=str(tmp_path / "old"), width=16, optimizer=amsgrad)).status
        == "finished"
    )


# ------------------------------------------------------------------------------------------------ what people do


class Typed(small_runs.Rows):
    """Rows of somebody's own that know nothing of precisions; perhaps none of them are to train on."""

    def __init__(self, dtype: str = "float32", train: int = 80) -> None:
        super().__init__()
        kind = getattr(torch, dtype)
        self.split = self.split._replace(train_x=self.split.train_x.to(kind), test_x=self.split.test_x.to(kind))
        self.count = train

    @property
    def size(self) -> int:
        return self.count

    def to(self, device: torch.device, dtype: torch.dtype = torch.float32) -> Any:
        return self


def each_one(outputs: Tensor, targets: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(outputs, targets, reduction="none")


@pytest.mark.parametrize("dtype", ["float64", "float16"])
def test_data_in_another_precision(dtype: str) -> None:
    what = recipe(data=Spec("test_train_errors.Typed", {"dtype": dtype}), steps=3, precision="fp32")
    assert run_recipe(what).status == "finished"


def test_a_history_without_checkpoints_is_not_written_over(tmp_path: Path) -> None:
    diverging = recipe(tmp_path, optimizer=Spec("torch.optim.SGD", {"lr": 1e200}), checkpoints=Checkpoints(every=0))
    assert run_recipe(diverging).status == "diverged"
    with refused("history of a run without checkpoints", leaves=tmp_path):
        run_recipe(recipe(tmp_path))


def test_a_damaged_line_of_metrics_costs_itself_alone(tmp_path: Path) -> None:
    what = recipe(tmp_path, steps=8, log_every=2, evaluation=Evaluation())
    run_recipe(what)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "metrics.jsonl").write_text("".join([lines[0], "not JSON\n", "3\n", *lines[2:]]))
    run_recipe(replace(what, steps=10), resume=True)
    assert column(tmp_path, "step") == [2, 6, 8, 10]


def mlp(**changes: int) -> Spec:
    return replace(small_runs.MLP, init_args={**small_runs.MLP.init_args, **changes})


def gpt2(**changes: int) -> Spec:
    return replace(small_runs.HEADS, init_args={**small_runs.HEADS.init_args, **changes})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"noise": 1.0}, "noise is for a run that starts from a checkpoint"),
        ({"start_width": 8}, "from_width is for a run that starts from a checkpoint"),
        ({"start": "x", "start_width": 0}, "from_width is 0"),
        ({"schedule": Schedule("cosine", floor=-3.0)}, "schedule.floor is -3.0"),
        ({"schedule": Schedule(warmup=-1)}, "schedule.warmup is -1"),
        ({"seeds": Seeds(init=1 << 70)}, "seeds.init is"),
        ({"loss": "torch.pi"}, "not a function of outputs and targets"),
        ({"loss": "mine"}, "give module.name"),
        ({"loss": "test_train_errors.each_one"}, "gives shape (8,), not one number"),
        ({"data": Spec("test_train_errors.Typed", {"train": 0})}, "nothing to train on"),
        ({"model": mlp(d_in=9)}, "of shape (6,)"),
        ({"model": mlp(d_out=2)}, "the model has 2 outputs, but the data has 3 classes"),
        ({"kind": "gpt2-heads", "model": gpt2(vocab=7)}, "the model has 7 outputs, but the data has 11 classes"),
        ({"kind": "gpt2-heads", "model": gpt2(context=4)}, "context is 4"),
        ({"data": Spec("test_train_errors.Empty")}, "nothing to evaluate on"),
        ({"device": "mps"}, "device mps cannot be used here"),
        ({"device": "gpu"}, "there is no device 'gpu': give auto, cpu, cuda or cuda:0"),
    ],
)
def test_one_sentence(changes: dict[str, Any], words: str) -> None:
    with refused(words):
        run_recipe(recipe(**changes))


def test_more_outputs_than_classes() -> None:
    """A vocabulary is often rounded up."""
    assert run_recipe(recipe(model=mlp(d_out=8), steps=2)).status == "finished"


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_gpu_that_is_not_there() -> None:
    with refused("cuda", "auto"):
        run_recipe(recipe(device="cuda"))
