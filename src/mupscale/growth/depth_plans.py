"""A plan for more depth: of every tensor of the deep model, which one of the shallow model it is made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any, Literal

from torch import Tensor, nn

from mupscale.core import Entry, Plan, TensorSource, naming, tidy
from mupscale.growth.block_places import fitting_places
from mupscale.growth.depth_operators import DepthOperator, Identity, Place
from mupscale.growth.stream_writers import StreamWriters
from mupscale.planning import BlockList, Writers, find_block_lists
from mupscale.system import MupscaleError, checks_arguments

DepthRule = Literal["none", "complete"]
"""How rates follow the depth: not at all, or as under a residual multiplier of 1/L (CompleteP)."""


@checks_arguments
def plan_depth(
    shallow: nn.Module,
    deep: nn.Module,
    *,
    inputs: Any = None,
    grow: DepthOperator | None = None,
    blocks: str | None = None,
    depth_rule: DepthRule = "none",
    writers: Mapping[str, Writers] | None = None,
) -> Plan:
    """How `shallow` grows into `deep`, two models of one class with more blocks in the second.

    The plan says what each tensor of the deep model is made of. Printed, it is a table of the deep model's blocks.
    inputs: a small batch, as the models are called with it. A run of the shallow model on it shows which parameters of
    a block write into the residual stream, and whether the stream stays as it is without them.
    grow: what the new blocks are, `Identity()` if nothing is said. blocks: where the blocks are, if that is not found.
    depth_rule: 'complete' if learning rates are to follow the depth. writers: what a run would show, where it is known:
    by the path of a block of the shallow model, names relative to it, and the values at which they write nothing.

    >>> import torch
    >>> from mupscale.models import MLP
    >>> plan_depth(MLP(3, [8, 8], 2), MLP(3, [8, 8, 8], 2), inputs=torch.ones(1, 3))
    Traceback (most recent call last):
    mupscale.system.errors.MupscaleError: 'layers.1' cannot start as identity: it has no residual connection: ...
    """
    operator = Identity() if grow is None else grow
    lists = find_block_lists(shallow, deep, blocks)
    tensors, deeper = _tensors(shallow), _tensors(deep)
    places = {one.path: fitting_places(one, operator, tensors, deeper) for one in lists}
    written = StreamWriters(shallow, deep, lists, inputs, writers)
    needed = {
        one.deep[number]: written.of_block(one, number, place)
        for one in lists
        for number, place in enumerate(places[one.path])
        if depth_rule == "complete" or (place.is_new and not operator.copies)
    }
    silent = {f"{path}.{name}": value for path, names in needed.items() for name, value in names.items()}
    sources = _sources(lists, places, tensors, deeper, silent, copies=operator.copies)
    plan = _unscaled(deep, tensors, sources, mup=not operator.copies)
    return with_depth(plan, lists, needed) if depth_rule == "complete" else plan


def with_depth(plan: Plan, lists: Sequence[BlockList], writers: Mapping[str, Writers]) -> Plan:
    """The plan with what follows from more blocks under a residual multiplier of 1/L (rule 'complete').

    lists: of blocks, with as many as the plan's rates are for (shallow) and as the model has (deep). writers: of each
    block of the model, by its path.

    >>> plan = Plan({name: Entry((2, 2), (2, 2)) for name in ("0.weight", "1.weight")})
    >>> two = BlockList("*", ("0",), ("0", "1"))
    >>> with_depth(plan, [two], {"0": {"weight": 0.0}, "1": {"weight": 0.0}})["0.weight"].rule
    Rule(out=1, in_=1, fold=Fraction(1, 2), depth=2)
    """
    entries = dict(plan.parameters)
    for one in lists:
        times = Fraction(len(one.deep), len(one.shallow))
        for path in one.deep:
            for name in [name for name in entries if name.startswith(f"{path}.")]:
                local, entry = name.removeprefix(f"{path}."), entries[name]
                fold, offset = entry.fold, entry.offset
                if local in writers[path]:
                    fold, offset = tidy(Fraction(fold) / times), -writers[path][local] or 0
                depth = tidy(entry.depth * times)
                entries[name] = replace(entry, fold=fold, offset=offset, depth=depth)
    return replace(plan, parameters=entries)


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**naming.parameters(model), **naming.buffers(model)}


def _sources(
    lists: Sequence[BlockList],
    places: Mapping[str, Sequence[Place]],
    tensors: Mapping[str, Tensor],
    deeper: Mapping[str, Tensor],
    silent: Mapping[str, float],
    *,
    copies: bool,
) -> dict[str, TensorSource]:
    """silent: the values at which what writes into the stream writes nothing. copies: whether new blocks are copies."""
    moves: dict[str, tuple[str, bool]] = {}
    for one in lists:
        for path, place in zip(one.deep, places[one.path], strict=True):
            moves[path] = one.shallow[place.block], place.is_new
        moves |= {path: (source, False) for path, source in one.moved.items()}
    sources = {}
    for name, tensor in deeper.items():
        path = next((p for p in moves if name.startswith(f"{p}.")), "")
        source, is_new = (moves[path][0] + name.removeprefix(path), moves[path][1]) if path else (name, False)
        if source not in tensors or (not is_new and tensors[source].shape != tensor.shape):
            ours = tuple(tensors[source].shape) if source in tensors else "nothing"
            raise MupscaleError(
                f"'{name}' has shape {tuple(tensor.shape)} in the deep model and '{source}' is {ours} in the shallow "
                f"one: the two differ in more than the number of blocks of {', '.join(one.path for one in lists)}; "
                "build both at the same width, or name the blocks (blocks=)"
            )
        if copies or not is_new:
            sources[name] = TensorSource(source, "copy" if is_new else "old")
        else:
            sources[name] = (
                TensorSource(source, "silent", silent[name]) if name in silent else TensorSource(source, "drawn")
            )
    return sources


def _unscaled(
    deep: nn.Module, tensors: Mapping[str, Tensor], sources: Mapping[str, TensorSource], *, mup: bool
) -> Plan:
    """A plan by which every factor is 1."""
    names = {group[0]: group for group in naming.aliases(naming.unwrap(deep).named_parameters(remove_duplicate=False))}

    def entry(name: str, tensor: Tensor) -> Entry:
        narrow = tuple(tensors[sources[name].name].shape)
        return Entry(narrow, tuple(tensor.shape), names=names.get(name, (name,)), source=sources[name])

    parameters, buffers = (
        {name: entry(name, tensor) for name, tensor in named.items()}
        for named in (naming.parameters(deep), naming.buffers(deep))
    )
    return Plan(parameters, buffers, mup=mup)
