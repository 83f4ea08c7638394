"""A bar for many runs that train as one program, or one after another."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from mupscale.system import Display, open_display


class ManyRuns:
    """For `train_many(on_point=…)`: how far so many runs of so many steps are, all at once or some after others."""

    def __init__(self, steps: int, runs: int, display: Display) -> None:
        self.steps, self.runs, self.display = steps, runs, display
        self.over, self.together, self.step = 0, 0, 0  # runs that are done, those that train now, and their step

    def __call__(self, step: int, values: Mapping[int, float]) -> None:
        """A point of the runs that train now: the lowest loss among them is shown."""
        if step <= self.step:  # others have begun
            self.over, self.together = self.over + self.together, 0
        self.step, self.together = step, max(self.together, len(values))
        finite = [value for value in values.values() if math.isfinite(value)]
        if not finite:
            return
        runs = max(self.runs, self.over + self.together)
        before = f"{self.over} of {runs} runs done, " if self.over else ""
        shown = f"loss {min(finite):.4f}"
        done = (self.over * self.steps + self.together * step) / runs
        self.display.update(done, f"{before}step {step}/{self.steps}  {shown}", shown=shown)


@contextmanager
def lowest_loss_bar(steps: int, runs: int = 1, *, visible: bool = True) -> Iterator[ManyRuns]:
    """A bar of the steps of so many runs, with the lowest loss among them and the time left, gone when they end.

    Where stderr is no terminal, a line now and then.
    """
    columns = ("wide bar", "count", "{task.fields[shown]}", "time", "left", "time left")
    display = open_display(columns, steps, visible=visible, transient=True, lines="stdout", shown="")
    try:
        yield ManyRuns(steps, runs, display)
    finally:
        display.close()
