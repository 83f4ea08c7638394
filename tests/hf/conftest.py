"""What tests of Hugging Face's Trainer share."""

from types import SimpleNamespace

import pytest


@pytest.fixture(autouse=True, scope="session")
def _no_garbage_looked_for() -> None:
    """accelerate looks through all objects of the process at the end of every training, which takes long in a test."""
    try:
        from accelerate.utils import memory
    except ImportError:
        return
    memory.gc = SimpleNamespace(collect=lambda: 0)
