"""A checkpoint loaded whole by transformers, and batches to run its model on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mupscale.hf.describe import in_one_line, model_class, quiet_transformers, require_transformers, transformers_config
from mupscale.hf.files import Source
from mupscale.system import MupscaleError, generator

Batch = dict[str, Tensor]
_WINDOW = 512  # tokens, where a config names no limit


@dataclass(frozen=True)
class Loaded:
    """A model, and the tensors of its files that it has no use for (a head of another task)."""

    model: nn.Module
    unused: tuple[str, ...]


def load_pretrained(source: Source, dtype: torch.dtype, *, device: str | torch.device | None = None) -> Loaded:
    """The model of a checkpoint, in evaluation mode, with eager attention.

    Every parameter comes from the files, never from a random initial value; they may hold more than the model uses.

    >>> import tempfile
    >>> from mupscale.hf.files import open_source
    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     GPT2LMHeadModel(GPT2Config(n_embd=8, n_head=2, n_layer=1, vocab_size=11)).save_pretrained(folder)
    ...     load_pretrained(open_source(folder), torch.float32).unused
    ()
    """
    folder, cls, config = source.folder, model_class(source.config), transformers_config(source.config)
    try:
        with quiet_transformers():
            model, info = cls.from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                attn_implementation="eager",
                local_files_only=True,
                output_loading_info=True,
            )
    except Exception as error:  # whatever it raises of files, shapes and configs
        raise MupscaleError(f"transformers cannot load {folder}: {in_one_line(error)}") from None
    for kind, lack in (("missing_keys", "lacks"), ("mismatched_keys", "has another shape for")):
        names = sorted(str(n[0] if isinstance(n, tuple) else n) for n in info.get(kind, ()))
        if names:
            raise MupscaleError(
                f"{folder} {lack} '{names[0]}'{_more(names)}, which {cls.__name__} would fill with random values: the "
                f"files and config.json do not belong together"
            )
    model = model.eval() if device is None else model.eval().to(device)
    return Loaded(model, tuple(sorted(info.get("unexpected_keys", ()))))


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
    """`count` batches for the model as keyword arguments: random tokens or pixels, or a text in windows of `size`.

    text: needs the folder, whose tokenizer reads it; it starts again where it ends too soon. trust_remote_code: run
    the tokenizer's own code, if it is code of the checkpoint's.
    """
    config: Any = model.config
    if text is not None and folder is None:
        raise MupscaleError("a text is read by the checkpoint's own tokenizer: give its folder, too")
    if getattr(model, "main_input_name", "input_ids") == "pixel_values":
        if text is not None:
            raise MupscaleError(f"{type(model).__name__} reads images, not text: leave the text out")
        return [{"pixel_values": _pixels(config, rows, seed, i)} for i in range(count)]
    decoder = config.get_text_config()
    if not isinstance(getattr(decoder, "vocab_size", None), int):
        raise MupscaleError(
            f"{type(model).__name__} reads '{model.main_input_name}', neither tokens nor pixels, so there is nothing "
            f"to compare it on; upscale the model in memory with mupscale.plan and inputs= of its own"
        )
    vocabulary, pad = int(decoder.vocab_size), getattr(decoder, "pad_token_id", None)
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
    batches = [{"input_ids": ids} for ids in tokens]
    if getattr(config, "is_encoder_decoder", False):
        batches = [{**batch, "decoder_input_ids": batch["input_ids"].flip(-1)} for batch in batches]
    return batches


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


def _tokens_of(text: str, folder: Path, vocabulary: int, needed: int, trust_remote_code: bool) -> Tensor:
    transformers = require_transformers()
    try:
        with quiet_transformers():
            tokenizer = transformers.AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=trust_remote_code
            )
            ids = tokenizer(text, return_tensors=None)["input_ids"]
    except Exception as error:  # whatever is wrong with its files
        if not trust_remote_code and "trust_remote_code" in str(error):
            raise MupscaleError(
                f"the tokenizer in {folder} is code of its own, which is not run unless you trust it "
                f"(--trust-remote-code); leave the text out, and random tokens are taken"
            ) from None
        raise MupscaleError(
            f"{folder} has no tokenizer that transformers can load ({in_one_line(error)}); leave the text out, and "
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


def _more(names: tuple[str, ...] | list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""
