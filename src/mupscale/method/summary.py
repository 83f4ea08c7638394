"""What a run of the method found, as plain data: summary.json, which is all that the report needs."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from mupscale.sweep import Sweep
from mupscale.system import MupscaleError, parse_record, read_json, write_json

FORMAT = 1


@dataclass(frozen=True)
class Curve:
    """One seed's run: training loss (means between two points) and held-out scores, against steps.

    status: finished or diverged. Points lie at the same steps for all seeds of a run, as far as
    each came; held-out points have their own. accuracy is empty where targets are no classes.
    lowest, highest: the extremes of what each point is the mean of; empty where that is one measurement.

    >>> Curve(seed=0, status="finished", steps=[50, 95, 100], losses=[3.0, 1.0, 0.5]).final()
    0.75
    """

    seed: int
    status: str
    steps: list[int]
    losses: list[float]
    held_out_steps: list[int] = field(default_factory=list)
    held_out_losses: list[float] = field(default_factory=list)
    accuracy: list[float] = field(default_factory=list)
    lowest: list[float] = field(default_factory=list)
    highest: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        """A step has one loss, and one of each extreme if there are any."""
        lengths = {"losses": self.losses, "lowest": self.lowest, "highest": self.highest}
        for name, values in lengths.items():
            if len(values) != len(self.steps) and (values or name == "losses"):
                raise MupscaleError(f"a curve has {len(self.steps)} steps, but {len(values)} values in '{name}'")

    def final(self) -> float | None:
        """Mean training loss over the last tenth of the steps; None if it diverged."""
        if self.status == "diverged" or not self.steps:
            return None
        start = bisect_right(self.steps, 0.9 * self.steps[-1])
        return fmean(self.losses[min(start, len(self.losses) - 1) :])

    def final_held_out(self) -> float | None:
        """The last held-out loss; None if it diverged or none was taken."""
        return None if self.status == "diverged" or not self.held_out_losses else self.held_out_losses[-1]


@dataclass(frozen=True)
class Runs:
    """A model of the comparison, trained with several seeds.

    name: which contender it is, see contenders.py.
    after_base: whether it starts from the base model, whose cost then belongs to it. drop: the step at which the
    learning rate changes from lr to drop_lr. noise: one number, or constants per parameter (signal-normalised noise).

    >>> curves = [Curve(0, "finished", [10], [0.25]), Curve(1, "diverged", [10], [9.0])]
    >>> runs = Runs("scratch", "(a) from scratch", width=128, lr=0.1, steps=10, flops_per_step=2.0, curves=curves)
    >>> runs.finals()
    [0.25]
    """

    name: str
    label: str
    width: Any
    lr: float
    steps: int
    flops_per_step: float | None
    curves: list[Curve]
    after_base: bool = False
    noise: float | dict[str, float] = 0.0
    drop: int | None = None
    drop_lr: float | None = None

    def finals(self) -> list[float]:
        """Each finished seed's final training loss."""
        return [loss for curve in self.curves if (loss := curve.final()) is not None]


@dataclass(frozen=True)
class StageCost:
    """What a stage cost: FLOPs of training (None where a model's cost cannot be counted) and seconds."""

    name: str
    flops: float | None
    seconds: float


@dataclass(frozen=True)
class Choice:
    """The hyperparameters for the large models: the base model's lr, and noise and lr for upscaling it.

    plain: noise and lr as one small width alone would transfer them, where an extrapolated value is used instead.
    """

    base_lr: float
    lr: float
    noise: float
    unit: str
    plain: tuple[float, float] | None = None
    constants: dict[str, float] | None = None


@dataclass(frozen=True)
class Summary:
    """What a run of the method gave.

    costs, gain: see costs.py. verdict, warnings: sentences. coords: the coordinate check.
    """

    name: str
    command: str
    recipe: dict[str, Any]
    method: dict[str, Any]
    sweeps: list[Sweep]
    choice: Choice
    runs: list[Runs]
    stages: list[StageCost]
    costs: dict[str, float | None] = field(default_factory=dict)
    gain: dict[str, float | None] = field(default_factory=dict)
    verdict: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    coords: dict[str, Any] | None = None

    def get(self, name: str) -> Runs | None:
        """The runs of a name."""
        return next((runs for runs in self.runs if runs.name == name), None)

    def to_json(self) -> dict[str, Any]:
        """Plain values, from which `from_json` makes the same."""
        return {"format": FORMAT, **asdict(self)}

    @classmethod
    def from_json(cls, values: Any) -> Summary:
        """What to_json gave."""
        parts = (
            {name: value for name, value in values.items() if name != "format"} if isinstance(values, dict) else values
        )
        try:
            return parse_record(cls, parts)
        except MupscaleError as error:
            raise MupscaleError(f"this is no summary written by mupscale run ({error})") from None

    def save(self, folder: Path) -> Path:
        """Write summary.json, whole or not at all."""
        return write_json(folder / "summary.json", self.to_json())

    @classmethod
    def load(cls, folder: str | Path) -> Summary:
        """The summary in a run's folder."""
        path = Path(folder) / "summary.json"
        try:
            return cls.from_json(read_json(path))
        except OSError as error:
            raise MupscaleError(
                f"{folder} holds no finished run of the method: cannot read its summary.json ({error.strerror})"
            ) from None
