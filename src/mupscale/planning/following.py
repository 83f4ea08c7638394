"""Following units through a run: the narrow and the wide model side by side, operation by operation.

Weights are generic, so a unit is known by its values. Every wide tensor has to be the narrow one, its units copied in
some order; and what flows back through the operation has to be the narrow gradient, shared out among the copies. Where
a pass gets stuck, another guess of the orders and constants is made.
"""

from __future__ import annotations

import copy
import itertools
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn

from mupscale.core import Axis, Role, check_same_names, expand, index_of_old, naming, tidy
from mupscale.planning.comparing import are_close
from mupscale.planning.from_modules import ONE_DEPTH, How, build_plan, find_role, folds_of_buffers
from mupscale.planning.tracing import (
    Operation,
    RecordedRun,
    all_tensors,
    in_float64,
    record_run,
    saved_tensors,
    without_copies,
)
from mupscale.system import MupscaleError, as_asked, ways_out

Axes = Mapping[int, Axis]
_MOST_COMBINATIONS = 64


def growing_dims(narrow: Sequence[int], wide: Sequence[int]) -> tuple[int, ...] | None:
    """The dimensions along which a shape grows; none where it does not fit.

    One that grows by no whole multiple may join parts that do with parts that stay.
    """
    if len(narrow) != len(wide):
        return None
    dims = tuple(d for d, (n, m) in enumerate(zip(narrow, wide, strict=True)) if n != m)
    return dims if all(0 < narrow[d] < wide[d] for d in dims) else None


def possible_axes(n: int, wide: int, hints: Iterable[Axis] = ()) -> list[Axis]:
    """Every order in which n units can be copied to so many: the hints that fit first, then blocks of any length.

    Of a size that is no whole multiple, the hints alone can tell which part of it stays.
    """

    def fits(axis: Axis) -> bool:
        parts = axis.sections or ((n, axis.block),)
        whole = sum(length for length, _ in parts) == n
        uncut = all(length % block == 0 for length, block in parts if block)
        return whole and uncut and axis.wide(n) == wide

    blocks = [Axis(wide // n, block) for block in range(1, n + 1) if n % block == 0 and wide % n == 0]
    return list(dict.fromkeys([*filter(fits, hints), *blocks]))


def explanations(narrow: Tensor, wide: Tensor, hints: Iterable[Axis]) -> Iterator[tuple[dict[int, Axis], float]]:
    """Orders of copies, and factors, under which the wide tensor is the narrow one; most likely ones first.

    >>> x = torch.tensor([[1.0, 2.0], [3.0, 5.0]])
    >>> next(explanations(x, x.repeat_interleave(2, 1) * 3, []))
    ({1: Axis(times=2, block=1, sections=(), side='')}, 3.0)
    >>> next(explanations(torch.arange(1.0, 5), torch.tensor([1.0, 2, 1, 2, 3, 3, 4, 4]), []))  # in unequal blocks
    ({0: Axis(times=2, block=1, sections=((2, 2), (2, 1)), side='')}, 1.0)
    """
    dims = growing_dims(narrow.shape, wide.shape)
    if dims is None:
        return
    narrow, wide, hints = narrow.detach(), wide.detach(), list(hints)
    choices = [possible_axes(narrow.shape[d], wide.shape[d], hints) for d in dims]
    if dims and (narrow.numel() == 0 or bool((narrow == narrow.flatten()[0]).all())):
        choices = [each[:3] for each in choices]  # all alike: every order explains it
    found = False

    def orders() -> Iterator[tuple[Axis, ...]]:
        yield from itertools.islice(itertools.product(*choices), _MOST_COMBINATIONS)
        if not found:  # else it would show what was found once more
            yield from _read_axes(narrow, wide, dims, {axis.copies for axis in hints if axis.times != 1})

    for axes in orders():
        by_dim = dict(zip(dims, axes, strict=True))
        factor = factor_between(expand(narrow, by_dim), wide)
        if factor is not None:
            found = True
            yield by_dim, factor


def _read_axes(
    narrow: Tensor, wide: Tensor, dims: Sequence[int], multiples: Collection[int]
) -> Iterator[tuple[Axis, ...]]:
    """The orders that the values show: parts that were joined or split off may each have blocks of their own.

    multiples: by which units may grow where some stay, so that sizes do not tell.
    """
    if not dims or not narrow.numel() or not narrow.is_floating_point():
        return
    shape = [1 if d in dims else n for d, n in enumerate(narrow.shape)]
    push = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(narrow)
    axes = []
    for dim in dims:
        grown = [d for d in dims if d != dim]  # along which the mean is the same, whatever the order

        def number(t: Tensor, dim: int = dim, grown: list[int] = grown) -> Tensor:
            """One for each unit."""
            pushed = (t.mean(grown, keepdim=True) if grown else t) * push
            return pushed.movedim(dim, 0).reshape(t.shape[dim], -1).sum(1)

        ours, theirs = number(narrow), number(wide)
        times, stay = divmod(len(theirs), len(ours))
        factor = 1.0 if stay else theirs.mean() / ours.mean()  # what stays changes the mean
        ordered, places = (ours * factor).sort()
        nearest = torch.bucketize(theirs, (ordered[1:] + ordered[:-1]) / 2)
        units = places[nearest].cpu()
        found = (axis_of_units(units, len(ours), k) for k in (sorted(multiples) if stay else [times]))
        axis = next((axis for axis in found if axis is not None), None)
        if axis is None:
            return
        axes.append(axis)
    yield tuple(axes)


def axis_of_units(units: Tensor, n: int, times: int, borders: Collection[int] = ()) -> Axis | None:
    """The axis that copies n units in this order (the narrow unit of each wide one); None where none does.

    Where there are fewer than so many times as many units, those that occur once stay.

    borders: where a part with blocks of its own may end, so that parts are told apart even where blocks are equal.

    >>> axis_of_units(torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 4, 4, 5, 5]), 6, 2)
    Axis(times=2, block=1, sections=((4, 4), (2, 1)), side='')
    >>> axis_of_units(torch.tensor([0, 0, 1, 1, 2]), 3, 2)
    Axis(times=2, block=1, sections=((2, 1), (1, 0)), side='')
    """
    sections: list[tuple[int, int]] = []
    start, wide_start, may_stay = 0, 0, len(units) < n * times
    while start < n:
        ahead = units[wide_start:]
        again = (ahead[1:] == start).nonzero()
        block = int(again[0]) + 1 if len(again) else 0
        length = block or 1
        copies = torch.arange(start, start + length).repeat(times if block else 1)
        if not (block or may_stay) or not torch.equal(ahead[: len(copies)], copies):
            return None
        if sections and sections[-1][1] == block and start not in borders:
            sections[-1] = (sections[-1][0] + length, block)
        else:
            sections.append((length, block))
        start, wide_start = start + length, wide_start + len(copies)
    if wide_start != len(units):
        return None
    blocks = {block for _, block in sections}
    return Axis(times, blocks.pop()) if len(blocks) == 1 else Axis(times, sections=tuple(sections))


def factor_between(expected: Tensor, actual: Tensor) -> float | None:
    """By what the actual tensor is a multiple of the expected one; none where it is no multiple."""
    if expected.shape != actual.shape or expected.dtype != actual.dtype:
        return None
    if not expected.is_floating_point():
        return 1.0 if torch.equal(expected, actual) else None
    if are_close(expected, actual):
        return 1.0
    finite = expected.isfinite() & actual.isfinite()
    a, b = expected[finite].double(), actual[finite].double()
    size = float(a @ a)
    factor = float(a @ b) / size if size else 0.0
    if factor and math.isfinite(factor) and are_close(expected * factor, actual):
        return factor
    return None


def _shared_out(narrow: Tensor, axes: Axes, among: Collection[int], scale: float = 1.0) -> Tensor:
    """A tensor copied along its axes, and each entry shared out among its copies along some of the dimensions."""
    copies = math.prod((axes[d].times for d in among), start=1)
    return expand(narrow, axes, scale=scale / float(copies), shared=among)


Dim = tuple[str, int]


@dataclass(frozen=True)
class Guess:
    """What is assumed before a pass: the order of copies of parameters' dimensions, and constants folded into them.

    products: whether what is computed from several weights is followed as data are (a learned query, projected), or is
    one weight (a sum of low-rank factors). own_constants: whether constants of the wide model may hold the narrow one's
    between others (ALiBi's slopes), which is enough for fresh units; copies of the narrow one's are then taken instead.
    known_folds: of buffers whose module says that they are copied so, as singular vectors are, whoever sums over them.
    """

    axes: Mapping[Dim, Axis] = field(default_factory=dict)
    folds: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    products: bool = False
    own_constants: bool = False
    known_folds: Mapping[str, float] = field(default_factory=dict)

    def fold(self, name: str) -> float:
        """The constant folded into a parameter or buffer."""
        return self.constants(name)[0]

    def constants(self, name: str) -> tuple[float, float]:
        """The constant folded into a parameter or buffer, and what its module adds to it."""
        return self.folds.get(name, (self.known_folds.get(name, 1.0), 0.0))


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


@dataclass
class Side:
    """One of the two models: its run, its weights by name, which of them are trained, and what was computed so far."""

    run: RecordedRun
    weights: dict[str, Tensor]
    trained: Collection[str]
    values: dict[int, Tensor] = field(default_factory=dict)


def tensors_of(values: Sequence[Any]) -> list[Tensor]:
    return [value for value in values if isinstance(value, Tensor)]


Applied = tuple[dict[int | str, Tensor], list[Any]]
"""Of an operation on one side, with a graph: arguments and weights that gradients are wanted of; and the results."""


def _pulled(applied: Applied, push: Mapping[int, Tensor]) -> dict[int | str, Tensor]:
    """Gradients of the arguments and weights, for these of the results, by their places."""
    leaves, results = applied
    with torch.enable_grad():  # one number, since torch loads its compiler for seconds to check given gradients
        total = torch.stack([(results[i] * each.conj()).real.sum() for i, each in push.items()]).sum()
    tensors = list(leaves.values())
    gradients = torch.autograd.grad(total, tensors, allow_unused=True, retain_graph=True, materialize_grads=True)
    dense = (gradient.to_dense() for gradient in gradients)  # those of an Embedding(sparse=True) are not
    return dict(zip(leaves, dense, strict=True))


_MOST_CHOICES = 40


class Follower:
    """One pass over both runs under a guess; what was found is in `written`, `axes`, `scales` and `sources`.

    These are of every tensor that depends on the batch: its order of copies, its factor, and where its units come from.
    """

    def __init__(self, small: Side, large: Side, guess: Guess) -> None:
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
        self.guess = guess
        self.written: dict[str, Written] = {}
        self.unseen: set[str] = set()  # weights that met no data: experts without a token
        for number in small.run.inputs:
            self.note(number, {}, 1.0, {})
        for name, ours in small.weights.items():
            if ours.shape == large.weights[name].shape:
                self._write({name: Written({})})

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
            name = self.small.run.names.get(number)
            if name in self.small.weights:  # also of one that is written in place: what it held may have been read
                names[name] = None
        return list(names)

    def is_contracted(self, position: int, name: str, dim: int) -> bool:
        """Whether changing one unit of a weight changes all of the result, and not a part of it."""
        side = self.small if self.small.weights[name].shape[dim] > 1 else self.large
        op, weight = side.run.operations[position], side.weights[name]

        def results(given: Mapping[str, Tensor]) -> list[Tensor]:
            """For dense arguments, so that no zero hides an effect."""
            generator, tensors = torch.Generator().manual_seed(position), {}
            for number in op.refs:
                value = self.tensor(side, number, given)
                if number in self.axes and value.is_floating_point():
                    value = torch.randn(value.shape, generator=generator, dtype=value.dtype).to(value.device)
                tensors[number] = value
            return tensors_of(op.run(tensors))

        before = results({})
        for index in dict.fromkeys((0, weight.shape[dim] - 1, weight.shape[dim] // 2, weight.shape[dim] // 3)):
            changed = weight.clone()
            changed.select(dim, index).mul_(1.7).add_(0.3 * float(weight.abs().mean()))
            after = results({name: changed})
            differs = [(a != b) & ~(a.isnan() & b.isnan()) for a, b in zip(before, after, strict=True)]
            for touched in itertools.islice((d for d in differs if bool(d.any())), 1):
                if all(bool(touched.movedim(e, 0).reshape(n, -1).any(1).all()) for e, n in enumerate(touched.shape)):
                    return True  # where another unit does not: what multiplies that one may be zero, as a sine is
        return False

    def note(self, number: int, axes: Mapping[int, Axis], scale: float, sources: Mapping[int, frozenset[Dim]]) -> None:
        self.axes[number], self.scales[number], self.sources[number] = dict(axes), scale, dict(sources)

    def follow(self) -> Stuck | None:
        """Go through the operations; where it gets stuck, or None."""
        for position, op in enumerate(self.small.run.operations):
            kinds = {self.kind(number) for number in op.refs}
            is_weight = "data" not in kinds and "weight" in kinds
            if is_weight and not (self.guess.products and len(self.weights_of(op)) > 1):
                for number in (number for number in op.results if number is not None):
                    self.makers.setdefault(number, []).append(position)
            elif not is_weight and "data" not in kinds:
                made = []
                for side in (self.small, self.large):
                    made.append(side.run.operations[position].run(side.values, in_place=True))
                    side.values |= {n: value for n, value in zip(op.results, made[-1], strict=True) if n is not None}
                _check_draws(op, *made)
            else:
                for number in op.refs if self.guess.own_constants else ():
                    self._take_narrow_constant(number)
                outcome = self.attempt(position)
                for other in self._free_orders(position) if isinstance(outcome, Stuck) else ():
                    if isinstance(outcome := self.attempt(position, other), Accepted):
                        self.axes |= other
                        break
                if isinstance(outcome, Stuck):
                    return outcome
                self._accept(position, outcome)
        for position, number in enumerate(self.small.run.outputs, len(self.small.run.operations)):
            if not math.isclose(scale := self.scales.get(number, 1.0), 1.0, rel_tol=1e-7):
                return Stuck(position, scale)
        return None

    def _take_narrow_constant(self, number: int) -> None:
        """Go on with copies of a narrow constant, where the wide one has that at old units.

        Whether the wide model is right with its own constant has to be tried with its old units alone.
        """
        if self.kind(number) != "constant":
            return
        ours, theirs = (side.values[number] for side in (self.small, self.large))
        dims = growing_dims(ours.shape, theirs.shape) or ()
        for d in dims if len(dims) == 1 else ():
            for axis, last in itertools.product(possible_axes(ours.shape[d], theirs.shape[d]), (False, True)):
                if factor_between(ours, theirs[index_of_old(tuple(ours.shape), {d: replace(axis, last=last)})]) == 1.0:
                    self.large.values[number] = expand(ours, {d: axis})
                    return

    def attempt(self, position: int, other: Mapping[int, dict[int, Axis]] | None = None) -> Accepted | Stuck:
        """Try an operation, with other orders of copies for some of its arguments; nothing is changed for good.

        Parameters that occur for the first time are widened: their outputs as guessed, their inputs in every order.
        """
        op = self.small.run.operations[position]
        axes = {number: self.axes[number] for number in op.refs if number in self.axes} | dict(other or {})
        floats = [number for number in axes if self.small.values[number].is_floating_point()]
        names = [name for name in self.weights_of(op) if name in self.small.trained]

        def applied(side: Side, instead: Mapping[int, Tensor]) -> Applied:
            with torch.enable_grad():
                leaves: dict[Any, Tensor] = {name: side.weights[name].detach().requires_grad_() for name in names}
                for n in floats:
                    leaves[n] = instead.get(n, side.values[n]).detach().requires_grad_()
                known = {**instead, **leaves}
                found = {n: known[n] if n in known else self.tensor(side, n, leaves) for n in op.refs}
                return leaves, side.run.operations[position].run(found)

        try:
            ours = applied(self.small, {})
        except RuntimeError as error:
            raise _not_run_again(op, error) from error
        expanded = {
            number: expand(self.small.values[number], by_dim, scale=self.scales[number])
            for number, by_dim in (other or {}).items()
        }
        is_scaled = any(self.scales.get(number, 1.0) != 1.0 for number in op.refs)
        off_by_factor = None
        for choice in itertools.islice(self._choices(position, axes), _MOST_CHOICES):
            self._write(choice)
            try:
                theirs = applied(self.large, expanded)
                _check_draws(op, ours[1], theirs[1])
                accepted = self._explain(position, axes, choice, ours, theirs)
            except RuntimeError:  # these shapes do not go together
                accepted = None
            finally:
                for name in choice:
                    del self.written[name]
            if accepted is not None and (is_scaled or all(factor == 1.0 for _, factor in accepted.results.values())):
                return accepted
            off_by_factor = off_by_factor or accepted
        return off_by_factor or Stuck(position)

    def _free_orders(self, position: int) -> Iterator[dict[int, dict[int, Axis]]]:
        """Other orders for arguments along which all entries are equal, as those of a key that serves many heads are.

        Every order explains such an argument, so that the first one was taken when it was made.
        """
        for number in dict.fromkeys(self.small.run.operations[position].refs):
            axes = self.axes.get(number, {})
            for d, axis in axes.items():
                ours = self.small.values[number]
                if torch.equal(ours, ours.narrow(d, 0, 1).expand_as(ours)):
                    for other in possible_axes(ours.shape[d], ours.shape[d] * axis.copies):
                        if other != axis:
                            yield {number: {**axes, d: other}}

    def factor_without(self, position: int, zeroed: str) -> float | None:
        """By what the operation would be off if one of its weights were zero; none where it would not be a multiple."""
        axes = {n: self.axes[n] for n in self.small.run.operations[position].refs if n in self.axes}
        hints = [axis for by_dim in axes.values() for axis in by_dim.values()]
        for choice in itertools.islice(self._choices(position, axes), _MOST_CHOICES):
            self._write(choice)
            outputs = []
            for side in (self.small, self.large):
                op, given = side.run.operations[position], {zeroed: torch.zeros_like(side.weights[zeroed])}
                outputs.append(tensors_of(op.run({n: self.tensor(side, n, given) for n in op.refs}))[0])
            for name in choice:
                del self.written[name]
            factors = (factor for _, factor in explanations(outputs[0], outputs[1], hints) if factor != 1.0)
            if (factor := next(factors, None)) is not None:
                return factor
        return None

    def _choices(self, position: int, axes: Mapping[int, Mapping[int, Axis]]) -> Iterator[dict[str, Written]]:
        """How the weights that occur for the first time may be widened."""
        op = self.small.run.operations[position]
        names = [name for name in self.weights_of(op) if name not in self.written]
        if not names:
            yield {}
            return
        grown = {name: self._growing(name) for name in names}
        unknown = [name for name in names if name not in self.guess.known_folds]
        spots = [(name, d) for name in unknown for d in grown[name] if self.is_contracted(position, name, d)]
        hints = [axis for by_dim in axes.values() for axis in by_dim.values()]
        options = [
            possible_axes(*self._sizes(spot), [*hints, *([guessed] if (guessed := self.guess.axes.get(spot)) else [])])
            for spot in spots
        ]
        simplest = sorted(spots, key=lambda spot: (spot[0] in self.small.trained, len(grown[spot[0]])))
        # a sum over two weights divides one of them, and a norm of a table none
        undivided = (None, *simplest) if len(spots) > 1 or not axes else (None,)
        outs = self._outputs(grown, spots, hints)
        alike_first = sorted(
            itertools.product(*options), key=lambda orders: len({*orders})
        )  # as what is summed over is
        both = itertools.product(outs, alike_first) if len(spots) < 2 else ((o, a) for a in alike_first for o in outs)
        for (outputs, orders), not_summed in itertools.product(both, undivided):
            chosen = dict(zip(spots, orders, strict=True))
            yield {
                name: Written(
                    {d: chosen.get((name, d), axis) for d, axis in outputs[name].items()},
                    tuple(d for d in grown[name] if (name, d) in chosen and (name, d) != not_summed),
                )
                for name in names
            }

    def _outputs(
        self, grown: Mapping[str, tuple[int, ...]], inputs: Sequence[Dim], hints: Sequence[Axis]
    ) -> list[dict[str, dict[int, Axis]]]:
        """Orders for what weights give out: as guessed, as the arguments lie, and in blocks of any length."""
        sizes = {(name, d): self._sizes((name, d)) for name, dims in grown.items() for d in dims}
        free = {spot: pair for spot, pair in sizes.items() if spot not in inputs}
        possible = {spot: possible_axes(*pair, hints) for spot, pair in sizes.items()}
        if not all(possible.values()):  # what joins units that grow with others that do not, as no argument does
            return []
        in_single_units = {
            spot: Axis(wide // n) if wide % n == 0 else possible[spot][0] for spot, (n, wide) in sizes.items()
        }
        guessed = {spot: self.guess.axes.get(spot, axis) for spot, axis in in_single_units.items()}
        fitting = {spot: [a for a in axes if a in hints] for spot, axes in possible.items()}
        orders = [guessed, {spot: [*fitting[spot], guessed[spot]][0] for spot in sizes}]
        for block in range(1, min((n for n, _ in free.values()), default=0) + 1):
            if all(n % block == 0 for n, _ in free.values()):
                orders.append({**guessed, **{spot: Axis(wide // n, block) for spot, (n, wide) in free.items()}})
        unique = [order for i, order in enumerate(orders) if order not in orders[:i]]
        return [{name: {d: order[name, d] for d in dims} for name, dims in grown.items()} for order in unique]

    def _growing(self, name: str) -> tuple[int, ...]:
        narrow, wide = self.small.weights[name].shape, self.large.weights[name].shape
        dims = growing_dims(narrow, wide)
        if dims is None:
            raise MupscaleError(
                f"'{name}' of shape {tuple(narrow)} → {tuple(wide)} becomes narrower, or has no units to grow from. "
                "Build the wide model at least as wide"
            )
        return dims

    def _sizes(self, spot: Dim) -> tuple[int, int]:
        name, d = spot
        return self.small.weights[name].shape[d], self.large.weights[name].shape[d]

    def _write(self, choice: Mapping[str, Written]) -> None:
        """Widen these weights."""
        for name, written in choice.items():
            fold, offset = self.guess.constants(name)
            narrow = self.small.weights[name]
            wide = _shared_out(narrow + offset if offset else narrow, written.axes, written.inputs, fold)
            self.large.weights[name] = wide.sub_(offset) if offset else wide
            self.written[name] = written

    def _explain(
        self,
        position: int,
        axes: Mapping[int, dict[int, Axis]],
        choice: Mapping[str, Written],
        ours: Applied,
        theirs: Applied,
    ) -> Accepted | None:
        """The results' orders of copies and factors, checked backwards."""
        op = self.small.run.operations[position]
        hints = [self.written[name].axes[d] for name in self.weights_of(op) for d in self.written[name].outputs]
        hints += [axis for by_dim in axes.values() for axis in by_dim.values()]
        used = {n: i for i, n in enumerate(op.results) if n is not None and n in self.used}
        sizes = [pair for i in used.values() for pair in zip(ours[1][i].shape, theirs[1][i].shape, strict=False)]
        if any(n and wide % n for n, wide in sizes):
            hints += self._joined(op, axes)
        each = [itertools.islice(explanations(ours[1][i], theirs[1][i], hints), 6) for i in used.values()]
        lazily = len(each) == 1 and not op.is_view  # the first is mostly right, and the others need not be looked for
        options = [] if lazily else [list(some) for some in each]
        is_clear = op.is_view and all(len(some) == 1 for some in options)
        for combination in ((one,) for one in each[0]) if lazily else itertools.product(*options):
            results = dict(zip(used, combination, strict=True))
            places = {used[number]: found for number, found in results.items()}
            if is_clear or self._gradients_agree(position, axes, places, ours, theirs):
                return Accepted(dict(choice), results)
        return None

    def _joined(self, op: Operation, axes: Mapping[int, Mapping[int, Axis]]) -> list[Axis]:
        """How the arguments' units lie one after another, along each dimension, where some grow and others do not."""
        shapes = {n: self.tensor(self.small, n).shape for n in op.refs}
        joined = []
        for d in range(max((len(shape) for shape in shapes.values()), default=0)):
            found = {axes[n][d].times for n in op.refs if d in axes.get(n, {})}
            if len(found) != 1 or not all(d < len(shape) for shape in shapes.values()):
                continue
            sections: list[tuple[int, int]] = []
            for number in op.refs:
                length, axis = shapes[number][d], axes.get(number, {}).get(d)
                for part, block in [(length, 0)] if axis is None else axis.sections or [(length, axis.block)]:
                    before = sections.pop()[0] if sections and sections[-1][1] == block else 0
                    sections.append((before + part, block))
            if any(not block for _, block in sections):
                joined.append(Axis(found.pop(), sections=tuple(sections)))
        return joined

    def _gradients_agree(
        self,
        position: int,
        axes: Mapping[int, dict[int, Axis]],
        results: Mapping[int, tuple[dict[int, Axis], float]],
        ours: Applied,
        theirs: Applied,
    ) -> bool:
        """Whether every copy of an argument gets its share of the narrow gradient, and every weight its own.

        results: the orders of copies and the factor of each, by its place.
        """
        pushed = {i: ours[1][i] for i in results if ours[1][i].requires_grad}
        if not pushed or not (any(axes.values()) or any(by_dim for by_dim, _ in results.values())):
            return True
        generator = torch.Generator().manual_seed(position)
        push = {i: torch.randn(v.shape, generator=generator, dtype=v.dtype).to(v.device) for i, v in pushed.items()}
        expanded = {
            i: _shared_out(value, axes_of_result, [*axes_of_result], 1 / factor)
            for i, value in push.items()
            for axes_of_result, factor in [results[i]]
        }
        small, large = _pulled(ours, push), _pulled(theirs, expanded)
        for key, gradient in small.items():
            if isinstance(key, int):
                expected = _shared_out(gradient, axes[key], [*axes[key]], 1 / self.scales[key])
            else:
                written = self.written[key]
                expected = _shared_out(gradient, written.axes, written.outputs, 1 / self.guess.fold(key))
            if not are_close(expected, large[key], loosened=10):
                return False
        return True

    def _accept(self, position: int, accepted: Accepted) -> None:
        """Compute the operation for good on both sides."""
        self._write(accepted.written)
        op = self.small.run.operations[position]
        if any(self.small.values[number].numel() == 0 for number in op.refs if number in self.axes):
            self.unseen |= set(accepted.written)
        names = self.weights_of(op)  # the units of the results come from these, or from where those of arguments do
        own = {(name, d) for name in names for d in self.written[name].outputs}
        contracts = any(self.written[name].inputs for name in names)
        earlier = {each for n in op.refs for dims in self.sources.get(n, {}).values() for each in dims}
        sources = frozenset(own if own and contracts else own | earlier)
        for side in (self.small, self.large):
            tensors = {number: self.tensor(side, number) for number in op.refs}
            results = zip(op.results, side.run.operations[position].run(tensors, in_place=True), strict=True)
            side.values |= {n: value for n, value in results if n is not None and isinstance(value, Tensor)}
        for number in op.results:
            if number is None:
                continue
            axes, scale = accepted.results.get(number, ({}, 1.0))
            self.note(number, axes, scale, dict.fromkeys(axes, sources))
            ours, theirs = self.small.values[number], self.large.values[number]
            if number in accepted.results and torch._debug_has_internal_overlap(theirs) == 0:
                theirs.copy_(expand(ours, axes, scale=scale) if scale != 1.0 or axes else ours)  # no rounding adds up


def _check_draws(op: Operation, ours: Sequence[Any], theirs: Sequence[Any]) -> None:
    """An error where random numbers are drawn for more units at another width; else they are the same in both runs."""
    if op.is_random and [t.shape for t in tensors_of(ours)] != [t.shape for t in tensors_of(theirs)]:
        raise MupscaleError(
            f"'{op.module or 'the model'}' draws random numbers for units that grow ({op.name}), which differ at a "
            f"different width{ways_out('; ', off='switch that off to plan by running', no_inputs='leave out inputs=')}"
        )


def _not_run_again(op: Operation, error: RuntimeError) -> MupscaleError:
    """Of an operation that ran with the model, and that torch refuses to run, or to differentiate, on its own."""
    said = " ".join(str(error).split())
    ways = ways_out(plain="compute it with operations that torch can differentiate", no_inputs="leave out inputs=")
    return MupscaleError(f"'{op.module or 'the model'}' runs {op.name}, which cannot be followed ({said}){ways}")


_MOST_UNITS = 256  # that are asked one by one
_WHOLE = 1e-6  # how far a ratio of gradients may be from a whole number


def operations_before(follower: Follower, position: int, wanted: Collection[int] | None = None) -> Iterator[int]:
    """The operations that an operation's arguments come from, the nearest first; at the end, those of an output.

    wanted: the numbers of some of the arguments, where not all are meant.
    """
    run, operations = follower.small.run, follower.small.run.operations
    if wanted is None:
        is_output = position >= len(operations)
        wanted = [run.outputs[position - len(operations)]] if is_output else operations[position].refs
    waiting = {made for number in wanted if (made := run.maker(number, position)) is not None}
    while waiting:
        latest = max(waiting)
        waiting.remove(latest)
        yield latest
        waiting |= {made for n in operations[latest].refs if (made := run.maker(n, latest)) is not None}


class SourceUnits:
    """For the arguments of one operation: which units of weights each of their units comes from, in both models."""

    def __init__(self, follower: Follower, position: int) -> None:
        self.follower, self.position = follower, position
        self.known: dict[tuple[bool, int, int], dict[Dim, list[Tensor]] | None] = {}

    def orders(self, changed: Sequence[tuple[int, int]], axis: Axis) -> dict[Dim, Axis]:
        """The orders of weights' units that give these dimensions of arguments this one, and nothing else another."""
        sources = {spot: self.follower.sources[spot[0]][spot[1]] for spot in changed}
        found = {
            source: self._order(source, [spot for spot in changed if source in sources[spot]], axis)
            for source in frozenset[Dim]().union(*sources.values())
        }
        return {source: order for source, order in found.items() if order is not None}

    def _order(self, source: Dim, changed: Sequence[tuple[int, int]], axis: Axis) -> Axis | None:
        """The order of a weight's units that gives dimensions of arguments this one and leaves the others, if any."""
        follower, (name, dim) = self.follower, source
        n, wide = (side.weights[name].shape[dim] for side in (follower.small, follower.large))
        current = follower.written[name].axes[dim]
        units, told = current.source(n), torch.full((wide,), -1)
        for spot in changed:
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
            results = zip(op.results, op.run(arguments), strict=True)
            again |= {n: value for n, value in results if n is not None and isinstance(value, Tensor)}
        return again[number], weights


def _rows(number: Tensor, weights: Mapping[str, Tensor], sources: Collection[Dim]) -> dict[Dim, Tensor]:
    """The gradient of a number, for each source as a matrix with a row for each of its units."""
    tensors = list(weights.values())
    found = torch.autograd.grad(number, tensors, retain_graph=True, allow_unused=True, materialize_grads=True)
    gradients = dict(zip(weights, found, strict=True))
    rows = {(name, dim): gradients[name].movedim(dim, 0).cpu() for name, dim in sources}
    return {source: gradient.reshape(len(gradient), -1) for source, gradient in rows.items()}


def _single(plain: Tensor, numbered: Tensor, count: int) -> list[Tensor] | None:
    """The units behind each unit, where none goes into two: its gradient is multiplied by the number of that one."""
    largest = plain.abs().argmax(1, keepdim=True)
    a, b = plain.gather(1, largest)[:, 0], numbered.gather(1, largest)[:, 0]
    ratio = torch.where(a != 0, b / a, 0.0)
    numbers = ratio.round().long()
    if bool(((ratio - numbers).abs() > _WHOLE).any() or (numbers < 0).any() or (numbers > count).any()):
        return None
    return [(numbers == number).nonzero()[:, 0] for number in range(1, count + 1)]


_FOLDS_UPSTREAM = 5  # operations with weights, back from where a factor shows


def suggestions(follower: Follower, stuck: Stuck) -> Iterator[Guess]:
    """Guesses that may get further than this pass did, most likely ones first."""
    if stuck.factor is not None:
        yield from _with_folds(follower, stuck.position, stuck.factor)
    else:
        yield from _with_other_orders(follower, stuck.position)
        yield from _without_factors(follower, stuck.position)


def _with_other_orders(follower: Follower, position: int) -> Iterator[Guess]:
    """Another order of copies for the units of an argument, if the operation would then do.

    Units copied one by one come first, to be copied as another argument's are: blocks were found for a reason.
    """
    op = follower.small.run.operations[position]
    arguments = [(n, d) for n in dict.fromkeys(op.refs) for d in follower.axes.get(n, {})]
    arguments.sort(key=lambda spot: follower.axes[spot[0]][spot[1]].block)
    orders_there = [follower.axes[n][d] for n, d in arguments]
    traced = SourceUnits(follower, position)
    for number, dim in arguments:
        n, wide = (side.values[number].shape[dim] for side in (follower.small, follower.large))
        sources = follower.sources[number][dim]
        same_sources = [
            (m, e) for m, e in arguments if follower.sources[m][e] == sources and follower.small.values[m].shape[e] == n
        ]
        for axis in possible_axes(n, wide, orders_there):
            if axis == follower.axes[number][dim]:
                continue
            for changed in ([(number, dim)], same_sources) if len(same_sources) > 1 else ([(number, dim)],):
                other = {m: dict(follower.axes[m]) for m, _ in changed}
                for m, e in changed:
                    other[m][e] = axis
                if isinstance(follower.attempt(position, other), Accepted):
                    for orders in (traced.orders(changed, axis), *_equal_blocks(follower, sources, axis)):
                        if orders:
                            everywhere = _for_all_layers(follower, orders)
                            yield replace(follower.guess, axes={**follower.guess.axes, **everywhere})


def _equal_blocks(follower: Follower, sources: frozenset[Dim], axis: Axis) -> Iterator[dict[Dim, Axis]]:
    """Blocks of one length for parameters' outputs: the axis's own, else any, where these are flattened in some way."""
    sizes = {spot: follower.small.weights[spot[0]].shape[spot[1]] for spot in sources}
    for length in dict.fromkeys((axis.block, *range(1, max(sizes.values(), default=0) + 1))):
        orders = {spot: Axis(axis.times, length) for spot, size in sizes.items() if size % length == 0}
        if all(follower.large.weights[n].shape[d] == sizes[n, d] * axis.times for n, d in orders):
            yield orders


def _for_all_layers(follower: Follower, orders: Mapping[Dim, Axis]) -> dict[Dim, Axis]:
    """The same order for parameters of the same name and size in other layers."""
    kinds = {name: (re.sub(r"\d+", "#", name), weight.shape) for name, weight in follower.small.weights.items()}
    patterns = {(kinds[name], dim): axis for (name, dim), axis in orders.items()}
    spots = ((name, dim) for name, (_, shape) in kinds.items() for dim in range(len(shape)))
    return {(n, d): patterns[kinds[n], d] for n, d in spots if (kinds[n], d) in patterns} | dict(orders)


def _without_factors(follower: Follower, position: int) -> Iterator[Guess]:
    """Where an argument, or the operation but for one of its weights, is off by a factor: that folded in somewhere."""
    op = follower.small.run.operations[position]
    scales = {number: follower.scales[number] for number in op.refs if number in follower.scales}
    factors = [scale for scale in scales.values() if scale != 1.0]
    if len({*scales.values()}) > 1:  # what belongs to one argument is made up for before the two meet
        for number, scale in scales.items():
            if scale != 1.0:
                upstream = _upstream(follower, operations_before(follower, position, [number]))
                yield from _with_folds_into(follower, upstream, scale)
    for name in follower.weights_of(op):
        factor = follower.factor_without(position, name)
        factors += [factor] if factor is not None else []
    for factor in dict.fromkeys(factors):
        yield from _with_folds(follower, position, factor)
    if not factors:  # inside one operation, such as attention whose heads grow
        times = {float(axis.times) for number in op.refs for axis in follower.axes.get(number, {}).values()}
        powers = {t**power for t in times for power in (0.5, 1.0, -0.5, -1.0)}
        factors = sorted(powers, key=lambda factor: abs(factor - 1.4))
        for name, factor in itertools.product(follower.weights_of(op), factors):
            trial = copy.copy(follower)  # with a constant folded into one weight that the operation is the first to use
            folds = {**follower.guess.folds, name: (_exact(follower.guess.fold(name) / factor), 0.0)}
            trial.guess = replace(follower.guess, folds=folds)
            outcome = None if name in follower.written else trial.attempt(position)
            if isinstance(outcome, Accepted) and all(scale == 1.0 for _, scale in outcome.results.values()):
                yield trial.guess
        for factor in factors:
            yield from _with_folds(follower, position, factor)


def _with_folds(follower: Follower, position: int, factor: float) -> Iterator[Guess]:
    """A constant folded into weights: those of the operation itself, or of operations before it."""
    here = follower.small.run.operations[position : position + 1]
    own = ([name] for op in here for name in follower.weights_of(op))
    upstream = _upstream(follower, operations_before(follower, position))
    yield from _with_folds_into(follower, itertools.chain(own, upstream), factor)


def _with_folds_into(follower: Follower, foldable: Iterable[list[str]], factor: float) -> Iterator[Guess]:
    """A constant folded into one of these sets of weights; one that is used twice in a product takes the root of it."""
    for names, power, offset in itertools.product(foldable, (1.0, 0.5), (0.0, 1.0)):
        if not offset or all(follower.small.weights[name].dim() < 2 for name in names):
            own = {n: (_exact(follower.guess.fold(n) * abs(factor) ** -power), offset) for n in names}
            yield replace(follower.guess, folds={**follower.guess.folds, **own})


def _upstream(follower: Follower, earlier_operations: Iterable[int]) -> Iterator[list[str]]:
    """The weights of the nearest of these operations, and of several of them together."""
    sets: list[list[str]] = []
    for earlier in earlier_operations:
        names = follower.weights_of(follower.small.run.operations[earlier])
        if names and names not in sets:
            sets.append(names)
        if len(sets) == _FOLDS_UPSTREAM:
            break
    for count, names in enumerate(sets):
        yield names
        if count:
            yield list(dict.fromkeys(itertools.chain(*sets[: count + 1])))


def _exact(number: float) -> float:
    """The number, its rounding taken off: a small fraction, or the root of one."""
    for power in (1, 2):
        fraction = Fraction(number**power).limit_denominator(4096)
        if fraction and math.isclose(fraction, number**power, rel_tol=1e-9):
            return float(float(fraction) ** (1 / power))
    return number


def refusal(follower: Follower, stuck: Stuck, how: How | None = None) -> MupscaleError:
    """What is wrong, where, and what to do about it: `how` the plan is to be used, where that is known."""
    operations = follower.small.run.operations
    ways = {"size": "leave that size as it is", "roles": "pass roles= for what the run cannot show"}
    if how == "copies":
        fresh = as_asked("grow=mupscale.Fresh()", "--how fresh")
        ways["fresh"] = f"try fresh units, which need no copies ({fresh})"
    advice = ways_out(**ways)
    if stuck.position >= len(operations):
        return MupscaleError(
            f"the wide model's output is {stuck.factor:.6g} times the narrow one's, and no weight that was tried can "
            f"compensate for it{advice}"
        )
    op = operations[stuck.position]
    where = f"'{op.module}'" if op.module else "the model"
    sides = follower.small.values, follower.large.values
    pairs = [[tuple(values[n].shape) for values in sides] for n in op.refs if all(n in values for values in sides)]
    shapes = [f"{ours} → {theirs}" for ours, theirs in pairs if ours != theirs]
    what = f"{where} ({op.name} of {', '.join(shapes) or 'what does not grow'})"
    if _uses_numbers_of_the_width(follower, stuck.position):
        table = "register the table as a buffer that is saved (persistent) instead of computing it in forward"
        size = f"{ways['size']} (of rotary embeddings head_dim: grow the number of heads)"
        tables = {"table": table, **{name: way for name, way in ways.items() if name != "roles"}, "size": size}
        return MupscaleError(
            f"{what} uses numbers that the model computes from its width, as sinusoids of positions are, and those of "
            f"the wide model are no copies of the narrow one's{ways_out(**tables)}"
        )
    return MupscaleError(
        f"in {what} the wide units are not copies of the narrow ones, in any order that was tried{advice}"
    )


def _uses_numbers_of_the_width(follower: Follower, position: int) -> bool:
    """Whether constants of the wide model, behind weights too, are no copies of the narrow one's."""
    operations, sides = follower.small.run.operations, (follower.small, follower.large)
    waiting, seen = list(operations[position].refs), set[int]()
    while waiting:
        number = waiting.pop()
        if number in seen:  # what is written in place is made of itself
            continue
        seen.add(number)
        for maker in follower.makers.get(number, ()):
            waiting += operations[maker].refs
        if follower.kind(number) == "constant" and all(number in side.values for side in sides):
            ours, theirs = (side.values[number] for side in sides)
            alike = (w.flatten().sort()[0] for w in follower.small.weights.values() if w.numel() == ours.numel())
            is_own = ours.shape != theirs.shape and ours.is_floating_point()  # indices choose, and are no such numbers
            is_own = is_own and next(explanations(ours, theirs, []), None) is None
            if is_own and not any(torch.equal(w, ours.flatten().sort()[0]) for w in alike):  # a weight past autograd
                return True
    return False


_MOST_PASSES = 25


def roles_by_running(
    narrow: nn.Module,
    wide: nn.Module,
    inputs: Any,
    given: Mapping[str, Role] | None = None,
    how: How | None = None,
    *,
    own_constants: bool = False,
) -> dict[str, Role]:
    """The role of every parameter and saved buffer that the models use on this batch, under all their names.

    given: roles by pattern, which the search begins with, beside what modules say; None to begin with nothing.
    how: what the roles are for, which a refusal then gives advice for. own_constants: as in Guess.
    """
    search = _Search(narrow, wide, inputs, how)
    first_names = {alias: group[0] for group in naming.aliases(all_tensors(narrow).items()) for alias in group}
    known = {name: float(fold) for name, fold in folds_of_buffers(narrow, wide, given or {}).items()}
    guess = Guess(own_constants=own_constants, known_folds=known)
    if given is not None:
        with suppress(MupscaleError):
            plan = build_plan(narrow, wide, roles=given, assume=True)
            entries = {**plan.buffers, **plan.parameters}
            axes = {(name, d): a for name, entry in entries.items() for d, a in entry.axes.items() if a.times != 1}
            told = {n: e for n, e in entries.items() if any(find_role(given, alias) for alias in e.names)}
            folds = {name: (float(e.fold), float(e.offset)) for name, e in told.items() if e.fold != 1}
            guess = replace(guess, axes=axes, folds=folds)
    error = None
    for products in (False, True):
        try:
            roles = search.roles(replace(guess, products=products))
        except MupscaleError as refused:
            error = error or refused
        else:
            roles |= _computed_buffers(search.small, search.large)
            return {alias: roles[name] for alias, name in first_names.items() if name in roles}
    raise error or AssertionError("no error, and no roles")


def _computed_buffers(small: nn.Module, large: nn.Module) -> dict[str, Role]:
    """Buffers that no state dict holds and that the wide model computes itself, where they are copies all the same."""
    saved, theirs = saved_tensors(small), naming.buffers(large)
    roles = {}
    for name, buffer in naming.buffers(small).items():
        if name not in saved and name in theirs and buffer.shape != theirs[name].shape:
            axes = next((axes for axes, factor in explanations(buffer, theirs[name], []) if factor == 1.0), {})
            if len(set(axes.values())) == 1:
                roles[name] = Role(out=tuple(axes), out_block=next(iter(axes.values())).block)
    return roles


class _Search:
    """Pass after pass over the two runs, each under a better guess."""

    def __init__(self, narrow: nn.Module, wide: nn.Module, inputs: Any, how: How | None) -> None:
        self.how = how
        self.small, self.batch = in_float64(narrow, inputs, generic=0)
        self.large, _ = in_float64(wide, inputs, like=narrow)
        ours, theirs = saved_tensors(self.small), saved_tensors(self.large)
        check_same_names("the narrow model", ours, "the wide model", theirs, ONE_DEPTH, what="parameter or buffer")
        self.narrow_run, self.wide_run = self._first_runs()
        if why := naming.why_not_a_copy(narrow, self.narrow_run.leaves.values()):
            ways = ways_out(forward="refer to it in forward instead", no_inputs="leave out inputs=")
            raise MupscaleError(f"{why}{ways}")
        self.compared = _comparable(self.narrow_run, self.wide_run)
        self.passes = 0

    def _first_runs(self) -> tuple[RecordedRun, RecordedRun]:
        """Of both models, with a gradient for every weight, frozen ones too.

        Torch runs other operations for what is frozen: one model may be, and the other not. What is frozen today may be
        trained after growth. But a model may write into its frozen weights, which torch refuses where they are trained.
        """
        parameters = [p for model in (self.small, self.large) for p in model.parameters()]
        frozen = [p for p in parameters if not p.requires_grad]
        for p in frozen:
            p.requires_grad_(p.is_floating_point())
        try:
            return record_run(self.small, self.batch).run, record_run(self.large, self.batch).run
        except MupscaleError:
            if not frozen:
                raise
        for p in frozen:
            p.requires_grad_(False)
        return record_run(self.small, self.batch).run, record_run(self.large, self.batch).run

    def follow(self, guess: Guess) -> tuple[Follower, Stuck | None]:
        """One pass; where the wide model went another way (experts), again with the weights known by then."""
        self.passes += 1
        reached = -1
        while True:
            narrow_run, wide_run, shared = self.compared
            small, large = (
                Side(replace(run, operations=run.operations[:shared]), saved_tensors(model), naming.parameters(model))
                for run, model in ((narrow_run, self.small), (wide_run, self.large))
            )
            follower = Follower(small, large, guess)
            stuck = follower.follow()
            is_whole = shared == max(len(narrow_run.operations), len(wide_run.operations))
            is_fixed = is_whole and not any(op.depends_on_values for op in narrow_run.operations)
            if is_fixed or (is_whole and stuck is None) or len(follower.written) <= reached:
                break
            reached = len(follower.written)
            if not self._record_again(follower):
                break
        if stuck is None and not is_whole:
            op = (narrow_run if shared < len(narrow_run.operations) else wide_run).operations[shared]
            ways = ways_out("; ", build="build them alike but for their widths", no_inputs="leave out inputs=")
            where = op.module or "the model"
            raise MupscaleError(
                f"the two models do not run the same operations: they differ from '{where}' on ({op.name}){ways}"
            )
        return follower, stuck

    def _record_again(self, follower: Follower) -> bool:
        """Run the wide model with what is known of its weights; whether it did anything else, or by other numbers."""
        with torch.no_grad():
            for name, weight in saved_tensors(self.large).items():
                if name in follower.written:
                    weight.copy_(follower.large.weights[name])
        runs = self.wide_run, record_run(self.large, self.batch).run
        self.wide_run = runs[1]
        self.compared = _comparable(self.narrow_run, self.wide_run)
        steps = [[(op.function, op.args, op.kwargs) for op in run.operations] for run in runs]
        first, second = ({n: leaf for n, leaf in run.leaves.items() if n not in run.names} for run in runs)
        return steps[0] != steps[1] or any(n not in second or not torch.equal(t, second[n]) for n, t in first.items())

    def roles(self, guess: Guess) -> dict[str, Role]:
        """What the pass that came through says of every weight that met data; an error where no guess helps.

        Nothing of a weight that is copied in several orders at once, as a recurrent layer's: its module knows it.
        """
        self.passes = 0
        follower, _ = self._get_past(*self.follow(guess), [guess])
        seen = {name: written for name, written in follower.written.items() if name not in follower.unseen}
        roles = {name: _role(name, written, follower.guess) for name, written in seen.items()}
        return {name: role for name, role in roles.items() if role is not None}

    def _get_past(
        self, follower: Follower, stuck: Stuck | None, tried: list[Guess], goal: int | None = None
    ) -> tuple[Follower, Stuck | None]:
        """Better guesses until one comes through, or past a position; an error where none does."""
        while stuck is not None and (goal is None or stuck.position <= goal):
            if stuck.factor is None and _uses_numbers_of_the_width(follower, stuck.position):
                raise refusal(follower, stuck, self.how)  # no order of weights makes up for it
            for better in suggestions(follower, stuck):
                if better in tried:
                    continue
                tried.append(better)
                other, where = self.follow(better)
                # what makes an output right may be wrong for another reader of the same units, such as a second head
                is_of_order = stuck.factor is not None and where is not None and where.factor is None
                if where and is_of_order and where.position not in operations_before(follower, stuck.position):
                    with suppress(MupscaleError):
                        other, where = self._get_past(other, where, tried, stuck.position)
                if where is None or where.position > stuck.position:
                    follower, stuck = other, where
                    break
                if self.passes > _MOST_PASSES:
                    raise refusal(follower, stuck, self.how)
            else:
                raise refusal(follower, stuck, self.how)
        return follower, stuck


def _comparable(ours: RecordedRun, theirs: RecordedRun) -> tuple[RecordedRun, RecordedRun, int]:
    """The two runs, and how many operations they have in common; without copies in memory if they part before."""
    shared = 0
    for is_plain in (False, True):
        if is_plain:
            ours, theirs = without_copies(ours), without_copies(theirs)
        pairs = enumerate(zip(ours.operations, theirs.operations, strict=False))
        lengths = len(ours.operations), len(theirs.operations)
        parted = (i for i, (a, b) in pairs if (a.function, a.refs, a.results) != (b.function, b.refs, b.results))
        shared = next(parted, min(lengths))
        if shared == max(lengths):
            break
    return ours, theirs, shared


def _role(name: str, written: Written, guess: Guess) -> Role | None:
    pairs = [(number, Fraction(number).limit_denominator(4096)) for number in guess.constants(name)]
    fold, offset = (tidy(fraction) if float(fraction) == number else number for number, fraction in pairs)
    inputs, outputs = ([written.axes[d] for d in dims] for dims in (written.inputs, written.outputs))
    if any(len(set(axes)) > 1 for axes in (inputs, outputs)):
        return None
    out, in_ = (axes[0] if axes else 1 for axes in (outputs, inputs))
    return Role(written.outputs, written.inputs, out, in_, fold, offset=offset)
