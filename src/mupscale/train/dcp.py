"""Folders of torch.distributed.checkpoint (DCP), as torchtitan and FSDP write them; and one grown into another.

A DCP folder's index (.metadata) is a pickle. It is unpickled once, if it names nothing but what such an index is made
of; torch, which would unpickle it again and load whatever it names, is given what was found in it of tensors.

Such a folder names its tensors and says nothing else of the model. A family, made of a function that builds the model
at any sizes, tells what each tensor is; the folder's own names and shapes have to be those of the model it builds.
Model and optimizer then grow tensor by tensor into a folder that its trainer resumes from.
"""

from __future__ import annotations

import copy
import inspect
import io
import json
import math
import pickle
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mupscale.core import Entry, Plan, Shape, TensorSource, Width, check_dtype, check_same_names, naming
from mupscale.family import BuiltMembers, Family
from mupscale.growth import (
    DEPTH_OPERATORS,
    Experts,
    GrowthSettings,
    NewTensor,
    Part,
    check_operator,
    check_written,
    grow_state,
    initial_state,
    is_replica,
    no_pattern,
    plan_experts,
    refuse_nonfinite,
    shape_of_state,
    with_measured_initial,
)
from mupscale.optim import NORM_FACTOR, GroupBuilder, recognise_optimizer, traits_of
from mupscale.system import (
    MupscaleError,
    appearing,
    is_dcp_folder,
    is_taken,
    name_of_group,
    pattern_of_name,
    printable,
    read_json,
    replace_text,
    text_table,
)
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


class DcpFolder:
    """A DCP folder's tensors, read one at a time, and what else lies in it, as bytes.

    tensors: what the index says of each. objects: the names of all that is no tensor. paths: where each of both lay in
    the nested dict that was saved.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = path = Path(path)
        if not is_dcp_folder(path):
            raise MupscaleError(f"{path} is not a folder of torch.distributed.checkpoint: it has no {INDEX}")
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
            raise MupscaleError(f"'{name}' in {self.path} is not a plain value ({reason})") from None


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


def write_dcp(folder: Path, content: GrownFolder, processes: Processes) -> None:
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


RECORD_FILE = "mupscale.json"
_FORMAT = "mupscale.dcp/1"
_OPTIMIZERS = ("optimizer.", "optim.")
_NO_SETTINGS = {"params", "foreach", "fused", "capturable", "differentiable", "maximize"}  # of a run, not of a group
_PLAIN = (str, int, float, list, tuple, type(None))  # what a JSON file can hold
_MOST_ROWS = 20
Router = Literal["drawn", "silent"]


def upscale_dcp(
    source: str | Path,
    out: str | Path,
    family: BuiltMembers,
    narrow: Mapping[str, int],
    wide: Mapping[str, int],
    growth: GrowthSettings,
    *,
    seed: int = 0,
    router: Router = "drawn",
    optimizer: type[Optimizer] | None = None,
    processes: Processes | None = None,
) -> DcpUpscaled:
    """Write the folder `out`: model and optimizer of the folder `source`, grown from the sizes `narrow` to `wide`.

    Sizes that the family's base does not name are those of experts, which its function takes: {"experts": 8, "top_k":
    2}. growth: how new units and blocks are filled. router: what a new router is, as in `Experts`. optimizer: its
    class, where it is not one of torch's. processes: those that divide the work; all must call. What is neither the
    model's nor the optimizer's is copied as it is.

    >>> import tempfile
    >>> from mupscale.train import save_dcp
    >>> family = Family(lambda width: nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 2)), {"width": 8})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = save_dcp(f"{folder}/small", family.build({"width": 8}))
    ...     copies = GrowthSettings(how="copies")
    ...     upscale_dcp(f"{folder}/small", f"{folder}/wide", family, {"width": 8}, {"width": 16}, copies).numbers
    (50, 98)
    """
    processes, out = processes or Processes(torch.device("cpu")), Path(out)
    if growth.how == "lossless":
        raise MupscaleError(
            "lossless growth needs to see what the model computes, which a folder that is grown tensor by tensor does "
            "not show. Use how: fresh, or grow the model in memory (mupscale.upscale with inputs=)"
        )
    plan, sketches = plan_dcp(family, narrow, wide, growth, router)
    if all(entry.narrow == entry.wide for entry in plan.parameters.values()) and not plan.has_new_parts:
        raise MupscaleError(f"nothing would grow from {dict(narrow)} to {dict(wide)}. Choose larger sizes")
    grown = GrownFolder(DcpFolder(source), plan, growth, seed, optimizer, sketches)
    record = {
        "format": _FORMAT,
        "from": dict(narrow),
        "to": dict(wide),
        "growth": growth.growth_settings,
        "seed": seed,
        "groups": [{key: v for key, v in group.items() if isinstance(v, _PLAIN)} for group in grown.groups],
        "plan": json.loads(plan.to_json()),
    }
    what = f"{out} cannot be written"
    with ExitStack() as place:

        def open_place() -> Path:
            if is_taken(out):
                raise MupscaleError(f"{out} already exists. Remove it, or choose a different name")
            return place.enter_context(appearing(out))

        hidden = processes.by_main(open_place, what)
        write_dcp(hidden, grown, processes)
        processes.by_main(lambda: replace_text(hidden / RECORD_FILE, json.dumps(record, indent=1) + "\n"), what)
        processes.by_main(place.close, what)
    before = {plan.sources[name].name: math.prod(entry.narrow) for name, entry in plan.parameters.items()}
    numbers = sum(before.values()), sum(math.prod(entry.wide) for entry in plan.parameters.values())
    said = {
        "units": growth.in_words,
        "blocks": f"new blocks: {growth.how if growth.how in DEPTH_OPERATORS else growth.deepen}",
        "experts": f"experts: copies, with routers {'drawn' if router == 'drawn' else 'at zero'}",
    }
    words = "; ".join(text for part, text in said.items() if part in what_grows(family, narrow, wide))
    return DcpUpscaled(out, dict(narrow), dict(wide), numbers, grown.groups, grown.optimizer, words)


def what_grows(
    family: BuiltMembers, narrow: Mapping[str, int], wide: Mapping[str, int]
) -> set[Literal["units", "blocks", "experts"]]:
    """Which parts of a model become more, from some sizes to others."""
    own = Width.of(family.base).sizes
    grown = [name for name, size in wide.items() if size != narrow.get(name)]
    return {"experts" if n not in own else "blocks" if n == family.depth_size else "units" for n in grown}


def plan_dcp(
    family: BuiltMembers,
    narrow: Mapping[str, int],
    wide: Mapping[str, int],
    growth: GrowthSettings,
    router: Router = "drawn",
) -> tuple[Plan, tuple[nn.Module, nn.Module]]:
    """How a folder's model grows, and the models of both sizes, without memory; as `upscale_dcp` has the arguments."""
    own = Width.of(family.base).sizes
    (at, few), (to, many) = (
        tuple({n: size for n, size in sizes.items() if (n in own) is ours} for ours in (True, False))
        for sizes in (narrow, wide)
    )
    small, large = (BuiltMembers(partial(family.build_function, **some), own) for some in (few, many))
    plan: Plan | None = None
    if at != to or few == many:
        assert isinstance(family, Family), "a family of widths"
        plan = family.growth_plan(at, to, growth.build_operators())
    if few != many:
        if not is_replica(growth.build_operator()):
            raise MupscaleError(
                "experts start as copies, without noise: use how: copies (--how copies). For fresh units or noise as "
                "well, grow the folder first, and add experts to the result"
            )
        if family.inputs is None:
            raise MupscaleError("small models are run to see that experts compute the same. Give a batch (--inputs)")
        operator, base = Experts(router), family.base
        tried = plan_experts(small.drawn(base, 0), large.drawn(base, 0), inputs=family.inputs, grow=operator)
        mixed = plan_experts(small.sketch(to), large.sketch(to), grow=operator, tried=tried)
        plan = _with_new_values(mixed if plan is None else plan.then(mixed), large, to)
    assert plan is not None
    return plan, (small.sketch(at), large.sketch(to))


def _with_new_values(plan: Plan, mixture: BuiltMembers, sizes: Mapping[str, int]) -> Plan:
    """The plan of experts with what routers are drawn from, and with their buffers, as the mixture is built."""
    new = [name for name, source in plan.sources.items() if not source.is_taken]
    drawn = [name for name in new if plan[name].source.kind == "drawn" and not plan.initial.get(name)]
    models = [mixture.drawn_alone(sizes, seed, drawn) for seed in range(2)]
    draws = [{name: naming.parameters(model)[name] for name in drawn} for model in models]
    buffers = dict(plan.buffers)
    for name, buffer in naming.buffers(models[0]).items():
        if new and name not in buffers and name in models[0].state_dict():
            if len(values := buffer.unique()) != 1:
                raise MupscaleError(f"the buffer '{name}' of the mixture is not constant: its values are unknown")
            source = TensorSource(plan.sources[new[0]].name, "silent", float(values))
            buffers[name] = Entry(plan[new[0]].narrow, tuple(buffer.shape), names=(name,), source=source)
    return with_measured_initial(replace(plan, buffers=buffers), draws)


@dataclass(frozen=True)
class DcpUpscaled:
    """What was written: the sizes, the number of parameters before and after, and the wide run's parameter groups."""

    path: Path
    narrow: dict[str, int]
    wide: dict[str, int]
    numbers: tuple[int, int]
    groups: list[dict[str, Any]]
    optimizer: type[Optimizer] | None
    words: str

    @property
    def trainer_lines(self) -> str:
        """The groups as torchtitan's config takes them, where there is an optimizer."""
        assert self.optimizer is not None
        taken = _settings_of(self.optimizer)
        every = [name for group in self.groups for name in group["params"]]
        lines = ["param_groups = ["]
        for group in self.groups:
            settings = {key: value for key, value in group.items() if key in taken}
            settings |= {"lr": group.get("initial_lr", group["lr"]), NORM_FACTOR: group[NORM_FACTOR]}
            lines += [
                "    ParamGroupConfig(",
                f'        pattern=r"{_pattern(group["params"], every)}",',
                f'        optimizer_name="{self.optimizer.__name__}",',
                f"        optimizer_kwargs={settings!r},",
                "    ),",
            ]
        return "\n".join([*lines, "]"])

    def __str__(self) -> str:
        few, many = self.numbers
        changes = [(name, self.narrow.get(name), size) for name, size in self.wide.items()]
        sizes = ", ".join(f"{n} {old} → {new}" if old else f"{n} {new}" for n, old, new in changes if old != new)
        head = f"{self.path}: {sizes}; {few:,} → {many:,} parameters ({self.words})"
        if self.optimizer is None:
            return f"{head}\nno optimizer state in the folder: only the model has grown"
        return (
            f"{head}\n{self.optimizer.__name__}'s state has grown along. Rates of the wide run, for torchtitan's "
            f"OptimizersContainer.Config:\n\n{self.trainer_lines}"
        )


def describe_dcp_growth(
    source: str | Path, family: BuiltMembers, narrow: Mapping[str, int], wide: Mapping[str, int], growth: GrowthSettings
) -> str:
    """What `upscale_dcp` would make of a folder: tables of units, of blocks and experts, and of the optimizer."""
    plan, sketches = plan_dcp(family, narrow, wide, growth)
    said, grows, depth = list[str](), what_grows(family, narrow, wide), family.depth_size
    if "units" in grows:
        own = Width.of(family.base).sizes
        units = {name: narrow[name] if name == depth else size for name, size in wide.items() if name in own}
        said.append(str(plan_dcp(family, narrow, {**narrow, **units}, growth)[0]))
        if not growth.build_operator().needs_multiples:
            said.append("Old weights stay as they are beside fresh units: the column `weight` is for copies.")
    if grows != {"units"}:
        said.append(str(plan))
    grown = GrownFolder(DcpFolder(source), plan, growth, 0, None, sketches)
    if grown.optimizer is None:
        return "\n\n".join([*said, "no optimizer state in the folder"])
    factors = {"lr": "lr_factor", "decay": "weight_decay_factor", "eps": "eps_factor", "norm": NORM_FACTOR}
    rows = []
    for group in grown.groups:
        patterns: dict[str, list[str]] = {}
        for name in group["params"]:
            patterns.setdefault(pattern_of_name(name), []).append(name)
        numbers = [f"{group[key]:.4g}" if isinstance(group.get(key), float) else "–" for key in factors.values()]
        rows += [(name_of_group(names), *numbers) for names in patterns.values()]
    table = text_table((f"{grown.optimizer.__name__}", *(f"{name} ×" for name in factors)), rows, left=1)
    return "\n\n".join([*said, table])


def _pattern(names: list[str], every: list[str]) -> str:
    """A regular expression that finds these names, and no others of all: layers by any number, if that will do."""

    def step(part: str, any_number: bool) -> str:
        if not part.isdigit():
            return rf"{part}\."
        return (r"\d+" if any_number else part) + r"\.(?:_\w+\.)?"  # activation checkpointing puts a name in there

    def expression(any_number: bool) -> str:
        paths = [name.split(".") for name in names]
        found = ["".join([*(step(part, any_number) for part in path), last]) for *path, last in paths]
        return f"^({'|'.join(dict.fromkeys(found))})$"

    general = expression(any_number=True)
    return general if {name for name in every if re.search(general, name)} == {*names} else expression(any_number=False)


@dataclass
class GrownFolder:
    """What becomes of a folder: every tensor, made when it is asked for, and every object, as `DcpFolder` has them.

    models: narrow and wide, without memory, whose names and shapes the folders have; None where they are not known.
    groups: of the wide model's optimizer.
    """

    source: DcpFolder
    plan: Plan
    growth: GrowthSettings
    seed: int
    optimizer: type[Optimizer] | None
    models: tuple[nn.Module, nn.Module] | None

    def __post_init__(self) -> None:
        self.operator, source = self.growth.build_operator(), self.source
        check_operator(self.operator, self.plan)
        if self.plan.mup and self.plan.patterned:
            raise no_pattern(self.plan.patterned[0])
        self.prefix = source.model_prefix
        self.shapes: dict[str, Shape] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self.objects: dict[str, bytes] = {}
        self.paths: dict[str, tuple[str | int, ...]] = {}
        self.groups: list[dict[str, Any]] = []
        self._makers: dict[str, Callable[[], Tensor]] = {}
        self._translated: tuple[str, dict[str, Tensor]] = "", {}
        self._add_model()
        self._add_optimizer()
        ours = {self.prefix + name for name in source.model}
        for name in (*source.shapes, *source.objects):  # what is neither the model's nor the optimizer's, as it is
            if name not in ours and not name.startswith(_OPTIMIZERS):
                self._keep(name, name)

    def read(self, name: str) -> Tensor:
        return self._makers[name]().contiguous()

    def raw(self, name: str) -> bytes:
        return self.objects[name]

    def _add(self, name: str, shape: Shape, dtype: torch.dtype, make: Callable[[], Tensor]) -> None:
        self.shapes[name], self.dtypes[name], self._makers[name] = tuple(shape), dtype, make

    def _keep(self, name: str, stored: str, renamed: tuple[str, str] = ("", "")) -> None:
        """What is stored under a name as it is; it lies as that in nested dicts, under its own parameter's name."""
        if stored in self.source.objects:
            self.objects[name] = self.source.raw(stored)
        elif name not in self.shapes:
            self._add(name, self.source.shapes[stored], self.source.dtypes[stored], partial(self.source.read, stored))
        path = tuple(p.replace(*renamed) if isinstance(p, str) else p for p in self.source.paths.get(stored, ()))
        if ".".join(map(str, path)) == name:
            self.paths[name] = path

    # ------------------------------------------------------------------------------------------- the model

    def _add_model(self) -> None:
        """The wide model's tensors by the names that it saves them under, and what each is read from."""
        plan, stored = self.plan, {name: self.source.shapes[self.prefix + name] for name in self.source.model}
        if self.models is None:
            saved = {alias: plan[name].wide for alias, name in plan.names.items() if plan.old_path(alias) in stored}
        else:
            expected, saved = ({n: tuple(t.shape) for n, t in model.state_dict().items()} for model in self.models)
            check_same_names(str(self.source.path), stored, "the model of these sizes", expected, _ADVICE, "tensor")
            if odd := next((name for name, shape in expected.items() if stored[name] != shape), None):
                raise MupscaleError(
                    f"'{odd}' has shape {stored[odd]} in {self.source.path} and {expected[odd]} in the model of these "
                    f"sizes: {_ADVICE}"
                )
        for name, shape in saved.items():
            old = self.prefix + plan.old_path(name)
            is_plain = name in plan.names
            make = partial(self._make, plan.names[name], self._read) if is_plain else self._made_by_module(name)
            self._add(self.prefix + name, shape, self._dtype(name, self.source.dtypes[old]), make)
            self._keep(self.prefix + name, old, (plan.old_path(name), name))

    def _dtype(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """That of a tensor in the new folder: as in the old one, or, of a buffer that this lacks, as it is built."""
        is_new = name in self.plan.buffers and not self.plan.sources[name].is_taken
        return naming.buffers(self.models[1])[name].dtype if is_new and self.models is not None else dtype

    def _read(self, name: str) -> Tensor:
        return self.source.read(self.prefix + name)

    def _make(self, name: str, read: Callable[[str], Tensor]) -> Tensor:
        """A parameter or buffer of the wide model, by the plan's name."""
        plan, operator, entry = self.plan, self.operator, self.plan[name]
        narrow, part = read(plan.sources[name].name), Part(name, plan, self.seed)
        if (new := NewTensor.of(name, plan, self.seed)) is not None:
            return new.whole(entry.wide, self._dtype(name, narrow.dtype))
        is_buffer = name in plan.buffers
        if is_buffer and (entry.narrow == entry.wide or not narrow.is_floating_point()):
            return narrow
        if is_buffer and not operator.needs_multiples:
            raise MupscaleError(f"the buffer '{name}' grows, and fresh units have no values for it. Use --how copies")
        check_dtype(name, narrow)
        refuse_nonfinite({name: narrow})
        out = torch.full(entry.wide, math.nan, dtype=narrow.dtype)
        if is_buffer:
            operator.buffer(out, narrow, part)
        else:
            operator.parameter(out, narrow.expand(part.entry.narrow), part)
        check_written(name, out, operator)
        return out

    def _made_by_module(self, name: str) -> Callable[[], Tensor]:
        """Of a tensor that is no parameter: some module saves its parameters under other names, with a hook."""
        modules = {} if self.models is None else dict(self.models[1].named_modules())
        path = name
        while path and not (path in modules and modules[path]._state_dict_hooks):
            path = path.rpartition(".")[0]
        if not path:
            raise MupscaleError(f"'{name}' in {self.source.path} is not a parameter or buffer of the model: {_ADVICE}")

        def make() -> Tensor:
            if self._translated[0] != path:  # its other tensors come next
                self._translated = path, self._translate(path)
            return self._translated[1][name].clone()

        return make

    def _translate(self, path: str) -> dict[str, Tensor]:
        """What a module of the wide model saves, from what the narrow one's saved: through parameters and back."""
        assert self.models is not None
        old = self.plan.old_path(path)
        small, large = (
            copy.deepcopy(model.get_submodule(place)).to_empty(device="cpu")
            for model, place in zip(self.models, (old, path), strict=True)
        )
        small.load_state_dict({name: self._read(f"{old}.{name}") for name in small.state_dict()})
        held = {f"{old}.{n}": t.detach() for n, t in (*small.named_parameters(), *small.named_buffers())}
        with torch.no_grad():
            for name, p in large.named_parameters():
                p.data = self._make(self.plan.names[f"{path}.{name}"], held.__getitem__)
        return {f"{path}.{name}": tensor for name, tensor in large.state_dict().items()}

    # ------------------------------------------------------------------------------------------- the optimizer

    def _add_optimizer(self) -> None:
        """Its state by the names that it has itself, and its groups with the wide model's rates."""
        names = [*self.source.shapes, *self.source.objects]
        start = next((s for s in _OPTIMIZERS if any(n.startswith(f"{s}state.") for n in names)), None)
        if start is None:
            return
        states: dict[str, dict[str, str]] = {}
        for name in names:
            if name.startswith(f"{start}state."):
                parameter, key = self._split(name.removeprefix(f"{start}state."), name)
                states.setdefault(parameter, {})[key] = name
        hypers, is_numbered = self._hyperparameters(f"{start}param_groups.")
        first = next(iter(hypers.values()), {})
        keys = {key for state in states.values() for key in state}
        cls = self.optimizer = self.optimizer or recognise_optimizer(keys, first, self.source.path)
        known = {key: value for key, value in first.items() if key in _settings_of(cls)}
        one, builder = cls([nn.Parameter(torch.zeros(1))], **known), GroupBuilder(traits_of(cls).at(self.plan))
        for name, entry in self.plan.parameters.items():
            old = self.plan.sources[name].name
            for key, stored in states.get(old, {}).items():
                self._add_state(stored.replace(old, name), stored, key, name, hypers.get(old, {}), one)
            if (own := hypers.get(old)) is not None:
                builder.add(name, nn.Parameter(torch.empty(0)), entry, own, own)
        for number, group in enumerate(builder.groups() if hypers else ()):
            self._add_group(start, number, group, is_numbered)

    def _split(self, rest: str, whole: str) -> tuple[str, str]:
        """A parameter of the narrow model and the key behind it, in the name of something that is kept for it."""
        name, _, key = rest.rpartition(".")
        while name and name not in self.plan.old_names:
            name, _, more = name.rpartition(".")
            key = f"{more}.{key}"
        if not name:
            raise MupscaleError(
                f"'{whole}' in {self.source.path} names no parameter of the model. Save the optimizer by names, with "
                "torch.distributed.checkpoint.state_dict.get_optimizer_state_dict, as torchtitan does"
            )
        return self.plan.old_names[name], key

    def _hyperparameters(self, start: str) -> tuple[dict[str, dict[str, Any]], bool]:
        """By parameter of the narrow model, as torchtitan keeps them; and whether they are in numbered groups."""
        found, numbered = dict[str, dict[str, Any]](), dict[str, dict[str, Any]]()
        for name in (*self.source.objects, *self.source.shapes):
            if name.startswith(start):
                rest, value = name.removeprefix(start), self.source.value(name)
                number, _, key = rest.partition(".")
                if number.isdigit() and number not in self.plan.old_names:
                    numbered.setdefault(number, {})[key] = value
                else:
                    parameter, key = self._split(rest, name)
                    found.setdefault(parameter, {})[key] = value
        for group in numbered.values():
            for name in group["params"]:
                parameter, _ = self._split(f"{name}.lr", f"{start}…{name}")
                found[parameter] = {key: v for key, v in group.items() if key not in ("params", "param_names")}
        return found, bool(numbered)

    def _add_state(
        self, name: str, stored: str, key: str, parameter: str, hyper: Mapping[str, Any], optimizer: Optimizer
    ) -> None:
        entry, source = self.plan.parameters[parameter], self.plan.sources[parameter]
        if stored not in self.source.objects:  # what is no tensor is a number for the whole parameter
            shape, dtype = self.source.shapes[stored], self.source.dtypes[stored]
            if not source.is_taken and len(shape) == len(entry.narrow):
                shape = tuple(w if s == n else s for s, n, w in zip(shape, entry.narrow, entry.wide, strict=True))
            else:
                shape = shape_of_state(name, shape, entry.stacked)
            part, like = Part(parameter, self.plan, self.seed), torch.empty(1, dtype=dtype).expand(entry.wide)

            def make() -> Tensor:
                if not source.is_taken:  # none yet: as it is before the first step
                    start = initial_state(optimizer, hyper, len(entry.narrow)).get(key, 0.0)
                    return torch.full(shape, start, dtype=dtype)
                value, traits = self.source.read(stored), traits_of(type(optimizer))
                grown: Tensor = grow_state(key, value, part, like, hyper, traits, self.operator, optimizer)
                return grown

            self._add(name, shape, dtype, make)
        self._keep(name, stored, (source.name, parameter))

    def _add_group(self, start: str, number: int, group: dict[str, Any], is_numbered: bool) -> None:
        """In the form that the source has: for a number, or for each parameter."""
        said = {key: value for key, value in group.items() if key != "params"}
        names = [name for name, _ in group["params"]]
        self.groups.append({**said, "params": names})
        if is_numbered:
            said |= {"params": names}
            if f"{start}param_groups.0.param_names" in self.source.objects:  # as where the optimizer was given names
                said |= {"param_names": names}
        owners = [number] if is_numbered else names
        for owner in owners:
            for key, value in said.items():
                name, stream = f"{start}param_groups.{owner}.{key}", io.BytesIO()
                torch.save(value, stream)
                self.objects[name] = stream.getvalue()
                place = ("param_groups", number, key) if is_numbered else (f"param_groups.{owner}.{key}",)
                self.paths[name] = (start[:-1], *place)


_ADVICE = "give the sizes of the model in the folder (--from), and the function that builds it (--model)"


def _settings_of(cls: type[Optimizer]) -> set[str]:
    return set(inspect.signature(cls).parameters) - _NO_SETTINGS


def compare_dcp(
    small: str | Path,
    large: str | Path,
    *,
    build: Callable[..., nn.Module] | None = None,
    optimizer: type[Optimizer] | None = None,
) -> DcpComparison:
    """Which tensors of the folder `large` are not what `small` becomes by the growth that its mupscale.json tells.

    Where there is none, which are not those of `small`. build: from sizes to the model, needed only where a module
    saves its parameters under other names. optimizer: as in `upscale_dcp`.
    """
    before, after = DcpFolder(small), DcpFolder(large)
    expected: DcpFolder | GrownFolder = before
    record, file = None, after.path / RECORD_FILE
    if file.exists():
        try:
            record = read_json(file)
            if record["format"] != _FORMAT or not {"plan", "growth", "seed", "from", "to"} <= record.keys():
                raise KeyError("format")
        except (OSError, ValueError, KeyError, TypeError, MupscaleError) as error:
            raise MupscaleError(
                f"{file} is not what mupscale upscale wrote ({type(error).__name__}: {error})"
            ) from None
        plan = Plan.from_json(json.dumps(record["plan"]))
        growth, seed = GrowthSettings(**record["growth"]), record["seed"]
        strangers = [name for name in before.model if name not in plan.old_names]
        if build is None and strangers:
            raise MupscaleError(
                f"'{strangers[0]}' is not a parameter: a module saves it instead of its own. Give --model, the "
                "function that builds the model"
            )
        members = build and BuiltMembers(build, record["from"])
        models = (members.sketch(record["from"]), members.sketch(record["to"])) if members else None
        expected = GrownFolder(before, plan, growth, seed, optimizer, models)
    rows = tuple(_differences(expected, after))
    count = len(expected.shapes) + len(expected.objects)
    return DcpComparison(before.path, after.path, record is not None, count, rows)


@dataclass(frozen=True)
class DcpComparison:
    """Two folders: how many tensors and other objects were compared, and of each that differs, what and by how much."""

    small: Path
    large: Path
    grown: bool
    count: int
    rows: tuple[tuple[str, str, str], ...]

    @property
    def ok(self) -> bool:
        return not self.rows

    def __str__(self) -> str:
        what = f"what {self.small} becomes" if self.grown else f"those of {self.small}"
        if self.ok:
            return f"equal: all {self.count} tensors and other values of {self.large} are {what}"
        more = len(self.rows) - _MOST_ROWS
        verdict = f"DIFFERENT: {len(self.rows)} of {self.count} tensors and other values of {self.large} are not {what}"
        rows = [tuple(map(printable, row)) for row in self.rows[:_MOST_ROWS]]
        table = text_table(("name", "expected", "found"), rows, left=3)
        return "\n".join([table, *([f"… and {more} more"] if more > 0 else []), verdict])


def _differences(expected: DcpFolder | GrownFolder, found: DcpFolder) -> Iterator[tuple[str, str, str]]:
    """Names, shapes or values of what differs; of tensors of one shape, how many entries and by what of their size."""
    for name in {**expected.shapes, **found.shapes}:
        shape, other = expected.shapes.get(name), found.shapes.get(name)
        if shape is None or other is None or shape != other:
            yield name, _seen(shape), _seen(other)
            continue
        ours, theirs = expected.read(name).double(), found.read(name).double()
        if not torch.equal(ours, theirs):
            size = float(ours.norm())
            off = float((ours - theirs).norm()) / size if size else math.inf
            yield name, _seen(shape), f"{int((ours != theirs).sum())} entries differ, by {off:.1e} in all"
    for name in {**expected.objects, **found.objects}:
        one, another = (each.raw(name) if name in each.objects else None for each in (expected, found))
        if one != another and (None in (one, another) or _seen(one) != _seen(another) or _seen(one) == _seen(b"")):
            yield name, _seen(one), _seen(another)


def _seen(value: Any) -> str:
    """A shape, or the plain value in an object's bytes, for a table."""
    if value is None:
        return "missing"
    if isinstance(value, bytes):
        with suppress(Exception):  # whatever it is, it is not unpickled if it is not plain
            return repr(torch.load(io.BytesIO(value), map_location="cpu", weights_only=True))[:40]
        return f"{len(value)} bytes"
    return "×".join(map(str, value)) or "a number"
