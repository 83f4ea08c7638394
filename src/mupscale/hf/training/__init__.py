"""Training an upscaled checkpoint on, with the small model's hyperparameters.

groups: parameter groups from mupscale.json, a model's parameters as plans name them, and an optimizer's file, read and
widened. trainer: callbacks of transformers' Trainer, for clipping, growth and branches.
"""

from typing import TYPE_CHECKING, Any

from mupscale.hf.training.groups import (
    compare_optimizer_file,
    decay_groups,
    find_optimizer_file,
    match_plan,
    param_groups,
    plan,
    resume_optimizer,
    shapes_of,
    widen_optimizer_file,
)

if TYPE_CHECKING:
    from mupscale.hf.training.trainer import BranchTrainerCallback, Clip, GrowTrainerCallback


def __getattr__(name: str) -> Any:
    if name in ("BranchTrainerCallback", "Clip", "GrowTrainerCallback"):  # they import transformers
        from mupscale.hf.training import trainer

        return getattr(trainer, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "BranchTrainerCallback",
    "Clip",
    "GrowTrainerCallback",
    "compare_optimizer_file",
    "decay_groups",
    "find_optimizer_file",
    "match_plan",
    "param_groups",
    "plan",
    "resume_optimizer",
    "shapes_of",
    "widen_optimizer_file",
]
