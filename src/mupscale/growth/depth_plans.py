"""A plan for more depth: of every tensor of the deep model, which one of the shallow model it is or is made after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, Literal, get_args

from torch import Tensor, nn

from mupscale.core import Entry, Plan, naming, tidy
from mupscale.growth.block_places import fitting_places
from mupscale.growth.depth_operators import DepthOperator, Identity, Place
from mupscale.growth.stream_writers import StreamWriters
from mupscale.planning import BlockList, Writers, find_block_lists
from mupscale.system import MupscaleError

DepthRule = Literal["none", "complete"]
"""How rates follow the depth: not at all, or as under a residual multiplier of 1/L (CompleteP)."""


@dataclass(frozen=True)
class Origin:
    """The shallow model's tensor that one of the deep model is, or, where it is new, is a copy of or like."""

    name: str
    is_new: bool = False


@dataclass(frozen=True)
class DepthPlan:
    """How a shallow model becomes a deep one.

    origins: of every parameter and buffer of the deep model, by name. silent: the parameters of new blocks that write
    into the residual stream, and the value at which they write nothing. rules: what the deep model's parameter groups
    go by; every factor is 1 unless rates follow the depth. lists: the lists of blocks that are longer.

    >>> import torch
    >>> from mupscale.models import GPT2
    >>> shallow, deep = (GPT2(11, 8, width=8, head_dim=4, layers=n) for n in (1, 2))
    >>> plan = plan_depth(shallow, deep, inputs=torch.zeros(1, 8, dtype=torch.int64))
    >>> plan.origins["h.1.ln_1.weight"], sorted(plan.silent)[:2]
    (Origin(name='h.0.ln_1.weight', is_new=True), ['h.1.attn.c_proj.bias', 'h.1.attn.c_proj.weight'])
    """

    origins: Mapping[str, Origin]
    silent: Mapping[str, float]
    rules: Plan
    lists: Sequence[BlockList] = field(default_factory=tuple)


def plan_depth(
    shallow: nn.Module,
    deep: nn.Module,
    *,
    inputs: Any = None,
    grow: DepthOperator | None = None,
    blocks: str | None = None,
    depth_rule: DepthRule = "none",
    writers: Mapping[str, Writers] | None = None,
) -> DepthPlan:
    """How `shallow` grows into `deep`, two models of one class with more blocks in the second.

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
    if depth_rule not in get_args(DepthRule):
        raise MupscaleError(f"depth_rule is none or complete, not {depth_rule!r}")
    lists = find_block_lists(shallow, deep, blocks)
    tensors, deeper = _tensors(shallow), _tensors(deep)
    places = {one.path: fitting_places(one, operator, tensors, deeper) for one in lists}
    origins = _origins(lists, places, tensors, deeper)
    written = StreamWriters(shallow, deep, lists, inputs, writers)
    needed = {
        one.deep[number]: written.of_block(one, number, place)
        for one in lists
        for number, place in enumerate(places[one.path])
        if depth_rule == "complete" or (place.is_new and not operator.copies)
    }
    silent: dict[str, float] = {}
    if not operator.copies:
        new = [one.deep[n] for one in lists for n, place in enumerate(places[one.path]) if place.is_new]
        silent = {f"{path}.{name}": value for path in new for name, value in needed[path].items()}
    rules = _rules(deep)
    if depth_rule == "complete":
        rules = with_depth(rules, lists, needed)
    return DepthPlan(origins, silent, rules, tuple(lists))


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


def _origins(
    lists: Sequence[BlockList],
    places: Mapping[str, Sequence[Place]],
    tensors: Mapping[str, Tensor],
    deeper: Mapping[str, Tensor],
) -> dict[str, Origin]:
    moves: dict[str, tuple[str, bool]] = {}
    for one in lists:
        for path, place in zip(one.deep, places[one.path], strict=True):
            moves[path] = one.shallow[place.block], place.is_new
        moves |= {path: (source, False) for path, source in one.moved.items()}
    origins = {}
    for name, tensor in deeper.items():
        path = next((p for p in moves if name.startswith(f"{p}.")), "")
        source, is_new = (moves[path][0] + name.removeprefix(path), moves[path][1]) if path else (name, False)
        if source not in tensors or (not is_new and tensors[source].shape != tensor.shape):
            ours = tuple(tensors[source].shape) if source in tensors else "nothing"
            raise MupscaleError(
                f"'{name}' has shape {tuple(tensor.shape)} in the deep model and '{source}' is {ours} in the shallow "
                f"one: the two differ in more than the number of blocks of {', '.join(one.path for one in lists)}; "
                f"build both at one width, or name the blocks (blocks=)"
            )
        origins[name] = Origin(source, is_new)
    return origins


def _rules(deep: nn.Module) -> Plan:
    """Entries with every factor 1, for parameters that only change their names."""
    names = {group[0]: group for group in naming.aliases(naming.unwrap(deep).named_parameters(remove_duplicate=False))}
    shapes = {name: tuple(p.shape) for name, p in naming.parameters(deep).items()}
    return Plan({name: Entry(shape, shape, names=names.get(name, (name,))) for name, shape in shapes.items()})
