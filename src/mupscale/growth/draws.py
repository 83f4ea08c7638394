"""Normal numbers for noise and new units: the same for a seed on every machine, and any part of a tensor alone.

Sixteen random bits pick two numbers at once, a point of the plane, from a table of 65,536 points that lie as the normal
distribution of the plane has them. Their mean is 0 exactly and their covariance the identity within 1e-8; other
moments and the distribution of any projection are the normal one's within some thousandths. A weight thus takes one of
65,000 values, up to 4.56 standard deviations, in every dtype. A ziggurat has no such bounds and takes longer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import torch
from torch import Tensor

from mupscale.core import Initial, Plan, Shape
from mupscale.system import MupscaleError, derive

_POINTS = 1 << 16
_GRID = float(1 << 20)  # coordinates are multiples of 1 / this, which float32 has exactly
_VALUES_PER_WORD = 4  # uniform numbers that 64 random bits pick
_PER_WORD = 8  # numbers that 64 random bits pick
_BLOCK = 1 << 20  # numbers that are drawn from one stream


def standard_normal(shape: tuple[int, ...], dtype: torch.dtype, seed: int, name: str) -> Tensor:
    """N(0, 1) entries that depend on the seed, the name and the shape alone; on the CPU."""
    drawn = torch.float64 if dtype == torch.float64 else torch.float32
    flat = torch.empty(math.prod(shape), dtype=drawn)
    return draw_normal(flat, 0, seed, name).reshape(shape)


def draw_normal(out: Tensor, start: int, seed: int, name: str) -> Tensor:
    """Entries start, start + 1, … of a flattened tensor of standard normal ones, into `out`.

    Every block of entries has a stream of its own, so that any part of a tensor can be drawn alone, by any thread.
    """
    stop = start + out.numel()
    for first in range(start // _BLOCK * _BLOCK, stop, _BLOCK):
        labels = name, *([first // _BLOCK] if first else [])
        begin, end = max(first, start), min(first + _BLOCK, stop)
        _pick_points(out[begin - start : end - start], begin - first, np.random.SFC64(derive(seed, *labels)))
    return out


def draw_uniform(out: Tensor, start: int, seed: int, name: str) -> Tensor:
    """The same for numbers with a mean of 0 and a variance of 1 that are uniform: 65,536 values between ±√3."""
    stop = start + out.numel()
    for first in range(start // _BLOCK * _BLOCK, stop, _BLOCK):
        stream = np.random.SFC64(derive(seed, "uniform", name, first // _BLOCK))
        begin, end = max(first, start), min(first + _BLOCK, stop)
        skipped = (begin - first) // _VALUES_PER_WORD
        stream.random_raw(skipped, output=False)
        words = stream.random_raw(-(-(end - first) // _VALUES_PER_WORD) - skipped)
        ranks = words.astype("<u8", copy=False).view("<u2").astype(np.int32)
        wanted = torch.from_numpy(ranks)[begin - first - skipped * _VALUES_PER_WORD :][: end - begin].double()
        out[begin - start : end - start] = (2 * wanted + 1 - _POINTS) * (math.sqrt(3) / _POINTS)
    return out


def _pick_points(out: Tensor, skipped: int, stream: np.random.SFC64) -> None:
    """Fill `out` with the coordinates of random points, of which so many are passed over at first."""
    stream.random_raw(skipped // _PER_WORD, output=False)
    skipped %= _PER_WORD
    words = stream.random_raw(-(-(skipped + len(out)) // _PER_WORD))
    index = torch.from_numpy(words.astype("<u8", copy=False).view("<u2").astype(np.int32))
    index = index[skipped // 2 : -(-(skipped + len(out)) // 2)]
    if out.dtype == torch.float32 and 2 * len(index) == len(out) and out.storage_offset() % 2 == 0:
        torch.index_select(_points(), 0, index, out=out.view(torch.int64))
    else:  # a point of which one number is wanted, or other memory
        out.copy_(_points()[index].view(torch.float32)[skipped % 2 :][: len(out)])


@cache
def _points() -> Tensor:
    """The table, two float32 in eight bytes: a quarter of it by golden angles, and that turned by right angles.

    Radii are equally likely parts of their distribution. No coordinate is nearer to the middle between two multiples of
    the grid than 10,000 roundings of float64, so that every machine's logarithm and cosine give the same table.
    """
    quarter = _POINTS // 4
    number = np.arange(quarter)
    radius = np.sqrt(-2 * np.log((number + 0.5) / quarter))
    radius /= math.sqrt(math.fsum(radius**2) / (2 * quarter))
    angle = 2 * math.pi * (number * ((math.sqrt(5) - 1) / 2) % 1.0)
    x, y = (np.rint(radius * along(angle) * _GRID) / _GRID for along in (np.cos, np.sin))
    turned = [np.stack(point, axis=1) for point in ((x, y), (-y, x), (-x, -y), (y, -x))]
    return torch.from_numpy(np.concatenate(turned).astype(np.float32)).view(torch.int64).view(-1)


@dataclass(frozen=True)
class NewTensor:
    """A tensor of a new layer: its name, what it is drawn from (a constant for a std of 0), and the seed.

    law: where its parts start differently, so that mean and std are those of no part.
    """

    name: str
    mean: float
    std: float
    seed: int
    law: Initial | None = None

    @classmethod
    def of(cls, name: str, plan: Plan, seed: int) -> NewTensor | None:
        """What a plan says of a tensor; None if it is made of another one's values."""
        source, law = plan.sources[name], plan.initial.get(name, Initial())
        if source.is_taken:
            return None
        is_silent = source.kind == "silent"
        if is_silent:
            return cls(plan.drawn_as(name), source.value, 0.0, seed)
        if law.means == ():
            raise MupscaleError(
                f"'{name}' of a new block starts as a pattern, or by no law that its values could be drawn from, and "
                "no model that has them is in memory here. Copy blocks instead (Stack), or grow the models in memory "
                "with mupscale.upscale"
            )
        means = law.means or (0.0,)
        in_parts = law if len(means) > 1 else None
        return cls(plan.drawn_as(name), means[0], law.std or 0.0, seed, in_parts)

    def part(self, start: int, count: int, size: int, dtype: torch.dtype) -> Tensor:
        """So many of its `size` entries; what is drawn follows from the seed and the name alone."""
        if self.std == 0:
            return torch.full((count,), self.mean, dtype=dtype)
        drawn = draw_normal(torch.empty(count), start, self.seed, f"new block {self.name}")
        return drawn.mul_(self.std).add_(self.mean).to(dtype)

    def whole(self, shape: Shape, dtype: torch.dtype) -> Tensor:
        """All of it."""
        size = math.prod(shape)
        if self.law is None:
            return self.part(0, size, size, dtype).view(shape)
        standard = replace(self, mean=0.0, std=1.0, law=None).whole(shape, torch.float32)
        spreads, means = (self.law.by_unit(numbers, shape) for numbers in (self.law.spreads, self.law.means or (0.0,)))
        return (standard * spreads + means).to(dtype)
