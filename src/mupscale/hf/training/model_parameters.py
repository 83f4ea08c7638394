"""A model's parameters as plans and optimizers see them: names, shapes, which are one tensor, which are decayed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from mupscale.core import Entry, Initial, Plan, Shape, naming
from mupscale.hf.describe import Config, family_of_config, model_class, sketch_model
from mupscale.hf.files import Record
from mupscale.system import MupscaleError, checks_arguments

_IN_BLOCK = re.compile(r"[^.]+\.\d+\.")  # the first of a name's numbered modules, as in model.layers.0.mlp
_NO_DECAY = re.compile(r"bias|layernorm|rmsnorm|(^|\.|_)norm(\.|$)")


def shapes_of(model: nn.Module) -> dict[str, Shape]:
    """Shapes of all parameters, tied ones under each of their names."""
    named = naming.unwrap(model).named_parameters(remove_duplicate=False)
    return {naming.canonical(name): tuple(p.shape) for name, p in named}


def match_plan(model: nn.Module, plan: Plan, small: Config | None = None) -> Plan:
    """The plan with the parameters that the model has, under its own names, tied as they are there.

    small: config.json of the model that was upscaled, where the wide one may have been loaded with another head.
    """
    taken: dict[str, str] = {}
    parameters: dict[str, Entry] = {}
    initial: dict[str, Initial] = {}
    for group in naming.aliases(naming.unwrap(model).named_parameters(remove_duplicate=False)):
        if strangers := [name for name in group if name not in plan.names]:
            raise MupscaleError(f"the model has the parameter '{strangers[0]}', which the upscaled one does not have")
        entries = {plan.names[name]: replace(plan.parameters[plan.names[name]], names=()) for name in group}
        first = next(iter(entries))
        if any(entry != entries[first] for entry in entries.values()):
            _refuse_new_readout(group, type(naming.unwrap(model)).__name__, small)
            raise MupscaleError(
                f"'{group[0]}' and '{group[1]}' are one tensor in this model, but were two when it was upscaled. Load "
                "it with tie_word_embeddings as in its config.json"
            )
        if first in taken:
            raise MupscaleError(
                f"'{taken[first]}' and '{group[0]}' are two tensors in this model, but were one when it was upscaled. "
                "Load it with tie_word_embeddings as in its config.json"
            )
        taken.update(dict.fromkeys(entries, group[0]))
        parameters[group[0]] = replace(entries[first], names=group)
        own = plan.initial.get(first, Initial())
        initial[group[0]] = own if plan.fresh is None else replace(own, std=own.std or 0.0)
    if missing := [name for name in plan.parameters if name not in taken]:
        raise MupscaleError(f"the model lacks the parameter '{missing[0]}', which the upscaled one has")
    return Plan(parameters, {}, initial, plan.mup, plan.tried_by)


def plan_for_model(model: nn.Module, record: Record) -> Plan:
    """The plan from the first model to this one, which may have another head than the one that grew.

    A head that reads what was folded for a tied readout takes the constant back.
    """
    plan, own = record.whole_plan(), naming.unwrap(model)
    if shapes_of(model).keys() <= plan.names.keys() or not hasattr(own, "config"):
        return match_plan(model, plan, record.config)
    kind, tied = type(own).__name__, {"tie_word_embeddings": getattr(own.config, "tie_word_embeddings", False)}
    ours = family_of_config({**record.first_config, "architectures": [kind], **tied}).plan(record.times, initial=False)
    entries, back = dict(ours.parameters), set[float]()
    blocks = {found[0] for name in plan.names if (found := _IN_BLOCK.search(name))}
    for name, entry in ours.parameters.items():
        known = [n for n in plan.names if f".{n}".endswith(f".{name}") or f".{name}".endswith(f".{n}")]
        if len(entry.names) > 1:
            _refuse_new_readout(entry.names, kind, record.config)
        if known:
            entries[name] = replace(plan[plan.names[known[0]]], names=entry.names)
            back |= {float(entry.fold) / float(entries[name].fold)} - {1.0}
        elif entry.in_ and len(back) == 1:
            entries[name] = entry.with_constants(fold=next(iter(back)) * entry.fold)
        if not known and (found := _IN_BLOCK.search(name)) and found[0] in blocks:  # it belongs to no other head
            upscaled = model_class(record.first_config).__name__
            raise MupscaleError(
                f"the model has the parameter '{name}', which the upscaled one does not have. Load it as {upscaled}"
            )
    return match_plan(model, replace(ours, parameters=entries), record.config)


def _refuse_new_readout(group: Sequence[str], kind: str, small: Config | None) -> None:
    """An error where one of the names of a tensor is of a head that the model lacked when it was upscaled."""
    if small is None:
        return
    upscaled = sketch_model(small)
    known = tuple(f".{name}" for name in shapes_of(upscaled))  # which may be the body alone, without its prefix
    if new := [name for name in group if not f".{name}".endswith(known)]:
        raise MupscaleError(
            f"'{new[0]}' is one tensor with '{group[0]}' in this model, and the {type(upscaled).__name__} that was "
            "upscaled had no such readout, so the norm before it lacks the 1/k that a tied readout needs when the "
            f"width grows k times. Load the small model as {kind}, save it, and upscale that; or load this one with "
            "tie_word_embeddings=False, and its readout starts afresh"
        )


def refuse_untrainable(model: nn.Module) -> None:
    """Adapters and quantised weights are no parameters that a width's rules could speak of."""
    for path, module in naming.modules(model).items():
        if type(module).__module__.split(".")[0] == "peft":
            raise MupscaleError(
                f"the model has a LoRA or another PEFT adapter ('{path or type(module).__name__}'): its small matrices "
                "have no axes to widen. Merge it (merge_and_unload), and train the whole model"
            )
    quantised = getattr(naming.unwrap(model), "is_quantized", False)
    for name, p in naming.parameters(model).items():
        if re.search(r"(^|[._])lora_", name):
            raise MupscaleError(
                f"'{name}' is a parameter of a LoRA adapter, which has no axes to widen. Merge the adapter, and train "
                "the whole model"
            )
        if quantised or not p.is_floating_point() or p.itemsize < 2:
            raise MupscaleError(
                f"the model is quantised ('{name}' is stored as {p.dtype}), so its weights cannot be trained. Load it "
                "in float32 or bfloat16, without a quantization_config"
            )


@checks_arguments
def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Names in two groups, as transformers' Trainer makes them: weight decay for all but biases and norms.

    For `groups=` of param_groups, which puts parameters for names: torch's optimizers take none. Frozen parameters are
    in neither.

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3))
    >>> [(group["params"], group["weight_decay"]) for group in decay_groups(model, 0.1)]
    [(['0.weight'], 0.1), (['0.bias', '1.weight', '1.bias'], 0.0)]
    """
    norms = tuple(f"{path}." for path, module in naming.modules(model).items() if isinstance(module, nn.LayerNorm))
    trained = [name for name, p in naming.parameters(model).items() if p.requires_grad]
    spared = [name for name in trained if name.startswith(norms) or _NO_DECAY.search(name.lower())]
    decayed = [name for name in trained if name not in {*spared}]
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": spared, "weight_decay": 0.0}]
