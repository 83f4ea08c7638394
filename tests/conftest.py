"""Every test starts from one seed and one thread; exactness is tested in float64."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _same_start() -> Iterator[None]:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def float64() -> Iterator[None]:
    """float64 everywhere: optimizers keep their scalar state (ASGD's eta, step) in the default dtype."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
