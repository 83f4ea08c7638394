"""What grows in the config of a model that is not described: fields by their usual names, in each of its parts.

A config of several parts has others in it (text_config, vision_config); a list holds the sizes of stages.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from mupscale.core import Number
from mupscale.hf.describe.architecture import Config
from mupscale.hf.describe.building import sketch_model, transformers_config
from mupscale.hf.describe.multipliers import PartTimes, Times, grown, how_to_grow_alike
from mupscale.system import MupscaleError

FIELDS = {
    "hidden": (
        "hidden_size",
        "n_embd",
        "d_model",
        "dim",
        "embedding_size",
        "attention_hidden_size",
        "embed_dim",
        "hidden_sizes",
        "decoder_hidden_size",
    ),
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
        "intermediate_size_mlp",
    ),
    "heads": (
        "num_attention_heads",
        "n_head",
        "n_heads",
        "num_heads",
        "attention_heads",
        "encoder_attention_heads",
        "decoder_attention_heads",
        "linear_num_key_heads",
        "linear_num_value_heads",
        "n_groups",
    ),
    "kv": ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_head_kv"),
}
"""Names that transformers' configs have for what grows; a field that is null follows from the others and stays so."""

HEAD_DIM = ("head_dim", "d_kv", "kv_channels", "attention_head_size")

AS_HIDDEN = ("word_embed_proj_dim", "pooler_output_size")
"""Sizes that grow with the hidden size where they are equal to it."""

FOLLOWS = {
    ("siglip", "text", "projection_size"): ("vision", "hidden_size"),
    ("siglip2", "text", "projection_size"): ("vision", "hidden_size"),
    ("qwen2_vl", "vision", "hidden_size"): ("text", "hidden_size"),
}
"""Sizes of one part that another part reads, by model_type, part and field: they grow with that part's."""

_END = "_config"


def part_names(config: Config) -> list[str]:
    """The parts of a model of several: text, vision, audio; none for a model that is one.

    >>> part_names({"text_config": {"hidden_size": 8}, "num_attention_heads": 2})  # the others say it once more
    []
    >>> part_names({"text_config": {"hidden_size": 8}, "vision_config": {}})
    ['text', 'vision']
    """
    if any(is_size(config.get(name)) for name in FIELDS["heads"]):
        return []
    return [name.removesuffix(_END) for name, value in config.items() if name.endswith(_END) and _is_model(value)]


def _is_model(value: object) -> bool:
    return isinstance(value, Mapping) and "quant_method" not in value


def part_config(config: Config, part: str) -> dict[str, Any]:
    """config.json of a part, with what transformers takes where it leaves fields out."""
    built = getattr(transformers_config(config), part + _END)
    return {**built.to_dict(), **config[part + _END]}


def wide_config(config: Config, times: Times, *, wider_heads: bool = False) -> dict[str, Any]:
    """config.json with every field that grows multiplied, in each part by its own multipliers.

    wider_heads: let heads have more units where hidden grows and they stay, which only a run shows to be right.

    >>> wide_config({"model_type": "convnext", "hidden_sizes": [4, 8]}, Times.of(2))
    {'model_type': 'convnext', 'hidden_sizes': [8, 16]}
    """
    parts = part_names(config)
    if isinstance(times, PartTimes) and (strangers := {name for name, _ in times.parts} - {*parts}):
        there = f"its parts are {', '.join(parts)}" if parts else "config.json names no parts"
        raise MupscaleError(f"'{min(strangers)}' is not a part of this model that grows: {there}")
    if not parts:
        return _wide_part(config, times, wider_heads)
    wide = {part: part_config(config, part) for part in parts}
    for part in parts:
        if (own := times.of_part(part)) != Times():
            wide[part] = _wide_part(wide[part], own, wider_heads)
    for (model_type, part, name), (of, field) in FOLLOWS.items():
        if model_type == config.get("model_type"):
            wide[part][name] = wide[of][field]
    return {**config, **{part + _END: content for part, content in wide.items()}}


def sizes_of(config: Config) -> dict[str, Any]:
    """Every field with a usual name, of a part with the part's name before it."""
    names = [name for group in (*FIELDS.values(), HEAD_DIM) for name in group]
    if parts := part_names(config):
        every = {part: sizes_of(part_config(config, part)) for part in parts}
        return {f"{part}.{name}": size for part, sizes in every.items() for name, size in sizes.items()}
    return {name: config[name] for name in names if config.get(name) is not None}


def parts_of(config: Config) -> dict[str, int]:
    """hidden, ffn, heads and kv by the first field with a usual name; where there are more, they grow in proportion."""
    if parts := part_names(config):
        every = {part: parts_of(part_config(config, part)) for part in parts}
        return {f"{part}.{name}": size for part, sizes in every.items() for name, size in sizes.items()}
    named = {part: [config[n] for n in names if isinstance(config.get(n), int)] for part, names in FIELDS.items()}
    return {part: sizes[0] for part, sizes in named.items() if sizes and is_size(sizes[0])}


def ffn_that_follows_hidden(config: Config, times: Times) -> int | None:
    """What the feed-forward size becomes where transformers makes it of the hidden size by itself; else None.

    >>> mamba = {"model_type": "mamba", "hidden_size": 64, "intermediate_size": 128, "expand": 2}
    >>> ffn_that_follows_hidden(mamba, Times.of("hidden=2"))
    256
    """
    fields = [name for name in FIELDS["ffn"] if is_size(config.get(name))]
    left = {name: value for name, value in config.items() if name not in fields}
    wider = {name: _grown(left[name], times.hidden) for name in FIELDS["hidden"] if is_size(left.get(name))}
    try:
        before, after = (vars(transformers_config(one)).get(fields[0]) for one in (left, {**left, **wider}))
    except (IndexError, MupscaleError):
        return None
    return after if before == config[fields[0]] and isinstance(after, int) and after != before else None


def _wide_part(config: Config, times: Times, wider_heads: bool) -> dict[str, Any]:
    """config.json with every field that grows multiplied."""
    fields = {part: [name for name in names if is_size(config.get(name))] for part, names in FIELDS.items()}
    if not fields["hidden"]:
        raise MupscaleError(f"config.json has no known field for the hidden size ({', '.join(FIELDS['hidden'])})")
    explicit = any(is_size(config.get(name)) for name in HEAD_DIM)
    also = {n: grown(config[n], times.hidden) for n in AS_HIDDEN if config.get(n) == config[fields["hidden"][0]]}
    if times.hidden != times.heads and fields["heads"] and not explicit and not (wider_heads and times.heads == 1):
        hidden, heads = fields["hidden"][0], fields["heads"][0]
        alike = all(isinstance(config[name], int) for name in (hidden, heads))
        if alike and _takes_head_dim(config, config[hidden] // config[heads]):
            return _wide_part({**config, "head_dim": config[hidden] // config[heads]}, times, wider_heads)
        advice = how_to_grow_alike(config[hidden], config[heads], times) if alike else "let both grow alike"
        raise MupscaleError(f"head_dim is {hidden} / {heads} here, and must stay the same: {advice}")
    if times.ffn not in (1, times.hidden) and not fields["ffn"]:
        raise MupscaleError(
            f"config.json has no separate size for the feed-forward layers ({', '.join(FIELDS['ffn'])}): let ffn grow "
            f"as hidden does, {times.hidden} times"
        )
    wide = {name: _grown(config[name], getattr(times, part)) for part, names in fields.items() for name in names}
    return {**config, **wide, **also}


def _takes_head_dim(config: Config, size: int) -> bool:
    """Whether a head_dim in config.json is what heads consist of, where none is given: tried on sketches."""
    with suppress(MupscaleError):
        shapes = [
            [tuple(p.shape) for p in sketch_model({**config, **more}).parameters()]
            for more in ({}, {"head_dim": size}, {"head_dim": 2 * size})
        ]
        return shapes[0] == shapes[1] != shapes[2]
    return False


def _grown(size: int | list[int], times: Number) -> int | list[int]:
    return [grown(n, times) for n in size] if isinstance(size, list | tuple) else grown(size, times)


def is_size(value: object) -> bool:
    """A positive number, or a list of such.

    >>> is_size(8), is_size([8, 16]), is_size(True), is_size(None)
    (True, True, False, False)
    """
    if isinstance(value, list | tuple):
        return len(value) > 0 and all(map(is_size, value))
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
