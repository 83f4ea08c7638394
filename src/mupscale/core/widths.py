"""The width of a model: one number, or several sizes by name that the function which builds the model takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from numbers import Integral, Real

from mupscale.core.rules import Number, tidy
from mupscale.system import MupscaleError

Size = int | float
PlainWidth = Size | dict[str, Size]
WholeWidth = int | dict[str, int]
"""A width as recipes and their JSON hold it."""

_PLAIN = "width"  # the name of the one size of a plain width


@dataclass(frozen=True)
class Width:
    """A width of a family: plain (512) or named ({"d_model": 64, "heads": 4}); make it with `Width.of`.

    Two widths are equal if their sizes are, in whatever order they are named.

    >>> base, wide = Width.of({"d_model": 64, "heads": 4}), Width.of({"d_model": 256, "heads": 16})
    >>> wide.ratio_to(base)
    {'d_model': 4, 'heads': 4}
    >>> small = Width.of({"d_model": 32, "heads": 2}).scaled_as(base, wide)
    >>> small.plain, small.label, str(small), small.size
    ({'d_model': 128, 'heads': 8}, 'd_model128-heads8', 'd_model 128, heads 8', 128)
    """

    sizes: Mapping[str, Size] = field(compare=False)
    is_plain: bool = False
    key: tuple[tuple[str, Size], ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", dict(self.sizes))
        object.__setattr__(self, "key", tuple(sorted(self.sizes.items())))

    @classmethod
    def of(cls, width: WidthLike, what: str = "a width", *, whole: bool = False) -> Width:
        """The width that a number or a mapping of names to numbers is; an error if they are not positive.

        what: what the width is for, in the error. whole: whether all sizes must be whole numbers.
        """
        if isinstance(width, Width):
            sizes, is_plain = width.sizes, width.is_plain
        else:
            is_plain = not isinstance(width, Mapping)
            sizes = width if isinstance(width, Mapping) else {_PLAIN: width}
        are_positive = bool(sizes) and all(
            isinstance(size, Real) and not isinstance(size, bool) and 0 < float(size) < math.inf
            for size in sizes.values()
        )
        if whole and not (are_positive and _are_whole(sizes)):
            shown = width.plain if isinstance(width, Width) else width
            raise MupscaleError(f"{what} is {shown}, but widths are positive whole numbers")
        if not are_positive:
            raise MupscaleError(f"{what} is a positive width or a dict of them, not {width!r}")
        return cls(sizes, is_plain)

    @property
    def plain(self) -> PlainWidth:
        """The number, or the sizes by name: what JSON holds."""
        return self.sizes[_PLAIN] if self.is_plain else dict(self.sizes)

    @property
    def whole(self) -> WholeWidth:
        """As `plain`, where all sizes are whole numbers; an error otherwise."""
        if not self.is_whole:
            raise MupscaleError(f"a width of {self.plain} is not a whole number of units: choose whole sizes")
        sizes = {name: int(size) for name, size in self.sizes.items()}
        return sizes[_PLAIN] if self.is_plain else sizes

    @property
    def is_whole(self) -> bool:
        """Whether all sizes are whole numbers by their type: 64, not 64.0."""
        return _are_whole(self.sizes)

    @property
    def size(self) -> Size:
        """One number for sorting, plots and extrapolation: of named sizes, the largest."""
        return max(self.sizes.values())

    @property
    def label(self) -> str:
        """The width as part of a file name: 512, or d_model64-heads4."""
        if self.is_plain:
            return str(self.sizes[_PLAIN])
        return "-".join(f"{name}{size}" for name, size in self.sizes.items())

    def __str__(self) -> str:
        return self.shown()

    @property
    def phrase(self) -> str:
        """The width in a sentence."""
        return f"width {self}" if self.is_plain else str(self)

    def shown(self, number: Callable[[Size], str] = str) -> str:
        """The width for people: 512, or d_model 64, heads 4; `number` writes each size."""
        if self.is_plain:
            return number(self.sizes[_PLAIN])
        return ", ".join(f"{name} {number(size)}" for name, size in self.sizes.items())

    def has_form_of(self, other: Width) -> bool:
        """Whether both are plain, or both name the same sizes."""
        return self.is_plain == other.is_plain and self.sizes.keys() == other.sizes.keys()

    def check_form(self, other: Width, what: str = "the width", whose: str = "the width") -> None:
        """An error unless `has_form_of(other)`; what, whose: what the two widths are, in its message."""
        if self.has_form_of(other):
            return
        if self.is_plain or other.is_plain:
            form = "a number" if other.is_plain else f"a mapping with {', '.join(other.sizes)}"
            raise MupscaleError(
                f"{what} {self.plain} must be of the same form as {whose} {other.plain}: give {form} for each"
            )
        raise MupscaleError(f"{what} {self.plain} does not name the same arguments as {other.plain}")

    def times(self, factor: Number, names: Iterable[str] | None = None) -> Width:
        """A width whose sizes are so many times as large: all of them, or those that are named."""
        chosen = self.sizes.keys() if names is None else set(names)
        return Width(
            {name: _product(size, factor) if name in chosen else size for name, size in self.sizes.items()},
            self.is_plain,
        )

    def ratio_to(self, narrow: Width) -> dict[str, Number]:
        """By how much each size is larger than that of another width of the same form, exactly where both are whole."""
        self.check_form(narrow)
        return {name: _ratio(size, narrow.sizes[name]) for name, size in self.sizes.items()}

    def growing(self, wide: Width) -> list[str]:
        """The names of the sizes that are larger in the wide one."""
        return [name for name, ratio in wide.ratio_to(self).items() if ratio > 1]

    def scaled_as(self, narrow: Width, wide: Width) -> Width:
        """This width with every size as many times as large as it is in `wide` relative to `narrow`."""
        self.check_form(narrow)
        ratios = wide.ratio_to(narrow)
        return Width({name: _product(size, ratios[name]) for name, size in self.sizes.items()}, self.is_plain)

    def check_multiple_of(self, narrow: Width, what: str) -> None:
        """An error that begins with `what` unless every size is a whole multiple of the narrow width's."""
        for name, size, unit in self._beside(narrow, what):
            if size < unit or size % unit:
                below, above = size // unit * unit, (size // unit + 1) * unit
                near = f"{above}" if below == 0 else f"{below} or {above}"
                raise MupscaleError(
                    f"{what}: {name} {size} is not a multiple of {unit}. Choose {near}, or grow by fresh units (how: "
                    "fresh), which fit any larger width"
                )

    def check_wider_than(self, narrow: Width, what: str) -> None:
        """An error that begins with `what` unless every size is at least that of the narrow width."""
        for name, size, unit in self._beside(narrow, what):
            if size < unit:
                raise MupscaleError(f"{what}: {name} {size} is narrower than {unit}")

    def _beside(self, narrow: Width, what: str) -> list[tuple[str, Size, Size]]:
        if self.sizes.keys() != narrow.sizes.keys():
            raise MupscaleError(f"{what}: width {self.plain} does not name the same arguments as {narrow.plain}")
        return [(name, size, narrow.sizes[name]) for name, size in self.sizes.items()]


WidthLike = Size | Mapping[str, Size] | Width
"""Whatever `Width.of` takes: 512, {"d_model": 64, "heads": 4}, or a Width."""


def _are_whole(sizes: Mapping[str, Size]) -> bool:
    return all(isinstance(size, Integral) for size in sizes.values())


def _ratio(wide: Size, narrow: Size) -> Number:
    whole = isinstance(wide, Integral) and isinstance(narrow, Integral)
    return tidy(Fraction(wide) / Fraction(narrow)) if whole else wide / narrow


def _product(size: Size, factor: Number) -> Size:
    product = tidy(size * factor) if isinstance(factor, Fraction) else size * factor
    return float(product) if isinstance(product, Fraction) else product
