"""Tensor programs with upscaling: what a program may do on either backend (Definition 'modified Ne⊗or⊤ program').

A vector of n·k entries is an array (…, units, k): the k copies of a unit side by side, and batches in front. `Finite`
has n units; `Limit` has samples of the units' joint distribution instead. A program is ordinary Python on either:

    def program(p: Program) -> Tensor:
        W, x = p.matrix(copies=p.k), p.vector()
        return p.avg((W.T @ torch.tanh(W @ x)) ** 2)

Functions of entries such as torch.tanh are OuterNonlin with r = 0, and numbers are scalars of the program.

`grow` puts units of another population beside those that there are (growth by fresh units, beyond the paper): arrays
are longer from then on, old units first. Averages are mixtures: every unit counts by its share of the width, which is
1/n at finite width, and in the limit a population's fraction divided by its samples.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from mupscale.system import MupscaleError, derive

Psi = Callable[..., Tensor]
_AT_A_TIME = 1 << 24  # entries of an outer product that are in memory at once


class Matrix(ABC):
    """A random nk × nk matrix with entries N(0, 1/n), drawn for blocks of `copies` × `copies` equal entries.

    copies = 1 is the class W₁ of the paper (the noise of an upscaling), copies = k its class W₂ (duplicated weights);
    in between is the noise of an upscaling that another one follows. out, in_: the units that it leads to and from,
    where it is a block of the whole (everything else is zero); n is the width at which it was drawn, in any case.
    """

    def __init__(self, program: Program, copies: int, out: range, in_: range) -> None:
        self.program, self.copies, self.distinct = program, copies, program.distinct(copies)
        self.out, self.in_ = out, in_

    def __matmul__(self, x: Tensor) -> Tensor:
        """MatMul with W, for one vector or a batch of them."""
        return self.times(x, transposed=False)

    @property
    def T(self) -> Transpose:
        """Wᵀ: `W.T @ x` is MatMul with it."""
        return Transpose(self)

    def times(self, x: Tensor, *, transposed: bool) -> Tensor:
        """(W ⊗ 1 1ᵀ) x: W acts on the sums over equal copies, and its result is repeated."""
        self.program.check(x, "a matrix")
        source, target = (self.out, self.in_) if transposed else (self.in_, self.out)
        x = x[..., source.start : source.stop, :]
        sums = x.unflatten(-1, (-1, self.copies)).sum(-1) if self.copies > 1 else x
        batch = sums.reshape(-1, *sums.shape[-2:])
        y = self._times(batch, transposed).reshape(*sums.shape[:-2], len(target), self.distinct)
        y = y.repeat_interleave(self.copies, -1) if self.copies > 1 else y
        around = target.start, self.program.units - target.stop
        return pad(y, (0, 0, *around)) if any(around) else y

    @abstractmethod
    def _times(self, x: Tensor, transposed: bool) -> Tensor:
        """The iid matrix, or its transpose, times a batch of vectors (batch, units that it leads from, distinct)."""


class Transpose:
    """A matrix seen from the other side."""

    def __init__(self, matrix: Matrix) -> None:
        self.T = matrix

    def __matmul__(self, x: Tensor) -> Tensor:
        """MatMul with Wᵀ."""
        return self.T.times(x, transposed=True)


class Program(ABC):
    """The operations of the language; `units` are a backend's n or its samples, k the copies of each."""

    def __init__(self, units: int, k: int, seed: int, device: str | torch.device | None, dtype: torch.dtype) -> None:
        if units < 1 or k < 1:
            raise MupscaleError(f"a program needs at least one unit and one copy of it, not {units} and {k}")
        if dtype not in (torch.float32, torch.float64):
            raise MupscaleError(f"a program computes in torch.float32 or torch.float64, not in {dtype}")
        self.units, self.k, self.dtype = units, k, dtype
        self.populations = [range(units)]
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        # Backends and widths are independent of each other: the class's name and its units are part of the seed. k is
        # not, so that a run before its upscaling is the same at every k.
        self.generator = torch.Generator(self.device).manual_seed(derive(seed, type(self).__name__, units))
        self.shares = torch.full((units, 1), 1 / units, device=self.device, dtype=dtype)  # of the width, unit by unit

    def grow(self, times: float) -> range:
        """Make the width `times` as large with units of a new population behind all others; the new units.

        Vectors from before are shorter than those from now on: what becomes of them is the program's business.
        """
        if not 1 < times < math.inf:
            raise MupscaleError(f"fresh units make a network more than once as wide, and not infinitely, not {times:g}")
        count = self._count_new(times)
        new = self.shares.new_full((count, 1), (1 - 1 / times) / count)
        self.shares = torch.cat([self.shares / times, new])
        self.populations.append(range(self.units, self.units + count))
        self.units += count
        return self.populations[-1]

    @abstractmethod
    def _count_new(self, times: float) -> int:
        """How many units, or samples, a new population has."""

    def vector(self, copies: int = 1, count: int | None = None, *, of: range | None = None) -> Tensor:
        """An initial vector with entries N(0, 1): iid (copies = 1) or duplicated (copies = k); or `count` of them.

        of: one population, and a vector of its length.
        """
        distinct, of = self.distinct(copies), of or range(self.units)
        drawn = self._normals((1 if count is None else count) * distinct, of)
        vectors = drawn.reshape(-1, distinct, len(of)).transpose(1, 2).contiguous()
        vectors = vectors.repeat_interleave(copies, -1) if copies > 1 else vectors
        return vectors if count is not None else vectors[0]

    def matrix(self, copies: int = 1, out: range | None = None, in_: range | None = None) -> Matrix:
        """An initial matrix: iid (copies = 1) or duplicated (copies = k); or a block of one, as in `Matrix`."""
        return self._matrix(copies, out or range(self.units), in_ or range(self.units))

    @abstractmethod
    def _matrix(self, copies: int, out: range, in_: range) -> Matrix: ...

    @abstractmethod
    def _normals(self, count: int, of: range) -> Tensor:
        """(count, units) fresh standard normals for these units, which are whole populations."""

    def distinct(self, copies: int) -> int:
        """How many different copies of a unit there are where `copies` of them are equal."""
        if copies < 1 or self.k % copies:
            raise MupscaleError(
                f"copies={copies} is no class of this program: its {self.k} copies of a unit do not divide into groups "
                f"of {copies}; take a divisor of {self.k}"
            )
        return self.k // copies

    def avg(self, x: Tensor) -> Tensor:
        """Avg: the mean over all nk entries, for each vector of a batch."""
        self.check(x, "avg")
        return self.weigh(x).sum((-2, -1))

    def weigh(self, x: Tensor) -> Tensor:
        """Every entry times its share of all nk, so that sums are averages."""
        return x * (self.shares / self.k)

    def inner(self, x: Tensor, y: Tensor) -> Tensor:
        """Avg of x y, for batches (a, units, k) and (b, units, k) an a × b matrix; Tr⟨x|y⟩ / k."""
        self.check(x, "inner")
        self.check(y, "inner")
        size = self.units * self.k
        products = x.reshape(-1, size) @ self.weigh(y).reshape(-1, size).T
        return products.reshape((*x.shape[:-2], *y.shape[:-2]))

    def kernel(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        """⟨x|y⟩, the k × k matrix of second moments between copies, for each pair of a batch."""
        y = x if y is None else y
        self.check(x, "kernel")
        self.check(y, "kernel")
        return x.mT @ (y * self.shares)

    def outer_nonlin(
        self, psi: Psi, xs: Sequence[Tensor], r: int = 0, scalars: Sequence[float | Tensor] = ()
    ) -> Tensor:
        """OuterNonlin: y_α = ⟨ψ(x_α; x_β₁; …; x_βᵣ; c)⟩ over β₁ … βᵣ; ψ gets r + 1 lists of tensors, and c if any.

        The tensors broadcast: those of β₁ have an axis of their own behind that of α, and so on.
        """
        for x in xs:
            self.check(x, "outer_nonlin")
            if x.dim() != 2:
                raise MupscaleError(f"outer_nonlin takes single vectors, not a batch of shape {tuple(x.shape)}")
        size = self.units * self.k
        if r < 0:
            raise MupscaleError(f"outer_nonlin's order r is 0 or more, not {r}")
        if size**r > _AT_A_TIME:
            raise MupscaleError(
                f"outer_nonlin of order {r} over {size} entries needs {float(size) ** r:.1e} numbers in memory for "
                f"every entry, and {_AT_A_TIME:.1e} is the most; take fewer units or samples, or a lower order"
            )
        flat = [x.reshape(-1) for x in xs]
        betas = [[v.reshape(*(1,) * (i + 1), -1, *(1,) * (r - 1 - i)) for v in flat] for i in range(r)]
        step = max(1, _AT_A_TIME // size**r)
        shares = (self.shares / self.k).expand(-1, self.k).reshape(-1)
        parts = []
        for start in range(0, size, step):
            alpha = [v[start : start + step].reshape(-1, *(1,) * r) for v in flat]
            value = torch.as_tensor(psi(alpha, *betas, *([scalars] if len(scalars) else [])))
            expected = (min(step, size - start), *(size,) * r)
            if value.dim() != r + 1 or any(
                has not in (1, wants) for has, wants in zip(value.shape, expected, strict=True)
            ):
                raise MupscaleError(
                    f"the nonlinearity returned shape {tuple(value.shape)} where one number for each of {expected} was "
                    f"expected; it must act entry by entry"
                )
            value = value.expand(expected)
            for _ in range(r):
                value = value @ shares
            parts.append(value)
        return torch.cat(parts).reshape(self.units, self.k)

    def check(self, x: Tensor, what: str) -> None:
        """Refuse what is no vector of this program."""
        if not isinstance(x, Tensor):
            raise MupscaleError(
                f"{what} takes vectors, and {type(x).__name__} is none; multiply from the right, one matrix after the "
                f"other: A @ (B @ x)"
            )
        if x.dim() < 2 or tuple(x.shape[-2:]) != (self.units, self.k):
            raise MupscaleError(
                f"{what} takes vectors of shape (…, {self.units}, {self.k}), units × copies, not {tuple(x.shape)}"
            )
        if x.dtype != self.dtype or x.device.type != self.device.type:
            raise MupscaleError(
                f"{what} takes vectors of {self.dtype} on {self.device.type}, as this program's are, not of {x.dtype} "
                f"on {x.device.type}"
            )
