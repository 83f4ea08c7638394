"""Train many runs: as one program where that works, one after another where it does not; the numbers are the same.

What `train_many` was asked for and how far it is, on disk too; as many runs at once as fit into memory, each stack from
its first step, or from where it was killed, to its last; one after another; and a bar for a person.
"""

from __future__ import annotations

import gc
import hashlib
import json
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import torch
from torch import Tensor

from mupscale import checkpoint
from mupscale.data import Data
from mupscale.engine.replicas import NotStackable
from mupscale.engine.stack import RunStack, check_stackable, rate_after
from mupscale.system import Display, Interrupted, MupscaleError, available_memory, number_in_environment, remove, show
from mupscale.train import (
    MOST_IN_A_ROW,
    Callback,
    Recipe,
    RunFolder,
    StopRequest,
    StoredRecipe,
    TrainingRun,
    catch_stop_signals,
    data_fingerprint,
    exact_mean,
    join_processes,
    matmul_precision,
    seen_from,
    step_of,
    stored_values,
)

Status = Literal["finished", "diverged", "pruned"]
_LAST = 0.1  # the part of a run at its end over which its training loss is measured
Records = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Outcome:
    """How one run of `train_many` ended.

    step: how far it came; if it diverged, the first step whose loss is not finite. curve: steps, and the mean training
    loss since the one before. scores: of the evaluation at its end. flops: of all its steps, None where the model's
    cost cannot be counted.
    """

    recipe: Recipe
    status: Status
    step: int
    curve: list[tuple[int, float]]
    scores: dict[str, float] = field(default_factory=dict)
    flops: float | None = None

    @property
    def loss(self) -> float | None:
        """The mean training loss over the last tenth of the steps; None unless it finished."""
        if self.status != "finished":
            return None
        return fmean(loss for step, loss in self.curve if step > (1 - _LAST) * self.curve[-1][0])

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "recipe"}

    @classmethod
    def from_json(cls, recipe: Recipe, values: Mapping[str, Any]) -> Outcome:
        return cls(recipe, **{**values, "curve": curve_from_json(values["curve"])})


def curve_from_json(points: Sequence[Sequence[float]]) -> list[tuple[int, float]]:
    return [(int(step), float(loss)) for step, loss in points]


def read_outcome(recipe: Recipe) -> Outcome | None:
    """The outcome of a run that is over, read from its folder; None if it is not, or of another recipe."""
    if recipe.out is None:
        return None
    folder = RunFolder(recipe.out)
    records = folder.records()
    if not records or records[-1]["kind"] != "end" or records[-1]["status"] not in ("finished", "diverged"):
        return None
    try:
        theirs = _recipe_in(folder)
    except MupscaleError:
        return None
    if theirs is None or theirs.describe_difference(recipe, recipe.steps) or theirs.steps != recipe.steps:
        return None
    end, last = records[-1], folder.last()
    if end["status"] == "finished" and (last is None or step_of(last) != recipe.steps):
        return None
    return Outcome(recipe, end["status"], int(end.get("at", end["step"])), *curve_and_scores(records), end.get("flops"))


def curve_and_scores(records: Records) -> tuple[list[tuple[int, float]], dict[str, float]]:
    """A run's curve and its last scores, from its records of metrics."""
    curve = [(r["step"], r["loss"]) for r in records if r["kind"] == "train" and r["loss"] is not None]
    last: Mapping[str, Any] = next((r for r in reversed(records) if r["kind"] == "eval"), {})
    names = [name for name in ("loss", "accuracy") if name in last]
    return curve, {name: math.nan if last[name] is None else last[name] for name in names}


def check_folders(recipes: Sequence[Recipe], resume: bool) -> None:
    """Refuse two runs in one folder, a folder with a run that is not to be resumed, and one of another recipe."""
    seen: set[Path] = set()
    for recipe in recipes:
        if recipe.out is None:
            continue
        folder, path = RunFolder(recipe.out), Path(recipe.out).absolute()
        if path in seen:
            raise MupscaleError(f"two runs have the folder {recipe.out}: give each its own (out)")
        seen.add(path)
        last, theirs = folder.last(), _recipe_in(folder)
        if not resume and (last is not None or folder.records()):
            raise MupscaleError(f"{recipe.out} holds a run already: resume it, or choose another folder (out)")
        if theirs is not None and (why := theirs.describe_difference(recipe, recipe.steps)):
            raise MupscaleError(f"{recipe.out} holds a run of another recipe: {why}; choose another folder (out)")
        if last is not None and step_of(last) > recipe.steps:
            raise MupscaleError(
                f"the run in {recipe.out} stands at step {step_of(last)}, beyond the {recipe.steps} steps asked for: "
                f"give more steps, or another folder (out)"
            )


def _recipe_in(folder: RunFolder) -> StoredRecipe | None:
    path = folder.path / "recipe.json"
    try:
        return StoredRecipe.read(path)
    except FileNotFoundError:
        return None
    except (OSError, MupscaleError) as error:
        raise MupscaleError(f"{path} cannot be read as a recipe ({error}): choose another folder (out)") from None


PruneCallback = Callable[[int, Mapping[int, float]], Collection[int]]
"""Given a step and the mean loss of each run since its last point, by number: the runs to stop."""
PointCallback = Callable[[int, Mapping[int, float]], None]
"""Called at every point of the curves with the step and the mean loss of each run since the last point, by number."""


@dataclass
class TrainingJob:
    """The arguments of `train_many`, and the outcomes so far, by the number of the recipe."""

    recipes: list[Recipe]
    points: int = 40
    rungs: Sequence[int] = ()
    prune: PruneCallback | None = None
    evaluate: bool = False
    save_path: Path | None = None
    on_point: PointCallback | None = None
    note: Callable[[str], None] = show
    memory: int | None = None
    data: Data | None = None  # of all recipes, if it is loaded already
    resume: bool = False
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    saved: checkpoint.Checkpoint | None = None  # an interrupted stack that is to go on

    @property
    def remaining(self) -> list[int]:
        return [number for number in range(len(self.recipes)) if number not in self.outcomes]

    def point_spacing(self, recipe: Recipe) -> int:
        return recipe.log_every if recipe.out is not None else max(1, recipe.steps // self.points)

    def needs_scores(self, recipe: Recipe) -> bool:
        return self.evaluate or recipe.out is not None

    def report_point(self, step: int, values: Mapping[int, float]) -> None:
        if self.on_point is not None:
            self.on_point(step, values)

    def runs_to_prune(self, recipe: Recipe, step: int, values: Mapping[int, float]) -> set[int]:
        if self.prune is None or not values:
            return set()
        spacing = self.point_spacing(recipe)
        near = {max(1, round(rung / spacing)) * spacing for rung in self.rungs}  # the nearest points of the curve
        return set(self.prune(step, values)) & set(values) if step in near and step < recipe.steps else set()

    # ------------------------------------------------------------------------------------------- on disk

    def header(self) -> dict[str, Any]:
        """The header of a saved file: the fingerprint of the job, and its outcomes so far."""
        done = {str(number): outcome.to_json() for number, outcome in self.outcomes.items()}
        return {"fingerprint": self._fingerprint(), "outcomes": done, "numbers": []}

    def save_outcomes(self, *, complete: bool = False) -> None:
        """Write the outcomes so far to `save_path`, if there is one and not all is done; complete: then, too."""
        if self.save_path is not None and (self.remaining or complete):
            checkpoint.save_states(self.save_path, {}, None, None, {"stack": self.header()})

    def load_saved(self) -> bool:
        """Read what an interrupted call of the same job has saved; whether there was any. Other files are ignored."""
        if self.save_path is None or not self.save_path.exists():
            return False
        try:
            saved = checkpoint.load(self.save_path)
            header = saved.extra.get("stack", {})
            if header.get("fingerprint") != self._fingerprint():
                return False
            done = {int(n): Outcome.from_json(self.recipes[int(n)], v) for n, v in header["outcomes"].items()}
            numbers = list(header["numbers"])
        except (MupscaleError, ValueError, KeyError, TypeError, AttributeError, IndexError):
            return False
        self.outcomes |= done
        self.saved = saved if numbers else None
        return True

    def _fingerprint(self) -> str:
        """Of all that is asked for; paths are seen from the saved file's folder, which may be moved with them."""
        assert self.save_path is not None
        here = self.save_path.parent
        recipes = [(stored_values(recipe, here), seen_from(here, recipe.out)) for recipe in self.recipes]
        arguments = [recipes, self.points, list(self.rungs), self.evaluate]
        return hashlib.sha256(json.dumps(arguments).encode()).hexdigest()


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
        return data_fingerprint(self.stack.data)

    def _save_checkpoint(self, row: int) -> None:
        """Write the checkpoint at a run's end, from which `train` can go on."""
        folder, recipe, step = self.folders[row], self.stack.recipes[row], self.stack.step
        if folder is None:
            return
        where: dict[str, Any] = {"step": step, "width": recipe.width, "data": self.fingerprint}
        where |= {"lr": rate_after(recipe, step - 1), "losses": [], "norms": []}
        where |= {"flops": self._flops(step) or 0.0, "seconds": self._elapsed()}
        model, optimizer = self.stack.export(row)
        folder.save(recipe, model, optimizer, self.stack.plan, self.stack.processes, **where)

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


def train_one_by_one(job: TrainingJob, stop: StopRequest) -> None:
    for number in job.remaining:
        recipe = job.recipes[number]
        if recipe.out is None:
            rarely = replace(recipe.evaluation, every=0)
            recipe = replace(recipe, log_every=job.point_spacing(recipe), evaluation=rarely)
        listener = _Listener()
        with matmul_precision(recipe.precision), join_processes(recipe.device, recipe.parallel) as processes:
            run = TrainingRun(recipe, processes, [listener], job.data)
            try:
                run.begin(job.resume)
                job.outcomes[number] = _train_run(job, number, run, listener, stop)
            finally:
                run.close()
        job.save_outcomes()
        stop.check()


def _train_run(job: TrainingJob, number: int, run: TrainingRun, listener: _Listener, stop: StopRequest) -> Outcome:
    """Train one run from where it stands to its end, reporting every point."""
    recipe = job.recipes[number]
    status: Any = "finished" if run.step >= recipe.steps else None
    while status is None:
        status = run.advance(stop.asked)
        if listener.point is not None:
            values, listener.point = {number: listener.point}, None
            job.report_point(run.step, values)
            if status is None and job.runs_to_prune(recipe, run.step, values):
                status = "pruned"
    run.end(status)
    if status == "interrupted":
        raise Interrupted(f"interrupted after step {run.step} of {recipe.steps}")
    curve, scores = curve_and_scores(RunFolder(recipe.out).records() if recipe.out is not None else listener.records)
    step = run.losses.diverged_at(run.step) if status == "diverged" else run.step
    cost = None if run.flops_per_example is None else run.flops_per_example * recipe.batch
    flops = None if cost is None else run.flops - cost * max(0, run.step - step)
    return Outcome(recipe, status, step, curve, scores if job.needs_scores(recipe) else {}, flops)


class _Listener(Callback):
    """Collects the records of a run."""

    def __init__(self) -> None:
        self.records: list[Mapping[str, Any]] = []
        self.point: float | None = None  # the training loss of a point that is not reported yet

    def metrics(self, run: Any, record: Mapping[str, Any]) -> None:
        self.records.append(record)
        if record["kind"] == "train":
            self.point = record["loss"]


Engine = Literal["auto", "vectorised", "serial"]


def train_many(
    recipes: Sequence[Recipe],
    *,
    engine: Engine = "auto",
    points: int = 40,
    rungs: Sequence[int] = (),
    prune: PruneCallback | None = None,
    evaluate: bool = False,
    save: Path | None = None,
    on_point: PointCallback | None = None,
    resume: bool = False,
    note: Callable[[str], None] | None = None,
    memory: int | None = None,
    data: Data | None = None,
) -> list[Outcome]:
    """Train all of these recipes; outcomes come in their order.

    A recipe with a folder (out) becomes a run like any other, with its metrics and a checkpoint at its end; `resume`
    skips those that are finished and trains the others, else a folder that holds a run is refused.
    engine: auto falls back to one at a time, and says why; vectorised does not. points: of a curve, where there is no
    folder. rungs, prune: where runs may be stopped early, and which. save: a file for what is done so far, from which
    the same call goes on after an interruption or a kill. memory: bytes that a stack may take; what is free if not
    given. data: the recipes' own, where it is loaded already.

    >>> from mupscale.engine import train_many
    >>> from mupscale.train import Recipe, Spec
    >>> model, data = Spec("mupscale.models.MLP", {"d_in": 54, "d_out": 7}), Spec("mupscale.data.CoverTypeSample")
    >>> sgd = [Spec("torch.optim.SGD", {"lr": lr}) for lr in (0.1, 1e30)]
    >>> recipes = [Recipe(model, data, optimizer, width=8, base=8, batch=20, steps=20) for optimizer in sgd]
    >>> [outcome.status for outcome in train_many(recipes)]
    ['finished', 'diverged']
    """
    if points < 1:
        raise MupscaleError(f"points is {points}, but a curve has at least one")
    if data is not None and any(recipe.data != recipes[0].data for recipe in recipes):
        raise MupscaleError("the runs differ in data, so one that is loaded already cannot be given for all of them")
    note = note or partial(show, stream="stderr")
    job = TrainingJob(list(recipes), points, rungs, prune, evaluate, save, on_point, note, memory, data)
    job.resume = job.load_saved() or resume
    if job.resume:
        read = ((number, read_outcome(job.recipes[number])) for number in job.remaining)
        job.outcomes |= {number: outcome for number, outcome in read if outcome is not None}
    check_folders([recipes[number] for number in job.remaining], job.resume)
    try:
        with catch_stop_signals() as stop:
            if engine != "serial" and job.remaining:
                try:
                    train_in_stacks(job, stop)
                except NotStackable as error:
                    if engine == "vectorised":
                        raise
                    job.note(f"one run at a time: {error}")
            train_one_by_one(job, stop)
    except Interrupted:
        if not job.remaining:  # too late to stop in the middle: the same call has all of this
            job.save_outcomes(complete=True)
        raise
    if save is not None:
        remove(save)
    return [job.outcomes[number] for number in range(len(recipes))]


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
    with Display(columns, steps, visible=visible, transient=True, lines="stdout", shown="") as display:
        yield ManyRuns(steps, runs, display)
