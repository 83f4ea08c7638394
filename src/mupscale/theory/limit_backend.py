"""The limit n → ∞ of a program: a ket is an array of samples × k copies (Definition 'Ket Construction')."""

from __future__ import annotations

import torch
from torch import Tensor

from mupscale.system import MupscaleError
from mupscale.theory.implicit_matrices import ImplicitMatrix, Rows
from mupscale.theory.program import Matrix, Program


class Limit(Program):
    """A program at infinite width, by Monte Carlo over `samples` of its kets.

    All fresh normals are made orthonormal in sample space, with mean zero (moment matching): linear programs are then
    exact, and others much less noisy. dots=False leaves the dot-kets out, to show what they are for.
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
        self.dots = dots
        self._fresh = Rows(samples, self)
        self._fresh.add(torch.ones(1, samples, device=self.device, dtype=dtype))  # so that normals have mean zero

    @property
    def latents(self) -> int:
        """Independent normals drawn so far; they must stay far fewer than the samples."""
        return self._fresh.count - 1

    def matrix(self, copies: int = 1) -> Matrix:
        """A matrix of which no product is known yet."""
        return ImplicitMatrix(self, copies, projected=False, dots=self.dots)

    def _normals(self, count: int) -> Tensor:
        needed = self._fresh.count + count
        if needed > self.units:
            raise MupscaleError(
                f"the program needs {needed - 1} independent normals and more, and {self.units} samples cannot hold "
                f"them; take {20 * needed} samples or more"
            )
        drawn = torch.randn(count, self.units, generator=self.generator, device=self.device, dtype=self.dtype)
        earlier = self._fresh.rows
        for _ in range(2):
            drawn = drawn - (drawn @ earlier.T / self.units) @ earlier
            drawn = torch.linalg.solve_triangular(
                torch.linalg.cholesky(drawn @ drawn.T / self.units), drawn, upper=False
            )
        self._fresh.add(drawn)
        return drawn
