"""Numbers of a run: one per step, on the device until somebody looks; and lines of metrics, as they are on disk."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mupscale.system import MupscaleError, open_file, show_short
from mupscale.train.processes import Processes

Record = Mapping[str, Any]


class MetricSeries:
    """A number per step, fetched from the device and averaged over processes only when somebody looks."""

    def __init__(self, processes: Processes) -> None:
        self.processes = processes
        self.pending: list[Tensor] = []
        self.settled: list[float] = []
        self.finite = True  # whether everything fetched so far is

    def add(self, value: Tensor) -> None:
        self.pending.append(value)

    def settle(self) -> None:
        if self.pending:
            values = torch.stack([value.detach() for value in self.pending]).double().to(self.processes.device)
            settled = self.processes.mean(values).tolist()
            self.finite = self.finite and all(map(math.isfinite, settled))
            self.settled += settled
            self.pending = []

    def diverged_at(self, step: int) -> int:
        """The step whose number is the first that is not finite, if the last one is that of `step`; or the next."""
        first = next((i for i, value in enumerate(self.settled) if not math.isfinite(value)), len(self.settled))
        return step - len(self.settled) + first + 1

    def flush(self) -> float:
        """The mean of what is settled, which is then forgotten; no number where every step was left out."""
        mean = exact_mean(self.settled)
        self.settled = []
        return mean


def exact_mean(numbers: list[float]) -> float:
    """The mean to the last bit, whatever the order; no number of none."""
    return math.fsum(numbers) / len(numbers) if numbers else math.nan


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
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(record, dict) and "kind" in record and "step" in record and line.endswith("\n"):
                _check(record, path, number)
                yield line, record


def _check(record: Record, path: Path, number: int) -> None:
    """Refuse a line whose fields are missing or of another type."""
    for name, value in record.items():
        if name in _FIELDS and not _FIELDS[name][1](value):
            expected = _FIELDS[name][0]
            raise MupscaleError(
                f"{path}, line {number}: '{name}' is {show_short(value)}, but must be {expected}: remove the line"
            )
    for name in _NEEDED.get(record["kind"], ()):
        if name not in record:
            raise MupscaleError(f"{path}, line {number}: '{name}' is missing: remove the line")


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
