"""Miniatures of a config: models of its kind that are small enough to be run, and what they show of the real one.

A miniature has the same numbers of heads and groups, and every kind of layer; what such parts consist of is smaller,
and so are vocabularies and numbers of experts. So the blocks in which units are copied are parts of their axes as in
the real model, or have the same length. Two miniatures of different sizes tell which.

They also show what a model starts with, as a law: a constant, or a power of the fan-in or of the layers. For that they
are initialised with numbers that have the mean and the spread of their distribution exactly: +σ and −σ in turn for
normal numbers, evenly spaced ones for uniform numbers; and in a second draw the same mirrored.
"""

from __future__ import annotations

import itertools
import json
import math
import operator
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mupscale import planning
from mupscale.core import Axis, Initial, Plan, Role, Shape, naming, part_of_units
from mupscale.growth import EPS, Copies, Fresh, find_writers, upscale_untried
from mupscale.hf.building import (
    IN_MEMORY,
    Batch,
    Config,
    build_model,
    built_in_float64,
    in_one_line,
    make_batches,
    memory_shortage,
    quiet_transformers,
    sketch_model,
    transformers_config,
)
from mupscale.hf.config_fields import (
    AS_HIDDEN,
    FIELDS,
    HEAD_DIM,
    Times,
    growable_form,
    is_size,
    part_config,
    part_names,
    parts_of,
    wide_config,
)
from mupscale.system import MupscaleError, UncheckedPlan, warn

LAYERS = (
    *("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    *("encoder_layers", "decoder_layers", "num_encoder_layers", "num_decoder_layers"),
)
"""Names that transformers' configs have for a number of layers."""

LAYER = re.compile(r"(?P<list>(?:.*?\.)?(?:layers|layer|h|blocks?))\.(?P<number>\d+)\.(?P<local>.+)")
"""Names of a layer's tensors."""

_DIMS = re.compile(r"(_head_dim|_proj_dim|^state_size|_output_size)$")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_PER_TOKEN = ("num_experts_per_tok", "moe_top_k", "num_experts_per_token")
_GROUPS = ("n_group", "topk_group")  # of experts, which then stay
_LENGTHS = {"max_source_positions": 16, "vocab_size": 64, "chunk_size": 4}  # of tables and runs that need not be long
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")  # of a layer, or an expert
_DEPTHS = (2, 3, 4, 6, 8, 12, 24, 48)
_FEW = 1 << 26  # numbers in a model that is built to be run
_BYTES = 32  # for each number of the model itself, if that is run: it and a smaller one in float64, and their copies
_FEW_EXPERTS = 4
_SAME = 1e-8
_FEW_NEURONS = 32
_SMALLEST = 4  # units of a head: fewer could not be told from one


@dataclass(frozen=True)
class Shown:
    """What two miniatures show: the roles of their tensors by name, the shapes, and what norms do.

    unseen: what a batch did not show, in words. exact: whether copies are, and not fresh units alone (ALiBi's slopes).
    """

    roles: tuple[Mapping[str, Role], Mapping[str, Role]]
    shapes: tuple[Mapping[str, Shape], Mapping[str, Shape]]
    norms: Mapping[str, str] = field(default_factory=dict)
    past_norms: Mapping[str, tuple[int, ...]] | None = None
    unseen: str = ""
    exact: bool = True


def plan_by_miniatures(config: Config, times: Times) -> Plan:
    """The plan by the model's own names, as miniatures of it show it; the model itself is never built."""
    config = growable_form(config, times)
    small, large = sketch_model(config), sketch_model(wide_config(config, times))
    shown = learn(config, times)
    if shown.unseen:
        warn(f"of '{config.get('model_type')}' {shown.unseen}", UncheckedPlan)
    real, like = planning.all_tensors(small), counterparts(config, planning.all_tensors(small), shown.shapes[0])
    sides = _roles_of_all_widths(config, times, shown)
    roles, widths = dict[str, Role](), dict[str, set[int]]()
    for name, of in like.items():
        if of in shown.roles[0]:
            role, other = (each[of] for each in shown.roles)
            first, second = (each[of] for each in shown.shapes)
            whole = sides.get(of, role)
            dims = {d for side in whole.dims(real[name].dim()) for d in side}
            if dims >= {d for side in role.dims(real[name].dim()) for d in side}:
                role, widths[name] = replace(role, out=whole.out, in_=whole.in_), dims
            roles[name] = _at_size(role, other, first, second, tuple(real[name].shape))
    told: dict[str, Any] = {"how": "fresh" if times.fresh else "copies", "assume": True}
    planned = planning.build_plan(small, large, roles=roles, is_width=lambda n, d: d in widths.get(n, ()), **told)
    norms = {n: shown.norms[like[n]] for n in planned.parameters if like.get(n) in shown.norms}
    past = shown.past_norms
    past = None if past is None else {n: past[like[n]] for n in planned.parameters if like.get(n) in past}
    planned = planned.with_initial("norm", norms).with_initial("past_norms", past)
    return replace(planned, tried_by="small members")


def _roles_of_all_widths(config: Config, times: Times, shown: Shown) -> Mapping[str, Role]:
    """Roles in which every width is an output or an input, also those that do not grow now.

    μP's initial values go by that. Where not all sizes can grow at once (ALiBi's heads), those that can.
    """
    if 1 not in (times.hidden, times.ffn, times.heads, times.kv) or part_names(config):
        return shown.roles[1]
    ours = dict(sketch_model(config).named_parameters())

    def growing(times: Times) -> dict[str, tuple[bool, ...]]:
        """Of each parameter, which dimensions grow; of one that the small model lacks, such as a head's norm, none."""
        theirs = sketch_model(wide_config(config, times)).named_parameters()
        return {n: tuple(map(operator.ne, ours[n].shape, p.shape)) if n in ours else () for n, p in theirs}

    with suppress(MupscaleError):
        if growing(times) == growing(Times.of(2)):  # as where heads become wider, not more
            return shown.roles[1]
    for whole in (Times.of(2), Times(hidden=2, ffn=2)):
        with suppress(MupscaleError):
            return learn(config, whole).roles[1]
    return shown.roles[1]


def learn(config: Config, times: Times) -> Shown:
    """What miniatures of the config show of a growth by `times`; learnt once for all configs with the same ones."""
    whole = times.as_copies() if times.fresh else times
    for more in (0, 1):
        pair = miniature_configs(config, whole, more)
        small, large = (json.dumps(one, sort_keys=True) for one in pair)
        shown = _learn(small, large, whole, times.fresh)
        kinds, roles = _kinds_of_layers(pair[0]), dict[tuple[Any, ...], Role]()
        if all(roles.setdefault((_pattern(n), kinds(n)), role) == role for n, role in shown.roles[1].items()):
            break  # else the last layer is not as the first, and one between the two is looked at, too
    if not shown.exact:
        narrow, wide, batch = _pair(pair[0], times)
        silent = planning.build_plan(narrow, wide, roles=shown.roles[0], how="fresh", assume=True)
        if not planning.keeps_outputs(narrow, wide, silent, batch):
            raise MupscaleError(
                f"'{config.get('model_type')}' has constants that depend on its sizes, such as ALiBi's slopes, and "
                f"{times} times as many units would change those of the old ones. Grow 2 or 4 times, or grow other "
                "sizes"
            )
    return shown


@lru_cache(maxsize=256)
def _learn(first: str, second: str, times: Times, fresh: bool) -> Shown:
    config = json.loads(first)
    narrow, wide, batch = _pair(config, times)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UncheckedPlan)
        ran = planning.plan(narrow, wide, inputs=batch, grow=Fresh() if fresh else Copies())
    unseen = next((str(one.message) for one in caught if issubclass(one.category, UncheckedPlan)), "")
    roles, shapes, exact = planning.roles_of(ran), _shapes(narrow), ran.tried_by == "copies"
    others, theirs = dict(roles), shapes
    if second != first:  # there they have blocks in proportion, if that stands the check
        ours, large, more = _pair(json.loads(second), times)
        theirs = _shapes(ours)
        others = {n: _at_size(role, None, shapes[n], shapes[n], theirs[n]) for n, role in roles.items() if n in theirs}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UncheckedPlan)
            try:
                scaled = planning.build_plan(ours, large, roles=others, assume=True, how="copies" if exact else "fresh")
                if exact:
                    planning.check_plan_by_running(ours, large, scaled, more)
                stands = exact or planning.keeps_outputs(ours, large, scaled, more)
            except MupscaleError:
                stands = False
            if not stands:
                how = Copies() if exact else Fresh()
                others = planning.roles_of(planning.plan(ours, large, inputs=more, grow=how))
    if fresh:
        roles = planning.roles_for_any_width(narrow, wide, roles)
    unseen = unseen.partition(". Pass inputs=")[0]
    return Shown((roles, others), (shapes, theirs), ran.norms, ran.past_norms, unseen, exact)


def _pair(config: Config, times: Times) -> tuple[nn.Module, nn.Module, Batch]:
    """A miniature, the wider one, and a batch on which they run."""
    with torch.random.fork_rng(devices=[]), built_in_float64():
        torch.manual_seed(0)
        narrow, wide = (_with_constants(build_model(one)) for one in (config, wide_config(config, times)))
        for model in (narrow, wide):  # a cache is no output to compare, and hrm_text saves a config that breaks its own
            model.config.use_cache = False  # type: ignore[union-attr]
            _make_mild(model)
        return narrow, wide, batch_for(narrow)


@torch.no_grad()
def _make_mild(model: nn.Module) -> None:
    """Scale parameters with entries beyond ±1 into that range.

    A decay of exp(log 128), as Mamba 2's last head has it, forgets everything within a token: no batch would show what
    that head does, and longer and longer ones would be tried.
    """
    for p in model.parameters():
        largest = float(p.abs().max()) if p.numel() else 0.0
        if largest > 1:
            p.div_(largest)


def _with_constants(model: nn.Module) -> nn.Module:
    """The model with parameters that are never saved, as Marian's sinusoids, as what they are: each has its own."""
    unsaved = re.compile("|".join(getattr(model, "_keys_to_ignore_on_save", None) or ["(?!)"]))
    for name, p in list(model.named_parameters()):
        if unsaved.search(name) and not p.requires_grad:
            path, _, local = name.rpartition(".")
            delattr(model.get_submodule(path), local)
            model.get_submodule(path).register_buffer(local, p.detach(), persistent=False)
    return model


def moves_outputs(config: Config, times: Times) -> bool:
    """Whether new units move the outputs of a miniature although they start silent, as where a norm follows the sum."""
    whole = times.as_copies()
    return _moves_outputs(json.dumps(miniature_configs(config, whole)[0], sort_keys=True), whole)


@lru_cache(maxsize=64)
@torch.no_grad()
def _moves_outputs(config: str, times: Times) -> bool:
    narrow, wide, batch = _pair(json.loads(config), times)
    generator = torch.Generator().manual_seed(0)
    for p in narrow.parameters():
        p.add_(torch.randn(p.shape, generator=generator, dtype=p.dtype), alpha=0.3)
    with warnings.catch_warnings(), torch.enable_grad():
        warnings.simplefilter("ignore")
        ran = planning.plan(narrow, wide, inputs=batch, grow=Fresh())
    stds = {name: 0.1 if len(entry.narrow) > 1 else 0.0 for name, entry in ran.parameters.items()}
    start = planning.with_laws(ran, ran.parameters, {name: Initial(std, (0.0,)) for name, std in stds.items()})
    upscale_untried(narrow, wide, start, grow=Fresh(lossless=True))
    for module in (*narrow.modules(), *wide.modules()):
        for name in EPS:  # which a lossless growth divides
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 1e-30)
    with planning.KeepDouble():
        ours, theirs = (list(planning.tensors_in(model(**batch))) for model in (narrow, wide))
    pairs = [(a, b) for a, b in zip(ours, theirs, strict=True) if a.shape == b.shape and a.is_floating_point()]
    return any(planning.relative_difference(a, b) > _SAME for a, b in pairs)


def batch_for(model: nn.Module) -> Batch:
    """A small batch on which a miniature runs; an error of its own where there is none."""
    batch = make_batches(model, size=8)[0]
    try:
        with torch.no_grad(), quiet_transformers(), planning.KeepDouble():  # it says once what it runs without
            model(**batch)
    except Exception as error:  # whatever a model raises
        raise MupscaleError(
            f"{type(model).__name__} does not run on random inputs, so its units cannot be followed "
            f"({in_one_line(error)}). With a batch on which it does, {IN_MEMORY}"
        ) from None
    return batch


def find_residual_writers(config: Config) -> tuple[dict[str, float], dict[str, str]]:
    """By name, what of the layers writes into the residual stream, and the value at which it does not.

    And by the path of a miniature's layer that cannot be silent, why.
    """
    shapes, written, reasons = _writers(json.dumps(miniature_configs(config, Times())[0], sort_keys=True))
    real = naming.parameters(sketch_model(config))
    like = counterparts(config, real, shapes)
    return {name: written[like[name]] for name in real if like.get(name) in written}, dict(reasons)


@lru_cache(maxsize=64)
def _writers(config: str) -> tuple[dict[str, Shape], dict[str, float], dict[str, str]]:
    with torch.random.fork_rng(devices=[]), built_in_float64():
        torch.manual_seed(0)
        model = build_model(json.loads(config))
        batch = batch_for(model)
    shapes = _shapes(model)
    matches = filter(None, map(LAYER.fullmatch, naming.parameters(model)))
    paths = list(dict.fromkeys(f"{match['list']}.{match['number']}" for match in matches))
    writers, reasons = find_writers(model, paths, batch)
    return shapes, {f"{p}.{local}": value for p, each in writers.items() for local, value in each.items()}, reasons


def miniature_configs(config: Config, times: Times, more_layers: int = 0) -> list[dict[str, Any]]:
    """Two configs of models that are small enough to be run, one of them with twice as many units in each part."""
    shallow, wanted = shallow_config(config, more_layers), _patterns(sketch_model(config))
    divisors = [d for d in (1 << n for n in range(12, 0, -1)) if _divides(shallow, d)]
    error: MupscaleError | None = None
    for divisor in (*divisors, 1):  # a small model is its own miniature, and so is one that has none
        fewer = 1  # by what feed-forward layers can be smaller still: neurons are alike, and cost the most
        if divisor > 1 and times != Times():  # not for moments of draws
            sizes = [value for one in _with_parts(shallow) for name, value in _dims(one) if name in FIELDS["ffn"]]
            fewer = max(1, min(sizes, default=1) // (divisor * _FEW_NEURONS))
        pair = [_divided(shallow, d, fewer) for d in (divisor, max(1, divisor // 2))]
        try:
            models = [(sketch_model(one), sketch_model(wide_config(one, times))) for one in pair[divisor == 1 :]]
        except MupscaleError as refused:
            error = refused
            continue
        numbers = max(sum(p.numel() for p in large.parameters()) for _, large in models)
        is_small = numbers <= _FEW or (divisor == 1 and not memory_shortage(_BYTES * numbers))
        if is_small and all(_patterns(small) == wanted for small, _ in models):
            return pair
    raise error or MupscaleError(
        f"no smaller model with the parts of '{config.get('model_type')}' can be built, on which its units could be "
        f"followed, and memory is too small for the model itself"
    )


def shallow_config(config: Config, more_layers: int = 0) -> dict[str, Any]:
    """The config with the fewest layers that have all kinds of parameters, few experts and a small vocabulary."""
    whole = {**config, **{f"{part}_config": part_config(config, part) for part in part_names(config)}}
    told = {*LAYERS, *_EXPERTS, *_PER_TOKEN, *_GROUPS, *_LENGTHS}
    built = vars(transformers_config(config)).items()
    whole |= {name: value for name, value in built if name in told and name not in config and is_size(value)}
    wanted = _patterns(sketch_model(config))
    for depth in _DEPTHS:
        shallow = _with_depth(whole, depth + more_layers)
        lists = [(value, shallow[name]) for name, value in whole.items() if isinstance(value, list)]
        has_all_kinds = all({*map(str, words)} == {*map(str, left)} for words, left in lists)  # for each layer one
        with suppress(MupscaleError):
            if has_all_kinds and _patterns(sketch_model(shallow)) == wanted:
                return shallow
    return whole


def _is_part(name: str, value: object) -> bool:
    return name.endswith("_config") and isinstance(value, Mapping)


def _with_parts(config: Config) -> list[Config]:
    """The config and those in it."""
    return [config, *(each for name, value in config.items() if _is_part(name, value) for each in _with_parts(value))]


def _with_depth(config: Config, depth: int) -> dict[str, Any]:
    shallow = dict(config)
    counts = {config[name] for name in LAYERS if isinstance(config.get(name), int)}
    few = not any(config.get(name, 1) not in (None, 1) for name in _GROUPS)
    chosen = [config[n] for n in _PER_TOKEN if is_size(config.get(n))]
    most = _FEW_EXPERTS if few else max([2 * _FEW_EXPERTS, *(2 * n for n in chosen)])
    for name, value in config.items():
        if _is_part(name, value):
            shallow[name] = _with_depth(value, depth)
        elif name in LAYERS and isinstance(value, int):
            shallow[name] = min(value, depth)
        elif isinstance(value, list) and len(value) in counts:
            shallow[name] = value[:depth]
        elif name in _LENGTHS and isinstance(value, int):
            shallow[name] = min(value, _LENGTHS[name])
        elif name in _EXPERTS and isinstance(value, int):
            shallow[name] = min(value, most)
        elif name in _PER_TOKEN and isinstance(value, int) and few:
            shallow[name] = min(value, _FEW_EXPERTS // 2)
    limit = shallow.get("vocab_size", 0)
    tokens = [name for name, value in shallow.items() if name.endswith("_token_id") and isinstance(value, int)]
    return {**shallow, **{name: 0 for name in tokens if isinstance(limit, int) and shallow[name] >= limit > 0}}


def _dims(config: Config) -> Iterator[tuple[str, int]]:
    """Fields that say how many units something consists of, but for those of counts, tables and windows."""
    for name, value in config.items():
        named = name in {*FIELDS["hidden"], *FIELDS["ffn"], *HEAD_DIM, *AS_HIDDEN} or _DIMS.search(name)
        if named and isinstance(value, int) and is_size(value):
            yield name, value


def _divides(config: Config, divisor: int) -> bool:
    """Whether all sizes can be so much smaller, and heads keep some units."""
    for one in _with_parts(config):
        heads = max((one[n] for n in FIELDS["heads"] if isinstance(one.get(n), int)), default=1)
        explicit = any(isinstance(one.get(n), int) for n in HEAD_DIM)
        for name, value in _dims(one):
            least = _SMALLEST * (heads if name in FIELDS["hidden"] and not explicit else 1)
            if name not in FIELDS["ffn"] and (value % divisor or value // divisor < least):
                return False
    return True


def _divided(config: Config, divisor: int, fewer: int) -> dict[str, Any]:
    """The config with sizes that are so much smaller. fewer: by what there are fewer neurons of feed-forward layers."""
    small = {n: _divided(value, divisor, fewer) if _is_part(n, value) else value for n, value in config.items()}
    by = {name: divisor * (fewer if name in FIELDS["ffn"] else 1) for name, _ in _dims(config)}
    return {**small, **{name: max(min(_SMALLEST, value), value // by[name]) for name, value in _dims(config)}}


def _shapes(model: nn.Module) -> dict[str, Shape]:
    return {name: tuple(tensor.shape) for name, tensor in planning.all_tensors(model).items()}


def _at_size(role: Role, other: Role | None, first: Shape, second: Shape, real: Shape) -> Role:
    """The role of a tensor of the real shape, of which miniatures with these shapes have these roles.

    Lengths that are the same in both stay; others grow with the axis, or with what of it grows. other: None where
    only one miniature is known, and all lengths grow with the axis.
    """
    if not real:
        return role
    out, in_ = (next(iter(side), 0) for side in role.dims(len(real)))
    ours, theirs = role.out_axis.sections, () if other is None else other.out_axis.sections
    lengths = [n for n, _ in ours]
    if len(lengths) == len(theirs) and first[out] != second[out]:
        more = [length - n for n, (length, _) in zip(lengths, theirs, strict=True)]
        scale = Fraction(real[out] - first[out], second[out] - first[out])
        lengths = [int(n + each * scale) for n, each in zip(lengths, more, strict=True)]
    if lengths and sum(lengths) != real[out]:
        lengths = _in_proportion([n for n, _ in ours], real[out])

    def block_of(d: int, block: int, their: int | None, units: Fraction) -> int:
        is_constant = block == their and first[d] != second[d]
        return block if is_constant or block == 1 else max(1, int(block * units))

    blocks = [block for _, block in theirs] or [None] * len(lengths)  # type: ignore[list-item]
    grown = zip(lengths, ours, blocks, strict=False)
    sections = [(real_n, block_of(out, block, each, Fraction(real_n, n))) for real_n, (n, block), each in grown]
    sides = (None, None) if other is None else (other.out_axis.block, other.in_axis.block)
    out_block = block_of(out, role.out_axis.block, sides[0], Fraction(real[out], first[out]))
    in_block = block_of(in_, role.in_axis.block, sides[1], Fraction(real[in_], first[in_]))
    return replace(
        role,
        out_block=replace(role.out_axis, block=out_block, sections=tuple(sections)),
        in_block=replace(role.in_axis, block=in_block),
    )


def _in_proportion(lengths: Sequence[int], total: int) -> list[int]:
    """The lengths of parts when their axis has so many units: all in proportion, or some as they are, others twice."""
    for times in itertools.product((2, 1), repeat=len(lengths)) if total % sum(lengths) else ():
        if sum(k * n for k, n in zip(times, lengths, strict=True)) == total:
            return [k * n for k, n in zip(times, lengths, strict=True)]
    return [n * total // sum(lengths) for n in lengths]


def counterparts(config: Config, real: Mapping[str, Any], miniature: Mapping[str, Any]) -> dict[str, str]:
    """By the names of a model's tensors, those of the miniature's that are like them: of a layer of the same kind.

    The first layer is like the first, the last like the last, if they are of one kind.

    >>> config = {"model_type": "gpt2", "n_embd": 8, "n_head": 2}
    >>> counterparts(config, {"h.0.w": 0, "h.1.w": 0, "h.2.w": 0}, {"h.0.w": 0, "h.1.w": 0})
    {'h.0.w': 'h.0.w', 'h.1.w': 'h.0.w', 'h.2.w': 'h.1.w'}
    """
    by_pattern: dict[str, list[str]] = {}
    for name in miniature:
        by_pattern.setdefault(_pattern(name), []).append(name)
    kinds = _kinds_of_layers(config)
    last, their_last = _last_numbers(real), _last_numbers(miniature)
    found = {}
    for name in real:
        pattern = _pattern(name)
        candidates = by_pattern.get(pattern, [])
        alike = [n for n in candidates if kinds(n) == kinds(name)] or candidates
        if alike:
            ends = last[pattern], their_last[pattern]
            far = {n: sum(map(_distance, *map(_numbers, (name, n)), *ends)) for n in alike}
            found[name] = min(alike, key=far.__getitem__)
    return found


def _numbers(name: str) -> list[int]:
    return [int(n) for n in _NUMBER.findall(name)]


def _last_numbers(names: Mapping[str, Any]) -> dict[str, list[int]]:
    """By pattern, the largest of each of the numbers in it."""
    last: dict[str, list[int]] = {}
    for name in names:
        numbers = _numbers(name)
        before = last.setdefault(_pattern(name), numbers)
        last[_pattern(name)] = [max(pair) for pair in zip(before, numbers, strict=True)]
    return last


def _distance(ours: int, theirs: int, our_last: int, their_last: int) -> int:
    """How far a number in a name is from one in the other model: as first, last or in between if that has more."""
    if our_last == their_last:
        return 10 * (ours != theirs)
    # where there is none in between, the first is like it
    places = [0 if n == 0 else 3 if n == last else 1 for n, last in ((ours, our_last), (theirs, their_last))]
    return abs(places[0] - places[1])


def _pattern(name: str) -> str:
    return _NUMBER.sub("#", name)


def _patterns(model: nn.Module) -> set[str]:
    return {_pattern(name) for name in naming.parameters(model)}


def _kinds_of_layers(config: Config) -> Any:
    """A function that tells of a name what the config's lists say of its layer."""
    values = tree_leaves(transformers_config(config).to_dict(), is_leaf=lambda value: isinstance(value, list | tuple))
    lists = [value for value in values if isinstance(value, list | tuple) and len(value) > 1]

    def kind(name: str) -> tuple[str, ...]:
        number = _NUMBER.search(name)
        at = int(number[0]) if number else 0
        return tuple(str(one[at]) for one in lists if at < len(one))

    return kind


_SMALL = 0.05  # of the spread: a mean below that is an accident
_DRAWS, _NUMBERS_DRAWN = 16, 1 << 22  # of a miniature that tell what follows one law, and the numbers in all of them


@dataclass(frozen=True)
class _Start:
    """How the parameters of one miniature start."""

    shapes: Mapping[str, Shape]
    laws: Mapping[str, Initial]


def initial_laws(config: Config) -> dict[str, Initial]:
    """How all parameters of the model start that a config names, which is not built."""
    real = {name: tuple(p.shape) for name, p in naming.parameters(sketch_model(config)).items()}
    small, large = miniature_configs(config, Times())
    first, second = (_start(json.dumps(one, sort_keys=True)) for one in (small, large))
    layers, few = _layers(real), _layers(first.shapes)
    third = first
    if layers != few:
        third = _start(json.dumps(miniature_configs(config, Times(), 2)[0], sort_keys=True))
    like, deep = (counterparts(config, real, one.shapes) for one in (first, third))
    hidden = [parts_of(each).get("hidden", 1) for each in (small, large, config)]
    units = hidden[1] / hidden[0], hidden[2] / hidden[0]
    depths = _layers(third.shapes) / few, layers / few
    laws = {}
    for name, shape in real.items():
        one = like[name]
        sizes = zip(first.shapes[one], second.shapes[one], shape, strict=True)
        ratios = [(b / a, real_size / a) for a, b, real_size in sizes if a != b]
        widths = ratios[-1] if ratios else units  # the last dimension is what a Linear reads, so the fan-in
        start, wider, deeper = first.laws[one], second.laws[one], third.laws[deep[name]]
        laws[name] = _law_of_real(start, _Seen(wider, *widths), _Seen(deeper, *depths))
    return laws


class _Seen(NamedTuple):
    """The law in a miniature that is so many times as wide or deep as another, which the model is `by` times."""

    law: Initial
    ratio: float
    by: float

    def factor(self, std: float, seen: float) -> float:
        """By what the model's standard deviation differs from the first miniature's: by a power of the size."""
        return float(self.by ** _power(std, seen, self.ratio))


def _law_of_real(first: Initial, wider: _Seen, deeper: _Seen) -> Initial:
    """The law at the model's own size; a pattern where miniatures do not show the same parts.

    In a miniature a pattern may be too short to be told from constants.
    """
    laws = first, wider.law, deeper.law
    is_pattern = len({(len(law.means or ()), law.dim, law.run) for law in laws}) > 1 or first.means == ()
    if is_pattern:
        std = (first.std or 0.0) * wider.factor(first.std or 0.0, wider.law.std or 0.0)
        return Initial(std * deeper.factor(first.std or 0.0, deeper.law.std or 0.0), ())
    each = zip(*(law.spreads for law in laws), strict=True)
    stds = [std * wider.factor(std, wide) * deeper.factor(std, deep) for std, wide, deep in each]
    if len(stds) == 1:
        return replace(wider.law, std=stds[0])
    return replace(wider.law, std=_of_all(stds), stds=tuple(stds))


def _of_all(stds: Sequence[float]) -> float:
    """The standard deviation about the means of equal parts."""
    return math.sqrt(sum(std**2 for std in stds) / len(stds))


def _layers(names: Mapping[str, Any]) -> int:
    return 1 + max((int(match["number"]) for match in map(LAYER.fullmatch, names) if match), default=0)


def _power(std: float, other: float, ratio: float) -> float:
    """The exponent of a law, in quarters."""
    if std == 0 or other == 0 or ratio == 1:
        return 0.0
    return round(4 * math.log(other / std) / math.log(ratio)) / 4


@lru_cache(maxsize=64)
def _start(config: str) -> _Start:
    """The laws are found on random draws, and their numbers measured on even ones, which have them exactly."""
    one = json.loads(config)
    laws, draws = _find_laws(one), []
    for numbers in (_EvenDraws(mirrored=False), _EvenDraws(mirrored=True), planning.CentralDraws()):
        with torch.random.fork_rng(devices=[]), built_in_float64(), numbers, _truncated_draws():
            parameters = naming.parameters(build_model(one))
        draws.append({name: p.detach().double() for name, p in parameters.items()})
    shapes = {name: tuple(p.shape) for name, p in draws[0].items()}
    return _Start(shapes, {n: _exactly(law, *(draw[n] for draw in draws)) for n, law in laws.items()})


def _find_laws(config: Config) -> dict[str, Initial]:
    """What parts the parameters have, and which of them are patterns, on some random draws of the model."""
    axes = _width_axes(config)
    numbers = sum(p.numel() for p in naming.parameters(sketch_model(config)).values())
    draws = []
    for seed in range(max(2, min(_DRAWS, _NUMBERS_DRAWN // max(1, numbers)))):
        with torch.random.fork_rng(devices=[]), built_in_float64():
            torch.manual_seed(seed)
            draws.append(naming.parameters(build_model(config)))
    return planning.measure_laws(draws, planning.initial_std(draws), lambda name: axes.get(name, {}))


def _width_axes(config: Config) -> dict[str, dict[int, Axis]]:
    """By parameter, the dimensions that a wider model has longer; but the first, where no model is wider in all."""
    small = {name: tuple(p.shape) for name, p in naming.parameters(sketch_model(config)).items()}
    for times in (Times.of(2), Times(hidden=2, ffn=2)):
        with suppress(MupscaleError):
            wide = naming.parameters(sketch_model(wide_config(config, times)))
            grown = {n: [d for d, size in enumerate(shape) if wide[n].shape[d] != size] for n, shape in small.items()}
            return {name: dict.fromkeys(dims, Axis()) for name, dims in grown.items()}
    return {name: dict.fromkeys(range(1, len(shape)), Axis()) for name, shape in small.items()}


def _exactly(law: Initial, draw: Tensor, mirrored: Tensor, centre: Tensor) -> Initial:
    """The law with the numbers of a pair of even draws; a pattern, if it is no multiple of what was drawn.

    centre: the same from the middle of each distribution, which is no middle any more after a logarithm.
    """
    if law.std == 0:
        return law
    is_drawn = draw != mirrored
    noise, middle = (draw - mirrored)[is_drawn] / 2, (draw + mirrored)[is_drawn] / 2
    off = (middle - centre[is_drawn]).nan_to_num()  # of weights over their norm there is no centre
    is_linear = noise.numel() > 0 and bool((off.abs() <= _SAME * (noise.abs() + middle.abs())).all())
    if not law.means or not is_linear:
        std = _rounded(noise.square().mean().sqrt()) if noise.numel() else law.std
        return Initial(std, ())
    count = len(law.means)
    if count == 1:
        mean, std = _moments(draw, mirrored)
        return replace(law, std=std, means=(mean,))
    labels = part_of_units(draw.shape[law.dim], count, law.run)
    chosen = [torch.nonzero(labels == part).flatten() for part in range(count)]
    moments = [_moments(*(each.index_select(law.dim, units) for each in (draw, mirrored))) for units in chosen]
    means, stds = zip(*moments, strict=True)
    return replace(law, std=_of_all(stds), means=means, stds=stds)


def _moments(draw: Tensor, mirrored: Tensor) -> tuple[float, float]:
    """Mean and standard deviation of what is drawn, so without rows of padding; or a constant, and 0."""
    is_drawn = draw != mirrored
    if not bool(is_drawn.any()):
        return float(draw.flatten()[0]), 0.0
    values = torch.cat([draw[is_drawn], mirrored[is_drawn]])
    mean, std = float(values.mean()), _rounded(values.std(correction=0))
    return (mean if abs(mean) > _SMALL * std else 0.0), std


def _rounded(number: Tensor) -> float:
    """Without what the sum rounds."""
    return float(f"{float(number):.12g}")


@contextmanager
def _truncated_draws() -> Iterator[None]:
    """Inside, numbers that torch would draw until all are within bounds have the moments of that distribution."""
    before = torch.nn.init._no_grad_trunc_normal_

    @torch.no_grad()
    def draw(tensor: Tensor, mean: float, std: float, a: float, b: float, generator: Any = None) -> Tensor:
        low, high = (a - mean) / std, (b - mean) / std
        heights = [math.exp(-(x**2) / 2) / math.sqrt(2 * math.pi) for x in (low, high)]
        within = (math.erf(high / math.sqrt(2)) - math.erf(low / math.sqrt(2))) / 2
        shift = (heights[0] - heights[1]) / within
        variance = 1 + (low * heights[0] - high * heights[1]) / within - shift**2
        return tensor.normal_(mean + std * shift, std * math.sqrt(variance))

    torch.nn.init._no_grad_trunc_normal_ = draw
    try:
        yield
    finally:
        torch.nn.init._no_grad_trunc_normal_ = before


class _EvenDraws(TorchDispatchMode):
    """Random numbers with the moments of their distribution; mirrored: the others of a pair."""

    def __init__(self, mirrored: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.mirrored = mirrored

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, aten = func(*args, **(kwargs or {})), torch.ops.aten
        given = list(args[1:3])
        first, second = given + [0.0, 1.0][len(given) :]
        if func is aten.normal_.default:
            return result.copy_(first + second * self._signs(result))
        if func is aten.uniform_.default:
            half, spread = (first + second) / 2, (second - first) / math.sqrt(12)
            return result.copy_(half + spread * self._signs(result))  # so that every part of it has the moments, too
        if func.overloadpacket in (aten.randn, aten.randn_like):
            return result.copy_(self._signs(result))
        return result.copy_(self._ranks(result)) if func.overloadpacket in (aten.rand, aten.rand_like) else result

    def _signs(self, like: Tensor) -> Tensor:
        number = torch.arange(like.numel(), device=like.device) + self.mirrored
        return (1 - 2 * (number % 2)).to(like).view(like.shape)

    def _ranks(self, like: Tensor) -> Tensor:
        ranks = (torch.arange(like.numel(), device=like.device) + 0.5) / max(1, like.numel())
        return (1 - ranks if self.mirrored else ranks).to(like).view(like.shape)
