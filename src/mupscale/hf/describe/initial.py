"""What a model starts with, by the law that its miniatures show: a constant, or a power of the fan-in or of the layers.

Miniatures are initialised with numbers that have the mean and the spread of their distribution exactly, so that a few
of them show the law itself: +σ and −σ in turn for normal numbers, evenly spaced ones for uniform numbers; and in a
second draw the same mirrored.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mupscale.core import Shape, naming
from mupscale.hf.describe.building import Config, build_model, built_in_float64, sketch_model
from mupscale.hf.describe.config_fields import parts_of
from mupscale.hf.describe.miniatures import LAYER, LAYERS, counterparts, miniature_configs, shallow_config
from mupscale.hf.describe.multipliers import Times
from mupscale.planning import initial_means

Means = dict[str, tuple[float, ...]]
_SMALL = 0.05  # of the spread: a mean below that is an accident


@dataclass(frozen=True)
class _Start:
    """What the parameters of one miniature start with."""

    shapes: Mapping[str, Shape]
    stds: Mapping[str, float]
    means: Means


def initial_law(config: Config) -> tuple[dict[str, float], Means]:
    """Standard deviations and means of all parameters of the model that a config names, which is not built.

    >>> config = {"model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 8}
    >>> stds, means = initial_law(config)
    >>> stds["transformer.wte.weight"], round(stds["transformer.h.7.mlp.c_proj.weight"], 6)  # 0.02 / √16
    (0.02, 0.005)
    >>> means["transformer.h.7.ln_1.weight"]
    (1.0,)
    """
    real = {name: tuple(p.shape) for name, p in naming.parameters(sketch_model(config)).items()}
    small, large = miniature_configs(config, Times())
    first, second = (_start(json.dumps(one, sort_keys=True)) for one in (small, large))
    layers, few = _layers(real), _layers(first.shapes)
    third = first
    if layers != few:
        third = _start(json.dumps(_with_layers_of(small, shallow_config(config, 2)), sort_keys=True))
    like, deep = (counterparts(config, real, one.shapes) for one in (first, third))
    hidden = [parts_of(each).get("hidden", 1) for each in (small, large, config)]
    units = hidden[1] / hidden[0], hidden[2] / hidden[0]
    stds: dict[str, float] = {}
    means: Means = {}
    for name, shape in real.items():
        one = like[name]
        std = _scaled(first.stds[one], second.stds[one], first.shapes[one], second.shapes[one], shape, units)
        more = _layers(third.shapes) / few
        std *= (layers / few) ** _power(first.stds[one], third.stds[deep[name]], more)
        stds[name] = std
        if one in second.means:
            means[name] = second.means[one]
    return stds, means


def _with_layers_of(config: dict[str, Any], deep: Mapping[str, Any]) -> dict[str, Any]:
    """The miniature with the layers of another config."""
    changed = {n: v for n, v in deep.items() if n in config and (isinstance(v, list) or n in LAYERS)}
    parts = {n: _with_layers_of(v, deep[n]) for n, v in config.items() if n.endswith("_config") and isinstance(v, dict)}
    return {**config, **changed, **parts}


def _layers(names: Mapping[str, Any]) -> int:
    return 1 + max((int(match["number"]) for match in map(LAYER.fullmatch, names) if match), default=0)


def _scaled(std: float, other: float, first: Shape, second: Shape, real: Shape, units: tuple[float, float]) -> float:
    """The law at the real shape: of the fan-in where that differs between the miniatures, else of the hidden size.

    units: how much larger the hidden size of the second miniature is, and that of the real model.
    """
    ratios = [(b / a, r / a) for a, b, r in zip(first, second, real, strict=True) if a != b]
    grown, by = ratios[-1] if ratios else units  # the last dimension is what a Linear reads
    return std * float(by ** _power(std, other, grown))


def _power(std: float, other: float, ratio: float) -> float:
    """The exponent of a law, in quarters."""
    if std == 0 or other == 0 or ratio == 1:
        return 0.0
    return round(4 * math.log(other / std) / math.log(ratio)) / 4


@lru_cache(maxsize=64)
def _start(config: str) -> _Start:
    draws = []
    for mirrored in (False, True):
        with built_in_float64(), _EvenDraws(mirrored), _truncated_draws():
            draws.append(naming.parameters(build_model(json.loads(config))))
    stds: dict[str, float] = {}
    means: Means = {}
    for name, first in draws[0].items():
        values = torch.stack([draw[name].detach().double().flatten() for draw in draws])
        drawn = values[:, values[0] != values[1]]
        spread = float(drawn.var(correction=0).sqrt()) if drawn.numel() else 0.0
        stds[name] = float(f"{spread:.12g}")  # without what the sum rounds
        if drawn.numel():
            mean = float(drawn.mean())
            means[name] = (mean if abs(mean) > _SMALL * stds[name] else 0.0,)
        else:  # a pattern, such as a table of sinusoids, has no mean to speak of; new columns of a table start at 0
            constant = initial_means([{name: first}], {name: 0.0})
            means |= constant if constant or first.dim() == 1 else {name: (0.0,)}
    return _Start({name: tuple(p.shape) for name, p in draws[0].items()}, stds, means)


@contextmanager
def _truncated_draws() -> Iterator[None]:
    """Inside, numbers that torch would draw until all are within bounds have the moments of that distribution."""
    before = torch.nn.init._no_grad_trunc_normal_

    @torch.no_grad()
    def draw(tensor: Tensor, mean: float, std: float, a: float, b: float, generator: Any = None) -> Tensor:
        low, high = (a - mean) / std, (b - mean) / std
        heights = [math.exp(-(x**2) / 2) / math.sqrt(2 * math.pi) for x in (low, high)]
        within = (math.erf(high / math.sqrt(2)) - math.erf(low / math.sqrt(2))) / 2
        shift = (heights[0] - heights[1]) / within
        variance = 1 + (low * heights[0] - high * heights[1]) / within - shift**2
        return tensor.normal_(mean + std * shift, std * math.sqrt(variance))

    torch.nn.init._no_grad_trunc_normal_ = draw
    try:
        yield
    finally:
        torch.nn.init._no_grad_trunc_normal_ = before


class _EvenDraws(TorchDispatchMode):
    """Random numbers with the moments of their distribution; mirrored: the others of a pair."""

    def __init__(self, mirrored: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.mirrored = mirrored

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, aten = func(*args, **(kwargs or {})), torch.ops.aten
        if func is aten.normal_.default:
            mean, std = [*args[1:], 0.0, 1.0][:2] if len(args) != 2 else (args[1], 1.0)
            return result.copy_(mean + std * self._signs(result))
        if func is aten.uniform_.default:
            low, high = [*args[1:], 0.0, 1.0][:2] if len(args) != 2 else (args[1], 1.0)
            return result.copy_(low + (high - low) * self._ranks(result))
        if func.overloadpacket in (aten.randn, aten.randn_like):
            return result.copy_(self._signs(result))
        return result.copy_(self._ranks(result)) if func.overloadpacket in (aten.rand, aten.rand_like) else result

    def _signs(self, like: Tensor) -> Tensor:
        number = torch.arange(like.numel(), device=like.device) + self.mirrored
        return (1 - 2 * (number % 2)).to(like).view(like.shape)

    def _ranks(self, like: Tensor) -> Tensor:
        ranks = (torch.arange(like.numel(), device=like.device) + 0.5) / max(1, like.numel())
        return (1 - ranks if self.mirrored else ranks).to(like).view(like.shape)
