"""The tensors of two runs side by side: weights, constants, and what depends on the batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mupscale.core import Axis
from mupscale.planning.guesses import Dim, Side
from mupscale.planning.tracing import Operation


class BothRuns:
    """Two runs, and for every tensor that depends on the batch its order of copies, its factor and its sources."""

    def __init__(self, small: Side, large: Side) -> None:
        self.small, self.large = small, large
        self.makers: dict[int, list[int]] = {}  # of tensors that follow from weights alone: operations, in place too
        self.axes: dict[int, dict[int, Axis]] = {}
        self.scales: dict[int, float] = {}
        self.sources: dict[int, dict[int, frozenset[Dim]]] = {}
        self.used = {number for op in small.run.operations for number in op.refs} | set(small.run.outputs)
        for side in (small, large):
            side.values = {}
            for number, leaf in side.run.leaves.items():
                if side.run.names.get(number) not in side.weights:
                    side.values[number] = leaf.detach().clone()

    def kind(self, number: int) -> str:
        """Whether a tensor is a weight (or follows from weights), a constant, or depends on the batch."""
        if number in self.axes:
            return "data"
        is_weight = number in self.makers or self.small.run.names.get(number) in self.small.weights
        return "weight" if is_weight else "constant"

    def tensor(
        self, side: Side, number: int, given: Mapping[str, Tensor] | None = None, before: int | None = None
    ) -> Tensor:
        """A tensor of the run; what follows from weights alone is computed when it is asked for.

        before: as it was ahead of the operation at this position, since operations may write into it.
        """
        makers = [position for position in self.makers.get(number, ()) if before is None or position < before]
        if makers:
            op = side.run.operations[makers[-1]]
            tensors = {each: self.tensor(side, each, given, makers[-1]) for each in op.refs}
            if op.changes_arguments:
                tensors = {each: tensor.clone() for each, tensor in tensors.items()}
            value: Tensor = op.run(tensors)[op.results.index(number)]
            return value
        if number in side.values:
            return side.values[number]
        name = side.run.names[number]
        return (given or {}).get(name, side.weights[name])

    def weights_of(self, op: Operation) -> list[str]:
        """The names of the weights that an operation uses, through whatever is computed from them."""
        names, waiting, seen = dict[str, None](), list(op.refs), set[int]()
        while waiting:
            number = waiting.pop()
            if number in seen or self.kind(number) != "weight":
                continue
            seen.add(number)
            for position in self.makers.get(number, ()):
                waiting += self.small.run.operations[position].refs
            if number not in self.makers:
                names[self.small.run.names[number]] = None
        return list(names)

    def results(self, side: Side, position: int, instead: Mapping[int, Tensor] | None = None) -> list[Any]:
        """What an operation gives on one side, its arguments untouched."""
        op = side.run.operations[position]
        tensors = {number: self.tensor(side, number) for number in op.refs} | dict(instead or {})
        if op.changes_arguments or "batch_norm" in op.name:
            tensors = {number: tensor.clone() for number, tensor in tensors.items()}
        results = op.run(tensors)
        return [torch.zeros_like(x) for x in tensors_of(results)] if "empty" in op.name else results

    def is_contracted(self, position: int, name: str, dim: int) -> bool:
        """Whether changing one unit of a weight changes all of the result, and not a part of it."""
        side = self.small if self.small.weights[name].shape[dim] > 1 else self.large
        weight = side.weights[name]
        before = tensors_of(self.dense_results(side, position, {}))
        for index in dict.fromkeys((0, weight.shape[dim] - 1, weight.shape[dim] // 2, weight.shape[dim] // 3)):
            changed = weight.clone()
            changed.select(dim, index).mul_(1.7).add_(0.3 * float(weight.abs().mean()))
            after = tensors_of(self.dense_results(side, position, {name: changed}))
            differs = [(a != b) & ~(a.isnan() & b.isnan()) for a, b in zip(before, after, strict=True)]
            touched = next((d for d in differs if bool(d.any())), None)
            if touched is not None:
                others = [tuple(o for o in range(touched.dim()) if o != e) for e in range(touched.dim())]
                return all(bool((touched.any(dim=o) if o else touched).all()) for o in others)
        return False

    def dense_results(self, side: Side, position: int, given: Mapping[str, Tensor]) -> list[Any]:
        """The operation's results for other weights, and for dense arguments, so that no zero hides an effect."""
        op = side.run.operations[position]
        generator = torch.Generator().manual_seed(position)
        tensors = {}
        for number in op.refs:
            value = self.tensor(side, number, given).clone()
            if number in self.axes and value.is_floating_point():
                value = torch.randn(value.shape, generator=generator, dtype=value.dtype)
            tensors[number] = value
        return op.run(tensors)

    def note(self, number: int, axes: Mapping[int, Axis], scale: float, sources: Mapping[int, frozenset[Dim]]) -> None:
        self.axes[number], self.scales[number], self.sources[number] = dict(axes), scale, dict(sources)


def tensors_of(values: Sequence[Any]) -> list[Tensor]:
    return [value for value in values if isinstance(value, Tensor)]
