"""Sweeps over learning rate and noise, by any number of workers that share a storage.

space    what is searched (Space, SweepJob), and what was found (Tried, Sweep)
search   run_sweep: take trials, train a batch as one program, store the results
trials   all trials of a sweep in the storage: ask and tell
storage  SQLite, journal files, databases
workers  who is at work on a study, and who died
pruning  when to stop a trial that falls behind
remarks  what to know of a finished sweep beside its optimum
"""

from mupscale.sweep.remarks import edge_remarks, sweep_remarks
from mupscale.sweep.search import run_sweep
from mupscale.sweep.space import Cell, Space, Sweep, SweepJob, Tried, check_learning_rates

__all__ = [
    "Cell",
    "Space",
    "Sweep",
    "SweepJob",
    "Tried",
    "check_learning_rates",
    "edge_remarks",
    "run_sweep",
    "sweep_remarks",
]
