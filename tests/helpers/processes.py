"""Processes for tests: torch and all else that takes long to load is loaded once, in one that all others fork from."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(  # what is not installed is left out
    [
        "mupscale.method",
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
        "jsonargparse",
        "pytest",
    ]
)


def run_in_processes(function: Callable[..., None], arguments: tuple[Any, ...], count: int) -> None:
    """As torch.multiprocessing.spawn: function(number, *arguments) in several processes, until all have ended."""
    from torch.multiprocessing.spawn import start_processes

    start_processes(function, arguments, count, start_method="forkserver")
