"""Width-invariant clipping for transformers' Trainer, whose own breaks the equivalence of small and wide model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from mupscale.hf.files import Record
from mupscale.hf.training import groups
from mupscale.hf.training.invariant_clipping import InvariantClipping, find_in_charge
from mupscale.system import MupscaleError, checks_arguments


@checks_arguments
class Clip(InvariantClipping):
    """`Trainer(…, callbacks=[Clip("path/to/wide")])`: clips by the norm that the small model's gradient would have.

    It takes over max_grad_norm of the training arguments (or a max_norm of its own; 0 is none) and switches the
    Trainer's clipping off while it trains. The norm is logged as `invariant_grad_norm`. Every checkpoint that the
    Trainer saves gets its mupscale.json, so that it can be upscaled again.

    >>> clip = Clip("path/to/wide", max_norm=1.0)  # the folder is read when training begins
    >>> clip.max_norm
    1.0
    """

    def __init__(self, path: str | Path, max_norm: float | None = None) -> None:
        super().__init__(max_norm)
        self.path = path

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take the Trainer's clipping over, unless the model has grown since in this Trainer."""
        if args.fp16:
            raise MupscaleError(
                "Clip cannot clip gradients that fp16 has scaled: train with bf16=True, or in float32 (fp16=False)"
            )
        if args.deepspeed:
            raise MupscaleError("DeepSpeed hides the gradients, so Clip cannot clip them. Train with DDP or FSDP2")
        self.switch_off_theirs(args)
        if find_in_charge(kwargs["model"]) in (None, self):
            self.begin(kwargs["model"])

    def begin(self, model: nn.Module) -> None:
        """Read the folder, and be in charge of the model."""
        self.take_charge(model, groups.plan(self.path, model), Record.load(self.path))
