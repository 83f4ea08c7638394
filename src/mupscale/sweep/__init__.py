"""Sweeps over learning rate and noise, by any number of workers that share a storage.

space    what is searched (Space, SweepJob), what was found (Tried, Sweep), and what to know of it
search   run_sweep: take trials, train a batch as one program, store the results
trials   all trials of a sweep in the storage: ask and tell
storage  SQLite, journal files, databases
workers  who is at work on a study, and who died
pruning  when to stop a trial that falls behind
"""

from mupscale.sweep.search import run_sweep
from mupscale.sweep.space import (
    Cell,
    Space,
    Sweep,
    SweepJob,
    Tried,
    check_learning_rates,
    joined_edges,
    sweep_remarks,
)

__all__ = [
    "Cell",
    "Space",
    "Sweep",
    "SweepJob",
    "Tried",
    "check_learning_rates",
    "joined_edges",
    "run_sweep",
    "sweep_remarks",
]
