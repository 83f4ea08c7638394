"""Ctrl-C and terminations, noted when they come and obeyed between two steps, or at the end of what was begun."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from mupscale.system import Interrupted


class StopRequest:
    """Set by Ctrl-C and by a termination; a second Ctrl-C stops at once. obeyed: set by whoever ends for it."""

    def __init__(self) -> None:
        self.asked = self.obeyed = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.asked = True

    def check(self) -> None:
        """Raise Interrupted if somebody has asked to stop, and nobody has obeyed; for moments when all is saved."""
        if self.asked and not self.obeyed:
            raise Interrupted("interrupted after the last step of a run")


@contextmanager
def catch_stop_signals() -> Iterator[StopRequest]:
    """Note Ctrl-C and terminations instead of ending the program; the caller looks between two steps.

    One that nobody has obeyed is raised when the block ends, so that none is forgotten: after an error, too, which
    whoever calls might take for a reason to try something else.

    >>> with catch_stop_signals() as stop:
    ...     signal.raise_signal(signal.SIGINT)
    ...     stop.obeyed = stop.asked  # by ending here
    >>> with catch_stop_signals():
    ...     signal.raise_signal(signal.SIGTERM)
    Traceback (most recent call last):
    mupscale.system.errors.Interrupted: interrupted after the last step of a run
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():  # signals reach the main thread alone
        yield request
        return
    before = {number: signal.signal(number, request) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        try:
            yield request
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
    except Exception as error:
        if not request.asked or isinstance(error, Interrupted):
            raise
        raise Interrupted(f"interrupted; meanwhile {type(error).__name__}: {error}") from error
    request.check()
