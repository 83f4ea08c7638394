"""Where following units got stuck: what to guess instead, and what to say if nothing helps."""

from __future__ import annotations

import copy
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction

from mupscale.core import Axis
from mupscale.planning.copied_values import possible_axes
from mupscale.planning.following import Follower
from mupscale.planning.growth_checks import How
from mupscale.planning.guesses import Accepted, Dim, Guess, Side, Stuck
from mupscale.planning.source_units import SourceUnits, operations_before
from mupscale.system import MupscaleError, as_asked, ways_out

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
        current, sources = follower.axes[number][dim], follower.sources[number][dim]
        same_sources = [
            (m, e) for m, e in arguments if follower.sources[m][e] == sources and follower.small.values[m].shape[e] == n
        ]
        for axis in possible_axes(n, wide, orders_there):
            if axis == current:
                continue
            for changed in ([(number, dim)], same_sources) if len(same_sources) > 1 else ([(number, dim)],):
                other = {m: dict(follower.axes[m]) for m, _ in changed}
                for m, e in changed:
                    other[m][e] = axis
                if isinstance(follower.attempt(position, other), Accepted):
                    for orders in (
                        *_traced_orders(follower, traced, changed, axis),
                        *_orders_of_sources(follower, sources, n, axis),
                    ):
                        yield replace(follower.guess, axes={**follower.guess.axes, **orders})


def _traced_orders(
    follower: Follower, traced: SourceUnits, changed: Sequence[tuple[int, int]], axis: Axis
) -> Iterator[dict[Dim, Axis]]:
    """The order of parameters' outputs that gives these dimensions of arguments this one, and nothing else another."""
    sources = frozenset[Dim]().union(*(follower.sources[number][dim] for number, dim in changed))
    spots = dict.fromkeys(changed, axis)
    found = {
        source: traced.order(source, {(m, e): a for (m, e), a in spots.items() if source in follower.sources[m][e]})
        for source in sources
    }
    orders = {source: order for source, order in found.items() if order is not None}
    if orders:
        yield _for_all_layers(follower, orders)


def _orders_of_sources(follower: Follower, sources: frozenset[Dim], n: int, axis: Axis) -> Iterator[dict[Dim, Axis]]:
    """The order that parameters' outputs must have for an activation of n units to have this one.

    The activation may be a part of them, their blocks flattened with positions, or their heads.
    """
    sizes = {spot: follower.small.weights[spot[0]].shape[spot[1]] for spot in sources}
    for is_section in (False, True):
        orders = {}
        for spot, size in sizes.items():
            block = Fraction(axis.block * size, n)
            if is_section and size > n:
                block = Fraction(axis.block)
            grows = follower.large.weights[spot[0]].shape[spot[1]] == size * axis.times
            if grows and block.denominator == 1 and size % int(block) == 0 and not axis.sections:
                orders[spot] = Axis(axis.times, int(block))
        if orders:
            yield _for_all_layers(follower, orders)
    for length in range(1, max(sizes.values(), default=0) + 1):  # flattened with the batch, or in some other way
        orders = {spot: Axis(axis.times, length) for spot, size in sizes.items() if size % length == 0}
        if orders and all(follower.large.weights[n].shape[d] == sizes[n, d] * axis.times for n, d in orders):
            yield _for_all_layers(follower, orders)


def _for_all_layers(follower: Follower, orders: Mapping[Dim, Axis]) -> dict[Dim, Axis]:
    """The same order for parameters of the same name and size in other layers."""
    patterns = {(_pattern(name), dim, follower.small.weights[name].shape): axis for (name, dim), axis in orders.items()}
    everywhere = dict(orders)
    for name, weight in follower.small.weights.items():
        for dim in range(weight.dim()):
            axis = patterns.get((_pattern(name), dim, weight.shape))
            if axis is not None:
                everywhere.setdefault((name, dim), axis)
    return everywhere


def _pattern(name: str) -> str:
    return re.sub(r"\d+", "#", name)


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
        yield from _with_own_folds(follower, position, factors)
        for factor in factors:
            yield from _with_folds(follower, position, factor)


def _with_own_folds(follower: Follower, position: int, factors: Sequence[float]) -> Iterator[Guess]:
    """A constant folded into one weight that the operation is the first to use, where nothing is off then."""
    for name, factor in itertools.product(follower.weights_of(follower.small.run.operations[position]), factors):
        folds = {**follower.guess.folds, name: (_exact(follower.guess.fold(name) / factor), 0.0)}
        trial = copy.copy(follower)
        trial.guess = replace(follower.guess, folds=folds)
        outcome = None if name in follower.written else trial.attempt(position)
        if isinstance(outcome, Accepted) and all(scale == 1.0 for _, scale in outcome.results.values()):
            yield trial.guess


def _with_folds(follower: Follower, position: int, factor: float) -> Iterator[Guess]:
    """A constant folded into weights: those of the operation itself, or of operations before it."""
    yield from _with_folds_into(follower, _foldable(follower, position), factor)


def _with_folds_into(follower: Follower, foldable: Iterable[list[str]], factor: float) -> Iterator[Guess]:
    """A constant folded into one of these sets of weights; one that is used twice in a product takes the root of it."""
    for names, power in itertools.product(foldable, (1.0, 0.5)):
        for offset in (0.0, 1.0):
            if offset and any(follower.small.weights[name].dim() > 1 for name in names):
                continue
            folds = dict(follower.guess.folds)
            for name in names:
                folds[name] = (_exact(follower.guess.fold(name) * abs(factor) ** -power), offset)
            yield replace(follower.guess, folds=folds)


def _foldable(follower: Follower, position: int) -> Iterator[list[str]]:
    run = follower.small.run
    if position < len(run.operations):
        yield from ([name] for name in follower.weights_of(run.operations[position]))
    yield from _upstream(follower, operations_before(follower, position))


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
    """What is wrong, where, and what to do about it: `how` the plan is to be used, where that is known.

    >>> from torch import nn
    >>> from mupscale.planning.tracing import record_run
    >>> follower = Follower(*[Side(record_run(nn.Identity(), 1), {}, ()) for _ in "ab"], Guess())
    >>> print(refusal(follower, Stuck(0, factor=2.0)))
    the wide model's output is 2 times the narrow one's, and ...
    """
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
    shapes = [f"{_shape(follower.small, n)} → {_shape(follower.large, n)}" for n in op.refs if _grows(follower, n)]
    what = f"{where} ({op.name} of {', '.join(shapes) or 'what does not grow'})"
    return MupscaleError(
        f"in {what} the wide units are not copies of the narrow ones, in any order that was tried{advice}"
    )


def _grows(follower: Follower, number: int) -> bool:
    return follower.kind(number) != "weight" and _shape(follower.small, number) != _shape(follower.large, number)


def _shape(side: Side, number: int) -> tuple[int, ...]:
    return tuple(side.values[number].shape) if number in side.values else ()
