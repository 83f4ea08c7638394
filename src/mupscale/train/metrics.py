"""Numbers of a run: one per step, on the device until somebody looks; and the lines of its metrics, by their types."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mupscale.system import MupscaleError, show_short
from mupscale.train.processes import Processes

_NUMBERS = ("loss", "lr", "flops", "seconds", "accuracy", "grad_norm")
_PLAIN = 1 << 62
_NEEDED = {"train": ("loss",), "eval": ("loss",), "grow": ("width",), "end": ("status",)}


class MetricsChecks:
    """The checks of a file's lines, most of which have the same fields of the same types as one before.

    Of such a line only whole numbers are looked at, for a type says nothing of their size. Where a line is of a new
    form, or a number is not plainly right, `check_metrics` has the word.

    >>> checks = MetricsChecks("metrics.jsonl")
    >>> checks.check({"kind": "train", "step": 1, "loss": 0.5}, 1)
    >>> checks.check({"kind": "train", "step": -2, "loss": 0.5}, 2)
    Traceback (most recent call last):
    mupscale.system.errors.MupscaleError: metrics.jsonl, line 2: 'step' is -2, but must be a whole number: remove ...
    """

    def __init__(self, path: str | Path) -> None:
        self.path = path
        self.sound: dict[tuple[Any, ...], tuple[str, ...]] = {}

    def check(self, record: Mapping[str, Any], number: int) -> None:
        """Refuse the line of this number if something is wrong with it."""
        form = (record["kind"], *record, *map(type, record.values()))
        if not self._is_sound(record, form):
            check_metrics(record, f"{self.path}, line {number}")
            if dict not in form:
                self.sound[form] = tuple(name for name, value in record.items() if type(value) is int)

    def _is_sound(self, record: Mapping[str, Any], form: tuple[Any, ...]) -> bool:
        try:
            whole = self.sound[form]
        except (KeyError, TypeError):  # a new form, or a kind that is a list
            return False
        for name in whole:  # noqa: SIM110 - a generator for every line takes half as long again
            if not 0 < record[name] < _PLAIN:
                return False
        return True


def check_metrics(record: Mapping[str, Any], where: str) -> None:
    """Refuse a line whose fields are missing or of another type; where: the file and the line.

    >>> check_metrics({"kind": "train", "step": None, "loss": 0.5}, "metrics.jsonl, line 3")
    Traceback (most recent call last):
    mupscale.system.errors.MupscaleError: metrics.jsonl, line 3: 'step' is None, but must be a whole number: remove ...
    """
    _check(isinstance(record["kind"], str), record, "kind", "text", where)
    for name in ("step", "at"):
        _check(name not in record or _is_step(record[name]), record, name, "a whole number", where)
    for name in _NUMBERS:
        value = record.get(name)
        fits = value is None or (isinstance(value, int | float) and not isinstance(value, bool) and _is_small(value))
        _check(fits, record, name, "a number", where)
    for name in _NEEDED.get(record["kind"], ()):
        if name not in record:
            raise MupscaleError(f"{where}: '{name}' is missing: remove the line")
    _check(isinstance(record.get("status", ""), str), record, "status", "text", where)
    _check("width" not in record or _is_width(record["width"]), record, "width", "a width", where)


def _check(fits: bool, record: Mapping[str, Any], name: str, expected: str, where: str) -> None:
    if not fits:
        raise MupscaleError(
            f"{where}: '{name}' is {show_short(record.get(name))}, but must be {expected}: remove the line"
        )


def _is_step(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def _is_small(value: float) -> bool:
    return not isinstance(value, int) or abs(value) < 1 << 1000


def _is_width(value: Any) -> bool:
    if isinstance(value, dict):
        return bool(value) and all(map(_is_width_number, value.values()))
    return _is_width_number(value)


def _is_width_number(value: Any) -> bool:
    return _is_step(value) and value > 0


class MetricSeries:
    """A number per step, fetched from the device and averaged over processes only when somebody looks."""

    def __init__(self, processes: Processes) -> None:
        self.processes = processes
        self.pending: list[Tensor] = []
        self.settled: list[float] = []
        self.finite = True  # whether everything fetched so far is

    def add(self, value: Tensor) -> None:
        """The number of the next step."""
        self.pending.append(value)

    def settle(self) -> None:
        """Fetch what is pending."""
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
        mean = math.fsum(self.settled) / len(self.settled) if self.settled else math.nan
        self.settled = []
        return mean
