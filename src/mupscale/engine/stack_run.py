"""A stack on its way from its first step to its last, with all that `train` would note about each of its runs."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mupscale import checkpoint
from mupscale.engine.jobs import Work
from mupscale.engine.outcomes import Journal, Outcome, Status, as_curve
from mupscale.engine.stack import Stack
from mupscale.engine.stackable import rate_after
from mupscale.system import Interrupted
from mupscale.train import RunState, StopRequest

_LOOK_EVERY = 100  # steps after which losses are fetched from the device at the latest
_MINUTES = 2.0  # between two saves of a stack, if the recipe says nothing


class Passage:
    """What is recorded of a stack, who is dropped from it, and when it is saved."""

    def __init__(self, work: Work, stack: Stack, numbers: list[int]) -> None:
        self.work, self.stack, self.numbers, self.recipe = work, stack, numbers, stack.shared
        self.curves: dict[int, list[tuple[int, float]]] = {number: [] for number in numbers}
        self.losses = self.norms = torch.empty(
            0, len(numbers), dtype=torch.float64
        )  # steps since the last point × runs
        self.journals = [Journal(recipe) for recipe in stack.recipes]
        self.seconds, self.began = 0.0, time.monotonic()
        self.saved = time.monotonic()

    def go(self, stop: StopRequest) -> None:
        """From where the stack stands to the end."""
        for journal in self.journals:
            journal.open(self.stack.step)
        try:
            while self.numbers and self.stack.step < self.recipe.steps:
                self._advance(stop)
                if self.numbers and self.stack.step < self.recipe.steps:
                    self._save_if_due(stop)
            if self.numbers:
                self._finish()
        finally:
            for journal in self.journals:
                journal.close()

    def _save_if_due(self, stop: StopRequest) -> None:
        minutes = self.recipe.checkpoints.minutes
        due = time.monotonic() - self.saved >= 60 * (_MINUTES if minutes is None else minutes)
        if stop.asked or due:
            self.save()
        if stop.asked:
            kept = "" if self.work.save is None else ", and kept"
            raise Interrupted(f"interrupted after step {self.stack.step} of {self.recipe.steps}{kept}")

    def _advance(self, stop: StopRequest) -> None:
        """To the next step at which something is due, or where somebody asks to stop."""
        before, steps, spacing = self.stack.step, self.recipe.steps, self.work.spacing(self.recipe)
        self._record_drops(before)
        every = self.recipe.evaluation.every if self.recipe.out is not None else 0
        point, evaluation = _next(before, spacing, steps), _next(before, every, steps)
        drops = [growth.at for recipe in self.stack.recipes for growth in recipe.grow if growth.at > before]
        due = min([point, evaluation, _next(before, _LOOK_EVERY, steps), *drops])
        self._remember(self.stack.advance(due - before, lambda: stop.asked))
        if self.stack.step < due:
            return
        self._drop_diverged()
        if due == point and self.numbers:
            self._point()
        if due == evaluation < steps and self.numbers:
            self._evaluate()

    def _remember(self, losses: Tensor) -> None:
        self.losses = torch.cat([self.losses, losses.double().cpu()])
        if self.stack.norms is not None:
            self.norms = torch.cat([self.norms, self.stack.norms.double().cpu()])

    def _drop_diverged(self) -> None:
        """Runs whose loss is not finite are over."""
        finite = self.losses.isfinite()
        gone = (~finite.all(0)).nonzero()[:, 0].tolist()
        first = self.stack.step - len(self.losses) + 1
        for row in gone:
            self._over(row, "diverged", at=first + int(finite[:, row].long().argmin()))
        self._drop(gone)

    def _drop_broken(self) -> None:
        """So are those whose weights are not: their next loss would be the first that is not."""
        gone = [row for row, sound in enumerate(self.stack.sound()) if not sound]
        for row in gone:
            self._over(row, "diverged", at=self.stack.step + 1)
        self._drop(gone)

    def _point(self) -> None:
        """A point of every curve; and the end of those that somebody stops there."""
        step, losses, norms = self.stack.step, _means(self.losses), _means(self.norms)
        self.losses, self.norms = self.losses[:0], self.norms[:0]
        values = dict(zip(self.numbers, losses, strict=True))
        for row, (number, loss) in enumerate(values.items()):
            self.curves[number].append((step, loss))
            more = {"grad_norm": norms[row]} if norms else {}
            self._record(row, "train", loss=loss, lr=self.stack.rate(row), width=self.recipe.width, **more)
        self.work.told(step, values)
        gone = self.work.stopped(self.recipe, step, values)
        rows = [row for row, number in enumerate(self.numbers) if number in gone]
        for row in rows:
            self._over(row, "pruned")
        self._drop(rows)

    def _evaluate(self) -> list[dict[str, float]]:
        """Scores, where somebody will look at them."""
        self._drop_broken()
        if not self.numbers or not self.work.scored(self.recipe):
            return [{} for _ in self.numbers]
        found = self.stack.evaluate()
        for row, scores in enumerate(found):
            self._record(row, "eval", **scores)
        return found

    def _finish(self) -> None:
        """What is left has come to its end."""
        for row, scores in enumerate(self._evaluate()):
            self._save_run(row)
            self._over(row, "finished", scores)

    def _over(self, row: int, status: Status, scores: dict[str, float] | None = None, **more: int) -> None:
        number, step = self.numbers[row], more.get("at", self.stack.step)
        flops = self._flops(min(step, self.stack.step))
        curve = self.curves[number]
        self.work.outcomes[number] = Outcome(self.work.recipes[number], status, step, curve, scores or {}, flops)
        self._record(row, "end", status=status, **more)
        self.journals[row].close()

    def _drop(self, gone: Sequence[int]) -> None:
        if not gone:
            return
        rows = [row for row in range(len(self.numbers)) if row not in set(gone)]
        self.numbers, self.journals = ([those[row] for row in rows] for those in (self.numbers, self.journals))  # type: ignore[assignment]
        self.losses, self.norms = (numbers[:, rows] for numbers in (self.losses, self.norms))
        if rows:
            self.stack.keep(rows)

    # ------------------------------------------------------------------------------------------- what it leaves

    def _record(self, row: int, kind: str, **values: Any) -> None:
        """A line of metrics as `train` writes it."""
        step, data = self.stack.step, self.stack.data
        where = {"kind": kind, "step": step, data.unit: step * self.recipe.batch * data.per_example}
        spent = {"flops": self._flops(step), "seconds": round(self._elapsed(), 3)}
        self.journals[row].write({**where, **spent, **values})

    def _record_drops(self, step: int) -> None:
        """Where the learning rate changes: to `train` it is a growth to the same width."""
        for row, recipe in enumerate(self.stack.recipes):
            growth = recipe.growth_at(step)
            if growth is not None:
                lr = rate_after(recipe, step)
                self._record(row, "grow", width=growth.width, noise=growth.noise, unit=growth.unit, lr=lr)

    def _flops(self, step: int) -> float | None:
        return None if self.stack.flops_per_step is None else self.stack.flops_per_step * step

    def _elapsed(self) -> float:
        return self.seconds + time.monotonic() - self.began

    def _save_run(self, row: int) -> None:
        """The checkpoint at a run's end, from which `train` can go on."""
        folder, recipe, step = self.journals[row].folder, self.stack.recipes[row], self.stack.step
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
            recipe=recipe.to_json(),
        )
        path = folder.checkpoint(step, sharded=False)
        checkpoint.save(path, model, optimizer, self.stack.plan, run=state.to_json())
        folder.forget(recipe.checkpoints.keep)

    def save(self) -> None:
        """Where all of it stands, in one file."""
        self.saved = time.monotonic()
        if self.work.save is not None:
            curves = {str(number): self.curves[number] for number in self.numbers}
            where = {"numbers": self.numbers, "curves": curves, "seconds": self._elapsed()}
            since = {"losses": self.losses, "norms": self.norms}
            self.stack.save(self.work.save, {**self.work.header(), **where, **since})

    def restore(self, saved: checkpoint.Checkpoint) -> None:
        """Go on where this work was saved, with those of its runs that have not ended since."""
        header = saved.extra["stack"]
        self.stack.restore(saved)
        self.curves = {number: as_curve(header["curves"][str(number)]) for number in self.numbers}
        self.losses, self.norms, self.seconds = header["losses"], header["norms"], float(header["seconds"])
        self._drop([row for row, number in enumerate(self.numbers) if number in self.work.outcomes])
        where = f"step {self.stack.step} of {self.recipe.steps}"
        self.work.note(f"going on after {where} with {len(self.numbers)} run{'' if len(self.numbers) == 1 else 's'}")


def _next(step: int, every: int, last: int) -> int:
    """The next step that is a multiple, or the last."""
    return min((step // every + 1) * every, last) if every else last


def _means(numbers: Tensor) -> list[float]:
    """Of every run's numbers; as `train` computes it."""
    return [math.fsum(column) / len(column) for column in numbers.T.tolist()] if len(numbers) else []
