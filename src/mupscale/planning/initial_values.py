"""The law by which a parameter starts, as freshly built models show it: one for all its entries, or one for each part.

Parts lie along one axis, as in a packed q|k|v, or the gates of a recurrent layer, one after another or unit by unit.
What no such law explains (identity plus noise, values that rise along an axis) is a pattern: new units take the values
that the wide model is built with.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mupscale.core import Axis, Entry, Initial, Plan, part_of_units, places

_FEW_NUMBERS, _ENOUGH_NUMBERS = 4, 256  # of a parameter in one model, and in all that are drawn
_SMALL_MODEL = 10_000  # numbers of a model that may be drawn often
_PIECE = 1 << 20  # numbers that are measured in double precision at a time
_MONOTONE = 8  # numbers of which no random draw is sorted
_MOST_PARTS = 16  # equal parts of an axis with a law each, such as the gates of a recurrent layer
_CHANCE = 6.0  # standard errors that chance does not reach
_ENOUGH_TO_TELL = 1 << 17  # numbers of a large tensor that are looked at for parts and patterns
_LONG_ROW = 64  # numbers from which a row's mean and variance have about a normal distribution
_MANY = 128  # numbers that show the shape of their distribution
_MANY_FOR_SHAPE, _FLAT = 512, 2.1  # numbers that tell a uniform distribution from a normal one, by this kurtosis
_SKEWED, _HEAVY = 0.5, 5.0  # a skewness and a kurtosis that are no normal or uniform distribution's

Axes = Mapping[int, Axis]


@dataclass(frozen=True)
class Layout:
    """How the parts of an axis lie: `run` units of each of them by turns, until the axis ends."""

    dim: int
    count: int
    run: int

    def sums(self, by_unit: Tensor) -> Tensor:
        """From one number for each unit to the sum over each part."""
        return by_unit.reshape(-1, self.count, self.run).sum(dim=(0, 2))

    def labels(self, units: int) -> Tensor:
        """The part of each unit."""
        return part_of_units(units, self.count, self.run)


def measure_laws(
    draws: Sequence[Mapping[str, Tensor]],
    stds: Mapping[str, float],
    axes_of: Callable[[str], Axes],
    *,
    as_built: bool = False,
) -> dict[str, Initial]:
    """How each parameter starts, as freshly built models show it.

    stds: from `initial_std`. axes_of: from a name to the parameter's width axes. as_built: the wide model itself is
    measured, whose values are at hand, so that they are taken wherever one law does not do.
    """
    laws = {}
    for name, std in stds.items():
        axes, samples = axes_of(name), [draw[name].detach() for draw in draws]
        if std == 0:
            laws[name] = _law_of_constants(samples[0], axes)
            continue
        without_padding = _without_zero_rows(samples, axes)
        if is_one_law(without_padding, axes):
            mean = _mean_beyond_chance(samples, std)
            laws[name] = Initial(std, (mean,), shape="uniform" if _is_uniform(without_padding) else "normal")
            continue
        of_parts = None if as_built else _law_of_parts(without_padding, axes)
        laws[name] = of_parts or Initial(_spread_between(samples, std), ())
    return laws


def initial_std(draws: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
    """Std of each parameter over freshly initialised models; 0 where it is constant, or the same in every draw."""
    stds = {}
    for name, first in draws[0].items():
        if len(draws) > 1 and all(torch.equal(first, draw[name]) for draw in draws[1:]):
            stds[name] = 0.0
        elif first.numel() < _FEW_NUMBERS and first.numel() * len(draws) >= _ENOUGH_NUMBERS:  # about one mean for all
            stds[name] = math.sqrt(_variance(torch.cat([draw[name].detach().flatten() for draw in draws])))
        else:
            stds[name] = math.sqrt(sum(_variance(draw[name]) for draw in draws) / len(draws))
    return stds


def count_draws(draws: Sequence[Mapping[str, Tensor]], names: Collection[str]) -> int:
    """How many models to draw for the spread of these parameters: more where a small model has few numbers of one."""
    few = [
        p.numel()
        for name, p in draws[0].items()
        if name in names and 0 < p.numel() < _FEW_NUMBERS and not all(torch.equal(p, draw[name]) for draw in draws[1:])
    ]
    if not few or sum(p.numel() for p in draws[0].values()) > _SMALL_MODEL:
        return len(draws)
    return max(len(draws), _ENOUGH_NUMBERS // min(few))


# ---------------------------------------------------------------------------------------- laws at the wide width


def with_laws(plan: Plan, entries: Mapping[str, Entry], laws: Mapping[str, Initial]) -> Plan:
    """The plan with the laws that μP has at its wide width.

    entries: how the measured model becomes the wide one. laws: as measured.
    """
    return plan.with_laws({name: law_at_width(law, entries[name]) for name, law in laws.items()})


def law_at_width(law: Initial, entry: Entry) -> Initial:
    """The law under μP of a tensor that grows as the entry says, from the law of the one that it grows from."""
    fold, offset, spread = float(entry.fold), float(entry.offset), entry.init
    means = None if law.means is None else tuple(part * fold + offset * (fold - 1) for part in law.means)
    std = None if law.std is None else law.std * spread
    wide = replace(law, std=std, means=means, stds=tuple(one * spread for one in law.stds))
    if len(law.means or ()) < 2:
        return wide
    run = _run_at_width(law, entry)
    return replace(wide, means=(), stds=(), run=0) if run is None else replace(wide, run=run)


def _run_at_width(law: Initial, entry: Entry) -> int | None:
    """How many units of a part follow each other in the wide tensor; 0 for equal parts, None where nothing tells."""
    count = len(law.means or ())
    axis = entry.axes.get(law.dim, Axis())
    if axis.times == 1:
        return law.run
    if not law.run:
        return 0 if _stay_equal_parts(law, entry.stacked) else None
    is_each_block_whole = axis.block % (law.run * count) == 0
    return law.run if is_each_block_whole else None


def _stay_equal_parts(law: Initial, entry: Entry) -> bool:
    """Whether every unit is in the same of the equal parts of the wide tensor as before: not where blocks are wider."""
    count, narrow, wide = len(law.means or ()), entry.narrow[law.dim], entry.wide[law.dim]
    if narrow % count or wide % count:
        return False
    now = part_of_units(wide, count)[places(entry.axes[law.dim], narrow)]
    return bool((now == part_of_units(narrow, count)).all())


# ---------------------------------------------------------------------------------------- constants


def _law_of_constants(values: Tensor, axes: Axes) -> Initial:
    """The constants of the fewest parts along an axis; no means where they are too many, or of one unit each."""
    if values.numel() == 0 or not values.dim():
        return Initial(0.0, (float(values) if values.numel() else 0.0,))
    for layout in _layouts(values.shape, {0: Axis(), **axes}, at_least=1):
        units = values.shape[layout.dim]
        if layout.count > 1 and layout.count > units // 2:
            continue
        rows = values.double().movedim(layout.dim, 0).reshape(units, -1)
        firsts = rows[[int(torch.argmax((layout.labels(units) == part).int())) for part in range(layout.count)], 0]
        if torch.equal(rows, firsts[layout.labels(units)][:, None].expand_as(rows)):
            if layout.count == 1:
                return Initial(0.0, (float(firsts),))
            return _in_parts(0.0, firsts.tolist(), [], layout, axes.get(layout.dim, Axis()), units)
    return Initial(0.0, ())


def _in_parts(
    std: float, means: Sequence[float], stds: Sequence[float], layout: Layout, axis: Axis, units: int
) -> Initial:
    """The law of parts that lie so; equal parts, each of them once, stay that whatever the width."""
    is_once = layout.run * layout.count == units and (axis.block == 1 or axis.block % units)
    return Initial(std, tuple(means), stds=tuple(stds), dim=layout.dim, run=0 if is_once else layout.run)


def _layouts(shape: Sequence[int], axes: Axes, at_least: int = 2) -> Iterator[Layout]:
    """How parts may lie along the axes, those of the fewest parts first.

    Gates may be one after another, or take turns in every block; the sections of a packed axis are whole numbers of
    equal parts.
    """
    for count in range(at_least, max(shape, default=0) + 1):
        for dim, axis in axes.items():
            units = shape[dim] if dim < len(shape) else 0
            if units == 0 or units % count:
                continue
            sections = [length for length, _ in axis.at(units).sections] if axis.sections else []
            is_section = bool(sections) and count == units // math.gcd(*sections)
            if count > _MOST_PARTS and not is_section:
                continue
            is_each_block = axis.block > 1 and axis.block % count == 0 and axis.block < units
            if is_each_block and count > 1:
                yield Layout(dim, count, axis.block // count)
            yield Layout(dim, count, units // count)


# ---------------------------------------------------------------------------------------- what is drawn


class _UnitScores:
    """How far the mean and the variance of each unit along a dimension lie from those of all, in standard errors.

    Each score has a variance of 1 where all entries follow one law. numbers: of one unit, in all draws together; of a
    large tensor some of them are looked at.
    """

    def __init__(self, samples: Sequence[Tensor], dim: int) -> None:
        step = _step(sum(sample.numel() for sample in samples))
        by_unit = [sample.movedim(dim, 0).reshape(sample.shape[dim], -1)[:, ::step] for sample in samples]
        rows = torch.cat(by_unit, 1).double().cpu()
        self.units, self.numbers = rows.shape
        self.lowest, self.highest = rows.amin(1), rows.amax(1)
        self.centred = rows - rows.mean()
        squares = self.centred.square()
        self.variance = max(float(squares.mean()), 1e-300)
        self.sums_of_squares = squares.sum(1)
        unequal = squares - self.variance
        self.of_squares = max(float(unequal.square().mean()), 1e-300)
        self.means = self.centred.sum(1) / math.sqrt(self.variance * self.numbers)
        self.variances = unequal.sum(1) / math.sqrt(self.of_squares * self.numbers)

    def has_constants_apart(self, layout: Layout) -> bool:
        """Whether some parts are constants, and others are drawn."""
        per_part = self.units // layout.count * self.numbers
        if layout.count < 2 or per_part < 2:
            return False
        lowest = self.lowest.reshape(-1, layout.count, layout.run).amin((0, 2))
        is_constant = lowest == self.highest.reshape(-1, layout.count, layout.run).amax((0, 2))
        return bool(is_constant.any()) and not bool(is_constant.all())

    def differ(self, layout: Layout) -> bool:
        """Whether a part has another mean or variance than all entries, more than chance explains."""
        if layout.count < 2:
            return False
        per_part = self.units // layout.count
        apart = math.sqrt(per_part * (1 - 1 / layout.count))
        if float((layout.sums(self.means) / apart).abs().max()) > _CHANCE:
            return True
        of_variances = (layout.sums(self.variances) / apart).abs()
        numbers = per_part * self.numbers
        shares = layout.sums(self.sums_of_squares) / (numbers * self.variance)
        error_of_share = math.sqrt(self.of_squares / numbers) / self.variance
        in_logarithms = shares.clamp(min=1e-300).log().abs() / error_of_share
        # of few numbers the variance is skewed to one side and its logarithm to the other, so both have to say so
        return bool((torch.minimum(of_variances, in_logarithms) > _CHANCE).any())

    def are_coupled(self, layout: Layout) -> bool:
        """Whether parts tell of each other, as copies do, or gates of which one is the other's negative."""
        if layout.count < 2:
            return False
        parts = self.centred.reshape(-1, layout.count, layout.run, self.numbers).transpose(0, 1).flatten(1)
        products = parts @ parts.T / (self.variance * math.sqrt(parts.shape[1]))
        return bool((products.triu(1).abs() > _CHANCE).any())

    def change_along(self) -> bool:
        """Whether means or variances rise or fall along the axis, or differ from unit to unit."""
        if self.units * self.numbers < _LONG_ROW or self.units < 2:
            return False
        place = torch.arange(self.units, dtype=torch.float64)
        place = place - place.mean()
        slope = place / place.norm()
        if max(abs(float(self.means @ slope)), abs(float(self.variances @ slope))) > _CHANCE:
            return True
        if self.numbers < _LONG_ROW:
            return False
        excess = [float(score.square().sum()) - self.units for score in (self.means, self.variances)]
        return max(excess) > 2 * _CHANCE * math.sqrt(2 * self.units)


def _law_of_parts(samples: Sequence[Tensor], axes: Axes) -> Initial | None:
    """The fewest parts of one axis that each follow a law of their own; None where there is one law, or none helps."""
    shape = samples[0].shape
    scores = {dim: _UnitScores(samples, dim) for dim in axes if dim < len(shape)}
    for layout in _layouts(shape, {dim: axes[dim] for dim in scores}):
        score = scores[layout.dim]
        if not (score.has_constants_apart(layout) or score.differ(layout)):
            continue
        has_odd_parts = any(_has_another_shape([part]) for part in _parts_of(samples, layout) if _spread(part))
        if not has_odd_parts and is_one_law(_standardised(samples, layout, *_moments(samples, layout)), axes):
            means, stds = _moments_together(samples, layout)
            if is_one_law(_standardised(samples, layout, means, stds), axes):
                of_all = math.sqrt(sum(std**2 for std in stds) / len(stds))
                law = _in_parts(of_all, means, stds, layout, axes[layout.dim], shape[layout.dim])
                is_uniform = _is_uniform(_standardised(samples, layout, means, stds))
                return replace(law, shape="uniform" if is_uniform else "normal")
    return None


def _parts_of(samples: Sequence[Tensor], layout: Layout) -> list[Tensor]:
    """The numbers of each part in all draws."""
    units = samples[0].shape[layout.dim]
    labels = layout.labels(units)
    chosen = [torch.nonzero(labels == part).flatten() for part in range(layout.count)]
    return [torch.cat([s.index_select(layout.dim, each.to(s.device)).flatten() for s in samples]) for each in chosen]


def _standardised(
    samples: Sequence[Tensor], layout: Layout, means: Sequence[float], stds: Sequence[float]
) -> list[Tensor]:
    """The draws with a mean of 0 and a variance of 1 in every part, without the parts that are constants."""
    units = samples[0].shape[layout.dim]
    labels = layout.labels(units)
    mean, std = (torch.tensor(numbers, dtype=torch.float64)[labels] for numbers in (means, stds))
    drawn = torch.nonzero(std > 0).flatten()
    shape = [-1 if d == layout.dim else 1 for d in range(samples[0].dim())]
    mean, std = mean[drawn].view(shape), std[drawn].view(shape)
    rows = [sample.index_select(layout.dim, drawn.to(sample.device)).cpu().double() for sample in samples]
    return [(each - mean) / std for each in rows]


def is_one_law(samples: Sequence[Tensor], axes: Axes) -> bool:
    """Whether all entries may be drawn from one distribution, each for itself, and that is a normal or uniform one."""
    shape = samples[0].shape
    if not samples[0].numel() or not shape:
        return True
    for dim in range(len(shape)):
        scores = _UnitScores(samples, dim)
        if scores.change_along():
            return False
        for layout in _layouts(shape, {dim: axes.get(dim, Axis())}):
            for parts in (layout, Layout(dim, layout.count, 1)):
                if scores.differ(parts) or scores.has_constants_apart(parts) or scores.are_coupled(parts):
                    return False
    return not (_share_a_pattern(samples) or _has_a_diagonal(samples) or _has_another_shape(samples))


def _share_a_pattern(samples: Sequence[Tensor]) -> bool:
    """Whether all draws have something in common, or one draw alone shows a pattern."""
    if len(samples) == 1:
        return _has_pattern(samples[0])
    flat = [_some_of([sample]) for sample in samples]
    centred = [one - one.mean() for one in flat]
    total, squares = sum(centred), sum(one.square().sum() for one in centred)
    assert isinstance(total, Tensor)
    assert isinstance(squares, Tensor)
    pairs = len(samples) * (len(samples) - 1) / 2
    common = float((total.square().sum() - squares) / 2)  # the sum of products over all pairs of draws
    variance = float(squares) / (len(samples) * total.numel())
    return common > _CHANCE * variance * math.sqrt(pairs * total.numel())


def _has_a_diagonal(samples: Sequence[Tensor]) -> bool:
    """Whether a square matrix, or one of several squares, has other values where units meet themselves."""
    first = samples[0]
    if first.dim() < 2 or min(first.shape[:2]) < 2 or max(first.shape[:2]) % min(first.shape[:2]):
        return False
    rows, columns = first.shape[:2]
    longer, shorter = torch.arange(max(rows, columns)), torch.arange(max(rows, columns)) % min(rows, columns)
    index = (longer, shorter) if rows >= columns else (shorter, longer)
    values = torch.cat([sample[index].double().flatten().cpu() for sample in samples])
    everything = _some_of(samples)
    error = float(everything.std(correction=0)) / math.sqrt(len(values))
    return abs(float(values.mean()) - float(everything.mean())) > _CHANCE * error


def _has_another_shape(samples: Sequence[Tensor]) -> bool:
    """Whether the distribution is skewed, or has more far from its mean than a normal one."""
    values = _some_of(samples)
    count = len(values)
    if count < _MANY:
        return False
    scaled = (values - values.mean()) / values.std(correction=0)
    skewness, kurtosis = float(scaled.pow(3).mean()), float(scaled.pow(4).mean())
    is_skewed = abs(skewness) > max(_SKEWED, _CHANCE * math.sqrt(15 / count))
    is_heavy = kurtosis > max(_HEAVY, 3 + _CHANCE * math.sqrt(96 / count))
    return is_skewed or is_heavy


def _step(numbers: int) -> int:
    """Of how many numbers one is looked at; odd, so that parts which take turns are all seen."""
    return max(1, numbers // _ENOUGH_TO_TELL) | 1


def _some_of(samples: Sequence[Tensor]) -> Tensor:
    """The numbers of all draws in a row; of large tensors some of them."""
    step = _step(sum(sample.numel() for sample in samples))
    return torch.cat([sample.reshape(-1)[::step].cpu() for sample in samples]).double()


def _is_uniform(samples: Sequence[Tensor]) -> bool:
    """Whether enough numbers show a uniform distribution, whose kurtosis is 1.8, rather than one of 3."""
    values = _some_of(samples)
    if len(values) < _MANY_FOR_SHAPE:
        return False
    scaled = (values - values.mean()) / values.std(correction=0)
    return float(scaled.pow(4).mean()) < _FLAT


def _has_pattern(values: Tensor) -> bool:
    """Whether one draw shows that it is none: along an axis it repeats, is sorted, or neighbours are alike."""
    for d in range(values.dim()):
        steps = values.diff(dim=d)
        if not steps.numel():
            continue
        if not steps.any() or (values.shape[d] >= _MONOTONE and bool((steps >= 0).all() or (steps <= 0).all())):
            return True
        alike = 1 - float(steps.float().square().mean() / (2 * values.float().var(correction=0)))
        if alike > 6 / math.sqrt(steps.numel()):
            return True
    return False


def _without_zero_rows(samples: Sequence[Tensor], axes: Axes) -> list[Tensor]:
    """The draws of an embedding without rows that are zero throughout, which stand for padding."""
    rows = [d for d in range(samples[0].dim()) if d not in axes]
    if samples[0].dim() != 2 or len(rows) != 1 or not axes:
        return list(samples)
    (row,) = rows
    is_used = torch.stack([(sample != 0).any(dim=1 - row) for sample in samples]).any(dim=0)
    used = torch.nonzero(is_used).flatten()
    return [sample.index_select(row, used) for sample in samples] if 0 < len(used) < len(is_used) else list(samples)


# ---------------------------------------------------------------------------------------- patterns with noise


class CentralDraws(TorchDispatchMode):
    """Inside, every random number is the middle of its distribution, so that what is left of a start is its pattern.

    >>> with CentralDraws():
    ...     torch.nn.init.normal_(torch.empty(2), mean=3.0)
    tensor([3., 3.])
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        result = func(*args, **named)
        aten, kind = torch.ops.aten, func.overloadpacket
        first = args[1] if len(args) > 1 else None
        second = args[2] if len(args) > 2 else None
        if kind is aten.normal_:
            return result.fill_(named.get("mean", first or 0.0))
        if kind is aten.uniform_:
            low = named.get("from", first or 0.0)
            high = named.get("to", 1.0 if second is None else second)
            return result.fill_((low + high) / 2)
        if kind is aten.normal:
            return result.copy_(torch.as_tensor(args[0]))
        if kind in (aten.randn, aten.randn_like):
            return result.zero_()
        return result.fill_(0.5) if kind in (aten.rand, aten.rand_like) else result


def lie_about(samples: Sequence[Tensor], centre: Tensor) -> bool:
    """Whether what is random in the draws is symmetrical about these values: nothing else is common to all of them."""
    noise = [sample.double() - centre.double() for sample in samples]
    return not _share_a_pattern(noise)


# ---------------------------------------------------------------------------------------- their numbers


def _moments(samples: Sequence[Tensor], layout: Layout) -> tuple[list[float], list[float]]:
    """The mean and standard deviation of each part."""
    parts = [part.double() for part in _parts_of(samples, layout)]
    return [float(part.mean()) for part in parts], [_spread(part) for part in parts]


def _spread(part: Tensor) -> float:
    """The standard deviation: 0, and no rounding, of a constant."""
    return 0.0 if bool((part == part[0]).all()) else math.sqrt(_variance(part))


def _moments_together(samples: Sequence[Tensor], layout: Layout) -> tuple[list[float], list[float]]:
    """The same, where parts that nothing tells apart have one mean and one standard deviation."""
    parts = _parts_of(samples, layout)
    together: list[list[int]] = []
    for number, part in enumerate(parts):
        alike = next((group for group in together if _are_alike(parts[group[0]], part)), None)
        if alike is None:
            together.append([number])
        else:
            alike.append(number)
    means, stds = [0.0] * len(parts), [0.0] * len(parts)
    for group in together:
        values = torch.cat([parts[number] for number in group])
        spread = _spread(values)
        mean = float(values[0]) if spread == 0 else _mean_beyond_chance([values], spread)
        for number in group:
            means[number], stds[number] = mean, spread
    return means, stds


def _are_alike(one: Tensor, other: Tensor) -> bool:
    are_constant = [bool((part == part[0]).all()) for part in (one, other)]
    if any(are_constant):
        return all(are_constant) and bool(one[0] == other[0])
    size = min(len(one), len(other))
    both = torch.stack([one[:size], other[:size]])
    return not _UnitScores([both], 0).differ(Layout(0, 2, 1))


def _mean_beyond_chance(samples: Sequence[Tensor], std: float) -> float:
    """The mean; 0 where that may be an accident, within some standard errors."""
    count = max(1, sum(sample.numel() for sample in samples))
    mean = sum(float(sample.sum(dtype=torch.float64)) for sample in samples) / count
    return mean if std > 0 and abs(mean) > _CHANCE * std / math.sqrt(count) else 0.0


def _spread_between(samples: Sequence[Tensor], std: float) -> float:
    """The standard deviation of what differs from draw to draw; that of all entries where there is one draw."""
    if len(samples) == 1:
        return std
    mean = torch.zeros_like(samples[0], dtype=torch.float64)
    for sample in samples:
        mean += sample / len(samples)
    squares = sum(float((sample.double() - mean).square().sum()) for sample in samples)
    return math.sqrt(squares / ((len(samples) - 1) * samples[0].numel()))


def _variance(p: Tensor) -> float:
    mean, pieces = float(p.detach().sum(dtype=torch.float64)) / max(1, p.numel()), p.detach().reshape(-1).split(_PIECE)
    return sum(float((piece.double() - mean).square().sum()) for piece in pieces) / max(1, p.numel())
