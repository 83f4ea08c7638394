"""Clipping of a grown model by the norm that the first small model's gradient would have, for transformers' Trainer."""

from __future__ import annotations

from pathlib import Path
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from mupscale.core import Plan
from mupscale.hf.describe import require_transformers
from mupscale.hf.files import Record
from mupscale.optim import clip_grad_norm_
from mupscale.system import print_at_once

_THEIRS = "_mupscale_max_grad_norm"


class InvariantClipping(require_transformers().TrainerCallback):  # type: ignore[misc]
    """Clips the Trainer's model and puts its mupscale.json beside every checkpoint, while it is in charge of the model.

    Of several callbacks that a Trainer has, the one that made the model what it is now is in charge.
    """

    def __init__(self, max_norm: float | None = None) -> None:
        self.max_norm = max_norm
        self.norm: torch.Tensor | None = None
        self.plan: Plan | None = None
        self.record: Record | None = None

    def take_charge(self, model: nn.Module, plan: Plan, record: Record) -> None:
        """Clip this model from now on, by the norm that belongs to this plan."""
        self.plan, self.record = plan, record
        _IN_CHARGE[model] = self
        model.save_pretrained = MethodType(save_pretrained, model)  # type: ignore[assignment]

    def is_in_charge(self, model: nn.Module) -> bool:
        """Whether no other has made the model what it is now."""
        return find_in_charge(model) is self

    def switch_off_theirs(self, args: Any) -> None:
        """Have the Trainer not clip; its max_grad_norm is ours, where we were given none."""
        theirs = args.max_grad_norm or vars(args).get(_THEIRS, 0.0)  # an interrupted run could not give it back
        if self.max_norm is None:
            self.max_norm = theirs
        setattr(args, _THEIRS, theirs)
        args.max_grad_norm = 0.0

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Whoever was in charge in another Trainer is so no longer."""
        if kwargs.get("model") is not None:
            _IN_CHARGE.pop(kwargs["model"], None)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Clip, after the gradients of all accumulated batches have come together."""
        if self.is_in_charge(kwargs["model"]) and self.plan is not None and self.max_norm:
            self.norm = clip_grad_norm_(kwargs["model"], self.max_norm, self.plan)

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note the norm in the Trainer's history."""
        is_ours = self.norm is not None and self.is_in_charge(kwargs["model"])
        if is_ours and state.log_history and "loss" in state.log_history[-1]:
            assert self.norm is not None
            state.log_history[-1]["invariant_grad_norm"] = self.norm.item()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Put mupscale.json beside what was saved."""
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        is_ours = self.is_in_charge(kwargs["model"]) and state.is_world_process_zero
        if is_ours and self.record is not None and folder.is_dir():
            self.record.save(folder)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave the arguments as they were."""
        if _THEIRS in vars(args):
            args.max_grad_norm = vars(args).pop(_THEIRS)


def save_pretrained(self: Any, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
    """A grown model's own, with its mupscale.json: whoever saves it, Trainer.save_model among them.

    As a method of the model it is copied and pickled with it.
    """
    saved = type(self).save_pretrained(self, save_directory, *args, **kwargs)
    one = find_in_charge(self)
    if one is not None and one.record is not None and kwargs.get("is_main_process", True):
        one.record.save(Path(save_directory))
    return saved


def say_in_log(state: Any, text: str, **values: Any) -> None:
    """A line for the person who watches the run, and an entry in the Trainer's history."""
    state.log_history.append({"epoch": state.epoch, "step": state.global_step, **values})
    if state.is_local_process_zero:
        print_at_once(f"step {state.global_step}: {text}")


_IN_CHARGE: WeakKeyDictionary[nn.Module, InvariantClipping] = WeakKeyDictionary()


def find_in_charge(model: nn.Module) -> InvariantClipping | None:
    """Who clips this model."""
    return _IN_CHARGE.get(model)
