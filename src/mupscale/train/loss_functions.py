"""The loss of the paper's three experiments, and the number of correct answers."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional as F

from mupscale.system import MupscaleError


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
            f"{type(outputs).__name__}: give a loss of your own (loss: your.module.function)"
        )
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


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
