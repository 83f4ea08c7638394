"""A run of a model with its blocks marked: which tensors each block is given, and which it gives."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from mupscale.core import naming
from mupscale.planning.model_calls import call_arguments
from mupscale.planning.tracing import (
    Operation,
    OperationRecorder,
    RecordedRun,
    module_paths,
    run_in_float64,
    tensors_in,
)

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)  # which have no forward pass of their own


@dataclass
class BlockRun:
    """One block's part of a run: tensors by number, and the stretch of operations in between.

    given: the floating-point tensors that it is called with. returned: the tensors that it gives back. first, last:
    where its operations begin and end in the run.
    """

    path: str
    given: list[int] = field(default_factory=list)
    returned: list[int] = field(default_factory=list)
    first: int = 0
    last: int = 0


@dataclass
class MarkedRun:
    """A recorded run, its blocks in the order in which they ran, and where each tensor is returned or written into."""

    run: RecordedRun
    blocks: list[BlockRun]
    values: dict[int, Tensor]
    makers: dict[int, list[int]] = field(default_factory=dict)
    last_uses: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for position, operation in enumerate(self.run.operations):
            self.last_uses |= dict.fromkeys(operation.refs, position)
            for number in operation.results:
                if number is not None:
                    self.makers.setdefault(number, []).append(position)

    def maker(self, number: int, before: int) -> int | None:
        """The operation that last returned a tensor, or wrote into it, ahead of another operation."""
        earlier = [position for position in self.makers.get(number, ()) if position < before]
        return earlier[-1] if earlier else None

    def streams(self, block: BlockRun) -> list[int]:
        """Of what a block returns, the stream, and what else is carried on from block to block beside it.

        The first tensor is the stream. Another one is carried on if it is used after the block, and the block was given
        something of its shape: a second stream, or the attention of the block before.
        """
        shapes = [self.values[number].shape for number in block.given]
        return block.returned[:1] + [
            number
            for number in block.returned[1:]
            if self.values[number].shape in shapes
            and (self.last_uses.get(number, -1) >= block.last or number in self.run.outputs)
        ]

    def operation(self, position: int) -> Operation:
        """The operation at a place in the run."""
        return self.run.operations[position]


def run_with_blocks(model: nn.Module, paths: Sequence[str], inputs: Any, *, until_next: bool = False) -> MarkedRun:
    """Run a model that `in_float64` returned, and mark its blocks.

    A block may have no forward pass of its own, but be a ModuleList of parts that the model calls itself. It begins
    where the first of its parts is called, and ends where the next block of its list begins; of the last one of a list
    the end is not known. until_next: all blocks end there, since the model itself adds what they give to the stream.
    """
    recorder = OperationRecorder(model, call_arguments(inputs))
    blocks = {path: BlockRun(path) for path in paths}
    with module_paths(model, recorder.path), _marks(model, blocks, recorder), recorder:
        output = run_in_float64(model, inputs)
    recorder.run.outputs = [recorder.number(t) for t in tensors_in(output)]
    modules = naming.modules(model)
    called = sorted((block for block in blocks.values() if block.given), key=lambda block: block.first)
    lists: dict[str, list[BlockRun]] = {}
    for block in called:
        lists.setdefault(without_number(block.path), []).append(block)
    for one in lists.values():
        for block, following in itertools.pairwise(one):
            if until_next or isinstance(modules[block.path], _CONTAINERS):
                block.returned, block.last = following.given[:1], following.first
        if until_next:
            one[-1].returned = []
    return MarkedRun(recorder.run, called, dict(enumerate(recorder.alive)))


def without_number(path: str) -> str:
    """What the paths of a list's blocks have in common.

    >>> without_number("stages.1.blocks.12"), without_number("block3")
    ('stages.1.blocks.', 'block')
    """
    return re.sub(r"\d+$", "", path)


@contextmanager
def _marks(model: nn.Module, blocks: dict[str, BlockRun], recorder: OperationRecorder) -> Iterator[None]:
    """Note what blocks are given and give, while the model runs."""
    handles: list[Any] = []
    modules = naming.modules(model)

    def begin(block: BlockRun) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            if not block.given:
                tensors = [t for t in tensors_in((args, kwargs)) if t.is_floating_point()]
                block.given = [recorder.number(t) for t in tensors]
                block.first = len(recorder.run.operations)

        return hook

    def finish(block: BlockRun) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if not block.returned:
                block.returned = [recorder.number(t) for t in tensors_in(output) if t.is_floating_point()]
                block.last = len(recorder.run.operations)

        return hook

    for path, block in blocks.items():
        parts = [path]
        if isinstance(modules[path], _CONTAINERS):
            parts = [p for p, m in modules.items() if p.startswith(f"{path}.") and not isinstance(m, _CONTAINERS)]
        else:
            handles.append(modules[path].register_forward_hook(finish(block)))
        handles += [modules[p].register_forward_pre_hook(begin(block), with_kwargs=True) for p in parts]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
