"""Checks of the data and the model: there are examples, the model takes them and can grow, its weights are finite."""

from __future__ import annotations

import zlib
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from mupscale.core import WholeWidth, Width
from mupscale.data import Data
from mupscale.family import Family
from mupscale.models import count_flops
from mupscale.system import MupscaleError, available_memory, describe_shortage
from mupscale.train.loss_functions import find_logits
from mupscale.train.objective import cast_input
from mupscale.train.processes import Processes
from mupscale.train.recipe import Recipe
from mupscale.train.run_models import check_copies

_FINGERPRINTED = 256  # examples that the fingerprint of the data looks at

_Counted = tuple[float, int | None]
"""The FLOPs of an example, and the number of logits, where there are any."""
_COUNTED: WeakKeyDictionary[Family, dict[Any, _Counted | None]] = WeakKeyDictionary()


def check_data(data: Data) -> None:
    """There must be something to train on and to evaluate on."""
    if data.size < 1:
        raise MupscaleError("there is nothing to train on: the data's training part is empty")
    if next(iter(data.evaluation(1)), None) is None:
        raise MupscaleError("there is nothing to evaluate on: the data's held-out part is empty")


def data_fingerprint(data: Data) -> str:
    """Eight digits that change with the number of examples and with what some of them hold, spread over all."""
    count = min(data.size, _FINGERPRINTED)
    rows = torch.arange(count, device=data.rows_on or data.device) * data.size // count
    total = zlib.crc32(f"{data.size} {data.per_example}".encode())
    for part in data.examples(rows):
        values = part.detach().cpu().contiguous()
        total = zlib.crc32(str(tuple(values.shape)).encode(), total)
        total = zlib.crc32(values.reshape(-1).view(torch.uint8).numpy().data, total)
    return f"{total:08x}"


def cost_per_example(family: Family, width: WholeWidth, data: Data, recipe: Recipe) -> float | None:
    """Training FLOPs of one example, counted on a model without memory; its outputs are checked on the way.

    All runs of a process share a family, so that they are counted once for each width. A model that looks at values
    (transformers' masks do) is built for it, where there is room. None where they cannot be counted.
    """
    x = cast_input(_first_example(data), recipe)
    known = _COUNTED.setdefault(family, {})
    key = Width.of(width).label, tuple(x.shape), x.dtype, recipe.dtype()
    if key not in known:
        known[key] = _count_any_way(family, width, x, recipe)
    if (counted := known[key]) is None:
        return None
    cost, outputs = counted
    if data.classes is not None and outputs is not None and outputs < data.classes:
        raise MupscaleError(
            f"the model has {outputs} outputs, but the data has {data.classes} classes: set the model's number of "
            f"outputs (vocab, classes, d_out) to at least that, or, for text, take the model's own tokenizer "
            f"(bytes have 257 classes: one ends a document)"
        )
    return cost


def _count_any_way(family: Family, width: WholeWidth, x: Tensor, recipe: Recipe) -> _Counted | None:
    """On a model without memory; on one that is built where it needs values, unless it takes more than half of memory.

    An error where the model cannot take the example at all: it is no matter of counting then.
    """
    with suppress(Exception):  # a model that needs values
        return _count(family.sketch(width).to("meta", recipe.dtype()), x.to("meta"))
    model = None
    try:
        if 2 * _count_parameters(family, width) * recipe.dtype().itemsize > (available_memory() or 0):
            return None
        with torch.random.fork_rng(devices=[]):
            model = family.build(width).to(recipe.dtype())
            return _count(model, x.cpu())
    except Exception:  # its cost is not known, and its outputs are not checked
        if x.device.type == "cpu" and model is not None:  # where the model is to run
            _run_on_example(model, x, recipe, width)
        return None


def _count_parameters(family: Family, width: WholeWidth) -> int:
    return sum(p.numel() for p in family.sketch(width).parameters())


def _count(model: nn.Module, x: Tensor) -> _Counted:
    """FLOPs, and the number of logits on the way."""
    outputs: list[Any] = []
    model.register_forward_hook(lambda module, given, output: outputs.append(output))
    cost = float(count_flops(model, x))
    logits = find_logits(outputs[-1])
    return cost, None if logits is None else logits.shape[-1]


def check_memory(recipe: Recipe, family: Family, processes: Processes) -> None:
    """Refuse a model whose weights and gradients alone are more than the machine has left: it would end the process.

    A CUDA device says so by itself.
    """
    left = available_memory()
    if left is None or processes.device.type != "cpu" or processes.world > 1:
        return
    for width in (recipe.width, *(growth.width for growth in recipe.grow)):
        count = _count_parameters(family, width)
        needed = 2 * count * recipe.dtype().itemsize
        if needed > left:
            raise MupscaleError(
                f"there is not enough memory for {Width.of(width).phrase}: {count:,} parameters and their gradients "
                f"take {describe_shortage(needed, left)}; take a smaller width"
            )


def check_growth(recipe: Recipe, family: Family, data: Data) -> None:
    """Plan every growth of the run, so that one which cannot be done is refused before the first step.

    Copies are tried, too: small members of the family are run on a few examples.
    """
    width = recipe.width
    for growth in recipe.grow:
        family.check_growth(width, growth.width, growth.build_operators())
        if growth.build_operator().needs_multiples:
            check_copies(family, data, width, growth.width)
        width = growth.width


@torch.no_grad()
def check_model_takes_data(
    model: nn.Module, width: WholeWidth, data: Data, recipe: Recipe, processes: Processes
) -> None:
    """Run the model on one example, so that one which cannot take it is refused before the first step."""
    try:
        _run_on_example(model.eval(), cast_input(_first_example(data), recipe), recipe, width)
    finally:
        model.train()
        processes.reshard(model)


@torch.no_grad()
def _run_on_example(model: nn.Module, x: Tensor, recipe: Recipe, width: WholeWidth) -> None:
    try:
        model(x)
    except Exception as error:
        remedy = "set its number of inputs (d_in, …) to what the data has"
        if not x.is_floating_point():
            remedy = f"give it a vocabulary for tokens up to {int(x.max())}, or the data its tokenizer"
        raise MupscaleError(
            f"{recipe.model.class_path} at {Width.of(width).phrase} cannot take the data's examples of shape "
            f"{tuple(x.shape[1:])}: {str(error).splitlines()[0] if str(error) else type(error).__name__}; choose a "
            f"width that it can have, or {remedy}"
        ) from error


def _first_example(data: Data) -> Tensor:
    x, _ = data.examples(torch.zeros(1, dtype=torch.int64, device=data.rows_on or data.device))
    return x
