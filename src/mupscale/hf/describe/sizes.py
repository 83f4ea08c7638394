"""The sizes that a model is to have, and by how much it must grow for them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction

from mupscale.hf.describe.multipliers import PartTimes, Ratios, Times
from mupscale.system import MupscaleError, as_asked, setting

PARTS = {
    "hidden": "hidden size",
    "ffn": "size of the feed-forward layers",
    "heads": "number of heads",
    "kv": "number of key/value heads",
}


def times_to(wanted: Mapping[str, int], now: Mapping[str, int], *, fresh: bool) -> Times:
    """By how much a model of these sizes grows to have the wanted ones; what is not wanted otherwise stays.

    wanted, now: by hidden, ffn, heads and kv. fresh: by fresh units, which take any wider size. Key/value heads grow
    with the heads unless they are named.
    """
    for part, size in wanted.items():
        _check_size(part, size, now)
    if "kv" not in wanted and "heads" in wanted and "kv" in now:
        wanted = {**wanted, "kv": _kv_of_heads(wanted["heads"], now["heads"], now["kv"])}
    ratios = {part: Fraction(wanted.get(part, size), size) for part, size in now.items()}
    if all(ratio == 1 for ratio in ratios.values()):
        raise MupscaleError(f"nothing would grow: the model has {_in_words(now)} already")
    if fresh:
        return check_groups(Ratios(**{"kv": ratios.get("heads", Fraction(1)), **ratios}), now)
    for part, ratio in ratios.items():
        if ratio.denominator != 1:
            raise MupscaleError(
                f"{setting(part, wanted[part])} is not a whole multiple of {now[part]}, which copies need. Fresh units "
                f"fit any larger size: {as_asked('grow=mupscale.Fresh()', '--how fresh')}"
            )
    whole = {part: int(ratio) for part, ratio in ratios.items()}
    return Times(**{"kv": whole.get("heads", 1), **whole})


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


def times_to_parts(wanted: Mapping[str, int], now: Mapping[str, int], *, fresh: bool) -> Times:
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
    return PartTimes.of_parts(
        {part: times_to(own, _of_part(now, part), fresh=fresh) for part, own in named.items() if own}
    )


def _of_part(sizes: Mapping[str, int], part: str) -> dict[str, int]:
    return {name.removeprefix(f"{part}."): n for name, n in sizes.items() if name.startswith(f"{part}.")}


def check_groups(times: Times, now: Mapping[str, int]) -> Times:
    """The ratios, where each old key/value head keeps its old heads and gets whole new ones, or new ones get groups."""
    if isinstance(times, PartTimes):
        for part, own in times.parts:
            check_groups(own, _of_part(now, part))
        return times
    heads, kv = now.get("heads"), now.get("kv")
    if heads is None or kv is None:
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


def _check_size(part: str, size: int, now: Mapping[str, int]) -> None:
    if part not in now:
        raise MupscaleError(f"{setting(part)}: config.json has no separate field for the {PARTS[part]}")
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise MupscaleError(
            f"{setting(part)} takes the {PARTS[part]} of the wide model, as in {setting(part, 2 * now[part])}"
        )
    if size < now[part]:
        raise MupscaleError(
            f"{setting(part, size)} is smaller than the model's {PARTS[part]}, {now[part]}. A model can only become "
            "wider"
        )


def _kv_of_heads(heads: int, heads_now: int, kv_now: int) -> int:
    """As many groups as the heads make; an error that says what to give where they make none."""
    group = heads_now // kv_now
    if heads % group:
        below = heads // group * group
        more = setting("heads", below + group)
        near = f"{setting('heads', below)} or {below + group}" if below > heads_now else more
        stay = f", or {setting('kv', kv_now)}, so each serves {heads // kv_now}" if heads % kv_now == 0 else ""
        raise MupscaleError(
            f"{setting('heads', heads)} cuts a group: each key/value head serves {group} heads. Choose {near}{stay}"
        )
    return heads // group


def _in_words(now: Mapping[str, int]) -> str:
    return ", ".join(f"{part} {size}" for part, size in now.items())
