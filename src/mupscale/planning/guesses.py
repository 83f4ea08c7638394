"""What is assumed and what is found while units are followed through a run."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor

from mupscale.core import Axis, Role
from mupscale.planning.copied_values import growing_dims, possible_axes
from mupscale.planning.tracing import RecordedRun

Dim = tuple[str, int]
Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Guess:
    """What is assumed before a pass: the order of copies of parameters' dimensions, and constants folded into them.

    products: whether what is computed from several weights is followed as data are (a learned query, projected), or is
    one weight (a sum of low-rank factors). own_constants: whether constants of the wide model may hold the narrow one's
    between others (ALiBi's slopes), which is enough for fresh units; copies of the narrow one's are then taken instead.
    """

    axes: Mapping[Dim, Axis] = field(default_factory=dict)
    folds: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    products: bool = False
    own_constants: bool = False

    def differences(self, other: Guess) -> set[str]:
        """The parameters of which the two assume something else."""
        dims = {dim for dim in {*self.axes, *other.axes} if self.axes.get(dim) != other.axes.get(dim)}
        folds = {name for name in {*self.folds, *other.folds} if self.folds.get(name) != other.folds.get(name)}
        return {name for name, _ in dims} | folds

    def fold(self, name: str) -> float:
        """The constant folded into a parameter."""
        return self.folds.get(name, (1.0, 0.0))[0]


def guess_with_roles(guess: Guess, roles: Mapping[str, Role], narrow: Tensors, wide: Tensors) -> Guess:
    """The guess with the orders and constants of these roles, which are by name; not with those that do not fit.

    >>> import torch
    >>> tensors = [{"a": torch.ones(n, 3)} for n in (8, 16)]
    >>> guess_with_roles(Guess(), {"a": Role(out=0, out_block=4)}, *tensors).axes
    {('a', 0): Axis(times=2, block=4, sections=(), side='')}
    """
    axes, folds = dict(guess.axes), dict(guess.folds)
    for name, role in roles.items():
        if name not in narrow or not role.fits(narrow[name].dim()):
            continue
        small, large = narrow[name].shape, wide[name].shape
        times = {d: large[d] // small[d] for d in growing_dims(small, large) or ()}
        out, in_ = ([d for d in side if d in times] for side in role.dims(len(small)))
        given = {d: Axis(times[d], role.out_block, role.sections_of(small[d])) for d in out}
        given |= {d: Axis(times[d], role.in_block) for d in in_}
        axes |= {(name, d): axis for d, axis in given.items() if axis in possible_axes(small[d], large[d], [axis])}
        multiples = [math.prod(times[d] for d in side) for side in (out, in_)]
        fold = float(role.fold(*multiples) if callable(role.fold) else role.fold)
        if fold != 1:
            folds[name] = fold, float(role.offset)
    return replace(guess, axes=axes, folds=folds)


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
    """An operation that no order of copies explains; counted on behind the last, an output that is off by a factor."""

    position: int
    factor: float | None = None


class Side:
    """One of the two models: its run, its weights by name, which of them are trained, and what was computed so far."""

    def __init__(self, run: RecordedRun, weights: dict[str, Tensor], trained: Collection[str]) -> None:
        self.run, self.weights, self.trained = run, weights, trained
        self.values: dict[int, Tensor] = {}
