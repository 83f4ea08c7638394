"""A saved torch optimizer, widened beside its model's weights: `optimizer.pt` of transformers' Trainer, for one.

Such a state is larger than its model, so neither side is held in memory: the narrow one is mapped, and the wide one is
written into the mapped file itself, tensor by tensor.
"""

from __future__ import annotations

import errno
import mmap
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mupscale.core import Axis, Entry, Plan, expand
from mupscale.growth import (
    Fresh,
    StatePart,
    axes_of_state,
    initial_state,
    is_scalar,
    refuse_nonfinite,
    state_factor,
)
from mupscale.hf.describe import Times, family_of_config, grown, sketch_model
from mupscale.hf.files import Source
from mupscale.hf.training.model_parameters import match_plan
from mupscale.hf.training.saved_optimizer import SavedOptimizer, read_optimizer
from mupscale.optim import FROM_GROUP, GroupBuilder, Traits, scale, traits_of
from mupscale.system import MupscaleError, open_file, replacing

Joined = Mapping[str, tuple[str, ...]]
"""Of parameters that are made of several, those."""


def widen_optimizer_file(
    path: str | Path,
    out: str | Path,
    source: Source,
    times: Times,
    plan: Plan | None = None,
    *,
    optimizer_class: type[Optimizer] | None = None,
    grow: Fresh | None = None,
    joined: Joined = MappingProxyType({}),
) -> None:
    """Write the optimizer state at `path`, widened as its model is, to `out`: a plain torch state dict with names.

    source: the narrow checkpoint. plan: by the model's own names, where mupscale.json holds it. optimizer_class: for
    an optimizer that is not torch's own. grow: by fresh units, whose state is as a fresh optimizer has it. joined: of
    parameters that are made of several of the narrow model's, one behind the other, all of these. Rates,
    decays and eps are rescaled as in param_groups, and `initial_lr` with them, so that a scheduler made anew with
    `last_epoch` goes on; its own saved state has narrow rates, one for each narrow group.
    `mupscale.hf.resume_optimizer` makes an optimizer of the file.
    """
    groups, pieces = _prepare(Path(path), source, times, plan, optimizer_class, grow, joined)
    write_optimizer(Path(out), groups, pieces)


def check_optimizer_file(
    path: str | Path,
    source: Source,
    times: Times,
    plan: Plan | None = None,
    *,
    grow: Fresh | None = None,
    joined: Joined = MappingProxyType({}),
) -> None:
    """Raise what widen_optimizer_file would, before hours of work on the weights; reads next to nothing."""
    _prepare(Path(path), source, times, plan, None, grow, joined)


def _prepare(
    path: Path,
    source: Source,
    times: Times,
    plan: Plan | None,
    optimizer_class: type[Optimizer] | None,
    grow: Fresh | None,
    joined: Joined,
) -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]]]:
    """The wide groups, and by name and key what becomes of each part of the state."""
    model = sketch_model(source.config)
    if plan is None:
        plan = family_of_config(source.config).plan(times, initial=False)
    if not plan.has_new_parts:
        plan = match_plan(model, plan)
        plan.check(model, "narrow")
    narrow = read_optimizer(path, model, mmap=True)
    cls = optimizer_class or narrow.optimizer_class()
    groups = _groups(narrow, plan, traits_of(cls))
    taken = [n for n in plan.parameters if plan.sources[n].is_taken and plan.sources[n].name in narrow.states]
    return groups, {name: dict(_pieces(name, narrow, plan, cls, grow, joined)) for name in taken}


def _groups(narrow: SavedOptimizer, plan: Plan, optimizer_traits: Traits) -> list[dict[str, Any]]:
    """The wide optimizer's groups as param_groups makes them, in a state dict's form: numbers, and names."""
    wide, made = GroupBuilder(optimizer_traits), dict[str, list[str]]()
    for name in plan.parameters:
        made.setdefault(plan.sources[name].name, []).append(name)
    for names, hyper in narrow.groups:
        own = {key: value for key, value in hyper.items() if key != FROM_GROUP}
        for name in (target for source in names for target in made.get(source, ())):
            wide.add(name, nn.Parameter(torch.empty(0)), plan.parameters[name], own, own)
    groups, start = [], 0
    for group in wide.groups():
        names = [name for name, _ in group.pop("params")]
        groups.append({**group, "params": list(range(start, start + len(names))), "param_names": names})
        start += len(names)
    return groups


@dataclass(frozen=True)
class StateTensor:
    """One state tensor: its narrow values, its wide shape, and what writes the wide values."""

    value: Tensor
    shape: tuple[int, ...]
    write: Callable[[Tensor], object]


def _pieces(
    name: str, narrow: SavedOptimizer, plan: Plan, cls: type[Optimizer], grow: Fresh | None, joined: Joined
) -> Iterator[tuple[str, Any]]:
    """A parameter's state by key: tensors as pieces, anything else as it will be."""
    entry, traits, source = plan.parameters[name], traits_of(cls), plan.sources[name].name
    hyper = next(hyper for names, hyper in narrow.groups if source in names)
    for key, value in narrow.states[source].items():
        factor = state_factor(name, key, entry, hyper, traits)
        if not isinstance(value, Tensor):
            yield key, scale(value, factor) if isinstance(value, float) else value
            continue
        one_number = is_scalar(value, entry)
        if (name in joined or len(entry.wide) > len(entry.narrow)) and not one_number:
            values = [narrow.states.get(n, {}).get(key) for n in joined.get(name, (source,))]
            yield key, _join(name, key, values, entry.wide, factor)
            continue
        axes = {} if one_number else axes_of_state(key, value, entry)
        shape = tuple(grown(n, axes[d].times) if d in axes else n for d, n in enumerate(value.shape))
        if grow is None or one_number:
            yield key, StateTensor(value, shape, partial(_write_copies, value, axes, factor))
            continue
        start = partial(_initial, cls, hyper, key, len(entry.narrow))
        by_entry = partial(_factor_of, name, key, hyper, traits)
        part = StatePart(name, plan, 0, key, tuple(value.shape), axes, start, by_entry, key in traits.rates)
        yield key, StateTensor(value, shape, partial(_write_fresh, value, part, grow))


def _join(name: str, key: str, values: Sequence[Tensor | None], wide: tuple[int, ...], factor: float) -> StateTensor:
    """The state of a tensor that joins others, one behind the other, and may stack copies of that."""
    held = [value for value in values if value is not None]
    dim, joined = len(wide) - held[0].dim(), (sum(len(value) for value in held), *held[0].shape[1:])
    if len(held) < len(values) or joined != wide[dim:]:
        raise MupscaleError(
            f"the optimizer state '{key}' of '{name}' would have shape {joined}, but an expert has {wide[dim:]}: this "
            "optimizer keeps no number for every weight. Start a new optimizer for the mixture"
        )
    return StateTensor(held[0], wide, partial(_write_joined, f"{name}/{key}", held, dim, factor))


def _write_joined(label: str, values: Sequence[Tensor], dim: int, factor: float, out: Tensor) -> None:
    for part, value in zip(out.split([len(value) for value in values], dim), values, strict=True):
        refuse_nonfinite({label: value})
        part.copy_(value * factor)


def _write_copies(value: Tensor, axes: Mapping[int, Axis], factor: float, out: Tensor) -> None:
    expand(value, axes, out, factor)


def _write_fresh(value: Tensor, part: StatePart, grow: Fresh, out: Tensor) -> None:
    grow.state(out, value, part)


def _factor_of(name: str, key: str, hyper: Mapping[str, Any], traits: Traits, entry: Entry) -> float:
    return state_factor(name, key, entry, hyper, traits)


def _initial(cls: type[Optimizer], hyper: Mapping[str, Any], key: str, ndim: int) -> float:
    """What a new optimizer of this class starts the state with."""
    build: Callable[[Any], Optimizer] = cls
    return initial_state(build([nn.Parameter(torch.zeros(1))]), hyper, ndim).get(key, 0.0)


def write_optimizer(out: Path, groups: Sequence[dict[str, Any]], pieces: Mapping[str, Mapping[str, Any]]) -> None:
    """First the file with room for all tensors, then their values into it.

    groups: as in a state dict, with names. pieces: by name and key, tensors as StateTensor, anything else as it is.
    """
    numbers = {n: i for group in groups for n, i in zip(group["param_names"], group["params"], strict=True)}
    room = {
        numbers[name]: {
            key: torch.empty(part.shape, dtype=part.value.dtype) if isinstance(part, StateTensor) else part
            for key, part in parts.items()
        }
        for name, parts in sorted(pieces.items(), key=lambda item: numbers[item[0]])
    }
    with replacing(out) as temporary:
        try:
            with torch.serialization.skip_data():  # so that the memory just asked for is never touched
                torch.save({"state": room, "param_groups": list(groups)}, temporary)
            _reserve(temporary)
        except (OSError, RuntimeError) as error:  # torch's own writer raises the latter
            raise MupscaleError(f"{out} cannot be written ({error}); is there room for it on the disk?") from None
        del room
        with torch.serialization.set_default_mmap_options(mmap.MAP_SHARED):
            mapped = torch.load(temporary, map_location="cpu", weights_only=True, mmap=True)
        for name, parts in pieces.items():
            for key, part in parts.items():
                if isinstance(part, StateTensor):
                    refuse_nonfinite({f"{name}/{key}": part.value})
                    part.write(mapped["state"][numbers[name]][key])
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
