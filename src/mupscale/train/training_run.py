"""A training run: plain PyTorch steps, growth in the middle of them, and nothing that a kill could lose.

A run's state is its step, its model and its optimizer. Data, dropout and schedule are functions of seeds and the step,
so a resumed run takes the same steps as one that was never stopped, bit for bit on the CPU.
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

import torch

from mupscale.core import Width
from mupscale.optim import clip_grad_norm_
from mupscale.system import MupscaleError, derive
from mupscale.train.evaluation import evaluate
from mupscale.train.growing import coming_batches, grow_model
from mupscale.train.growth_events import Growth
from mupscale.train.nonfinite import has_finite_state
from mupscale.train.numeric_precision import cast_input
from mupscale.train.run_position import RunPosition
from mupscale.train.run_result import Result, RunStatus, resume_command_of
from mupscale.train.run_state import RunState
from mupscale.train.snapshot import save_snapshot
from mupscale.train.step_failures import check_loss, explain_loss, explain_step
from mupscale.train.stop_requests import StopRequest
from mupscale.train.stored_paths import stored_values

_SETTLE_EVERY = 100  # steps after which losses are fetched from the device at the latest


class TrainingRun(RunPosition):
    """One training run, from where it stands to its end."""

    # ------------------------------------------------------------------------------------------- the loop

    def go(self, stop: StopRequest) -> Result:
        """From where the run stands to its end."""
        status: RunStatus | None = "finished" if self.step >= self.recipe.steps else None
        while status is None:
            status = self.advance(stop.asked)
        stop.obeyed = status == "interrupted"
        return self.end(status)

    def advance(self, asked_to_stop: bool = False) -> RunStatus | None:
        """Take one step, and do what is due before and after it; give the status if the run is then over."""
        status = self._advance(asked_to_stop)
        if status == "diverged" and self.nonfinite.may_rewind():
            self._rewind()
            return None
        return status

    def _advance(self, asked_to_stop: bool) -> RunStatus | None:
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
        if not self.losses.finite or self.nonfinite.is_hopeless:
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

    def _rewind(self) -> None:
        """Go back from a loss that is not finite, and say so."""
        at = self.losses.diverged_at(self.step)
        bad = self.go_back()
        self._record("rewind", **{"from": bad, "left_out": self.left_out})
        self.progress.note(
            f"step {at} is not finite: back to step {self.step}, and {bad - self.step} batches of the data are left out"
        )

    def _train_step(self) -> None:
        recipe, parts = self.recipe, self.recipe.accumulate
        self.processes.seed_generators(recipe.seeds.dropout, self.step)
        part, graphed = recipe.batch // parts, recipe.compile in ("reduce-overhead", "max-autotune")
        if graphed:
            torch.compiler.cudagraph_mark_step_begin()
        losses, first = [], (self.step + self.left_out) * recipe.batch
        kept = self.nonfinite.keep_buffers(self.model)
        for number in range(parts):
            stretch = self.processes.share(first + number * part, part)
            x, y = self.data.batch(recipe.seeds.data, *stretch)
            with self.processes.accumulating(self.runner, number == parts - 1):
                x = cast_input(x, self.recipe)
                with explain_loss(recipe, self.runner, x, y):
                    loss = self.objective(x, y)
                check_loss(recipe, loss)
                (loss / parts if parts > 1 else loss).backward()
            losses.append(loss.detach().clone() if graphed else loss.detach())  # a graph writes to one place
        mean = torch.stack(losses).mean() if parts > 1 else losses[0]
        skipped = self.nonfinite.must_skip(mean, self.model, kept, self.processes)
        if not skipped:
            self.losses.add(mean)
            if recipe.clip is not None:
                self.norms.add(clip_grad_norm_(self.model, recipe.clip, self.plan))
            self._set_rates()
            with explain_step(recipe, self.rate):
                self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.callbacks.tell("step", self)
        self.flops += (self.flops_per_example or 0.0) * recipe.batch
        if skipped:
            self._record("skip")

    def _set_rates(self) -> None:
        rate = self.lr * self.recipe.schedule.at(self.step, self.recipe.steps)
        if rate != self.rate:
            self.rate = rate
            for group in self.optimizer.param_groups:
                group["lr"] = rate * group["lr_factor"]

    def _grow(self, growth: Growth) -> None:
        """Widen model, buffers and optimizer state in memory; a growth that fails is the end of the run."""
        try:
            self._widen(growth)
        except MupscaleError as error:
            with suppress(MupscaleError):  # what went wrong first matters more
                self._record("end", status="failed", error=str(error))
            raise

    def _widen(self, growth: Growth) -> None:
        began = time.monotonic()
        del self.runner, self.objective
        if self.recipe.compile_mode() is not None:
            torch.compiler.reset()
        before = self.width
        wide, optimizer = grow_model(
            self.model,
            self.optimizer,
            before=before,
            width=growth.width,
            grow=growth.build_operators(),
            seed=derive(self.recipe.seeds.noise, "grow", growth.at),
            family=self.family,
            processes=self.processes,
            data=self.data,
            batches=coming_batches(self.recipe, self.data, self.step + self.left_out),
        )
        self.lr = growth.lr if growth.lr is not None else self.lr
        self._adopt(wide, optimizer, growth.width)
        self._record("grow", **growth.record(self.lr))
        seconds, narrow = time.monotonic() - began, Width.of(before)
        self.progress.note(
            f"step {self.step}  grown from {narrow.phrase} to {Width.of(growth.width)}, "
            f"{growth.words}, lr {self.lr:g} ({seconds:.1f} s)"
        )

    # ---------------------------------------------------------------------------------- metrics and checkpoints

    def _settle(self) -> None:
        self.losses.settle()
        self.norms.settle()

    def _is_sound(self) -> bool:
        """Whether losses, weights and optimizer state are finite: a gradient, or its square, may overflow alone."""
        self._settle()
        finite = has_finite_state(self.model, self.optimizer, self.processes)
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
            left_out=self.left_out or None,
            recipe=stored_values(self.recipe, self.folder.path),
            data=self.fingerprint,
            threads=torch.get_num_threads(),
        )
        folder = self.folder
        self.processes.by_main(folder.sync, f"{folder.metrics} cannot be written")
        path = folder.checkpoint(self.step, sharded=self.processes.sharded)
        save_snapshot(path, self.model, self.optimizer, self.plan, self.processes, state)
        keep = self.recipe.checkpoints.keep
        self.processes.by_main(lambda: folder.forget(keep), f"{folder.checkpoints} cannot be cleared of old ones")
        self._saved = time.monotonic()

    def end(self, status: RunStatus) -> Result:
        """The last line of metrics, and what the person at the keyboard should know."""
        more = {"at": self.losses.diverged_at(self.step)} if status == "diverged" else {}
        self._record("end", status=status, **more)
        out = None if self.folder is None else self.folder.path
        if status == "diverged":
            self.progress.note(f"diverged: the loss of step {more['at']} is not finite; the history is kept")
        elif status == "interrupted":
            where = f"; go on with: {resume_command_of(self.recipe, out)}" if out else ""
            self.progress.note(f"interrupted after step {self.step}{where}")
        return Result(status, self.step, self.width, self.model, self.optimizer, out)

    def close(self) -> None:
        """Leave the terminal and the files as they should be."""
        for name in ("runner", "objective"):  # DDP must be gone before the group of processes is, or both may hang
            self.__dict__.pop(name, None)
        self.progress.close()
        if self.board is not None:
            self.board.close()
        if self.folder is not None:
            self.folder.release()


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
