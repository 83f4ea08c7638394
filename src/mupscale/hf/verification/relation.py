"""How a wide checkpoint came from a small one: the growths that lie between them, and the plans of these."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from mupscale.core import Axis, Plan, places
from mupscale.growth import Copies, Fresh, is_replica, word_of_operator
from mupscale.hf.describe import Config, ConfigFamily, Times, experts_of, family_of_config, grown, layers_of
from mupscale.hf.files import RECORD_FILE, GrowthStep, Record, Source, plan_growth
from mupscale.hf.verification.weights import PlannedGrowth
from mupscale.system import MupscaleError


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
        """How much wider, in all."""
        return reduce(lambda total, growth: total * growth.times, self.growths, Times())

    @property
    def family(self) -> ConfigFamily:
        """The small model's."""
        return family_of_config(self.small.config)

    @property
    def noisy(self) -> bool:
        """Whether units were made to differ from copies on the way, by noise or otherwise."""
        return bool(self._draws)

    @property
    def _draws(self) -> list[str]:
        """What makes copies differ, in words: noise, or the operator's own word."""
        grown = [g.grow for g in self.growths if g.is_width and g.fresh is None and not is_replica(g.grow)]
        return list(dict.fromkeys("noise" if type(one) is Copies else word_of_operator(one) for one in grown))

    @property
    def fresh(self) -> Fresh | None:
        """How it last grew by fresh units; None where all growths are copies."""
        return next((growth.fresh for growth in reversed(self.growths) if growth.fresh is not None), None)

    @property
    def deepened(self) -> tuple[GrowthStep, ...]:
        """The growths by which it became deeper, or a mixture."""
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
        stacked = any(growth.deepen != "identity" for growth in self.deepened)
        movers = ["copied layers"] * stacked + ["copied experts"] * self._moved_by_experts
        return movers + self._draws + ["fresh units"] * (self.fresh is not None)

    @property
    def _moved_by_experts(self) -> bool:
        """Whether there are more experts, and not as many more that are active."""
        config, moved = self.small.config, False
        for growth in self.growths:
            moved = moved or (growth.experts is not None and not growth.experts.keeps_function(config))
            config = growth.config_after(config)
        return moved

    def old_units(self, n: int) -> Tensor:
        """Where the n hidden units of the small model lie in the wide one; of copies, the first."""
        units, size = torch.arange(n), n
        for growth in self.growths:
            units = places(Axis(growth.times.hidden), size)[units]
            size = grown(size, growth.times.hidden)
        return units

    def steps(self) -> Iterator[PlannedGrowth]:
        """Each growth with its plan, for the tensors of the files."""
        config, shapes, record = self.small.config, self.small.shapes, self.before
        for growth in self.growths:
            by_model = None
            if not growth.is_width:
                plan = growth.plan_files(shapes, config, record)
                yield PlannedGrowth(plan, Copies(), growth.seed)
                shapes = {name: entry.wide for name, entry in plan.parameters.items()}
            else:
                recorded = self.plan if len(self.growths) == 1 else None
                fresh = not is_replica(growth.grow)
                plan, by_model = plan_growth(record, config, growth.times, shapes, recorded=recorded, initial=fresh)
                yield PlannedGrowth(plan, growth.grow, growth.seed)
                shapes = {name: plan[plan.names.get(name, name)].wide for name in shapes}
            record = (record or Record(config)).then(growth, by_model)
            config = growth.config_after(config)

    def whole_plan(self) -> Plan:
        """All that became wider, by the names of the small model's parameters."""
        return self.family.plan(self.times, initial=self.fresh is not None) if self.plan is None else self.plan


def find_record(source: Source) -> Record | None:
    """mupscale.json beside a checkpoint, if it is there; refused where it tells of another model than config.json."""
    record = Record.find(source.folder)
    if record is None:
        return None
    advice = f"copy the right {RECORD_FILE} there, or remove it to count learning rates from this checkpoint"
    if not _same_sizes(_config_after(record.config, record.growths), source.config):
        first, now = _sizes_in_words(record.config), _sizes_in_words(source.config)
        raise MupscaleError(
            f"{source.folder / RECORD_FILE} describes a model that grew {record.in_words} from {first}, but "
            f"config.json beside it has {now}: {advice}"
        )
    if (tied := family_of_config(record.config).is_tied()) != family_of_config(source.config).is_tied():
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
        if _same_sizes(_config_after(small.config, growths), wide.config):
            whole = plan if plan is not None else record.plan if start == 0 and len(growths) == 1 else None
            return Relation(small, wide, growths, whole, before or _before(record, start))
    raise _unrelated(
        f"by its {RECORD_FILE} it grew {record.in_words} from {_sizes_in_words(record.config)}, and the small one "
        f"has {_sizes_in_words(small.config)}"
    )


def _before(record: Record, start: int) -> Record | None:
    """What mupscale.json of the small model would say, by the wide one's, where later growths count from the first."""
    before: Record | None = None
    if not all(is_replica(growth.grow) for growth in record.growths[start:]):
        config: Config = record.config
        for growth in record.growths[:start]:
            plan = family_of_config(config).plan(growth.times, initial=False) if growth.is_width else None
            before, config = (before or Record(config)).then(growth, plan), growth.config_after(config)
    return before


def _unrelated(why: str) -> MupscaleError:
    return MupscaleError(f"the wide checkpoint is not an upscaled version of the small one: {why}")


def _config_after(config: Config, growths: tuple[GrowthStep, ...]) -> Config | None:
    """The config after these growths; None where it cannot grow so."""
    try:
        return reduce(lambda grown, growth: growth.config_after(grown), growths, config)
    except MupscaleError:
        return None


def _sizes(config: Config) -> dict[str, Any]:
    layers = layers_of(config)
    experts = {} if (counts := experts_of(config)) == (1, 1) else dict(zip(("experts", "top_k"), counts, strict=True))
    return {**family_of_config(config).sizes(), **({} if layers is None else {"layers": layers}), **experts}


def _same_sizes(one: Config | None, other: Config) -> bool:
    """Whether the sizes that both configs say are the same; one may leave out what follows from others."""
    if one is None:
        return False
    ours, theirs = _sizes(one), _sizes(other)
    return one.get("model_type") == other.get("model_type") and all(
        ours[name] == theirs[name] for name in ours.keys() & theirs.keys()
    )


def _sizes_in_words(config: Config) -> str:
    return ", ".join(f"{name} {size}" for name, size in _sizes(config).items())


def _times_between(small: Source, wide: Source) -> Times:
    """Without a record: by the ratios of the configs."""
    few, many = (family_of_config(source.config).parts() for source in (small, wide))
    if (
        "hidden" in few
        and few.keys() == many.keys() <= {"hidden", "ffn", "heads", "kv"}
        and all(many[n] % few[n] == 0 for n in few)
    ):
        ratios = {name: many[name] // size for name, size in few.items()}
        times = Times(**{"ffn": ratios["hidden"], "kv": ratios.get("heads", 1), **ratios})
        if _same_sizes(_config_after(small.config, (GrowthStep(times),)), wide.config):
            return times
    raise _unrelated(f"it has {_sizes_in_words(wide.config)} and the small one {_sizes_in_words(small.config)}")
