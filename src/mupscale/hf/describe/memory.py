"""How much memory is free: whether a model may be built for a measurement, or two of them compared."""

from __future__ import annotations

from mupscale.system import available_memory as available_memory

_SPARE = 1 << 29  # bytes that are left to everything else


def fits(needed: int) -> bool:
    """Whether so many bytes of memory can be had, with a little to spare; True where nobody can tell."""
    free = available_memory()
    return free is None or needed + _SPARE <= free
