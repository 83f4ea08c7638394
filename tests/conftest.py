"""What many tests share: float64 for exactness, pictures without pixels, the same examples each time."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

# The same examples on every machine, and no limit by the clock; `pytest --hypothesis-profile=default` draws others.
settings.register_profile("same-examples", derandomize=True, deadline=None, database=None)
settings.load_profile("same-examples")


@pytest.fixture(autouse=True, scope="session")
def _no_lines_by_the_clock() -> Iterator[None]:
    """A line that tells how far a long run is would come on a busy machine alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mupscale.system.terminal.SECONDS_BETWEEN_LINES", math.inf)
        yield


@pytest.fixture
def float64() -> Iterator[None]:
    """float64 everywhere: optimizers keep their scalar state (ASGD's eta, step) in the default dtype."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def pictures_without_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures are laid out, and every part of them is asked to draw itself, but no pixel is set."""
    from matplotlib.figure import Figure

    def save(self: Figure, path: Path, format: str, **_: Any) -> None:
        if format == "svg":
            path.write_text("<svg/>")
        else:
            self.draw_without_rendering()
            path.write_bytes(b"\x89PNG")

    monkeypatch.setattr(Figure, "savefig", save)
