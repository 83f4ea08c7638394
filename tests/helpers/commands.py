"""Commands as a person meets them."""

from __future__ import annotations

import re

import pytest

from mupscale.cli import main

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def refused(capsys: pytest.CaptureFixture[str], words: list[str], *statuses: int) -> str:
    """The one sentence in which a command refuses: no traceback, nothing that moves a cursor, not the last resort."""
    capsys.readouterr()
    status = main(words)
    shown = capsys.readouterr()
    assert status in (statuses or (1, 2)), (words, shown)
    assert shown.err.count("\n") == 1, (words, shown.err)
    for sign in ("Traceback", "<class", "-v shows where"):
        assert sign not in shown.err, (words, shown.err)
    assert not CONTROL.search(shown.err + shown.out)
    return shown.err.strip()
