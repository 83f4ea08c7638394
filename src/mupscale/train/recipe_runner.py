"""A recipe, run from its start or its last checkpoint to the end."""

from __future__ import annotations

from contextlib import ExitStack

from mupscale.train.numeric_precision import matmul_precision
from mupscale.train.processes import join_processes
from mupscale.train.recipe import Recipe
from mupscale.train.training_run import Result, TrainingRun, catch_stop_signals


def run_recipe(recipe: Recipe, *, resume: bool = False, overwrite: bool = False) -> Result:
    """Train as the recipe says; `resume` goes on from the last checkpoint in the run's folder, if there is one.

    overwrite: where the folder holds a run, remove it and start over.

    >>> from contextlib import redirect_stdout
    >>> from mupscale.train import Growth, Spec
    >>> recipe = Recipe(
    ...     model=Spec("mupscale.models.MLP", {"d_in": 54, "d_out": 7}),
    ...     data=Spec("mupscale.data.CoverTypeSample"),
    ...     optimizer=Spec("torch.optim.AdamW", {"lr": 1e-3}),
    ...     width=16,
    ...     base=16,
    ...     steps=4,
    ...     batch=32,
    ...     grow=[Growth(at=2, width=32)],
    ...     device="cpu",
    ... )
    >>> with redirect_stdout(None):  # without the lines of progress
    ...     result = run_recipe(recipe)
    >>> result.status, result.step, result.width
    ('finished', 4, 32)
    """
    with ExitStack() as stack:
        stack.enter_context(matmul_precision(recipe.precision))
        processes = stack.enter_context(join_processes(recipe.device, recipe.parallel))
        run = TrainingRun(recipe, processes)
        stack.callback(run.close)
        stop = stack.enter_context(catch_stop_signals())
        run.begin(resume, overwrite)
        return run.go(stop)
