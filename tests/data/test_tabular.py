"""CoverType from files in UCI's format, written here; and what ships with the package."""

from __future__ import annotations

import gzip
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from mupscale import MupscaleError
from mupscale.data import CoverType, CoverTypeSample, Split, Table, covtype_sample, tinyshakespeare
from mupscale.data.tabular import choose_test_rows

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


def lines(tmp_path: Path) -> tuple[Path, list[str]]:
    """A good file and its lines, to be spoiled."""
    path = write(tmp_path / "covtype.data", rows())
    return path, path.read_text().splitlines()


def spoiled(path: Path, text: list[str]) -> str:
    """What CoverType says about the file with these lines: one sentence that names it."""
    path.write_text("\n".join(text) + "\n")
    with pytest.raises(MupscaleError) as caught:
        CoverType(path)
    message = str(caught.value)
    assert str(path) in message
    assert "\n" not in message
    return message


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


def test_the_split_depends_on_its_seed_alone(tmp_path: Path) -> None:
    path = write(tmp_path / "covtype.data", rows())
    first, again, other = CoverType(path), CoverType(path), CoverType(path, split_seed=1)
    assert all(torch.equal(a, b) for a, b in zip(first.split, again.split, strict=True))
    assert not torch.equal(first.split.test_x, other.split.test_x)
    assert first.split.test_y.bincount().tolist() == other.split.test_y.bincount().tolist()


def test_a_fraction_of_each_class() -> None:
    labels = torch.arange(7).repeat_interleave(torch.tensor([1000, 200, 30, 4, 3, 2, 2]))[torch.randperm(1241)]
    assert labels[choose_test_rows(labels, 0.5, 0)].bincount().tolist() == [500, 100, 15, 2, 2, 1, 1]
    assert labels[choose_test_rows(labels, 0.999, 0)].bincount().tolist() == [999, 199, 29, 3, 2, 1, 1]
    assert labels[choose_test_rows(labels, 0.001, 0)].bincount().tolist() == [1] * 7


def test_a_constant_column_becomes_zero(tmp_path: Path) -> None:
    table = rows()
    table[:, 3] = 77
    assert (CoverType(write(tmp_path / "covtype.data", table)).split.train_x[:, 3] == 0).all()


def test_evaluation_is_the_test_part_in_order(tmp_path: Path) -> None:
    data = CoverType(write(tmp_path / "covtype.data", rows()))
    batches = list(data.evaluation(10))
    assert [len(y) for _, y in batches] == [10, 10, 10, 6]
    assert torch.equal(torch.cat([x for x, _ in batches]), data.split.test_x)
    assert torch.equal(torch.cat([y for _, y in batches]), data.split.test_y)


def test_sample() -> None:
    data = CoverTypeSample()
    assert (data.size, data.classes) == (12_000, 7)
    x, y = data.batch(0, 0, 12_000)
    assert x.shape == (12_000, 54)
    assert torch.equal(y.bincount(), covtype_sample().train_y.bincount())
    torch.testing.assert_close(x[:, :10].mean(0), torch.zeros(10), rtol=0, atol=1e-5)
    torch.testing.assert_close(x[:, :10].std(0), torch.ones(10))


def test_tinyshakespeare() -> None:
    text = tinyshakespeare()
    assert text.startswith("First Citizen:\nBefore we proceed any further, hear me speak.")
    assert len(text) == 1_115_394


def test_table_of_ones_own() -> None:
    x, y = torch.randn(6, 2), torch.tensor([0, 3, 1, 1, 0, 2])
    assert Table(Split(x, y, x[:2], y[:2])).classes == 4
    assert Table(Split(x, y, x[:2], y[:2]), classes=9).classes == 9
    assert Table(Split(x, y.float(), x[:2], y[:2].float())).classes is None
    with pytest.raises(MupscaleError, match=r"training part .* has 6 and 5"):
        Table(Split(x, y[:5], x, y))
    with pytest.raises(MupscaleError, match=r"test part .* has 0 and 0"):
        Table(Split(x, y, x[:0], y[:0]))


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(MupscaleError, match=r"cannot read .*nowhere.gz: No such file"):
        CoverType(tmp_path / "nowhere.gz")
    with pytest.raises(MupscaleError, match=r"cannot read .*: Is a directory.*covtype.data.gz"):
        CoverType(tmp_path)


@pytest.mark.parametrize("zipped", [True, False])
def test_empty(tmp_path: Path, zipped: bool) -> None:
    path = tmp_path / "covtype.data"
    path.write_bytes(gzip.compress(b"") if zipped else b"")
    with pytest.raises(MupscaleError, match="has no rows"):
        CoverType(path)


@pytest.mark.parametrize("kept", [0.1, 0.5, 0.99])
def test_gzip_cut_short(tmp_path: Path, kept: float) -> None:
    path = write(tmp_path / "covtype.data.gz", rows([200] * 7))
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * kept)])
    with pytest.raises(MupscaleError, match=r"covtype.data.gz is cut short or damaged .*fetch it again"):
        CoverType(path)


def test_gzip_damaged(tmp_path: Path) -> None:
    path = write(tmp_path / "covtype.data.gz", rows([200] * 7))
    content = bytearray(path.read_bytes())
    content[-6] ^= 255  # in the checksum
    path.write_bytes(content)
    with pytest.raises(MupscaleError, match="cut short or damaged"):
        CoverType(path)


def test_wrong_number_of_columns(tmp_path: Path) -> None:
    path, text = lines(tmp_path)
    assert "changed from 55 to 54 at row 3" in spoiled(path, [*text[:2], text[2].partition(",")[2], *text[3:]])
    everywhere = [line.partition(",")[2] for line in text]
    assert "has 54 columns instead of 55" in spoiled(path, everywhere)


def test_not_a_number(tmp_path: Path) -> None:
    path, text = lines(tmp_path)
    fields = text[4].split(",")
    for field, complaint in {"pine": "'pine' to float32 at row 4, column 8", "nan": "row 5 is not finite"}.items():
        spoilt = ",".join([*fields[:7], field, *fields[8:]])
        assert complaint in spoiled(path, [*text[:4], spoilt, *text[5:]])


def test_a_header(tmp_path: Path) -> None:
    path, text = lines(tmp_path)
    header = ",".join(["Elevation", *(f"column{i}" for i in range(54))])
    assert "'Elevation' to float32 at row 0, column 1.; UCI's covtype.data has no header" in spoiled(
        path, [header, *text]
    )


@pytest.mark.parametrize("label", ["0", "2.5"])
def test_class_out_of_range(tmp_path: Path, label: str) -> None:
    path, text = lines(tmp_path)
    wrong = text[9].rpartition(",")[0] + "," + label
    assert f"row 10 is not finite, or its class is {label};" in spoiled(path, [*text[:9], wrong, *text[10:]])


@pytest.mark.parametrize(("per_class", "which"), [([5, 5, 5, 1, 5, 5, 5], "4 has 1"), ([5] * 6, "7 has 0")])
def test_class_with_too_few_rows(tmp_path: Path, per_class: list[int], which: str) -> None:
    path = write(tmp_path / "covtype.data", rows(per_class))
    with pytest.raises(MupscaleError, match=f"at least 2 rows of each class, but class {which}"):
        CoverType(path)


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.2, float("nan")])
def test_fraction_out_of_range(tmp_path: Path, fraction: float) -> None:
    path = write(tmp_path / "covtype.data", rows())
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
