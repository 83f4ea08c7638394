"""Classes by their import path, with the arguments they are made with: how a recipe names models, data, optimizers."""

from __future__ import annotations

import functools
import importlib
import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, TypeVar, get_type_hints

from mupscale.system import MupscaleError

_Kind = TypeVar("_Kind")


@dataclass(frozen=True)
class Spec:
    """A class by its import path, and the arguments it is made with.

    Args:
        class_path: import path of the class, e.g. mupscale.models.MLP
        init_args: arguments by name

    Example:
        >>> import torch
        >>> Spec("torch.nn.Linear", {"in_features": 3}).make(torch.nn.Module, out_features=2)
        Linear(in_features=3, out_features=2, bias=True)
    """

    class_path: str
    init_args: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "init_args", _plain(self.init_args))

    def load(self) -> Any:
        return import_path(self.class_path)

    def make(self, kind: type[_Kind], /, **more: Any) -> _Kind:
        """An instance of this kind; `more` goes before init_args of the same name. What is of another is not called."""
        instance = self.call(load_of_kind(self.class_path, kind), **more)
        if not isinstance(instance, kind):
            raise MupscaleError(f"{self.class_path} gave a {type(instance).__name__}, which is no {kind_name(kind)}")
        return instance

    def call(self, target: Callable[..., Any], /, **more: Any) -> Any:
        """What the class or function gives for init_args and `more`, which goes before arguments of the same name."""
        arguments = {**self.init_args, **more}
        try:
            inspect.signature(target).bind(**arguments)
        except TypeError as error:
            raise MupscaleError(f"{self.class_path} cannot be made: {error}") from None
        return target(**arguments)

    def check_plain(self) -> None:
        """Arguments that a file can hold, or a sentence that names the one it cannot."""
        for name, value in self.init_args.items():
            try:
                json.dumps(value)
            except (TypeError, ValueError):
                raise MupscaleError(
                    f"{self.class_path}: {name} is a {type(value).__name__}, which a run's files cannot hold: "
                    f"give plain values, or no folder (out)"
                ) from None


def import_path(path: str) -> Any:
    """The class or function that a dotted path names.

    >>> import_path("mupscale.models.MLP").__name__
    'MLP'
    """
    module, _, name = path.rpartition(".")
    if "" in (*module.split("."), name):
        raise MupscaleError(f"{path!r} is not an import path: give module.name")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise MupscaleError(f"{path!r} cannot be imported: {error}") from None


def load_of_kind(path: str, kind: type[_Kind]) -> Callable[..., _Kind]:
    """A class of this kind by its import path, or a function that may give one; nothing is called.

    >>> from torch import nn
    >>> load_of_kind("torch.nn.Linear", nn.Module).__name__
    'Linear'
    >>> load_of_kind("os.system", nn.Module)
    Traceback (most recent call last):
    mupscale.system.errors.MupscaleError: os.system is neither a torch.nn.Module nor a function that returns one
    """
    target = import_path(path)
    others: tuple[type, ...] = getattr(kind, "sources", ())  # what can be made into one, as torch's Dataset into Data
    if isinstance(target, type):
        if issubclass(target, (kind, *others)):
            return target  # type: ignore[return-value]
        raise MupscaleError(f"{path} is no {kind_name(kind)}")
    function = target.func if isinstance(target, functools.partial) else target
    if not inspect.isfunction(function) or not (others or _may_give(function, kind)):
        raise MupscaleError(f"{path} is neither a {kind_name(kind)} nor a function that returns one")
    return target  # type: ignore[no-any-return]


def kind_name(kind: type) -> str:
    """How a kind is called in messages."""
    parts = kind.__module__.split(".")
    return ".".join([*parts[: 1 if parts[0] == "builtins" else 2], kind.__name__])


def _may_give(function: Callable[..., Any], kind: type) -> bool:
    """Whether what a function says of its result allows this kind; one that says nothing may give anything."""
    try:
        result = get_type_hints(function).get("return", kind)
    except Exception:  # an annotation may be any expression
        return True
    return not isinstance(result, type) or issubclass(result, kind)


def _plain(value: Any) -> Any:
    """As JSON gives it back: lists for tuples, text for paths."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return [_plain(inner) for inner in value]
    return str(value) if isinstance(value, PurePath) else value
