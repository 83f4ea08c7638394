"""Ways to grow side by side: copies with noise, fresh units with their amplitude, each at several rates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from mupscale.system import Diverged, MupscaleError
from mupscale.theory.estimates import Estimate, finite, limit, warn_of_few_samples
from mupscale.theory.limit_study import Experiment, Tick, ignore, is_lost
from mupscale.theory.mlp_training import Stage


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
    """The one of this kind with the lowest loss in the limit; None where all diverged, or there is none.

    >>> best_way([WayToGrow(Stage(1, 0.1, 2), None, None)], "copies") is None
    True
    """
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
    """All of them: copies with each noise where `times` is whole, fresh units with each amplitude; at each rate.

    >>> [(stage.how, stage.lr) for stage in list_ways(1.5, 3, 0.5, [0.5, 1], [0.5], [1.0])]
    [('fresh', 0.25), ('fresh', 0.5)]
    """
    if times <= 1 or not rates or min(rates) <= 0:
        raise MupscaleError(f"growing needs more than 1 time the width and rates above 0, not {times} and {rates}")
    ways: list[dict[str, Any]] = [{"times": times, "how": "fresh", "outgoing": a} for a in outgoing]
    if times == int(times):
        ways = [*({"times": int(times), "noise": noise} for noise in noises), *ways]
    return [Stage(after, lr * rate, **way) for way in ways for rate in rates]
