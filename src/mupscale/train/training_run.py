"""A training run: plain PyTorch steps, growth in the middle of them, and nothing that a kill could lose.

A run's state is its step, its model and its optimizer. Data, dropout and schedule are functions of seeds and the step,
so a resumed run takes the same steps as one that was never stopped, bit for bit on the CPU.
"""

from __future__ import annotations

import shlex
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from mupscale.core import WholeWidth, Width
from mupscale.optim import clip_grad_norm_
from mupscale.system import Interrupted, MupscaleError, derive, is_out_of_memory
from mupscale.train.evaluation import evaluate
from mupscale.train.growing import coming_batches, grow_model
from mupscale.train.growth_events import Growth
from mupscale.train.loss_functions import find_logits
from mupscale.train.nonfinite import has_finite_state
from mupscale.train.numeric_precision import cast_input
from mupscale.train.recipe import Recipe
from mupscale.train.run_position import RunPosition
from mupscale.train.snapshot import RunState, save_snapshot
from mupscale.train.stored_recipes import is_own_run, packages_to_trust, stored_values

RunStatus = Literal["finished", "diverged", "interrupted"]


@dataclass(frozen=True)
class Result:
    """How a run ended, and its model."""

    status: RunStatus
    step: int
    width: WholeWidth
    model: nn.Module
    optimizer: Optimizer
    out: Path | None


def resume_command_of(recipe: Recipe, out: Path) -> str:
    """The command that goes on with a run, with the packages of its own that it has to be trusted with."""
    packages = [] if is_own_run(out, recipe) else packages_to_trust(recipe)
    trust = "".join(f" --trust {package}" for package in packages)
    return f"mupscale resume {shlex.quote(str(out))}{trust}"


_LONGEST = 300


def explain_loss(recipe: Recipe, model: nn.Module, x: Tensor, y: Tensor, error: Exception) -> MupscaleError | None:
    """What failed where a batch's loss was computed, model or loss, and on what; None where the error itself says it.

    >>> from mupscale.train import Spec
    >>> model, data = Spec("mupscale.models.MLP", {"d_in": 54, "d_out": 7}), Spec("mupscale.data.CoverTypeSample")
    >>> recipe = Recipe(model, data, Spec("torch.optim.SGD", {"lr": 0.1}), width=8, base=8, steps=1, batch=2)
    >>> targets = torch.tensor([3, 9])
    >>> print(explain_loss(recipe, nn.Identity(), torch.zeros(2, 7), targets, RuntimeError("no class 9")))
    the loss mupscale.train.cross_entropy cannot take outputs of shape (2, 7) ... from 3 to 9: no class 9
    """
    return None if _is_no_mistake(error) else MupscaleError(_which_failed(recipe, model, x, y, error))


def check_loss(recipe: Recipe, loss: Any) -> None:
    """One number, which depends on the model's weights.

    >>> from mupscale.train import Spec
    >>> model, data = Spec("mupscale.models.MLP", {"d_in": 54, "d_out": 7}), Spec("mupscale.data.CoverTypeSample")
    >>> recipe = Recipe(model, data, Spec("torch.optim.SGD", {"lr": 0.1}), width=8, base=8, steps=1, batch=2)
    >>> check_loss(recipe, torch.zeros(3))
    Traceback (most recent call last):
    mupscale.system.errors.MupscaleError: the loss mupscale.train.cross_entropy gives shape (3,), not one number
    """
    if not isinstance(loss, Tensor):
        raise MupscaleError(f"the loss {recipe.loss} gives a {type(loss).__name__}, not a tensor of one number")
    if loss.dim():
        raise MupscaleError(f"the loss {recipe.loss} gives shape {tuple(loss.shape)}, not one number")
    if not loss.requires_grad:
        raise MupscaleError(
            f"the loss {recipe.loss} does not depend on the model's weights, so the model cannot learn from it"
        )


def explain_step(recipe: Recipe, rate: float, error: Exception) -> MupscaleError | None:
    """The optimizer whose step failed, and its learning rate; None where the error itself says enough.

    >>> from mupscale.train import Spec
    >>> model, data = Spec("mupscale.models.MLP", {"d_in": 54, "d_out": 7}), Spec("mupscale.data.CoverTypeSample")
    >>> recipe = Recipe(model, data, Spec("torch.optim.SGD", {"lr": 1e300}), width=8, base=8, steps=1, batch=2)
    >>> print(explain_step(recipe, 1e300, RuntimeError("value cannot be converted")))
    torch.optim.SGD cannot take a step with a learning rate of 1e+300: value cannot be converted
    """
    if _is_no_mistake(error):
        return None
    name = recipe.optimizer.class_path
    return MupscaleError(f"{name} cannot take a step with a learning rate of {rate:g}: {_reason(error)}")


def _is_no_mistake(error: Exception) -> bool:
    """What is told as it is: sentences, memory and disks that are full, and devices that broke."""
    return isinstance(error, MupscaleError | OSError | torch.AcceleratorError) or is_out_of_memory(error)


def _which_failed(recipe: Recipe, model: nn.Module, x: Tensor, y: Tensor, error: Exception) -> str:
    if dist.is_available() and dist.is_initialized():  # the others would not call the model with this one
        return f"the loss {recipe.loss} of inputs {_shown(x)} and targets {_shown(y)} failed: {_reason(error)}"
    try:
        with torch.no_grad():
            outputs = model(x)
    except Exception:
        return f"the model {recipe.model.class_path} cannot take inputs {_shown(x)}: {_reason(error)}"
    logits = find_logits(outputs)
    given = f"a {type(outputs).__name__}" if logits is None else f"outputs of shape {tuple(logits.shape)}"
    return f"the loss {recipe.loss} cannot take {given} and targets {_shown(y)}: {_reason(error)}"


def _shown(values: Tensor) -> str:
    """A tensor's shape, and the range of whole numbers: labels and tokens may lie outside of what a model knows."""
    shape = f"of shape {tuple(values.shape)}"
    if values.is_floating_point() or not values.numel():
        return shape
    return f"{shape} from {int(values.min())} to {int(values.max())}"


def _reason(error: Exception) -> str:
    said = " ".join(str(error).split())[:_LONGEST]
    return f"{type(error).__name__}: {said}" if not isinstance(error, RuntimeError) else said or type(error).__name__


class StopRequest:
    """Set by Ctrl-C and by a termination; a second Ctrl-C stops at once. obeyed: set by whoever ends for it."""

    def __init__(self) -> None:
        self.asked = self.obeyed = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.asked = True

    def check(self) -> None:
        """Raise Interrupted if somebody has asked to stop, and nobody has obeyed; for moments when all is saved."""
        if self.asked and not self.obeyed:
            raise Interrupted("interrupted after the last step of a run")


@contextmanager
def catch_stop_signals() -> Iterator[StopRequest]:
    """Note Ctrl-C and terminations instead of ending the program; the caller looks between two steps.

    One that nobody has obeyed is raised when the block ends, so that none is forgotten: after an error, too, which
    whoever calls might take for a reason to try something else.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():  # signals reach the main thread alone
        yield request
        return
    before = {number: signal.signal(number, request) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        try:
            yield request
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
    except Exception as error:
        if not request.asked or isinstance(error, Interrupted):
            raise
        raise Interrupted(f"interrupted; meanwhile {type(error).__name__}: {error}") from error
    request.check()


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
                try:
                    loss = self.objective(x, y)
                except Exception as error:
                    if told := explain_loss(recipe, self.runner, x, y, error):
                        raise told from error
                    raise
                check_loss(recipe, loss)
                (loss / parts if parts > 1 else loss).backward()
            losses.append(loss.detach().clone() if graphed else loss.detach())  # a graph writes to one place
        mean = torch.stack(losses).mean() if parts > 1 else losses[0]
        skipped = self.nonfinite.rule == "skip" and self.nonfinite.must_skip(mean, self.model, kept, self.processes)
        if not skipped:
            self.losses.add(mean)
            if recipe.clip is not None:
                self.norms.add(clip_grad_norm_(self.model, recipe.clip, self.plan))
            self._set_rates()
            try:
                self.optimizer.step()
            except Exception as error:
                if told := explain_step(recipe, self.rate, error):
                    raise told from error
                raise
        for group in self.optimizer.param_groups:  # zero_grad takes as long as a small layer
            for parameter in group["params"]:
                parameter.grad = None
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
