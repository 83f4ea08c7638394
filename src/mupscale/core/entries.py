"""What a plan says of one tensor of the larger model: what it is made of, its axes, and the numbers that follow."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from itertools import zip_longest
from typing import Any, Literal

from torch import Tensor

from mupscale.core.axes import Axis, expand
from mupscale.core.rules import Number, Rule, tidy
from mupscale.system import MupscaleError

Shape = tuple[int, ...]


@dataclass(frozen=True)
class TensorSource:
    """What a tensor of the larger model is made of: target ← source.

    name: the tensor of the smaller model; empty where it has the name of the target.
    kind: "old" if the target is that tensor, grown. What is in a new part of the model, a block or an expert, is a
    "copy" if it starts as that tensor, with its optimizer state; "drawn" if it keeps the values that the larger model
    was built with; "silent" if it starts at `value`, at which it writes nothing. The last two have no optimizer state
    yet, and are in the parameter group of the named tensor. Of a copy, `value` is the share of entries that are drawn.

    >>> TensorSource("h.0.mlp.weight", "silent").is_new, TensorSource("h.0.mlp.weight", "copy").is_taken
    (True, True)
    """

    name: str = ""
    kind: Literal["old", "copy", "drawn", "silent"] = "old"
    value: float = 0.0

    @property
    def is_new(self) -> bool:
        """Whether the target is in a part of the larger model that the smaller one lacks."""
        return self.kind != "old"

    @property
    def is_taken(self) -> bool:
        """Whether the target has the named tensor's values, grown."""
        return self.kind in ("old", "copy")

    def then(self, later: TensorSource) -> TensorSource:
        """What the target of a later growth is made of, where this is what its own source is made of."""
        kind, value = (self.kind, self.value) if later.kind == "old" or not self.is_taken else (later.kind, later.value)
        return TensorSource(self.name or later.name, kind, value)


@dataclass(frozen=True)
class Entry:
    """One parameter or buffer: its shapes, its width axes by dimension, and what each dimension is to it.

    source: what it is made of: the smaller model's tensor of the same name, if nothing is said.
    offset: what the model adds to the stored value before it uses it, as a norm with gain 1 + w does.
    keep: by what the weights of old units are multiplied where the other units are new ones and no copies, so that what
    they compute stays: a model that divides a readout by its width needs it.
    depth: among how many parts a gradient is shared that one part had: experts, or residual blocks where rates follow
    the depth.
    A wide shape with a dimension more in front stacks copies of the narrow tensor, as experts are (`stacked`).

    >>> entry = Entry(narrow=(8, 4), wide=(16, 4), axes={0: Axis(2)}, out=(0,))
    >>> entry.rule, entry.out_is_width, entry.in_is_width
    (Rule(out=2, in_=1, fold=1), True, False)
    """

    narrow: Shape
    wide: Shape
    axes: Mapping[int, Axis] = field(default_factory=dict)
    out: tuple[int, ...] = ()
    in_: tuple[int, ...] = ()
    fold: Number = 1
    names: tuple[str, ...] = ()
    offset: Number = 0
    keep: Number = 1
    depth: Number = 1
    source: TensorSource = TensorSource()

    @cached_property
    def rule(self) -> Rule:
        """The three numbers of this parameter."""
        return Rule(self._times(self.out), self._times(self.in_), self.fold, self.depth)

    def _times(self, dims: tuple[int, ...]) -> Number:
        return math.prod((self.axes[d].times for d in dims if d in self.axes), start=1)

    @property
    def stacked(self) -> Entry:
        """This entry, from as many copies of the narrow tensor as the wide one has in dimensions of its own.

        >>> Entry(narrow=(8, 4), wide=(3, 8, 4)).stacked.narrow
        (3, 8, 4)
        """
        ahead = range(len(self.wide) - len(self.narrow))
        lead = tuple(int(self.wide[d] / self.axes.get(d, Axis()).times) for d in ahead)
        return replace(self, narrow=(*lead, *self.narrow)) if lead else self

    @property
    def out_is_width(self) -> bool:
        """Whether the output axis is a width of the family, even where it does not grow in this plan."""
        return any(d in self.axes for d in self.out)

    @property
    def in_is_width(self) -> bool:
        """Whether the input axis is a width of the family."""
        return any(d in self.axes for d in self.in_)

    @property
    def shift(self) -> float:
        """What is added to the copied and scaled weight: w + offset is what scales, and w is what is stored."""
        return float(self.offset) * (self.rule.weight - 1)

    @property
    def init(self) -> float:
        """Factor of the initial standard deviation under μP."""
        return self.rule.init(out_is_width=self.out_is_width, in_is_width=self.in_is_width)

    def widened(
        self,
        narrow: Tensor,
        out: Tensor | None = None,
        *,
        factor: float | None = None,
        axes: Mapping[int, Axis] | None = None,
        overwrite: bool = False,
    ) -> Tensor:
        """The wide tensor that a narrow one becomes: copied along the axes, times `rule.weight`, plus `shift`.

        out: where to write it; new memory if not given. factor: what to multiply by instead, with no shift, for buffers
        (1) and optimizer state. axes: others than the parameter's own, for a piece of it. overwrite: whether the narrow
        tensor's memory may be used for the product, which saves an allocation.

        >>> import torch
        >>> entry = Entry(narrow=(1, 2), wide=(1, 4), axes={1: Axis(2)}, in_=(1,))
        >>> entry.widened(torch.tensor([[3.0, 5.0]]))  # every input comes twice, so each weight is halved
        tensor([[1.5000, 1.5000, 2.5000, 2.5000]])
        """
        scale, shift = (self.rule.weight, self.shift) if factor is None else (factor, 0.0)
        if overwrite and scale != 1:
            narrow, scale = narrow.mul_(scale), 1.0
        if axes is None and narrow.dim() < len(self.wide):
            narrow = narrow.expand(self.stacked.narrow)
        wide = expand(narrow, self.axes if axes is None else axes, out, scale)
        return wide.add_(shift) if shift else wide

    def then(self, later: Entry) -> Entry:
        """This growth followed by a later one; a dimension that grows in one only need be an axis of that one."""
        if self.wide != later.narrow:
            raise MupscaleError(
                f"plans of different models do not compose: '{self.names[0]}' ends with shape {self.wide} "
                f"in the first and starts with {later.narrow} in the second"
            )
        self = self._before(later)
        out, in_ = {*self.out, *later.out}, {*self.in_, *later.in_}
        offsets = {e.offset for e in (self, later) if e.offset or e.rule.weight != 1}  # what stays may not say it
        if out & in_ or len(offsets) > 1:
            raise MupscaleError(
                f"plans of different models do not compose: '{self.names[0]}' is not stored alike in the two"
            )
        axes = {d: self.axes.get(d, Axis()) * later.axes.get(d, Axis()) for d in sorted({*self.axes, *later.axes})}
        fold = tidy(Fraction(1) * self.fold * later.fold)
        keep = tidy(Fraction(1) * self.keep * later.keep)
        depth = tidy(Fraction(1) * self.depth * later.depth)
        outputs, inputs = tuple(sorted(out)), tuple(sorted(in_))
        grown = replace(self, wide=later.wide, axes=axes, out=outputs, in_=inputs, fold=fold, keep=keep, depth=depth)
        return replace(grown, names=later.names, offset=next(iter(offsets), 0), source=self.source.then(later.source))

    def _before(self, later: Entry) -> Entry:
        """This entry with the dimensions of a later one, which may stack copies, or draw what has another shape."""
        ahead = max(0, len(later.wide) - len(later.narrow))
        sizes = enumerate(zip_longest(later.narrow, later.wide))
        kept = {d for d, (before, after) in sizes if later.source.is_taken or before == after}
        axes = {d + ahead: axis for d, axis in self.axes.items() if d in kept}
        out, in_ = (tuple(d + ahead for d in side if d in kept) for side in (self.out, self.in_))
        return replace(self, axes=axes, out=out, in_=in_)


def _number_to_json(number: Number) -> int | float | str:
    return f"{number.numerator}/{number.denominator}" if isinstance(number, Fraction) else number


def _number_from_json(number: int | float | str) -> Number:
    return Fraction(number) if isinstance(number, str) else number


def entry_to_json(entry: Entry) -> dict[str, Any]:
    """Plain values; numbers that are no whole ones exactly."""
    axes = [
        [d, _number_to_json(a.times), a.block, [list(s) for s in a.sections], *([True] if a.last else [])]
        for d, a in entry.axes.items()
    ]
    return {
        "narrow": list(entry.narrow),
        "wide": list(entry.wide),
        "axes": axes,
        "out": list(entry.out),
        "in": list(entry.in_),
        "fold": _number_to_json(entry.fold),
        "names": list(entry.names),
        "offset": _number_to_json(entry.offset),
        "keep": _number_to_json(entry.keep),
        **({} if entry.depth == 1 else {"depth": _number_to_json(entry.depth)}),
        **({} if entry.source == TensorSource() else {"source": list(astuple(entry.source))}),
    }


def entry_from_json(content: dict[str, Any]) -> Entry:
    """What entry_to_json gave."""
    axes = {
        d: Axis(_number_from_json(times), block, tuple((a, b) for a, b in sections), bool(last))
        for d, times, block, sections, *last in content["axes"]
    }
    return Entry(
        tuple(content["narrow"]),
        tuple(content["wide"]),
        axes,
        tuple(content["out"]),
        tuple(content["in"]),
        _number_from_json(content["fold"]),
        tuple(content["names"]),
        _number_from_json(content.get("offset", 0)),
        _number_from_json(content.get("keep", 1)),
        _number_from_json(content.get("depth", 1)),
        TensorSource(*content.get("source", ())),
    )
