"""Tables and images kept as tensors on the device: any of your own, and Forest CoverType and CIFAR-100, the paper's.

CoverType is by Jock A. Blackard (UCI Machine Learning Repository), licensed CC BY 4.0. The sample that ships with the
package, made by tools/make_covtype_sample.py, has 12,000 training and 3,000 test rows of the 581,012.
"""

from __future__ import annotations

import gzip
import math
import tarfile
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from importlib import resources
from lzma import LZMAError
from pathlib import Path
from typing import IO, Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import one_hot

from mupscale.data.stream import Batch, Data
from mupscale.system import MupscaleError, generator, open_gzip, require

CONTINUOUS, FEATURES, CLASSES = 10, 54, 7
ROWS = 581_012
CLASS_NUMBERS = range(1, CLASSES + 1)
LAYOUT = f"UCI's covtype.data has no header and {FEATURES + 1} numbers a line, the last of them a class 1 … {CLASSES}"
WILDERNESS_AREAS, SOIL_TYPES = 4, 40


class Split(NamedTuple):
    """Inputs and targets to train on, and to evaluate on."""

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor


def covtype_sample(dtype: torch.dtype = torch.float32) -> Split:
    """The CoverType sample with the paper's preprocessing: 54 features, 7 classes.

    >>> sample = covtype_sample()
    >>> sample.train_x.shape, sample.test_x.shape
    (torch.Size([12000, 54]), torch.Size([3000, 54]))
    """
    with resources.files("mupscale.data").joinpath("covtype.npz").open("rb") as file:
        columns = {name: torch.from_numpy(values) for name, values in np.load(file, allow_pickle=False).items()}
    train = columns["train"]
    binary = [one_hot(columns["wilderness"].long(), WILDERNESS_AREAS), one_hot(columns["soil"].long(), SOIL_TYPES)]
    x = torch.cat([standardise(columns["continuous"], train), *binary], dim=1).to(dtype)
    y = columns["label"].long()
    return Split(x[train], y[train], x[~train], y[~train])


def standardise(columns: Tensor, train: Tensor) -> Tensor:
    """Give the training rows of each column mean 0 and standard deviation 1; a constant column becomes 0."""
    columns = columns.double()
    std, mean = torch.std_mean(columns[train], dim=0)
    return (columns - mean) / torch.where(std > 0, std, 1.0)


class Table(Data):
    """Any tensors that fit in memory: inputs and targets to train on, and to evaluate on."""

    def __init__(self, split: Split, classes: int | None = None) -> None:
        for part, x, y in (("training", split.train_x, split.train_y), ("test", split.test_x, split.test_y)):
            if len(x) != len(y) or len(x) == 0:
                raise MupscaleError(
                    f"a {part} part needs as many inputs as targets and at least one, but has {len(x)} and {len(y)}"
                )
        if classes is None and not split.train_y.is_floating_point():
            classes = int(max(split.train_y.max(), split.test_y.max())) + 1
        self.split, self.classes, self.device = split, classes, split.train_x.device

    @property
    def size(self) -> int:
        return len(self.split.train_y)

    def examples(self, rows: Tensor) -> Batch:
        return self.split.train_x.index_select(0, rows), self.split.train_y.index_select(0, rows)

    def evaluation(self, batch: int) -> Iterator[Batch]:
        x, y = self.split.test_x, self.split.test_y
        return ((x[start : start + batch], y[start : start + batch]) for start in range(0, len(y), batch))

    def to(self, device: torch.device, dtype: torch.dtype = torch.float32) -> Self:
        """Move all of it at once; whole numbers (classes, token ids) stay whole."""
        self.device = device
        self.split = Split(*(part.to(device, dtype if part.is_floating_point() else None) for part in self.split))
        return self


class CoverType(Table):
    """Forest CoverType: 581,012 patches of forest, 54 features, 7 kinds of trees, with the paper's preprocessing.

    path: UCI's covtype.data.gz, or the same unzipped; None fetches it with scikit-learn.
    The split is stratified; continuous columns are standardised on the training part, binary ones left.
    """

    def __init__(self, path: str | Path | None = None, *, test_fraction: float = 0.2, split_seed: int = 0) -> None:
        table = torch.from_numpy(_fetch() if path is None else _read_rows(Path(path).expanduser()))
        labels = table[:, FEATURES].long() - 1
        test = choose_test_rows(labels, test_fraction, split_seed)
        table[:, :CONTINUOUS] = standardise(table[:, :CONTINUOUS], ~test)
        x = table[:, :FEATURES]
        super().__init__(Split(x[~test], labels[~test], x[test], labels[test]), CLASSES)

    @classmethod
    def shape_without_files(cls, arguments: Mapping[str, Any]) -> Mapping[str, Any] | None:
        path = arguments.get("path")
        if path is not None and Path(path).expanduser().exists():
            return None
        held_out = round(float(arguments.get("test_fraction", 0.2)) * ROWS)
        return {"shape": [FEATURES], "classes": CLASSES, "rows": ROWS - held_out, "held_out": held_out}


class CoverTypeSample(Table):
    """The sample of Forest CoverType that ships with the package: 12,000 training rows and 3,000 test rows."""

    def __init__(self) -> None:
        super().__init__(covtype_sample(), CLASSES)


def choose_test_rows(labels: Tensor, fraction: float, seed: int) -> Tensor:
    """Which rows are the test part: this fraction of each class, rounded, chosen by the seed."""
    if not 0 < fraction < 1:
        raise MupscaleError(f"test_fraction must lie between 0 and 1, but is {fraction}")
    counts = labels.bincount(minlength=CLASSES).tolist()
    for label, count in enumerate(counts):
        if count < 2:
            raise MupscaleError(
                f"a stratified split needs at least 2 rows of each class, but class {label + 1} has {count}; "
                "use the whole data set or a larger sample"
            )
    order = torch.randperm(len(labels), generator=generator(seed, "split"))
    by_class = order[labels[order].argsort(stable=True)]
    test = torch.zeros(len(labels), dtype=torch.bool)
    for rows in by_class.split(counts):
        test[rows[: min(max(round(fraction * len(rows)), 1), len(rows) - 1)]] = True
    return test


def _read_rows(path: Path) -> NDArray[np.float32]:
    """The rows of the file as they stand: 54 features and a class."""
    try:
        with open_maybe_zipped(path) as file, warnings.catch_warnings():
            warnings.filterwarnings("ignore", "loadtxt: input contained no data")
            table = np.loadtxt(file, dtype=np.float32, delimiter=",", comments=None, ndmin=2)
    except ValueError as error:  # which names the row
        raise MupscaleError(f"{path}: {error}; {LAYOUT}") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise MupscaleError(f"{path} is cut short or damaged ({error}); download it again") from None
    except OSError as error:
        raise MupscaleError(
            f"cannot read {path}: {error.strerror or error}; path names UCI's covtype.data.gz"
        ) from None
    if table.size == 0:
        raise MupscaleError(f"{path} has no rows; {LAYOUT}")
    if table.shape[1] != FEATURES + 1:
        raise MupscaleError(f"{path} has {table.shape[1]} columns instead of {FEATURES + 1}; {LAYOUT}")
    wrong = ~(np.isfinite(table).all(axis=1) & np.isin(table[:, FEATURES], CLASS_NUMBERS))
    if wrong.any():
        row = int(wrong.argmax())
        raise MupscaleError(f"{path}, row {row + 1} is not finite, or its class is {table[row, -1]:g}; {LAYOUT}")
    return table


def open_maybe_zipped(path: Path) -> IO[bytes]:
    """The file, through gzip where its first bytes say so, whatever its name."""
    with path.open("rb") as file:
        zipped = file.read(2) == b"\x1f\x8b"
    return open_gzip(path) if zipped else path.open("rb")


def _fetch() -> NDArray[np.float32]:
    """The same rows from scikit-learn's copy, downloaded the first time."""
    sklearn = require(
        "sklearn.datasets",
        reason="CoverType without a path is fetched with scikit-learn, which is missing",
        remedy=", or give the path of covtype.data.gz",
    )
    try:
        features, labels = sklearn.fetch_covtype(return_X_y=True)
    except OSError as error:
        raise MupscaleError(
            f"CoverType could not be fetched ({error}); where there is no network, give the path of covtype.data.gz"
        ) from None
    return np.column_stack([features, labels]).astype(np.float32)


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
        train, test = _read_parts(path)
        super().__init__(
            Split(*_decode_records(train, path, "train.bin"), *_decode_records(test, path, "test.bin")),
            FINE_CLASSES,
            augment=augment,
        )

    @classmethod
    def shape_without_files(cls, arguments: Mapping[str, Any]) -> Mapping[str, Any] | None:
        if Path(str(arguments.get("path"))).expanduser().exists():
            return None
        return {"shape": [CHANNELS, SIDE, SIDE], "classes": FINE_CLASSES, "rows": 50_000, "held_out": 10_000}


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


def _read_parts(path: Path) -> list[bytes]:
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
    with open_maybe_zipped(path) as file:
        with tarfile.open(fileobj=file, mode="r|*") as archive:
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
            f"{name} in {path} has {len(records):,} bytes, which is not a multiple of a record's {RECORD:,}; "
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
