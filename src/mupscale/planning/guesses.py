"""What is assumed and what is found while units are followed through a run."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from mupscale.core import Axis
from mupscale.planning.tracing import RecordedRun

Dim = tuple[str, int]


@dataclass(frozen=True)
class Guess:
    """What is assumed before a pass: the order of copies of parameters' dimensions, and constants folded into them.

    products: whether what is computed from several weights is followed as data are (a learned query, projected), or is
    one weight (a sum of low-rank factors).
    """

    axes: Mapping[Dim, Axis] = field(default_factory=dict)
    folds: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    products: bool = False

    def differences(self, other: Guess) -> set[str]:
        """The parameters of which the two assume something else."""
        dims = {dim for dim in {*self.axes, *other.axes} if self.axes.get(dim) != other.axes.get(dim)}
        folds = {name for name in {*self.folds, *other.folds} if self.folds.get(name) != other.folds.get(name)}
        return {name for name, _ in dims} | folds

    def fold(self, name: str) -> float:
        """The constant folded into a parameter."""
        return self.folds.get(name, (1.0, 0.0))[0]


@dataclass(frozen=True)
class Written:
    """How a parameter was widened: the order of copies along each dimension that grows, and which are inputs."""

    axes: Mapping[int, Axis]
    inputs: tuple[int, ...] = ()

    @property
    def outputs(self) -> tuple[int, ...]:
        return tuple(d for d in self.axes if d not in self.inputs)


@dataclass(frozen=True)
class Accepted:
    """An operation that both models agree on: for each result its order of copies and its factor."""

    written: Mapping[str, Written]
    results: Mapping[int, tuple[dict[int, Axis], float]]


@dataclass(frozen=True)
class Stuck:
    """An operation that no order of copies explains; after the last one, an output that is off by a factor."""

    position: int
    factor: float | None = None


class Side:
    """One of the two models: its run, its weights by name, which of them are trained, and what was computed so far."""

    def __init__(self, run: RecordedRun, weights: dict[str, Tensor], trained: Collection[str]) -> None:
        self.run, self.weights, self.trained = run, weights, trained
        self.values: dict[int, Tensor] = {}
