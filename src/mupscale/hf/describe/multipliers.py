"""By how much each part of a transformer grows, and the config that says so."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields

from mupscale.system import MupscaleError


@dataclass(frozen=True)
class Times:
    """Multipliers of the hidden size, the feed-forward layers, the attention heads and the key/value heads.

    head_dim stays, so rotary embeddings and the attention's scale stay.

    >>> Times.of(2)
    Times(hidden=2, ffn=2, heads=2, kv=2)
    >>> Times.of("hidden=2,ffn=3,heads=2")
    Times(hidden=2, ffn=3, heads=2, kv=2)
    """

    hidden: int = 1
    ffn: int = 1
    heads: int = 1
    kv: int = 1

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise MupscaleError(
                    f"{name} cannot grow {value} times: units are copied whole, so choose a whole number, as in "
                    f"--times 2 or --times hidden=2,ffn=3,heads=2"
                )
        if self.heads % self.kv:
            raise MupscaleError(
                f"key/value heads cannot grow {self.kv} times while heads grow {self.heads} times: each serves whole "
                f"groups of heads, so grow both alike (kv={self.heads}) or leave the key/value heads as they are (kv=1)"
            )

    @classmethod
    def of(cls, times: int | str | Mapping[str, int] | Times) -> Times:
        """From a number for everything, a text such as 'hidden=2,ffn=3,heads=2', or a mapping; what is not named stays.

        Key/value heads grow with the heads unless they are named.
        """
        if isinstance(times, Times):
            return times
        if isinstance(times, str):
            times = _parsed(times)
        if not isinstance(times, Mapping):
            return cls(times, times, times, times)
        if strangers := times.keys() - {f.name for f in fields(cls)}:
            raise MupscaleError(
                f"--times names '{min(strangers)}', which is nothing that grows: hidden, ffn, heads and kv are"
            )
        return cls(**{"kv": times.get("heads", 1), **times})

    def __mul__(self, other: Times) -> Times:
        """First this, then the other."""
        return Times(*(getattr(self, f.name) * getattr(other, f.name) for f in fields(self)))

    def __str__(self) -> str:
        values = asdict(self)
        return str(self.hidden) if len({*values.values()}) == 1 else ",".join(f"{k}={v}" for k, v in values.items())


def _parsed(text: str) -> int | dict[str, int]:
    def number(word: str) -> int:
        if not re.fullmatch(r"\d+", word):
            raise MupscaleError(
                f"--times {text}: '{word}' is no whole number; units are copied whole, as in --times 2 or "
                f"--times hidden=2,ffn=3,heads=2"
            )
        return int(word)

    if "=" not in text:
        return number(text.strip())
    pairs = [part.partition("=") for part in text.split(",")]
    numbers = [(name.strip(), number(value.strip())) for name, _, value in pairs]
    if twice := [name for i, (name, _) in enumerate(numbers) if name in dict(numbers[:i])]:
        raise MupscaleError(f"--times {text} names '{twice[0]}' twice: say once how much it grows")
    return dict(numbers)
