"""Hugging Face checkpoints: upscale one on disk, verify it, and train it on with the right parameter groups.

`upscale`, `verify` and `inspect` are the commands of these names; `param_groups`, `plan`, `decay_groups`,
`resume_optimizer`, `Clip`, `GrowTrainerCallback` and `BranchTrainerCallback` are for training; `LanguageModel` is a
folder's model at any width, for recipes; `register` says what a run of a model cannot show.

Imports go one way: describe (configs and their plans) → files (checkpoints on disk) → training (groups, clipping,
optimizers) → verification (is it the same model?) → inspection, upscaling, language_model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mupscale.hf.describe import Times, register
from mupscale.hf.files import Record, Source, is_gguf, read_gguf
from mupscale.hf.inspection import Inspection, inspect
from mupscale.hf.language_model import LanguageModel, hidden_size, load_language_model, load_language_optimizer
from mupscale.hf.training import decay_groups, param_groups, plan, resume_optimizer
from mupscale.hf.upscaling import Upscaled, deepen_checkpoint, upscale
from mupscale.hf.verification import Comparison, verify

if TYPE_CHECKING:
    from mupscale.hf.training import BranchTrainerCallback, Clip, GrowTrainerCallback


def __getattr__(name: str) -> Any:
    if name in ("BranchTrainerCallback", "Clip", "GrowTrainerCallback"):  # they import transformers
        from mupscale.hf import training

        return getattr(training, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "BranchTrainerCallback",
    "Clip",
    "Comparison",
    "GrowTrainerCallback",
    "Inspection",
    "LanguageModel",
    "Record",
    "Source",
    "Times",
    "Upscaled",
    "decay_groups",
    "deepen_checkpoint",
    "hidden_size",
    "inspect",
    "is_gguf",
    "load_language_model",
    "load_language_optimizer",
    "param_groups",
    "plan",
    "read_gguf",
    "register",
    "resume_optimizer",
    "upscale",
    "verify",
]
