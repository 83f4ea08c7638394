"""One growth of a checkpoint: as it is asked for, planned, and kept in mupscale.json beside the wide checkpoint.

That file tells how it grew, so that a learning rate of the small model can be used on. Initial values of a model that
grows once more count from the first model, too.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property, reduce
from pathlib import Path
from typing import Any, NamedTuple, get_args

from torch import Tensor

from mupscale.core import Axis, DecayRule, Plan, RuleSet, Shape, TensorSource
from mupscale.growth import (
    OPERATORS,
    Copies,
    Deepen,
    Fresh,
    GaussianNoise,
    NewTensor,
    Noise,
    Operator,
    SignalNoise,
    as_noise,
    choose_operator,
    is_replica,
    no_pattern,
    word_of_operator,
)
from mupscale.hf import depths
from mupscale.hf.building import Config, sketch_model
from mupscale.hf.built_values import build_tensors
from mupscale.hf.config_family import ConfigFamily, names_in_model
from mupscale.hf.config_fields import (
    Sizes,
    Times,
    check_groups,
    part_names,
    parts_and_stages,
    parts_of,
    sizes_by_part,
    times_to_parts,
)
from mupscale.planning import with_laws
from mupscale.system import MupscaleError, read_json, replace_text, setting, show_short

RECORD_FILE = "mupscale.json"
_FORMAT = "mupscale.hf/2"
_MOST_GROWTHS, _MOST_LAYERS_OR_EXPERTS = 100, 10_000
_REPLICA = Copies()


@dataclass(frozen=True)
class GrowthStep:
    """One upscaling: by how much, by which operator, drawn from which seed.

    sizes: what it became, for a reader. layers, deepen: how many it has since, and what the new ones are. experts: of
    the mixture that it became. scale_lr: by what it multiplied the learning rates, beside what the width asks for.
    """

    times: Times
    grow: Operator = _REPLICA
    seed: int = 0
    sizes: Mapping[str, Any] = field(default_factory=dict, compare=False)
    layers: int | None = None
    deepen: Deepen = "identity"
    experts: depths.ExpertCounts | None = None
    scale_lr: float = 1.0

    def __post_init__(self) -> None:
        if isinstance(self.grow, Copies):  # one noise is written one way
            object.__setattr__(self, "grow", replace(self.grow, noise=as_noise(self.grow.noise)))

    @property
    def fresh(self) -> Fresh | None:
        """How it grew by fresh units; None if it did not."""
        return self.grow if isinstance(self.grow, Fresh) else None

    @property
    def draws(self) -> bool:
        """Whether anything is drawn, for which initial values have to be known."""
        return not is_replica(self.grow)

    @property
    def is_replica(self) -> bool:
        """Whether the wide model is copies without noise."""
        return self.times != Times() and not self.draws

    @property
    def noise(self) -> GaussianNoise:
        """What copies were given."""
        noise = getattr(self.grow, "noise", None)
        return noise if isinstance(noise, GaussianNoise) else GaussianNoise(0.0)

    @property
    def is_width(self) -> bool:
        """Whether it became wider, and not deeper or a mixture."""
        return self.layers is None and self.experts is None

    def with_noise_as_it_was(self) -> GrowthStep:
        """The step for the record: signal-normalised noise, once given, as the constants that it amounted to."""
        if isinstance(self.grow, Copies) and isinstance(self.grow.noise, SignalNoise):
            return replace(self, grow=replace(self.grow, noise=self.grow.noise.effective or 0.0))
        return self

    def __str__(self) -> str:
        """For a message: by 2 in width, or to 24 layers."""
        if self.experts is not None:
            return f"to {self.experts.experts} experts, of which {self.experts.top_k} are active"
        return f"by {self.times} in width" if self.layers is None else f"to {self.layers} layers ({self.deepen})"

    def config_after(self, config: Config) -> dict[str, Any]:
        """config.json after this growth of the model that had this one."""
        if self.experts is not None:
            return depths.experts_config(config, self.experts)
        if self.layers is not None:
            return depths.deep_config(config, self.deepen, self.layers)
        return ConfigFamily(config).wide_config(self.times)

    def to_json(self) -> dict[str, Any]:
        noise = {"noise": self.noise.std, "seed": self.seed, "unit": self.noise.unit}
        content: dict[str, Any] = {"times": self.times.to_json(), **noise}
        content |= {} if self.scale_lr == 1 else {"scale_lr": self.scale_lr}
        if self.experts is not None:
            return {**content, "how": "experts", **asdict(self.experts)}
        if self.layers is not None:
            return {**content, "how": self.deepen, "layers": self.layers}
        if self.grow == Copies(self.noise):
            return content
        told = {field.name: getattr(self.grow, field.name) for field in fields(self.grow) if field.name != "noise"}  # type: ignore[arg-type]
        return {**content, "how": word_of_operator(self.grow), **told, "sizes": dict(self.sizes)}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> GrowthStep:
        how = content.get("how", "copies")
        times = Times.from_json(content["times"])
        own: dict[str, Any] = {"seed": content["seed"], "scale_lr": float(content.get("scale_lr", 1.0))}
        if how in get_args(Deepen):
            return cls(times, layers=_count(content, "layers"), deepen=how, **own)
        if how == "experts":
            experts = depths.ExpertCounts(_count(content, "experts"), _count(content, "top_k"), content["router"])
            return cls(times, experts=experts, **own)
        if how not in OPERATORS:
            raise ValueError(f"a growth by {how!r}, which this version does not know")
        told = {field.name: content[field.name] for field in fields(OPERATORS[how].make) if field.name in content}  # type: ignore[arg-type]
        if "noise" in told:
            told["noise"] = GaussianNoise(told["noise"], content["unit"])
        return cls(times, OPERATORS[how].make(**told), sizes=content.get("sizes", {}), **own)


def _count(content: Mapping[str, Any], name: str) -> int:
    """How many layers or experts a growth has on record; each is planned by itself, so not any number of them."""
    count = int(content[name])
    if count > _MOST_LAYERS_OR_EXPERTS:
        raise ValueError(f"{name} is {show_short(count)}, more than {_MOST_LAYERS_OR_EXPERTS:,}")
    return count


@dataclass(frozen=True)
class Record:
    """The growths of a model from the first one on, whose config this is; none of one that has not grown.

    plan: of all growths in one, by the model's own names, where it is known. Of several growths it says by how much,
    not where copies lie. decay: the rule of `RuleSet` by which weight decay grew. optimizer: the SHA-256 of the saved
    optimizer that was written beside the wide checkpoint; empty where none was.
    """

    config: Mapping[str, Any]
    growths: tuple[GrowthStep, ...] = ()
    plan: Plan | None = None
    decay: DecayRule = RuleSet.decay
    optimizer: str = ""

    @property
    def times(self) -> Times:
        """How much wider than the first model, in all."""
        return reduce(lambda total, growth: total * growth.times, self.growths, Times())

    @property
    def in_words(self) -> str:
        """For a message: by 2 in width and then to 24 layers."""
        return " and then ".join(map(str, self.growths))

    @property
    def widenings(self) -> list[GrowthStep]:
        """The growths by which it became wider."""
        return [growth for growth in self.growths if growth.is_width]

    @property
    def first_config(self) -> dict[str, Any]:
        """config.json of the first model, with the layers and experts that there are since."""
        later = (growth for growth in self.growths if not growth.is_width)
        return reduce(lambda deep, growth: growth.config_after(deep), later, dict(self.config))

    def then(self, growth: GrowthStep, plan: Plan | None = None) -> Record:
        """Grown once more; `plan` is that growth's own, by the model's names."""
        whole = self.plan
        if growth.layers is not None:
            if whole is not None and plan is not None:  # as if the first had had all layers, which `first_config` has
                deep = whole.then(plan)
                entries = {name: replace(entry, source=TensorSource()) for name, entry in deep.parameters.items()}
                whole = replace(deep, parameters=entries)
        elif plan is None:
            whole = None
        else:
            whole = then_parts(in_no_blocks(self.whole_plan()), in_no_blocks(plan)) if self.widenings or whole else plan
            whole = whole if growth.grow.needs_multiples else replace(whole, mup=True)
        return replace(self, growths=(*self.growths, growth), plan=whole, optimizer="")

    def whole_plan(self) -> Plan:
        """From the first model to this one, by the model's own names; made again where it is not on record."""
        return ConfigFamily(self.first_config).plan(self.times, initial=False) if self.plan is None else self.plan

    def save(self, folder: Path) -> None:
        content = {
            "format": _FORMAT,
            "growths": [growth.to_json() for growth in self.growths],
            "config": dict(self.config),
            "plan": None if self.plan is None else json.loads(self.plan.to_json()),
            **({} if self.decay == RuleSet.decay else {"decay": self.decay}),
            **({"optimizer": self.optimizer} if self.optimizer else {}),
        }
        replace_text(folder / RECORD_FILE, json.dumps(content, indent=1, ensure_ascii=False) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Record:
        """From a checkpoint's folder, or the file itself."""
        path = Path(path)
        file = path / RECORD_FILE if path.is_dir() else path
        try:
            content = read_json(file)
            if content["format"] != _FORMAT:
                raise KeyError("format")
            if len(content["growths"]) > _MOST_GROWTHS:
                raise ValueError(f"it lists {len(content['growths']):,} growths, more than {_MOST_GROWTHS}")
            growths = tuple(GrowthStep.from_json(growth) for growth in content["growths"])
            plan = None if content["plan"] is None else Plan.from_json(json.dumps(content["plan"]))
            if not isinstance(content["config"], dict):
                raise TypeError("its config is no mapping")
            decay = RuleSet(decay=content.get("decay", RuleSet.decay)).decay
            return cls(content["config"], growths, plan, decay, str(content.get("optimizer", "")))
        except OSError:
            raise MupscaleError(
                f"there is no {RECORD_FILE} at {path}: give the folder that mupscale upscale wrote (a model saved "
                f"elsewhere needs a copy of that file beside it)"
            ) from None
        except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, MupscaleError) as error:
            raise MupscaleError(
                f"{file} is not a {RECORD_FILE} of this version ({type(error).__name__}: {error}). Copy the one that "
                "mupscale upscale wrote"
            ) from None

    @classmethod
    def find(cls, folder: Path) -> Record | None:
        """The record of a checkpoint, if it was upscaled before."""
        return cls.load(folder) if (folder / RECORD_FILE).exists() else None


def in_no_blocks(plan: Plan) -> Plan:
    """By how much everything grows, without where copies lie: growths compose whatever blocks each was copied in."""
    return replace(
        plan,
        parameters={
            name: replace(entry, axes={d: Axis(axis.times, side=axis.side) for d, axis in entry.axes.items()})
            for name, entry in plan.parameters.items()
        },
        buffers={},
    )


def then_parts(plan: Plan, later: Plan) -> Plan:
    """First the plan, then the later one, which may join several tensors and then names the first of them alone."""
    named = {source.name for source in later.sources.values()}
    plan = plan.with_initial("past_norms", None) if later.has_new_parts else plan  # dimensions that may have moved
    return replace(plan, parameters={n: e for n, e in plan.parameters.items() if n in named}).then(later)


def count_from_first(record: Record, plan: Plan) -> Plan:
    """The plan of a growth with the initial values that one growth from the first model to its width would have.

    record: of the model before this growth. A plan that knows no initial values stays as it is.
    """
    if plan.fresh is None or not record.widenings:
        return plan
    first, so_far = ConfigFamily(record.first_config).plan(Times()), in_no_blocks(record.whole_plan())
    now = in_no_blocks(plan).parameters
    entries = {name: so_far[so_far.names[name]].then(entry) for name, entry in now.items()}
    laws = {name: first.initial[first.names[name]] for name in entries}
    patterns = (plan.means or {}).items()  # also what is one for its blocks, which the product of growths leaves out
    laws |= {name: replace(laws[name], means=(), stds=(), run=0) for name, means in patterns if means == ()}
    return with_laws(plan, entries, laws)


@dataclass(frozen=True)
class PlannedGrowth:
    """One growth of a checkpoint: its plan by the names in the files, and by the model's own; config and record after.

    joined: of each parameter that is made of several of the smaller model's, all of these.
    """

    growth: GrowthStep
    plan: Plan
    by_model: Plan
    config: Config
    record: Record
    joined: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @cached_property
    def shapes(self) -> dict[str, Shape]:
        """Of the files after it, tied tensors under each of their names."""
        return {alias: self.plan[name].wide for alias, name in self.plan.names.items()}

    @cached_property
    def built(self) -> dict[str, Tensor]:
        """What starts as a pattern, as transformers builds the wide model, by its name in the files.

        An error where a tensor of the files has no such values, as one of several that are stacked in the model.
        """
        if self.growth.fresh is None:
            return {}
        held = names_in_model(sketch_model(self.config), self.plan.patterned)
        own_names = {name: in_model.names[0] for name, in_model in held.items()}
        tensors = build_tensors(self.config, own_names)
        for name, values in tensors.items():
            if tuple(values.shape) != self.plan[name].wide:
                raise no_pattern(name)
        return tensors


def plan_growths(
    growths: Sequence[GrowthStep],
    config: Config,
    shapes: Mapping[str, Shape] | None,
    record: Record | None = None,
    recorded: Plan | None = None,
) -> list[PlannedGrowth]:
    """The plans of growths, one after the other.

    config, shapes, record: of the first model and its files; shapes is None for a model in memory, by its own names.
    recorded: the plan by the model's names, where there is one growth and it is known.
    """
    steps, record = list[PlannedGrowth](), record or Record(config)
    for growth in growths:
        joined: dict[str, tuple[str, ...]] = {}
        if growth.experts is not None:
            assert shapes is not None
            plan = depths.plan_experts_files(shapes, config, growth.experts)
            by_model, joined = depths.plan_mixture(config, shapes, growth.experts)
        elif growth.layers is not None:
            told = growth.deepen, growth.layers, record.first_config, record.times
            by_model = depths.plan_layers_of_model(config, *told)
            plan = by_model if shapes is None else depths.plan_layers(shapes, *told)
        else:
            family = ConfigFamily(config)
            by_model = recorded or family.plan(growth.times, initial=growth.draws)
            by_model = count_from_first(record, by_model)
            plan = by_model if shapes is None else family.plan_files(growth.times, shapes, recorded=by_model)
        config, record = growth.config_after(config), record.then(growth, by_model)
        steps.append(PlannedGrowth(growth, plan, by_model, config, record, joined))
        shapes = None if shapes is None else steps[-1].shapes
    return steps


def names_after(names: Iterable[str], steps: Sequence[PlannedGrowth]) -> Iterable[str]:
    """The names in the last files, where these are those in the first."""
    return next((step.plan.parameters for step in reversed(steps) if not step.growth.is_width), names)


class History(NamedTuple):
    """How a tensor of a grown checkpoint came about.

    name: in the first checkpoint. ways: the growths that changed it since, or since it was drawn in this shape, each
    with the plan's name of it.
    """

    name: str
    ways: list[tuple[PlannedGrowth, str]]
    drawn: NewTensor | None
    shape: Shape
    in_new_part: bool


def trace(name: str, steps: Sequence[PlannedGrowth]) -> History:
    """Back from a tensor of the last files to where it comes from."""
    ways, drawn, is_new, shape = list[tuple[PlannedGrowth, str]](), None, False, Shape()
    for step in reversed(steps):
        if name not in step.plan.names:
            raise MupscaleError(f"'{name}' is not in the plan: the plan was made for a different checkpoint")
        planned = step.plan.names[name]
        source, entry = step.plan.sources[planned], step.plan[planned]
        is_new = is_new or source.is_new
        if drawn is None and (drawn := NewTensor.of(planned, step.plan, step.growth.seed)) is not None:
            shape = entry.wide
        elif drawn is None and (step.growth.is_width or entry.axes):  # of new parts, those with more rows
            ways.append((step, planned))
        name = name if step.growth.is_width else source.name
    return History(name, ways[::-1], drawn, shape, is_new)


def settle_growth(
    config: Config,
    names: Collection[str] = (),
    folder: object = "the model",
    *,
    times: int | str | Mapping[str, int] | Times | None = None,
    sizes: Sizes | None = None,
    grow: Operator | None = None,
    noise: Noise | None = None,
    exact: bool = False,
    seed: int = 0,
    layers: int | None = None,
    deepen: Deepen = "identity",
    experts: int | None = None,
    top_k: int | None = None,
) -> list[GrowthStep]:
    """The growth in width that is meant by multipliers or sizes, an operator or noise; then one to layers or experts.

    Twice as wide if nothing is said; with layers or experts alone the width stays. exact: by copies without noise.
    names, folder: of the checkpoint's tensors, and where it lies.
    """
    wanted, deeper = sizes_by_part(sizes or {}), list[GrowthStep]()
    if experts is not None or top_k is not None:
        counts = depths.settle_experts(config, experts or 0, top_k, folder, exact=exact, layers=layers)
        deeper.append(GrowthStep(Times(), seed=seed, experts=counts))
    elif layers is not None:
        depths.check_depth(config, deepen, layers, names, folder)
        deeper.append(GrowthStep(Times(), seed=seed, layers=layers, deepen=deepen))
    if deeper and times is None and not wanted:
        if grow is not None or noise is not None or (exact and layers is not None):
            among = "" if layers is not None else ". Noise among experts is for models in memory (docs/experts.md)"
            raise MupscaleError(
                "noise, fresh units and other ways to grow are for a wider model, which more layers or experts alone "
                f"do not make: give a width as well ({setting('times', 2)}), or leave them out{among}"
            )
        times, exact = 1, True
    operator = choose_operator(grow, noise, exact=exact)
    if wanted and times is not None:
        raise MupscaleError("give either how much it grows (times) or its new sizes (hidden, ffn, heads, kv)")
    by_how_much = Times.of(2 if times is None else times, part_names(config))
    if by_how_much.parts and not part_names(config):
        raise MupscaleError(
            f"{setting('times', str(by_how_much))}: a {config.get('model_type')} model has no parts; hidden, ffn, "
            f"heads and kv grow"
        )
    fresh = not operator.needs_multiples
    if fresh and by_how_much == Times() and not wanted:
        raise MupscaleError(f"{setting('times', 1)} changes nothing: leave it out, or give 2 or more")
    if wanted:
        by_how_much = times_to_parts(wanted, parts_and_stages(config), fresh=fresh)
    else:
        by_how_much = by_how_much.for_units(fresh=fresh)
        by_how_much = check_groups(by_how_much, parts_of(config)) if fresh else by_how_much
    return [GrowthStep(by_how_much, operator, seed), *deeper]
