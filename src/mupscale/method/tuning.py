"""Step 0 of Meta-algorithm 'Upscaling procedure': tune on small systems, and transfer to the large one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean

from mupscale.growth import SignalNoise
from mupscale.method.drift import Drift, extrapolate
from mupscale.method.peers import load_model
from mupscale.method.stages import label, size, small_name
from mupscale.method.summary import Choice
from mupscale.method.workshop import Workshop
from mupscale.sweep import Cell, Sweep
from mupscale.system import MupscaleError, derive
from mupscale.train import Recipe, Width


@dataclass(frozen=True)
class Tuned:
    """What the sweeps found and what follows for the large models.

    zero_lr: the learning rate that training on without noise likes best. sentences: how the optimum moves.
    """

    sweeps: list[Sweep]
    choice: Choice
    zero_lr: float
    sentences: list[str]


def tune(shop: Workshop, worker: bool = False) -> Tuned:
    """Sweep 1 at the largest small width, Sweep 2 at each of them, and the choice."""
    widths = sorted(shop.method.widths, key=size)
    sweeps, base_lr = list[Sweep](), float(shop.recipe.optimizer.init_args["lr"])
    if shop.method.lrs:
        first = _sweep_1(shop, widths[-1], worker)
        base_lr = first.best.lr
        sweeps.append(first)
    pairs: list[tuple[float, Sweep]] = []
    for width in widths:
        _small(shop, width, base_lr)
        pairs.append((size(width), _sweep_2(shop, width, worker)))
    drift = extrapolate(pairs, size(shop.recipe.width))
    choice, last = _choice(shop, drift, base_lr, widths[-1]), pairs[-1][1]
    zero_lr = (last.best_without_noise or last.best).lr
    return Tuned([*sweeps, *(sweep for _, sweep in pairs)], choice, zero_lr, drift.sentences)


def _sweep_1(shop: Workshop, width: Width, worker: bool) -> Sweep:
    def recipes(cell: Cell) -> list[Recipe]:
        steps = shop.protocol.base_steps
        return [shop.protocol.fresh(width, cell.lr, steps, seed) for seed in shop.sweep_seeds]

    return shop.sweep(f"sweep-1-width-{label(width)}", width, None, shop.method.sweep_1(), recipes, worker)


def _sweep_2(shop: Workshop, width: Width, worker: bool) -> Sweep:
    def recipes(cell: Cell) -> list[Recipe]:
        return [shop.protocol.trial(width, cell, seed) for seed in shop.sweep_seeds]

    wide = shop.protocol.upscaled_width(width)
    return shop.sweep(f"sweep-2-width-{label(width)}", wide, width, shop.method.sweep_2(), recipes, worker)


def _small(shop: Workshop, width: Width, lr: float) -> None:
    """The small base models that Sweep 2 upscales."""
    recipes = [shop.protocol.small(width, lr, seed) for seed in shop.sweep_seeds]
    outcomes = shop.train(f"small-width-{label(width)}", {small_name(width): recipes})
    if any(outcome.status != "finished" for outcome in outcomes[small_name(width)]):
        raise MupscaleError(
            f"the small base model of width {label(width)} diverged at learning rate {lr:g}: let Sweep 1 (method.lrs) "
            f"choose among smaller ones"
        )


def _choice(shop: Workshop, drift: Drift, base_lr: float, width: Width) -> Choice:
    """Extrapolated and plain values; for signal-normalised noise constants by parameter, as the paper transfers it."""
    unit, plain = shop.protocol.growth.unit, (drift.plain_noise, drift.plain_lr)
    signal = unit == "signal" and drift.noise > 0
    constants = _constants(shop, width, base_lr, drift.noise) if signal else None
    return Choice(base_lr, drift.lr, drift.noise, unit, None if (drift.noise, drift.lr) == plain else plain, constants)


def _constants(shop: Workshop, width: Width, base_lr: float, t: float) -> dict[str, float]:
    """What t amounts to in each parameter at the small width, over the sweep's seeds ('Modification to Step 0')."""
    found: list[Mapping[str, float]] = []
    for seed in shop.sweep_seeds:
        small, trial = shop.protocol.small(width, base_lr, seed), shop.protocol.trial(width, Cell(base_lr, t), seed)
        noise = SignalNoise(t)
        model = load_model(small, str(small.out))
        small.family().upscale(model, width=trial.width, noise=noise, seed=derive(trial.seeds.noise, "start"))
        assert noise.effective is not None
        assert isinstance(noise.effective.std, Mapping)
        found.append(noise.effective.std)
    return {name: fmean(constants[name] for constants in found) for name in found[0]}
