"""The safetensors format: where each tensor lies in a file, and a header that is written before its tensors.

A file is the length of the header (8 bytes), the header (JSON), and the tensors one after the other. Knowing the places
lets threads read and write parts of tensors, so that no tensor need ever be in memory whole.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from mupscale.core import Shape
from mupscale.system import MupscaleError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_CODES = {dtype: code for code, dtype in DTYPES.items()}
_LONGEST_HEADER = 100_000_000  # what safetensors itself reads


@dataclass(frozen=True)
class StoredTensor:
    """A tensor's place in a file: it starts at this byte, counted from the beginning of the file."""

    file: Path
    dtype: torch.dtype
    shape: Shape
    start: int

    @property
    def numel(self) -> int:
        """How many entries it has."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """How long it is."""
        return self.numel * self.dtype.itemsize


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file in the order in which they lie there, when all of it is in order."""
    try:
        if not path.is_file() and path.exists():
            raise MupscaleError(f"{path} is not an ordinary file, so no weights are read from it")
        with open(path, "rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            length, content = _read_json(path, file, size)
    except OSError as error:
        raise MupscaleError(f"{path} cannot be read: {error.strerror}") from None
    content.pop("__metadata__", None)
    placed = sorted((_place(path, name, entry) for name, entry in content.items()), key=lambda part: part[1])
    tensors, end = {}, 0
    for name, start, stop, dtype, shape in placed:
        if start != end:
            raise _broken(path, f"'{name}' starts at byte {start} and what comes before it ends at {end}")
        tensors[name], end = StoredTensor(path, dtype, shape, 8 + length + start), stop
    if 8 + length + end != size:
        what = "is truncated" if size < 8 + length + end else "has more bytes than it should"
        raise MupscaleError(
            f"{path} {what}: its header says {8 + length + end} bytes, but it has {size}. Download or copy it again"
        )
    return tensors


def _read_json(path: Path, file: BinaryIO, size: int) -> tuple[int, dict[str, Any]]:
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > min(size - 8, _LONGEST_HEADER):
        reason = f"a header of {length} bytes in a file of {size}" if size >= 8 else f"it has {size} bytes"
        raise _broken(path, reason)
    try:
        content = json.loads(file.read(length))
    except (ValueError, RecursionError):
        raise _broken(path, "its header is no JSON") from None
    if not isinstance(content, dict):
        raise _broken(path, "its header is no JSON object")
    return length, content


def _place(path: Path, name: str, entry: Any) -> tuple[str, int, int, torch.dtype, Shape]:
    try:
        code, shape, (start, stop) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        whole = all(type(n) is int and n >= 0 for n in (*shape, start, stop))
    except (TypeError, KeyError, ValueError):
        whole = False
    if not whole:
        raise _broken(path, f"its header does not say where '{name}' lies")
    if not isinstance(code, str) or code not in DTYPES:
        raise MupscaleError(
            f"'{name}' in {path} has dtype {code}, as in a quantised checkpoint, which cannot be widened. Use the "
            "original in float32, bfloat16 or float16, or dequantise it"
        )
    dtype = DTYPES[code]
    if stop - start != math.prod(shape) * dtype.itemsize:
        raise _broken(path, f"'{name}' of shape {shape} and dtype {code} has {stop - start} bytes")
    return name, start, stop, dtype, shape


def _broken(path: Path, reason: str) -> MupscaleError:
    return MupscaleError(f"{path} is not a complete safetensors file ({reason}). Download or copy it again")


def make_header(tensors: Mapping[str, tuple[torch.dtype, Shape]]) -> tuple[bytes, dict[str, int]]:
    """The first bytes of a file with these tensors, and the byte at which each of them starts."""
    content: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offsets, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        offsets[name], start = end, end
        end += math.prod(shape) * dtype.itemsize
        content[name] = {"dtype": _CODES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, {name: 8 + len(text) + at for name, at in offsets.items()}


def read_into(tensor: Tensor, file: Any, at: int) -> Tensor:
    """Fill a contiguous tensor from an unbuffered file, from this byte on."""
    file.seek(at)
    left = raw_bytes(tensor)
    while left.nbytes:
        count = file.readinto(left)
        if not count:
            raise MupscaleError(f"{file.name} has become shorter while it was read. Download or copy it again")
        left = left[count:]
    return tensor


def raw_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, which share its memory."""
    array: Any = tensor.detach().view(-1).view(torch.uint8).numpy()
    return memoryview(array)
