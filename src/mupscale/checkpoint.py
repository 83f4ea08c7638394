"""One file that holds a model, its optimizer and its plan: tensors as safetensors, everything else as JSON.

The JSON lies in the file's header, so that one rename makes the whole checkpoint appear: a killed save leaves the
previous one. Nothing is ever unpickled, except through torch's weights-only loader.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch  # for the examples
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from mupscale.core import Plan, copy_into, gather_whole, laid_out_like, naming
from mupscale.growth import what_is_foreign
from mupscale.optim import load_schedule, name_parameters, read_optimizer, saved_schedule, watch_first_steps
from mupscale.system import (
    MupscaleError,
    NotNegative,
    check_tensors,
    checks_arguments,
    make_folder,
    open_tensors,
    parse_json,
    replacing,
    warn,
    write_tensors,
)

_HEADER = "mupscale"
_VERSION = 2  # 1 may have no checksums
_PICKLED = (b"PK\x03\x04", b"\x80\x02\x8a\x0a")  # how torch.save's files begin: a zip archive, or in old ones a pickle
_GROUPS_OF_PLAN = (
    "a grown model's has the groups that mupscale.param_groups makes from the checkpoint's plan, and from groups=, "
    "where the small model's optimizer had groups of its own"
)


class DamagedCheckpoint(MupscaleError):
    """A file that is not what was written: cut short, or with other bits in it."""


@dataclass(frozen=True, repr=False)
class Checkpoint:
    """What a file holds: state dicts as torch makes them, the plan, and the caller's own JSON values.

    >>> Checkpoint({"weight": torch.ones(2, 3)}, extra={"step": 100})
    Checkpoint(1 tensors of 6 numbers, extra: 'step')
    """

    model: dict[str, Tensor]
    optimizer: dict[str, Any] | None = None
    plan: Plan | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        numbers = sum(tensor.numel() for tensor in self.model.values())
        parts = [f"{len(self.model)} tensors of {numbers:,} numbers"]
        parts += [name for name in ("optimizer", "plan") if getattr(self, name) is not None]
        return f"Checkpoint({', '.join(parts)}, extra: {', '.join(map(repr, self.extra)) or 'none'})"


@checks_arguments
def save(
    path: str | Path, model: nn.Module, optimizer: Optimizer | None = None, plan: Plan | None = None, **extra: Any
) -> Path:
    """Write a checkpoint; `extra` is anything JSON can hold. With several processes all must call, and one writes.

    >>> import tempfile
    >>> import mupscale as mu
    >>> model = nn.Linear(2, 3)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = mu.save(f"{folder}/model.safetensors", model, step=100)
    ...     mu.load(path).extra
    {'step': 100}
    """
    return save_states(path, _model_state(model), None if optimizer is None else optimizer.state_dict(), plan, extra)


def save_states(
    path: str | Path,
    model: Mapping[str, Tensor],
    optimizer: Mapping[str, Any] | None,
    plan: Plan | None,
    extra: Mapping[str, Any],
) -> Path:
    """As `save`, from state dicts."""
    path = Path(path)
    tensors = _PackedTensors()
    content = {
        "version": _VERSION,
        "model": _pack(model, "model", tensors),
        "optimizer": None if optimizer is None else _pack(optimizer, "optimizer", tensors),
        "plan": None if plan is None else plan.to_json(),
        "extra": _pack(extra, "extra", tensors),
    }
    several, failure = dist.is_available() and dist.is_initialized(), None
    if not several or dist.get_rank() == 0:
        try:
            make_folder(path.parent)
            with replacing(path) as temporary:
                write_tensors(temporary, tensors.storable(), {_HEADER: json.dumps(content)})
        except OSError as error:
            failure = error.strerror or str(error)
    if several:
        message = [failure]
        dist.broadcast_object_list(message)  # when this returns, the file is there for every process, or for none
        failure = message[0]
    if failure is not None:
        raise MupscaleError(f"the checkpoint {path} could not be written: {failure}; what was there before is whole")
    return path


@checks_arguments
def load(
    path: str | Path,
    model: nn.Module | None = None,
    optimizer: Optimizer | None = None,
    scheduler: LRScheduler | None = None,
) -> Checkpoint:
    """Read a checkpoint, and put it into the model, the optimizer and the scheduler where given.

    The scheduler's state is what was saved as `save(…, scheduler=scheduler.state_dict())`. Optimizer and scheduler get
    the saved groups, also where the optimizer's own divide its parameters otherwise.

    >>> import tempfile
    >>> import mupscale as mu
    >>> model, other = nn.Linear(2, 3), nn.Linear(2, 3)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = mu.save(f"{folder}/model.safetensors", model)
    ...     _ = mu.load(path, other)
    >>> torch.equal(other.weight, model.weight)
    True
    """
    try:
        header, tensors, has_checksums = _read(Path(path))
    except FileNotFoundError:
        raise MupscaleError(f"there is no checkpoint at {path}") from None
    except (SafetensorError, OSError, RuntimeError) as error:
        with suppress(OSError), Path(path).open("rb") as file:
            if file.read(4) in _PICKLED:
                raise MupscaleError(f"{path} is a file of torch.save: read it with mupscale.load_torch") from None
        raise DamagedCheckpoint(f"{path} is not a whole checkpoint ({error}); it may be truncated") from None
    checkpoint = _parse_header(header, tensors, has_checksums, path)
    schedule = checkpoint.extra.get("scheduler")
    if scheduler is not None and not isinstance(schedule, dict):
        raise MupscaleError(f"{path} holds no schedule: save it with scheduler=scheduler.state_dict()")
    if model is not None:
        check_model_state(checkpoint.model, model)
    if optimizer is not None:
        if checkpoint.optimizer is None:
            raise MupscaleError(f"{path} holds no optimizer state; load it without an optimizer")
        count = len(optimizer.param_groups)
        load_optimizer_state(checkpoint.optimizer, optimizer)
        watch_first_steps(optimizer)  # a loop that goes on in another process may go on as before the growth, too
        has_scheduler = hasattr(optimizer.step, "_wrapped_by_lr_sched")
        if scheduler is None and has_scheduler and count != len(optimizer.param_groups):
            warn(
                f"the optimizer has {len(optimizer.param_groups)} groups now, as it was saved, and had {count} when "
                "its scheduler was made, which no longer fits. Give that to mupscale.load, too, or make it now"
            )
    if model is not None:
        load_model_state(checkpoint.model, model)
    if scheduler is not None and schedule is not None:
        load_schedule(schedule, scheduler)
    return checkpoint


@checks_arguments
def load_optimizer(
    path: str | Path,
    model: nn.Module,
    optimizer_class: type[Optimizer] | None = None,
    *,
    lr: NotNegative | None = None,
) -> Optimizer:
    """The optimizer of a checkpoint, with its groups and state: after any number of growths, no plan is needed.

    path: a file of `save`, a folder that `mupscale upscale` wrote, or a file in which torch.save wrote an optimizer's
    state dict. model: as large as the saved one. optimizer_class: if it is none of torch's, or to be sure.
    lr: another learning rate, in the units of the model that grew first.

    >>> import tempfile
    >>> import mupscale as mu
    >>> narrow, wide = nn.Linear(2, 2, bias=False), nn.Linear(4, 4, bias=False)
    >>> wide, optimizer = mu.upscale(narrow, wide, optimizer=torch.optim.SGD(narrow.parameters(), lr=0.1, momentum=0.9))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = mu.save(f"{folder}/wide.safetensors", wide, optimizer)
    ...     again = mu.load_optimizer(path, wide, torch.optim.SGD)
    >>> again.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    True
    """
    file = Path(path)
    if file.is_dir():
        file = file / "optimizer.pt"
        if not file.is_file():
            raise MupscaleError(
                f"{path} holds no optimizer.pt: it was written without a saved optimizer. For a new one, "
                "mupscale.hf.param_groups(folder, model, optimizer_class, lr=…) makes its groups"
            )
    if is_checkpoint(file):
        content = load(file).optimizer
        if content is None:
            raise MupscaleError(f"{file} holds no optimizer state: save it with mupscale.save(path, model, optimizer)")
        saved = name_parameters(content, file, model)
    elif file.is_file():
        saved = read_optimizer(file, model)
    else:
        raise MupscaleError(f"there is no saved optimizer at {file}")
    optimizer = saved.build(model, optimizer_class or saved.optimizer_class(), lr)
    watch_first_steps(optimizer)  # a loop that goes on in another process may go on as before the growth, too
    return optimizer


def _parse_header(header: str, tensors: Mapping[str, Tensor], has_checksums: bool, path: str | Path) -> Checkpoint:
    """What the header says, with the tensors in their places; the field that is not what it must be is named."""
    try:
        content = parse_json(header, f"the header of {path}")
    except MupscaleError as error:
        raise DamagedCheckpoint(str(error)) from None
    if not isinstance(content, dict) or "version" not in content:
        raise DamagedCheckpoint(f"the header of {path} is damaged: it says no version")
    if content["version"] not in (1, _VERSION):
        raise MupscaleError(f"{path} was written in version {content['version']} of the format; this reads {_VERSION}")
    if content["version"] != 1 and not has_checksums:
        raise DamagedCheckpoint(f"{path} is damaged: its header has no checksums")
    parts: dict[str, Any] = {}
    for name in ("model", "optimizer", "extra", "plan"):
        try:
            value = content[name]
            parts[name] = (value and Plan.from_json(value)) if name == "plan" else _unpack(value, tensors)
            if not isinstance(parts[name], dict | Plan) and not (parts[name] is None and name in ("optimizer", "plan")):
                raise TypeError(f"it is of type {type(parts[name]).__name__}")
        except (KeyError, TypeError, ValueError, AttributeError, MupscaleError) as error:
            raise MupscaleError(
                f"the header of {path} is damaged: '{name}' ({type(error).__name__}: {error})"
            ) from None
    if not all(isinstance(tensor, Tensor) for tensor in parts["model"].values()):
        raise DamagedCheckpoint(f"the header of {path} is damaged: 'model' holds more than tensors")
    if (state := parts["optimizer"]) is not None:  # groups and state as an optimizer's state dict has them
        groups, inner = state.get("param_groups"), state.get("state")
        fit = isinstance(groups, list) and all(
            isinstance(g, dict) and isinstance(g.get("params"), list) for g in groups
        )
        if not fit or not isinstance(inner, dict) or not all(isinstance(values, dict) for values in inner.values()):
            raise DamagedCheckpoint(f"the header of {path} is damaged: 'optimizer' is not the state of an optimizer")
    return Checkpoint(**{**parts, "extra": saved_schedule(parts["extra"])})


def _read(path: Path) -> tuple[str, dict[str, Tensor], bool]:
    """Header and tensors of one file, and whether it has checksums, which then are theirs."""
    while True:  # safetensors opens a path twice, and a writer may replace it meanwhile
        before = path.stat()
        if not path.is_file():
            raise MupscaleError(f"{path} is not a regular file, so no checkpoint is read from it")
        try:
            with open_tensors(path, "pt") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError, RuntimeError):
            if os.path.samestat(before, path.stat()):
                raise
            continue
        if os.path.samestat(before, path.stat()):
            break
    if not _is_ours(metadata):
        raise MupscaleError(f"{path} is a safetensors file, but not a checkpoint written by mupscale")
    try:
        has_checksums = check_tensors(tensors, metadata, required=len(metadata) > 1)  # else their name is damaged
    except MupscaleError as error:
        raise DamagedCheckpoint(f"{path} is damaged: {error}") from None
    return metadata[_HEADER], tensors, has_checksums


def is_checkpoint(path: str | Path) -> bool:
    """Whether a safetensors file is one that `save` wrote."""
    try:
        if not Path(path).is_file():
            return False
        with open_tensors(Path(path), "pt") as file:
            return _is_ours(file.metadata() or {})
    except (SafetensorError, OSError):
        return False


def _is_ours(metadata: Mapping[str, str]) -> bool:
    """Whether a file's metadata are of `save`: by the header's name, or by its checksum, where that name is damaged."""
    return _HEADER in metadata or any(f'"metadata/{_HEADER}"' in text for text in metadata.values())


def load_optimizer_state(state: dict[str, Any], optimizer: Optimizer) -> None:
    """As optimizer.load_state_dict; state of a sharded parameter is laid out as the parameter is.

    Where both name their parameters, the optimizer gets the saved groups, however its own divide the same parameters:
    a family's model that has grown to the base has the groups of its narrow width, and a new one has one.
    """
    own = optimizer.param_groups
    optimizer.param_groups = _grouped_as(state["param_groups"], own)
    try:
        for p, key, name, value in _saved_tensors(state, optimizer):  # torch compares numbers of parameters only
            of_same_dims = zip(value.shape, p.shape, strict=False) if value.dim() == p.dim() else ()
            if any(size not in (1, n) for size, n in of_same_dims):  # 1: reduced, as Adafactor's rows are
                raise MupscaleError(
                    f"the checkpoint belongs to another optimizer: its '{name}' number {key} has shape "
                    f"{tuple(value.shape)} and the parameter {tuple(p.shape)}; {_GROUPS_OF_PLAN}"
                )
        if foreign := what_is_foreign(state, optimizer):
            raise MupscaleError(
                f"the checkpoint belongs to another optimizer: {foreign}; load it into one of the class that it was "
                f"saved from, or load the model alone"
            )
        optimizer.load_state_dict(state)
    except (ValueError, KeyError, MupscaleError) as error:
        optimizer.param_groups = own
        if isinstance(error, MupscaleError):
            raise
        raise MupscaleError(f"the checkpoint belongs to another optimizer: {error}; {_GROUPS_OF_PLAN}") from None
    for p, _, name, value in _saved_tensors(state, optimizer):
        if value.dim() == 0:  # torch casts all but `step` (NAdam's mu_product) to the dtype of the parameter
            optimizer.state[p][name] = value.to(optimizer.state[p][name].device, copy=True)
    for p, values in optimizer.state.items():
        for key, value in values.items():
            if isinstance(value, Tensor) and value.shape == p.shape and value.dim():
                values[key] = laid_out_like(value, p)


def _grouped_as(saved: list[dict[str, Any]], own: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The optimizer's groups, divided as the saved ones are by the parameters' names; as they are, if those differ."""
    theirs = [name for group in saved for name in group.get("param_names", ())]
    ours = {n: (p, g) for g in own for n, p in zip(g.get("param_names", ()), g["params"], strict=False)}
    count = sum(len(group["params"]) for group in own)
    is_named = all(group["params"] for group in saved) and len(theirs) == len(ours) == count
    if not is_named or ours.keys() != set(theirs):
        return own
    return [
        {**ours[names[0]][1], "params": [ours[name][0] for name in names], "param_names": list(names)}
        for names in (group["param_names"] for group in saved)
    ]


def _saved_tensors(state: dict[str, Any], optimizer: Optimizer) -> Iterator[tuple[Tensor, Any, str, Tensor]]:
    """A saved state's tensors: the optimizer's parameter, what the state calls that, the tensor's name, and itself."""
    ours = [p for group in optimizer.param_groups for p in group["params"]]
    theirs = [key for group in state["param_groups"] for key in group["params"]]
    for p, key in zip(ours, theirs, strict=False):
        yield from ((p, key, n, v) for n, v in state["state"].get(key, {}).items() if isinstance(v, Tensor))


def load_model_state(state: Mapping[str, Tensor], model: nn.Module) -> None:
    """Strictly: every name and shape must agree. Sharded and wrapped models included."""
    for name, tensor in check_model_state(state, model).items():
        copy_into(tensor, state[name])


def check_model_state(state: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """The model's own tensors by canonical name, if they are the state's."""
    own = _model_state(model)
    check_shapes({name: tensor.shape for name, tensor in state.items()}, own)
    return own


def check_shapes(theirs: Mapping[str, torch.Size], own: Mapping[str, Tensor]) -> None:
    """Refuse a checkpoint whose tensors are not those of the model."""
    if own.keys() != theirs.keys():
        odd = min(map(str, own.keys() ^ theirs.keys()))
        raise MupscaleError(f"the checkpoint belongs to another model: '{odd}' is in one of the two only")
    for name, tensor in own.items():
        if tensor.shape != theirs[name]:
            raise MupscaleError(
                f"the checkpoint belongs to another model: '{name}' has shape {tuple(theirs[name])} there and "
                f"{tuple(tensor.shape)} here"
            )


def _model_state(model: nn.Module) -> dict[str, Tensor]:
    return {naming.canonical(name): tensor for name, tensor in naming.unwrap(model).state_dict().items()}


class _PackedTensors:
    """Tensors by a name of their own; one that is met again, as a tied weight is, is kept once."""

    def __init__(self) -> None:
        self.by_name: dict[str, Tensor] = {}
        self.names: dict[Any, str] = {}

    def add(self, tensor: Tensor, key: str) -> str:
        """Keep the tensor, and return its name: the key, where that is free."""
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
            kind = "one without values (meta)" if tensor.is_meta else "sparse or quantised"
            raise MupscaleError(f"'{key}' is a tensor which a checkpoint cannot store: {kind}")
        memory = (tensor.data_ptr() or id(tensor), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        if memory not in self.names:
            while key in self.by_name:
                key += "+"
            self.by_name[key], self.names[memory] = tensor, key
        return self.names[memory]

    def storable(self) -> dict[str, Tensor]:
        """As safetensors wants them: contiguous, and none in the memory of another (two slices of one tensor)."""
        contiguous: dict[str, Tensor] = {}
        seen: set[int] = set()
        for name, tensor in self.by_name.items():
            storage = tensor.untyped_storage().data_ptr()
            own = tensor if storage not in seen else tensor.clone()
            contiguous[name] = own.contiguous()
            seen.add(storage)
        return contiguous


def _pack(value: Any, key: str, tensors: _PackedTensors) -> Any:
    """JSON for the value; tensors go into `tensors` and leave their name."""
    if isinstance(value, Tensor):
        return {"$tensor": tensors.add(gather_whole(value.detach()), key)}
    if isinstance(value, Mapping):
        items = ((_pack(k, key, tensors), _pack(v, f"{key}.{k}", tensors)) for k, v in value.items())
        return {"$items": [list(item) for item in items]}
    if isinstance(value, tuple):
        return {"$tuple": [_pack(v, f"{key}.{i}", tensors) for i, v in enumerate(value)]}
    if isinstance(value, list):
        return [_pack(v, f"{key}.{i}", tensors) for i, v in enumerate(value)]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise MupscaleError(
        f"'{key}' is a {type(value).__name__}, which a checkpoint cannot store. Use tensors or JSON values"
    )


def _unpack(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """What `_pack` was given; a KeyError, TypeError or ValueError where it did not make this."""
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
