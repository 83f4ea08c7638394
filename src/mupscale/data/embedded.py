"""A stratified sample of Forest CoverType (Blackard, UCI Machine Learning Repository, CC BY 4.0), as tensors.

Made by tools/make_covtype_sample.py: 12,000 training and 3,000 test rows of the 581,012, with the paper's
preprocessing: continuous columns standardised on the training part, binary columns left as they are.
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
    """Training and test rows: 54 features each, and one of 7 classes."""

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor


def covtype_sample(dtype: torch.dtype = torch.float32) -> Split:
    """The sample, preprocessed."""
    with resources.files("mupscale.data").joinpath("covtype.npz").open("rb") as file:
        columns = {name: torch.from_numpy(values) for name, values in np.load(file, allow_pickle=False).items()}
    train = columns["train"]
    continuous = columns["continuous"].to(torch.float64)
    std, mean = torch.std_mean(continuous[train], dim=0)
    binary = [
        one_hot(columns["wilderness"].long(), WILDERNESS_AREAS),
        one_hot(columns["soil"].long(), SOIL_TYPES),
    ]
    x = torch.cat([(continuous - mean) / std, *binary], dim=1).to(dtype)
    y = columns["label"].long()
    return Split(x[train], y[train], x[~train], y[~train])
