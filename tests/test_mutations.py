"""The wrong changes of tools/mutations.txt, run by hand: each can still be made, and what notices it is there."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def mutate(monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import mutate

    return mutate


def test_every_wrong_change_can_be_made(mutate: object) -> None:
    mutations = mutate.read_mutations()  # type: ignore[attr-defined]
    assert len(mutations) >= 60
    assert max(Counter(one.what for one in mutations).values()) == 1
    for one in mutations:
        assert one.old != one.new
        assert all((ROOT / path).exists() for path in one.tests.split()), one.what
        one.file()  # an error unless its text stands once


def test_the_table_says_what_notices_each(mutate: object) -> None:
    """As `python tools/mutate.py` printed it; a test that was renamed has to be named anew."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([^|]+) \| `([^`]+)` \| `([^`:]+)::(\w+)` \|$", text, re.M)
    mutations = mutate.read_mutations()  # type: ignore[attr-defined]
    assert [row[:2] for row in rows] == [(one.what, one.where) for one in mutations]
    for what, _, file, test in rows:
        assert f"def {test}(" in (ROOT / "tests" / file).read_text(encoding="utf-8"), what
