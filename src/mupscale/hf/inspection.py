"""What will happen to a checkpoint, before it happens: every tensor's axes, its Rule, and the factors that follow."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from mupscale.core import Axis, Entry, Plan
from mupscale.hf.describe import PlannedArchitecture, Times, architecture_of
from mupscale.hf.files import Record, open_source, shorten_number
from mupscale.hf.verification import find_record
from mupscale.optim import Traits, default_hyper, traits_of
from mupscale.system import MupscaleError

_DIGITS = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True)
class InspectionRow:
    """Tensors that differ in their layer alone."""

    name: str
    count: int
    entry: Entry
    output: str
    input: str
    factors: Mapping[str, float | tuple[float, ...]]


@dataclass(frozen=True)
class Inspection:
    """The rows, and around them: which sizes of the config change, and how large the model becomes."""

    folder: Path
    architecture: PlannedArchitecture
    times: Times
    optimizer: str
    sizes: Mapping[str, tuple[Any, Any]]
    rows: tuple[InspectionRow, ...]
    numbers: tuple[int, int]
    record: Record | None

    @property
    def model_type(self) -> str:
        """The architecture, as transformers calls it."""
        return self.architecture.model_type

    @property
    def described(self) -> bool:
        """Whether there is a description of the architecture."""
        return self.architecture.described

    @property
    def groups(self) -> int:
        """How many parameter groups the optimizer will have; what it cannot train (Muon: no matrix) is in none."""
        trained = [row.factors for row in self.rows if all(value == value for value in row.factors.values())]
        return len({tuple(factors.items()) for factors in trained})

    def summary(self) -> list[str]:
        """A few sentences."""
        before, after = map(shorten_number, self.numbers)
        lines = [
            f"{self.model_type} ({self.architecture.origin}), {before} → {after} numbers with --times {self.times}"
        ]
        lines += [", ".join(f"{name} {a} → {b}" for name, (a, b) in self.sizes.items())]
        folds = [row.name for row in self.rows if row.entry.fold != 1]
        if folds:
            lines.append(f"a constant is folded into {', '.join(folds)}")
        if self.record is not None:
            steps = " and then ".join(str(growth.times) for growth in self.record.growths)
            lines.append(
                f"it has been upscaled before, by {steps}: param_groups counts from the first model, and the factors "
                f"shown here count from this one"
            )
        groups = f"{self.groups} parameter group{'s' * (self.groups != 1)}"
        lines.append(f"{self.optimizer} gets {groups}; its factors are in the last columns")
        return lines

    def table(self) -> Any:
        """For a terminal, through rich."""
        from rich.table import Table

        table = Table(box=None, header_style="bold", pad_edge=False)
        table.add_column("tensors", overflow="fold")
        names = list(self.rows[0].factors) if self.rows else []
        for title in ("shape", "output", "input"):
            table.add_column(title, overflow="fold")
        for title in ("out", "in", "fold", "weight", *names):
            table.add_column(title.replace("weight_decay", "decay"), justify="right", no_wrap=True)
        for row in self.rows:
            rule = row.entry.rule
            values = (rule.out, rule.in_, row.entry.fold, rule.weight, *row.factors.values())
            label = row.name if row.count == 1 else f"{row.name} ({row.count})"
            table.add_row(label, _shapes(row.entry), row.output, row.input, *map(_short, values))
        return table


def inspect(
    path: str | Path, *, times: int | str | Times = 2, optimizer: str | type[Optimizer] = "AdamW"
) -> Inspection:
    """How a checkpoint would be upscaled: nothing but headers and config.json is read.

    >>> import json, pathlib, tempfile, torch
    >>> from safetensors.torch import save_file
    >>> temporary = tempfile.TemporaryDirectory()
    >>> folder = pathlib.Path(temporary.name)
    >>> _ = (folder / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_embd": 8, "n_head": 2}))
    >>> save_file({"wte.weight": torch.ones(11, 8)}, folder / "model.safetensors")
    >>> inspection = inspect(folder, times=2)
    >>> [(row.name, row.entry.wide, row.factors["lr"]) for row in inspection.rows]
    [('wte.weight', (11, 16), 1.0)]
    >>> print(inspection.summary()[0])
    gpt2 (as described), 88 → 176 numbers with --times 2
    >>> temporary.cleanup()
    """
    source, times = open_source(path), Times.of(times)
    cls = find_optimizer(optimizer) if isinstance(optimizer, str) else optimizer
    architecture = architecture_of(source.config)
    plan = architecture.plan_parameters(source.config, times, source.shapes)
    wide = architecture.wide_config(source.config, times)
    sizes = {n: (source.config.get(n), v) for n, v in wide.items() if source.config.get(n) != v}
    entries = plan.parameters.values()
    numbers = (sum(math.prod(e.narrow) for e in entries), sum(math.prod(e.wide) for e in entries))
    rows = _rows(architecture, plan, traits_of(cls), default_hyper(cls, {}))
    return Inspection(
        source.folder,
        architecture,
        times,
        cls.__name__,
        sizes,
        tuple(rows),
        numbers,
        find_record(source),
    )


def find_optimizer(name: str) -> type[Optimizer]:
    """An optimizer of torch by its name, in capitals or not."""
    classes = {n.lower(): c for n, c in vars(torch.optim).items() if isinstance(c, type) and issubclass(c, Optimizer)}
    if name.lower() not in classes:
        raise MupscaleError(f"torch has no optimizer '{name}'; it has AdamW, SGD, Adam, Adafactor, Muon and others")
    return classes[name.lower()]


def _rows(
    architecture: PlannedArchitecture, plan: Plan, optimizer_traits: Traits, hyper: Mapping[str, Any]
) -> list[InspectionRow]:
    merged: dict[tuple[Any, ...], list[str]] = {}
    for name, entry in plan.parameters.items():
        key = (_DIGITS.sub("*", name), entry.narrow, entry.wide, entry.rule, tuple(entry.axes.items()))
        merged.setdefault(key, []).append(name)
    rows = []
    for (label, *_), names in merged.items():
        entry = plan.parameters[names[0]]
        wires = architecture.wires_of(names[0], len(entry.narrow))
        output, input_ = (
            ", ".join(_axis(wires.get(d, ""), entry.axes[d]) for d in dims) for dims in (entry.out, entry.in_)
        )
        fits, factors = not optimizer_traits.matrices_only or len(entry.narrow) == 2, optimizer_traits.hyper
        values = {n: factor(entry, hyper) if fits else float("nan") for n, factor in factors.items() if n in hyper}
        rows.append(InspectionRow(label, len(names), entry, output, input_, values))
    return rows


def _axis(wire: str, axis: Axis) -> str:
    blocks = [block for _, block in axis.sections] or [axis.block]
    by = "" if blocks == [1] or axis.times == 1 else f" by {'|'.join(map(str, blocks))}"
    return f"{wire} {axis.times}×{by}".strip()


def _shapes(entry: Entry) -> str:
    narrow, wide = ("×".join(map(str, shape)) or "1" for shape in (entry.narrow, entry.wide))
    return narrow if narrow == wide else f"{narrow} → {wide}"


def _short(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(_short, value))
    return "–" if value != value else f"{float(value):.4g}"
