"""Between the engine and the study while a batch trains: losses go to the storage, trials to prune to the engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from statistics import fmean

from mupscale.engine import PointCallback
from mupscale.sweep.study import Study, TakenTrial
from mupscale.system import MupscaleError

Note = Callable[[str], None]
_REPORT_EVERY = 5.0  # seconds between two reports of where trials stand, beside those at rungs


class BatchCallbacks:
    """The callbacks of `train_many` for a batch of trials.

    trial_of_run: the index of the trial that each run is a seed of. on_point: called at every point, too.
    """

    def __init__(
        self,
        study: Study,
        trials: Sequence[TakenTrial],
        trial_of_run: Sequence[int],
        note: Note,
        on_point: PointCallback | None,
    ) -> None:
        self.study, self.trials, self.trial_of_run = study, trials, trial_of_run
        self.note, self.on_point = note, on_point
        self.losses: dict[int, dict[int, float]] = {}  # by rung and run
        self.pruned: set[int] = set()  # indices of trials
        self.reported_at = time.monotonic()

    def report_point(self, step: int, losses: Mapping[int, float]) -> None:
        """Store where trials stand, now and then; a storage out of reach for a while does not stop the training."""
        if self.on_point is not None:
            self.on_point(step, losses)
        if time.monotonic() - self.reported_at < _REPORT_EVERY:
            return
        with suppress(MupscaleError):
            self._report(step, losses)
        self.reported_at = time.monotonic()

    def prune(self, step: int, losses: Mapping[int, float]) -> Collection[int]:
        """The runs to stop at a rung; none where the storage is out of reach."""
        at_rung = self.losses.setdefault(step, {})
        at_rung.update(losses)
        running = {self.trial_of_run[run] for run in losses} - self.pruned
        try:
            self._report(step, {run: loss for run, loss in at_rung.items() if self.trial_of_run[run] in running})
            numbers = {self.trials[index].number: index for index in running}
            self.pruned |= {numbers[number] for number in self.study.trials_to_prune(numbers, step)}
        except MupscaleError as error:
            self.note(f"nothing is stopped at step {step}: {error}")
        return [run for run in losses if self.trial_of_run[run] in self.pruned]

    def _report(self, step: int, losses: Mapping[int, float]) -> None:
        by_trial: dict[int, list[float]] = {}
        for run, loss in losses.items():
            by_trial.setdefault(self.trial_of_run[run], []).append(loss)
        self.study.report({self.trials[index].number: fmean(some) for index, some in by_trial.items()}, step)
