"""Sweeps over learning rate and noise, by any number of workers that share a storage.

space          what is searched, and the results: Cell, Space, Trial, Sweep
sweep_job      what a sweep is to search, and the recipes of a cell
search         run_sweep
trial_batches  trials that a worker trains at once, on disk
callbacks      between the engine and the study while they train
study          all trials of a sweep, in the storage
attempts       what became of every attempt at a cell
storage        SQLite, journal files, databases
workers        who is at work on a study, and who died
pruning        when to stop a trial that falls behind
remarks        what to know of a finished sweep beside its optimum
"""

from mupscale.sweep.remarks import sweep_remarks
from mupscale.sweep.search import run_sweep
from mupscale.sweep.space import Cell, Space, Sweep, Trial, check_learning_rates
from mupscale.sweep.sweep_job import SweepJob

__all__ = [
    "Cell",
    "Space",
    "Sweep",
    "SweepJob",
    "Trial",
    "check_learning_rates",
    "run_sweep",
    "sweep_remarks",
]
