"""GGUF files: a header that is checked against the file, and the model that transformers' own loader makes of one.

That loader fills a tensor that the file lacks with random numbers, and passes over one that it does not know. So what
it is given is checked first, and what it returns afterwards. It sees the file alone, in a folder without anything else.
"""

from __future__ import annotations

import math
import re
import shutil
import struct
from collections.abc import Mapping
from contextlib import redirect_stderr, suppress
from dataclasses import dataclass, replace
from io import BufferedReader, StringIO
from pathlib import Path
from typing import Any

import torch

from mupscale import system
from mupscale.core import Shape
from mupscale.hf.building import in_one_line, quiet_transformers, require_transformers
from mupscale.hf.config_family import check_sizes
from mupscale.hf.source import Source, TemporaryFolder, open_source
from mupscale.system import MupscaleError, checks_arguments

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_FIELDS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}  # of struct
_TEXT, _ARRAY = 8, 9
_MOST_TENSORS = 100_000
_MOST_FIELDS = 100_000
_MOST_ITEMS = 1 << 21  # of all arrays together: the largest vocabularies have 1.3 million words, scores and merges
_MOST_DIMENSIONS = 8
_LONGEST_NAME = 1 << 16
_BLOCK = re.compile(r"(?:(enc|dec)\.)?blk\.(\d+)\.")


@dataclass(frozen=True)
class GgufHeader:
    """What stands before the numbers.

    metadata: single values by name, without arrays. shapes: as torch has them. places: the first byte of each tensor,
    and how many it has.
    """

    file: Path
    metadata: dict[str, Any]
    shapes: dict[str, Shape]
    places: dict[str, tuple[int, int]]

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture"))

    @property
    def numbers(self) -> int:
        """How many the tensors hold together."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    def has_equal_bytes(self, name: str, other: str) -> bool:
        """Whether two tensors are there and hold the same."""
        if not {name, other} <= self.places.keys() or self.shapes[name] != self.shapes[other]:
            return False
        contents = []
        with open(self.file, "rb") as file:
            for start, count in (self.places[name], self.places[other]):
                file.seek(start)
                contents.append(file.read(count))
        return contents[0] == contents[1]

    def check_blocks(self) -> None:
        """Refuse a number of layers for which there are more or fewer blocks of tensors."""
        blocks: dict[str, set[int]] = {}
        for name in self.shapes:
            if match := _BLOCK.match(name):
                blocks.setdefault(match[1] or "", set()).add(int(match[2]))
        named_count = f"{self.architecture}.block_count"
        count = self.metadata.get(named_count)
        for part, indices in blocks.items():
            decoder_count = self.metadata.get(f"{self.architecture}.decoder_block_count", count)
            expected = decoder_count if part == "dec" else count
            if expected != len(indices) or max(indices) >= len(indices):
                prefix = f"{part}.blk" if part else "blk"
                raise MupscaleError(
                    f"{self.file} says that {named_count} is {system.show_short(expected)}, and holds tensors of "
                    f"{len(indices)} blocks ({prefix}.{min(indices)} to {prefix}.{max(indices)}). {_AGAIN}"
                )
        if not blocks and count:
            raise MupscaleError(
                f"{self.file} says that {named_count} is {system.show_short(count)}, and holds no tensor of a block "
                f"(blk.0 and so on). {_AGAIN}"
            )


_AGAIN = "Download or copy it again, or convert the original checkpoint anew"


class _HeaderReader:
    """Reads a header from its start, and no byte beyond the file's end."""

    def __init__(self, file: BufferedReader, path: Path) -> None:
        self.file, self.path = file, path
        self.left = path.stat().st_size
        self.items_left = _MOST_ITEMS

    def take(self, count: int) -> bytes:
        if count > self.left:
            raise self.refusal("it ends within its header")
        self.left -= count
        return self.file.read(count)

    def number(self, kind: str) -> Any:
        return struct.unpack(f"<{kind}", self.take(struct.calcsize(f"<{kind}")))[0]

    def text(self, longest: int | None = None) -> str:
        length = self.number("Q")
        if longest is not None and length > longest:
            raise self.refusal(f"a name in it would be {length:,} bytes long")
        return self.take(length).decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        """A value, or None in place of an array, which is passed over."""
        if kind == _TEXT:
            return self.text()
        if kind in _FIELDS:
            return self.number(_FIELDS[kind])
        if kind != _ARRAY:
            raise self.refusal(f"a value in it has the unknown type {kind}")
        item_kind, count = self.number("I"), self.number("Q")
        self.items_left -= count
        if self.items_left < 0:
            raise self.refusal(f"its arrays hold more than {_MOST_ITEMS:,} items together")
        if item_kind in _FIELDS:
            self.take(count * struct.calcsize(f"<{_FIELDS[item_kind]}"))
        elif item_kind == _TEXT:
            for _ in range(count):
                self.take(self.number("Q"))
        else:
            raise self.refusal(f"an array in it has items of the unknown type {item_kind}")
        return None

    def refusal(self, reason: str) -> MupscaleError:
        return MupscaleError(f"{self.path} is not a complete GGUF file: {reason}. {_AGAIN}")


def read_gguf_header(path: Path) -> GgufHeader:
    """The header of a GGUF file, whose tensors must lie one after the other and fill the file."""
    sizes = system.require("gguf", reason=f"reading {path.name} needs the package gguf").GGML_QUANT_SIZES
    with open(path, "rb") as file:
        reader = _HeaderReader(file, path)
        if reader.take(len(_MAGIC)) != _MAGIC:
            raise reader.refusal("it does not start with the letters GGUF")
        if (version := reader.number("I")) not in _VERSIONS:
            raise reader.refusal(f"version {version} of the format is not known")
        tensor_count, field_count = reader.number("Q"), reader.number("Q")
        if tensor_count > _MOST_TENSORS or field_count > _MOST_FIELDS:
            raise reader.refusal(f"it would hold {tensor_count:,} tensors and {field_count:,} fields")

        metadata = {}
        for _ in range(field_count):
            name = reader.text(_LONGEST_NAME)
            value = reader.value(reader.number("I"))
            if value is not None:
                metadata[name] = value
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise reader.refusal(f"its alignment is {system.show_short(alignment)}")

        shapes: dict[str, Shape] = {}
        places: dict[str, tuple[int, int]] = {}
        end = 0  # of the tensors so far, from the start of the first
        for _ in range(tensor_count):
            name = reader.text(_LONGEST_NAME)
            if name in shapes:
                raise reader.refusal(f"it has two tensors named '{name}'")
            dimensions = reader.number("I")
            if dimensions > _MOST_DIMENSIONS:
                raise reader.refusal(f"'{name}' would have {dimensions:,} dimensions")
            fastest_first = [reader.number("Q") for _ in range(dimensions)]
            kind, offset = reader.number("I"), reader.number("Q")
            if kind not in sizes:
                raise reader.refusal(f"'{name}' has the unknown type {kind}")
            in_block, bytes_of_block = sizes[kind]
            if dimensions == 0 or fastest_first[0] % in_block:
                raise reader.refusal(f"'{name}' has rows that are not whole blocks of {in_block} numbers")
            if offset != end:
                raise reader.refusal(f"'{name}' starts at byte {offset:,} of the numbers, where {end:,} is its place")
            shapes[name] = tuple(reversed(fastest_first))
            count = math.prod(fastest_first) // in_block * bytes_of_block
            places[name] = offset, count
            end = _aligned(offset + count, alignment)

        start = _aligned(file.tell(), alignment)
        held = path.stat().st_size - start
        if not end - alignment < held <= end:  # the last tensor may lack the bytes up to the alignment
            raise reader.refusal(f"its tensors need {end:,} bytes, and {max(held, 0):,} follow its header")
    places = {name: (start + offset, count) for name, (offset, count) in places.items()}
    return GgufHeader(path, metadata, shapes, places)


def _aligned(place: int, alignment: int) -> int:
    return -(-place // alignment) * alignment


@checks_arguments
def read_gguf(path: str | Path) -> Source:
    """A GGUF file as a checkpoint of float32 numbers, which `upscale`, `verify` and `inspect` take like a folder.

    Its weights are dequantised: what the file rounded stays rounded. They are in memory once, and then lie in a
    temporary folder as long as the result lives. The file must hold every tensor of its architecture and no other.
    Files that lie beside it are not looked at.

    >>> read_gguf("absent.gguf")
    Traceback (most recent call last):
    mupscale.system.errors.MupscaleError: there is no file at absent.gguf: give a GGUF file
    """
    file = Path(path)
    if not file.is_file():
        raise MupscaleError(f"there is no file at {path}: give a GGUF file")
    require_transformers()
    header = read_gguf_header(file)
    header.check_blocks()
    place = TemporaryFolder()
    try:
        folder = _unpack(header, Path(place.name))
    except MupscaleError:
        raise
    except OSError as error:
        raise MupscaleError(
            f"{file} could not be unpacked into {place.name} ({in_one_line(error)}): if its disk is full, set TMPDIR "
            f"to a folder on a larger one"
        ) from None
    except Exception as error:  # whatever the loader makes of the file
        raise MupscaleError(f"transformers cannot read {file}: {in_one_line(error)}") from None
    opened = open_source(folder)
    return replace(opened, tensors={name: replace(one, within=place) for name, one in opened.tensors.items()})


def _unpack(header: GgufHeader, place: Path) -> Path:
    """Have transformers load the file, check what it made of it, and save that as a checkpoint's folder."""
    transformers = require_transformers()
    # The loader takes a tokenizer's code, a config and adapters from the file's folder, and asks at the terminal
    # whether it may run them. Here that folder holds nothing but the file.
    alone = system.make_folder(place / "alone")
    _link(header.file, alone / "model.gguf")
    how: dict[str, Any] = {"gguf_file": "model.gguf", "local_files_only": True, "trust_remote_code": False}
    with quiet_transformers(), redirect_stderr(StringIO()):  # its bar, which no setting turns off
        config = transformers.AutoConfig.from_pretrained(alone, **how)
        check_sizes(config.to_dict(), header.shapes, f"the header of {header.file}")
        with torch.device("meta"):
            sketch = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        _check_held(header, sketch)
        how |= {"dtype": torch.float32, "output_loading_info": True}
        if (unpacked := getattr(transformers, "GgufConfig", None)) is not None:  # or blocks stay packed on some devices
            how["quantization_config"] = unpacked(dequantize=True)
        model, info = transformers.AutoModelForCausalLM.from_pretrained(alone, **how)
        del how["dtype"], how["output_loading_info"]
        how.pop("quantization_config", None)
        tokenizer = transformers.AutoTokenizer.from_pretrained(alone, **how)
    _check_loaded(header, model, info)
    folder = system.make_folder(place / header.file.stem)
    _save(model, folder)
    tokenizer.save_pretrained(folder)
    return folder


def _link(file: Path, link: Path) -> None:
    try:
        link.symlink_to(file.resolve())
    except OSError:  # where links need rights that the user lacks
        shutil.copyfile(file, link)


def _held_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and saved buffers, each under its first name."""
    saved = model.state_dict().keys()
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: tensor for name, tensor in tensors.items() if name in saved}


def _check_held(header: GgufHeader, sketch: torch.nn.Module) -> None:
    """Refuse a file that holds more or fewer numbers than the model has, and name the tensors."""
    needed = sum(tensor.numel() for tensor in _held_tensors(sketch).values())
    held = header.numbers
    # Files of Falcon and Bloom hold the readout a second time, and transformers passes over it.
    if _has_tied_readout(sketch) and header.has_equal_bytes("output.weight", "token_embd.weight"):
        held -= math.prod(header.shapes["output.weight"])
    if held == needed:
        return
    kind = type(sketch).__name__
    in_model = _names_in_model(header, sketch)
    if _has_tied_readout(sketch):
        in_model.discard("output.weight")
    lacking = sorted(in_model - header.shapes.keys())
    over = sorted(name for name in header.shapes if in_model and name not in in_model)
    if lacking:
        raise MupscaleError(
            f"{header.file} lacks {_listed(lacking)}, which transformers would fill with random numbers. {_AGAIN}"
        )
    if over:
        raise MupscaleError(
            f"{header.file} holds {_listed(over)}, which transformers' {kind} does not have, so that part of the model "
            "would be lost. Use the original checkpoint"
        )
    raise MupscaleError(
        f"{header.file} holds {held:,} numbers, and transformers' {kind} has {needed:,} by the header: they do not "
        f"belong together. {_AGAIN}"
    )


def _listed(names: list[str]) -> str:
    return f"'{names[0]}'" + (f" and {len(names) - 1} more tensors" if len(names) > 1 else "")


def _has_tied_readout(model: Any) -> bool:
    return bool(model.config.tie_word_embeddings)


def _names_in_model(header: GgufHeader, model: torch.nn.Module) -> set[str]:
    """What the file would call the model's tensors; nothing where transformers does not say."""
    with suppress(Exception):
        from transformers import modeling_gguf_pytorch_utils as loader

        processor = loader.TENSOR_PROCESSORS.get(header.architecture, loader.TensorProcessor)
        return set(loader.get_gguf_hf_weights_map(model, processor(config={})))
    return set()


def _check_loaded(header: GgufHeader, model: torch.nn.Module, info: Mapping[str, Any]) -> None:
    """Refuse a model with a tensor that is not the file's, or with numbers that are not finite."""
    for kind, what in (
        ("missing_keys", "lacks {}, which transformers would fill with random numbers"),
        ("unexpected_keys", "holds {}, which the model that transformers builds does not have"),
        ("mismatched_keys", "has another shape for {} than the model that transformers builds"),
    ):
        names = sorted(str(key[0] if isinstance(key, tuple) else key) for key in info.get(kind, ()))
        if names:
            raise MupscaleError(f"{header.file} {what.format(_listed(names))}. {_AGAIN}")
    broken = [name for name, tensor in _held_tensors(model).items() if not bool(tensor.isfinite().all())]
    if broken:
        raise MupscaleError(f"{header.file} holds numbers that are not finite in {_listed(sorted(broken))}. {_AGAIN}")


def _save(model: torch.nn.Module, folder: Path) -> None:
    """config.json and weights; save_pretrained refuses a model that came from a quantised file, dequantised or not."""
    from safetensors.torch import save_file

    config: Any = model.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    first = {tensor.data_ptr(): name for name, tensor in reversed(model.state_dict().items())}  # of tied ones
    tensors = {name: t.contiguous() for name, t in model.state_dict().items() if first[t.data_ptr()] == name}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
