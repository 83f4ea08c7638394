"""Train many runs: as one program where that works, one after another where it does not; the numbers are the same."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from mupscale.data import Data
from mupscale.engine.batched import train_together
from mupscale.engine.jobs import Decide, Tell, Work
from mupscale.engine.outcomes import Outcome, check_folders, finished
from mupscale.engine.serial import train_one_by_one
from mupscale.engine.stackable import NotStackable
from mupscale.system import MupscaleError
from mupscale.train import Recipe, catch_stop_signals

Engine = Literal["auto", "vectorised", "serial"]


def train_many(
    recipes: Sequence[Recipe],
    *,
    engine: Engine = "auto",
    points: int = 40,
    rungs: Sequence[int] = (),
    decide: Decide | None = None,
    evaluate: bool = False,
    save: Path | None = None,
    tell: Tell | None = None,
    resume: bool = False,
    note: Callable[[str], None] | None = None,
    memory: int | None = None,
    data: Data | None = None,
) -> list[Outcome]:
    """Train all of these; outcomes come in their order.

    A recipe with a folder (out) becomes a run like any other, with its metrics and a checkpoint at its end; `resume`
    skips those that are finished and trains the others, else a folder that holds a run is refused.
    engine: auto falls back to one at a time, and says why; vectorised does not. points: of a curve, where there is no
    folder. rungs, decide: where runs may be stopped early, and which. save: a file that keeps what was interrupted, or
    killed, and from which the same call goes on. memory: bytes that one program may take; what is free if not given.
    data: the recipes' own, where it is loaded already.
    """
    if points < 1:
        raise MupscaleError(f"points is {points}, but a curve has at least one")
    if data is not None and any(recipe.data != recipes[0].data for recipe in recipes):
        raise MupscaleError("the runs differ in data, so one that is loaded already cannot be given for all of them")
    work = Work(list(recipes), points, rungs, decide, evaluate, save, tell, note or _on_stderr, memory, data)
    work.resume = work.take_up() or resume
    if work.resume:
        for number in work.left:
            if (outcome := finished(recipes[number])) is not None:
                work.outcomes[number] = outcome
    check_folders([recipes[number] for number in work.left], work.resume)
    with catch_stop_signals() as stop:
        if engine != "serial" and work.left:
            try:
                train_together(work, stop)
            except NotStackable as error:
                if engine == "vectorised":
                    raise
                work.note(f"one run at a time: {error}")
        train_one_by_one(work, stop)
    if save is not None:
        save.unlink(missing_ok=True)
    return work.in_order()


def _on_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
