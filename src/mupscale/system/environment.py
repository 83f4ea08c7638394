"""Numbers that a launcher of many processes leaves in the environment."""

from __future__ import annotations

import os

from mupscale.system.errors import MupscaleError


def number_in_environment(name: str, default: int) -> int:
    """A whole number that torchrun sets, such as WORLD_SIZE; the default where it is not set.

    >>> from mupscale.system import number_in_environment
    >>> number_in_environment("NUMBER_THAT_NOBODY_SETS", 1)
    1
    """
    text = os.environ.get(name, "").strip()
    if not text:
        return default
    if not text.isdecimal() or len(text) > 9:
        raise MupscaleError(
            f"the environment variable {name} is {text[:40]!r}, but must be a whole number, as torchrun sets it: unset "
            f"it, or start with torchrun"
        )
    return int(text)
