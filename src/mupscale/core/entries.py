"""What a plan says of one tensor of the larger model: what it is made of, its axes, and the numbers that follow."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from itertools import zip_longest
from typing import Literal

import torch
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
    yet, and are in the parameter group of the named tensor. An "expert" is a copy that shares the tensor's gradient
    with the others; `value` is the share of its entries that are drawn.
    """

    name: str = ""
    kind: Literal["old", "copy", "expert", "drawn", "silent"] = "old"
    value: float = 0.0

    @property
    def is_new(self) -> bool:
        """Whether the target is in a part of the larger model that the smaller one lacks."""
        return self.kind != "old"

    @property
    def is_taken(self) -> bool:
        """Whether the target has the named tensor's values, grown."""
        return self.kind in ("old", "copy", "expert")

    def then(self, later: TensorSource) -> TensorSource:
        """What the target of a later growth is made of, where this is what its own source is made of."""
        kind, value = (self.kind, self.value) if later.kind == "old" or not self.is_taken else (later.kind, later.value)
        return TensorSource(self.name or later.name, kind, value)


@dataclass(frozen=True)
class Constants:
    """What the model and its depth do to a stored value, which its axes do not tell.

    fold: a constant that is folded into the stored weight, as in Rule.
    offset: what the model adds to the stored value before it uses it, as a norm with gain 1 + w does.
    keep: by what the weights of old units are multiplied where the other units are new ones and no copies, so that what
    they compute stays: a model that divides a readout by its width needs it.
    depth: among how many parts a gradient is shared that one part had: experts, or residual blocks where rates follow
    the depth.
    undo: what is taken back of the fold when values are written: beside blocks that write nothing yet, the old ones
    keep their weights, and rates alone follow the depth.
    residual: which part of the fold is the depth's, so that rules over width can leave it alone.
    """

    fold: Number = 1
    offset: Number = 0
    keep: Number = 1
    depth: Number = 1
    undo: Number = 1
    residual: Number = 1


@dataclass(frozen=True)
class Entry:
    """One parameter or buffer: its shapes, its width axes by dimension, and what each of them is to it.

    names: all that a tied tensor has. source: what it is made of: the smaller model's tensor of the same name, if
    nothing is said. A wide shape with a dimension more in front stacks copies of the narrow tensor, as experts are
    (`stacked`).

    >>> entry = Entry(narrow=(8, 4), wide=(16, 4), axes={0: Axis(2, side="out")})
    >>> entry.rule, entry.out, entry.in_  # the dimensions that are widths, whether they grow in this plan or not
    (Rule(out=2, in_=1, fold=1), (0,), ())
    """

    narrow: Shape
    wide: Shape
    axes: Mapping[int, Axis] = field(default_factory=dict)
    constants: Constants = Constants()
    names: tuple[str, ...] = ()
    source: TensorSource = TensorSource()

    @cached_property
    def rule(self) -> Rule:
        """The three numbers of this parameter."""
        return Rule(self._times(self.out), self._times(self.in_), self.fold, self.constants.depth)

    def _times(self, dims: tuple[int, ...]) -> Number:
        return math.prod((self.axes[d].times for d in dims), start=1)

    @cached_property
    def out(self) -> tuple[int, ...]:
        """The dimensions along which its outputs are."""
        return tuple(sorted(d for d, axis in self.axes.items() if axis.side == "out"))

    @cached_property
    def in_(self) -> tuple[int, ...]:
        """The dimensions along which its inputs are."""
        return tuple(sorted(d for d, axis in self.axes.items() if axis.side == "in"))

    @property
    def fold(self) -> Number:
        """The constant that is folded into the stored weight."""
        return self.constants.fold

    @property
    def offset(self) -> Number:
        """What the model adds to the stored value."""
        return self.constants.offset

    @property
    def keep(self) -> Number:
        """The factor of old units' weights beside new ones."""
        return self.constants.keep

    def with_constants(self, **constants: Number) -> Entry:
        """The entry with other constants, by name."""
        return replace(self, constants=replace(self.constants, **constants))

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
    def shift(self) -> float:
        """What is added to the copied and scaled weight: w + offset is what scales, and w is what is stored."""
        return float(self.offset) * (self.weight - 1)

    @property
    def weight(self) -> float:
        """What a copied weight is multiplied by: `rule.weight`, less what is taken back of it."""
        return self.rule.weight * float(self.constants.undo)

    @property
    def init(self) -> float:
        """Factor of the initial standard deviation under μP."""
        init = self.rule.init(out_is_width=bool(self.out), in_is_width=bool(self.in_))
        return init * float(self.constants.undo)

    def widened(
        self,
        narrow: Tensor,
        out: Tensor | None = None,
        *,
        factor: float | None = None,
        axes: Mapping[int, Axis] | None = None,
        is_buffer: bool = False,
        overwrite: bool = False,
    ) -> Tensor:
        """The wide tensor that a narrow one becomes: copied along the axes, times `weight`, plus `shift`.

        out: where to write it; new memory if not given. factor: what to multiply by instead, with no shift, for
        optimizer state. is_buffer: buffers have no shift, and nothing of their fold is taken back. axes: others than
        the parameter's own, for a piece of it. overwrite: whether the narrow tensor's memory may be used for the
        product, which saves an allocation.

        >>> import torch
        >>> entry = Entry(narrow=(1, 2), wide=(1, 4), axes={1: Axis(2, side="in")})
        >>> entry.widened(torch.tensor([[3.0, 5.0]]))  # every input comes twice, so each weight is halved
        tensor([[1.5000, 1.5000, 2.5000, 2.5000]])
        """
        scale, shift = (self.weight, self.shift) if factor is None else (factor, 0.0)
        if is_buffer:
            scale, shift = self.rule.weight, 0.0
        if overwrite and scale != 1:
            narrow, scale = narrow.mul_(scale), 1.0
        if axes is None and narrow.dim() < len(self.wide):
            narrow = narrow.expand(self.stacked.narrow)
        axes = self.axes if axes is None else axes
        # inputs that stay are not copied, and each has its whole weight
        summed = [d for d, axis in axes.items() if axis.side == "in"] if factor is None else []
        wide = expand(narrow, axes, out, scale, summed)
        return wide.add_(shift) if shift else wide

    def then(self, later: Entry) -> Entry:
        """This growth followed by a later one; a dimension that grows in one only need be an axis of that one."""
        if self.wide != later.narrow:
            raise MupscaleError(
                f"plans of different models do not compose: '{self.names[0]}' ends with shape {self.wide} "
                f"in the first and starts with {later.narrow} in the second"
            )
        self = self._before(later)
        first, then = self.constants, later.constants
        offsets = {e.offset for e in (self, later) if e.offset or e.rule.weight != 1}  # what stays may not say it
        if {*self.out} & {*later.in_} or {*self.in_} & {*later.out} or len(offsets) > 1:
            raise MupscaleError(
                f"plans of different models do not compose: '{self.names[0]}' is not stored alike in the two"
            )
        axes = {d: self.axes.get(d, Axis()) * later.axes.get(d, Axis()) for d in sorted({*self.axes, *later.axes})}
        numbers = ("fold", "keep", "depth", "undo", "residual")
        products = {n: tidy(Fraction(1) * getattr(first, n) * getattr(then, n)) for n in numbers}
        constants = Constants(offset=next(iter(offsets), 0), **products)
        return Entry(self.narrow, later.wide, axes, constants, later.names, self.source.then(later.source))

    def _before(self, later: Entry) -> Entry:
        """This entry with the dimensions of a later one, which may stack copies, or draw what has another shape."""
        ahead = max(0, len(later.wide) - len(later.narrow))
        sizes = enumerate(zip_longest(later.narrow, later.wide))
        kept = {d for d, (before, after) in sizes if later.source.is_taken or before == after}
        return replace(self, axes={d + ahead: axis for d, axis in self.axes.items() if d in kept})


@dataclass(frozen=True)
class Initial:
    """What a parameter starts with: the law that new units are drawn from, and what norms make of them.

    std, means: of a fresh μP initialisation at the wide width, where known. What starts as a pattern, such as decays
    that rise from unit to unit, or the identity with noise, has no means, (): new units take the values that the wide
    model is built with, and std is the spread of what is drawn of it.
    means, stds: one for each part of the axis `dim`, where parts start differently: means of (0, 1, 0, 0) for an LSTM's
    bias whose forget gate starts at 1, with stds of (0.1, 0, 0.1, 0.1) if the other gates are drawn. No stds: all parts
    have std. run: how many units of a part follow each other, after which those of the next part come; 0 for equal
    parts, each of them once. shape: of the distribution.
    norm: of a parameter of a norm over a growing axis, what that does: "layer" (centres and divides), "rms" (divides)
    or "group" (centres and divides groups of units) at its gain, and "bias" at the other.
    past_norms: the growing dimensions whose units no norm reads (outputs) or made (inputs); None if no run has
    shown it.
    drawn_as: the name by which its random numbers are drawn, where files call it otherwise than the model does.
    """

    std: float | None = None
    means: tuple[float, ...] | None = None
    norm: str = ""
    past_norms: tuple[int, ...] | None = None
    drawn_as: str = ""
    stds: tuple[float, ...] = ()
    dim: int = 0
    run: int = 0
    shape: Literal["normal", "uniform"] = "normal"

    def then(self, later: Initial, *, is_wider: bool) -> Initial:
        """After a later growth; is_wider: whether the parameter grew in it, so that what was known of it is stale."""
        law = later if is_wider or later.std is not None else self
        return replace(
            law,
            norm=later.norm or self.norm,
            past_norms=self.past_norms if later.past_norms is None else later.past_norms,
            drawn_as=later.drawn_as or self.drawn_as,
        )

    @property
    def spreads(self) -> tuple[float, ...]:
        """The standard deviation of each part; one where all have the same."""
        return self.stds or (self.std or 0.0,)

    def by_unit(self, numbers: tuple[float, ...], shape: Shape) -> Tensor:
        """From one number for each part to one for each unit of the axis, to be broadcast over a tensor of this shape.

        >>> Initial(0.1, (0.0, 1.0)).by_unit((0.0, 1.0), (4, 1)).flatten()
        tensor([0., 0., 1., 1.], dtype=torch.float64)
        """
        units = shape[self.dim] if shape else 1
        values = torch.tensor(numbers, dtype=torch.float64)[part_of_units(units, len(numbers), self.run)]
        return values.reshape([-1 if d == self.dim else 1 for d in range(max(1, len(shape)))])


def part_of_units(units: int, parts: int, run: int = 0) -> Tensor:
    """For each unit of an axis, the part that it is of: `run` units of each by turns, or (0) equal parts, each once.

    >>> part_of_units(6, 2), part_of_units(6, 3, run=1)
    (tensor([0, 0, 0, 1, 1, 1]), tensor([0, 1, 2, 0, 1, 2]))
    """
    return torch.arange(units) // (run or -(-units // parts)) % parts
