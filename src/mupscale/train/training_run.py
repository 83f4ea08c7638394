"""A training run: plain PyTorch steps, growth in the middle of them, and nothing that a kill could lose.

A run's state is its step, its model and its optimizer. Data, dropout and schedule are functions of seeds and the step,
so a resumed run takes the same steps as one that was never stopped, bit for bit on the CPU.
"""

from __future__ import annotations

import math
import shlex
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from mupscale.core import Plan, WholeWidth, Width
from mupscale.data import Data
from mupscale.optim import clip_grad_norm_
from mupscale.system import MupscaleError, derive
from mupscale.train.callbacks import CallbackList, make_callbacks
from mupscale.train.evaluation import evaluate
from mupscale.train.growing import coming_batches, grow_model
from mupscale.train.growth_events import Growth
from mupscale.train.metric_series import MetricSeries
from mupscale.train.model_checks import (
    check_data,
    check_growth,
    check_model_takes_data,
    cost_per_example,
    has_finite_weights,
)
from mupscale.train.numeric_precision import cast_input, make_objective
from mupscale.train.processes import Processes
from mupscale.train.progress import Progress, make_progress
from mupscale.train.recipe import Recipe
from mupscale.train.resuming import resume_point
from mupscale.train.run_folder import RunFolder
from mupscale.train.run_state import RunState
from mupscale.train.snapshot import save_snapshot
from mupscale.train.start import starting_point
from mupscale.train.stop_requests import StopRequest
from mupscale.train.tensorboard import TensorBoardWriter

Status = Literal["finished", "diverged", "interrupted"]
_SETTLE_EVERY = 100  # steps after which losses are fetched from the device at the latest


@dataclass(frozen=True)
class Result:
    """How a run ended, and its model."""

    status: Status
    step: int
    width: WholeWidth
    model: nn.Module
    optimizer: Optimizer
    out: Path | None


class TrainingRun:
    """One training run: the parts it is built from, and what changes from step to step."""

    def __init__(
        self, recipe: Recipe, processes: Processes, progress: Progress | None = None, data: Data | None = None
    ) -> None:
        if recipe.batch % (recipe.accumulate * processes.world):
            raise MupscaleError(
                f"a batch of {recipe.batch} in {recipe.accumulate} parts (accumulate) cannot be shared evenly by "
                f"{processes.world} processes"
            )
        self.recipe, self.processes = recipe, processes
        self.loss = recipe.loss_function()
        loaded = recipe.make_data() if data is None else data
        self.data: Data = loaded.to(processes.device, recipe.dtype())
        self.family = recipe.family()
        self.folder = None if recipe.out is None else RunFolder(recipe.out)
        self.board: TensorBoardWriter | None = None
        self.callbacks = CallbackList(make_callbacks(recipe.callbacks) if processes.main else [])
        self.step = 0
        self.flops = 0.0
        self.seconds = 0.0
        self.lr = float(recipe.optimizer.init_args["lr"])
        self.losses = MetricSeries(processes)
        self.norms = MetricSeries(processes)
        self.progress = progress or make_progress(recipe.steps, self.data.unit, visible=processes.main)

    # ------------------------------------------------------------------------------------------- beginning

    def begin(self, resume: bool, overwrite: bool = False) -> None:
        """The model and the optimizer: initialised, from somebody's checkpoint, or where this run stood."""
        last = None
        if self.folder is not None:
            folder = self.folder
            self.processes.by_main(lambda: folder.begin(resume or overwrite), f"{folder.path} cannot be written")
            last = folder.last() if resume else None
        check_growth(self.recipe, self.family, self.data)
        check_data(self.data)
        if last is not None:
            self._resume(last)
        else:
            model, optimizer = starting_point(self.recipe, self.family, self.processes, self.data)
            self._adopt(model, optimizer, self.recipe.width)
        if (ready := self.folder) is not None:
            self.processes.by_main(lambda: self._open(ready, overwrite), f"{ready.path} cannot be written")
        self._began = self._saved = time.monotonic()
        self._reported = (self.step, self._began)
        self.callbacks.tell("begin", self)

    def _open(self, folder: RunFolder, overwrite: bool) -> None:
        """Open the files of metrics, after every other check: a run that is refused changes no file."""
        if overwrite:
            folder.clear()
        if self.recipe.tensorboard:
            self.board = TensorBoardWriter(folder.path, self.step)
        folder.go_on(self.recipe, self.step)

    def _resume(self, path: Path) -> None:
        """Go on where the checkpoint at `path` was written."""
        point = resume_point(path, self.recipe, self.family, self.processes)
        self.step, self.lr, self.flops, self.seconds = point.step, point.lr, point.flops, point.seconds
        self.losses.settled, self.norms.settled = list(point.losses), list(point.norms)
        self._adopt(point.model, point.optimizer, point.width)
        finished = "; it is finished: more --steps go on" if self.step == self.recipe.steps else ""
        self.progress.note(f"resumed after step {self.step} from {path}{finished}")

    def _adopt(self, model: nn.Module, optimizer: Optimizer, width: WholeWidth) -> None:
        """Go on with this model and this optimizer."""
        self.model, self.optimizer, self.width = model.train(), optimizer, width
        self.plan: Plan = self.family.plan(width)
        self.runner = self.processes.runner(model)
        self.objective = make_objective(self.runner, self.loss, self.recipe, self.processes.device)
        self.flops_per_example = cost_per_example(self.family, width, self.data, self.recipe)
        if self.flops_per_example is None:
            check_model_takes_data(model, self.data, self.recipe, self.processes)
        self.rate = math.nan

    # ------------------------------------------------------------------------------------------- the loop

    def go(self, stop: StopRequest) -> Result:
        """From where the run stands to its end."""
        status: Status | None = "finished" if self.step >= self.recipe.steps else None
        while status is None:
            status = self.advance(stop.asked)
        return self.end(status)

    def advance(self, asked_to_stop: bool = False) -> Status | None:
        """Take one step, and do what is due before and after it; give the status if the run is then over."""
        recipe = self.recipe
        growth = recipe.growth_at(self.step)
        if growth is not None:
            if not self._is_sound():  # there is nothing to widen
                return "diverged"
            self._grow(growth)
        self._train_step()
        last = self.step == recipe.steps
        logging = last or self.step % recipe.log_every == 0
        if logging:
            self._log()
        elif len(self.losses.pending) >= _SETTLE_EVERY:
            self._settle()
        if not self.losses.finite:
            return "diverged"
        evaluating = last or _is_due(self.step, recipe.evaluation.every)
        stopping, late = self._agree(asked_to_stop, logging)
        saving = last or stopping or late or _is_due(self.step, recipe.checkpoints.every)
        if (evaluating or saving) and not self._is_sound():  # then the last good checkpoint stays
            return "diverged"
        if evaluating:
            self._evaluate()
        if saving:
            self._save()
        if last:
            return "finished"
        return "interrupted" if stopping else None

    def _train_step(self) -> None:
        recipe, parts = self.recipe, self.recipe.accumulate
        self.processes.seed_generators(recipe.seeds.dropout, self.step)
        part, graphed = recipe.batch // parts, recipe.compile in ("reduce-overhead", "max-autotune")
        if graphed:
            torch.compiler.cudagraph_mark_step_begin()
        losses = []
        for number in range(parts):
            stretch = self.processes.share(self.step * recipe.batch + number * part, part)
            x, y = self.data.batch(recipe.seeds.data, *stretch)
            with self.processes.accumulating(self.runner, number == parts - 1):
                loss = self.objective(cast_input(x, self.recipe), y)
                if loss.dim():
                    raise MupscaleError(f"the loss {recipe.loss} gives shape {tuple(loss.shape)}, not one number")
                (loss / parts if parts > 1 else loss).backward()
            losses.append(loss.detach().clone() if graphed else loss.detach())  # a graph writes to one place
        self.losses.add(torch.stack(losses).mean() if parts > 1 else losses[0])
        if recipe.clip is not None:
            self.norms.add(clip_grad_norm_(self.model, recipe.clip, self.plan))
        self._set_rates()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.callbacks.tell("step", self)
        self.flops += (self.flops_per_example or 0.0) * recipe.batch

    def _set_rates(self) -> None:
        rate = self.lr * self.recipe.schedule.at(self.step, self.recipe.steps)
        if rate != self.rate:
            self.rate = rate
            for group in self.optimizer.param_groups:
                group["lr"] = rate * group["lr_factor"]

    def _grow(self, growth: Growth) -> None:
        """Widen model, buffers and optimizer state in memory; the data goes on undisturbed."""
        began = time.monotonic()
        del self.runner, self.objective
        if self.recipe.compile:
            torch.compiler.reset()
        before = self.width
        wide, optimizer = grow_model(
            self.model,
            self.optimizer,
            before=before,
            width=growth.width,
            grow=growth.build_operator(),
            seed=derive(self.recipe.seeds.noise, "grow", growth.at),
            family=self.family,
            processes=self.processes,
            data=self.data,
            batches=coming_batches(self.recipe, self.data, self.step),
        )
        self.lr = growth.lr if growth.lr is not None else self.lr
        self._adopt(wide, optimizer, growth.width)
        self._record("grow", **growth.record(self.lr))
        seconds = time.monotonic() - began
        self.progress.note(
            f"step {self.step}  grown from width {Width.of(before)} to {Width.of(growth.width)}, "
            f"{growth.words}, lr {self.lr:g} ({seconds:.1f} s)"
        )

    # ---------------------------------------------------------------------------------- metrics and checkpoints

    def _settle(self) -> None:
        self.losses.settle()
        self.norms.settle()

    def _is_sound(self) -> bool:
        """Whether the losses so far and the weights are finite: a gradient may overflow where its loss does not."""
        self._settle()
        finite = has_finite_weights(self.model, self.processes)
        return self.losses.finite and finite

    def _log(self) -> None:
        self._settle()
        if not self.losses.finite:
            return
        more = {"grad_norm": self.norms.flush()} if self.norms.settled else {}
        record = self._record("train", loss=self.losses.flush(), lr=self.rate, width=self.width, **more)
        (step, then), self._reported = self._reported, (self.step, time.monotonic())
        units = (self.step - step) * self.recipe.batch * self.data.per_example
        self.progress.update(record, units / (self._reported[1] - then))

    def _evaluate(self) -> None:
        scores = evaluate(self.model, self.data, self.recipe, self.processes)
        self.progress.update(self._record("eval", **scores), 0.0)

    def _record(self, kind: str, **values: Any) -> dict[str, Any]:
        """One line of metrics, with where the run stands."""
        record = {
            "kind": kind,
            "step": self.step,
            self.data.unit: self.step * self.recipe.batch * self.data.per_example,
            "flops": None if self.flops_per_example is None else self.flops,
            "seconds": round(self._elapsed(), 3),
            **values,
        }
        if (folder := self.folder) is not None:
            self.processes.by_main(lambda: folder.write(record), f"{folder.metrics} cannot be written")
        if self.board is not None:
            self.board.write(record)
        self.callbacks.tell_record(self, record)
        return record

    def _elapsed(self) -> float:
        """Seconds of training, those before a resume included."""
        return self.seconds + time.monotonic() - self._began

    def _agree(self, asked_to_stop: bool, logging: bool) -> tuple[bool, bool]:
        """Whether to stop, and whether a checkpoint is due by the clock; processes agree where they log."""
        minutes = self.recipe.checkpoints.minutes
        due = minutes is not None and time.monotonic() - self._saved >= 60 * minutes
        if self.processes.world == 1:
            return asked_to_stop, due
        if not logging:
            return False, False
        stopping, due = self.processes.any(asked_to_stop, due and self.processes.main)
        return stopping, due

    def _save(self) -> None:
        """Write a checkpoint."""
        if self.folder is None:
            return
        state = RunState(
            step=self.step,
            width=self.width,
            lr=self.lr,
            flops=self.flops,
            seconds=self._elapsed(),
            losses=self.losses.settled,
            norms=self.norms.settled,
            recipe=self.recipe.to_json(),
        )
        folder = self.folder
        path = folder.checkpoint(self.step, sharded=self.processes.sharded)
        save_snapshot(path, self.model, self.optimizer, self.plan, self.processes, state)
        keep = self.recipe.checkpoints.keep
        self.processes.by_main(lambda: folder.forget(keep), f"{folder.checkpoints} cannot be cleared of old ones")
        self._saved = time.monotonic()

    def end(self, status: Status) -> Result:
        """The last line of metrics, and what the person at the keyboard should know."""
        more = {"at": self.losses.diverged_at(self.step)} if status == "diverged" else {}
        self._record("end", status=status, **more)
        out = None if self.folder is None else self.folder.path
        if status == "diverged":
            self.progress.note(f"diverged: the loss of step {more['at']} is not finite; the history is kept")
        elif status == "interrupted":
            where = f"; go on with: mupscale resume {shlex.quote(str(out))}" if out else ""
            self.progress.note(f"interrupted after step {self.step}{where}")
        return Result(status, self.step, self.width, self.model, self.optimizer, out)

    def close(self) -> None:
        """Leave the terminal and the files as they should be."""
        for name in ("runner", "objective"):  # DDP must be gone before the group of processes is, or both may hang
            self.__dict__.pop(name, None)
        self.progress.close()
        if self.board is not None:
            self.board.close()


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
