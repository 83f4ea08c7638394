"""What a checkpoint says of its run: where the run stands and what it has used so far."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from mupscale.core import WholeWidth
from mupscale.system import MupscaleError


@dataclass(frozen=True)
class RunState:
    """Where a run stands when its checkpoint is written.

    A field is None where the checkpoint does not say it. A model that is written without a run, for a later one to
    start from, says its width alone.

    Args:
        step: optimizer steps so far
        width: the model's width
        lr: learning rate at the base width, before the schedule
        flops: training FLOPs so far
        seconds: seconds of training so far
        losses: losses of the steps since the last line of metrics
        norms: gradient norms of these steps, if the gradient is clipped
        left_out: batches of the data that were left out where the run went back from a loss that was not finite
        recipe: the recipe as plain values
        data: a fingerprint of the data
        threads: of torch, on whose number sums on a CPU depend in their last bits

    >>> RunState(width=16).to_json()
    {'width': 16}
    >>> RunState.from_json({"width": 16, "step": 300}, Path("base.safetensors")).step
    300
    """

    step: int | None = None
    width: WholeWidth | None = None
    lr: float | None = None
    flops: float | None = None
    seconds: float | None = None
    losses: list[float] | None = None
    norms: list[float] | None = None
    left_out: int | None = None
    recipe: dict[str, Any] | None = None
    data: str | None = None
    threads: int | None = None

    @property
    def optimizer_class(self) -> str | None:
        """Import path of the optimizer's class."""
        optimizer = (self.recipe or {}).get("optimizer")
        path = optimizer.get("class_path") if isinstance(optimizer, dict) else None
        return path if isinstance(path, str) else None

    def to_json(self) -> dict[str, Any]:
        """Plain values, without the fields that are None."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @classmethod
    def from_json(cls, values: Any, path: Path) -> RunState:
        """The state from what `to_json` gave; `path` is the checkpoint that an error names."""
        if not isinstance(values, Mapping):
            raise MupscaleError(f"{path}: 'run' is {_shown(values)}, but must be the values of a run by name")
        state = {field.name: values[field.name] for field in fields(cls) if values.get(field.name) is not None}
        for name, value in state.items():
            expected, is_valid = _CHECKS[name]
            if not is_valid(value):
                raise MupscaleError(f"{path}: the run's '{name}' is {_shown(value)}, but must be {expected}")
        return cls(**state)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_width(value: Any) -> bool:
    return all(map(_is_count, value.values())) if isinstance(value, dict) else _is_count(value)


def _is_list_of_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_number, value))


_CHECKS = {
    "step": ("a whole number", _is_count),
    "width": ("a whole number, or one for each argument", _is_width),
    "lr": ("a number", _is_number),
    "flops": ("a number", _is_number),
    "seconds": ("a number", _is_number),
    "losses": ("a list of numbers", _is_list_of_numbers),
    "norms": ("a list of numbers", _is_list_of_numbers),
    "left_out": ("a whole number", _is_count),
    "recipe": ("a recipe's values by name", lambda value: isinstance(value, dict)),
    "data": ("a fingerprint", lambda value: isinstance(value, str)),
    "threads": ("a whole number", _is_count),
}


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
