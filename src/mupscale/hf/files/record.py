"""mupscale.json, beside a wide checkpoint: how it grew, so that a learning rate of the small model can be used on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

from mupscale.core import Plan, Shape
from mupscale.growth import Unit
from mupscale.hf.describe import Times, architecture_of
from mupscale.system import MupscaleError, replace_text

RECORD_FILE = "mupscale.json"
_FORMAT = "mupscale.hf/1"


@dataclass(frozen=True)
class GrowthStep:
    """One upscaling: by how much, with which noise (unit: as in GaussianNoise), drawn from which seed.

    >>> GrowthStep(Times.of(2), noise=0.5, seed=1).times.ffn
    2
    """

    times: Times
    noise: float | Mapping[str, float] = 0.0
    seed: int = 0
    unit: Unit = "init"


@dataclass(frozen=True)
class Record:
    """The growths of a model from the first one on, whose config this is.

    plan: of all growths in one, by the model's own names, where the architecture is not described.

    >>> import tempfile
    >>> record = Record({"model_type": "llama"}, (GrowthStep(Times.of(2)),)).then(GrowthStep(Times.of(3)))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     record.save(Path(folder))
    ...     Record.load(folder).times.hidden
    6
    """

    config: Mapping[str, Any]
    growths: tuple[GrowthStep, ...]
    plan: Plan | None = None

    @property
    def times(self) -> Times:
        """How much wider than the first model, in all."""
        return reduce(lambda total, growth: total * growth.times, self.growths, Times())

    def then(self, growth: GrowthStep, plan: Plan | None = None) -> Record:
        """Grown once more; `plan` is that growth's own, where the architecture is not described."""
        whole = plan if self.plan is None or plan is None else self.plan.then(plan)
        return replace(self, growths=(*self.growths, growth), plan=whole)

    def plan_for(self, shapes: Mapping[str, Shape]) -> Plan:
        """The plan from the first model to this one, for parameters of these names and wide shapes."""
        if self.plan is not None:
            return self.plan
        return architecture_of(self.config).plan_wide_parameters(self.config, self.times, shapes)

    def save(self, folder: Path) -> None:
        """Write mupscale.json."""
        content = {
            "format": _FORMAT,
            "growths": [asdict(growth) for growth in self.growths],
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
            content = json.loads(file.read_text(encoding="utf-8"))
            if content["format"] != _FORMAT:
                raise KeyError("format")
            growths = tuple(
                GrowthStep(Times(**g["times"]), g["noise"], g["seed"], g.get("unit", "init"))
                for g in content["growths"]
            )
            plan = None if content["plan"] is None else Plan.from_json(json.dumps(content["plan"]))
            if not isinstance(content["config"], dict):
                raise TypeError("its config is no mapping")
            return cls(content["config"], growths, plan)
        except OSError:
            raise MupscaleError(
                f"there is no {RECORD_FILE} at {path}: give the folder that mupscale upscale wrote (a model saved "
                f"elsewhere needs a copy of that file beside it)"
            ) from None
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise MupscaleError(
                f"{file} is no {RECORD_FILE} of this version ({type(error).__name__}: {error}); copy the one that "
                f"mupscale upscale wrote"
            ) from None

    @classmethod
    def find(cls, folder: Path) -> Record | None:
        """The record of a checkpoint, if it was upscaled before."""
        return cls.load(folder) if (folder / RECORD_FILE).exists() else None
