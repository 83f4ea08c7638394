"""A plan for more depth: of every tensor of the deep model, which one of the shallow model it is or is made after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, Literal

from torch import Tensor, nn

from mupscale.core import Entry, Plan, naming, tidy
from mupscale.growth.block_places import fitting_places
from mupscale.growth.depth_operators import DepthOperator, Identity, Place
from mupscale.growth.stream_writers import StreamWriters
from mupscale.planning import BlockList, Writers, find_block_lists
from mupscale.system import MupscaleError, checks_arguments, html_table, pattern_of_name, text_table, wrap_text

DepthRule = Literal["none", "complete"]
"""How rates follow the depth: not at all, or as under a residual multiplier of 1/L (CompleteP)."""

_HEADER = ("block", "comes from", "starts")


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
    go by; every factor is 1 unless rates follow the depth. grow: what the new blocks are. lists: the lists of blocks
    that are longer. Printed, a plan is a table of the deep model's blocks.

    >>> import torch
    >>> from mupscale.models import GPT2
    >>> shallow, deep = (GPT2(11, 8, width=8, head_dim=4, layers=n) for n in (1, 2))
    >>> plan = plan_depth(shallow, deep, inputs=torch.zeros(1, 8, dtype=torch.int64))
    >>> plan.origins["h.1.ln_1.weight"], sorted(plan.silent)[:2]
    (Origin(name='h.0.ln_1.weight', is_new=True), ['h.1.attn.c_proj.bias', 'h.1.attn.c_proj.weight'])
    >>> plan
    DepthPlan(1 → 2 blocks of 'h', Identity)
    """

    origins: Mapping[str, Origin]
    silent: Mapping[str, float]
    rules: Plan
    grow: DepthOperator
    lists: Sequence[BlockList] = field(default_factory=tuple)

    def __repr__(self) -> str:
        return f"DepthPlan({', '.join([*map(_list_in_words, self.lists), type(self.grow).__name__])})"

    def __str__(self) -> str:
        """A table of the deep model's blocks, and below it what else there is to know."""
        return f"{text_table(_HEADER, self._table_rows(), left=3)}\n{wrap_text(self._caption())}"

    def _repr_html_(self) -> str:
        """The same table in a notebook."""
        return html_table(_HEADER, self._table_rows(), self._caption())

    def _table_rows(self) -> list[tuple[str, ...]]:
        new = "a copy" if self.grow.copies else "new, and writes nothing yet"
        rows: list[tuple[str, ...]] = []
        for one in self.lists:
            for path in one.deep:
                tensor = next((name for name in self.origins if name.startswith(f"{path}.")), None)
                if tensor is not None:
                    origin = self.origins[tensor]
                    source = origin.name.removesuffix(tensor.removeprefix(path))
                    rows.append((path, source, new if origin.is_new else "as it was"))
        return rows

    def _caption(self) -> str:
        silent = sorted({pattern_of_name(name) for name in self.silent})
        follows = any(entry.depth != 1 for entry in self.rules.parameters.values())
        return "; ".join(
            [
                f"{self.grow!r}: the function {'changes' if self.grow.copies else 'stays'}",
                *([f"what writes into the stream: {', '.join(silent)}"] if silent else []),
                *(["learning rates follow the depth"] if follows else []),
            ]
        )


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
    return DepthPlan(origins, silent, rules, operator, tuple(lists))


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


def _list_in_words(one: BlockList) -> str:
    return f"{len(one.shallow)} → {len(one.deep)} blocks of '{one.path.removesuffix('.*')}'"


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
                "build both at the same width, or name the blocks (blocks=)"
            )
        origins[name] = Origin(source, is_new)
    return origins


def _rules(deep: nn.Module) -> Plan:
    """Entries with every factor 1, for parameters that only change their names."""
    names = {group[0]: group for group in naming.aliases(naming.unwrap(deep).named_parameters(remove_duplicate=False))}
    shapes = {name: tuple(p.shape) for name, p in naming.parameters(deep).items()}
    return Plan({name: Entry(shape, shape, names=names.get(name, (name,))) for name, shape in shapes.items()})
