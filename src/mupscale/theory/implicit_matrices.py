"""Gaussian matrices that are never formed: each product is drawn when it is first asked for (the option --revealed).

A random matrix W with iid N(0, 1/n) entries is revealed product by product (the principle of deferred decisions). Its
products with the directions seen so far are kept. For a new direction q, orthogonal to those, the product is a fresh
normal vector, conditioned on the products that its transpose has given for directions p:

    W q = Z − Σ pⱼ ⟨pⱼ|Z⟩ + Σ pⱼ ⟨Wᵀpⱼ|q⟩,    Z iid N(0, 1),    q, p of length √n

This is exact at every width (Gaussian conditioning). As n → ∞ the middle term vanishes, Z is the hat-ket and the last
term the dot-ket, by Stein's lemma: ⟨Wᵀp|q⟩ is E of ∂|q⟩/∂Z′, so nothing is differentiated (Definition 'Ket
Construction').
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


class KnownProducts:
    """Directions, orthonormal, that a matrix or its transpose was multiplied with, and the product for each."""

    def __init__(self, length: int, like: Program) -> None:
        self.directions, self.products = Rows(length, like), Rows(length, like)


class ImplicitMatrix(Matrix):
    """A matrix of which only products are known.

    projected: include the middle term, as at finite width. dots: include the last one, the dot-kets.
    """

    def __init__(self, program: Program, copies: int, *, projected: bool, dots: bool = True) -> None:
        super().__init__(program, copies)
        self.projected, self.dots = projected, dots
        self.sides = tuple(KnownProducts(program.units * self.distinct, program) for _ in range(2))

    def _times(self, x: Tensor, transposed: bool) -> Tensor:
        side, other = self.sides[transposed], self.sides[not transposed]
        flat, n = x.reshape(len(x), -1), self.program.units
        directions = side.directions.rows
        parts = flat @ directions.T / n
        y = parts @ side.products.rows
        new = self._new_directions(flat, flat - parts @ directions, directions)
        if new is not None:
            products = self._draw_products(new, other)
            y += (flat @ new.T / n) @ products
            side.directions.add(new)
            side.products.add(products)
        return y.reshape(x.shape)

    def _new_directions(self, vectors: Tensor, rest: Tensor, directions: Tensor) -> Tensor | None:
        """New directions among the rest of these vectors: block Gram-Schmidt, twice."""
        n = self.program.units
        lengths = vectors.norm(dim=1).tolist()
        if not all(length < float("inf") for length in lengths):
            raise Diverged("the program has diverged: a vector is not finite; take a smaller learning rate")
        new = _orthonormal(rest, [_NEW[self.program.dtype] * length for length in lengths], n)
        if not len(new):
            return None
        return _orthonormal(new - (new @ directions.T / n) @ directions, [0.0] * len(new), n)

    def _draw_products(self, new: Tensor, other: KnownProducts) -> Tensor:
        """W q for each new q."""
        n, p, count = self.program.units, other.directions.rows, len(new)
        drawn = self.program._normals(count * self.distinct)
        fresh = drawn.reshape(count, self.distinct, n).transpose(1, 2).reshape(count, -1)
        if self.projected:
            fresh = fresh - (fresh @ p.T / n) @ p
        return fresh + (new @ other.products.rows.T / n) @ p if self.dots else fresh


def _orthonormal(vectors: Tensor, shortest: list[float], n: int) -> Tensor:
    """Gram-Schmidt once, to length √n; a vector of which no more than `shortest` is left is left out."""
    basis = vectors[:0]
    for vector, least in zip(vectors, shortest, strict=True):
        left = vector - (basis @ vector / n) @ basis
        length = float(left.norm())
        if length > least:
            basis = torch.cat([basis, (left * (n**0.5 / length))[None]])
    return basis
