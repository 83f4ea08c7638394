"""Which machine this is, and whether one of its processes still runs."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from pathlib import Path


def machine_name() -> str:
    """This machine, and the process namespace in it: where process numbers mean the same.

    >>> from mupscale.system import machine_name
    >>> machine_name() == machine_name()
    True
    """
    space = ""
    with suppress(OSError):
        space = os.readlink("/proc/self/ns/pid")
    return f"{platform.node()} {space}".strip()


def is_process_alive(pid: int) -> bool:
    """Whether a process of this machine still runs; yes where one cannot ask without ending it (Windows).

    >>> import os
    >>> from mupscale.system import is_process_alive
    >>> is_process_alive(os.getpid())
    True
    """
    if os.name == "nt":
        return True
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[:1]
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        return True
    return state != ["Z"]  # dead, but its parent has not looked yet
