"""What the dimensions of a parameter are to it: output or input, and the blocks in which their units are copied."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from numbers import Integral
from typing import Any

from mupscale.core.rules import Number
from mupscale.system import MupscaleError

Dims = int | tuple[int, ...]
Sections = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Role:
    """The output and input dimensions of one parameter or buffer, and the blocks in which their units are copied.

    `out_sections` is for an output axis of several parts whose blocks differ: (length, block) of each part in turn, in
    units of the narrow model, so that the lengths add up to the axis. Where the plan is tried, as by a family, they
    serve every width: the parts grow with the axis. Where all parts have blocks of one length, `out_block` says it.
    `fold` is a constant for the stored weight, as in Rule; a callable gets the multipliers (out, in_).
    `offset` is what the module adds to the stored weight before it uses it: 1 for a norm with gain 1 + w.
    `uncopyable`, where not empty, says why the axes may scale (μP) but their units cannot be copied (widening).
    `keep` is what the weights of old units are multiplied by where new units come beside them, as in Entry; where there
    is a fold, it has to be said. `unplaceable` says why new units cannot come beside the old ones. `last`: an old block
    is the last of those that come in its place, as in Axis.

    >>> import torch, mupscale as mu
    >>> head = mu.Role(out=0, in_=1, in_block=49)  # reads channels that were flattened with their 7 x 7 positions
    >>> head.dims(ndim=2)
    ((0,), (1,))
    >>> print(head)
    Role(out=0, in_=1, in_block=49)

    Queries, keys and values from one linear layer: 4 query heads of 8 units, and 2 key heads and 2 value heads that
    they share in pairs. A pair of query heads stays together, so blocks are of 16 units there and of 8 elsewhere.

    >>> qkv = mu.Role(out=0, in_=1, out_sections=((32, 16), (16, 8), (16, 8)))
    >>> narrow, wide = torch.nn.Linear(32, 64, bias=False), torch.nn.Linear(64, 128, bias=False)
    >>> plan = mu.plan(narrow, wide, roles={"weight": qkv})
    >>> plan["weight"].axes[0].source(64)[:64:8]  # the narrow unit at which each wide query head begins
    tensor([ 0,  8,  0,  8, 16, 24, 16, 24])
    """

    out: Dims = ()
    in_: Dims = ()
    out_block: int = 1
    in_block: int = 1
    out_sections: Sections = ()
    fold: Number | Callable[[Number, Number], Number] = 1
    uncopyable: str = ""
    offset: Number = 0
    keep: Number | Callable[[Number, Number], Number] | None = None
    unplaceable: str = ""
    last: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "out", _read_dims("out", "output", self.out))
        object.__setattr__(self, "in_", _read_dims("in_", "input", self.in_))

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
        return (self.out_block, self.in_block, self.out_sections, self.fold) != (1, 1, (), 1)

    def sections_of(self, units: int) -> Sections:
        """The sections as parts of an output axis of so many units, whatever width they were told for.

        >>> fused = Role(out=0, out_sections=((32, 16), (16, 8), (16, 8)))
        >>> fused.sections_of(128)
        ((64, 16), (32, 8), (32, 8))
        """
        whole = sum(length for length, _ in self.out_sections)
        if not whole or whole == units:
            return self.out_sections
        if any(length * units % (whole * block) for length, block in self.out_sections):
            lengths, blocks = (", ".join(map(str, numbers)) for numbers in zip(*self.out_sections, strict=True))
            raise MupscaleError(
                f"an axis of {whole} units is copied in parts of {lengths}, in blocks of {blocks}. An axis of {units} "
                "units cannot be divided that way"
            )
        return tuple((length * units // whole, block) for length, block in self.out_sections)

    def blocks(self, *, out: int | None = None, in_: int | None = None) -> Role:
        """The same role with other block lengths."""
        return replace(
            self,
            out_block=self.out_block if out is None else out,
            in_block=self.in_block if in_ is None else in_,
        )


def _read_dims(name: str, kind: str, dims: object) -> tuple[int, ...]:
    """The dimensions that a role names, one or several."""
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
