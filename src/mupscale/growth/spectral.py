"""The largest singular value of a matrix: the size of a weight's signal, which noise may be measured by."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_EXACT = 512  # up to this size the svd is as fast as anything


def spectral_norm(matrix: Tensor) -> float:
    """The largest singular value: by svd for small matrices, by Lanczos iteration (to about 1e-5) for large ones.

    >>> spectral_norm(torch.diag(torch.tensor([3.0, 1.0, 2.0], dtype=torch.float64)))
    3.0
    """
    matrix = matrix if matrix.dtype == torch.float64 else matrix.float()
    if min(matrix.shape) <= _EXACT:
        gram = matrix @ matrix.T if matrix.shape[0] <= matrix.shape[1] else matrix.T @ matrix
        return _root_of_largest(gram)
    return _lanczos_norm(matrix)


def _lanczos_norm(matrix: Tensor, tolerance: float = 1e-6, steps: int = 400) -> float:
    """Golub–Kahan bidiagonalisation with full reorthogonalisation; its largest Ritz value grows to ‖A‖.

    A matrix of low rank, such as a widened one, exhausts its range early: the value is exact then.
    """
    start = torch.randn(matrix.shape[1], generator=torch.Generator().manual_seed(0), dtype=matrix.dtype).to(
        matrix.device
    )
    right, left = [start / start.norm()], list[Tensor]()
    bidiagonal = torch.zeros(steps, steps, dtype=torch.float64)
    previous = 0.0
    for i in range(min(steps, *matrix.shape)):
        u = _orthogonal(matrix @ right[-1], left)
        bidiagonal[i, i] = u.norm()
        if _exhausted(bidiagonal[i, i], bidiagonal, matrix.dtype):
            break
        left.append(u / u.norm())
        v = _orthogonal(matrix.T @ left[-1], right)
        if i + 1 == steps or _exhausted(v.norm(), bidiagonal, matrix.dtype):
            break
        bidiagonal[i, i + 1] = v.norm()
        right.append(v / v.norm())
        if i % 10 == 9:
            value = _root_of_largest(bidiagonal[: i + 1, : i + 1] @ bidiagonal[: i + 1, : i + 1].T)
            if value - previous <= tolerance * value:
                return value
            previous = value
    return _root_of_largest(bidiagonal @ bidiagonal.T)


def _root_of_largest(gram: Tensor) -> float:
    """The root of the largest eigenvalue; the svd of the same matrix is NaN in some builds of torch."""
    return math.sqrt(max(float(torch.linalg.eigvalsh(gram.double())[-1]), 0.0))


def _exhausted(norm: Tensor, bidiagonal: Tensor, dtype: torch.dtype) -> bool:
    """Whether a new direction is nothing but rounding."""
    return float(norm) <= 100 * torch.finfo(dtype).eps * float(bidiagonal.max())


def _orthogonal(vector: Tensor, basis: list[Tensor]) -> Tensor:
    for _ in range(2 if basis else 0):
        stacked = torch.stack(basis)
        vector = vector - stacked.T @ (stacked @ vector)
    return vector
