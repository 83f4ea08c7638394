"""A checkpoint loaded whole by transformers, and batches to run its model on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from mupscale.hf.describe import in_one_line, model_class, quiet_transformers, transformers_config
from mupscale.hf.files import Source
from mupscale.system import MupscaleError


@dataclass(frozen=True)
class Loaded:
    """A model, and the tensors of its files that it has no use for (a head of another task)."""

    model: nn.Module
    unused: tuple[str, ...]


def load_pretrained(source: Source, dtype: torch.dtype, *, device: str | torch.device | None = None) -> Loaded:
    """The model of a checkpoint, in evaluation mode, with eager attention.

    Every parameter comes from the files, never from a random initial value; they may hold more than the model uses.
    """
    folder, cls, config = source.folder, model_class(source.config), transformers_config(source.config)
    try:
        with quiet_transformers():
            model, info = cls.from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                attn_implementation="eager",
                local_files_only=True,
                output_loading_info=True,
            )
    except Exception as error:  # whatever it raises of files, shapes and configs
        raise MupscaleError(f"transformers cannot load {folder}: {in_one_line(error)}") from None
    for kind, lack in (("missing_keys", "lacks"), ("mismatched_keys", "has another shape for")):
        names = sorted(str(n[0] if isinstance(n, tuple) else n) for n in info.get(kind, ()))
        if names:
            raise MupscaleError(
                f"{folder} {lack} '{names[0]}'{_more(names)}, which {cls.__name__} would fill with random values: the "
                f"files and config.json do not belong together"
            )
    model = model.eval() if device is None else model.eval().to(device)
    return Loaded(model, tuple(sorted(info.get("unexpected_keys", ()))))


def _more(names: tuple[str, ...] | list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""
