"""Where a run stands: the parts it is built from, and how it comes there: begun, resumed, or gone back."""

from __future__ import annotations

import math
import time
from pathlib import Path

from torch import nn
from torch.optim import Optimizer

from mupscale.core import Plan, WholeWidth
from mupscale.data import Data
from mupscale.system import MupscaleError
from mupscale.train.callbacks import CallbackList, TensorBoardWriter, make_callbacks
from mupscale.train.metrics import MetricSeries
from mupscale.train.model_checks import (
    check_data,
    check_growth,
    check_memory,
    check_model_takes_data,
    cost_per_example,
    data_fingerprint,
)
from mupscale.train.nonfinite import NonfiniteSteps
from mupscale.train.numeric_precision import make_objective
from mupscale.train.processes import Processes
from mupscale.train.progress import Progress, make_progress
from mupscale.train.recipe import Recipe
from mupscale.train.resuming import ResumePoint, resume_newest
from mupscale.train.run_folder import RunFolder
from mupscale.train.start import starting_point


class RunPosition:
    """The parts of a run, and what changes from step to step."""

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
        self.left_out = 0  # batches of the data that a rewind has left out
        self.nonfinite = NonfiniteSteps(recipe.on_nonfinite)
        self.lr = float(recipe.optimizer.init_args["lr"])
        self.losses = MetricSeries(processes)
        self.norms = MetricSeries(processes)
        self.progress = progress or make_progress(recipe.steps, self.data.unit, visible=processes.main)

    def begin(self, resume: bool, overwrite: bool = False) -> None:
        """The model and the optimizer: initialised, from somebody's checkpoint, or where this run stood."""
        last = None
        if self.folder is not None:
            folder = self.folder
            self.processes.by_main(lambda: folder.begin(resume or overwrite), f"{folder.path} cannot be written")
            last = folder.last() if resume else None
        check_memory(self.recipe, self.family, self.processes)
        check_data(self.data)
        cost_per_example(self.family, self.recipe.width, self.data, self.recipe)  # refuses data that do not fit
        check_growth(self.recipe, self.family, self.data)
        self.fingerprint = data_fingerprint(self.data)
        if self.folder is not None and last is not None:
            self._resume(self.folder)
        else:
            model, optimizer = starting_point(self.recipe, self.family, self.processes, self.data)
            self._adopt(model, optimizer, self.recipe.width)
            if resume and self.folder is not None and (self.folder.path / "recipe.json").exists():
                self.progress.note(f"{self.folder.path} has no checkpoint yet: starting over from step 0")
        if (ready := self.folder) is not None:
            self.processes.by_main(lambda: self._open(ready, overwrite), f"{ready.path} cannot be written")
        if epochs := self.data.describe_epochs(self.recipe.steps * self.recipe.batch):
            self.progress.note(f"{self.recipe.steps:,} steps of {self.recipe.batch:,} are {epochs}")
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

    def _resume(self, folder: RunFolder) -> None:
        """Go on from the newest checkpoint that is as it was written."""
        path, point = self._newest(folder)
        self._go_back_to(point)
        finished = "; it is finished: more --steps go on" if self.step == self.recipe.steps else ""
        self.progress.note(f"resumed after step {self.step} from {path}{finished}")
        for note in point.notes:
            self.progress.note(note)

    def _newest(self, folder: RunFolder) -> tuple[Path, ResumePoint]:
        note = self.progress.note
        return resume_newest(folder, self.recipe, self.family, self.processes, self.fingerprint, note)

    def _go_back_to(self, point: ResumePoint) -> None:
        """Stand where a checkpoint was written."""
        self.step, self.lr, self.flops, self.seconds = point.step, point.lr, point.flops, point.seconds
        self.left_out = point.left_out
        self.losses.settled, self.norms.settled = list(point.losses), list(point.norms)
        self._adopt(point.model, point.optimizer, point.width)

    def _adopt(self, model: nn.Module, optimizer: Optimizer, width: WholeWidth) -> None:
        """Go on with this model and this optimizer."""
        self.model, self.optimizer, self.width = model.train(), optimizer, width
        self.plan: Plan = self.family.plan(width)
        self.runner = self.processes.runner(model)
        self.objective = make_objective(self.runner, self.loss, self.recipe, self.processes.device)
        self.flops_per_example = cost_per_example(self.family, width, self.data, self.recipe)
        if self.flops_per_example is None:
            check_model_takes_data(model, width, self.data, self.recipe, self.processes)
        self.rate = math.nan

    def go_back(self) -> int:
        """Stand at the last good checkpoint, or the start, and leave out the data since; the step it went back from."""
        bad, seconds, folder = self.step, self._elapsed(), self.folder
        self.losses, self.norms = MetricSeries(self.processes), MetricSeries(self.processes)
        if folder is not None and folder.last() is not None:
            self._go_back_to(self._newest(folder)[1])
        else:
            self.step, self.flops, self.left_out = 0, 0.0, 0
            self.lr = float(self.recipe.optimizer.init_args["lr"])
            model, optimizer = starting_point(self.recipe, self.family, self.processes, self.data)
            self._adopt(model, optimizer, self.recipe.width)
        self.left_out = self.nonfinite.note_rewind(bad, self.step, self.left_out)
        self.seconds, self._began = seconds, time.monotonic()
        self._reported = (self.step, self._began)
        if folder is not None:
            self.processes.by_main(lambda: folder.go_on(self.recipe, self.step), f"{folder.path} cannot be written")
        return bad

    def _elapsed(self) -> float:
        """Seconds of training, those before a resume included."""
        return self.seconds + time.monotonic() - self._began
