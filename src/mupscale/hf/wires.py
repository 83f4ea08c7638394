"""Wires: the axes that a model's tensors share, and which of them each dimension of a tensor is.

A wire carries units from what writes it to what reads it, so it is copied in one way everywhere: `hidden` unit by
unit, `queries` and `keys` by whole heads or groups. A Layout says which wire is a tensor's output and which its input;
the three numbers of its Rule follow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from mupscale.axes import Axis
from mupscale.errors import MupscaleError
from mupscale.plan import Entry, Shape
from mupscale.rules import Number


@dataclass(frozen=True)
class Wire:
    """An axis of `size` narrow units that grows `times`, in blocks; `sections` as in Axis, where blocks differ."""

    size: int
    times: int = 1
    block: int = 1
    sections: tuple[tuple[int, int], ...] = ()

    @property
    def axis(self) -> Axis:
        """How it is copied."""
        return Axis(self.times, self.block if self.times != 1 else 1, self.sections if self.times != 1 else ())

    def __mul__(self, number: int) -> Wire:
        """`number` units for each one, kept together: a head's query, key and value side by side."""
        sections = tuple((length * number, block * number) for length, block in self.sections)
        return Wire(self.size * number, self.times, self.block * number, sections)

    def __or__(self, other: Wire) -> Wire:
        """One wire after the other in one packed axis: q|k|v."""
        if self.times != other.times:
            raise MupscaleError(
                f"one tensor packs an axis that grows {self.times} times with one that grows {other.times} times, "
                f"which would need two learning rates in it; let both grow alike"
            )
        parts = [part for wire in (self, other) for part in wire.sections or ((wire.size, wire.block),)]
        return Wire(self.size + other.size, self.times, 1, tuple(parts))


@dataclass(frozen=True)
class Layout:
    """The wires of a tensor by dimension, counted from the last (-1), as output or input.

    offset: as in Entry, what the model adds to the stored value (1 for Gemma's norms).
    """

    out: Mapping[int, str]
    in_: Mapping[int, str]
    offset: Number = 0

    def entry(self, name: str, shape: Shape, wires: Mapping[str, Wire], fold: Number = 1) -> Entry:
        """The tensor's part of a plan; `shape` is the narrow one, and must be what the wires say."""
        named = {d % len(shape): wires[wire] for side in (self.out, self.in_) for d, wire in side.items()}
        for (d, wire), label in zip(named.items(), (*self.out.values(), *self.in_.values()), strict=True):
            if shape[d] != wire.size:
                raise MupscaleError(
                    f"'{name}' has shape {shape}, and its dimension {d} should be '{label}' of {wire.size} units "
                    f"according to the config: the checkpoint and its config.json do not belong together"
                )
        axes = {d: wire.axis for d, wire in sorted(named.items())}
        wide = tuple(n * named[d].times if d in named else n for d, n in enumerate(shape))
        out, in_ = (tuple(sorted(d % len(shape) for d in side)) for side in (self.out, self.in_))
        return Entry(shape, wide, axes, out, in_, fold, (name,), self.offset)

    def narrowed(self, shape: Shape, wires: Mapping[str, Wire]) -> Shape:
        """The narrow shape of a tensor that has this shape in the wide model."""
        times = {d % len(shape): wires[wire].times for side in (self.out, self.in_) for d, wire in side.items()}
        return tuple(n // times.get(d, 1) for d, n in enumerate(shape))

    def with_offset(self, offset: Number) -> Layout:
        """The same, of a tensor that is stored without `offset`."""
        return replace(self, offset=offset)


def linear(out: str, in_: str) -> Layout:
    """(…, out, in): nn.Linear, and experts stacked before it."""
    return Layout({-2: out}, {-1: in_})


def conv1d(in_: str, out: str) -> Layout:
    """(in, out): transformers' Conv1D."""
    return Layout({-1: out}, {-2: in_})


def table(out: str) -> Layout:
    """(rows, out): an embedding, or the weight of a layer whose input is no width."""
    return Layout({-1: out}, {})


def column(out: str) -> Layout:
    """(out, rows): a Linear whose input is no width."""
    return Layout({-2: out}, {})


def patches(out: str) -> Layout:
    """(out, channels, height, width): a convolution of an image."""
    return Layout({-4: out}, {})


def vector(out: str) -> Layout:
    """(…, out): a bias, a norm's gain, a token of its own."""
    return Layout({-1: out}, {})


def readout(in_: str) -> Layout:
    """(…, in): logits, a router, a regression head: what it writes is no width."""
    return Layout({}, {-1: in_})


def same() -> Layout:
    """No wire: a bias of logits, a per-head norm, a mask; it is copied as it is."""
    return Layout({}, {})
