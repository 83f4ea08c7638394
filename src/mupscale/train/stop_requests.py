"""Ctrl-C and terminations, noted when they come and obeyed between two steps."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopRequest:
    """Set by Ctrl-C and by a termination; a second Ctrl-C stops at once."""

    def __init__(self) -> None:
        self.asked = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.asked = True


@contextmanager
def catch_stop_signals() -> Iterator[StopRequest]:
    """Note Ctrl-C and terminations instead of ending the program; the caller looks between two steps.

    >>> with catch_stop_signals() as stop:
    ...     signal.raise_signal(signal.SIGINT)
    ...     stop.asked
    True
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():  # signals reach the main thread alone
        yield request
        return
    before = {number: signal.signal(number, request) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
