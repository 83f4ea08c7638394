"""What the library knows of an architecture: which config fields grow, and which wires each tensor lies between.

A description is data; nothing of the modelling code is repeated. `docs/huggingface.md` shows how to write one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase, translate
from fractions import Fraction
from functools import cached_property
from typing import Any

from mupscale.core import Entry, Number, Plan, Shape, tidy
from mupscale.hf.describe.initial import plan_fresh
from mupscale.hf.describe.multipliers import Ratios, Times, grown, how_to_grow_alike
from mupscale.hf.describe.wires import Layout, Wire
from mupscale.system import MupscaleError, setting

Config = Mapping[str, Any]
Wires = Mapping[str, Wire]
CAUSAL = ("ForCausalLM", "LMHeadModel", "DoubleHeadsModel")
"""Endings of the class names of language models that predict the next token."""


@dataclass(frozen=True)
class Tied:
    """A readout that is the embedding itself: the models that have one, its names, and the norm that takes its 1/k.

    models: endings of the class names in config.json's `architectures` whose readout it is.
    norm: patterns of the gain (and bias) of the norm just before the readout, or a function of the config that gives
    them. others: patterns of what else reads that norm, and takes the 1/k back. aliases: other tensors that are one
    when the readout is tied, as its bias may be, and the name each is kept under. wire: what the embedding writes.
    scaled: the model itself divides by √hidden before the readout.
    """

    embedding: str
    readouts: tuple[str, ...]
    norm: tuple[str, ...] | Callable[[Config], tuple[str, ...]]
    models: tuple[str, ...] = CAUSAL
    default: bool = False
    others: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    wire: str = "hidden"
    scaled: bool = False


@dataclass(frozen=True)
class Architecture:
    """One architecture of transformers, by its `model_type`.

    tensors: layouts by name pattern (`*` as in a shell; the first that fits counts), for the names in the files and in
    the model. hidden … head_dim: names of config fields; ffn, kv and head_dim are None where the config has no
    such field; feed-forward layers are 4 × hidden then.
    defaults: values of fields that a config.json may leave out; a function of the config where it may be null, too.
    wires: more wires than hidden, ffn, queries and keys, from those and the config. also: more config fields of the
    wide model. scaled_embedding: the model multiplies its embeddings by √hidden. divisible: transformers wants heads to
    divide the hidden size even where head_dim is given. init: by pattern, std of a fresh initialisation relative to the
    config's (1 for every tensor of two dimensions or more that lies at a wire, 0 for others, unless named here).
    aliases: by pattern, other names of one tensor, tied or not, and the name it is kept under.
    wider_heads: heads may become wider instead of more, since neither their positions nor their norms prevent that;
    folds: by pattern, the constants that copies then want in the weights. start: by pattern, around what new units
    and new layers start, where that is not 0 (or 1, of gains).
    refuse: a sentence for configs that cannot grow so. not_lossless: why fresh units change the function whatever they
    start with, if they do.

    >>> from mupscale.hf.describe import linear
    >>> tiny = Architecture("tiny", tensors={"*.up.weight": linear("ffn", "hidden")})
    >>> config = {"hidden_size": 4, "intermediate_size": 6, "num_attention_heads": 2, "initializer_range": 0.02}
    >>> tiny.wide_config(config, Times.of(2))["intermediate_size"]
    12
    >>> tiny.plan(config, Times.of(2), {"layers.0.up.weight": (6, 4)})["layers.0.up.weight"].wide
    (12, 8)
    """

    model_type: str
    tensors: Mapping[str, Layout]
    tied: Tied | None = None
    hidden: str = "hidden_size"
    ffn: str | None = "intermediate_size"
    heads: str = "num_attention_heads"
    kv: str | None = None
    head_dim: str | None = None
    std: str = "initializer_range"
    defaults: Mapping[str, Any] = field(default_factory=dict)
    wires: Callable[[Wires, Config], Wires] = lambda wires, config: {}
    also: Callable[[Config, Times], Config] = lambda config, times: {}
    scaled_embedding: bool = False
    divisible: bool = False
    init: Mapping[str, Callable[[Config], float]] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    wider_heads: bool = False
    folds: Callable[[Config, Times], Mapping[str, Number]] = lambda config, times: {}
    start: Mapping[str, Callable[[Config], float]] = field(default_factory=dict)
    refuse: Callable[[Config, Times], str] = lambda config, times: ""
    not_lossless: Callable[[Config, Times], str] = lambda config, times: ""

    def value(self, config: Config, name: str) -> Any:
        """A field of the config, or what transformers takes where it is absent (or null, if that can be told)."""
        default = self.defaults.get(name)
        value = config.get(name, default)
        if callable(default):
            return default(config) if value is None or value is default else value
        return value

    def number(self, config: Config, name: str) -> int:
        """A size or a count of the config."""
        value = self.value(config, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise MupscaleError(f"config.json of a {self.model_type} model has no usable '{name}' (it is {value!r})")
        return value

    def all_wires(self, config: Config, times: Times) -> dict[str, Wire]:
        """The wires of a narrow config that grows so many times."""
        self._check(config, times)
        heads, kv_heads, head_dim = self.number(config, self.heads), self.kv_heads(config), self.head_size(config)
        # copies of a group lie together; fresh heads of a key/value head that stays come into its own group
        group = 1 if isinstance(times, Ratios) and times.kv != times.heads else heads // kv_heads
        wires = {
            "hidden": Wire(self.number(config, self.hidden), times.hidden),
            "ffn": Wire(self.ffn_size(config), times.hidden if self.ffn is None else times.ffn),
            "queries": Wire(heads * head_dim, times.heads, group * head_dim),
            "keys": Wire(kv_heads * head_dim, times.kv, head_dim),
        }
        if self.wider_heads and times.heads == 1:  # each unit of a head beside its copies
            wires |= {"queries": wires["hidden"], "keys": wires["hidden"]}
        return {**wires, **self.wires(wires, config)}

    def _check(self, config: Config, times: Times) -> None:
        """Refuse what cannot grow so, and what transformers would not load."""
        hidden, heads = self.number(config, self.hidden), self.number(config, self.heads)
        _check_complete(config)
        if why := self.refuse(config, times):
            raise MupscaleError(why)
        if self.ffn is None and times.ffn not in (1, times.hidden):
            raise MupscaleError(
                f"config.json of a {self.model_type} model has no separate size for the feed-forward layers. Let ffn "
                f"grow as hidden does, {times.hidden} times"
            )
        more = not self.wider_heads or times.heads != 1
        if times.hidden != times.heads and self.head_dim is None and more:
            raise MupscaleError(
                f"in {self.model_type} head_dim is {self.hidden} / {self.heads}, and must stay the same: "
                f"{how_to_grow_alike(hidden, heads, times)}"
            )
        if times.kv != times.heads and self.kv is None:
            raise MupscaleError(
                f"{self.model_type} has as many key/value heads as heads, so its kv heads cannot grow separately. "
                f"Leave kv out{'' if isinstance(times, Ratios) else ' of ' + setting('times')}"
            )
        hidden, heads = grown(hidden, times.hidden), grown(heads, times.heads)
        if self.divisible and hidden % heads:
            alike = "let hidden grow as much as heads"
            alike = alike if isinstance(times, Ratios) else f"{alike}, as in {setting('times', times.heads)}"
            raise MupscaleError(
                f"in transformers, the heads of a {self.model_type} model must divide its {self.hidden}, but {heads} "
                f"heads do not divide {hidden}: {alike}"
            )

    def parts(self, config: Config) -> dict[str, int]:
        """The sizes that can be set: hidden, ffn, heads and kv."""
        return {
            "hidden": self.number(config, self.hidden),
            **({} if self.ffn is None else {"ffn": self.ffn_size(config)}),
            "heads": self.number(config, self.heads),
            **({} if self.kv is None else {"kv": self.kv_heads(config)}),
        }

    def ffn_size(self, config: Config) -> int:
        """Units of a feed-forward layer."""
        return 4 * self.number(config, self.hidden) if self.ffn is None else self.number(config, self.ffn)

    def kv_heads(self, config: Config) -> int:
        """Key/value heads, each of which serves a group of heads."""
        heads = self.number(config, self.heads)
        if self.kv is None or self.value(config, self.kv) is None:
            return heads
        kv_heads = self.number(config, self.kv)
        if heads % kv_heads:
            raise MupscaleError(f"config.json has {heads} heads, which {kv_heads} key/value heads do not divide")
        return kv_heads

    def head_size(self, config: Config) -> int:
        """Units of one attention head."""
        if self.head_dim is not None and self.value(config, self.head_dim) is not None:
            return self.number(config, self.head_dim)
        hidden, heads = self.number(config, self.hidden), self.number(config, self.heads)
        if hidden % heads:
            raise MupscaleError(f"config.json has {self.hidden} {hidden}, which {heads} heads do not divide")
        return hidden // heads

    def wide_config(self, config: Config, times: Times) -> dict[str, Any]:
        """config.json of the wide model."""
        self.all_wires(config, times)
        multiplied = {self.hidden: times.hidden, self.heads: times.heads}
        multiplied |= {} if self.ffn is None else {self.ffn: times.ffn}
        wide = {**config, **{name: grown(self.number(config, name), k) for name, k in multiplied.items()}}
        if self.kv is not None:
            wide[self.kv] = grown(self.kv_heads(config), times.kv)
        if self.head_dim is not None and (config.get(self.head_dim) is not None or times.hidden != times.heads):
            wide[self.head_dim] = self.head_size(config)
        return {**wide, **self.also(config, times)}

    def is_tied(self, config: Config) -> bool:
        """Whether the model that the config names reads its logits out with the embedding."""
        if self.tied is None:
            return False
        tied = config.get("tie_word_embeddings")
        classes = config.get("architectures") or [self.tied.models[0]]
        if not isinstance(classes, list) or not isinstance(classes[0], str):
            raise MupscaleError(f"'architectures' in config.json is not a list of class names (it is {classes!r})")
        return (self.tied.default if tied is None else bool(tied)) and classes[0].endswith(self.tied.models)

    @cached_property
    def _patterns(self) -> list[tuple[re.Pattern[str], Layout]]:
        return [(re.compile(translate(pattern)), layout) for pattern, layout in self.tensors.items()]

    def layout(self, name: str) -> Layout:
        """The layout of a tensor by its name."""
        for pattern, layout in self._patterns:
            if pattern.match(name):
                return layout
        raise MupscaleError(
            f"'{name}' is a tensor that the description of {self.model_type} does not know. Describe it with "
            f"mupscale.hf.extend({self.model_type!r}, {{'{name}': mupscale.hf.linear('hidden', 'hidden')}}) or the like"
        )

    def _layout_when(self, tied: bool, name: str) -> Layout:
        """A tied readout is the embedding, whatever a model calls it."""
        if tied and self.tied is not None and _matches(name, self.tied.readouts):
            return self.layout(self.tied.embedding)
        return self.layout(name)

    def plan(self, config: Config, times: Times, shapes: Mapping[str, Shape], *, wide: bool = False) -> Plan:
        """The plan for tensors of these names and narrow shapes: a file's or a model's, all of them or some.

        config: the narrow model's. wide: the shapes are the wide model's.
        """
        wires, tied, fresh = self.all_wires(config, times), self.is_tied(config), isinstance(times, Ratios)
        folds, entries = {} if fresh else self.folds(config, times), dict[str, Entry]()
        layouts = {name: self._layout_when(tied, name) for name in shapes}
        for name, shape in shapes.items():
            layout = layouts[name]
            narrow = layout.narrowed(name, shape, wires) if wide else shape
            fold, keep = self._fold_and_keep(name, wires, tied, config)
            fold = next((k for pattern, k in folds.items() if _matches(name, (pattern,))), fold)
            entries[name] = layout.entry(name, narrow, wires, fold, keep if fresh else 1)
        entries = self._join_names(entries, tied)
        std = self.initial_std(config)
        stds = {name: self._init(name, entry, config) * (std or 0.02) for name, entry in entries.items()}
        if fresh:
            start = {name: self.start_of(name, config) for name in entries}
            started = {name: value for name, value in start.items() if value is not None}
            return plan_fresh(entries, layouts, stds if std else None, started)
        return Plan(entries, fresh={name: stds[name] * entry.init for name, entry in entries.items()})

    def start_of(self, name: str, config: Config) -> float | None:
        """Around what a tensor's initial values lie, where that is told."""
        return next((value(config) for pattern, value in self.start.items() if _matches(name, (pattern,))), None)

    def initial_std(self, config: Config) -> float | None:
        """The std that the config gives a fresh initialisation; None where it does not tell."""
        std = self.value(config, self.std)
        if std is not None and (isinstance(std, bool) or not isinstance(std, int | float)):
            raise MupscaleError(f"'{self.std}' in config.json is not a number (it is {std!r})")
        return None if std is None else float(std)

    def _fold_and_keep(self, name: str, wires: Wires, tied: bool, config: Config) -> tuple[Number, Number]:
        """Where the model scales its embeddings by √hidden, they take that back; a tied readout's 1/k is the norm's.

        Beside fresh units no readout is divided, so that old units only take back what the model's own scale does.
        """
        if self.tied is None:
            return 1, 1
        times = wires[self.tied.wire].times
        embedded = _root(times) if self.scaled_embedding else 1
        if _matches(name, (self.tied.embedding,)) or (tied and _matches(name, self.tied.readouts)):
            return tidy(_inverse(embedded)), tidy(_inverse(embedded))
        scale = _root(times) if self.tied.scaled else embedded
        if tied and _matches(name, self.tied.norm(config) if callable(self.tied.norm) else self.tied.norm):
            return tidy(_inverse(times) * scale), tidy(scale)
        if tied and _matches(name, self.tied.others):
            return tidy(times * _inverse(scale)), tidy(_inverse(scale))
        return 1, 1

    def _join_names(self, entries: Mapping[str, Entry], tied: bool) -> dict[str, Entry]:
        """Names of one tensor as one entry, under the name it is kept under."""
        joined, owners = dict(entries), dict(self.aliases)
        if tied and self.tied is not None:
            owners |= {**dict.fromkeys(self.tied.readouts, self.tied.embedding), **self.tied.aliases}
        for pattern, of in owners.items():
            owner = next((name for name in entries if _matches(name, (of,))), None)
            for name in [n for n in entries if owner is not None and _matches(n, (pattern,))]:
                assert owner is not None
                del joined[name]
                joined[owner] = replace(joined[owner], names=(*joined[owner].names, name))
        return joined

    def _init(self, name: str, entry: Entry, config: Config) -> float:
        for pattern, factor in self.init.items():
            if _matches(name, (pattern,)):
                return factor(config)
        layout = self.layout(name)
        return 1.0 if len(entry.narrow) > 1 and layout.wired and not layout.norm else 0.0


def _root(number: Number) -> Number:
    """The square root, exact where it is a fraction."""
    if isinstance(number, float):
        return math.sqrt(number)
    exact = Fraction(number)
    root = Fraction(math.isqrt(exact.numerator), math.isqrt(exact.denominator))
    return tidy(root) if root**2 == exact else math.sqrt(exact)


def _inverse(number: Number) -> Number:
    return 1 / number if isinstance(number, float) else Fraction(1) / number


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _check_complete(config: Config) -> None:
    """Refuse what no architecture can grow."""
    if config.get("pruned_heads"):
        raise MupscaleError(
            "heads were pruned from this model (pruned_heads in config.json), so its layers differ in size. Only a "
            "model with all its heads can be upscaled"
        )
    if config.get("add_cross_attention"):
        raise MupscaleError(
            "this model attends to an encoder (add_cross_attention in config.json), which would have to grow with it. "
            "Only stand-alone models can be upscaled"
        )
