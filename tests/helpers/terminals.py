"""A terminal for what is written to stderr, without a process of its own."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable

import pytest


def on_a_terminal(use: Callable[[], object], **environment: str) -> str:
    """What a terminal of 120 columns gets of what is shown meanwhile, with its colours."""
    pty = pytest.importorskip("pty")
    reader, writer = pty.openpty()
    with os.fdopen(writer, "w") as terminal, pytest.MonkeyPatch.context() as patched:
        for name in ("NO_COLOR", "COLORTERM"):
            patched.delenv(name, raising=False)
        for name, value in {"TERM": "xterm-256color", "COLUMNS": "120", **environment}.items():
            patched.setenv(name, value)
        patched.setattr(sys, "stderr", terminal)
        shown = list[bytes]()
        thread = threading.Thread(target=_read_all, args=(reader, shown))  # a terminal that nobody reads is soon full
        thread.start()
        use()
    thread.join()
    os.close(reader)
    return b"".join(shown).decode(errors="replace")


def _read_all(descriptor: int, shown: list[bytes]) -> None:
    with contextlib.suppress(OSError):  # the end, where the other side is closed
        while some := os.read(descriptor, 1 << 16):
            shown.append(some)
