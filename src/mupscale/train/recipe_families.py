"""The family that a recipe's model belongs to: made, measured and tried once in a process, for all of its runs."""

from __future__ import annotations

import inspect
import json
from typing import Any

import torch
from torch import Tensor, nn

from mupscale.core import DepthRule, RuleSet, WholeWidth
from mupscale.data import Data, as_data
from mupscale.family import Family
from mupscale.system import MupscaleError, PlanError
from mupscale.train.class_paths import Spec, load_of_kind

_ROWS = 4  # on which small models are compared


_KEPT: dict[Any, Family] = {}  # those of the last eight asked for


def family_of(
    model: Spec, data: Spec, base: WholeWidth, init_at: WholeWidth | None, depth: DepthRule = "none"
) -> Family:
    """The family of a model that is trained on these data; depth: its rule for that, `RuleSet.depth`.

    Where its modules do not tell what a parameter is, small models are run on a few examples, which show it. What has
    been found out about it (plans, initial values, whether copies are exact on these data) holds for all runs.
    """
    try:
        plain = json.dumps([model.init_args, data.init_args, base, init_at, depth], sort_keys=True)
    except (TypeError, ValueError):  # arguments that are more than plain values
        return _make(model, data, base, init_at, RuleSet(depth=depth))
    key = (model.load(), data.load(), plain, torch.get_default_dtype())
    family = _KEPT.pop(key) if key in _KEPT else _make(model, data, base, init_at, RuleSet(depth=depth))
    _KEPT[key] = family
    while len(_KEPT) > 8:
        del _KEPT[next(iter(_KEPT))]
    return family


def _make(model: Spec, data: Spec, base: WholeWidth, init_at: WholeWidth | None, rules: RuleSet) -> Family:
    def build(*width: int | float, **widths: int | float) -> nn.Module:
        takes = inspect.signature(model.load()).parameters if width else {}
        if width and not any(one.name == "width" or one.kind is one.VAR_KEYWORD for one in takes.values()):
            names = list(takes) or ["ARGUMENT"]
            raise MupscaleError(
                f"{model.class_path} has no argument called width; it has {', '.join(names)}. Name the one that is its "
                f"width, in width or in base, such as width: {{{names[0]}: {width[0]}}}. Plain numbers in grow, "
                f"family.sizes and study.widths then mean it"
            )
        return model.make(nn.Module, **({"width": width[0]} if width else widths))

    family = Family(build, base, init_at=init_at, rules=rules)
    try:
        if family.depth_size is None:
            family.plan(base)
            return family
    except PlanError:
        pass
    except MupscaleError:  # it is said where the plan is needed
        return family
    # of modules that do not tell, and of what writes into the residual stream, it is found by running small models
    return Family(build, base, init_at=init_at, rules=rules, inputs=few_examples(make_data(data)))


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
