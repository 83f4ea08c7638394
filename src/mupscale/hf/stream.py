"""From checkpoint to checkpoint in pieces: read a few rows, copy, rescale, perturb, round, write them in their place.

The plans tell every shape before a tensor is read, so all files are laid out and their headers written first, and
threads fill them in any order. A piece fits into a core's cache; memory is a few pieces per thread.
"""

from __future__ import annotations

import json
import math
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch
from torch import Tensor

from mupscale import growth
from mupscale.core import Axis, Entry, Shape, check_dtype, widened_shape
from mupscale.hf.record import PlannedGrowth, names_after, trace
from mupscale.hf.source import Source, StoredTensor, read_into
from mupscale.system import MupscaleError, make_header, open_file, raw_bytes, replace_text, show_short, usable_cores

BYTES = (" GB", " MB", " kB", " bytes")
_SIZES = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_SIZES |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}


@dataclass(frozen=True)
class WideTensor:
    """One tensor of the output: what it is made of, how, and where it goes.

    part: what it is in the plan of the growth in width, under which name its noise is drawn; tied tensors have one.
    grow: the operator of that growth. new: what it is instead, in a new layer. rows: how many copies of each row of
    what it grows to there are, as a router with more experts has. built: what new units take their values from, where
    it starts as a pattern.
    """

    name: str
    source: StoredTensor
    target: StoredTensor
    part: growth.Part | None
    grow: growth.Operator
    new: growth.NewTensor | None = None
    rows: int = 1
    built: Tensor | None = None

    @property
    def entry(self) -> Entry:
        return Entry(self.source.shape, self.source.shape) if self.part is None else self.part.plan[self.part.name]

    def places(self, at: int, count: int) -> Iterator[tuple[int, int, int]]:
        """Of so many entries from `at` on of what it grows to, runs (start, stop), and where each lies there."""
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
        return len(self.head) + sum(tensor.target.bytes for tensor in self.tensors.values())


def parse_size(size: int | str) -> int:
    """'5GB', '500MB', '2GiB' or a number of bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Z]*)", "" if isinstance(size, bool) else str(size).strip().upper())
    count = 0.0 if match is None else float(match[1]) * _SIZES.get(match[2], 0)
    if not 1 <= count < 1 << 63:
        raise MupscaleError(f"{show_short(size)} is not a shard size. Write it as 5GB or 500MB")
    return int(count)


def shorten_number(number: int, units: tuple[str, ...] = (" B", " M", " k", "")) -> str:
    """697.1 M, or of BYTES 2.79 GB: four digits and the power of a thousand."""
    scale, unit = next((s, u) for s, u in zip((1e9, 1e6, 1e3, 1.0), units, strict=True) if number >= s or s == 1)
    return f"{number / scale:,.4g}{unit}"


def arrange_shards(
    source: Source, steps: Sequence[PlannedGrowth], *, dtype: torch.dtype | None = None, shard_size: int | str = "5GB"
) -> list[WeightShard]:
    """The files of the larger checkpoint, with all their tensors in place; nothing is read or written yet.

    steps: at most one growth in width, and then one to more layers or experts. dtype: of the floating-point tensors,
    which keep theirs where it is None.
    """
    largest, shards = parse_size(shard_size), list[dict[str, WideTensor]]()
    used = largest + 1
    for name in names_after(source.tensors, steps):
        tensor = _wide_tensor(name, source, steps, dtype)
        if used + tensor.target.bytes > largest and (used or not shards):
            shards.append({})
            used = 0
        shards[-1][name] = tensor
        used += tensor.target.bytes
    count = len(shards)
    files = [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
    files = ["model.safetensors"] if count == 1 else files
    return [_place(file, tensors) for file, tensors in zip(files, shards, strict=True)]


def _wide_tensor(name: str, source: Source, steps: Sequence[PlannedGrowth], dtype: torch.dtype | None) -> WideTensor:
    history = trace(name, steps)
    stored, rows, shape = source.tensors[history.name], 1, steps[-1].shapes[name]
    part: growth.Part | None = None
    grow: growth.Operator = growth.Copies()
    built: Tensor | None = None
    for step, planned in history.ways:
        if step.growth.is_width:
            part, grow = growth.Part(planned, step.plan, step.growth.seed), step.growth.grow
            built = step.built.get(planned)
        else:
            rows = step.plan[planned].axes.get(0, Axis()).copies
    if part is not None and stored.shape != part.entry.narrow:
        raise MupscaleError(
            f"'{history.name}' has shape {stored.shape} in {stored.file.name} and {part.entry.narrow} by the config: "
            f"the checkpoint and its config.json do not belong together"
        )
    if not stored.dtype.is_floating_point:
        if part is not None and part.entry.wide != part.entry.narrow:
            check_dtype(name, torch.empty(0, dtype=stored.dtype))
        dtype = None
    target = StoredTensor(Path(), dtype or stored.dtype, shape, 0)
    return WideTensor(name, stored, target, part, grow, history.drawn, rows, built)


def _place(file: str, tensors: Mapping[str, WideTensor]) -> WeightShard:
    """Tensors of large numbers first, so that each starts at a multiple of its own, as safetensors does it."""
    ordered = dict(sorted(tensors.items(), key=lambda item: -item[1].target.dtype.itemsize))
    forms = {name: (tensor.target.dtype, tensor.target.shape) for name, tensor in ordered.items()}
    head, starts = make_header(forms, {"format": "pt"})
    places = {name: replace(tensor.target, file=Path(file), start=starts[name]) for name, tensor in ordered.items()}
    return WeightShard(file, head, {name: replace(tensor, target=places[name]) for name, tensor in ordered.items()})


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


_PIECE = 1 << 20  # wide entries that are made at a time; noise comes in blocks, and one that is cut is drawn twice
_WRITE = 1 << 17  # bytes that are written at a time: larger writes cost Linux up to five times as much
_MOST_THREADS = 16


class Piece(NamedTuple):
    """A part of a narrow tensor, and the wide entries at which what becomes of it starts, once for each copy."""

    start: int
    shape: Shape
    axes: Mapping[int, Axis]
    at: tuple[int, ...]


def write_shards(
    shards: Sequence[WeightShard],
    folder: Path,
    *,
    threads: int | None = None,
    advance: Callable[[int], None] = lambda bytes: None,
) -> None:
    """Fill the files; the result is the same for any number of threads and any shards.

    Copies and fresh units are written in pieces; any other operator writes a tensor at a time, which is whole in memory
    then. advance: called with the number of bytes after each write.
    """
    threads = min(usable_cores(), _MOST_THREADS) if threads is None else threads
    if threads < 1:
        raise MupscaleError(f"at least one thread is needed, not {threads}")
    ours = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            for shard in shards:
                _write_shard(shard, folder / shard.file, pool, threads, advance)
    finally:
        torch.set_num_threads(ours)


Make = Callable[["_Desk"], Iterator[tuple[int, Tensor]]]
"""Reads a part of a tensor and yields what becomes of it, each time with the place among the wide entries."""


def _write_shard(
    shard: WeightShard, path: Path, pool: ThreadPoolExecutor, threads: int, advance: Callable[[int], None]
) -> None:
    """Fill one file: threads take tasks one by one, until there are none or one of them fails."""
    with open_file(path, "wb") as file:
        file.write(shard.head)
        file.truncate(shard.bytes)
    tasks = ((tensor, make) for tensor in shard.tensors.values() for make in _tasks(tensor))
    taking, writing, stopped = threading.Lock(), threading.Lock(), threading.Event()

    def work() -> None:
        try:
            with ExitStack() as open_files:
                desk = _Desk(path, writing, open_files)
                while not stopped.is_set():
                    with taking:
                        tensor, make = next(tasks, (None, None))
                    if tensor is None or make is None:
                        break
                    for at, wide in make(desk):
                        advance(desk.write(wide, tensor, at))
        finally:
            stopped.set()  # for all: there are no more, or this one has failed

    try:
        for future in [pool.submit(work) for _ in range(threads)]:
            future.result()
    finally:
        stopped.set()


def _tasks(tensor: WideTensor) -> Iterator[Make]:
    """What there is to do for a tensor, by what it is made of and how it grows."""
    part, grow, is_number = tensor.part, tensor.grow, tensor.source.dtype.is_floating_point
    if tensor.new is not None:
        for piece in pieces(tensor.target.shape, {}, _PIECE):
            yield partial(_draw, tensor, tensor.new, piece)
    elif part is not None and is_number and type(grow) is growth.Fresh:
        fresh = replace(grow.tensor(part), built=tensor.built)
        for region in fresh.regions(_PIECE):
            yield partial(_make_fresh, tensor, fresh, region)
    elif (std := 0.0 if part is None or not is_number else _spread_of_copies(part, grow)) is not None:
        shrink = grow.shrink_of(part.name, part.plan) if part is not None and isinstance(grow, growth.Copies) else 1.0
        for piece in pieces(tensor.source.shape, tensor.entry.axes, _PIECE):
            yield partial(_make_copies, tensor, std, shrink, piece)
    elif part is not None:
        yield partial(_make_whole, tensor, part)


def _spread_of_copies(part: growth.Part, grow: growth.Operator) -> float | None:
    """The standard deviation of the noise of copies, which buffers lack; None of what is not made piece by piece."""
    noise = growth.as_noise(grow.noise) if type(grow) is growth.Copies and not grow.paired else None
    if not isinstance(noise, growth.GaussianNoise):
        return None
    level = noise.of(part.name) if part.name in part.plan.parameters else 0.0
    return level * growth.unit_std(part.plan, part.name, noise.unit) if level else 0.0


def pieces(shape: Shape, axes: Mapping[int, Axis], size: int, start: int = 0, at: int = 0) -> Iterator[Piece]:
    """A tensor in parts of about `size` wide entries, each of which has one place, or one for each of its copies.

    Rows are grouped by whole blocks, whose copies lie together; a block that is too large is cut, and its parts are
    written as often as it is copied. Dimensions before those that grow are gone through one by one where need be.
    """
    axes = {d: axis for d, axis in axes.items() if axis.times != 1}
    if any(axis.staying for axis in axes.values()):
        raise MupscaleError(
            "inputs that are joined with a width do not grow with it, which a checkpoint on disk cannot do: load the "
            "model, and grow it in memory with mupscale.upscale"
        )
    if 0 in shape:
        return
    if not axes:
        shape = (math.prod(shape),)
    elif len(shape) == 1:
        shape, axes = (1, *shape), {1: axes[0]}
    row = math.prod(shape[1:])
    inner = {d: axis for d, axis in axes.items() if d > 0}
    wide_row = row * math.prod(axis.copies for axis in inner.values())
    if 0 not in axes and wide_row > size and len(shape) > 2:
        for i in range(shape[0]):
            yield from pieces(shape[1:], {d - 1: a for d, a in inner.items()}, size, start + i * row, at + i * wide_row)
        return
    first = axes.get(0, Axis())
    copies = first.copies
    for length, block in first.sections or ((shape[0], first.block),):
        if length % block:
            raise MupscaleError(f"an axis of {length} units does not divide into blocks of {block}. Check the block")
        whole = {**inner, 0: Axis(copies, block)} if copies > 1 else inner
        if block * copies * wide_row <= size:
            step = size // (block * copies * wide_row) * block
            for r in range(0, length, step):
                rows = min(step, length - r)
                yield Piece(start + r * row, (rows, *shape[1:]), whole, (at + r * copies * wide_row,))
        else:
            step = max(1, size // wide_row)
            for b in range(0, length, block):
                for r in range(0, block, step):
                    places = tuple(at + (b * copies + c * block + r) * wide_row for c in range(copies))
                    yield Piece(start + (b + r) * row, (min(step, block - r), *shape[1:]), inner, places)
        start += length * row
        at += length * copies * wide_row


class _Desk:
    """One thread's open files and buffers.

    write_lock: of all threads that write this file. Linux lets in one at a time, and has the others wait by spinning.
    """

    def __init__(self, path: Path, write_lock: threading.Lock, open_files: ExitStack) -> None:
        self._write_lock, self._open_files = write_lock, open_files
        self._target = open_files.enter_context(open_file(path, "r+b", buffering=0))
        self._sources: dict[Path, BinaryIO] = {}
        self._buffers: dict[str, Tensor] = {}

    def buffer(self, use: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory for one use, kept from piece to piece, so that it stays in the cache."""
        length = math.prod(shape) * dtype.itemsize
        if use not in self._buffers or len(self._buffers[use]) < length:
            self._buffers[use] = torch.empty(length, dtype=torch.uint8)
        return self._buffers[use][:length].view(dtype).view(*shape)

    def read(self, tensor: WideTensor, start: int, shape: Shape) -> Tensor:
        """Entries from `start` on, as a tensor of this shape; an error where any is not finite."""
        source = tensor.source
        if source.file not in self._sources:
            self._sources[source.file] = self._open_files.enter_context(source.file.open("rb", buffering=0))
        narrow = self.buffer("narrow", shape, source.dtype)
        read_into(narrow, self._sources[source.file], source.start + start * source.dtype.itemsize)
        if narrow.is_floating_point():  # a quick look; sums of large numbers may overflow
            exact = torch.promote_types(narrow.dtype, torch.float32)
            if not math.isfinite(float(narrow.sum(dtype=exact))):
                growth.refuse_nonfinite({tensor.name: narrow})
        return narrow

    def write(self, wide: Tensor, tensor: WideTensor, at: int) -> int:
        """Round and write all of it, once for each copy of its rows; returns how many bytes that were."""
        dtype = tensor.target.dtype
        if wide.dtype != dtype:
            wide = refuse_overflow(self.buffer("rounded", wide.shape, dtype).copy_(wide), tensor)
        entries, size, total = raw_bytes(wide), dtype.itemsize, 0
        with self._write_lock:
            for start, stop, place in tensor.places(at, wide.numel()):
                left = entries[start * size : stop * size]
                total += left.nbytes
                self._target.seek(tensor.target.start + place * size)
                while left.nbytes:
                    left = left[self._target.write(left[:_WRITE]) :]
        return total


def refuse_overflow(rounded: Tensor, tensor: WideTensor) -> Tensor:
    """The tensor, where its dtype could hold the numbers."""
    if not math.isfinite(float(rounded.sum(dtype=torch.float32))) and not torch.isfinite(rounded).all():
        raise MupscaleError(f"'{tensor.name}' holds values that are too large for {rounded.dtype}. Keep a wider dtype")
    return rounded


def _draw(tensor: WideTensor, new: growth.NewTensor, piece: Piece, desk: _Desk) -> Iterator[tuple[int, Tensor]]:
    yield piece.start, new.part(piece.start, math.prod(piece.shape), tensor.target.numel, tensor.target.dtype)


def _make_fresh(
    tensor: WideTensor, fresh: growth.FreshTensor, region: growth.Region, desk: _Desk
) -> Iterator[tuple[int, Tensor]]:
    out = desk.buffer("wide", fresh.shape_of(region), tensor.target.dtype)
    fresh.write(out, region, lambda start, stop: desk.read(tensor, start, (stop - start,)))
    if tensor.source.dtype != tensor.target.dtype:
        refuse_overflow(out, tensor)
    yield fresh.place_of(region), out


def _make_copies(
    tensor: WideTensor, std: float, shrink: float, piece: Piece, desk: _Desk
) -> Iterator[tuple[int, Tensor]]:
    entry, narrow = tensor.entry, desk.read(tensor, piece.start, piece.shape)
    if not narrow.is_floating_point():
        yield piece.at[0], narrow
        return
    exact = torch.promote_types(narrow.dtype, torch.float32)
    # rounding comes once, at the end: what is only copied and scaled may stay in its own dtype
    is_changed = std or shrink != 1 or entry.shift
    if narrow.dtype != exact and (is_changed or narrow.dtype != tensor.target.dtype):
        narrow = desk.buffer("exact", narrow.shape, exact).copy_(narrow)
    shape = widened_shape(piece.shape, piece.axes)
    out = desk.buffer("wide", shape, narrow.dtype) if piece.axes else narrow
    wide = entry.widened(narrow, out, axes=piece.axes, overwrite=True)
    if shrink != 1:
        wide.mul_(shrink)
    if not std or tensor.part is None:
        yield from ((at, wide) for at in piece.at)
        return
    growth.check_spread(tensor.name, std, tensor.target.dtype)
    noise = desk.buffer("noise", [wide.numel()], wide.dtype)
    for at in piece.at:
        growth.draw_normal(noise, at, tensor.part.seed, tensor.part.name)
        yield at, torch.add(wide.view(-1), noise, alpha=std, out=noise)


def _make_whole(tensor: WideTensor, part: growth.Part, desk: _Desk) -> Iterator[tuple[int, Tensor]]:
    narrow = desk.read(tensor, 0, tensor.source.shape)
    narrow = narrow.to(torch.promote_types(narrow.dtype, torch.float32))
    out = torch.full(part.entry.wide, math.nan, dtype=narrow.dtype)
    tensor.grow.parameter(out, narrow, part)
    growth.check_written(tensor.name, out, tensor.grow)
    yield 0, out
