"""What this machine has for a process: cores, memory, and numbers that a launcher leaves in the environment."""

from __future__ import annotations

import gc
import math
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mupscale.system.errors import MupscaleError


def usable_cores() -> int:
    """The cores that this process may run on, where the system tells; all of the machine's elsewhere."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def number_in_environment(name: str, default: int) -> int:
    """A whole number that torchrun sets, such as WORLD_SIZE; the default where it is not set."""
    text = os.environ.get(name, "").strip()
    if not text:
        return default
    if not text.isdecimal() or len(text) > 9:
        raise MupscaleError(
            f"the environment variable {name} is {text[:40]!r}, but must be a whole number, as torchrun sets it: unset "
            f"it, or start with torchrun"
        )
    return int(text)


_GROUPS = (
    ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Of both versions of Linux's control groups: the folder, the files that tell a container's limit and what it has
taken, and the line of memory.stat with what it holds of files, and would give back."""
_NO_MEMORY = re.compile(r"can't allocate memory|out of memory|not enough memory|Cannot allocate memory", re.I)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error, Python's, torch's or the driver's, says that there is no memory left."""
    return isinstance(error, MemoryError) or bool(_NO_MEMORY.search(str(error)))


@contextmanager
def pausing_garbage_collection() -> Iterator[None]:
    """Leave Python's search for cycles out of a short piece of work that reads or imports much and throws little away.

    The search looks at every container again and again while their number grows: torch's modules alone are hundreds
    of thousands, a long curve millions.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def available_memory(root: Path = Path("/")) -> int | None:
    """Bytes of main memory that can be had without swapping, within the container's limit; None if unknown.

    root: where /proc and /sys are.
    """
    sizes = (_in_machine(root), _in_container(root), _in_unknown_system(root))
    return min((size for size in sizes if size is not None), default=None)


def describe_shortage(needed: int, free: int, spare: int = 0) -> str:
    """How much memory there is too little: both numbers are rounded so that the sentence is never a contradiction.

    spare: what is to be left to everything else.
    """
    more = f", beside {_gigabytes(spare, math.ceil)} for everything else" if spare else ""
    return f"{_gigabytes(needed, math.ceil)} of memory{more}, and {_gigabytes(free, math.floor)} are free"


def _gigabytes(size: int, rounded: Callable[[float], int]) -> str:
    return f"{rounded(size / 1e8) / 10:,.1f} GB"


def _in_machine(root: Path) -> int | None:
    with suppress(OSError):
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def _in_container(root: Path) -> int | None:
    """What the group of processes may still take; the cache of files counts as free, since it is given back."""
    for place, limit_file, used_file, held_in_files in _GROUPS:
        folder = root / place
        with suppress(OSError, ValueError):  # ValueError: the limit may be the word max
            limit, used = (int((folder / name).read_text()) for name in (limit_file, used_file))
            with suppress(OSError, ValueError):
                lines = map(str.split, (folder / "memory.stat").read_text().splitlines())
                used -= int(next((line[1] for line in lines if line[:1] == [held_in_files]), 0))
            return max(0, limit - used)
    return None


def _in_unknown_system(root: Path) -> int | None:
    """Where there is no /proc: half of all memory."""
    if (root / "proc/meminfo").exists() or "SC_PHYS_PAGES" not in getattr(os, "sysconf_names", {}):
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
