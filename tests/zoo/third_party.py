"""What an entry of the table of third-party models is, and how their classes are imported."""

from __future__ import annotations

import copy
import importlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

MODELS: list[Model] = []


@dataclass(frozen=True)
class Model:
    """A model of another library, built small, and what the plan by running makes of it.

    build: makes it at k times its smallest width. inputs: what it is called with, a tuple or a dict of keywords.
    refused: what the message of the refusal says, as a regular expression; empty where the widening is exact.
    why: the refusal in a few words, for the table in the docs. deeper: makes it with twice as many blocks, and gives
    None where its constructor takes no number of blocks.
    """

    library: str
    name: str
    build: Callable[[int], nn.Module]
    inputs: Callable[[], Any]
    refused: str = ""
    why: str = ""
    deeper: Callable[[], nn.Module | None] = lambda: None


def add(
    library: str, name: str, path: str, inputs: Callable[[], Any], *, refused: str = "", why: str = "", **options: Any
) -> None:
    """Put the class at "module:name" on the list. options: its keywords, and functions of k where they grow."""

    def deeper() -> nn.Module | None:
        deep = twice_as_deep(at(1, options))
        return None if deep is None else find(path)(**deep)

    MODELS.append(Model(library, name, lambda k: find(path)(**at(k, options)), inputs, refused, why, deeper))


def at(k: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """Options at k times the smallest width."""
    return {name: value(k) if callable(value) else value for name, value in options.items()}


def by(*sizes: int) -> Callable[[int], Any]:
    """A size, or a tuple of several, k times each."""
    return lambda k: k * sizes[0] if len(sizes) == 1 else tuple(k * size for size in sizes)


def made(path: str, **options: Any) -> Callable[[int], Any]:
    """What the class or function at "module:name" makes of such options."""
    return lambda k: find(path)(**at(k, options))


def named(path: str) -> Callable[[int], Any]:
    """The class or function at "module:name" itself."""
    return lambda k: find(path)


DEPTHS = re.compile(
    r"depths?|(num_|num_single_|cls_attn_)?layers|num_blocks|block_(repeats|config)|layers_per_block"
    r"|(s\d|cls)_depth|depth_token_only"
)


def twice_as_deep(arguments: Mapping[str, Any]) -> dict[str, Any] | None:
    """The arguments of a constructor with twice the blocks, by the names that their numbers go by; None without any.

    >>> twice_as_deep({"depths": (1, 2), "dim": 8, "stages": (1, 1)})
    {'depths': (2, 4), 'dim': 8, 'stages': (2, 2)}
    """
    deep: dict[str, Any] = {}
    for name, value in arguments.items():
        if DEPTHS.fullmatch(name) or (name == "stages" and isinstance(value, tuple)):
            deep[name] = _doubled(value)
        elif name == "cfg" and hasattr(value, "depths"):
            deep[name] = replace(value, depths=_doubled(value.depths))
        elif name == "block_args" and isinstance(value, list):  # of timm's builder: a dict for each block of a stage
            deep[name] = [[*stage, *copy.deepcopy(stage)] for stage in value]
    return {**arguments, **deep} if deep else None


def _doubled(value: Any) -> Any:
    return type(value)(_doubled(each) for each in value) if isinstance(value, list | tuple) else 2 * value


def images(size: int, *, batch: int = 4, channels: int = 3) -> Callable[[], tuple[Tensor]]:
    """A batch of square images."""
    return lambda: (torch.randn(batch, channels, size, size, generator=torch.Generator().manual_seed(0)),)


def find(path: str) -> Any:
    """The class or function at "module:name"."""
    module, name = path.split(":")
    needs_torchvision = module.split(".")[0] in ("timm", "vit_pytorch")
    with _torchvision_stub() if needs_torchvision else nullcontext():
        return getattr(importlib.import_module(module), name)


@contextmanager
def _torchvision_stub() -> Iterator[None]:
    """Placeholders for torchvision while a library is imported.

    timm and vit-pytorch import it for reading and augmenting images, and timm for a frozen norm. No release of it can
    be imported beside the pinned torch. No model of the table calls it: a call of a placeholder would be an error.
    """
    names = ["", ".datasets", ".ops", ".ops.misc", ".transforms", ".transforms.functional"]
    stubs = {f"torchvision{name}": _Stub(f"torchvision{name}") for name in names}
    for name, stub in stubs.items():
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(stubs[parent], child, stub)
    there = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "torchvision"}
    sys.modules.update(stubs)
    try:
        yield
    finally:
        for name in stubs:
            del sys.modules[name]
        sys.modules.update(there)


class _Stub(ModuleType):
    """A module whose every name is a class that cannot be made."""

    __path__: list[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        placeholder = _Placeholder(name, (), {"__init__": _unusable})
        setattr(self, name, placeholder)
        return placeholder


class _Placeholder(type):
    """A class whose attributes are their own names: timm makes a dictionary of the members of one."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


def _unusable(self: Any, *args: Any, **kwargs: Any) -> None:
    raise RuntimeError(f"{type(self).__name__} of torchvision is not there: only its name is, for imports")
