"""Random streams that depend on a seed and a label alone: none disturbs another, and none has a state to save."""

from __future__ import annotations

import hashlib

import torch


def derive(seed: int, *labels: object) -> int:
    """A seed of its own for what the labels name."""
    text = "/".join(str(part) for part in (seed, *labels))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def generator(seed: int, *labels: object) -> torch.Generator:
    """A generator on the CPU, so that its numbers are the same whatever the device of their use."""
    return torch.Generator().manual_seed(derive(seed, *labels))
