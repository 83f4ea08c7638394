"""Whether there is memory enough: to build a model for a measurement, or to compare two of them."""

from __future__ import annotations

from mupscale import system

_SPARE = 500_000_000  # bytes that are left to everything else


def fits(needed: int) -> bool:
    """Whether so many bytes of memory can be had, with a little to spare; True where nobody can tell."""
    return not shortage(needed)


def shortage(needed: int) -> str:
    """How much memory is needed and how much there is, in words, where so many bytes cannot be had; else nothing."""
    free = system.available_memory()
    return "" if free is None or needed + _SPARE <= free else system.describe_shortage(needed, free, _SPARE)
