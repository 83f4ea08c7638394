"""Processes for tests: torch and all else that takes long to load is loaded once, in one that all others fork from."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

DEADLINE = 600.0  # seconds after which a process is taken to hang; one that works may wait long for a busy machine

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(  # what is not installed is left out
    [
        "mupscale.study",
        "mupscale.cli",
        "mupscale.models",
        "torch._dynamo",
        "torch.distributed.fsdp",
        "torch.testing",
        "optuna.storages._rdb.storage",
        "optuna.storages._rdb.models",
        "sqlalchemy.orm",
        "sqlalchemy.dialects.sqlite",
        "alembic.command",
        "pytest",
    ]
)


def run_in_processes(function: Callable[..., None], arguments: tuple[Any, ...], count: int) -> None:
    """As torch.multiprocessing.spawn: function(number, *arguments) in several processes, until all have ended."""
    from torch.multiprocessing.spawn import start_processes

    start_processes(function, arguments, count, start_method="forkserver")


class Child:
    """A process whose output goes to a file."""

    def __init__(self, output: Path, target: Callable[..., None], *arguments: object) -> None:
        self.output = output
        self.process = PROCESSES.Process(target=_speak, args=(str(output), target, *arguments))
        self.process.start()

    def wait(self) -> int:
        """Its exit status; negative if a signal ended it."""
        self.process.join(DEADLINE)
        if self.process.is_alive():
            self.process.kill()
            raise AssertionError(f"it does not end: {self.output.read_text()}")
        assert self.process.exitcode is not None
        return self.process.exitcode

    def words(self) -> str:
        """Its output, when it has ended."""
        self.wait()
        return self.output.read_text()


class Script(Child):
    """A script in a process of its own, which need not load torch first."""

    def __init__(self, output: Path, script: str, *arguments: object) -> None:
        super().__init__(output, _run, script, [str(one) for one in arguments])


def _speak(output: str, target: Callable[..., None], *arguments: object) -> None:
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOCTTY, 0o600)
    for stream in (1, 2):
        os.dup2(file, stream)
    torch.set_num_threads(1)
    target(*arguments)


def _run(script: str, arguments: list[str]) -> None:
    sys.argv = ["-c", *arguments]
    exec(compile(script, "<script>", "exec"), {"__name__": "__main__"})


def give_up_rights() -> None:
    """Give up what root may do beyond other users, where the system is Linux: then modes of files hold for root, too.

    The user stays the same, so that what root alone may read, perhaps the interpreter itself, can still be read.
    """
    if os.geteuid() != 0 or not sys.platform.startswith("linux"):
        return
    version, this_process, none = 0x20080522, 0, [0] * 6  # see capset(2): effective, permitted, inheritable, twice
    ctypes.CDLL(None).capset((ctypes.c_uint32 * 2)(version, this_process), (ctypes.c_uint32 * 6)(*none))
