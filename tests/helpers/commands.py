"""Commands as a person meets them."""

from __future__ import annotations

import re
import shlex

import pytest

from mupscale.cli import main

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def told(capsys: pytest.CaptureFixture[str], words: str | list[str], status: int = 0) -> str:
    """What a command that ends with this status writes to stdout."""
    capsys.readouterr()
    assert main(shlex.split(words) if isinstance(words, str) else words) == status
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], words: str | list[str], *statuses: int) -> str:
    """The one sentence in which a command refuses: no traceback, nothing that moves a cursor, not the last resort."""
    capsys.readouterr()
    status = main(shlex.split(words) if isinstance(words, str) else words)
    shown = capsys.readouterr()
    assert status in (statuses or (1, 2)), (words, shown)
    assert shown.err.count("\n") == 1, (words, shown.err)
    for sign in ("Traceback", "<class", "-v shows where"):
        assert sign not in shown.err, (words, shown.err)
    assert not CONTROL.search(shown.err + shown.out)
    return shown.err.strip()
