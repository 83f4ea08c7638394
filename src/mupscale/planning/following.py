"""Following units through a run: the narrow and the wide model side by side, operation by operation.

Weights are generic, so a unit is known by its values. Every wide tensor has to be the narrow one, its units copied in
some order; and what flows back through the operation has to be the narrow gradient, shared out among the copies.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mupscale.core import Axis, expand, index_of_old
from mupscale.planning.back_through import BackThrough
from mupscale.planning.both_runs import BothRuns, tensors_of
from mupscale.planning.copied_values import (
    are_close,
    copies_of_each,
    explanations,
    factor_between,
    growing_dims,
    possible_axes,
)
from mupscale.planning.guesses import Accepted, Dim, Guess, Side, Stuck, Written
from mupscale.planning.tracing import Operation
from mupscale.system import MupscaleError, ways_out

_MOST_CHOICES = 40


class Follower(BothRuns):
    """One pass over both runs under a guess; what was found is in `written`, `axes` and `scales`."""

    def __init__(self, small: Side, large: Side, guess: Guess) -> None:
        super().__init__(small, large)
        self.guess = guess
        self.written: dict[str, Written] = {}
        self.written_at: dict[str, int] = {}
        self.unseen: set[str] = set()  # weights that met no data: experts without a token
        self.start = 0
        for number in small.run.inputs:
            self.note(number, {}, 1.0, {})
        for name, ours in small.weights.items():
            if ours.shape == large.weights[name].shape:
                self._write({name: Written({})})

    def go_on_from(self, earlier: Follower) -> None:
        """Take over what another pass found before the first operation for which the two guess differently."""
        changed = self.guess.differences(earlier.guess)
        operations = self.small.run.operations
        uses = (i for i, op in enumerate(operations) if changed and not changed.isdisjoint(earlier.weights_of(op)))
        start = next(uses, 0)
        if self.guess.products != earlier.guess.products or any(op.changes_arguments for op in operations[start:]):
            return  # what was written into is no longer what it was
        computed = {number for op in operations[:start] for number in op.results if number is not None}
        for side, theirs in ((self.small, earlier.small), (self.large, earlier.large)):
            side.values |= {number: value for number, value in theirs.values.items() if number in computed}
        for number in computed & earlier.axes.keys():
            self.note(number, earlier.axes[number], earlier.scales[number], earlier.sources[number])
        self.makers = {number: makers for number, makers in earlier.makers.items() if number in computed}
        for name, position in earlier.written_at.items():
            if position < start:
                self.written[name], self.written_at[name] = earlier.written[name], position
                self.large.weights[name] = earlier.large.weights[name]
        self.unseen = {name for name in earlier.unseen if name in self.written_at}
        self.start = start

    def follow(self) -> Stuck | None:
        """Go through the operations; where it gets stuck, or None."""
        for position, op in enumerate(self.small.run.operations):
            if position < self.start:
                continue
            kinds = {self.kind(number) for number in op.refs}
            is_weight = "data" not in kinds and "weight" in kinds
            if is_weight and not (self.guess.products and len(self.weights_of(op)) > 1):
                for number in (number for number in op.results if number is not None):
                    self.makers.setdefault(number, []).append(position)
            elif not is_weight and "data" not in kinds:
                self._compute_constant(position)
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
        return self._check_outputs()

    def _check_outputs(self) -> Stuck | None:
        for position, number in enumerate(self.small.run.outputs, len(self.small.run.operations)):
            scale = self.scales.get(number, 1.0)
            if not math.isclose(scale, 1.0, rel_tol=1e-7):
                return Stuck(position, scale)
        return None

    def _compute_constant(self, position: int) -> None:
        for side in (self.small, self.large):
            op = side.run.operations[position]
            for number, value in zip(op.results, op.run(side.values), strict=True):
                if number is not None:
                    side.values[number] = torch.zeros_like(value) if "empty" in op.name else value
        op = self.small.run.operations[position]
        _check_draws(op, *([side.values[n] for n in op.results if n is not None] for side in (self.small, self.large)))

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
        ours = self.results(self.small, position)
        is_scaled = any(self.scales.get(number, 1.0) != 1.0 for number in op.refs)
        off_by_factor = None
        for choice in itertools.islice(self._choices(position, axes), _MOST_CHOICES):
            self._write(choice)
            try:
                theirs = self.results(self.large, position, self._expanded(other or {}))
                _check_draws(op, ours, theirs)
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
        op = self.small.run.operations[position]
        axes = {number: self.axes[number] for number in op.refs if number in self.axes}
        for choice in self._choices(position, axes):
            self._write(choice)
            outputs = []
            for side in (self.small, self.large):
                given = {zeroed: torch.zeros_like(side.weights[zeroed])}
                tensors = {number: self.tensor(side, number, given).clone() for number in op.refs}
                outputs.append(tensors_of(side.run.operations[position].run(tensors))[0])
            for name in choice:
                del self.written[name]
            for _, factor in explanations(
                outputs[0], outputs[1], [a for by_dim in axes.values() for a in by_dim.values()]
            ):
                if factor != 1.0:
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
        spots = [(name, d) for name in names for d in grown[name] if self.is_contracted(position, name, d)]
        hints = [axis for by_dim in axes.values() for axis in by_dim.values()]
        options = [self._orders(spot, hints) for spot in spots]
        simplest = sorted(spots, key=lambda spot: (spot[0] in self.small.trained, len(grown[spot[0]])))
        undivided = (None, *simplest) if len(spots) > 1 else (None,)  # a sum over two weights divides one of them
        everything = itertools.product(self._outputs(grown, spots, hints), itertools.product(*options), undivided)
        for outputs, orders, not_summed in everything:
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
        spots = [(name, d) for name, dims in grown.items() for d in dims]
        free = [spot for spot in spots if spot not in inputs]
        blocks = range(1, min((self._sizes(spot)[0] for spot in free), default=0) + 1)
        orders = [
            {spot: self._output_order(spot, []) for spot in spots},
            {spot: self._output_order(spot, hints) for spot in spots},
        ]
        for block in blocks:
            if all(self._sizes(spot)[0] % block == 0 for spot in free):
                chosen = {spot: Axis(self._sizes(spot)[1] // self._sizes(spot)[0], block) for spot in free}
                orders.append({**orders[0], **chosen})
        unique = [order for i, order in enumerate(orders) if order not in orders[:i]]
        return [{name: {d: order[name, d] for d in dims} for name, dims in grown.items()} for order in unique]

    def _growing(self, name: str) -> tuple[int, ...]:
        narrow, wide = self.small.weights[name].shape, self.large.weights[name].shape
        dims = growing_dims(narrow, wide)
        if dims is None:
            raise MupscaleError(
                f"'{name}' of shape {tuple(narrow)} → {tuple(wide)} does not grow by a whole multiple. Build that size "
                "as a multiple of the width"
            )
        return dims

    def _output_order(self, spot: Dim, hints: Sequence[Axis]) -> Axis:
        """As guessed, or as an argument's units of the same number lie."""
        n, wide = self._sizes(spot)
        fitting = [axis for axis in possible_axes(n, wide, hints) if axis in hints]
        return fitting[0] if fitting else self.guess.axes.get(spot, Axis(wide // n))

    def _sizes(self, spot: Dim) -> tuple[int, int]:
        name, d = spot
        return self.small.weights[name].shape[d], self.large.weights[name].shape[d]

    def _orders(self, spot: Dim, hints: Sequence[Axis]) -> list[Axis]:
        guessed = [self.guess.axes[spot]] if spot in self.guess.axes else []
        return possible_axes(*self._sizes(spot), [*hints, *guessed])

    def _write(self, choice: Mapping[str, Written]) -> None:
        """Widen these weights."""
        for name, written in choice.items():
            fold, offset = self.guess.folds.get(name, (1.0, 0.0))
            summed = math.prod(int(written.axes[d].times) for d in written.inputs)
            weight = fold / summed
            wide = expand(self.small.weights[name], written.axes, scale=weight)
            self.large.weights[name] = wide.add_(offset * (weight - 1)) if offset else wide
            self.written[name] = written

    def _expanded(self, axes: Mapping[int, Mapping[int, Axis]]) -> dict[int, Tensor]:
        return {
            number: expand(self.small.values[number], by_dim, scale=self.scales[number])
            for number, by_dim in axes.items()
        }

    def _explain(
        self,
        position: int,
        axes: Mapping[int, dict[int, Axis]],
        choice: Mapping[str, Written],
        ours: Sequence[Any],
        theirs: Sequence[Any],
    ) -> Accepted | None:
        """The results' orders of copies and factors, checked backwards."""
        op = self.small.run.operations[position]
        names = self.weights_of(op)
        hints = [self.written[name].axes[d] for name in names for d in self.written[name].outputs]
        hints += [axis for by_dim in axes.values() for axis in by_dim.values()]
        used = [(n, a, b) for n, a, b in zip(op.results, ours, theirs, strict=True) if n is not None and n in self.used]
        numbers = [number for number, _, _ in used]
        each = [itertools.islice(explanations(a, b, hints), 6) for _, a, b in used]
        lazily = len(each) == 1 and not op.is_view  # the first is mostly right, and the others need not be looked for
        options = [] if lazily else [list(some) for some in each]
        is_clear = op.is_view and all(len(some) == 1 for some in options)
        for combination in ((one,) for one in each[0]) if lazily else itertools.product(*options):
            results = dict(zip(numbers, combination, strict=True))
            if is_clear or self._gradients_agree(position, axes, results, names):
                return Accepted(dict(choice), results)
        return None

    def _gradients_agree(
        self,
        position: int,
        axes: Mapping[int, dict[int, Axis]],
        results: Mapping[int, tuple[dict[int, Axis], float]],
        names: Sequence[str],
    ) -> bool:
        """Whether every copy of an argument gets its share of the narrow gradient, and every weight its own."""
        grows = any(axes.values()) or any(by_dim for by_dim, _ in results.values())
        if not grows:
            return True
        arguments = {number: by_dim for number, by_dim in axes.items() if self.small.values[number].is_floating_point()}
        generator = torch.Generator().manual_seed(position)
        names = [name for name in names if name in self.small.trained]
        ours = BackThrough(self.small, position, arguments, names, self.tensor, {})
        outputs = {number: value for number, value in ours.outputs.items() if number in results}
        if not outputs:
            return True
        push = {n: torch.randn(v.shape, generator=generator, dtype=v.dtype) for n, v in outputs.items()}
        expanded = {}
        for number, value in push.items():
            by_dim, factor = results[number]
            expanded[number] = expand(value, by_dim, scale=1 / (float(copies_of_each(by_dim)) * factor))
        theirs = BackThrough(self.large, position, arguments, names, self.tensor, self._expanded(axes))
        small, large = ours.pull(push), theirs.pull(expanded)
        for key, gradient in small.items():
            copied, share = self._share(key, axes)
            if not are_close(expand(gradient, copied, scale=share), large[key], loosened=10):
                return False
        return True

    def _share(self, key: int | str, axes: Mapping[int, dict[int, Axis]]) -> tuple[Mapping[int, Axis], float]:
        """How a gradient is copied, and the part of it that each copy gets."""
        if isinstance(key, int):
            return axes[key], 1 / (float(copies_of_each(axes[key])) * self.scales[key])
        written = self.written[key]
        out = math.prod(int(written.axes[d].times) for d in written.outputs)
        return written.axes, 1 / (out * self.guess.fold(key))

    def _accept(self, position: int, accepted: Accepted) -> None:
        """Compute the operation for good on both sides."""
        self._write(accepted.written)
        self.written_at |= dict.fromkeys(accepted.written, position)
        op = self.small.run.operations[position]
        if any(self.small.values[number].numel() == 0 for number in op.refs if number in self.axes):
            self.unseen |= set(accepted.written)
        sources = self._sources(op)
        for side in (self.small, self.large):
            tensors = {number: self.tensor(side, number) for number in op.refs}
            if "batch_norm" in op.name:
                tensors = {n: t.clone() if self.kind(n) == "weight" else t for n, t in tensors.items()}
            operation = side.run.operations[position]
            for number, value in zip(op.results, operation.run(tensors), strict=True):
                if number is not None and isinstance(value, Tensor):
                    side.values[number] = torch.zeros_like(value) if "empty" in op.name else value
        for number in op.results:
            if number is None:
                continue
            axes, scale = accepted.results.get(number, ({}, 1.0))
            self.note(number, axes, scale, dict.fromkeys(axes, sources))
            ours, theirs = self.small.values[number], self.large.values[number]
            if number in accepted.results and torch._debug_has_internal_overlap(theirs) == 0:
                theirs.copy_(expand(ours, axes, scale=scale) if scale != 1.0 or axes else ours)  # no rounding adds up

    def _sources(self, op: Operation) -> frozenset[Dim]:
        """The parameters' dimensions that the units of the results come from."""
        names = self.weights_of(op)
        own = {(name, d) for name in names for d in self.written[name].outputs}
        contracts = any(self.written[name].inputs for name in names)
        earlier = {each for n in op.refs for dims in self.sources.get(n, {}).values() for each in dims}
        return frozenset(own if own and contracts else own | earlier)


def _check_draws(op: Operation, ours: Sequence[Any], theirs: Sequence[Any]) -> None:
    """An error where random numbers are drawn for more units at another width; else they are the same in both runs."""
    if op.is_random and [t.shape for t in tensors_of(ours)] != [t.shape for t in tensors_of(theirs)]:
        raise MupscaleError(
            f"'{op.module or 'the model'}' draws random numbers for units that grow ({op.name}), which differ at a "
            f"different width{ways_out('; ', off='switch that off to plan by running', no_inputs='leave out inputs=')}"
        )
