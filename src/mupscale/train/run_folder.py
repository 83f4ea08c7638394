"""The folder of a run: its recipe, its metrics as JSON lines, and its last checkpoints.

A checkpoint is one safetensors file, or shards (torch.distributed.checkpoint) under FSDP. Shards are safetensors, too,
and can be read back by any number of processes, one included.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
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
from mupscale.system import (
    MupscaleError,
    Must,
    RunLock,
    as_asked,
    clear_leftovers,
    make_folder,
    move,
    parse_record,
    remove,
    replace_text,
    setting,
    told_fields,
)
from mupscale.train.callbacks import Record, TensorBoard, append_line, read_lines
from mupscale.train.dcp import explaining_torch, load_into
from mupscale.train.processes import Processes
from mupscale.train.recipe import Recipe
from mupscale.train.stored_recipes import StoredRecipe, sign_run, stored_values

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
    """A checkpoint that is read, where it is sharded without its tensors; or somebody's weights, which say no more."""

    path: Path
    content: Checkpoint
    sharded: bool = False

    @property
    def run(self) -> RunState | None:
        extra = self.content.extra
        return RunState.from_json(extra["run"], self.path) if "run" in extra else None

    def check_model(self, model: nn.Module) -> None:
        """Refuse a model whose tensors are others; it may be on the meta device."""
        if not self.sharded:
            checkpoint.check_model_state(self.content.model, model)
            return
        sizes = {name: one.size for name, one in _stored_tensors(self.path).items() if name.startswith("model.")}
        checkpoint.check_shapes(sizes, _model_tensors(model))

    def restore_model(self, model: nn.Module) -> None:
        if not self.sharded:
            checkpoint.load_model_state(self.content.model, model)
            return
        self.check_model(model)
        load_into(_model_tensors(model), _reader(self.path), self.path)

    def restore_optimizer(self, cls: type[Optimizer], hyper: Mapping[str, Any], model: nn.Module) -> Optimizer:
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
    sharded = path.is_dir()
    return Snapshot(path, checkpoint.load(path / _HEADER if sharded else path), sharded)


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


_CHECKPOINT = re.compile(r"step-(\d{9})(\.safetensors)?")


class RunFolder:
    """The files of a run: `recipe.json`, `metrics.jsonl` and `checkpoints/step-….safetensors` (shards under FSDP)."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.metrics = self.path / "metrics.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self.lock: RunLock | None = None
        self.board = TensorBoard()
        self.is_own = False  # begun by this user, here: see sign_run
        self.made: list[Path] = []  # folders that were not there before, innermost first, while nothing is in them

    # ------------------------------------------------------------------------------------------- while it trains

    def begin(self, resume: bool) -> None:
        """Make the folder and lock it, unless it holds a run that is not to be resumed, or that somebody trains."""
        last, over = self.last(), f"start over ({as_asked('overwrite=True', '--overwrite')})"
        other = f"choose another folder ({setting('out')})"
        if last is None and not resume and self.records():
            raise MupscaleError(f"{self.path} holds the history of a run without checkpoints: {other}, or {over}")
        if last is not None and not resume:
            raise MupscaleError(
                f"{self.path} holds a run at step {step_of(last)} already: resume it "
                f"({as_asked('resume=True', '--resume')}), {over}, or {other}"
            )
        self.made = [each for each in (self.checkpoints, self.path, *self.path.parents) if not each.exists()]
        self.lock = self.lock or RunLock(make_folder(self.path))
        try:
            for folder in (self.path, make_folder(self.checkpoints)):
                clear_leftovers(folder, alone=True)
            self.is_own = not (self.path / "recipe.json").exists()
            with suppress(OSError, MupscaleError):
                self.is_own = self.is_own or bool(StoredRecipe.read(self.path / "recipe.json").packages_if_own())
        except BaseException:
            self.release()
            raise

    def clear(self) -> None:
        """Remove the run that is there, and nothing that is no part of one."""
        files = [self.path / "recipe.json", self.metrics, *self.path.glob("events.out.tfevents.*"), *self.all()]
        for path in files:
            remove(path)
        self.is_own = True

    def go_on(self, recipe: Recipe, step: int) -> None:
        """Write the recipe, and drop the metrics that will come again after so many steps."""
        self.board.close()
        if recipe.tensorboard:
            self.board.open(self.path, step)
        self.made = []  # to stay
        if self.is_own:
            sign_run(self.path, recipe)
        replace_text(self.path / "recipe.json", json.dumps(stored_values(recipe, self.path), indent=2) + "\n")
        lines = [line for line, record in read_lines(self.metrics) if not _is_written_again(record, step)]
        replace_text(self.metrics, "".join(lines))

    def write(self, record: Record) -> None:
        append_line(self.metrics, record)
        self.board.metrics(None, record)

    def save(
        self, recipe: Recipe, model: nn.Module, optimizer: Optimizer, plan: Plan, processes: Processes, **where: Any
    ) -> None:
        """Write a checkpoint, and forget old ones; where: what `RunState` says of the run. Every process must call."""
        stored, threads = stored_values(recipe, self.path), torch.get_num_threads()
        state = RunState(**where, recipe=stored, threads=threads)
        processes.by_main(self._sync, f"{self.metrics} cannot be written")
        path = self.checkpoint(state.step or 0, sharded=processes.sharded)
        save_snapshot(path, model, optimizer, plan, processes, state)
        keep = recipe.checkpoints.keep
        processes.by_main(lambda: self.forget(keep), f"{self.checkpoints} cannot be cleared of old ones")

    def forget(self, keep: int) -> None:
        for path in self.all()[:-keep]:
            remove(path)

    def _sync(self) -> None:
        """See to it that the metrics so far are on the disk, before the checkpoint that covers them."""
        if self.metrics.is_file():
            with open(self.metrics, "rb") as file:
                os.fsync(file.fileno())

    def set_aside(self, checkpoint: Path) -> None:
        """Keep a damaged checkpoint under another name, so that it is taken for none."""
        move(checkpoint, checkpoint.with_name(f"damaged-{checkpoint.name}"))

    def release(self) -> None:
        """Let others train in the folder; where nothing was written there, nothing is left of it."""
        self.board.close()
        if self.lock is not None:
            self.lock.release()
            self.lock = None
        with suppress(OSError):  # the first that is not empty
            for folder in self.made:
                folder.rmdir()

    # ------------------------------------------------------------------------------------------- what is there

    def checkpoint(self, step: int, *, sharded: bool = False) -> Path:
        return self.checkpoints / f"step-{step:09d}{'' if sharded else '.safetensors'}"

    def all(self) -> list[Path]:
        """Every checkpoint, the newest last."""
        if not self.checkpoints.is_dir():
            return []
        paths = [path for path in self.checkpoints.iterdir() if _CHECKPOINT.fullmatch(path.name)]
        return sorted(paths, key=step_of)

    def last(self) -> Path | None:
        checkpoints = self.all()
        return checkpoints[-1] if checkpoints else None

    def records(self) -> list[dict[str, Any]]:
        return list(self.each_record())

    def each_record(self) -> Iterator[dict[str, Any]]:
        return (record for _, record in read_lines(self.metrics))


def _is_written_again(record: Record, step: int) -> bool:
    """Whether the line came after the checkpoint of this step was written."""
    kind, at = record["kind"], int(record["step"])
    return at > step or kind == "end" or (kind in ("grow", "rewind") and at == step)


def step_of(checkpoint: Path) -> int:
    match = _CHECKPOINT.fullmatch(checkpoint.name)
    return int(match[1]) if match else 0


def find_checkpoint(path: str | Path) -> Path:
    """The file or shard folder that a path means: itself, or a run's newest checkpoint."""
    path = Path(path)
    if not path.exists():
        raise MupscaleError(f"there is no checkpoint at {path}")
    if path.name == "checkpoints":
        path = path.absolute().parent
    if path.is_file() or _CHECKPOINT.fullmatch(path.name) or (path / ".metadata").is_file():
        return path
    last = RunFolder(path).last()
    if last is None:
        raise MupscaleError(f"{path} is a folder without checkpoints of a run")
    return last
