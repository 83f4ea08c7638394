"""mupscale.json, beside a wide checkpoint: how it grew, so that a learning rate of the small model can be used on.

Initial values of a model that grows once more count from the first model, too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import reduce
from pathlib import Path
from typing import Any, get_args

from mupscale.core import Axis, DecayRule, Plan, RuleSet, Shape, TensorSource
from mupscale.growth import (
    OPERATORS,
    Copies,
    Deepen,
    Fresh,
    GaussianNoise,
    Operator,
    Unit,
    as_noise,
    word_of_operator,
)
from mupscale.hf.building import Config
from mupscale.hf.config_family import ConfigFamily
from mupscale.hf.depths import ExpertCounts, deep_config, experts_config, plan_experts_files, plan_layers, with_layers
from mupscale.hf.multipliers import Times
from mupscale.planning import with_initial
from mupscale.system import MupscaleError, read_json, replace_text

RECORD_FILE = "mupscale.json"
_FORMAT = "mupscale.hf/2"
_REPLICA = Copies()


@dataclass(frozen=True)
class GrowthStep:
    """One upscaling: by how much, by which operator, drawn from which seed.

    sizes: what it became, for a reader. layers: how many it has since, where it became deeper, and deepen: what the new
    ones are. experts: of the mixture that it became.
    """

    times: Times
    grow: Operator = _REPLICA
    seed: int = 0
    sizes: Mapping[str, Any] = field(default_factory=dict, compare=False)
    layers: int | None = None
    deepen: Deepen = "identity"
    experts: ExpertCounts | None = None

    def __post_init__(self) -> None:
        if isinstance(self.grow, Copies):  # one noise is written one way
            object.__setattr__(self, "grow", replace(self.grow, noise=as_noise(self.grow.noise)))

    @property
    def fresh(self) -> Fresh | None:
        """How it grew by fresh units; None if it did not."""
        return self.grow if isinstance(self.grow, Fresh) else None

    @property
    def _gaussian(self) -> GaussianNoise:
        noise = getattr(self.grow, "noise", None)
        return noise if isinstance(noise, GaussianNoise) else GaussianNoise(0.0)

    @property
    def noise(self) -> float | Mapping[str, float]:
        """How much noise copies were given."""
        return self._gaussian.std

    @property
    def is_width(self) -> bool:
        """Whether it became wider, and not deeper or a mixture."""
        return self.layers is None and self.experts is None

    @property
    def unit(self) -> Unit:
        """The unit of that noise."""
        return self._gaussian.unit

    def __str__(self) -> str:
        """For a message: by 2 in width, or to 24 layers."""
        if self.experts is not None:
            return f"to {self.experts.experts} experts, of which {self.experts.top_k} are active"
        return f"by {self.times} in width" if self.layers is None else f"to {self.layers} layers ({self.deepen})"

    def config_after(self, config: Config) -> dict[str, Any]:
        """config.json after this growth of the model that had this one."""
        if self.experts is not None:
            return experts_config(config, self.experts)
        if self.layers is not None:
            return deep_config(config, self.deepen, self.layers)
        return ConfigFamily(config).wide_config(self.times)

    def plan_files(self, shapes: Mapping[str, Shape], config: Config, record: Record | None) -> Plan:
        """What the files are made of that this growth in depth or experts makes of those of the model with this config.

        shapes: of these. record: of that model, where it has grown before.
        """
        if self.experts is not None:
            return plan_experts_files(shapes, config, self.experts)
        assert self.layers is not None
        first, times = (config, Times()) if record is None else (record.first_config, record.times)
        return plan_layers(shapes, self.deepen, self.layers, first, times)

    def to_json(self) -> dict[str, Any]:
        """As mupscale.json has it."""
        content: dict[str, Any] = {"times": self.times.to_json(), "noise": self.noise, "seed": self.seed}
        content["unit"] = self.unit
        if self.experts is not None:
            return {**content, "how": "experts", **asdict(self.experts)}
        if self.layers is not None:
            return {**content, "how": self.deepen, "layers": self.layers}
        if self.grow == Copies(self._gaussian):
            return content
        told = {field.name: getattr(self.grow, field.name) for field in fields(self.grow) if field.name != "noise"}  # type: ignore[arg-type]
        return {**content, "how": word_of_operator(self.grow), **told, "sizes": dict(self.sizes)}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> GrowthStep:
        """What to_json gave."""
        how = content.get("how", "copies")
        if how in get_args(Deepen):
            times, seed, layers = Times.from_json(content["times"]), content["seed"], int(content["layers"])
            return cls(times, seed=seed, layers=layers, deepen=how)
        if how == "experts":
            experts = ExpertCounts(int(content["experts"]), int(content["top_k"]), content["router"])
            return cls(Times(), seed=content["seed"], experts=experts)
        if how not in OPERATORS:
            raise ValueError(f"a growth by {how!r}, which this version does not know")
        told = {field.name: content[field.name] for field in fields(OPERATORS[how].make) if field.name in content}  # type: ignore[arg-type]
        if "noise" in told:
            told["noise"] = GaussianNoise(told["noise"], content["unit"])
        times, sizes = Times.from_json(content["times"]), content.get("sizes", {})
        return cls(times, OPERATORS[how].make(**told), content["seed"], sizes)


@dataclass(frozen=True)
class Record:
    """The growths of a model from the first one on, whose config this is; none of one that has not grown.

    plan: of all growths in one, by the model's own names, where it is known. Of several growths it says by how much,
    not where copies lie. decay: the rule of `RuleSet` by which weight decay grew.
    """

    config: Mapping[str, Any]
    growths: tuple[GrowthStep, ...] = ()
    plan: Plan | None = None
    decay: DecayRule = RuleSet.decay

    @property
    def times(self) -> Times:
        """How much wider than the first model, in all."""
        return reduce(lambda total, growth: total * growth.times, self.growths, Times())

    @property
    def deepenings(self) -> list[GrowthStep]:
        """The growths by which it became deeper, or a mixture."""
        return [growth for growth in self.growths if not growth.is_width]

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
        return reduce(lambda deep, step: step.config_after(deep), self.deepenings, dict(self.config))

    def then(self, growth: GrowthStep, plan: Plan | None = None) -> Record:
        """Grown once more; `plan` is that growth's own, in width or experts."""
        whole = self.plan
        if growth.layers is not None:
            if whole is not None:  # as if the first model had had all the layers, which `first_config` has
                deep = with_layers(whole, growth.deepen, growth.layers)
                entries = {name: replace(entry, source=TensorSource()) for name, entry in deep.parameters.items()}
                whole = replace(deep, parameters=entries)
        elif plan is None:
            whole = None
        else:
            whole = then_parts(in_no_blocks(self.whole_plan()), in_no_blocks(plan)) if self.widenings or whole else plan
            whole = whole if growth.grow.needs_multiples else replace(whole, mup=True)
        return replace(self, growths=(*self.growths, growth), plan=whole)

    def whole_plan(self) -> Plan:
        """From the first model to this one, by the model's own names; made again where it is not on record."""
        return ConfigFamily(self.first_config).plan(self.times, initial=False) if self.plan is None else self.plan

    def save(self, folder: Path) -> None:
        """Write mupscale.json."""
        content = {
            "format": _FORMAT,
            "growths": [growth.to_json() for growth in self.growths],
            "config": dict(self.config),
            "plan": None if self.plan is None else json.loads(self.plan.to_json()),
            **({} if self.decay == RuleSet.decay else {"decay": self.decay}),
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
            growths = tuple(GrowthStep.from_json(growth) for growth in content["growths"])
            plan = None if content["plan"] is None else Plan.from_json(json.dumps(content["plan"]))
            if not isinstance(content["config"], dict):
                raise TypeError("its config is no mapping")
            return cls(content["config"], growths, plan, RuleSet(decay=content.get("decay", RuleSet.decay)).decay)
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
    """The plan with the initial values that one growth from the first model to its wide width would have.

    record: of the model that grows, before this growth. plan: of this growth, by the model's own names. A plan that
    knows no initial values stays as it is.
    """
    if plan.fresh is None or not record.widenings:
        return plan
    first, so_far = ConfigFamily(record.first_config).plan_unchanged(), in_no_blocks(record.whole_plan())
    assert first.fresh is not None
    assert first.means is not None
    now = in_no_blocks(plan).parameters
    entries = {name: so_far[so_far.names[name]].then(entry) for name, entry in now.items()}
    owners = {name: first.names[name] for name in entries}
    stds = {name: first.fresh[owner] for name, owner in owners.items()}
    means = {name: first.means[owner] for name, owner in owners.items() if owner in first.means}
    return with_initial(plan, entries, stds, means)


def plan_growth(
    record: Record | None,
    config: Config,
    times: Times,
    shapes: Mapping[str, Shape],
    *,
    recorded: Plan | None = None,
    initial: bool = True,
) -> tuple[Plan, Plan]:
    """The plan of a checkpoint's growth for the tensors of its files, and the one that mupscale.json holds.

    record: from whose first model initial values are counted; None to count from the checkpoint itself. recorded and
    initial: as in `ConfigFamily.plan_files`.
    """
    family = ConfigFamily(config)
    by_model = family.plan(times, initial=initial) if recorded is None else recorded
    if record is not None:
        by_model = count_from_first(record, by_model)
    return family.plan_files(times, shapes, recorded=by_model), by_model
