"""What a model's parameters are when it is freshly built."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor, nn

from mupscale.core import Entry, Plan, naming


def all_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters under all their names, and buffers."""
    model = naming.unwrap(model)
    pairs = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {naming.canonical(name): tensor for name, tensor in pairs}


_FEW_NUMBERS, _ENOUGH_NUMBERS = 4, 256  # of a parameter in one model, and in all that are drawn
_SMALL_MODEL = 10_000  # numbers of a model that may be drawn often
_PIECE = 1 << 20  # numbers that are measured in double precision at a time
_MONOTONE = 8  # numbers of which no random draw is sorted
_MOST_PARTS = 16  # equal parts of an axis with a constant each, such as the gates of a recurrent layer


def initial_std(draws: list[dict[str, nn.Parameter]]) -> dict[str, float]:
    """Std of each parameter over freshly initialised models; 0 where it is constant, or the same in every draw."""
    stds = {}
    for name, first in draws[0].items():
        if len(draws) > 1 and all(torch.equal(first, draw[name]) for draw in draws[1:]):
            stds[name] = 0.0
        elif first.numel() < _FEW_NUMBERS and first.numel() * len(draws) >= _ENOUGH_NUMBERS:  # about one mean for all
            stds[name] = math.sqrt(_variance(torch.cat([draw[name].detach().flatten() for draw in draws])))
        else:
            stds[name] = math.sqrt(sum(_variance(draw[name]) for draw in draws) / len(draws))
    return stds


def count_draws(draws: Sequence[Mapping[str, Tensor]], names: Collection[str]) -> int:
    """How many models to draw for the spread of these parameters: more where a small model has few numbers of one."""
    few = [
        p.numel()
        for name, p in draws[0].items()
        if name in names and 0 < p.numel() < _FEW_NUMBERS and not all(torch.equal(p, draw[name]) for draw in draws[1:])
    ]
    if not few or sum(p.numel() for p in draws[0].values()) > _SMALL_MODEL:
        return len(draws)
    return max(len(draws), _ENOUGH_NUMBERS // min(few))


def initial_means(
    draws: Sequence[Mapping[str, nn.Parameter]], stds: Mapping[str, float]
) -> dict[str, tuple[float, ...]]:
    """Mean of each parameter over freshly initialised models, for each of the equal parts that constants have.

    What starts as a pattern, which is nothing to draw, has none: ().
    """
    means = {}
    for name, std in stds.items():
        first = draws[0][name].detach()
        if std == 0:
            means[name] = _constant_parts(first)
        elif len(draws) == 1 and _has_pattern(first):
            means[name] = ()
        else:  # one that may be an accident is within six standard errors of 0
            count = max(1, sum(draw[name].numel() for draw in draws))
            mean = sum(float(draw[name].detach().sum(dtype=torch.float64)) for draw in draws) / count
            means[name] = (mean if std > 0 and abs(mean) > 6 * std / math.sqrt(count) else 0.0,)
    return means


def _has_pattern(values: Tensor) -> bool:
    """Whether one draw shows that it is none: along an axis it repeats, is sorted, or neighbours are alike."""
    for d in range(values.dim()):
        steps = values.diff(dim=d)
        if not steps.numel():
            continue
        if not steps.any() or (values.shape[d] >= _MONOTONE and bool((steps >= 0).all() or (steps <= 0).all())):
            return True
        alike = 1 - float(steps.float().square().mean() / (2 * values.float().var(correction=0)))
        if alike > 6 / math.sqrt(steps.numel()):
            return True
    return False


def with_initial(
    plan: Plan, entries: Mapping[str, Entry], stds: Mapping[str, float], means: Mapping[str, tuple[float, ...]]
) -> Plan:
    """The plan with the initial values that μP has at its wide width.

    entries: how the measured model becomes the wide one. stds, means: as measured.
    """
    wide_means = {}
    for name, parts in means.items():
        fold, offset = float(entries[name].fold), float(entries[name].offset)
        wide_means[name] = tuple(part * fold + offset * (fold - 1) for part in parts)
    wide_stds = {name: std * entries[name].init for name, std in stds.items()}
    return plan.with_initial("std", wide_stds).with_initial("means", wide_means)


def _constant_parts(values: Tensor) -> tuple[float, ...]:
    """The constants of the fewest equal parts along the first axis; () where they are too many, or of one unit each."""
    if values.numel() == 0:
        return (0.0,)
    rows = values.double().reshape(len(values) if values.dim() else 1, -1)
    for count in range(1, min(_MOST_PARTS, max(1, len(rows) // 2)) + 1):
        if len(rows) % count == 0:
            parts = rows.reshape(count, -1)
            if bool((parts == parts[:, :1]).all()):
                return tuple(float(value) for value in parts[:, 0])
    return ()


def _variance(p: Tensor) -> float:
    mean, pieces = float(p.detach().sum(dtype=torch.float64)) / max(1, p.numel()), p.detach().reshape(-1).split(_PIECE)
    return sum(float((piece.double() - mean).square().sum()) for piece in pieces) / max(1, p.numel())
