"""The files of a wide checkpoint, laid out before a tensor is read: which tensor goes where, from its plan alone."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from mupscale.core import Axis, Entry, Plan, check_dtype
from mupscale.growth import NewTensor
from mupscale.hf.files.safetensors_format import StoredTensor, make_header
from mupscale.hf.files.source import Source
from mupscale.system import MupscaleError, replace_text, show_short

_SIZES = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_SIZES |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}


@dataclass(frozen=True)
class WideTensor:
    """One tensor of the output: where it comes from, how it grows, and where it goes.

    name: the plan's, under which its noise is drawn; tied tensors have one. new: what it is instead, in a new layer.
    rows: how many copies of each row of what it grows to there are, as a router with more experts has.
    """

    name: str
    source: StoredTensor
    entry: Entry
    target: StoredTensor
    new: NewTensor | None = None
    rows: int = 1

    def places(self, at: int, count: int) -> Iterator[tuple[int, int, int]]:
        """Of so many entries from `at` on of what it grows to, runs (start, stop), and where in the target each lies.

        >>> target = StoredTensor(Path(), torch.float32, (4, 2), 0)
        >>> list(WideTensor("router", target, Entry((2, 2), (2, 2)), target, rows=2).places(1, 2))
        [(0, 1, 1), (0, 1, 3), (1, 2, 4), (1, 2, 6)]
        """
        if self.rows == 1:
            yield 0, count, at
            return
        row, start = self.target.numel // self.target.shape[0], 0
        while start < count:
            number, within = divmod(at + start, row)
            stop = min(count, start + row - within)
            yield from ((start, stop, (number * self.rows + copy) * row + within) for copy in range(self.rows))
            start = stop


@dataclass(frozen=True)
class WeightShard:
    """One file of the output; `head` is what comes before its tensors."""

    file: str
    head: bytes
    tensors: Mapping[str, WideTensor]

    @property
    def bytes(self) -> int:
        """Of the whole file."""
        return len(self.head) + sum(tensor.target.bytes for tensor in self.tensors.values())


def parse_size(size: int | str) -> int:
    """'5GB', '500MB', '2GiB' or a number of bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Z]*)", "" if isinstance(size, bool) else str(size).strip().upper())
    count = 0.0 if match is None else float(match[1]) * _SIZES.get(match[2], 0)
    if not 1 <= count < 1 << 63:
        raise MupscaleError(f"{show_short(size)} is not a shard size. Write it as 5GB or 500MB")
    return int(count)


def size_in_words(size: int) -> str:
    """2.79 GB.

    >>> size_in_words(2_790_000_000)
    '2.79 GB'
    """
    return shorten_number(size, (" GB", " MB", " kB", " bytes"))


def shorten_number(number: int, units: tuple[str, ...] = (" B", " M", " k", "")) -> str:
    """697.1 M: four digits and the power of a thousand.

    >>> shorten_number(697_100_000)
    '697.1 M'
    """
    scale, unit = next((s, u) for s, u in zip((1e9, 1e6, 1e3, 1.0), units, strict=True) if number >= s or s == 1)
    return f"{number / scale:,.4g}{unit}"


def arrange_shards(
    source: Source,
    plan: Plan,
    *,
    parts: Plan | None = None,
    seed: int = 0,
    dtype: torch.dtype | None = None,
    shard_size: int | str = "5GB",
) -> list[WeightShard]:
    """The files of the larger checkpoint, with all their tensors in place; nothing is read or written yet.

    plan: in width. parts: from the tensors of the wide checkpoint to those with new layers or experts, of which those
    are drawn from the seed that are made of no other's values; rows may be copied. dtype: of the floating-point
    tensors, which keep theirs where it is None.
    """
    largest, names = parse_size(shard_size), plan_names(source, plan)
    shards: list[dict[str, WideTensor]] = []
    used = largest + 1
    made = {name: name for name in source.tensors} if parts is None else {n: s.name for n, s in parts.sources.items()}
    for name, origin in made.items():
        tensor = _wide_tensor(origin, names[origin], source.tensors[origin], plan[names[origin]], dtype)
        if parts is not None:
            new, rows = NewTensor.of(name, parts, seed), parts[name].axes.get(0, Axis()).copies
            tensor = replace(tensor, new=new, rows=rows, target=replace(tensor.target, shape=parts[name].wide))
        if used + tensor.target.bytes > largest and (used or not shards):
            shards.append({})
            used = 0
        shards[-1][name] = tensor
        used += tensor.target.bytes
    count = len(shards)
    files = [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
    files = ["model.safetensors"] if count == 1 else files
    return [_place(file, tensors) for file, tensors in zip(files, shards, strict=True)]


def _wide_tensor(name: str, planned: str, stored: StoredTensor, entry: Entry, dtype: torch.dtype | None) -> WideTensor:
    if stored.shape != entry.narrow:
        raise MupscaleError(
            f"'{name}' has shape {stored.shape} in {stored.file.name} and {entry.narrow} by the config: the checkpoint "
            f"and its config.json do not belong together"
        )
    if not stored.dtype.is_floating_point:
        if entry.wide != entry.narrow:
            check_dtype(name, torch.empty(0, dtype=stored.dtype))
        dtype = None
    return WideTensor(planned, stored, entry, StoredTensor(Path(), dtype or stored.dtype, entry.wide, 0))


def _place(file: str, tensors: Mapping[str, WideTensor]) -> WeightShard:
    """Tensors of large numbers first, so that each starts at a multiple of its own, as safetensors does it."""
    ordered = dict(sorted(tensors.items(), key=lambda item: -item[1].target.dtype.itemsize))
    head, starts = make_header({name: (tensor.target.dtype, tensor.target.shape) for name, tensor in ordered.items()})
    places = {name: replace(tensor.target, file=Path(file), start=starts[name]) for name, tensor in ordered.items()}
    return WeightShard(file, head, {name: replace(tensor, target=places[name]) for name, tensor in ordered.items()})


def plan_names(source: Source, plan: Plan) -> dict[str, str]:
    """The plan's name of each tensor of the files."""
    return {name: plan_name(name, plan, stored.file.name) for name, stored in source.tensors.items()}


def plan_name(name: str, plan: Plan, file: str = "the files") -> str:
    """The plan's name of a tensor of a file.

    >>> plan_name("wte.weight", Plan({"transformer.wte.weight": Entry((2,), (2,), names=("wte.weight",))}))
    'transformer.wte.weight'
    """
    if name not in plan.names:
        raise MupscaleError(f"'{name}' in {file} is not in the plan: the plan was made for a different checkpoint")
    return plan.names[name]


def write_index(shards: Sequence[WeightShard], folder: Path) -> None:
    """Where each tensor is, as transformers writes it; one file alone needs no index."""
    if len(shards) == 1:
        return
    every = [tensor for shard in shards for tensor in shard.tensors.values()]
    content = {
        "metadata": {
            "total_parameters": sum(tensor.target.numel for tensor in every),
            "total_size": sum(tensor.target.bytes for tensor in every),
        },
        "weight_map": dict(sorted((name, shard.file) for shard in shards for name in shard.tensors)),
    }
    replace_text(folder / "model.safetensors.index.json", json.dumps(content, indent=2) + "\n")
