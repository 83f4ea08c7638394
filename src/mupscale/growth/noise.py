"""Symmetry-breaking noise: Step 2 of Meta-algorithm 'Upscaling procedure', in two units and signal-normalised.

Without noise the copies of a unit stay equal for ever. Its standard deviation scales with width as μP's
initialisation does, so that a level tuned on a small pair of widths is right for a large one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from mupscale.core import Entry, Plan, gather_whole, is_sharded, laid_out_like
from mupscale.growth.draws import standard_normal
from mupscale.growth.sources import whole_or_void
from mupscale.system import MupscaleError, NotNegative, checks_arguments

_EXACT = 512  # up to this size the svd is as fast as anything


def spectral_norm(matrix: Tensor) -> float:
    """The largest singular value: by svd for small matrices, by Lanczos iteration (to about 1e-5) for large ones."""
    matrix = matrix if matrix.dtype == torch.float64 else matrix.float()
    if min(matrix.shape) <= _EXACT:
        gram = matrix @ matrix.T if matrix.shape[0] <= matrix.shape[1] else matrix.T @ matrix
        return _root_of_largest(gram)
    return _lanczos_norm(matrix)


def _lanczos_norm(matrix: Tensor, tolerance: float = 1e-6, steps: int = 400) -> float:
    """Golub–Kahan bidiagonalisation with full reorthogonalisation; its largest Ritz value grows to ‖A‖.

    A matrix of low rank, such as a widened one, exhausts its range early: the value is exact then.
    """
    start = torch.randn(matrix.shape[1], generator=torch.Generator().manual_seed(0), dtype=matrix.dtype).to(
        matrix.device
    )
    right, left = [start / start.norm()], list[Tensor]()
    bidiagonal = torch.zeros(steps, steps, dtype=torch.float64)
    previous = 0.0
    for i in range(min(steps, *matrix.shape)):
        u = _orthogonal(matrix @ right[-1], left)
        bidiagonal[i, i] = u.norm()
        if _exhausted(bidiagonal[i, i], bidiagonal, matrix.dtype):
            break
        left.append(u / u.norm())
        v = _orthogonal(matrix.T @ left[-1], right)
        if i + 1 == steps or _exhausted(v.norm(), bidiagonal, matrix.dtype):
            break
        bidiagonal[i, i + 1] = v.norm()
        right.append(v / v.norm())
        if i % 10 == 9:
            value = _root_of_largest(bidiagonal[: i + 1, : i + 1] @ bidiagonal[: i + 1, : i + 1].T)
            if value - previous <= tolerance * value:
                return value
            previous = value
    return _root_of_largest(bidiagonal @ bidiagonal.T)


def _root_of_largest(gram: Tensor) -> float:
    """The root of the largest eigenvalue; the svd of the same matrix is NaN in some builds of torch."""
    return math.sqrt(max(float(torch.linalg.eigvalsh(gram.double())[-1]), 0.0))


def _exhausted(norm: Tensor, bidiagonal: Tensor, dtype: torch.dtype) -> bool:
    """Whether a new direction is nothing but rounding."""
    return float(norm) <= 100 * torch.finfo(dtype).eps * float(bidiagonal.max())


def _orthogonal(vector: Tensor, basis: list[Tensor]) -> Tensor:
    for _ in range(2 if basis else 0):
        stacked = torch.stack(basis)
        vector = vector - stacked.T @ (stacked @ vector)
    return vector


Unit = Literal["init", "theory"]

_AT_A_TIME = 1 << 22  # entries that are moved to a device at a time
_FARTHEST = 20.0  # standard deviations from the mean, which no draw reaches


@checks_arguments
@dataclass(frozen=True)
class GaussianNoise:
    """Gaussian noise; `std` is one number, or one per parameter name (then parameters not named get none).

    unit "init": multiples of the std of a fresh μP initialisation at the wide width.
    unit "theory": the paper's Algorithm 'Upscaling for MLPs under SGD': std on input weights, std/√N_in on hidden
    matrices, std/N_in on a readout stored with its 1/N_in, nothing on biases and norms.

    >>> import mupscale as mu
    >>> mu.GaussianNoise(0.3).of("layers.1.weight")
    0.3
    >>> mu.GaussianNoise({"layers.1.weight": 0.3}, unit="theory").of("layers.0.weight")
    0.0
    """

    std: NotNegative | Mapping[str, NotNegative]
    unit: Unit = "init"

    def of(self, name: str) -> float:
        """The level for one parameter."""
        return self.std.get(name, 0.0) if isinstance(self.std, Mapping) else self.std

    def to_json(self) -> str:
        """Exact: from_json gives an equal noise."""
        return json.dumps({"std": dict(self.std) if isinstance(self.std, Mapping) else self.std, "unit": self.unit})

    @classmethod
    def from_json(cls, text: str) -> GaussianNoise:
        """The noise that to_json wrote."""
        try:
            return cls(**json.loads(text))
        except (ValueError, TypeError) as error:
            raise MupscaleError(f"this is not noise written by mupscale ({error})") from None


@checks_arguments
@dataclass
class SignalNoise:
    """Noise whose spectral norm is `t` times the weight's own (Appendix 'Alternative algorithm: signal-normalized').

    `t` need not transfer across widths, but the constants it amounts to do: after use, `effective` holds them as a
    GaussianNoise that can be given as `noise=` at another width.

    >>> import mupscale as mu
    >>> narrow, wide, noise = nn.Linear(8, 8), nn.Linear(16, 16), mu.SignalNoise(0.1)
    >>> plan = mu.plan(narrow, wide)
    >>> _ = mu.perturb(mu.widen(narrow, wide, plan), plan, noise)
    >>> list(noise.effective.std)  # the constants to use at another width
    ['weight']
    """

    t: NotNegative
    effective: GaussianNoise | None = field(default=None, compare=False)


Noise = NotNegative | GaussianNoise | SignalNoise


def is_no_noise(noise: Noise) -> bool:
    """Whether it changes nothing."""
    if isinstance(noise, GaussianNoise):
        return not any(noise.std.values()) if isinstance(noise.std, Mapping) else not noise.std
    return not (noise.t if isinstance(noise, SignalNoise) else noise)


@checks_arguments
@torch.no_grad()
def perturb(wide: nn.Module, plan: Plan, noise: Noise, seed: int = 0) -> GaussianNoise:
    """Add noise to the wide model in place; returns the constants per parameter that it amounted to.

    Each parameter has streams of its own, drawn on the CPU from the seed and its name: the same for every device,
    number of processes and order. Zero noise changes no bit.

    >>> import mupscale as mu
    >>> narrow, wide = nn.Linear(8, 8), nn.Linear(16, 16)
    >>> plan = mu.plan(narrow, wide, fresh=lambda: nn.Linear(8, 8))
    >>> before = mu.widen(narrow, wide, plan).weight.clone()
    >>> mu.perturb(wide, plan, 0.5, seed=1)
    GaussianNoise(std={'weight': 0.5, 'bias': 0.5}, unit='init')
    >>> torch.equal(wide.weight, before)
    False
    """
    noise = check_noise(noise, plan)
    unit: Unit = noise.unit if isinstance(noise, GaussianNoise) else "theory"
    constants = {}
    parameters = plan.check(wide)
    with whole_or_void(wide):
        for name, p in parameters.items():
            level = add_noise(p, name, plan, noise, seed)
            if level is not None:
                constants[name] = level
    effective = GaussianNoise(constants, unit)
    if isinstance(noise, SignalNoise):
        noise.effective = effective
    return effective


@torch.no_grad()
def add_noise(
    p: Tensor, name: str, plan: Plan, noise: GaussianNoise | SignalNoise, seed: int, *, paired: bool = False
) -> float | None:
    """Add noise to one wide parameter in place; returns its level, or None where it gets no noise at any level.

    paired: noise that sums to 0 over the copies of each input, so that the function stays.
    """
    if not _has_noise(noise, plan):
        return None
    entry = plan.parameters[name]
    std = unit_std(plan, name, noise.unit if isinstance(noise, GaussianNoise) else "theory")
    if not std or (paired and not _copied_inputs(entry)):
        return None
    level = noise.of(name) if isinstance(noise, GaussianNoise) else noise.t
    if level == 0:
        return 0.0
    delta = standard_normal(entry.wide, p.dtype, seed, name)
    if paired:
        delta = _balanced(delta, entry)
    if isinstance(noise, SignalNoise):
        signal = spectral_norm(as_matrix(gather_whole(p.detach()), entry))
        level *= signal / spectral_norm(as_matrix(delta, entry)) / std
    check_spread(name, level * std, p.dtype)
    _add(p, delta, level * std)
    return level


def check_spread(name: str, std: float, dtype: torch.dtype) -> None:
    """Refuse noise of a standard deviation at which a parameter of this dtype would overflow."""
    if std > torch.finfo(dtype).max / _FARTHEST:
        raise MupscaleError(
            f"the noise on '{name}' has a standard deviation of {std:g}, more than {dtype} can hold: use less noise"
        )


def _copied_inputs(entry: Entry) -> list[int]:
    return [d for d in entry.in_ if d in entry.axes and entry.axes[d].times != 1]


def _balanced(delta: Tensor, entry: Entry) -> Tensor:
    """The noise less its mean over the copies of each input, at the same spread: for two copies, +ε and −ε."""
    dim = _copied_inputs(entry)[0]
    axis = entry.axes[dim]
    copies: Tensor = delta.unflatten(dim, (-1, axis.copies, axis.block))
    copies = copies - copies.mean(dim + 1, keepdim=True)
    return (copies * math.sqrt(axis.copies / (axis.copies - 1))).flatten(dim, dim + 2)


def _add(p: Tensor, delta: Tensor, factor: float) -> None:
    """p ← p + factor·delta, which lies on the CPU and travels in parts: no second copy stands by on the device."""
    if p.device == delta.device or p.dim() == 0 or is_sharded(p):
        p.add_(laid_out_like(delta.to(p.device), p), alpha=factor)
        return
    rows = max(1, _AT_A_TIME * len(p) // max(1, p.numel()))
    for part, noise in zip(p.split(rows), delta.split(rows), strict=True):
        part.add_(noise.to(p.device), alpha=factor)


def check_noise(noise: Noise, plan: Plan) -> GaussianNoise | SignalNoise:
    """The noise as an object; an error if the plan's model cannot be given it, before anything is written."""
    noise = as_noise(noise)
    constants = noise.std if isinstance(noise, GaussianNoise) and isinstance(noise.std, Mapping) else {}
    if strangers := constants.keys() - plan.parameters.keys():
        raise MupscaleError(
            f"the noise has a constant for '{min(strangers)}', which the model does not have: it is for a different "
            "model"
        )
    if isinstance(noise, GaussianNoise) and _has_noise(noise, plan):
        unit_std(plan, next(iter(plan.parameters)), noise.unit)
    return noise


def as_noise(noise: Noise) -> GaussianNoise | SignalNoise:
    """The noise as an object: a number is in units of the initialisation."""
    return noise if isinstance(noise, GaussianNoise | SignalNoise) else GaussianNoise(noise)


def _has_noise(noise: GaussianNoise | SignalNoise, plan: Plan) -> bool:
    """Whether any parameter gets noise."""
    if isinstance(noise, SignalNoise):
        return True
    return any(noise.std.get(name) for name in plan.parameters) if isinstance(noise.std, Mapping) else noise.std != 0


def unit_std(plan: Plan, name: str, unit: Unit) -> float:
    """The std that level 1 means for this parameter at the plan's wide width."""
    if unit == "theory":
        return _theory_std(plan.parameters[name])
    if plan.fresh is None:
        raise MupscaleError(
            "noise in units of the initialisation needs to know it: make the plan with fresh=build (a freshly built "
            'narrow model), use a Family, or give GaussianNoise(std, unit="theory")'
        )
    return plan.fresh[name]


def _theory_std(entry: Entry) -> float:
    """Algorithm 'Upscaling for MLPs under SGD', σ_Δ^(ℓ) at σ̄_Δ = 1; for convolutions N_in counts the taps."""
    if len(entry.wide) < 2 or not (entry.out_is_width or entry.in_is_width):
        return 0.0
    if not entry.in_is_width:
        return 1.0
    fan_in = math.prod(entry.wide[d] for d in _input_dims(entry))
    return float(fan_in ** (-0.5 if entry.out_is_width else -1.0))


def _input_dims(entry: Entry) -> list[int]:
    """The input axes and, behind them, a convolution's taps."""
    last = max(1, *entry.in_, *entry.out)  # a weight has an output and an input dimension before any taps
    return [*entry.in_, *range(last + 1, len(entry.wide))]


def as_matrix(weight: Tensor, entry: Entry) -> Tensor:
    """The weight as output × input matrix, a convolution as out × (in·taps)."""
    columns = _input_dims(entry) if entry.in_ else [d for d in range(weight.dim()) if d not in entry.out]
    rows = [d for d in range(weight.dim()) if d not in columns]
    return weight.permute(*rows, *columns).reshape(math.prod(weight.shape[d] for d in rows), -1)
