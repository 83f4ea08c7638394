"""Which layers of a shallow and a deep model correspond: those at the same part of the way through the blocks."""

from __future__ import annotations

from torch import nn

from mupscale.core import naming
from mupscale.growth import Identity
from mupscale.planning import find_block_lists
from mupscale.system import MupscaleError


def names_in_shallow(shallow: nn.Module, deep: nn.Module) -> dict[str, str]:
    """What modules of the deep model are called in the shallow one; those that it has no counterpart of are left out.

    Block i of n corresponds to block ⌊i·N/n⌋ of N, which reads the stream at the same part of the way.

    >>> shallow, deep = (nn.ModuleDict({"h": nn.ModuleList(nn.Linear(2, 2) for _ in range(n))}) for n in (2, 6))
    >>> names_in_shallow(shallow, deep)
    {'': '', 'h': 'h', 'h.0': 'h.0', 'h.3': 'h.1'}
    """
    ours, theirs = naming.modules(shallow), naming.modules(deep)
    prefixes: dict[str, str | None] = {}
    if ours.keys() != theirs.keys():
        try:
            lists = find_block_lists(shallow, deep)
        except MupscaleError:  # what has the same name has to do
            lists = []
        for one in lists:
            for path, place in zip(one.deep, Identity().places(len(one.shallow), len(one.deep)), strict=True):
                prefixes[path] = None if place.is_new else one.shallow[place.block]
            prefixes |= one.moved
    names: dict[str, str] = {}
    for path in theirs:
        inside = next((prefix for prefix in prefixes if path == prefix or path.startswith(f"{prefix}.")), None)
        start = "" if inside is None else prefixes[inside]
        if start is not None and (name := start + path.removeprefix(inside or "")) in ours:
            names[path] = name
    return names
