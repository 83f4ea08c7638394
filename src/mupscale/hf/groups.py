"""Training an upscaled checkpoint on: parameter groups from the small model's hyperparameters and mupscale.json.

And a saved torch optimizer widened. Such a state is larger than its model, so the narrow one is mapped, and the wide
one is written into the mapped file.
"""

from __future__ import annotations

import errno
import inspect
import math
import mmap
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mupscale import optim
from mupscale.core import Entry, Initial, Plan, RuleSet, Shape, naming
from mupscale.growth import Operator, Part, grow_state, is_scalar, shape_of_state, state_factor
from mupscale.hf.building import Config, model_class, sketch_model
from mupscale.hf.config_family import ConfigFamily
from mupscale.hf.output_folder import OPTIMIZER_FILE
from mupscale.hf.record import PlannedGrowth, Record
from mupscale.hf.source import Source
from mupscale.optim import SavedOptimizer
from mupscale.planning import relative_difference
from mupscale.system import MupscaleError, NotNegative, checks_arguments, open_file, replacing

State = Mapping[str, Any]
_IN_BLOCK = re.compile(r"[^.]+\.\d+\.")  # the first of a name's numbered modules, as in model.layers.0.mlp


def shapes_of(model: nn.Module) -> dict[str, Shape]:
    """Shapes of all parameters, tied ones under each of their names."""
    named = naming.unwrap(model).named_parameters(remove_duplicate=False)
    return {naming.canonical(name): tuple(p.shape) for name, p in named}


def check_rules(rules: RuleSet | None, layers: int | None) -> None:
    """An error where more layers are to follow a rule for depth, which a growth by configs does not."""
    if rules is not None and rules.depth != "none" and layers is not None:
        raise MupscaleError(
            f"rules.depth={rules.depth} is for mupscale.upscale, families and recipes: a Hugging Face growth to "
            f"{layers} layers keeps the learning rates of blocks. Leave it out"
        )


def match_plan(model: nn.Module, plan: Plan, small: Config | None = None) -> Plan:
    """The plan with the parameters that the model has, under its own names, tied as they are there.

    small: config.json of the model that was upscaled, where the wide one may have been loaded with another head.
    """
    taken, parameters, initial = dict[str, str](), dict[str, Entry](), dict[str, Initial]()
    for group in naming.aliases(naming.unwrap(model).named_parameters(remove_duplicate=False)):
        if strangers := [name for name in group if name not in plan.names]:
            raise MupscaleError(f"the model has the parameter '{strangers[0]}', which the upscaled one does not have")
        entries = {plan.names[name]: replace(plan.parameters[plan.names[name]], names=()) for name in group}
        first = next(iter(entries))
        is_one = any(entry != entries[first] for entry in entries.values())
        if is_one:
            _refuse_new_readout(group, type(naming.unwrap(model)).__name__, small)
        if is_one or first in taken:
            other, now, before = (group[1], "one tensor", "two") if is_one else (taken[first], "two tensors", "one")
            raise MupscaleError(
                f"'{group[0]}' and '{other}' are {now} in this model, but were {before} when it was upscaled. Load it "
                "with tie_word_embeddings as in its config.json"
            )
        taken.update(dict.fromkeys(entries, group[0]))
        parameters[group[0]] = replace(entries[first], names=group)
        own = plan.initial.get(first, Initial())
        initial[group[0]] = own if plan.fresh is None else replace(own, std=own.std or 0.0)
    if missing := [name for name in plan.parameters if name not in taken]:
        raise MupscaleError(f"the model lacks the parameter '{missing[0]}', which the upscaled one has")
    return Plan(parameters, {}, initial, plan.mup, plan.tried_by)


def plan_for_model(model: nn.Module, record: Record) -> Plan:
    """The plan from the first model to this one, which may have another head than the one that grew.

    A head that reads what was folded for a tied readout takes the constant back.
    """
    plan, own = record.whole_plan(), naming.unwrap(model)
    if shapes_of(model).keys() <= plan.names.keys() or not hasattr(own, "config"):
        return match_plan(model, plan, record.config)
    kind, tied = type(own).__name__, {"tie_word_embeddings": getattr(own.config, "tie_word_embeddings", False)}
    ours = ConfigFamily({**record.first_config, "architectures": [kind], **tied}).plan(record.times, initial=False)
    entries, back = dict(ours.parameters), set[float]()
    blocks = {found[0] for name in plan.names if (found := _IN_BLOCK.search(name))}
    for name, entry in ours.parameters.items():
        known = [n for n in plan.names if f".{n}".endswith(f".{name}") or f".{name}".endswith(f".{n}")]
        if len(entry.names) > 1:
            _refuse_new_readout(entry.names, kind, record.config)
        if known:
            entries[name] = replace(plan[plan.names[known[0]]], names=entry.names)
            back |= {float(entry.fold) / float(entries[name].fold)} - {1.0}
        elif entry.in_ and len(back) == 1:
            entries[name] = entry.with_constants(fold=next(iter(back)) * entry.fold)
        if not known and (found := _IN_BLOCK.search(name)) and found[0] in blocks:  # it belongs to no other head
            upscaled = model_class(record.first_config).__name__
            raise MupscaleError(
                f"the model has the parameter '{name}', which the upscaled one does not have. Load it as {upscaled}"
            )
    return match_plan(model, replace(ours, parameters=entries), record.config)


def _refuse_new_readout(group: Sequence[str], kind: str, small: Config | None) -> None:
    """An error where one of the names of a tensor is of a head that the model lacked when it was upscaled."""
    if small is None:
        return
    upscaled = sketch_model(small)
    known = tuple(f".{name}" for name in shapes_of(upscaled))  # which may be the body alone, without its prefix
    if new := [name for name in group if not f".{name}".endswith(known)]:
        raise MupscaleError(
            f"'{new[0]}' is one tensor with '{group[0]}' in this model, and the {type(upscaled).__name__} that was "
            "upscaled had no such readout, so the norm before it lacks the 1/k that a tied readout needs when the "
            f"width grows k times. Load the small model as {kind}, save it, and upscale that; or load this one with "
            "tie_word_embeddings=False, and its readout starts afresh"
        )


def refuse_untrainable(model: nn.Module) -> None:
    """Adapters and quantised weights are no parameters that a width's rules could speak of."""
    modules = naming.modules(model).items()
    adapters = [path or type(m).__name__ for path, m in modules if type(m).__module__.split(".")[0] == "peft"]
    adapters += [name for name in naming.parameters(model) if re.search(r"(^|[._])lora_", name)]
    if adapters:
        raise MupscaleError(
            f"the model has a LoRA or another PEFT adapter ('{adapters[0]}'): its small matrices have no axes to "
            "widen. Merge it (merge_and_unload), and train the whole model"
        )
    quantised = getattr(naming.unwrap(model), "is_quantized", False)
    for name, p in naming.parameters(model).items():
        if quantised or not p.is_floating_point() or p.itemsize < 2:
            raise MupscaleError(
                f"the model is quantised ('{name}' is stored as {p.dtype}), so its weights cannot be trained. Load it "
                "in float32 or bfloat16, without a quantization_config"
            )


def find_optimizer_file(path: str | Path) -> Path:
    """The file of a saved optimizer, or optimizer.pt in a folder."""
    file = Path(path) / OPTIMIZER_FILE if Path(path).is_dir() else Path(path)
    if not file.is_file():
        raise MupscaleError(f"there is no saved optimizer at {file}: give what torch.save wrote of its state_dict()")
    return file


@checks_arguments
def plan(path: str | Path, model: nn.Module) -> Plan:
    """How the model grew from the first small one on, by its own parameter names: for clip_grad_norm_ and the like.

    path: the folder that `mupscale upscale` wrote, or its mupscale.json. The model may be wrapped (DDP, torch.compile)
    and in any floating-point dtype.

    >>> plan("absent", nn.Linear(2, 2))  # after hf.upscale(small, wide): plan(wide, model)
    Traceback (most recent call last):
    mupscale.system.errors.MupscaleError: there is no mupscale.json at absent: give the folder that mupscale upscale ...
    """
    refuse_untrainable(model)
    record = Record.load(path)
    try:
        model_plan = plan_for_model(model, record)
        model_plan.check(model)
    except MupscaleError as error:
        kind = type(naming.unwrap(model)).__name__
        raise MupscaleError(
            f"{path} describes a model that grew {record.in_words}, and this {kind} is a different one: {error}"
        ) from None
    return model_plan


@checks_arguments
def param_groups(
    path: str | Path,
    model: nn.Module,
    optimizer_class: type[Optimizer],
    *,
    groups: Sequence[Mapping[str, Any]] | None = None,
    rules: RuleSet | None = None,
    **hyper: Any,
) -> list[dict[str, Any]]:
    """Parameter groups for an upscaled model; lr, weight decay and eps are those that were right for the small one.

    `param_groups("path/to/wide", model, torch.optim.AdamW, lr=2e-5, groups=decay_groups(model, 0.1))`: groups as for
    torch, where parameters may be given by name. Schedulers that multiply each group's rate, as all of transformers'
    do, need nothing else; those that are given rates take mupscale.per_group(optimizer, lr). rules: as in
    mupscale.param_groups; if not given, weight decay follows the rule that the model grew by.

    >>> import tempfile, torch, transformers
    >>> from mupscale import hf
    >>> folder = tempfile.TemporaryDirectory()
    >>> config = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, n_positions=16, vocab_size=11)
    >>> transformers.GPT2LMHeadModel(config).save_pretrained(f"{folder.name}/small")
    >>> _ = hf.upscale(f"{folder.name}/small", f"{folder.name}/wide", verify=False, progress=False)
    >>> model = transformers.GPT2LMHeadModel.from_pretrained(f"{folder.name}/wide")
    >>> groups = param_groups(f"{folder.name}/wide", model, torch.optim.AdamW, lr=1e-3)
    >>> sorted({group["lr"] for group in groups})  # hidden matrices take half the rate
    [0.0005, 0.001]
    >>> folder.cleanup()
    """
    whole, rules = plan(path, model), rules or RuleSet(decay=Record.load(path).decay)
    return optim.param_groups(model, whole, optimizer_class, groups=groups, rules=rules, **hyper)


@checks_arguments
def resume_optimizer(
    path: str | Path, model: nn.Module, optimizer_class: type[Optimizer], *, lr: NotNegative | None = None
) -> Optimizer:
    """The optimizer of an upscaled checkpoint, with the groups and state that `upscale --optimizer-state` widened.

    path: the checkpoint's folder, or the optimizer's file. lr: another learning rate, in the small model's units; of a
    run whose schedule has ended at 0 it must be given, unless a new schedule begins: without it there is a warning.

    >>> import tempfile, torch
    >>> model, folder = torch.nn.Linear(2, 2), tempfile.TemporaryDirectory()
    >>> torch.save(torch.optim.AdamW(model.parameters(), lr=1e-3).state_dict(), f"{folder.name}/optimizer.pt")
    >>> resume_optimizer(folder.name, model, torch.optim.AdamW, lr=5e-4).param_groups[0]["lr"]
    0.0005
    >>> folder.cleanup()
    """
    refuse_untrainable(model)
    saved = optim.read_optimizer(find_optimizer_file(path), model)
    return saved.build(model, optimizer_class, lr)


def grow_optimizer_file(
    path: str | Path,
    out: str | Path | None,
    source: Source,
    steps: Sequence[PlannedGrowth],
    rules: RuleSet | None = None,
) -> None:
    """Write the optimizer state at `path`, grown as its model is, to `out`: a plain torch state dict with names.

    out: None to raise what it would, before hours of work on the weights, and to read next to nothing. source: the
    first checkpoint. steps: its growths. rules: by which weight decay grows, where the state does not say it. What
    starts as identity or is drawn has no state, copies have that of what they are copies of, and all are in the groups
    of what they come from. Rates, decays and eps are rescaled as in param_groups, and `initial_lr` with them, so that a
    scheduler made anew with `last_epoch` goes on.
    """
    grown = _grown_optimizer(Path(path), source, steps, rules, warns=out is not None)
    if out is not None:
        write_optimizer(Path(out), grown)


_BOOKKEEPING = (optim.FROM_GROUP, optim.RATE_CHANGE)  # which later growths and schedulers need, and no update


def compare_optimizer_file(
    path: Path, wide: SavedOptimizer, source: Source, steps: Sequence[PlannedGrowth], rules: RuleSet
) -> tuple[str, float]:
    """What in the wide optimizer is farthest from the one at `path`, grown with its model; and how far, relatively.

    Compared are all state tensors, all hyperparameters of every parameter, and which parameters are in a group.
    """
    grown = _grown_optimizer(path, source, steps, rules, warns=False)
    off: dict[str, float] = {}
    for name in dict.fromkeys((*grown.states, *wide.states)):
        expected_state, state = grown.states.get(name, {}), wide.states.get(name, {})
        for key in dict.fromkeys((*expected_state, *state)):
            expected = expected_state.get(key)
            if isinstance(expected, StateTensor):
                expected = expected.make()
            off[f"{name}/{key}"] = _distance(expected, state.get(key))

    expected_hypers, hypers = grown.hyper_by_name, wide.hyper_by_name
    for name in dict.fromkeys((*expected_hypers, *hypers)):
        expected_hyper, hyper = expected_hypers.get(name, {}), hypers.get(name, {})
        for key in dict.fromkeys((*expected_hyper, *hyper)):
            if key not in _BOOKKEEPING:
                off[f"{key} of {name}"] = _distance(expected_hyper.get(key), hyper.get(key))

    companions = _companions(wide)
    for name, expected_companions in _companions(grown).items():
        if companions.get(name) != expected_companions:
            off[f"the group of {name}"] = math.inf
    return max(off.items(), key=lambda item: item[1], default=("", 0.0))


def _companions(saved: SavedOptimizer) -> dict[str, frozenset[str]]:
    """By name of a parameter: all that are in its group."""
    return {name: frozenset(names) for names, _ in saved.groups for name in names}


def _distance(expected: Any, actual: Any) -> float:
    """How far two values of an optimizer are apart, relatively; infinitely where they are not alike."""
    if isinstance(expected, list | tuple) and isinstance(actual, list | tuple):
        if len(expected) != len(actual):
            return math.inf
        return max(map(_distance, expected, actual), default=0.0)
    if not all(isinstance(value, int | float | Tensor) and not isinstance(value, bool) for value in (expected, actual)):
        return 0.0 if type(expected) is type(actual) and expected == actual else math.inf
    a, b = (torch.as_tensor(value, dtype=torch.float64) for value in (expected, actual))
    if a.shape != b.shape:
        return math.inf
    if a.numel() == 1 and not a.any():  # a rate or a decay of 0 has no relative difference
        return math.inf if b.any() else 0.0
    return relative_difference(a, b)


def _grown_optimizer(
    path: Path, source: Source, steps: Sequence[PlannedGrowth], rules: RuleSet | None, *, warns: bool
) -> SavedOptimizer:
    """The optimizer after these growths, no state of which has been made yet."""
    check_rules(rules, next((step.growth.layers for step in steps if step.growth.layers is not None), None))
    saved = optim.read_optimizer(find_optimizer_file(path), sketch_model(source.config), mmap=True)
    cls = saved.optimizer_class()
    added = optim.groups_by_rules([hyper for _, hyper in saved.groups], rules or RuleSet())
    told = zip(saved.groups, added, strict=True)
    saved = replace(saved, groups=[(names, {**hyper, **more}) for (names, hyper), more in told])
    for step in steps:
        saved = _grown_once(saved, step, cls, warns=warns and step.growth.grow.needs_multiples)
    return saved


def _grown_once(saved: SavedOptimizer, step: PlannedGrowth, cls: type[Optimizer], *, warns: bool) -> SavedOptimizer:
    plan, wide, states = step.by_model, optim.GroupBuilder(optim.traits_of(cls)), dict[str, State]()
    for names, hyper in saved.groups:
        own = {key: value for key, value in hyper.items() if key != optim.FROM_GROUP}
        for name in (name for name in plan.parameters if plan.sources[name].name in names):
            wide.add(name, nn.Parameter(torch.empty(0)), plan.parameters[name], own, own)
    if warns:
        wide.warn_of_inexact_decay()
    groups = [([name for name, _ in group.pop("params")], group) for group in wide.groups()]
    for _, group in groups if step.growth.scale_lr != 1 else ():
        for rate in ("lr", "initial_lr"):  # the latter is what a schedule begins with
            if rate in group:
                group[rate] = optim.scale(group[rate], step.growth.scale_lr)
    hypers, first, build = saved.hyper_by_name, saved.groups[0][1], partial(cls, [nn.Parameter(torch.zeros(1, 1))])
    needed = [n for n, p in inspect.signature(cls).parameters.items() if p.default is p.empty and n in first]
    one = build(**{name: first[name] for name in needed})  # which tells what new entries of a state start with
    for name, source in plan.sources.items():
        if source.is_taken and source.name in saved.states:
            held = [saved.states[origin] for origin in step.joined.get(name, (source.name,))]
            states[name] = dict(_grown_state(name, held, plan, hypers[source.name], step.growth.grow, one))
    return replace(saved, groups=groups, states=states)


@dataclass(frozen=True)
class StateTensor:
    """One state tensor of a grown optimizer, and what makes it."""

    shape: Shape
    dtype: torch.dtype
    make: Callable[[], Tensor]


def _grown_state(
    name: str, held: Sequence[State], plan: Plan, hyper: Mapping[str, Any], grow: Operator, optimizer: Optimizer
) -> Iterator[tuple[str, Any]]:
    """A parameter's state by key, from that of the one or more that it is made of; of tensors, what makes them."""
    traits, entry = optim.traits_of(type(optimizer)), plan[name]
    for key, first in held[0].items():
        state_factor(name, key, entry, hyper, traits)  # a state that is unknown is refused now, before anything is made
        like = torch.empty(1, dtype=first.dtype if isinstance(first, _TENSORS) else None).expand(entry.wide)
        told = like, hyper, traits, grow, optimizer
        if not isinstance(first, _TENSORS):
            yield key, grow_state(key, first, Part(name, plan, 0), *told)
            continue
        shape, of, values = tuple(first.shape), plan, [state.get(key) for state in held]
        if len(held) > 1 and not is_scalar(torch.empty(shape, device="meta"), entry):
            if any(value is None or tuple(value.shape) != entry.narrow for value in values):
                raise MupscaleError(
                    f"the optimizer state '{name}/{key}' has shape {shape}, but an expert has {entry.narrow}: this "
                    "optimizer keeps no number for every weight. Start a new optimizer for the mixture"
                )
            shape = (shape[0] * len(held), *shape[1:])
            of = replace(plan, parameters={name: replace(entry, narrow=shape)})
        else:
            values = values[:1]
        part = Part(name, of, 0)
        make = partial(_make_state, key, values, part, told)
        yield key, StateTensor(shape_of_state(f"{name}/{key}", shape, part.entry), first.dtype, make)


_TENSORS = (Tensor, StateTensor)


def _make_state(key: str, values: Sequence[Any], part: Part, told: tuple[Any, ...]) -> Tensor:
    read = [value.make() if isinstance(value, StateTensor) else value for value in values]
    made: Tensor = grow_state(key, read[0] if len(read) == 1 else torch.cat(read), part, *told)
    return made


def write_optimizer(out: Path, saved: SavedOptimizer) -> None:
    """First the file with room for all tensors, then their values into it."""
    groups, numbers = list[dict[str, Any]](), dict[str, int]()
    for names, hyper in saved.groups:
        start = len(numbers)
        numbers.update({name: start + i for i, name in enumerate(names)})
        groups.append({**hyper, "params": list(range(start, len(numbers))), "param_names": names})
    room = {
        numbers[name]: {
            key: torch.empty(part.shape, dtype=part.dtype) if isinstance(part, StateTensor) else part
            for key, part in state.items()
        }
        for name, state in sorted(saved.states.items(), key=lambda item: numbers[item[0]])
    }
    with replacing(out) as temporary:
        try:
            with torch.serialization.skip_data():  # so that the memory just asked for is never touched
                torch.save({"state": room, "param_groups": groups}, temporary)
            _reserve(temporary)
        except (OSError, RuntimeError) as error:  # torch's own writer raises the latter
            raise MupscaleError(f"{out} cannot be written ({error}); is there room for it on the disk?") from None
        del room
        with torch.serialization.set_default_mmap_options(mmap.MAP_SHARED):
            mapped = torch.load(temporary, map_location="cpu", weights_only=True, mmap=True)
        for name, state in saved.states.items():
            for key, part in state.items():
                if isinstance(part, StateTensor):
                    mapped["state"][numbers[name]][key].copy_(part.make())
        for group, target in zip(groups, mapped["param_groups"], strict=True):
            for key in (key for key, value in group.items() if isinstance(value, Tensor)):
                target[key].copy_(group[key])


def _reserve(path: Path) -> None:
    """Room on the disk for the whole of a sparse file: where there is none, writing to its map would kill us."""
    size = path.stat().st_size
    if hasattr(os, "posix_fallocate"):
        with open_file(path, "r+b") as file:
            os.posix_fallocate(file.fileno(), 0, size)
    elif shutil.disk_usage(path.parent).free < size:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
