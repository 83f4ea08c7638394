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
from mupscale.method.method_run import MethodRun, Note, print_at_once
from mupscale.method.settings import Method
from mupscale.method.summary import Summary
from mupscale.method.tuning import Tuned, tune
from mupscale.method.verdict import write_verdict, write_warnings
from mupscale.sweep import findings
from mupscale.train import Recipe


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
    """
    run = MethodRun(recipe, method, Path(folder), note)
    run.open()
    tuned = tune(run)
    runs, own_sweeps = train_contenders(run, tuned)
    sweeps = [*tuned.sweeps, *own_sweeps]
    stages = run.stage_costs(sweeps)
    costs, gain = compute_costs(runs, stages, tuned.sweeps), compute_gain(runs)
    summary = Summary(
        name=run.folder.resolve().name,
        command=command,
        recipe=recipe.to_json(),
        method=method.to_json(),
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
            *(f"{sweep.name}: {finding}" for sweep in own_sweeps for finding in findings(sweep)),
        ],
    )
    summary.save(run.folder)  # the answer first: the check below is one picture of its page
    summary = replace(summary, coords=check_coordinates(run, tuned.choice.base_lr))
    summary.save(run.folder)
    return summary


def run_sweeps(
    recipe: Recipe, method: Method, folder: str | Path, *, worker: bool = False, note: Note = print_at_once
) -> Tuned:
    """Run Step 0 alone; with a storage that others reach, as one worker of many."""
    run = MethodRun(recipe, method, Path(folder), note)
    run.open()
    return tune(run, worker)
