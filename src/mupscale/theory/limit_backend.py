"""The limit n → ∞ of a program: a ket is an array of samples × k copies (Definition 'Ket Construction')."""

from __future__ import annotations

import torch
from torch import Tensor

from mupscale.system import MupscaleError
from mupscale.theory.implicit_matrices import ImplicitMatrix, Rows
from mupscale.theory.program import Matrix, Program


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
