"""A run's model and optimizer on disk: one safetensors file, or shards (torch.distributed.checkpoint) under FSDP.

Shards are safetensors, too, and can be read back by any number of processes, one included.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.optim import Optimizer

from mupscale import checkpoint
from mupscale.checkpoint import Checkpoint, DamagedCheckpoint
from mupscale.core import Plan, WholeWidth, naming
from mupscale.system import MupscaleError, Must, make_folder, move, parse_record, remove, told_fields
from mupscale.train.dcp_folders import explaining_torch, load_into
from mupscale.train.processes import Processes

Count = Annotated[int, Must("a whole number of 0 or more", lambda value: value >= 0)]


@dataclass(frozen=True)
class RunState:
    """Where a run stands when its checkpoint is written.

    A field is None where the checkpoint does not say it. A model that is written without a run, for a later one to
    start from, says its width alone.

    Args:
        step: optimizer steps so far
        width: the model's width
        lr: learning rate at the base width, before the schedule
        flops: training FLOPs so far
        seconds: seconds of training so far
        losses: losses of the steps since the last line of metrics
        norms: gradient norms of these steps, if the gradient is clipped
        left_out: batches of the data that were left out where the run went back from a loss that was not finite
        recipe: the recipe as plain values
        data: a fingerprint of the data
        threads: of torch, on whose number sums on a CPU depend in their last bits
    """

    step: Count | None = None
    width: WholeWidth | None = None
    lr: float | None = None
    flops: float | None = None
    seconds: float | None = None
    losses: list[float] | None = None
    norms: list[float] | None = None
    left_out: Count | None = None
    recipe: dict[str, Any] | None = None
    data: str | None = None
    threads: Count | None = None

    @property
    def optimizer_class(self) -> str | None:
        optimizer = (self.recipe or {}).get("optimizer")
        path = optimizer.get("class_path") if isinstance(optimizer, dict) else None
        return path if isinstance(path, str) else None

    def to_json(self) -> dict[str, Any]:
        return told_fields(self)

    @classmethod
    def from_json(cls, values: Any, path: Path) -> RunState:
        """The state from what `to_json` gave; `path` is the checkpoint that an error names."""
        if isinstance(values, Mapping):  # it may be somebody else's, who keeps more there
            values = {each.name: values[each.name] for each in fields(cls) if values.get(each.name) is not None}
        return parse_record(cls, values, f"{path}: run")

    def check_whole(self, path: Path) -> int:
        """Its step; an error unless it says all that a run needs to go on from it."""
        for name in ("step", "lr", "flops", "seconds", "losses", "norms", "recipe"):
            if getattr(self, name) is None:
                raise MupscaleError(f"{path} does not record the run's '{name}', so the run cannot be resumed from it")
        assert self.step is not None
        return self.step


_HEADER, _SHARDS = "header.safetensors", "shards"


def save_snapshot(
    path: Path, model: nn.Module, optimizer: Optimizer, plan: Plan, processes: Processes, run: RunState
) -> None:
    """Write it all; it appears under its name when it is whole. Every process must call."""
    processes.share_buffers(model)
    extra = {"run": run.to_json()}
    if not processes.sharded:
        checkpoint.save(path, model, optimizer, plan, **extra)
        return
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save as save_shards

    temporary, what = path.with_name(f".{path.name}.tmp"), f"the checkpoint {path} could not be written"
    tensors: dict[str, Any] = {**_model_tensors(model)}
    others: dict[str, dict[str, Any]] = {}  # of the optimizer's state what is no tensor
    for name, p in naming.parameters(model).items():
        state = optimizer.state.get(p, {})
        tensors |= {f"optimizer.{name}/{key}": value for key, value in state.items() if isinstance(value, Tensor)}
        others[name] = {key: value for key, value in state.items() if not isinstance(value, Tensor)}
    header = {"state": others, "param_groups": optimizer.state_dict()["param_groups"]}
    try:
        processes.by_main(lambda: remove(temporary), what)
        processes.by_main(lambda: make_folder(temporary), what)
        with explaining_torch(what, "; the one before is whole"):
            writer = HuggingFaceStorageWriter(str(temporary / _SHARDS), save_distributed=True)
            save_shards(tensors, storage_writer=writer)
        checkpoint.save_states(temporary / _HEADER, {}, header, plan, extra)
        processes.by_main(lambda: move(temporary, path), what)
    except MupscaleError:  # all processes fail here, or none
        with suppress(OSError):
            if processes.main:
                remove(temporary)
        raise


def save_model_at(path: Path, model: nn.Module, width: WholeWidth, optimizer: Optimizer | None = None) -> None:
    """A model with its width in a file that a run can start from (`from`), in a folder that is made if need be.

    optimizer: of the model, with names in its groups, whose state goes along.
    """
    checkpoint.save(path, model, optimizer, run=RunState(width=width).to_json())


@dataclass(frozen=True)
class Snapshot:
    """A checkpoint that is read, its tensors perhaps not yet."""

    path: Path
    content: Checkpoint

    @property
    def sharded(self) -> bool:
        return self.path.is_dir()

    @property
    def run(self) -> RunState | None:
        """What it says of its run; None if the model was saved without one."""
        extra = self.content.extra
        return RunState.from_json(extra["run"], self.path) if "run" in extra else None

    def check_model(self, model: nn.Module) -> None:
        """Refuse a model whose tensors are others; it may be on the meta device."""
        if not self.sharded:
            checkpoint.check_model_state(self.content.model, model)
            return
        sizes = {key: stored.size for key, stored in _stored_tensors(self.path).items()}
        for key, tensor in _model_tensors(model).items():
            if sizes.get(key) != tensor.shape:
                raise MupscaleError(
                    f"the checkpoint is of another model: '{key.removeprefix('model.')}' has shape "
                    f"{tuple(sizes.get(key) or ())} there and {tuple(tensor.shape)} here"
                )

    def restore_model(self, model: nn.Module) -> None:
        if not self.sharded:
            checkpoint.load_model_state(self.content.model, model)
            return
        self.check_model(model)
        load_into(_model_tensors(model), _reader(self.path), self.path)

    def restore_optimizer(self, cls: type[Optimizer], hyper: Mapping[str, Any], model: nn.Module) -> Optimizer:
        """The optimizer, with the groups it had and its state."""
        saved = self.content.optimizer
        if saved is None:
            raise MupscaleError(f"{self.path} holds no optimizer state, so the run cannot be resumed from it")
        parameters = naming.parameters(model)
        groups = []
        for group in saved["param_groups"]:
            settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
            groups.append({"params": [(name, parameters[name]) for name in group["param_names"]], **settings})
        optimizer = cls(groups, **hyper)
        if not self.sharded:
            checkpoint.load_optimizer_state(saved, optimizer)
            return optimizer
        targets = self._sharded_state(optimizer)
        load_into(targets, _reader(self.path), self.path)
        states: dict[str, dict[str, Any]] = {name: dict(values) for name, values in saved["state"].items()}
        for key, tensor in targets.items():
            name, _, entry = key.removeprefix("optimizer.").rpartition("/")
            states.setdefault(name, {})[entry] = tensor
        optimizer.state.update({parameters[name]: values for name, values in states.items()})
        return optimizer

    def _sharded_state(self, optimizer: Optimizer) -> dict[str, Tensor]:
        """Empty tensors for the optimizer's state in the shards, each laid out as its parameter is."""
        named = {n: (p, g) for g in optimizer.param_groups for n, p in zip(g["param_names"], g["params"], strict=True)}
        empty: dict[str, Tensor] = {}
        for key, stored in _stored_tensors(self.path).items():
            if key.startswith("optimizer."):
                p, group = named[key.removeprefix("optimizer.").rpartition("/")[0]]
                dtype, counts_on_device = stored.properties.dtype, group.get("fused") or group.get("capturable")
                if stored.size == p.shape and p.dim():
                    empty[key] = torch.empty_like(p.detach(), dtype=dtype)
                else:
                    device = p.device if len(stored.size) or counts_on_device else "cpu"
                    empty[key] = torch.empty(stored.size, dtype=dtype, device=device)
        return empty


def read_snapshot(path: Path) -> Snapshot:
    """Open a checkpoint of either kind."""
    return Snapshot(path, checkpoint.load(path / _HEADER if path.is_dir() else path))


def _reader(folder: Path) -> Any:
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    return HuggingFaceStorageReader(str(folder / _SHARDS))


def _stored_tensors(folder: Path) -> dict[str, Any]:
    """The tensors in the shards, if all parts of each are there: torch would leave what is missing as it finds it."""
    try:
        tensors: dict[str, Any] = _reader(folder).read_metadata().state_dict_metadata
    except (SafetensorError, OSError) as error:
        raise DamagedCheckpoint(f"{folder} is not a whole checkpoint ({error}); it may be truncated") from None
    for key, tensor in tensors.items():
        if sum(chunk.sizes.numel() for chunk in tensor.chunks) != tensor.size.numel():
            raise DamagedCheckpoint(f"{folder} is not a whole checkpoint: the shard with a part of '{key}' is missing")
    return tensors


def _model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Weights and buffers by their names in shards; a tied one once, since safetensors has no memory twice."""
    tensors: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in naming.unwrap(model).state_dict(keep_vars=True).items():
        tensors.setdefault(id(tensor), (f"model.{naming.canonical(name)}", tensor.detach()))
    return dict(tensors.values())
