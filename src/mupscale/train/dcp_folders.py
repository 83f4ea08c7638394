"""Folders of torch.distributed.checkpoint (DCP), as torchtitan and FSDP write them: tensors read and written, no code.

A DCP folder's index (.metadata) is a pickle. It is unpickled once, if it names nothing but what such an index is made
of; torch, which would unpickle it again and load whatever it names, is given what was found in it of tensors.
"""

from __future__ import annotations

import io
import math
import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mupscale.core import Shape
from mupscale.system import MupscaleError, is_dcp_folder
from mupscale.train.processes import Processes, divide_by_size

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.storage import StorageReader

INDEX = ".metadata"
_MOST_BYTES = 1 << 30  # of one object
_NOT_THE_MODEL = ("optimizer.", "optim.", "lr_scheduler", "train_state", "dataloader")
_SAFE = {
    "builtins": {"set", "frozenset", "dict", "list", "tuple", "int", "str", "bytes"},
    "collections": {"OrderedDict", "defaultdict"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch": {"Size", "device"},
    "torch.serialization": {"_get_layout"},
    "torch._utils": {"_rebuild_device"},
}


@contextmanager
def explaining_torch(what: str, remedy: str = "") -> Iterator[None]:
    """Errors of torch.distributed.checkpoint, which has many lines for each process, as one sentence."""
    from torch.distributed.checkpoint.api import CheckpointException

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that one process alone reads or writes is meant
        try:
            yield
        except CheckpointException as error:  # no subclass of Exception
            cause, _ = next(iter(error.failures.values()))
            if isinstance(cause, MupscaleError):
                raise cause from None
            reason = " ".join(str(cause).split()) or type(cause).__name__
            raise MupscaleError(f"{what}: {reason}{remedy}") from None


def load_into(targets: dict[str, Tensor], reader: StorageReader, folder: Path, *, no_dist: bool = False) -> None:
    """Fill the tensors from a folder, whatever their layout. no_dist: by this process alone."""
    from torch.distributed.checkpoint.state_dict_loader import load

    with explaining_torch(f"{folder} cannot be read"):
        load(targets, storage_reader=reader, no_dist=no_dist)


class _IndexReader(pickle.Unpickler):
    """Refuses everything that is no part of an index."""

    def find_class(self, module: str, name: str) -> Any:
        if module in ("pathlib", "pathlib._local"):
            return _join_path  # and no class, of which a pickle could set attributes, for the whole process
        if name in _SAFE.get(module, ()) or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name}")


def _join_path(*parts: str) -> str:
    return "/".join(parts)


class DcpContent(Protocol):
    """What a DCP folder holds, or is to hold: tensors, other objects as bytes, and the path of each in nested dicts."""

    shapes: dict[str, Shape]
    dtypes: dict[str, torch.dtype]
    objects: dict[str, Any]
    paths: dict[str, tuple[str | int, ...]]

    def read(self, name: str) -> Tensor:
        """The tensor of this name."""

    def raw(self, name: str) -> bytes:
        """The bytes that stand for an object."""


class DcpFolder:
    """A DCP folder's tensors, read one at a time, and what else lies in it, as bytes.

    tensors: what the index says of each. objects: the names of all that is no tensor. paths: where each of both lay in
    the nested dict that was saved.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = path = Path(path)
        if not is_dcp_folder(path):
            raise MupscaleError(f"{path} is no folder of torch.distributed.checkpoint: it has no {INDEX}")
        try:
            self._index, self.objects, self.paths = _read_index(path)
            self.tensors: dict[str, Any] = {**self._index.state_dict_metadata}
            self.shapes = {name: tuple(one.size) for name, one in self.tensors.items()}
            self.dtypes: dict[str, torch.dtype] = {n: one.properties.dtype for n, one in self.tensors.items()}
        except pickle.UnpicklingError as error:
            raise MupscaleError(
                f"{path / INDEX} holds {error}, which no index of tensors needs: it is not read"
            ) from None
        except MupscaleError:
            raise
        except Exception as error:  # what is unpickled may have anything in its fields
            raise MupscaleError(f"{path / INDEX} is damaged ({type(error).__name__}: {error})") from None

    @property
    def model_prefix(self) -> str:
        """What the names of the model's tensors begin with: `model.`, or nothing, as torchtitan has it."""
        ours = [name for name in self.tensors if not name.startswith(_NOT_THE_MODEL)]
        if not ours:
            raise MupscaleError(f"{self.path} holds no tensors of a model")
        return "model." if all(name.startswith("model.") for name in ours) else ""

    @property
    def model(self) -> list[str]:
        """The model's own names of its tensors."""
        prefix = self.model_prefix
        return [name.removeprefix(prefix) for name in self.tensors if not name.startswith(_NOT_THE_MODEL)]

    def read(self, name: str) -> Tensor:
        """The tensor of this name, whole and in main memory, whatever it was sharded over."""
        tensor = torch.empty(self.shapes[name], dtype=self.dtypes[name])
        load_into({name: tensor}, _reader(self.path, self._index), self.path, no_dist=True)
        return tensor

    def raw(self, name: str) -> bytes:
        """The bytes that stand for an object; nothing is unpickled."""
        info = self.objects[name]
        if getattr(info, "transform_descriptors", None):
            raise MupscaleError(f"'{name}' in {self.path} is stored compressed. Save the checkpoint without extensions")
        with open(self.path / info.relative_path, "rb") as file:
            file.seek(info.offset)
            return file.read(min(info.length, _MOST_BYTES))

    def value(self, name: str) -> Any:
        """A number, text, or a plain list or tuple of such; what holds code is refused."""
        if name in self.tensors:
            return self.read(name)
        try:
            return torch.load(io.BytesIO(self.raw(name)), map_location="cpu", weights_only=True)
        except Exception as error:  # whatever is wrong with it
            reason = (str(error).splitlines() or [""])[0].rstrip(".")
            raise MupscaleError(f"'{name}' in {self.path} is no plain value ({reason})") from None


def load_dcp(folder: str | Path) -> dict[str, Tensor]:
    """All tensors of a DCP folder by their names, whole and in main memory, whatever they were sharded over.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = save_dcp(f"{folder}/step-100", nn.Linear(2, 1))
    ...     sorted(load_dcp(path))
    ['model.bias', 'model.weight']
    """
    source = DcpFolder(folder)
    return {name: source.read(name) for name in source.tensors}


def _read_index(folder: Path) -> tuple[Metadata, dict[str, Any], dict[str, tuple[str | int, ...]]]:
    """The tensors of the index, each whole, and the folder's own files that they lie in; where objects lie; paths."""
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata

    with open(folder / INDEX, "rb") as file:
        index = _IndexReader(file).load()
    every: dict[str, Any] = index.state_dict_metadata
    stored = {name: one for name, one in every.items() if isinstance(one, TensorStorageMetadata)}
    for name, tensor in stored.items():
        if sum(chunk.sizes.numel() for chunk in tensor.chunks) != tensor.size.numel():
            raise MupscaleError(f"{folder} cannot be read: a part of '{name}' is missing in its {INDEX}")
    for info in index.storage_data.values():
        if Path(info.relative_path).name != info.relative_path or not (folder / info.relative_path).is_file():
            raise MupscaleError(f"{folder} cannot be read: it has no file {info.relative_path!r}")
        if not all(type(number) is int and number >= 0 for number in (info.offset, info.length)):
            raise MupscaleError(f"{folder} cannot be read: its {INDEX} gives no place in {info.relative_path!r}")
    places = {key.fqn: info for key, info in index.storage_data.items()}
    objects = {n: places[n] for n, one in every.items() if isinstance(one, BytesStorageMetadata) and n in places}
    nested = index.planner_data if isinstance(index.planner_data, dict) else {}
    paths = {n: p for n, p in nested.items() if type(p) is tuple and all(type(part) in (str, int) for part in p)}
    return Metadata({**stored}, storage_data=index.storage_data), objects, paths


def _reader(folder: Path, index: Metadata) -> StorageReader:
    """Torch's own, but for the index, which it does not read."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    class CheckedReader(FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
            return index

    return CheckedReader(folder)


def load_dcp_model(folder: str | Path) -> dict[str, Tensor]:
    """The model's tensors in a DCP folder: those under `model`, or all that are no optimizer's or loader's.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     sorted(load_dcp_model(save_dcp(f"{folder}/step-100", nn.Linear(2, 1))))
    ['bias', 'weight']
    """
    source = DcpFolder(folder)
    return {name: source.read(source.model_prefix + name) for name in source.model}


def save_dcp(folder: str | Path, model: nn.Module, optimizer: Optimizer | None = None) -> Path:
    """Write a model, and its optimizer, as a DCP folder, which torch's own loader reads; all processes must call.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     sorted(path.name for path in save_dcp(f"{folder}/step-100", nn.Linear(2, 1)).iterdir())
    ['.metadata', '__0_0.distcp']
    """
    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
    from torch.distributed.checkpoint.state_dict_saver import save

    state: dict[str, Any] = {"model": get_model_state_dict(model)}
    if optimizer is not None:
        state["optimizer"] = get_optimizer_state_dict(model, optimizer)
    with explaining_torch(f"{folder} could not be written"):
        save(state, checkpoint_id=str(folder), no_dist=not (dist.is_available() and dist.is_initialized()))
    return Path(folder)


def write_dcp(folder: Path, content: DcpContent, processes: Processes) -> None:
    """Write a DCP folder of which each tensor is made when its turn comes, and given up when it is written.

    Tensors must have memory of their own. Several processes divide them; all must call.
    """
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    class Planner(DefaultSavePlanner):
        made: Tensor | None = None

        def set_up_planner(self, *args: Any, **kwargs: Any) -> None:
            super().set_up_planner(*args, **kwargs)
            self.mappings = {name: content.paths.get(name, (name,)) for name in self.state_dict}

        def resolve_data(self, write_item: Any) -> Any:
            if self.made is not None:  # torch keeps what it has written until the end
                self.made.untyped_storage().resize_(0)
            name, self.made = write_item.index.fqn, None
            if name in content.objects:
                return io.BytesIO(content.raw(name))
            self.made = content.read(name)
            return self.made

    sizes = {name: math.prod(shape) * content.dtypes[name].itemsize for name, shape in content.shapes.items()}
    ours = divide_by_size(sizes, processes.world)[processes.rank]
    empty = {n: torch.empty(content.shapes[n], dtype=content.dtypes[n], device="meta") for n in ours}
    state: dict[str, Any] = {**empty, **dict.fromkeys(content.objects)}
    with explaining_torch(f"{folder} could not be written"):
        writer = FileSystemWriter(folder, per_thread_copy_ahead=0)  # one tensor after the other, on any machine
        save(state, storage_writer=writer, planner=Planner(), no_dist=processes.world == 1)
