"""Batches that show more than a given one: other numbers, random tokens, more rows, more positions.

Nothing is known of what the numbers mean, so little is assumed. Only whole numbers that look up rows of a table are
drawn anew, below its size; masks, classes, lengths and indices are repeated. A batch that the model refuses, or that
gives it no finite numbers, is left out by the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from mupscale.planning.model_calls import call_arguments
from mupscale.planning.tracing import run_in_float64
from mupscale.system import MupscaleError

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
_TABLES = {"embedding": 1, "_embedding_bag": 1, "_embedding_bag_forward_only": 1}  # looked up along the first dimension


@dataclass(frozen=True)
class Stronger:
    """A batch, and what it has more than the given one: other numbers for equal ones, more positions."""

    batch: Any
    is_longer: bool


class Leaves:
    """The tensors of a batch, and how to put others in their places."""

    def __init__(self, inputs: Any) -> None:
        self.args, self.kwargs = call_arguments(inputs)
        self.flat, self.spec = tree_flatten((self.args, self.kwargs))
        self.places = [i for i, x in enumerate(self.flat) if isinstance(x, Tensor) and _is_plain(x)]
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


def _is_plain(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_nested


def check_not_empty(inputs: Any) -> None:
    """Refuse a batch of tensors that have no number in them; there may be no batch at all.

    >>> check_not_empty(torch.zeros(0, 3))
    Traceback (most recent call last):
    mupscale.system.errors.MupscaleError: the batch is empty, so it shows nothing: pass inputs= with at least ...
    """
    tensors = [t for t in Leaves(inputs).tensors if t.dim()]
    if tensors and not any(t.numel() for t in tensors):
        raise MupscaleError(EMPTY)


def all_alike(tensor: Tensor) -> bool:
    """Whether all of its numbers are one, or its only number is zero.

    >>> all_alike(torch.ones(2)), all_alike(torch.ones(1)), all_alike(torch.zeros(1)), all_alike(torch.arange(2))
    (True, False, True, False)
    """
    if tensor.numel() < 2:
        return tensor.numel() == 1 and not bool(tensor.any())
    return bool((tensor == tensor.flatten()[0]).all())


def has_equal_slices(tensor: Tensor) -> bool:
    """Whether its entries are equal along one of its dimensions: rows, positions or channels.

    >>> has_equal_slices(torch.randn(1, 3).expand(2, 3)), has_equal_slices(torch.eye(3))
    (True, False)
    """
    dims = [d for d in range(tensor.dim()) if tensor.shape[d] > 1]
    return bool(tensor.numel()) and any(bool((tensor == tensor.narrow(d, 0, 1)).all()) for d in dims)


def has_one_position(tensor: Tensor) -> bool:
    """Whether it may be a sequence, or an image, of one place: of tokens, or of vectors.

    >>> has_one_position(torch.zeros(4, 1, 8)), has_one_position(torch.zeros(4, 1, 8, 8))
    (True, False)
    """
    if not tensor.is_floating_point():
        return tensor.dim() == 2 and tensor.shape[1] == 1
    options = _position_dims(tensor)[: 2 if tensor.dim() == 3 else 1]  # the channel of an image is no position
    return tensor.dim() > 2 and any(all(tensor.shape[d] == 1 for d in dims) for dims in options)


def strengthened(leaves: Leaves, tables: Mapping[int, int], timid: bool = False) -> Iterator[Stronger]:
    """Batches that may show more, those most like the given one first.

    tables: of the tensors that look up rows of a table, by number, how many it has.
    timid: with small and positive numbers, where the model refused others.

    >>> shapes = [tuple(one.batch[0].shape) for one in strengthened(Leaves(torch.zeros(1, 2, 3)), {})]
    >>> shapes[0], shapes[1], shapes[-1]
    ((1, 2, 3), (8, 2, 3), (8, 2, 4))
    """
    draw = _Draw(leaves.tensors, tables, timid)
    same: Sizes = [{} for _ in leaves.tensors]
    if any(draw.is_alike(i) for i in range(len(leaves.tensors))):
        yield Stronger(leaves.replaced(draw.tensors(same, alike_alone=True)), False)
    if not all(draw.is_alike(i) or not draw.can_change(i) for i in range(len(leaves.tensors))):
        yield Stronger(leaves.replaced(draw.tensors(same)), False)
    seen, lead = [same], leaves.lead(tables)
    for sizes, is_longer in () if lead is None else _larger(lead, leaves.tensors):
        if sizes not in seen and draw.fits(sizes):
            seen.append(sizes)
            yield Stronger(leaves.replaced(draw.tensors(sizes)), is_longer)


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
        for along in (_same_place, _last_place, _all_places):
            yield [_sizes_along(lead, tensor, wanted, along) for tensor in tensors], is_longer


def _position_dims(tensor: Tensor) -> list[tuple[int, ...]]:
    """Where positions may be: behind the rows, last (channels first), or the sides of an image."""
    by_dims: dict[int, list[tuple[int, ...]]] = {2: [(1,)], 3: [(1,), (2,)], 4: [(2, 3), (1,)], 5: [(2, 3, 4), (1,)]}
    return by_dims.get(tensor.dim(), [])


Along = Callable[[list[int], int, int], list[int]]  # of dimensions of one size, those that grow


def _same_place(fitting: list[int], dim: int, dims: int) -> list[int]:
    return [d for d in fitting if d == dim]


def _last_place(fitting: list[int], dim: int, dims: int) -> list[int]:
    """As the rows of a recurrent state are, (layers, rows, units)."""
    return [d for d in fitting if d < dims - 1 or dims < 3][-1:]


def _all_places(fitting: list[int], dim: int, dims: int) -> list[int]:
    """As the positions of a mask are, (rows, 1, positions, positions)."""
    return fitting


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


class _Lookups(TorchDispatchMode):
    """Notes which tensors of a batch look up rows of a table that does not depend on the batch."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tables: dict[int, int] = {}
        self.origins = {id(t): frozenset([i]) for i, t in enumerate(tensors)}
        self.whole = {i for i, t in enumerate(tensors) if not t.is_floating_point() and t.dtype != torch.bool}
        self.alive: list[Any] = []  # so that an id stands for one tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        flat = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
        output = func(*args, **(kwargs or {}))
        self._note(str(func).split(".")[1], args)
        origin = frozenset[int]().union(*(self.origins.get(id(x), frozenset()) for x in flat))
        for x in tree_flatten(output)[0]:
            if isinstance(x, Tensor):
                self.alive.append(x)
                self.origins[id(x)] = self.origins.get(id(x), frozenset()) | origin
        return output

    def _note(self, name: str, args: Any) -> None:
        looked_up: list[tuple[Any, int]] = []
        if name in _TABLES:
            looked_up = [(args[1], 0)]
        elif name == "index":
            looked_up = [(index, dim) for dim, index in enumerate(args[1])]
        elif name in ("index_select", "gather", "scatter", "scatter_"):
            looked_up = [(args[2], args[1])]
        for index, dim in looked_up:
            if isinstance(index, Tensor) and index.dtype != torch.bool and not self.origins.get(id(args[0])):
                for i in self.origins.get(id(index), frozenset()) & self.whole:
                    self.tables[i] = min(args[0].shape[dim], self.tables.get(i, args[0].shape[dim]))


@torch.no_grad()
def find_tables(model: nn.Module, leaves: Leaves) -> dict[int, int]:
    """Of the batch's tensors that look up rows of a table (tokens), by number, how many rows the smallest one has.

    >>> find_tables(nn.Embedding(7, 2), Leaves(torch.zeros(1, 3, dtype=torch.long)))
    {0: 7}
    """
    if all(t.is_floating_point() or t.dtype == torch.bool for t in leaves.tensors):
        return {}
    lookups = _Lookups(leaves.tensors)
    with suppress(Exception), lookups:  # whatever a model raises while it is watched: then less is known
        run_in_float64(model, leaves.replaced(leaves.tensors))
    return lookups.tables
