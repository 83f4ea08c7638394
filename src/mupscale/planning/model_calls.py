"""How a model is called on a batch, and what is said where it does not run on it."""

from __future__ import annotations

import inspect
import random
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from mupscale.core import copy_model, naming
from mupscale.planning.precision import KeepDouble
from mupscale.system import MupscaleError, ways_out


def call_arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """How a model is called on a batch: a tuple is its positional arguments, a dict its keywords.

    >>> call_arguments({"tokens": 1}), call_arguments(1)
    (((), {'tokens': 1}), ((1,), {}))
    """
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)), {}


def run_on_batch(model: nn.Module, inputs: Any, *, in_double: bool = False) -> Any:
    """What the model returns for a batch; what it raises is passed on in a sentence, as the cause of a MupscaleError.

    in_double: the model and the batch are in float64, and everything stays so.

    >>> run_on_batch(nn.Linear(2, 3), (torch.ones(1, 2), torch.ones(1)))
    Traceback (most recent call last):
    mupscale.system.errors.MupscaleError: the batch gives 2 arguments, and Linear.forward takes (input): pass what ...
    """
    args, kwargs = call_arguments(inputs)
    try:
        with KeepDouble() if in_double else nullcontext():
            return model(*args, **kwargs)
    except Exception as error:
        check_takes(model, inputs)
        kind, said = type(naming.unwrap(model)).__name__, " ".join(f"{type(error).__name__}: {error}".split())
        if in_double and _runs_in_float32(model, inputs):
            raise MupscaleError(
                f"{kind} does not run on the batch in float64 ({said}), but a plan by running needs "
                f"float64{ways_out(double='let nothing in the model ask for float32', no_inputs='leave out inputs=')}"
            ) from error
        raise MupscaleError(
            f"{kind} does not run on the batch ({said}): pass what the model is called with: a tensor, a tuple of "
            "arguments or a dict of keywords"
        ) from error


def check_takes(model: nn.Module, inputs: Any) -> None:
    """An error that names the arguments of the model's `forward` where these are not what it can be called with.

    >>> check_takes(nn.Linear(2, 3), {"x": torch.ones(1, 2)})
    Traceback (most recent call last):
    mupscale.system.errors.MupscaleError: the batch gives x=, and Linear.forward takes (input): pass what the model ...
    """
    args, kwargs = call_arguments(inputs)
    plain = naming.unwrap(model)
    try:
        signature = inspect.signature(plain.forward)
        signature.bind(*args, **kwargs)
    except ValueError:
        return  # what has no signature cannot be looked at
    except TypeError:
        given = ", ".join(f"{name}=" for name in kwargs) or f"{len(args)} argument{'s' * (len(args) != 1)}"
        raise MupscaleError(
            f"the batch gives {given}, and {type(plain).__name__}.forward takes ({', '.join(signature.parameters)}): "
            "pass what the model is called with: a tensor, a tuple of arguments or a dict of keywords, without labels "
            "that only the loss needs"
        ) from None


def _runs_in_float32(model: nn.Module, inputs: Any) -> bool:
    """Whether a model that fails in float64 does run, so that the precision is what it fails for."""
    single = tree_map_only(Tensor, lambda t: t.float() if t.is_floating_point() else t, inputs)
    args, kwargs = call_arguments(single)
    try:
        with torch.no_grad():
            copy_model(model).float()(*args, **kwargs)
    except Exception:  # whatever it is
        return False
    return True


@contextmanager
def drawing(seed: int, tensors: Iterable[Tensor]) -> Iterator[None]:
    """Inside, the CPU and the devices of these tensors draw from a seed; afterwards they go on where they were.

    So do Python's own generator and NumPy's, with which transformers masks sound.

    >>> with drawing(0, []):
    ...     first = torch.randn(2)
    >>> with drawing(0, []):
    ...     print(torch.equal(first, torch.randn(2)))
    True
    """
    devices = sorted({tensor.device.index for tensor in tensors if tensor.is_cuda})
    before = random.getstate(), numpy.random.get_state()
    try:
        with torch.random.fork_rng(devices=devices):
            for generator in (torch.default_generator, *(torch.cuda.default_generators[index] for index in devices)):
                generator.manual_seed(seed)
            random.seed(seed)
            numpy.random.seed(seed)
            yield
    finally:
        random.setstate(before[0])
        numpy.random.set_state(before[1])
