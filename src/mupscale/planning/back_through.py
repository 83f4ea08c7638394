"""One operation backwards: from gradients of its results to those of its arguments and weights."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor

from mupscale.planning.guesses import Side

Find = Callable[[Side, int, Mapping[str, Tensor]], Tensor]


class BackThrough:
    """An operation on one side, run once more with a graph behind it.

    arguments: the numbers of those that gradients are wanted of. names: the weights likewise. instead: other values.
    find: gives the tensor of a number, for given weights.
    """

    def __init__(
        self,
        side: Side,
        position: int,
        arguments: Collection[int],
        names: Sequence[str],
        find: Find,
        instead: Mapping[int, Tensor],
    ) -> None:
        op = side.run.operations[position]
        changed = op.changes_arguments or "batch_norm" in op.name
        with torch.enable_grad():
            self.leaves: dict[int | str, Tensor] = {}
            tensors: dict[int, Tensor] = {}
            for name in names:
                self.leaves[name] = side.weights[name].detach().requires_grad_()
            given = {name: self.leaves[name] for name in names}
            for number in op.refs:
                if number in arguments:
                    value = instead.get(number, side.values[number])
                    self.leaves[number] = tensor = value.detach().requires_grad_()
                else:
                    tensor = find(side, number, given)
                tensors[number] = tensor.clone() if changed else tensor
            results = op.run(tensors)
        self.outputs = {
            number: value
            for number, value in zip(op.results, results, strict=True)
            if number is not None and isinstance(value, Tensor) and value.requires_grad
        }

    def pull(self, push: Mapping[int, Tensor]) -> dict[int | str, Tensor]:
        """Gradients of the arguments and weights, for these of the results."""
        numbers = [number for number in push if number in self.outputs]
        keys = list(self.leaves)
        with torch.enable_grad():  # one number, since torch loads its compiler for seconds to check given gradients
            total = torch.stack([(self.outputs[n] * push[n].conj()).real.sum() for n in numbers]).sum()
        gradients = torch.autograd.grad(total, [self.leaves[key] for key in keys], allow_unused=True)
        pairs = zip(keys, gradients, strict=True)
        return {key: torch.zeros_like(self.leaves[key]) if g is None else g for key, g in pairs}
