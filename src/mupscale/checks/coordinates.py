"""The coordinate check: how large activations, and their changes by training, are at each width.

Under μP they do not depend on the width (the paper's 'all hidden activations and their updates stay Θ(1)'); under
the standard parametrisation they grow or vanish. One look tells whether a family is set up right.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mupscale.checks.coordinate_verdicts import CoordCheck, Measurement
from mupscale.checks.equivalence import Loss
from mupscale.checks.same_depth import names_in_shallow
from mupscale.core import Plan, Width, WidthLike, naming
from mupscale.planning import Recorder, silence_dropout
from mupscale.system import MupscaleError, checks_arguments, seeded

OUTPUT = "(output)"
_TITLES = {"mup": "μP", "standard": "standard parametrisation"}


@runtime_checkable
class Members(Protocol):
    """What the check asks of a family: a model and an optimizer at every width, and the plan between them."""

    def build(self, width: WidthLike) -> nn.Module:
        """A model with its author's own initialisation."""
        ...

    def init(self, width: WidthLike, seed: int = 0) -> nn.Module:
        """A model with the initialisation of μP."""

    def optimizer(self, model: nn.Module, optimizer: type[Optimizer], **hyper: Any) -> Optimizer:
        """Its optimizer, with the rates of its width."""

    def plan(self, width: nn.Module) -> Plan:
        """From the base to this model."""


@checks_arguments
def coord_check(
    family: Members,
    widths: Sequence[WidthLike],
    batches: Iterable[Any],
    loss: Loss,
    optimizer: type[Optimizer],
    *,
    steps: int = 4,
    seeds: int = 2,
    parametrization: Literal["mup", "standard"] = "mup",
    dtype: torch.dtype | None = None,
    **hyper: Any,
) -> CoordCheck:
    """Train members of the family for a few steps and measure their modules' outputs on the first batch.

    A power of the width is fitted to what the seeds gave, with a standard error. A layer is flat if its output has a
    power of at most 0.2, and the output's change by training one within ±0.2. A power beyond that, but not with its
    95 % interval, is too noisy to tell (`ok` is False, `outcome` says so), and so is one whose standard error is above
    0.2: take widths further apart, more seeds, or a smaller learning rate.
    Where layers are not flat, and the loss doubles or is not finite at the smallest width already, `outcome` is
    "learning rate too large": take one at which that model trains. At large widths alone that is "not flat".
    parametrization="standard" trains the author's own initialisation with one learning rate, for comparison.
    Of models of several depths, blocks are compared that lie at the same part of the way, under the shallowest's names.
    One size may differ, or several that grow by the same factors; a depth differs alone.

    >>> import mupscale as mu
    >>> from mupscale.models import MLP
    >>> x, y = torch.randn(16, 3), torch.randn(16, 1)
    >>> family = mu.Family(lambda width: MLP(3, width, 1), base=64)
    >>> loss = lambda model, batch: (model(batch[0]) - batch[1]).square().mean()
    >>> check = mu.coord_check(family, [16, 32], [(x, y)], loss, torch.optim.Adam, lr=0.01, steps=1, seeds=1)
    >>> check.widths, [layer.module for layer in check.layers]
    ([16.0, 32.0], ['layers.0', 'layers.1', 'layers.2', 'layers.3'])
    """
    data = list(batches)
    if len(widths) < 2 or not data:
        raise MupscaleError("coord_check needs at least two widths and one batch")
    members = [Width.of(width) for width in widths]
    axis, sizes = _differing_size(members)
    rows: list[Measurement] = []
    first: nn.Module | None = None
    for size, width in sorted(zip(sizes, members, strict=True), key=lambda pair: pair[0]):
        for seed in range(seeds):
            model = _member(family, width, seed, parametrization, dtype)
            opt, folds = _trainer(family, model, parametrization, optimizer, hyper)
            first = model if first is None else first
            names = _names_in_first(first, model, members)
            measured = _measure(model, opt, data, loss, steps, size, seed, folds)
            rows += [replace(row, module=names[row.module]) for row in measured if row.module in names]
    return CoordCheck(rows, f"{_TITLES[parametrization]}, {optimizer.__name__}", axis)


def _differing_size(widths: Sequence[Width]) -> tuple[str, list[float]]:
    """The name of the one size in which these widths differ, such as a depth, and its values.

    "width" and the largest size where several grow by the same factors.
    """
    for width in widths[1:]:
        width.check_form(widths[0])
    names = _differing_names(widths)
    axis, sizes = "width", [float(width.size) for width in widths]
    if len(names) == 1:
        axis, sizes = names[0], [float(width.sizes[names[0]]) for width in widths]
    elif any(len({width.ratio_to(widths[0])[name] for name in names}) > 1 for width in widths):
        raise _several_sizes(widths, "by different factors")
    if len(set(sizes)) < len(sizes):
        raise MupscaleError(
            f"coord_check compares models of different sizes, and {axis} is {', '.join(f'{s:g}' for s in sizes)}; let "
            f"each differ from the others"
        )
    return axis, sizes


def _differing_names(widths: Sequence[Width]) -> list[str]:
    return [name for name in widths[0].sizes if len({width.sizes[name] for width in widths}) > 1]


def _several_sizes(widths: Sequence[Width], how: str) -> MupscaleError:
    names, values = _differing_names(widths), "; ".join(map(str, widths))
    return MupscaleError(
        f"coord_check fits powers of one size, and {' and '.join(names)} differ {how} here ({values}); vary one size "
        f"at a time, and keep the others as they are"
    )


def _names_in_first(first: nn.Module, model: nn.Module, widths: Sequence[Width]) -> dict[str, str]:
    """What the model's layers are called in the first; an error if its blocks are others and another size differs."""
    if len(_differing_names(widths)) > 1 and naming.parameters(first).keys() != naming.parameters(model).keys():
        raise _several_sizes(widths, "and one of them is a number of layers,")
    return {path or OUTPUT: name or OUTPUT for path, name in names_in_shallow(first, model).items()}


def _member(family: Members, width: Width, seed: int, parametrization: str, dtype: torch.dtype | None) -> nn.Module:
    with seeded(seed):
        model = family.init(width, seed) if parametrization == "mup" else family.build(width)
    silence_dropout(model)  # another mask at every look would count as change
    return model.to(dtype=dtype)


def _trainer(
    family: Members, model: nn.Module, parametrization: str, optimizer: type[Optimizer], hyper: dict[str, Any]
) -> tuple[Optimizer, dict[str, float]]:
    """The model's optimizer, and the constants that are folded into outputs of its modules."""
    if parametrization == "mup":
        return family.optimizer(model, optimizer, **hyper), _folds(family.plan(model))
    return optimizer(model.parameters(), **hyper), {}


def _folds(plan: Plan) -> dict[str, float]:
    """Constants that are folded into all of a module's parameters, and so into its output: the 1/k of a tied readout.

    A weight whose forward has a multiplier of its own (MuReadout: fold = in_) gives its output as it is.
    """
    own: dict[str, set[float]] = {}
    for name, entry in plan.parameters.items():
        undone = entry.rule.weight == 1
        own.setdefault(name.rpartition(".")[0], set()).add(1.0 if undone else float(entry.fold * entry.constants.undo))
    return {path: folds.pop() for path, folds in own.items() if len(folds) == 1}


def _measure(
    model: nn.Module,
    optimizer: Optimizer,
    data: list[Any],
    loss: Loss,
    steps: int,
    width: float,
    seed: int,
    folds: Mapping[str, float],
) -> list[Measurement]:
    rows, start = [], dict[str, Tensor]()
    measured = {path for path, module in naming.modules(model).items() if _is_layer(module)}
    for step in range(steps + 1):
        with torch.no_grad(), Recorder(model) as recorder:
            value = float(loss(model, data[0]))
        if step == 0 and not _is_output_of(recorder.outputs, measured):
            measured.add("")  # computed by no layer: a product of two of them, a functional readout
        for path, output in recorder.outputs.items():
            if path in measured:
                output = output / folds.get(path, 1.0)
                start.setdefault(path, output)
                name = path or OUTPUT
                sizes = _rms(output), _rms(output - start[path])
                rows.append(Measurement(width, seed, step, name, *sizes, value))
        if step == steps:
            break
        optimizer.zero_grad()
        loss(model, data[step % len(data)]).backward()
        optimizer.step()
    return rows


def _is_output_of(outputs: Mapping[str, Tensor], layers: set[str]) -> bool:
    """Whether the model's own output, up to its shape, is that of one of the layers."""
    own = outputs.get("")
    same_size = (o for path, o in outputs.items() if path in layers and own is not None and o.numel() == own.numel())
    return own is None or any(torch.equal(o.flatten(), own.flatten()) for o in same_size)


def _is_layer(module: nn.Module) -> bool:
    return any(True for _ in module.parameters(recurse=False))


def _rms(tensor: Tensor) -> float:
    return float(tensor.double().square().mean().sqrt())
