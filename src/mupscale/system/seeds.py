"""Random streams that depend on a seed and a label alone: none disturbs another, and none has a state to save."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def derive(seed: int, *labels: object) -> int:
    """A seed of its own for what the labels name."""
    text = "/".join(str(part) for part in (seed, *labels))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def generator(seed: int, *labels: object) -> torch.Generator:
    """A generator on the CPU, so that its numbers are the same whatever the device of their use."""
    import torch  # here, for `mupscale --help` has no use for it

    return torch.Generator().manual_seed(derive(seed, *labels))


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Inside, torch draws its random numbers from this seed; afterwards it goes on where it was on the CPU."""
    import torch

    with torch.random.fork_rng(devices=[]):
        if torch.accelerator.is_available():
            torch.manual_seed(seed)
        else:  # the same numbers: what seeds every kind of accelerator takes a thousand times longer
            torch.default_generator.manual_seed(seed)
        yield
