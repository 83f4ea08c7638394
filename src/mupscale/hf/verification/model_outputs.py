"""Two models run on the same batches: how far their outputs differ, with which loss, and where it begins."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mupscale.core import Plan
from mupscale.hf.describe import Batch
from mupscale.planning import Difference, Recorder, first_differing_module, has_length_one, relative_difference
from mupscale.system import MupscaleError, generator

_UNIT = 1e-4  # of a length, in float32

_CAUSAL = ("ForCausalLM", "LMHeadModel", "DoubleHeadsModel")  # endings of names of classes that predict the next token


@dataclass(frozen=True)
class OutputComparison:
    """Largest relative difference of each output, and the mean loss of both models.

    constant: whether the small model's outputs do not depend on anything, as with weights that are all zero.
    """

    differences: dict[str, float]
    losses: tuple[float, float]
    constant: bool


@torch.no_grad()
def compare_outputs(
    ours: nn.Module, theirs: nn.Module, batches: list[Batch], old_units: Callable[[int], Tensor] | None = None
) -> OutputComparison:
    """Run both models on these batches.

    old_units: from a number of hidden units to their places in the wide model, where it has new ones beside them.
    """
    worst: dict[str, float] = {}
    losses = [0.0, 0.0]
    constant = False
    for number, batch in enumerate(batches):
        small = run_model(ours, batch, "the small model")
        wide = run_model(theirs, batch, "the wide model")
        if old_units is not None:
            wide = {name: _pick(t, small[name], old_units) if name in small else t for name, t in wide.items()}
        for name, tensor in small.items():
            off = relative_difference(_copy_units(tensor, wide[name]), wide[name]) if name in wide else math.inf
            worst[name] = max(worst.get(name, 0.0), off)
        for side, outputs in enumerate((small, _average_copies(wide, widths_of(small)))):
            losses[side] += float(loss_of(ours, outputs, batch)) / len(batches)
        if number == 0:
            constant = all(bool((t == t.flatten()[0]).all()) for t in small.values())
    return OutputComparison(worst, (losses[0], losses[1]), constant)


def run_model(model: nn.Module, batch: Batch, which: str = "the model") -> dict[str, Tensor]:
    """Every tensor that a model gives out, by name; caches, inner states and losses are none of them."""
    try:
        outputs = model(**batch)
    except MupscaleError:
        raise
    except Exception as error:  # a model that does not run, as with a field of its config that should have grown
        first = (str(error).splitlines() or [""])[0]
        raise MupscaleError(f"{which} cannot be run ({type(error).__name__}: {first})") from None
    return {name: t for name, t in outputs.items() if isinstance(t, Tensor) and t.is_floating_point() and t.dim()}


def _pick(wide: Tensor, small: Tensor, old_units: Callable[[int], Tensor]) -> Tensor:
    """The old units of a hidden state."""
    if wide.shape == small.shape or wide.shape[:-1] != small.shape[:-1] or wide.shape[-1] < small.shape[-1]:
        return wide
    return wide.index_select(-1, old_units(small.shape[-1]).to(wide.device))


def _copy_units(small: Tensor, wide: Tensor) -> Tensor:
    """A hidden state as the wide model should have it: every unit as often as the last axis has grown."""
    if small.shape[:-1] != wide.shape[:-1] or wide.shape[-1] % small.shape[-1]:
        raise MupscaleError(
            f"the outputs of the two models have shapes {tuple(small.shape)} and {tuple(wide.shape)}: WIDE is not an "
            "upscaled version of SMALL"
        )
    copies = small.repeat_interleave(wide.shape[-1] // small.shape[-1], -1)
    return copies * _shrinkage(small, wide)


def _shrinkage(small: Tensor, wide: Tensor) -> float:
    """What copies are multiplied by: of vectors of length 1, whose length stays, by the root of their number."""
    if small.shape[-1] == wide.shape[-1] or not (
        has_length_one(small, slack=_UNIT) and has_length_one(wide, slack=_UNIT)
    ):
        return 1.0
    return float((small.shape[-1] / wide.shape[-1]) ** 0.5)


def widths_of(outputs: dict[str, Tensor]) -> dict[str, int]:
    """The size of each output's last axis."""
    return {name: t.shape[-1] for name, t in outputs.items()}


def _average_copies(outputs: dict[str, Tensor], widths: dict[str, int]) -> dict[str, Tensor]:
    """The mean over each unit's copies: a readout that divides by the width, so that losses are the same."""
    return {
        name: t if t.shape[-1] == widths[name] else _mean_of_copies(t, widths[name])
        for name, t in outputs.items()
        if name in widths
    }


def _mean_of_copies(wide: Tensor, width: int) -> Tensor:
    mean: Tensor = wide.unflatten(-1, (width, -1)).mean(-1)
    return mean * (wide.shape[-1] / width) ** 0.5 if has_length_one(wide, slack=_UNIT) else mean


def loss_of(model: nn.Module, outputs: dict[str, Tensor], batch: Batch) -> Tensor:
    """The next token's for a causal language model; else of targets drawn once for each output."""
    total: Tensor | None = None
    for name, t in outputs.items():
        if name == "logits" and type(model).__name__.endswith(_CAUSAL) and t.dim() == 3:
            value = F.cross_entropy(t[:, :-1].flatten(0, -2), batch["input_ids"][:, 1:].flatten())
        elif "logits" in name and t.shape[-1] > 1 and t.dim() > 1:
            classes = torch.randint(t.shape[-1], t.shape[:-1], generator=generator(0, name)).to(t.device)
            value = F.cross_entropy(t.flatten(0, -2), classes.flatten())
        else:
            value = (t - torch.randn(t.shape, generator=generator(0, name)).to(t)).square().mean()
        total = value if total is None else total + value
    if total is None:
        raise MupscaleError(f"{type(model).__name__} returns no tensor to compare")
    return total


def first_difference(
    ours: nn.Module, theirs: nn.Module, batches: list[Batch], plan: Plan, tolerance: float
) -> Difference | None:
    """The first module whose outputs differ on any of these batches."""
    for batch in batches:
        with torch.no_grad(), Recorder(ours) as small, Recorder(theirs) as wide:
            run_model(ours, batch)
            run_model(theirs, batch)
        if (first := first_differing_module(small, wide, plan, tolerance)) is not None:
            return first
    return None


@contextmanager
def plain_outputs(model: nn.Module, widths: dict[str, int]) -> Iterator[None]:
    """While it is entered, the model gives out a dict of tensors of the small model's shapes."""

    def plain(module: nn.Module, inputs: Any, outputs: Any) -> dict[str, Tensor]:
        return _average_copies({name: t for name, t in outputs.items() if name in widths}, widths)

    handle = model.register_forward_hook(plain)
    try:
        yield
    finally:
        handle.remove()
