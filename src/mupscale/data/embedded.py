"""What ships inside the package: a sample of Forest CoverType and Tiny Shakespeare.

CoverType is by Jock A. Blackard (UCI Machine Learning Repository), licensed CC BY 4.0. The sample, made by
tools/make_covtype_sample.py, has 12,000 training and 3,000 test rows of the 581,012.
Tiny Shakespeare (collected by Andrej Karpathy) is 1.1 MB of plays in the public domain.
"""

from __future__ import annotations

from importlib import resources
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

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
    binary = [
        one_hot(columns["wilderness"].long(), WILDERNESS_AREAS),
        one_hot(columns["soil"].long(), SOIL_TYPES),
    ]
    x = torch.cat([standardise(columns["continuous"], train), *binary], dim=1).to(dtype)
    y = columns["label"].long()
    return Split(x[train], y[train], x[~train], y[~train])


def standardise(columns: Tensor, train: Tensor) -> Tensor:
    """Give the training rows of each column mean 0 and standard deviation 1; a constant column becomes 0."""
    columns = columns.double()
    std, mean = torch.std_mean(columns[train], dim=0)
    return (columns - mean) / torch.where(std > 0, std, 1.0)


def tinyshakespeare() -> str:
    """The text of Tiny Shakespeare.

    >>> print(tinyshakespeare()[:50])
    First Citizen:
    Before we proceed any further, hear
    """
    return resources.files("mupscale.data").joinpath("tinyshakespeare.txt").read_text(encoding="utf-8")
