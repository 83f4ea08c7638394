"""How many cores there are to use."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """The cores that this process may run on, where the system tells; all of the machine's elsewhere.

    >>> from mupscale.system import usable_cores
    >>> usable_cores() >= 1
    True
    """
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
