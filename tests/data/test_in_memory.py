"""CoverType and CIFAR-100 from files in their publishers' formats, written here; images augmented one at a time."""

from __future__ import annotations

import gzip
import io
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

from mupscale import MupscaleError
from mupscale.data import CIFAR100, CoverType, CoverTypeSample, Images, Shapes, Split, Table, covtype_sample
from mupscale.data.in_memory import choose_test_rows
from mupscale.data.stream import random_bits
from refusals import refuses
from weights import identical

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
    assert identical(first.split, again.split)
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
    refuses(r"training part .* has 6 and 5", Table, Split(x, y[:5], x, y))
    refuses(r"test part .* has 0 and 0", Table, Split(x, y, x[:0], y[:0]))


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
        refuses(f"cannot read .*: {complaint}", CoverType, path)
    path = write(tmp_path / "covtype.data.gz", rows([200] * 7))
    whole = path.read_bytes()
    checksum = bytearray(whole)
    checksum[-6] ^= 255
    for content in (*(whole[: int(len(whole) * kept)] for kept in (0.1, 0.5, 0.99)), bytes(checksum)):
        path.write_bytes(content)
        refuses(r"covtype.data.gz is cut short or damaged .*download it again", CoverType, path)


def test_parts_that_cannot_be_made(tmp_path: Path) -> None:
    for per_class, which in (([5, 5, 5, 1, 5, 5, 5], "4 has 1"), ([5] * 6, "7 has 0")):
        with pytest.raises(MupscaleError, match=f"at least 2 rows of each class, but class {which}"):
            CoverType(write(tmp_path / "covtype.data", rows(per_class)))
    path = write(tmp_path / "covtype.data", rows())
    for fraction in (0.0, 1.0, -0.2, float("nan")):
        refuses("test_fraction must lie between 0 and 1", CoverType, path, test_fraction=fraction)


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
    assert identical(fetched.split, read.split)


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
    refuses("pip install 'mupscale\\[all\\]'", CoverType)


CPU = torch.device("cpu")
RECORD = 3074


def records(count: int, seed: int) -> bytes:
    """Records of CIFAR-100: the coarse class is never the fine one, and each channel has a range of its own."""
    random = torch.Generator().manual_seed(seed)
    fine = torch.arange(count) % 100
    red, green, blue = (torch.randint(low, low + 100, (count, 1024), generator=random) for low in (0, 60, 120))
    table = torch.cat([(99 - fine)[:, None], fine[:, None], red, green, blue], dim=1)
    return table.to(torch.uint8).numpy().tobytes()


def expected(content: bytes) -> tuple[Tensor, Tensor]:
    images, labels = [], []
    for start in range(0, len(content), RECORD):
        record = content[start : start + RECORD]
        labels.append(record[1])
        images.append([[list(record[2 + 1024 * c + 32 * r :][:32]) for r in range(32)] for c in range(3)])
    return torch.tensor(images, dtype=torch.uint8), torch.tensor(labels)


def archive(path: Path, members: dict[str, bytes]) -> Path:
    mode = {".gz": "w:gz", ".tgz": "w:gz", ".tar": "w"}[path.suffix]
    with tarfile.open(path, mode) as tar:  # type: ignore[call-overload]
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def folder(path: Path, members: dict[str, bytes]) -> Path:
    for name, content in members.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)
    return path


TRAIN, TEST = records(120, 1), records(30, 2)
BARE = {"train.bin": TRAIN, "test.bin": TEST}
NESTED = {f"cifar-100-binary/{name}": content for name, content in BARE.items()}
EXTRAS = {"cifar-100-binary/coarse_label_names.txt": b"x\n", **dict(reversed(NESTED.items()))}


@pytest.mark.parametrize(
    ("name", "members"),
    [
        ("folder", BARE),
        ("folder", NESTED),
        ("cifar-100-binary.tar.gz", EXTRAS),
        ("cifar.tgz", NESTED),
        ("cifar.tar", {f"./{name}": content for name, content in BARE.items()}),
    ],
)
def test_cifar100(tmp_path: Path, name: str, members: dict[str, bytes]) -> None:
    make = folder if name == "folder" else archive
    data = CIFAR100(str(make(tmp_path / name, members)))
    assert (data.size, data.classes, data.unit) == (120, 100, "samples")
    for content, x, y in ((TRAIN, *data.split[:2]), (TEST, *data.split[2:])):
        images, labels = expected(content)
        assert torch.equal(x, images)
        assert torch.equal(y, labels)
        assert x.dtype == torch.uint8
    written = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.bin"))
    assert bool(written) == (name == "folder"), "an archive is read, never extracted"


def cifar(tmp_path: Path, *, augment: bool = True) -> CIFAR100:
    return CIFAR100(folder(tmp_path, BARE), augment=augment)


def test_normalised_by_the_training_part(tmp_path: Path) -> None:
    data = cifar(tmp_path).to(CPU, torch.float64)
    pixels = expected(TRAIN)[0].double()
    mean, std = pixels.mean((0, 2, 3)), pixels.std((0, 2, 3), unbiased=False)
    assert mean[0] < 60 < mean[1] < 120 < mean[2]
    x, y = data.examples(torch.tensor([7, 0]))
    torch.testing.assert_close(x, (pixels[[7, 0]] - mean[:, None, None]) / std[:, None, None])
    assert y.tolist() == [7, 0]

    x, y = (torch.cat(parts) for parts in zip(*data.evaluation(8), strict=True))
    torch.testing.assert_close(x, (expected(TEST)[0] - mean[:, None, None]) / std[:, None, None])
    assert torch.equal(y, expected(TEST)[1])


def test_augmentation_is_that_of_single_images(tmp_path: Path) -> None:
    """Each image of a batch is the raw one padded with black, cropped, maybe mirrored, and only then normalised."""
    data = cifar(tmp_path).to(CPU, torch.float64)
    rows = torch.arange(120).repeat(5)
    bits = random_bits(0, 0, len(rows), CPU)
    x = data.augment(data.examples(rows)[0], bits)
    raw = data.split.train_x[rows]
    seen = set()
    for image, source, random in zip(x, raw, bits.tolist(), strict=True):
        top, left, mirrored = random % 9, random // 9 % 9, random // 81 % 2
        crop = pad(source, (4, 4, 4, 4))[:, top : top + 32, left : left + 32]
        assert torch.equal(image, data.normalise(crop.flip(2) if mirrored else crop))
        seen.add((top, left, mirrored))
    assert len(seen) > 150  # of 162


def test_a_batch_is_augmented_by_its_positions(tmp_path: Path) -> None:
    data = cifar(tmp_path)
    x, y = data.batch(3, 100, 64)
    assert x.shape == (64, 3, 32, 32)
    assert x.dtype == torch.float32
    parts = [data.batch(3, 100, 40), data.batch(3, 140, 24)]
    assert torch.equal(x, torch.cat([part[0] for part in parts]))
    assert torch.equal(y, torch.cat([part[1] for part in parts]))
    plain = cifar(tmp_path, augment=False)
    assert torch.equal(plain.batch(3, 100, 64)[1], y)
    torch.testing.assert_close(plain.batch(3, 0, 120)[0].mean((0, 2, 3)), torch.zeros(3), rtol=0, atol=1e-5)


def test_shapes() -> None:
    data = Shapes(train=200, test=50)
    assert (data.size, data.classes) == (200, 10)
    assert data.split.train_y.bincount().tolist() == [20] * 10
    assert data.split.test_y.bincount().tolist() == [5] * 10
    assert data.split.train_x.shape == (200, 3, 32, 32)
    again, other = Shapes(train=200, test=50), Shapes(train=200, test=50, seed=1)
    assert identical(data.split, again.split)
    assert not torch.equal(data.split.train_x, other.split.train_x)
    same = Shapes(train=50, test=50).split
    assert not torch.equal(same.train_x, same.test_x)
    refuses("train is 0", Shapes, train=0)
    torch.set_default_dtype(torch.float64)  # which changes nothing; conftest.py puts it back
    assert torch.equal(Shapes(train=50, test=50).split.train_x, same.train_x)


@pytest.mark.slow
def test_shapes_are_for_convolutions() -> None:
    """What tells the classes apart is form: a small convolutional net sees it soon, a linear model does not."""
    data = Shapes(train=2000, test=500, augment=False)

    def accuracy(model: nn.Module, steps: int) -> float:
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        for step in range(steps):
            x, y = data.batch(0, 50 * step, 50)
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
        with torch.no_grad():
            return sum(float((model(x).argmax(1) == y).sum()) for x, y in data.evaluation(100)) / 500

    convolutions = [
        (nn.Conv2d(i, o, 5, stride=2, padding=2), nn.BatchNorm2d(o), nn.ReLU()) for i, o in ((3, 16), (16, 32))
    ]
    body = [layer for block in convolutions for layer in block]
    net = nn.Sequential(*body, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(128, 10))
    linear = nn.Sequential(nn.Flatten(), nn.Linear(3072, 10))
    assert accuracy(linear, 100) < 0.3 < accuracy(net, 200) < 0.9


def test_images_of_ones_own() -> None:
    x, y = torch.randint(0, 256, (6, 1, 12, 8), dtype=torch.uint8), torch.arange(6)
    x[:, :, 0] = 5
    data = Images(Split(x, y, x, y))
    assert data.classes == 6
    assert data.batch(0, 0, 4)[0].shape == (4, 1, 12, 8)
    constant = torch.full((2, 3, 4, 4), 9, dtype=torch.uint8)
    assert (Images(Split(constant, y[:2], constant, y[:2])).examples(torch.tensor([0]))[0] == 0).all()
    refuses(r"bytes \(uint8\).*are torch.float32 \(6, 1, 12, 8\)", Images, Split(x.float(), y, x.float(), y))
    refuses(r"are torch.uint8 \(6, 12, 8\)", Images, Split(x, y, x[:, 0], y))


def refused(path: Path) -> str:
    """What CIFAR100 says: one sentence that names the path."""
    with pytest.raises(MupscaleError) as caught:
        CIFAR100(path)
    message = str(caught.value)
    assert str(path) in message
    assert "\n" not in message
    return message


def test_files_that_are_not_there(tmp_path: Path) -> None:
    assert "No such file" in refused(tmp_path / "cifar.tar.gz")
    assert "holds no train.bin" in refused(tmp_path)
    python = {"cifar-100-python/train": b"x", "cifar-100-python/test": b"x"}
    assert "holds no train.bin; take the binary version" in refused(archive(tmp_path / "a.tar.gz", python))
    assert "holds no test.bin" in refused(archive(tmp_path / "b.tar", {"train.bin": TRAIN}))
    assert "holds no test.bin" in refused(folder(tmp_path, {"train.bin": TRAIN}))


def test_names_in_an_archive_lead_nowhere(tmp_path: Path) -> None:
    """A link called train.bin is not followed, and a name that climbs out of the folder is only a name."""
    (tmp_path / "inside").mkdir()
    secret = tmp_path / "train.bin"
    secret.write_bytes(TRAIN)
    path = tmp_path / "inside" / "cifar.tar"
    with tarfile.open(path, "w") as tar:
        link = tarfile.TarInfo("train.bin")
        link.type, link.linkname = tarfile.SYMTYPE, str(secret)
        tar.addfile(link)
        info = tarfile.TarInfo("../../test.bin")
        info.size = len(TEST)
        tar.addfile(info, io.BytesIO(TEST))
    assert "holds no train.bin" in refused(path)
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["cifar.tar", "inside", "train.bin"]


@pytest.mark.parametrize("name", ["cifar.tar.gz", "cifar.tar"])
def test_archives_cut_short(tmp_path: Path, name: str) -> None:
    path = archive(tmp_path / name, NESTED)
    whole = path.read_bytes()
    for kept in (0.001, 0.3, 0.7):
        path.write_bytes(whole[: int(len(whole) * kept)])
        assert "cut short or damaged" in refused(path)
    for content in (b"", b"not a tar archive at all", TRAIN):
        path.write_bytes(content)
        assert "is not a tar archive" in refused(path)


def test_records_that_are_not_whole_or_of_another_set(tmp_path: Path) -> None:
    for name, content in (
        ("train.bin", TRAIN[:-1]),
        ("test.bin", TEST + b"x"),
        ("test.bin", b""),
        ("train.bin", b"ab"),
    ):
        message = refused(folder(tmp_path, BARE | {name: content}))
        assert f"{name} in" in message
        assert f"has {len(content):,} bytes" in message
        assert "3,074" in message
    wrong = bytearray(TRAIN)
    wrong[4 * RECORD + 1] = 200
    assert "record 5 of train.bin" in refused(folder(tmp_path, BARE | {"train.bin": bytes(wrong)}))


@pytest.mark.gpu
def test_batches_on_the_gpu_are_those_on_the_cpu() -> None:
    on_cpu, on_gpu = Shapes(train=200, test=50), Shapes(train=200, test=50).to(torch.device("cuda"))
    for start in (0, 150):
        x, y = on_gpu.batch(0, start, 128)
        assert x.is_cuda
        torch.testing.assert_close(x.cpu(), on_cpu.batch(0, start, 128)[0])
        assert torch.equal(y.cpu(), on_cpu.batch(0, start, 128)[1])
    for (x, y), (a, b) in zip(on_gpu.evaluation(20), on_cpu.evaluation(20), strict=True):
        torch.testing.assert_close(x.cpu(), a)
        assert torch.equal(y.cpu(), b)


def test_one_wrong_bit_in_an_archive_is_noticed(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 100, (4, RECORD), dtype=np.uint8).tobytes()
    path = archive(tmp_path / "c.tar.gz", {"train.bin": noise, "test.bin": noise})
    CIFAR100(str(path))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert "cut short or damaged" in refused(path)
