"""A run's model and optimizer on disk: one safetensors file, or shards (torch.distributed.checkpoint) under FSDP.

Shards are safetensors, too, and can be read back by any number of processes, one included.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mupscale import checkpoint
from mupscale import names as naming
from mupscale.checkpoint import Checkpoint
from mupscale.errors import MupscaleError
from mupscale.plan import Plan
from mupscale.train.parallel import Processes

_HEADER, _SHARDS = "header.safetensors", "shards"


def save(
    path: Path, model: nn.Module, optimizer: Optimizer, plan: Plan, processes: Processes, extra: Mapping[str, Any]
) -> None:
    """Write it all; it appears under its name when it is whole. Every process must call."""
    if not processes.sharded:
        checkpoint.save(path, model, optimizer, plan, **extra)
        return
    temporary = path.with_name(f".{path.name}.tmp")
    failure: Exception | None = None
    try:
        if processes.main:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        processes.barrier()
        _write_shards(temporary, model, optimizer)
        checkpoint.write(temporary / _HEADER, {}, _without_tensors(model, optimizer), plan, extra)
    except Exception as error:  # another process may have failed alone: all must know
        failure = error
    (failed,) = processes.any(failure is not None)
    if failed:
        reason = str(failure).strip().splitlines()[-1] if failure else "another process failed"
        raise MupscaleError(f"the checkpoint {path} could not be written: {reason}; the one before is whole") from None
    if processes.main:
        os.replace(temporary, path)
    processes.barrier()


@dataclass(frozen=True)
class Snapshot:
    """A checkpoint that is read, its tensors perhaps not yet."""

    path: Path
    content: Checkpoint

    @property
    def sharded(self) -> bool:
        """Whether its tensors lie in shards."""
        return self.path.is_dir()

    def restore_model(self, model: nn.Module) -> None:
        """Its weights and buffers, into the model."""
        if not self.sharded:
            checkpoint.load_model(self.content.model, model)
            return
        targets = {f"model.{name}": tensor for name, tensor in _model_tensors(model).items()}
        _check_shapes(self.path, targets)
        _read_shards(self.path, targets)

    def restore_optimizer(self, cls: type[Optimizer], hyper: Mapping[str, Any], model: nn.Module) -> Optimizer:
        """The optimizer, with the groups it had and its state."""
        saved = self.content.optimizer
        if saved is None:
            raise MupscaleError(f"{self.path} holds no optimizer state, so the run cannot be resumed from it")
        parameters = naming.parameters(model)
        groups = []
        for group in saved["param_groups"]:
            kept = {key: value for key, value in group.items() if key not in ("params", "param_names")}
            groups.append({"params": [(name, parameters[name]) for name in group["param_names"]], **kept})
        optimizer = cls(groups, **hyper)
        if not self.sharded:
            checkpoint.load_optimizer(saved, optimizer)
            return optimizer
        state = _sharded_state(self.path, parameters)
        _read_shards(self.path, {f"optimizer.{n}/{key}": t for n, values in state.items() for key, t in values.items()})
        for name, values in state.items():
            optimizer.state[parameters[name]] = values
        for name, values in saved["state"].items():
            optimizer.state[parameters[name]] = {**values, **optimizer.state.get(parameters[name], {})}
        return optimizer


def read(path: Path) -> Snapshot:
    """Open a checkpoint of either kind."""
    return Snapshot(path, checkpoint.load(path / _HEADER if path.is_dir() else path))


def _write_shards(folder: Path, model: nn.Module, optimizer: Optimizer) -> None:
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save as save_shards

    state: dict[str, Any] = {f"model.{name}": tensor for name, tensor in _model_tensors(model).items()}
    for name, p in naming.parameters(model).items():
        for key, value in optimizer.state.get(p, {}).items():
            if isinstance(value, Tensor):
                state[f"optimizer.{name}/{key}"] = value
    save_shards(state, storage_writer=HuggingFaceStorageWriter(str(folder / _SHARDS), save_distributed=True))


def _read_shards(folder: Path, targets: dict[str, Any]) -> None:
    """Fill the targets, whatever their layout."""
    from torch.distributed.checkpoint.state_dict_loader import load as load_shards

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that one process alone reads is meant
        load_shards(targets, storage_reader=_reader(folder))


def _reader(folder: Path) -> Any:
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    return HuggingFaceStorageReader(str(folder / _SHARDS))


def _sharded_state(folder: Path, parameters: Mapping[str, nn.Parameter]) -> dict[str, dict[str, Tensor]]:
    """Empty tensors for the optimizer's state in the shards, each laid out as its parameter is."""
    state: dict[str, dict[str, Tensor]] = {}
    for key, found in _reader(folder).read_metadata().state_dict_metadata.items():
        if key.startswith("optimizer."):
            name, _, entry = key.removeprefix("optimizer.").rpartition("/")
            p = parameters[name]
            if found.size == p.shape and p.dim():
                made = torch.empty_like(p.detach(), dtype=found.properties.dtype)
            else:
                made = torch.empty(found.size, dtype=found.properties.dtype)
            state.setdefault(name, {})[entry] = made
    return state


def _check_shapes(folder: Path, targets: Mapping[str, Tensor]) -> None:
    there = {key: found.size for key, found in _reader(folder).read_metadata().state_dict_metadata.items()}
    for key, tensor in targets.items():
        if there.get(key) != tensor.shape:
            name = key.removeprefix("model.")
            raise MupscaleError(
                f"the checkpoint is of another model: '{name}' has shape {tuple(there.get(key) or ())} there and "
                f"{tuple(tensor.shape)} here"
            )


def _model_tensors(model: nn.Module) -> dict[str, Tensor]:
    return {naming.canonical(name): tensor.detach() for name, tensor in naming.unwrap(model).state_dict().items()}


def _without_tensors(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """The optimizer's groups, and of its state what is no tensor."""
    state = {
        name: {key: value for key, value in optimizer.state.get(p, {}).items() if not isinstance(value, Tensor)}
        for name, p in naming.parameters(model).items()
    }
    return {"state": state, "param_groups": optimizer.state_dict()["param_groups"]}
