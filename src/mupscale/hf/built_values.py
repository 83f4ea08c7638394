"""Tensors of a config's model as transformers initialises them, without the rest of the model.

New units of what starts as a pattern (decays, sinusoids) take the values that the wide model is built with. The whole
model is made on the meta device; the tensors that are asked for get memory, and transformers' own initialisation fills
them: it has to be able to, since it fills whatever a checkpoint lacks in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mupscale.core import naming
from mupscale.growth import no_pattern
from mupscale.hf.building import Config, build_model, quiet_transformers

_INITIALISED = "_is_hf_initialized"  # how transformers marks what it need not initialise again


def build_tensors(config: Config, own_names: Mapping[str, str]) -> dict[str, Tensor]:
    """Parameters and buffers of the model, in the dtype that transformers builds them in.

    own_names: by the names that are wanted, those that the model has. An error names the first tensor that the model
    lacks, or that its initialisation leaves without a value.
    """
    if not own_names:
        return {}
    model = build_model(config, "meta")
    for module in model.modules():
        vars(module).pop(_INITIALISED, None)
    known = {**naming.parameters(model), **naming.buffers(model)}
    for name, own in own_names.items():
        if own not in known:
            raise no_pattern(name)
        _give_memory(model, own)

    initialise: Any = getattr(model, "initialize_weights", None)
    if initialise is not None:
        with torch.random.fork_rng(devices=[]), torch.no_grad(), quiet_transformers():
            torch.manual_seed(0)
            initialise()

    tensors = {**naming.parameters(model), **naming.buffers(model)}
    built = {name: tensors[own].detach() for name, own in own_names.items()}
    for name, values in built.items():
        if values.is_meta or bool(values.isnan().any()):
            raise no_pattern(name)
    return built


def _give_memory(model: nn.Module, name: str) -> None:
    """Replace a parameter or buffer on the meta device by one that holds NaN, which shows whether it is written."""
    path, _, local = name.rpartition(".")
    module = model.get_submodule(path)
    if local in module._buffers:
        buffer = module._buffers[local]
        assert buffer is not None
        module._buffers[local] = _unwritten(buffer)
    else:
        parameter = module._parameters[local]
        assert parameter is not None
        module._parameters[local] = nn.Parameter(_unwritten(parameter), requires_grad=parameter.requires_grad)


def _unwritten(like: Tensor) -> Tensor:
    """Memory of a tensor's shape and dtype, NaN all over."""
    return torch.full(like.shape, float("nan"), dtype=like.dtype)
