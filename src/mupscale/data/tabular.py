"""Tables: a row of numbers and a class, all of it kept as tensors on the device. Forest CoverType is the paper's.

It is by Jock A. Blackard (UCI Machine Learning Repository), licensed CC BY 4.0. The sample that ships with the package,
made by tools/make_covtype_sample.py, has 12,000 training and 3,000 test rows of the 581,012.
"""

from __future__ import annotations

import gzip
import warnings
import zlib
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import IO, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import one_hot

from mupscale.data.stream import Batch, Data
from mupscale.system import MupscaleError, generator, open_gzip, require

CONTINUOUS, FEATURES, CLASSES = 10, 54, 7
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
        table = torch.from_numpy(_fetch() if path is None else _read(Path(path).expanduser()))
        labels = table[:, FEATURES].long() - 1
        test = choose_test_rows(labels, test_fraction, split_seed)
        table[:, :CONTINUOUS] = standardise(table[:, :CONTINUOUS], ~test)
        x = table[:, :FEATURES]
        super().__init__(Split(x[~test], labels[~test], x[test], labels[test]), CLASSES)


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


def _read(path: Path) -> NDArray[np.float32]:
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
