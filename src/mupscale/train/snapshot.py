"""A run's model and optimizer on disk: one safetensors file, or shards (torch.distributed.checkpoint) under FSDP.

Shards are safetensors, too, and can be read back by any number of processes, one included.
"""

from __future__ import annotations

import warnings
from collections.abc import Container, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.optim import Optimizer

from mupscale import checkpoint
from mupscale.checkpoint import Checkpoint, DamagedCheckpoint
from mupscale.core import Plan, WholeWidth, naming
from mupscale.system import MupscaleError, make_folder, move, remove
from mupscale.train.processes import Processes


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

    step: int | None = None
    width: WholeWidth | None = None
    lr: float | None = None
    flops: float | None = None
    seconds: float | None = None
    losses: list[float] | None = None
    norms: list[float] | None = None
    left_out: int | None = None
    recipe: dict[str, Any] | None = None
    data: str | None = None
    threads: int | None = None

    @property
    def optimizer_class(self) -> str | None:
        """Import path of the optimizer's class."""
        optimizer = (self.recipe or {}).get("optimizer")
        path = optimizer.get("class_path") if isinstance(optimizer, dict) else None
        return path if isinstance(path, str) else None

    def to_json(self) -> dict[str, Any]:
        """Plain values, without the fields that are None."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @classmethod
    def from_json(cls, values: Any, path: Path) -> RunState:
        """The state from what `to_json` gave; `path` is the checkpoint that an error names."""
        if not isinstance(values, Mapping):
            raise MupscaleError(f"{path}: 'run' is {_shown(values)}, but must be the values of a run by name")
        state = {field.name: values[field.name] for field in fields(cls) if values.get(field.name) is not None}
        for name, value in state.items():
            expected, is_valid = _CHECKS[name]
            if not is_valid(value):
                raise MupscaleError(f"{path}: the run's '{name}' is {_shown(value)}, but must be {expected}")
        return cls(**state)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_width(value: Any) -> bool:
    return all(map(_is_count, value.values())) if isinstance(value, dict) else _is_count(value)


def _is_list_of_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_number, value))


_CHECKS = {
    "step": ("a whole number", _is_count),
    "width": ("a whole number, or one for each argument", _is_width),
    "lr": ("a number", _is_number),
    "flops": ("a number", _is_number),
    "seconds": ("a number", _is_number),
    "losses": ("a list of numbers", _is_list_of_numbers),
    "norms": ("a list of numbers", _is_list_of_numbers),
    "left_out": ("a whole number", _is_count),
    "recipe": ("a recipe's values by name", lambda value: isinstance(value, dict)),
    "data": ("a fingerprint", lambda value: isinstance(value, str)),
    "threads": ("a whole number", _is_count),
}


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


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
    from torch.distributed.checkpoint.api import CheckpointException

    temporary = path.with_name(f".{path.name}.tmp")
    what = f"the checkpoint {path} could not be written"
    try:
        processes.by_main(lambda: _make_empty(temporary), what)
        _write_shards(temporary, model, optimizer)
        checkpoint.save_states(temporary / _HEADER, {}, _without_tensors(model, optimizer), plan, extra)
        processes.by_main(lambda: move(temporary, path), what)
    except (MupscaleError, CheckpointException) as error:  # all processes fail here, or none
        with suppress(OSError):
            if processes.main:
                remove(temporary)
        if isinstance(error, MupscaleError):
            raise
        raise MupscaleError(f"{what}: {_reason(error)}; the one before is whole") from None


def save_model_at(path: Path, model: nn.Module, width: WholeWidth, optimizer: Optimizer | None = None) -> None:
    """A model with its width in a file that a run can start from (`from`), in a folder that is made if need be.

    optimizer: of the model, with names in its groups, whose state goes along.

    >>> from tempfile import TemporaryDirectory
    >>> from mupscale.models import MLP
    >>> with TemporaryDirectory() as folder:
    ...     save_model_at(Path(folder, "runs", "start.safetensors"), MLP(d_in=3, d_out=2, width=16), 16)
    ...     read_snapshot(Path(folder, "runs", "start.safetensors")).run.width
    16
    """
    checkpoint.save(path, model, optimizer, run=RunState(width=width).to_json())


@dataclass(frozen=True)
class Snapshot:
    """A checkpoint that is read, its tensors perhaps not yet."""

    path: Path
    content: Checkpoint

    @property
    def sharded(self) -> bool:
        """Whether its tensors lie in shards."""
        return self.path.is_dir()

    @property
    def run(self) -> RunState | None:
        """What it says of its run; None if the model was saved without one."""
        extra = self.content.extra
        return RunState.from_json(extra["run"], self.path) if "run" in extra else None

    def check_model(self, model: nn.Module) -> None:
        """Refuse a model whose tensors are others; it may be on the meta device."""
        if self.sharded:
            _check_shapes(self.path, _targets(model))
        else:
            checkpoint.check_model_state(self.content.model, model)

    def restore_model(self, model: nn.Module) -> None:
        """Its weights and buffers, into the model."""
        if not self.sharded:
            checkpoint.load_model_state(self.content.model, model)
            return
        self.check_model(model)
        _read_shards(self.path, _targets(model))

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
        on_device = {
            name for group in optimizer.param_groups if _counts_on_device(group) for name in group["param_names"]
        }
        state = _sharded_state(self.path, parameters, on_device)
        _read_shards(self.path, {f"optimizer.{n}/{key}": t for n, values in state.items() for key, t in values.items()})
        for name, values in state.items():
            optimizer.state[parameters[name]] = values
        for name, values in saved["state"].items():
            optimizer.state[parameters[name]] = {**values, **optimizer.state.get(parameters[name], {})}
        return optimizer


def read_snapshot(path: Path) -> Snapshot:
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


def _make_empty(folder: Path) -> None:
    remove(folder)
    make_folder(folder)


def _reason(error: Any) -> str:
    """What a process that failed says, of all that torch.distributed.checkpoint tells of it."""
    cause, _ = next(iter(error.failures.values()))
    return " ".join(str(cause).split()) or type(cause).__name__


def _read_shards(folder: Path, targets: dict[str, Any]) -> None:
    """Fill the targets, whatever their layout."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_loader import load as load_shards

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that one process alone reads is meant
        try:
            load_shards(targets, storage_reader=_reader(folder))
        except CheckpointException as error:
            raise MupscaleError(f"{folder} cannot be read: {_reason(error)}") from None


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


def _sharded_state(
    folder: Path, parameters: Mapping[str, nn.Parameter], on_device: Container[str]
) -> dict[str, dict[str, Tensor]]:
    """Empty tensors for the optimizer's state in the shards, each laid out as its parameter is."""
    state: dict[str, dict[str, Tensor]] = {}
    for key, stored in _stored_tensors(folder).items():
        if key.startswith("optimizer."):
            name, _, entry = key.removeprefix("optimizer.").rpartition("/")
            p = parameters[name]
            if stored.size == p.shape and p.dim():
                empty = torch.empty_like(p.detach(), dtype=stored.properties.dtype)
            else:
                device = p.device if len(stored.size) or name in on_device else "cpu"
                empty = torch.empty(stored.size, dtype=stored.properties.dtype, device=device)
            state.setdefault(name, {})[entry] = empty
    return state


def _counts_on_device(group: Mapping[str, Any]) -> bool:
    """Whether the optimizer keeps its numbers of steps where the parameters are."""
    return bool(group.get("fused") or group.get("capturable"))


def _targets(model: nn.Module) -> dict[str, Tensor]:
    """The model's tensors by the names that they have in shards."""
    return {f"model.{name}": tensor for name, tensor in _model_tensors(model).items()}


def _check_shapes(folder: Path, targets: Mapping[str, Tensor]) -> None:
    sizes = {key: stored.size for key, stored in _stored_tensors(folder).items()}
    for key, tensor in targets.items():
        if sizes.get(key) != tensor.shape:
            name = key.removeprefix("model.")
            raise MupscaleError(
                f"the checkpoint is of another model: '{name}' has shape {tuple(sizes.get(key) or ())} there and "
                f"{tuple(tensor.shape)} here"
            )


def _model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Weights and buffers; a tied one under its first name only, since a file of safetensors has no memory twice."""
    tensors: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in naming.unwrap(model).state_dict(keep_vars=True).items():
        tensors.setdefault(id(tensor), (naming.canonical(name), tensor.detach()))
    return dict(tensors.values())


def _without_tensors(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """The optimizer's groups, and of its state what is no tensor."""
    state = {
        name: {key: value for key, value in optimizer.state.get(p, {}).items() if not isinstance(value, Tensor)}
        for name, p in naming.parameters(model).items()
    }
    return {"state": state, "param_groups": optimizer.state_dict()["param_groups"]}
