"""Code that a checkpoint brings with it (auto_map in config.json), which runs only where the user said so."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from mupscale.system import MupscaleError

P = ParamSpec("P")
R = TypeVar("R")
_TRUSTED: ContextVar[Path | None] = ContextVar("_TRUSTED", default=None)


def runs_trusted_code(function: Callable[P, R]) -> Callable[P, R]:
    """A function of a checkpoint (its first argument) that runs code of its own where trust_remote_code is True."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        path = args[0] if args else next(iter(kwargs.values()))
        if not kwargs.get("trust_remote_code") or not isinstance(path, str | Path):
            return function(*args, **kwargs)
        before = _TRUSTED.set(Path(path))
        try:
            return function(*args, **kwargs)
        finally:
            _TRUSTED.reset(before)

    return call


def own_class(config: Mapping[str, Any], name: str | None) -> Any:
    """The class of the checkpoint's own code for AutoConfig, or that `architectures` names; None where it may not run."""
    folder, references = _TRUSTED.get(), config.get("auto_map")
    if folder is None or not isinstance(references, Mapping):
        return None
    named = {str(path).rpartition(".")[2]: str(path) for auto, path in references.items() if auto != "AutoConfig"}
    reference = references.get("AutoConfig") if name == "AutoConfig" else named.get(str(name))
    if name is None:
        reference = next(iter(named.values()), None)
    if reference is None:
        return None
    if "--" in str(reference):
        raise MupscaleError(
            f"the code of this checkpoint is in a different repository ({reference} in config.json). Save the model "
            "together with its code, as save_pretrained does"
        )
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    try:
        return get_class_from_dynamic_module(str(reference), str(folder), local_files_only=True)
    except Exception as error:  # whatever its code raises
        raise MupscaleError(f"the code of {folder} cannot be loaded ({type(error).__name__}: {error})") from None
