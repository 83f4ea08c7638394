"""Data of a known shape whose files are not there: enough to say what a training would cost, and to time its steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from mupscale.data.stream import Batch, Data

_ROWS_TO_EVALUATE = 1024  # of data whose number of rows is not known


class StandIn(Data):
    """Random examples in the shape of data that is not there, for a dry run.

    Args:
        shape: of an example's input, without the batch
        classes: how many there are; of tokens, those that are drawn
        rows: training examples in an epoch; None: unknown
        held_out: examples to evaluate on
        is_text: whether an example is a window of tokens, of which the targets are the next ones

    Example:
        >>> x, y = StandIn([54], classes=7, rows=1000).batch(seed=0, start=0, count=3)
        >>> x.shape, y.shape
        (torch.Size([3, 54]), torch.Size([3]))
    """

    def __init__(
        self,
        shape: Sequence[int],
        *,
        classes: int = 2,
        rows: int | None = None,
        held_out: int = _ROWS_TO_EVALUATE,
        is_text: bool = False,
    ) -> None:
        self._shape, self._drawn_classes, self._rows, self._held_out = tuple(shape), classes, rows, held_out
        self._is_text = is_text
        self._dtype = torch.float32
        self.classes = None if is_text else classes  # how many tokens there are is not known either
        if is_text:
            self.unit, self.per_example = "tokens", self._shape[0]

    @property
    def size(self) -> int:
        return self._rows or _ROWS_TO_EVALUATE

    def epochs(self, examples: int) -> float | None:
        return super().epochs(examples) if self._rows else None

    def examples(self, rows: Tensor) -> Batch:
        if self._is_text:
            tokens = torch.randint(self._drawn_classes, (len(rows), self._shape[0] + 1), device=self.device)
            return tokens[:, :-1], tokens[:, 1:]
        x = torch.randn(len(rows), *self._shape, dtype=self._dtype, device=self.device)
        return x, torch.randint(self._drawn_classes, (len(rows),), device=self.device)

    def evaluation(self, batch: int) -> Iterator[Batch]:
        for rows in torch.arange(self._held_out).split(batch):
            yield self.examples(rows)

    def to(self, device: torch.device, dtype: torch.dtype = torch.float32) -> Data:
        self._dtype = dtype
        return super().to(device, dtype)
