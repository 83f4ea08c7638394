"""The blocks that a deep model has more of than a shallow one: where their list is, and what became of each name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from mupscale.core import naming, plain_type
from mupscale.system import MupscaleError

_LISTS = (nn.ModuleList, nn.Sequential)


@dataclass(frozen=True)
class BlockList:
    """Blocks of one class, one after the other, of which the deep model has more.

    shallow, deep: the paths of the blocks in the two models. moved: modules of the same Sequential that come after the
    blocks, and so have another number in the deep model: from their path there to the shallow one.

    >>> BlockList("h.*", ("h.0",), ("h.0", "h.1")).times
    2.0
    """

    path: str
    shallow: tuple[str, ...]
    deep: tuple[str, ...]
    moved: Mapping[str, str] = field(default_factory=dict)

    @property
    def times(self) -> float:
        """By how much there are more blocks."""
        return len(self.deep) / len(self.shallow)


def find_block_lists(shallow: nn.Module, deep: nn.Module, blocks: str | None = None) -> list[BlockList]:
    """The lists of blocks that are longer in the deep model: ModuleLists, or stretches of one class in a Sequential.

    A ModuleDict whose keys are 0, 1, … is such a list, too.
    blocks: the path of the blocks, with * in place of their number ("encoder.layer*"), where they lie in no such list.

    >>> shallow, deep = (nn.ModuleDict({"h": nn.ModuleList(nn.Linear(2, 2) for _ in range(n))}) for n in (1, 3))
    >>> [(one.path, one.deep) for one in find_block_lists(shallow, deep)]
    [('h.*', ('h.0', 'h.1', 'h.2'))]
    """
    ours, theirs = naming.modules(shallow), naming.modules(deep)
    if blocks is not None:
        return [_named_blocks(blocks, ours, theirs)]
    lists: list[BlockList] = []
    for path, module in ours.items():
        other = theirs.get(path)
        if other is None or not _is_list(module) or not _is_list(other) or len(module._modules) == len(other._modules):
            continue
        if not any(True for _ in (*other.parameters(), *other.buffers())):  # of nothing that is stored
            continue
        if not any(path.startswith(f"{block}.") for one in lists for block in one.deep):
            lists.append(_longer_list(path, module, other))
    if not lists:
        same = naming.parameters(shallow).keys() == naming.parameters(deep).keys()
        raise MupscaleError(
            "the deep model has no more blocks than the shallow one. Build it with more"
            if same
            else "no ModuleList or Sequential is longer in the deep model, so the library cannot find its blocks. "
            "Name them: blocks='path.of.the.blocks.*', with * in place of their number"
        )
    return lists


def _is_list(module: nn.Module) -> bool:
    """Whether a module holds others in an order: also a ModuleDict by their numbers, as torchtitan has it."""
    numbers = [str(number) for number in range(len(module._modules))]
    return isinstance(module, _LISTS) or (isinstance(module, nn.ModuleDict) and [*module._modules] == numbers != [])


def _named_blocks(pattern: str, ours: Mapping[str, nn.Module], theirs: Mapping[str, nn.Module]) -> BlockList:
    if pattern.count("*") != 1:
        raise MupscaleError(f"blocks= is a path with one * in place of the blocks' number ('h.*'), not {pattern!r}")
    expression = re.compile(re.escape(pattern).replace(r"\*", r"(\d+)"))
    paths = []
    for modules in (ours, theirs):
        numbered = [(int(match[1]), path) for path in modules if (match := expression.fullmatch(path))]
        paths.append(tuple(path for _, path in sorted(numbered)))
    _check_longer(pattern, *paths)
    _check_one_class(pattern, [*(ours[p] for p in paths[0]), *(theirs[p] for p in paths[1])])
    return BlockList(pattern, paths[0], paths[1])


def _check_longer(path: str, shallow: Sequence[Any], deep: Sequence[Any]) -> None:
    if not shallow or len(deep) <= len(shallow):
        raise MupscaleError(
            f"'{path}' has {len(shallow)} blocks in the shallow model and {len(deep)} in the deep one: a deeper model "
            f"needs more of them, and at least one to begin with"
        )


def _check_one_class(path: str, blocks: Iterable[nn.Module]) -> None:
    kinds = list(dict.fromkeys(plain_type(block).__name__ for block in blocks))
    if len(kinds) > 1:
        raise MupscaleError(
            f"'{path}' holds blocks of different classes ({', '.join(kinds)}), so the class of a new block is unknown. "
            "A list that grows in depth must have blocks of one class"
        )


def _longer_list(path: str, shallow: Any, deep: Any) -> BlockList:
    """The stretch of one class in a list that is longer in the deep model; what follows it moves."""
    names = [[f"{path}.{name}".lstrip(".") for name in module._modules] for module in (shallow, deep)]
    shallow, deep = ([*module._modules.values()] for module in (shallow, deep))
    kinds = [[plain_type(block) for block in blocks] for blocks in (shallow, deep)]
    grown = [kind for kind in dict.fromkeys([*kinds[0], *kinds[1]]) if kinds[0].count(kind) != kinds[1].count(kind)]
    if len(grown) != 1 or any(_without(grown[0], k) != _without(grown[0], kinds[0]) for k in kinds):
        _check_longer(f"{path}.*".lstrip("."), *names)
        _check_one_class(path, [*shallow, *deep])
    starts = [k.index(grown[0]) if grown[0] in k else 0 for k in kinds]
    counts = [k.count(grown[0]) for k in kinds]
    blocks = [tuple(n[start : start + count]) for n, start, count in zip(names, starts, counts, strict=True)]
    _check_longer(f"{path}.*".lstrip("."), *blocks)
    if any(set(k[s : s + c]) != {grown[0]} for k, s, c in zip(kinds, starts, counts, strict=True)):
        _check_one_class(path, [*shallow, *deep])
    after = [n[start + count :] for n, start, count in zip(names, starts, counts, strict=True)]
    return BlockList(f"{path}.*".lstrip("."), blocks[0], blocks[1], dict(zip(after[1], after[0], strict=True)))


def _without(kind: type, kinds: Sequence[type]) -> list[type]:
    return [each for each in kinds if each is not kind]
