"""A program's numbers with error bars: over seeds of the limit's samples, or over draws of a finite network."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mupscale.system import Diverged, MupscaleError, warn
from mupscale.theory.backends import Finite, Limit
from mupscale.theory.program import Program

_SAMPLES_PER_LATENT = 20  # samples for each latent below which orthonormal normals are no longer nearly independent


class FewSamples(UserWarning):
    """The limit was computed with few samples for its latents, and may be biased."""


def warn_of_few_samples(note: str) -> None:
    """Warn with an estimate's note, if it has one."""
    if note:
        warn(note, FewSamples)


@dataclass(frozen=True)
class Estimate:
    """Mean and standard error over seeds, entry by entry.

    values: the program's numbers for each seed. note: a warning, or an empty text.

    >>> estimate = Estimate(torch.tensor([1.0, 3.0]))
    >>> float(estimate.mean), float(estimate.standard_error)
    (2.0, 1.0)
    """

    values: Tensor
    note: str = ""

    @property
    def mean(self) -> Tensor:
        """Over seeds."""
        return self.values.mean(0)

    @property
    def standard_error(self) -> Tensor:
        """Of the mean."""
        return self.spread / math.sqrt(len(self.values))

    @property
    def spread(self) -> Tensor:
        """Standard deviation of one seed."""
        return self.values.std(0)


def limit(
    program: Callable[[Program], Tensor],
    *,
    k: int = 1,
    samples: int = 20_000,
    seeds: int = 4,
    device: str | torch.device | None = None,
    dots: bool = True,
    quiet: bool = False,
) -> Estimate:
    """What a program's numbers tend to as the width grows (Master theorem), with a standard error over seeds.

    Where there are too many latents for the samples the estimate's `note` says so, and it warns (`FewSamples`), unless
    it is quiet.

    Two products with iid matrices of variance 1/n keep a vector's mean square:

    >>> estimate = limit(lambda p: p.avg((p.matrix() @ (p.matrix() @ p.vector())) ** 2), samples=1000, seeds=2)
    >>> float(estimate.mean.round(decimals=6)), bool(estimate.standard_error < 1e-6)
    (1.0, True)
    """
    latents = 0

    def one(seed: int) -> Tensor:
        nonlocal latents
        backend = Limit(samples, k, seed, device=device, dots=dots)
        numbers = program(backend)
        latents = max(latents, backend.latents)
        return numbers

    values, note = _run_seeds(one, seeds), ""
    if samples < _SAMPLES_PER_LATENT * latents:
        note = (
            f"{latents} latents are many for {samples} samples: take at least {_SAMPLES_PER_LATENT * latents}, or the "
            f"limit may be biased by more than its error bar says"
        )
    warn_of_few_samples("" if quiet else note)
    return Estimate(values, note)


def finite(
    program: Callable[[Program], Tensor],
    n: int,
    *,
    k: int = 1,
    seeds: int = 8,
    device: str | torch.device | None = None,
    dtype: torch.dtype = torch.float32,
    dense: bool = True,
) -> Estimate:
    """The same numbers of real networks of width n·k, over several draws; dense=False as in `Finite`.

    >>> estimate = finite(lambda p: p.avg((p.matrix() @ p.vector()) ** 2), n=100, seeds=4)
    >>> estimate.values.shape, bool(abs(estimate.mean - 1) < 0.5)
    (torch.Size([4]), True)
    """
    return Estimate(
        _run_seeds(lambda seed: program(Finite(n, k, seed, device=device, dtype=dtype, dense=dense)), seeds)
    )


def _run_seeds(one: Callable[[int], Tensor], seeds: int) -> Tensor:
    if seeds < 2:
        raise MupscaleError(f"a standard error needs at least two seeds, not {seeds}")
    values = []
    for seed in range(seeds):
        values.append(torch.as_tensor(one(seed)).detach().cpu().double())
        if not values[-1].isfinite().all():
            raise Diverged(f"the program has diverged: its numbers are not finite for seed {seed}")
    return torch.stack(values)
