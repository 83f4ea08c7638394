"""The loop: plain PyTorch steps, growth in the middle of them, and nothing that a kill could lose.

A run's state is its step, its model and its optimizer. Data, dropout and schedule are functions of seeds and the step,
so a resumed run takes the same steps as one that was never stopped, bit for bit on the CPU.
"""

from __future__ import annotations

import math
import shlex
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mupscale.core import Plan, held
from mupscale.data import Data
from mupscale.optim import clip_grad_norm_
from mupscale.system import MupscaleError, derive
from mupscale.train import snapshot
from mupscale.train.evaluation import as_input, evaluate
from mupscale.train.processes import Processes, processes
from mupscale.train.progress import Progress, make_progress
from mupscale.train.recipe import Growth, Recipe, Width
from mupscale.train.run_folder import Folder
from mupscale.train.run_state import RunState, require
from mupscale.train.start import check_data, cost_per_example, hyperparameters, starting_point
from mupscale.train.tensorboard import Board

Status = Literal["finished", "diverged", "interrupted"]
_SETTLE_EVERY = 100  # steps after which losses are fetched from the device at the latest


@dataclass(frozen=True)
class Result:
    """How a run ended, and its model."""

    status: Status
    step: int
    width: Width
    model: nn.Module
    optimizer: Optimizer
    out: Path | None


def train(recipe: Recipe, *, resume: bool = False) -> Result:
    """Train as the recipe says; `resume` goes on from the last checkpoint in the run's folder, if there is one."""
    with ExitStack() as stack:
        stack.enter_context(matmul_precision(recipe.precision))
        among = stack.enter_context(processes(recipe.device, recipe.parallel))
        run = Run(recipe, among)
        stack.callback(run.close)
        stop = stack.enter_context(asked_to_stop())
        run.begin(resume)
        return run.go(stop)


class Run:
    """One training run: what it is made of, and what changes from step to step."""

    def __init__(
        self, recipe: Recipe, among: Processes, progress: Progress | None = None, data: Data | None = None
    ) -> None:
        if recipe.batch % (recipe.accumulate * among.world):
            raise MupscaleError(
                f"a batch of {recipe.batch} in {recipe.accumulate} parts (accumulate) cannot be shared evenly by "
                f"{among.world} processes"
            )
        self.recipe, self.processes = recipe, among
        self.loss = recipe.loss_function()
        loaded = recipe.make_data() if data is None else data
        self.data: Data = loaded.to(among.device, recipe.dtype())
        self.family = recipe.family()
        self.folder = None if recipe.out is None else Folder(recipe.out)
        self.board: Board | None = None
        self.step = 0
        self.flops = 0.0
        self.seconds = 0.0
        self.lr = float(recipe.optimizer.init_args["lr"])
        self.losses = Series(among)
        self.norms = Series(among)
        self.progress = progress or make_progress(recipe.steps, self.data.unit, visible=among.main)

    # ------------------------------------------------------------------------------------------- beginning

    def begin(self, resume: bool) -> None:
        """The model and the optimizer: initialised, from somebody's checkpoint, or where this run stood."""
        last = None
        if self.folder is not None:
            folder = self.folder
            self.processes.by_main(lambda: folder.begin(resume), f"{folder.path} cannot be written")
            last = folder.last() if resume else None
        self._check_growth()
        check_data(self.data)
        if last is not None:
            self._restore(_read(last))
        else:
            model, optimizer = starting_point(self.recipe, self.family, self.processes)
            self._adopt(model, optimizer, self.recipe.width)
        if (ready := self.folder) is not None:
            self.processes.by_main(lambda: self._open(ready), f"{ready.path} cannot be written")
        self._began = self._saved = time.monotonic()
        self._reported = (self.step, self._began)

    def _open(self, folder: Folder) -> None:
        """The files of metrics; nothing that was there is touched before all else is known to be well."""
        if self.recipe.tensorboard:
            self.board = Board(folder.path, self.step)
        folder.go_on(self.recipe, self.step)

    def _check_growth(self) -> None:
        """Whatever would be wrong with a growth is said now, not in the middle of the night."""
        width = self.recipe.width
        for growth in self.recipe.grow:
            self.family.widening(width, growth.width)
            width = growth.width

    def _restore(self, saved: snapshot.Snapshot) -> None:
        state, path = saved.run, saved.path
        if state is None:
            raise MupscaleError(f"{path} is a checkpoint, but not of a run, so it cannot be resumed")
        self.step = require(state.step, "step", path)
        if self.recipe.steps < self.step:
            raise MupscaleError(
                f"the run in {path.parents[1]} stands at step {self.step}, beyond the {self.recipe.steps} steps "
                f"asked for: give more steps"
            )
        if why := Recipe.from_json(require(state.recipe, "recipe", path)).differs_from(self.recipe, self.step):
            raise MupscaleError(
                f"{path} is a checkpoint of another recipe: {why}; choose another folder (--out), or put it back"
            )
        self.lr, self.flops = require(state.lr, "lr", path), require(state.flops, "flops", path)
        self.seconds = require(state.seconds, "seconds", path)
        self.losses.settled = list(require(state.losses, "losses", path))
        self.norms.settled = list(require(state.norms, "norms", path))
        width = self.recipe.width_after(self.step)
        model = self.processes.place(self.family.build(width).to(self.recipe.dtype()))
        saved.restore_model(model)
        hyper = hyperparameters(self.recipe, self.processes.device)
        optimizer = saved.restore_optimizer(self.recipe.optimizer_class(), hyper, model)
        self._adopt(model, optimizer, width)
        over = "; it is finished: more --steps go on" if self.step == self.recipe.steps else ""
        self.progress.note(f"resumed after step {self.step} from {path}{over}")

    def _adopt(self, model: nn.Module, optimizer: Optimizer, width: Width) -> None:
        """Go on with this model and this optimizer."""
        self.model, self.optimizer, self.width = model.train(), optimizer, width
        self.plan: Plan = self.family.plan(width)
        self.runner = self.processes.runner(model)
        self.objective = self._make_objective()
        self.flops_per_example = self._cost()
        self.rate = math.nan

    def _make_objective(self) -> Callable[[Tensor, Tensor], Tensor]:
        runner, loss, device = self.runner, self.loss, self.processes.device.type
        bf16 = self.recipe.precision == "bf16"

        def objective(x: Tensor, y: Tensor) -> Tensor:
            with torch.autocast(device, dtype=torch.bfloat16, enabled=bf16):
                return loss(runner(x), y)

        mode = self.recipe.compile
        return torch.compile(objective, mode="default" if mode is True else mode) if mode else objective

    def _cost(self) -> float | None:
        """Training FLOPs of one example; where they cannot be counted, whether the model takes one at all."""
        cost = cost_per_example(self.family, self.width, self.data, self.recipe)
        if cost is None:
            self._try()
        return cost

    @torch.no_grad()
    def _try(self) -> None:
        x, _ = self.data.examples(torch.zeros(1, dtype=torch.int64, device=self.data.rows_on or self.data.device))
        self.model.eval()
        try:
            self.model(as_input(x, self.recipe))
        except Exception as error:
            raise MupscaleError(
                f"{self.recipe.model.class_path} cannot take the data's examples of shape {tuple(x.shape[1:])}: "
                f"{str(error).splitlines()[0] if str(error) else type(error).__name__}"
            ) from error
        finally:
            self.model.train()
            self.processes.reshard(self.model)

    # ------------------------------------------------------------------------------------------- the loop

    def go(self, stop: StopRequest) -> Result:
        """From where the run stands to its end."""
        status: Status | None = "finished" if self.step >= self.recipe.steps else None
        while status is None:
            status = self.advance(stop.asked)
        return self.end(status)

    def advance(self, asked_to_stop: bool = False) -> Status | None:
        """One step, and what is due before and after it; the status with which the run is then over, if it is."""
        recipe = self.recipe
        growth = recipe.growth_at(self.step)
        if growth is not None:
            if not self._sound():  # there is nothing to widen
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
        evaluating = last or _due(self.step, recipe.evaluation.every)
        stopping, late = self._agreed(asked_to_stop, logging)
        saving = last or stopping or late or _due(self.step, recipe.checkpoints.every)
        if (evaluating or saving) and not self._sound():  # then the last good checkpoint stays
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
        self._seed_dropout()
        part, graphed = recipe.batch // parts, recipe.compile in ("reduce-overhead", "max-autotune")
        if graphed:
            torch.compiler.cudagraph_mark_step_begin()
        losses = []
        for number in range(parts):
            stretch = self.processes.share(self.step * recipe.batch + number * part, part)
            x, y = self.data.batch(recipe.seeds.data, *stretch)
            with self.processes.accumulating(self.runner, number == parts - 1):
                loss = self.objective(as_input(x, self.recipe), y)
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
        self.flops += (self.flops_per_example or 0.0) * recipe.batch

    def _seed_dropout(self) -> None:
        """What modules draw in this step depends on the seed, the step and the process alone."""
        seed = derive(self.recipe.seeds.dropout, self.step, self.processes.rank)
        torch.default_generator.manual_seed(seed)
        if self.processes.device.type == "cuda":
            torch.cuda.default_generators[self.processes.device.index].manual_seed(seed)

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
        wide, optimizer = self.family.upscale(
            self.model,
            self.optimizer,
            width=growth.width,
            noise=growth.as_noise(),
            seed=derive(self.recipe.seeds.noise, "grow", growth.at),
            place=self.processes.place,
        )
        assert optimizer is not None
        self.lr = growth.lr if growth.lr is not None else self.lr
        self._adopt(wide, optimizer, growth.width)
        self._record("grow", width=growth.width, noise=growth.noise, unit=growth.unit, lr=self.lr)
        seconds = time.monotonic() - began
        noise = "by parameter" if isinstance(growth.noise, dict) else f"{growth.noise:g}"
        self.progress.note(
            f"step {self.step}  grown from width {_shown(before)} to {_shown(growth.width)}, noise {noise}, "
            f"lr {self.lr:g} ({seconds:.1f} s)"
        )

    # ------------------------------------------------------------------------------------------- what it tells

    def _settle(self) -> None:
        self.losses.settle()
        self.norms.settle()

    def _sound(self) -> bool:
        """Whether losses so far are finite, and weights: a gradient may overflow where its loss does not."""
        self._settle()
        parts = [held(p.detach()) for p in self.model.parameters()]  # some processes may hold nothing of a small one
        largest = nn.utils.get_total_norm([part for part in parts if part.numel()], math.inf)
        (broken,) = self.processes.any(not largest.isfinite())
        return self.losses.finite and not broken

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
        return record

    def _elapsed(self) -> float:
        """Seconds of training, over all sittings."""
        return self.seconds + time.monotonic() - self._began

    def _agreed(self, asked: bool, logging: bool) -> tuple[bool, bool]:
        """Whether to stop, and whether a checkpoint is due by the clock; processes agree where they log."""
        minutes = self.recipe.checkpoints.minutes
        due = minutes is not None and time.monotonic() - self._saved >= 60 * minutes
        if self.processes.world == 1:
            return asked, due
        if not logging:
            return False, False
        stopping, due = self.processes.any(asked, due and self.processes.main)
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
        snapshot.save(path, self.model, self.optimizer, self.plan, self.processes, state)
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


class Series:
    """A number per step, fetched from the device and averaged over processes only when somebody looks."""

    def __init__(self, among: Processes) -> None:
        self.processes = among
        self.pending: list[Tensor] = []
        self.settled: list[float] = []
        self.finite = True  # whether everything fetched so far is

    def add(self, value: Tensor) -> None:
        """The number of the next step."""
        self.pending.append(value)

    def settle(self) -> None:
        """Fetch what is pending."""
        if self.pending:
            values = torch.stack([value.detach() for value in self.pending]).double().to(self.processes.device)
            settled = self.processes.mean(values).tolist()
            self.finite = self.finite and all(map(math.isfinite, settled))
            self.settled += settled
            self.pending = []

    def diverged_at(self, step: int) -> int:
        """The step whose number is the first that is not finite, if the last one is that of `step`; or the next."""
        first = next((i for i, value in enumerate(self.settled) if not math.isfinite(value)), len(self.settled))
        return step - len(self.settled) + first + 1

    def flush(self) -> float:
        """The mean of what is settled, which is then forgotten."""
        mean = math.fsum(self.settled) / len(self.settled)
        self.settled = []
        return mean


class StopRequest:
    """Set by Ctrl-C and by a termination; a second Ctrl-C stops at once."""

    def __init__(self) -> None:
        self.asked = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.asked = True


@contextmanager
def asked_to_stop() -> Iterator[StopRequest]:
    """Ctrl-C and terminations are asked for here, and answered between two steps."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():  # signals reach the main thread alone
        yield request
        return
    before = {number: signal.signal(number, request) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """TF32 where it is asked for, or where autocast leaves something in float32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision in ("tf32", "bf16") else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _read(path: Path) -> snapshot.Snapshot:
    try:
        return snapshot.read(path)
    except MupscaleError as error:
        raise MupscaleError(f"{error}; remove it to go on from the one before") from None


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _shown(width: Width) -> str:
    return ", ".join(f"{n} {w}" for n, w in width.items()) if isinstance(width, dict) else str(width)
