"""Hugging Face checkpoints: upscale one on disk, verify it, and train it on with the right parameter groups.

`upscale`, `verify` and `inspect` are the commands of these names; `param_groups`, `plan`, `decay_groups`,
`resume_optimizer`, `Clip`, `GrowTrainerCallback` and `BranchTrainerCallback` are for training; `LanguageModel` is a
folder's model at any width, for recipes; `register` says what a run of a model cannot show.

Imports go one way. Known before any weight is read: building (the model that a config.json names, and what it is run
on), config_fields (what grows in a config, and by how much), miniatures (small models of its kind, and what a run
shows), config_family (the plan), depths (more layers, or experts). Files: source (where tensors lie), gguf_files (what
transformers makes of a GGUF file), record (growths, planned, and mupscale.json), stream (filled in pieces),
output_folder (what else lies there). Training: groups. Is it the same model: verifying. On top: trainer, inspection, …
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mupscale.hf.config_family import register
from mupscale.hf.config_fields import Times
from mupscale.hf.gguf_files import read_gguf
from mupscale.hf.groups import param_groups, plan, resume_optimizer
from mupscale.hf.inspection import Inspection, inspect
from mupscale.hf.language_model import LanguageModel, hidden_size, load_language_model, load_language_optimizer
from mupscale.hf.record import Record
from mupscale.hf.source import Source, is_gguf
from mupscale.hf.upscaling import Upscaled, upscale
from mupscale.hf.verifying import Comparison, verify
from mupscale.optim import decay_groups

if TYPE_CHECKING:
    from mupscale.hf.trainer import BranchTrainerCallback, Clip, GrowTrainerCallback


def __getattr__(name: str) -> Any:
    if name in ("BranchTrainerCallback", "Clip", "GrowTrainerCallback"):  # they import transformers
        from mupscale.hf import trainer

        return getattr(trainer, name)
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
