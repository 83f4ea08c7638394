"""Packages that not every user needs, and how to install one that is missing."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from mupscale.system.errors import MupscaleError


def require(module: str, *, extra: str, reason: str, remedy: str = "") -> Any:
    """Import an optional package; where it is missing, say for what it is needed and which extra brings it.

    reason: the sentence before the pip command. remedy: what goes on after it, if there is another way.

    >>> from mupscale.system import require
    >>> require("json", extra="sweep", reason="sweeps need json").dumps([1])
    '[1]'
    >>> require("absent_package", extra="sweep", reason="sweeps need absent_package")
    Traceback (most recent call last):
    mupscale.system.errors.MupscaleError: sweeps need absent_package: pip install 'mupscale[sweep]'
    """
    try:
        return import_module(module)
    except ImportError:
        raise MupscaleError(f"{reason}: pip install 'mupscale[{extra}]'{remedy}") from None
