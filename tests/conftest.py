"""What many tests share: float64, in which exactness is tested, and coarse pictures."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch


@pytest.fixture
def float64() -> Iterator[None]:
    """float64 everywhere: optimizers keep their scalar state (ASGD's eta, step) in the default dtype."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def coarse_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures are laid out and drawn once, as a coarse PNG; their SVG, which is not looked at, is empty."""
    from matplotlib.figure import Figure

    whole = Figure.savefig

    def save(self: Figure, path: Path, **more: Any) -> None:
        if path.suffix == ".svg":
            path.write_text("<svg/>")
        else:
            whole(self, path, **{**more, "dpi": 50})

    monkeypatch.setattr(Figure, "savefig", save)
