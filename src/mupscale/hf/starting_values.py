"""Do new units in a checkpoint's files start as transformers starts a model?

The files hold what was drawn by the laws of a plan, so drawing it again by these laws shows nothing of a wrong one.
Here transformers' own initialisation of the first model, at its real size, says what is right: its mean and its spread
are carried by μP's factors and compared with those of the new entries. One tensor of each kind is enough.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor

from mupscale.core import Axis, Entry, Plan, part_of_units, places, whole_blocks
from mupscale.growth import Fresh, silent_start
from mupscale.hf.building import sketch_model
from mupscale.hf.built_values import build_tensors
from mupscale.hf.config_family import names_in_model
from mupscale.hf.record import PlannedGrowth, trace
from mupscale.hf.source import Source, StoredTensor
from mupscale.system import generator, pattern_of_name

ALLOWED = 6.0
"""Standard errors that chance does not reach."""

_SLACK = 0.005  # of the spread, beside what chance explains, for what laws leave out
_LEAST = 256  # entries whose mean and spread say something
_LOOKED_AT = 1 << 22  # entries of a tensor, at most
_LARGEST = 1 << 26  # entries of a tensor that is read for this
_AT_ONCE = 1 << 24  # entries of the tensors that transformers initialises at a time
_MOST_PARTS = 4  # equal parts of an axis that are compared each for itself


class Start(NamedTuple):
    """What was found of the new units: of how many tensors, how far off, in standard errors, and which is wrong."""

    tensors: int
    errors: float
    name: str = ""
    why: str = ""

    @property
    def ok(self) -> bool:
        """Whether chance explains it."""
        return self.errors <= ALLOWED


def compare_start(small: Source, wide: Source, steps: Sequence[PlannedGrowth]) -> Start:
    """Of one tensor of each kind: the new units of the last growth that drew any, against transformers' own start.

    Those that were drawn as large as trained ones have become are compared with the trained entries instead.
    """
    found = Start(0, 0.0)
    for sample, reference in _initialised(list(_one_of_each_kind(wide, steps))):
        trained = None
        if sample.fresh.spread == "trained":
            if not sample.source:
                continue
            trained = small.tensors[sample.source].read()
        offs = list(_deviations(sample, reference, trained))
        if not offs:
            continue
        errors, why = max(offs, key=lambda off: off[0])
        count = found.tensors + 1
        found = Start(count, errors, sample.name, why) if errors > found.errors else found._replace(tensors=count)
    return found


class _Sample(NamedTuple):
    """A tensor of the files, the growth that drew its new units, and what it is of the first model.

    source: what it is of the small checkpoint, if it grew in this growth alone. whole: from the first model on.
    """

    name: str
    stored: StoredTensor
    step: PlannedGrowth
    planned: str
    source: str
    own: str
    whole: Entry

    @property
    def entry(self) -> Entry:
        return self.step.plan[self.planned]

    @property
    def fresh(self) -> Fresh:
        fresh = self.step.growth.fresh
        assert fresh is not None
        return fresh


def _one_of_each_kind(wide: Source, steps: Sequence[PlannedGrowth]) -> Iterator[_Sample]:
    """The first layer's of each; neither patterns, which are compared as a whole, nor what is too large to be read."""
    seen, first_models = set(), dict[int, _FirstModel]()
    for name, stored in wide.tensors.items():
        kind = pattern_of_name(name), stored.shape
        history = trace(name, steps)
        is_one_more = kind not in seen and history.drawn is None and bool(history.ways)
        if not is_one_more or not stored.dtype.is_floating_point or stored.numel > _LARGEST:
            continue
        step, planned = history.ways[-1]
        if step.growth.fresh is None or planned in step.plan.patterned or step.plan[planned].narrow == stored.shape:
            continue
        if id(step) not in first_models:
            first_models[id(step)] = _FirstModel.of(step)
        own, whole = first_models[id(step)].find(planned)
        if whole is None or whole.wide != stored.shape:  # as where a model stacks what lies apart in files
            continue
        seen.add(kind)
        source = history.name if len(history.ways) == 1 else ""
        yield _Sample(name, stored, step, planned, source, own, whole)


class _FirstModel(NamedTuple):
    """What a growth's tensors are called in the first model, and how they grew from there on."""

    own_names: dict[str, str]
    plan: Plan

    @classmethod
    def of(cls, step: PlannedGrowth) -> _FirstModel:
        held = names_in_model(sketch_model(step.record.first_config), step.plan.parameters)
        return cls({name: in_model.names[0] for name, in_model in held.items()}, step.record.whole_plan())

    def find(self, planned: str) -> tuple[str, Entry | None]:
        """The name, and the growth as an entry; none where the plan has no such tensor."""
        own = self.own_names.get(planned, planned)
        return own, self.plan[self.plan.names[own]] if own in self.plan.names else None


def _initialised(samples: list[_Sample]) -> Iterator[tuple[_Sample, Tensor]]:
    """Each with the tensor as transformers starts it in the first model; without those that it cannot make alone."""
    pieces, size = list[list[_Sample]](), _AT_ONCE
    for sample in samples:
        numbers = math.prod(sample.whole.narrow)
        is_another = size + numbers > _AT_ONCE or sample.step is not pieces[-1][-1].step
        if is_another:
            pieces.append([])
        size = numbers + (0 if is_another else size)
        pieces[-1].append(sample)
    for piece in pieces:
        built = _built(piece)
        if built is None:
            built = {name: values for one in piece for name, values in (_built([one]) or {}).items()}
        for sample in piece:
            values = built.pop(sample.name, None)
            if values is not None and tuple(values.shape) == sample.whole.narrow:
                yield sample, values


def _built(samples: list[_Sample]) -> dict[str, Tensor] | None:
    with suppress(Exception):  # whatever an initialisation says to tensors that have no memory
        return build_tensors(samples[0].step.record.first_config, {one.name: one.own for one in samples})
    return None


# ---------------------------------------------------------------------------------------- one tensor


class _Some(NamedTuple):
    """Some entries of a tensor: all that lie where these units of each of its dimensions meet."""

    values: Tensor
    units: list[Tensor]

    @classmethod
    def of(cls, tensor: Tensor) -> _Some:
        """At most as many as are looked at; chosen at random, since new units come at even distances."""
        left, units = _LOOKED_AT, dict[int, Tensor]()
        by_size = sorted(range(tensor.dim()), key=lambda d: tensor.shape[d])
        for position, d in enumerate(by_size):
            size = tensor.shape[d]
            count = min(size, max(1, math.floor(left ** (1 / (tensor.dim() - position)))))
            order = torch.randperm(size, generator=generator(0, size)) if count < size else torch.arange(size)
            units[d] = order[:count].sort().values
            left //= count
        for d, chosen in units.items():
            tensor = tensor if len(chosen) == tensor.shape[d] else tensor.index_select(d, chosen)
        return cls(tensor.double(), [units[d] for d in range(tensor.dim())])

    def along(self, dim: int, by_unit: Tensor) -> Tensor:
        """From one value for each unit of a dimension to one for each entry."""
        shape = [-1 if d == dim else 1 for d in range(self.values.dim())]
        return by_unit[self.units[dim]].view(shape).expand(self.values.shape)

    def without_padding(self, among: Tensor, entry: Entry) -> Tensor:
        """Which of these entries are in no row of zeros, of a matrix with one dimension that is no width."""
        rows = [d for d in range(among.dim()) if d not in entry.axes]
        if among.dim() != 2 or len(rows) != 1:
            return among
        is_used = ((self.values != 0) & among).any(dim=1 - rows[0], keepdim=True)
        return among & is_used if bool(is_used.any()) else among


def _deviations(sample: _Sample, reference: Tensor, trained: Tensor | None) -> Iterator[tuple[float, str]]:
    """How far mean and spread of each part of the new entries are off, in standard errors, and a word on it.

    trained: the tensor of the small checkpoint, whose spread new units take instead.
    """
    entry, whole = sample.entry, sample.whole
    dims, share = _drawn_region(sample)
    if not dims:
        return
    found, start = _Some.of(sample.stored.read()), _Some.of(reference)
    is_new = torch.zeros_like(found.values, dtype=torch.bool)
    for d in dims:
        is_new |= found.along(d, _is_new_unit(entry, d))
    is_new = found.without_padding(is_new, entry)
    is_used = start.without_padding(torch.ones_like(start.values, dtype=torch.bool), whole)

    fold, offset = float(whole.fold), float(whole.offset)
    for words, dim, ours, theirs in _parts(entry, whole, is_whole=trained is not None):
        new = found.values[is_new & found.along(dim, theirs)]
        old = start.values[is_used & start.along(dim, ours)]
        if not len(new) or not len(old):
            continue
        mean = share * (float(old.mean()) * fold + offset * (fold - 1))
        if bool((old == old[0]).all()):
            yield _compare_constant(words, new, mean, torch.finfo(sample.stored.dtype).eps)
            continue
        factor = whole.init
        if trained is not None:
            some = _Some.of(trained)
            values = some.values[some.without_padding(torch.ones_like(some.values, dtype=torch.bool), entry)]
            old, factor = torch.cat([values - mean, mean - values]), entry.init  # the spread is that about the mean
        yield from _compare_drawn(words, new, old, mean, share * factor)


def _drawn_region(sample: _Sample) -> tuple[tuple[int, ...], float]:
    """The dimensions whose new units have entries that are all drawn, and their share of what is drawn.

    New outputs where there are any, else new inputs; no dimensions where a growth without loss leaves nothing drawn.
    """
    plan, fresh, entry = sample.step.plan, sample.fresh, sample.entry
    outgoing, outputs = silent_start(sample.planned, entry, plan) if fresh.lossless else (fresh.outgoing, "drawn")
    growing = [d for d, axis in entry.axes.items() if axis.times != 1]
    of_outputs = tuple(d for d in growing if d not in entry.in_)
    if of_outputs:
        return (of_outputs, 1.0) if outputs == "drawn" else ((), 0.0)
    return (tuple(growing), outgoing) if outgoing else ((), 0.0)


def _is_new_unit(entry: Entry, dim: int) -> Tensor:
    is_new = torch.ones(entry.wide[dim], dtype=torch.bool)
    is_new[places(entry.axes[dim], entry.narrow[dim])] = False
    return is_new


def _parts(entry: Entry, whole: Entry, *, is_whole: bool) -> Iterator[tuple[str, int, Tensor, Tensor]]:
    """What is compared each for itself: words, a dimension, and which of its units in the first and the wide model.

    The sections of a packed axis, or two to some equal parts where old units stay in theirs; and the whole tensor.
    """
    everything = [torch.ones(shape[0], dtype=torch.bool) for shape in (whole.narrow, whole.wide)]
    has_sections = any(axis.sections for axis in entry.axes.values())
    if is_whole or not has_sections:
        yield "New units", 0, everything[0], everything[1]
    for dim, axis in {} if is_whole else entry.axes.items():
        first, narrow, wide = whole.narrow[dim], entry.narrow[dim], entry.wide[dim]
        if axis.sections:
            ours, theirs = [n for n, _ in axis.at(first).sections], _wide_lengths(axis)
            labels = [(torch.arange(len(ours)).repeat_interleave(torch.tensor(each))) for each in (ours, theirs)]
            yield from _each_part(dim, len(ours), labels[0], labels[1])
            continue
        for count in range(2, _MOST_PARTS + 1):
            if first % count or narrow % count or wide % count:
                continue
            now = part_of_units(wide, count)
            if torch.equal(now[places(axis, narrow)], part_of_units(narrow, count)):
                yield from _each_part(dim, count, part_of_units(first, count), now)


def _wide_lengths(axis: Axis) -> list[int]:
    return [whole_blocks(axis, length, block) * block for length, block in axis.sections]


def _each_part(dim: int, count: int, ours: Tensor, theirs: Tensor) -> Iterator[tuple[str, int, Tensor, Tensor]]:
    for part in range(count):
        yield f"New units in part {part + 1} of {count} of dimension {dim}", dim, ours == part, theirs == part


def _compare_constant(words: str, new: Tensor, value: float, eps: float) -> tuple[float, str]:
    off = float((new - value).abs().max())
    is_same = off <= 4 * eps * abs(value)
    return 0.0 if is_same else math.inf, f"{words} are up to {off:.4g} away from the constant {value:.4g}"


def _compare_drawn(words: str, new: Tensor, old: Tensor, mean: float, factor: float) -> Iterator[tuple[float, str]]:
    """Mean and spread of new entries against this mean, and the spread of the others times the factor."""
    if min(len(new), len(old)) < _LEAST:
        return
    spread, right = float(new.std(correction=0)), float(old.std(correction=0)) * factor
    error = right * math.sqrt(1 / len(new) + 1 / len(old) + _SLACK**2)
    yield abs(float(new.mean()) - mean) / error, f"{words} have a mean of {float(new.mean()):.4g} and not {mean:.4g}"
    error = math.sqrt(_error_of_spread(new) ** 2 + _error_of_spread(old) ** 2 + _SLACK**2)
    off = abs(math.log(spread / right)) / error if spread else math.inf
    yield off, f"{words} have a standard deviation of {spread:.4g} and not {right:.4g}"


def _error_of_spread(values: Tensor) -> float:
    """The standard error of a standard deviation, relatively."""
    squares = (values - values.mean()).square()
    variance = float(squares.mean())
    return float(squares.std(correction=0)) / math.sqrt(len(values)) / (2 * variance) if variance else 0.0
