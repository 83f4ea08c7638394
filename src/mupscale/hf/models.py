"""Models of transformers: a sketch without memory, a checkpoint loaded whole, and batches to run them on."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mupscale.hf.source import Source
from mupscale.system import MupscaleError, available_memory, generator, require

Batch = dict[str, Tensor]
_SPARE = 1 << 29  # bytes that are left to everything else
_WINDOW = 512  # tokens, where a config names no limit


def require_transformers() -> Any:
    """The transformers package; a sentence where it is missing."""
    return require("transformers", extra="hf", reason="this needs transformers")


@contextmanager
def quiet() -> Iterator[None]:
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
    known = model_type in transformers.CONFIG_MAPPING
    name = str(names[0]) if names else None
    if known and name is not None and isinstance(found := getattr(transformers, name, None), type):
        return found
    if known and name is None:
        from transformers.models.auto import modeling_auto

        for mapping in (modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, modeling_auto.MODEL_MAPPING_NAMES):
            if isinstance(usual := mapping.get(model_type), str):
                return getattr(transformers, usual)
    what = f"model_type '{model_type}'" if not known else f"the class '{name}'"
    if config.get("auto_map"):
        raise MupscaleError(
            f"{what} is code of the checkpoint's own (auto_map in config.json), which is never run here; describe the "
            f"architecture (mupscale.hf.register) and upscale it with verify off"
        )
    raise MupscaleError(
        f"{what} is not known to transformers {transformers.__version__}: correct config.json, or install a version "
        f"that knows it"
    )


def config_of(config: Mapping[str, Any]) -> Any:
    """The config of transformers that a config.json describes, to run as plain formulas (eager)."""
    transformers = require_transformers()
    model_class(config)
    given = {k: v for k, v in config.items() if k not in ("model_type", "transformers_version", "auto_map")}
    try:
        with quiet():
            made = transformers.AutoConfig.for_model(config["model_type"], **given)
    except Exception as error:  # whatever its checks raise
        raise MupscaleError(f"transformers refuses this config.json: {_in_one_line(error)}") from None
    made._attn_implementation = made._experts_implementation = "eager"
    return made


def sketch(config: Mapping[str, Any]) -> nn.Module:
    """The model of a config.json without memory (on the meta device), its parameters tied as in the real one."""
    return _build(config, "meta")


def build(config: Mapping[str, Any]) -> nn.Module:
    """The model of a config.json, freshly initialised in float32."""
    return _build(config, "cpu")


def _build(config: Mapping[str, Any], device: str) -> nn.Module:
    cls, made = model_class(config), config_of(config)
    try:
        with quiet(), torch.device(device):
            model: nn.Module = cls(made)
    except Exception as error:  # whatever a model's constructor makes of a config
        raise MupscaleError(
            f"transformers cannot build {cls.__name__} from this config.json: {_in_one_line(error)}"
        ) from None
    return model.eval()


@dataclass(frozen=True)
class Loaded:
    """A model, and the tensors of its files that it has no use for (a head of another task)."""

    model: nn.Module
    unused: tuple[str, ...]


def load(source: Source, dtype: torch.dtype, *, device: str | torch.device | None = None) -> Loaded:
    """The model of a checkpoint, in evaluation mode, with eager attention.

    Every parameter comes from the files, never from a random initial value; they may hold more than the model uses.
    """
    folder, cls, made = source.folder, model_class(source.config), config_of(source.config)
    try:
        with quiet():
            model, info = cls.from_pretrained(
                folder,
                config=made,
                dtype=dtype,
                attn_implementation="eager",
                local_files_only=True,
                output_loading_info=True,
            )
    except Exception as error:  # whatever it raises of files, shapes and configs
        raise MupscaleError(f"transformers cannot load {folder}: {_in_one_line(error)}") from None
    for kind, lack in (("missing_keys", "lacks"), ("mismatched_keys", "has another shape for")):
        names = sorted(str(n[0] if isinstance(n, tuple) else n) for n in info.get(kind, ()))
        if names:
            raise MupscaleError(
                f"{folder} {lack} '{names[0]}'{_more(names)}, which {cls.__name__} would fill with random values: the "
                f"files and config.json do not belong together"
            )
    model = model.eval() if device is None else model.eval().to(device)
    return Loaded(model, tuple(sorted(info.get("unexpected_keys", ()))))


def batches(
    model: nn.Module,
    count: int = 1,
    size: int = 32,
    *,
    rows: int = 2,
    seed: int = 0,
    text: str | None = None,
    folder: str | Path | None = None,
) -> list[Batch]:
    """`count` batches for the model as keyword arguments: random tokens or pixels, or a text in windows of `size`.

    text: needs the folder, whose tokenizer reads it; it starts again where it ends too soon.
    """
    config: Any = model.config
    if text is not None and folder is None:
        raise MupscaleError("a text is read by the checkpoint's own tokenizer: give its folder, too")
    if getattr(model, "main_input_name", "input_ids") == "pixel_values":
        if text is not None:
            raise MupscaleError(f"{type(model).__name__} reads images, not text: leave the text out")
        return [{"pixel_values": _pixels(config, rows, seed, i)} for i in range(count)]
    decoder = config.get_text_config()
    vocabulary, pad = int(decoder.vocab_size), getattr(decoder, "pad_token_id", None)
    size = max(2, min(size, _positions(decoder, pad)))
    if type(model).__name__.endswith("ForSequenceClassification") and pad is None:
        rows = 1  # the last token of a row is found by its padding
    if text is not None:
        assert folder is not None
        tokens = _tokens_of(text, Path(folder), vocabulary, count * rows * size).view(count, rows, size)
    else:
        tokens = torch.randint(0, vocabulary, (count, rows, size), generator=generator(seed, "tokens"))
        if pad is not None and vocabulary > 1:
            tokens = torch.where(tokens == pad, (tokens + 1) % vocabulary, tokens)
    if type(model).__name__.endswith("ForMultipleChoice"):
        tokens = torch.stack([tokens, tokens.flip(-1)], 2)
    made = [{"input_ids": ids} for ids in tokens]
    if getattr(config, "is_encoder_decoder", False):
        made = [{**batch, "decoder_input_ids": batch["input_ids"].flip(-1)} for batch in made]
    return made


def _positions(config: Any, pad: int | None) -> int:
    """How many tokens a model takes; RoBERTa counts from behind the padding token's number."""
    limit = getattr(config, "max_position_embeddings", None)
    if not isinstance(limit, int) or limit < 1:
        return _WINDOW
    return limit - pad - 1 if pad is not None and 2 * pad + 2 < limit else limit


def _pixels(config: Any, rows: int, seed: int, number: int) -> Tensor:
    size = getattr(config, "image_size", 224)
    height, width = size if isinstance(size, list | tuple) else (size, size)
    channels = int(getattr(config, "num_channels", 3))
    return torch.randn(rows, channels, height, width, generator=generator(seed, f"pixels {number}"))


def _tokens_of(text: str, folder: Path, vocabulary: int, needed: int) -> Tensor:
    transformers = require_transformers()
    try:
        with quiet():
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
            ids = tokenizer(text, return_tensors=None)["input_ids"]
    except Exception as error:  # whatever is wrong with its files
        raise MupscaleError(
            f"{folder} has no tokenizer that transformers can load ({_in_one_line(error)}); leave the text out, and "
            f"random tokens are taken"
        ) from None
    if len(ids) < 2:
        raise MupscaleError(f"the text is {len(ids)} tokens long; give two or more")
    if max(ids) >= vocabulary:
        raise MupscaleError(
            f"the tokenizer in {folder} gives token {max(ids)}, and the model's vocabulary has {vocabulary}: they do "
            f"not belong together"
        )
    return torch.tensor(ids).repeat(-(-needed // len(ids)))[:needed]


def fits(needed: int) -> bool:
    """Whether so many bytes of memory can be had, with a little to spare; True where nobody can tell."""
    free = available_memory()
    return free is None or needed + _SPARE <= free


def _more(names: tuple[str, ...] | list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""


def _in_one_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    first = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])  # what comes after the colon, too
    return f"{type(error).__name__}: {first.rstrip('.') or 'no reason given'}"
