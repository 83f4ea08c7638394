"""Lines of metrics, as they are on disk, and who is told of a run: the person at the terminal, callbacks by class path.

callbacks:
- class_path: mupscale.train.WeightsAndBiases
  init_args: {project: widening}
- mupscale.train.JsonLines
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer

from mupscale.system import Display, MupscaleError, check_installed, make_folder, open_file, require, show_short
from mupscale.train.recipe import Spec

Record = Mapping[str, Any]


def append_line(path: Path, record: Record) -> None:
    """Append a record, whole whenever the process is killed; JSON has null for what is not finite."""
    plain = {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in record.items()}
    with open_file(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(plain) + "\n")


def read_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every line with its record, one at a time, for there may be millions; but not one that a kill cut short."""
    if not path.is_file():  # nor a pipe, which would be waited for
        return
    with open(path, encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            record = read_record(line, f"{path}, line {number}") if line.endswith("\n") else None
            if record is not None:
                yield line, record


def read_record(line: str, where: str) -> dict[str, Any] | None:
    """The record in a line of metrics; None where there is none. where: what an error about its fields names."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or "kind" not in record or "step" not in record:
        return None
    _check(record, where)
    return record


def _check(record: Record, where: str) -> None:
    for name, value in record.items():
        if name in _FIELDS and not _FIELDS[name][1](value):
            expected = _FIELDS[name][0]
            raise MupscaleError(f"{where}: '{name}' is {show_short(value)}, but must be {expected}: remove the line")
    for name in _NEEDED.get(record["kind"], ()):
        if name not in record:
            raise MupscaleError(f"{where}: '{name}' is missing: remove the line")


def _is_number(value: Any) -> bool:
    return value is None or type(value) is float or (type(value) is int and abs(value) < 1 << 1000)


def _is_step(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _is_width(value: Any) -> bool:
    sizes = value.values() if isinstance(value, dict) else [value]
    return bool(sizes) and all(_is_step(size) and size > 0 for size in sizes)


_FIELDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "kind": ("text", lambda value: isinstance(value, str)),
    "status": ("text", lambda value: isinstance(value, str)),
    "width": ("a width", _is_width),
    **dict.fromkeys(("step", "at"), ("a whole number", _is_step)),
    **dict.fromkeys(("loss", "lr", "flops", "seconds", "accuracy", "grad_norm"), ("a number", _is_number)),
}
_NEEDED = {"train": ("loss",), "eval": ("loss",), "grow": ("width",), "end": ("status",)}


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

    def note(self, text: str) -> None:
        """What a person should know, in a sentence."""

    def close(self) -> None:
        """However the run has ended."""


def tell_record(callbacks: Sequence[Callback], run: RunInProgress, record: Record) -> None:
    """A line of metrics, and the event that it is of."""
    event = {"eval": "evaluation", "grow": "growth", "end": "end"}.get(record["kind"])
    for name in ("metrics", event) if event else ("metrics",):
        for callback in callbacks:
            getattr(callback, name)(run, record)


class Progress(Callback):
    """For a person: a bar with loss, throughput and time left on a terminal, plain lines elsewhere.

    steps: of the run. unit: what is counted, of which an example of the data has `per_example`, and a step `batch`
    examples.
    """

    def __init__(self, steps: int, unit: str, per_step: int) -> None:
        self.steps, self.unit, self.per_step = steps, unit, per_step
        columns = ("wide bar", "count", "{task.fields[shown]}", "time", "left", "time left")
        self.display = Display(columns, steps, lines="stdout", first_line_at_once=True, shown="")
        self._last = 0, 0.0

    def begin(self, run: RunInProgress) -> None:
        self._last = run.step, time.monotonic()

    def metrics(self, run: RunInProgress, record: Record) -> None:
        """The bar's new state, or a line if the last one is some time ago; evaluations stay."""
        step = record["step"]
        if record["kind"] == "train":
            (before, then), self._last = self._last, (step, time.monotonic())
            speed = (step - before) * self.per_step / (self._last[1] - then)
            shown = f"loss {record['loss']:.4f}{describe_speed(speed, self.unit)}"
            self.display.update(step, f"step {step}/{self.steps}  {shown}", last=step >= self.steps, shown=shown)
        elif record["kind"] == "eval":
            accuracy = f", accuracy {record['accuracy']:.1%}" if "accuracy" in record else ""
            shown = f"held-out loss {record['loss']:.4f}{accuracy}"
            self.display.note(f"step {step}  {shown}", f"step {step}/{self.steps}  {shown}")

    def note(self, text: str) -> None:
        self.display.note(text)

    def close(self) -> None:
        self.display.close()


def describe_speed(speed: float, unit: str) -> str:
    """So many units a second, in three digits; nothing where nothing was done."""
    if speed <= 0:
        return ""
    scale, prefix = next(((s, p) for s, p in ((1e9, "G"), (1e6, "M"), (1e3, "k")) if speed >= s), (1.0, ""))
    return "  " + " ".join(filter(None, (f"{speed / scale:.3g}", prefix, f"{unit}/s")))


class JsonLines(Callback):
    """Appends every line of metrics to a file. path: by default metrics-copy.jsonl in the run's folder."""

    def __init__(self, path: str | None = None) -> None:
        self.path = None if path is None else Path(path)

    def begin(self, run: RunInProgress) -> None:
        if self.path is None:
            self.path = _folder(run, "JsonLines", "path") / "metrics-copy.jsonl"
        make_folder(self.path.parent)

    def metrics(self, run: RunInProgress, record: Record) -> None:
        assert self.path is not None
        append_line(self.path, record)


class TensorBoard(Callback):
    """Writes every number of the metrics as `kind/name` for TensorBoard. folder: by default the run's own."""

    def __init__(self, folder: str | None = None) -> None:
        self.folder = folder
        self.writer: Any = None

    def begin(self, run: RunInProgress) -> None:
        self.open(_folder(run, "TensorBoard", "folder") if self.folder is None else Path(self.folder), run.step)

    def open(self, folder: Path, step: int) -> None:
        """Write into this folder, where what a kill left of later steps comes again."""
        check_installed(["tensorboard"], "tensorboard: true")
        try:
            module = import_module("torch.utils.tensorboard")
        except ImportError:  # a part of it is missing
            raise MupscaleError("tensorboard: true needs tensorboard: pip install 'mupscale[plots]'") from None
        self.writer = module.SummaryWriter(str(folder), purge_step=step + 1)

    def metrics(self, run: RunInProgress | None, record: Record) -> None:
        for name, value in numbers_of(record).items() if self.writer is not None else ():
            self.writer.add_scalar(name, value, record["step"])

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()
            self.writer = None


def numbers_of(record: Record) -> dict[str, float]:
    """The numbers of a record of metrics as kind/name, but for the step at which they are."""
    kind = record["kind"]
    return {f"{kind}/{n}": v for n, v in record.items() if isinstance(v, int | float) and n != "step"}


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
        wandb = require("wandb", reason="WeightsAndBiases needs wandb")
        name = {} if run.recipe.out is None else {"name": Path(run.recipe.out).name}
        self.run = wandb.init(**{"config": run.recipe.to_json(), "resume": "allow", **name, **self.init})

    def metrics(self, run: RunInProgress, record: Record) -> None:
        self.run.log(numbers_of(record), step=int(record["step"]))

    def end(self, run: RunInProgress, record: Record) -> None:
        self.run.finish(exit_code=0 if record.get("status") == "finished" else 1)


def make_callbacks(specs: Sequence[str | Mapping[str, Any]]) -> list[Callback]:
    return [spec.make(Callback) for spec in callback_specs(specs)]


def callback_specs(callbacks: Sequence[str | Mapping[str, Any]]) -> list[Spec]:
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
