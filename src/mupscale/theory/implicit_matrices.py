"""Gaussian matrices that are never formed: each product is drawn when it is first asked for (the option --revealed).

A random matrix W with iid N(0, 1/n) entries is revealed product by product (the principle of deferred decisions). Its
products with the directions seen so far are kept. For a new direction q, orthogonal to those, the product is a fresh
normal vector, conditioned on the products that its transpose has given for directions p:

    W q = Z − Σ pⱼ ⟨pⱼ|Z⟩ + Σ pⱼ ⟨Wᵀpⱼ|q⟩,    Z iid N(0, 1),    q, p of length √n

This is exact at every width (Gaussian conditioning). As n → ∞ the middle term vanishes, Z is the hat-ket and the last
term the dot-ket, by Stein's lemma: ⟨Wᵀp|q⟩ is E of ∂|q⟩/∂Z′, so nothing is differentiated (Definition 'Ket
Construction').

Every entry is multiplied by the root of its unit's share of the width (1/√n at finite width) on the way in, and divided
by it on the way out. Lengths and angles are then those of averages, also where units are of several populations or the
matrix is a block between two of them; shares are those at which it was drawn, which is what its variance 1/n means.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mupscale.system import Diverged
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
        new = self._new_directions(flat, flat - parts @ directions, directions)
        if new is not None:
            products = self._draw_products(new, other, transposed)
            y += (flat @ new.T) @ products
            side.directions.add(new)
            side.products.add(products)
        return y.reshape(len(x), -1, self.distinct) / self._roots[not transposed]

    def _new_directions(self, vectors: Tensor, rest: Tensor, directions: Tensor) -> Tensor | None:
        """New directions among the rest of these vectors: block Gram-Schmidt, twice."""
        lengths = torch.linalg.vector_norm(vectors, dim=1)
        if not lengths.isfinite().all():
            raise Diverged("the program has diverged: a vector is not finite; take a smaller learning rate")
        new = _orthonormal(rest, _NEW[self.program.dtype] * lengths)
        if not len(new):
            return None
        return _orthonormal(new - (new @ directions.T) @ directions, 0 * lengths[: len(new)])

    def _draw_products(self, new: Tensor, other: KnownProducts, transposed: bool) -> Tensor:
        """W q for each new q."""
        p, count, target = other.directions.rows, len(new), self.in_ if transposed else self.out
        drawn = self.program._normals(count * self.distinct, target)
        fresh = drawn.reshape(count, self.distinct, len(target)).transpose(1, 2) * self._roots[not transposed]
        fresh = fresh.reshape(count, -1)
        if self.projected:
            fresh = fresh - (fresh @ p.T) @ p
        return fresh + (new @ other.products.rows.T) @ p if self.dots else fresh


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
