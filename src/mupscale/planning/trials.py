"""What a plan is tried on: the batch that was given and, where that leaves something unseen, a stronger one.

The check of a plan compares outputs and gradients. It cannot see a weight whose gradient vanishes: the queries and keys
of one position, or of equal ones; what reads a state of zeros; a branch that did not run. A stronger batch has other
numbers, random tokens, more rows, more positions. Nothing is known of what the numbers mean, so little is assumed: only
whole numbers that look up rows of a table are drawn anew, below its size; masks, classes, lengths and indices are
repeated. A batch that the model refuses, or that gives it no finite numbers, is left out.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from mupscale.core import Role, naming
from mupscale.planning import tracing
from mupscale.planning.comparing import EMPTY, Shapes, in_full_precision, is_large, largest_number
from mupscale.planning.from_modules import find_role, in_groups, is_certain_output
from mupscale.planning.miniatures import find_miniatures
from mupscale.system import MupscaleError, UncheckedPlan, warn

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
        self.args, self.kwargs = tracing.call_arguments(inputs)
        self.flat, self.spec = tree_flatten((self.args, self.kwargs))
        tensors = [i for i, x in enumerate(self.flat) if isinstance(x, Tensor)]
        self.places = [i for i in tensors if self.flat[i].layout == torch.strided and not self.flat[i].is_nested]
        self.tensors: list[Tensor] = [self.flat[i] for i in self.places]

    def lead(self, tables: Mapping[int, int]) -> Tensor | None:
        """The first tensor of numbers, or of rows of a table: what the rest goes with."""
        drawn = (t for i, t in enumerate(self.tensors) if t.dim() and (t.is_floating_point() or i in tables))
        return next(drawn, next((t for t in self.tensors if t.dim()), None))

    def drawn(self, tables: Mapping[int, int]) -> list[int]:
        """The tensors that can have other numbers: those of floating point, and rows of tables."""
        floats = [i for i, t in enumerate(self.tensors) if t.is_floating_point() and (t.dim() or all_alike(t))]
        return sorted({*tables, *floats})

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


Sizes = list[dict[int, int]]  # for every tensor, new sizes by dimension

Along = Callable[[list[int], int, int], list[int]]
_ALONG: tuple[Along, ...] = (
    lambda fitting, dim, dims: [d for d in fitting if d == dim],
    lambda fitting, dim, dims: [d for d in fitting if d < dims - 1 or dims < 3][-1:],  # a state: layers, rows, units
    lambda fitting, dim, dims: fitting,  # a mask: rows, 1, positions, positions
)
"""Of dimensions of one size (of so many in all), those that grow where another tensor grows along this one."""


def _larger(lead: Tensor, tensors: Sequence[Tensor]) -> Iterator[tuple[Sizes, bool]]:
    """More rows, then more positions, then both, as one tensor has them; others go along where sizes agree."""
    rows = min(max(_ROWS, 4 * len(lead)), _MOST_ROWS)
    more_rows = {0: rows} if rows > len(lead) else {}
    options: list[tuple[dict[int, int], bool]] = [(more_rows, False)]
    for length, dims in itertools.product(_LENGTHS, _position_dims(lead)):
        longer = {d: length(lead.shape[d]) for d in dims}
        options += [(longer, True), (more_rows | longer, True)]

    def sizes(tensor: Tensor, wanted: Mapping[int, int], along: Along) -> dict[int, int]:
        if tensor is lead:
            return dict(wanted)
        found = dict[int, int]()
        for dim, size in wanted.items():
            fitting = [d for d in range(tensor.dim()) if tensor.shape[d] == lead.shape[dim]]
            found |= dict.fromkeys(along(fitting, dim, tensor.dim()), size)
        return found

    for (wanted, is_longer), along in itertools.product(options, _ALONG):
        yield [sizes(tensor, wanted, along) for tensor in tensors], is_longer


def _position_dims(tensor: Tensor) -> list[tuple[int, ...]]:
    """Where positions may be: behind the rows, last (channels first), or the sides of an image."""
    by_dims: dict[int, list[tuple[int, ...]]] = {2: [(1,)], 3: [(1,), (2,)], 4: [(2, 3), (1,)], 5: [(2, 3, 4), (1,)]}
    return by_dims.get(tensor.dim(), [])


def strengthened(leaves: Leaves, tables: Mapping[int, int], timid: bool = False) -> Iterator[tuple[Any, bool]]:
    """Batches that may show more, those most like the given one first, and whether they have more positions.

    tables: of the tensors that look up rows of a table, by number, how many it has.
    timid: with small and positive numbers, where the model refused others.
    """
    generator = torch.Generator().manual_seed(_SEED)
    changeable = leaves.drawn(tables)
    alike = [i for i in changeable if all_alike(leaves.tensors[i])]

    def made(sizes: Sizes, changed: Collection[int]) -> Any:
        tensors = []
        for i, (given, more) in enumerate(zip(leaves.tensors, sizes, strict=True)):
            tensor = _grown(given, more)
            if i in changed:
                most = min(tables[i], max(2, int(given.max()) + 1)) if i in tables and timid else tables.get(i)
                tensor = _redrawn(given, tensor.shape, most, timid, generator).to(given.device, given.dtype)
            tensors.append(tensor.contiguous() if more or i in changed else given)
        return leaves.replaced(tensors)

    same: Sizes = [{} for _ in leaves.tensors]
    if alike:
        yield made(same, alike), False
    if alike != changeable:
        yield made(same, changeable), False
    seen, lead = [same], leaves.lead(tables)
    for sizes, is_longer in () if lead is None else _larger(lead, leaves.tensors):
        grown = (_grown(t, more).numel() for t, more in zip(leaves.tensors, sizes, strict=True))
        if sizes not in seen and max(grown) <= _MOST_NUMBERS:
            seen.append(sizes)
            yield made(sizes, changeable), is_longer


def _redrawn(given: Tensor, shape: torch.Size, rows: int | None, timid: bool, generator: torch.Generator) -> Tensor:
    """Rows of a table; or in place of equal numbers some around them; else the same numbers in another order."""
    if rows is not None:
        return torch.randint(0, rows, shape, generator=generator)
    if not all_alike(given) or not bool(given.isfinite().all()):
        places = torch.randint(0, max(1, given.numel()), shape, generator=generator)
        return given.detach().flatten().cpu()[places] if given.numel() else given.new_empty(shape)
    if number := float(given.flatten()[0]):
        return number * (0.5 + torch.rand(shape, generator=generator))
    drawn = torch.randn(shape, generator=generator)
    return drawn.abs() if timid else drawn


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
        recorder = tracing.record_run(model, leaves.replaced(leaves.tensors))
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


def _lookups(op: tracing.Operation) -> list[tuple[tracing.Ref, int]]:
    """The tensors by which an operation looks up entries of its first argument, each with the dimension."""
    looked_up: list[tuple[Any, int]] = []
    if op.name in _TABLES:
        looked_up = [(op.args[1], 0)]
    elif op.name == "index":
        looked_up = [(index, dim) for dim, index in enumerate(op.args[1])]
    elif op.name in ("index_select", "gather", "scatter", "scatter_"):
        looked_up = [(op.args[2], op.args[1])]
    return [(index, dim) for index, dim in looked_up if isinstance(index, tracing.Ref)]


_VANISHES = 1e-10  # beside the largest gradient of the model: the check cannot tell this from nothing
_FEW = 1 / 16  # of an axis: single units may be silent by chance, as those of a ReLU are
_MANY = 1 / 4  # of an axis: a part worth a word
_LEAST = 4  # units in such a part


def _growing_weights(narrow: nn.Module, wide: nn.Module) -> dict[str, list[int]]:
    """By name, the dimensions along which parameters grow, without biases beside a weight.

    A bias is certainly added, and where it may be added in vain (to keys, before a BatchNorm) it never has a gradient.
    """
    ours, theirs = naming.parameters(narrow), naming.parameters(wide)
    growing = {
        name: dims
        for name, p in ours.items()
        if name in theirs and p.dim() == theirs[name].dim()
        if (dims := [d for d in range(p.dim()) if p.shape[d] != theirs[name].shape[d]])
    }
    matrices = [name for name in growing if ours[name].dim() > 1]

    def is_beside_a_weight(name: str) -> bool:
        path, _, local = name.rpartition(".")
        is_bias = ours[name].dim() == 1 and "bias" in local
        return is_bias and any(other.startswith(f"{path}.".lstrip(".")) for other in matrices)

    return {name: dims for name, dims in growing.items() if not is_beside_a_weight(name)}


class Seen(NamedTuple):
    """By parameter and growing dimension, which units have a gradient. absent: parameters that are in no graph."""

    units: Mapping[tuple[str, int], Tensor]
    absent: frozenset[str]

    @property
    def lacking(self) -> float:
        """The parts of axes that are not seen, all together; those that may be so by chance do not count."""
        masks = [mask for mask in self.units.values() if int((~mask).sum()) > 1 or not bool(mask.any())]
        return sum(part for part in map(_silent, masks) if part >= _FEW)

    @property
    def unseen(self) -> list[str]:
        """Parameters of which nothing is seen."""
        some = {name for (name, _), mask in self.units.items() if bool(mask.any())}
        return [name for name in dict.fromkeys(name for name, _ in self.units) if name not in some]

    @property
    def parts(self) -> list[str]:
        """Parameters of which a good part is not seen."""
        silent = {key: _silent(mask) for key, mask in self.units.items() if int((~mask).sum()) >= _LEAST}
        return list(dict.fromkeys(name for (name, _), part in silent.items() if _MANY <= part < 1))


def _silent(mask: Tensor) -> float:
    return float((~mask).double().mean()) if mask.numel() else 0.0


_SHOWN = 5  # groups of parameters that a message names


class Trials:
    """A batch, in float64, and what it and a stronger one show of two models; they are looked at once.

    strong: the stronger batch, where the given one shows too little and the models take another that shows more.
    unseen: growing parameters that change no output on any of them, and that are no certain gains or biases.
    parts: those of which a good part does not. shapes: of the two models' outputs, where large ones were run.
    """

    def __init__(self, inputs: Any) -> None:
        check_not_empty(inputs)
        self.given = tracing.in_double(inputs)
        self.strong: Any = None
        self.unseen: list[str] = []
        self.parts: list[str] = []
        self.shapes: tuple[Shapes, Shapes] | tuple[()] = ()
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
        if self._has_looked:
            return self
        self._has_looked = True
        if is_large(narrow, wide) and (mini := next(find_miniatures(narrow, wide, self.given), None)) is not None:
            with in_full_precision():
                shown = Trials(mini.inputs).look(mini.narrow, mini.wide).renamed(mini.originals)
            self.strong, self.unseen, self.parts = shown.strong, shown.unseen, shown.parts
        else:
            self._search(narrow, wide, gradients)
        return self

    def _search(self, narrow: nn.Module, wide: nn.Module, gradients: Mapping[str, Tensor] | None) -> None:
        """Find a batch that leaves less unseen than the given one, if that leaves anything."""
        growing, parameters, modules = _growing_weights(narrow, wide), naming.parameters(narrow), naming.modules(narrow)

        def seen_by(gradients: Mapping[str, Tensor]) -> Seen:
            level = _VANISHES * max(map(largest_number, gradients.values()), default=0.0)
            units = {}
            for name, p in parameters.items():
                for d in growing.get(name, ()):
                    gradient = gradients.get(name, p.new_zeros(()).expand(p.shape))
                    units[name, d] = torch.full((p.shape[d],), name in gradients)
                    if p.numel():
                        others = [e for e in range(p.dim()) if e != d]
                        sizes = gradient.detach().abs()
                        units[name, d] &= (sizes.amax(others) if others else sizes).gt(level).cpu()
            return Seen(units, frozenset(growing.keys() - gradients.keys()))

        @torch.enable_grad()
        def see(batch: Any) -> Seen | None:
            """What a batch shows of a copy with generic weights, frozen ones too; None where there are no numbers."""
            with suppress(Exception):  # whatever a model raises on what it was not made for
                model, batch = tracing.in_float64(narrow, batch, generic=1)
                for p in model.parameters():
                    p.requires_grad_(p.is_floating_point())
                outputs = tracing.outputs_in_float64(model, batch)
                gradients = tracing.gradients_of(model, tracing.gradient_loss(outputs))
                if all(bool(t.isfinite().all()) for t in (*outputs, *gradients.values())):
                    return seen_by(gradients)
            return None

        @torch.no_grad()
        def is_effective(name: str) -> bool:
            """Whether a parameter that has no gradient changes outputs all the same, as one does behind a `detach`."""
            for batch in self.batches:
                outputs = []
                for factor, shift in ((1.0, 0.0), (1.5, 0.1)):
                    model, values = tracing.in_float64(narrow, batch, generic=1)
                    naming.parameters(model)[name].mul_(factor).add_(shift)
                    outputs.append(tracing.outputs_in_float64(model, values))
                if any(not torch.equal(a, b) for a, b in zip(*outputs, strict=True)):
                    return True
            return False

        trained = all(parameters[name].requires_grad for name in growing)
        seen = seen_by(gradients) if gradients is not None and trained else see(self.given)
        if seen is None:
            return
        leaves, is_free = Leaves(self.given), True
        is_short = any(map(has_one_position, leaves.tensors))
        if seen.lacking or is_short or any(all_alike(t) or has_equal_slices(t) for t in leaves.tensors):
            tables = find_tables(tracing.in_float64(narrow, self.given, generic=1)[0], leaves)
            lead, drawn = leaves.lead(tables), [leaves.tensors[i] for i in leaves.drawn(tables)]
            is_dull = any(all_alike(t) or (t is lead and has_equal_slices(t)) for t in drawn)
            if seen.lacking or is_short or is_dull:
                first, is_taken, lacks = seen, False, (float(is_dull + is_short), seen.lacking)
                for timid in (False, True):
                    for batch, is_longer in () if is_taken else strengthened(leaves, tables, timid):
                        if not (first.lacking or is_dull or is_longer) or (shown := see(batch)) is None:
                            continue  # it has what is there already, or the model does not take it
                        is_taken = True
                        both = {key: mask | shown.units[key] for key, mask in first.units.items()}
                        together = Seen(both, first.absent & shown.absent)
                        now = float(is_short and not is_longer), together.lacking
                        if now < lacks:
                            with suppress(Exception), torch.no_grad():  # whatever the wide model raises on it
                                tracing.run_in_float64(*tracing.in_float64(wide, batch, like=narrow))
                                self.strong, seen, lacks = batch, together, now
                                if not any(lacks):
                                    break
                is_free = len(drawn) == len(leaves.tensors) and not lacks[0]
        for name in seen.unseen:
            (path, _, local), dims = name.rpartition("."), growing[name]
            # a gain's or an added token's growing axis has its units, whatever it is used for
            is_certain = len(dims) == 1 and is_certain_output(modules[path], local, parameters[name], dims[0])
            if not is_certain and not (name in seen.absent and is_effective(name)):
                self.unseen.append(name)
        # where all of the batch could be changed, what is still unseen has no effect on any batch
        self.parts = [] if is_free else seen.parts

    def renamed(self, originals: Mapping[str, Sequence[str]]) -> Trials:
        """What was seen of a miniature as of the model that it is one of. originals: by name, what is like it there."""
        for names in (self.unseen, self.parts):
            names[:] = [original for name in names for original in originals.get(name, (name,))]
        return self

    def warn(self, roles: Mapping[str, Role] | None = None) -> None:
        """Say which parameters no batch has shown. roles: those that the user gave, who knows."""
        unseen, parts = ([n for n in names if find_role(roles or {}, n) is None] for names in (self.unseen, self.parts))
        if unseen or parts:
            groups = [in_groups(dict.fromkeys(names, ""), _SHOWN) for names in (unseen, parts)]
            some = [groups[0]] * bool(unseen) + [f"a part of {groups[1]}"] * bool(parts)
            stronger = "" if self.strong is None else ", nor on a stronger one that was drawn"
            warn(
                f"the batch does not show whether the plan is right for {' and '.join(some)}: it changes no output on "
                f"the batch{stronger}, so only module types and names decide. Pass inputs= on which it matters (longer "
                "ones; models in train() for what only training uses), or roles= for it",
                UncheckedPlan,
            )
