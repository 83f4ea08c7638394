"""Tensors as safetensors, with a checksum of each in the header; and files of torch.save, read without running code."""

from __future__ import annotations

import json
import math
import pickle
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mupscale.system.errors import MupscaleError
from mupscale.system.typed_values import checks_arguments

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@checks_arguments
def load_torch(path: str | Path) -> Any:
    """A file that torch.save wrote, loaded weights-only: tensors and plain containers, never code.

    >>> import tempfile
    >>> import torch
    >>> import mupscale as mu
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     torch.save({"step": 3, "weight": torch.ones(2)}, f"{folder}/run.pt")
    ...     mu.load_torch(f"{folder}/run.pt")
    {'step': 3, 'weight': tensor([1., 1.])}
    """
    import torch  # here, for `mupscale --help` has no use for it

    if Path(path).exists() and not Path(path).is_file():
        raise MupscaleError(f"{path} is not a regular file, so it cannot hold weights")
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise MupscaleError(f"there is no file at {path}") from None
    except Exception as error:  # a broken pickle may raise anything
        code = re.search(r"GLOBAL (\S+)", str(error))
        if isinstance(error, pickle.UnpicklingError) and code:
            reason = f"it holds {code[1]}, which is code, and not tensors alone; save a state_dict instead"
        else:
            first = re.split(r"\n|\. ", f"{type(error).__name__}: {error}")[0]
            reason = f"it is truncated, or not a file of torch.save ({first})"
        raise MupscaleError(f"{path} cannot be loaded as weights only: {reason}") from None


_MOST_HEADER, _MOST_TENSORS = 24 << 20, 100_000


@contextmanager
def open_tensors(path: Path, framework: str) -> Iterator[Any]:
    """A safetensors file, open as `safe_open` opens it, where its header is no larger than that of a real checkpoint.

    Parsing takes 15 times a header's bytes in memory, and each tensor in it takes time. The first eight bytes say how
    long it is.
    """
    from safetensors import safe_open  # here, for `mupscale --help` has no use for it

    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
    if _MOST_HEADER < length < path.stat().st_size:  # a longer one is of a damaged file, which safe_open says
        raise MupscaleError(_too_large(path, f"{length:,} bytes", f"{_MOST_HEADER:,}"))
    with safe_open(path, framework=framework) as opened:
        count = len(opened.keys())
        if count > _MOST_TENSORS:
            raise MupscaleError(_too_large(path, f"{count:,} tensors", f"{_MOST_TENSORS:,}"))
        yield opened


def _too_large(path: Path, size: str, most: str) -> str:
    return (
        f"the header of {path} has {size}, more than the {most} that one file may have: it is damaged, or made to do "
        f"harm. If it is a real checkpoint, save it in shards"
    )


CHECKSUMS = "checksums"
"""The entry of a file's metadata with the checksums, as JSON."""
_UNKNOWN = "0" * 8
DTYPES = {
    "F64": "float64",
    "C64": "complex64",
    "I64": "int64",
    "U64": "uint64",
    "F32": "float32",
    "I32": "int32",
    "U32": "uint32",
    "BF16": "bfloat16",
    "F16": "float16",
    "I16": "int16",
    "U16": "uint16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}
"""What safetensors calls torch's dtypes."""
_CODES = {f"torch.{name}": code for code, name in DTYPES.items()}


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file; checksums of every tensor, and of the metadata's own entries, go into its header."""
    largest_first = dict(sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize))  # so that all are aligned
    sums = {f"metadata/{name}": checksum(text.encode()) for name, text in metadata.items()}
    sums |= {f"tensor/{name}": _UNKNOWN for name in largest_first}
    forms = {name: (tensor.dtype, tensor.shape) for name, tensor in largest_first.items()}

    def header() -> bytes:
        return make_header(forms, {**metadata, CHECKSUMS: json.dumps(sums)})[0]

    with open(path, "wb") as file:
        file.write(header())
        for name, tensor in largest_first.items():
            raw = raw_bytes(tensor)
            sums[f"tensor/{name}"] = _checksum_of(tensor, raw)
            file.write(raw)
        file.seek(0)
        file.write(header())  # as long as before: checksums have eight digits


def check_tensors(tensors: Mapping[str, Tensor], metadata: Mapping[str, str], *, required: bool = True) -> bool:
    """Refuse what was read from a file if it is not what was written; whether there are checksums that tell.

    required: a file without any is refused, too.
    """
    if CHECKSUMS not in metadata:
        if required:
            raise MupscaleError("its header has no checksums")
        return False
    try:
        sums = dict(json.loads(metadata[CHECKSUMS]))
    except (ValueError, TypeError):
        raise MupscaleError("its list of checksums is damaged") from None
    actual = {f"metadata/{name}": checksum(text.encode()) for name, text in metadata.items() if name != CHECKSUMS}
    for name, tensor in tensors.items():
        actual[f"tensor/{name}"] = _checksum_of(tensor, raw_bytes(tensor))
    for key in sorted({*sums, *actual}):
        if sums.get(key) != actual.get(key):
            kind, _, name = key.partition("/")
            what = "header" if kind == "metadata" else f"'{name}'"
            raise MupscaleError(f"the checksum of {what} is not that of its values")
    return True


def checksum(data: Any, start: int = 0) -> str:
    """Eight digits that change with any bit of the data."""
    return f"{zlib.crc32(data, start):08x}"


def _checksum_of(tensor: Tensor, raw: memoryview) -> str:
    """Of values, dtype and shape."""
    form = f"{tensor.dtype} {tuple(tensor.shape)}"
    return checksum(raw, zlib.crc32(form.encode()))


def raw_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor, in its own memory where it lies on the CPU."""
    import torch  # here, for `mupscale --help` has no use for it

    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def make_header(
    tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, int]]:
    """The first bytes of a safetensors file with these tensors, and the byte at which each of them starts."""
    content: dict[str, Any] = {"__metadata__": metadata}
    offsets, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        if str(dtype) not in _CODES:
            raise MupscaleError(f"'{name}' is a tensor of {dtype}, which a safetensors file cannot hold")
        offsets[name], start = end, end
        end += math.prod(shape) * dtype.itemsize
        content[name] = {"dtype": _CODES[str(dtype)], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(content, separators=(",", ":")).encode()
    if len(text) > _MOST_HEADER or len(tensors) > _MOST_TENSORS:
        raise MupscaleError(
            f"{len(tensors):,} tensors with a header of {len(text):,} bytes are more than one safetensors file may "
            f"have ({_MOST_TENSORS:,} tensors, {_MOST_HEADER:,} bytes): it could not be read again. Save them in shards"
        )
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, {name: 8 + len(text) + at for name, at in offsets.items()}
