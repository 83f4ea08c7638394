"""What the measurements share: seconds on a device, CPU seconds of whole processes, and the memory of this one."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch


def wait(device: torch.device) -> None:
    """Until all work that was given to it is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """Time of the work; its result is kept alive till the end, so that its memory is fresh."""
    wait(device)
    began = time.perf_counter()
    result = work()
    wait(device)
    elapsed = time.perf_counter() - began
    del result
    return elapsed


def cpu_seconds(words: list[str], *, check: bool = True) -> float:
    """User and system seconds of one process of Python, which may keep what it compiles."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    errors, before = None if check else subprocess.DEVNULL, os.times()
    subprocess.run([sys.executable, *words], stdout=subprocess.DEVNULL, stderr=errors, env=env, check=check)
    after = os.times()
    return after.children_user - before.children_user + after.children_system - before.children_system


def resident(field: str = "VmRSS") -> int:
    """Bytes of memory that this process holds, or held at most since `forget_peak` (VmHWM), as Linux notes them."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field))


def forget_peak() -> None:
    """Have the highest memory counted from now on."""
    Path("/proc/self/clear_refs").write_text("5")


@contextmanager
def peak_memory() -> Iterator[list[int]]:
    """By how many bytes the memory of this process grows at most, once it is left."""
    forget_peak()
    before, most = resident(), [0]
    yield most
    most[0] = resident("VmHWM") - before
