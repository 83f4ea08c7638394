"""Sweeps: what is searched and found, and the engine that trains many small models as one; torch alone is needed.

The search itself, which needs optuna, is in mupscale.sweep.search.
"""

from mupscale.sweep.engine import Interrupted, NotStackable, Outcome, train_many
from mupscale.sweep.space import Cell, Space, Sweep, Trial
from mupscale.sweep.stack import Stack

__all__ = [
    "Cell",
    "Interrupted",
    "NotStackable",
    "Outcome",
    "Space",
    "Stack",
    "Sweep",
    "Trial",
    "train_many",
]
