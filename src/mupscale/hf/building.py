"""The model that a config.json names, built by transformers, and what it can be run on.

Code that a checkpoint brings with it (auto_map in config.json) runs only where the user said so. What it is run on is
random tokens, pixels, sound or series of its sizes, or a text.
"""

from __future__ import annotations

import inspect
import json
import logging
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from mupscale import system
from mupscale.system import MupscaleError, as_asked, generator, require

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
    reference = next(iter(named.values()), None) if name is None else named.get(name)
    reference = references.get("AutoConfig") if name == "AutoConfig" else reference
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

IN_MEMORY = "upscale the model in memory: mupscale.upscale(narrow, wide, inputs=…) needs no config"
"""What is left where transformers does not know a model, or nobody knows what to run it on: its code and a batch."""

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
        from transformers.models.auto import modeling_auto as auto

        usual = (auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type), auto.MODEL_MAPPING_NAMES.get(model_type))
        if named := [one for one in usual if isinstance(one, str)]:
            return getattr(transformers, named[0])
    what = f"model_type '{model_type}'" if not is_known else f"the class '{name}'"
    if config.get("auto_map"):
        raise MupscaleError(
            f"{what} is the checkpoint's own code (auto_map in config.json), which runs only if you trust it "
            f"({_trust()})"
        )
    raise MupscaleError(
        f"{what} is not known to transformers {transformers.__version__}: correct config.json, or install a version "
        f"that knows it. If you have the model's code, {IN_MEMORY}"
    )


def transformers_config(config: Mapping[str, Any]) -> Any:
    """The config of transformers that a config.json describes, to run as plain formulas (eager)."""
    transformers = require_transformers()
    model_class(config)
    not_given = ("model_type", "transformers_version", "auto_map")
    fields = {k: plain_numbers(v) for k, v in config.items() if k not in not_given}
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
        return build_model(config, "meta")
    key = f"{torch.get_default_dtype()} {json.dumps(config, sort_keys=True, default=repr)}"
    if key not in _SKETCHES:
        made = build_model(config, "meta")
        while len(_SKETCHES) >= _MOST_SKETCHES:
            _SKETCHES.pop(next(iter(_SKETCHES)))
        _SKETCHES[key] = made
    return _SKETCHES[key]


def memory_shortage(needed: int) -> str:
    """How much memory is needed and how much there is, in words, where so many bytes cannot be had; else nothing."""
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


def build_model(config: Mapping[str, Any], device: str = "cpu") -> nn.Module:
    """The model of a config.json, freshly initialised in float32."""
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


Batch = dict[str, Tensor]
_WINDOW = 512  # tokens, where a config names no limit
_FRAMES = 12  # of sound


def make_batches(
    model: nn.Module,
    count: int = 1,
    size: int = 32,
    *,
    rows: int = 2,
    seed: int = 0,
    text: str | None = None,
    folder: str | Path | None = None,
    trust_remote_code: bool = False,
) -> list[Batch]:
    """`count` batches for the model as keyword arguments: random tokens, pixels, sound, or a text in windows of `size`.

    text: needs the folder, whose tokenizer reads it; it starts again where it ends too soon. trust_remote_code: run
    the tokenizer's own code, if it is code of the checkpoint's.
    """
    if text is not None and folder is None:
        raise MupscaleError("to read a text, the checkpoint's own tokenizer is needed. Give its folder, too")
    main = getattr(model, "main_input_name", "input_ids")
    if main not in ("input_ids", "input_features") and text is not None:
        what = {"pixel_values": "images", "input_values": "sound", "past_values": "series"}.get(main, main)
        raise MupscaleError(f"{type(model).__name__} reads {what}, not text: leave the text out")
    try:
        signals = [_signals(model, main, rows, seed, number) for number in range(count)]
    except (AttributeError, TypeError):
        raise MupscaleError(
            f"{type(model).__name__} reads '{main}', but its config does not give the sizes of that input, so there is "
            f"nothing to compare the models on. With a batch of yours, {IN_MEMORY}"
        ) from None
    if main != "input_ids" and not _decodes(model):
        return signals
    config: Any = model.config
    decoder = config.get_text_config()
    if not isinstance(getattr(decoder, "vocab_size", None), int):
        raise MupscaleError(
            f"{type(model).__name__} reads '{main}', neither tokens nor pixels, so there is nothing to compare the "
            f"models on. With a batch of yours, {IN_MEMORY}"
        )
    vocabulary, pad = int(decoder.vocab_size), getattr(decoder, "pad_token_id", None)
    if vocabulary < 1:
        raise MupscaleError(f"the config has a vocabulary of {vocabulary}, but needs at least one token")
    size = max(2, min(size, _positions(decoder, pad)))
    if type(model).__name__.endswith("ForSequenceClassification") and pad is None:
        rows = 1  # the last token of a row is found by its padding
    if text is not None:
        assert folder is not None
        needed = count * rows * size
        tokens = _tokens_of(text, Path(folder), vocabulary, needed, trust_remote_code).view(count, rows, size)
    else:
        tokens = torch.randint(0, vocabulary, (count, rows, size), generator=generator(seed, "tokens"))
        if pad is not None and vocabulary > 1:
            tokens = torch.where(tokens == pad, (tokens + 1) % vocabulary, tokens)
    if type(model).__name__.endswith("ForMultipleChoice"):
        tokens = torch.stack([tokens, tokens.flip(-1)], 2)
    return [_together(model, ids, signal) for ids, signal in zip(tokens, signals, strict=True)]


def _arguments(model: nn.Module) -> set[str]:
    return set(inspect.signature(model.forward).parameters)


def _decodes(model: nn.Module) -> bool:
    """Whether it takes tokens of a decoder beside what its encoder reads."""
    return bool(getattr(model.config, "is_encoder_decoder", False)) and "decoder_input_ids" in _arguments(model)


def _signals(model: nn.Module, main: str, rows: int, seed: int, number: int) -> Batch:
    """What is no token: pixels, sound, series; nothing for a model of text."""
    config: Any = model.config
    vision = getattr(config, "vision_config", None)
    name, grid, shape = main, Batch(), [rows]
    if main == "input_features":
        shape += [config.num_mel_bins, 2 * config.max_source_positions]
    elif main == "past_values":
        shape += [config.context_length, config.num_input_channels]
    elif main == "input_values" and hasattr(config, "num_mel_bins") and hasattr(config, "max_length"):
        shape += [config.max_length, config.num_mel_bins]  # a spectrogram
    elif main == "input_values":
        samples = _FRAMES  # after all convolutions
        for kernel, stride in reversed(list(zip(config.conv_kernel, config.conv_stride, strict=True))):
            samples = (samples - 1) * int(stride) + int(kernel)
        shape.append(samples)
    elif main != "pixel_values" and "image_grid_thw" in _arguments(model) and vision is not None:
        name, side = "pixel_values", 2 * int(vision.spatial_merge_size)
        grid = {"image_grid_thw": torch.tensor([[1, side, side]] * rows)}
        shape = [rows * side**2, vision.in_channels * vision.temporal_patch_size * vision.patch_size**2]
    elif main == "pixel_values" or ("pixel_values" in _arguments(model) and vision is not None):
        name, seen = "pixel_values", config if main == "pixel_values" else vision
        size, frames = getattr(seen, "image_size", 224), getattr(seen, "num_frames", None)
        shape += [] if frames is None else [frames]  # of videos
        shape += [getattr(seen, "num_channels", 3), *(size if isinstance(size, list | tuple) else (size, size))]
    else:
        return {}
    return {**grid, name: torch.randn(*map(int, shape), generator=generator(seed, f"pixels {number}"))}


def _together(model: nn.Module, tokens: Tensor, signals: Batch) -> Batch:
    """Tokens as the model takes them: for its encoder, its decoder, with places for what images become."""
    config: Any = model.config
    if _decodes(model):
        first = signals or {"input_ids": tokens}
        return {**first, "decoder_input_ids": tokens.flip(-1)}
    image = getattr(config, "image_token_id", None)
    if image is None or not signals:
        return {"input_ids": tokens, **signals}
    tokens, vision = torch.where(tokens == image, (tokens + 1) % int(image), tokens), config.vision_config
    if "image_grid_thw" in signals:
        count = int(signals["image_grid_thw"][0].prod()) // int(vision.spatial_merge_size) ** 2
    else:
        count = math.prod(n // int(vision.patch_size) for n in signals["pixel_values"].shape[-2:])
    places = torch.full((tokens.shape[0], count), int(image))
    batch = {"input_ids": torch.cat([places, tokens], -1), **signals}
    if "mm_token_type_ids" in _arguments(model):
        batch["mm_token_type_ids"] = (batch["input_ids"] == image).long()
    return batch


def _positions(config: Any, pad: int | None) -> int:
    """How many tokens a model takes; RoBERTa counts from behind the padding token's number."""
    named = ("max_position_embeddings", "max_target_positions", "max_seq_len")
    limit = next((value for name in named if isinstance(value := getattr(config, name, None), int)), None)
    if limit is None or limit < 1:
        return _WINDOW
    return limit - pad - 1 if pad is not None and 2 * pad + 2 < limit else limit


def _trust() -> str:
    return as_asked("trust_remote_code=True", "--trust-remote-code")


def _tokens_of(text: str, folder: Path, vocabulary: int, needed: int, trust_remote_code: bool) -> Tensor:
    transformers = require_transformers()
    try:
        with quiet_transformers():
            how = {"local_files_only": True, "trust_remote_code": trust_remote_code}
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **how)
            ids = tokenizer(text, return_tensors=None)["input_ids"]
            known = tokenizer.decode(ids, skip_special_tokens=True).strip()
    except Exception as error:  # whatever is wrong with its files
        if not trust_remote_code and "trust_remote_code" in str(error):
            raise MupscaleError(
                f"the tokenizer in {folder} is custom code, which runs only if you trust it ({_trust()}). Or leave the "
                "text out to use random tokens"
            ) from None
        raise MupscaleError(
            f"{folder} has no tokenizer that transformers can load ({in_one_line(error)}). Leave the text out to use "
            "random tokens"
        ) from None
    if text.strip() and not known:  # without files transformers makes one of special tokens alone
        raise MupscaleError(
            f"{folder} has no tokenizer that knows a word of the text: put its files there (tokenizer.json), or leave "
            "the text out to use random tokens"
        )
    if len(ids) < 2:
        raise MupscaleError(f"the text is {len(ids)} tokens long; give two or more")
    if max(ids) >= vocabulary:
        raise MupscaleError(
            f"the tokenizer in {folder} gives token {max(ids)}, and the model's vocabulary has {vocabulary}: they do "
            f"not belong together"
        )
    return torch.tensor(ids).repeat(-(-needed // len(ids)))[:needed]
