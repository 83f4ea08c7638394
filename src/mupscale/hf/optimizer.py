"""A saved torch optimizer, widened beside its model's weights: `optimizer.pt` of transformers' Trainer, for one.

Such a state is larger than its model, so neither side is held in memory: the narrow one is mapped, and the wide one is
written into the mapped file itself, tensor by tensor.
"""

from __future__ import annotations

import errno
import mmap
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mupscale.core import Axis, Plan, expand, widened_shape
from mupscale.growth import axes_of_state, is_scalar, refuse_nonfinite, state_factor
from mupscale.hf import saved
from mupscale.hf.architectures import known as described
from mupscale.hf.growth import Times
from mupscale.hf.parameters import named_as_in, shapes_of
from mupscale.optim import FROM_GROUP, Groups, Traits, scale, traits
from mupscale.system import MupscaleError, replacing

if TYPE_CHECKING:
    from mupscale.hf.source import Source


def widen_optimizer_file(
    path: str | Path,
    out: str | Path,
    source: Source,
    times: Times,
    plan: Plan | None = None,
    *,
    optimizer_class: type[Optimizer] | None = None,
) -> None:
    """Write the optimizer state at `path`, widened as its model is, to `out`: a plain torch state dict with names.

    source: the narrow checkpoint. plan: for an architecture that is not described. optimizer_class: for an optimizer
    that is not torch's own. Rates, decays and eps are rescaled as in param_groups, and `initial_lr` with them, so that
    a scheduler made anew with `last_epoch` goes on; its own saved state has narrow rates, one for each narrow group.
    `mupscale.hf.resume_optimizer` makes an optimizer of the file.
    """
    groups, pieces = _prepare(Path(path), source, times, plan, optimizer_class)
    _write(Path(out), groups, pieces)


def check_optimizer_file(path: str | Path, source: Source, times: Times, plan: Plan | None = None) -> None:
    """Raise what widen_optimizer_file would, before hours of work on the weights; reads next to nothing."""
    _prepare(Path(path), source, times, plan, None)


def _prepare(
    path: Path, source: Source, times: Times, plan: Plan | None, optimizer_class: type[Optimizer] | None
) -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]]]:
    """The wide groups, and by name and key what becomes of each part of the state."""
    from mupscale.hf.models import sketch

    model = sketch(source.config)
    plan = named_as_in(model, _described_plan(source, times, model) if plan is None else plan)
    plan.check(model, "narrow")
    narrow = saved.read(path, model, mmap=True)
    known = traits(optimizer_class or narrow.optimizer_class())
    groups = _groups(narrow, plan, known)
    return groups, {name: dict(_pieces(name, narrow, plan, known)) for name in narrow.states}


def _described_plan(source: Source, times: Times, model: nn.Module) -> Plan:
    architecture = described(source.model_type)
    if architecture is None:
        raise MupscaleError(f"'{source.model_type}' is not described, so its optimizer needs the plan of its model")
    return architecture.plan(source.config, times, shapes_of(model))


def _groups(narrow: saved.Saved, plan: Plan, known: Traits) -> list[dict[str, Any]]:
    """The wide optimizer's groups as param_groups makes them, in a state dict's form: numbers, and names."""
    made = Groups(known)
    for names, hyper in narrow.groups:
        kept = {key: value for key, value in hyper.items() if key != FROM_GROUP}
        for name in names:
            made.add(name, nn.Parameter(torch.empty(0)), plan.parameters[name], kept, kept)
    groups, start = [], 0
    for group in made.groups():
        names = [name for name, _ in group.pop("params")]
        groups.append({**group, "params": list(range(start, start + len(names))), "param_names": names})
        start += len(names)
    return groups


@dataclass(frozen=True)
class _Piece:
    """One state tensor: its narrow values and how they become the wide ones."""

    value: Tensor
    axes: Mapping[int, Axis]
    factor: float

    @property
    def shape(self) -> tuple[int, ...]:
        return widened_shape(self.value.shape, self.axes)


def _pieces(name: str, narrow: saved.Saved, plan: Plan, known: Traits) -> Iterator[tuple[str, Any]]:
    """A parameter's state by key: tensors as pieces, anything else as it will be."""
    entry = plan.parameters[name]
    hyper = next(hyper for names, hyper in narrow.groups if name in names)
    for key, value in narrow.states[name].items():
        factor = state_factor(name, key, entry, hyper, known)
        if isinstance(value, Tensor):
            yield key, _Piece(value, {} if is_scalar(value, entry) else axes_of_state(key, value, entry), factor)
        else:
            yield key, scale(value, factor) if isinstance(value, float) else value


def _write(out: Path, groups: Sequence[dict[str, Any]], pieces: Mapping[str, Mapping[str, Any]]) -> None:
    """First the file with room for all tensors, then their values into it."""
    numbers = {n: i for group in groups for n, i in zip(group["param_names"], group["params"], strict=True)}
    room = {
        numbers[name]: {
            key: torch.empty(part.shape, dtype=part.value.dtype) if isinstance(part, _Piece) else part
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
                if isinstance(part, _Piece):
                    refuse_nonfinite({f"{name}/{key}": part.value})
                    expand(part.value, part.axes, mapped["state"][numbers[name]][key], part.factor)
        for group, target in zip(groups, mapped["param_groups"], strict=True):
            for key in (key for key, value in group.items() if isinstance(value, Tensor)):
                target[key].copy_(group[key])


def _reserve(path: Path) -> None:
    """Room on the disk for the whole of a sparse file: where there is none, writing to its map would kill us."""
    size = path.stat().st_size
    if hasattr(os, "posix_fallocate"):
        with open(path, "r+b") as file:
            os.posix_fallocate(file.fileno(), 0, size)
    elif shutil.disk_usage(path.parent).free < size:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
