"""By how much each part of a transformer grows, and the config that says so."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from fractions import Fraction
from typing import Any

from mupscale.core import Number, tidy
from mupscale.system import MupscaleError, as_asked, parse_multipliers, setting

PART_NAMES = ("text", "vision", "audio", "encoder", "decoder", "qformer", "backbone", "thinker", "talker")
"""What transformers calls the parts of a model: each has a config of its own, text_config and so on."""


@dataclass(frozen=True)
class Times:
    """Multipliers of the hidden size, the feed-forward layers, the attention heads and the key/value heads.

    head_dim stays, so rotary embeddings and the attention's scale stay.

    >>> Times.of(2)
    Times(hidden=2, ffn=2, heads=2, kv=2)
    >>> Times.of("hidden=2,ffn=3,heads=2")
    Times(hidden=2, ffn=3, heads=2, kv=2)
    """

    hidden: Number = 1
    ffn: Number = 1
    heads: Number = 1
    kv: Number = 1

    def __post_init__(self) -> None:
        self._check()

    def _check(self) -> None:
        for name, value in asdict(self).items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise MupscaleError(
                    f"{name} cannot grow {value} times: copies need a whole number, as in {setting('times', 2)} or "
                    f"{setting('times', 'hidden=2,ffn=3,heads=2')}"
                )
        if self.heads % self.kv:
            raise MupscaleError(
                f"key/value heads cannot grow {self.kv} times while heads grow {self.heads} times: each serves whole "
                f"groups of heads, so grow both by the same factor (kv={self.heads}), or keep the key/value heads "
                "(kv=1)"
            )

    @classmethod
    def of(cls, times: int | str | Mapping[str, int] | Times, parts: Iterable[str] = ()) -> Times:
        """From a number for everything, a text such as 'hidden=2,ffn=3,heads=2', or a mapping; what is not named stays.

        Key/value heads grow with the heads unless they are named. parts: those that the model has, for the error.
        """
        if isinstance(times, Times):
            return times
        if isinstance(times, str):
            times = parse_multipliers(times)
        if not isinstance(times, Mapping):
            return cls(times, times, times, times)
        if any(name.partition(".")[0] in PART_NAMES for name in times):
            return PartTimes.by_name(times, parts)
        if strangers := times.keys() - {f.name for f in fields(cls)}:
            raise MupscaleError(
                f"{setting('times')} names '{min(strangers)}', which does not grow: {_what_grows(parts)} do"
            )
        return cls(**{"kv": times.get("heads", 1), **times})

    def of_part(self, part: str) -> Times:
        """The multipliers of a part of a model: its text, its vision; the same for all where none is named."""
        return self

    @property
    def takes_any_ratio(self) -> bool:
        """Whether it is a growth by fresh units."""
        return False

    def as_ratios(self) -> Times:
        """The same for a growth by fresh units."""
        return Ratios(**asdict(self))

    def as_copies(self) -> Times:
        """Twice as much of what grows."""
        return Times(**{name: 2 if ratio != 1 else 1 for name, ratio in asdict(self).items()})

    def __mul__(self, other: Times) -> Times:
        """First this, then the other."""
        if isinstance(other, PartTimes) and not isinstance(self, PartTimes):
            return other * self
        cls = Ratios if Ratios in (type(self), type(other)) else Times
        return cls(*(getattr(self, f.name) * getattr(other, f.name) for f in fields(self)))

    def to_json(self) -> dict[str, Any]:
        """Exact."""
        return asdict(self)

    def __str__(self) -> str:
        values = asdict(self)
        return str(self.hidden) if len({*values.values()}) == 1 else ",".join(f"{k}={v}" for k, v in values.items())


@dataclass(frozen=True)
class Ratios(Times):
    """The same for a growth by fresh units, which need no whole multiples: any ratio from 1 on."""

    def _check(self) -> None:
        for name, value in asdict(self).items():
            if isinstance(value, bool | float) or not isinstance(value, int | Fraction) or value < 1:
                raise MupscaleError(f"{name} cannot become {value} times as large: a model can only become wider")
            object.__setattr__(self, name, tidy(value))

    @property
    def takes_any_ratio(self) -> bool:
        """It is."""
        return True

    def to_json(self) -> dict[str, Any]:
        """Exact: fractions as text, so that an earlier version does not take them for copies."""
        return {name: str(value) for name, value in asdict(self).items()}

    @classmethod
    def from_json(cls, content: Mapping[str, int | str]) -> Ratios:
        """What to_json gave."""
        return cls(**{name: Fraction(value) for name, value in content.items()})


@dataclass(frozen=True)
class PartTimes(Times):
    """Multipliers of a model of several parts, each by its name; parts that are not named stay."""

    parts: tuple[tuple[str, Times], ...] = ()

    def _check(self) -> None:
        """The multipliers of each part are checked."""

    @classmethod
    def by_name(cls, times: Mapping[str, int], parts: Iterable[str] = ()) -> PartTimes:
        """From `text=2` or `text.hidden=2,text.heads=2`."""
        named: dict[str, dict[str, int]] = {}
        for name, number in times.items():
            part, _, what = name.partition(".")
            if part not in PART_NAMES:
                such = ", ".join(parts or PART_NAMES)
                raise MupscaleError(f"{setting('times')} names '{part}' beside parts of a model: the parts are {such}")
            more = {what: number} if what else dict.fromkeys(("hidden", "ffn", "heads", "kv"), number)
            named[part] = {**named.get(part, {}), **more}
        return cls.of_parts({part: Times.of(numbers) for part, numbers in named.items()})

    @classmethod
    def of_parts(cls, parts: Mapping[str, Times]) -> PartTimes:
        """The largest multipliers stand for the whole."""
        largest = {f.name: max((getattr(t, f.name) for t in parts.values()), default=1) for f in fields(Times)}
        return cls(**{**largest, "kv": largest["heads"]}, parts=tuple(parts.items()))

    def of_part(self, part: str) -> Times:
        """1 where it is not named."""
        return dict(self.parts).get(part, Times())

    @property
    def takes_any_ratio(self) -> bool:
        """Whether any part does."""
        return any(times.takes_any_ratio for _, times in self.parts)

    def as_ratios(self) -> PartTimes:
        """Of each part."""
        return PartTimes.of_parts({name: times.as_ratios() for name, times in self.parts})

    def as_copies(self) -> PartTimes:
        """Of each part."""
        return PartTimes.of_parts({name: times.as_copies() for name, times in self.parts})

    def __mul__(self, other: Times) -> PartTimes:
        """First this, then the other."""
        names = [name for name, _ in (*self.parts, *getattr(other, "parts", ()))]
        if not isinstance(other, PartTimes) and other != Times():
            raise MupscaleError(
                "a growth that names parts and one that does not cannot be combined. Name the parts in both"
            )
        return PartTimes.of_parts({name: self.of_part(name) * other.of_part(name) for name in names})

    def to_json(self) -> dict[str, Any]:
        """By part."""
        return {"parts": {name: times.to_json() for name, times in self.parts}}

    def __str__(self) -> str:
        words = list[str]()
        for name, times in self.parts:
            values = asdict(times)
            if len({*values.values()}) == 1:
                words.append(f"{name}={times.hidden}")
            else:
                words += [f"{name}.{what}={k}" for what, k in values.items() if k != 1]
        return ",".join(words)


def times_from_json(content: Mapping[str, Any]) -> Times:
    """What to_json gave, in which ratios are texts."""
    if "parts" in content:
        return PartTimes.of_parts({name: times_from_json(numbers) for name, numbers in content["parts"].items()})
    return Ratios.from_json(content) if any(isinstance(n, str) for n in content.values()) else Times(**content)


def grown(size: int, times: Number) -> int:
    """The size times a ratio; an error where that is no whole number.

    >>> grown(8, Fraction(3, 2))
    12
    """
    wide = Fraction(size) * Fraction(times)
    if wide.denominator != 1:
        raise MupscaleError(f"{size} units cannot grow {times} times: that is not a whole number")
    return int(wide)


def how_to_grow_alike(hidden: int, heads: int, times: Times) -> str:
    """What to ask for where heads are parts of the hidden size and the two do not grow alike."""
    if not isinstance(times, Ratios):
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


def _what_grows(parts: Iterable[str]) -> str:
    """In words, for an error; parts: of a model that has several."""
    sizes = "hidden, ffn, heads and kv"
    return f"{' and '.join(parts)} (text=2), or {sizes} of one of them (text.ffn=2)" if parts else sizes
