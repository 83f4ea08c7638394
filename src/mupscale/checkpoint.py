"""One file that holds a model, its optimizer and its plan: tensors as safetensors, everything else as JSON.

The JSON lies in the file's header, so that one rename makes the whole checkpoint appear: a killed save leaves the
previous one. Nothing is ever unpickled, except through torch's weights-only loader.
"""

from __future__ import annotations

import json
import os
import pickle
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from mupscale import names as naming
from mupscale import sharded
from mupscale.errors import MupscaleError
from mupscale.plan import Plan

_HEADER = "mupscale"
_VERSION = 1


@dataclass(frozen=True)
class Checkpoint:
    """What a file holds: state dicts as torch makes them, the plan, and the caller's own JSON values."""

    model: dict[str, Tensor]
    optimizer: dict[str, Any] | None = None
    plan: Plan | None = None
    extra: dict[str, Any] = field(default_factory=dict)


def save(
    path: str | Path,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    plan: Plan | None = None,
    **extra: Any,
) -> Path:
    """Write a checkpoint; `extra` is anything JSON can hold. With several processes all must call, and one writes."""
    path = Path(path)
    tensors: dict[str, Tensor] = {}
    content = {
        "version": _VERSION,
        "model": _pack(_model_state(model), "model", tensors),
        "optimizer": None if optimizer is None else _pack(optimizer.state_dict(), "optimizer", tensors),
        "plan": None if plan is None else plan.to_json(),
        "extra": _pack(extra, "extra", tensors),
    }
    if dist.is_available() and dist.is_initialized() and dist.get_rank() != 0:
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        save_file(tensors, temporary, metadata={_HEADER: json.dumps(content)})
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def load(path: str | Path, model: nn.Module | None = None, optimizer: Optimizer | None = None) -> Checkpoint:
    """Read a checkpoint, and put it into the model and the optimizer where given."""
    try:
        with safe_open(path, framework="pt") as file:
            header = (file.metadata() or {}).get(_HEADER)
            if header is None:
                raise MupscaleError(f"{path} is a safetensors file, but no checkpoint written by mupscale")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise MupscaleError(f"there is no checkpoint at {path}") from None
    except (SafetensorError, OSError) as error:
        raise MupscaleError(f"{path} is not a whole checkpoint ({error}); it may be truncated") from None
    content = json.loads(header)
    if content["version"] != _VERSION:
        raise MupscaleError(f"{path} was written in version {content['version']} of the format; this reads {_VERSION}")
    unpacked = {part: _unpack(content[part], tensors) for part in ("model", "optimizer", "extra")}
    plan = None if content["plan"] is None else Plan.from_json(content["plan"])
    checkpoint = Checkpoint(unpacked["model"], unpacked["optimizer"], plan, unpacked["extra"])
    if model is not None:
        load_model(checkpoint.model, model)
    if optimizer is not None:
        if checkpoint.optimizer is None:
            raise MupscaleError(f"{path} holds no optimizer state; load it without an optimizer")
        optimizer.load_state_dict(checkpoint.optimizer)
    return checkpoint


def load_model(state: Mapping[str, Tensor], model: nn.Module) -> None:
    """Strictly: every name and shape must agree. Sharded and wrapped models included."""
    plain = naming.unwrap(model)
    own = {naming.canonical(name): (name, tensor) for name, tensor in plain.state_dict().items()}
    if own.keys() != state.keys():
        odd = min(own.keys() ^ state.keys())
        raise MupscaleError(f"the checkpoint is of another model: '{odd}' is in one of the two only")
    for name, (_, tensor) in own.items():
        if tensor.shape != state[name].shape:
            raise MupscaleError(
                f"the checkpoint is of another model: '{name}' has shape {tuple(state[name].shape)} there and "
                f"{tuple(tensor.shape)} here"
            )
    for name, (_, tensor) in own.items():
        sharded.write(state[name], tensor)


def load_torch(path: str | Path) -> Any:
    """A file that torch.save wrote, loaded weights-only: tensors and plain containers, never code."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise MupscaleError(f"there is no file at {path}") from None
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, zipfile.BadZipFile) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise MupscaleError(f"{path} cannot be loaded as weights only: {reason}") from None


def _model_state(model: nn.Module) -> dict[str, Tensor]:
    return {naming.canonical(name): tensor for name, tensor in naming.unwrap(model).state_dict().items()}


def _pack(value: Any, key: str, tensors: dict[str, Tensor]) -> Any:
    """JSON for the value; tensors go into `tensors` and leave their name, equal ones once."""
    if isinstance(value, Tensor):
        whole = sharded.full(value.detach())
        for name, known in tensors.items():
            if known is whole or (_same_memory(known, whole) and whole.numel()):
                return {"$tensor": name}
        tensors[key] = whole
        return {"$tensor": key}
    if isinstance(value, Mapping):
        return {"$items": [[_pack(k, key, tensors), _pack(v, f"{key}.{k}", tensors)] for k, v in value.items()]}
    if isinstance(value, tuple):
        return {"$tuple": [_pack(v, f"{key}.{i}", tensors) for i, v in enumerate(value)]}
    if isinstance(value, list):
        return [_pack(v, f"{key}.{i}", tensors) for i, v in enumerate(value)]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise MupscaleError(
        f"'{key}' is a {type(value).__name__}, which a checkpoint cannot hold; give tensors or JSON values"
    )


def _unpack(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_unpack(v, tensors) for v in value]
    if not isinstance(value, dict):
        return value
    ((tag, content),) = value.items()
    if tag == "$tensor":
        return tensors[content]
    if tag == "$tuple":
        return tuple(_unpack(v, tensors) for v in content)
    return {_unpack(k, tensors): _unpack(v, tensors) for k, v in content}


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype
