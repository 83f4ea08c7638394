"""What the dimensions of a parameter are to it: output or input, and the blocks in which their units are copied."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from numbers import Integral
from typing import Any

from mupscale.core.axes import Axis
from mupscale.core.rules import Number
from mupscale.system import MupscaleError

Dims = int | tuple[int, ...]
Sections = tuple[tuple[int, int], ...]
Constant = Number | Callable[[Number, Number], Number]


@dataclass(frozen=True)
class Role:
    """The output and input dimensions of one parameter or buffer, and the blocks in which their units are copied.

    `out_block` and `in_block` are the length of these blocks. Where an axis has several parts whose blocks differ, they
    are the (length, block) of each part in turn, in units of the narrow model, so that the lengths add up to the axis.
    Where the plan is tried, as by a family, they serve every width: the parts grow with the axis. A block of 0 says
    that a part of the inputs does not grow. An `Axis` says both.
    `fold` is a constant for the stored weight, as in Rule; a callable gets the multipliers (out, in_).
    `keep` is what the weights of old units are multiplied by where new units come beside them, as in Entry; where there
    is a fold, it has to be said.
    `offset` is what the module adds to the stored weight before it uses it: 1 for a norm with gain 1 + w.
    `why_not`: the axes scale (μP), but their units cannot be copied, for the first reason; or new ones cannot come
    beside the old ones, for the second.

    >>> import torch, mupscale as mu
    >>> head = mu.Role(out=0, in_=1, in_block=49)  # reads channels that were flattened with their 7 x 7 positions
    >>> head.dims(ndim=2)
    ((0,), (1,))
    >>> print(head)
    Role(out=0, in_=1, in_block=49)

    Queries, keys and values from one linear layer: 4 query heads of 8 units, and 2 key heads and 2 value heads that
    they share in pairs. A pair of query heads stays together, so blocks are of 16 units there and of 8 elsewhere.

    >>> qkv = mu.Role(out=0, in_=1, out_block=((32, 16), (16, 8), (16, 8)))
    >>> narrow, wide = torch.nn.Linear(32, 64, bias=False), torch.nn.Linear(64, 128, bias=False)
    >>> plan = mu.plan(narrow, wide, roles={"weight": qkv})
    >>> plan["weight"].axes[0].source(64)[:64:8]  # the narrow unit at which each wide query head begins
    tensor([ 0,  8,  0,  8, 16, 24, 16, 24])
    """

    out: Dims = ()
    in_: Dims = ()
    out_block: int | Sections | Axis = 1
    in_block: int | Sections | Axis = 1
    fold: Constant = 1
    keep: Constant | None = None
    offset: Number = 0
    why_not: tuple[str, str] = ("", "")

    def __post_init__(self) -> None:
        object.__setattr__(self, "out", _read_dims("out", "output", self.out))
        object.__setattr__(self, "in_", _read_dims("in_", "input", self.in_))
        object.__setattr__(self, "out_block", _short_block(self.out_axis))
        object.__setattr__(self, "in_block", _short_block(self.in_axis))

    @property
    def out_axis(self) -> Axis:
        """How the units of output dimensions lie in blocks."""
        return _axis_of(self.out_block)

    @property
    def in_axis(self) -> Axis:
        """How those of input dimensions do."""
        return _axis_of(self.in_block)

    def __str__(self) -> str:
        """What differs from a role that says nothing; functions are not spelt out."""
        said = {one.name: getattr(self, one.name) for one in fields(self) if getattr(self, one.name) != one.default}
        for name, value in said.items():
            if callable(value):
                said[name] = "…"
            elif name in ("out", "in_") and len(value) == 1:
                (said[name],) = value
            elif isinstance(value, float):
                said[name] = f"{value:.6g}"
        return f"Role({', '.join(f'{name}={value}' for name, value in said.items())})"

    def dims(self, ndim: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Output and input dimensions as non-negative numbers, for a tensor of this many dimensions."""
        out = tuple(d % ndim for d in _as_tuple(self.out)) if ndim else ()
        in_ = tuple(d % ndim for d in _as_tuple(self.in_)) if ndim else ()
        return out, in_

    def fits(self, ndim: int) -> bool:
        """Whether a tensor of this many dimensions has all that are named here, each of them once."""
        dims = _as_tuple(self.out) + _as_tuple(self.in_)
        return ndim == 0 or (all(-ndim <= d < ndim for d in dims) and len({d % ndim for d in dims}) == len(dims))

    @property
    def has_blocks_or_fold(self) -> bool:
        """Whether it says more than which dimension is output and which is input."""
        return (self.out_block, self.in_block, self.fold) != (1, 1, 1)


def _axis_of(block: int | Sections | Axis) -> Axis:
    if isinstance(block, Axis):
        return block.layout
    return Axis(block=block) if isinstance(block, int) else Axis(sections=tuple((n, each) for n, each in block))


def _short_block(axis: Axis) -> int | Sections | Axis:
    """As one would write it, so that equal roles are equal."""
    return axis if axis.last else axis.sections or axis.block


def _read_dims(name: str, kind: str, dims: object) -> tuple[int, ...]:
    try:
        several: tuple[Any, ...] = tuple(dims)  # type: ignore[arg-type]
    except TypeError:
        several = (dims,)
    if all(isinstance(dim, Integral) and not isinstance(dim, bool) for dim in several):
        return tuple(map(int, several))
    raise MupscaleError(
        f"a role's {name} is the number of the {kind} dimension that grows, such as {name}=0, or several as a tuple, "
        f"not {dims!r}; leave {name} out if no {kind} dimension grows"
    )


def _as_tuple(dims: Dims) -> tuple[int, ...]:
    return (dims,) if isinstance(dims, int) else tuple(dims)
