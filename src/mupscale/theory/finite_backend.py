"""Programs at finite width, with real matrices or with ones that are never formed."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mupscale.theory.implicit_matrices import ImplicitMatrix
from mupscale.theory.program import Matrix, Program


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

    def matrix(self, copies: int = 1) -> Matrix:
        """With entries in memory, unless dense=False."""
        return DenseMatrix(self, copies) if self.dense else ImplicitMatrix(self, copies, projected=True)

    def _normals(self, count: int) -> Tensor:
        return torch.randn(count, self.units, generator=self.generator, device=self.device, dtype=self.dtype)


class DenseMatrix(Matrix):
    """All n·distinct × n·distinct different entries."""

    def __init__(self, program: Finite, copies: int) -> None:
        super().__init__(program, copies)
        size = program.units * self.distinct
        drawn = torch.randn(size, size, generator=program.generator, device=program.device, dtype=program.dtype)
        self.weight = drawn / math.sqrt(program.units)

    def full(self) -> Tensor:
        """The nk × nk matrix, equal entries repeated."""
        return self.weight.repeat_interleave(self.copies, 0).repeat_interleave(self.copies, 1)

    def _times(self, x: Tensor, transposed: bool) -> Tensor:
        flat = x.reshape(len(x), -1)
        return (flat @ (self.weight if transposed else self.weight.T)).reshape(x.shape)
