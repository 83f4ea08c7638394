"""The stream is a function of the seed and the position: however it is cut, it is the same."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mupscale.data import Data, Split, Table
from mupscale.data.stream import Batch, Order, random_bits

CPU = torch.device("cpu")


class Squares(Data):
    """The least a source of one's own has to say."""

    @property
    def size(self) -> int:
        return 10

    def examples(self, rows: Tensor) -> Batch:
        return rows.float(), rows**2

    def evaluation(self, batch: int) -> Iterator[Batch]:
        yield torch.zeros(1), torch.zeros(1)


class Jittered(Squares):
    def augment(self, x: Tensor, bits: Tensor) -> Tensor:
        return x + bits / 2**48


@given(size=st.integers(1, 50), seed=st.integers(0, 2**63), epoch=st.integers(0, 10**9))
def test_each_epoch_is_a_permutation(size: int, seed: int, epoch: int) -> None:
    rows = Order(size, seed, CPU).rows(epoch * size, size)
    assert rows.sort().values.tolist() == list(range(size))


@settings(max_examples=30)
@given(size=st.integers(1, 7), start=st.integers(0, 1000), cuts=st.lists(st.integers(1, 9), min_size=1, max_size=12))
def test_the_order_does_not_depend_on_how_it_is_cut(size: int, start: int, cuts: list[int]) -> None:
    """Wrap-around included: stretches longer than an epoch, and starts in the middle of one."""
    whole = Order(size, 0, CPU).rows(start, sum(cuts))
    order, parts, position = Order(size, 0, CPU, ahead=True), [], start
    for count in cuts:
        parts.append(order.rows(position, count))
        position += count
    assert torch.equal(torch.cat(parts), whole)
    backwards = Order(size, 0, CPU)
    assert [int(backwards.rows(start + i, 1)) for i in reversed(range(len(whole)))] == whole.flip(0).tolist()


def test_every_epoch_and_every_seed_has_an_order_of_its_own_and_few_are_kept() -> None:
    order = Order(1000, 0, CPU)
    epochs = [order.rows(start, 1000) for start in range(0, 5000, 1000)]
    assert len({tuple(epoch.tolist()) for epoch in (*epochs, Order(1000, 1, CPU).rows(0, 1000))}) == 6
    assert len(order._epochs) <= 2


def test_orders_are_uniform() -> None:
    """Each row is as often at each place as any other: 5 rows, 2,000 epochs, a χ² with 16 degrees of freedom."""
    rows = Order(5, 0, CPU).rows(0, 10_000).view(2000, 5)
    counts = torch.stack([column.bincount(minlength=5) for column in rows.T]).double()
    assert ((counts - 400) ** 2 / 400).sum() < 45


@given(start=st.integers(0, 2**50), cuts=st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_random_bits_do_not_depend_on_how_they_are_cut(start: int, cuts: list[int]) -> None:
    parts, position = [], start
    for count in cuts:
        parts.append(random_bits(3, position, count, CPU))
        position += count
    assert torch.equal(torch.cat(parts), random_bits(3, start, sum(cuts), CPU))


def test_random_bits_are_uniform_and_independent() -> None:
    count = 100_000
    values = random_bits(0, 0, count, CPU)
    assert values.min() >= 0
    assert values.max() < 2**48
    assert len(values.unique()) == count
    bits = torch.stack([values >> i & 1 for i in range(48)]).double() * 2 - 1
    bits = torch.cat([bits[:, :-1], bits[:, 1:]])  # with those of the next position
    products = (bits @ bits.T / (count - 1)).fill_diagonal_(0)
    assert bits.mean(1).abs().max() * count**0.5 < 5
    assert products.abs().max() * count**0.5 < 5.5


def test_random_bits_are_those_of_splitmix64() -> None:
    """Against whole numbers of any size; a change here would change every run that is resumed."""
    from mupscale.system.seeds import derive

    def splitmix(value: int) -> int:
        value &= 2**64 - 1
        value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & 2**64 - 1
        value = (value ^ value >> 27) * 0x94D049BB133111EB & 2**64 - 1
        return value ^ value >> 31

    start = 10**12
    expected = [splitmix((start + i) * 0x9E3779B97F4A7C15 + derive(5, "augment")) >> 16 for i in range(50)]
    assert random_bits(5, start, 50, CPU).tolist() == expected


def test_seeds_have_bits_of_their_own() -> None:
    assert not set(random_bits(0, 0, 1000, CPU).tolist()) & set(random_bits(1, 0, 1000, CPU).tolist())


@pytest.mark.parametrize("data", [Squares(), Jittered()], ids=["plain", "augmented"])
def test_a_source_of_ones_own(data: Data) -> None:
    x, y = data.batch(0, 25, 20)
    again = [data.batch(0, 25 + i, 1) for i in range(20)]
    assert torch.equal(x, torch.cat([x for x, _ in again]))
    assert torch.equal(y, torch.cat([y for _, y in again]))
    assert y[5:15].sort().values.tolist() == [i**2 for i in range(10)]
    assert torch.equal(x.floor().long() ** 2, y)
    assert isinstance(data, Jittered) == bool((x % 1).any())
    assert not torch.equal(data.batch(1, 25, 20)[1], y)
    assert torch.equal(data.batch(0, 25, 20)[1], y)  # seeds may take turns
    assert (data.unit, data.per_example, data.classes) == ("samples", 1, None)


def test_float64_by_to() -> None:
    x, y = torch.randn(8, 3), torch.arange(8)
    data = Table(Split(x, y, x, y))
    assert data.batch(0, 0, 4)[0].dtype == torch.float32
    before = data.batch(0, 0, 4)
    assert data.to(CPU, torch.float64) is data
    after = data.batch(0, 0, 4)
    assert after[0].dtype == torch.float64
    assert after[1].dtype == torch.int64
    assert torch.equal(after[0].float(), before[0])
    assert next(data.evaluation(8))[0].dtype == torch.float64
    assert Squares().to(CPU, torch.float64).device == CPU
