"""Exactness is tested in float64; what every test starts from is in the conftest.py of the folder above."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def float64() -> Iterator[None]:
    """float64 everywhere: optimizers keep their scalar state (ASGD's eta, step) in the default dtype."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
