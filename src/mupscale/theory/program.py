"""Tensor programs with upscaling: what a program may do on either backend (Definition 'modified Ne⊗or⊤ program').

A vector of n·k entries is an array (…, units, k): the k copies of a unit side by side, and batches in front. `Finite`
has n units; `Limit` has samples of the units' joint distribution instead. A program is ordinary Python on either:

    def program(p: Program) -> Tensor:
        W, x = p.matrix(copies=p.k), p.vector()
        return p.avg((W.T @ torch.tanh(W @ x)) ** 2)

Functions of entries such as torch.tanh are OuterNonlin with r = 0, and numbers are scalars of the program.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mupscale.system import MupscaleError, derive

Psi = Callable[..., Tensor]
_AT_A_TIME = 1 << 24  # entries of an outer product that are in memory at once


class Matrix(ABC):
    """A random nk × nk matrix with entries N(0, 1/n), drawn for blocks of `copies` × `copies` equal entries.

    copies = 1 is the class W₁ of the paper (the noise of an upscaling), copies = k its class W₂ (duplicated weights);
    in between is the noise of an upscaling that another one follows.
    """

    def __init__(self, program: Program, copies: int) -> None:
        self.program, self.copies, self.distinct = program, copies, program.distinct(copies)

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
        sums = x.unflatten(-1, (-1, self.copies)).sum(-1) if self.copies > 1 else x
        batch = sums.reshape(-1, *sums.shape[-2:])
        y = self._times(batch, transposed).reshape(sums.shape)
        return y.repeat_interleave(self.copies, -1) if self.copies > 1 else y

    @abstractmethod
    def _times(self, x: Tensor, transposed: bool) -> Tensor:
        """The iid matrix, or its transpose, times a batch of vectors (batch, units, distinct)."""


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
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        # Backends and widths are independent of each other: the class's name and its units are part of the seed. k is
        # not, so that a run before its upscaling is the same at every k.
        self.generator = torch.Generator(self.device).manual_seed(derive(seed, type(self).__name__, units))

    def vector(self, copies: int = 1, count: int | None = None) -> Tensor:
        """An initial vector with entries N(0, 1): iid (copies = 1) or duplicated (copies = k); or `count` of them."""
        distinct = self.distinct(copies)
        drawn = self._normals((1 if count is None else count) * distinct)
        vectors = drawn.reshape(-1, distinct, self.units).transpose(1, 2).contiguous()
        vectors = vectors.repeat_interleave(copies, -1) if copies > 1 else vectors
        return vectors if count is not None else vectors[0]

    @abstractmethod
    def matrix(self, copies: int = 1) -> Matrix:
        """An initial matrix: iid (copies = 1) or duplicated (copies = k)."""

    @abstractmethod
    def _normals(self, count: int) -> Tensor:
        """(count, units) fresh standard normals."""

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
        return x.mean((-2, -1))

    def inner(self, x: Tensor, y: Tensor) -> Tensor:
        """Avg of x y, for batches (a, units, k) and (b, units, k) an a × b matrix; Tr⟨x|y⟩ / k."""
        self.check(x, "inner")
        self.check(y, "inner")
        size = self.units * self.k
        products = x.reshape(-1, size) @ y.reshape(-1, size).T / size
        return products.reshape((*x.shape[:-2], *y.shape[:-2]))

    def kernel(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        """⟨x|y⟩, the k × k matrix of second moments between copies, for each pair of a batch."""
        y = x if y is None else y
        self.check(x, "kernel")
        self.check(y, "kernel")
        return x.mT @ y / self.units

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
        size = self._affordable(r)
        flat = [x.reshape(-1) for x in xs]
        betas = [[v.reshape(*(1,) * (i + 1), -1, *(1,) * (r - 1 - i)) for v in flat] for i in range(r)]
        step = max(1, _AT_A_TIME // size**r)
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
            mean = value.mean(tuple(range(1, r + 1))) if r else value
            parts.append(mean.expand(expected[0]))
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

    def _affordable(self, r: int) -> int:
        size = self.units * self.k
        if r < 0:
            raise MupscaleError(f"outer_nonlin's order r is 0 or more, not {r}")
        if size**r > _AT_A_TIME:
            raise MupscaleError(
                f"outer_nonlin of order {r} over {size} entries needs {float(size) ** r:.1e} numbers in memory for "
                f"every entry, and {_AT_A_TIME:.1e} is the most; take fewer units or samples, or a lower order"
            )
        return size
