"""What grows in a config: fields by their usual names, in each of its parts.

A config of several parts has others in it (text_config, vision_config); a list holds the sizes of stages.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from mupscale.core import Number
from mupscale.hf.building import Config, sketch_model, transformers_config
from mupscale.hf.multipliers import Times, as_every_stage, grown, how_to_grow_alike
from mupscale.system import MupscaleError, setting

_FIELDS = {
    "hidden": "hidden_size n_embd d_model dim embedding_size attention_hidden_size embed_dim hidden_sizes "
    "decoder_hidden_size",
    "ffn": "moe_intermediate_size intermediate_size ffn_dim n_inner d_ff ffn_hidden_size hidden_dim encoder_ffn_dim "
    "decoder_ffn_dim shared_expert_intermediate_size intermediate_size_mlp",
    "heads": "num_attention_heads n_head n_heads num_heads attention_heads encoder_attention_heads "
    "decoder_attention_heads linear_num_key_heads linear_num_value_heads n_groups",
    "kv": "num_key_value_heads num_kv_heads n_kv_heads n_head_kv",
}
FIELDS = {part: tuple(names.split()) for part, names in _FIELDS.items()}
"""Names that transformers' configs have for what grows; a field that is null follows from the others and stays so."""

HEAD_DIM = ("head_dim", "d_kv", "kv_channels", "attention_head_size")

AS_HIDDEN = ("word_embed_proj_dim", "pooler_output_size", "pooler_hidden_size", "lru_width")
"""Sizes that grow with the hidden size where they are equal to it."""
_WORDS_OF_THEIR_OWN = {"electra": "embedding_size"}  # the same, by model_type

FOLLOWS = {
    ("siglip", "text", "projection_size"): ("vision", "hidden_size"),
    ("siglip2", "text", "projection_size"): ("vision", "hidden_size"),
    ("qwen2_vl", "vision", "hidden_size"): ("text", "hidden_size"),
}
"""Sizes of one part that another part reads, by model_type, part and field: they grow with that part's."""

_END = "_config"


def part_names(config: Config) -> list[str]:
    """The parts of a model of several: text, vision, audio; none for a model that is one."""
    if any(is_size(config.get(name)) for name in FIELDS["heads"]):
        return []
    named = [name for name in config if name.endswith(_END) and name not in ("attn_config", "quantization_config")]
    models = [name for name in named if isinstance(config[name], Mapping) and "quant_method" not in config[name]]
    return [name.removesuffix(_END) for name in models]


def part_config(config: Config, part: str) -> dict[str, Any]:
    """config.json of a part, with what transformers takes where it leaves fields out."""
    built = getattr(transformers_config(config), part + _END)
    return {**built.to_dict(), **config[part + _END]}


def wide_config(config: Config, times: Times) -> dict[str, Any]:
    """config.json with every field that grows multiplied, in each part by its own multipliers."""
    parts = part_names(config)
    if strangers := {name for name, _ in times.parts} - {*parts}:
        there = f"its parts are {', '.join(parts)}" if parts else "config.json names no parts"
        raise MupscaleError(f"'{min(strangers)}' is not a part of this model that grows: {there}")
    if not parts:
        return _wide_part(growable_form(config, times), times)
    wide = {part: part_config(config, part) for part in parts}
    for part in parts:
        if (own := times.of_part(part)) != Times():
            wide[part] = _wide_part(wide[part], own)
    for (model_type, part, name), (of, field) in FOLLOWS.items():
        if model_type == config.get("model_type"):
            wide[part][name] = wide[of][field]
    return {**config, **{part + _END: content for part, content in wide.items()}}


def growable_form(config: Config, times: Times) -> Config:
    """The config, or one of the same model by whose fields it can grow so, where its own have no room for that."""
    if config.get("model_type") != "falcon" or times.heads == 1 or config.get("new_decoder_architecture"):
        return config
    if not config.get("multi_query", True) or not config.get("parallel_attn", True):
        return config
    return {**config, "new_decoder_architecture": True, "num_ln_in_parallel_attn": 1, "num_kv_heads": 1}


def sizes_of(config: Config) -> dict[str, Any]:
    """Every field with a usual name, of a part with the part's name before it."""
    names = [name for group in (*FIELDS.values(), HEAD_DIM) for name in group]
    if parts := part_names(config):
        every = {part: sizes_of(part_config(config, part)) for part in parts}
        return {f"{part}.{name}": size for part, sizes in every.items() for name, size in sizes.items()}
    config = _values(config)
    return {name: config[name] for name in names if config.get(name) is not None}


def parts_of(config: Config) -> dict[str, int]:
    """hidden, ffn, heads and kv by the first field with a usual name; where there are more, they grow in proportion."""
    return {part: size for part, size in parts_and_stages(config).items() if isinstance(size, int)}


def parts_and_stages(config: Config) -> dict[str, Any]:
    """The same, and the list where there is one size for each stage."""
    if parts := part_names(config):
        every = {part: parts_and_stages(part_config(config, part)) for part in parts}
        return {f"{part}.{name}": size for part, sizes in every.items() for name, size in sizes.items()}
    config = _values(config)
    found = dict[str, Any]()
    for part, names in FIELDS.items():
        sizes = [config[name] for name in names if is_size(config.get(name))]
        found |= {part: next((n for n in sizes if isinstance(n, int)), sizes[0])} if sizes else {}
    return found


def ffn_that_follows_hidden(config: Config, times: Times) -> int | None:
    """What the feed-forward size becomes where transformers makes it of the hidden size by itself; else None."""
    fields = [name for name in FIELDS["ffn"] if is_size(config.get(name))]
    left = {name: value for name, value in config.items() if name not in fields}
    wider = {name: _grown(left[name], times.hidden) for name in FIELDS["hidden"] if is_size(left.get(name))}
    try:
        before, after = (vars(transformers_config(one)).get(fields[0]) for one in (left, {**left, **wider}))
    except (IndexError, MupscaleError):
        return None
    return after if before == config[fields[0]] and isinstance(after, int) and after != before else None


def _values(config: Config) -> dict[str, Any]:
    """config.json with what transformers takes where it leaves a size out; null where that follows from others."""
    known = {name for group in (*FIELDS.values(), HEAD_DIM, AS_HIDDEN) for name in group}
    built: dict[str, Any] = {}
    with suppress(MupscaleError):  # of a part, which has been completed, or of what is refused later
        built = vars(transformers_config(config))
    left = {name: value for name, value in built.items() if name in known and config.get(name) is None}
    values = {**config, **{name: value for name, value in left.items() if is_size(value)}}
    hidden = next((values[n] for n in FIELDS["hidden"] if is_size(values.get(n))), None)
    nulls = [name for name in FIELDS["ffn"] if name in left and left[name] is None]
    if nulls and isinstance(hidden, int) and not any(is_size(values.get(name)) for name in FIELDS["ffn"]):
        key = json.dumps(config, sort_keys=True, default=repr)  # tried once for each config
        if key not in _USUAL_FFN:
            _USUAL_FFN[key] = _takes_size(config, {nulls[0]: 4 * hidden})
        values |= {nulls[0]: 4 * hidden} if _USUAL_FFN[key] else {}
    return values


_USUAL_FFN: dict[str, bool] = {}
"""By config, whether a null means a feed-forward size of 4 times the hidden size."""


def _wide_part(given: Config, times: Times) -> dict[str, Any]:
    """config.json with every field that grows multiplied."""
    config = _values(given)
    fields = {part: [name for name in names if is_size(config.get(name))] for part, names in FIELDS.items()}
    if not fields["hidden"]:
        raise MupscaleError(
            f"config.json has no field for the hidden size that is known ({', '.join(FIELDS['hidden'])})"
        )
    if config.get("pruned_heads"):
        raise MupscaleError(
            "heads were pruned from this model (pruned_heads in config.json), so that its layers differ in size; only "
            "a model with all its heads can be upscaled"
        )
    if config.get("add_cross_attention"):
        raise MupscaleError(
            "this model attends to an encoder (add_cross_attention in config.json), which would have to grow with it; "
            "only models that stand alone can be upscaled"
        )
    hidden = fields["hidden"][0]
    words = _WORDS_OF_THEIR_OWN.get(str(config.get("model_type")))
    fields["hidden"] = [n for n in fields["hidden"] if n != words or config[n] == config[hidden]]
    explicit = any(is_size(given.get(name)) for name in HEAD_DIM)
    also = {n: grown(config[n], times.hidden) for n in AS_HIDDEN if config.get(n) == config[hidden]}
    if times.hidden != times.heads and fields["heads"] and not explicit:
        heads = fields["heads"][0]
        alike = all(isinstance(config[name], int) for name in (hidden, heads))
        known = {name: config[name] for name in HEAD_DIM if is_size(config.get(name))}
        known = known or ({"head_dim": config[hidden] // config[heads]} if alike else {})
        if known and _takes_size(given, known):
            return _wide_part({**given, **known}, times)
        if times.heads != 1 or times.fresh:  # else heads become wider, if a run shows that they can
            advice = how_to_grow_alike(config[hidden], config[heads], times) if alike else as_every_stage()
            raise MupscaleError(f"head_dim is {hidden} / {heads} here, and it must stay: {advice}")
    if times.ffn not in (1, times.hidden) and not fields["ffn"]:
        raise MupscaleError(
            f"config.json has no separate size for the feed-forward layers ({', '.join(FIELDS['ffn'])}): let ffn grow "
            f"as hidden does, {times.hidden} times"
        )
    if times.kv != times.heads and not fields["kv"] and fields["heads"]:
        raise MupscaleError(
            f"{config.get('model_type')} has as many key/value heads as heads, so its kv heads cannot grow apart from "
            f"them. Leave kv out{'' if times.fresh else ' of ' + setting('times')}"
        )
    grows = {name: getattr(times, part) for part, names in fields.items() for name in names}
    wide: dict[str, Any] = {
        name: _grown(config[name], k) for name, k in grows.items() if k != 1 or given.get(name) is not None
    }
    attention = config.get("attn_config")
    if times.heads == 1 and isinstance(attention, Mapping) and attention.get("clip_qkv"):
        # MPT cuts queries, keys and values off at a number, which takes the constant of wider heads with them
        power = 0.25 if attention.get("softmax_scale") is None else 0.5
        wide["attn_config"] = {**attention, "clip_qkv": attention["clip_qkv"] * float(times.hidden) ** -power}
    return {**given, **wide, **also}


def _takes_size(config: Config, known: Mapping[str, int]) -> bool:
    """Whether such a field in config.json says what it does without it, where none is given: tried on sketches."""
    with suppress(MupscaleError):
        told: tuple[Mapping[str, int], ...] = ({}, known, {name: 2 * size for name, size in known.items()})
        shapes = [[tuple(p.shape) for p in sketch_model({**config, **more}).parameters()] for more in told]
        return shapes[0] == shapes[1] != shapes[2]
    return False


def _grown(size: int | list[int], times: Number) -> int | list[int]:
    return [grown(n, times) for n in size] if isinstance(size, list | tuple) else grown(size, times)


def is_size(value: object) -> bool:
    """A positive number, or a list of such."""
    if isinstance(value, list | tuple):
        return len(value) > 0 and all(map(is_size, value))
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


Size = int | str | Mapping[str, int]
"""Of the wide model; of a model of several parts, by their names, as in {"text": 1024} or "text=1024,vision=768"."""

Sizes = Mapping[str, Size | None]
"""By hidden, ffn, heads and kv; None for what is not asked for."""
