"""A plan checked on large models as they are: outputs and gradients in single precision, block by block.

Both models run with generic weights, which are drawn when a block is called and given up behind it. So a check takes
the memory of the narrow model's gradients and of one block of the wide one, and not several copies of both models.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from mupscale.core import Entry, Plan, naming
from mupscale.planning.copied_values import largest_number
from mupscale.planning.model_calls import drawing, run_on_batch
from mupscale.planning.output_gradients import gradient_loss
from mupscale.planning.tracing import computed_tensors, silence_dropout, take_modes, tensors_in
from mupscale.system import MupscaleError

LARGE = 1 << 25
"""Numbers in two models' parameters from which on they are not copied in float64."""

_QUIET = 1e-3
_SAMPLE = 1 << 14
_TOLERANCE = 2e-3  # float32 through many blocks rounds by some 1e-6; a wrong order or constant is off by a good part
_UNITS = 256  # of an axis, at most, whose gradients are compared
_FAINT = 1e-5  # of the largest gradient: rounding may be as large

_in_full: ContextVar[bool] = ContextVar("in_full", default=False)

Shapes = Sequence[tuple[int, ...]]
Weights = Callable[[str], Tensor]
Look = Callable[[str, Tensor], None]


def is_large(*models: nn.Module) -> bool:
    """Whether models are too large to be copied in float64, several times.

    >>> is_large(nn.Linear(8, 8))
    False
    """
    return not _in_full.get() and sum(p.numel() for model in models for p in model.parameters()) > LARGE


@contextmanager
def in_full_precision() -> Iterator[None]:
    """Inside, no model counts as large: a miniature is looked at in float64, and so are models that have none.

    >>> with in_full_precision():
    ...     is_large(nn.Linear(8192, 8192, device="meta"))
    False
    """
    token = _in_full.set(True)
    try:
        yield
    finally:
        _in_full.reset(token)


def in_single(batch: Any) -> Any:
    """A batch with its numbers in float32.

    >>> in_single(torch.ones(1, dtype=torch.float64)).dtype
    torch.float32
    """
    return tree_map(lambda x: x.float() if isinstance(x, Tensor) and x.is_floating_point() else x, batch)


def size_of(values: Tensor) -> float:
    """The root mean square, of a part of very many numbers.

    >>> size_of(torch.tensor([3.0, -3.0]))
    3.0
    """
    flat = values.detach().reshape(-1)
    few = flat[:: max(1, flat.numel() // _SAMPLE)].double()
    return float(few.square().mean().sqrt()) if few.numel() else 0.0


@dataclass
class FullSize:
    """What a check at full size found: in which output or gradient two models differ, and the shapes of their outputs.

    reason: nothing where they agree.
    """

    reason: str = ""
    shapes: tuple[Shapes, Shapes] = ((), ())


def check_at_full_size(narrow: nn.Module, wide: nn.Module, plan: Plan, batch: Any) -> FullSize:
    """Compare models with generic weights, one widened as planned, on a batch.

    >>> import mupscale as mu
    >>> narrow, wide = (nn.Sequential(nn.Linear(3, n), nn.Tanh(), nn.Linear(n, 2)) for n in (4, 8))
    >>> check_at_full_size(narrow, wide, mu.plan(narrow, wide), torch.ones(1, 3)).reason
    ''
    """
    batch = in_single(batch)
    try:
        return _check(narrow, wide, plan, batch, in_blocks=True)
    except Exception:  # a block whose weights are used elsewhere, or that is not alike when it is run again
        return _check(narrow, wide, plan, batch, in_blocks=False)


def generic_weights(model: nn.Module) -> Weights:
    """A function that draws a weight by its name, in float32 and as large as the model's; the same at every call.

    >>> draw = generic_weights(nn.Linear(2, 2))
    >>> torch.equal(draw("weight"), draw("weight"))
    True
    """
    ours = naming.parameters(model)

    def drawn(name: str) -> Tensor:
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        size = size_of(ours[name])
        values = torch.rand(ours[name].shape, generator=generator, dtype=torch.float32)
        return values.sub_(0.5).mul_(12**0.5 * (size if size >= _QUIET else 0.1)).to(ours[name].device)

    return drawn


def _check(narrow: nn.Module, wide: nn.Module, plan: Plan, batch: Any, in_blocks: bool) -> FullSize:
    drawn = generic_weights(narrow)
    samples: dict[str, _Sample] = {}
    largest, wrong = [0.0], list[str]()

    def keep(name: str, gradient: Tensor) -> None:
        samples[name] = _Sample(plan.parameters[name], gradient)
        largest[0] = max(largest[0], largest_number(samples[name].values))

    def compare(name: str, gradient: Tensor) -> None:
        if not wrong and name in samples and not samples[name].agrees(gradient, _FAINT * largest[0]):
            wrong.append(name)

    small = Streamed(narrow, drawn, keep, in_blocks)
    large = Streamed(wide, lambda name: plan[name].widened(drawn(name)), compare, in_blocks)
    take_modes(large.model, narrow)
    _widen_buffers(small.model, large.model, plan)
    with small.filled(), large.filled(), torch.enable_grad():
        outputs, theirs = _outputs(small.model, batch), _outputs(large.model, batch)
        if not any(t.numel() and bool(t.isfinite().any()) for t in outputs):
            raise MupscaleError(
                "the narrow model computes no finite numbers on the batch. Pass inputs on which it does"
            )
        shapes = [tuple(t.shape) for t in outputs], [tuple(t.shape) for t in theirs]
        for number, (a, b) in enumerate(zip(outputs, theirs, strict=True)):
            if a.shape == b.shape and (off := _relative(a.detach(), b.detach(), 0.0)) > _TOLERANCE:
                said = f"output {number} of the wide model differs from the narrow one's by {off:.1e} on the batch"
                return FullSize(said, shapes)
        for side, values in ((small, outputs), (large, theirs)):
            loss = gradient_loss(values, *shapes)
            if loss.requires_grad:
                loss.backward()
            side.show()
            side.empty()
    said = "the copies of '{}' do not each get their share of its gradient on the batch"
    return FullSize(said.format(wrong[0]) if wrong else "", shapes)


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
            if m > _UNITS:
                index = torch.randperm(m, generator=generator)[:_UNITS].sort().values
                if n == m:
                    others = [e for e in range(gradient.dim()) if e != d]
                    sizes = gradient.abs().amax(others) if others else gradient.abs()
                    index = sizes.topk(_UNITS).indices.cpu()
            self.wide.append(index)
            source = entry.axes[d].source(n)[index] if n != m else index
            gradient = gradient.index_select(d, source.to(gradient.device))
        self.values = gradient.clone()

    def agrees(self, gradient: Tensor, faint: float) -> bool:
        """Whether the copies in a wide gradient have their shares; what is fainter than this counts as nothing."""
        for d, index in enumerate(self.wide):
            gradient = gradient.index_select(d, index.to(gradient.device))
        least = faint * self.share * max(1, gradient.numel()) ** 0.5
        return _relative(self.values * self.share, gradient, least) <= _TOLERANCE


def _relative(ours: Tensor, theirs: Tensor, least: float) -> float:
    """The difference of two tensors beside the size of the first, or beside what is faint; both may hold nan."""
    ours, theirs = ours.nan_to_num(), theirs.nan_to_num()
    return float((ours - theirs).norm()) / max(float(ours.norm()), least, 1e-30)


def _outputs(model: nn.Module, batch: Any) -> list[Tensor]:
    with drawing(0, model.parameters()):
        return [t for t in tensors_in(run_on_batch(model, batch)) if t.is_floating_point()]


@torch.no_grad()
def _widen_buffers(small: nn.Module, large: nn.Module, plan: Plan) -> None:
    ours, theirs = naming.buffers(small), naming.buffers(large)
    for name, entry in plan.buffers.items():
        if name in ours and name in theirs and ours[name].is_floating_point():
            theirs[name].copy_(entry.widened(ours[name], factor=entry.rule.weight))


class Streamed:
    """A copy of a model that holds the weights of one block of a list at a time, and of what lies in no list all.

    weights: a weight by its name. look: what is shown the gradient of each, by its name, and does not keep it here.
    """

    def __init__(
        self, original: nn.Module, weights: Weights, look: Look = lambda *_: None, in_blocks: bool = True
    ) -> None:
        self.weights, self.look = weights, look
        plain = naming.unwrap(original)
        memo: dict[int, Any] = dict(computed_tensors(plain))
        memo |= {id(p): nn.Parameter(torch.empty(0)) for p in plain.parameters()}
        for buffer in plain.buffers():
            memo[id(buffer)] = buffer.detach().float() if buffer.is_floating_point() else buffer.detach().clone()
        self.model = copy.deepcopy(plain, memo)
        silence_dropout(self.model)
        self.names = {id(p): name for name, p in naming.parameters(self.model).items()}
        self.blocks = _blocks(self.model) if in_blocks else []
        within = {id(p) for _, own in self.blocks for p in own}
        self.rest = [p for p in self.model.parameters() if id(p) not in within]
        for block, own in self.blocks:
            block.forward = _StreamedForward(self, block.forward, own)

    def fill(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Give these weights their values, or those that lie in no block."""
        for p in self.rest if parameters is None else parameters:
            p.data = self.weights(self.names[id(p)])

    @contextmanager
    def filled(self, own: Sequence[nn.Parameter] | None = None) -> Iterator[None]:
        """Inside, these weights have values, or those that lie in no block; outside they have none."""
        self.fill(own)
        try:
            yield
        finally:
            self.empty(own)

    def empty(self, own: Sequence[nn.Parameter] | None = None) -> None:
        """Give up the values of these weights, or of those that lie in no block."""
        for p in self.rest if own is None else own:
            p.data, p.grad = torch.empty(0), None

    def show(self, own: Sequence[nn.Parameter] | None = None) -> None:
        """Hand on the gradients of these weights, or of those that lie in no block."""
        for p in self.rest if own is None else own:
            if p.grad is not None:
                gradient, p.grad = p.grad, None
                self.look(self.names[id(p)], gradient)


def _blocks(model: nn.Module) -> list[tuple[nn.Module, list[nn.Parameter]]]:
    """The blocks of the outermost lists, with the parameters that nothing else has."""
    groups = naming.aliases(model.named_parameters(remove_duplicate=False))
    shared = {group[0] for group in groups if len(group) > 1}
    tied = {id(p) for name, p in naming.parameters(model).items() if name in shared}
    found: list[tuple[nn.Module, list[nn.Parameter]]] = []
    lists: list[str] = []
    for path, module in model.named_modules():
        inside = any(path.startswith(f"{outer}.") or not outer for outer in lists)
        if isinstance(module, nn.ModuleList | nn.Sequential) and len(module) > 1 and not inside:
            lists.append(path)
            for block in module:
                if own := [p for p in block.parameters() if id(p) not in tied]:
                    found.append((block, own))
    return found


class _StreamedForward:
    """A block's forward pass, with its weights drawn for it; run again for the backward pass."""

    def __init__(self, of: Streamed, forward: Callable[..., Any], own: list[nn.Parameter]) -> None:
        self.of, self.forward, self.own = of, forward, own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            with self.of.filled(self.own):
                return self.forward(*args, **kwargs)
        flat, spec = tree_flatten((args, kwargs))
        places = [i for i, x in enumerate(flat) if isinstance(x, Tensor)]
        call = _Call(self, flat, spec, places)
        tensors = _Recomputed.apply(  # type: ignore[no-untyped-call]
            call, torch.ones((), requires_grad=True), *(flat[i] for i in places)
        )
        return call.joined(list(tensors))


class _Call:
    """One call of a block: how its tensors go back into its arguments, and into what it returned."""

    def __init__(self, block: _StreamedForward, flat: list[Any], spec: Any, places: list[int]) -> None:
        self.block, self.flat, self.spec, self.places = block, flat, spec, places
        self.result: tuple[list[Any], Any] = ([], None)
        self.state = torch.get_rng_state()

    def run(self, tensors: list[Tensor]) -> list[Tensor]:
        """The tensors that the block returns for these; its weights have to be there."""
        flat = list(self.flat)
        for place, tensor in zip(self.places, tensors, strict=True):
            flat[place] = tensor
        args, kwargs = tree_unflatten(flat, self.spec)
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self.state)
            self.result = tree_flatten(self.block.forward(*args, **kwargs))
        return [x for x in self.result[0] if isinstance(x, Tensor)]

    def joined(self, tensors: list[Tensor]) -> Any:
        """What the block returned, with these tensors."""
        flat, spec = self.result
        self.result = ([], None)
        return tree_unflatten([tensors.pop(0) if isinstance(x, Tensor) else x for x in flat], spec)


class _Recomputed(torch.autograd.Function):
    """A block whose weights are there while it runs, and again while its gradients are computed."""

    @staticmethod
    def forward(ctx: Any, call: _Call, one: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.save_for_backward(*tensors)
        with call.block.of.filled(call.block.own), torch.no_grad():
            outputs = call.run([t.detach() for t in tensors])
        ctx.first = [t.detach().clone() for t in outputs]
        ctx.mark_non_differentiable(*(t for t in outputs if not t.is_floating_point()))
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        block = ctx.call.block
        given = [t.detach().requires_grad_(t.is_floating_point()) for t in ctx.saved_tensors]
        with block.of.filled(block.own), torch.enable_grad():
            outputs = ctx.call.run(given)
            if any(
                not torch.allclose(a, b, rtol=1e-3, equal_nan=True) for a, b in zip(outputs, ctx.first, strict=True)
            ):
                raise MupscaleError("a block does something else when it is run again")
            pairs = [(t, g) for t, g in zip(outputs, gradients, strict=True) if t.requires_grad and g is not None]
            torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])
            block.of.show(block.own)
        return None, None, *(t.grad if t.requires_grad else None for t in given)
