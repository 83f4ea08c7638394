"""CIFAR-100 from files in the publisher's layout, written here; augmentation against one image at a time."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

from mupscale import MupscaleError
from mupscale.data import CIFAR100, Images, Shapes, Split
from mupscale.data.stream import random_bits

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
    assert all(torch.equal(a, b) for a, b in zip(data.split, again.split, strict=True))
    assert not torch.equal(data.split.train_x, other.split.train_x)
    same = Shapes(train=50, test=50).split
    assert not torch.equal(same.train_x, same.test_x)
    with pytest.raises(MupscaleError, match="train is 0"):
        Shapes(train=0)
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
    with pytest.raises(MupscaleError, match=r"bytes \(uint8\).*are torch.float32 \(6, 1, 12, 8\)"):
        Images(Split(x.float(), y, x.float(), y))
    with pytest.raises(MupscaleError, match=r"are torch.uint8 \(6, 12, 8\)"):
        Images(Split(x, y, x[:, 0], y))


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
