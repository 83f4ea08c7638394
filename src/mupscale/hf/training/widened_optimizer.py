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
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mupscale.core import Axis, Entry, Plan, RuleSet, expand, naming
from mupscale.growth import (
    Copies,
    Operator,
    StatePart,
    axes_of_state,
    initial_state,
    is_scalar,
    refuse_nonfinite,
    state_factor,
)
from mupscale.hf.describe import ConfigFamily, Times, grown, plan_mixture, sketch_model, with_layers
from mupscale.hf.files import GrowthStep, Source, then_parts
from mupscale.hf.training.groups import SavedOptimizer, match_plan, read_optimizer
from mupscale.optim import DECAY_RULE, FROM_GROUP, GroupBuilder, Traits, scale, traits_of
from mupscale.system import MupscaleError, open_file, replacing


def widen_optimizer_file(
    path: str | Path,
    out: str | Path | None,
    source: Source,
    times: Times,
    plan: Plan | None = None,
    *,
    optimizer_class: type[Optimizer] | None = None,
    grow: Operator | None = None,
    deeper: GrowthStep | None = None,
    rules: RuleSet | None = None,
) -> None:
    """Write the optimizer state at `path`, grown as its model is, to `out`: a plain torch state dict with names.

    out: None to raise what it would, before hours of work on the weights, and to read next to nothing.

    source: the narrow checkpoint. plan: by the model's own names, where mupscale.json holds it. optimizer_class: for
    an optimizer that is not torch's own. grow: the operator, which fills the state, too; copies if none is given.
    deeper: the growth to more layers, or to experts, that comes then. What starts as identity or is drawn has no state,
    copies have that of what they are copies of, and all are in the groups of what they come from. Rates, decays and
    eps are rescaled as in param_groups, and `initial_lr` with them, so that a scheduler made anew with `last_epoch`
    goes on; its own saved state has narrow rates, one for each narrow group. rules: by which weight decay grows, where
    the state does not say it. `mupscale.hf.resume_optimizer` makes an optimizer of the file.
    """
    model = sketch_model(source.config)
    if plan is None:
        plan = ConfigFamily(source.config).plan(times, initial=False)
    plan = match_plan(model, plan)
    plan.check(model, "narrow")
    narrow = read_optimizer(Path(path), model, mmap=True)
    order, whole = [name for names, _ in narrow.groups for name in names], plan
    later, joined = Plan({}), dict[str, tuple[str, ...]]()
    if deeper is not None:
        order = list(naming.parameters(sketch_model(deeper.config_after(source.config))))
    if deeper is not None and deeper.layers is not None:
        whole = with_layers(plan, deeper.deepen, deeper.layers)
    elif deeper is not None and deeper.experts is not None:
        wide = ConfigFamily(source.config).wide_config(times)
        later, joined = plan_mixture(wide, source.shapes, deeper.experts)
        whole = then_parts(plan, later)
    cls, pieces = optimizer_class or narrow.optimizer_class(), dict[str, dict[str, Any]]()
    for name in order:
        origin = whole.sources[name]
        if origin.is_taken and origin.name in narrow.states:
            made = [dict(_pieces(n, narrow, plan, cls, grow or Copies())) for n in joined.get(name, (origin.name,))]
            pieces[name] = made[0] if name not in later.parameters else _in_parts(name, made, narrow, later[name], cls)
    if rules is not None and rules.decay != "invariant":
        narrow = replace(narrow, groups=[(names, {DECAY_RULE: rules.decay, **hyper}) for names, hyper in narrow.groups])
    copies = grow is None or grow.needs_multiples
    groups = _groups(narrow, whole, order, traits_of(cls), warns=out is not None and copies)
    if out is not None:
        write_optimizer(Path(out), groups, pieces)


def _groups(
    narrow: SavedOptimizer, plan: Plan, order: Sequence[str], traits: Traits, *, warns: bool
) -> list[dict[str, Any]]:
    """The wide optimizer's groups as param_groups makes them, in a state dict's form: numbers, and names."""
    wide = GroupBuilder(traits)
    for names, hyper in narrow.groups:
        own = {key: value for key, value in hyper.items() if key != FROM_GROUP}
        for name in (name for name in order if plan.sources[name].name in names):
            wide.add(name, nn.Parameter(torch.empty(0)), plan.parameters[name], own, own)
    if warns:
        wide.warn_of_inexact_decay()
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
    name: str, narrow: SavedOptimizer, plan: Plan, cls: type[Optimizer], grow: Operator
) -> Iterator[tuple[str, Any]]:
    """A parameter's state by key: tensors as pieces, anything else as it will be."""
    entry, traits, hyper = plan.parameters[name], traits_of(cls), _group_of(name, narrow)
    for key, value in narrow.states.get(name, {}).items():
        factor = state_factor(name, key, entry, hyper, traits)
        if not isinstance(value, Tensor):
            yield key, scale(value, factor) if isinstance(value, float) else value
            continue
        if is_scalar(value, entry):
            yield key, StateTensor(value, tuple(value.shape), partial(_write_number, value, factor))
            continue
        axes = axes_of_state(key, value, entry)
        shape = tuple(grown(n, axes[d].times) if d in axes else n for d, n in enumerate(value.shape))
        start = partial(_initial, cls, hyper, key, len(entry.narrow))
        by_entry = partial(_factor_of, name, key, hyper, traits)
        part = StatePart(name, plan, 0, key, tuple(value.shape), axes, start, by_entry, key in traits.rates)
        yield key, StateTensor(value, shape, partial(_write_grown, value, part, grow))


def _group_of(name: str, narrow: SavedOptimizer) -> Mapping[str, Any]:
    return next(hyper for names, hyper in narrow.groups if name in names)


def _in_parts(
    name: str, made: Sequence[Mapping[str, Any]], narrow: SavedOptimizer, later: Entry, cls: type[Optimizer]
) -> dict[str, Any]:
    """A parameter's state of these, one behind the other, shared and copied as the later entry says."""
    hyper, traits, parts = _group_of(later.source.name or name, narrow), traits_of(cls), dict[str, Any]()
    for key, first in made[0].items():
        label, factor = f"{name}/{key}", state_factor(name, key, later, hyper, traits)
        held = [one[key] for one in made if isinstance(one.get(key), StateTensor)]
        if not isinstance(first, StateTensor):
            parts[key] = scale(first, factor) if isinstance(first, float) else first
        elif is_scalar(first.value, later) or later.wide == later.narrow:
            parts[key] = replace(first, write=partial(_write_joined, label, [first], {}, factor))
        elif len(held) < len(made) or any(one.shape != later.narrow for one in held):
            raise MupscaleError(
                f"the optimizer state '{label}' has shape {first.shape}, but an expert has {later.narrow}: this "
                "optimizer keeps no number for every weight. Start a new optimizer for the mixture"
            )
        else:
            write = partial(_write_joined, label, held, later.axes, factor)
            parts[key] = StateTensor(first.value, later.wide, write)
    return parts


def _write_joined(
    label: str, held: Sequence[StateTensor], axes: Mapping[int, Axis], factor: float, out: Tensor
) -> None:
    """Tensors one behind the other, or a single one; and copies of them where `out` has a dimension more in front."""
    dim = out.dim() - len(held[0].shape)
    for part, one in zip(out.split([one.shape[0] for one in held], dim) if held[1:] else [out], held, strict=True):
        refuse_nonfinite({label: one.value})
        grown = torch.empty(one.shape, dtype=one.value.dtype)
        one.write(grown)
        part.copy_(expand(grown if factor == 1 else grown.mul_(factor), axes))


def _write_number(value: Tensor, factor: float, out: Tensor) -> None:
    out.copy_(scale(value, factor))


def _write_grown(value: Tensor, part: StatePart, grow: Operator, out: Tensor) -> None:
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
