"""Studies of the limit: finite networks beside it, copies that drift apart, noise × learning rate, ways to grow."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import linear_regression
from typing import Any

import torch
from torch import Tensor

from mupscale.system import Diverged, MupscaleError, make_folder, replace_text
from mupscale.theory.mlp_training import MLPSetup, Run, Stage, count_copies, mask_separated_copies, run
from mupscale.theory.program import Estimate, Program, finite, limit, warn_of_few_samples
from mupscale.theory.worked_examples import Settings, closed_form, never_upscaled

_LOST = 100  # times the untrained network's loss at which a run counts as diverged
_BINS = 60
_REACH = 3.5  # standard deviations to each side that a histogram shows


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

    def then(self, stage: Stage) -> Experiment:
        """The same with one stage more."""
        return replace(self, stages=[*self.stages, stage])

    def __call__(self, program: Program) -> Run:
        """Run it, on either backend."""
        return run(program, self.mlp, self.inputs, self.targets, self.stages)


@dataclass(frozen=True)
class Draws:
    """How much is drawn: samples and seeds of the limit, and real networks of each width.

    dense=False never forms networks' matrices (as in `Finite`): for those that are too wide for memory. tick: called
    whenever one network, or one seed of the limit, is done.

    >>> Draws(samples=1000).seeds
    2
    """

    samples: int = 4000
    seeds: int = 2
    networks: int = 8
    device: str | None = None
    dense: bool = True
    tick: Callable[[], None] = lambda: None

    def limit(self, experiment: Experiment, numbers: Callable[[Run], Tensor]) -> Estimate:
        """What these numbers of its run tend to; without a warning, since a study runs many."""
        program, k = self._ticking(experiment, numbers), experiment.times
        return limit(program, k=k, samples=self.samples, seeds=self.seeds, device=self.device, quiet=True)

    def finite(self, experiment: Experiment, n: int, numbers: Callable[[Run], Tensor]) -> Estimate:
        program, dtype = self._ticking(experiment, numbers), torch.float32 if self.dense else torch.float64
        k, device = experiment.times, self.device
        return finite(program, n, k=k, seeds=self.networks, device=device, dtype=dtype, dense=self.dense)

    def _ticking(self, experiment: Experiment, numbers: Callable[[Run], Tensor]) -> Callable[[Program], Tensor]:
        def program(backend: Program) -> Tensor:
            found = numbers(experiment(backend))
            self.tick()
            return found

        return program


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
        estimates = {name: getattr(self, name).values.tolist() for name in ("outputs", "losses", "same", "other")}
        return {"width": self.width, "note": self.outputs.note, **estimates, "density": self.density.tolist()}


@dataclass(frozen=True)
class LimitComparison:
    """Finite networks beside their limit. upscaled: times of upscalings; edges: of the bins of the densities.

    times: k, the copies of a unit; wider: how many times wider the networks become, which fresh units make more.
    """

    times: int
    wider: float
    upscaled: tuple[int, ...]
    limit: Measurements
    finite: tuple[Measurements, ...]
    edges: Tensor

    @property
    def widths(self) -> list[int]:
        return [networks.width for networks in self.finite if networks.width is not None]

    @property
    def errors(self) -> list[float]:
        """How far a network of each width is from the limit: root mean square over draws, times and outputs."""
        return [float(squares.mean().sqrt()) for squares in self._squares]

    @property
    def _squares(self) -> list[Tensor]:
        return [(networks.outputs.values - self.limit.outputs.mean).square().flatten(1) for networks in self.finite]

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
        each = [squares.mean(1) for squares in self._squares]
        variances = [m.var() / len(m) / (2 * m.mean()).square() for m in each]  # of the error's logarithm
        x = torch.tensor(self.widths, dtype=torch.float64).log()
        off = (x - x.mean()) / (x - x.mean()).square().sum()
        return float((off.square() * torch.stack(variances)).sum().sqrt())

    def to_json(self) -> dict[str, Any]:
        names = "times", "wider", "upscaled", "errors", "slope", "slope_error"
        measured = {"limit": self.limit.to_json(), "finite": [networks.to_json() for networks in self.finite]}
        return {name: getattr(self, name) for name in names} | measured | {"edges": self.edges.tolist()}


def fit_slope(widths: Sequence[float], errors: Sequence[float]) -> float:
    """The power of n that fits errors best, by least squares in logarithms."""
    return linear_regression([*map(math.log, widths)], [*map(math.log, errors)]).slope


def compare_with_limit(experiment: Experiment, widths: Sequence[int], draws: Draws) -> LimitComparison:
    """Run an experiment in the limit, and on networks of each width."""
    if len(set(widths)) != len(widths) or any(n < 1 for n in widths):
        raise MupscaleError(f"widths must be distinct numbers of units, 1 or more, not {', '.join(map(str, widths))}")
    runs = list[Run]()

    def outputs(result: Run) -> Tensor:
        tensors: dict[str, Any] = {name: value for name, value in vars(result).items() if isinstance(value, Tensor)}
        tensors["hidden"] = result.hidden[0]  # of the first input alone
        runs.append(replace(result, **{name: value.detach().cpu().double() for name, value in tensors.items()}))
        return result.outputs

    found = draws.limit(experiment, outputs)
    warn_of_few_samples(found.note)
    upscaled, separated = runs[0].upscaled, mask_separated_copies(experiment.stages)
    reach = max(float(one.hidden.std()) for one in runs) * _REACH
    edges = torch.linspace(-reach, reach, _BINS + 1, dtype=torch.float64)
    limit, networks = _measure(None, found, runs, separated, edges), list[Measurements]()
    for n in sorted(widths):
        runs.clear()
        networks.append(_measure(n, draws.finite(experiment, n, outputs), runs, separated, edges))
    return LimitComparison(experiment.times, experiment.wider, upscaled, limit, tuple(networks), edges)


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
        closed = torch.tensor(self.closed, dtype=torch.float64)
        return float((self.comparison.limit.outputs.mean.flatten() - closed).abs().max())

    def to_json(self) -> dict[str, Any]:
        own = {"closed_form": self.closed, "never_upscaled": self.never, "difference": self.difference}
        return own | self.comparison.to_json()


def worked_example(
    number: int, settings: Settings, target: float, widths: Sequence[int], draws: Draws
) -> WorkedExample:
    """Example 1 or 2 with the loss (y − target)²/2: by its recursion, in the limit, and on finite networks."""
    settings, layers = replace(settings, slope=lambda y: y - target), number + 2
    mlp = MLPSetup(layers, "linear", settings.sigma, [False, *[True] * number, False])
    x, y = (torch.tensor([[value]], dtype=torch.float64) for value in (settings.x, target))
    experiment = Experiment(mlp, x, y, settings.stages(number))
    comparison = compare_with_limit(experiment, widths, draws)
    closed, never = (closed_form(number, each) for each in (settings, never_upscaled(settings)))
    return WorkedExample(number, closed, never, comparison)


# ---------------------------------------------------------------------------------------- ways to grow


@dataclass(frozen=True)
class WayToGrow:
    """A growth and the steps after it. losses: from the growth on, of the limit and of networks; None: diverged.

    A run that ends far above the loss of the untrained network counts as diverged: few steps do not reach infinity.
    note: the limit's warning, if there is one.
    """

    stage: Stage
    limit: Estimate | None
    networks: Estimate | None = None
    note: str = ""

    @property
    def loss(self) -> float | None:
        """At the end, in the limit; None: diverged."""
        return None if self.limit is None else float(self.limit.mean[-1])

    @property
    def name(self) -> str:
        if self.stage.how == "fresh":
            return f"fresh units, a = {self.stage.outgoing:g}"
        return f"copies, noise {self.stage.noise:g}" if self.stage.noise else "copies, no noise"

    def to_json(self) -> dict[str, Any]:
        both = {"limit": self.limit, "networks": self.networks}
        losses = {key: None if value is None else value.values.tolist() for key, value in both.items()}
        return {"name": self.name, "stage": asdict(self.stage), **losses}


def compare_ways_to_grow(
    experiment: Experiment, stages: Sequence[Stage], draws: Draws, width: int | None = None
) -> list[WayToGrow]:
    """Let an experiment go on by each of these stages, in the limit, and on networks of a width if one is given.

    All have the same seeds, so that ways differ by more than chance.

    >>> from mupscale.theory import MLPSetup, gaussian_batch
    >>> base = Experiment(MLPSetup(3, "linear"), *gaussian_batch(1), [Stage(1, 0.1)])
    >>> stages = [Stage(1, 0.1, 2), Stage(1, 0.1, 2, how="fresh"), Stage(1, 1e9, 2, how="fresh")]
    >>> [(way.name, way.limit is not None) for way in compare_ways_to_grow(base, stages, Draws(200))]
    [('copies, no noise', True), ('fresh units, a = 1', True), ('fresh units, a = 1', False)]
    """
    ways, before = list[WayToGrow](), sum(stage.steps for stage in experiment.stages)
    for stage in stages:
        whole = experiment.then(stage)
        is_silent = stage.how == "copies" and not stage.has_noise  # 'Equivalence at zero noise': one copy says it all
        limit = _estimate(draws.limit, experiment.then(replace(stage, times=1)) if is_silent else whole)
        networks = None if width is None else _estimate(partial(draws.finite, n=width), whole)
        note = "" if limit is None else limit.note
        ways.append(WayToGrow(stage, _from_growth(limit, before), _from_growth(networks, before), note))
    warn_of_few_samples(note_of(ways))
    return ways


def _estimate(estimate: Callable[..., Estimate], whole: Experiment) -> Estimate | None:
    try:
        return estimate(whole, numbers=lambda result: result.losses)
    except Diverged:
        return None


def _from_growth(found: Estimate | None, before: int) -> Estimate | None:
    is_lost = found is None or found.values[:, -1].max() > _LOST * found.values[:, 0].max()
    return None if is_lost or found is None else Estimate(found.values[:, before:])


def note_of(ways: Sequence[WayToGrow]) -> str:
    """The last one's warning, which in a sweep has the most noise and the most latents."""
    return next((way.note for way in reversed(ways) if way.note), "")


def sweep_limit(
    experiment: Experiment,
    lrs: Sequence[float],
    noises: Sequence[float] = (),
    *,
    times: int = 2,
    after: int = 5,
    draws: Draws | None = None,
) -> list[WayToGrow]:
    """Noise × learning rate at infinite width: the experiment's stages, an upscaling by `times`, `after` steps more.

    Zero noise is always tried, the loss is that of the batch, and cells go noise by noise.

    >>> from mupscale.theory import MLPSetup, gaussian_batch
    >>> before = Experiment(MLPSetup(3, "linear"), *gaussian_batch(1), [Stage(1, 0.5)])
    >>> cells = sweep_limit(before, lrs=(0.1, 1e9), after=1, draws=Draws(200))
    >>> [(cell.stage.lr, cell.stage.noise, cell.loss is not None) for cell in cells]
    [(0.1, 0.0, True), (1000000000.0, 0.0, False)]
    """
    stages = [Stage(after, lr, times, noise) for noise in sorted({0.0, *noises}) for lr in sorted({*lrs})]
    return compare_ways_to_grow(experiment, stages, draws or Draws(5000))


def best_way(ways: Sequence[WayToGrow], how: str = "copies") -> WayToGrow | None:
    """The one of this kind with the lowest loss in the limit; None where all diverged, or there is none.

    >>> ways = [WayToGrow(Stage(1, lr), Estimate(torch.tensor([[1.0, lr]]))) for lr in (0.3, 0.1, 0.2)]
    >>> best_way(ways).loss == ways[1].loss
    True
    """
    finished = [way for way in ways if way.loss is not None and way.stage.how == how]
    return min(finished, key=lambda way: way.loss or 0.0, default=None)


def list_ways(
    times: float, after: int, lr: float, rates: Sequence[float], noises: Sequence[float], outgoing: Sequence[float]
) -> list[Stage]:
    """All of them: copies with each noise where `times` is whole, fresh units with each amplitude; at each rate."""
    if times <= 1 or not rates or min(rates) <= 0:
        raise MupscaleError(f"growing needs more than 1 time the width and rates above 0, not {times} and {rates}")
    ways: list[dict[str, Any]] = [{"times": times, "how": "fresh", "outgoing": a} for a in outgoing]
    if times == int(times):
        ways = [*({"times": int(times), "noise": noise} for noise in noises), *ways]
    return [Stage(after, lr * rate, **way) for way in ways for rate in rates]


def save_results(path: Path, values: Mapping[str, Any]) -> Path:
    """Write results as JSON, all or nothing; the path."""
    try:
        make_folder(path.parent)
        replace_text(path, json.dumps(values, ensure_ascii=False) + "\n")
    except OSError as error:
        raise MupscaleError(f"{path} cannot be written: {error.strerror}; choose another folder") from None
    return path
