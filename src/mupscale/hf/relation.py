"""How a wide checkpoint came from a small one: the growths that lie between them, their plans, and what they move.

The tensors of its files are the small one's, grown, with the noise or the units that were drawn for them. They are
compared one at a time, and the one that is wrong is named.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any

import torch
from torch import Tensor

from mupscale.core import Axis, Entry, Plan, expand, index_of_old, places
from mupscale.growth import Copies, Fresh, Part, is_replica, word_of_operator
from mupscale.hf.building import Config
from mupscale.hf.config_family import ConfigFamily
from mupscale.hf.config_fields import parts_of, sizes_of
from mupscale.hf.depths import experts_of, layers_of
from mupscale.hf.multipliers import PARTS, Times, grown
from mupscale.hf.record import RECORD_FILE, GrowthStep, History, PlannedGrowth, Record, names_after, plan_growths, trace
from mupscale.hf.source import Source, StoredTensor
from mupscale.system import MupscaleError

_AT_A_TIME = 1 << 22  # entries that are compared in double precision at a time


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
    names, held = names_after(small.tensors, steps), wide.tensors
    for one, other, which, whose in ((names, held, "wide", "small"), (held, names, "small", "wide")):
        if lacking := {*one} - {*other}:
            raise _unrelated(f"the {which} one lacks '{min(lacking)}', which the {whose} one has")
    limit = rounding_limit(small, wide)
    for name in names:
        yield _difference(name, small, wide.tensors[name], trace(name, steps), limit)


def _difference(name: str, small: Source, grown: StoredTensor, history: History, limit: float) -> TensorDifference:
    """Of several growths the dtypes between them are not on record, so the dtype that fits counts."""
    stored, ways, drawn = small.tensors[history.name], history.ways, history.drawn
    narrow, wide = stored.read() if drawn is None else None, grown.read()
    best = TensorDifference(name, math.inf, math.inf, math.inf)
    for between in dict.fromkeys((stored.dtype, grown.dtype, torch.bfloat16, torch.float16)):
        first = between if ways else grown.dtype
        expected = narrow if drawn is None else drawn.whole(history.shape, first)
        assert expected is not None
        for number, (step, planned) in enumerate(ways, 1):
            expected = _grown(name, expected, planned, step, grown.dtype if number == len(ways) else between)
        if expected.shape != wide.shape:
            raise _unrelated(f"'{name}' should have shape {tuple(expected.shape)}, but has {tuple(wide.shape)}")
        whole = _relative_difference(expected, wide)
        once = len(ways) + (drawn is not None) <= 1
        if whole < best.whole or once:
            both = (0.0, whole) if history.in_new_part else (whole, 0.0)
            if not history.in_new_part and any(not step.growth.grow.needs_multiples for step, _ in ways):
                old = torch.ones(ways[0][0].plan[ways[0][1]].narrow, dtype=torch.bool)  # or copies of old ones
                for entry, is_copied in ((s.plan[planned], s.growth.grow.needs_multiples) for s, planned in ways):
                    among = torch.zeros(entry.wide, dtype=torch.bool)
                    if not is_copied:
                        among[index_of_old(entry.narrow, entry.axes)] = old
                    old = expand(old, entry.axes) if is_copied else among
                new = _relative_difference(expected[~old], wide[~old])
                both = _relative_difference(expected[old], wide[old]), new
            best = TensorDifference(name, whole, *both)
        if best.whole <= limit or once:
            break
    return best


def rounding_limit(small: Source, wide: Source) -> float:
    """What the differences may be where another machine rounds otherwise: in float32, which 16 bits hardly show."""
    dtypes = {stored.dtype for source in (small, wide) for stored in source.tensors.values()}
    eps = (torch.finfo(d).eps / (1 if d.itemsize > 2 else 8) for d in dtypes if d.is_floating_point)
    return max(eps, default=0.0)


def is_exact(entries: Mapping[str, Entry]) -> bool:
    """Whether nothing is rounded: every factor is a power of two, and nothing is added."""
    return all(math.frexp(entry.rule.weight)[0] == 0.5 and not entry.shift for entry in entries.values())


def _grown(name: str, narrow: Tensor, planned: str, step: PlannedGrowth, dtype: torch.dtype) -> Tensor:
    entry = step.plan[planned]
    if tuple(narrow.shape) != entry.narrow:
        raise MupscaleError(f"'{name}' has shape {tuple(narrow.shape)}, but should have {entry.narrow} by the config")
    if not narrow.is_floating_point():
        return narrow
    exact = dtype
    if not isinstance(step.growth.grow, Fresh):
        exact = torch.promote_types(narrow.dtype, torch.float32)
        narrow = narrow.to(exact)
    out = torch.empty(entry.wide, dtype=exact)
    step.growth.grow.parameter(out, narrow, Part(planned, step.plan, step.growth.seed))
    return out.to(dtype)


def _relative_difference(expected: Tensor, actual: Tensor) -> float:
    """‖expected − actual‖ / ‖expected‖; infinite where anything is not finite."""
    off = norm = 0.0
    for a, b in zip(expected.flatten().split(_AT_A_TIME), actual.flatten().split(_AT_A_TIME), strict=True):
        off += float((a.double() - b.double()).square().sum())
        norm += float(a.double().square().sum())
    value = math.sqrt(off / norm) if norm and off == off else math.sqrt(off)
    return value if value == value else math.inf


@dataclass(frozen=True)
class Relation:
    """Two checkpoints, and the growths that lead from the one to the other.

    plan: of all of them in one, where the caller or mupscale.json has it. before: how the small one had grown.
    """

    small: Source
    wide: Source
    growths: tuple[GrowthStep, ...]
    plan: Plan | None = None
    before: Record | None = None

    @property
    def times(self) -> Times:
        return reduce(lambda total, growth: total * growth.times, self.growths, Times())

    @property
    def draws(self) -> list[str]:
        """What makes copies differ, in words: noise, or the operator's own word."""
        grown = [g.grow for g in self.growths if g.is_width and g.fresh is None and not is_replica(g.grow)]
        return list(dict.fromkeys("noise" if type(one) is Copies else word_of_operator(one) for one in grown))

    @property
    def fresh(self) -> Fresh | None:
        """How it last grew by fresh units; None where all growths are copies."""
        return next((growth.fresh for growth in reversed(self.growths) if growth.fresh is not None), None)

    @property
    def deepened(self) -> tuple[GrowthStep, ...]:
        return tuple(growth for growth in self.growths if not growth.is_width)

    @property
    def deepened_after_fresh(self) -> GrowthStep | None:
        """The growth to more layers that are identity, where one by fresh units came before it, and no other."""
        if len(self.growths) != 2 or self.growths[0].fresh is None:
            return None
        later = self.growths[1]
        return later if later.layers is not None and later.deepen == "identity" else None

    @property
    def movers(self) -> list[str]:
        """What makes the larger model compute something else, in words."""
        stacked, routed, config = any(growth.deepen != "identity" for growth in self.deepened), False, self.small.config
        for growth in self.deepened:
            routed = routed or (growth.experts is not None and not growth.experts.keeps_function(config))
            config = growth.config_after(config)
        movers = ["copied layers"] * stacked + ["copied experts"] * routed
        return movers + self.draws + ["fresh units"] * (self.fresh is not None)

    def old_units(self, n: int) -> Tensor:
        """Where the n hidden units of the small model lie in the wide one; of copies, the first."""
        units, size = torch.arange(n), n
        for growth in self.growths:
            units = places(Axis(growth.times.hidden), size)[units]
            size = grown(size, growth.times.hidden)
        return units

    @cached_property
    def steps(self) -> list[PlannedGrowth]:
        recorded = self.plan if len(self.growths) == 1 else None
        return plan_growths(self.growths, self.small.config, self.small.shapes, self.before, recorded)

    def whole_plan(self) -> Plan:
        """All that became wider, by the names of the small model's parameters."""
        if self.plan is not None:
            return self.plan
        return ConfigFamily(self.small.config).plan(self.times, initial=self.fresh is not None)


def find_record(source: Source) -> Record | None:
    """mupscale.json beside a checkpoint, if it is there; refused where it tells of another model than config.json."""
    record = Record.find(source.folder)
    if record is None:
        return None
    advice = f"copy the right {RECORD_FILE} there, or remove it to count learning rates from this checkpoint"
    if not _becomes(record.config, record.growths, source.config):
        first, now = _sizes_in_words(record.config), _sizes_in_words(source.config)
        raise MupscaleError(
            f"{source.folder / RECORD_FILE} describes a model that grew {record.in_words} from {first}, but "
            f"config.json beside it has {now}: {advice}"
        )
    if (tied := ConfigFamily(record.config).is_tied()) != ConfigFamily(source.config).is_tied():
        raise MupscaleError(
            f"by {source.folder / RECORD_FILE} the model's readout was {'' if tied else 'not '}"
            f"its embedding when it grew, and by config.json beside it that has changed: {advice}"
        )
    return record


def relate(small: Source, wide: Source, plan: Plan | None = None) -> Relation:
    """The growths from the one to the other by mupscale.json and both configs, or an error that says what is wrong.

    plan: between the two, where there is no record of it.
    """
    record = Record.find(wide.folder)
    became = record is not None and any(growth.experts is not None for growth in record.growths)
    if small.model_type != wide.model_type and not became:
        raise _unrelated(f"the small one is a {small.model_type} model and the wide one a {wide.model_type}")
    if record is None:
        if plan is not None:
            return Relation(small, wide, (GrowthStep(Times()),), plan)
        return Relation(small, wide, (GrowthStep(_times_between(small, wide)),))
    before = Record.find(small.folder)
    count = len(record.growths)
    starts = range(count + 1) if before is None else [len(before.growths)]
    for start in starts:
        growths = record.growths[start:]
        if _becomes(small.config, growths, wide.config):
            whole = plan if plan is not None else record.plan if start == 0 and len(growths) == 1 else None
            return Relation(small, wide, growths, whole, before or _before(record, start))
    raise _unrelated(
        f"by its {RECORD_FILE} it grew {record.in_words} from {_sizes_in_words(record.config)}, and the small one "
        f"has {_sizes_in_words(small.config)}"
    )


def _before(record: Record, start: int) -> Record | None:
    """What mupscale.json of the small model would say, by the wide one's, where later growths count from the first."""
    before, config = None, dict(record.config)
    for growth in record.growths[:start] if any(growth.draws for growth in record.growths[start:]) else ():
        plan = ConfigFamily(config).plan(growth.times, initial=False) if growth.is_width else None
        before, config = (before or Record(config)).then(growth, plan), growth.config_after(config)
    return before


def _unrelated(why: str) -> MupscaleError:
    return MupscaleError(f"the wide checkpoint is not an upscaled version of the small one: {why}")


def _sizes(config: Config) -> dict[str, Any]:
    layers = layers_of(config)
    experts = {} if (counts := experts_of(config)) == (1, 1) else dict(zip(("experts", "top_k"), counts, strict=True))
    return {**sizes_of(config), **({} if layers is None else {"layers": layers}), **experts}


def _becomes(config: Config, growths: tuple[GrowthStep, ...], other: Config) -> bool:
    """Whether these growths lead to the other's sizes, as far as both say them: one may leave out what follows."""
    with suppress(MupscaleError):  # which cannot grow so
        one = reduce(lambda grown, growth: growth.config_after(grown), growths, config)
        ours, theirs = _sizes(one), _sizes(other)
        same = all(ours[name] == theirs[name] for name in ours.keys() & theirs.keys())
        return same and one.get("model_type") == other.get("model_type")
    return False


def _sizes_in_words(config: Config) -> str:
    return ", ".join(f"{name} {size}" for name, size in _sizes(config).items())


def _times_between(small: Source, wide: Source) -> Times:
    """Without a record: by the ratios of the configs."""
    few, many = (parts_of(source.config) for source in (small, wide))
    known = "hidden" in few and few.keys() == many.keys() <= PARTS.keys()
    if known and all(many[name] % size == 0 for name, size in few.items()):
        ratios = {name: many[name] // size for name, size in few.items()}
        times = Times.named({"ffn": ratios["hidden"], **ratios})
        if _becomes(small.config, (GrowthStep(times),), wide.config):
            return times
    raise _unrelated(f"it has {_sizes_in_words(wide.config)} and the small one {_sizes_in_words(small.config)}")
