"""A DCP folder, model and optimizer, grown into another that its trainer resumes from, tensor by tensor.

Such a folder names its tensors and says nothing else of the model. A family, made of a function that builds the model
at any sizes, tells what each tensor is; the folder's own names and shapes have to be those of the model it builds.
"""

from __future__ import annotations

import copy
import inspect
import io
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mupscale.core import Entry, Initial, Plan, TensorSource, Width, check_dtype, check_same_names, naming
from mupscale.family import BuiltMembers, Family
from mupscale.growth import (
    DEPTH_OPERATORS,
    Experts,
    NewTensor,
    Part,
    axes_of_state,
    check_operator,
    check_written,
    grow_state,
    initial_state,
    is_replica,
    is_scalar,
    plan_experts,
    refuse_nonfinite,
)
from mupscale.optim import NORM_FACTOR, GroupBuilder, recognise_optimizer, traits_of
from mupscale.planning import initial_means, initial_std, no_pattern
from mupscale.system import (
    MupscaleError,
    appearing,
    is_taken,
    name_of_group,
    pattern_of_name,
    printable,
    read_json,
    replace_text,
    text_table,
)
from mupscale.train.dcp_folders import DcpFolder, write_dcp
from mupscale.train.growth_events import Growth
from mupscale.train.processes import Processes

RECORD_FILE = "mupscale.json"
_FORMAT = "mupscale.dcp/1"
_OPTIMIZERS = ("optimizer.", "optim.")
_NO_SETTINGS = {"params", "foreach", "fused", "capturable", "differentiable", "maximize"}  # of a run, not of a group
_MOST_ROWS = 20
Read = Callable[[str], Tensor]
Router = Literal["drawn", "silent"]


def upscale_dcp(
    source: str | Path,
    out: str | Path,
    family: BuiltMembers,
    narrow: Mapping[str, int],
    wide: Mapping[str, int],
    growth: Growth,
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
    ...     copies = Growth(0, how="copies")
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
    grown = _Growing(DcpFolder(source), plan, growth, seed, optimizer, *sketches)
    record = {
        "format": _FORMAT,
        "from": dict(narrow),
        "to": dict(wide),
        "growth": growth.filling,
        "seed": seed,
        "groups": [{key: value for key, value in group.items() if _is_plain(value)} for group in grown.groups],
        "plan": json.loads(plan.to_json()),
    }
    what = f"{out} cannot be written"
    with ExitStack() as place:

        def open_place() -> Path:
            if is_taken(out):
                raise MupscaleError(f"{out} already exists. Remove it, or choose a different name")
            return place.enter_context(appearing(out))

        hidden = processes.ask_main(open_place, what)
        write_dcp(hidden, grown.tensors, grown.make, grown.objects, grown.paths, processes)
        processes.by_main(lambda: replace_text(hidden / RECORD_FILE, json.dumps(record, indent=1) + "\n"), what)
        processes.by_main(place.close, what)
    before = {plan.sources[name].name: math.prod(entry.narrow) for name, entry in plan.parameters.items()}
    numbers = sum(before.values()), sum(math.prod(entry.wide) for entry in plan.parameters.values())
    said = {
        "units": growth.words,
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
    family: BuiltMembers, narrow: Mapping[str, int], wide: Mapping[str, int], growth: Growth, router: Router = "drawn"
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
    stds = initial_std(draws)
    laws = {name: Initial(stds[name], means) for name, means in initial_means(draws, stds).items()}
    buffers = dict(plan.buffers)
    for name, buffer in naming.buffers(models[0]).items():
        if new and name not in buffers and name in models[0].state_dict():
            if len(values := buffer.unique()) != 1:
                raise MupscaleError(f"the buffer '{name}' of the mixture is not constant: its values are unknown")
            source = TensorSource(plan.sources[new[0]].name, "silent", float(values))
            buffers[name] = Entry(plan[new[0]].narrow, tuple(buffer.shape), names=(name,), source=source)
    return replace(plan, buffers=buffers, initial={**plan.initial, **laws})


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
        taken = set(inspect.signature(self.optimizer).parameters) - _NO_SETTINGS
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
    source: str | Path, family: BuiltMembers, narrow: Mapping[str, int], wide: Mapping[str, int], growth: Growth
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
    grown = _Growing(DcpFolder(source), plan, growth, 0, None, *sketches)
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


def _is_plain(value: Any) -> bool:
    return isinstance(value, str | int | float | bool | list | tuple | None)


class _Growing:
    """What becomes of every tensor and object of a folder.

    narrow, wide: the models, without memory, whose names and shapes the folders have.
    tensors: of the new folder, shapes and dtypes. objects: of it, bytes. paths: of both. groups: the wide optimizer's.
    """

    def __init__(
        self,
        source: DcpFolder,
        plan: Plan,
        growth: Growth,
        seed: int,
        optimizer: type[Optimizer] | None,
        narrow: nn.Module | None,
        wide: nn.Module | None,
    ) -> None:
        self.source, self.plan, self.seed, self.optimizer = source, plan, seed, optimizer
        self.operator = growth.build_operator()
        self.narrow, self.wide = narrow, wide
        check_operator(self.operator, plan)
        if plan.mup and plan.patterned:
            raise no_pattern(plan.patterned[0])
        self.prefix = source.model_prefix
        self.tensors: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        self.objects: dict[str, bytes] = {}
        self.paths: dict[str, tuple[str | int, ...]] = {}
        self.groups: list[dict[str, Any]] = []
        self._makers: dict[str, Callable[[], Tensor]] = {}
        self._translated: tuple[str, dict[str, Tensor]] = "", {}
        self._add_model()
        self._add_optimizer()
        self._add_rest()

    def make(self, name: str) -> Tensor:
        """The tensor of this name in the new folder."""
        return self._makers[name]().contiguous()

    def _add(
        self,
        name: str,
        shape: tuple[int, ...],
        make: Callable[[], Tensor],
        like: str,
        renamed: tuple[str, str] = ("", ""),
    ) -> None:
        """A tensor that is made of the stored one, and lies as it in nested dicts, under its own parameter's name."""
        dtype = self._dtype(name.removeprefix(self.prefix), self.source.dtypes[like])
        self.tensors[name], self._makers[name] = (tuple(shape), dtype), make
        self._add_path(name, like, renamed)

    def _add_path(self, name: str, like: str, renamed: tuple[str, str] = ("", "")) -> None:
        path = tuple(p.replace(*renamed) if isinstance(p, str) else p for p in self.source.paths.get(like, ()))
        if ".".join(map(str, path)) == name:
            self.paths[name] = path

    # ------------------------------------------------------------------------------------------- the model

    @cached_property
    def _modules(self) -> tuple[dict[str, nn.Module], dict[str, nn.Module]]:
        return tuple({} if m is None else dict(m.named_modules()) for m in (self.narrow, self.wide))  # type: ignore[return-value]

    def _add_model(self) -> None:
        """The wide model's tensors by the names that it saves them under, and what each is read from."""
        stored = {name: self.source.shapes[self.prefix + name] for name in self.source.model}
        if self.narrow is not None and self.wide is not None:
            expected = {name: tuple(t.shape) for name, t in self.narrow.state_dict().items()}
            check_same_names(str(self.source.path), stored, "the model of these sizes", expected, _ADVICE, "tensor")
            for name, shape in expected.items():
                if stored[name] != shape:
                    raise MupscaleError(
                        f"'{name}' has shape {stored[name]} in {self.source.path} and {shape} in the model of these "
                        f"sizes: {_ADVICE}"
                    )
            saved = {name: tuple(t.shape) for name, t in self.wide.state_dict().items()}
        else:
            saved = {alias: self.plan[name].wide for alias, name in self.plan.names.items()}
            saved = {name: shape for name, shape in saved.items() if self.plan.old_path(name) in stored}
        for name, shape in saved.items():
            old = self.plan.old_path(name)
            is_plain = name in self.plan.names
            read = partial(self._tensor, self.plan.names[name], self._read) if is_plain else None
            make: Callable[[], Tensor] = self._made_by_module(name) if read is None else read
            self._add(self.prefix + name, shape, make, self.prefix + old, (old, name))

    def _dtype(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """That of a tensor in the new folder: as in the old one, or, of a buffer that this lacks, as it is built."""
        is_new = name in self.plan.buffers and not self.plan.sources[name].is_taken
        return naming.buffers(self.wide)[name].dtype if is_new and self.wide is not None else dtype

    def _read(self, name: str) -> Tensor:
        tensor: Tensor = self.source.read(self.prefix + name)
        return tensor

    def _tensor(self, name: str, read: Read) -> Tensor:
        """A parameter or buffer of the wide model, by the plan's name."""
        entry, source = self.plan[name], self.plan.sources[name]
        narrow, part = read(source.name), Part(name, self.plan, self.seed)
        if (new := NewTensor.of(name, self.plan, self.seed)) is not None:
            return new.whole(entry.wide, self._dtype(name, narrow.dtype))
        if name in self.plan.buffers and (entry.narrow == entry.wide or not narrow.is_floating_point()):
            return narrow
        check_dtype(name, narrow)
        refuse_nonfinite({name: narrow})
        out = torch.full(entry.wide, float("nan"), dtype=narrow.dtype)
        if name in self.plan.parameters:
            self.operator.parameter(out, narrow.expand(part.entry.narrow), part)
        elif self.operator.needs_multiples:
            self.operator.buffer(out, narrow, part)
        else:
            raise MupscaleError(f"the buffer '{name}' grows, and fresh units have no values for it. Use --how copies")
        check_written(name, out, self.operator)
        return out

    def _made_by_module(self, name: str) -> Callable[[], Tensor]:
        """Of a tensor that is no parameter: some module saves its parameters under other names, with a hook."""
        modules, path = self._modules[1], name
        while path and not (path in modules and modules[path]._state_dict_hooks):
            path = path.rpartition(".")[0]
        if not path:
            raise MupscaleError(f"'{name}' in {self.source.path} is no parameter or buffer of the model: {_ADVICE}")

        def make() -> Tensor:
            if self._translated[0] != path:
                self._translated = path, self._translate(path)
            return self._translated[1][name].clone()

        return make

    def _translate(self, path: str) -> dict[str, Tensor]:
        """What a module of the wide model saves, from what the narrow one's saved: through parameters and back."""
        old = self.plan.old_path(path)
        small, large = (_with_memory(m[p]) for m, p in zip(self._modules, (old, path), strict=True))
        small.load_state_dict({name: self._read(f"{old}.{name}") for name in small.state_dict()})
        ours: dict[str, Tensor] = {
            f"{old}.{n}": t.detach() for n, t in (*small.named_parameters(), *small.named_buffers())
        }
        with torch.no_grad():
            for name, p in large.named_parameters():
                p.data = self._tensor(self.plan.names[f"{path}.{name}"], ours.__getitem__)
        return {f"{path}.{name}": tensor for name, tensor in large.state_dict().items()}

    # ------------------------------------------------------------------------------------------- the optimizer

    def _add_optimizer(self) -> None:
        """Its state by the names that it has itself, and its groups with the wide model's rates."""
        names = [*self.source.tensors, *self.source.objects]
        start = next((s for s in _OPTIMIZERS if any(n.startswith(f"{s}state.") for n in names)), None)
        if start is None:
            return
        states: dict[str, dict[str, str]] = {}
        for name in names:
            if name.startswith(f"{start}state."):
                parameter, key = self._split(name.removeprefix(f"{start}state."), name)
                states.setdefault(parameter, {})[key] = name
        hypers = self._hyperparameters(start)
        first = next(iter(hypers.values()), {})
        keys = {key for state in states.values() for key in state}
        cls = self.optimizer = self.optimizer or recognise_optimizer(keys, first, self.source.path)
        one = cls([nn.Parameter(torch.zeros(1))], **_constructor(cls, first))
        for name in self.plan.parameters:
            source = self.plan.sources[name]
            for key, stored in states.get(source.name, {}).items():
                hyper = hypers.get(source.name, {})
                self._add_state(stored.replace(source.name, name), stored, key, name, hyper, one)
        if hypers:
            self._add_groups(start, hypers, cls)

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

    def _hyperparameters(self, start: str) -> dict[str, dict[str, Any]]:
        """By parameter of the narrow model. torchtitan keeps them so; others keep numbered groups."""
        start, found, numbered = f"{start}param_groups.", dict[str, dict[str, Any]](), dict[str, dict[str, Any]]()
        for name in (*self.source.objects, *self.source.tensors):
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
        self._is_numbered = bool(numbered)
        return found

    def _add_state(
        self, name: str, stored: str, key: str, parameter: str, hyper: Mapping[str, Any], optimizer: Optimizer
    ) -> None:
        entry, source = self.plan.parameters[parameter], self.plan.sources[parameter]
        if stored in self.source.objects:  # what is no tensor is a number for the whole parameter
            self.objects[name] = self.source.raw(stored)
            self._add_path(name, stored, (source.name, parameter))
            return
        shape, dtype, traits = self.source.shapes[stored], self.source.dtypes[stored], traits_of(type(optimizer))
        sketch, stacked = torch.empty(shape, device="meta"), entry.stacked
        if not source.is_taken and len(shape) == len(entry.narrow):
            shape = tuple(w if s == n else s for s, n, w in zip(shape, entry.narrow, entry.wide, strict=True))
        elif not is_scalar(sketch, entry):
            sketch = sketch.expand(*stacked.narrow[: len(stacked.narrow) - len(shape)], *shape)
            axes = axes_of_state(name, sketch, stacked)
            shape = tuple(w if d in axes else n for d, (n, w) in enumerate(zip(sketch.shape, entry.wide, strict=True)))
        part = Part(parameter, self.plan, self.seed)
        like = torch.empty(1, dtype=dtype).expand(entry.wide)

        def make() -> Tensor:
            if not source.is_taken:  # none yet: as it is before the first step
                return torch.full(shape, initial_state(optimizer, hyper, len(entry.narrow)).get(key, 0.0), dtype=dtype)
            value = self.source.read(stored)
            grown: Tensor = grow_state(key, value, part, like, hyper, traits, self.operator, optimizer)
            return grown

        self._add(name, shape, make, stored, (source.name, parameter))

    def _add_groups(self, start: str, hypers: Mapping[str, dict[str, Any]], cls: type[Optimizer]) -> None:
        builder = GroupBuilder(traits_of(cls).at(self.plan))
        for name, entry in self.plan.parameters.items():
            if (own := hypers.get(self.plan.sources[name].name)) is not None:
                builder.add(name, nn.Parameter(torch.empty(0)), entry, own, own)
        for number, group in enumerate(builder.groups()):
            names = [name for name, _ in group["params"]]
            self.groups.append({**group, "params": names})
            said = {key: value for key, value in group.items() if key != "params"}
            if self._is_numbered:
                for key, value in {**said, "params": names}.items():
                    self.objects[f"{start}param_groups.{number}.{key}"] = _saved(value)
                    self.paths[f"{start}param_groups.{number}.{key}"] = (start[:-1], "param_groups", number, key)
                continue
            for name in names:
                for key, value in said.items():
                    self.objects[f"{start}param_groups.{name}.{key}"] = _saved(value)
                    self.paths[f"{start}param_groups.{name}.{key}"] = (start[:-1], f"param_groups.{name}.{key}")

    def _add_rest(self) -> None:
        """What is neither the model's nor the optimizer's, as it is."""
        ours = (*self.source.model,) if not self.prefix else ()
        for name in self.source.tensors:
            if name not in ours and not name.startswith((*_OPTIMIZERS, *((self.prefix,) if self.prefix else ()))):
                self._add(name, self.source.shapes[name], partial(self.source.read, name), name)
        for name in self.source.objects:
            if not name.startswith(_OPTIMIZERS):
                self.objects[name] = self.source.raw(name)
                self._add_path(name, name)


_ADVICE = "give the sizes of the model in the folder (--from), and the function that builds it (--model)"


def _with_memory(module: nn.Module) -> nn.Module:
    return copy.deepcopy(module).to_empty(device="cpu")


def _constructor(cls: type[Optimizer], hyper: Mapping[str, Any]) -> dict[str, Any]:
    taken = set(inspect.signature(cls).parameters) - _NO_SETTINGS
    return {key: value for key, value in hyper.items() if key in taken}


def _saved(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


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
    tensors = {name: (shape, before.dtypes[name]) for name, shape in before.shapes.items()}
    make: Callable[[str], Tensor] = before.read
    objects = {name: before.raw(name) for name in before.objects}
    record = _read_record(after.path)
    if record is not None:
        plan, growth, seed = Plan.from_json(json.dumps(record["plan"])), Growth(0, **record["growth"]), record["seed"]
        strangers = [name for name in before.model if name not in plan.old_names]
        if build is None and strangers:
            raise MupscaleError(
                f"'{strangers[0]}' is no parameter: a module saves it instead of its own. Give --model, the function "
                "that builds the model"
            )
        models = [build and BuiltMembers(build, record["from"]).sketch(record[side]) for side in ("from", "to")]
        grown = _Growing(before, plan, growth, seed, optimizer, *models)
        tensors, make, objects = grown.tensors, grown.make, grown.objects
    rows = list(_differences(tensors, make, after))
    ours, theirs = objects, {name: after.raw(name) for name in after.objects}
    rows += [
        (name, _seen(ours.get(name)), _seen(theirs.get(name)))
        for name in {**ours, **theirs}
        if not _same(ours.get(name), theirs.get(name))
    ]
    return DcpComparison(before.path, after.path, record is not None, len(tensors) + len(objects), tuple(rows))


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
        """Whether nothing differs."""
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


def _differences(
    tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]], make: Callable[[str], Tensor], after: DcpFolder
) -> Iterator[tuple[str, str, str]]:
    """Of tensors that differ: their names, and the shapes; or, where these are the same, by what part of their size."""
    for name in {**tensors, **after.shapes}:
        shape, found = tensors[name][0] if name in tensors else None, after.shapes.get(name)
        if shape != found:
            yield name, _seen(shape), _seen(found)
            continue
        one, other = make(name).double(), after.read(name).double()
        if not torch.equal(one, other):
            size = float(one.norm())
            off = float((one - other).norm()) / size if size else float("inf")
            number = int((one != other).sum())
            yield name, "×".join(map(str, shape or ())) or "a number", f"{number} entries differ, by {off:.1e} in all"


def _read_record(folder: Path) -> dict[str, Any] | None:
    file = folder / RECORD_FILE
    if not file.exists():
        return None
    try:
        record: dict[str, Any] = read_json(file)
        if record["format"] != _FORMAT or not {"plan", "growth", "seed", "from", "to"} <= record.keys():
            raise KeyError("format")
        return record
    except (OSError, ValueError, KeyError, TypeError, MupscaleError) as error:
        raise MupscaleError(f"{file} is not what mupscale upscale wrote ({type(error).__name__}: {error})") from None


def _same(one: bytes | None, other: bytes | None) -> bool:
    return one == other or (None not in (one, other) and _seen(one) == _seen(other) != _seen(b""))


def _seen(value: Any) -> str:
    """A shape, or the plain value in an object's bytes, for a table."""
    if value is None:
        return "missing"
    if isinstance(value, bytes):
        with suppress(Exception):  # whatever it is, it is not unpickled if it is not plain
            return repr(torch.load(io.BytesIO(value), map_location="cpu", weights_only=True))[:40]
        return f"{len(value)} bytes"
    return "×".join(map(str, value)) or "a number"
