"""Architectures that nobody described: config fields by their usual names, and the core's walk over two sketches.

What comes out is a proposal. It counts only when the widened model has been verified, over training steps, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from mupscale.core import Entry, Plan, Shape
from mupscale.hf import models
from mupscale.hf.growth import Times
from mupscale.planning import Role, plan
from mupscale.system import MupscaleError

FIELDS = {
    "hidden": ("hidden_size", "n_embd", "d_model", "dim", "embedding_size", "attention_hidden_size"),
    "ffn": (
        "intermediate_size",
        "ffn_dim",
        "n_inner",
        "d_ff",
        "ffn_hidden_size",
        "hidden_dim",
        "encoder_ffn_dim",
        "decoder_ffn_dim",
        "moe_intermediate_size",
        "shared_expert_intermediate_size",
    ),
    "heads": (
        "num_attention_heads",
        "n_head",
        "n_heads",
        "num_heads",
        "attention_heads",
        "encoder_attention_heads",
        "decoder_attention_heads",
    ),
    "kv": ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_head_kv"),
}
"""Names that transformers' configs have for what grows; a field that is null follows from the others and stays so."""

HEAD_DIM = ("head_dim", "d_kv", "kv_channels", "attention_head_size")
_MOST = 64  # GB of float32 would take minutes to initialise


def plan_by_modules(config: Mapping[str, Any], times: Times, *, fresh: bool = True) -> tuple[dict[str, Any], Plan]:
    """The wide config and the plan, by the model's own names, of an architecture that is not described.

    fresh: measure the initial stds, which only noise needs, on narrow models built for it where memory allows.
    """
    try:
        wide = wide_config(config, times)
        small, large = models.sketch(config), models.sketch(wide)
        roles = mixture_roles(small)
        size = 4 * sum(p.numel() for p in small.parameters())
        if not fresh or not models.fits(2 * size) or size > _MOST << 30:
            return wide, plan(small, large, roles=roles)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return wide, plan(small, large, roles=roles, fresh=lambda: models.build(config))
    except MupscaleError as error:
        raise MupscaleError(f"{str(error).rstrip('.')}. {how_to_describe(config)}") from None


def how_to_describe(config: Mapping[str, Any]) -> str:
    """What to do about an architecture that its modules alone do not explain."""
    return (
        f"The architecture '{config.get('model_type')}' is not described, so its modules were asked; a description "
        f"of it (mupscale.hf.register) settles what they cannot tell: see 'Adding an architecture' in "
        f"docs/huggingface.md"
    )


def wide_config(config: Mapping[str, Any], times: Times) -> dict[str, Any]:
    """config.json with every field that grows multiplied."""
    found = {part: [name for name in names if _is_size(config.get(name))] for part, names in FIELDS.items()}
    if not found["hidden"]:
        raise MupscaleError(
            f"config.json has no field for the hidden size that is known ({', '.join(FIELDS['hidden'])})"
        )
    explicit = any(_is_size(config.get(name)) for name in HEAD_DIM)
    if times.hidden != times.heads and found["heads"] and not explicit:
        raise MupscaleError(
            f"head_dim is {found['hidden'][0]} / {found['heads'][0]} here, and it must stay: let hidden and heads grow "
            f"alike, as in --times hidden={times.hidden},ffn={times.ffn},heads={times.hidden}"
        )
    if times.ffn != times.hidden and not found["ffn"]:
        raise MupscaleError(
            f"config.json gives the feed-forward layers no size of their own ({', '.join(FIELDS['ffn'])}): let ffn "
            f"grow as hidden does, {times.hidden} times"
        )
    grown = {name: config[name] * getattr(times, part) for part, names in found.items() for name in names}
    return {**config, **grown}


def plan_for_files(config: Mapping[str, Any], plan: Plan, shapes: Mapping[str, Shape]) -> Plan:
    """The plan by the names in the files, which transformers may load under others, or stack (one tensor per expert).

    shapes: of the narrow checkpoint's tensors.
    """
    model = models.sketch(config)
    names, ignored = _names_in_model(model, shapes), getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    entries: dict[str, Entry] = {}
    fresh: dict[str, float] = {}
    whole: dict[str, str] = {}
    for name, shape in shapes.items():
        planned = plan.names.get(names[name])
        entry = None if planned is None else _part(plan[planned], shape)
        if planned is None and any(re.search(pattern, name) for pattern in ignored):  # masks of older versions
            entry = Entry(shape, shape)
        if entry is None:
            raise MupscaleError(
                f"'{name}' of shape {shape} is no parameter of the model that config.json names, nor a part of one "
                f"that could be widened alone. {how_to_describe(config)}"
            )
        if planned is not None and shape == plan[planned].narrow:
            first = whole.setdefault(planned, name)  # of tied ones, which draw the same noise
            if first != name:
                entries[first] = replace(entries[first], names=(*entries[first].names, name))
                continue
        entries[name] = replace(entry, names=(name,))
        fresh[name] = 0.0 if plan.fresh is None or planned is None else plan.fresh.get(planned, 0.0)
    return Plan(entries, fresh=None if plan.fresh is None else fresh)


def _names_in_model(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """By transformers' own table of what is called otherwise in files; as they are where it has none."""
    try:
        from transformers import conversion_mapping
        from transformers import core_model_loading as loading

        table = conversion_mapping.get_model_conversion_mapping(model)
        renamed = [change for change in table if isinstance(change, loading.WeightRenaming)]
        converted = [change for change in table if isinstance(change, loading.WeightConverter)]
        prefix, own = getattr(model, "base_model_prefix", None), model.state_dict()
        return {n: loading.rename_source_key(n, renamed, converted, prefix, own)[0] for n in names}
    except (ImportError, AttributeError, TypeError):  # another version of transformers
        return {name: name for name in names}


def _part(entry: Entry, shape: Shape) -> Entry | None:
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
    wide = tuple(n * axes[d].copies if d in axes else n for d, n in enumerate(shape))
    out, in_ = (tuple(d - ahead for d in side) for side in (entry.out, entry.in_))
    return replace(entry, narrow=shape, wide=wide, axes=axes, out=out, in_=in_)


def mixture_roles(model: nn.Module) -> dict[str, Role]:
    """Routers and stacked experts hold bare parameters, which transformers lays out alike nearly everywhere."""
    roles: dict[str, Role] = {}
    for path, module in model.named_modules():
        name = type(module).__name__
        for local, p in module.named_parameters(recurse=False):
            if name.endswith("Router") and local == "weight" and p.dim() == 2:
                roles[f"{path}.{local}"] = Role(out=0, in_=1)
            elif name.endswith("Experts") and p.dim() == 3 and local.endswith("proj"):
                hidden = getattr(module, "hidden_dim", None) or getattr(module, "hidden_size", None)
                straight = p.shape[1 if local == "down_proj" else 2] == hidden  # (expert, out, in), as in a Linear
                roles[f"{path}.{local}"] = Role(out=1, in_=2) if straight else Role(out=2, in_=1)
    return roles


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
