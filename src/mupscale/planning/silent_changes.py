"""What a plan that stands its check may still change without a word: outputs that grow, and losses kept on modules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from mupscale.core import Entry, Plan, Role, naming
from mupscale.planning.copied_values import are_close
from mupscale.planning.from_modules import find_role
from mupscale.planning.tracing import in_float64, run_in_float64, tensors_in
from mupscale.system import warn

Sizes = tuple[int, int]


def warn_of_growing_outputs(
    narrow: nn.Module,
    wide: nn.Module,
    plan: Plan,
    inputs: Any,
    roles: Mapping[str, Role] | None = None,
    shapes: Sequence[Sequence[tuple[int, ...]]] = (),
) -> None:
    """Warn where an output grows that nothing in the model reads, as a number of classes does by mistake.

    Hidden units that a model hands out are read by its own layers. roles: of the user, who knows what has one.
    shapes: of the two models' outputs, where they are known.

    >>> import torch, mupscale as mu
    >>> narrow, wide = (nn.Sequential(nn.Linear(3, n), nn.Linear(n, n)) for n in (4, 8))
    >>> warn_of_growing_outputs(narrow, wide, mu.plan(narrow, wide), torch.ones(1, 3))  # which are read
    """
    unread = _unread(plan.parameters)
    if not unread:
        return
    shapes = shapes or [_shapes(*in_float64(model, inputs, like=narrow)) for model in (narrow, wide)]
    for number, (before, after) in enumerate(zip(*shapes, strict=False)):
        for sizes in zip(before, after, strict=False):
            writers = unread.get(sizes, [])
            told = any(find_role(roles or {}, alias) for name in writers for alias in plan.parameters[name].names)
            if writers and not told:
                warn(_growing_output(number, sizes, writers, plan))


def _shapes(model: nn.Module, batch: Any) -> list[tuple[int, ...]]:
    return [tuple(t.shape) for t in tensors_in(run_in_float64(model, batch))]


def _unread(entries: Mapping[str, Entry]) -> dict[Sizes, list[str]]:
    """Sizes that grow and that no parameter has as inputs, with the parameters that have them as outputs."""
    written: dict[Sizes, list[str]] = {}
    read = set[Sizes]()
    for name, entry in entries.items():
        for d, axis in entry.axes.items():
            sizes = entry.narrow[d], entry.wide[d]
            if d in entry.in_:
                read |= {sizes, (sizes[0] // axis.block, sizes[1] // axis.block)}  # as channels are, after a flatten
            elif axis.times != 1:
                written.setdefault(sizes, []).append(name)
    return {sizes: names for sizes, names in written.items() if sizes not in read}


def _growing_output(number: int, sizes: Sizes, writers: list[str], plan: Plan) -> str:
    others = "new ones are drawn" if plan.mup else "each is there several times"
    name = max(writers, key=lambda name: len(plan[name].narrow))
    role = Role(out=plan[name].out, in_=plan[name].in_)
    return (
        f"output {number} of the model grows from {sizes[0]} to {sizes[1]}, written by '{name}', and nothing in the "
        f"model reads it. If these are classes or tokens, build the wide model with {sizes[0]}: otherwise {others}, "
        "which changes what the model says. If they are features for other code, say that they are meant to grow: "
        f"roles={{'{name}': mupscale.{role}}}"
    )


def warn_of_kept_losses(narrow: nn.Module, wide: nn.Module) -> None:
    """Warn where modules keep a number of their last run that can be differentiated and is not the same at both widths.

    It may be a part of the loss that is not in the outputs, which then weighs more the wider the model is.
    """
    theirs = dict(_kept_numbers(wide))
    for name, number in _kept_numbers(narrow):
        if name in theirs and not are_close(number.detach(), theirs[name].detach(), loosened=100):
            before, after = float(number.detach()), float(theirs[name].detach())
            warn(
                f"'{name}', which the model computes besides its outputs, is {before:.4g} in the narrow model and "
                f"{after:.4g} in the wide one. If it is part of the loss, training differs. Make it a mean over units "
                "instead of a sum, or give it less weight in the wide model's loss"
            )


def _kept_numbers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Numbers that modules keep as attributes, alone or in lists and dicts, with the graph that they come from."""
    for path, module in naming.modules(model).items():
        for attribute, value in vars(module).items():
            if attribute in ("_parameters", "_buffers", "_modules"):
                continue
            for place, tensor in enumerate(tensors_in(value)):
                if tensor.numel() == 1 and tensor.grad_fn is not None and tensor.is_floating_point():
                    yield f"{path}.{attribute}".lstrip(".") + (f"[{place}]" if tensor is not value else ""), tensor
