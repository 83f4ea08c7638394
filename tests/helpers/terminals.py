"""A terminal for what is written to stderr, without a process of its own."""

from __future__ import annotations

import contextlib
import os
import sys
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
        use()
    shown = b""
    with contextlib.suppress(OSError):  # the end, where the other side is closed
        while some := os.read(reader, 1 << 16):
            shown += some
    os.close(reader)
    return shown.decode(errors="replace")
