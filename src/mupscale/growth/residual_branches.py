"""Which parameters of a block write into the residual stream, read off a run of the model.

The output of a block is walked back to its input. Where the stream is added to something, that something is a branch;
a branch is walked back to the parameters that its last operation is linear in: a projection's weight and bias, the gain
of a norm or of a scale per channel. With these at zero the block leaves the stream as it is, which is then tried.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from mupscale.core import naming
from mupscale.planning import Call, Operation, RecordedRun, Ref, check_not_empty, in_float64, record_run

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)  # which have no forward pass of their own


@dataclass
class MarkedRun:
    """A recorded run, its tensors, and its blocks in the order in which they ran."""

    run: RecordedRun
    blocks: list[Call]
    values: dict[int, Tensor]

    @cached_property
    def last_uses(self) -> dict[int, int]:
        """By tensor, the last operation that it is an argument of."""
        return {number: at for at, operation in enumerate(self.run.operations) for number in operation.refs}

    def streams(self, block: Call) -> list[int]:
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


def run_with_blocks(model: nn.Module, paths: Sequence[str], inputs: Any, *, until_next: bool = False) -> MarkedRun:
    """Run a model that `in_float64` returned, and mark its blocks.

    A block may have no forward pass of its own, but be a ModuleList of parts that the model calls itself. It begins
    where the first of its parts is called, and ends where the next block of its list begins; of the last one of a list
    the end is not known. until_next: all blocks end there, since the model itself adds what they give to the stream.
    """
    modules = naming.modules(model)
    parts = {path: [p for p in modules if p == path or p.startswith(f"{path}.")] for path in paths}
    recorder = record_run(model, inputs, {part for within in parts.values() for part in within})
    called = []
    for path in paths:
        call = next((call for call in recorder.calls if call.path in parts[path] and call.given), None)
        if call is not None:
            own = call.path == path
            called.append(replace(call, path=path, returned=call.returned * own, last=call.last * own))
    called.sort(key=lambda block: block.first)
    lists: dict[str, list[Call]] = {}
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
    return re.sub(r"\d+$", "", path)


Writers = dict[str, float]
"""From a parameter's name to the value at which it writes nothing.

That is 0, −1 for a gain that is stored without its 1, and 1 for a scale s of the stream itself, which adds s − 1 of it.
"""

_SUMS = {"add", "add_", "sub", "sub_"}
_ALL_OPERANDS = {"cat", "stack", "index_add", "index_add_", "index_put", "index_put_"}
_KEEP_ZERO = re.compile(
    r"clone|_to_copy|_unsafe_view|contiguous|(native_)?dropout|copy_|constant_pad_nd|(mul|div)_?|neg|gelu|silu|glu|tanh"
    r"|index(_select)?|gather|sum|mean|masked_fill|lift_fresh|alias|roll|flip|repeat|_reshape_alias|avg_pool2d"
    r"|split_with_sizes|bmm|matmul|mm"
)
_PRODUCTS = {"mul", "mul_", "mm", "bmm", "matmul"}
_ZEROS = {"zeros", "zeros_like", "new_zeros"}
_EXACT = 1e-12  # of the stream's size, in float64
_NO_RESIDUAL = "it has no residual connection: its input is not added to what it computes"


class _Unlike(Exception):
    """The block, or a branch of it, is not of the form that can be silenced; the message says why."""


def find_writers(model: nn.Module, paths: Sequence[str], inputs: Any) -> tuple[dict[str, Writers], dict[str, str]]:
    """Of each block, the parameters that write into the stream; and why there are none, for the others.

    paths: of the blocks. Names are relative to the block. What is writers has been tried: a block whose writers have
    these values gives back what it is given, in float64, whatever its other weights are.
    """
    check_not_empty(inputs)
    copied, batch = in_float64(model, inputs, generic=0)
    writers, reasons = _find(copied, paths, batch, until_next=False)
    if not writers:  # the model may add what its blocks give to the stream itself
        copied, batch = in_float64(model, inputs, generic=0)
        writers = _find(copied, paths, batch, until_next=True)[0]
    return writers, {path: reason for path, reason in reasons.items() if path not in writers}


def _find(
    model: nn.Module, paths: Sequence[str], batch: Any, *, until_next: bool
) -> tuple[dict[str, Writers], dict[str, str]]:
    marked = run_with_blocks(model, paths, batch, until_next=until_next)
    writers, reasons = dict[str, Writers](), dict[str, str]()
    for block in marked.blocks:
        try:
            writers[block.path] = _Walk(marked, block).writers()
        except _Unlike as reason:
            reasons[block.path] = str(reason)
    called = {block.path for block in marked.blocks}
    reasons |= {path: "the model did not call it on the batch" for path in paths if path not in called}
    _try_silence(model, batch, writers, reasons, until_next)
    for block in marked.blocks:
        if not block.returned:  # the last of blocks that end where the next begins is like the others of its list
            others = [path for path in writers if without_number(path) == without_number(block.path)]
            if twins := [path for path in others if _names(model, path) == _names(model, block.path)]:
                writers[block.path] = dict(writers[twins[0]])
    return writers, reasons


@torch.no_grad()
def silence(parameters: Mapping[str, Tensor], path: str, writers: Writers) -> None:
    """Let a block write nothing into the stream, in place."""
    for local, value in writers.items():
        parameters[f"{path}.{local}"].fill_(value)


def _try_silence(
    model: nn.Module, batch: Any, candidates: dict[str, Writers], reasons: dict[str, str], until_next: bool
) -> None:
    """Keep of what was candidates the blocks that do give back what they are given."""
    parameters = naming.parameters(model)
    for path, writers in candidates.items():
        silence(parameters, path, writers)
    if not candidates:
        return
    marked = run_with_blocks(model, [*candidates, *reasons], batch, until_next=until_next)
    for block in marked.blocks:
        if not block.returned or block.path not in candidates:
            continue
        streams = marked.streams(block)
        if not all(_gives_back(marked, block, number) for number in streams):
            names = ", ".join(candidates.pop(block.path))
            finite = all(bool(marked.values[number].isfinite().all()) for number in streams)
            transformed, divides = "its output is not just its input plus branches", "at zero, it divides by zero"
            reasons[block.path] = transformed if finite else f"with {names} {divides}"


def _gives_back(marked: MarkedRun, block: Call, number: int) -> bool:
    """Whether this output of a block is one of its inputs; one that it adds to in place cannot be compared."""
    after = marked.values[number].detach()
    given = [marked.values[n].detach() for n in block.given if marked.values[n].shape == after.shape]
    return number in block.given or any(
        float((after - x).abs().max()) <= _EXACT * (1 + float(x.abs().max())) for x in given
    )


def _names(model: nn.Module, path: str) -> set[str]:
    return {name.removeprefix(path) for name in naming.parameters(model) if name.startswith(f"{path}.")}


def _factors(operation: Operation) -> list[int]:
    """What an operation's result is zero with: of a quotient not its divisor, of a weight norm its length alone."""
    if operation.name in ("div", "div_"):
        return operation.refs[:1]
    return operation.refs[1:] if operation.name == "_weight_norm_interface" else operation.refs


class _Walk:
    def __init__(self, marked: MarkedRun, block: Call) -> None:
        self.marked, self.block = marked, block
        self.data, self._scales = set(block.given), Writers()
        for operation in marked.run.operations[block.first : block.last]:
            if self.data & set(operation.refs):
                self.data |= {number for number in operation.results if number is not None}

    def writers(self) -> Writers:
        """What its branches are written by; an exception that says why, where they are no branches."""
        if not self.block.returned:
            raise _Unlike("where it ends cannot be told")
        streams = self.marked.streams(self.block)
        branches = [branch for number in streams for branch in self._branches(number, self.block.last)]
        if not branches and not self._scales:
            raise _Unlike(_NO_RESIDUAL)
        written = self._own(self._scales)
        for number, before in branches:
            written |= self._written_by(number, before)
        return {name.removeprefix(f"{self.block.path}."): value for name, value in written.items()}

    def _branches(self, number: int, before: int) -> list[tuple[int, int]]:
        """What is added to the stream on its way from the input to this tensor."""
        position = self.marked.run.maker(number, before)
        if position is None or position < self.block.first:
            if number in self.block.given:
                return []
            raise _Unlike(_NO_RESIDUAL)
        operation = self.marked.run.operations[position]
        operands = [n for n in dict.fromkeys(operation.refs) if n in self.data]
        if operation.name in _SUMS and len(operands) == 2:
            for stream, branch in (operands, operands[::-1]):
                scales = dict(self._scales)
                with suppress(_Unlike):
                    return [*self._branches(stream, position), (branch, position)]
                self._scales = scales
            raise _Unlike(f"its input is transformed before '{operation.module}' adds to it")
        if operation.name == "cat" and operands == list(dict.fromkeys(operation.refs)):  # parts of the stream, or two
            return [branch for operand in operands for branch in self._branches(operand, position)]
        roots = [self._roots(n, position) for n in operation.refs if n not in self.data]
        used = {name: value for each in roots for name, value in each.items()}
        if "norm" in operation.name and len(operands) == 1:
            raise _Unlike(
                f"'{operation.module}' normalises the stream after a branch was added (post-norm), so every block "
                "changes the stream"
            )
        if operation.name in ("mul", "mul_") and len(operands) == 1 and list(used.values()) == [0.0]:
            self._scales |= dict.fromkeys(used, 1.0)
            used = {}
        if len(operands) != 1 or used:
            raise _Unlike(
                f"it has no residual connection: '{operation.module}' transforms all of its input ({operation.name}), "
                "and nothing is added to that"
            )
        return self._branches(operands[0], position)

    def _written_by(self, number: int, before: int) -> Writers:
        """The parameters that this tensor is zero without."""
        position = self.marked.run.maker(number, before)
        if position is None or position < self.block.first:
            roots = self._own(self._roots(number, before))
            if roots or not bool(self.marked.values[number].any()):
                return roots
            raise _Unlike("a branch ends in the block's own input, with no parameter after it")
        operation = self.marked.run.operations[position]
        operands = [n for n in dict.fromkeys(operation.refs) if n in self.data]
        others = [n for n in dict.fromkeys(_factors(operation)) if n not in self.data]
        roots = {name: value for n in others for name, value in self._roots(n, position).items()}
        if operation.name in _ZEROS or (not operands and not roots):  # zeros that experts add their outputs to
            return {}
        if operation.name in _SUMS or operation.name in _ALL_OPERANDS:
            writers = self._own(roots)
            for operand in operands:
                if self.marked.values[operand].is_floating_point():  # no index of where something is added
                    writers |= self._written_by(operand, position)
            return writers
        if roots:
            return self._own(roots)
        # behind an operation without parameters: of a product, one factor that is zero is enough
        reason = _Unlike(f"a branch ends in {operation.name} ('{operation.module}'), which does not write zero at zero")
        for operand in operands if operation.is_view or _KEEP_ZERO.fullmatch(operation.name) else ():
            try:
                return self._written_by(operand, position)
            except _Unlike as error:
                reason = error
        raise reason

    def _own(self, roots: Writers) -> Writers:
        """The same, if all of them are the block's own."""
        if strangers := [name for name in roots if not name.startswith(f"{self.block.path}.")]:
            raise _Unlike(f"'{strangers[0]}', which writes into the stream, is shared with other parts of the model")
        return dict(roots)

    def _roots(self, number: int, before: int) -> Writers:
        """The parameters that a tensor follows from without the batch, and at which value of theirs it is zero."""
        name = self.marked.run.names.get(number)
        position = self.marked.run.maker(number, before)
        if position is None:
            is_parameter = name is not None and isinstance(self.marked.values[number], nn.Parameter)
            return {name: 0.0} if name is not None and is_parameter else {}
        operation = self.marked.run.operations[position]
        roots = [self._roots(n, position) for n in _factors(operation)]
        if operation.name in _PRODUCTS:  # of which one factor that is zero is enough, and two could not learn
            return next(filter(None, roots), {})
        every = {root: value for each in roots for root, value in each.items()}
        if operation.name in _SUMS and len(operation.refs) == 1:
            sign = 1 if operation.name.startswith("sub") else -1
            added = next((x for x in operation.args if isinstance(x, int | float) and not isinstance(x, Ref)), 0.0)
            return {root: value + sign * float(added) for root, value in every.items()}
        return every
