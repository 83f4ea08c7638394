"""Where programs run: at finite width, with real matrices or ones that are never formed, and in the limit n → ∞."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mupscale.system import Diverged, MupscaleError
from mupscale.theory.program import Matrix, Program

_NEW = {torch.float64: 1e-7, torch.float32: 1e-4}  # what part of a vector, beyond the basis, counts as a new direction


class Rows:
    """Rows of one length, kept in one piece of memory that grows by half when it is full."""

    def __init__(self, length: int, like: Program) -> None:
        self._memory = torch.empty(4, length, device=like.device, dtype=like.dtype)
        self.count = 0

    @property
    def rows(self) -> Tensor:
        return self._memory[: self.count]

    def add(self, rows: Tensor) -> None:
        needed = self.count + len(rows)
        if needed > len(self._memory):
            grown = self._memory.new_empty(max(needed, len(self._memory) * 3 // 2), self._memory.shape[1])
            grown[: self.count] = self.rows
            self._memory = grown
        self._memory[self.count : needed] = rows
        self.count = needed

    def lengthen(self, length: int, factor: float = 1.0) -> None:
        """Give rows this length: what they have times a factor, and zeros."""
        self._memory = torch.nn.functional.pad(factor * self._memory, (0, length - self._memory.shape[1]))


class KnownProducts:
    """Directions, orthonormal, that a matrix or its transpose was multiplied with, and the product for each."""

    def __init__(self, source: int, target: int, like: Program) -> None:
        self.directions, self.products = Rows(source, like), Rows(target, like)


class ImplicitMatrix(Matrix):
    """A matrix of which only products are known.

    projected: include the middle term, as at finite width. dots: include the last one, the dot-kets.
    """

    def __init__(
        self, program: Program, copies: int, out: range, in_: range, *, projected: bool, dots: bool = True
    ) -> None:
        super().__init__(program, copies, out, in_)
        self.projected, self.dots = projected, dots
        source, target = (len(units) * self.distinct for units in (in_, out))
        self.sides = KnownProducts(source, target, program), KnownProducts(target, source, program)
        self._roots = [program.shares[units.start : units.stop].sqrt() for units in (in_, out)]

    def _times(self, x: Tensor, transposed: bool) -> Tensor:
        side, other = self.sides[transposed], self.sides[not transposed]
        flat = (x * self._roots[transposed]).reshape(len(x), -1)
        directions = side.directions.rows
        parts = flat @ directions.T
        y = parts @ side.products.rows
        lengths = torch.linalg.vector_norm(flat, dim=1)
        if not lengths.isfinite().all():
            raise Diverged("the program has diverged: a vector is not finite; take a smaller learning rate")
        new = _orthonormal(flat - parts @ directions, _NEW[self.program.dtype] * lengths)  # block Gram-Schmidt, twice
        if len(new):
            new = _orthonormal(new - (new @ directions.T) @ directions, 0 * lengths[: len(new)])
            p, count, target = other.directions.rows, len(new), self.in_ if transposed else self.out
            drawn = self.program._normals(count * self.distinct, target)
            fresh = drawn.reshape(count, self.distinct, len(target)).transpose(1, 2) * self._roots[not transposed]
            products = fresh.reshape(count, -1)  # W q for each new q
            if self.projected:
                products = products - (products @ p.T) @ p
            if self.dots:
                products = products + (new @ other.products.rows.T) @ p
            y += (flat @ new.T) @ products
            side.directions.add(new)
            side.products.add(products)
        return y.reshape(len(x), -1, self.distinct) / self._roots[not transposed]


def _orthonormal(vectors: Tensor, shortest: Tensor) -> Tensor:
    """Gram-Schmidt once; a vector of which no more than `shortest` is left is left out."""
    basis = vectors[:0]
    if not (torch.linalg.vector_norm(vectors, dim=1) > shortest).any():
        return basis
    if len(vectors) <= vectors.shape[1]:
        factors: tuple[Tensor, Tensor] = torch.linalg.qr(vectors.T)
        q, sizes = factors[0], factors[1].diagonal()
        if (sizes.abs() > shortest).all():  # mostly: nothing is left out
            return (q * sizes.sign()).T.contiguous()
    for vector, least in zip(vectors, shortest.tolist(), strict=True):
        left = vector - (basis @ vector) @ basis
        length = float(left.norm())
        if length > least:
            basis = torch.cat([basis, (left / length)[None]])
    return basis


class Finite(Program):
    """A program at width n·k. dense=False never forms a matrix: the same distribution at a cost linear in n."""

    def __init__(
        self,
        n: int,
        k: int = 1,
        seed: int = 0,
        *,
        device: str | torch.device | None = None,
        dtype: torch.dtype = torch.float64,
        dense: bool = True,
    ) -> None:
        super().__init__(n, k, seed, device, dtype)
        self.dense = dense

    def _matrix(self, copies: int, out: range, in_: range) -> Matrix:
        """With entries in memory, unless dense=False."""
        if self.dense:
            return DenseMatrix(self, copies, out, in_)
        return ImplicitMatrix(self, copies, out, in_, projected=True)

    def _count_new(self, times: float) -> int:
        wide = round(times * self.units)
        if abs(wide - times * self.units) > 1e-6 * wide or wide == self.units:
            raise MupscaleError(
                f"{self.units} units cannot become {times:g} times as many: take a whole number of new ones"
            )
        return wide - self.units

    def _normals(self, count: int, of: range) -> Tensor:
        return torch.randn(count, len(of), generator=self.generator, device=self.device, dtype=self.dtype)


class DenseMatrix(Matrix):
    """All n·distinct × n·distinct different entries."""

    def __init__(self, program: Finite, copies: int, out: range, in_: range) -> None:
        super().__init__(program, copies, out, in_)
        size = len(out) * self.distinct, len(in_) * self.distinct
        drawn = torch.randn(size, generator=program.generator, device=program.device, dtype=program.dtype)
        self.weight = drawn / math.sqrt(program.units)

    def _times(self, x: Tensor, transposed: bool) -> Tensor:
        return x.reshape(len(x), -1) @ (self.weight if transposed else self.weight.T)


class Limit(Program):
    """A program at infinite width, by Monte Carlo over `samples` of its kets.

    All fresh normals of a population are made orthonormal in sample space, with mean zero (moment matching): linear
    programs are then exact, and others much less noisy. Every population has as many samples. dots=False leaves the
    dot-kets out, to show what they are for.
    """

    def __init__(
        self,
        samples: int,
        k: int = 1,
        seed: int = 0,
        *,
        device: str | torch.device | None = None,
        dtype: torch.dtype = torch.float64,
        dots: bool = True,
    ) -> None:
        super().__init__(samples, k, seed, device, dtype)
        self.samples, self.dots = samples, dots
        self._fresh: dict[range, Rows] = {}

    @property
    def latents(self) -> int:
        """Independent normals drawn so far, for one population; they must stay far fewer than the samples."""
        return max((fresh.count - 1 for fresh in self._fresh.values()), default=0)

    def _matrix(self, copies: int, out: range, in_: range) -> Matrix:
        """A matrix of which no product is known yet."""
        return ImplicitMatrix(self, copies, out, in_, projected=False, dots=self.dots)

    def _count_new(self, times: float) -> int:
        return self.samples  # whatever a population's fraction: its share is divided by them

    def _normals(self, count: int, of: range) -> Tensor:
        inside = [units for units in self.populations if units.start >= of.start and units.stop <= of.stop]
        return torch.cat([self._normals_of(units, count) for units in inside], 1)

    def _normals_of(self, units: range, count: int) -> Tensor:
        """Fresh normals for one population, orthonormal in its own samples."""
        if units not in self._fresh:
            self._fresh[units] = Rows(len(units), self)
            self._fresh[units].add(torch.ones(1, len(units), device=self.device, dtype=self.dtype))  # for mean zero
        fresh, samples = self._fresh[units], len(units)
        needed = fresh.count + count
        if needed > samples:
            raise MupscaleError(
                f"the program needs {needed - 1} independent normals and more, and {samples} samples cannot hold "
                f"them; take {20 * needed} samples or more"
            )
        drawn = torch.randn(count, samples, generator=self.generator, device=self.device, dtype=self.dtype)
        earlier = fresh.rows
        for _ in range(2):
            drawn = drawn - (drawn @ earlier.T / samples) @ earlier
            drawn = torch.linalg.solve_triangular(torch.linalg.cholesky(drawn @ drawn.T / samples), drawn, upper=False)
        fresh.add(drawn)
        return drawn
