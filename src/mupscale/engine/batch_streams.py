"""The batches of a stack: runs with the same data seed read the same stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from mupscale.data import Data


class Streams:
    """The streams that the rows of a stack read, one for each data seed.

    shared: whether all rows read the same one; batches then have no dimension of rows.
    """

    def __init__(self, data: Data, seeds: Sequence[int], batch: int, device: torch.device) -> None:
        self.data, self.batch = data, batch
        self.seeds = list(dict.fromkeys(seeds))
        self.shared = len(self.seeds) == 1
        self._one_for_each = len(self.seeds) == len(seeds)
        self._stream_of_row = torch.tensor([self.seeds.index(seed) for seed in seeds], device=device)

    def first_row(self, step: int, most: int | None = None) -> tuple[Tensor, Tensor]:
        """The batch of the first row at a step, or the first few examples of it."""
        return self.data.batch(self.seeds[0], step * self.batch, self.batch if most is None else min(self.batch, most))

    def batches(self, step: int, count: int, prefetch_bytes: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of the next steps: one for all rows, or one for each.

        prefetch_bytes: how much is made at once.
        """
        last, ahead = step + count, 1
        while step < last:
            ahead = min(ahead, last - step)
            stretches = self.data.batches(self.seeds, step * self.batch, ahead * self.batch)
            xs, ys = (self._cut_into_steps(joined, ahead) for joined in stretches)
            for x, y in zip(xs, ys, strict=True):
                repeated = not self.shared and not self._one_for_each
                yield (x[self._stream_of_row], y[self._stream_of_row]) if repeated else (x, y)
            step += ahead
            ahead = max(1, prefetch_bytes // (xs[0].nbytes + ys[0].nbytes))

    def _cut_into_steps(self, joined: Tensor, steps: int) -> Tensor:
        """Stretches of the streams, cut into steps; a dimension of streams follows where there are several."""
        views: Tensor = joined.unflatten(0, (len(self.seeds), steps, -1))
        return views[0] if self.shared else views.transpose(0, 1)
