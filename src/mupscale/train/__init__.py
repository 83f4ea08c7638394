"""Training: a recipe, the loop with growth in the middle of it, exact resume, one process or many."""

from mupscale.train import snapshot
from mupscale.train.evaluation import as_input
from mupscale.train.loop import Result, Run, StopRequest, asked_to_stop, matmul_precision, train
from mupscale.train.losses import correct, cross_entropy
from mupscale.train.pictures import curves
from mupscale.train.processes import Processes, processes
from mupscale.train.progress import Silence, make_progress
from mupscale.train.recipe import (
    MAY_CHANGE,
    Checkpoints,
    Evaluation,
    Growth,
    Level,
    Recipe,
    Schedule,
    Seeds,
    Spec,
    Width,
    import_path,
    make_noise,
)
from mupscale.train.run_folder import Folder, find_checkpoint, step_of
from mupscale.train.run_state import RunState
from mupscale.train.start import check_data, cost_per_example, starting_point
from mupscale.train.tensorboard import Board

__all__ = [
    "MAY_CHANGE",
    "Board",
    "Checkpoints",
    "Evaluation",
    "Folder",
    "Growth",
    "Level",
    "Processes",
    "Recipe",
    "Result",
    "Run",
    "RunState",
    "Schedule",
    "Seeds",
    "Silence",
    "Spec",
    "StopRequest",
    "Width",
    "as_input",
    "asked_to_stop",
    "check_data",
    "correct",
    "cost_per_example",
    "cross_entropy",
    "curves",
    "find_checkpoint",
    "import_path",
    "make_noise",
    "make_progress",
    "matmul_precision",
    "processes",
    "snapshot",
    "starting_point",
    "step_of",
    "train",
]
