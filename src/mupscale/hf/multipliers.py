"""By how much each part of a transformer grows, and which sizes it is to have then."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

from mupscale.core import Number, tidy
from mupscale.system import MupscaleError, as_asked, parse_multipliers, setting

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
            return cls.named({name: Fraction(number) for name, number in content.items()}, fresh=True)
        return cls.named(content)

    def __str__(self) -> str:
        words = list[str]()
        for part, times in self.parts or (("", self),):
            is_even = len({*times.by_name.values()}) == 1
            each = [f"{part}.{name}={k}".lstrip(".") for name, k in times.by_name.items() if k != 1 or not part]
            words += [f"{part}={times.hidden}".lstrip("=")] if is_even else each
        return ",".join(words)


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
