"""Many training runs of one architecture as one program: parameters stacked, the model vmapped over them.

What differs between the runs (learning rate, weight decay, eps, noise, seeds, the checkpoint they start from) is a
tensor with an entry for each; everything else is shared. Each run takes the steps that `train` would take with its
recipe, so a stack is a faster way to the same numbers, never another experiment. On CUDA a step is one graph.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mupscale import checkpoint
from mupscale.core import naming
from mupscale.data import Data
from mupscale.engine.replicas import (
    PER_RUN,
    Hyperparameters,
    NotCapturable,
    NotStackable,
    ParameterLayout,
    Replicas,
    StepGraph,
    StepResult,
    VmappedModel,
    clip_rows,
    find_stack_optimizer,
    merge_segments,
)
from mupscale.growth import GrowthSettings
from mupscale.system import MupscaleError
from mupscale.train import (
    Processes,
    Recipe,
    Seeds,
    check_data,
    compile_quietly,
    cost_per_example,
    scores_of,
    starting_point,
)


def check_stackable(recipes: Sequence[Recipe]) -> None:
    """Refuse runs that cannot be trained as one program, as far as their recipes tell."""
    if recipes[0].accumulate > 1:
        raise NotStackable("steps that are cut into parts (accumulate) are taken one run at a time")
    if recipes[0].on_nonfinite == "rewind":
        raise NotStackable("a run that may go back (on_nonfinite: rewind) cannot do so among others that go on")
    if any(recipe.no_decay or recipe.callbacks for recipe in recipes):
        raise NotStackable("parameter groups (no_decay) and callbacks are for runs that are trained one at a time")
    for recipe in recipes:
        for growth in recipe.grow:
            if growth.width != recipe.width or growth.noise:
                raise NotStackable("a stack cannot grow in the middle; start from a checkpoint (from) instead")
    if len({recipe.out is None for recipe in recipes}) > 1:
        raise NotStackable("some of the runs have a folder (out) and others have none")
    first, *others = (_shared_part(recipe) for recipe in recipes)
    for other in others:
        if other != first:
            differing = next(name for name in vars(other) if getattr(other, name) != getattr(first, name))
            raise NotStackable(f"the runs differ in {differing}, which must be one for all")


def _shared_part(recipe: Recipe) -> Recipe:
    """The recipe without what may differ between the runs of a stack."""
    shared = {name: value for name, value in recipe.optimizer.init_args.items() if name not in PER_RUN}
    return replace(
        recipe,
        optimizer=replace(recipe.optimizer, init_args={**shared, "lr": 1.0}),
        seeds=Seeds(),
        out=None,
        start=None,
        start_width=None,
        **GrowthSettings(how="copies").growth_settings,
        state="keep",
        grow=[],
    )


def group_by_start(recipes: Sequence[Recipe]) -> list[list[int]]:
    groups: dict[str, list[int]] = {}
    for number, recipe in enumerate(recipes):
        start = [recipe.start, recipe.start_width, recipe.width]
        growth = [recipe.growth_settings, recipe.state, recipe.seeds.noise]
        key = json.dumps([recipe.seeds.init, *start, *growth], sort_keys=True)
        groups.setdefault(key, []).append(number)
    return list(groups.values())


def rate_after(recipe: Recipe, step: int) -> float:
    """The learning rate for the step after `step` ones, before the schedule; growth may have changed it."""
    changed = [growth.lr for growth in recipe.grow if growth.at <= step and growth.lr is not None]
    return float(changed[-1] if changed else recipe.optimizer.init_args["lr"])


class Streams:
    """The streams that the rows of a stack read, one for each data seed.

    shared: whether all rows read the same one; batches then have no dimension of rows.
    """

    def __init__(self, data: Data, seeds: Sequence[int], batch: int, device: torch.device) -> None:
        self.data, self.batch = data, batch
        self.seeds = list(dict.fromkeys(seeds))
        self.shared = len(self.seeds) == 1
        self._one_for_each = len(self.seeds) == len(seeds)
        self._stream_of_row = torch.tensor([self.seeds.index(seed) for seed in seeds], device=device)

    def first_row(self, step: int, most: int | None = None) -> tuple[Tensor, Tensor]:
        """The batch of the first row at a step, or the first few examples of it."""
        return self.data.batch(self.seeds[0], step * self.batch, self.batch if most is None else min(self.batch, most))

    def batches(self, step: int, count: int, prefetch_bytes: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of the next steps: one for all rows, or one for each.

        prefetch_bytes: how much is made at once.
        """
        last, ahead = step + count, 1
        while step < last:
            ahead = min(ahead, last - step)
            stretches = self.data.batches(self.seeds, step * self.batch, ahead * self.batch)
            # cut into steps; a dimension of streams follows where there are several
            views = (joined.unflatten(0, (len(self.seeds), ahead, -1)) for joined in stretches)
            xs, ys = (view[0] if self.shared else view.transpose(0, 1) for view in views)
            for x, y in zip(xs, ys, strict=True):
                repeated = not self.shared and not self._one_for_each
                yield (x[self._stream_of_row], y[self._stream_of_row]) if repeated else (x, y)
            step += ahead
            ahead = max(1, prefetch_bytes // (xs[0].nbytes + ys[0].nbytes))


# Measured on an H200 with bench/sweep.py:
_SECONDS_A_BYTE = 5.6e-12  # that a step without compiling takes, for each byte that is kept for the backward pass
_SECONDS_A_TENSOR = 0.7  # that compiling takes, for each parameter of the model
_SECONDS_AT_LEAST = 10.0
_SAVED = 0.4  # of the time without compiling; 0.6 for language models, 0.2 for small MLPs


def worth_compiling(steps: int, runs: int, kept_bytes: int, tensors: int) -> bool:
    """Whether compiling is expected to take less time than it saves.

    kept_bytes: that a step of one run keeps for its backward pass; tensors: parameters of the model.

    >>> worth_compiling(steps=100, runs=20, kept_bytes=200_000_000, tensors=50)  # over before it is compiled
    False
    >>> worth_compiling(steps=10_000, runs=20, kept_bytes=200_000_000, tensors=50)
    True
    """
    plain = steps * runs * kept_bytes * _SECONDS_A_BYTE
    return _SAVED * plain > _SECONDS_AT_LEAST + tensors * _SECONDS_A_TENSOR


_CACHED = 10 << 20  # bytes that fit into a core's caches, from measurements at widths 32 to 256
_SMALLEST_BLOCK = 8  # runs: with fewer in a block, calls cost more than caches save
_ONE_THREAD = 4 << 20  # bytes that a block keeps, below which threads wait for each other more than they help
_PREFETCHED = 64 << 20  # bytes of batches that are made at once on a GPU: one launch for each takes longer than a step


class RunStack:
    """Runs trained as one program: `RunStack(recipes, device).advance(100)` takes a hundred steps with each of them.

    Recipes must have the same model, width, data, batch, steps and schedule; `NotStackable` says what differs.
    flops_per_step: training FLOPs of one step of one run, None where the model's cost cannot be counted.
    norms: of the gradients in the last `advance`, before clipping (steps × runs); None where nothing is clipped.
    recipes: of the runs, in the order of all results; `replicas` may also have rows of dropped runs (`keep_runs`).
    """

    def __init__(self, recipes: Sequence[Recipe], device: torch.device, data: Data | None = None) -> None:
        self.recipes, self.device, self.step = list(recipes), device, 0
        self.processes = Processes(device)
        check_stackable(recipes)
        self.shared = recipes[0]
        self.data: Data = data if data is not None else self.shared.make_data().to(device, self.shared.dtype())
        check_data(self.data)
        self.family = self.shared.family()
        self.plan = self.family.plan(self.shared.width)
        cost = cost_per_example(self.family, self.shared.width, self.data, self.shared)
        self.flops_per_step = None if cost is None else cost * self.shared.batch
        self.norms: Tensor | None = None
        self._can_capture = True
        self._compiles = self._keep_row_count = False
        self._prefetch_bytes = _PREFETCHED if device.type == "cuda" else 0
        self._start_runs()
        self._reset_rows()
        row, buffers = self.replicas.row(0)  # vmap is tried on a few examples, before the first step
        self.vmapped.check_training(row, buffers, *self.streams.first_row(0, most=8))
        x, y = next(iter(self.data.evaluation(self.shared.evaluation.batch or self.shared.batch)))
        self.vmapped.check_evaluation(row, buffers, x[:8], y[:8])
        compiles = self.shared.compile_mode() is not None
        if self.shared.compile is False and device.type == "cuda":  # then if the stage is long enough to pay for it
            kept = self.vmapped.bytes_for_backward(*self.replicas.row(0), *self.streams.first_row(0))
            compiles = worth_compiling(self.shared.steps, len(recipes), kept, len(self.replicas.layout.names))
        self._set_compiled(compiles)

    # ------------------------------------------------------------------------------------------- beginning

    def _start_runs(self) -> None:
        """Start every run as `train` does, and stack the models and optimizers."""
        for rows in group_by_start(self.recipes):
            model, optimizer = starting_point(self.recipes[rows[0]], self.family, self.processes, self.data)
            if rows[0] == 0:
                self._allocate(model, optimizer)
            for row in rows:
                self.replicas.copy_in(row, model, optimizer)
        usual = inspect.signature(self.shared.optimizer_class()).parameters
        columns = {}
        for name in PER_RUN:
            default = usual[name].default if name in usual else 0.0
            values = [float(recipe.optimizer.init_args.get(name, default)) for recipe in self.recipes]
            columns[name] = torch.tensor(values, dtype=self.shared.dtype()).unsqueeze(1).to(self.device)
        self.hyper = Hyperparameters(shared=self.optimizer.shared, **columns)

    def _allocate(self, model: nn.Module, optimizer: Optimizer) -> None:
        decays = any(recipe.optimizer.init_args.get("weight_decay", 1) for recipe in self.recipes)
        self.optimizer = find_stack_optimizer(type(optimizer), {**optimizer.param_groups[0], "weight_decay": decays})
        frozen = [name for name, p in naming.parameters(model).items() if not p.requires_grad]
        if frozen:
            raise NotStackable(f"'{frozen[0]}' does not train, and a stack trains every parameter")
        layout = ParameterLayout.of(model, optimizer, self.plan)
        self.vmapped = VmappedModel(model, layout, self.shared, self.device)
        self.replicas = Replicas(layout, model, self.optimizer.state, len(self.recipes), self.shared.dtype())

    def _reset_rows(self) -> None:
        self._rows = list(range(len(self.replicas)))  # each run's row; the others are of dropped runs
        self._rates = [0.0] * len(self.replicas)  # of every row; where a run was dropped, its last
        seeds = [recipe.seeds.data for recipe in self.recipes]
        self.streams = Streams(self.data, seeds, self.shared.batch, self.device)
        self._rate_changes = {growth.at for recipe in self.recipes for growth in recipe.grow}
        self._multiple: float | None = None
        self._graph: StepGraph | None = None
        self._blocks: list[tuple[slice, Replicas, Hyperparameters]] | None = None
        self._one_thread = False
        segments = self.replicas.layout.segments
        self._segments = merge_segments(segments, self.replicas.flat.detach()) if self._compiles else segments
        self._compiled: dict[str, Callable[..., Any]] = {}
        if self._compiles:
            torch.compiler.reset()  # it gives up, silently, on a function that it has compiled for eight stacks

    def _set_compiled(self, compiles: bool) -> None:
        """Compile the step from now on, or do not; never on the CPU, where it makes a stack slower."""
        compiles = compiles and self.device.type == "cuda"
        if compiles != self._compiles:
            self._compiles = compiles
            self._keep_row_count = compiles  # compiling anew costs more than a few rows that nobody reads
            self._reset_rows()

    # ------------------------------------------------------------------------------------------- steps

    def advance(self, count: int, stop: Callable[[], bool] | None = None) -> Tensor:
        """Take `count` steps, or fewer if `stop` says so; each run's losses (steps × runs), still on the device."""
        self.vmapped.template.train()
        losses = torch.empty(count, len(self.replicas), dtype=self.shared.dtype(), device=self.device)
        norms = None if self.shared.clip is None else torch.empty_like(losses)
        taken = 0
        if self._blocks is None:
            self._blocks = self._make_blocks()
        with one_thread() if self._one_thread else nullcontext():
            for x, y in self.streams.batches(self.step, count, self._prefetch_bytes):
                if taken and stop is not None and stop():
                    break
                self._set_rates()
                losses[taken], norm = self._replay(x, y) if self.device.type == "cuda" else self._take_step(x, y)
                if norms is not None and norm is not None:
                    norms[taken] = norm
                self.step += 1
                taken += 1
        self.norms = None if norms is None else norms[:taken, self._rows]
        return losses[:taken, self._rows]

    def _set_rates(self) -> None:
        multiple = self.shared.schedule.at(self.step, self.shared.steps)
        if multiple != self._multiple or self.step in self._rate_changes:
            self._multiple = multiple
            for row, recipe in zip(self._rows, self.recipes, strict=True):
                self._rates[row] = rate_after(recipe, self.step) * multiple
            self.hyper.lr.copy_(torch.tensor(self._rates, dtype=self.hyper.lr.dtype).unsqueeze(1))

    def rate(self, row: int) -> float:
        """A run's learning rate in the last step, at the base width."""
        last = max(0, self.step - 1)
        return rate_after(self.recipes[row], last) * self.shared.schedule.at(last, self.shared.steps)

    def _replay(self, x: Tensor, y: Tensor) -> StepResult:
        if self._graph is None and self._can_capture:
            try:
                self._graph = StepGraph(self._take_step, self.replicas, x, y)
            except NotCapturable:
                self._can_capture = False
        return self._take_step(x, y) if self._graph is None else self._graph.replay(x, y)

    def _take_step(self, x: Tensor, y: Tensor) -> StepResult:
        assert self._blocks is not None
        shared = self.streams.shared
        results = [
            self._step_block(replicas, hyper, x if shared else x[rows], y if shared else y[rows])
            for rows, replicas, hyper in self._blocks
        ]
        if len(results) == 1:
            return results[0]
        losses, norms = zip(*results, strict=True)
        return torch.cat(losses), None if norms[0] is None else torch.cat(norms)

    def _make_blocks(self) -> list[tuple[slice, Replicas, Hyperparameters]]:
        """The rows in blocks; on a CPU small enough for what a step keeps to stay in its caches."""
        rows = count = len(self.replicas)
        if self.device.type == "cpu":
            x, y = self.streams.first_row(self.step)
            needed = max(1, self.vmapped.bytes_for_backward(*self.replicas.row(0), x, y))
            most = max(_SMALLEST_BLOCK, _CACHED * torch.get_num_threads() // needed)
            count = math.ceil(rows / math.ceil(rows / most))
            self._one_thread = count * needed < _ONE_THREAD
        if count == rows:
            return [(slice(None), self.replicas, self.hyper)]
        blocks = [slice(start, min(start + count, rows)) for start in range(0, rows, count)]
        return [(block, self.replicas.view(block), self.hyper.rows(block)) for block in blocks]

    def _step_block(self, replicas: Replicas, hyper: Hyperparameters, x: Tensor, y: Tensor) -> StepResult:
        skipping = self.shared.on_nonfinite == "skip"
        before = {name: tensor.clone() for name, tensor in replicas.tensors().items()} if skipping else {}
        with self.vmapped.folded():
            losses = self._part("losses", self.vmapped.losses)(
                replicas.flat, replicas.buffers, x, y, self.streams.shared
            )
        (gradient,) = torch.autograd.grad(losses.sum(), replicas.flat)
        with torch.no_grad():
            sound = losses.isfinite() & gradient.abs().amax(1).square().isfinite() if skipping else None
            norms = self._part("update", self._update)(gradient, replicas, hyper)
            if sound is not None:
                replicas.put_back(before, sound)
                losses = torch.where(sound, losses, math.nan)
        return losses.detach(), norms

    def _part(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        if self._compiles and name not in self._compiled:
            self._compiled[name] = compile_quietly(function, dynamic=False)
        return self._compiled.get(name, function)

    def _update(self, gradient: Tensor, replicas: Replicas, hyper: Hyperparameters) -> Tensor | None:
        norms = None
        if self.shared.clip is not None:
            norms = clip_rows(gradient, self.shared.clip, replicas.layout.segments)
        replicas.steps_taken += 1
        self.optimizer.update(replicas.flat, gradient, replicas.state, replicas.steps_taken, hyper, self._segments)
        return norms

    # ------------------------------------------------------------------------------------------- between steps

    @torch.no_grad()
    def evaluate(self) -> list[dict[str, float]]:
        """Each run's loss on the evaluation set, and its accuracy where targets are classes."""
        batch, rows = self.shared.evaluation.batch or self.shared.batch, len(self.recipes)
        flat = self._of_runs(self.replicas.flat.detach())
        held = {name: self._of_runs(buffer) for name, buffer in self.replicas.buffers.items()}
        most = max(1, rows * self.shared.batch // batch)  # so that it takes no more memory than training
        totals = torch.zeros(4, rows, dtype=torch.float64, device=self.device)  # loss, examples, correct, targets
        self.vmapped.template.eval()
        try:
            for x, y in self.data.evaluation(batch):
                for some in torch.arange(rows, device=self.device).split(most):
                    part = slice(int(some[0]), int(some[-1]) + 1)
                    buffers = {name: buffer[part] for name, buffer in held.items()}
                    loss, right = self.vmapped.scores(flat[part], buffers, x, y)
                    is_class = right >= 0
                    counts = (
                        loss * len(x),
                        torch.full_like(loss, len(x)),
                        right.clamp(min=0),
                        is_class.double() * y.numel(),
                    )
                    totals[:, part] += torch.stack(counts)
        finally:
            self.vmapped.template.train()
        return [scores_of(column) for column in totals.T.tolist()]

    def finite_runs(self) -> list[bool]:
        """Whether each run's parameters and optimizer state are finite."""
        finite = self.replicas.finite_rows()
        return [finite[row] for row in self._rows]

    def keep_runs(self, rows: Sequence[int]) -> None:
        """Go on with these runs alone, so that the others cost nothing more.

        A compiled step depends on the number of rows. There, the rows of dropped runs stay until they are half of
        all, and compute what nobody reads; so the step, its graph and its compiled code go on as they are.
        """
        self.recipes = [self.recipes[row] for row in rows]
        self._rows = [self._rows[row] for row in rows]
        if self._keep_row_count and 2 * len(self._rows) > len(self.replicas):
            return
        self.replicas.keep_rows(self._rows)
        self.hyper = self.hyper.rows(self._rows)
        self._reset_rows()

    def _of_runs(self, rows: Tensor) -> Tensor:
        """The rows of the runs; a copy only where there are rows of dropped runs."""
        return rows if self._rows == list(range(len(rows))) else rows[self._rows]

    def export(self, row: int) -> tuple[nn.Module, Optimizer]:
        """One run's model and optimizer, as `train` would have them."""
        no_growth = GrowthSettings(how="copies").growth_settings
        fresh = replace(self.recipes[row], start=None, start_width=None, **no_growth)
        model, optimizer = starting_point(fresh, self.family, self.processes)
        self.replicas.copy_out(self._rows[row], model, optimizer)
        for group in optimizer.param_groups if self.step else ():
            group["lr"] = self.rate(row) * group["lr_factor"]
        return model, optimizer

    # ------------------------------------------------------------------------------------------- on disk

    def save(self, path: Path, extra: Mapping[str, Any]) -> None:
        """Write where the stack stands, whole or not at all; extra: JSON values and tensors."""
        tensors = {name: self._of_runs(tensor.cpu()) for name, tensor in self.replicas.tensors().items()}
        checkpoint.save_states(
            path, tensors, None, None, {"stack": {"step": self.step, "compiled": self._compiles, **extra}}
        )

    @torch.no_grad()
    def restore(self, saved: checkpoint.Checkpoint) -> None:
        """Go on where a stack of the same runs stood."""
        own = self.replicas.tensors()
        shapes = {name: self._of_runs(tensor).shape for name, tensor in own.items()}
        theirs = {name: tensor.shape for name, tensor in saved.model.items()}
        if shapes != theirs:
            odd = next((name for name in {**shapes, **theirs} if shapes.get(name) != theirs.get(name)), "")
            raise MupscaleError(f"this is not where these runs stood: '{odd}' has another shape")
        for name, tensor in own.items():
            tensor[self._rows] = saved.model[name].to(tensor)
        self._set_compiled(bool(saved.extra["stack"].get("compiled", self._compiles)))  # so that it rounds as before
        self.step, self._multiple = int(saved.extra["stack"]["step"]), None


@contextmanager
def one_thread() -> Iterator[None]:
    """One thread for torch: small models train as fast, and do not wait for cores that other programs use."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
