"""A checkpoint to start from: its config and where each of its tensors lies, all checked before anything is done."""

from __future__ import annotations

import re
import shutil
import tempfile
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from mupscale.core import Shape
from mupscale.hf.describe import check_sizes
from mupscale.hf.files.safetensors_format import DTYPES, StoredTensor, make_header, raw_bytes, read_header
from mupscale.system import (
    MupscaleError,
    check_has_config,
    checks_arguments,
    load_torch,
    open_file,
    read_json,
    require,
    show_short,
)

_SHARD = re.compile(r"(model|pytorch_model)-\d+-of-\d+\.(safetensors|bin)")
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
_SAFETENSORS = ("model.safetensors", "model-*-of-*.safetensors")
_PICKLED = ("pytorch_model.bin", "pytorch_model-*-of-*.bin")
_BESIDE = ("*.json", "*.txt", "*.model", "*.jinja", "README.md")


@dataclass(frozen=True)
class Source:
    """A checkpoint's folder, its config.json, and the place of each tensor.

    resources: what must live as long as this does, such as a folder of converted files.
    """

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, StoredTensor]
    resources: tuple[object, ...] = field(default=(), repr=False, compare=False)

    @property
    def shapes(self) -> dict[str, Shape]:
        """By name."""
        return {name: stored.shape for name, stored in self.tensors.items()}

    @property
    def bytes(self) -> int:
        """The size of all tensors."""
        return sum(stored.bytes for stored in self.tensors.values())

    @property
    def model_type(self) -> str:
        """The architecture, as transformers calls it."""
        return str(self.config["model_type"])


def open_source(path: str | Path | Source) -> Source:
    """A checkpoint in a folder, or one of the hub by its name; only headers are read."""
    if isinstance(path, Source):
        return path
    folder = Path(path)
    if not folder.exists() and isinstance(path, str) and _HUB_NAME.fullmatch(path):
        folder = _download(path)
    if folder.is_file() and is_gguf(folder):
        raise MupscaleError(
            f"{folder} is a GGUF file, whose weights are mostly quantised: give --dequantise, or mupscale.hf.read_gguf "
            "in Python, to read them as float32; or use the original checkpoint, which is not rounded"
        )
    if not folder.is_dir():
        if folder.exists():
            raise MupscaleError(
                f"{path} is a file: give the folder of a Hugging Face checkpoint, with config.json and weights; a file "
                f"of mupscale.save is read by mupscale.load"
            )
        raise MupscaleError(f"there is no folder at {path}: give a checkpoint's folder or a hub name")
    if (folder / "adapter_config.json").exists():
        raise MupscaleError(
            f"{folder} holds a LoRA or another PEFT adapter, which cannot be widened by itself. Merge it into its "
            "model with merge_and_unload(), and save that"
        )
    config = read_config(folder)
    resources: list[object] = []
    tensors = _find_tensors(folder, resources)
    if not tensors:
        raise MupscaleError(f"the weights in {folder} hold no tensors. Download or copy them again")
    source = Source(folder, config, tensors, tuple(resources))
    check_sizes(config, source.shapes, folder)
    return source


@checks_arguments
def is_gguf(path: str | Path) -> bool:
    """Whether this is a GGUF file, by its name or its first four bytes."""
    if Path(path).suffix.lower() == ".gguf":
        return True
    try:
        with open(path, "rb") as file:
            return file.read(4) == b"GGUF"
    except OSError:
        return False


def read_config(folder: Path) -> dict[str, Any]:
    """A folder's config.json, where it is one of transformers and not quantised."""
    check_has_config(folder)
    config = _read_json(folder / "config.json")
    if (quantised := config.get("quantization_config")) is not None:
        method = quantised.get("quant_method", "some method") if isinstance(quantised, dict) else quantised
        raise MupscaleError(
            f"the checkpoint in {folder} is quantised ({method}) and cannot be widened. Use the original in float32, "
            "bfloat16 or float16, or dequantise it"
        )
    if not isinstance(config.get("model_type"), str):
        raise MupscaleError(f"{folder / 'config.json'} names no model_type: it is not a config of transformers")
    return config


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = read_json(path)
    except OSError as error:
        raise MupscaleError(f"{path} cannot be read: {error.strerror}") from None
    except MupscaleError as error:
        raise MupscaleError(f"{error}. Download or copy it again") from None
    if not isinstance(content, dict):
        raise MupscaleError(f"{path} is no JSON object. Download or copy it again")
    return content


def _find_tensors(folder: Path, resources: list[object]) -> dict[str, StoredTensor]:
    """As transformers looks for them: one file before an index, safetensors before pickles."""
    for single in ("model.safetensors", "pytorch_model.bin"):
        index = folder / f"{single}.index.json"
        if (folder / single).exists():
            return _read_file(folder / single, resources)
        if index.exists():
            return _read_index(folder, index, resources)
    if shards := sorted(f.name for f in folder.iterdir() if _SHARD.fullmatch(f.name)):
        raise MupscaleError(f"{folder} holds {shards[0]} but no index of its shards. Download or copy that file, too")
    raise MupscaleError(
        f"there are no weights in {folder}: neither model.safetensors nor pytorch_model.bin, nor an index of shards"
    )


def _read_index(folder: Path, index: Path, resources: list[object]) -> dict[str, StoredTensor]:
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise MupscaleError(f"{index} has no usable weight_map. Download or copy it again")
    files = list(dict.fromkeys(weight_map.values()))
    for file in files:
        if file in ("", ".", "..") or len(file) > 200 or re.search(r"[/\\:\0]", file):
            raise MupscaleError(
                f"{index} names the file {show_short(file)}, which is not a plain name of a file beside it"
            )
    if missing := [file for file in files if not (folder / file).exists()]:
        raise MupscaleError(
            f"{len(missing)} of {len(files)} shards are missing in {folder}, the first of them {missing[0]}: download "
            f"or copy them"
        )
    ending = files[0].rpartition(".")[2] if files else ""
    beside = {f.name for f in folder.iterdir() if _SHARD.fullmatch(f.name) and f.name.endswith(ending)}
    if strangers := beside - {*files}:
        raise MupscaleError(
            f"{folder / min(strangers)} is not in {index.name}: remove it if it is left over from a different "
            "checkpoint, or correct the index"
        )
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        held = _read_file(folder / file, resources)
        named = {name for name, where in weight_map.items() if where == file}
        if absent := named - held.keys():
            raise MupscaleError(f"{index} places '{min(absent)}' in {file}, which has no such tensor")
        if extra := held.keys() - named:
            raise MupscaleError(f"{folder / file} holds '{min(extra)}', which {index.name} does not place there")
        tensors.update(held)
    return tensors


def _read_file(path: Path, resources: list[object]) -> dict[str, StoredTensor]:
    return read_header(path) if path.suffix == ".safetensors" else _read_pickled(path, resources)


def _read_pickled(path: Path, resources: list[object]) -> dict[str, StoredTensor]:
    """Tensors of a torch.save file, read where they lie; those of an old format are converted first."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():  # shapes and places, without memory
        content = _state_dict(path)
    tensors = {}
    for name, tensor in content.items():
        offset = getattr(tensor.untyped_storage(), "_checkpoint_offset", None)
        if offset is None or not tensor.is_contiguous():
            return _convert(path, resources)
        start = offset + tensor.storage_offset() * tensor.element_size()
        tensors[name] = StoredTensor(path, tensor.dtype, tuple(tensor.shape), start)
    return tensors


def _state_dict(path: Path) -> dict[str, Tensor]:
    content = load_torch(path)
    if not isinstance(content, dict) or not all(isinstance(tensor, Tensor) for tensor in content.values()):
        raise MupscaleError(f"{path} is not a model's state dict: it holds more than named tensors")
    for name, tensor in content.items():
        if tensor.dtype not in DTYPES.values():
            raise MupscaleError(
                f"'{name}' in {path} has dtype {tensor.dtype}, as in a quantised checkpoint, which cannot be widened. "
                "Use the original in float32, bfloat16 or float16, or dequantise it"
            )
    return content


class TemporaryFolder:
    """Removed with the last reference to it, without the warning that a TemporaryDirectory gives then."""

    def __init__(self) -> None:
        self.name = tempfile.mkdtemp(prefix="mupscale-")
        weakref.finalize(self, shutil.rmtree, self.name, ignore_errors=True)


def _convert(path: Path, resources: list[object]) -> dict[str, StoredTensor]:
    """The whole file is in memory for a moment, as old formats want it; afterwards it lies on the disk."""
    folder = TemporaryFolder()
    resources.append(folder)
    converted, content = Path(folder.name) / "converted.safetensors", _state_dict(path)
    first, _ = make_header({name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in content.items()})
    try:
        with open_file(converted, "wb") as file:
            file.write(first)
            for tensor in content.values():
                file.write(raw_bytes(tensor.contiguous()))
    except OSError as error:
        raise MupscaleError(
            f"{path} is of an old format and must be converted, but {folder.name} has no room for that "
            f"({error.strerror}): set TMPDIR to a folder on a larger disk"
        ) from None
    return read_header(converted)


def _download(name: str) -> Path:
    reason = f"there is no folder '{name}', and a model of the hub needs huggingface_hub"
    hub = require("huggingface_hub", reason=reason)

    def fetch(patterns: Iterable[str]) -> Path:
        wanted = [*patterns, *_BESIDE]
        return Path(hub.snapshot_download(name, allow_patterns=wanted, ignore_patterns=["*/*"]))

    try:
        folder = fetch(_SAFETENSORS)
        return folder if any(folder.glob("*.safetensors")) else fetch(_PICKLED)
    except (OSError, ValueError) as error:
        first = re.split(r"\n|\. ", str(error).strip())[0]
        raise MupscaleError(
            f"there is no folder '{name}', and it could not be downloaded from the hub ({type(error).__name__}: "
            f"{first}): check the name and the network, or download it and give the folder"
        ) from None
