"""Classes by their import path, with the arguments they are made with: how a recipe names models, data, optimizers."""

from __future__ import annotations

import importlib
import inspect
import json
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from mupscale.system import MupscaleError


@dataclass(frozen=True)
class Spec:
    """A class by its import path, and the arguments it is made with.

    Args:
        class_path: import path of the class, e.g. mupscale.models.MLP
        init_args: arguments by name

    Example:
        >>> Spec("torch.nn.Linear", {"in_features": 3}).make(out_features=2)
        Linear(in_features=3, out_features=2, bias=True)
    """

    class_path: str
    init_args: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "init_args", _plain(self.init_args))

    def load(self) -> Any:
        """The class (or function) itself."""
        return import_path(self.class_path)

    def make(self, **more: Any) -> Any:
        """An instance; `more` goes before init_args of the same name."""
        target, arguments = self.load(), {**self.init_args, **more}
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
    if not module:
        raise MupscaleError(f"{path!r} is no import path: give module.name")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise MupscaleError(f"{path!r} cannot be imported: {error}") from None


def _plain(value: Any) -> Any:
    """As JSON gives it back: lists for tuples, text for paths."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return [_plain(inner) for inner in value]
    return str(value) if isinstance(value, PurePath) else value
