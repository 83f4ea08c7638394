"""The loss of the paper's three experiments, and the number of correct answers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from mupscale.system import MupscaleError
from mupscale.train.class_paths import import_path


def cross_entropy(outputs: Any, targets: Tensor) -> Tensor:
    """Mean cross-entropy of logits (…, classes) with integer targets (…).

    >>> import torch
    >>> round(float(cross_entropy(torch.zeros(2, 4), torch.tensor([0, 3]))), 4)  # four equal classes: log 4
    1.3863
    """
    logits = find_logits(outputs)
    if logits is None:
        raise MupscaleError(
            f"cross_entropy is for outputs that are a tensor, or have one as `logits`, not for a "
            f"{type(outputs).__name__}: give your own loss (loss: your.module.function)"
        )
    if targets.is_floating_point():
        raise MupscaleError(
            f"cross_entropy is for classes, but the targets are numbers ({targets.dtype}): for regression give a loss "
            f"such as loss: torch.nn.functional.mse_loss; for classes, targets of whole numbers"
        )
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def load_loss(path: str) -> Callable[[Any, Tensor], Tensor]:
    """The loss that an import path names, a function of outputs and targets; it is not called.

    >>> load_loss("mupscale.train.cross_entropy").__name__
    'cross_entropy'
    >>> load_loss("torch.nn.MSELoss")
    Traceback (most recent call last):
    mupscale.system.errors.MupscaleError: the loss torch.nn.MSELoss is no function of outputs and targets
    """
    loss: Callable[[Any, Tensor], Tensor] = import_path(path)
    if not callable(loss) or isinstance(loss, type) or not _takes_two(loss):
        raise MupscaleError(f"the loss {path} is no function of outputs and targets")
    return loss


def _takes_two(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind(None, None)
    except TypeError:
        return False
    except ValueError:  # written in C: it does not tell
        return True
    return True


def find_logits(outputs: Any) -> Tensor | None:
    """A model's output: a tensor, or an object that keeps it as `logits`, as transformers' models do."""
    logits = outputs if isinstance(outputs, Tensor) else getattr(outputs, "logits", None)
    return logits if isinstance(logits, Tensor) else None


def count_correct(outputs: Any, targets: Tensor) -> Tensor | None:
    """How many targets are the class with the largest logit; None where outputs are not logits of classes.

    >>> import torch
    >>> int(count_correct(torch.eye(3), torch.tensor([0, 1, 1])))
    2
    """
    logits = find_logits(outputs)
    if logits is None or targets.is_floating_point() or logits.shape[:-1] != targets.shape:
        return None
    return (logits.argmax(-1) == targets).sum()
