"""Studies of the limit: finite networks beside it, copies that drift apart, noise × learning rate, ways to grow."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mupscale.sweep import Cell, Space, Sweep, Tried
from mupscale.system import Diverged, MupscaleError, make_folder, replace_text
from mupscale.theory.estimates import Estimate, finite, limit, warn_of_few_samples
from mupscale.theory.mlp_training import MLPSetup, Run, Stage, count_copies, mask_separated_copies, run
from mupscale.theory.program import Program
from mupscale.theory.worked_examples import Settings, example_1, example_2, never_upscaled

Tick = Callable[[], None]
"""Called whenever one network, or one seed of the limit, is done; a progress bar's advance."""

_LOST = 100  # times the untrained network's loss at which a run counts as diverged
_BINS = 60
_REACH = 3.5  # standard deviations to each side that a histogram shows


def ignore(*_: str) -> None:
    """What is called for progress and notes where nobody listens."""


@dataclass(frozen=True)
class Experiment:
    """An MLP, a batch (inputs × features, inputs × outputs), and the stages that it trains through."""

    mlp: MLPSetup
    inputs: Tensor
    targets: Tensor
    stages: Sequence[Stage]

    @property
    def times(self) -> int:
        """k: how many copies of a unit there are in the end."""
        return count_copies(self.stages)

    @property
    def wider(self) -> float:
        """How many times wider the network is in the end."""
        return math.prod(stage.times for stage in self.stages)

    def __call__(self, program: Program) -> Run:
        """Run it, on either backend."""
        return run(program, self.mlp, self.inputs, self.targets, self.stages)


def is_lost(losses: Tensor) -> bool:
    """Whether a run, seeds × times, ends far above the untrained network's loss: few steps do not reach infinity."""
    return bool(losses[:, -1].max() > _LOST * losses[:, 0].max())


def gaussian_batch(inputs: int = 4, features: int = 3, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A synthetic batch: random directions ξ with |ξ| = 1, so that h¹ has variance σ̄², and targets N(0, 1).

    >>> x, y = gaussian_batch(inputs=4, features=8)
    >>> x.shape, y.shape
    (torch.Size([4, 8]), torch.Size([4, 1]))
    """
    if inputs < 1 or features < 1:
        raise MupscaleError(f"a batch needs at least one input and one feature, not {inputs} and {features}")
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(inputs, features + 1, generator=generator, dtype=torch.float64)
    return torch.nn.functional.normalize(drawn[:, :-1], dim=1), drawn[:, -1:]


# ---------------------------------------------------------------------------------------- finite and infinite


@dataclass(frozen=True)
class Measurements:
    """Networks of one width n (k·n in the end), or the limit, where width is None.

    outputs: times × inputs × outputs; losses: times; same and other: ⟨h|h⟩ᵢᵢ and ⟨h|h⟩ᵢⱼ in the last hidden layer, mean
    over inputs, by time, where i and j are copies of a unit that the first upscaling separates. density: of its
    preactivations at the end, first input.
    """

    width: int | None
    outputs: Estimate
    losses: Estimate
    same: Estimate
    other: Estimate
    density: Tensor

    @property
    def correlation(self) -> Tensor:
        """Of two copies of a unit that the first upscaling separates, by time: 1 until noise tells them apart."""
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
    def from_json(cls, values: Mapping[str, Any]) -> Measurements:
        """What to_json gave."""
        estimates = {name: Estimate(_tensor(values[name]), values["note"]) for name in _ESTIMATES}
        return cls(width=values["width"], density=_tensor(values["density"]), **estimates)


_ESTIMATES = ("outputs", "losses", "same", "other")


@dataclass(frozen=True)
class LimitComparison:
    """Finite networks beside their limit. upscaled: times of upscalings; edges: of the bins of the densities.

    times: k, the copies of a unit; wider: how many times wider the networks become, which fresh units make more.
    """

    times: int
    upscaled: tuple[int, ...]
    limit: Measurements
    finite: tuple[Measurements, ...]
    edges: Tensor
    wider: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "wider", self.wider or self.times)

    @property
    def widths(self) -> list[int]:
        """n of the finite networks."""
        return [networks.width for networks in self.finite if networks.width is not None]

    @property
    def errors(self) -> list[float]:
        """How far a network of each width is from the limit: root mean square over draws, times and outputs."""
        limit = self.limit.outputs.mean
        return [float((networks.outputs.values - limit).square().mean().sqrt()) for networks in self.finite]

    @property
    def gaps(self) -> list[tuple[float, float]]:
        """How far the mean over draws is from the limit, and the standard error of that; root mean squares."""
        limit, gaps = self.limit.outputs, []
        for networks in self.finite:
            distance = (networks.outputs.mean - limit.mean).square().mean().sqrt()
            error = (networks.outputs.standard_error.square() + limit.standard_error.square()).mean().sqrt()
            gaps.append((float(distance), float(error)))
        return gaps

    @property
    def slope(self) -> float | None:
        """Of the errors against n on log axes, fitted; −1/2 by the Master theorem. None without two errors above 0."""
        return fit_slope(self.widths, self.errors) if len(self.finite) > 1 and min(self.errors) > 0 else None

    @property
    def slope_error(self) -> float | None:
        """Its standard error, by how much networks of one width differ in their distance from the limit."""
        if self.slope is None:
            return None
        limit, variances = self.limit.outputs.mean, []
        for networks in self.finite:
            squares = (networks.outputs.values - limit).square().flatten(1).mean(1)
            variances.append(squares.var() / len(squares) / (2 * squares.mean()).square())  # of the error's logarithm
        x = _tensor(self.widths).log()
        off = (x - x.mean()) / (x - x.mean()).square().sum()
        return float((off.square() * torch.stack(variances)).sum().sqrt())

    def to_json(self) -> dict[str, Any]:
        """Plain values, from which from_json makes the same; errors and slope are beside them for the reader."""
        return {
            "times": self.times,
            "wider": self.wider,
            "upscaled": list(self.upscaled),
            "errors": self.errors,
            "slope": self.slope,
            "slope_error": self.slope_error,
            "limit": self.limit.to_json(),
            "finite": [networks.to_json() for networks in self.finite],
            "edges": self.edges.tolist(),
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> LimitComparison:
        """What to_json gave, or read back from a file."""
        return cls(
            times=values["times"],
            upscaled=tuple(values["upscaled"]),
            limit=Measurements.from_json(values["limit"]),
            finite=tuple(Measurements.from_json(networks) for networks in values["finite"]),
            edges=_tensor(values["edges"]),
            wider=values["wider"],
        )


def fit_slope(widths: Sequence[float], errors: Sequence[float]) -> float:
    """The power of n that fits errors best, by least squares in logarithms."""
    x, y = (torch.tensor(values, dtype=torch.float64).log() for values in (widths, errors))
    return float(((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum())


def compare_with_limit(
    experiment: Experiment,
    widths: Sequence[int],
    *,
    samples: int = 20_000,
    seeds: int = 4,
    networks: int = 8,
    device: str | None = None,
    dense: bool = True,
    tick: Tick = ignore,
    note: Callable[[str], None] = warn_of_few_samples,
) -> LimitComparison:
    """Run an experiment in the limit, with `seeds` of `samples`, and on `networks` real ones of each width.

    dense=False never forms their matrices (as in `Finite`): for networks that are too wide for memory. note: as in
    `limit`.
    """
    if len(set(widths)) != len(widths) or any(n < 1 for n in widths):
        raise MupscaleError(f"widths are distinct numbers of units, 1 or more, not {', '.join(map(str, widths))}")
    runs: list[Run] = []

    def program(backend: Program) -> Tensor:
        result = experiment(backend)
        runs.append(_reduce_to_cpu(result))
        tick()
        return result.outputs

    k, dtype = experiment.times, torch.float32 if dense else torch.float64
    outputs = limit(program, k=k, samples=samples, seeds=seeds, device=device, note=note)
    edges, separated = _edges(runs), mask_separated_copies(experiment.stages)
    infinite, upscaled = _measure(None, outputs, runs, separated, edges), runs[0].upscaled
    measured = []
    for n in sorted(widths):
        runs.clear()
        outputs = finite(program, n, k=k, seeds=networks, device=device, dtype=dtype, dense=dense)
        measured.append(_measure(n, outputs, runs, separated, edges))
    return LimitComparison(k, upscaled, infinite, tuple(measured), edges, experiment.wider)


def _reduce_to_cpu(result: Run) -> Run:
    """A run on the CPU, with the preactivations of the first input alone."""
    names = ("outputs", "losses", "kernels", "shares")
    tensors = {name: getattr(result, name).detach().cpu().double() for name in names}
    return Run(**tensors, hidden=result.hidden[0].detach().cpu().double(), upscaled=result.upscaled)


def _edges(runs: Sequence[Run]) -> Tensor:
    reach = max(float(one.hidden.std()) for one in runs) * _REACH
    return torch.linspace(-reach, reach, _BINS + 1, dtype=torch.float64)


def _measure(
    width: int | None, outputs: Estimate, runs: Sequence[Run], separated: Tensor, edges: Tensor
) -> Measurements:
    """What the runs of one width, or of the limit, have in common."""
    kernels = torch.stack([one.kernels for one in runs]).mean(2)  # seeds × times × k × k
    same = kernels.diagonal(dim1=-2, dim2=-1).mean(-1)
    hidden = torch.cat([one.hidden for one in runs])
    shares = torch.cat([one.shares[:, None].expand_as(one.hidden) for one in runs]) / (len(runs) * hidden.shape[1])
    counts = torch.histogram(hidden.flatten(), edges, weight=shares.flatten()).hist
    return Measurements(
        width=width,
        outputs=outputs,
        losses=Estimate(torch.stack([one.losses for one in runs])),
        same=Estimate(same),
        other=Estimate(kernels[..., separated].mean(-1) if separated.any() else same),
        density=counts / (edges[1] - edges[0]),
    )


# ---------------------------------------------------------------------------------------- worked examples


@dataclass(frozen=True)
class WorkedExample:
    """A worked example of the paper: its closed form, also if never upscaled, and finite networks beside the limit."""

    number: int
    closed: list[float]
    never: list[float]
    comparison: LimitComparison

    @property
    def difference(self) -> float:
        """How far the limit backend is from the closed form."""
        return float(
            (self.comparison.limit.outputs.mean.flatten() - torch.tensor(self.closed, dtype=torch.float64)).abs().max()
        )

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "closed_form": self.closed,
            "never_upscaled": self.never,
            "difference": self.difference,
            **self.comparison.to_json(),
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
    tick: Tick = ignore,
) -> WorkedExample:
    """Example 1 or 2 with the loss (y − target)²/2: by its recursion, in the limit, and on finite networks."""
    letters = {1: "CBA", 2: "DCBA"}[number]  # from the input to the readout
    settings = replace(settings, slope=lambda y: y - target)
    noise = [math.sqrt(settings.variance(letter)) for letter in letters]
    trained = [False, *[True] * (len(letters) - 2), False]
    stages = [Stage(settings.before, settings.lr), Stage(settings.after, settings.upscaled_lr, settings.times, noise)]
    x, y = (torch.tensor([[value]], dtype=torch.float64) for value in (settings.x, target))
    experiment = Experiment(MLPSetup(len(letters), "linear", settings.sigma, trained), x, y, stages)
    recursion = example_1 if number == 1 else example_2
    comparison = compare_with_limit(
        experiment, widths, samples=samples, seeds=seeds, networks=networks, dense=dense, tick=tick
    )
    return WorkedExample(number, recursion(settings), recursion(never_upscaled(settings)), comparison)


# ---------------------------------------------------------------------------------------- files


def save_results(path: Path, values: Mapping[str, Any]) -> Path:
    """Write results as JSON, all or nothing; the path."""
    try:
        make_folder(path.parent)
        replace_text(path, json.dumps(values, ensure_ascii=False) + "\n")
    except OSError as error:
        raise MupscaleError(f"{path} cannot be written: {error.strerror}; choose another folder") from None
    return path


def _tensor(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def sweep_limit(
    experiment: Experiment,
    space: Space,
    *,
    times: int = 2,
    after: int = 5,
    samples: int = 5000,
    seeds: int = 2,
    device: str | None = None,
    tick: Tick = ignore,
    note: Callable[[str], None] = warn_of_few_samples,
) -> Sweep:
    """Noise × learning rate at infinite width: the experiment's stages, an upscaling by `times`, `after` steps more.

    The loss is that of the batch at the end. Every cell has the same seeds, so that cells differ by more than chance. A
    trial that ends far above the loss of the untrained network counts as diverged: few steps do not reach infinity.
    note: as in `limit`, once for the sweep.

    >>> from mupscale.theory import Experiment, MLPSetup, Stage, gaussian_batch
    >>> before = Experiment(MLPSetup(3, "linear"), *gaussian_batch(1), [Stage(1, 0.5)])
    >>> sweep = sweep_limit(before, Space(lrs=(0.1, 1e9)), after=1, samples=200)
    >>> [(trial.lr, trial.status) for trial in sweep.trials], sweep.width
    ([(0.1, 'finished'), (1000000000.0, 'diverged')], '2n')
    """
    if times < 2 or after < 1:
        raise MupscaleError(
            f"a sweep upscales by 2 times or more and trains for a step or more, not {times} and {after}"
        )
    start = time.monotonic()
    trials, notes = list[Tried](), list[str]()
    for cell in space.cells:
        trial, warning = _run_trial(experiment, cell, times, after, samples, seeds, device)
        trials.append(trial)
        notes += [warning] if warning else []
        tick()
    if notes:
        note(notes[-1])  # the noisiest cell's, which has the most latents
    return Sweep(
        name=f"limit-times-{times}",
        trials=trials,
        width=f"{times * experiment.times}n",
        start="n" if experiment.times == 1 else f"{experiment.times}n",
        space=space,
        measure="train",
        seconds=time.monotonic() - start,
    )


def _run_trial(
    experiment: Experiment, cell: Cell, times: int, after: int, samples: int, seeds: int, device: str | None
) -> tuple[Tried, str]:
    """Run one cell; the trial, and a warning or an empty text."""
    copies = times if cell.noise else 1  # 'Equivalence at zero noise': then one copy of each unit says it all
    last = Stage(after, cell.lr, copies, cell.noise)
    upscaled = Experiment(experiment.mlp, experiment.inputs, experiment.targets, [*experiment.stages, last])
    before = sum(stage.steps for stage in experiment.stages)
    try:
        estimate = limit(
            lambda program: upscaled(program).losses,
            k=upscaled.times,
            samples=samples,
            seeds=seeds,
            device=device,
            note=ignore,
        )
    except Diverged:
        return Tried(*cell, [None] * seeds), ""
    losses = estimate.values
    curve = list(enumerate(losses[:, before:].mean(0).tolist()))
    ends = losses[:, -1].tolist()
    if is_lost(losses):
        return Tried(*cell, [None] * seeds, curve=curve, steps=after), estimate.note
    return Tried(*cell, ends, curve=curve, steps=after), estimate.note


@dataclass(frozen=True)
class WayToGrow:
    """A growth and the steps after it. losses: from the growth on, of the limit and of networks; None: diverged."""

    stage: Stage
    limit: Estimate | None
    networks: Estimate | None

    @property
    def name(self) -> str:
        """How it grows, in words."""
        if self.stage.how == "fresh":
            return f"fresh units, a = {self.stage.outgoing:g}"
        return f"copies, noise {self.stage.noise:g}" if self.stage.noise else "copies, no noise"

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        both = {"limit": self.limit, "networks": self.networks}
        losses = {key: None if value is None else value.values.tolist() for key, value in both.items()}
        return {"name": self.name, "stage": asdict(self.stage), **losses}


def compare_ways_to_grow(
    experiment: Experiment,
    stages: Sequence[Stage],
    *,
    width: int | None = None,
    samples: int = 4000,
    seeds: int = 2,
    networks: int = 8,
    device: str | None = None,
    dense: bool = True,
    tick: Tick = ignore,
    note: Callable[[str], None] = warn_of_few_samples,
) -> list[WayToGrow]:
    """Let an experiment go on by each of these stages, in the limit, and on networks of a width if one is given.

    All have the same seeds, so that ways differ by more than chance. dense: as in `Finite`. note: as in `limit`, once.

    >>> from mupscale.theory import MLPSetup, gaussian_batch
    >>> base = Experiment(MLPSetup(3, "linear"), *gaussian_batch(1), [Stage(1, 0.1)])
    >>> stages = [Stage(1, 0.1, 2), Stage(1, 0.1, 2, how="fresh"), Stage(1, 1e9, 2, how="fresh")]
    >>> [(way.name, way.limit is not None) for way in compare_ways_to_grow(base, stages, samples=200)]
    [('copies, no noise', True), ('fresh units, a = 1', True), ('fresh units, a = 1', False)]
    """
    notes, ways = list[str](), list[WayToGrow]()
    for stage in stages:
        whole = Experiment(experiment.mlp, experiment.inputs, experiment.targets, [*experiment.stages, stage])
        infinite = partial(limit, k=whole.times, samples=samples, seeds=seeds, device=device, note=notes.append)
        found = [_losses_after_growth(whole, infinite), None]
        tick()
        if width is not None:
            found[1] = _losses_after_growth(
                whole, partial(finite, n=width, k=whole.times, seeds=networks, device=device, dense=dense)
            )
            tick()
        ways.append(WayToGrow(stage, *found))
    if notes:
        note(notes[-1])
    return ways


def _losses_after_growth(whole: Experiment, estimate: Callable[..., Estimate]) -> Estimate | None:
    """Losses from the last stage on; None where they diverge, or end far above those of the untrained network."""
    try:
        found = estimate(lambda program: whole(program).losses)
    except Diverged:
        return None
    if is_lost(found.values):
        return None
    return Estimate(found.values[:, sum(stage.steps for stage in whole.stages[:-1]) :], found.note)


def best_way(ways: Sequence[WayToGrow], how: str) -> WayToGrow | None:
    """The one of this kind with the lowest loss in the limit; None where all diverged, or there is none."""
    finished = [(float(way.limit.mean[-1]), i) for i, way in enumerate(ways) if way.limit and way.stage.how == how]
    return ways[min(finished)[1]] if finished else None


def list_ways(
    times: float,
    after: int,
    lr: float,
    rates: Sequence[float],
    noises: Sequence[float],
    outgoing: Sequence[float],
) -> list[Stage]:
    """All of them: copies with each noise where `times` is whole, fresh units with each amplitude; at each rate."""
    if times <= 1 or not rates or min(rates) <= 0:
        raise MupscaleError(f"growing needs more than 1 time the width and rates above 0, not {times} and {rates}")
    ways: list[dict[str, Any]] = [{"times": times, "how": "fresh", "outgoing": a} for a in outgoing]
    if times == int(times):
        ways = [*({"times": int(times), "noise": noise} for noise in noises), *ways]
    return [Stage(after, lr * rate, **way) for way in ways for rate in rates]
