"""The weights of a deeper checkpoint: tensors copied from the shallow one, constant or drawn, in pieces."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mupscale.growth import draw_normal
from mupscale.hf.files.safetensors_format import StoredTensor, make_header, raw_bytes, read_into
from mupscale.hf.files.shards import parse_size
from mupscale.system import replace_text

_PIECE = 1 << 24  # entries that are in memory at a time


@dataclass(frozen=True)
class DeepTensor:
    """A tensor of the deep checkpoint: the stored one that it is, or is shaped as.

    mean, std: where it is new, what it is drawn from; a constant for a std of 0. None for a copy.
    """

    stored: StoredTensor
    mean: float | None = None
    std: float = 0.0


def write_deep_weights(folder: Path, tensors: Mapping[str, DeepTensor], shard_size: int | str, seed: int = 0) -> int:
    """Write these tensors into safetensors files of about this size, and give the number of files.

    What is drawn follows from the seed and the tensor's name alone.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as name:
    ...     stored = StoredTensor(Path(name), torch.float32, (2,), 0)
    ...     write_deep_weights(Path(name), {"norm.weight": DeepTensor(stored, mean=1.0)}, "5GB")
    1
    """
    shards = list(_shards(tensors, parse_size(shard_size)))
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards):
        many = len(shards) > 1
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors" if many else "model.safetensors"
        header, _ = make_header({name: (tensor.stored.dtype, tensor.stored.shape) for name, tensor in shard.items()})
        with (folder / file).open("wb") as out:
            out.write(header)
            for name, tensor in shard.items():
                for piece in _pieces(name, tensor, seed):
                    out.write(raw_bytes(piece))
        weight_map |= dict.fromkeys(shard, file)
    if len(shards) > 1:
        size = sum(tensor.stored.bytes for tensor in tensors.values())
        content = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
        replace_text(folder / "model.safetensors.index.json", json.dumps(content, indent=2) + "\n")
    return len(shards)


def _shards(tensors: Mapping[str, DeepTensor], size: int) -> Iterator[dict[str, DeepTensor]]:
    shard: dict[str, DeepTensor] = {}
    for name, tensor in tensors.items():
        if shard and sum(held.stored.bytes for held in shard.values()) + tensor.stored.bytes > size:
            yield shard
            shard = {}
        shard[name] = tensor
    if shard:
        yield shard


def _pieces(name: str, tensor: DeepTensor, seed: int) -> Iterator[Tensor]:
    stored = tensor.stored
    for start in range(0, stored.numel, _PIECE):
        count = min(_PIECE, stored.numel - start)
        if tensor.mean is None:
            with stored.file.open("rb", buffering=0) as file:
                yield read_into(
                    torch.empty(count, dtype=stored.dtype), file, stored.start + start * stored.dtype.itemsize
                )
        elif tensor.std == 0:
            yield torch.full((count,), tensor.mean, dtype=stored.dtype)
        else:
            drawn = draw_normal(torch.empty(count), start, stored.numel, seed, f"new block {name}")
            yield (drawn * tensor.std + tensor.mean).to(stored.dtype)
