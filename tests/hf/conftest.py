"""Tests of Hugging Face checkpoints need transformers; and what those of its Trainer share."""

from collections.abc import Iterator
from importlib.util import find_spec
from types import SimpleNamespace

import pytest

collect_ignore_glob = [] if find_spec("transformers") and find_spec("accelerate") else ["test_*"]


@pytest.fixture(autouse=True, scope="session")
def _no_garbage_looked_for() -> None:
    """accelerate looks through all objects of the process at the end of every training, which takes long in a test."""
    from accelerate.utils import memory

    memory.gc = SimpleNamespace(collect=lambda: 0)


@pytest.fixture
def double(float64: None) -> Iterator[None]:
    """Models in float64 that stay so on the way."""
    from mupscale.planning import KeepDouble

    with KeepDouble():
        yield
