"""A training run: plain PyTorch steps, growth in the middle of them, and nothing that a kill could lose.

A run's state is its step, its model and its optimizer. Data, dropout and schedule are functions of seeds and the step,
so a resumed run takes the same steps as one that was never stopped, bit for bit on the CPU.
"""

from __future__ import annotations

import math
import shlex
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from mupscale.checkpoint import DamagedCheckpoint
from mupscale.core import Plan, WholeWidth, Width
from mupscale.data import Data
from mupscale.optim import clip_grad_norm_
from mupscale.system import Interrupted, MupscaleError, as_asked, derive, setting
from mupscale.train.callbacks import Callback, Progress, make_callbacks, tell_record
from mupscale.train.objective import (
    MetricSeries,
    NonfiniteSteps,
    evaluate,
    explaining,
    has_finite_state,
    make_objective,
    matmul_precision,
)
from mupscale.train.processes import Processes, join_processes
from mupscale.train.recipe import Growth, Recipe
from mupscale.train.run_folder import RunFolder, RunState, read_snapshot
from mupscale.train.run_models import (
    check_data,
    check_growth,
    check_memory,
    check_model_takes_data,
    coming_batches,
    cost_per_example,
    data_fingerprint,
    grow_model,
    hyperparameters,
    place_member,
    starting_point,
)
from mupscale.train.stored_recipes import StoredRecipe, is_own_run, packages_to_trust

RunStatus = Literal["finished", "diverged", "interrupted"]
_SETTLE_EVERY = 100  # steps after which losses are fetched from the device at the latest


@dataclass(frozen=True)
class Result:
    """How a run ended, and its model."""

    status: RunStatus
    step: int
    width: WholeWidth
    model: nn.Module
    optimizer: Optimizer
    out: Path | None


def run_recipe(recipe: Recipe, *, resume: bool = False, overwrite: bool = False) -> Result:
    """Train as the recipe says; `resume` goes on from the last checkpoint in the run's folder, if there is one.

    overwrite: where the folder holds a run, remove it and start over.

    >>> from contextlib import redirect_stdout
    >>> from mupscale.train import Growth, Spec
    >>> recipe = Recipe(
    ...     model=Spec("mupscale.models.MLP", {"d_in": 54, "d_out": 7}),
    ...     data=Spec("mupscale.data.CoverTypeSample"),
    ...     optimizer=Spec("torch.optim.AdamW", {"lr": 1e-3}),
    ...     width=16,
    ...     base=16,
    ...     steps=4,
    ...     batch=32,
    ...     grow=[Growth(at=2, width=32)],
    ...     device="cpu",
    ... )
    >>> with redirect_stdout(None):  # without the lines of progress
    ...     result = run_recipe(recipe)
    >>> result.status, result.step, result.width
    ('finished', 4, 32)
    """
    with ExitStack() as stack:
        stack.enter_context(matmul_precision(recipe.precision))
        processes = stack.enter_context(join_processes(recipe.device, recipe.parallel))
        run = TrainingRun(recipe, processes)
        stack.callback(run.close)
        stop = stack.enter_context(catch_stop_signals())
        run.begin(resume, overwrite)
        return run.go(stop)


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


class TrainingRun:
    """One training run, from where it stands to its end. listeners: instead of the bar or lines for a person."""

    def __init__(
        self,
        recipe: Recipe,
        processes: Processes,
        listeners: Sequence[Callback] | None = None,
        data: Data | None = None,
    ) -> None:
        if recipe.batch % (recipe.accumulate * processes.world):
            raise MupscaleError(
                f"a batch of {recipe.batch} in {recipe.accumulate} parts (accumulate) cannot be shared evenly by "
                f"{processes.world} processes"
            )
        self.recipe, self.processes = recipe, processes
        loaded = recipe.make_data() if data is None else data
        self.data: Data = loaded.to(processes.device, recipe.dtype())
        self.family = recipe.family()
        self.folder = None if recipe.out is None else RunFolder(recipe.out)
        self.callbacks: list[Callback] = []
        if processes.main:
            if listeners is None:
                listeners = [Progress(recipe.steps, self.data.unit, recipe.batch * self.data.per_example)]
            self.callbacks = [*make_callbacks(recipe.callbacks), *listeners]
        self.nonfinite = NonfiniteSteps(recipe.on_nonfinite)
        self.losses, self.norms = MetricSeries(processes), MetricSeries(processes)

    # ------------------------------------------------------------------------------------------- where it stands

    def begin(self, resume: bool, overwrite: bool = False) -> None:
        """The model and the optimizer: initialised, from somebody's checkpoint, or where this run stood."""
        recipe, folder = self.recipe, self.folder
        if folder is not None:
            self._write(lambda: folder.begin(resume or overwrite), folder.path)
        check_memory(recipe, self.family, self.processes)
        check_data(self.data)
        cost_per_example(self.family, recipe.width, self.data, recipe)  # refuses data that do not fit
        check_growth(recipe, self.family, self.data)
        self.fingerprint = data_fingerprint(self.data)
        threads = self._stand(resume)
        if folder is not None:
            if resume and folder.last() is not None:
                finished = "; it is finished: more --steps go on" if self.step == recipe.steps else ""
                self._note(f"resumed after step {self.step} from {folder.last()}{finished}")
            elif resume and (folder.path / "recipe.json").exists():
                self._note(f"{folder.path} has no checkpoint yet: starting over from step 0")
            if overwrite:  # after every other check: a run that is refused changes no file
                self._write(folder.clear, folder.path)
            self._write(lambda: folder.go_on(recipe, self.step), folder.path)
        now = torch.get_num_threads()
        if self.processes.device.type == "cpu" and threads not in (None, now):
            self._note(
                f"it ran with {threads} threads and goes on with {now}: sums are taken in another order, so it agrees "
                f"to rounding with a run that was never stopped, and not bit for bit"
            )
        if epochs := self.data.describe_epochs(recipe.steps * recipe.batch):
            self._note(f"{recipe.steps:,} steps of {recipe.batch:,} are {epochs}")
        self._began = self._saved = time.monotonic()
        self._tell("begin")

    def _stand(self, at_last: bool) -> int | None:
        """Take up the model and the optimizer of the newest checkpoint, or of the start where there is none.

        at_last: False for the start in any case. The number of threads that the run had there, where it is known.
        """
        recipe = self.recipe
        if at_last and self.folder is not None and self.folder.last() is not None:
            state, model, optimizer = self._read_newest(self.folder)
        else:
            state = RunState(step=0, lr=float(recipe.optimizer.init_args["lr"]))
            model, optimizer = starting_point(recipe, self.family, self.processes, self.data)
        self.step, self.lr, self.left_out = state.step or 0, state.lr or 0.0, state.left_out or 0
        self.flops, self.seconds = state.flops or 0.0, state.seconds or 0.0
        self.losses.settled, self.norms.settled = [*(state.losses or ())], [*(state.norms or ())]
        self._adopt(model, optimizer, recipe.width_after(self.step))
        return state.threads

    def _read_newest(self, folder: RunFolder) -> tuple[RunState, nn.Module, Optimizer]:
        """What is in the newest checkpoint that is as it was written; damaged ones are set aside, and said."""
        *before, newest = folder.all()
        while True:
            try:
                return self._read(newest)
            except DamagedCheckpoint as error:
                if not before:
                    raise MupscaleError(f"{error}; it is the only checkpoint, so remove it to start over") from None
                damaged, newest = newest, before.pop()
                self.processes.by_main(partial(folder.set_aside, damaged), f"{damaged} cannot be renamed")
                self._note(f"{error}; it is kept as damaged-{damaged.name}, and {newest.name} is taken instead")

    def _read(self, path: Path) -> tuple[RunState, nn.Module, Optimizer]:
        """What is in the checkpoint at `path`, if it is one of this recipe's run on these data."""
        recipe, run = self.recipe, path.parents[1]
        try:
            saved = read_snapshot(path)
        except DamagedCheckpoint:
            raise
        except MupscaleError as error:
            raise MupscaleError(f"{error}; remove it to resume from the checkpoint before it") from None
        state = saved.run
        if state is None:
            raise MupscaleError(f"{path} is a checkpoint, but does not belong to a run, so it cannot be resumed")
        step = state.check_whole(path)
        if recipe.steps < step:
            raise MupscaleError(
                f"the run in {run} is already at step {step}, but you asked for {recipe.steps} steps: give more "
                f"({setting('steps')})"
            )
        if why := StoredRecipe.of(state.recipe, path, run).describe_difference(recipe, step):
            raise MupscaleError(
                f"{path} is a checkpoint of another recipe: {why}; choose another folder ({setting('out')}), or put it "
                "back"
            )
        if state.data not in (None, self.fingerprint):
            raise MupscaleError(
                f"the data has changed since the run in {run} was trained (its fingerprint is {self.fingerprint}, and "
                f"was {state.data}): restore the data, or start a new run from the checkpoint "
                f"({as_asked('start=', '--from ')}{path})"
            )
        model = place_member(self.family, recipe.width_after(step), self.processes, recipe.dtype())
        saved.restore_model(model)
        hyper = hyperparameters(recipe, self.processes.device)
        return state, model, saved.restore_optimizer(recipe.optimizer_class(), hyper, model)

    def _adopt(self, model: nn.Module, optimizer: Optimizer, width: WholeWidth) -> None:
        self.model, self.optimizer, self.width = model.train(), optimizer, width
        self.plan: Plan = self.family.plan(width)
        self.runner = self.processes.runner(model)
        self.objective = make_objective(self.runner, self.recipe, self.processes.device)
        self.flops_per_example = cost_per_example(self.family, width, self.data, self.recipe)
        if self.flops_per_example is None:
            check_model_takes_data(model, width, self.data, self.recipe, self.processes)
        self.rate = math.nan

    def _rewind(self) -> None:
        """Go back to the last good checkpoint, or the start, and leave out the data since: a loss was not finite."""
        bad, at, seconds, folder = self.step, self.losses.diverged_at(self.step), self._elapsed(), self.folder
        self.losses, self.norms = MetricSeries(self.processes), MetricSeries(self.processes)
        self._stand(at_last=True)
        self.left_out = self.nonfinite.note_rewind(bad, self.step, self.left_out)
        self.seconds, self._began = seconds, time.monotonic()
        if folder is not None:
            self._write(lambda: folder.go_on(self.recipe, self.step), folder.path)
        self._record("rewind", **{"from": bad, "left_out": self.left_out})
        self._note(
            f"step {at} is not finite: back to step {self.step}, and {bad - self.step} batches of the data are left out"
        )

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
        if logging or len(self.losses.pending) >= _SETTLE_EVERY:
            self._settle()
        if logging and self.losses.finite:
            more = {"grad_norm": self.norms.flush()} if self.norms.settled else {}
            self._record("train", loss=self.losses.flush(), lr=self.rate, width=self.width, **more)
        if not self.losses.finite or self.nonfinite.is_hopeless:
            return "diverged"
        evaluating = last or _is_due(self.step, recipe.evaluation.every)
        stopping, late = self._agree(asked_to_stop, logging)
        saving = last or stopping or late or _is_due(self.step, recipe.checkpoints.every)
        if (evaluating or saving) and not self._is_sound():  # then the last good checkpoint stays
            return "diverged"
        if evaluating:
            self._record("eval", **evaluate(self.model, self.data, recipe, self.processes))
        if saving:
            self._save()
        if last:
            return "finished"
        return "interrupted" if stopping else None

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

    def _train_step(self) -> None:
        recipe, parts = self.recipe, self.recipe.accumulate
        self.processes.seed_generators(recipe.seeds.dropout, self.step)
        part, graphed = recipe.batch // parts, recipe.compile in ("reduce-overhead", "max-autotune")
        if graphed:
            torch.compiler.cudagraph_mark_step_begin()
        losses, first = [], (self.step + self.left_out) * recipe.batch
        kept = self.nonfinite.keep_buffers(self.model)
        for number in range(parts):
            x, y = self.data.batch(recipe.seeds.data, *self.processes.share(first + number * part, part))
            with self.processes.accumulating(self.runner, number == parts - 1):
                loss = self.objective(x, y)
                (loss / parts if parts > 1 else loss).backward()
            losses.append(loss.detach().clone() if graphed else loss.detach())  # a graph writes to one place
        mean = torch.stack(losses).mean() if parts > 1 else losses[0]
        skipped = self.nonfinite.rule == "skip" and self.nonfinite.must_skip(mean, self.model, kept, self.processes)
        if not skipped:
            self.losses.add(mean)
            if recipe.clip is not None:
                self.norms.add(clip_grad_norm_(self.model, recipe.clip, self.plan))
            self._set_rates()
            what = f"{recipe.optimizer.class_path} cannot take a step with a learning rate of {self.rate:g}"
            with explaining(lambda: what):
                self.optimizer.step()
        for group in self.optimizer.param_groups:  # zero_grad takes as long as a small layer
            for parameter in group["params"]:
                parameter.grad = None
        self.step += 1
        self._tell("step")
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
        began, before = time.monotonic(), self.width
        del self.runner, self.objective
        if self.recipe.compile_mode() is not None:
            torch.compiler.reset()
        try:
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
        except MupscaleError as error:
            with suppress(MupscaleError):  # what went wrong first matters more
                self._record("end", status="failed", error=str(error))
            raise
        self._record("grow", **growth.record(self.lr))
        seconds = time.monotonic() - began
        self._note(
            f"step {self.step}  grown from {Width.of(before).phrase} to {Width.of(growth.width)}, "
            f"{growth.in_words}, lr {self.lr:g} ({seconds:.1f} s)"
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

    def _record(self, kind: str, **values: Any) -> None:
        record = {
            "kind": kind,
            "step": self.step,
            self.data.unit: self.step * self.recipe.batch * self.data.per_example,
            "flops": None if self.flops_per_example is None else self.flops,
            "seconds": round(self._elapsed(), 3),
            **values,
        }
        if (folder := self.folder) is not None:
            self._write(lambda: folder.write(record), folder.metrics)
        tell_record(self.callbacks, self, record)

    def _elapsed(self) -> float:
        """Seconds of training, those before a resume included."""
        return self.seconds + time.monotonic() - self._began

    def _write(self, action: Callable[[], object], place: Path) -> None:
        self.processes.by_main(action, f"{place} cannot be written")

    def _tell(self, event: str) -> None:
        for callback in self.callbacks:
            getattr(callback, event)(self)

    def _note(self, text: str) -> None:
        for callback in self.callbacks:
            callback.note(text)

    def _save(self) -> None:
        if (folder := self.folder) is None:
            return
        where: dict[str, Any] = {"step": self.step, "width": self.width, "lr": self.lr, "data": self.fingerprint}
        where |= {"flops": self.flops, "seconds": self._elapsed(), "left_out": self.left_out or None}
        where |= {"losses": self.losses.settled, "norms": self.norms.settled}
        folder.save(self.recipe, self.model, self.optimizer, self.plan, self.processes, **where)
        self._saved = time.monotonic()

    def end(self, status: RunStatus) -> Result:
        """The last line of metrics, and what the person at the keyboard should know."""
        more = {"at": self.losses.diverged_at(self.step)} if status == "diverged" else {}
        self._record("end", status=status, **more)
        out = None if self.folder is None else self.folder.path
        if status == "diverged":
            self._note(f"diverged: the loss of step {more['at']} is not finite; the history is kept")
        elif status == "interrupted":
            where = f"; go on with: {_resume_command(self.recipe, out)}" if out else ""
            self._note(f"interrupted after step {self.step}{where}")
        return Result(status, self.step, self.width, self.model, self.optimizer, out)

    def close(self) -> None:
        for name in ("runner", "objective"):  # DDP must be gone before the group of processes is, or both may hang
            self.__dict__.pop(name, None)
        for callback in self.callbacks:
            callback.close()
        if self.folder is not None:
            self.folder.release()


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _resume_command(recipe: Recipe, out: Path) -> str:
    """The command that goes on with a run, with the packages of its own that it has to be trusted with."""
    packages = [] if is_own_run(out, recipe) else packages_to_trust(recipe)
    trust = "".join(f" --trust {package}" for package in packages)
    return f"mupscale resume {shlex.quote(str(out))}{trust}"
