"""The operator beyond the paper: the trained network stays as it is, and the new units are drawn at μP's initial scale.

GROWTH in one table, for a weight from inputs to outputs:

    old inputs, old outputs    the narrow weight (times Constants.keep, which undoes what the model itself divides by)
    any inputs, new outputs    fresh, at the initial spread or at that of the trained weights
    new inputs, old outputs    fresh, times `outgoing`

Learning rate, weight decay and eps are those of μP at the wide width: rules.py does not know of this.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any, Literal, NamedTuple

import torch
from torch import Tensor

from mupscale.core import (
    Axis,
    Constants,
    Entry,
    Initial,
    Plan,
    Shape,
    index_of_old,
    index_of_units,
    is_new,
    part_of_units,
    places,
)
from mupscale.growth.draws import draw_normal, draw_uniform
from mupscale.growth.lossless import gain_factor, silent_start
from mupscale.growth.operators import Operator, Part, StatePart
from mupscale.system import MupscaleError, Must, checks_arguments

_ZEROS = Initial(0.0, (0.0,))
_MEASURED = 1 << 17  # entries whose spread is measured at a time, each with a few numbers beside it
_SUMMED = 1 << 20  # entries that are summed at a time where a mean is over the whole tensor

Spread = Literal["initial", "trained"]
"""How large fresh values are: as in a new model, or as the trained ones have become."""

Read = Callable[[int, int], Tensor]
"""From the first and the last place to the entries of the flattened narrow tensor that lie between."""


class Region(NamedTuple):
    """Wide units of the first axis that grows, for each index of the dimensions before it."""

    outer: range
    units: range


@dataclass(eq=False)
class FreshTensor:
    """A wide tensor and what it is to be filled with, in any order of regions and by any number of threads.

    stream, seed: what the random numbers follow from. law: what they are drawn from, as in Plan.
    keep: the factor of the old weights. outgoing: the factor of what leads from new inputs to old outputs.
    new_outputs: whether new outputs are fresh, zero or the mean of the old ones. built: the wide tensor, where it
    starts as a pattern, from which new units are taken in place of random numbers.
    spread: that of the law, or as large as the trained entries have become, part by part.
    """

    entry: Entry
    stream: str
    seed: int
    law: Initial = _ZEROS
    keep: float = 1.0
    outgoing: float = 1.0
    new_outputs: Literal["drawn", "zero", "mean"] = "drawn"
    built: Tensor | None = None
    spread: Spread = "initial"

    def __post_init__(self) -> None:
        entry = self.entry
        growing = [d for d, axis in entry.axes.items() if axis.times != 1]
        self.grows = bool(growing)
        self._split = split = min(growing, default=0)
        narrow, wide = entry.narrow or (1,), entry.wide or (1,)
        self._outer, self._n, self._wide = math.prod(wide[:split]), narrow[split], wide[split]
        self._narrow_inner, self._inner = narrow[split + 1 :], wide[split + 1 :]
        self._lock = threading.Lock()
        self._ready = False
        self._zero_rows: Tensor | None = None
        self._mean: Tensor | None = None

    def regions(self, size: int) -> Iterator[Region]:
        """The whole tensor in regions of about `size` entries, in the order in which they lie there."""
        inner = math.prod(self._inner)
        if 0 in (self._outer, self._wide, inner):
            return
        at_once, step = max(1, size // (self._wide * inner)), max(1, size // inner)
        for outer in range(0, self._outer, at_once):
            for unit in range(0, self._wide, step):
                outers = range(outer, min(outer + at_once, self._outer))
                yield Region(outers, range(unit, min(unit + step, self._wide)))

    def shape_of(self, region: Region) -> tuple[int, ...]:
        """The region as a tensor."""
        return (len(region.outer), len(region.units), *self._inner)

    def place_of(self, region: Region) -> int:
        """Where the region starts in the flattened wide tensor, in which it lies without gaps."""
        return (region.outer[0] * self._wide + region.units[0]) * math.prod(self._inner)

    def fill(self, out: Tensor, narrow: Tensor, size: int = 1 << 24) -> None:
        """Write the whole tensor, from one that is in memory whole."""
        flat = narrow.reshape(-1)
        whole = out if out.is_contiguous() else torch.empty_like(out, memory_format=torch.contiguous_format)
        view = whole.view(self._outer, self._wide, *self._inner)
        for region in self.regions(size):
            outer, units = (slice(part[0], part[-1] + 1) for part in region)
            self.write(view[outer, units], region, lambda start, stop: flat[start:stop])
        if whole is not out:
            out.copy_(whole)

    def write(self, out: Tensor, region: Region, read: Read) -> None:
        """Write one region into `out`, which has its shape."""
        with self._lock:
            if self.grows and not self._ready:  # what only the whole of the narrow tensor can tell
                self._zero_rows = self._find_zero_rows(read)
                if self.spread == "trained" and self.built is None and any(self.law.spreads):
                    self.law = self._trained_law(read)
                if self.new_outputs == "mean" and self.entry.out == (self._split,):
                    self._mean = self._mean_of_old(read, out)
                self._ready = True
        self._write_drawn(out, region, read)
        if not self.grows or self.new_outputs == "drawn":
            return
        (dim,) = self.entry.out
        new = self._cut(self._is_new[dim], region).to(out.device)
        if self.new_outputs == "zero":
            out.masked_fill_(new, 0.0)
            return
        if self._mean is not None:
            mean = self._mean[region.outer.start : region.outer.stop]
        else:
            old, here = self._old(dim).to(out.device), dim - self._split + 1
            mean = (_sum(out.index_select(here, old).double(), here) / len(old)).to(out)
        out.copy_(torch.where(new, mean, out))

    def _write_drawn(self, out: Tensor, region: Region, read: Read) -> None:
        """Fresh values, and the old weights among them."""
        if self.grows:
            self._draw(out, region)
            if self._zero_rows is not None:
                out.masked_fill_(self._cut(self._zero_rows, region).to(out.device), 0.0)
            self._scale_outgoing(out, region)
        old = range(*(int(torch.searchsorted(self._places, u)) for u in (region.units.start, region.units.stop)))
        if old:
            self._write_old(out, region, old, read)

    def _draw(self, out: Tensor, region: Region) -> None:
        if self.built is not None:
            out.copy_(self._cut(self.built, region))
        elif not any(self.law.spreads):
            out.zero_()
        else:
            exact = torch.float64 if out.dtype == torch.float64 else torch.float32
            in_place = out.dtype == exact and out.device.type == "cpu" and out.is_contiguous()
            flat = out.view(-1) if in_place else torch.empty(out.numel(), dtype=exact)
            draw = draw_uniform if self.law.shape == "uniform" else draw_normal
            draw(flat, self.place_of(region), self.seed, self.stream)
            drawn = flat.view(out.shape)
            drawn.mul_(self._cut(self._spreads, region).to(drawn) if self.law.stds else self.law.spreads[0])
            if not in_place:
                out.copy_(drawn)
        if any(self.law.means or ()):
            out.add_(self._cut(self._means, region).to(out))

    def _write_old(self, out: Tensor, region: Region, old: range, read: Read) -> None:
        row, keep = math.prod(self._narrow_inner), self.keep
        places_here = self._places[old.start : old.stop] - region.units.start
        index = index_of_units([torch.arange(len(region.outer)), places_here, *self._inner_places])
        start = (region.outer.start * self._n + old.start) * row
        stop = ((region.outer.stop - 1) * self._n + old.stop) * row
        narrow = read(start, stop).reshape(len(region.outer), len(old), *self._narrow_inner)
        exact = torch.float64 if torch.float64 in (narrow.dtype, out.dtype) else torch.float32
        kept = narrow if keep == 1 else narrow.to(exact) * keep + float(self.entry.offset) * (keep - 1)
        out[index] = kept.to(out)

    def _scale_outgoing(self, out: Tensor, region: Region) -> None:
        """Multiply what leads from new inputs to old outputs."""
        entry = self.entry
        if self.outgoing == 1 or not any(entry.axes[d].times != 1 for d in entry.in_):
            return
        where = torch.zeros((1,) * out.dim(), dtype=torch.bool)
        for d in entry.in_:
            where = where | self._cut(self._is_new[d], region)
        for d in entry.out:
            where = where & ~self._cut(self._is_new[d], region)
        out.mul_(torch.where(where, self.outgoing, 1.0).to(out))

    def _trained_law(self, read: Read) -> Initial:
        """The law with the spread that each part has in the narrow tensor, carried to the wide width as μP's init is.

        Parts that start as constants stay so. Rows of padding, which are zero and stay zero, do not count.
        """
        law, shape = self.law, self.entry.narrow or (1,)
        parts = max(len(law.spreads), len(law.means or ()))
        means = _for_each_part(law.means or (0.0,), parts)
        part_of_unit = part_of_units(shape[law.dim], parts, law.run)

        squares, counts = torch.zeros(2, parts, dtype=torch.float64)
        for start in range(0, math.prod(shape), _MEASURED):
            stop = min(start + _MEASURED, math.prod(shape))
            trained = read(start, stop).reshape(-1).cpu().double()
            place = torch.arange(start, stop)
            part = part_of_unit[_index_along(law.dim, place, shape)]
            counted = torch.ones_like(trained)
            if self._zero_rows is not None:
                (row_dim,) = (d for d, size in enumerate(self._zero_rows.shape) if size > 1)
                is_padding = self._zero_rows.reshape(-1)[_index_along(row_dim, place, shape)]
                counted.masked_fill_(is_padding, 0.0)
            difference = (trained - means[part]) * counted
            squares += torch.bincount(part, difference.square(), minlength=parts)
            counts += torch.bincount(part, counted, minlength=parts)

        trained_spreads = (squares / counts.clamp(min=1)).sqrt() * self.entry.init
        is_drawn = _for_each_part(law.spreads, parts) > 0
        spreads = tuple(torch.where(is_drawn, trained_spreads, 0.0).tolist())
        return replace(law, std=max(spreads), stds=spreads if parts > 1 else ())

    def _mean_of_old(self, read: Read, out: Tensor) -> Tensor:
        """The mean over the old units of the first axis that grows, in parts that do not depend on the region."""
        means = []
        step = max(1, _SUMMED // max(1, math.prod(self._inner)))
        for outer in range(self._outer):
            total = torch.zeros(1, 1, *self._inner, dtype=torch.float64, device=out.device)
            for unit in range(0, self._wide, step):
                region = Region(range(outer, outer + 1), range(unit, min(unit + step, self._wide)))
                part = torch.empty(self.shape_of(region), dtype=out.dtype, device=out.device)
                self._write_drawn(part, region, read)
                here = self._places[(self._places >= unit) & (self._places < region.units.stop)] - unit
                if len(here):
                    total += _sum(part.index_select(1, here.to(out.device)).double(), 1)
            means.append(total / self._n)
        return torch.cat(means).to(out)

    def _find_zero_rows(self, read: Read) -> Tensor | None:
        """A row of an embedding that is zero throughout stands for padding, and stays zero."""
        narrow = self.entry.narrow
        rows = [d for d in range(len(narrow)) if d not in self.entry.axes]
        if self.entry.in_ or len(rows) != 1 or len(narrow) != 2 or 0 in narrow or self.built is not None:
            return None
        (row,), count = rows, max(1, _SUMMED // narrow[1])
        parts = []
        for start in range(0, narrow[0], count):
            stop = min(start + count, narrow[0])
            zero = read(start * narrow[1], stop * narrow[1]).reshape(-1, narrow[1]) == 0
            parts.append(zero.all(dim=1) if row == 0 else zero.all(dim=0))
        zeros = torch.cat(parts) if row == 0 else torch.stack(parts).all(dim=0)
        return self._along(zeros.cpu(), row) if bool(zeros.any()) and not bool(zeros.all()) else None

    @cached_property
    def _places(self) -> Tensor:
        """The places of the old units along the first axis that grows."""
        return self._old(self._split) if self.entry.wide else torch.zeros(1, dtype=torch.long)

    @cached_property
    def _inner_places(self) -> list[Tensor]:
        return [self._old(d) for d in range(self._split + 1, len(self.entry.wide))]

    def _old(self, dim: int) -> Tensor:
        n, axis = self.entry.narrow[dim], self.entry.axes.get(dim)
        return torch.arange(n) if axis is None or axis.times == 1 else places(axis, n)

    @cached_property
    def _is_new(self) -> dict[int, Tensor]:
        entry = self.entry
        return {d: self._along(is_new(axis, entry.narrow[d]), d) for d, axis in entry.axes.items()}

    @cached_property
    def _means(self) -> Tensor:
        return self.law.by_unit(self.law.means or (0.0,), self.entry.wide)

    @cached_property
    def _spreads(self) -> Tensor:
        return self.law.by_unit(self.law.spreads, self.entry.wide)

    def _along(self, values: Tensor, dim: int) -> Tensor:
        """One value for each unit of a dimension, to be broadcast over the others."""
        return values.reshape([-1 if d == dim else 1 for d in range(max(1, len(self.entry.wide)))])

    def _cut(self, whole: Tensor, region: Region) -> Tensor:
        """A region of what can be broadcast to the whole tensor."""
        leading = whole.expand(*self.entry.wide[: self._split], *whole.shape[self._split :])
        split: Tensor = leading.reshape(self._outer, *whole.shape[self._split :])
        outer = split[region.outer.start : region.outer.stop]
        return outer if outer.shape[1] == 1 else outer[:, region.units.start : region.units.stop]


def _sum(values: Tensor, dim: int) -> Tensor:
    """The sum along a dimension, by pairs: the same on any number of threads."""
    while (n := values.shape[dim]) > 1:
        half = values.narrow(dim, 0, n // 2) + values.narrow(dim, n // 2, n // 2)
        values = torch.cat([half, values.narrow(dim, n - 1, 1)], dim) if n % 2 else half
    return values


def _index_along(dim: int, places: Tensor, shape: Shape) -> Tensor:
    """Of places in a flattened tensor, the index along one of its dimensions."""
    return places // math.prod(shape[dim + 1 :]) % shape[dim]


def _for_each_part(numbers: tuple[float, ...], parts: int) -> Tensor:
    """One number for each part, where one alone is for all of them."""
    return torch.tensor(numbers, dtype=torch.float64).expand(parts)


@dataclass(frozen=True, kw_only=True)
class LosslessSettings:
    """What recipes, commands and records may say of fresh units, lossless ones included.

    Args:
        spread: for fresh units, how large what is drawn is: initial (as a new model's) or trained (as large as the
            trained weights have become, part by part)
    """

    spread: Spread = "initial"

    def operator_arguments(self) -> dict[str, Any]:
        """What `Fresh` is made with."""
        return {"spread": self.spread}


@dataclass(frozen=True, kw_only=True)
class FreshSettings(LosslessSettings):
    """What recipes, commands and records may say of fresh units.

    Args:
        outgoing: for fresh units, the scale of their weights into old units, from 0 (old units do not see them yet) to
            1 (as initialised)
    """

    outgoing: float = 1.0

    def operator_arguments(self) -> dict[str, Any]:
        """What `Fresh` is made with."""
        return {**super().operator_arguments(), "outgoing": self.outgoing}


@checks_arguments
@dataclass(frozen=True)
class Fresh(Operator):
    """New units beside the old ones, drawn as μP draws them at the wide width; any wider width will do.

    What starts as a pattern over its units (torch.linspace) is not drawn: new units have the wide model's own values.

    outgoing: between 0 and 1, how much of its fresh weight a new unit has towards old ones. At 0 the function stays on
    every axis that no norm reads. lossless: the function stays on the axes that norms read, too, where a batch
    (inputs=) has shown who reads them; `upscale` tells by how much it does not. spread: how large what is drawn is,
    "initial" (as a new model's), or "trained": the root mean square of the trained entries, part by part.

    >>> import torch, mupscale as mu
    >>> from torch.nn import Linear, Sequential, Tanh
    >>> narrow, wide = (Sequential(Linear(3, n), Tanh(), Linear(n, 2)) for n in (8, 12))
    >>> plan = mu.plan(narrow, wide, fresh=narrow, grow=mu.Fresh())
    >>> _ = mu.upscale(narrow, wide, plan, grow=mu.Fresh(outgoing=0.0))
    >>> x = torch.randn(5, 3)
    >>> torch.allclose(narrow(x), wide(x), atol=1e-6)
    True
    """

    outgoing: Annotated[float, Must("a number between 0 and 1", lambda value: 0 <= value <= 1)] = 1.0
    lossless: bool = False
    spread: Spread = "initial"
    needs_multiples = False

    def check(self, plan: Plan) -> None:
        """Refuse a plan that does not know the initialisation, or a growth that cannot be lossless."""
        for name, entry in plan.parameters.items():
            if _grows(entry):
                law_of(plan, name)
            if self.lossless and entry.keep != 1 and entry.out and entry.in_:
                raise MupscaleError(
                    f"'{name}': head_dim grows, which cannot be lossless: queries and keys of new units would both "
                    "start at zero and stay there. Grow the number of heads, or leave out lossless="
                )

    def parameter(self, out: Tensor, narrow: Tensor, part: Part) -> None:
        built = out.clone() if part.name in part.plan.patterned else None
        replace(self.tensor(part), built=built).fill(out, narrow)

    def tensor(self, part: Part) -> FreshTensor:
        """What the wide parameter is filled with; `check` has seen the plan."""
        entry, plan, keep = part.entry, part.plan, self._keep(part)
        stream = f"fresh {part.plan.drawn_as(part.name)} {entry.narrow} {entry.wide}"
        if not _grows(entry):
            return FreshTensor(entry, stream, part.seed, keep=keep)
        law = law_of(plan, part.name)
        outgoing, outputs = silent_start(part.name, entry, plan) if self.lossless else (self.outgoing, "drawn")
        return FreshTensor(entry, stream, part.seed, law, keep, outgoing, outputs, spread=self.spread)

    def state(self, out: Tensor, narrow: Tensor, part: StatePart) -> None:
        """The old state in its places, and beside it what a fresh optimizer has, or the mean of the old state."""
        keep = self._keep(part)
        kept = part.entry if part.is_rate else Entry(part.entry.narrow, part.entry.narrow, constants=Constants(keep))
        old_state = narrow.to(out) * part.factor(kept)
        if part.begins_at_mean:
            out.copy_(_with_means(old_state, part.axes))
            return
        out.fill_(part.initial)
        out[index_of_old(part.narrow, part.axes)] = old_state

    def _keep(self, part: Part) -> float:
        return float(part.entry.keep) * (gain_factor(part.name, part.plan) if self.lossless else 1.0)


def _with_means(old: Tensor, axes: Mapping[int, Axis]) -> Tensor:
    """The old values in their places, and the mean of the old units for new ones.

    One axis after another: the mean over any axis then stays what it was, for every unit of the other axes.
    """
    grown = old
    for dim, axis in axes.items():
        if axis.times == 1:
            continue
        n = grown.shape[dim]
        wide_shape = [axis.wide(n) if d == dim else size for d, size in enumerate(grown.shape)]
        mean = grown.mean(dim, keepdim=True)
        old_places = places(axis, n).to(grown.device)
        grown = mean.expand(wide_shape).index_copy(dim, old_places, grown)
    return grown


def _grows(entry: Entry) -> bool:
    return any(axis.times != 1 for axis in entry.axes.values())


def law_of(plan: Plan, name: str) -> Initial:
    """How a parameter starts of which there are new units; an error where nothing is known of these."""
    if plan.fresh is None or plan.means is None:
        raise MupscaleError(
            "fresh units need an initialisation to be drawn from. Build the wide model on a real device, with its own "
            "initialisation; or make the plan with fresh=build (a freshly built narrow model, or the function that "
            "builds it); or use a Family; or grow by copies (grow=mupscale.Copies(…))"
        )
    if name not in plan.means:
        raise no_pattern(name)
    return plan.initial[name]


def no_pattern(name: str) -> MupscaleError:
    """The error where new units of what starts as a pattern have no wide model to take their values from."""
    return MupscaleError(
        f"'{name}' starts as a pattern, or by no law that new units could be drawn from. They take the values that the "
        "wide model is built with, but no such model is in memory here. Grow by copies, to a whole multiple of the "
        "width. For models of your own: build the wide one on a real device, and grow with "
        "mupscale.upscale(narrow, wide)"
    )
