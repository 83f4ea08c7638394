"""What is searched and by whom: the space, the study that keeps it, its workers, and what a finished sweep says."""

from mupscale.sweep.findings import findings
from mupscale.sweep.search import Task, run_sweep
from mupscale.sweep.space import Cell, Space, Sweep, Trial

__all__ = [
    "Cell",
    "Space",
    "Sweep",
    "Task",
    "Trial",
    "findings",
    "run_sweep",
]
