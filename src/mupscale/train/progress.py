"""What a person sees of a run: a bar with loss, throughput and time left on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any, Protocol

_LINES_APART = 10.0  # seconds between plain lines


class Progress(Protocol):
    """Told of every record of metrics, and of what else happens."""

    def update(self, record: dict[str, Any], speed: float) -> None:
        """A record of metrics, and units (samples, tokens) a second since the last one."""

    def note(self, text: str) -> None:
        """Something that happens once."""

    def close(self) -> None:
        """The end."""


def make_progress(steps: int, unit: str, *, visible: bool, passing: bool = False) -> Progress:
    """The bar where stderr is a terminal and rich is installed; nothing at all in processes that do not print.

    passing: leave nothing behind, since somebody else tells how it ended.
    """
    if not visible:
        return Silence()
    if sys.stderr.isatty():
        try:
            return Bar(steps, unit, passing)
        except ImportError:
            pass
    return Lines(steps, unit, passing)


class Silence:
    """No output."""

    def update(self, record: dict[str, Any], speed: float) -> None:
        """Nothing."""

    def note(self, text: str) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class Lines:
    """A line every few seconds, and one for whatever happens once."""

    def __init__(self, steps: int, unit: str, passing: bool = False) -> None:
        self.steps, self.unit, self.passing = steps, unit, passing
        self.last = time.monotonic() if passing else 0.0

    def update(self, record: dict[str, Any], speed: float) -> None:
        """A line, if the last one is some time ago; evaluations always."""
        now = time.monotonic()
        last = record["step"] >= self.steps and not self.passing
        if record["kind"] == "train" and now - self.last < _LINES_APART and not last:
            return
        self.last = now if record["kind"] == "train" else self.last
        print(f"step {record['step']}/{self.steps}  {describe(record)}{_speed(speed, self.unit)}", flush=True)

    def note(self, text: str) -> None:
        """A line."""
        print(text, flush=True)

    def close(self) -> None:
        """Nothing."""


class Bar:
    """A rich progress bar."""

    def __init__(self, steps: int, unit: str, passing: bool = False) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        self.unit = unit
        self.bar = RichProgress(
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[shown]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(elapsed_when_finished=False),
            console=Console(stderr=True),
            transient=passing,
        )
        self.task = self.bar.add_task("", total=steps, shown="")
        self.bar.start()

    def update(self, record: dict[str, Any], speed: float) -> None:
        """The bar's new state; evaluations stay above it as lines."""
        if record["kind"] == "train":
            self.bar.update(self.task, completed=record["step"], shown=f"{describe(record)}{_speed(speed, self.unit)}")
        else:
            self.bar.console.print(f"step {record['step']}  {describe(record)}", highlight=False)

    def note(self, text: str) -> None:
        """A line above the bar."""
        self.bar.console.print(text, highlight=False, markup=False)

    def close(self) -> None:
        """Leave the bar as it stands."""
        self.bar.stop()


def describe(record: dict[str, Any]) -> str:
    """A record in few words."""
    if record["kind"] == "eval":
        accuracy = record.get("accuracy")
        return f"held-out loss {record['loss']:.4f}" + ("" if accuracy is None else f", accuracy {accuracy:.1%}")
    return f"loss {record['loss']:.4f}"


def _speed(speed: float, unit: str) -> str:
    if speed <= 0:
        return ""
    scale, prefix = next(((s, p) for s, p in ((1e9, "G"), (1e6, "M"), (1e3, "k")) if speed >= s), (1.0, ""))
    return "  " + " ".join(filter(None, (f"{speed / scale:.3g}", prefix, f"{unit}/s")))
