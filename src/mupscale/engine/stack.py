"""Many training runs of one architecture as one program: parameters stacked, the model vmapped over them.

What differs between the runs (learning rate, weight decay, eps, noise, seeds, the checkpoint they start from) is a
tensor with an entry for each; everything else is shared. Each run takes the steps that `train` would take with its
recipe, so a stack is a faster way to the same numbers, never another experiment. On CUDA a step is one graph.
"""

from __future__ import annotations

import inspect
import math
import warnings
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
from mupscale.engine.cuda_graph import Graph, Losses, NotCapturable
from mupscale.engine.replicas import Layout, Replicas
from mupscale.engine.stackable import OWN, NotStackable, check_alike, rate_after, same_beginnings
from mupscale.engine.updates import Hyper, Kind, as_one, clip, kind_of
from mupscale.engine.vmapped import Program
from mupscale.system import MupscaleError
from mupscale.train import Processes, Recipe, check_data, cost_per_example, starting_point

__all__ = ["NotStackable", "Stack"]

_CACHED = 10 << 20  # bytes for which a core's caches are good, from measurements at widths 32 to 256
_LEAST = 8  # runs in a block: with fewer, calls cost more than caches save
_SHARED = 4 << 20  # bytes kept by a block below which threads wait for each other more than they help
_AHEAD = 64 << 20  # bytes of batches that are made at once on a GPU: a launch for each would take longer than a step


class Stack:
    """Runs trained together: `Stack(recipes, device).advance(100)` takes a hundred steps with each of them.

    Recipes must have the same model, width, data, batch, steps and schedule; `NotStackable` says what is in the way.
    flops_per_step: training FLOPs of one step of one run, None where the model's cost cannot be counted.
    norms: of the gradients in the last `advance`, before clipping (steps × runs); None where nothing is clipped.
    recipes: of the runs, by whose order all is numbered; `replicas` may also have rows of runs that have gone (`keep`).
    """

    def __init__(self, recipes: Sequence[Recipe], device: torch.device, data: Data | None = None) -> None:
        self.recipes, self.device, self.step = list(recipes), device, 0
        self.shared = check_alike(recipes)
        self.data: Data = data if data is not None else self.shared.make_data().to(device, self.shared.dtype())
        check_data(self.data)
        self.family = self.shared.family()
        self.plan = self.family.plan(self.shared.width)
        cost = cost_per_example(self.family, self.shared.width, self.data, self.shared)
        self.flops_per_step = None if cost is None else cost * self.shared.batch
        self.norms: Tensor | None = None
        self._captures = True
        self._compiles = bool(self.shared.compile) and device.type == "cuda"  # on the CPU it makes a stack slower
        self._dear = self._compiles  # to change the number of rows: compiling anew costs more than some for nobody
        self._ahead = _AHEAD if device.type == "cuda" else 0
        self._begin()
        self._changed()
        self._check()

    # ------------------------------------------------------------------------------------------- beginning

    def _begin(self) -> None:
        """Start every run as `train` does, and stack what comes out."""
        for rows in same_beginnings(self.recipes):
            model, optimizer = starting_point(self.recipes[rows[0]], self.family, Processes(self.device))
            if rows[0] == 0:
                self._allocate(model, optimizer)
            for row in rows:
                self.replicas.take(row, model, optimizer)
        usual = inspect.signature(self.shared.optimizer_class()).parameters
        columns = {}
        for name in OWN:
            default = usual[name].default if name in usual else 0.0
            values = [float(recipe.optimizer.init_args.get(name, default)) for recipe in self.recipes]
            columns[name] = torch.tensor(values, dtype=self.shared.dtype()).unsqueeze(1).to(self.device)
        self.hyper = Hyper(shared=self.kind.shared, **columns)

    def _allocate(self, model: nn.Module, optimizer: Optimizer) -> None:
        decays = any(recipe.optimizer.init_args.get("weight_decay", 1) for recipe in self.recipes)
        kind = kind_of(type(optimizer), {**optimizer.param_groups[0], "weight_decay": decays})
        if isinstance(kind, str):
            raise NotStackable(f"{kind} among what can train as one program")
        frozen = [name for name, p in naming.parameters(model).items() if not p.requires_grad]
        if frozen:
            raise NotStackable(f"'{frozen[0]}' does not train, and a stack trains every parameter")
        self.kind: Kind = kind
        layout = Layout.of(model, optimizer, self.plan)
        self.program = Program(model, layout, self.shared, self.device)
        self.replicas = Replicas(layout, model, kind.state, len(self.recipes), self.shared.dtype())

    def _changed(self) -> None:
        """After rows have come or gone: which stream of data each reads (runs with one seed share its batches)."""
        self._alive = list(range(len(self.replicas)))  # each run's row; the others are of runs that have gone
        self._rates = [0.0] * len(self.replicas)  # of every row; where a run has gone, its last
        seeds = [recipe.seeds.data for recipe in self.recipes]
        self.streams = list(dict.fromkeys(seeds))
        self._stream_of = torch.tensor([self.streams.index(seed) for seed in seeds], device=self.device)
        self._drops = {growth.at for recipe in self.recipes for growth in recipe.grow}
        self._multiple: float | None = None
        self._graph: Graph | None = None
        self._blocks: list[tuple[slice, Replicas, Hyper]] | None = None
        self._one_thread = False
        segments = self.replicas.layout.segments
        self._segments = as_one(segments, self.replicas.flat.detach()) if self._compiles else segments
        self._compiled: dict[str, Callable[..., Any]] = {}
        if self._compiles:
            torch.compiler.reset()  # it gives up, silently, on a function that it has compiled for eight stacks

    def _check(self) -> None:
        """A few examples under vmap, trained on and evaluated on, before anybody relies on it."""
        row, buffers = self.replicas.one(0)
        x, y = self.data.batch(self.streams[0], 0, min(self.shared.batch, 8))
        self.program.check(row, buffers, x, y)
        x, y = next(iter(self.data.evaluation(self.shared.evaluation.batch or self.shared.batch)))
        self.program.check_scores(row, buffers, x[:8], y[:8])

    # ------------------------------------------------------------------------------------------- steps

    def advance(self, count: int, stop: Callable[[], bool] | None = None) -> Tensor:
        """Take so many steps, fewer if told to stop; each run's loss at each (steps × runs), still on the device."""
        self.program.template.train()
        losses = torch.empty(count, len(self.replicas), dtype=self.shared.dtype(), device=self.device)
        norms = None if self.shared.clip is None else torch.empty_like(losses)
        taken = 0
        if self._blocks is None:
            self._blocks = self._cut()
        with one_thread() if self._one_thread else nullcontext():
            for x, y in self._batches(count):
                if taken and stop is not None and stop():
                    break
                self._set_rates()
                losses[taken], norm = self._replay(x, y) if self.device.type == "cuda" else self._take_step(x, y)
                if norms is not None and norm is not None:
                    norms[taken] = norm
                self.step += 1
                taken += 1
        self.norms = None if norms is None else norms[:taken, self._alive]
        return losses[:taken, self._alive]

    def _batches(self, count: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of the next steps: one for all rows, or one for each."""
        batch, at, last = self.shared.batch, self.step, self.step + count
        own = len(self.streams) not in (1, len(self.replicas))  # more rows than streams
        ahead = 1
        while at < last:
            ahead = min(ahead, last - at)
            stretches = [self.data.batch(seed, at * batch, ahead * batch) for seed in self.streams]
            xs, ys = (_by_step(parts, ahead) for parts in zip(*stretches, strict=True))
            for x, y in zip(xs, ys, strict=True):
                yield (x[self._stream_of], y[self._stream_of]) if own else (x, y)
            at += ahead
            ahead = max(1, self._ahead // (xs[0].nbytes + ys[0].nbytes))

    def _set_rates(self) -> None:
        multiple = self.shared.schedule.at(self.step, self.shared.steps)
        if multiple != self._multiple or self.step in self._drops:
            self._multiple = multiple
            for row, recipe in zip(self._alive, self.recipes, strict=True):
                self._rates[row] = rate_after(recipe, self.step) * multiple
            self.hyper.lr.copy_(torch.tensor(self._rates, dtype=self.hyper.lr.dtype).unsqueeze(1))

    def rate(self, row: int) -> float:
        """A run's learning rate in the last step, at the base width."""
        last = max(0, self.step - 1)
        return rate_after(self.recipes[row], last) * self.shared.schedule.at(last, self.shared.steps)

    def _replay(self, x: Tensor, y: Tensor) -> Losses:
        if self._graph is None and self._captures:
            try:
                self._graph = Graph(self._take_step, self.replicas, x, y)
            except NotCapturable:
                self._captures = False
        return self._take_step(x, y) if self._graph is None else self._graph.replay(x, y)

    def _take_step(self, x: Tensor, y: Tensor) -> Losses:
        """A step of every row, block by block."""
        assert self._blocks is not None
        shared = len(self.streams) == 1
        made = [
            self._step_of(replicas, hyper, x if shared else x[rows], y if shared else y[rows])
            for rows, replicas, hyper in self._blocks
        ]
        if len(made) == 1:
            return made[0]
        losses, norms = zip(*made, strict=True)
        return torch.cat(losses), None if norms[0] is None else torch.cat(norms)

    def _cut(self) -> list[tuple[slice, Replicas, Hyper]]:
        """The rows in blocks; on a CPU small enough for what a step keeps to stay in its caches."""
        rows = count = len(self.replicas)
        if self.device.type == "cpu":
            x, y = self.data.batch(self.streams[0], self.step * self.shared.batch, self.shared.batch)
            kept = max(1, self.program.kept(*self.replicas.one(0), x, y))
            count = math.ceil(rows / math.ceil(rows / max(_LEAST, _CACHED * torch.get_num_threads() // kept)))
            self._one_thread = count * kept < _SHARED
        if count == rows:
            return [(slice(None), self.replicas, self.hyper)]
        blocks = [slice(start, min(start + count, rows)) for start in range(0, rows, count)]
        return [(block, self.replicas.part(block), self.hyper.of(block)) for block in blocks]

    def _step_of(self, replicas: Replicas, hyper: Hyper, x: Tensor, y: Tensor) -> Losses:
        losses = self._part("losses", self.program.losses)(
            replicas.flat, replicas.buffers, x, y, len(self.streams) == 1
        )
        (gradient,) = torch.autograd.grad(losses.sum(), replicas.flat)
        with torch.no_grad():
            norms = self._part("update", self._update)(gradient, replicas, hyper)
        return losses.detach(), norms

    def _update(self, gradient: Tensor, replicas: Replicas, hyper: Hyper) -> Tensor | None:
        """Clip, and one update of all parameters of these runs."""
        norms = None
        if self.shared.clip is not None:
            norms = clip(gradient, self.shared.clip, replicas.layout.segments)
        replicas.taken += 1
        self.kind.update(replicas.flat, gradient, replicas.state, replicas.taken, hyper, self._segments)
        return norms

    def _part(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A part of the step, compiled if the recipe says so."""
        if not self._compiles:
            return function
        if name not in self._compiled:
            warnings.filterwarnings(
                "ignore", r"\s*Online softmax is disabled", UserWarning
            )  # at every stack, to no use
            self._compiled[name] = torch.compile(function, dynamic=False)
        return self._compiled[name]

    # ------------------------------------------------------------------------------------------- between steps

    @torch.no_grad()
    def evaluate(self) -> list[dict[str, float]]:
        """Each run's loss on the evaluation set, and its accuracy where targets are classes."""
        batch, rows = self.shared.evaluation.batch or self.shared.batch, len(self.recipes)
        flat = self._living(self.replicas.flat.detach())
        held = {name: self._living(buffer) for name, buffer in self.replicas.buffers.items()}
        most = max(1, rows * self.shared.batch // batch)  # so that it takes no more memory than training
        totals = torch.zeros(4, rows, dtype=torch.float64, device=self.device)  # loss, examples, correct, targets
        self.program.template.eval()
        try:
            for x, y in self.data.evaluation(batch):
                for some in torch.arange(rows, device=self.device).split(most):
                    part = slice(int(some[0]), int(some[-1]) + 1)
                    buffers = {name: buffer[part] for name, buffer in held.items()}
                    loss, right = self.program.scores(flat[part], buffers, x, y)
                    known = right >= 0
                    counts = (
                        loss * len(x),
                        torch.full_like(loss, len(x)),
                        right.clamp(min=0),
                        known.double() * y.numel(),
                    )
                    totals[:, part] += torch.stack(counts)
        finally:
            self.program.template.train()
        return [_scores(*column) for column in totals.T.tolist()]

    def sound(self) -> list[bool]:
        """Whether each run's parameters are finite."""
        sound = self.replicas.sound()
        return [sound[row] for row in self._alive]

    def keep(self, rows: Sequence[int]) -> None:
        """Go on with these runs alone, so that the others cost nothing more.

        Where another number of rows is dear, those of the others stay, computing what nobody reads, until they are
        half of all: the step, its graph and what it was compiled to go on as they are.
        """
        self.recipes = [self.recipes[row] for row in rows]
        self._alive = [self._alive[row] for row in rows]
        if self._dear and 2 * len(self._alive) > len(self.replicas):
            return
        self.replicas.keep(self._alive)
        self.hyper = self.hyper.of(self._alive)
        self._changed()

    def _living(self, rows: Tensor) -> Tensor:
        """Those of the runs; a copy only where there are others among them."""
        return rows if self._alive == list(range(len(rows))) else rows[self._alive]

    def export(self, row: int) -> tuple[nn.Module, Optimizer]:
        """One run's model and optimizer, as `train` would have them."""
        fresh = replace(self.recipes[row], start=None, noise=0.0, start_width=None)
        model, optimizer = starting_point(fresh, self.family, Processes(self.device))
        self.replicas.give(self._alive[row], model, optimizer)
        for group in optimizer.param_groups if self.step else ():
            group["lr"] = self.rate(row) * group["lr_factor"]
        return model, optimizer

    # ------------------------------------------------------------------------------------------- on disk

    def save(self, path: Path, extra: Mapping[str, Any]) -> None:
        """Write where the stack stands, whole or not at all; extra: JSON values and tensors."""
        tensors = {name: self._living(tensor.cpu()) for name, tensor in self.replicas.tensors().items()}
        checkpoint.save_states(path, tensors, None, None, {"stack": {"step": self.step, **extra}})

    @torch.no_grad()
    def restore(self, saved: checkpoint.Checkpoint) -> None:
        """Go on where a stack of the same runs stood."""
        own = self.replicas.tensors()
        shapes = {name: self._living(tensor).shape for name, tensor in own.items()}
        theirs = {name: tensor.shape for name, tensor in saved.model.items()}
        if shapes != theirs:
            odd = next((name for name in {**shapes, **theirs} if shapes.get(name) != theirs.get(name)), "")
            raise MupscaleError(f"this is not where these runs stood: '{odd}' has another shape")
        for name, tensor in own.items():
            tensor[self._alive] = saved.model[name].to(tensor)
        self.step, self._multiple = int(saved.extra["stack"]["step"]), None


@contextmanager
def one_thread() -> Iterator[None]:
    """Models so small train as fast, and do not suffer where other programs want the cores, too."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _by_step(stretches: Sequence[Tensor], steps: int) -> Tensor:
    """The streams' stretches, cut into steps; a dimension of streams follows where there are several."""
    views = [stretch.unflatten(0, (steps, -1)) for stretch in stretches]
    return views[0] if len(views) == 1 else torch.stack(views, dim=1)


def _scores(loss: float, examples: float, right: float, targets: float) -> dict[str, float]:
    accuracy = {"accuracy": right / targets} if targets else {}
    return {"loss": loss / examples, **accuracy}
