"""Width-invariant clipping for transformers' Trainer, whose own breaks the equivalence of small and wide model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from mupscale.core import Plan
from mupscale.hf.describe import require_transformers
from mupscale.hf.files import Record
from mupscale.hf.training import groups
from mupscale.optim import clip_grad_norm_
from mupscale.system import MupscaleError

_THEIRS = "_mupscale_max_grad_norm"


class Clip(require_transformers().TrainerCallback):  # type: ignore[misc]
    """`Trainer(…, callbacks=[Clip("path/to/wide")])`: clips by the norm that the small model's gradient would have.

    It takes over max_grad_norm of the training arguments (or a max_norm of its own; 0 is none) and switches the
    Trainer's clipping off while it trains. The norm is logged as `invariant_grad_norm`. Every checkpoint that the
    Trainer saves gets its mupscale.json, so that it can be upscaled again.

    >>> clip = Clip("path/to/wide", max_norm=1.0)  # the folder is read when training begins
    >>> clip.max_norm
    1.0
    """

    def __init__(self, path: str | Path, max_norm: float | None = None) -> None:
        self.path, self.max_norm = path, max_norm
        self.norm: torch.Tensor | None = None
        self._plan: Plan | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take the Trainer's clipping over."""
        if args.fp16:
            raise MupscaleError(
                "Clip cannot clip gradients that fp16 has scaled: train with bf16=True, or in float32 (fp16=False)"
            )
        if args.deepspeed:
            raise MupscaleError(
                "DeepSpeed keeps the gradients to itself, so that Clip cannot clip them: train with DDP or FSDP2"
            )
        theirs = args.max_grad_norm or vars(args).get(_THEIRS, 0.0)  # an interrupted run could not give it back
        if self.max_norm is None:
            self.max_norm = theirs
        setattr(args, _THEIRS, theirs)
        args.max_grad_norm = 0.0
        self._plan = groups.plan(self.path, kwargs["model"])

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Clip, after the gradients of all accumulated batches have come together."""
        assert self._plan is not None
        if self.max_norm:
            self.norm = clip_grad_norm_(kwargs["model"], self.max_norm, self._plan)

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note the norm in the Trainer's history."""
        if self.norm is not None and state.log_history and "loss" in state.log_history[-1]:
            state.log_history[-1]["invariant_grad_norm"] = self.norm.item()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Put mupscale.json beside what was saved."""
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if state.is_world_process_zero and folder.is_dir():
            Record.load(self.path).save(folder)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave the arguments as they were."""
        args.max_grad_norm = vars(args).pop(_THEIRS)
