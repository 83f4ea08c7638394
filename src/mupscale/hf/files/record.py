"""mupscale.json, beside a wide checkpoint: how it grew, so that a learning rate of the small model can be used on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import Any, get_args

from mupscale.core import Axis, Plan, Shape
from mupscale.growth import DRAWS, Draws, Fresh, Unit
from mupscale.hf.describe import (
    Config,
    ExpertCounts,
    HowDeep,
    LayerTensor,
    Times,
    deep_config,
    expert_tensors,
    experts_config,
    family_of_config,
    layer_origins,
    plan_layers,
    times_from_json,
)
from mupscale.system import MupscaleError, read_json, replace_text

RECORD_FILE = "mupscale.json"
_FORMAT = "mupscale.hf/1"
_FROM_FIRST = "from the first model"


@dataclass(frozen=True)
class GrowthStep:
    """One upscaling: by how much, with which noise (unit: as in GaussianNoise), drawn from which seed.

    fresh: how it grew by fresh units; None where it grew by copies. sizes: what it became, for a reader. draws: how the
    random numbers were drawn, which files of earlier versions do not say. layers: how many it has since, where it
    became deeper, and deepen: what the new ones are. experts: of the mixture that it became. from_first: whether the
    initial spread of noise and new units is counted from the first model, and not, as earlier versions did, from this.

    >>> GrowthStep(Times.of(2), noise=0.5, seed=1).times.ffn
    2
    >>> from mupscale.hf.describe import Ratios
    >>> GrowthStep.from_json(GrowthStep(Ratios(ffn=2), fresh=Fresh(outgoing=0.5)).to_json()).fresh
    Fresh(outgoing=0.5, lossless=False)
    """

    times: Times
    noise: float | Mapping[str, float] = 0.0
    seed: int = 0
    unit: Unit = "init"
    fresh: Fresh | None = None
    sizes: Mapping[str, Any] = field(default_factory=dict, compare=False)
    draws: Draws = DRAWS
    layers: int | None = None
    deepen: HowDeep = "identity"
    from_first: bool = False
    experts: ExpertCounts | None = None

    @property
    def is_width(self) -> bool:
        """Whether it became wider, and not deeper or a mixture."""
        return self.layers is None and self.experts is None

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
        return family_of_config(config).wide_config(self.times)

    def new_tensors(self, shapes: Mapping[str, Shape], config: Config, record: Record | None) -> dict[str, LayerTensor]:
        """What every tensor is after this growth in depth or experts of the model with this config, in these files.

        record: of that model, where it has grown before.
        """
        if self.experts is not None:
            return expert_tensors(shapes, config, self.experts)
        assert self.layers is not None
        first, times = (config, Times()) if record is None else (record.first_config, record.times)
        return plan_layers(shapes, self.deepen, self.layers, first, times)

    def to_json(self) -> dict[str, Any]:
        """As mupscale.json has it."""
        content: dict[str, Any] = {"times": self.times.to_json(), "noise": self.noise}
        content |= {"seed": self.seed, "unit": self.unit, **({} if self.draws == "torch" else {"draws": self.draws})}
        content |= {"spread": _FROM_FIRST} if self.from_first else {}
        if self.experts is not None:
            return {**content, "how": "experts", **asdict(self.experts)}
        if self.layers is not None:
            return {**content, "how": self.deepen, "layers": self.layers}
        if self.fresh is None:
            return content
        return {**content, "how": "fresh", **asdict(self.fresh), "sizes": dict(self.sizes)}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> GrowthStep:
        """What to_json gave, or an earlier version, which knew copies alone."""
        how = content.get("how", "copies")
        draws = content.get("draws", "torch")
        if draws not in get_args(Draws):
            raise ValueError(f"numbers drawn by {draws!r}, which this version does not know")
        if (spread := content.get("spread")) not in (None, _FROM_FIRST):
            raise ValueError(f"an initial scale counted {spread!r}, which this version does not know")
        if how in get_args(HowDeep):
            times, seed, layers = Times(**content["times"]), content["seed"], int(content["layers"])
            return cls(times, seed=seed, draws=draws, layers=layers, deepen=how)
        if how == "experts":
            experts = ExpertCounts(int(content["experts"]), int(content["top_k"]), content["router"])
            return cls(Times(), seed=content["seed"], draws=draws, experts=experts)
        if how not in ("copies", "fresh"):
            raise ValueError(f"a growth by {how!r}, which this version does not know")
        fresh = Fresh(content["outgoing"], content["lossless"]) if how == "fresh" else None
        times = times_from_json(content["times"])
        unit, sizes = content.get("unit", "init"), content.get("sizes", {})
        made = cls(times, content["noise"], content["seed"], unit, fresh, sizes, draws)
        return replace(made, from_first=spread is not None)


@dataclass(frozen=True)
class Record:
    """The growths of a model from the first one on, whose config this is; none of one that has not grown.

    plan: of all growths in one, by the model's own names; files of earlier versions may lack it. Of several growths it
    says by how much, not where copies lie.

    >>> import tempfile
    >>> record = Record({"model_type": "llama"}).then(GrowthStep(Times.of(2))).then(GrowthStep(Times.of(3)))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     record.save(Path(folder))
    ...     Record.load(folder).times.hidden
    6
    """

    config: Mapping[str, Any]
    growths: tuple[GrowthStep, ...] = ()
    plan: Plan | None = None

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
            whole = None if whole is None else _with_layers(whole, growth.deepen, growth.layers)
        elif plan is None:
            whole = None
        else:
            whole = in_no_blocks(self._rates_of(plan)).then(in_no_blocks(plan)) if self.widenings or whole else plan
            whole = replace(whole, mup=True) if growth.fresh is not None else whole
        return replace(self, growths=(*self.growths, growth), plan=whole)

    def _rates_of(self, later: Plan) -> Plan:
        """What is on record of the tensors that a later growth makes others of; of joined ones it names the first."""
        whole, named = self.whole_plan(), {source.name for source in later.sources.values()}
        past = None if later.has_new_parts else whole.past_norms  # whose names are gone
        return replace(whole, parameters={n: e for n, e in whole.parameters.items() if n in named}, past_norms=past)

    def whole_plan(self) -> Plan:
        """From the first model to this one, by the model's own names; made again where it is not on record."""
        return family_of_config(self.first_config).plan(self.times, initial=False) if self.plan is None else self.plan

    def save(self, folder: Path) -> None:
        """Write mupscale.json."""
        content = {
            "format": _FORMAT,
            "growths": [growth.to_json() for growth in self.growths],
            "config": dict(self.config),
            "plan": None if self.plan is None else json.loads(self.plan.to_json()),
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
            return cls(content["config"], growths, plan)
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
    """By how much everything grows, without where copies lie: growths compose whatever blocks each was copied in.

    >>> in_no_blocks(Plan({})).parameters
    {}
    """
    return replace(
        plan,
        parameters={
            name: replace(entry, axes={d: Axis(axis.times) for d, axis in entry.axes.items()})
            for name, entry in plan.parameters.items()
        },
        buffers={},
    )


def _with_layers(plan: Plan, how: HowDeep, layers: int) -> Plan:
    """The plan of a model that has more layers since: each grew as the layer that it comes from."""
    origins = {deep: origin.name for deep, origin in layer_origins(plan.parameters, how, layers).items()}

    def by_origin(values: Mapping[str, Any]) -> dict[str, Any]:
        return {deep: values[origin] for deep, origin in origins.items() if origin in values}

    entries = {n: replace(e, names=e.names if origins[n] == n else (n,)) for n, e in by_origin(plan.parameters).items()}
    fresh, means = (None if values is None else by_origin(values) for values in (plan.fresh, plan.means))
    past = None if plan.past_norms is None else by_origin(plan.past_norms)
    return replace(plan, parameters=entries, fresh=fresh, means=means, norms=by_origin(plan.norms), past_norms=past)
