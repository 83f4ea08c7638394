"""Images, kept as bytes on the device and normalised, cropped and mirrored there; CIFAR-100 is the paper's."""

from __future__ import annotations

import gzip
import math
import tarfile
import zlib
from collections.abc import Callable, Iterator
from lzma import LZMAError
from pathlib import Path
from typing import Self

import numpy as np
import torch
from torch import Tensor

from mupscale.data.stream import Batch
from mupscale.data.tabular import Split, Table
from mupscale.system import MupscaleError, generator, open_gzip

SIDE, CHANNELS = 32, 3
RECORD = 2 + CHANNELS * SIDE * SIDE
FINE_CLASSES = 100
FOLDER, PARTS = "cifar-100-binary", ("train.bin", "test.bin")
LARGEST_PART = 1 << 30


class Images(Table):
    """Images as bytes (N, C, H, W), with their classes.

    Channels are normalised by the training part's mean and standard deviation. With `augment`, training images are
    padded with 4 black pixels on each side, cropped at random to their size, and mirrored every other time.
    """

    padding = 4

    def __init__(self, split: Split, classes: int | None = None, *, augment: bool = True) -> None:
        super().__init__(split, classes)
        for images in (split.train_x, split.test_x):
            if images.dtype != torch.uint8 or images.ndim != 4:
                raise MupscaleError(
                    f"images must be bytes (uint8) of shape (N, C, H, W), but are {images.dtype} {tuple(images.shape)}"
                )
        self.augmented = augment
        self.mean, self.std = channel_statistics(split.train_x)
        self.to(self.device)

    def examples(self, rows: Tensor) -> Batch:
        x, y = super().examples(rows)
        return self.normalise(x), y

    def evaluation(self, batch: int) -> Iterator[Batch]:
        for x, y in super().evaluation(batch):
            yield self.normalise(x), y

    def normalise(self, pixels: Tensor) -> Tensor:
        """Bytes as numbers around 0; a black pixel becomes exactly what padding is."""
        return torch.addcmul(self._black, pixels.to(self._scale.dtype), self._scale)

    def augment(self, x: Tensor, bits: Tensor) -> Tensor:
        """Pad, crop and mirror normalised images, as one gather whose indices are made of the random bits."""
        if not self.augmented:
            return x
        count, channels, height, width = x.shape
        pad, shifts = self.padding, 2 * self.padding + 1
        padded = self._black.repeat(count, 1, height + 2 * pad, width + 2 * pad)
        padded[:, :, pad : pad + height, pad : pad + width] = x
        top, left, mirrored = bits % shifts, bits // shifts % shifts, bits // shifts**2 % 2 == 1
        across = torch.arange(width, device=x.device)
        rows = top[:, None] + torch.arange(height, device=x.device)
        columns = left[:, None] + torch.where(mirrored[:, None], across.flip(0), across)
        index = rows[:, :, None] * padded.shape[3] + columns[:, None, :]
        return padded.flatten(2).gather(2, index.flatten(1)[:, None].expand(-1, channels, -1)).view_as(x)

    def to(self, device: torch.device, dtype: torch.dtype = torch.float32) -> Self:
        """Move all of it at once; the images stay bytes, and dtype is what they are normalised to."""
        super().to(device, dtype)
        self._scale = (1 / self.std).to(device, dtype)[:, None, None]
        self._black = (-self.mean / self.std).to(device, dtype)[:, None, None]
        return self


class CIFAR100(Images):
    """CIFAR-100 in its publisher's binary layout, with the 100 fine classes.

    path: cifar-100-binary.tar.gz as it is, or the folder that holds train.bin and test.bin.
    """

    def __init__(self, path: str | Path, *, augment: bool = True) -> None:
        path = Path(path).expanduser()
        train, test = _read(path)
        super().__init__(
            Split(*_decode_records(train, path, "train.bin"), *_decode_records(test, path, "test.bin")),
            FINE_CLASSES,
            augment=augment,
        )


class Shapes(Images):
    """Synthetic images, drawn from a seed: ten shapes in two colours, turned, scaled, shifted, under noise.

    No substitute for photographs; they are there so that everything made for images can be tried without a download.

    >>> Shapes(train=20, test=10).batch(seed=0, start=0, count=4)[0].shape
    torch.Size([4, 3, 32, 32])
    """

    def __init__(self, train: int = 4000, test: int = 1000, *, seed: int = 0, augment: bool = True) -> None:
        if min(train, test) < 1:
            raise MupscaleError(f"Shapes needs images to train on and to test on, but train is {train} and test {test}")
        super().__init__(
            Split(*draw_shapes(train, seed, "train"), *draw_shapes(test, seed, "test")), len(SHAPES), augment=augment
        )


def channel_statistics(images: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each channel, exact: from counts of the 256 values."""
    values = torch.arange(256, dtype=torch.float64, device=images.device)
    counts = torch.stack([c.flatten().bincount(minlength=256) for c in images.unbind(1)]).double()
    shares = counts / counts.sum(1, keepdim=True)
    mean = shares @ values
    std = (shares * (values - mean[:, None]) ** 2).sum(1).sqrt()
    return mean, torch.where(std > 0, std, 1.0)


def _read(path: Path) -> list[bytes]:
    """The two parts of CIFAR-100, from a folder or straight out of the archive."""
    try:
        if path.is_dir():
            files = {
                name: folder / name for folder in (path / FOLDER, path) for name in PARTS if (folder / name).is_file()
            }
            parts = {name: file.read_bytes() for name, file in files.items()}
        else:
            parts = _from_archive(path)
    except (tarfile.TarError, gzip.BadGzipFile, EOFError, zlib.error, LZMAError) as error:
        raise MupscaleError(
            f"{path} is not a tar archive, or is cut short or damaged ({error}); download it again"
        ) from None
    except OSError as error:
        raise MupscaleError(
            f"cannot read {path}: {error.strerror or error}; path names cifar-100-binary.tar.gz or its folder"
        ) from None
    for name in PARTS:
        if name not in parts:
            raise MupscaleError(f"{path} holds no {name}; take the binary version, cifar-100-binary.tar.gz")
    return [parts[name] for name in PARTS]


def _from_archive(path: Path) -> dict[str, bytes]:
    """Read in one pass and in memory: nothing is extracted, so no name in the archive reaches the disk."""
    parts: dict[str, bytes] = {}
    with path.open("rb") as raw:
        zipped = raw.read(2) == b"\x1f\x8b"
    with open_gzip(path) if zipped else path.open("rb") as file:
        with tarfile.open(fileobj=file, mode="r|" if zipped else "r|*") as archive:
            for member in archive:
                name = member.name.rpartition("/")[2]
                content = archive.extractfile(member) if name in PARTS and member.isfile() else None
                if content is not None and member.size > LARGEST_PART:
                    raise MupscaleError(
                        f"{name} in {path} has {member.size:,} bytes, of which {LARGEST_PART:,} are read at most"
                    )
                if content is not None:
                    parts[name] = content.read()
        while file.read(1 << 20):  # to the end, where gzip has the checksum, which tarfile does not look at
            pass
    return parts


def _decode_records(records: bytes, path: Path, name: str) -> tuple[Tensor, Tensor]:
    """Images and fine classes; a record is a coarse class, a fine one, and the red, green and blue planes."""
    if not records or len(records) % RECORD:
        raise MupscaleError(
            f"{name} in {path} has {len(records):,} bytes, which is no multiple of a record's {RECORD:,}; "
            "it is cut short or not CIFAR-100's binary version"
        )
    table = np.frombuffer(records, np.uint8).reshape(-1, RECORD)
    labels = torch.from_numpy(table[:, 1].astype(np.int64))
    if labels.max() >= FINE_CLASSES:
        number = int((labels >= FINE_CLASSES).nonzero()[0])
        raise MupscaleError(
            f"record {number + 1} of {name} in {path} has the class {int(labels[number])}, but CIFAR-100's are "
            f"0 … {FINE_CLASSES - 1}; is it another data set?"
        )
    return torch.from_numpy(table[:, 2:].copy()).view(-1, CHANNELS, SIDE, SIDE), labels


def draw_shapes(count: int, seed: int, part: str) -> tuple[Tensor, Tensor]:
    """So many synthetic images and their classes, each class as often as any other."""
    random = generator(seed, "shapes", part)

    def uniform(low: float, high: float, channels: int = 1) -> Tensor:
        return low + (high - low) * torch.rand(count, channels, 1, 1, generator=random, dtype=torch.float32)

    labels = torch.arange(count) % len(SHAPES)
    angle, radius = uniform(0, 2 * math.pi), uniform(0.4, 0.8)
    grid = torch.linspace(-1, 1, SIDE, dtype=torch.float32)
    x, y = (grid - uniform(-0.3, 0.3)) / radius, (grid[:, None] - uniform(-0.3, 0.3)) / radius
    u, v = x * angle.cos() + y * angle.sin(), y * angle.cos() - x * angle.sin()
    depth = torch.empty(count, 1, SIDE, SIDE, dtype=torch.float32)
    for label, shape in enumerate(SHAPES):
        depth[label :: len(SHAPES)] = shape(u[label :: len(SHAPES)], v[label :: len(SHAPES)])
    inside = (depth * radius * SIDE).sigmoid()  # an edge about a pixel wide
    ground = uniform(0, 0.5, CHANNELS)
    colour = ground + uniform(0.1, 0.5, CHANNELS)  # a shape is always brighter than its ground
    noise = torch.randn(count, CHANNELS, SIDE, SIDE, generator=random, dtype=torch.float32) * uniform(0.02, 0.15)
    image = torch.lerp(ground, colour, inside) + noise
    return (image.clamp_(0, 1) * 255).round_().to(torch.uint8), labels


def _polygon(corners: int) -> Callable[[Tensor, Tensor], Tensor]:
    wedge = 2 * math.pi / corners

    def depth(u: Tensor, v: Tensor) -> Tensor:
        return math.cos(wedge / 2) - u.hypot(v) * (v.atan2(u) % wedge - wedge / 2).cos()

    return depth


# Each is positive inside the shape, which fills a circle of radius 1, and unchanged by mirroring but for a turn.
SHAPES: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    lambda u, v: 1 - u.hypot(v),  # disc
    lambda u, v: 0.2 - (u.hypot(v) - 0.8).abs(),  # ring
    _polygon(3),
    _polygon(4),
    _polygon(5),
    lambda u, v: 0.7 + 0.3 * (5 * v.atan2(u)).cos() - u.hypot(v),  # star
    lambda u, v: torch.minimum(0.25 - torch.minimum(u.abs(), v.abs()), 1 - torch.maximum(u.abs(), v.abs())),  # cross
    lambda u, v: torch.minimum(1 - u.hypot(v), (u - 0.5).hypot(v) - 0.8),  # crescent
    lambda u, v: torch.minimum(1 - u.hypot(v), 0.2 * (8 * u).sin()),  # stripes
    lambda u, v: torch.minimum(1 - u.hypot(v), 0.2 * (6 * u).sin() * (6 * v).sin()),  # checks
)
