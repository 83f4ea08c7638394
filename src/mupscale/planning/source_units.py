"""Which units of a weight the units of a tensor come from, as gradients show, and the order of copies that follows.

Several tensors may be parts of what one weight gives out, as queries, keys and values of one fused projection are. Each
part may need an order of its own, which only the units of the weight that it comes from can be given.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from mupscale.core import Axis
from mupscale.planning.copied_values import axis_of_units
from mupscale.planning.following import Follower
from mupscale.planning.guesses import Dim, Side

_MOST_UNITS = 256  # that are asked one by one
_WHOLE = 1e-6  # how far a ratio of gradients may be from a whole number


def operations_before(follower: Follower, position: int, wanted: Collection[int] | None = None) -> Iterator[int]:
    """The operations that an operation's arguments come from, the nearest first; at the end, those of an output.

    wanted: the numbers of some of the arguments, where not all are meant.

    >>> from torch import nn
    >>> from mupscale.planning.guesses import Guess
    >>> from mupscale.planning.tracing import record_run
    >>> run = record_run(nn.Sequential(nn.Tanh(), nn.ReLU()), torch.ones(2))
    >>> list(operations_before(Follower(*[Side(run, {}, ()) for _ in "ab"], Guess()), position=1))
    [0]
    """
    operations = follower.small.run.operations
    makers = {number: i for i, op in enumerate(operations[:position]) for number in op.results if number is not None}
    if wanted is None:
        is_output = position >= len(operations)
        wanted = [follower.small.run.outputs[position - len(operations)]] if is_output else operations[position].refs
    waiting = {makers[number] for number in wanted if number in makers}
    while waiting:
        latest = max(waiting)
        waiting.remove(latest)
        yield latest
        waiting |= {makers[number] for number in operations[latest].refs if makers.get(number, latest) < latest}


class SourceUnits:
    """For the arguments of one operation: which units of weights each of their units comes from, in both models."""

    def __init__(self, follower: Follower, position: int) -> None:
        self.follower, self.position = follower, position
        self.known: dict[tuple[bool, int, int], dict[Dim, list[Tensor]] | None] = {}

    def order(self, source: Dim, changed: Mapping[tuple[int, int], Axis]) -> Axis | None:
        """The order of a weight's units that gives dimensions of arguments these orders and leaves the others.

        changed: by number of the argument, and dimension. None where there is none, or where nothing is to be changed.
        """
        follower, (name, dim) = self.follower, source
        n, wide = (side.weights[name].shape[dim] for side in (follower.small, follower.large))
        current = follower.written[name].axes[dim]
        units, told = current.source(n), torch.full((wide,), -1)
        for spot, axis in changed.items():
            ours, theirs = (self._behind(is_wide, *spot, source) for is_wide in (False, True))
            if ours is None or theirs is None:
                return None
            for unit, copied in enumerate(axis.source(len(ours)).tolist()):
                rows, copies = ours[copied], theirs[unit]
                if len(rows) != len(copies) or bool(((told[copies] >= 0) & (told[copies] != rows)).any()):
                    return None
                told[copies] = rows
        units = torch.where(told >= 0, told, units)
        return axis_of_units(units, n, current.copies, self._borders(source))

    def _borders(self, source: Dim) -> set[int]:
        """Where, along a weight's dimension, the part ends that goes into one argument."""
        borders = set[int]()
        for number in dict.fromkeys(self.follower.small.run.operations[self.position].refs):
            for dim, sources in self.follower.sources.get(number, {}).items():
                each = self._behind(False, number, dim, source) if source in sources else None
                rows = torch.cat(each).unique() if each else torch.zeros(0)
                borders |= {int(row) + 1 for row in rows} ^ {int(row) for row in rows}
        return borders

    def _behind(self, is_wide: bool, number: int, dim: int, source: Dim) -> list[Tensor] | None:
        """For each unit of an argument's dimension, the units of the weight; none where that is too much to ask."""
        key = (is_wide, number, dim)
        if key not in self.known:
            side = self.follower.large if is_wide else self.follower.small
            sources = self.follower.sources[number][dim]
            try:
                self.known[key] = self._trace(side, number, dim, sources)
            except (RuntimeError, KeyError):  # what cannot be run once more on its own, or backwards
                self.known[key] = None
        found = self.known[key]
        return None if found is None else found.get(source)

    def _trace(self, side: Side, number: int, dim: int, sources: Collection[Dim]) -> dict[Dim, list[Tensor]] | None:
        """By source, the units behind each unit: at once where each goes into one alone, else one by one."""
        with torch.enable_grad():
            result, weights = self._run_again(side, number, {name for name, _ in sources})
            units = result.movedim(dim, 0)
            push = torch.randn(units.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
            each = (units * push.to(units.device)).real.flatten(1).sum(1)
            numbered = (each * torch.arange(1, len(each) + 1).to(each)).sum()
            plain, multiplied = (_rows(number, weights, sources) for number in (each.sum(), numbered))
            found = {source: _single(plain[source], multiplied[source], len(each)) for source in sources}
            if any(rows is None for rows in found.values()):
                if len(each) > _MOST_UNITS:
                    return None
                by_unit = [_rows(unit, weights, sources) for unit in each]
                return {s: [g[s].abs().amax(1).nonzero()[:, 0] for g in by_unit] for s in sources}
        return {source: rows for source, rows in found.items() if rows is not None}

    def _run_again(self, side: Side, number: int, names: Collection[str]) -> tuple[Tensor, dict[str, Tensor]]:
        """A tensor computed once more from the latest use of these weights on, with a graph; and the weights."""
        before = sorted(operations_before(self.follower, self.position, [number]))
        uses = {n: i for i in before for n in self.follower.weights_of(side.run.operations[i]) if n in names}
        weights = {name: side.weights[name].detach().requires_grad_() for name in uses}
        again: dict[int, Tensor] = {}
        for position in (i for i in before if i >= min(uses.values(), default=0)):
            op = side.run.operations[position]
            given = {name: weights[name] for name, use in uses.items() if use == position}
            arguments = {n: again[n] if n in again else self.follower.tensor(side, n, given) for n in op.refs}
            if op.changes_arguments or "batch_norm" in op.name:
                arguments = {n: tensor.clone() for n, tensor in arguments.items()}
            results = zip(op.results, op.run(arguments), strict=True)
            again |= {n: value for n, value in results if n is not None and isinstance(value, Tensor)}
        return again[number], weights


def _rows(number: Tensor, weights: Mapping[str, Tensor], sources: Collection[Dim]) -> dict[Dim, Tensor]:
    """The gradient of a number, for each source as a matrix with a row for each of its units."""
    names = list(weights)
    found = torch.autograd.grad(number, [weights[name] for name in names], retain_graph=True, allow_unused=True)
    gradients = dict(zip(names, found, strict=True))
    rows = {}
    for name, dim in sources:
        gradient = gradients.get(name)
        gradient = torch.zeros_like(weights[name]) if gradient is None else gradient
        rows[name, dim] = gradient.movedim(dim, 0).reshape(gradient.shape[dim], -1).cpu()
    return rows


def _single(plain: Tensor, numbered: Tensor, count: int) -> list[Tensor] | None:
    """The units behind each unit, where none goes into two: its gradient is multiplied by the number of that one."""
    largest = plain.abs().argmax(1, keepdim=True)
    a, b = plain.gather(1, largest)[:, 0], numbered.gather(1, largest)[:, 0]
    ratio = torch.where(a != 0, b / a, 0.0)
    numbers = ratio.round().long()
    if bool(((ratio - numbers).abs() > _WHOLE).any() or (numbers < 0).any() or (numbers > count).any()):
        return None
    order = numbers.argsort(stable=True)
    lengths: Sequence[int] = torch.bincount(numbers, minlength=count + 1).tolist()
    return list(order.split(list(lengths)))[1:]
