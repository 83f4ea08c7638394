"""Which of the model's parameters a tensor in a file is: under another name, or several in a row; its plan by that."""

from __future__ import annotations

import importlib
import re
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from mupscale.core import Axis, Entry, Initial, Plan, Shape, naming
from mupscale.hf.describe.building import Config, sketch_model
from mupscale.hf.describe.given_roles import GIVEN, entry_given
from mupscale.hf.describe.multipliers import grown
from mupscale.system import MupscaleError

_OLD = re.compile(r"(.*\.)?(attn|attention)\.(masked_)?bias|.*rotary_emb\.inv_freq")  # that older versions saved


@dataclass(frozen=True)
class InModel:
    """The parameters that a tensor in a file is made into.

    in_a_row: whether, of several, each is a part of the tensor along its first dimension, in this order.
    """

    names: tuple[str, ...]
    in_a_row: bool = True


def names_in_model(model: nn.Module, names: Iterable[str]) -> dict[str, InModel] | None:
    """By transformers' own table of what is called otherwise in files, or split; None where it has none."""
    try:
        from transformers import conversion_mapping
        from transformers import core_model_loading as loading

        table = conversion_mapping.get_model_conversion_mapping(model)
        renamed = [change for change in table if isinstance(change, loading.WeightRenaming)]
        converted = [change for change in table if isinstance(change, loading.WeightConverter)]
        prefix, own = getattr(model, "base_model_prefix", None), model.state_dict()
        found = {n: loading.rename_source_key(n, renamed, converted, prefix, own) for n in names}
        return {n: _all_targets(first, pattern, converted) for n, (first, pattern) in found.items()}
    except (ImportError, AttributeError, TypeError):  # another version of transformers
        return None


def _all_targets(first: str, pattern: str | None, converted: Iterable[Any]) -> InModel:
    """All that a tensor is split into, where transformers' table names the first of them for it."""
    split = (change for change in converted if pattern in change.source_patterns and len(change.target_patterns) > 1)
    change = next(split, None)
    if change is None:
        return InModel((first,))
    targets = change.target_patterns
    plain = [type(each).__name__ in ("Chunk", "Split") and each.dim == 0 for each in change.operations]
    return InModel(tuple(first.replace(targets[0], each, 1) for each in targets), plain == [True])


def plan_for_files(
    config: Config, plan: Plan, shapes: Mapping[str, Shape], grown_sizes: Mapping[int, int] | None = None
) -> Plan:
    """The plan by the names in the files, which transformers may load under others, or stack (one tensor per expert).

    shapes: of the narrow checkpoint's tensors. grown_sizes: what sizes of the model become, for tensors that it lacks.
    """
    model = sketch_model(config)
    names = names_in_model(model, shapes) or {name: InModel((name,)) for name in shapes}
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    entries: dict[str, Entry] = {}
    whole: dict[str, str] = {}
    for name, shape in shapes.items():
        planned = plan.names.get(names[name].names[0])
        entry = None if planned is None else _entry_in_file(plan, names[name], shape)
        if planned is None and (_OLD.fullmatch(name) or any(re.search(pattern, name) for pattern in ignored)):
            entry = Entry(shape, shape)
        if planned is None and entry is None:
            entry = entry_given(str(config.get("model_type")), name, shape, grown_sizes or {})
        if entry is None:
            raise _cannot_tell(name, shape, names[name], None if planned is None else plan[planned].narrow)
        if planned is not None and shape == plan[planned].narrow:
            first = whole.setdefault(planned, name)  # of tied ones, which draw the same noise
            if first != name:
                entries[first] = replace(entries[first], names=(*entries[first].names, name))
                continue
        entries[name] = replace(entry, names=(name,))
    by_model = {name: plan.names.get(first, first) for name in entries for first in names[name].names[:1]}
    statistics, initial = _initial_statistics(model), dict[str, Initial]()
    for name, entry in entries.items():
        own = plan.initial.get(by_model[name], Initial())
        if plan.fresh is not None:
            own = replace(own, std=own.std or 0.0, means=own.means or statistics.get(by_model[name], (0.0,)))
        if own.past_norms:  # a tensor may be a part of a parameter that has one dimension more
            ahead = len(plan[by_model[name]].narrow) - len(entry.narrow)
            own = replace(own, past_norms=tuple(d - ahead for d in own.past_norms if d >= ahead))
        initial[name] = own
    return Plan(entries, {}, initial, plan.mup, plan.tried_by)


def names_beside(config: Config, plan: Plan, shapes: Mapping[str, Shape]) -> list[str]:
    """Names in files of which the plan of the model tells nothing, nor anybody else."""
    model = sketch_model(config)
    names = names_in_model(model, shapes) or {name: InModel((name,)) for name in shapes}
    ignored = [_OLD, *map(re.compile, getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())]
    given = GIVEN.get(str(config.get("model_type")), {})
    return [
        name
        for name in shapes
        if not {*names[name].names} & plan.names.keys()
        and not any(pattern.search(name) for pattern in ignored)
        and not any(fnmatchcase(name, pattern) for pattern in given)
    ]


def class_with(config: Config, names: Collection[str]) -> str | None:
    """Another class of the model's kind that has these parameters, as one with all heads; None where there is none."""
    module = importlib.import_module(type(sketch_model(config)).__module__)
    classes = [
        name for name, one in vars(module).items() if isinstance(one, type) and one.__module__ == module.__name__
    ]
    for name in sorted(classes):
        with suppress(MupscaleError, TypeError):
            made = sketch_model({**config, "architectures": [name]})
            if {*names} <= {n for n, _ in made.named_parameters(remove_duplicate=False)}:
                return name
    return None


def _initial_statistics(model: nn.Module) -> dict[str, tuple[float, ...]]:
    """Buffers that start at 1: the running variance of a BatchNorm, which divides, and the gain of a frozen one."""
    ones = ("running_var", "weight")
    norms = {path: module for path, module in naming.modules(model).items() if hasattr(module, "running_var")}
    return {
        f"{path}.{n}": (1.0,)
        for path, module in norms.items()
        for n, _ in module.named_buffers(recurse=False)
        if n in ones
    }


def _cannot_tell(name: str, shape: Shape, held: InModel, expected: Shape | None) -> MupscaleError:
    if len(held.names) > 1:
        return MupscaleError(
            f"'{name}' of shape {shape} holds {len(held.names)} parameters of the model ('{held.names[0]}', …) in an "
            f"order in which they cannot grow: load the model with transformers, and save it under its own names with "
            f"model.save_pretrained(folder, save_original_format=False)"
        )
    if expected is not None and len(expected) == len(shape):
        return MupscaleError(
            f"'{name}' has shape {shape}, and {expected} by the config: the checkpoint and its config.json do not "
            f"belong together"
        )
    return MupscaleError(
        f"'{name}' of shape {shape} is no parameter of the model that config.json names, nor a part of one "
        f"that could be widened alone: say what it is with mupscale.hf.register, or leave it out of the files"
    )


def _entry_in_file(plan: Plan, held: InModel, shape: Shape) -> Entry | None:
    """The entry of a tensor in a file: of one parameter, of a part of it, or of several in a row."""
    if len(held.names) == 1:
        return _entry_of_part(plan[plan.names[held.names[0]]], shape)
    if not held.in_a_row or any(name not in plan.names for name in held.names):
        return None
    entries = [plan[plan.names[name]] for name in held.names]
    first, growths = entries[0], [entry.axes.get(0, Axis()) for entry in entries]
    alike = {(e.narrow[1:], e.out, e.in_, e.constants, e.axes.get(1)) for e in entries}
    stds = [(plan.fresh or {}).get(plan.names[name], 0.0) for name in held.names]  # as measured, so of some spread
    whole = sum(entry.narrow[0] for entry in entries) == shape[0]
    if len(alike) > 1 or len({axis.times for axis in growths}) > 1 or max(stds) > 1.5 * min(stds) or not whole:
        return None
    parts = zip((entry.narrow[0] for entry in entries), growths, strict=True)
    sections = tuple(part for n, axis in parts for part in axis.sections or ((n, axis.block),))
    wide = (sum(entry.wide[0] for entry in entries), *first.wide[1:])
    joined = {0: Axis(growths[0].times, 1, sections, side=growths[0].side)} if 0 in first.axes else {}
    return replace(first, narrow=shape, wide=wide, axes={**first.axes, **joined})


def _entry_of_part(entry: Entry, shape: Shape) -> Entry | None:
    """The entry of a tensor in a file: the parameter itself, or one of those that are stacked and joined in it."""
    if shape == entry.narrow:
        return entry
    ahead = len(entry.narrow) - len(shape)
    axes = {d - ahead: axis for d, axis in entry.axes.items()}
    in_blocks = any(axis.block != 1 or axis.sections for axis in axes.values())
    if ahead not in (0, 1) or in_blocks or any(d < 0 for d in axes):
        return None
    if any(n % part for n, part in zip(entry.narrow[ahead:], shape, strict=True)):
        return None
    wide = tuple(grown(n, axes[d].times) if d in axes else n for d, n in enumerate(shape))
    return replace(entry, narrow=shape, wide=wide, axes=axes)
