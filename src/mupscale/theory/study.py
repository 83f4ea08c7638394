"""What a theorist looks at: networks that meet their limit, copies that drift apart, sweeps at infinite width."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mupscale.errors import MupscaleError
from mupscale.files import replace_text
from mupscale.sweep.space import Cell, Space, Sweep, Trial
from mupscale.theory.estimate import Estimate, finite, limit
from mupscale.theory.examples import Settings, coefficients, example_1, example_2, matched_learning_rate
from mupscale.theory.network import MLP, Run, Stage, run
from mupscale.theory.program import Diverged, Program

Tick = Callable[[], None]
"""Called whenever one network, or one seed of the limit, is done."""

_BINS = 60
_LOST = 100  # times the untrained network's loss at which a trial counts as diverged
_REACH = 3.5  # standard deviations to each side that a histogram shows


def _nothing(*_: str) -> None:
    pass


@dataclass(frozen=True)
class Experiment:
    """An MLP, a batch (inputs × features, inputs × outputs), and the stages that it trains through."""

    mlp: MLP
    inputs: Tensor
    targets: Tensor
    stages: Sequence[Stage]

    @property
    def times(self) -> int:
        """k: how many times wider the network is in the end."""
        return self.mlp.copies(self.stages)

    def __call__(self, program: Program) -> Run:
        """Run it, on either backend."""
        return run(program, self.mlp, self.inputs, self.targets, self.stages)


def gaussian_batch(inputs: int = 4, features: int = 3, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A synthetic batch: random directions ξ with |ξ| = 1, so that h¹ has variance σ̄², and targets N(0, 1)."""
    if inputs < 1 or features < 1:
        raise MupscaleError(f"a batch needs at least one input and one feature, not {inputs} and {features}")
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(inputs, features + 1, generator=generator, dtype=torch.float64)
    return torch.nn.functional.normalize(drawn[:, :-1], dim=1), drawn[:, -1:]


# ---------------------------------------------------------------------------------------- finite and infinite


@dataclass(frozen=True)
class Measured:
    """Networks of one width n (k·n in the end), or the limit, where width is None.

    outputs: times × inputs × outputs; losses: times; same and other: ⟨h|h⟩ᵢᵢ and ⟨h|h⟩ᵢⱼ of the copies i ≠ j of a unit
    in the last hidden layer, mean over inputs, by time. density: of its preactivations at the end, first input.
    """

    width: int | None
    outputs: Estimate
    losses: Estimate
    same: Estimate
    other: Estimate
    density: Tensor

    @property
    def correlation(self) -> Tensor:
        """Of two copies of a unit, by time: 1 until an upscaling with noise tells them apart."""
        return (self.other.mean / self.same.mean).nan_to_num(1.0)  # 0/0: equal as well

    def to_json(self) -> dict[str, Any]:
        """Every seed's numbers."""
        return {
            "width": self.width,
            "note": self.outputs.note,
            **{name: getattr(self, name).values.tolist() for name in _ESTIMATES},
            "density": self.density.tolist(),
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Measured:
        """What to_json gave."""
        found = {name: Estimate(_tensor(values[name]), values["note"]) for name in _ESTIMATES}
        return cls(width=values["width"], density=_tensor(values["density"]), **found)


_ESTIMATES = ("outputs", "losses", "same", "other")


@dataclass(frozen=True)
class Meeting:
    """Finite networks beside their limit. upscaled: times of upscalings; edges: of the bins of the densities."""

    times: int
    upscaled: tuple[int, ...]
    limit: Measured
    finite: tuple[Measured, ...]
    edges: Tensor

    @property
    def widths(self) -> list[int]:
        """n of the finite networks."""
        return [found.width for found in self.finite if found.width is not None]

    @property
    def errors(self) -> list[float]:
        """How far a network of each width is from the limit: root mean square over draws, times and outputs."""
        limit = self.limit.outputs.mean
        return [float((found.outputs.values - limit).square().mean().sqrt()) for found in self.finite]

    @property
    def gaps(self) -> list[tuple[float, float]]:
        """How far the mean over draws is from the limit, and the standard error of that; root mean squares."""
        limit, found = self.limit.outputs, []
        for each in self.finite:
            distance = (each.outputs.mean - limit.mean).square().mean().sqrt()
            error = (each.outputs.standard_error.square() + limit.standard_error.square()).mean().sqrt()
            found.append((float(distance), float(error)))
        return found

    @property
    def slope(self) -> float | None:
        """Of the errors against n on log axes, fitted; −1/2 by the Master theorem. None without two errors above 0."""
        return fitted_slope(self.widths, self.errors) if len(self.finite) > 1 and min(self.errors) > 0 else None

    def to_json(self) -> dict[str, Any]:
        """Plain values, from which from_json makes the same; what was found from them is beside them to be read."""
        return {
            "times": self.times,
            "upscaled": list(self.upscaled),
            "errors": self.errors,
            "slope": self.slope,
            "limit": self.limit.to_json(),
            "finite": [found.to_json() for found in self.finite],
            "edges": self.edges.tolist(),
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Meeting:
        """What to_json gave, or read back from a file."""
        return cls(
            times=values["times"],
            upscaled=tuple(values["upscaled"]),
            limit=Measured.from_json(values["limit"]),
            finite=tuple(Measured.from_json(found) for found in values["finite"]),
            edges=_tensor(values["edges"]),
        )


def fitted_slope(widths: Sequence[float], errors: Sequence[float]) -> float:
    """The power of n that fits best, by least squares in logarithms."""
    x, y = (torch.tensor(values, dtype=torch.float64).log() for values in (widths, errors))
    return float(((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum())


def meeting(
    experiment: Experiment,
    widths: Sequence[int],
    *,
    samples: int = 20_000,
    seeds: int = 4,
    networks: int = 8,
    device: str | None = None,
    dense: bool = True,
    tick: Tick = _nothing,
) -> Meeting:
    """Run an experiment in the limit, with `seeds` of `samples`, and on `networks` real ones of each width.

    dense=False never forms their matrices (as in `Finite`): for networks that are too wide for memory.
    """
    if len(set(widths)) != len(widths) or any(n < 1 for n in widths):
        raise MupscaleError(f"widths are different numbers of units, 1 or more, not {', '.join(map(str, widths))}")
    runs: list[Run] = []

    def program(backend: Program) -> Tensor:
        found = experiment(backend)
        runs.append(_light(found))
        tick()
        return found.outputs

    k, dtype = experiment.times, torch.float32 if dense else torch.float64
    outputs = limit(program, k=k, samples=samples, seeds=seeds, device=device)
    edges = _edges(runs)
    infinite, upscaled = _measured(None, outputs, runs, edges), runs[0].upscaled
    met = []
    for n in sorted(widths):
        runs.clear()
        drawn = finite(program, n, k=k, seeds=networks, device=device, dtype=dtype, dense=dense)
        met.append(_measured(n, drawn, runs, edges))
    return Meeting(k, upscaled, infinite, tuple(met), edges)


def _light(found: Run) -> Run:
    """A run on the CPU, with the preactivations of the first input alone."""
    tensors = {name: getattr(found, name).detach().cpu().double() for name in ("outputs", "losses", "kernels")}
    return Run(**tensors, hidden=found.hidden[0].detach().cpu().double(), upscaled=found.upscaled)


def _edges(runs: Sequence[Run]) -> Tensor:
    reach = max(float(found.hidden.std()) for found in runs) * _REACH
    return torch.linspace(-reach, reach, _BINS + 1, dtype=torch.float64)


def _measured(width: int | None, outputs: Estimate, runs: Sequence[Run], edges: Tensor) -> Measured:
    kernels = torch.stack([found.kernels for found in runs]).mean(2)  # seeds × times × k × k
    k = kernels.shape[-1]
    diagonal = kernels.diagonal(dim1=-2, dim2=-1).sum(-1)
    others = (kernels.sum((-2, -1)) - diagonal) / (k * (k - 1)) if k > 1 else diagonal
    hidden = torch.cat([found.hidden.flatten() for found in runs])
    counts = torch.histogram(hidden, edges).hist
    return Measured(
        width=width,
        outputs=outputs,
        losses=Estimate(torch.stack([found.losses for found in runs])),
        same=Estimate(diagonal / k),
        other=Estimate(others),
        density=counts / (len(hidden) * (edges[1] - edges[0])),
    )


# ---------------------------------------------------------------------------------------- worked examples


@dataclass(frozen=True)
class Worked:
    """A worked example of the paper: its closed form, also if never upscaled, and finite networks beside the limit."""

    number: int
    closed: list[float]
    never: list[float]
    meeting: Meeting

    @property
    def difference(self) -> float:
        """How far the limit backend is from the closed form."""
        return float(
            (self.meeting.limit.outputs.mean.flatten() - torch.tensor(self.closed, dtype=torch.float64)).abs().max()
        )

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "closed_form": self.closed,
            "never_upscaled": self.never,
            "difference": self.difference,
            **self.meeting.to_json(),
        }


def worked_example(
    number: int,
    settings: Settings,
    target: float,
    widths: Sequence[int],
    *,
    samples: int = 1000,
    seeds: int = 2,
    networks: int = 16,
    dense: bool = True,
    tick: Tick = _nothing,
) -> Worked:
    """Example 1 or 2 with the loss (y − target)²/2: by its recursion, in the limit, and on finite networks."""
    letters = {1: "CBA", 2: "DCBA"}[number]  # from the input to the readout
    settings = replace(settings, slope=lambda y: y - target)
    noise = [math.sqrt(settings.variance(letter)) for letter in letters]
    trained = [False, *[True] * (len(letters) - 2), False]
    stages = [Stage(settings.before, settings.lr), Stage(settings.after, settings.upscaled_lr, settings.times, noise)]
    x, y = (torch.tensor([[value]], dtype=torch.float64) for value in (settings.x, target))
    experiment = Experiment(MLP(len(letters), "linear", settings.sigma, trained), x, y, stages)
    recursion = example_1 if number == 1 else example_2
    met = meeting(experiment, widths, samples=samples, seeds=seeds, networks=networks, dense=dense, tick=tick)
    return Worked(number, recursion(settings), recursion(_never(settings)), met)


class Finding(NamedTuple):
    """A choice of hyperparameters, and how far what it should leave unchanged moves from the run never upscaled."""

    choice: str
    what: str
    change: float


def conditions(settings: Settings) -> list[Finding]:
    """When does noise leave the limit unchanged? The paper's conclusions, and the conditions that hold.

    The noise of A and D is the settings'; the loss of example 2 is linear, so that coefficients depend on nothing else.
    """
    a, c, d = (math.sqrt(settings.variance(letter)) for letter in "ACD")
    sigma, lr = settings.sigma, settings.lr
    first = replace(settings, noise=(("A", a), ("B", 1.0), ("C", c)))
    matched = replace(first, upscaled_lr=matched_learning_rate(lr, sigma, c, a))
    linear = replace(settings, slope=lambda y: -1.0)
    squares = (sigma**2 + a**2) * (sigma**2 + d**2)
    printed = replace(linear, upscaled_lr=lr * sigma**2 / math.sqrt(squares), noise=(("A", a), ("D", d)))
    both = replace(linear, upscaled_lr=lr * sigma**2 / (sigma**2 + a**2), noise=(("A", a), ("D", a)))
    tenfold = replace(both, times=10 * both.times)
    pair = f"σ_A = σ_D = {a:g}, γ↑(σ̄² + σ_A²) = γσ̄²"
    return [
        Finding("example 1, γ↑ = γ", "output", _change(replace(first, upscaled_lr=lr), example_1)),
        Finding("example 1, γ↑ = matched_learning_rate", "output", _change(matched, example_1)),
        Finding(f"example 2, printed condition, σ_A = {a:g}, σ_D = {d:g}", "M + M′", _change(printed, _sums_of_m)),
        Finding(f"example 2, printed condition, σ_A = {a:g}, σ_D = {d:g}", "N + N′", _change(printed, _sums_of_n)),
        Finding(f"example 2, {pair}", "M + M′", _change(both, _sums_of_m)),
        Finding(f"example 2, {pair}", "N + N′", _change(both, _sums_of_n)),
        Finding(f"example 2, {pair}, σ_B = σ_C = 0, k = {both.times}", "output", _change(both, example_2)),
        Finding(f"example 2, {pair}, σ_B = σ_C = 0, k = {tenfold.times}", "output", _change(tenfold, example_2)),
    ]


def _change(settings: Settings, values: Callable[[Settings], list[float]]) -> float:
    return max(abs(a - b) for a, b in zip(values(settings), values(_never(settings)), strict=True))


def _never(settings: Settings) -> Settings:
    return replace(settings, before=settings.before + settings.after, after=0, noise=())


def _sums_of_m(settings: Settings) -> list[float]:
    return [found.m + found.m_new for found in coefficients(settings)]


def _sums_of_n(settings: Settings) -> list[float]:
    return [found.n + found.n_new for found in coefficients(settings)]


# ---------------------------------------------------------------------------------------- sweeps


def sweep(
    experiment: Experiment,
    space: Space,
    *,
    times: int = 2,
    after: int = 5,
    samples: int = 5000,
    seeds: int = 2,
    device: str | None = None,
    tick: Tick = _nothing,
    note: Callable[[str], None] = _nothing,
) -> Sweep:
    """Noise × learning rate at infinite width: the experiment's stages, an upscaling by `times`, `after` steps more.

    The loss is that of the batch at the end. Every cell has the same seeds, so that cells differ by more than chance. A
    trial that ends far above the loss of the untrained network counts as diverged: few steps do not reach infinity.
    note: called with a sentence where there are too many latents for the samples.
    """
    if times < 2 or after < 1:
        raise MupscaleError(
            f"a sweep upscales by 2 times or more and trains for a step or more, not {times} and {after}"
        )
    start = time.monotonic()
    trials, notes = list[Trial](), list[str]()
    for cell in space.cells:
        trial, said = _trial(experiment, cell, times, after, samples, seeds, device)
        trials.append(trial)
        notes += [said] if said else []
        tick()
    if notes:
        note(notes[-1])  # the noisiest cell's, which has the most latents
    return Sweep(
        name=f"limit-times-{times}",
        width=f"{times * experiment.times}n",
        start="n" if experiment.times == 1 else f"{experiment.times}n",
        space=space,
        trials=trials,
        seeds=seeds,
        seconds=time.monotonic() - start,
    )


def _trial(
    experiment: Experiment, cell: Cell, times: int, after: int, samples: int, seeds: int, device: str | None
) -> tuple[Trial, str]:
    """A cell, and what to beware of."""
    copies = times if cell.noise else 1  # 'Equivalence at zero noise': then one copy of each unit says it all
    last = Stage(after, cell.lr, copies, cell.noise)
    whole = Experiment(experiment.mlp, experiment.inputs, experiment.targets, [*experiment.stages, last])
    before = sum(stage.steps for stage in experiment.stages)
    try:
        found = limit(lambda program: whole(program).losses, k=whole.times, samples=samples, seeds=seeds, device=device)
    except Diverged:
        return Trial(cell.lr, cell.noise, "diverged", None), ""
    losses = found.values
    curve = list(enumerate(losses[:, before:].mean(0).tolist()))
    ends = losses[:, -1].tolist()
    if max(ends) > _LOST * float(losses[:, 0].max()):
        return Trial(cell.lr, cell.noise, "diverged", None, curve=curve, steps=after), found.note
    return Trial(cell.lr, cell.noise, "finished", math.fsum(ends) / seeds, ends, curve, after), found.note


# ---------------------------------------------------------------------------------------- files


def save(path: Path, values: Mapping[str, Any]) -> Path:
    """Results as JSON."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, json.dumps(values, ensure_ascii=False) + "\n")
    except OSError as error:
        raise MupscaleError(f"{path} cannot be written: {error.strerror}; choose another folder") from None
    return path


def _tensor(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)
