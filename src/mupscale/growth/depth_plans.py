"""A plan for more depth: of every tensor of the deep model, which one of the shallow model it is made of.

First where each block of the shallow model goes, by shapes; then what writes into the residual stream, by running the
models; and whether blocks that write nothing leave the function as it is.
"""

from __future__ import annotations

import copy
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from mupscale import core
from mupscale.core import DEPTH_POWERS, DepthRule, Entry, Number, Plan, RuleSet, TensorSource, naming
from mupscale.growth.fresh import Fresh
from mupscale.growth.residual_branches import Writers, find_writers
from mupscale.growth.writing import SAME, distance, grown_in_float64
from mupscale.planning import record_run, run_in_float64, tensors_in
from mupscale.system import MupscaleError, UncheckedPlan, checks_arguments, warn


class Place(NamedTuple):
    """A block of the deep model: the shallow model's block that it is, or, where it is new, is a copy of or like."""

    block: int
    is_new: bool


class DepthOperator(ABC):
    """How a deeper model is filled: which of its blocks are the old ones, and what the others are.

    copies: whether new blocks are copies of old ones, with their optimizer state. Where not, they are drawn afresh and
    write nothing into the residual stream, so that the function stays.
    """

    copies: bool = False

    @abstractmethod
    def places(self, shallow: int, deep: int) -> list[Place]:
        """Of each of the deep model's blocks, which block of the shallow one it is, or is made after."""


@checks_arguments
@dataclass(frozen=True)
class Identity(DepthOperator):
    """New blocks, freshly initialised, that write nothing into the residual stream yet: the function stays.

    Old block i of n lies at ⌊i·N/n⌋ among N, so that new ones come evenly spread behind them. at: where in the deep
    model the new blocks are instead, counted from 0.

    >>> [place.block if not place.is_new else None for place in Identity().places(2, 6)]
    [0, None, None, 1, None, None]
    >>> [place.block if not place.is_new else None for place in Identity(at=(0, 1)).places(2, 4)]
    [None, None, 0, 1]
    """

    at: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.at is not None:
            object.__setattr__(self, "at", tuple(self.at))

    def places(self, shallow: int, deep: int) -> list[Place]:
        """Old blocks where they are put, and behind each of them new ones that are like it."""
        return _around(_old_places(self.at, shallow, deep), deep)


@checks_arguments
@dataclass(frozen=True)
class Stack(DepthOperator):
    """New blocks are copies of the old ones, with their optimizer state. The function changes.

    order: 'appended', all blocks again on top of all blocks, as progressive stacking does it; or 'interleaved', each
    block's copies directly behind it. Where rates follow the depth, the projections into the residual stream are
    divided by the number of copies, as weights are where units are copied.

    >>> [place.block for place in Stack().places(2, 4)], [place.block for place in Stack("interleaved").places(2, 4)]
    ([0, 1, 0, 1], [0, 0, 1, 1])
    """

    order: Literal["appended", "interleaved"] = "appended"
    copies = True

    def places(self, shallow: int, deep: int) -> list[Place]:
        if self.order == "interleaved":
            return _around(_old_places(None, shallow, deep), deep)
        return [Place(number % shallow, is_new=number >= shallow) for number in range(deep)]


def _old_places(at: tuple[int, ...] | None, shallow: int, deep: int) -> list[int]:
    if at is None:
        return [number * deep // shallow for number in range(shallow)]
    if len(set(at)) != deep - shallow or not all(0 <= number < deep for number in at):
        raise MupscaleError(
            f"at={at} must give the places of {deep - shallow} new blocks among {deep}: {deep - shallow} different "
            f"numbers from 0 to {deep - 1}"
        )
    return [number for number in range(deep) if number not in at]


def _around(old: list[int], deep: int) -> list[Place]:
    """Every new block goes with the old one before it; those before all old ones, with the first."""
    return [Place(max(0, sum(place <= n for place in old) - 1), is_new=n not in old) for n in range(deep)]


@dataclass(frozen=True)
class BlockList:
    """Blocks of one class, one after the other, of which the deep model has more.

    shallow, deep: the paths of the blocks in the two models. moved: modules of the same Sequential that come after the
    blocks, and so have another number in the deep model: from their path there to the shallow one.
    """

    path: str
    shallow: tuple[str, ...]
    deep: tuple[str, ...]
    moved: Mapping[str, str] = field(default_factory=dict)

    @property
    def times(self) -> float:
        return len(self.deep) / len(self.shallow)


def find_block_lists(shallow: nn.Module, deep: nn.Module, blocks: str | None = None) -> list[BlockList]:
    """The lists of blocks that are longer in the deep model: ModuleLists, or stretches of one class in a Sequential.

    A ModuleDict whose keys are 0, 1, … is such a list, too.
    blocks: the path of the blocks, with * in place of their number ("encoder.layer*"), where they lie in no such list.
    """
    if blocks is not None:
        return [_named_blocks(blocks, naming.modules(shallow), naming.modules(deep))]
    lists = longer_lists(shallow, deep)
    if not lists:
        same = naming.parameters(shallow).keys() == naming.parameters(deep).keys()
        raise MupscaleError(
            "the deep model has no more blocks than the shallow one. Build it with more"
            if same
            else "no ModuleList or Sequential is longer in the deep model, so the library cannot find its blocks. "
            "Name them: blocks='path.of.the.blocks.*', with * in place of their number"
        )
    return lists


def longer_lists(shallow: nn.Module, deep: nn.Module) -> list[BlockList]:
    """The lists of blocks that are longer in the deep model, if any; an error where one cannot be grown."""
    ours, theirs = naming.modules(shallow), naming.modules(deep)
    lists: list[BlockList] = []
    for path, module in ours.items():
        other = theirs.get(path)
        if other is None or not _is_list(module) or not _is_list(other) or len(module._modules) == len(other._modules):
            continue
        is_stored = any(True for _ in (*other.parameters(), *other.buffers()))
        if is_stored and not any(path.startswith(f"{block}.") for one in lists for block in one.deep):
            lists.append(_longer_list(path, module, other))
    return lists


def _is_list(module: nn.Module) -> bool:
    """Whether a module holds others in an order: also a ModuleDict by their numbers, as torchtitan has it."""
    numbers = [str(number) for number in range(len(module._modules))]
    is_numbered = isinstance(module, nn.ModuleDict) and [*module._modules] == numbers != []
    return is_numbered or isinstance(module, nn.ModuleList | nn.Sequential)


def _named_blocks(pattern: str, ours: Mapping[str, nn.Module], theirs: Mapping[str, nn.Module]) -> BlockList:
    if pattern.count("*") != 1:
        raise MupscaleError(f"blocks= is a path with one * in place of the blocks' number ('h.*'), not {pattern!r}")
    expression = re.compile(re.escape(pattern).replace(r"\*", r"(\d+)"))
    paths = []
    for modules in (ours, theirs):
        numbered = [(int(match[1]), path) for path in modules if (match := expression.fullmatch(path))]
        paths.append(tuple(path for _, path in sorted(numbered)))
    blocks = BlockList(pattern, paths[0], paths[1])
    _check_blocks(blocks, [*(ours[p] for p in paths[0]), *(theirs[p] for p in paths[1])])
    return blocks


def _check_blocks(blocks: BlockList, modules: Iterable[nn.Module]) -> None:
    """An error unless there are more blocks, and these modules are of one class."""
    shallow, deep = len(blocks.shallow), len(blocks.deep)
    if not shallow or deep <= shallow:
        raise MupscaleError(
            f"'{blocks.path}' has {shallow} blocks in the shallow model and {deep} in the deep one: a deeper model "
            f"needs more of them, and at least one to begin with"
        )
    kinds = list(dict.fromkeys(core.plain_type(block).__name__ for block in modules))
    if len(kinds) > 1:
        raise MupscaleError(
            f"'{blocks.path}' holds blocks of different classes ({', '.join(kinds)}), so the class of a new block is "
            "unknown. A list that grows in depth must have blocks of one class"
        )


def _longer_list(path: str, *models: Any) -> BlockList:
    """The stretch of one class in a list that is longer in the deep model; what follows it moves."""
    names = [[f"{path}.{name}".lstrip(".") for name in module._modules] for module in models]
    children = [block for module in models for block in module._modules.values()]
    kinds = [[core.plain_type(block) for block in module._modules.values()] for module in models]
    grown = [kind for kind in dict.fromkeys([*kinds[0], *kinds[1]]) if kinds[0].count(kind) != kinds[1].count(kind)]
    pattern = f"{path}.*".lstrip(".")
    others = [[kind for kind in k if kind not in grown[:1]] for k in kinds]
    if len(grown) != 1 or others[0] != others[1]:
        _check_blocks(BlockList(pattern, tuple(names[0]), tuple(names[1])), children)
    starts = [k.index(grown[0]) if grown[0] in k else 0 for k in kinds]
    ends = [start + k.count(grown[0]) for start, k in zip(starts, kinds, strict=True)]
    shallow, deep = (tuple(n[start:end]) for n, start, end in zip(names, starts, ends, strict=True))
    is_one_stretch = all({*k[start:end]} == {grown[0]} for k, start, end in zip(kinds, starts, ends, strict=True))
    _check_blocks(BlockList(pattern, shallow, deep), () if is_one_stretch else children)
    return BlockList(pattern, shallow, deep, dict(zip(names[1][ends[1] :], names[0][ends[0] :], strict=True)))


Shapes = dict[str, tuple[int, ...]]
"""The tensors of a block, by the names that they have in it."""


@checks_arguments
def plan_depth(
    shallow: nn.Module,
    deep: nn.Module,
    *,
    inputs: Any = None,
    grow: DepthOperator | None = None,
    blocks: str | None = None,
    rules: RuleSet | None = None,
    writers: Mapping[str, Writers] | None = None,
) -> Plan:
    """How `shallow` grows into `deep`, two models of one class with more blocks in the second.

    The plan says what each tensor of the deep model is made of. Printed, it is a table of the deep model's blocks.
    inputs: a small batch, as the models are called with it. A run of the shallow model on it shows which parameters of
    a block write into the residual stream, and whether the stream stays as it is without them.
    grow: what the new blocks are, `Identity()` if nothing is said. blocks: where the blocks are, if that is not found.
    rules: `RuleSet(depth='complete')`, or 'sqrt', if learning rates are to follow the depth. writers: what a run would
    show, where it is known: by the path of a block of the shallow model, names relative to it, and the values at which
    they write nothing.

    >>> import torch
    >>> from mupscale.models import MLP
    >>> plan_depth(MLP(3, [8, 8], 2), MLP(3, [8, 8, 8], 2), inputs=torch.ones(1, 3))
    Traceback (most recent call last):
    mupscale.system.errors.MupscaleError: 'layers.1' cannot start as identity: it has no residual connection: ...
    """
    operator, rule = grow or Identity(), (rules or RuleSet()).depth
    lists = find_block_lists(shallow, deep, blocks)
    ours, theirs = _tensors(shallow), _tensors(deep)
    moves = _moves(lists, operator, ours, theirs)
    origins = _origins(lists, moves, ours, theirs)
    every = rule != "none"  # rates of old blocks follow the depth, too
    in_blocks = [path for one in lists for path in one.deep]
    needed = {path: moves[path] for path in in_blocks if every or (moves[path][1] and not operator.copies)}
    written = _find_written(shallow, deep, lists, needed, inputs, writers)
    silent = {f"{path}.{name}": value for path, names in written.items() for name, value in names.items()}
    tied = {group[0]: group for group in naming.aliases(naming.unwrap(deep).named_parameters(remove_duplicate=False))}
    entries = {}
    for name, (origin, is_new) in origins.items():
        source = TensorSource(origin, "copy" if is_new else "old")
        if is_new and not operator.copies:
            source = TensorSource(origin, "silent", silent[name]) if name in silent else TensorSource(origin, "drawn")
        narrow, wide = tuple(ours[origin].shape), tuple(theirs[name].shape)
        entries[name] = Entry(narrow, wide, names=tied.get(name, (name,)), source=source)
    parameters = {name: entries[name] for name in naming.parameters(deep)}
    plan = Plan(parameters, {name: entries[name] for name in naming.buffers(deep)}, mup=not operator.copies)
    return with_depth(plan, lists, written, rule, undo=not operator.copies)


def _moves(
    lists: Sequence[BlockList], operator: DepthOperator, ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]
) -> dict[str, tuple[str, bool]]:
    """Of each block of the deep model, and of what follows blocks: its path in the shallow one; whether it is new."""
    moves = {path: (source, False) for one in lists for path, source in one.moved.items()}
    for one in lists:
        for path, place in zip(one.deep, fitting_places(one, operator, ours, theirs), strict=True):
            moves[path] = one.shallow[place.block], place.is_new
    return moves


def _origins(
    lists: Sequence[BlockList],
    moves: Mapping[str, tuple[str, bool]],
    ours: Mapping[str, Tensor],
    theirs: Mapping[str, Tensor],
) -> dict[str, tuple[str, bool]]:
    """Of each of the deep model's tensors, the shallow one's that it comes from, and whether it is of a new block."""
    origins = {}
    for name, tensor in theirs.items():
        path = next((path for path in moves if name.startswith(f"{path}.")), "")
        old, is_new = moves.get(path, ("", False))
        origin, shape = old + name.removeprefix(path), tuple(tensor.shape)
        narrow = tuple(ours[origin].shape) if origin in ours else None
        if narrow is None or (not is_new and narrow != shape):
            raise MupscaleError(
                f"'{name}' has shape {shape} in the deep model and '{origin}' is {narrow or 'nothing'} in the shallow "
                f"one: the two differ in more than the number of blocks of {', '.join(one.path for one in lists)}; "
                "build both at the same width, or name the blocks (blocks=)"
            )
        origins[name] = origin, is_new
    return origins


def why_not_depth_alone(shallow: nn.Module, deep: nn.Module, operator: DepthOperator) -> MupscaleError | None:
    """Why shapes say that the two models differ in more than the number of blocks; None where they do not."""
    lists = find_block_lists(shallow, deep)
    ours, theirs = _tensors(shallow), _tensors(deep)
    try:
        _origins(lists, _moves(lists, operator, ours, theirs), ours, theirs)
    except MupscaleError as error:
        return error
    return None


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**naming.parameters(model), **naming.buffers(model)}


def with_more_blocks(shallow: nn.Module, deep: nn.Module, grow: DepthOperator) -> nn.Module:
    """A copy of the shallow model, at its own width, with the deep model's blocks: copies of the shallow one's."""
    made, theirs = core.copy_model(naming.unwrap(shallow)), naming.modules(deep)
    modules = naming.modules(made)
    for one in find_block_lists(shallow, deep):
        path = one.path.rpartition(".")[0]
        places = zip(one.deep, grow.places(len(one.shallow), len(one.deep)), strict=True)
        origins = {block: one.shallow[place.block] for block, place in places} | dict(one.moved)
        names = {name: f"{path}.{name}".lstrip(".") for name in theirs[path]._modules}
        modules[path]._modules = {n: copy.deepcopy(modules[origins.get(block, block)]) for n, block in names.items()}
    return made


def with_depth(
    plan: Plan,
    lists: Sequence[BlockList],
    writers: Mapping[str, Writers],
    rule: DepthRule = "complete",
    *,
    undo: bool = False,
) -> Plan:
    """The plan with what follows from more blocks under a residual multiplier of L^-α, as the rule says.

    lists: of blocks, with as many as the plan's rates are for (shallow) and as the model has (deep). writers: of each
    block of the model, by its path. undo: whether old blocks keep their weights, and rates alone follow the depth.
    Beside the multiplier, rates of all blocks fall as L^(α-1): as a fold that no stored value shows.
    """
    if rule == "none":
        return plan
    entries = dict(plan.parameters)
    for one in lists:
        times = Fraction(len(one.deep), len(one.shallow))
        hidden = 1 if DEPTH_POWERS[rule] == 1 else float(times) ** float(1 - DEPTH_POWERS[rule])
        for path in one.deep:
            for name in [name for name in entries if name.startswith(f"{path}.")]:
                local, entry = name.removeprefix(f"{path}."), entries[name]
                writes = local in writers[path]
                share: Number = times if writes else hidden
                told: dict[str, Number] = {"depth": entry.constants.depth * times}
                if share != 1:
                    told |= {"fold": Fraction(entry.fold) / share, "residual": 1 / share}
                    told |= {"undo": times if writes and undo else hidden}
                if writes:
                    told["offset"] = -writers[path][local] or 0
                entries[name] = entry.with_constants(**{key: core.tidy(number) for key, number in told.items()})
    return replace(plan, parameters=entries)


def fitting_places(
    one: BlockList, operator: DepthOperator, tensors: Mapping[str, Tensor], deeper: Mapping[str, Tensor]
) -> list[Place]:
    """The operator's places, as far as shapes allow them.

    Old blocks that are to be spread evenly go to the nearest places where the deep model's blocks have their shapes:
    the last block of some models has less in it, and every second one of others has a mask. A new block goes with the
    nearest old one that is shaped as it is, or, where there is none, that has all of its tensors, in whatever shapes.
    """
    ours = [_below(path, tensors) for path in one.shallow]
    theirs = [_below(path, deeper) for path in one.deep]
    places = operator.places(len(ours), len(theirs))
    if operator == Identity():
        old = _where_they_fit(ours, theirs, [n for n, place in enumerate(places) if not place.is_new])
        new = tuple(n for n in range(len(theirs)) if n not in old)
        places = Identity(at=new).places(len(ours), len(theirs)) if old else places
    return [_fitting(one, operator, number, place, ours, theirs[number]) for number, place in enumerate(places)]


def _below(path: str, tensors: Mapping[str, Tensor]) -> Shapes:
    return {n.removeprefix(f"{path}."): tuple(t.shape) for n, t in tensors.items() if n.startswith(f"{path}.")}


def _where_they_fit(ours: Sequence[Shapes], theirs: Sequence[Shapes], wanted: Sequence[int]) -> tuple[int, ...]:
    """Places in rising order at which the old blocks' shapes are, nearest to the wanted ones; else none."""
    best: dict[int, tuple[int, tuple[int, ...]]] = {-1: (0, ())}  # by the last place that is taken
    for block, shapes in enumerate(ours):
        ends = [n for n, there in enumerate(theirs) if there == shapes]
        best = {
            end: min((cost + abs(end - wanted[block]), (*taken, end)) for cost, taken in before)
            for end in ends
            if (before := [way for last, way in best.items() if last < end])
        }
    return min(best.values())[1] if best else ()


def _fitting(
    one: BlockList, operator: DepthOperator, number: int, place: Place, ours: Sequence[Shapes], theirs: Shapes
) -> Place:
    """The place, or that of a new block with another old one."""
    if ours[place.block] == theirs:
        return place
    if place.is_new and not operator.copies:
        candidates = [i for i, block in enumerate(ours) if block == theirs]
        candidates = candidates or [i for i, block in enumerate(ours) if theirs.keys() <= block.keys()]
        if candidates:
            return Place(min(candidates, key=lambda i: abs(i - place.block)), is_new=True)
    odd = next((n for n in (*theirs, *ours[place.block]) if theirs.get(n) != ours[place.block].get(n)), "")
    raise MupscaleError(
        f"'{one.deep[number]}' cannot come from '{one.shallow[place.block]}': '{odd}' has shape {theirs.get(odd)} in "
        f"the deep model and {ours[place.block].get(odd)} in the shallow one. Depth grows by blocks of one shape. Use "
        "Identity(at=…) to say where new blocks go"
    )


def _find_written(
    shallow: nn.Module,
    deep: nn.Module,
    lists: Sequence[BlockList],
    needed: Mapping[str, tuple[str, bool]],
    inputs: Any,
    given: Mapping[str, Writers] | None,
) -> dict[str, Writers]:
    """What writes into the residual stream in blocks of the deep model: as given, or found by running the models.

    needed: by path, the shallow block that each is, or is made after, and whether it is new. given: by shallow path.
    Names are relative to the block, and are those of the shallow one. Where that one cannot be without effect, as the
    first block of a stage that changes the shape, or where it is the only one of its list and its end is not seen, the
    deep model's own block is looked at.
    """
    ours, theirs = naming.parameters(shallow), naming.parameters(deep)

    @cache
    def run(in_deep: bool) -> tuple[dict[str, Writers], dict[str, str]]:
        if inputs is None:
            raise MupscaleError(
                "the library runs the model to find what a block writes into the residual stream. Pass inputs=: a "
                "small batch, as the model is called"
            )
        paths = [path for one in lists for path in (one.deep if in_deep else one.shallow)]
        return find_writers(deep if in_deep else shallow, paths, inputs)

    found = {}
    for path, (source, is_new) in needed.items():
        written = (run(False)[0] if given is None else given).get(source)
        if written is not None and all(f"{path}.{name}" in theirs for name in written):
            found[path] = written
            continue
        if given is not None:
            raise cannot_be_identity(source, "no known part writes into the stream")
        if not is_new or any(p.is_meta for p in theirs.values()):
            raise cannot_be_identity(source, run(False)[1][source])
        if path not in run(True)[0]:
            is_alike = source in run(False)[1] and _below(source, ours) == _below(path, theirs)
            raise cannot_be_identity(*((source, run(False)[1][source]) if is_alike else (path, run(True)[1][path])))
        found[path] = run(True)[0][path]
    return found


def cannot_be_identity(path: str, reason: str) -> MupscaleError:
    """The error for a block that has an effect whatever is silent in it."""
    return MupscaleError(
        f"'{path}' cannot start as identity: {reason}. Grow by Stack(), which copies blocks and changes the function, "
        "or widen the model instead"
    )


@torch.no_grad()
def check_silent_blocks(shallow: nn.Module, deep: nn.Module, plan: Plan, inputs: Any) -> None:
    """An error where the deep model would compute something else although its new blocks write nothing."""
    tensors = [*shallow.parameters(), *deep.parameters()]
    if len({t.device for t in tensors}) > 1 or any(t.is_meta or core.is_sharded(t) for t in tensors):
        return  # which cannot be copied and run on one batch
    small, large, batch = grown_in_float64(shallow, deep, plan, inputs, Fresh())

    def outputs(model: nn.Module, seed: int) -> list[Tensor]:
        return [t for t in tensors_in(run_in_float64(model, batch, seed)) if t.is_floating_point()]

    before, after = outputs(small, 0), outputs(large, 0)
    if len(before) != len(after):  # what there is of each block, such as a cache, beside the output
        before, after = before[:1], after[:1]
    far = max(map(distance, before, after), default=0.0)
    if far <= SAME or max(map(distance, before, outputs(small, 1))) > SAME:
        return  # what draws random numbers while it runs cannot be compared
    if why := naming.why_not_a_copy(shallow, record_run(small, batch).run.leaves.values()):
        warn(f"this growth has not been tried: {why}", UncheckedPlan)
        return
    raise MupscaleError(
        f"the deep model's outputs differ by {far:.1g}, although its new blocks write nothing into the residual "
        "stream. Something depends on the number of blocks, or on what a block computes besides its output. Grow by "
        "Stack(), which copies blocks and changes the function"
        if math.isfinite(far)
        else "the deep model's outputs are not finite: it divides by the norm of a weight that is zero in new blocks. "
        "Grow by Stack(), which copies blocks and changes the function"
    )
