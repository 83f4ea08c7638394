"""One browser for all pages, and the page that most tests look at."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import browser
from mupscale.report import write_report
from summaries import write


@pytest.fixture(scope="session")
def tab() -> Iterator[browser.Browser]:
    """A browser that is open, or no test."""
    program = browser.find()
    if program is None:
        pytest.skip("no chromium is installed")
    with browser.Browser(program) as opened:
        yield opened


@pytest.fixture(scope="session")
def svg_alone() -> Callable[..., None]:
    """Takes the place of `savefig`: a picture as the page has it; where a PNG would lie beside it, it is laid out."""
    save_figure = pytest.importorskip("matplotlib.figure").Figure.savefig

    def save(self: Any, path: Path, **more: Any) -> None:
        if more.get("format") == "svg":  # under a temporary name
            save_figure(self, path, **more)
        else:
            self.draw_without_rendering()
            Path(path).write_bytes(b"\x89PNG")

    return save


@pytest.fixture(scope="session")
def paper_page(tmp_path_factory: pytest.TempPathFactory, svg_alone: Callable[..., None]) -> Path:
    """The report of the paper's comparison, transfer check and all."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("matplotlib.figure.Figure.savefig", svg_alone)
        return write_report([write(tmp_path_factory.mktemp("runs") / "run", check=True)])
