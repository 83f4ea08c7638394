"""Every test and every example in a docstring starts from one seed and one thread; examples run in an empty folder."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

os.environ["XDG_CONFIG_HOME"] = tempfile.mkdtemp(prefix="mupscale-tests-")  # no test writes into a user's own
atexit.register(shutil.rmtree, os.environ["XDG_CONFIG_HOME"], ignore_errors=True)
os.environ["PYTHONPATH"] = str(Path(__file__).parent / "src")  # of the processes that tests start
os.environ.pop("COLUMNS", None)  # pytest-xdist says 80 to its workers, as if output went to a terminal


def pytest_collection() -> None:
    """While tests are collected there is no garbage to look for: what is imported stays."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Nor is it looked through again and again while they run."""
    gc.freeze()
    gc.set_threshold(100_000, 20, 100)  # little of what tests make is garbage in cycles
    gc.enable()


@pytest.fixture(autouse=True)
def _same_start() -> Iterator[None]:
    if torch.accelerator.is_available():
        torch.manual_seed(0)
    else:  # in no time
        torch.default_generator.manual_seed(0)
    torch.set_num_threads(1)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture(autouse=True)
def _examples_in_an_empty_folder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if isinstance(request.node, pytest.DoctestItem):
        folder: Path = request.getfixturevalue("tmp_path")
        monkeypatch.chdir(folder)
