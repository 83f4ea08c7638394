"""Copies of models whose parameters keep what others have put on them."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn


def copy_model(model: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """A deep copy; memo: as for copy.deepcopy.

    >>> model = nn.Linear(2, 2)
    >>> model.weight.infshape = "base shape"  # what the mup package's layers and optimizers look for
    >>> copy_model(model).weight.infshape
    'base shape'
    """
    copied = copy.deepcopy(model, memo)
    keep_attributes(model, copied)
    return copied


def keep_attributes(model: nn.Module, copied: nn.Module) -> None:
    """Give a copy's parameters the attributes of the model's, which torch's deepcopy leaves out.

    >>> model, copied = nn.Linear(2, 2), nn.Linear(2, 2)
    >>> model.bias.tag = "mine"
    >>> keep_attributes(model, copied)
    >>> copied.bias.tag
    'mine'
    """
    for old, new in zip(model.parameters(), copied.parameters(), strict=True):
        vars(new).update(vars(old))
