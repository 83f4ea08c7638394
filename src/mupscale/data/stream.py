"""What a training run asks of its data: any stretch of an endless shuffled stream, and a fixed set to evaluate on.

The stream is a function of a seed and a position alone. So nothing has to be saved for an exact resume, a growth of the
model cannot disturb it, and any number of processes can share it: each asks for its own stretch.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils.data import Dataset

from mupscale.system import derive, generator

Batch = tuple[Tensor, Tensor]
_ROWS_KEPT = 1 << 25  # of permutations, over all seeds: 256 MiB for an epoch


class Data(ABC):
    """Examples to train on and to evaluate on. A source of your own says `size`, `examples` and `evaluation`.

    unit, per_example: what metrics count, and how many of them an example holds (a window of text: its tokens).
    classes: how many outputs a model needs; None where that has no meaning.
    rows_on: where `examples` takes its rows, if not on the device: what the CPU reads must not wait for a GPU.
    sources: other classes that a recipe may name as its data, which `as_data` makes into one.

    >>> class Squares(Data):
    ...     size = 100
    ...
    ...     def examples(self, rows):
    ...         return rows[:, None].float(), rows.float() ** 2
    ...
    ...     def evaluation(self, batch):
    ...         yield self.examples(torch.arange(100, 110))
    >>> x, y = Squares().batch(seed=0, start=0, count=4)
    >>> bool((x[:, 0] ** 2 == y).all())
    True
    """

    unit: str = "samples"
    per_example: int = 1
    classes: int | None = None
    device: torch.device = torch.device("cpu")
    rows_on: torch.device | None = None
    sources: ClassVar[tuple[type, ...]] = (Dataset,)

    @property
    @abstractmethod
    def size(self) -> int:
        """Training examples in an epoch."""

    @abstractmethod
    def examples(self, rows: Tensor) -> Batch:
        """Inputs and targets of these training examples, on the device."""

    @abstractmethod
    def evaluation(self, batch: int) -> Iterator[Batch]:
        """Everything to evaluate on, in batches, in a fixed order, on the device."""

    def describe_epochs(self, examples: int) -> str:
        """How often training on so many examples goes over the data; nothing where it does not get through once."""
        epochs = self.epochs(examples)
        if epochs is None or epochs <= 1:
            return ""
        return f"{epochs:.{2 if epochs < 10 else 0}f} epochs over {self.size:,} examples"

    def epochs(self, examples: int) -> float | None:
        """How often so many examples go over the data; None where nobody knows its size."""
        return examples / self.size

    @classmethod
    def writes_to(cls, arguments: Mapping[str, Any]) -> Path | None:
        """Where making it with these arguments would write; None where it reads alone. A stored recipe is asked."""
        return None

    @classmethod
    def shape_without_files(cls, arguments: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """What `StandIn` takes to stand for this data where its files are not there, so that a dry run can do without.

        None where they are there, or where nothing but the files tells the shape.
        """
        return None

    def augment(self, x: Tensor, bits: Tensor) -> Tensor:
        """The inputs as they are trained on; `bits` has 48 random bits for each."""
        return x

    def to(self, device: torch.device, dtype: torch.dtype = torch.float32) -> Data:
        """Move what is kept in memory to where the model is; dtype is that of continuous inputs."""
        self.device = device
        return self

    def batch(self, seed: int, start: int, count: int) -> Batch:
        """Examples start … start + count - 1 of the stream that this seed orders: epoch after epoch, each shuffled."""
        return self._stretch([seed], start, count)

    def batches(self, seeds: Sequence[int], start: int, count: int) -> Batch:
        """The same stretch of several streams, one after the other: read and moved to the device at once."""
        if type(self).batch is Data.batch:
            return self._stretch(seeds, start, count)
        xs, ys = zip(*(self.batch(seed, start, count) for seed in seeds), strict=True)
        return _joined(xs), _joined(ys)

    def _stretch(self, seeds: Sequence[int], start: int, count: int) -> Batch:
        x, y = self.examples(_joined([self._order(seed).rows(start, count) for seed in seeds]))
        if type(self).augment is not Data.augment:
            x = self.augment(x, _joined([random_bits(seed, start, count, x.device) for seed in seeds]))
        return x, y

    def _order(self, seed: int) -> Order:
        """The order of this seed; those of the last seeds asked for are kept, since a sweep goes round several."""
        orders: dict[object, Order] = self.__dict__.setdefault("_orders", {})
        key = (self.size, seed, self.rows_on or self.device)
        order = orders.pop(key, None) or Order(*key)
        orders[key] = order
        while len(orders) > max(1, _ROWS_KEPT // self.size):
            del orders[next(iter(orders))]
        return order


class Order:
    """The rows of an endless stream: permutation after permutation, each from the seed and the epoch's number.

    ahead: draw the next epoch's in a thread while this one is trained on, so that a GPU does not wait for it.
    """

    def __init__(self, size: int, seed: int, device: torch.device, *, ahead: bool | None = None) -> None:
        self.key = (size, seed, device)
        self._ahead = device.type == "cuda" if ahead is None else ahead
        self._epochs: dict[int, Tensor] = {}
        self._coming: dict[int, tuple[threading.Thread, list[Tensor]]] = {}

    def rows(self, start: int, count: int) -> Tensor:
        size, parts = self.key[0], []
        while count > 0:
            epoch, offset = divmod(start, size)
            taken = min(count, size - offset)
            parts.append(self._epoch(epoch)[offset : offset + taken])
            start, count = start + taken, count - taken
        return _joined(parts)

    def _epoch(self, epoch: int) -> Tensor:
        if epoch not in self._epochs:
            thread, drawn = self._coming.pop(epoch, (None, []))
            if thread is not None:
                thread.join()
            self._epochs = {e: rows for e, rows in self._epochs.items() if e == epoch - 1}
            pinned = drawn[0] if drawn else self._draw(epoch)
            self._epochs[epoch] = pinned.to(self.key[2], non_blocking=True)
            if self._ahead:
                coming: list[Tensor] = []
                thread = threading.Thread(target=lambda: coming.append(self._draw(epoch + 1)), daemon=True)
                self._coming = {epoch + 1: (thread, coming)}
                thread.start()
        return self._epochs[epoch]

    def _draw(self, epoch: int) -> Tensor:
        size, seed, device = self.key
        rows = torch.randperm(size, generator=generator(seed, "order", epoch))
        return rows.pin_memory() if device.type == "cuda" else rows  # so that nobody waits for the copy


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def random_bits(seed: int, start: int, count: int, device: torch.device) -> Tensor:
    """48 random bits for each position, however the stretch is cut: splitmix64 of the seed and the position."""
    value = torch.arange(start, start + count, device=device) * _GOLDEN + derive(seed, "augment")
    for shift, factor in ((30, _MIX_1), (27, _MIX_2)):
        value = (value ^ _shifted(value, shift)) * factor
    return _shifted(value ^ _shifted(value, 31), 16)


def _shifted(value: Tensor, bits: int) -> Tensor:
    """A logical shift to the right; torch's is arithmetic."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


_GOLDEN, _MIX_1, _MIX_2 = (_signed(v) for v in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
