"""Normal numbers: what they follow from, and how they are distributed."""

from __future__ import annotations

import hashlib
import math
from statistics import NormalDist

import numpy as np
import pytest
import torch
from torch import Tensor

from mupscale.growth.draws import _points, draw_normal, draw_uniform, standard_normal


def points() -> Tensor:
    """The table's points of the plane."""
    return _points().view(torch.float32).view(-1, 2).double()


def test_any_part_of_the_noise_can_be_drawn_alone() -> None:
    total = (1 << 20) + (1 << 17) + 1234
    whole = standard_normal((total,), torch.float32, 3, "name")
    for start, stop in (
        (0, total),
        (5, 9),
        (4, 5),
        (65_530, 65_540),
        (1 << 16, 1 << 17),
        (1_048_571, 1_048_590),
        (270_000, 1_100_001),
        (total - 3, total),
    ):
        for offset in (0, 1):  # memory in which two numbers do and do not lie as one of eight bytes
            part = torch.empty(stop - start + offset)[offset:]
            assert torch.equal(draw_normal(part, start, 3, "name"), whole[start:stop])


def test_blocks_of_noise_are_independent() -> None:
    whole = standard_normal((8, 1 << 18), torch.float64, 0, "w")  # two blocks
    correlations = torch.corrcoef(whole) - torch.eye(8)
    assert correlations.abs().max() < 5 / 512
    assert abs(float(whole.mean())) < 0.01
    assert abs(float(whole.std()) - 1) < 0.01


def test_numbers_are_the_same_on_every_machine() -> None:
    drawn = standard_normal((4,), torch.float32, seed=0, name="weight")
    assert drawn.tolist() == [0.8968029022216797, 0.9877691268920898, -0.5311689376831055, 0.24446487426757812]
    table = _points().numpy().astype("<i8").tobytes()
    assert hashlib.sha256(table).hexdigest() == "8ef2778793fe72ec75a258943423a4a7a4a1ac31aa0ab3604f1def25d927cd8c"


def test_no_machine_rounds_the_table_otherwise() -> None:
    """Before rounding no coordinate is within 10,000 errors of float64 of where rounding goes the other way."""
    quarter, grid = 1 << 14, 1 << 20
    number = np.arange(quarter)
    radius = np.sqrt(-2 * np.log((number + 0.5) / quarter))
    radius *= math.sqrt(2 * quarter / math.fsum(radius**2))
    angle = 2 * math.pi * (number * ((math.sqrt(5) - 1) / 2) % 1.0)
    for values in (radius * np.cos(angle) * grid, radius * np.sin(angle) * grid):
        assert np.abs(values % 1 - 0.5).min() > 10_000 * np.spacing(np.abs(values).max())


def test_the_table_has_the_moments_of_the_normal_distribution() -> None:
    x, y = points().T
    assert float(x.sum()) == float(y.sum()) == float((x * y).sum()) == 0
    assert float(x.square().mean()) == float(y.square().mean()) == pytest.approx(1, abs=1e-8)
    assert [float(v.pow(4).mean()) for v in (x, y)] == pytest.approx([3, 3], rel=2e-3)
    assert [float(v.pow(6).mean()) for v in (x, y)] == pytest.approx([15, 15], rel=1e-2)
    assert float((x * y).square().mean()) == pytest.approx(1, rel=5e-3)
    assert float((x * y).pow(4).mean()) == pytest.approx(9, rel=5e-2)


@pytest.mark.parametrize("angle", [0.0, 0.3, 0.7, 1.1])
def test_any_projection_of_the_table_is_normal(angle: float) -> None:
    projected = (points() @ torch.tensor([math.cos(angle), math.sin(angle)], dtype=torch.float64)).sort().values
    below = (torch.arange(len(projected)) + 0.5) / len(projected)
    cdf = torch.tensor([NormalDist().cdf(value) for value in projected.tolist()])
    assert float((cdf - below).abs().max()) < 1e-3
    assert 4.0 < float(projected.abs().max()) < 4.6


def test_rows_and_columns_of_a_matrix_are_independent() -> None:
    """Its singular values are those of a Gaussian matrix: neighbours that are drawn together leave no trace."""
    matrix = standard_normal((512, 2048), torch.float64, 7, "w")
    for one in (matrix, matrix.T):
        n = one.shape[1]
        others = (torch.corrcoef(one) - torch.eye(len(one), dtype=torch.float64)).abs()
        assert float(others.max()) < 6 / math.sqrt(n)
        assert float(others.square().mean()) == pytest.approx(1 / n, rel=0.02)
    values = torch.linalg.svdvals(matrix)
    widest, narrowest = math.sqrt(2048) + math.sqrt(512), math.sqrt(2048) - math.sqrt(512)
    assert float(values.max()) == pytest.approx(widest, rel=0.03)
    assert float(values.min()) == pytest.approx(narrowest, rel=0.06)


def test_every_dtype_gets_the_same_numbers() -> None:
    exact = standard_normal((1001,), torch.float64, 3, "w")
    assert torch.equal(exact, standard_normal((1001,), torch.float32, 3, "w").double())


def test_another_seed_name_or_block_gives_other_numbers() -> None:
    first = standard_normal((64,), torch.float32, 0, "a")
    for seed, name in ((1, "a"), (0, "b")):
        assert not torch.equal(first, standard_normal((64,), torch.float32, seed, name))
    later = draw_normal(torch.empty(64), 1 << 20, 0, "a")
    assert not torch.equal(first, later)


def test_uniform_numbers_have_a_mean_of_0_and_a_variance_of_1_and_are_drawn_in_any_parts() -> None:
    whole = draw_uniform(torch.empty(1 << 21, dtype=torch.float64), 0, 3, "w")
    assert float(whole.abs().max()) < math.sqrt(3)
    assert float(whole.mean()) == pytest.approx(0, abs=5 / math.sqrt(1 << 21))
    assert float(whole.square().mean()) == pytest.approx(1, abs=5 / math.sqrt(1 << 21))
    assert float(whole.pow(4).mean()) == pytest.approx(9 / 5, rel=0.01)
    for start, count in ((0, 5), (3, 9), ((1 << 20) - 3, 10), (1 << 20, 4)):
        part = draw_uniform(torch.empty(count, dtype=torch.float64), start, 3, "w")
        assert torch.equal(part, whole[start : start + count])
