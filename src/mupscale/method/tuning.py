"""Step 0 of Meta-algorithm 'Upscaling procedure': tune on small systems, and transfer to the large one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean

from mupscale.core import WholeWidth, Width
from mupscale.growth import SignalNoise
from mupscale.method.extrapolation import Extrapolation, extrapolate
from mupscale.method.method_run import MethodRun
from mupscale.method.other_widenings import load_trained
from mupscale.method.protocol import small_name
from mupscale.method.summary import Choice
from mupscale.sweep import Cell, Sweep
from mupscale.system import MupscaleError, derive
from mupscale.train import Recipe, check_copies


@dataclass(frozen=True)
class Tuned:
    """The sweeps, and the hyperparameters that follow for the large models.

    zero_lr: the learning rate that training on without noise likes best. sentences: how the optimum moves.
    """

    sweeps: list[Sweep]
    choice: Choice
    zero_lr: float
    sentences: list[str]


def tune(run: MethodRun, worker: bool = False) -> Tuned:
    """Run Sweep 1 at the largest small width and Sweep 2 at each of them, and choose."""
    widths = sorted(run.method.widths, key=lambda width: Width.of(width).size)
    sweeps, base_lr = list[Sweep](), float(run.recipe.optimizer.init_args["lr"])
    if run.method.lrs:
        first = _sweep_1(run, widths[-1], worker)
        base_lr = first.best.lr
        sweeps.append(first)
    pairs: list[tuple[float, Sweep]] = []
    for width in widths:
        _train_small(run, width, base_lr)
        pairs.append((Width.of(width).size, _sweep_2(run, width, worker)))
    optimum = extrapolate(pairs, Width.of(run.recipe.width).size)
    choice, last = _choose(run, optimum, base_lr, widths[-1]), pairs[-1][1]
    zero_lr = (last.best_without_noise or last.best).lr
    return Tuned([*sweeps, *(sweep for _, sweep in pairs)], choice, zero_lr, optimum.sentences)


def _sweep_1(run: MethodRun, width: WholeWidth, worker: bool) -> Sweep:
    def recipes(cell: Cell) -> list[Recipe]:
        steps = run.protocol.base_steps
        return [run.protocol.fresh(width, cell.lr, steps, seed) for seed in run.sweep_seeds]

    return run.sweep(f"sweep-1-width-{Width.of(width).label}", width, None, run.method.sweep_1(), recipes, worker)


def _sweep_2(run: MethodRun, width: WholeWidth, worker: bool) -> Sweep:
    def recipes(cell: Cell) -> list[Recipe]:
        return [run.protocol.trial(width, cell, seed) for seed in run.sweep_seeds]

    wide = run.protocol.upscaled_width(width)
    return run.sweep(f"sweep-2-width-{Width.of(width).label}", wide, width, run.method.sweep_2(), recipes, worker)


def _train_small(run: MethodRun, width: WholeWidth, lr: float) -> None:
    """The small base models that Sweep 2 upscales."""
    recipes = [run.protocol.small(width, lr, seed) for seed in run.sweep_seeds]
    outcomes = run.train(f"small-width-{Width.of(width).label}", {small_name(width): recipes})
    if any(outcome.status != "finished" for outcome in outcomes[small_name(width)]):
        raise MupscaleError(
            f"the small base model of width {Width.of(width).label} diverged at learning rate {lr:g}: let Sweep 1 "
            f"(method.lrs) choose among smaller ones"
        )


def _choose(run: MethodRun, optimum: Extrapolation, base_lr: float, width: WholeWidth) -> Choice:
    """Extrapolated and plain values; for signal-normalised noise constants by parameter, as the paper transfers it."""
    unit, best, plain = run.protocol.growth.unit, (optimum.noise, optimum.lr), (optimum.plain_noise, optimum.plain_lr)
    signal = unit == "signal" and optimum.noise > 0
    constants = _constants(run, width, base_lr, optimum.noise) if signal else None
    return Choice(base_lr, optimum.lr, optimum.noise, unit, None if best == plain else plain, constants)


def _constants(run: MethodRun, width: WholeWidth, base_lr: float, t: float) -> dict[str, float]:
    """What t amounts to in each parameter at the small width, over the sweep's seeds ('Modification to Step 0')."""
    by_seed: list[Mapping[str, float]] = []
    for seed in run.sweep_seeds:
        small, trial = run.protocol.small(width, base_lr, seed), run.protocol.trial(width, Cell(base_lr, t), seed)
        noise, draw = SignalNoise(t), derive(trial.seeds.noise, "start")
        family = small.family()
        check_copies(family, run.protocol.data, small.width, trial.width)
        family.upscale(load_trained(small), width=trial.width, noise=noise, seed=draw)
        assert noise.effective is not None
        assert isinstance(noise.effective.std, Mapping)
        by_seed.append(noise.effective.std)
    return {name: fmean(constants[name] for constants in by_seed) for name in by_seed[0]}
