"""What a recipe's run tells others while it goes on: callbacks by class path, and three that ship.

callbacks:
- class_path: mupscale.train.WeightsAndBiases
  init_args: {project: widening}
- mupscale.train.JsonLines
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer

from mupscale.system import MupscaleError, check_installed, make_folder, open_file, require
from mupscale.train.class_paths import Spec


class TensorBoardWriter:
    """Writes every number of a record of metrics as `kind/name`."""

    def __init__(self, folder: Path, step: int) -> None:
        check_installed(["tensorboard"], "tensorboard: true")
        try:
            module = import_module("torch.utils.tensorboard")
        except ImportError:  # a part of it is missing
            raise MupscaleError("tensorboard: true needs tensorboard: pip install 'mupscale[plots]'") from None
        first = step + 1  # what a kill left of later steps comes again
        self.writer = module.SummaryWriter(str(folder), purge_step=first)

    def write(self, record: dict[str, Any]) -> None:
        """One record."""
        for name, value in record.items():
            if name != "step" and isinstance(value, int | float):
                self.writer.add_scalar(f"{record['kind']}/{name}", value, record["step"])

    def close(self) -> None:
        """Flush."""
        self.writer.close()


Record = Mapping[str, Any]


class RunInProgress(Protocol):
    """What a callback sees of a run."""

    step: int
    model: nn.Module
    optimizer: Optimizer
    recipe: Any
    width: Any


class Callback:
    """Told what happens in a run, in its main process alone; a subclass has those of these methods that it needs.

    reaches_out: whether it writes or sends anything beyond the run's own folder, as it is made without arguments.

    >>> class Growths(Callback):
    ...     def growth(self, run: RunInProgress, record: Record) -> None:
    ...         print("grown to", run.width)
    """

    reaches_out = False

    def begin(self, run: RunInProgress) -> None:
        """Before the first step, or the first after a resume."""

    def step(self, run: RunInProgress) -> None:
        """After every optimizer step."""

    def metrics(self, run: RunInProgress, record: Record) -> None:
        """Every line of metrics, of whatever kind: train, eval, grow, end."""

    def evaluation(self, run: RunInProgress, record: Record) -> None:
        """After an evaluation."""

    def growth(self, run: RunInProgress, record: Record) -> None:
        """After a growth, with the wide model and its optimizer in place."""

    def end(self, run: RunInProgress, record: Record) -> None:
        """At the end; record["status"] is finished, diverged or interrupted."""


class JsonLines(Callback):
    """Appends every line of metrics to a file. path: by default metrics-copy.jsonl in the run's folder."""

    def __init__(self, path: str | None = None) -> None:
        self.path = None if path is None else Path(path)

    def begin(self, run: RunInProgress) -> None:
        """Settle where the file is."""
        if self.path is None:
            self.path = _folder(run, "JsonLines", "path") / "metrics-copy.jsonl"
        make_folder(self.path.parent)

    def metrics(self, run: RunInProgress, record: Record) -> None:
        """One line; what is not finite is null."""
        assert self.path is not None
        plain = {n: None if isinstance(v, float) and not math.isfinite(v) else v for n, v in record.items()}
        with open_file(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(plain) + "\n")


class TensorBoard(Callback):
    """Writes every number of the metrics for TensorBoard. folder: by default the run's own.

    >>> TensorBoard("boards/mine").folder
    'boards/mine'
    """

    def __init__(self, folder: str | None = None) -> None:
        self.folder = folder
        self.writer: TensorBoardWriter | None = None

    def begin(self, run: RunInProgress) -> None:
        """Open the files."""
        folder = _folder(run, "TensorBoard", "folder") if self.folder is None else Path(self.folder)
        self.writer = TensorBoardWriter(folder, run.step)

    def metrics(self, run: RunInProgress, record: Record) -> None:
        """One record."""
        assert self.writer is not None
        self.writer.write(dict(record))

    def end(self, run: RunInProgress, record: Record) -> None:
        """Flush."""
        if self.writer is not None:
            self.writer.close()


class WeightsAndBiases(Callback):
    """Sends metrics to Weights & Biases, with the recipe as the config. init: arguments of wandb.init.

    A run that is resumed goes on as the same one where `id` is among them, or the run has a folder, which names it.

    >>> WeightsAndBiases(project="widening", mode="offline").init
    {'project': 'widening', 'mode': 'offline'}
    """

    reaches_out = True

    def __init__(self, **init: Any) -> None:
        self.init = init
        self.run: Any = None

    def begin(self, run: RunInProgress) -> None:
        """Open the run there."""
        wandb = require("wandb", reason="WeightsAndBiases needs wandb")
        name = {} if run.recipe.out is None else {"name": Path(run.recipe.out).name}
        self.run = wandb.init(**{"config": run.recipe.to_json(), "resume": "allow", **name, **self.init})

    def metrics(self, run: RunInProgress, record: Record) -> None:
        """Numbers, as kind/name at the run's step."""
        numbers = {f"{record['kind']}/{n}": v for n, v in record.items() if isinstance(v, int | float) and n != "step"}
        self.run.log(numbers, step=int(record["step"]))

    def end(self, run: RunInProgress, record: Record) -> None:
        """Close the run there."""
        self.run.finish(exit_code=0 if record.get("status") == "finished" else 1)


class CallbackList:
    """The callbacks of a run, told one after another.

    >>> CallbackList([]).tell("begin", None)
    """

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self.callbacks = list(callbacks)

    def tell(self, event: str, *arguments: Any) -> None:
        """Call the method of this name of each."""
        for callback in self.callbacks:
            getattr(callback, event)(*arguments)

    def tell_record(self, run: RunInProgress, record: Record) -> None:
        """A line of metrics, and the event that it is of."""
        self.tell("metrics", run, record)
        event = {"eval": "evaluation", "grow": "growth", "end": "end"}.get(record["kind"])
        if event is not None:
            self.tell(event, run, record)


def make_callbacks(specs: Sequence[str | Mapping[str, Any]]) -> list[Callback]:
    """Callbacks by their class paths, with arguments (class_path and init_args) or without.

    >>> [type(callback).__name__ for callback in make_callbacks(["mupscale.train.JsonLines"])]
    ['JsonLines']
    """
    return [spec.make(Callback) for spec in callback_specs(specs)]


def callback_specs(callbacks: Sequence[str | Mapping[str, Any]]) -> list[Spec]:
    """Class path and arguments of each, as a recipe has them."""
    specs = []
    for one in callbacks:
        values = {"class_path": one} if isinstance(one, str) else dict(one)
        if not isinstance(values.get("class_path"), str) or set(values) - {"class_path", "init_args"}:
            raise MupscaleError(f"callbacks: {one} is neither a class path nor class_path with init_args")
        specs.append(Spec(**values))
    return specs


def _folder(run: RunInProgress, name: str, argument: str) -> Path:
    if run.recipe.out is None:
        raise MupscaleError(f"{name} needs a folder to write to, because the run has none (out): give its {argument}")
    return Path(run.recipe.out)
