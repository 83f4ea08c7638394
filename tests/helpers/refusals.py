"""What the library refuses, in one line of a test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import mupscale as mu


def refuses(words: str, call: Callable[..., object], *arguments: Any, **named: Any) -> str:
    """The call ends in an error of the library's own that says this (a regular expression); all that it says."""
    with pytest.raises(mu.MupscaleError, match=words) as refused:
        call(*arguments, **named)
    return str(refused.value)
