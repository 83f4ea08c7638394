"""What a batch does not exercise: the units of growing parameters that change no output on it.

The check of a plan compares outputs and gradients. It cannot see a weight whose gradient vanishes: the queries and keys
of one position, or of equal ones; what reads a state of zeros; a branch that did not run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mupscale.core import naming
from mupscale.planning.copied_values import largest_number
from mupscale.planning.tracing import in_float64, run_in_float64, tensors_in

_VANISHES = 1e-10  # beside the largest gradient of the model: the check cannot tell this from nothing
_FEW = 1 / 16  # of an axis: single units may be silent by chance, as those of a ReLU are
_MANY = 1 / 4  # of an axis: a part worth a word
_LEAST = 4  # units in such a part
_ENTRIES = 8  # that are looked at first

Dims = Mapping[str, tuple[int, ...]]


def growing_weights(narrow: nn.Module, wide: nn.Module) -> dict[str, tuple[int, ...]]:
    """By name, the dimensions along which parameters grow, without biases beside a weight.

    A bias is certainly added, and where it may be added in vain (to keys, before a BatchNorm) it never has a gradient.

    >>> growing_weights(nn.Linear(2, 4), nn.Linear(2, 8))
    {'weight': (0,)}
    """
    theirs = naming.parameters(wide)
    growing = {
        name: dims
        for name, p in naming.parameters(narrow).items()
        if name in theirs
        and p.dim() == theirs[name].dim()
        and (dims := tuple(d for d in range(p.dim()) if p.shape[d] != theirs[name].shape[d]))
    }
    matrices = [name for name in growing if theirs[name].dim() > 1]

    def is_beside_a_weight(name: str) -> bool:
        path, _, local = name.rpartition(".")
        within = f"{path}." if path else ""
        return theirs[name].dim() == 1 and "bias" in local and any(m.startswith(within) for m in matrices)

    return {name: dims for name, dims in growing.items() if not is_beside_a_weight(name)}


@dataclass(frozen=True)
class Seen:
    """By parameter and growing dimension, which units have a gradient. absent: parameters that are in no graph."""

    units: Mapping[tuple[str, int], Tensor]
    absent: frozenset[str]

    def __or__(self, other: Seen) -> Seen:
        return Seen({key: mask | other.units[key] for key, mask in self.units.items()}, self.absent & other.absent)

    @property
    def lacking(self) -> float:
        """The parts of axes that are not seen, all together; those that may be so by chance do not count."""
        masks = [mask for mask in self.units.values() if int((~mask).sum()) > 1 or not bool(mask.any())]
        return sum(part for part in map(_silent, masks) if part >= _FEW)

    @property
    def unseen(self) -> list[str]:
        """Parameters of which nothing is seen."""
        whole = dict[str, bool]()
        for (name, _), mask in self.units.items():
            whole[name] = whole.get(name, True) and not bool(mask.any())
        return [name for name, is_unseen in whole.items() if is_unseen]

    @property
    def parts(self) -> list[str]:
        """Parameters of which a good part is not seen."""
        silent = {key: _silent(mask) for key, mask in self.units.items() if int((~mask).sum()) >= _LEAST}
        return list(dict.fromkeys(name for (name, _), part in silent.items() if _MANY <= part < 1))


def _silent(mask: Tensor) -> float:
    return float((~mask).double().mean()) if mask.numel() else 0.0


def seen_by(gradients: Mapping[str, Tensor], sizes: Mapping[str, torch.Size], growing: Dims) -> Seen:
    """What gradients show of parameters of these sizes.

    >>> one = {"a": torch.tensor([[0.0, 1.0], [0.0, 2.0]])}
    >>> seen_by(one, {"a": torch.Size([2, 2])}, {"a": (0, 1)}).units["a", 1]
    tensor([False,  True])
    """
    largest = max(map(largest_number, gradients.values()), default=0.0)
    units = {}
    for name, dims in growing.items():
        gradient = gradients.get(name)
        for d in dims:
            if gradient is None:
                units[name, d] = torch.zeros(sizes[name][d], dtype=torch.bool)
            else:
                units[name, d] = _above(_VANISHES * largest, gradient, d)
    return Seen(units, frozenset(name for name in growing if name not in gradients))


def _above(level: float, gradient: Tensor, dim: int) -> Tensor:
    """Which units along a dimension have entries of this size; a few entries of each tell that of most gradients."""
    if not gradient.numel():
        return torch.ones(gradient.shape[dim], dtype=torch.bool)  # there is nothing to see
    few = gradient
    others = [d for d in range(gradient.dim()) if d != dim]
    for d in others:
        few = few.narrow(d, 0, min(_ENTRIES, few.shape[d]))
    for some in (few, gradient):
        units = (some.abs().amax(others) if others else some.abs()) > level
        if bool(units.all()):
            break
    return units.cpu()


@torch.enable_grad()
def run_and_see(narrow: nn.Module, batch: Any, growing: Dims) -> Seen | None:
    """What a batch shows of a copy of the model with generic weights, frozen ones too; None where it gives no numbers.

    >>> narrow = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 1))
    >>> run_and_see(narrow, torch.zeros(3, 2), {"0.weight": (0,), "1.weight": (1,)}).unseen
    ['0.weight']
    """
    model, batch = in_float64(narrow, batch, generic=1)
    for p in model.parameters():
        p.requires_grad_(p.is_floating_point())
    outputs = _outputs(model, batch)
    generator = torch.Generator().manual_seed(0)
    loss = torch.zeros((), dtype=torch.float64)
    for output in outputs:
        if output.requires_grad:
            push = torch.randn(output.shape, generator=generator, dtype=output.dtype)
            loss = loss + (output * push.to(output.device)).sum().cpu()
    if loss.requires_grad:
        loss.backward()
    named = naming.parameters(model)
    gradients = {name: p.grad for name, p in named.items() if p.grad is not None}
    if not all(bool(t.isfinite().all()) for t in (*outputs, *gradients.values())):
        return None
    return seen_by(gradients, {name: p.shape for name, p in named.items()}, growing)


def without_effect(narrow: nn.Module, batches: Sequence[Any], names: Sequence[str]) -> list[str]:
    """Of parameters that have no gradient those that change no output either, as they do behind a `detach`.

    >>> without_effect(nn.Linear(2, 4), [torch.ones(1, 2)], ["weight"])
    []
    """
    if not names:
        return []

    @torch.no_grad()
    def outputs(batch: Any, changed: Sequence[str]) -> Iterator[Tensor]:
        model, batch = in_float64(narrow, batch, generic=1)
        for name, p in naming.parameters(model).items():
            if name in changed:
                p.mul_(1.5).add_(0.1)
        return iter(_outputs(model, batch))

    def matter(changed: Sequence[str]) -> bool:
        pairs = ((outputs(batch, ()), outputs(batch, changed)) for batch in batches)
        return any(not torch.equal(a, b) for ours, theirs in pairs for a, b in zip(ours, theirs, strict=True))

    return [name for name in names if not matter([name])] if matter(names) else list(names)


def _outputs(model: nn.Module, batch: Any) -> list[Tensor]:
    return [t for t in tensors_in(run_in_float64(model, batch)) if t.is_floating_point()]
