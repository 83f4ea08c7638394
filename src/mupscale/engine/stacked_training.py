"""Training in stacks: as many runs at once as fit into memory, each stack from its first step, or from where it was
killed, to its last, with all that `train` would record of its runs.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mupscale import checkpoint
from mupscale.data import Data
from mupscale.engine.stack import RunStack
from mupscale.engine.stackable import NotStackable, check_stackable, rate_after
from mupscale.engine.training_job import Outcome, Status, TrainingJob, curve_from_json
from mupscale.system import Interrupted, MupscaleError, available_memory, number_in_environment
from mupscale.train import (
    MOST_IN_A_ROW,
    Recipe,
    RunFolder,
    RunState,
    StopRequest,
    data_fingerprint,
    exact_mean,
    join_processes,
    matmul_precision,
    save_snapshot,
    stored_values,
)

_SHARE = 0.7  # of free memory, that a stack may take
_ASSUMED_FREE = 4 << 30  # bytes, where the system does not tell


def runs_at_once(recipe: Recipe, device: torch.device, data: Data, memory: int | None = None) -> int:
    """How many runs fit into memory (bytes; what is free if not given) at once; one at least.

    A run takes what a step keeps for its backward pass, its parameters and optimizer state with room to work on them,
    and its batch.
    """
    stack = RunStack([replace(recipe, out=None)], device, data)
    x, y = data.batch(recipe.seeds.data, 0, recipe.batch)
    replicas = stack.replicas
    activations = stack.vmapped.bytes_for_backward(*replicas.row(0), x, y)
    parameters = replicas.flat.nbytes
    each = 2 * activations + (6 + len(replicas.state)) * parameters + 2 * (x.nbytes + y.nbytes)
    return max(1, int(_SHARE * (free_memory(device) if memory is None else memory) / each))


def even_share(count: int, most: int) -> int:
    """The size of the largest part, if `count` is cut into equal parts of at most `most`."""
    return math.ceil(count / math.ceil(count / most))


def free_memory(device: torch.device) -> int:
    """Bytes that are free: on the GPU, or in the machine or container that this process runs in."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    size = available_memory()
    return _ASSUMED_FREE if size is None else size


_LOOK_EVERY = 100  # steps after which losses are fetched from the device at the latest
_MINUTES = 2.0  # between two saves of a stack, if the recipe says nothing


class StackRun:
    """Trains a stack: records its curves and metrics, drops runs that are over, and saves it from time to time."""

    def __init__(self, job: TrainingJob, stack: RunStack, numbers: list[int]) -> None:
        self.job, self.stack, self.numbers, self.recipe = job, stack, numbers, stack.shared
        self.curves: dict[int, list[tuple[int, float]]] = {number: [] for number in numbers}
        self.losses = self.norms = torch.empty(
            0, len(numbers), dtype=torch.float64
        )  # steps since the last point × runs
        self.skipped: dict[int, int] = {}  # steps that were left out one after another, by number
        self.folders = [None if recipe.out is None else RunFolder(recipe.out) for recipe in stack.recipes]
        self.seconds, self.started_at = 0.0, time.monotonic()
        self.saved_at = time.monotonic()

    def train(self, stop: StopRequest) -> None:
        for recipe, folder in zip(self.stack.recipes, self.folders, strict=True):
            if folder is not None:
                self._write(partial(folder.begin, resume=True), folder.path)
                self._write(partial(folder.go_on, recipe, self.stack.step), folder.path)
        try:
            while self.numbers and self.stack.step < self.recipe.steps:
                self._advance(stop)
                if self.numbers and self.stack.step < self.recipe.steps:
                    minutes = self.recipe.checkpoints.minutes
                    due = time.monotonic() - self.saved_at >= 60 * (_MINUTES if minutes is None else minutes)
                    if stop.asked or due:
                        self.save()
                    if stop.asked:
                        kept = "" if self.job.save_path is None else ", and kept"
                        raise Interrupted(f"interrupted after step {self.stack.step} of {self.recipe.steps}{kept}")
            if self.numbers:
                self._finish()
        finally:
            for folder in self.folders:
                if folder is not None:
                    folder.release()

    def _advance(self, stop: StopRequest) -> None:
        """Train to the next step at which something is due, or until somebody asks to stop."""
        before, steps, spacing = self.stack.step, self.recipe.steps, self.job.point_spacing(self.recipe)
        for row, recipe in enumerate(self.stack.recipes):  # another rate: for `train` a growth to the same width
            if (growth := recipe.growth_at(before)) is not None:
                self._record(row, "grow", **growth.record(rate_after(recipe, before)))
        every = self.recipe.evaluation.every if self.recipe.out is not None else 0
        point, evaluation = _next(before, spacing, steps), _next(before, every, steps)
        rate_changes = [growth.at for recipe in self.stack.recipes for growth in recipe.grow if growth.at > before]
        due = min([point, evaluation, _next(before, _LOOK_EVERY, steps), *rate_changes])
        losses = self.stack.advance(due - before, lambda: stop.asked).double().cpu()
        if self.recipe.on_nonfinite == "skip":  # the steps that each run has left out one after another
            for row, number in enumerate(self.numbers):
                for step, finite in enumerate(losses[:, row].isfinite().tolist(), self.stack.step - len(losses) + 1):
                    self.skipped[number] = 0 if finite else self.skipped.get(number, 0) + 1
                    if not finite:
                        self._record(row, "skip", **self._where(step))
        self.losses = torch.cat([self.losses, losses])
        if self.stack.norms is not None:
            self.norms = torch.cat([self.norms, self.stack.norms.double().cpu()])
        if self.stack.step < due:
            return
        self._drop_diverged()
        if due == point and self.numbers:
            self._record_point()
        if due == evaluation < steps and self.numbers:
            self._evaluate()

    def _drop_diverged(self) -> None:
        """End the runs whose loss is not finite; where steps may be left out, those that left out too many."""
        finite = self.losses.isfinite()
        ended = (~finite.all(0)).nonzero()[:, 0].tolist()
        if self.recipe.on_nonfinite == "skip":
            ended = [row for row in ended if self.skipped.get(self.numbers[row], 0) >= MOST_IN_A_ROW]
        first = self.stack.step - len(self.losses) + 1
        for row in ended:
            self._end_run(row, "diverged", at=first + int(finite[:, row].long().argmin()))
        self._drop_rows(ended)

    def _record_point(self) -> None:
        """Add a point to every curve, and end the runs that are pruned there."""
        step, losses, norms = self.stack.step, _means(self.losses), _means(self.norms)
        self.losses, self.norms = self.losses[:0], self.norms[:0]
        values = dict(zip(self.numbers, losses, strict=True))
        for row, (number, loss) in enumerate(values.items()):
            self.curves[number].append((step, loss))
            more = {"grad_norm": norms[row]} if norms else {}
            self._record(row, "train", loss=loss, lr=self.stack.rate(row), width=self.recipe.width, **more)
        self.job.report_point(step, values)
        ended = self.job.runs_to_prune(self.recipe, step, values)
        rows = [row for row, number in enumerate(self.numbers) if number in ended]
        for row in rows:
            self._end_run(row, "pruned")
        self._drop_rows(rows)

    def _evaluate(self) -> list[dict[str, float]]:
        """Record held-out scores, where they are wanted."""
        ended = [row for row, finite in enumerate(self.stack.finite_runs()) if not finite]
        for row in ended:  # with such weights the next loss would not be finite, either
            self._end_run(row, "diverged", at=self.stack.step + 1)
        self._drop_rows(ended)
        if not self.numbers or not self.job.needs_scores(self.recipe):
            return [{} for _ in self.numbers]
        all_scores = self.stack.evaluate()
        for row, scores in enumerate(all_scores):
            self._record(row, "eval", **scores)
        return all_scores

    def _finish(self) -> None:
        for row, scores in enumerate(self._evaluate()):
            self._save_checkpoint(row)
            self._end_run(row, "finished", scores)

    def _end_run(self, row: int, status: Status, scores: dict[str, float] | None = None, **more: int) -> None:
        number, step = self.numbers[row], more.get("at", self.stack.step)
        flops = self._flops(min(step, self.stack.step))
        curve = self.curves[number]
        self.job.outcomes[number] = Outcome(self.job.recipes[number], status, step, curve, scores or {}, flops)
        self._record(row, "end", status=status, **more)
        if (folder := self.folders[row]) is not None:
            folder.release()

    def _drop_rows(self, ended: Sequence[int]) -> None:
        if not ended:
            return
        rows = [row for row in range(len(self.numbers)) if row not in set(ended)]
        self.numbers = [self.numbers[row] for row in rows]
        self.folders = [self.folders[row] for row in rows]
        self.losses, self.norms = (numbers[:, rows] for numbers in (self.losses, self.norms))
        if rows:
            self.stack.keep_runs(rows)

    # ------------------------------------------------------------------------------------------- what it writes

    def _record(self, row: int, kind: str, **values: Any) -> None:
        """Write a record of metrics, as `train` does."""
        step = self.stack.step
        spent = {"flops": self._flops(step), "seconds": round(self._elapsed(), 3)}
        if (folder := self.folders[row]) is not None:
            record = {"kind": kind, **self._where(step), **spent, **values}
            self._write(partial(folder.write, record), folder.metrics)

    def _write(self, action: Callable[[], object], place: Path) -> None:
        self.stack.processes.by_main(action, f"{place} cannot be written")

    def _where(self, step: int) -> dict[str, int]:
        data = self.stack.data
        return {"step": step, data.unit: step * self.recipe.batch * data.per_example}

    def _flops(self, step: int) -> float | None:
        return None if self.stack.flops_per_step is None else self.stack.flops_per_step * step

    def _elapsed(self) -> float:
        return self.seconds + time.monotonic() - self.started_at

    @cached_property
    def fingerprint(self) -> str:
        """Of the data, for the runs' checkpoints."""
        return data_fingerprint(self.stack.data)

    def _save_checkpoint(self, row: int) -> None:
        """Write the checkpoint at a run's end, from which `train` can go on."""
        folder, recipe, step = self.folders[row], self.stack.recipes[row], self.stack.step
        if folder is None:
            return
        model, optimizer = self.stack.export(row)
        state = RunState(
            step=step,
            width=recipe.width,
            lr=rate_after(recipe, step - 1),
            flops=self._flops(step) or 0.0,
            seconds=self._elapsed(),
            losses=[],
            norms=[],
            recipe=stored_values(recipe, folder.path),
            data=self.fingerprint,
            threads=torch.get_num_threads(),
        )
        folder.sync()
        save_snapshot(folder.checkpoint(step), model, optimizer, self.stack.plan, self.stack.processes, state)
        folder.forget(recipe.checkpoints.keep)

    def save(self) -> None:
        """Write the stack and its records so far to the file of the job, if there is one."""
        self.saved_at = time.monotonic()
        if self.job.save_path is not None:
            curves = {str(number): self.curves[number] for number in self.numbers}
            where = {"numbers": self.numbers, "curves": curves, "seconds": self._elapsed()}
            since = {"losses": self.losses, "norms": self.norms}
            self.stack.save(self.job.save_path, {**self.job.header(), **where, **since})

    def restore(self, saved: checkpoint.Checkpoint) -> None:
        """Go on where this stack was saved, with those of its runs that have not ended since."""
        header = saved.extra["stack"]
        self.stack.restore(saved)
        self.curves = {number: curve_from_json(header["curves"][str(number)]) for number in self.numbers}
        self.losses, self.norms, self.seconds = header["losses"], header["norms"], float(header["seconds"])
        self._drop_rows([row for row, number in enumerate(self.numbers) if number in self.job.outcomes])
        where = f"step {self.stack.step} of {self.recipe.steps}"
        self.job.note(f"going on after {where} with {len(self.numbers)} run{'' if len(self.numbers) == 1 else 's'}")


def _next(step: int, every: int, last: int) -> int:
    """The next step that is a multiple, or the last."""
    return min((step // every + 1) * every, last) if every else last


def _means(numbers: Tensor) -> list[float]:
    """The mean of every run's numbers, as `train` computes it: without steps that were left out."""
    columns = [[x for x in column if math.isfinite(x)] for column in numbers.T.tolist()] if len(numbers) else []
    return [exact_mean(column) for column in columns]


def train_in_stacks(job: TrainingJob, stop: StopRequest) -> None:
    """Train all remaining runs in stacks; raises NotStackable before the first step if they cannot be stacked."""
    first = job.recipes[job.remaining[0]]
    if number_in_environment("WORLD_SIZE", 1) > 1:
        raise NotStackable("several processes (torchrun) train one run at a time")
    check_stackable([job.recipes[number] for number in job.remaining])
    with matmul_precision(first.precision), join_processes(first.device, first.parallel) as processes:
        loaded = first.make_data() if job.data is None else job.data
        data = loaded.to(processes.device, first.dtype())
        largest: int | None = None
        while job.remaining:
            if job.saved is not None:
                chunk = [int(number) for number in job.saved.extra["stack"]["numbers"]]
            else:
                largest = largest or _largest_stack(job, processes.device, data)
                chunk = job.remaining[: even_share(len(job.remaining), largest)]
            try:
                _start_stack(job, chunk, processes.device, data).train(stop)
            except torch.OutOfMemoryError:
                largest = len(chunk) // 2
                if not largest:
                    raise _too_large() from None
                job.note(f"{len(chunk)} runs at once do not fit into memory: {largest} at a time")
            if processes.device.type == "cuda":
                gc.collect()  # a compiled step and its stack hold each other
                torch.cuda.empty_cache()
            job.save_outcomes()
            stop.check()


def _start_stack(job: TrainingJob, chunk: Sequence[int], device: torch.device, data: Data) -> StackRun:
    """A stack of these runs, at their first step or where they were saved."""
    saved, job.saved = job.saved, None
    run = StackRun(job, RunStack([job.recipes[number] for number in chunk], device, data), list(chunk))
    if saved is not None:
        try:
            run.restore(saved)
        except MupscaleError as error:
            job.note(f"starting over: {error}")
    return run


def _largest_stack(job: TrainingJob, device: torch.device, data: Data) -> int:
    """How many of the remaining runs fit into memory at once; one that is left alone need not be measured."""
    if len(job.remaining) == 1:
        return 1
    try:
        largest = runs_at_once(job.recipes[job.remaining[0]], device, data, job.memory)
    except torch.OutOfMemoryError:
        raise _too_large() from None
    if largest < len(job.remaining):
        count = len(job.remaining)
        job.note(f"{even_share(count, largest)} of {count} runs at a time: more need more memory")
    return largest


def _too_large() -> MupscaleError:
    return MupscaleError("one run alone does not fit into memory: take a smaller batch or width")
