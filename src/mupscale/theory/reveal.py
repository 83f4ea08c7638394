"""Gaussian matrices that are revealed only where they act, and never formed.

What a matrix W with iid N(0, 1/n) entries does to vectors that it has met is known; to a new direction q, orthogonal to
those, it does something fresh, apart from what is known through the vectors p that its transpose has met:

    W q = Z − Σ pⱼ ⟨pⱼ|Z⟩ + Σ pⱼ ⟨Wᵀpⱼ|q⟩,    Z iid N(0, 1),    q, p of length √n

This is exact at every width (Gaussian conditioning). As n → ∞ the middle term vanishes, Z is the hat-ket and the last
term the dot-ket, by Stein's lemma: ⟨Wᵀp|q⟩ is E of ∂|q⟩/∂Z′, so nothing is differentiated (Definition 'Ket
Construction').
"""

from __future__ import annotations

import torch
from torch import Tensor

from mupscale.theory.program import Diverged, Matrix, Program

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


class Side:
    """An orthonormal basis of what a matrix, or its transpose, has met, and what it gave for each."""

    def __init__(self, length: int, like: Program) -> None:
        self.met, self.gave = Rows(length, like), Rows(length, like)


class Revealed(Matrix):
    """projected: take the middle term along, as at finite width. dots: take the last one along."""

    def __init__(self, program: Program, copies: int, *, projected: bool, dots: bool = True) -> None:
        super().__init__(program, copies)
        self.projected, self.dots = projected, dots
        self.sides = tuple(Side(program.units * self.distinct, program) for _ in range(2))

    def _times(self, x: Tensor, transposed: bool) -> Tensor:
        side, other = self.sides[transposed], self.sides[not transposed]
        flat, n = x.reshape(len(x), -1), self.program.units
        known = side.met.rows
        parts = flat @ known.T / n
        y = parts @ side.gave.rows
        new = self._new(flat, flat - parts @ known, known)
        if new is not None:
            gave = self._given(new, other)
            y += (flat @ new.T / n) @ gave
            side.met.add(new)
            side.gave.add(gave)
        return y.reshape(x.shape)

    def _new(self, vectors: Tensor, rest: Tensor, known: Tensor) -> Tensor | None:
        """New directions among the rest of these vectors: block Gram-Schmidt, twice."""
        n = self.program.units
        lengths = vectors.norm(dim=1).tolist()
        if not all(length < float("inf") for length in lengths):
            raise Diverged("the program has diverged: a vector is not finite; take a smaller learning rate")
        found = _orthonormal(rest, [_NEW[self.program.dtype] * length for length in lengths], n)
        if not len(found):
            return None
        return _orthonormal(found - (found @ known.T / n) @ known, [0.0] * len(found), n)

    def _given(self, new: Tensor, other: Side) -> Tensor:
        """W q for each new q."""
        n, p, count = self.program.units, other.met.rows, len(new)
        drawn = self.program._normals(count * self.distinct)
        fresh = drawn.reshape(count, self.distinct, n).transpose(1, 2).reshape(count, -1)
        if self.projected:
            fresh = fresh - (fresh @ p.T / n) @ p
        return fresh + (new @ other.gave.rows.T / n) @ p if self.dots else fresh


def _orthonormal(vectors: Tensor, shortest: list[float], n: int) -> Tensor:
    """Gram-Schmidt once, to length √n; a vector of which no more than `shortest` is left is left out."""
    found = vectors[:0]
    for vector, least in zip(vectors, shortest, strict=True):
        left = vector - (found @ vector / n) @ found
        length = float(left.norm())
        if length > least:
            found = torch.cat([found, (left * (n**0.5 / length))[None]])
    return found
