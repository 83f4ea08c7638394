"""One browser for all pages."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import browser


@pytest.fixture(scope="session")
def tab() -> Iterator[browser.Browser]:
    """A browser that is open, or no test."""
    program = browser.find()
    if program is None:
        pytest.skip("no chromium is installed")
    with browser.Browser(program) as opened:
        yield opened
