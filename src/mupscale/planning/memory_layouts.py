"""Runs of two models made comparable where one copies a tensor in memory and the other has no need to.

A transposed tensor is copied before it is flattened, but with one head it lies in order already. Such copies change no
number, so they are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_map

from mupscale.planning.tracing import Operation, RecordedRun, Ref

_COPIES = {torch.ops.aten.clone.default}
_SHAPES = {torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default}


def without_copies(run: RecordedRun) -> RecordedRun:
    """The run without copies of tensors that nothing is written into, its tensors numbered anew.

    >>> from torch import nn
    >>> from mupscale.planning.tracing import record_run
    >>> class Flat(nn.Module):
    ...     def forward(self, x):
    ...         return x.transpose(1, 2).reshape(len(x), -1) + 1
    >>> for heads in (1, 2):
    ...     run = record_run(Flat(), torch.ones(2, 3, heads, 4))
    ...     print([[op.name for op in each.operations] for each in (run, without_copies(run))])
    [['transpose', 'view', 'add'], ['transpose', 'reshape', 'add']]
    [['transpose', 'clone', '_unsafe_view', 'add'], ['transpose', 'reshape', 'add']]
    """
    changed = _changed(run)
    same: dict[int, int] = {}  # the number of a copy: that of what it is a copy of
    kept = []
    for op in run.operations:
        is_plain = not changed & {*op.refs, *op.results}
        if is_plain and op.function in _COPIES:
            same |= {number: same.get(op.refs[0], op.refs[0]) for number in op.results if number is not None}
        else:
            is_shape = is_plain and op.function in _SHAPES
            kept.append(replace(op, function=torch.ops.aten.reshape.default) if is_shape else op)
    return _renumbered(replace(run, operations=kept), same)


def _changed(run: RecordedRun) -> set[int | None]:
    """Tensors that some operation writes into, themselves or through a view."""
    groups: dict[int, set[int | None]] = {}
    written: list[int] = []
    for op in run.operations:
        if op.changes_arguments:
            written += [number for number in op.refs if number in op.results]
        if op.is_view or op.changes_arguments:
            members = set[int | None]().union(*(groups.get(n, {n}) for n in (*op.refs, *op.results) if n is not None))
            groups |= {number: members for number in members if number is not None}
    return set[int | None]().union(*(groups.get(number, {number}) for number in written))


def _renumbered(run: RecordedRun, same: dict[int, int]) -> RecordedRun:
    """Numbers in the order in which tensors occur, so that equal runs have equal ones."""
    numbers: dict[int, int] = {}

    def new(number: int) -> int:
        return numbers.setdefault(same.get(number, number), len(numbers))

    def ref(x: Any) -> Any:
        return Ref(new(x.number)) if isinstance(x, Ref) else x

    def renumbered() -> Iterator[Operation]:
        for op in run.operations:
            args, kwargs = tree_map(ref, (op.args, op.kwargs), is_leaf=lambda x: isinstance(x, Ref))
            results = tuple(None if number is None else new(number) for number in op.results)
            yield replace(op, args=args, kwargs=kwargs, results=results)

    operations = list(renumbered())
    return RecordedRun(
        operations,
        {new(number): leaf for number, leaf in run.leaves.items()},
        {new(number): name for number, name in run.names.items()},
        {new(number) for number in run.inputs},
        [new(number) for number in run.outputs],
    )
