"""Which stages are compiled without being asked: those on CUDA that are long enough to pay for compiling.

The decision follows from the recipe and the number of runs, not from a clock: a stage that is trained again, or on
another GPU, is compiled or not just as it was, so that its numbers round alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mupscale.train import compile_quietly

# Measured on an H200 with bench/sweep.py:
_SECONDS_A_BYTE = 5.6e-12  # that a step without compiling takes, for each byte that is kept for the backward pass
_SECONDS_A_TENSOR = 0.7  # that compiling takes, for each parameter of the model
_SECONDS_AT_LEAST = 10.0
_SAVED = 0.4  # of the time without compiling; 0.6 for language models, 0.2 for small MLPs


def worth_compiling(steps: int, runs: int, kept_bytes: int, tensors: int) -> bool:
    """Whether compiling is expected to take less time than it saves.

    kept_bytes: that a step of one run keeps for its backward pass; tensors: parameters of the model.

    >>> worth_compiling(steps=100, runs=20, kept_bytes=200_000_000, tensors=50)  # over before it is compiled
    False
    >>> worth_compiling(steps=10_000, runs=20, kept_bytes=200_000_000, tensors=50)
    True
    """
    plain = steps * runs * kept_bytes * _SECONDS_A_BYTE
    return _SAVED * plain > _SECONDS_AT_LEAST + tensors * _SECONDS_A_TENSOR


class StepParts:
    """The parts of a step as functions, compiled once each where that is asked for.

    >>> StepParts(compiles=False).get("update", max) is max
    True
    """

    def __init__(self, compiles: bool) -> None:
        self.compiles = compiles
        self._compiled: dict[str, Callable[..., Any]] = {}
        if compiles:
            torch.compiler.reset()  # it gives up, silently, on a function that it has compiled for eight stacks

    def get(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A part of the step, compiled or as it is."""
        if not self.compiles:
            return function
        if name not in self._compiled:
            self._compiled[name] = compile_quietly(function, dynamic=False)
        return self._compiled[name]
