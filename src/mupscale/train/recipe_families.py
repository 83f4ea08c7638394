"""The family that a recipe's model belongs to: made, measured and tried once in a process, for all of its runs."""

from __future__ import annotations

import inspect
import json
from collections import OrderedDict
from collections.abc import Mapping
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn

from mupscale.core import DepthRule, RuleSet, WholeWidth
from mupscale.data import Data, as_data
from mupscale.family import Family
from mupscale.system import MupscaleError, PlanError
from mupscale.train.class_paths import Spec, load_of_kind

_MOST = 8  # families that are kept
_ROWS = 4  # on which small models are compared
_KEPT: OrderedDict[Any, Family] = OrderedDict()
_LOCK = Lock()


def family_of(
    model: Spec, data: Spec, base: WholeWidth, init_at: WholeWidth | None, depth: DepthRule = "none"
) -> Family:
    """The family of a model that is trained on these data; depth: its rule for that, `RuleSet.depth`.

    Where its modules do not tell what a parameter is, small models are run on a few examples, which show it. What has
    been found out about it (plans, initial values, whether copies are exact on these data) holds for all runs.
    """
    key = _key(model, data, base, init_at, depth)
    with _LOCK:
        if key is not None and key in _KEPT:
            _KEPT.move_to_end(key)
            return _KEPT[key]
    family = _make(model, data, base, init_at, depth)
    if key is not None:
        with _LOCK:
            _KEPT[key] = family
            while len(_KEPT) > _MOST:
                _KEPT.popitem(last=False)
    return family


def _key(model: Spec, data: Spec, base: WholeWidth, init_at: WholeWidth | None, depth: DepthRule) -> Any:
    """What a family depends on; none where arguments are more than plain values."""
    try:
        plain = json.dumps([model.init_args, data.init_args, base, init_at, depth], sort_keys=True)
    except (TypeError, ValueError):
        return None
    return model.load(), data.load(), plain, torch.get_default_dtype()


def _make(model: Spec, data: Spec, base: WholeWidth, init_at: WholeWidth | None, depth: DepthRule) -> Family:
    def build(*width: int | float, **widths: int | float) -> nn.Module:
        if width and not _takes_width(target := model.load()):
            names = list(inspect.signature(target).parameters) or ["ARGUMENT"]
            raise MupscaleError(
                f"{model.class_path} has no argument called width; it has {', '.join(names)}. Name the one that is its "
                f"width, in width or in base, such as width: {{{names[0]}: {width[0]}}}. Plain numbers in grow, "
                f"family.sizes and study.widths then mean it"
            )
        return _build(model, {"width": width[0]} if width else widths)

    rules = RuleSet(depth=depth)
    family = Family(build, base, init_at=init_at, rules=rules)
    if family.depth_size is not None:  # what writes into the residual stream is found by running small models
        inputs = few_examples(make_data(data))
        return Family(build, base, init_at=init_at, rules=rules, inputs=inputs)
    try:
        family.plan(base)
    except PlanError:
        return Family(build, base, init_at=init_at, inputs=few_examples(make_data(data)))
    except MupscaleError:  # it is said where the plan is needed
        pass
    return family


def _takes_width(target: Any) -> bool:
    """Whether a class or function has this argument, by name or among any that it takes."""
    parameters = inspect.signature(target).parameters.values()
    return any(one.name == "width" or one.kind is one.VAR_KEYWORD for one in parameters)


def _build(spec: Spec, widths: Mapping[str, int | float]) -> nn.Module:
    return spec.make(nn.Module, **widths)


def make_data(spec: Spec) -> Data:
    """Load the data: a Data, or what `as_data` makes one of."""
    try:
        return as_data(spec.call(load_of_kind(spec.class_path, Data)))
    except MupscaleError as error:
        if spec.class_path.startswith("mupscale."):
            raise
        raise MupscaleError(f"data: {spec.class_path}: {error}") from error


def few_examples(data: Data) -> Tensor:
    """Inputs on which small models are compared."""
    rows = torch.arange(_ROWS, device=data.rows_on or data.device) % data.size
    return data.examples(rows)[0].cpu()
