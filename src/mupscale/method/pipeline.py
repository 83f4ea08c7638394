"""The paper's Steps 0 to 4 and the comparison, as one run that can be cut anywhere and goes on where it was.

Everything is in the run's folder: method.json, the study, a folder for each model (an ordinary run), summary.json and
the report. A stage that is done is read, not trained.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from mupscale.method.contender_training import train_contenders
from mupscale.method.coordinate_check import check_coordinates
from mupscale.method.costs import compute_costs, compute_gain
from mupscale.method.method_run import MethodRun, Note
from mupscale.method.settings import Method
from mupscale.method.summary import Summary
from mupscale.method.tuning import Tuned, tune
from mupscale.method.verdict import write_verdict, write_warnings
from mupscale.sweep import sweep_remarks
from mupscale.system import print_at_once, writes_into
from mupscale.train import Recipe, stored_values


@writes_into("folder")
def run_method(
    recipe: Recipe, method: Method, folder: str | Path, *, command: str = "", note: Note = print_at_once
) -> Summary:
    """Run the whole method, from wherever it stands in the folder, to summary.json.

    Args:
        recipe: a recipe with one growth event: the base model up to it, the wide one from there on
        method: where to tune, over what, and what to compare with
        folder: where everything is kept; the same call goes on with what is there
        command: what to write into the summary as the way to do it again
        note: is told what is done, line by line

    A recipe that does not grow is refused before anything is trained or written:

    >>> from mupscale.train import Recipe, Spec
    >>> recipe = Recipe(
    ...     model=Spec("mupscale.models.MLP", {"d_in": 54, "d_out": 7}),
    ...     data=Spec("mupscale.data.CoverTypeSample"),
    ...     optimizer=Spec("torch.optim.SGD", {"lr": 0.1}),
    ...     width=8, base=4, steps=12, batch=10,
    ... )
    >>> method = Method(widths=[4], upscaled_lrs=[0.05, 0.1], noises=[0.3])
    >>> run_method(recipe, method, "runs/demo")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    mupscale.system.errors.MupscaleError: the method upscales once, so its recipe needs one growth event, and ...
    """
    run = MethodRun(recipe, method, Path(folder), note)
    run.open()
    tuned = tune(run)
    summary = _summarise(run, tuned, command)
    summary.save(run.folder)  # the answer first: the check below is one picture of its page
    summary = replace(summary, coords=check_coordinates(run, tuned.choice.base_lr))
    summary.save(run.folder)
    return summary


def _summarise(run: MethodRun, tuned: Tuned, command: str) -> Summary:
    """Train the contenders, and say what came of them."""
    runs, own_sweeps = train_contenders(run, tuned)
    sweeps = [*tuned.sweeps, *own_sweeps]
    stages = run.stage_costs(sweeps)
    costs, gain = compute_costs(runs, stages, tuned.sweeps), compute_gain(runs)
    return Summary(
        name=run.folder.resolve().name,
        command=command,
        recipe=stored_values(run.recipe, run.folder),
        method=run.method.to_json(),
        sweeps=sweeps,
        choice=tuned.choice,
        runs=runs,
        stages=stages,
        costs=costs,
        gain=gain,
        verdict=write_verdict(runs, costs, gain),
        warnings=[
            *tuned.sentences,
            *write_warnings(tuned.sweeps, runs),
            *(f"{sweep.name}: {finding}" for sweep in own_sweeps for finding in sweep_remarks(sweep)),
        ],
    )


@writes_into("folder")
def run_sweeps(
    recipe: Recipe, method: Method, folder: str | Path, *, worker: bool = False, note: Note = print_at_once
) -> Tuned:
    """Run Step 0 alone; with a storage that others reach, as one worker of many.

    It takes what `run_method` takes, and refuses the same before anything is trained:

    >>> from mupscale.train import Growth, Recipe, Spec
    >>> recipe = Recipe(
    ...     model=Spec("mupscale.models.MLP", {"d_in": 54, "d_out": 7}),
    ...     data=Spec("mupscale.data.CoverTypeSample"),
    ...     optimizer=Spec("torch.optim.SGD", {"lr": 0.1}),
    ...     width=8, base=4, steps=12, batch=10, grow=[Growth(at=4, width=16)],
    ... )
    >>> run_sweeps(recipe, Method(widths=[4, 4], upscaled_lrs=[0.05], noises=[0.3]), "runs/demo")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    mupscale.system.errors.MupscaleError: method.widths is [4, 4], but small widths must differ from each other
    """
    run = MethodRun(recipe, method, Path(folder), note)
    run.open()
    return tune(run, worker)
