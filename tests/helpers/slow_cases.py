"""Cases of which a few tell enough for every change; the others run with `make test-slow`."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def with_slow(cases: Iterable[Any], fast: Collection[Any]) -> list[Any]:
    """All cases, those that are not among the fast ones marked as slow."""
    cases = list(cases)
    strangers = [case for case in fast if case not in cases]
    assert not strangers, f"there is no case {strangers[0]}"
    return [pytest.param(case, marks=() if case in fast else pytest.mark.slow) for case in cases]
