"""Where a wide model with the old units alone parts from the narrow one, and the blocks that would bring them together.

Inputs may lie in blocks that no module tells, as after a flatten. Which blocks they are shows where the module whose
weights read them is tried with each.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from mupscale.core import Axis, Entry, Plan, index_of_old, multiplier
from mupscale.planning.copied_values import are_close
from mupscale.planning.recorder import Recorder
from mupscale.planning.tracing import run_in_float64, saved_tensors

_MOST_TRIALS = 40


@dataclass(frozen=True)
class Parting:
    """The first module whose output differs at old units. last: the one with weights before it that agrees, or ''.

    weights: the module's own. helpful: those that would agree with their inputs in blocks, and the length of a block.
    """

    path: str
    last: str
    weights: Mapping[str, Entry]
    helpful: Mapping[str, int]

    def __str__(self) -> str:
        entry = None if self.matrix is None else self.weights[self.matrix]
        shapes = "" if entry is None else f" (weight {entry.narrow} → {entry.wide})"
        before = f"they agree up to '{self.last}', and " if self.last else ""
        return f"{before}'{self.path or 'the model'}'{shapes} is the first to differ"

    @property
    def matrix(self) -> str | None:
        """The name of the module's first weight that may read units; none where it has none."""
        return next((name for name, entry in self.weights.items() if len(entry.narrow) > 1), None)

    @property
    def roles(self) -> str:
        """The roles that help, as they are written."""
        lines = (
            f"'{name}': mupscale.Role({_said(self.weights[name])}, in_block={block})"
            for name, block in self.helpful.items()
        )
        return f"{{{', '.join(lines)}}}"


def _said(entry: Entry) -> str:
    """What a role says already, as it is written."""
    parts = [f"{key}={_one(dims)}" for key, dims in (("out", entry.out), ("in_", entry.in_)) if dims]
    axis = entry.axes[entry.out[0]] if entry.out else Axis()
    parts += [f"out_block={axis.block}"] if axis.block != 1 else []
    return ", ".join(parts + ([f"out_sections={axis.sections}"] if axis.sections else []))


def _one(dims: tuple[int, ...]) -> int | tuple[int, ...]:
    return dims[0] if len(dims) == 1 else dims


@torch.no_grad()
def find_parting(small: nn.Module, large: nn.Module, batch: Any, plan: Plan) -> Parting | None:
    """Where two models part of which the wide one holds the narrow one's weights in the places of old units.

    >>> import mupscale as mu
    >>> narrow, wide = (nn.Sequential(nn.Conv1d(3, n, 1), nn.Flatten(), nn.Linear(4 * n, 2)).double() for n in (2, 3))
    >>> plan = mu.plan(narrow, wide, grow=mu.Fresh())
    >>> for name, p in wide.named_parameters():
    ...     p.data.zero_()[index_of_old(plan[name].narrow, plan[name].axes)] = narrow.get_parameter(name).data
    >>> print(find_parting(narrow, wide, torch.randn(2, 3, 4).double(), plan).roles)
    {'2.weight': mupscale.Role(in_=1, in_block=4)}
    """
    ours, theirs = (_outputs(model, batch) for model in (small, large))
    last = ""
    for path in ours:
        weights = {name: entry for name, entry in plan.parameters.items() if name.rpartition(".")[0] == path}
        same = _same_at_old_units(ours[path], theirs.get(path), weights)
        if same:
            last = path if any(len(entry.narrow) > 1 for entry in weights.values()) else last
        elif same is False:
            helpful = _helpful_blocks(ours[path], path, weights, small, large, batch)
            return Parting(path, last, weights, helpful)
    return None


def _outputs(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    with Recorder(model) as recorder:
        run_in_float64(model, batch)
    return recorder.outputs


def _same_at_old_units(ours: Tensor, theirs: Tensor | None, weights: Mapping[str, Entry]) -> bool | None:
    """Whether the old units of a module's output are the narrow one's; None where their places are not known.

    A module that has weights of its own and is like the narrow one's in no order of its units differs.
    """
    if theirs is None or ours.dim() != theirs.dim():
        return None
    grown = [d for d in range(ours.dim()) if ours.shape[d] != theirs.shape[d]]
    if len(grown) > 1:
        return None
    if not grown:
        return are_close(ours, theirs, loosened=100)
    (dim,) = grown
    n, wide = ours.shape[dim], theirs.shape[dim]
    sizes = (n, wide)
    known = {e.axes[d] for e in weights.values() for d in e.out if (e.narrow[d], e.wide[d]) == sizes}
    for axis in known or (Axis(multiplier(n, wide), block) for block in _blocks(n, wide)):
        if are_close(ours, theirs[index_of_old(tuple(ours.shape), {dim: axis})], loosened=100):
            return True
    return False if weights else None


def _blocks(n: int, wide: int) -> Iterator[int]:
    """The lengths of blocks in which n units can lie that become so many."""
    return (block for block in range(1, n + 1) if n % block == 0 and wide % block == 0)


def _helpful_blocks(
    ours: Tensor, path: str, weights: Mapping[str, Entry], small: nn.Module, large: nn.Module, batch: Any
) -> dict[str, int]:
    """Weights of a module, and the blocks in which they would have to read their inputs for its output to be right."""
    trials = itertools.islice(_trials(weights), _MOST_TRIALS)
    for names, dim_of, block in trials:
        blocked = {}
        for name in names:
            entry, dim = weights[name], dim_of[name]
            blocked[name] = replace(entry, axes={**entry.axes, dim: replace(entry.axes[dim], block=block)})
        _write_old_units(small, large, blocked)
        same = _same_at_old_units(ours, _outputs(large, batch).get(path), weights)
        _write_old_units(small, large, {name: weights[name] for name in names})
        if same:
            return dict.fromkeys(names, block)
    return {}


def _trials(weights: Mapping[str, Entry]) -> Iterator[tuple[tuple[str, ...], dict[str, int], int]]:
    """Weights with inputs of one size, all of them first, the dimension of these, and a block to try."""
    grown = {name: [d for d in entry.in_ if entry.axes[d].times != 1] for name, entry in weights.items()}
    dim_of = {name: dims[0] for name, dims in grown.items() if len(dims) == 1}
    sizes = {name: (weights[name].narrow[d], weights[name].wide[d]) for name, d in dim_of.items()}
    for size in dict.fromkeys(sizes.values()):
        alike = [name for name in dim_of if sizes[name] == size]
        for count in range(len(alike), 0, -1):
            for names in itertools.combinations(alike, count):
                yield from ((names, dim_of, block) for block in _blocks(*size) if block > 1)


def _write_old_units(small: nn.Module, large: nn.Module, entries: Mapping[str, Entry]) -> None:
    ours, theirs = saved_tensors(small), saved_tensors(large)
    for name, entry in entries.items():
        theirs[name].zero_()[index_of_old(entry.narrow, entry.axes)] = ours[name]
