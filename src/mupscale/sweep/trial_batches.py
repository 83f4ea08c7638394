"""Trials that one worker trains at once, and the files from which they go on after an interruption."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from mupscale.sweep.space import Cell, Trial
from mupscale.sweep.study import Study, TakenTrial
from mupscale.sweep.workers import Worker
from mupscale.system import (
    MupscaleError,
    clear_leftovers,
    is_process_alive,
    machine_name,
    make_folder,
    move,
    parse_record,
    read_json,
    remove,
    replace_text,
)


@dataclass(frozen=True)
class StoredBatch:
    """What the file of a batch holds: whose it is, its trials (number, lr, noise), their stack, and their results."""

    study: str
    worker: str
    place: str
    pid: int
    trials: list[tuple[int, float, float]]
    stack: str
    results: list[Trial] | None
    seconds: float


class TrialBatch:
    """Trials that are trained at once; with a folder, also a file that describes them and the file of their stack.

    own: the numbers of those that are still this worker's. results: once they are trained. stored: whether the
    storage has the results.
    """

    def __init__(self, study: str, me: Worker, trials: Sequence[TakenTrial], folder: Path | None) -> None:
        self.study, self.worker, self.trials = study, me.id, list(trials)
        self.path = None if folder is None else folder / f"{study}.{me.id}.batch.json"
        self.stack = None if folder is None else folder / f"{study}.{me.id}.stack.safetensors"
        self.own = {trial.number for trial in trials}
        self.results: list[Trial] | None = None
        self.seconds, self.stored = 0.0, False

    def begin(self) -> None:
        """Write which trials are about to be trained."""
        if self.path is not None:
            make_folder(self.path.parent)
        self._write()

    def finish(self, results: list[Trial]) -> None:
        """Write the results, before they go to the storage: it may be out of reach."""
        self.results = results
        with suppress(MupscaleError):  # a full disk: the storage may yet be elsewhere
            self._write()

    def remove_files(self) -> None:
        """Remove the files: the storage has the results, or the trials are free again."""
        for path in (self.path, self.stack):
            if path is not None:
                remove(path)

    def _write(self) -> None:
        if self.path is None or self.stack is None:
            return
        trials = [(trial.number, *trial.cell) for trial in self.trials]
        stored = StoredBatch(
            self.study, self.worker, machine_name(), os.getpid(), trials, self.stack.name, self.results, self.seconds
        )
        try:
            replace_text(self.path, json.dumps(asdict(stored)) + "\n")
        except OSError as error:
            raise MupscaleError(f"{self.path} cannot be written: {error.strerror or error}; free some space") from None

    @classmethod
    def read(cls, path: Path, me: Worker) -> TrialBatch | None:
        """A batch that an earlier worker left; None if the file cannot be read, or the worker is still at work."""
        try:
            stored = parse_record(StoredBatch, read_json(path), path)
        except (OSError, MupscaleError):
            return None
        trials = [TakenTrial(number, Cell(lr, noise)) for number, lr, noise in stored.trials]
        batch = cls(stored.study, me, trials, path.parent)
        batch.stack = path.parent / Path(stored.stack).name
        batch.results, batch.seconds, batch.worker = stored.results, stored.seconds, stored.worker
        same_machine = stored.place == machine_name()
        working = same_machine and is_process_alive(stored.pid) and me.is_working(batch.worker)
        return None if working else batch


def adopt_batches(folder: Path | None, study: Study, me: Worker, worker: bool) -> Iterator[TrialBatch]:
    """Take over batches that workers of this folder could not finish: those with a stack to go on from, or results.

    Trials without either are begun anew. For one worker among many that is once, as for any whose worker died; but a
    sweep that somebody runs alone, and starts again, was as likely stopped by hand: it may be so any number of times.
    """
    if folder is not None:
        clear_leftovers(folder)
    for path in sorted(folder.glob(f"{study.name}.*.batch.json")) if folder is not None else []:
        batch = TrialBatch.read(path, me)
        if batch is None or batch.study != study.name or batch.path is None or batch.stack is None:
            continue
        if batch.results is None and not batch.stack.exists():
            for number in () if worker else sorted(study.take_over(batch.trials, me.id)):
                study.make_void(number, "given back")
            remove(path)
            continue
        try:
            move(path, batch.path)  # of several workers that start at once, one succeeds
        except FileNotFoundError:
            continue
        batch.worker, batch.own = me.id, study.take_over(batch.trials, me.id)
        if batch.own:
            yield batch
        else:
            batch.remove_files()
