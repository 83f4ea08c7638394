"""Runs small enough for a test: data, recipes, what a run leaves behind, and processes of their own to be killed."""

from __future__ import annotations

import itertools
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import mupscale as mu
import processes
from mupscale import checkpoint
from mupscale.data import Data, Split, Table
from mupscale.data.stream import Batch
from mupscale.system.errors import MupscaleError
from mupscale.system.seeds import derive
from mupscale.train import Evaluation, Growth, Recipe, Result, Spec, TrainingRun, run_recipe
from weights import identical

ADAMW = Spec("torch.optim.AdamW", {"lr": 0.02, "betas": [0.9, 0.95], "weight_decay": 0.2, "eps": 1e-2})
GENTLE = Spec("torch.optim.AdamW", {**ADAMW.init_args, "lr": 0.002, "eps": 1e-3})
SGD = Spec("torch.optim.SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.05})
FEATURES, CLASSES, VOCAB, CONTEXT, SIDE = 6, 3, 11, 6, 8

# ------------------------------------------------------------------------------------------------ data and models


def rows(train: int = 80, test: int = 21) -> Split:
    """A table with something to learn in it."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(train + test, FEATURES, generator=generator)
    y = (x.sin() @ torch.randn(FEATURES, CLASSES, generator=generator)).argmax(1)
    return Split(x[:train], y[:train], x[train:], y[train:])


class Rows(Table):
    """Six numbers and one of three classes; 80 rows to train on and 21 to evaluate on."""

    def __init__(self) -> None:
        super().__init__(rows(), CLASSES)


class Slow(Rows):
    """The same, slow enough to be stopped in the middle of it."""

    def __init__(self, seconds: float = 0.005) -> None:
        super().__init__()
        self.seconds = seconds

    def examples(self, rows: Tensor) -> Batch:
        time.sleep(float(self.seconds) if len(rows) > 1 else 0)  # one alone, as for the model's cost, comes at once
        return super().examples(rows)


class Watched(Rows):
    """The same; `seen` has the rows that were asked for, the first of them for the model's cost."""

    seen: list[list[int]]

    def examples(self, rows: Tensor) -> Batch:
        Watched.seen.append(rows.tolist())
        return super().examples(rows)


class Curve(Table):
    """Targets that are no classes."""

    def __init__(self) -> None:
        split = rows()
        super().__init__(Split(split.train_x, split.train_x.sin(), split.test_x, split.test_x.sin()))


class Pictures(Table):
    """Images of noise, brighter in one channel."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        y = torch.arange(48) % CLASSES
        x = torch.randn(48, 3, SIDE, SIDE, generator=generator) + nn.functional.one_hot(y, 3)[:, :, None, None]
        super().__init__(Split(x[:40], y[:40], x[40:], y[40:]), CLASSES)


class Words(Data):
    """Windows of a text in which each token depends on the one before."""

    unit, per_example, classes = "tokens", CONTEXT, VOCAB

    def __init__(self) -> None:
        steps = torch.randint(1, 3, (200,), generator=torch.Generator().manual_seed(0))
        self.text = steps.cumsum(0) % VOCAB

    @property
    def size(self) -> int:
        """Windows to train on."""
        return 150

    def examples(self, rows: Tensor) -> Batch:
        at = rows[:, None] + torch.arange(CONTEXT)
        return self.text[at], self.text[at + 1]

    def evaluation(self, batch: int) -> Iterator[Batch]:
        for some in torch.arange(160, 190).split(batch):
            yield self.examples(some)


class Dropping(nn.Module):
    """A model that draws random numbers while it trains."""

    def __init__(self, width: int, p: float = 0.2) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, width), nn.Linear(width, width)
        self.drop, self.readout = nn.Dropout(p), nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.readout(self.drop(self.second(self.drop(self.first(x).tanh())).tanh()))


class Normed(nn.Module):
    """A model with buffers, and so with more than parameters for a run to have of its own."""

    def __init__(self, width: int, momentum: float = 0.1) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(FEATURES, width, bias=False), nn.BatchNorm1d(width, momentum=momentum)
        self.readout = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.readout(self.norm(self.first(x)).relu())


def squared(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss of one's own."""
    return (outputs - targets).square().mean()


# ------------------------------------------------------------------------------------------------ recipes

MLP = Spec("mupscale.models.MLP", {"d_in": FEATURES, "d_out": CLASSES, "depth": 3})
WIDTHS = {"data": Spec("small_runs.Rows"), "width": 8, "base": 4}
WORDS = {"vocab": VOCAB, "context": CONTEXT, "layers": 1}
HEADS = Spec("mupscale.models.GPT2", {**WORDS, "head_dim": 4})
DIMS = Spec("mupscale.models.GPT2", {**WORDS, "heads": 2, "attention_multiplier": 2.0})
RESNET = Spec("mupscale.models.ResNet18", {"classes": CLASSES})
KINDS: dict[str, dict[str, Any]] = {
    "mlp": {**WIDTHS, "model": MLP},
    "dropping": {**WIDTHS, "model": Spec("small_runs.Dropping"), "data": Spec("small_runs.Slow")},
    "normed": {**WIDTHS, "model": Spec("small_runs.Normed")},
    "gpt2-heads": {**WIDTHS, "model": HEADS, "data": Spec("small_runs.Words")},
    "gpt2-dims": {"model": DIMS, "data": Spec("small_runs.Words"), "width": {"head_dim": 4}, "base": {"head_dim": 2}},
    "resnet": {"model": RESNET, "data": Spec("small_runs.Pictures"), "width": 2, "base": 2, "init_at": 2, "batch": 16},
}


def recipe(out: Path | str | None = None, kind: str = "mlp", **changes: Any) -> Recipe:
    """A short run in float64, all of whose fields can be changed."""
    usual = {"optimizer": ADAMW, "steps": 20, "batch": 8, "precision": "fp64", "log_every": 1, "device": "cpu"}
    folder = None if out is None else str(out)
    return Recipe(**{**usual, "evaluation": Evaluation(every=7), **KINDS[kind], "out": folder, **changes})


def copies(at: int, width: Any = 0, **more: Any) -> Growth:
    """Growth by copies."""
    return Growth(at, width, how="copies", **more)


def by_hand(what: Recipe, model: nn.Module, optimizer: Optimizer, lr: float, steps: range) -> list[float]:
    """These steps of a recipe as one would write them: the library's parts in a bare loop; their losses."""
    data, losses = Rows().to(torch.device("cpu"), torch.float64), []
    for number in steps:
        torch.manual_seed(derive(what.seeds.dropout, number, 0))
        x, y = data.batch(what.seeds.data, what.batch * number, what.batch)
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        losses.append(float(loss.detach()))
        if what.clip is not None:
            mu.clip_grad_norm_(model, what.clip, optimizer)
        for group in optimizer.param_groups:
            group["lr"] = lr * what.schedule.at(number, what.steps) * group["lr_factor"]
        optimizer.step()
        optimizer.zero_grad()
    return losses


# ------------------------------------------------------------------------------------------------ what a run leaves


def metrics(out: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """Its metrics, as strict JSON."""
    lines = (out / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line, parse_constant=_refuse) for line in lines]
    return [record for record in records if kind in (None, record["kind"])]


def timeless(out: Path) -> list[dict[str, Any]]:
    """Its metrics without the clock."""
    return [{name: value for name, value in record.items() if name != "seconds"} for record in metrics(out)]


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def column(out: Path, name: str, kind: str = "train") -> list[Any]:
    """One number of each record of a kind."""
    return [record[name] for record in metrics(out, kind)]


def checkpoints(out: Path) -> list[str]:
    """The names in its folder of checkpoints."""
    return sorted(path.name for path in (out / "checkpoints").iterdir())


def step(number: int) -> str:
    """A checkpoint's name."""
    return f"step-{number:09d}.safetensors"


def tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint, model and optimizer."""
    saved = checkpoint.load(path)
    assert saved.optimizer is not None
    found = {f"model/{name}": tensor for name, tensor in saved.model.items()}
    for key, state in saved.optimizer["state"].items():
        found |= {f"optimizer/{key}/{name}": torch.as_tensor(value) for name, value in state.items()}
    return found


def assert_same_run(out: Path, other: Path) -> None:
    """Bit for bit the same: metrics but for the clock, and all that the last checkpoint holds."""
    assert timeless(out) == timeless(other)
    name = checkpoints(other)[-1]
    assert checkpoints(out)[-1] == name
    mine, yours = (checkpoint.load(folder / "checkpoints" / name) for folder in (out, other))
    assert identical((mine.model, mine.optimizer), (yours.model, yours.optimizer))
    ours, theirs = ({**saved.extra["run"], "seconds": None, "recipe": None} for saved in (mine, yours))
    assert ours == theirs


def contents(folder: Path) -> dict[Path, bytes]:
    """All files in a folder."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@contextmanager
def refused(*parts: object, leaves: Path | None = None) -> Iterator[None]:
    """A MupscaleError of one line that has all these parts; it leaves all files in this folder as they were."""
    before = leaves and contents(leaves)
    with pytest.raises(MupscaleError) as raised:
        yield
    said = str(raised.value)
    assert "\n" not in said
    for part in parts:
        assert str(part) in said, said
    assert (leaves and contents(leaves)) == before


# ------------------------------------------------------------------------------------------------ processes


class Child(processes.Child):
    """A run in a process of its own; `prepare` is called in it first. Its output is a file."""

    def __init__(
        self, recipe: Recipe, output: Path, *, resume: bool = False, prepare: Callable[[], object] = int
    ) -> None:
        super().__init__(output, _act, recipe, resume, prepare)


def _act(recipe: Recipe, resume: bool, prepare: Callable[[], object]) -> None:
    prepare()
    try:
        result: Result = run_recipe(recipe, resume=resume)
        print(f"{result.status} at step {result.step}")
    except MupscaleError as error:
        print(f"error: {error}")
    except KeyboardInterrupt:
        print("stopped at once")


# what a process may be prepared with


def at_changes(folder: str, act: Callable[[int], object]) -> None:
    """Call a function with 1, 2, … whenever this process is about to change something in the folder."""
    changes, numbers = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir"), itertools.count(1)

    def look(event: str, args: tuple[Any, ...]) -> None:
        reading = event == "open" and args[1] in ("r", "rb")
        if event in changes and folder in str(args[0]) and not reading:
            act(next(numbers))

    sys.addaudithook(look)


def die_at(folder: str, count: int) -> None:
    """Kill this process where it is about to change something in the folder for the so-many-th time."""
    at_changes(folder, lambda number: number == count and os.kill(os.getpid(), signal.SIGKILL))


def limit_files(size: int, survive: bool) -> None:
    """No file may become larger: as on a full disk, or the process is killed in the middle of writing it."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN if survive else signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def interrupt(step: int, *numbers: int) -> None:
    """Send this process these signals, one after the other, in its so-many-th step."""
    train_step, seen = TrainingRun._train_step, 0

    def interrupted(run: TrainingRun) -> None:
        nonlocal seen
        seen += 1
        if seen == step:
            for number in numbers:
                signal.raise_signal(number)
        train_step(run)

    TrainingRun._train_step = interrupted  # type: ignore[method-assign]
