"""CoverType from files in UCI's format, written here; and what ships with the package."""

from __future__ import annotations

import gzip
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from mupscale import MupscaleError
from mupscale.data import CoverType, CoverTypeSample, Split, Table, covtype_sample
from mupscale.data.in_memory import choose_test_rows

PER_CLASS = [40, 55, 20, 10, 13, 2, 37]


def rows(per_class: list[int] = PER_CLASS) -> np.ndarray:
    """Rows like CoverType's: ten whole numbers, some negative, two one-hot groups, and a class from 1."""
    random = np.random.default_rng(0)
    labels = random.permutation(np.repeat(np.arange(1, len(per_class) + 1), per_class))
    count = len(labels)
    continuous = random.integers(-200, 7000, (count, 10))
    wilderness, soil = np.eye(4, dtype=int)[random.integers(0, 4, count)], np.eye(40, dtype=int)[labels * 5 % 40]
    return np.column_stack([continuous, wilderness, soil, labels])


def write(path: Path, table: np.ndarray, newline: str = "\n") -> Path:
    text = "".join(",".join(map(str, row)) + newline for row in table.tolist())
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


@pytest.mark.parametrize("name", ["covtype.data.gz", "covtype.data", "covtype.csv"])
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_covtype(tmp_path: Path, name: str, newline: str) -> None:
    table = rows()
    data = CoverType(str(write(tmp_path / name, table, newline)), split_seed=4)
    split = data.split
    assert data.classes == 7
    assert data.size == len(split.train_x)
    assert split.test_y.bincount().tolist() == [8, 11, 4, 2, 3, 1, 7]  # 20 % of each, rounded, but at least one
    assert (split.train_y.bincount() + split.test_y.bincount()).tolist() == PER_CLASS

    test = choose_test_rows(torch.from_numpy(table[:, -1] - 1), 0.2, 4).numpy()
    mean, std = table[~test, :10].mean(0), table[~test, :10].std(0, ddof=1)
    for part, x, y in ((~test, split.train_x, split.train_y), (test, split.test_x, split.test_y)):
        np.testing.assert_allclose(x[:, :10], (table[part, :10] - mean) / std, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(x[:, 10:], table[part, 10:54])
        np.testing.assert_array_equal(y, table[part, 54] - 1)


def test_the_split_depends_on_its_seed_alone_and_a_constant_column_becomes_zero(tmp_path: Path) -> None:
    table = rows()
    table[:, 3] = 77
    path = write(tmp_path / "covtype.data", table)
    first, again, other = CoverType(path), CoverType(path), CoverType(path, split_seed=1)
    assert all(torch.equal(a, b) for a, b in zip(first.split, again.split, strict=True))
    assert not torch.equal(first.split.test_x, other.split.test_x)
    assert first.split.test_y.bincount().tolist() == other.split.test_y.bincount().tolist()
    assert (first.split.train_x[:, 3] == 0).all()
    batches = list(first.evaluation(10))
    assert [len(y) for _, y in batches] == [10, 10, 10, 6]
    assert torch.equal(torch.cat([x for x, _ in batches]), first.split.test_x)
    assert torch.equal(torch.cat([y for _, y in batches]), first.split.test_y)


def test_a_fraction_of_each_class() -> None:
    labels = torch.arange(7).repeat_interleave(torch.tensor([1000, 200, 30, 4, 3, 2, 2]))[torch.randperm(1241)]
    assert labels[choose_test_rows(labels, 0.5, 0)].bincount().tolist() == [500, 100, 15, 2, 2, 1, 1]
    assert labels[choose_test_rows(labels, 0.999, 0)].bincount().tolist() == [999, 199, 29, 3, 2, 1, 1]
    assert labels[choose_test_rows(labels, 0.001, 0)].bincount().tolist() == [1] * 7


def test_sample() -> None:
    data = CoverTypeSample()
    assert (data.size, data.classes) == (12_000, 7)
    x, y = data.batch(0, 0, 12_000)
    assert x.shape == (12_000, 54)
    assert torch.equal(y.bincount(), covtype_sample().train_y.bincount())
    torch.testing.assert_close(x[:, :10].mean(0), torch.zeros(10), rtol=0, atol=1e-5)
    torch.testing.assert_close(x[:, :10].std(0), torch.ones(10))
    assert ((x[:, 10:] == 0) | (x[:, 10:] == 1)).all()
    assert (x[:, 10:].sum(1) == 2).all()  # one wilderness, one soil
    assert len(next(data.evaluation(3000))[1]) == 3000


def test_table_of_ones_own() -> None:
    x, y = torch.randn(6, 2), torch.tensor([0, 3, 1, 1, 0, 2])
    assert Table(Split(x, y, x[:2], y[:2])).classes == 4
    assert Table(Split(x, y, x[:2], y[:2]), classes=9).classes == 9
    assert Table(Split(x, y.float(), x[:2], y[:2].float())).classes is None
    with pytest.raises(MupscaleError, match=r"training part .* has 6 and 5"):
        Table(Split(x, y[:5], x, y))
    with pytest.raises(MupscaleError, match=r"test part .* has 0 and 0"):
        Table(Split(x, y, x[:0], y[:0]))


def without_first_cell(line: str) -> str:
    return line.partition(",")[2]


def with_cell(lines: list[str], row: int, column: int, cell: str) -> list[str]:
    fields = lines[row].split(",")
    fields[column] = cell
    return [*lines[:row], ",".join(fields), *lines[row + 1 :]]


HEADER = ",".join(["Elevation", *(f"column{i}" for i in range(54))])
SPOILED: dict[str, tuple[Callable[[list[str]], list[str]], str]] = {
    "nothing": (lambda lines: [], "has no rows"),
    "a row of 54": (
        lambda lines: [*lines[:2], without_first_cell(lines[2]), *lines[3:]],
        "changed from 55 to 54 at row 3",
    ),
    "rows of 54": (lambda lines: [*map(without_first_cell, lines)], "has 54 columns instead of 55"),
    "a word": (lambda lines: with_cell(lines, 4, 7, "pine"), "'pine' to float32 at row 4, column 8"),
    "nan": (lambda lines: with_cell(lines, 4, 7, "nan"), "row 5 is not finite"),
    "a header": (
        lambda lines: [HEADER, *lines],
        "'Elevation' to float32 at row 0, column 1.; UCI's covtype.data has no header",
    ),
    "class 0": (lambda lines: with_cell(lines, 9, 54, "0"), "row 10 is not finite, or its class is 0;"),
    "class 2.5": (lambda lines: with_cell(lines, 9, 54, "2.5"), "row 10 is not finite, or its class is 2.5;"),
}


@pytest.mark.parametrize(("spoil", "complaint"), SPOILED.values(), ids=SPOILED)
def test_a_spoiled_file_is_refused_with_the_place(
    tmp_path: Path, spoil: Callable[[list[str]], list[str]], complaint: str
) -> None:
    path = write(tmp_path / "covtype.data", rows())
    text = "".join(f"{line}\n" for line in spoil(path.read_text().splitlines()))
    for content in (text.encode(), gzip.compress(text.encode())):
        path.write_bytes(content)
        with pytest.raises(MupscaleError) as caught:
            CoverType(path)
        assert complaint in str(caught.value)
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for path, complaint in ((tmp_path / "nowhere.gz", "No such file"), (tmp_path, "Is a directory.*covtype.data.gz")):
        with pytest.raises(MupscaleError, match=f"cannot read .*: {complaint}"):
            CoverType(path)
    path = write(tmp_path / "covtype.data.gz", rows([200] * 7))
    whole = path.read_bytes()
    checksum = bytearray(whole)
    checksum[-6] ^= 255
    for content in (*(whole[: int(len(whole) * kept)] for kept in (0.1, 0.5, 0.99)), bytes(checksum)):
        path.write_bytes(content)
        with pytest.raises(MupscaleError, match=r"covtype.data.gz is cut short or damaged .*download it again"):
            CoverType(path)


def test_parts_that_cannot_be_made(tmp_path: Path) -> None:
    for per_class, which in (([5, 5, 5, 1, 5, 5, 5], "4 has 1"), ([5] * 6, "7 has 0")):
        with pytest.raises(MupscaleError, match=f"at least 2 rows of each class, but class {which}"):
            CoverType(write(tmp_path / "covtype.data", rows(per_class)))
    path = write(tmp_path / "covtype.data", rows())
    for fraction in (0.0, 1.0, -0.2, float("nan")):
        with pytest.raises(MupscaleError, match="test_fraction must lie between 0 and 1"):
            CoverType(path, test_fraction=fraction)


def test_fetched_with_scikit_learn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From scikit-learn's own cache, written here in its layout."""
    pytest.importorskip("sklearn")
    joblib = pytest.importorskip("joblib")
    monkeypatch.setenv("SCIKIT_LEARN_DATA", str(tmp_path / "cache"))
    folder = tmp_path / "cache" / "covertype"
    folder.mkdir(parents=True)
    table = rows()
    joblib.dump(table[:, :54].astype(np.float64), folder / "samples_py3")
    joblib.dump(table[:, 54].astype(np.int32), folder / "targets_py3")
    fetched, read = CoverType(), CoverType(write(tmp_path / "covtype.data", table))
    assert all(torch.equal(a, b) for a, b in zip(fetched.split, read.split, strict=True))


def test_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("sklearn.datasets._base")
    monkeypatch.setattr(datasets.time, "sleep", lambda seconds: None)  # between its attempts
    monkeypatch.setenv("SCIKIT_LEARN_DATA", str(tmp_path))
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with pytest.warns(UserWarning, match="Retry"), pytest.raises(MupscaleError, match="give the path of covtype"):
        CoverType()


def test_no_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(MupscaleError, match="pip install 'mupscale\\[all\\]'"):
        CoverType()
