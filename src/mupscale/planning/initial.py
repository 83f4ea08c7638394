"""What a model's parameters are when it is freshly built, and which of their dimensions are widths of its family."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext, suppress

import torch
from torch import Tensor, nn

from mupscale.core import Entry, Plan, Width, naming
from mupscale.system import MupscaleError

_WIDE_ENOUGH = 64  # below this width an initialisation says little about wide ones

Sketch = Callable[[Width], nn.Module]
"""A family's member at a width, without memory."""


def find_width_dims(sketch: Sketch, base: Width) -> dict[str, set[int]]:
    """Dimensions that change when the widths double, together or one at a time."""
    names = list(base.sizes)
    probes = [base.times(2)]
    if len(names) > 1:
        probes += [base.times(2, [name]) for name in names]
    width_dims: dict[str, set[int]] = {}
    small = all_tensors(sketch(base))
    for number, width in enumerate(probes):
        with suppress(Exception) if number else nullcontext():  # a width alone may not be buildable
            for name, tensor in all_tensors(sketch(width)).items():
                if name in small and small[name].dim() == tensor.dim():
                    grown = {d for d in range(tensor.dim()) if tensor.shape[d] != small[name].shape[d]}
                    width_dims.setdefault(name, set()).update(grown)
    if not any(width_dims.values()):
        raise MupscaleError(
            f"no parameter changes when the width doubles from {base.plain}: does build use its argument?"
        )
    return width_dims


def find_depth_size(sketch: Sketch, base: Width) -> str | None:
    """The one of a width's sizes that is a number of blocks: with twice as much of it there are more parameters."""
    if base.is_plain or len(base.sizes) < 2 or not base.is_whole:
        return None
    depths = []
    small = all_tensors(sketch(base)).keys()
    for name in base.sizes:
        with suppress(Exception):  # a size alone may not be buildable
            if len(all_tensors(sketch(base.times(2, [name]))).keys() - small):
                depths.append(name)
    if len(depths) > 1:
        raise MupscaleError(
            f"both {depths[0]} and {depths[1]} change the number of parameters, but only one size may do that"
        )
    return depths[0] if depths else None


def default_init_at(base: Width, model: nn.Module, width_dims: Mapping[str, set[int]]) -> Width:
    """The base, or its smallest multiple at which every matrix is 64 wide: a base of 2 may be 2 heads of 32.

    model: the member of the family at the base.
    """
    tensors = all_tensors(model)
    widths = [tensors[n].shape[d] for n, dims in width_dims.items() if tensors[n].dim() > 1 for d in dims]
    size = max(base.size, min(widths, default=0))
    return base.times(max(1, math.ceil(_WIDE_ENOUGH / size))) if base.is_whole else base


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


def means_of(plan: Plan, name: str) -> tuple[float, ...]:
    """The initial means of a parameter of which there are new units; an error where nothing is known of these."""
    if plan.fresh is None or plan.means is None:
        raise MupscaleError(
            "fresh units need an initialisation to be drawn from. Build the wide model on a real device, with its own "
            "initialisation; or make the plan with fresh=build (a freshly built narrow model, or the function that "
            "builds it); or use a Family; or grow by copies (grow=mupscale.Copies(…))"
        )
    if name not in plan.means:
        raise no_pattern(name)
    return plan.means[name]


def no_pattern(name: str) -> MupscaleError:
    """The error where new units of what starts as a pattern have no wide model to take their values from."""
    return MupscaleError(
        f"'{name}' starts as a pattern, neither constant nor random, so new units take the values that the wide model "
        "is built with; but no such model is in memory here. Grow by copies, to a whole multiple of the width. For "
        "models of your own: build the wide one on a real device, and grow with mupscale.upscale(narrow, wide)"
    )


def rescale_spread(p: Tensor, std: float, fold: float, *, centred: bool) -> None:
    """Give the tensor this standard deviation, about 0, or about its own mean, which is kept, times fold."""
    pieces, count = p.detach().reshape(-1).split(_PIECE), max(1, p.numel())  # a large tensor is not copied whole
    center = sum(float(piece.double().sum()) for piece in pieces) / count if centred else 0.0
    spread = math.sqrt(sum(float((piece.double() - center).square().sum()) for piece in pieces) / count)
    if spread == 0:
        p.mul_(fold)
    else:
        p.sub_(center).mul_(std / spread).add_(center * fold)


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
