"""Wires: the axes that a model's tensors share, and which of them each dimension of a tensor is.

A wire carries units from what writes it to what reads it, so it is copied in one way everywhere: `hidden` unit by
unit, `queries` and `keys` by whole heads or groups. A Layout says which wire is a tensor's output and which its input;
the three numbers of its Rule follow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from mupscale.core import Axis, Entry, Number, Shape
from mupscale.hf.describe.multipliers import grown
from mupscale.system import MupscaleError, checks_arguments


@dataclass(frozen=True)
class Wire:
    """An axis of `size` narrow units that grows `times`, in blocks; `sections` as in Axis, where blocks differ.

    width: False for a size that never grows, such as OPT's word embeddings behind a projection. last: as in Axis.

    >>> Wire(size=4, times=2, block=2).axis  # two heads of two units
    Axis(times=2, block=2, sections=())
    >>> (Wire(4, 2, block=2) | Wire(2, 2, block=2)).size  # packed one after the other
    6
    """

    size: int
    times: Number = 1
    block: int = 1
    sections: tuple[tuple[int, int], ...] = ()
    width: bool = True
    last: bool = False

    @property
    def axis(self) -> Axis:
        """How it is copied."""
        return Axis() if self.times == 1 else Axis(self.times, self.block, self.sections, self.last)

    def __mul__(self, number: int) -> Wire:
        """`number` units for each one, kept together: a head's query, key and value side by side."""
        sections = tuple((length * number, block * number) for length, block in self.sections)
        return replace(self, size=self.size * number, block=self.block * number, sections=sections)

    def __floordiv__(self, number: int) -> Wire:
        """One unit for each `number` of these: a gain or a bias for each head."""
        sections = tuple((length // number, block // number) for length, block in self.sections)
        return replace(self, size=self.size // number, block=max(1, self.block // number), sections=sections)

    def __or__(self, other: Wire) -> Wire:
        """One wire after the other in one packed axis: q|k|v."""
        if self.times != other.times:
            raise MupscaleError(
                f"one tensor packs an axis that grows {self.times} times with one that grows {other.times} times, "
                "which would need two learning rates in it. Let both grow by the same factor"
            )
        size = self.size + other.size
        parts = tuple(part for wire in (self, other) for part in wire.sections or ((wire.size, wire.block),))
        if len({block for _, block in parts}) == 1:
            return Wire(size, self.times, parts[0][1], last=self.last)
        return Wire(size, self.times, 1, parts, last=self.last)


@dataclass(frozen=True)
class Layout:
    """The wires of a tensor by dimension, counted from the last (-1), as output or input.

    offset: as in Entry, what the model adds to the stored value (1 for Gemma's norms). norm: of a norm's parameters, as
    in Plan.norms: "rms" or "layer" for its gain, "bias" for the other; "head" for the gain of a norm over the units of
    one head, which stay.

    >>> wires = {"hidden": Wire(4, times=2), "ffn": Wire(6, times=3)}
    >>> entry = linear("ffn", "hidden").entry("up.weight", (6, 4), wires)
    >>> entry.wide, entry.rule.out, entry.rule.in_
    ((18, 8), 3, 2)
    """

    out: Mapping[int, str]
    in_: Mapping[int, str]
    offset: Number = 0
    norm: str = ""

    def entry(self, name: str, shape: Shape, wires: Mapping[str, Wire], fold: Number = 1, keep: Number = 1) -> Entry:
        """The tensor's part of a plan; `shape` is the narrow one, and must be what the wires say."""
        labels = self._labels(name, shape, wires)
        for d, label in labels.items():
            if shape[d] != wires[label].size:
                raise MupscaleError(
                    f"'{name}' has shape {shape}, but by the config its dimension {d} should be '{label}' of "
                    f"{wires[label].size} units: the checkpoint and its config.json do not belong together"
                )
        axes = {d: wires[label].axis for d, label in sorted(labels.items()) if wires[label].width}
        wide = tuple(grown(n, wires[labels[d]].times) if d in labels else n for d, n in enumerate(shape))
        out, in_ = (tuple(d for d in axes if d - len(shape) in side) for side in (self.out, self.in_))
        return Entry(shape, wide, axes, out, in_, fold, (name,), self.offset, keep)

    def narrowed(self, name: str, shape: Shape, wires: Mapping[str, Wire]) -> Shape:
        """The narrow shape of a tensor that has this shape in the wide model; an error where none there has it."""
        lying = {d: wires[label] for d, label in self._labels(name, shape, wires).items()}
        wide = tuple(grown(lying[d].size, lying[d].times) if d in lying else n for d, n in enumerate(shape))
        if shape != wide:
            raise MupscaleError(
                f"'{name}' has shape {shape}, and {wide} in the upscaled model. Load that model, from the folder that "
                "mupscale upscale wrote"
            )
        return tuple(lying[d].size if d in lying else n for d, n in enumerate(shape))

    def _labels(self, name: str, shape: Shape, wires: Mapping[str, Wire]) -> dict[int, str]:
        """The wires by dimension, counted from the first (0)."""
        named = {**self.out, **self.in_}
        if named and len(shape) < -min(named):
            raise MupscaleError(
                f"'{name}' has shape {shape}, but its description has {-min(named)} dimensions: the checkpoint is not "
                "of the kind that its config.json says"
            )
        for label in named.values():
            if label not in wires:
                raise MupscaleError(
                    f"'{name}' is described with the axis '{label}', which is not one of {', '.join(wires)}"
                )
        return {d % len(shape): label for d, label in named.items()}

    @property
    def wired(self) -> bool:
        """Whether it lies at any wire."""
        return bool(self.out or self.in_)

    def with_offset(self, offset: Number) -> Layout:
        """The same, of a tensor that is stored without `offset`."""
        return replace(self, offset=offset)

    def in_norm(self, kind: str) -> Layout:
        """The same, of a norm: of its gain where it divides ("rms") or centres, too ("layer"), or of its "bias".

        Growth by fresh units has to know it. "head" is a gain, too, of a norm over units that do not grow.
        """
        if kind not in ("rms", "layer", "bias", "head"):
            raise MupscaleError(
                f"a norm's gain is of kind 'rms', 'layer' or 'head', and its bias of kind 'bias', not {kind!r}"
            )
        return replace(self, norm=kind)


@checks_arguments
def linear(out: str, in_: str) -> Layout:
    """(…, out, in): nn.Linear, and experts stacked before it.

    >>> linear("ffn", "hidden").entry("up.weight", (6, 4), {"hidden": Wire(4, 2), "ffn": Wire(6, 2)}).wide
    (12, 8)
    """
    return Layout({-2: out}, {-1: in_})


@checks_arguments
def conv1d(in_: str, out: str) -> Layout:
    """(in, out): transformers' Conv1D.

    >>> conv1d("hidden", "ffn").entry("c_fc.weight", (4, 6), {"hidden": Wire(4, 2), "ffn": Wire(6, 3)}).wide
    (8, 18)
    """
    return Layout({-1: out}, {-2: in_})


@checks_arguments
def table(out: str) -> Layout:
    """(rows, out): an embedding, or the weight of a layer whose input is no width.

    >>> table("hidden").entry("embed_tokens.weight", (11, 4), {"hidden": Wire(4, 2)}).wide
    (11, 8)
    """
    return Layout({-1: out}, {})


@checks_arguments
def column(out: str) -> Layout:
    """(out, rows): a Linear whose input is no width.

    >>> column("hidden").entry("project.weight", (4, 3), {"hidden": Wire(4, 2)}).wide
    (8, 3)
    """
    return Layout({-2: out}, {})


@checks_arguments
def patches(out: str) -> Layout:
    """(out, channels, height, width): a convolution of an image.

    >>> patches("hidden").entry("projection.weight", (4, 3, 16, 16), {"hidden": Wire(4, 2)}).wide
    (8, 3, 16, 16)
    """
    return Layout({-4: out}, {})


def pixels(in_: str) -> Layout:
    """(colours, in, 1, 1): a convolution that reads the hidden units out as pixels."""
    return Layout({}, {-3: in_})


@checks_arguments
def vector(out: str) -> Layout:
    """(…, out): a bias, a norm's gain, a token of its own.

    >>> vector("hidden").entry("norm.weight", (4,), {"hidden": Wire(4, 2)}).wide
    (8,)
    """
    return Layout({-1: out}, {})


@checks_arguments
def readout(in_: str) -> Layout:
    """(…, in): logits, a router, a regression head: what it writes is no width.

    >>> entry = readout("hidden").entry("lm_head.weight", (11, 4), {"hidden": Wire(4, 2)})
    >>> entry.wide, entry.rule.weight  # as many logits, each weight halved
    ((11, 8), 0.5)
    """
    return Layout({}, {-1: in_})


def same() -> Layout:
    """No wire: a bias of logits, a per-head norm, a mask; it is copied as it is, and gets no noise.

    >>> same().entry("lm_head.bias", (11,), {"hidden": Wire(4, 2)}).wide
    (11,)
    """
    return Layout({}, {})
