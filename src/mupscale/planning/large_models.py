"""Large models: small ones that are run in their place, and a check of the plan at full size.

Nobody says how a model is built, but two of them show it: a whole number that a module keeps, or a dimension of a
tensor, is a size if it differs, and follows from the width by the power that the pair shows; so do other numbers
(1/√width). What is alike in both stays. No weights are copied, so a miniature of a large model costs no memory. This is
a guess, like a module's name: a closure may hold a size, a buffer may be computed from one. Whatever is learnt on such
a model is checked on the pair itself.

At full size both models run with generic weights in single precision, which are drawn when a block is called and given
up behind it. So a check takes the memory of the narrow model's gradients and of one block of the wide one, and not
several copies of both models.
"""

from __future__ import annotations

import copy
import math
import re
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from fractions import Fraction
from glob import escape
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from mupscale.core import Axis, Entry, Plan, Role, check_same_names, copy_model, naming, plain_type
from mupscale.planning.following import largest_number
from mupscale.planning.from_modules import ONE_DEPTH, How, build_plan, find_role
from mupscale.planning.initial import all_tensors
from mupscale.planning.tracing import (
    call_arguments,
    computed_tensors,
    drawing,
    gradient_loss,
    in_double,
    in_float64,
    run_in_float64,
    run_on_batch,
    silence_dropout,
    take_modes,
    tensors_in,
)
from mupscale.system import MupscaleError

LARGE = 1 << 25
"""Numbers in two models' parameters from which on they are not copied in float64."""

_QUIET = 1e-3
_SAMPLE = 1 << 14
_TOLERANCE = 2e-3  # float32 through many blocks rounds by some 1e-6; a wrong order or constant is off by a good part
_UNITS = 256  # of an axis, at most, whose gradients are compared
_DRAWN = 4_194_301  # random numbers that weights are made of
_FAINT = 1e-5  # of the largest gradient: rounding may be as large

_in_full: ContextVar[bool] = ContextVar("in_full", default=False)

Shapes = Sequence[tuple[int, ...]]
Weights = Callable[[str], Tensor]
Look = Callable[[str, Tensor], None]


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


def in_single(batch: Any) -> Any:
    """A batch with its numbers in float32."""
    return tree_map(lambda x: x.float() if isinstance(x, Tensor) and x.is_floating_point() else x, batch)


def size_of(values: Tensor) -> float:
    """The root mean square, of a part of very many numbers."""
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
    """Compare models with generic weights, one widened as planned, on a batch."""
    batch = in_single(batch)
    try:
        return _check(narrow, wide, plan, batch, in_blocks=True)
    except Exception:  # a block whose weights are used elsewhere, or that is not alike when it is run again
        return _check(narrow, wide, plan, batch, in_blocks=False)


def generic_weights(model: nn.Module) -> Weights:
    """A function that gives a weight by its name, in float32 and as large as the model's; the same at every call.

    Its numbers are a stretch of one row of random ones, from a place of its own on, again and again: no two units are
    alike, since that row's length is prime, and drawing them anew for each weight would take most of a check's time.
    """
    ours = naming.parameters(model)
    numbers = torch.rand(_DRAWN, generator=torch.Generator().manual_seed(0)).sub_(0.5)

    def drawn(name: str) -> Tensor:
        size, start, end = size_of(ours[name]), zlib.crc32(name.encode()) % _DRAWN, 0
        values = torch.empty(ours[name].numel())
        while end < len(values):
            part = values[end : end + _DRAWN - start].copy_(numbers[start : start + len(values) - end])
            start, end = 0, end + len(part)
        return values.mul_(12**0.5 * (size if size >= _QUIET else 0.1)).view(ours[name].shape).to(ours[name].device)

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
        for module in self.model.modules():
            if isinstance(module, nn.Embedding):
                module.sparse = True  # a gradient of the few rows that were looked up, beside a readout's of all
        self.names = {id(p): name for name, p in naming.parameters(self.model).items()}
        self.blocks = _blocks(self.model) if in_blocks else []
        within = {id(p) for _, own in self.blocks for p in own}
        self.rest = [p for p in self.model.parameters() if id(p) not in within]
        for block, own in self.blocks:
            block.forward = _streamed(self, block.forward, own)

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
                self.look(self.names[id(p)], gradient.to_dense())


def _tied(model: nn.Module) -> set[int]:
    """The parameters that several blocks, or other parts of the model, share."""
    groups = naming.aliases(model.named_parameters(remove_duplicate=False))
    shared = {group[0] for group in groups if len(group) > 1}
    return {id(p) for name, p in naming.parameters(model).items() if name in shared}


def _blocks(model: nn.Module) -> list[tuple[nn.Module, list[nn.Parameter]]]:
    """The blocks of the outermost lists, with the parameters that nothing else has."""
    tied = _tied(model)
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


def _streamed(of: Streamed, forward: Callable[..., Any], own: list[nn.Parameter]) -> Callable[..., Any]:
    """A block's forward pass, with its weights drawn for it; run again for the backward pass."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            with of.filled(own):
                return forward(*args, **kwargs)
        flat, spec = tree_flatten((args, kwargs))
        places = [i for i, x in enumerate(flat) if isinstance(x, Tensor)]
        state, returned = torch.get_rng_state(), list[Any]()

        def run(tensors: Sequence[Tensor]) -> list[Tensor]:
            """The tensors that the block returns for these; its weights have to be there."""
            given = dict(zip(places, tensors, strict=True))
            args, kwargs = tree_unflatten([given.get(i, x) for i, x in enumerate(flat)], spec)
            with torch.random.fork_rng(devices=[]):
                torch.set_rng_state(state)
                returned[:] = tree_flatten(forward(*args, **kwargs))
            return [x for x in returned[0] if isinstance(x, Tensor)]

        one = torch.ones((), requires_grad=True)
        tensors = iter(_Recomputed.apply((of, own, run), one, *(flat[i] for i in places)))  # type: ignore[no-untyped-call]
        result = tree_unflatten([next(tensors) if isinstance(x, Tensor) else x for x in returned[0]], returned[1])
        returned.clear()
        return result

    return call


class _Recomputed(torch.autograd.Function):
    """A block whose weights are there while it runs, and again while its gradients are computed."""

    @staticmethod
    def forward(ctx: Any, block: Any, one: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.block = of, own, run = block
        ctx.save_for_backward(*tensors)
        with of.filled(own), torch.no_grad():
            outputs = run([t.detach() for t in tensors])
        ctx.first = [t.detach().clone() for t in outputs]
        ctx.mark_non_differentiable(*(t for t in outputs if not t.is_floating_point()))
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        of, own, run = ctx.block
        given = [t.detach().requires_grad_(t.is_floating_point()) for t in ctx.saved_tensors]
        with of.filled(own), torch.enable_grad():
            outputs = run(given)
            if any(
                not torch.allclose(a, b, rtol=1e-3, equal_nan=True) for a, b in zip(outputs, ctx.first, strict=True)
            ):
                raise MupscaleError("a block does something else when it is run again")
            pairs = [(t, g) for t, g in zip(outputs, gradients, strict=True) if t.requires_grad and g is not None]
            torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])
            of.show(own)
        return None, None, *(t.grad if t.requires_grad else None for t in given)


_FEW = 3  # blocks that are not worth leaving out
_KEPT = 2  # of each kind of block, the first and the last
_OWN = ("_parameters", "_buffers", "_modules")
_COUNT = re.compile(r"layer|depth|block")


@dataclass(frozen=True)
class Thinned:
    """Blocks that a miniature leaves out: by the path of each block of a list, the path of one that is like it.

    kept: by the path of a list, the names of the blocks that stay.

    >>> Thinned({"h.5": "h.0"}, {"h": ("0", "7")}).name_in_miniature("h.5.weight")
    'h.0.weight'
    >>> Thinned({"h.6": "h.7"}, {"h": ("0", "7")}).name_in_miniature("h.6.weight")
    'h.1.weight'
    """

    like: Mapping[str, str] = field(default_factory=dict)
    kept: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def name_in_miniature(self, name: str) -> str:
        """What the tensor that is like this one is called where blocks are left out."""
        parts, made = name.split("."), ""
        for end in range(1, len(parts)):
            path = ".".join(parts[:end])
            if path in self.like:
                parts[:end] = self.like[path].split(".")
        for end, part in enumerate(parts):
            names = self.kept.get(".".join(parts[:end]), ())
            made += f".{names.index(part) if part in names else part}"
        return made[1:]


class Resizing:
    """Two models of one class and depth, and the ratio of their widths."""

    def __init__(self, narrow: nn.Module, wide: nn.Module) -> None:
        self.narrow, self.wide = naming.unwrap(narrow), naming.unwrap(wide)
        ours, theirs = (dict(model.named_modules(remove_duplicate=False)) for model in (self.narrow, self.wide))
        check_same_names("the narrow model", ours, "the wide model", theirs, ONE_DEPTH, what="module")
        self.modules = {path: (module, theirs[path]) for path, module in ours.items()}
        small, large = (dict(model.named_parameters()) for model in (self.narrow, self.wide))
        check_same_names("the narrow model", small, "the wide model", large, ONE_DEPTH, what="parameter")
        sizes = [zip(p.shape, large[name].shape, strict=False) for name, p in small.items()]
        ratios = Counter(Fraction(m, n) for pairs in sizes for n, m in pairs if n and m and n != m)
        self.ratio = max(ratios, key=lambda ratio: (ratios[ratio], ratio)) if ratios else Fraction(1)

    def copy(
        self,
        model: nn.Module,
        factor: Fraction,
        thinned: Thinned | None = None,
        instead: Mapping[int, int] | None = None,
    ) -> nn.Module:
        """One of the two models with sizes that are so many times its own, and with weights drawn as large as its own.

        thinned: blocks to leave out. instead: by sizes that are the same in both, other ones. An error where a size
        would be no whole number.
        """
        return _Copy(self, naming.unwrap(model), factor, thinned or Thinned(), instead or {}).model

    def shorter_tables(self, least: int) -> dict[int, int]:
        """By the length of a long table of tokens or positions, which is the same in both, one that is enough.

        least: how many rows have to be left. What is padded with the last row goes on so.
        """
        tables = [pair for pair in self.modules.values() if isinstance(pair[0], nn.Embedding)]
        lengths = {int(a.num_embeddings) for a, b in tables if a.num_embeddings == b.num_embeddings}
        short = {length: least for length in lengths if length > 4 * least}
        return short | {length - 1: least - 1 for length in short}

    def scaled(self, pair: tuple[int, int], own: int, factor: Fraction) -> int:
        """A size that is `own` in one of the models, and so large in the two."""
        power = self._power(*pair)
        size = own * factor ** (round(power) if round(power) and math.isclose(power, round(power), rel_tol=1e-6) else 1)
        if size.denominator != 1 or size < 1:
            raise MupscaleError(f"a size of {own} cannot become {factor} times as large")
        return int(size)

    def constant(self, pair: tuple[float, float], own: float, factor: Fraction) -> float:
        """The same of a number that follows from the width, such as 1/√width."""
        return float(own * float(factor) ** (round(4 * self._power(*pair), 6) / 4))

    def _power(self, before: float, after: float) -> float:
        if before * after <= 0 or self.ratio == 1:
            raise MupscaleError(f"a number of {before:.6g} → {after:.6g} follows no power of the width")
        return math.log(after / before) / math.log(self.ratio)

    def divisors(self) -> list[int]:
        """By how much all sizes that differ can be divided and keep at least two units, most first; without 1."""
        sizes = [n for pair in self._sizes() for n in pair if n > 1]
        common = math.gcd(*sizes) if sizes else 1
        most = min(sizes, default=1) // 2
        return [d for d in range(min(common, most), 1, -1) if common % d == 0]

    def _sizes(self) -> Iterator[tuple[int, int]]:
        for small, large in self.modules.values():
            yield from _differing(vars(small), vars(large), set())
            for ours, theirs in zip(_own_tensors(small), _own_tensors(large), strict=False):
                yield from ((n, m) for n, m in zip(ours.shape, theirs.shape, strict=False) if n != m)

    @property
    def is_uniform(self) -> bool:
        """Whether every size that differs is so many times as large in the wide model, or a power of that."""
        with suppress(MupscaleError):
            powers = [self._power(*pair) for pair in self._sizes()]
            return all(round(power) and math.isclose(power, round(power), rel_tol=1e-9) for power in powers)
        return False

    def thinned(self, *, inner: bool = True) -> Thinned:
        """Which blocks of long lists can be left out, since others are of the same kind.

        inner: also in lists that lie in blocks. Lists of one length are thinned alike, since a model may go through
        them together.
        """
        lists = {
            path: small
            for path, (small, _) in self.modules.items()
            if isinstance(small, nn.ModuleList | nn.Sequential) and len(small) > _FEW
        }
        if not inner:
            lists = {p: module for p, module in lists.items() if not any(p.startswith(f"{o}.") for o in lists if o)}
        tied = _tied(self.narrow)
        kinds: dict[int, list[Any]] = {}
        for path, module in lists.items():
            own = self._kinds(path, module, tied)
            before = kinds.setdefault(len(module), [()] * len(module))
            kinds[len(module)] = [(*some, kind) for some, kind in zip(before, own, strict=True)]
        like, kept = dict[str, str](), dict[str, tuple[str, ...]]()
        for path, module in lists.items():
            names, numbers = list(module._modules), dict[Any, list[int]]()
            for number, kind in enumerate(kinds[len(module)]):
                numbers.setdefault(kind, []).append(number)
            stay = sorted({n for alike in numbers.values() for n in (alike[0], alike[-1])[:_KEPT]})
            if len(stay) == len(names):
                continue
            kept[path] = tuple(names[n] for n in stay)
            for alike in numbers.values():
                like |= {f"{path}.{names[n]}".lstrip("."): f"{path}.{names[alike[0]]}".lstrip(".") for n in alike[1:-1]}
        return Thinned(like, kept)

    def _kinds(self, path: str, blocks: Any, tied: Collection[int]) -> list[Any]:
        """What tells the blocks of a list apart, in both models; their position does not."""
        described = []
        for number, name in enumerate(blocks._modules):
            block = f"{path}.{name}".lstrip(".")
            numbers = dict[tuple[str, str], int]()
            parts: list[Any] = [number if any(id(p) in tied for p in blocks[number].parameters()) else None]
            for inner, pair in self.modules.items():
                if inner == block or inner.startswith(f"{block}."):
                    local = inner.removeprefix(block)
                    parts.append((local, *(_description(module, local, numbers) for module in pair)))
            described.append((tuple(parts), numbers))
        steps = [
            {key: value - number for key, value in numbers.items()} for number, (_, numbers) in enumerate(described)
        ]
        places = {key for key in steps[0] if all(step.get(key) == steps[0][key] for step in steps)}
        return [
            (parts, tuple(sorted((key, n) for key, n in numbers.items() if key not in places)))
            for parts, numbers in described
        ]


class _Copy:
    """A copy that is under way: the tensors first, then the numbers that modules keep."""

    def __init__(
        self, pair: Resizing, original: nn.Module, factor: Fraction, thinned: Thinned, instead: Mapping[int, int]
    ) -> None:
        self.pair, self.factor, self.instead, self.seen = pair, factor, instead, set[int]()
        self.generator = torch.Generator().manual_seed(0)
        self.counts = {len(pair.modules[p][0]): len(names) for p, names in thinned.kept.items()}
        memo: dict[int, Any] = dict(computed_tensors(original))
        for path, names in thinned.kept.items():
            blocks = dict(original.named_modules(remove_duplicate=False)).get(path)
            for name, block in blocks._modules.items() if blocks is not None else ():
                if name not in names:
                    memo[id(block)] = nn.Identity()
        which = 0 if original is pair.narrow else 1
        for modules in pair.modules.values():
            for tensors in zip(*map(_own_tensors, modules), strict=False):
                if type(tensors[which]) in (nn.Parameter, Tensor) and id(tensors[which]) not in memo:
                    memo[id(tensors[which])] = self._tensor(tensors, tensors[which])
        # where blocks are left out, the attributes of parameters cannot be put in order
        self.model = copy.deepcopy(original, memo) if thinned.kept else copy_model(original, memo)
        made = dict(self.model.named_modules(remove_duplicate=False))
        for path, (small, large) in pair.modules.items():
            if path in made and type(made[path]) is type(small):
                self._resize(small.__dict__, large.__dict__, made[path].__dict__)
        for path in sorted(thinned.kept, key=len, reverse=True):
            if path in made:
                blocks = [made[path]._modules[name] for name in thinned.kept[path]]
                made[path]._modules.clear()
                made[path]._modules.update({str(number): block for number, block in enumerate(blocks)})

    def _tensor(self, pair: tuple[Tensor, Tensor], own: Tensor) -> Tensor:
        """One of another size; of the same kind and about as large."""
        shape = [
            self.instead.get(n, n) if ours == theirs else self.pair.scaled((ours, theirs), n, self.factor)
            for ours, theirs, n in zip(pair[0].shape, pair[1].shape, own.shape, strict=True)
        ]
        device = torch.device("cpu") if own.is_meta else own.device
        if isinstance(own, nn.Parameter):
            size = 0.02 if own.is_meta else size_of(own)
            drawn = torch.randn(shape, generator=self.generator, dtype=torch.float32) * size
            return nn.Parameter(drawn.to(device, own.dtype), own.requires_grad)
        if own.is_meta:
            return torch.ones(shape, dtype=own.dtype)
        values = own.detach().clone()
        is_told = own.is_floating_point() and not any(t.is_meta for t in pair)
        if is_told and pair[0].numel() == pair[1].numel() == 1 and float(pair[0]) != float(pair[1]):  # such as √width
            return values.fill_(self.pair.constant((float(pair[0]), float(pair[1])), float(own), self.factor))
        for dim, n in enumerate(shape):
            if n != values.shape[dim]:
                index = torch.arange(n, device=device) % max(1, values.shape[dim])
                values = values.index_select(dim, index)
        return values

    def _resize(self, small: dict[str, Any], large: dict[str, Any], own: dict[str, Any]) -> None:
        """Change the numbers in a dictionary that belong to a size, in lists and objects too."""
        if id(own) in self.seen:
            return
        self.seen.add(id(own))
        for name in own.keys() & small.keys() & large.keys():
            if name not in _OWN:
                own[name] = self._value(small[name], large[name], own[name])
                if _COUNT.search(str(name)) and type(own[name]) is int:
                    own[name] = self.counts.get(own[name], own[name])

    def _value(self, small: Any, large: Any, own: Any) -> Any:
        kind = type(own)
        if kind is not type(small) or kind is not type(large) or isinstance(own, nn.Module | Tensor | type):
            return own
        if kind in (int, float):
            if small == large:
                return self.instead.get(own, own) if kind is int else own
            return (self.pair.scaled if kind is int else self.pair.constant)((small, large), own, self.factor)
        if kind in (list, tuple, torch.Size) and len(small) == len(large) == len(own):
            return kind(self._value(*values) for values in zip(small, large, own, strict=True))
        if isinstance(own, dict):
            self._resize(small, large, own)
        elif hasattr(own, "__dict__") and not callable(own):
            self._resize(vars(small), vars(large), vars(own))
        return own


def _own_tensors(module: nn.Module) -> list[Tensor]:
    """Of a module itself: parameters, buffers and plain tensors, in order."""
    own = [*module._parameters.values(), *module._buffers.values(), *vars(module).values()]
    return [t for t in own if isinstance(t, Tensor)]


def _differing(small: Any, large: Any, seen: set[int]) -> Iterator[tuple[int, int]]:
    """The whole numbers that differ, in lists and objects too."""
    if type(small) is not type(large) or isinstance(small, nn.Module | Tensor | type) or id(small) in seen:
        return
    if type(small) is int and small != large:
        yield small, large
    elif isinstance(small, list | tuple | dict) or (hasattr(small, "__dict__") and not callable(small)):
        seen.add(id(small))
        if isinstance(small, list | tuple):
            pairs = zip(small, large, strict=False)
        else:
            ours, theirs = (each if isinstance(each, dict) else vars(each) for each in (small, large))
            pairs = ((ours[key], theirs[key]) for key in ours if key in theirs and key not in _OWN)  # type: ignore[assignment]
        for pair in pairs:
            yield from _differing(*pair, seen)


def _description(module: nn.Module, path: str, numbers: dict[tuple[str, str], int]) -> Any:
    """What of a module is told in the kind of its block; whole numbers, which may be its position, go to `numbers`."""
    told = []
    for name, value in vars(module).items():
        if type(value) is int:
            numbers[path, name] = value
        elif isinstance(value, bool | str | tuple) or (isinstance(value, float) and "drop" not in name):
            told.append((name, repr(value)))
    shapes = [(tuple(t.shape), t.dtype, t.requires_grad) for t in _own_tensors(module)]
    return plain_type(module), tuple(told), tuple(shapes)


_ROWS = 64  # of a table, at least
_MOST = 2  # miniatures that are tried


@dataclass(frozen=True)
class Miniature:
    """Two small models that are to each other what two large ones are.

    inputs: a batch for them. originals: by the names of their tensors, the large models' that are like them.
    """

    narrow: nn.Module
    wide: nn.Module
    inputs: Any
    originals: Mapping[str, list[str]] = field(default_factory=dict)

    @classmethod
    def of(cls, narrow: nn.Module, wide: nn.Module, inputs: Any) -> Miniature:
        """Two models as they are, or with fewer blocks and rows of tables if they are large."""
        made = next(find_miniatures(narrow, wide, inputs, narrower=False), None) if is_large(narrow, wide) else None
        return made or cls(narrow, wide, inputs, {name: [name] for name in all_tensors(narrow)})

    def given(self, roles: Mapping[str, Role]) -> dict[str, Role]:
        """The roles that were given for the large models, by name."""
        told = {name: find_role(roles, names[0]) for name, names in self.originals.items()}
        return {escape(name): role for name, role in told.items() if role is not None}

    def at_full_size(
        self, shown: Plan, narrow: nn.Module, wide: nn.Module, roles: Mapping[str, Role], how: How
    ) -> Plan:
        """The plan of the large models that this one of the small ones shows."""
        learnt = self.patterns({escape(name): role for name, role in roles_of(shown).items()}, roles)
        planned = build_plan(narrow, wide, roles=learnt, how=how, assume=True)
        past = None if shown.past_norms is None else self.by_original(shown.past_norms)
        planned = planned if past is None else planned.with_initial("past_norms", past)
        return replace(planned, tried_by=shown.tried_by)

    def patterns(self, learnt: Mapping[str, Role], given: Mapping[str, Role]) -> dict[str, Role]:
        """By pattern, what was given for the large models, and else roles of the small ones."""
        found = {own: role for own in self.originals if (role := find_role(learnt, own)) is not None}
        by_name = {name: find_role(given, name) or role for name, role in self.by_original(found).items()}
        return {escape(name): role for name, role in by_name.items()} | dict(given)

    def by_original(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """By the names of the large models, what is known by the small ones'."""
        return {name: value for own, value in values.items() for name in self.originals.get(own, ())}


def find_miniatures(narrow: nn.Module, wide: nn.Module, inputs: Any, *, narrower: bool = True) -> Iterator[Miniature]:
    """Miniatures of two models that run on the batch, the smallest first; none where nothing can be made smaller.

    narrower: whether widths are smaller, too, and not only lists of blocks and tables.
    """
    with suppress(MupscaleError):
        sizes = Resizing(narrow, wide)
        thinned = [sizes.thinned(), sizes.thinned(inner=False), Thinned()]
        factors = [Fraction(1, d) for d in sizes.divisors()[: _MOST * narrower]] + [Fraction(1)]
        rows = _rows(inputs)
        short = sizes.shorter_tables(rows)
        batch = tree_map(lambda x: x % rows if short and _is_whole(x) else x, inputs)
        tried = 0
        for blocks in [each for i, each in enumerate(thinned) if each not in thinned[:i]]:
            for factor in factors if blocks.kept or short else factors[:-1]:
                if tried < _MOST and (pair := _runnable_pair(sizes, factor, blocks, short, batch)) is not None:
                    tried += 1
                    originals: dict[str, list[str]] = {}
                    for name in all_tensors(narrow):
                        originals.setdefault(blocks.name_in_miniature(name), []).append(name)
                    yield Miniature(*pair, batch, originals)


def _rows(inputs: Any) -> int:
    """How many rows of tables are enough for a batch, or a longer one of its kind, whatever its tokens are."""
    return max([_ROWS, *(4 * n for t in tensors_in(call_arguments(inputs)) for n in t.shape[1:])])


def _is_whole(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.is_floating_point() and value.dtype != torch.bool


def _runnable_pair(
    sizes: Resizing, factor: Fraction, blocks: Thinned, short: Mapping[int, int], inputs: Any
) -> tuple[nn.Module, nn.Module] | None:
    try:
        narrow, wide = (sizes.copy(model, factor, blocks, short) for model in (sizes.narrow, sizes.wide))
        with torch.no_grad():
            for model in (narrow, wide):
                run_in_float64(*in_float64(model, in_double(inputs)))
    except Exception:  # whatever a model raises whose sizes do not go together
        return None
    return narrow, wide


def roles_of(plan: Plan) -> dict[str, Role]:
    """What a plan says of every parameter and buffer, under all its names."""
    entries = {**plan.buffers, **plan.parameters}
    return {alias: _role(name, entry) for name, entry in entries.items() for alias in entry.names or (name,)}


def _role(name: str, entry: Entry) -> Role:
    growing = {d: axis for d, axis in entry.axes.items() if axis.times != 1}
    out, in_ = ({growing[d].layout for d in side if d in growing} or {Axis()} for side in (entry.out, entry.in_))
    if len(out) > 1 or len(in_) > 1:
        raise MupscaleError(f"'{name}' is copied in several orders, which no role can tell")
    return Role(
        out=entry.out,
        in_=entry.in_,
        out_block=out.pop(),
        in_block=in_.pop(),
        fold=entry.fold,
        offset=entry.offset,
        keep=None if entry.fold == 1 and entry.keep == 1 else entry.keep,
    )
