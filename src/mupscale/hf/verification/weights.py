"""Are the tensors of a wide checkpoint the small one's, grown, with the noise or the units that were drawn for them?

This needs no model and no transformers, one tensor at a time, and names the tensor that is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from mupscale.core import Entry, Plan, expand, index_of_old
from mupscale.growth import (
    DRAWS,
    Copies,
    Draws,
    Fresh,
    GaussianNoise,
    NewTensor,
    Operator,
    Part,
    as_noise,
    standard_normal,
    unit_std,
)
from mupscale.hf.files import Source, StoredTensor, plan_name, read_into
from mupscale.system import MupscaleError

_AT_A_TIME = 1 << 22  # entries that are compared in double precision at a time


@dataclass(frozen=True)
class PlannedGrowth:
    """One growth of a checkpoint, in width or to more layers: its plan, by the names in the files; what was drawn."""

    plan: Plan
    grow: Operator
    seed: int
    draws: Draws = DRAWS


@dataclass(frozen=True)
class TensorDifference:
    """How far a tensor is from what it should be, relatively: all of it, its old units' weights, and all others.

    A tensor of a new layer has new ones alone.
    """

    name: str
    whole: float
    old: float
    new: float


def tensor_differences(small: Source, wide: Source, steps: Sequence[PlannedGrowth]) -> Iterator[TensorDifference]:
    """Of each tensor of the wide checkpoint from what the small one becomes by these steps."""
    names: Collection[str] = small.tensors.keys()
    for step in steps:
        names = step.plan.sources.keys() if step.plan.has_new_parts else names
    _check_names(names, wide.tensors.keys())
    limit = rounding_limit(small, wide)
    for name in names:
        yield _difference(name, wide.tensors[name], _trace(name, small, steps), limit)


class _History(NamedTuple):
    """How a tensor came about: stored in the small checkpoint or drawn for a new layer, and widened in these ways."""

    stored: StoredTensor
    ways: list[tuple[PlannedGrowth, str]]
    drawn: NewTensor | None
    in_new_layer: bool


def _trace(name: str, small: Source, steps: Sequence[PlannedGrowth]) -> _History:
    """Back from a tensor of the wide checkpoint to where it comes from."""
    ways: list[tuple[PlannedGrowth, str]] = []  # since it was drawn, if it was
    drawn, shape, is_new = None, None, False
    for step in reversed(steps):
        planned = name if step.plan.has_new_parts else plan_name(name, step.plan)
        entry, source = step.plan[planned], step.plan.sources[planned]
        is_new = is_new or source.is_new
        if drawn is None and (drawn := NewTensor.of(planned, step.plan, step.seed, step.draws)) is not None:
            shape = entry.wide
        if drawn is None and (entry.axes or not step.plan.has_new_parts):  # of new parts, those with more rows
            ways.append((step, planned))
        name = source.name if step.plan.has_new_parts else name
    stored = small.tensors[name]
    return _History(replace(stored, shape=shape or stored.shape), ways[::-1], drawn, is_new)


def _difference(name: str, grown: StoredTensor, history: _History, limit: float) -> TensorDifference:
    """Of several growths the dtypes between them are not on record, so the dtype that fits counts."""
    stored, ways, drawn = history.stored, history.ways, history.drawn
    narrow, wide = _read(stored) if drawn is None else None, _read(grown)
    best = TensorDifference(name, math.inf, math.inf, math.inf)
    for between in dict.fromkeys((stored.dtype, grown.dtype, torch.bfloat16, torch.float16)):
        first = between if ways else grown.dtype
        expected = narrow if narrow is not None else drawn.whole(stored.shape, first)  # type: ignore[union-attr]
        for number, (step, planned) in enumerate(ways, 1):
            dtype = grown.dtype if number == len(ways) else between
            expected = _grown(name, expected, planned, step, dtype)
        if expected.shape != wide.shape:
            raise MupscaleError(
                f"the wide checkpoint is not an upscaled version of the small one: '{name}' should have shape "
                f"{tuple(expected.shape)}, but has {tuple(wide.shape)}"
            )
        whole = _relative_difference(expected, wide)
        once = len(ways) + (drawn is not None) <= 1
        if whole < best.whole or once:
            old = _is_old(ways) if any(not step.grow.needs_multiples for step, _ in ways) else None
            both = (0.0, whole) if history.in_new_layer else _of_both(expected, wide, old, whole)
            best = TensorDifference(name, whole, *both)
        if best.whole <= limit or once:
            break
    return best


def _is_old(ways: Sequence[tuple[PlannedGrowth, str]]) -> Tensor:
    """Which entries of the wide tensor are the small one's, or copies of them."""
    old = torch.ones(ways[0][0].plan[ways[0][1]].narrow, dtype=torch.bool)
    for step, planned in ways:
        entry = step.plan[planned]
        if step.grow.needs_multiples:
            old = expand(old, entry.axes)
        else:
            among = torch.zeros(entry.wide, dtype=torch.bool)
            among[index_of_old(entry.narrow, entry.axes)] = old
            old = among
    return old


def _of_both(expected: Tensor, wide: Tensor, old: Tensor | None, whole: float) -> tuple[float, float]:
    """The differences of old and of new entries."""
    if old is None:
        return whole, 0.0
    return _relative_difference(expected[old], wide[old]), _relative_difference(expected[~old], wide[~old])


def rounding_limit(small: Source, wide: Source) -> float:
    """What the differences may be where another machine rounds otherwise: in float32, which 16 bits hardly show."""
    dtypes = {stored.dtype for source in (small, wide) for stored in source.tensors.values()}
    eps = (torch.finfo(d).eps / (1 if d.itemsize > 2 else 8) for d in dtypes if d.is_floating_point)
    return max(eps, default=0.0)


def is_exact(entries: Mapping[str, Entry]) -> bool:
    """Whether nothing is rounded: every factor is a power of two, and nothing is added.

    >>> from mupscale.core import Axis
    >>> is_exact({"readout": Entry((1, 4), (1, 8), {1: Axis(2, side="in")})})
    True
    >>> is_exact({"readout": Entry((1, 4), (1, 12), {1: Axis(3, side="in")})})
    False
    """
    return all(math.frexp(entry.rule.weight)[0] == 0.5 and not entry.shift for entry in entries.values())


def _check_names(ours: Collection[str], theirs: Collection[str]) -> None:
    """ours: as the small checkpoint's become. theirs: the wide one's."""
    for one, other, which, whose in ((ours, theirs, "wide", "small"), (theirs, ours, "small", "wide")):
        if lacking := {*one} - {*other}:
            raise MupscaleError(
                f"the wide checkpoint is not an upscaled version of the small one: the {which} one lacks "
                f"'{min(lacking)}', which the {whose} one has"
            )


def _grown(name: str, narrow: Tensor, planned: str, step: PlannedGrowth, dtype: torch.dtype) -> Tensor:
    entry = step.plan[planned]
    if tuple(narrow.shape) != entry.narrow:
        raise MupscaleError(f"'{name}' has shape {tuple(narrow.shape)}, but should have {entry.narrow} by the config")
    if not narrow.is_floating_point():
        return narrow
    exact, part = _exact(narrow.dtype), Part(planned, step.plan, step.seed, draws=step.draws)
    if type(step.grow) is not Copies or step.grow.paired:
        out = torch.empty(entry.wide, dtype=dtype if isinstance(step.grow, Fresh) else exact)
        step.grow.parameter(out, narrow if isinstance(step.grow, Fresh) else narrow.to(exact), part)
        return out.to(dtype)
    noise, wide = as_noise(step.grow.noise), entry.widened(narrow.to(exact, copy=True), overwrite=True)
    if isinstance(noise, GaussianNoise) and planned in step.plan.parameters and noise.of(planned):
        level = noise.of(planned) * unit_std(step.plan, planned, noise.unit)
        wide.add_(standard_normal(entry.wide, exact, step.seed, planned, step.draws), alpha=level)
    return wide.to(dtype)


def _exact(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _read(stored: StoredTensor) -> Tensor:
    with open(stored.file, "rb", buffering=0) as file:
        return read_into(torch.empty(stored.shape, dtype=stored.dtype), file, stored.start)


def _relative_difference(expected: Tensor, actual: Tensor) -> float:
    """‖expected − actual‖ / ‖expected‖; infinite where anything is not finite."""
    off = norm = 0.0
    for a, b in zip(expected.flatten().split(_AT_A_TIME), actual.flatten().split(_AT_A_TIME), strict=True):
        off += float((a.double() - b.double()).square().sum())
        norm += float(a.double().square().sum())
    value = math.sqrt(off / norm) if norm and off == off else math.sqrt(off)
    return value if value == value else math.inf
