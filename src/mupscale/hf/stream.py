"""From checkpoint to checkpoint in pieces: read a few rows, copy, rescale, perturb, round, write them in their place.

The plan tells every shape before a tensor is read, so all files are laid out and their headers written first, and
threads fill them in any order. A piece fits into a core's cache; memory is a few pieces per thread, whatever the size
of tensors and shards.
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
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch
from torch import Tensor

from mupscale.core import Axis, Entry, Plan, Shape, check_dtype, widened_shape
from mupscale.growth import (
    Copies,
    Fresh,
    FreshTensor,
    GaussianNoise,
    NewTensor,
    Operator,
    Part,
    Region,
    as_noise,
    check_spread,
    check_written,
    draw_normal,
    refuse_nonfinite,
    unit_std,
)
from mupscale.hf.source import Source, StoredTensor, make_header, raw_bytes, read_into
from mupscale.system import MupscaleError, open_file, replace_text, show_short, usable_cores

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
    """2.79 GB."""
    return shorten_number(size, (" GB", " MB", " kB", " bytes"))


def shorten_number(number: int, units: tuple[str, ...] = (" B", " M", " k", "")) -> str:
    """697.1 M: four digits and the power of a thousand."""
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
    """The plan's name of a tensor of a file."""
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


_PIECE = 1 << 20  # wide entries that are made at a time; noise comes in blocks, and one that is cut is drawn twice
_WRITE = 1 << 17  # bytes that are written at a time: larger writes cost Linux up to five times as much
_MOST_THREADS = 16


class Piece(NamedTuple):
    """A part of a narrow tensor, and the wide entries at which what becomes of it starts, once for each copy."""

    start: int
    shape: Shape
    axes: Mapping[int, Axis]
    at: tuple[int, ...]


class _Task(NamedTuple):
    """A part of a tensor: copies with noise of this standard deviation, a region with fresh units, or all of it."""

    tensor: WideTensor
    part: Piece | Region
    std: float = 0.0
    fresh: FreshTensor | None = None
    whole: Part | None = None


def write_shards(
    shards: Sequence[WeightShard],
    folder: Path,
    plan: Plan,
    *,
    grow: Operator | None = None,
    seed: int = 0,
    threads: int | None = None,
    advance: Callable[[int], None] = lambda bytes: None,
) -> None:
    """Fill the files; the result is the same for any number of threads and any shards.

    grow: an operator that has seen the plan; copies without noise if none is given. Copies and fresh units are written
    in pieces; any other operator writes a tensor at a time, which is whole in memory then.
    advance: called with the number of bytes after each write.
    """
    threads = min(usable_cores(), _MOST_THREADS) if threads is None else threads
    if threads < 1:
        raise MupscaleError(f"at least one thread is needed, not {threads}")
    ours = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            for shard in shards:
                with open_file(folder / shard.file, "wb") as file:
                    file.write(shard.head)
                    file.truncate(shard.bytes)
                work = _Work(_tasks(shard, plan, grow or Copies(), seed), folder / shard.file, grow or Copies(), seed)
                futures = [pool.submit(work.off, advance) for _ in range(threads)]
                try:
                    for future in futures:
                        future.result()
                finally:
                    work.stopped = True
    finally:
        torch.set_num_threads(ours)


def _tasks(shard: WeightShard, plan: Plan, grow: Operator, seed: int) -> Iterator[_Task]:
    """What there is to do for each tensor, by what it is made of and how it grows."""
    for tensor in shard.tensors.values():
        axes, part = tensor.entry.axes, Part(tensor.name, plan, seed)
        if tensor.new is not None:
            yield from (_Task(tensor, piece) for piece in pieces(tensor.target.shape, {}, _PIECE))
        elif not tensor.source.dtype.is_floating_point:
            yield from (_Task(tensor, piece) for piece in pieces(tensor.entry.narrow, axes, _PIECE))
        elif type(grow) is Fresh:
            fresh = FreshTensor(grow.values(part))
            yield from (_Task(tensor, region, fresh=fresh) for region in fresh.regions(_PIECE))
        elif type(grow) is Copies and not grow.paired and isinstance(noise := as_noise(grow.noise), GaussianNoise):
            level = noise.of(tensor.name) if tensor.name in plan.parameters else 0.0  # buffers have none
            std = level * unit_std(plan, tensor.name, noise.unit) if level else 0.0
            yield from (_Task(tensor, piece, std) for piece in pieces(tensor.entry.narrow, axes, _PIECE))
        else:
            yield _Task(tensor, Piece(0, tensor.entry.narrow, {}, (0,)), whole=part)


class _Work:
    """Tasks of one file that several threads take one by one, until there are none or one of them fails."""

    def __init__(self, tasks: Iterator[_Task], path: Path, grow: Operator, seed: int) -> None:
        self._tasks, self._path, self._grow, self._seed = tasks, path, grow, seed
        self._take, self._write, self.stopped = threading.Lock(), threading.Lock(), False

    def off(self, advance: Callable[[int], None]) -> None:
        """Take tasks and do them, in one thread."""
        try:
            with ExitStack() as open_files:
                writer = _PieceWriter(self._path, self._grow, self._seed, self._write, open_files)
                while (task := self._next()) is not None:
                    advance(writer.make(task))
        finally:
            self.stopped = True  # for all: there are no more, or this one has failed

    def _next(self) -> _Task | None:
        with self._take:
            return None if self.stopped else next(self._tasks, None)


def pieces(shape: Shape, axes: Mapping[int, Axis], size: int, start: int = 0, at: int = 0) -> Iterator[Piece]:
    """A tensor in parts of about `size` wide entries, each of which has one place, or one for each of its copies.

    Rows are grouped by whole blocks, whose copies lie together; a block that is too large is cut, and its parts are
    written as often as it is copied. Dimensions before those that grow are gone through one by one where need be.
    """
    axes = {d: axis for d, axis in axes.items() if axis.times != 1}
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


class _PieceWriter:
    """One thread's open files and buffers.

    write_lock: of all threads that write this file. Linux lets in one at a time, and has the others wait by spinning.
    """

    def __init__(
        self, path: Path, grow: Operator, seed: int, write_lock: threading.Lock, open_files: ExitStack
    ) -> None:
        self._grow, self._seed, self._write_lock, self._open_files = grow, seed, write_lock, open_files
        self._target = open_files.enter_context(open_file(path, "r+b", buffering=0))
        self._sources: dict[Path, BinaryIO] = {}
        self._buffers: dict[str, Tensor] = {}

    def make(self, task: _Task) -> int:
        """Read, widen and write one part; returns how many bytes were written."""
        if task.fresh is not None:
            assert isinstance(task.part, Region)
            return self._make_fresh(task.tensor, task.fresh, task.part)
        assert isinstance(task.part, Piece)
        if (new := task.tensor.new) is not None:
            target, count = task.tensor.target, math.prod(task.part.shape)
            part = new.part(task.part.start, count, target.numel, target.dtype)
            return self._write(part, task.tensor, task.part.start)
        if task.whole is not None:
            return self._make_whole(task.tensor, task.whole, task.part)
        return self._make_copies(task.tensor, task.std, task.part)

    def _make_whole(self, job: WideTensor, part: Part, piece: Piece) -> int:
        narrow = self._refuse_nonfinite(self._read(job.source, piece), job)
        narrow = narrow.to(torch.promote_types(narrow.dtype, torch.float32))
        out = torch.full(job.entry.wide, math.nan, dtype=narrow.dtype)
        self._grow.parameter(out, narrow, part)
        check_written(job.name, out, self._grow)
        return self._write(self._rounded(out, job), job, 0)

    def _make_fresh(self, job: WideTensor, fresh: FreshTensor, region: Region) -> int:
        def read(start: int, stop: int) -> Tensor:
            return self._refuse_nonfinite(self._read(job.source, Piece(start, (stop - start,), {}, ())), job)

        out = self._buffer("wide", fresh.shape_of(region), job.target.dtype)
        fresh.write(out, region, read)
        if job.source.dtype != job.target.dtype:
            self._refuse_overflow(out, job)
        return self._write(out, job, fresh.place_of(region))

    def _make_copies(self, job: WideTensor, level: float, piece: Piece) -> int:
        entry = job.entry
        narrow = self._read(job.source, piece)
        if not narrow.is_floating_point():
            return self._write(narrow, job, piece.at[0])
        exact = torch.promote_types(narrow.dtype, torch.float32)
        self._refuse_nonfinite(narrow, job)
        # rounding comes once, at the end: what is only copied and scaled may stay in its own dtype
        if narrow.dtype != exact and (level or entry.shift or narrow.dtype != job.target.dtype):
            narrow = self._buffer("exact", narrow.shape, exact).copy_(narrow)
        shape = widened_shape(piece.shape, piece.axes)
        out = self._buffer("wide", shape, narrow.dtype) if piece.axes else narrow
        wide = entry.widened(narrow, out, axes=piece.axes, overwrite=True)
        if not level:
            wide = self._rounded(wide, job)
            return sum(self._write(wide, job, at) for at in piece.at)
        return sum(self._write(self._rounded(self._noisy(wide, job, level, at), job), job, at) for at in piece.at)

    def _noisy(self, wide: Tensor, job: WideTensor, level: float, at: int) -> Tensor:
        check_spread(job.name, level, job.target.dtype)
        noise = self._buffer("noise", [wide.numel()], wide.dtype)
        draw_normal(noise, at, self._seed, job.name)
        return torch.add(wide.view(-1), noise, alpha=level, out=noise)

    def _rounded(self, wide: Tensor, job: WideTensor) -> Tensor:
        dtype = job.target.dtype
        if wide.dtype == dtype:
            return wide
        return self._refuse_overflow(self._buffer("rounded", wide.shape, dtype).copy_(wide), job)

    def _refuse_nonfinite(self, narrow: Tensor, job: WideTensor) -> Tensor:
        total = float(
            narrow.sum(dtype=torch.promote_types(narrow.dtype, torch.float32))
        )  # a quick look; sums of large numbers may overflow
        if not math.isfinite(total):
            refuse_nonfinite({job.name: narrow})
        return narrow

    def _refuse_overflow(self, rounded: Tensor, job: WideTensor) -> Tensor:
        if not math.isfinite(float(rounded.sum(dtype=torch.float32))) and not torch.isfinite(rounded).all():
            raise MupscaleError(f"'{job.name}' holds values that are too large for {rounded.dtype}. Keep a wider dtype")
        return rounded

    def _read(self, source: StoredTensor, piece: Piece) -> Tensor:
        if source.file not in self._sources:
            self._sources[source.file] = self._open_files.enter_context(source.file.open("rb", buffering=0))
        file, narrow = self._sources[source.file], self._buffer("narrow", piece.shape, source.dtype)
        return read_into(narrow, file, source.start + piece.start * source.dtype.itemsize)

    def _write(self, wide: Tensor, job: WideTensor, at: int) -> int:
        """All of it, once for each copy of its rows; returns how many bytes that were."""
        entries, size, total = raw_bytes(wide), wide.dtype.itemsize, 0
        with self._write_lock:
            for start, stop, place in job.places(at, wide.numel()):
                left = entries[start * size : stop * size]
                total += left.nbytes
                self._target.seek(job.target.start + place * size)
                while left.nbytes:
                    left = left[self._target.write(left[:_WRITE]) :]
        return total

    def _buffer(self, use: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory for one use, kept from piece to piece, so that it stays in the cache."""
        length = math.prod(shape) * dtype.itemsize
        if use not in self._buffers or len(self._buffers[use]) < length:
            self._buffers[use] = torch.empty(length, dtype=torch.uint8)
        return self._buffers[use][:length].view(dtype).view(*shape)
