"""A checkpoint as a family over its config: roles are learnt by running miniatures of it, and hold at its own size.

A miniature has the same numbers of heads, groups and experts, and every kind of layer; what such parts consist of is
smaller. So the blocks in which units are copied are parts of their axes as in the real model, or have the same length.
Two miniatures of different sizes tell which.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import torch
from torch import nn

from mupscale.core import Entry, Plan, Role, Shape, naming
from mupscale.growth import Copies, Fresh
from mupscale.hf.describe.architecture import Config
from mupscale.hf.describe.batches import make_batches
from mupscale.hf.describe.building import build_model, built_in_float64, sketch_model
from mupscale.hf.describe.config_fields import FIELDS, HEAD_DIM, is_size, part_config, part_names, wide_config
from mupscale.hf.describe.multipliers import Times
from mupscale.planning import How, all_tensors, build_plan, plan, roles_for_any_width
from mupscale.system import MupscaleError

LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers")
"""Names that transformers' configs have for numbers of layers."""

_DIMS = re.compile(r"(_head_dim|_proj_dim|^state_size|_output_size)$")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")  # of a layer, or an expert
_DEPTHS = (2, 3, 4, 6, 8, 12, 24, 48)
_FEW = 1 << 24  # numbers in a model that is built to be run
_SMALLEST = 4  # units of a head: fewer could not be told from one
_VOCABULARY = 64


@dataclass(frozen=True)
class Learnt:
    """What a miniature shows: the plan between its models, by their own names."""

    narrow: nn.Module
    wide: nn.Module
    plan: Plan


def roles_from_miniatures(config: Config, times: Times) -> dict[str, Role]:
    """The role of every parameter of the model that a config names, which is never built.

    >>> config = {"model_type": "llama", "hidden_size": 512, "num_attention_heads": 4, "num_key_value_heads": 4}
    >>> roles = roles_from_miniatures({**config, "intermediate_size": 1024, "num_hidden_layers": 32}, Times.of(2))
    >>> print(roles["model.layers.31.self_attn.o_proj.weight"])
    Role(out=0, in_=1, in_block=128)
    """
    first, second = (_learn(one, times) for one in miniatures(config, times))
    real = all_tensors(sketch_model(config))
    roles = roles_for_any_width(first.narrow, first.wide, _roles(first)) if times.takes_any_ratio else _roles(first)
    others = _roles(second)
    by_pattern: dict[str, list[str]] = {}
    for name in roles:
        by_pattern.setdefault(_pattern(name), []).append(name)
    kinds = _kinds_of_layers(config)
    found: dict[str, Role] = {}
    for name, tensor in real.items():
        candidates = by_pattern.get(_pattern(name), [])
        alike = [n for n in candidates if kinds(n) == kinds(name)] or candidates
        if not alike:
            continue  # a buffer that is not saved, of which there is no plan
        ours, theirs = (tuple(all_tensors(one.narrow)[alike[0]].shape) for one in (first, second))
        found[name] = _at_size(roles[alike[0]], others[alike[0]], ours, theirs, tuple(tensor.shape))
    return found


def plan_by_miniatures(config: Config, times: Times) -> Plan:
    """The plan by the model's own names, as miniatures of it show it.

    >>> config = {"model_type": "gpt2", "n_embd": 256, "n_head": 4, "n_layer": 12}
    >>> plan_by_miniatures(config, Times.of(2))["transformer.h.11.attn.c_attn.weight"].axes[1]
    Axis(times=2, block=64, sections=())
    """
    small, large = sketch_model(config), sketch_model(wide_config(config, times, wider_heads=True))
    how: How = "fresh" if times.takes_any_ratio else "copies"
    return build_plan(small, large, roles=roles_from_miniatures(config, times), how=how, assume=True)


def miniatures(config: Config, times: Times) -> list[dict[str, Any]]:
    """Two configs of models that are small enough to be run, one of them with twice as many units in each part.

    >>> config = {"model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "intermediate_size": 11008}
    >>> config |= {"num_key_value_heads": 32, "num_hidden_layers": 32, "vocab_size": 32000}
    >>> [small["hidden_size"] for small in miniatures(config, Times.of(2))]
    [128, 256]
    """
    whole = _whole(config)
    shallow, wanted = _shallow(whole), _patterns(sketch_model(config))
    divisors = [d for d in (1 << n for n in range(12, 0, -1)) if _divides(shallow, d)]
    for divisor in (*divisors, 1):  # a small model is its own miniature
        pair = [_divided(shallow, d) for d in (divisor, max(1, divisor // 2))]
        with suppress(MupscaleError):
            for one in pair:
                small, large = sketch_model(one), sketch_model(wide_config(one, _whole_times(times), wider_heads=True))
                if sum(p.numel() for p in large.parameters()) > _FEW or _patterns(small) != wanted:
                    raise MupscaleError("too large, or of other parts")
            return pair
    raise MupscaleError(
        f"the library cannot build a smaller '{config.get('model_type')}' model with the same parts to follow its units"
    )


def _whole(config: Config) -> dict[str, Any]:
    """config.json, its parts with what transformers takes where they leave fields out."""
    return {**config, **{f"{part}_config": part_config(config, part) for part in part_names(config)}}


def _shallow(config: Config) -> dict[str, Any]:
    """The config with the fewest layers that have all kinds of parameters, and a small vocabulary."""
    wanted = _patterns(sketch_model(config))
    for depth in _DEPTHS:
        shallow = _with_depth(config, depth)
        with suppress(MupscaleError):
            if _has_all_kinds(config, shallow) and _patterns(sketch_model(shallow)) == wanted:
                return shallow
    return config if isinstance(config, dict) else dict(config)


def _is_part(name: str, value: object) -> bool:
    return name.endswith("_config") and isinstance(value, Mapping)


def _with_depth(config: Config, depth: int) -> dict[str, Any]:
    shallow = dict(config)
    counts = {config[name] for name in LAYERS if isinstance(config.get(name), int)}
    for name, value in config.items():
        if _is_part(name, value):
            shallow[name] = _with_depth(value, depth)
        elif name in LAYERS and isinstance(value, int):
            shallow[name] = min(value, depth)
        elif isinstance(value, list) and len(value) in counts:
            shallow[name] = value[:depth]
        elif name == "vocab_size" and isinstance(value, int):
            shallow[name] = min(value, _VOCABULARY)
    tokens = [name for name, value in shallow.items() if name.endswith("_token_id") and isinstance(value, int)]
    return {**shallow, **{name: 0 for name in tokens if shallow[name] >= _VOCABULARY}}


def _has_all_kinds(config: Config, shallow: Config) -> bool:
    """Whether lists with a word for each layer still hold every word."""
    pairs = [(value, shallow[name]) for name, value in config.items() if isinstance(value, list)]
    return all({*map(str, whole)} == {*map(str, part)} for whole, part in pairs)


def _dims(config: Config) -> Iterator[tuple[str, int]]:
    """Fields that say how many units something consists of, but for those of counts, tables and windows."""
    for name, value in config.items():
        named = name in FIELDS["hidden"] or name in FIELDS["ffn"] or name in HEAD_DIM or _DIMS.search(name)
        if named and isinstance(value, int) and is_size(value):
            yield name, value


def _divides(config: Config, divisor: int) -> bool:
    """Whether all sizes can be so much smaller, and heads keep some units."""
    parts = [value for name, value in config.items() if _is_part(name, value)]
    heads = max((config[n] for n in FIELDS["heads"] if isinstance(config.get(n), int)), default=1)
    explicit = [config[n] for n in HEAD_DIM if isinstance(config.get(n), int)]
    for name, value in _dims(config):
        if name in FIELDS["ffn"]:
            continue
        least = _SMALLEST * (heads if name in FIELDS["hidden"] and not explicit else 1)
        if value % divisor or value // divisor < least:
            return False
    return all(_divides(part, divisor) for part in parts)


def _divided(config: Config, divisor: int) -> dict[str, Any]:
    small = {n: _divided(value, divisor) if _is_part(n, value) else value for n, value in config.items()}
    return {**small, **{name: max(_SMALLEST, value // divisor) for name, value in _dims(config)}}


def _whole_times(times: Times) -> Times:
    return times.as_copies() if times.takes_any_ratio else times


def _learn(config: Config, times: Times) -> Learnt:
    grown = wide_config(config, _whole_times(times), wider_heads=True)
    with torch.random.fork_rng(devices=[]), built_in_float64():
        torch.manual_seed(0)
        narrow, wide = build_model(config), build_model(grown)
        batch = make_batches(narrow, size=8)[0]
        ran = plan(narrow, wide, inputs=batch, grow=Fresh() if times.takes_any_ratio else Copies())
    return Learnt(narrow, wide, ran)


def _roles(learnt: Learnt) -> dict[str, Role]:
    """What the plan says, under all names of a tensor."""
    entries = {**learnt.plan.buffers, **learnt.plan.parameters}
    return {alias: _role(name, entry) for name, entry in entries.items() for alias in entry.names or (name,)}


def _role(name: str, entry: Entry) -> Role:
    blocks = [{entry.axes[d].block for d in side if entry.axes[d].times != 1} or {1} for side in (entry.out, entry.in_)]
    sections = {entry.axes[d].sections for d in entry.axes if entry.axes[d].sections}
    if max(map(len, blocks)) > 1 or len(sections) > 1:
        raise MupscaleError(f"'{name}' is copied in several orders, which no role can express")
    return Role(
        out=entry.out,
        in_=entry.in_,
        out_block=blocks[0].pop(),
        in_block=blocks[1].pop(),
        out_sections=next(iter(sections), ()),
        fold=entry.fold,
        offset=entry.offset,
        keep=None if entry.fold == 1 and entry.keep == 1 else entry.keep,
    )


def _at_size(role: Role, other: Role, first: Shape, second: Shape, real: Shape) -> Role:
    """The role of a tensor of the real shape, of which miniatures with these shapes have these roles.

    Lengths that are the same in both stay; others grow with the axis, or with what of it grows.
    """
    if not real:
        return role
    out, in_ = (next(iter(side), 0) for side in role.dims(len(real)))
    lengths = [n for n, _ in role.out_sections]
    if len(lengths) == len(other.out_sections) and first[out] != second[out]:
        more = [theirs - n for n, (theirs, _) in zip(lengths, other.out_sections, strict=True)]
        scale = Fraction(real[out] - first[out], second[out] - first[out])
        lengths = [int(n + each * scale) for n, each in zip(lengths, more, strict=True)]
    if sum(lengths) != real[out]:
        lengths = [n * real[out] // first[out] for n, _ in role.out_sections]

    def block_of(d: int, block: int, theirs: int, units: Fraction) -> int:
        is_constant = block == theirs and first[d] != second[d]
        return block if is_constant or block == 1 else int(block * units)

    theirs = [block for _, block in other.out_sections] or [0] * len(lengths)
    grown = zip(lengths, role.out_sections, theirs, strict=False)
    sections = [(real_n, block_of(out, block, each, Fraction(real_n, n))) for real_n, (n, block), each in grown]
    return replace(
        role,
        out_block=block_of(out, role.out_block, other.out_block, Fraction(real[out], first[out])),
        in_block=block_of(in_, role.in_block, other.in_block, Fraction(real[in_], first[in_])),
        out_sections=tuple(sections),
    )


def _pattern(name: str) -> str:
    return _NUMBER.sub("#", name)


def _patterns(model: nn.Module) -> set[str]:
    return {_pattern(name) for name in naming.parameters(model)}


def _kinds_of_layers(config: Config) -> Any:
    """A function that tells of a name what the config's lists say of its layer."""
    lists = [value for value in config.values() if isinstance(value, list) and len(value) > 1]

    def kind(name: str) -> tuple[str, ...]:
        number = _NUMBER.search(name)
        at = int(number[0]) if number else 0
        return tuple(str(one[at]) for one in lists if at < len(one))

    return kind
