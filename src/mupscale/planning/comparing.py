"""Two models with generic weights, the wide one's made of the narrow one's by a plan: do they compute the same?

Outputs and gradients are compared, in float64. Large models run in single precision instead, with the weights of one
block at a time: these are written when the block is called, and once more for its backward pass. So a check takes the
memory of one block, and of what lies in no block, and not several copies of both models.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from mupscale.core import Axis, Entry, Plan, index_of_old, is_new, multiplier, naming
from mupscale.planning import tracing
from mupscale.system import MupscaleError, warn

LARGE = 1 << 25
"""Numbers in two models' parameters from which on they are not copied in float64."""

EMPTY = "the batch is empty, so it shows nothing: pass inputs= with at least one row"

_UNITS = 256  # of an axis, at most, whose gradients are compared

_in_full: ContextVar[bool] = ContextVar("in_full", default=False)

_SILENT = 1e-100
"""What weights of new units are while these are silent: nothing beside the old ones, but its own length divides it, as
weight_norm has it. In single precision it is 0."""

Shapes = Sequence[tuple[int, ...]]
Write = Callable[[str, Tensor], object]
"""Writes the weight of this name into a tensor."""


def is_large(*models: nn.Module) -> bool:
    """Whether models are too large to be copied in float64, several times."""
    return not _in_full.get() and sum(p.numel() for model in models for p in model.parameters()) > LARGE


@contextmanager
def in_full_precision() -> Iterator[None]:
    """Inside, no model counts as large: a miniature is looked at in float64, and so are models that have none."""
    token = _in_full.set(True)
    try:
        yield
    finally:
        _in_full.reset(token)


def relative_difference(ours: Tensor, theirs: Tensor) -> float:
    """‖ours − theirs‖ / ‖ours‖, in double precision; infinite if either is not finite."""
    a, b = ours.double(), theirs.double()
    value = float((a - b).norm()) / (float(a.norm()) or 1.0)
    return math.inf if math.isnan(value) else value


_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}


def are_close(expected: Tensor, actual: Tensor, loosened: float = 1.0, size: float = 0.0) -> bool:
    """Whether two tensors are equal up to the rounding of one operation on numbers of their size, or of this one."""
    tolerance = loosened * _TOLERANCE.get(expected.dtype, 3e-2)
    allowed = tolerance * max(size, largest_number(expected)) + 1e-300
    if expected.shape == actual.shape:
        difference = largest_number(actual - expected, nan=math.inf)
        if difference <= allowed or 2 * allowed < difference < math.inf:  # between them, it depends on the entry's size
            return difference <= allowed
    return bool(torch.allclose(actual, expected, rtol=tolerance, atol=allowed, equal_nan=True))


def largest_number(tensor: Tensor, nan: float | None = None) -> float:
    """The largest absolute value in a tensor; where there are nan or inf, of the others, or `nan` where given."""
    if not tensor.numel():
        return 0.0
    largest = float(torch.linalg.vector_norm(tensor, math.inf))
    if math.isfinite(largest):
        return largest
    return nan if nan is not None else largest_number(tensor[tensor.isfinite()])


def _streamed(original: nn.Module, write: Write, in_blocks: bool) -> nn.Module:
    """A copy of a model in float32, whose blocks hold their weights in one stretch of memory while they run.

    write: gives a weight its values. in_blocks: False for all weights at once.
    """
    plain = naming.unwrap(original)
    memo: dict[int, Any] = dict(tracing.computed_tensors(plain))
    memo |= {id(p): nn.Parameter(p.new_empty(()).float().expand(p.shape), p.requires_grad) for p in plain.parameters()}
    for buffer in plain.buffers():
        memo[id(buffer)] = buffer.detach().float() if buffer.is_floating_point() else buffer.detach().clone()
    model = copy.deepcopy(plain, memo)
    tracing.silence_dropout(model)
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.sparse = True  # a gradient of the few rows that were looked up, beside a readout's of all
    names = {id(p): name for name, p in naming.parameters(model).items()}

    @torch.no_grad()
    def fill(parameters: Sequence[nn.Parameter]) -> None:
        for p in parameters:
            write(names[id(p)], p.detach())

    def filling(forward: Callable[..., Any], own: Sequence[nn.Parameter]) -> Callable[..., Any]:
        """A block's forward pass behind the filling of its weights; both are done once more for the backward pass."""

        def call(*args: Any, **kwargs: Any) -> Any:
            fill(own)
            return forward(*args, **kwargs)

        def call_twice(*args: Any, **kwargs: Any) -> Any:
            graph = torch.is_grad_enabled()
            return checkpoint(call, *args, use_reentrant=False, **kwargs) if graph else call(*args, **kwargs)

        return call_twice

    tied, lists, blocks = tied_parameters(model), list[str](), list[tuple[nn.Module, list[nn.Parameter]]]()
    for path, module in model.named_modules() if in_blocks else ():
        inside = any(path.startswith(f"{outer}.") or not outer for outer in lists)
        if isinstance(module, nn.ModuleList | nn.Sequential) and len(module) > 1 and not inside:
            lists.append(path)  # the outermost ones; with the parameters that nothing else has
            for block in module:
                if own := [p for p in block.parameters() if id(p) not in tied]:
                    blocks.append((block, own))
    most = max((sum(p.numel() for p in own) for _, own in blocks), default=0)
    memory = torch.empty(most, device=next((p.device for _, own in blocks for p in own), None))
    for block, own in blocks:
        start = 0
        for p in own:
            p.data = memory[start : start + p.numel()].view(p.shape)
            start += p.numel()
        block.forward = filling(block.forward, own)
    within = {id(p) for _, own in blocks for p in own}
    rest = [p for p in model.parameters() if id(p) not in within]
    for p in rest:
        p.data = torch.empty(p.shape, device=p.device)
    fill(rest)
    return model


def tied_parameters(model: nn.Module) -> set[int]:
    """The parameters that several blocks, or other parts of the model, share."""
    counts = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    return {number for number, count in counts.items() if count > 1}


class GenericPair:
    """Copies of two models and a batch: the narrow one with generic weights, the wide one with what is made of these.

    silent: they are put into the places of old units, with zeros elsewhere, as a growth by fresh units leaves them; and
    norms look at old units alone. Otherwise they are copied. in_blocks: large models hold the weights of one block.
    new_units: as for _look_at_old_units_alone.
    """

    def __init__(
        self,
        narrow: nn.Module,
        wide: nn.Module,
        plan: Plan,
        batch: Any,
        *,
        silent: bool = False,
        in_blocks: bool = True,
        new_units: list[Tensor] | None = None,
    ) -> None:
        self.plan, self.silent, self.is_large = plan, silent, is_large(narrow, wide)
        small: nn.Module
        if self.is_large:
            weights = naming.parameters(narrow)

            def drawn(name: str) -> Tensor:
                return tracing.generic_numbers(weights[name], name, seed=1)

            small = _streamed(narrow, lambda name, target: target.copy_(drawn(name)), in_blocks)
            large = _streamed(wide, lambda name, target: self._write(name, drawn(name), target), in_blocks)
            tracing.take_modes(large, narrow)
            tracing.take_whole_numbers(large, narrow)
            self.batch = tree_map(lambda x: x.float() if isinstance(x, Tensor) and x.is_floating_point() else x, batch)
            self.weight: Callable[[str], Tensor] = drawn
            ours, theirs = naming.buffers(small), naming.buffers(large)
        else:
            small, self.batch = tracing.in_float64(narrow, batch, generic=1)
            large, _ = tracing.in_float64(wide, (), like=narrow)
            self.weight = naming.parameters(small).__getitem__
            ours, theirs = tracing.saved_tensors(small), tracing.saved_tensors(large)
        self.models = small, large
        with torch.no_grad():
            for name, tensor in ours.items():
                is_of_numbers = tensor.is_floating_point() or tensor.is_complex()
                if (name in plan.parameters or name in plan.buffers) and is_of_numbers:
                    self._write(name, tensor, theirs[name])
            if silent:
                self._look_at_old_units_alone(new_units)

    def _write(self, name: str, weight: Tensor, target: Tensor) -> None:
        entry, is_parameter = self.plan[name], name in self.plan.parameters
        if self.silent:
            old = _kept(entry, weight) if is_parameter else weight
            target.fill_(_SILENT)[index_of_old(entry.narrow, entry.axes)] = old
        else:
            entry.widened(weight, target, is_buffer=not is_parameter)

    def _look_at_old_units_alone(self, new_units: list[Tensor] | None) -> None:
        """Let the wide model's norms do to the old units what the narrow one's do, and give zeros for new ones.

        new_units: a list that what the norms are given for new units is put into as they are called. With it
        GroupNorms, which mix old and new units whatever these start at, are left as they are.
        """
        ours, theirs = map(naming.modules, self.models)
        for name, kind in self.plan.norms.items():
            path, entry = name.rpartition(".")[0], self.plan[name]
            if not (kind in ("layer", "rms") or (kind == "group" and new_units is None)):
                continue
            own = naming.copy_model(ours[path])
            for local, p in own.named_parameters(recurse=False):
                full = f"{path}.{local}".lstrip(".")
                p.data = _kept(self.plan[full], self.weight(full))
            index = index_of_old(entry.narrow, entry.axes)[0]
            new = is_new(entry.axes[0], entry.narrow[0]).nonzero()[:, 0]

            def old_units_alone(
                x: Tensor,
                norm: nn.Module = own,
                index: Any = index,
                new: Tensor = new,
                is_group: bool = kind == "group",
                count: int = entry.wide[0],
            ) -> Tensor:
                dim = 1 if is_group or x.shape[-1] != count else -1  # some LayerNorms are of channels before positions
                units = x.movedim(dim, -1)
                if new_units is not None:
                    new_units.append(units[..., new])
                out = torch.zeros_like(units)
                out[..., index] = norm(units[..., index].movedim(-1, dim)).movedim(dim, -1)
                return out.movedim(-1, dim)

            theirs[path].forward = old_units_alone

    def outputs(self) -> list[list[Tensor]]:
        """Of both, the tensors of floating point that they return for the batch."""
        outputs = []
        for model in self.models:
            with tracing.drawing(0, model.parameters()):
                returned = tracing.run_on_batch(model, self.batch, in_double=not self.is_large)
            outputs.append([t for t in tracing.tensors_in(returned) if t.is_floating_point()])
        return outputs


def _kept(entry: Entry, weight: Tensor) -> Tensor:
    """What becomes of a weight of old units beside fresh ones."""
    return weight * float(entry.keep) + float(entry.offset) * (float(entry.keep) - 1)


@dataclass
class Compared:
    """Why two models differ on a batch, in words, or nothing; the shapes of their outputs.

    gradients: of the narrow one, where they are not large.
    """

    reason: str = ""
    shapes: tuple[Shapes, Shapes] = ((), ())
    gradients: dict[str, Tensor] = field(default_factory=dict)


def compare_copies(narrow: nn.Module, wide: nn.Module, plan: Plan, batch: Any) -> Compared:
    """Compare outputs and gradients on a batch, the wide model's weights being copies as planned."""
    if is_large(narrow, wide):
        with suppress(Exception):  # a block whose weights are used elsewhere, or that is not alike when it is run again
            return _compare(GenericPair(narrow, wide, plan, batch))
    return _compare(GenericPair(narrow, wide, plan, batch, in_blocks=False))


_LOOSENED = {False: (5, 1000, 1e-3), True: (20, 20, 5e-3)}
"""Of outputs and gradients, by whether models are large: how much more than one operation's rounding is allowed; and
from which part of the largest gradient on. Single precision through many blocks rounds by some 1e-6, and a wrong order
or constant is off by a good part."""


@torch.enable_grad()
def _compare(pair: GenericPair) -> Compared:
    of_outputs, of_gradients, part = _LOOSENED[pair.is_large]
    unused = [pair.outputs()]
    ours, theirs = unused[0]
    shapes = [tuple(t.shape) for t in ours], [tuple(t.shape) for t in theirs]
    _check_numbers(ours)
    for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if a.shape == b.shape and not are_close(a.detach(), b.detach(), of_outputs):  # others are units, as copies
            off = relative_difference(a.detach(), b.detach())
            said = f"output {number} of the wide model differs from the narrow one's by {off:.1e} on the batch"
            return Compared(said if pair.is_large else said + _first_module(pair), shapes)
    del ours, theirs
    samples, gradients, wrong = dict[str, _Sample](), dict[str, Tensor](), list[str]()
    largest = 0.0

    def look(p: Tensor, name: str, is_wide: bool) -> None:
        """Look at a gradient as soon as it is whole; it is not kept in the model."""
        nonlocal largest
        gradient, p.grad = p.grad if p.grad is None else p.grad.to_dense(), None
        if gradient is not None and is_wide:
            if name in samples and not samples[name].agrees(gradient, of_gradients, part * largest):
                wrong.append(name)
        elif gradient is not None:
            samples[name] = _Sample(pair.plan.parameters[name], gradient)
            largest = max(largest, largest_number(samples[name].values))
            if not pair.is_large:
                gradients[name] = gradient

    def differentiate() -> None:
        outputs = unused.pop() if unused else pair.outputs()
        wrong.clear()
        sizes = [[tuple(output.shape) for output in each] for each in outputs]  # in training mode there may be fewer
        for model, values in zip(pair.models, outputs, strict=True):
            loss = tracing.gradient_loss(values, *sizes)
            if loss.requires_grad:
                loss.backward()
            for p in model.parameters() if pair.is_large else ():
                p.data = p.new_empty(0)  # their memory is for what follows

    hooks = [
        p.register_post_accumulate_grad_hook(partial(look, name=name, is_wide=bool(is_wide)))
        for is_wide, model in enumerate(pair.models)
        for name, p in naming.parameters(model).items()
        if p.requires_grad
    ]
    try:
        tracing.differentiated(differentiate, pair.models)
    finally:
        for hook in hooks:  # a parameter holds its hooks where the collector cannot see, and these hold its model
            hook.remove()
    _check_numbers([*gradients.values()])
    if wrong:
        said = f"the copies of '{wrong[0]}' do not each get their share of its gradient on the batch"
        return Compared(said, shapes, gradients)
    warn_of_kept_losses(*pair.models)
    return Compared("", shapes, gradients)


class _Sample:
    """A part of a narrow gradient, and the places of its copies in the wide one.

    Units of an axis that grows are taken at random. Of other long axes, as of a table's rows, those with the largest
    gradients are, since most have none.
    """

    def __init__(self, entry: Entry, gradient: Tensor) -> None:
        self.share = float(entry.rule.gradient())
        generator = torch.Generator().manual_seed(0)
        self.wide = list[Tensor]()
        for d, (n, m) in enumerate(zip(entry.narrow, entry.wide, strict=True)):
            index = torch.arange(m)
            if m > _UNITS and n != m:
                index = torch.randperm(m, generator=generator)[:_UNITS].sort().values
            elif m > _UNITS:
                others = [e for e in range(gradient.dim()) if e != d]
                index = (gradient.abs().amax(others) if others else gradient.abs()).topk(_UNITS).indices.cpu()
            self.wide.append(index)
            source = entry.axes[d].source(n)[index] if n != m else index
            gradient = gradient.index_select(d, source.to(gradient.device))
        self.values = gradient.clone()

    def agrees(self, gradient: Tensor, loosened: float, faint: float) -> bool:
        """Whether the copies in a wide gradient have their shares; rounding counts as of numbers of this size."""
        for d, index in enumerate(self.wide):
            gradient = gradient.index_select(d, index.to(gradient.device))
        return are_close(self.values * self.share, gradient, loosened, size=faint * self.share)


def _check_numbers(tensors: Sequence[Tensor]) -> None:
    """What is nan on both sides looks equal, and so does nothing at all: there must be numbers to compare."""
    if tensors and not any(tensor.numel() for tensor in tensors):
        raise MupscaleError(EMPTY)
    if any(tensor.isnan().all() and tensor.numel() for tensor in tensors):
        raise MupscaleError(
            "the narrow model computes nan on the batch, so the check cannot tell whether copies are exact. Pass "
            "inputs on which outputs and gradients are finite"
        )


def warn_of_kept_losses(narrow: nn.Module, wide: nn.Module) -> None:
    """Warn where modules keep a number of their last run that can be differentiated and is not the same at both widths.

    It may be a part of the loss that is not in the outputs, which then weighs more the wider the model is.
    """
    ours, theirs = map(_kept_numbers, (narrow, wide))
    for name in ours:
        if name in theirs and not are_close(ours[name], theirs[name], loosened=100):
            before, after = float(ours[name]), float(theirs[name])
            warn(
                f"'{name}', which the model computes besides its outputs, is {before:.4g} in the narrow model and "
                f"{after:.4g} in the wide one. If it is part of the loss, training differs. Make it a mean over units "
                "instead of a sum, or give it less weight in the wide model's loss"
            )


def _kept_numbers(model: nn.Module) -> dict[str, Tensor]:
    """Numbers that modules keep as attributes, alone or in lists and dicts, with the graph that they come from."""
    numbers = {}
    for path, module in naming.modules(model).items():
        for attribute, value in vars(module).items():
            if attribute not in ("_parameters", "_buffers", "_modules"):
                for place, tensor in enumerate(tracing.tensors_in(value)):
                    if tensor.numel() == 1 and tensor.grad_fn is not None and tensor.is_floating_point():
                        index = f"[{place}]" if tensor is not value else ""
                        numbers[f"{path}.{attribute}".lstrip(".") + index] = tensor.detach()
    return numbers


def _first_module(pair: GenericPair) -> str:
    """The module in which two models begin to differ, in words; none where no module's output shows it.

    What draws random numbers may differ for that alone.
    """
    if random := tracing.why_random(pair.models[0], pair.batch):
        return f" ({random})"
    first = find_parting(*pair.models, pair.batch, pair.plan)
    return "" if first is None else f", and '{first.path}' is the first module that does (by {first.relative:.1e})"


_ALIKE = 1e-8  # in float64


@dataclass(frozen=True)
class Parting:
    """The first module whose output differs at old units, and by how much. last: the one before it that agrees, or ''.

    weights: the module's own.
    """

    path: str
    last: str
    weights: Mapping[str, Entry]
    relative: float

    def __str__(self) -> str:
        entry = None if self.matrix is None else self.weights[self.matrix]
        shapes = "" if entry is None else f" (weight {entry.narrow} → {entry.wide})"
        before = f"they agree up to '{self.last}', and " if self.last else ""
        return f"{before}'{self.path or 'the model'}'{shapes} is the first to differ (by {self.relative:.1e})"

    @property
    def matrix(self) -> str | None:
        """The name of the module's first weight that may read units; none where it has none."""
        return next((name for name, entry in self.weights.items() if len(entry.narrow) > 1), None)


@torch.no_grad()
def find_parting(
    small: nn.Module, large: nn.Module, batch: Any, plan: Plan, tolerance: float = _ALIKE
) -> Parting | None:
    """Where two models part; the wide one holds the narrow one's weights in the places of old units, or copies."""
    with tracing.Recorder(small) as ours, tracing.Recorder(large) as theirs:
        for model in (small, large):
            tracing.run_in_float64(model, batch)
    last = ""
    for path, output in ours.outputs.items():
        weights = {name: entry for name, entry in plan.parameters.items() if name.rpartition(".")[0] == path}
        factors = {1.0, *(float(entry.keep if plan.mup else entry.fold) for entry in weights.values())}
        off = _difference_at_old_units(output, theirs.outputs.get(path), weights, factors, tolerance)
        if off is not None and not off <= tolerance:
            return Parting(path, last, weights, off)
        if off is not None and any(len(entry.narrow) > 1 for entry in weights.values()):
            last = path
    return None


def _difference_at_old_units(
    ours: Tensor, theirs: Tensor | None, weights: Mapping[str, Entry], factors: Collection[float], tolerance: float
) -> float | None:
    """How far the old units of a module's output are from the narrow one's; None where their places are not known.

    factors: what the module's own weights are multiplied by, for a constant that comes later, which is no difference.
    A module that has weights of its own and is like the narrow one's in no order of its units differs.
    """
    if theirs is None or ours.dim() != theirs.dim():
        return None
    grown = [d for d in range(ours.dim()) if ours.shape[d] != theirs.shape[d]]
    if len(grown) > 1:
        return None
    orders: list[dict[int, Axis]] = [{}]
    if grown:
        (dim,) = grown
        n, wide = sizes = ours.shape[dim], theirs.shape[dim]
        known = {e.axes[d] for e in weights.values() for d in e.out if (e.narrow[d], e.wide[d]) == sizes}
        blocks = (block for block in range(1, n + 1) if n % block == 0 and wide % block == 0)
        orders = [{dim: axis} for axis in known or [Axis(multiplier(n, wide), block) for block in blocks]]
    at_old = (theirs[index_of_old(tuple(ours.shape), axes)] if axes else theirs for axes in orders)
    off = min((relative_difference(ours * factor, old) for old in at_old for factor in factors), default=math.inf)
    return off if off <= tolerance or weights or not grown else None
