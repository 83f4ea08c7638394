"""The first module in which two models that should be equivalent differ, and what usually causes it there."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from mupscale.core import Plan, naming
from mupscale.planning.recorder import Recorder

ROUNDING = 1e-5
"""Differences below it may be float32's."""


@dataclass(frozen=True)
class Difference:
    """The first place where the two models differ, and what usually causes it there."""

    name: str
    kind: str
    relative: float
    advice: str

    def __str__(self) -> str:
        return f"{self.kind} '{self.name}' differs first (by {self.relative:.1e}). {self.advice}"


def relative_difference(ours: Tensor, theirs: Tensor) -> float:
    """‖ours − theirs‖ / ‖ours‖, in double precision; infinite if either is not finite.

    >>> import torch
    >>> relative_difference(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5]))
    0.1
    """
    a, b = ours.double(), theirs.double()
    norm = float(a.norm())
    difference = float((a - b).norm())
    value = difference / norm if norm else difference
    return value if value == value else float("inf")


def first_differing_module(
    ours: Recorder, theirs: Recorder, plan: Plan, tolerance: float, *, may_round: bool = True
) -> Difference | None:
    """The first module, in the order in which they run, whose output in the wide model is not the narrow one's.

    may_round: whether modules may have computed in float32, which is then said of small differences.

    >>> import torch
    >>> import mupscale as mu
    >>> narrow, wide = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 1)), nn.Sequential(nn.Linear(2, 8), nn.Linear(8, 1))
    >>> with Recorder(narrow) as ours, Recorder(wide) as theirs:
    ...     _ = narrow(torch.ones(1, 2)), wide(torch.ones(1, 2))
    >>> first_differing_module(ours, theirs, mu.plan(narrow, wide), 1e-4).name  # wide was not written yet
    '0'
    """
    for path, output in ours.outputs.items():
        if path in theirs.outputs:
            expected, actual = _as_copies(output, theirs.outputs[path])
            relative = _up_to_folds(expected, actual, plan, path)
            if not relative <= tolerance:
                advice = _constant_factor(expected, actual, tolerance) or _advice(
                    path, naming.modules(ours.model)[path]
                )
                if may_round and relative < ROUNDING:
                    advice = f"{_ADVICE['rounding']} {advice}"
                return Difference(path or type(ours.model).__name__, "module", relative, advice)
    return None


def _as_copies(narrow: Tensor, wide: Tensor) -> tuple[Tensor, Tensor]:
    """Copies of the narrow output and the wide output, both in order of size, so that they agree in whatever order."""
    if narrow.dim() != wide.dim():
        return narrow, wide
    expected = narrow
    for d in range(narrow.dim()):
        if narrow.shape[d] and wide.shape[d] % narrow.shape[d] == 0 and wide.shape[d] != narrow.shape[d]:
            expected = expected.repeat_interleave(wide.shape[d] // narrow.shape[d], d).sort(dim=d).values
            wide = wide.sort(dim=d).values
    return expected, wide


def _up_to_folds(expected: Tensor, wide: Tensor, plan: Plan, path: str) -> float:
    if expected.shape != wide.shape:
        return float("inf")
    folds = {1.0, *(float(e.fold) for n, e in plan.parameters.items() if path and n.startswith(f"{path}."))}
    return min(relative_difference(expected * fold, wide) for fold in folds)


def _constant_factor(expected: Tensor, wide: Tensor, tolerance: float) -> str:
    """Advice where the wide output is right up to one factor."""
    if expected.shape != wide.shape:
        return ""
    a, b = expected.double().flatten(), wide.double().flatten()
    factor = float(a @ b / (a @ a)) if float(a @ a) else 0.0
    if factor and factor == factor and relative_difference(a * factor, b) <= tolerance:
        return f"Its output is {factor:.4g} times what it should be. {_ADVICE['factor']}"
    return ""


def _advice(path: str, module: nn.Module) -> str:
    name, place = type(module).__name__.lower(), path.lower()
    if any(word in name or (word in place and not isinstance(module, nn.Linear)) for word in ("attention", "attn")):
        key = "heads"
    elif isinstance(module, nn.Linear):
        key = "flatten"
    elif "norm" in name:
        key = "constant"
    else:
        key = "other"
    return _ADVICE[key]


_ADVICE = {
    "heads": (
        "Usually heads: if their number grows, whole heads must be copied (Role(out_block=head_dim), in_block for the "
        "output projection); if head_dim grows, attention must scale as 1/head_dim. A bias that depends on the number "
        "of heads (ALiBi's slopes) cannot be copied at all."
    ),
    "flatten": (
        "Usually a flatten before it: after convolutions flattened to C·H·W, its input is copied in blocks of H·W "
        "units (in_block of its Role). Otherwise heads that were not recognised, a tied weight, a bare parameter on "
        "the input side (Role(in_=DIM)), or a constant in forward that depends on the width."
    ),
    "factor": (
        "Usually a constant in forward that depends on the width, such as a division by √width, or a tied readout "
        "whose 1/k no norm takes."
    ),
    "constant": "Usually a constant in forward that depends on the width, such as a division by √width, or an eps.",
    "other": (
        "Usually heads that were not recognised, a flatten that needs a block, a tied weight used in two roles, a bare "
        "parameter on the input side (Role(in_=DIM)), or a constant in forward that depends on the width."
    ),
    "rounding": (
        "A difference this small may be rounding in a module that always computes in float32, as norms of "
        "transformers do. If so, pass tolerance=1e-4."
    ),
}
