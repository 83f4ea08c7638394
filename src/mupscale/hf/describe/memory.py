"""Whether there is memory enough: to build a model for a measurement, or to compare two of them."""

from __future__ import annotations

from mupscale import system

_SPARE = 1 << 29  # bytes that are left to everything else


def fits(needed: int) -> bool:
    """Whether so many bytes of memory can be had, with a little to spare; True where nobody can tell."""
    free = system.available_memory()
    return free is None or needed + _SPARE <= free
