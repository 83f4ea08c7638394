"""One browser for all pages, and the page that most tests look at."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

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
def paper_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of the paper's comparison, transfer check and all."""
    pytest.importorskip("matplotlib")
    return write_report([write(tmp_path_factory.mktemp("runs") / "run", check=True)])
