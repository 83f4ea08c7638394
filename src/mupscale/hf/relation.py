"""How a wide checkpoint came from a small one: the growths that lie between them, and the plans of these."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

from mupscale.core import Plan, Shape
from mupscale.growth import GaussianNoise
from mupscale.hf import generic
from mupscale.hf.architecture import Architecture
from mupscale.hf.architectures import known
from mupscale.hf.growth import Times
from mupscale.hf.record import FILE, Growth, Record
from mupscale.hf.source import Source
from mupscale.hf.weights import Step
from mupscale.system import MupscaleError

Config = Mapping[str, Any]


@dataclass(frozen=True)
class Relation:
    """Two checkpoints, and the growths that lead from the one to the other.

    plan: of all of them together, where it is known from elsewhere than a description.
    """

    small: Source
    wide: Source
    growths: tuple[Growth, ...]
    plan: Plan | None = None

    @property
    def times(self) -> Times:
        """How much wider, in all."""
        return reduce(lambda total, growth: total * growth.times, self.growths, Times())

    @property
    def described(self) -> bool:
        """Whether a description of the architecture is known."""
        return _described(self.small.config) is not None

    @property
    def noisy(self) -> bool:
        """Whether noise was added on the way."""
        noises = [growth.noise for growth in self.growths]
        return any(any(n.values()) if isinstance(n, Mapping) else n for n in noises)

    def steps(self) -> Iterator[Step]:
        """Each growth with its plan, for the tensors of the files."""
        config, shapes = self.small.config, self.small.shapes
        for growth in self.growths:
            plan = self._files_plan(config, growth, shapes)
            yield Step(plan, GaussianNoise(growth.noise, growth.unit), growth.seed)
            config = _grown(config, growth.times)
            shapes = {name: plan[plan.names.get(name, name)].wide for name in shapes}

    def _files_plan(self, config: Config, growth: Growth, shapes: Mapping[str, Shape]) -> Plan:
        architecture = _described(config)
        if architecture is not None:
            return architecture.plan(config, growth.times, shapes)
        return generic.plan_for_files(config, self._model_plan(config, growth), shapes)

    def _model_plan(self, config: Config, growth: Growth) -> Plan:
        """Of one growth of an architecture that is not described."""
        if self.plan is not None and len(self.growths) == 1:
            return self.plan
        return generic.plan_by_modules(config, growth.times, fresh=bool(growth.noise))[1]

    def plan_for(self, shapes: Mapping[str, Shape]) -> Plan:
        """From the small model to the wide one, for the small model's parameters."""
        architecture = _described(self.small.config)
        if self.plan is not None:
            return self.plan
        if architecture is not None:
            return architecture.plan(self.small.config, self.times, shapes)
        return generic.plan_by_modules(self.small.config, self.times, fresh=False)[1]


def recorded(source: Source) -> Record | None:
    """mupscale.json beside a checkpoint, if it is there; refused where it tells of another model than config.json."""
    record = Record.found(source.folder)
    if record is None:
        return None
    advice = f"copy the right {FILE} there, or remove it, and rates count from this checkpoint on"
    if not _same_sizes(_reached(record.config, record.growths), source.config):
        first, now = _sizes_in_words(record.config), _sizes_in_words(source.config)
        raise MupscaleError(
            f"{source.folder / FILE} tells of a model that grew {record.times} times from {first}, and config.json "
            f"beside it has {now}: {advice}"
        )
    architecture = _described(record.config)
    if architecture is not None and architecture.is_tied(record.config) != architecture.is_tied(source.config):
        raise MupscaleError(
            f"by {source.folder / FILE} the model's readout was {'' if architecture.is_tied(record.config) else 'not '}"
            f"its embedding when it grew, and by config.json beside it that has changed: {advice}"
        )
    return record


def relate(small: Source, wide: Source, plan: Plan | None = None) -> Relation:
    """The growths from the one to the other by mupscale.json and both configs, or an error that says what is wrong.

    plan: between the two, where there is no record of it.
    """
    if small.model_type != wide.model_type:
        raise _unrelated(f"the one is a {small.model_type} model and the other a {wide.model_type}")
    record = Record.found(wide.folder)
    if record is None:
        if plan is not None:
            return Relation(small, wide, (Growth(Times()),), plan)
        return Relation(small, wide, (Growth(_times_between(small, wide)),))
    before = Record.found(small.folder)
    count = len(record.growths)
    starts = range(count + 1) if before is None else [len(before.growths)]
    for start in starts:
        growths = record.growths[start:]
        if _same_sizes(_reached(small.config, growths), wide.config):
            whole = plan if plan is not None else record.plan if start == 0 else None
            return Relation(small, wide, growths, whole)
    grown = " and then ".join(f"{growth.times} times" for growth in record.growths)
    raise _unrelated(
        f"by its {FILE} it grew {grown} from {_sizes_in_words(record.config)}, and the small one has "
        f"{_sizes_in_words(small.config)}"
    )


def _unrelated(why: str) -> MupscaleError:
    return MupscaleError(f"the wide checkpoint is no upscaled version of the small one: {why}")


def _described(config: Config) -> Architecture | None:
    return known(config.get("model_type"))


def _grown(config: Config, times: Times) -> dict[str, Any]:
    architecture = _described(config)
    return generic.wide_config(config, times) if architecture is None else architecture.wide_config(config, times)


def _reached(config: Config, growths: tuple[Growth, ...]) -> Config | None:
    """The config after these growths; None where it cannot grow so."""
    try:
        return reduce(lambda grown, growth: _grown(grown, growth.times), growths, config)
    except MupscaleError:
        return None


def _sizes(config: Config) -> dict[str, Any]:
    """Every size that grows, under its name in the config."""
    architecture = _described(config)
    if architecture is None:
        names = [name for group in (*generic.FIELDS.values(), generic.HEAD_DIM) for name in group]
        return {name: config[name] for name in names if config.get(name) is not None}
    fields = (architecture.hidden, architecture.ffn, architecture.heads)
    sizes = {name: architecture.value(config, name) for name in fields}
    return {**sizes, "key/value heads": architecture.kv_heads(config), "head_dim": architecture.head_size(config)}


def _same_sizes(one: Config | None, other: Config) -> bool:
    return one is not None and _sizes(one) == _sizes(other)


def _sizes_in_words(config: Config) -> str:
    return ", ".join(f"{name} {size}" for name, size in _sizes(config).items())


def _times_between(small: Source, wide: Source) -> Times:
    """Without a record: by the ratios of the configs."""
    architecture = _described(small.config)
    if architecture is None:
        raise MupscaleError(
            f"there is no {FILE} in {wide.folder}, and '{small.model_type}' is not described, so that nobody knows how "
            f"the wide checkpoint grew: copy the file that mupscale upscale wrote to it"
        )
    few, many = list(_sizes(small.config).values())[:4], list(_sizes(wide.config).values())[:4]
    if all(m % n == 0 and m >= n for n, m in zip(few, many, strict=True)):
        times = Times(*(m // n for n, m in zip(few, many, strict=True)))
        if _same_sizes(_reached(small.config, (Growth(times),)), wide.config):
            return times
    raise _unrelated(f"it has {_sizes_in_words(wide.config)} and the small one {_sizes_in_words(small.config)}")
