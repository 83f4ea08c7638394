"""Programs at finite width, with real matrices or with ones that are never formed."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from mupscale.system import MupscaleError
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

    def full(self) -> Tensor:
        """The nk × nk matrix, equal entries repeated; zero outside of the block that it is."""
        repeated = self.weight.repeat_interleave(self.copies, 0).repeat_interleave(self.copies, 1)
        around = ((units.start, self.program.units - units.stop) for units in (self.in_, self.out))
        return pad(repeated, [self.program.k * count for pair in around for count in pair])

    def _times(self, x: Tensor, transposed: bool) -> Tensor:
        return x.reshape(len(x), -1) @ (self.weight if transposed else self.weight.T)
