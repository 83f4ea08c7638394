"""Tests of Hugging Face checkpoints need transformers; and what those of its Trainer share."""

from importlib.util import find_spec
from types import SimpleNamespace

import pytest

collect_ignore_glob = [] if find_spec("transformers") and find_spec("accelerate") else ["test_*"]


@pytest.fixture(autouse=True, scope="session")
def _no_garbage_looked_for() -> None:
    """accelerate looks through all objects of the process at the end of every training, which takes long in a test."""
    from accelerate.utils import memory

    memory.gc = SimpleNamespace(collect=lambda: 0)
