"""Folders of torch.distributed.checkpoint (DCP), as torchtitan and FSDP write them: tensors read and written, no code.

A DCP folder's index (.metadata) is a pickle. It is unpickled once, if it names nothing but what such an index is made
of; torch, which would unpickle it again and load whatever it names, is given what was found in it of tensors.
"""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mupscale.system import MupscaleError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.storage import StorageReader

INDEX = ".metadata"
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


def is_dcp_folder(path: Path) -> bool:
    """Whether torch.distributed.checkpoint has written this folder.

    >>> is_dcp_folder(Path("nowhere"))
    False
    """
    return (path / INDEX).is_file()


def load_dcp(folder: str | Path) -> dict[str, Tensor]:
    """All tensors of a DCP folder by their names, whole and in main memory, whatever they were sharded over.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = save_dcp(f"{folder}/step-100", nn.Linear(2, 1))
    ...     sorted(load_dcp(path))
    ['model.bias', 'model.weight']
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_loader import load

    path = Path(folder)
    if not is_dcp_folder(path):
        raise MupscaleError(f"{path} is no folder of torch.distributed.checkpoint: it has no {INDEX}")
    try:
        index = _read_index(path)
        stored: dict[str, Any] = index.state_dict_metadata
        tensors: dict[str, Any] = {n: torch.empty(t.size, dtype=t.properties.dtype) for n, t in stored.items()}
    except pickle.UnpicklingError as error:
        raise MupscaleError(f"{path / INDEX} holds {error}, which no index of tensors needs: it is not read") from None
    except MupscaleError:
        raise
    except Exception as error:  # what is unpickled may have anything in its fields
        raise MupscaleError(f"{path / INDEX} is damaged ({type(error).__name__}: {error})") from None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that one process alone reads is meant
        try:
            load(tensors, storage_reader=_reader(path, index), no_dist=True)
        except CheckpointException as error:  # no subclass of Exception
            last = str(error).strip().splitlines()[-1:] or [type(error).__name__]
            raise MupscaleError(f"{path} cannot be read: {last[0]}") from None
    return tensors


def _read_index(folder: Path) -> Metadata:
    """The tensors of the index, each whole, and the folder's own files that they lie in; nothing else of it."""
    from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

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
    return Metadata({**stored}, storage_data=index.storage_data)


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
    tensors = {n: t for n, t in load_dcp(folder).items() if not n.startswith(_NOT_THE_MODEL)}
    if not tensors:
        raise MupscaleError(f"{folder} holds no tensors of a model")
    nested = all(name.startswith("model.") for name in tensors)
    return {name.removeprefix("model.") if nested else name: tensor for name, tensor in tensors.items()}


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
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save(state, checkpoint_id=str(folder), no_dist=not (dist.is_available() and dist.is_initialized()))
    return Path(folder)
