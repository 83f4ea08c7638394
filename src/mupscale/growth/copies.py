"""The paper's operator: every unit copied, exactly, with noise that makes the copies differ; and Net2Net's.

Without noise the copies of a unit stay equal for ever. Its standard deviation scales with width as μP's initialisation
does, so that a level tuned on a small pair of widths is right for a large one. It comes in two units, and
signal-normalised: Step 2 of Meta-algorithm 'Upscaling procedure'.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import normalize

from mupscale.core import Axis, Entry, Plan, gather_whole, laid_out_like
from mupscale.growth.draws import standard_normal
from mupscale.growth.operators import Operator, Part, StatePart
from mupscale.system import MupscaleError, Must, NotNegative, as_asked, check_argument, checks_arguments, generator

_EXACT = 512  # up to this size of its smaller side a matrix is as large as its Gram matrix says
_STEPS = 64  # dimensions of the Krylov space of a larger one
_FARTHEST = 20.0  # standard deviations from the mean, which no draw reaches


def spectral_norm(matrix: Tensor) -> float:
    """The largest singular value: exact for small matrices, and of a Krylov space (to about 1e-5) for large ones."""
    matrix = matrix if matrix.dtype == torch.float64 else matrix.float()
    matrix = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    if len(matrix) > _EXACT:
        start = torch.randn(len(matrix), generator=torch.Generator().manual_seed(0), dtype=matrix.dtype)
        vector = start.to(matrix.device)
        basis = vector.new_empty(0, len(vector))
        for _ in range(_STEPS):
            for _ in range(2):  # once leaves rounding, which grows
                vector = vector - basis.T @ (basis @ vector)
            basis = torch.cat([basis, normalize(vector, dim=0)[None]])
            vector = matrix @ normalize(matrix.T @ basis[-1], dim=0)
        # a matrix of low rank exhausts the space: what rounding adds then are directions like any others
        matrix = torch.linalg.qr(basis.T).Q.T @ matrix
    gram = (matrix @ matrix.T).double()  # the svd of the same matrix is NaN in some builds of torch
    return math.sqrt(max(float(torch.linalg.eigvalsh(gram)[-1]), 0.0))


Unit = Literal["init", "theory"]


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

    @property
    def is_none(self) -> bool:
        return not any(self.std.values()) if isinstance(self.std, Mapping) else not self.std


@checks_arguments
@dataclass
class SignalNoise:
    """Noise whose spectral norm is `t` times the weight's own (Appendix 'Alternative algorithm: signal-normalized').

    `t` need not transfer across widths, but the constants it amounts to do: after use, `effective` holds them as a
    GaussianNoise that can be given as `noise=` at another width.

    >>> import mupscale as mu
    >>> narrow, wide, noise = torch.nn.Linear(8, 8), torch.nn.Linear(16, 16), mu.SignalNoise(0.1)
    >>> plan = mu.plan(narrow, wide)
    >>> _ = mu.perturb(mu.widen(narrow, wide, plan), plan, noise)
    >>> list(noise.effective.std)  # the constants to use at another width
    ['weight']
    """

    t: NotNegative
    effective: GaussianNoise | None = field(default=None, compare=False)
    unit: ClassVar[Unit] = "theory"

    def of(self, name: str) -> float:
        return self.t

    @property
    def is_none(self) -> bool:
        return not self.t


Noise = NotNegative | GaussianNoise | SignalNoise


def add_noise(
    p: Tensor, name: str, plan: Plan, noise: GaussianNoise | SignalNoise, seed: int, *, paired: bool = False
) -> float | None:
    """Add noise to one wide parameter in place; returns its level, or None where it gets none.

    paired: noise that sums to 0 over the copies of each input, so that the function stays.
    """
    entry, level = plan.parameters[name], noise.of(name)
    copied = [d for d in entry.in_ if entry.axes[d].times != 1]
    if not level or (paired and not copied) or not (std := unit_std(plan, name, noise.unit)):
        return None
    delta = standard_normal(entry.wide, p.dtype, seed, plan.drawn_as(name))
    if paired:  # less its mean over the copies of each input, at the same spread: for two copies, +ε and −ε
        dim, axis = copied[0], entry.axes[copied[0]]
        delta = _without_mean_of_copies(delta, dim, axis, entry.narrow[dim])
    law = plan.initial.get(name)
    if noise.unit == "init" and law is not None and law.stds:  # parts that start with other spreads get other noise
        delta.mul_((law.by_unit(law.stds, entry.wide) / std).to(delta))
    if isinstance(noise, SignalNoise):
        signal = spectral_norm(as_matrix(gather_whole(p.detach()), entry))
        level *= signal / spectral_norm(as_matrix(delta, entry)) / std
        earlier = {} if noise.effective is None else noise.effective.std
        assert isinstance(earlier, Mapping)
        noise.effective = GaussianNoise({**earlier, name: level}, noise.unit)
    check_spread(name, level * std, p.dtype)
    p.add_(laid_out_like(delta.to(p.device), p), alpha=level * std)
    return level


def _without_mean_of_copies(delta: Tensor, dim: int, axis: Axis, n: int) -> Tensor:
    """The noise less its mean over the copies of each of n narrow units, at the same spread; none on what stays."""
    parts, start = [], 0
    for length, block in axis.sections or ((n, axis.block),):
        wide_length = length * axis.copies if block else length
        part = delta.narrow(dim, start, wide_length)
        start += wide_length
        if block:
            copies: Tensor = part.unflatten(dim, (-1, axis.copies, block))
            apart = copies - copies.mean(dim + 1, keepdim=True)
            parts.append((apart * math.sqrt(axis.copies / (axis.copies - 1))).flatten(dim, dim + 2))
        else:
            parts.append(torch.zeros_like(part))
    return torch.cat(parts, dim)


def check_spread(name: str, std: float, dtype: torch.dtype) -> None:
    """Refuse noise of a standard deviation at which a parameter of this dtype would overflow."""
    if std > torch.finfo(dtype).max / _FARTHEST:
        raise MupscaleError(
            f"the noise on '{name}' has a standard deviation of {std:g}, more than {dtype} can hold: use less noise"
        )


def check_noise(noise: Noise, plan: Plan) -> GaussianNoise | SignalNoise:
    """The noise as an object; an error if the plan's model cannot be given it, before anything is written."""
    noise = as_noise(noise)
    constants = noise.std if isinstance(noise, GaussianNoise) and isinstance(noise.std, Mapping) else {}
    if strangers := constants.keys() - plan.parameters.keys():
        raise MupscaleError(
            f"the noise has a constant for '{min(strangers)}', which the model does not have: it is for a different "
            "model"
        )
    if not noise.is_none:
        unit_std(plan, next(iter(plan.parameters)), noise.unit)
    if isinstance(noise, SignalNoise):
        noise.effective = GaussianNoise({}, noise.unit)
    return noise


def as_noise(noise: Noise) -> GaussianNoise | SignalNoise:
    """The noise as an object: a number is in units of the initialisation."""
    return noise if isinstance(noise, GaussianNoise | SignalNoise) else GaussianNoise(noise)


def unit_std(plan: Plan, name: str, unit: Unit) -> float:
    """The std that level 1 means for this parameter at the plan's wide width."""
    if unit == "theory":  # Algorithm 'Upscaling for MLPs under SGD', σ_Δ^(ℓ) at σ̄_Δ = 1; N_in counts taps, too
        entry = plan.parameters[name]
        if len(entry.wide) < 2 or not (entry.out or entry.in_):
            return 0.0
        fan_in = math.prod(entry.wide[d] for d in _input_dims(entry)) if entry.in_ else 1
        return float(fan_in ** (-0.5 if entry.out else -1.0))
    if plan.fresh is None:
        raise MupscaleError(
            "noise in units of the initialisation needs to know it: make the plan with fresh=build (a freshly built "
            'narrow model), use a Family, or give GaussianNoise(std, unit="theory")'
        )
    return plan.fresh[name]


def _input_dims(entry: Entry) -> list[int]:
    """The input axes and, behind them, a convolution's taps."""
    last = max(1, *entry.in_, *entry.out)  # a weight has an output and an input dimension before any taps
    return [*entry.in_, *range(last + 1, len(entry.wide))]


def as_matrix(weight: Tensor, entry: Entry) -> Tensor:
    """The weight as output × input matrix, a convolution as out × (in·taps)."""
    columns = _input_dims(entry) if entry.in_ else [d for d in range(weight.dim()) if d not in entry.out]
    rows = [d for d in range(weight.dim()) if d not in columns]
    return weight.permute(*rows, *columns).reshape(math.prod(weight.shape[d] for d in rows), -1)


# ---------------------------------------------------------------------------------------- operators

NoiseLevel = float | dict[str, float]


@dataclass(frozen=True, kw_only=True)
class CopiesSettings:
    """What recipes, commands and records may say of copies.

    Args:
        noise: how much noise copies get so that they differ. With 0 the copies stay equal, and the wide model stays a
            replica of the small one. In a recipe also one value per parameter name
        noise_unit: unit of noise: init (a fresh initialisation), theory (the paper's constants) or signal (each
            weight's spectral norm)
        shrink: for copies, what trained matrices and embeddings are multiplied by before noise is added, above 0 and
            at most 1 (not shrunk)
    """

    noise: NoiseLevel = 0.0
    noise_unit: Literal["init", "theory", "signal"] = field(default="init", metadata={"of": "noise"})
    shrink: float = 1.0

    def operator_arguments(self) -> dict[str, Any]:
        """What `Copies` and its kin are made with."""
        return {"noise": build_noise(self.noise, self.noise_unit), "shrink": self.shrink}


def build_noise(level: NoiseLevel, unit: str) -> Noise:
    """Noise of this level; none at all for 0, whatever the unit. Constants by name are never relative to a signal."""
    if level == 0:
        return 0.0
    levels = {f"noise of {name}": each for name, each in level.items()} if isinstance(level, dict) else {"noise": level}
    for name, each in levels.items():  # by the name of the setting, which is not that of the operator's argument
        check_argument(NotNegative, each, name)
    if isinstance(level, dict):
        return GaussianNoise(level, unit="theory" if unit == "signal" else unit)  # type: ignore[arg-type]
    return SignalNoise(level) if unit == "signal" else GaussianNoise(level, unit=unit)  # type: ignore[arg-type]


@checks_arguments
@dataclass(frozen=True)
class Copies(Operator):
    """Every unit copied a whole number of times; without noise, the wide model trains exactly as the narrow one would.

    noise: how much the copies are made to differ, as in `perturb`. paired: noise that sums to 0 over the copies of each
    input (+ε on one and −ε on the other), so that the function stays; parameters that no copies feed get none.
    shrink: what trained matrices and embeddings are multiplied by before the noise. Gains stay, and biases do where the
    model has norms. A network whose trained weights have become large learns on better from smaller ones.

    >>> import torch, mupscale as mu
    >>> narrow, wide = torch.nn.Linear(2, 1, bias=False), torch.nn.Linear(4, 1, bias=False)
    >>> plan = mu.plan(narrow, wide, fresh=narrow)
    >>> _ = mu.upscale(narrow, wide, plan, grow=mu.Copies(noise=0.5, paired=True))
    >>> torch.allclose(wide.weight[0, ::2] + wide.weight[0, 1::2], narrow.weight[0])
    True
    """

    noise: Noise = 0.0
    paired: bool = False
    shrink: Annotated[float, Must("a number above 0 and at most 1", lambda value: 0 < value <= 1)] = 1.0

    def check(self, plan: Plan) -> None:
        check_noise(self.noise, plan)

    def parameter(self, out: Tensor, narrow: Tensor, part: Part) -> None:
        """The copies, each 1/in_ of the weight, shrunk, and their noise."""
        part.entry.widened(narrow, out)
        self.shrink_in_place(out, part)
        add_noise(out, part.name, part.plan, as_noise(self.noise), part.seed, paired=self.paired)

    def shrink_in_place(self, out: Tensor, part: Part) -> None:
        factor = self.shrink_of(part.name, part.plan)
        if factor != 1:
            out.mul_(factor)

    def shrink_of(self, name: str, plan: Plan) -> float:
        """The factor of one parameter or buffer: 1 for what starts as a constant, and for biases beside norms."""
        if self.shrink == 1 or name not in plan.parameters or _is_gain(name, plan):
            return 1.0
        is_matrix = len(plan.parameters[name].narrow) > 1
        return self.shrink if is_matrix or not _has_norms(plan) else 1.0

    def buffer(self, out: Tensor, narrow: Tensor, part: Part) -> None:
        """The copies; of one that is summed over its inputs, as a fixed projection is, each 1/in_ of it."""
        part.entry.widened(narrow, out, is_buffer=True)

    def state(self, out: Tensor, narrow: Tensor, part: StatePart) -> None:
        """The copies, rescaled as the gradient is."""
        part.entry.widened(narrow, out, factor=part.factor(part.entry), axes=part.axes)


def _is_gain(name: str, plan: Plan) -> bool:
    """Whether a parameter is a gain: it belongs to a norm, or starts at a constant that is not 0."""
    if name in plan.norms:
        return True
    law = plan.initial.get(name)
    if law is None or law.means is None:
        return False
    return any(law.means) and not any(law.spreads)


def _has_norms(plan: Plan) -> bool:
    """Whether the model divides by norms; then the size of what comes before them does not matter."""
    return any(_is_gain(name, plan) for name in plan.parameters)


def is_replica(operator: Operator) -> bool:
    """Whether the wide model would be copies without noise; what is there for comparison alone says nothing."""
    return type(operator) is Copies and as_noise(operator.noise).is_none and operator.shrink == 1


def replica_in_words() -> str:
    fresh = as_asked("leave out grow= and noise=", "leave out --how and --noise")
    noise = as_asked("grow=mupscale.Copies(noise=1.0)", "--how copies --noise 1")
    return (
        "copies without noise stay equal forever, so the wide model stays a replica of the narrow one, at several "
        f"times its cost. For fresh units, {fresh}; for copies that differ, {noise}; for a replica on purpose, "
        f"{as_asked('exact=True', '--exact')}"
    )


class NaiveCopies(Copies):
    """Copies whose optimizer starts afresh, for comparison: what people do who copy the weights alone."""

    state = Operator.state


class Net2Net(NaiveCopies):
    """Copies of units chosen at random, with noise, and an optimizer that starts afresh.

    Refused where random copies do not keep the function: with norms over the width, or packed projections.

    >>> import torch, mupscale as mu
    >>> narrow = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)).double()
    >>> wide = torch.nn.Sequential(torch.nn.Linear(3, 12), torch.nn.Tanh(), torch.nn.Linear(12, 2)).double()
    >>> x = torch.randn(5, 3, dtype=torch.float64)
    >>> wide, _ = mu.upscale(narrow, wide, mu.plan(narrow, wide, inputs=x), grow=Net2Net())
    >>> torch.allclose(wide(x), narrow(x))
    True
    """

    def check(self, plan: Plan) -> None:
        super().check(plan)
        if self.paired:
            raise MupscaleError("Net2Net copies units different numbers of times, so their noise cannot be paired")
        normed = [name for name, entry in plan.parameters.items() if entry.fold != 1 or name in plan.norms]
        if normed:
            raise MupscaleError(
                f"Net2Net's random copies change what a norm over the width computes ('{normed[0]}'), so it cannot "
                f"widen this model without changing its function"
            )
        if any(axis.sections for entry in plan.parameters.values() for axis in entry.axes.values()):
            raise MupscaleError("Net2Net does not support packed projections")

    def parameter(self, out: Tensor, narrow: Tensor, part: Part) -> None:
        """Random copies, what reads them divided by how many there are of each, and their noise."""
        self.buffer(out, narrow, part)
        self.shrink_in_place(out, part)
        add_noise(out, part.name, part.plan, as_noise(self.noise), part.seed)

    def buffer(self, out: Tensor, narrow: Tensor, part: Part) -> None:
        for dim, axis in part.entry.axes.items():
            if axis.copies != 1:
                chosen = random_copies(narrow.shape[dim], axis, part.seed)
                if dim in part.entry.in_:
                    counts = torch.bincount(chosen).to(narrow)
                    narrow = narrow / counts.view([-1 if d == dim else 1 for d in range(narrow.dim())])
                narrow = narrow.index_select(dim, chosen)
        out.copy_(narrow)


def random_copies(n: int, axis: Axis, seed: int) -> Tensor:
    """The narrow unit of each wide one: all of them once, then some at random; whole blocks, one map for each size."""
    blocks = n // axis.block
    more = torch.randint(blocks, (blocks * (axis.copies - 1),), generator=generator(seed, "net2net", n, axis.block))
    chosen = torch.cat([torch.arange(blocks), more])
    return (chosen[:, None] * axis.block + torch.arange(axis.block)).flatten()
