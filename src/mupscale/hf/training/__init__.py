"""Training an upscaled checkpoint on, with the small model's hyperparameters.

model_parameters: a model's parameters as plans name them. groups: parameter groups from mupscale.json.
invariant_clipping: who clips the model of transformers' Trainer, and by which norm. trainer: that for a checkpoint.
growing_trainer: growth in the middle of its run. branching_trainer: finished sizes that leave it.
saved_optimizer: an optimizer's file, read. widened_optimizer: such a file, widened.
deepened_optimizer: such a file, for more layers. deepened_model: a model in memory with them.
"""

from typing import TYPE_CHECKING, Any

from mupscale.hf.training.groups import param_groups, plan, resume_optimizer
from mupscale.hf.training.model_parameters import decay_groups, match_plan, shapes_of
from mupscale.hf.training.saved_optimizer import find_optimizer_file
from mupscale.hf.training.widened_optimizer import check_optimizer_file, widen_optimizer_file

if TYPE_CHECKING:
    from mupscale.hf.training.branching_trainer import BranchTrainerCallback
    from mupscale.hf.training.growing_trainer import GrowTrainerCallback
    from mupscale.hf.training.trainer import Clip


def __getattr__(name: str) -> Any:
    if name == "Clip":  # imports transformers
        from mupscale.hf.training.trainer import Clip

        return Clip
    if name == "GrowTrainerCallback":
        from mupscale.hf.training.growing_trainer import GrowTrainerCallback

        return GrowTrainerCallback
    if name == "BranchTrainerCallback":
        from mupscale.hf.training.branching_trainer import BranchTrainerCallback

        return BranchTrainerCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "BranchTrainerCallback",
    "Clip",
    "GrowTrainerCallback",
    "check_optimizer_file",
    "decay_groups",
    "find_optimizer_file",
    "match_plan",
    "param_groups",
    "plan",
    "resume_optimizer",
    "shapes_of",
    "widen_optimizer_file",
]
