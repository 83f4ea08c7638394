"""What a plan is tried on: the batch that was given and, where that leaves something unseen, a stronger one.

The check of a plan compares outputs and gradients. It cannot see a weight whose gradient vanishes: the queries and keys
of one position, or of equal ones; what reads a state of zeros; a branch that did not run. A stronger batch has other
numbers, random tokens, more rows, more positions. Nothing is known of what the numbers mean, so little is assumed: only
whole numbers that look up rows of a table are drawn anew, below its size; masks, classes, lengths and indices are
repeated. A batch that the model refuses, or that gives it no finite numbers, is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from mupscale.core import Role, naming
from mupscale.planning.first_guesses import is_certain_output
from mupscale.planning.following import largest_number
from mupscale.planning.from_modules import find_role
from mupscale.planning.large_models import Shapes, find_miniatures, in_full_precision, is_large
from mupscale.planning.tracing import (
    Operation,
    Ref,
    call_arguments,
    gradient_loss,
    gradients_of,
    in_double,
    in_float64,
    outputs_in_float64,
    record_run,
    run_in_float64,
)
from mupscale.system import MupscaleError, UncheckedPlan, name_of_group, pattern_of_name, warn

EMPTY = "the batch is empty, so it shows nothing: pass inputs= with at least one row"
_SEED = 8_117_359  # one that nobody takes: a tensor drawn like its neighbour would hide what tells them apart
_ROWS = 8  # at least
_MOST_ROWS = 64
_LENGTHS: tuple[Callable[[int], int], ...] = (
    lambda n: max(2 * n, 4),
    lambda n: max(4 * n, 8),
    lambda n: 16 * max(n, 4),
    lambda n: n + 1,
)
_MOST_NUMBERS = 1 << 16  # in a tensor: a convolution makes many times as many of them
_TABLES = {"embedding", "_embedding_bag", "_embedding_bag_forward_only"}  # looked up along the first dimension


class Leaves:
    """The tensors of a batch, and how to put others in their places."""

    def __init__(self, inputs: Any) -> None:
        self.args, self.kwargs = call_arguments(inputs)
        self.flat, self.spec = tree_flatten((self.args, self.kwargs))
        tensors = [i for i, x in enumerate(self.flat) if isinstance(x, Tensor)]
        self.places = [i for i in tensors if self.flat[i].layout == torch.strided and not self.flat[i].is_nested]
        self.tensors: list[Tensor] = [self.flat[i] for i in self.places]

    def lead(self, tables: Mapping[int, int]) -> Tensor | None:
        """The first tensor of numbers, or of rows of a table: what the rest goes with."""
        drawn = (t for i, t in enumerate(self.tensors) if t.dim() and (t.is_floating_point() or i in tables))
        return next(drawn, next((t for t in self.tensors if t.dim()), None))

    def replaced(self, tensors: Sequence[Tensor]) -> Any:
        """The batch with these tensors."""
        flat = list(self.flat)
        for place, tensor in zip(self.places, tensors, strict=True):
            flat[place] = tensor
        args, kwargs = tree_unflatten(flat, self.spec)
        return kwargs or args


def check_not_empty(inputs: Any) -> None:
    """Refuse a batch of tensors that have no number in them; there may be no batch at all."""
    tensors = [t for t in Leaves(inputs).tensors if t.dim()]
    if tensors and not any(t.numel() for t in tensors):
        raise MupscaleError(EMPTY)


def all_alike(tensor: Tensor) -> bool:
    """Whether all of its numbers are one, or its only number is zero."""
    if tensor.numel() < 2:
        return tensor.numel() == 1 and not bool(tensor.any())
    return bool((tensor == tensor.flatten()[0]).all())


def has_equal_slices(tensor: Tensor) -> bool:
    """Whether its entries are equal along one of its dimensions: rows, positions or channels."""
    dims = [d for d in range(tensor.dim()) if tensor.shape[d] > 1]
    return bool(tensor.numel()) and any(bool((tensor == tensor.narrow(d, 0, 1)).all()) for d in dims)


def has_one_position(tensor: Tensor) -> bool:
    """Whether it may be a sequence, or an image, of one place: of tokens, or of vectors."""
    if not tensor.is_floating_point():
        return tensor.dim() == 2 and tensor.shape[1] == 1
    options = _position_dims(tensor)[: 2 if tensor.dim() == 3 else 1]  # the channel of an image is no position
    return tensor.dim() > 2 and any(all(tensor.shape[d] == 1 for d in dims) for dims in options)


def strengthened(leaves: Leaves, tables: Mapping[int, int], timid: bool = False) -> Iterator[tuple[Any, bool]]:
    """Batches that may show more, those most like the given one first, and whether they have more positions.

    tables: of the tensors that look up rows of a table, by number, how many it has.
    timid: with small and positive numbers, where the model refused others.
    """
    draw = _Draw(leaves.tensors, tables, timid)
    same: Sizes = [{} for _ in leaves.tensors]
    if any(draw.is_alike(i) for i in range(len(leaves.tensors))):
        yield leaves.replaced(draw.tensors(same, alike_alone=True)), False
    if not all(draw.is_alike(i) or not draw.can_change(i) for i in range(len(leaves.tensors))):
        yield leaves.replaced(draw.tensors(same)), False
    seen, lead = [same], leaves.lead(tables)
    for sizes, is_longer in () if lead is None else _larger(lead, leaves.tensors):
        if sizes not in seen and draw.fits(sizes):
            seen.append(sizes)
            yield leaves.replaced(draw.tensors(sizes)), is_longer


Sizes = list[dict[int, int]]  # for every tensor, new sizes by dimension


def _larger(lead: Tensor, tensors: Sequence[Tensor]) -> Iterator[tuple[Sizes, bool]]:
    """More rows, then more positions, then both, as one tensor has them; others go along where sizes agree."""
    rows = min(max(_ROWS, 4 * len(lead)), _MOST_ROWS)
    more_rows = {0: rows} if rows > len(lead) else {}
    options: list[tuple[dict[int, int], bool]] = [(more_rows, False)]
    for length in _LENGTHS:
        for dims in _position_dims(lead):
            longer = {d: length(lead.shape[d]) for d in dims}
            options += [(longer, True), (more_rows | longer, True)]
    for wanted, is_longer in options:
        for along in _ALONG:
            yield [_sizes_along(lead, tensor, wanted, along) for tensor in tensors], is_longer


def _position_dims(tensor: Tensor) -> list[tuple[int, ...]]:
    """Where positions may be: behind the rows, last (channels first), or the sides of an image."""
    by_dims: dict[int, list[tuple[int, ...]]] = {2: [(1,)], 3: [(1,), (2,)], 4: [(2, 3), (1,)], 5: [(2, 3, 4), (1,)]}
    return by_dims.get(tensor.dim(), [])


Along = Callable[[list[int], int, int], list[int]]
_ALONG: tuple[Along, ...] = (
    lambda fitting, dim, dims: [d for d in fitting if d == dim],
    lambda fitting, dim, dims: [d for d in fitting if d < dims - 1 or dims < 3][-1:],  # a state: layers, rows, units
    lambda fitting, dim, dims: fitting,  # a mask: rows, 1, positions, positions
)
"""Of dimensions of one size (of so many in all), those that grow where another tensor grows along this one."""


def _sizes_along(lead: Tensor, tensor: Tensor, wanted: Mapping[int, int], along: Along) -> dict[int, int]:
    if tensor is lead:
        return dict(wanted)
    sizes = dict[int, int]()
    for dim, size in wanted.items():
        fitting = [d for d in range(tensor.dim()) if tensor.shape[d] == lead.shape[dim]]
        sizes |= dict.fromkeys(along(fitting, dim, tensor.dim()), size)
    return sizes


class _Draw:
    """Other numbers for the tensors of a batch, of the same kind and range."""

    def __init__(self, tensors: Sequence[Tensor], tables: Mapping[int, int], timid: bool) -> None:
        self.given, self.tables, self.timid = tensors, tables, timid
        self.generator = torch.Generator().manual_seed(_SEED)

    def can_change(self, i: int) -> bool:
        tensor = self.given[i]
        return i in self.tables or (tensor.is_floating_point() and (tensor.dim() > 0 or all_alike(tensor)))

    def is_alike(self, i: int) -> bool:
        return self.can_change(i) and all_alike(self.given[i])

    def fits(self, sizes: Sizes) -> bool:
        """Whether no tensor becomes very large."""
        return all(_grown(t, more).numel() <= _MOST_NUMBERS for t, more in zip(self.given, sizes, strict=True))

    def tensors(self, sizes: Sizes, alike_alone: bool = False) -> list[Tensor]:
        """All of them; alike_alone: changed only where all numbers are one."""
        drawn = []
        for i, (tensor, more) in enumerate(zip(self.given, sizes, strict=True)):
            changes = self.is_alike(i) if alike_alone else self.can_change(i)
            larger = _grown(tensor, more)
            if changes:
                numbers = self._tokens(i, larger) if i in self.tables else self._numbers(tensor, larger)
                larger = numbers.to(tensor.device, tensor.dtype)
            drawn.append(larger.contiguous() if more or changes else tensor)
        return drawn

    def _tokens(self, i: int, like: Tensor) -> Tensor:
        most = self.tables[i]
        below = min(most, max(2, int(self.given[i].max()) + 1)) if self.timid else most
        return torch.randint(0, below, like.shape, generator=self.generator)

    def _numbers(self, tensor: Tensor, like: Tensor) -> Tensor:
        """In place of equal numbers some around them; else the same numbers in another order."""
        if not all_alike(tensor) or not bool(tensor.isfinite().all()):
            places = torch.randint(0, max(1, tensor.numel()), like.shape, generator=self.generator)
            return tensor.detach().flatten().cpu()[places] if tensor.numel() else like
        number = float(tensor.flatten()[0])
        if number:
            return number * (0.5 + torch.rand(like.shape, generator=self.generator))
        drawn = torch.randn(like.shape, generator=self.generator)
        return drawn.abs() if self.timid else drawn


def _grown(tensor: Tensor, sizes: Mapping[int, int]) -> Tensor:
    """Repeated along these dimensions until it has their sizes; nothing is copied yet where it has one entry there."""
    for dim, size in sizes.items():
        if tensor.shape[dim] == 1:
            tensor = tensor.expand([size if d == dim else n for d, n in enumerate(tensor.shape)])
        elif tensor.shape[dim]:
            tensor = tensor.index_select(dim, torch.arange(size, device=tensor.device) % tensor.shape[dim])
    return tensor


@torch.no_grad()
def find_tables(model: nn.Module, leaves: Leaves) -> dict[int, int]:
    """Of the batch's tensors that look up rows of a table (tokens), by number, how many rows the smallest one has.

    A table does not depend on the batch.
    """
    tables = dict[int, int]()
    whole = {id(t): i for i, t in enumerate(leaves.tensors) if not t.is_floating_point() and t.dtype != torch.bool}
    if not whole:
        return tables
    with suppress(Exception):  # whatever a model raises while it is watched: then less is known
        recorder = record_run(model, leaves.replaced(leaves.tensors))
        values, origins = recorder.alive, {number: {number} for number in recorder.run.inputs}
        for op in recorder.run.operations:
            for index, dim in _lookups(op):
                table = op.args[0].number
                for number in origins.get(index.number, set()) if not origins.get(table) else ():
                    if (i := whole.get(id(values[number]))) is not None and values[index.number].dtype != torch.bool:
                        tables[i] = min(values[table].shape[dim], tables.get(i, values[table].shape[dim]))
            origin = set[int]().union(*(origins.get(number, set()) for number in op.refs))
            for number in (number for number in op.results if number is not None):
                origins[number] = origins.get(number, set()) | origin
    return tables


def _lookups(op: Operation) -> list[tuple[Ref, int]]:
    """The tensors by which an operation looks up entries of its first argument, each with the dimension."""
    looked_up: list[tuple[Any, int]] = []
    if op.name in _TABLES:
        looked_up = [(op.args[1], 0)]
    elif op.name == "index":
        looked_up = [(index, dim) for dim, index in enumerate(op.args[1])]
    elif op.name in ("index_select", "gather", "scatter", "scatter_"):
        looked_up = [(op.args[2], op.args[1])]
    return [(index, dim) for index, dim in looked_up if isinstance(index, Ref)]


_VANISHES = 1e-10  # beside the largest gradient of the model: the check cannot tell this from nothing
_FEW = 1 / 16  # of an axis: single units may be silent by chance, as those of a ReLU are
_MANY = 1 / 4  # of an axis: a part worth a word
_LEAST = 4  # units in such a part
_ENTRIES = 8  # that are looked at first

Dims = Mapping[str, tuple[int, ...]]


def growing_weights(narrow: nn.Module, wide: nn.Module) -> dict[str, tuple[int, ...]]:
    """By name, the dimensions along which parameters grow, without biases beside a weight.

    A bias is certainly added, and where it may be added in vain (to keys, before a BatchNorm) it never has a gradient.
    """
    theirs = naming.parameters(wide)
    growing = {
        name: dims
        for name, p in naming.parameters(narrow).items()
        if name in theirs
        and p.dim() == theirs[name].dim()
        and (dims := tuple(d for d in range(p.dim()) if p.shape[d] != theirs[name].shape[d]))
    }
    matrices = [name for name in growing if theirs[name].dim() > 1]

    def is_beside_a_weight(name: str) -> bool:
        path, _, local = name.rpartition(".")
        within = f"{path}." if path else ""
        return theirs[name].dim() == 1 and "bias" in local and any(m.startswith(within) for m in matrices)

    return {name: dims for name, dims in growing.items() if not is_beside_a_weight(name)}


@dataclass(frozen=True)
class Seen:
    """By parameter and growing dimension, which units have a gradient. absent: parameters that are in no graph."""

    units: Mapping[tuple[str, int], Tensor]
    absent: frozenset[str]

    def __or__(self, other: Seen) -> Seen:
        return Seen({key: mask | other.units[key] for key, mask in self.units.items()}, self.absent & other.absent)

    @property
    def lacking(self) -> float:
        """The parts of axes that are not seen, all together; those that may be so by chance do not count."""
        masks = [mask for mask in self.units.values() if int((~mask).sum()) > 1 or not bool(mask.any())]
        return sum(part for part in map(_silent, masks) if part >= _FEW)

    @property
    def unseen(self) -> list[str]:
        """Parameters of which nothing is seen."""
        whole = dict[str, bool]()
        for (name, _), mask in self.units.items():
            whole[name] = whole.get(name, True) and not bool(mask.any())
        return [name for name, is_unseen in whole.items() if is_unseen]

    @property
    def parts(self) -> list[str]:
        """Parameters of which a good part is not seen."""
        silent = {key: _silent(mask) for key, mask in self.units.items() if int((~mask).sum()) >= _LEAST}
        return list(dict.fromkeys(name for (name, _), part in silent.items() if _MANY <= part < 1))


def _silent(mask: Tensor) -> float:
    return float((~mask).double().mean()) if mask.numel() else 0.0


def seen_by(gradients: Mapping[str, Tensor], sizes: Mapping[str, torch.Size], growing: Dims) -> Seen:
    """What gradients show of parameters of these sizes."""
    largest = max(map(largest_number, gradients.values()), default=0.0)
    units = {}
    for name, dims in growing.items():
        gradient = gradients.get(name)
        for d in dims:
            if gradient is None:
                units[name, d] = torch.zeros(sizes[name][d], dtype=torch.bool)
            else:
                units[name, d] = _above(_VANISHES * largest, gradient, d)
    return Seen(units, frozenset(name for name in growing if name not in gradients))


def _above(level: float, gradient: Tensor, dim: int) -> Tensor:
    """Which units along a dimension have entries of this size; a few entries of each tell that of most gradients."""
    if not gradient.numel():
        return torch.ones(gradient.shape[dim], dtype=torch.bool)  # there is nothing to see
    few = gradient
    others = [d for d in range(gradient.dim()) if d != dim]
    for d in others:
        few = few.narrow(d, 0, min(_ENTRIES, few.shape[d]))
    for some in (few, gradient):
        units = (some.abs().amax(others) if others else some.abs()) > level
        if bool(units.all()):
            break
    return units.cpu()


@torch.enable_grad()
def run_and_see(narrow: nn.Module, batch: Any, growing: Dims) -> Seen | None:
    """What a batch shows of a copy of the model with generic weights, frozen ones too; None if it gives no numbers."""
    model, batch = in_float64(narrow, batch, generic=1)
    for p in model.parameters():
        p.requires_grad_(p.is_floating_point())
    outputs, named = outputs_in_float64(model, batch), naming.parameters(model)
    gradients = gradients_of(model, gradient_loss(outputs))
    if not all(bool(t.isfinite().all()) for t in (*outputs, *gradients.values())):
        return None
    return seen_by(gradients, {name: p.shape for name, p in named.items()}, growing)


def without_effect(narrow: nn.Module, batches: Sequence[Any], names: Sequence[str]) -> list[str]:
    """Of parameters that have no gradient those that change no output either, as they do behind a `detach`."""
    if not names:
        return []

    @torch.no_grad()
    def outputs(batch: Any, changed: Sequence[str]) -> Iterator[Tensor]:
        model, batch = in_float64(narrow, batch, generic=1)
        for name, p in naming.parameters(model).items():
            if name in changed:
                p.mul_(1.5).add_(0.1)
        return iter(outputs_in_float64(model, batch))

    def matter(changed: Sequence[str]) -> bool:
        pairs = ((outputs(batch, ()), outputs(batch, changed)) for batch in batches)
        return any(not torch.equal(a, b) for ours, theirs in pairs for a, b in zip(ours, theirs, strict=True))

    return [name for name in names if not matter([name])] if matter(names) else list(names)


_SHOWN = 5  # groups of parameters that a message names


class Trials:
    """A batch, in float64, and what it and a stronger one show of two models; they are looked at once.

    strong: the stronger batch, where the given one shows too little and the models take another that shows more.
    unseen: growing parameters that change no output on any of them, and that are no certain gains or biases.
    parts: those of which a good part does not. given_shows_all: whether the given batch shows some of each.
    shapes: of the two models' outputs, where large ones were run.
    """

    def __init__(self, inputs: Any) -> None:
        check_not_empty(inputs)
        self.given = in_double(inputs)
        self.strong: Any = None
        self.unseen: list[str] = []
        self.parts: list[str] = []
        self.shapes: tuple[Shapes, Shapes] | tuple[()] = ()
        self.given_shows_all = False
        self._has_looked = False

    @classmethod
    def of(cls, inputs: Any) -> Trials:
        """The trials, or those that a batch makes."""
        return inputs if isinstance(inputs, cls) else cls(inputs)

    @property
    def batches(self) -> list[Any]:
        """The given one, and the stronger one if there is one."""
        return [self.given] if self.strong is None else [self.given, self.strong]

    @property
    def best(self) -> Any:
        """The one that shows most."""
        return self.batches[-1]

    def look(self, narrow: nn.Module, wide: nn.Module, gradients: Mapping[str, Tensor] | None = None) -> Trials:
        """Find what the batch does not show of the models, and a stronger one that shows it.

        gradients: of the narrow model with generic weights on the given batch, where they are known.
        """
        if not self._has_looked:
            self._has_looked = True
            if is_large(narrow, wide) and (mini := next(find_miniatures(narrow, wide, self.given), None)) is not None:
                with in_full_precision():
                    seen_small = Trials(mini.inputs).look(mini.narrow, mini.wide).renamed(mini.originals)
                self.strong, self.unseen, self.parts = seen_small.strong, seen_small.unseen, seen_small.parts
                return self
            pair = _Pair(narrow, wide)
            if (seen := pair.see(self.given, gradients)) is not None:
                search = _Strengthening(pair, self.given, seen)
                self.given_shows_all = not (seen.unseen or search.is_short or search.is_dull)
                self.strong, seen = search.best, search.seen
                absent = [name for name in seen.unseen if name in seen.absent]
                effective = set(absent).difference(without_effect(narrow, self.batches, absent))
                self.unseen = [n for n in seen.unseen if n not in effective and not pair.is_certain(n)]
                self.parts = [] if search.is_free else seen.parts
        return self

    def renamed(self, originals: Mapping[str, Sequence[str]]) -> Trials:
        """What was seen of a miniature as of the model that it is one of. originals: by name, what is like it there."""
        for names in (self.unseen, self.parts):
            names[:] = [original for name in names for original in originals.get(name, (name,))]
        return self

    def warn(self, roles: Mapping[str, Role] | None = None) -> None:
        """Say which parameters no batch has shown. roles: those that the user gave, who knows."""
        unseen, parts = ([n for n in names if find_role(roles or {}, n) is None] for names in (self.unseen, self.parts))
        if unseen or parts:
            some = [_listed(unseen)] * bool(unseen) + [f"a part of {_listed(parts)}"] * bool(parts)
            stronger = "" if self.strong is None else ", nor on a stronger one that was drawn"
            warn(
                f"the batch does not show whether the plan is right for {' and '.join(some)}: it changes no output on "
                f"the batch{stronger}, so only module types and names decide. Pass inputs= on which it matters (longer "
                "ones; models in train() for what only training uses), or roles= for it",
                UncheckedPlan,
            )


class _Pair:
    """Two models, of which batches show more or less."""

    def __init__(self, narrow: nn.Module, wide: nn.Module) -> None:
        self.narrow, self.wide, self.growing = narrow, wide, growing_weights(narrow, wide)

    def see(self, batch: Any, gradients: Mapping[str, Tensor] | None = None) -> Seen | None:
        """What a batch shows; None where the narrow model does not take it. gradients: where they are known."""
        ours = naming.parameters(self.narrow)
        if gradients is not None and all(ours[name].requires_grad for name in self.growing):
            return seen_by(gradients, {name: p.shape for name, p in ours.items()}, self.growing)
        try:
            return run_and_see(self.narrow, batch, self.growing)
        except Exception:  # whatever a model raises on what it was not made for
            return None

    def is_certain(self, name: str) -> bool:
        """Whether a parameter's growing axis has its units, whatever it is used for: of a gain, or an added token."""
        path, _, local = name.rpartition(".")
        module, tensor, dims = (
            naming.modules(self.narrow)[path],
            naming.parameters(self.narrow)[name],
            self.growing[name],
        )
        return len(dims) == 1 and is_certain_output(module, local, tensor, dims[0])

    @torch.no_grad()
    def is_taken_by_wide(self, batch: Any) -> bool:
        """Whether the wide model runs on a batch, too."""
        model, values = in_float64(self.wide, batch, like=self.narrow)
        try:
            run_in_float64(model, values)
        except Exception:  # as above
            return False
        return True


class _Strengthening:
    """The search for a batch that leaves less unseen than the given one, if that leaves anything.

    best: the batch, or None. seen: what both show together. is_free: whether all of the batch could be changed, so that
    what is still unseen has no effect on any batch.
    """

    def __init__(self, pair: _Pair, given: Any, seen: Seen) -> None:
        self.pair, self.best, self.seen, self.is_free = pair, None, seen, True
        leaves = Leaves(given)
        self.is_short = any(map(has_one_position, leaves.tensors))
        self.is_dull = False
        may_be_dull = any(all_alike(t) or has_equal_slices(t) for t in leaves.tensors)
        if not (seen.lacking or self.is_short or may_be_dull):
            return
        tables = find_tables(in_float64(pair.narrow, given, generic=1)[0], leaves)
        drawn = [t for i, t in enumerate(leaves.tensors) if t.is_floating_point() or i in tables]
        lead = leaves.lead(tables)
        self.is_dull = any(all_alike(t) or (t is lead and has_equal_slices(t)) for t in drawn)
        if not (seen.lacking or self.is_short or self.is_dull):
            return
        self.lacks = self.is_dull + self.is_short, seen.lacking
        if not self._try(seen, leaves, tables, timid=False):
            self._try(seen, leaves, tables, timid=True)
        self.is_free = len(drawn) == len(leaves.tensors) and not self.lacks[0]

    def _try(self, seen: Seen, leaves: Leaves, tables: Mapping[int, int], timid: bool) -> bool:
        """Try batches until one leaves nothing unseen; whether the models took any."""
        is_taken = False
        for batch, is_longer in strengthened(leaves, tables, timid):
            if not (seen.lacking or self.is_dull or is_longer):
                continue  # it has what is there already
            shown = self.pair.see(batch)
            if shown is None:
                continue
            is_taken = True
            together = seen | shown
            lacks = int(self.is_short and not is_longer), together.lacking
            if lacks < self.lacks and self.pair.is_taken_by_wide(batch):
                self.best, self.seen, self.lacks = batch, together, lacks
                if not any(lacks):
                    break
        return is_taken


def _listed(names: Collection[str]) -> str:
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(pattern_of_name(name), []).append(name)
    shown = [f"'{name_of_group(group)}'" for group in list(groups.values())[:_SHOWN]]
    return ", ".join(shown) + (f" and {len(groups) - _SHOWN} more" if len(groups) > _SHOWN else "")
