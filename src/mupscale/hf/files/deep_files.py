"""The weights of a deeper checkpoint: tensors copied from the shallow one, constant or drawn, in pieces."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from mupscale.core import Shape
from mupscale.growth import DRAWS, Draws, draw_normal, refuse_nonfinite
from mupscale.hf.files.safetensors_format import StoredTensor, make_header, raw_bytes, read_into
from mupscale.hf.files.shards import parse_size
from mupscale.system import open_file, replace_text

_PIECE = 1 << 20  # entries that are in memory at a time


@dataclass(frozen=True)
class NewTensor:
    """A tensor of a new layer: its name, what it is drawn from (a constant for a std of 0), the seed, and how.

    >>> NewTensor("norm.weight", mean=1.0, std=0.0, seed=0).whole((2,), torch.float32)
    tensor([1., 1.])
    """

    name: str
    mean: float
    std: float
    seed: int
    draws: Draws = DRAWS

    def part(self, start: int, count: int, size: int, dtype: torch.dtype) -> Tensor:
        """So many of its `size` entries; what is drawn follows from the seed and the name alone."""
        if self.std == 0:
            return torch.full((count,), self.mean, dtype=dtype)
        drawn = draw_normal(torch.empty(count), start, size, self.seed, f"new block {self.name}", self.draws)
        return drawn.mul_(self.std).add_(self.mean).to(dtype)

    def whole(self, shape: Shape, dtype: torch.dtype) -> Tensor:
        """All of it."""
        size = math.prod(shape)
        return self.part(0, size, size, dtype).view(shape)


@dataclass(frozen=True)
class DeepTensor:
    """A tensor of the deep checkpoint: the stored one that it is, or, where it is new, is shaped as.

    rows: how many copies of each of the stored tensor's rows there are.
    """

    stored: StoredTensor
    new: NewTensor | None = None
    rows: int = 1

    @property
    def shape(self) -> Shape:
        """In the deep checkpoint."""
        shape = self.stored.shape
        return (shape[0] * self.rows, *shape[1:]) if self.rows > 1 else shape

    @property
    def numel(self) -> int:
        """In the deep checkpoint."""
        return self.stored.numel * self.rows

    @property
    def bytes(self) -> int:
        """In the deep checkpoint."""
        return self.stored.bytes * self.rows


def write_deep_weights(
    folder: Path,
    tensors: Mapping[str, DeepTensor],
    shard_size: int | str,
    advance: Callable[[int], None] = lambda bytes: None,
) -> int:
    """Write these tensors into safetensors files of about this size, and give the number of files.

    advance: called with the number of bytes after each write.
    """
    shards = list(_shards(tensors, parse_size(shard_size)))
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards):
        many = len(shards) > 1
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors" if many else "model.safetensors"
        header, _ = make_header({name: (tensor.stored.dtype, tensor.shape) for name, tensor in shard.items()})
        with open_file(folder / file, "wb") as out:
            out.write(header)
            for name, tensor in shard.items():
                for piece in _pieces(name, tensor):
                    out.write(raw_bytes(piece))
                    advance(piece.nbytes)
        weight_map |= dict.fromkeys(shard, file)
    if len(shards) > 1:
        size = sum(tensor.bytes for tensor in tensors.values())
        content = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
        replace_text(folder / "model.safetensors.index.json", json.dumps(content, indent=2) + "\n")
    return len(shards)


def _shards(tensors: Mapping[str, DeepTensor], size: int) -> Iterator[dict[str, DeepTensor]]:
    shard: dict[str, DeepTensor] = {}
    for name, tensor in tensors.items():
        if shard and sum(held.bytes for held in shard.values()) + tensor.bytes > size:
            yield shard
            shard = {}
        shard[name] = tensor
    if shard:
        yield shard


def _pieces(name: str, tensor: DeepTensor) -> Iterator[Tensor]:
    stored = tensor.stored
    if tensor.rows > 1:
        length = stored.numel // stored.shape[0]
        for row in range(stored.shape[0]):
            one = replace(stored, shape=(length,), start=stored.start + row * length * stored.dtype.itemsize)
            for _ in range(tensor.rows):
                yield from _pieces(name, DeepTensor(one))
        return
    with ExitStack() as files:
        file = None if tensor.new is not None else files.enter_context(stored.file.open("rb", buffering=0))
        for start in range(0, stored.numel, _PIECE):
            count = min(_PIECE, stored.numel - start)
            if tensor.new is not None:
                yield tensor.new.part(start, count, stored.numel, stored.dtype)
                continue
            assert file is not None
            piece = torch.empty(count, dtype=stored.dtype)
            yield _refuse_nonfinite(name, read_into(piece, file, stored.start + start * stored.dtype.itemsize))


def _refuse_nonfinite(name: str, piece: Tensor) -> Tensor:
    if piece.is_floating_point():
        refuse_nonfinite({name: piece})
    return piece
