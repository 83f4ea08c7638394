"""The model that a config.json names, built by transformers: as a sketch without memory, or freshly initialised.

Code that a checkpoint brings with it (auto_map in config.json) runs only where the user said so.
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn

from mupscale import system
from mupscale.system import MupscaleError, require

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
    """The class of the checkpoint's own code for AutoConfig, or that `architectures` names; None if it may not run."""
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


Config = Mapping[str, Any]
"""What a config.json holds."""

_SKETCHES: dict[str, nn.Module] = {}
_MOST_SKETCHES = 12
_SPARE = 500_000_000  # bytes


def require_transformers() -> Any:
    """The transformers package; a sentence where it is missing."""
    return require("transformers", reason="this needs transformers")


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Without the warnings, reports and progress bars of transformers, which speak of its own doings."""
    talk = require_transformers().utils.logging
    level, bars = talk.get_verbosity(), talk.is_progress_bar_enabled()
    talk.set_verbosity(logging.CRITICAL)
    talk.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        talk.set_verbosity(level)
        if bars:
            talk.enable_progress_bar()


def model_class(config: Mapping[str, Any]) -> Any:
    """The class of transformers that a config.json names first, or the usual one of its model_type."""
    transformers = require_transformers()
    model_type, names = str(config.get("model_type")), config.get("architectures") or []
    if not isinstance(names, list):
        raise MupscaleError(f"'architectures' in config.json is {names!r}, but must be a list of class names")
    is_known = model_type in transformers.CONFIG_MAPPING
    name = str(names[0]) if names else None
    if (own := own_class(config, name)) is not None:
        return own
    if is_known and name is not None and isinstance(named := getattr(transformers, name, None), type):
        return named
    if is_known and name is None:
        from transformers.models.auto import modeling_auto

        for mapping in (modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, modeling_auto.MODEL_MAPPING_NAMES):
            if isinstance(usual := mapping.get(model_type), str):
                return getattr(transformers, usual)
    what = f"model_type '{model_type}'" if not is_known else f"the class '{name}'"
    if config.get("auto_map"):
        raise MupscaleError(
            f"{what} is the checkpoint's own code (auto_map in config.json), which runs only if you trust it "
            "(--trust-remote-code, trust_remote_code=True)"
        )
    raise MupscaleError(
        f"{what} is not known to transformers {transformers.__version__}: correct config.json, or install a version "
        f"that knows it"
    )


def transformers_config(config: Mapping[str, Any]) -> Any:
    """The config of transformers that a config.json describes, to run as plain formulas (eager)."""
    transformers = require_transformers()
    model_class(config)
    fields = {
        k: plain_numbers(v) for k, v in config.items() if k not in ("model_type", "transformers_version", "auto_map")
    }
    try:
        own = own_class(config, "AutoConfig")
        with quiet_transformers():
            built = transformers.AutoConfig.for_model(config["model_type"], **fields) if own is None else own(**fields)
    except Exception as error:  # whatever its checks raise
        raise MupscaleError(f"transformers refuses this config.json: {in_one_line(error)}") from None
    built._attn_implementation = built._experts_implementation = "eager"
    return built


def plain_numbers(value: Any) -> Any:
    """A value of config.json with the numbers that JSON lacks, which stand there as {"__float__": "Infinity"}."""
    if isinstance(value, list):
        return [plain_numbers(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"__float__"} and value["__float__"] in ("Infinity", "-Infinity", "NaN"):
        return float(value["__float__"])
    return {name: plain_numbers(item) for name, item in value.items()}


def sketch_model(config: Mapping[str, Any]) -> nn.Module:
    """The model of a config.json without memory (on the meta device), its parameters tied as in the real one.

    Nobody may change it: the last few are kept, since a command asks for the same ones again and again.
    """
    if config.get("auto_map"):  # whose code may run in one call and not in the next
        return _build(config, "meta")
    key = f"{torch.get_default_dtype()} {json.dumps(config, sort_keys=True, default=repr)}"
    if key not in _SKETCHES:
        made = _build(config, "meta")
        while len(_SKETCHES) >= _MOST_SKETCHES:
            _SKETCHES.pop(next(iter(_SKETCHES)))
        _SKETCHES[key] = made
    return _SKETCHES[key]


def build_model(config: Mapping[str, Any]) -> nn.Module:
    """The model of a config.json, freshly initialised in float32."""
    return _build(config, "cpu")


def memory_shortage(needed: int) -> str:
    """How much memory is needed and how much there is, in words, where so many bytes cannot be had; else nothing.

    A little is left to everything else. Where nobody can tell, there is enough.
    """
    free = system.available_memory()
    return "" if free is None or needed + _SPARE <= free else system.describe_shortage(needed, free, _SPARE)


@contextmanager
def built_in_float64() -> Iterator[None]:
    """Inside, models are built in float64, so that what they compute of their width (√hidden) is not rounded first."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _build(config: Mapping[str, Any], device: str) -> nn.Module:
    cls, built = model_class(config), transformers_config(config)
    try:
        with quiet_transformers(), torch.device(device):
            model: nn.Module = cls(built)
    except Exception as error:  # whatever a model's constructor makes of a config
        raise MupscaleError(
            f"transformers cannot build {cls.__name__} from this config.json: {in_one_line(error)}"
        ) from None
    return model.eval()


def in_one_line(error: Exception) -> str:
    """The kind of an error and the first line of its message, for a message of our own."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    first = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])  # what comes after the colon, too
    return f"{type(error).__name__}: {first.rstrip('.') or 'no reason given'}"
