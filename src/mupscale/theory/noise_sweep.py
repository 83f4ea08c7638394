"""The method's Sweep 2 where there is no width: noise × learning rate, and the loss in the limit."""

from __future__ import annotations

import time
from collections.abc import Callable

from mupscale.sweep import Cell, Space, Sweep, Tried
from mupscale.system import Diverged, MupscaleError
from mupscale.theory.estimates import limit, warn_of_few_samples
from mupscale.theory.limit_study import Experiment, Tick, ignore, is_lost
from mupscale.theory.mlp_training import Stage


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
