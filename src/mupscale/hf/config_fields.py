"""By how much each part of a transformer grows, to which sizes, and which fields of its config those are.

A config of several parts has others in it (text_config, vision_config); a list holds the sizes of stages.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

from mupscale.core import Number, tidy
from mupscale.hf.building import Config, sketch_model, transformers_config
from mupscale.system import MupscaleError, as_asked, parse_multipliers, setting, show_short

_MOST_TIMES = 1_000_000
PARTS = {
    "hidden": "hidden size",
    "ffn": "size of the feed-forward layers",
    "heads": "number of heads",
    "kv": "number of key/value heads",
}

PART_NAMES = ("text", "vision", "audio", "encoder", "decoder", "qformer", "backbone", "thinker", "talker")
"""What transformers calls the parts of a model: each has a config of its own, text_config and so on."""


@dataclass(frozen=True)
class Times:
    """Multipliers of the hidden size, the feed-forward layers, the attention heads and the key/value heads.

    head_dim stays, so rotary embeddings and the attention's scale stay. fresh: for a growth by fresh units, which takes
    any ratio; copies need whole numbers. parts: of a model of several parts, the multipliers of each by its name, of
    which the largest stand for the whole; parts that are not named stay.

    >>> Times.of(2)
    Times(hidden=2, ffn=2, heads=2, kv=2)
    >>> Times.of("hidden=2,ffn=3,heads=2")
    Times(hidden=2, ffn=3, heads=2, kv=2)
    >>> Times.of("text=2,vision.ffn=3").of_part("vision")
    Times(hidden=1, ffn=3, heads=1, kv=1)
    """

    hidden: Number = 1
    ffn: Number = 1
    heads: Number = 1
    kv: Number = 1
    fresh: bool = field(default=False, repr=False)
    parts: tuple[tuple[str, Times], ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        for name, value in self.by_name.items() if not self.parts else ():
            is_number = isinstance(value, int | Fraction) and not isinstance(value, bool)
            if self.fresh and is_number and value > 0:
                object.__setattr__(self, name, tidy(value))
            elif self.fresh or not is_number or not isinstance(value, int) or value < 1:
                raise MupscaleError(
                    f"{name} cannot grow {value} times: copies need a whole number, as in {setting('times', 2)} or "
                    f"{setting('times', 'hidden=2,ffn=3,heads=2')}"
                )
        if not self.fresh and not self.parts and self.heads % self.kv:
            raise MupscaleError(
                f"key/value heads cannot grow {self.kv} times while heads grow {self.heads} times: each serves whole "
                f"groups of heads, so grow both by the same factor (kv={self.heads}), or keep the key/value heads "
                "(kv=1)"
            )

    @property
    def by_name(self) -> dict[str, Number]:
        return {name: getattr(self, name) for name in PARTS}

    @classmethod
    def of(cls, times: int | str | Mapping[str, int] | Times, parts: Iterable[str] = ()) -> Times:
        """From a number for everything, a text such as 'hidden=2,ffn=3,heads=2', or a mapping; what is not named stays.

        Key/value heads grow with the heads unless they are named. A part of a model has its name before its sizes, as
        in 'text=2' or 'text.hidden=2,text.heads=2'. parts: those that the model has, for the error.
        """
        if isinstance(times, Times):
            return times
        if isinstance(times, str):
            times = parse_multipliers(times)
        if not isinstance(times, Mapping):
            return cls(times, times, times, times)
        if not any(name.partition(".")[0] in PART_NAMES for name in times):
            if strangers := times.keys() - PARTS.keys():
                sizes = "hidden, ffn, heads and kv"
                of_parts = f"{' and '.join(parts)} (text=2), or {sizes} of one of them (text.ffn=2)"
                grow = of_parts if parts else sizes
                raise MupscaleError(f"{setting('times')} names '{min(strangers)}', which does not grow: {grow} do")
            return cls.named(times)
        named: dict[str, dict[str, int]] = {}
        for name, number in times.items():
            part, _, what = name.partition(".")
            if part not in PART_NAMES:
                such = ", ".join(parts or PART_NAMES)
                raise MupscaleError(f"{setting('times')} names '{part}' beside parts of a model: the parts are {such}")
            named.setdefault(part, {}).update({what: number} if what else dict.fromkeys(PARTS, number))
        return cls.of_parts({part: cls.of(numbers) for part, numbers in named.items()})

    @classmethod
    def named(cls, numbers: Mapping[str, Number], *, fresh: bool = False) -> Times:
        """By their names; what is not named stays, but key/value heads grow with the heads."""
        hidden, ffn, heads = (numbers.get(name, 1) for name in ("hidden", "ffn", "heads"))
        return cls(hidden, ffn, heads, numbers.get("kv", heads), fresh=fresh)

    @classmethod
    def of_parts(cls, parts: Mapping[str, Times]) -> Times:
        largest = {name: max((times.by_name[name] for times in parts.values()), default=1) for name in PARTS}
        fresh = any(times.fresh for times in parts.values())
        whole = cls.named({**largest, "kv": largest["heads"]}, fresh=True)
        return replace(whole, fresh=fresh, parts=tuple(parts.items()))

    def of_part(self, part: str) -> Times:
        """The multipliers of a part of a model: its text, its vision; the same for all where none is named."""
        return dict(self.parts).get(part, Times()) if self.parts else self

    def _each(self, change: Callable[[Times], Times]) -> Times:
        """Changed, of several parts each by itself."""
        if self.parts:
            return Times.of_parts({name: change(times) for name, times in self.parts})
        return change(self)

    def for_units(self, *, fresh: bool) -> Times:
        """The same for a growth by fresh units, or for one by copies."""
        return self._each(lambda times: replace(times, fresh=fresh))

    def as_copies(self) -> Times:
        """Twice as much of what grows."""
        return self._each(lambda times: Times.named({n: 1 if ratio == 1 else 2 for n, ratio in times.by_name.items()}))

    def __mul__(self, other: Times) -> Times:
        """First this, then the other."""
        if not self.parts and not other.parts:
            products = {name: number * other.by_name[name] for name, number in self.by_name.items()}
            return Times.named(products, fresh=self.fresh or other.fresh)
        if not (self.parts and other.parts) and Times() not in (self, other):
            raise MupscaleError(
                "a growth that names parts and one that does not cannot be combined. Name the parts in both"
            )
        names = [name for name, _ in (*self.parts, *other.parts)]
        return Times.of_parts({name: self.of_part(name) * other.of_part(name) for name in names})

    def to_json(self) -> dict[str, Any]:
        """Exact: ratios of fresh units as text, so that an earlier version does not take them for copies."""
        if self.parts:
            return {"parts": {name: times.to_json() for name, times in self.parts}}
        return {name: str(value) if self.fresh else value for name, value in self.by_name.items()}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Times:
        if "parts" in content:
            return cls.of_parts({name: cls.from_json(numbers) for name, numbers in content["parts"].items()})
        if strangers := content.keys() - PARTS.keys():
            raise ValueError(f"a multiplier of {min(strangers)!r}, which this version does not know")
        if any(isinstance(number, str) for number in content.values()):
            return cls.named({name: _ratio(number) for name, number in content.items()}, fresh=True)
        for name, number in content.items():
            if number > _MOST_TIMES:
                raise ValueError(f"{name} grew more than {_MOST_TIMES:,} times")
        return cls.named(content)

    def __str__(self) -> str:
        words = list[str]()
        for part, times in self.parts or (("", self),):
            is_even = len({*times.by_name.values()}) == 1
            each = [f"{part}.{name}={k}".lstrip(".") for name, k in times.by_name.items() if k != 1 or not part]
            words += [f"{part}={times.hidden}".lstrip("=")] if is_even else each
        return ",".join(words)


def _ratio(number: object) -> Fraction:
    """A ratio as `Times.to_json` writes it, such as 5/4; Python's own reading of 1e999999999 would not end."""
    text = str(number)
    if not re.fullmatch(r"[0-9]{1,9}(/[0-9]{1,9})?", text):
        raise ValueError(f"{show_short(text)} is no ratio of whole numbers of at most nine digits")
    return Fraction(text)


def grown(size: int, times: Number) -> int:
    """The size times a ratio; an error where that is no whole number."""
    wide = Fraction(size) * Fraction(times)
    if wide.denominator != 1:
        raise MupscaleError(f"{size} units cannot grow {times} times: that is not a whole number")
    return int(wide)


def how_to_grow_alike(hidden: int, heads: int, times: Times) -> str:
    """What to ask for where heads are parts of the hidden size and the two do not grow alike."""
    if not times.fresh:
        alike = f"hidden={times.hidden},ffn={times.ffn},heads={times.hidden}"
        return f"let hidden and heads grow by the same factor, as in {setting('times', alike)}"
    size, wide = hidden // heads, grown(hidden, times.hidden)
    if times.hidden != 1 and wide % size:
        fits = [n for n in (wide // size, wide // size + 1) if n > heads]
        near = " or ".join(f"{n * size} with {setting('heads', n)}" for n in fits)
        return f"{setting('hidden', wide)} would cut a head of {size} units. Choose {near}"
    count = wide // size if times.hidden != 1 else grown(heads, times.heads)
    both = as_asked(f"hidden={count * size}, heads={count}", f"--hidden {count * size} --heads {count}")
    return f"let hidden and heads grow by the same factor, as in {both}"


def as_every_stage() -> str:
    """What to ask for where a config lists a size for each stage."""
    return f"all stages grow by one whole number, as in {setting('times', 2)}"


def times_to(wanted: Mapping[str, int], now: Mapping[str, Any], *, fresh: bool) -> Times:
    """By how much a model of these sizes grows to have the wanted ones; what is not wanted otherwise stays.

    fresh: by fresh units, which take any wider size. Key/value heads grow with the heads unless they are named.
    """
    if stages := [part for part in wanted if isinstance(now.get(part), list | tuple)]:
        part = stages[0]
        raise MupscaleError(f"{setting(part)}: the {PARTS[part]} is a list here, {now[part]}, and {as_every_stage()}")
    now = {part: size for part, size in now.items() if isinstance(size, int)}
    for part, size in wanted.items():
        if part not in now:
            raise MupscaleError(f"{setting(part)}: config.json has no separate field for the {PARTS[part]}")
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise MupscaleError(
                f"{setting(part)} takes the {PARTS[part]} of the wide model, as in {setting(part, 2 * now[part])}"
            )
        if size < now[part]:
            raise MupscaleError(
                f"{setting(part, size)} is smaller than the model's {PARTS[part]}, {now[part]}. A model can only "
                "become wider"
            )
    if "kv" not in wanted and "heads" in wanted and "kv" in now:  # as many groups as the heads make
        heads, kv = wanted["heads"], now["kv"]
        group = now["heads"] // kv
        if heads % group:
            below = heads // group * group
            more = setting("heads", below + group)
            near = f"{setting('heads', below)} or {below + group}" if below > now["heads"] else more
            stay = f", or {setting('kv', kv)}, so each serves {heads // kv}" if heads % kv == 0 else ""
            raise MupscaleError(
                f"{setting('heads', heads)} cuts a group: each key/value head serves {group} heads. Choose {near}{stay}"
            )
        wanted = {**wanted, "kv": heads // group}
    ratios = {part: Fraction(wanted.get(part, size), size) for part, size in now.items()}
    if all(ratio == 1 for ratio in ratios.values()):
        raise MupscaleError(f"nothing would grow: the model has {_in_words(now)} already")
    for part, ratio in ratios.items():
        if ratio.denominator != 1 and not fresh:
            raise MupscaleError(
                f"{setting(part, wanted[part])} is not a whole multiple of {now[part]}, which copies need. Fresh units "
                f"fit any larger size: {as_asked('grow=mupscale.Fresh()', '--how fresh')}"
            )
    numbers = {part: tidy(ratio) for part, ratio in ratios.items()}
    times = Times.named(numbers, fresh=fresh)
    return check_groups(times, now) if fresh else times


def sizes_by_part(sizes: Mapping[str, int | str | Mapping[str, int] | None]) -> dict[str, int]:
    """Sizes that are asked for, of a part with its name before them."""
    wanted: dict[str, int] = {}
    for what, size in sizes.items():
        if isinstance(size, str) and "=" not in size and size.isdecimal():
            size = int(size)
        if isinstance(size, str):
            pairs = [pair.partition("=") for pair in size.split(",")]
            if not all(name.strip() and number.strip().isdecimal() for name, _, number in pairs):
                raise MupscaleError(
                    f"{setting(what, size)}: give a whole number, or for a model with several parts one for each, as "
                    f"in {setting(what, 'text=1024,vision=768')}"
                )
            size = {name.strip(): int(number) for name, _, number in pairs}
        if isinstance(size, Mapping):
            wanted |= {f"{part}.{what}": number for part, number in size.items()}
        elif size is not None:
            wanted[what] = size
    return wanted


def times_to_parts(wanted: Mapping[str, int], now: Mapping[str, Any], *, fresh: bool) -> Times:
    """The same as times_to, for models of several parts, too, whose sizes have the part's name before them."""
    parts = {name.partition(".")[0]: True for name in now if "." in name}
    if not parts and not any("." in name for name in wanted):
        return times_to(wanted, now, fresh=fresh)
    for name in wanted:
        if name not in now:
            part, _, what = name.rpartition(".")
            size = f"{part}={wanted[name]}" if part else wanted[name]
            raise MupscaleError(
                f"{setting(what or name, size)}: config.json has the sizes {_in_words(now)}. Name one of them, as in "
                f"{setting('hidden', 'text=1024')}"
            )
    named = {part: _of_part(wanted, part) for part in parts}
    return Times.of_parts({part: times_to(own, _of_part(now, part), fresh=fresh) for part, own in named.items() if own})


def _of_part(sizes: Mapping[str, Any], part: str) -> dict[str, Any]:
    return {name.removeprefix(f"{part}."): n for name, n in sizes.items() if name.startswith(f"{part}.")}


def check_groups(times: Times, now: Mapping[str, int]) -> Times:
    """The ratios, where each old key/value head keeps its old heads and gets whole new ones, or new ones get groups."""
    for part, own in times.parts:
        check_groups(own, _of_part(now, part))
    heads, kv = now.get("heads"), now.get("kv")
    if times.parts or heads is None or kv is None:
        return times
    many, many_kv = heads * times.heads, kv * times.kv
    if times.kv not in (1, times.heads) or many % many_kv:
        groups = math.ceil(many * kv / heads)
        raise MupscaleError(
            f"{heads} heads with {kv} key/value heads cannot become {many} with {many_kv}: key/value heads grow with "
            f"the heads in whole groups of {heads // kv}, or stay ({kv}) while each of them serves more heads. Choose "
            f"{groups * heads // kv} heads with {groups}, or {math.ceil(many / kv) * kv} with {kv}"
        )
    return times


def _in_words(now: Mapping[str, Any]) -> str:
    return ", ".join(f"{part} {size}" for part, size in now.items())


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
    for (model_type, part, name), (of, size) in FOLLOWS.items():
        if model_type == config.get("model_type"):
            wide[part][name] = wide[of][size]
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
