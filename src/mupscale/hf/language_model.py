"""The language model of a Hugging Face folder at any width, as recipes and families build models."""

from __future__ import annotations

import math
import warnings
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mupscale.hf.building import build_model, quiet_transformers
from mupscale.hf.config_fields import PARTS, Times, parts_of, wide_config
from mupscale.hf.groups import find_optimizer_file, resume_optimizer
from mupscale.hf.output_folder import copy_companions
from mupscale.hf.source import Source, open_source, read_config
from mupscale.hf.verifying import load_pretrained
from mupscale.system import MupscaleError, checks_arguments


class LanguageModel(nn.Module):
    """The model that a folder's config.json names, with another hidden size: tokens in, logits out.

    Feed-forward layers, heads and key/value heads grow and shrink with the hidden size; head_dim, layers and vocabulary
    stay. The weights are fresh, and nothing but config.json is read: `load_language_model` loads the folder's.

    >>> import json, pathlib, tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> config = {"model_type": "gpt2", "n_embd": 16, "n_head": 4, "n_layer": 1, "vocab_size": 11}
    >>> _ = (pathlib.Path(folder.name) / "config.json").write_text(json.dumps(config))
    >>> LanguageModel(folder.name, width=8)(torch.zeros(1, 3, dtype=torch.int64)).shape
    torch.Size([1, 3, 11])
    >>> folder.cleanup()
    """

    def __init__(self, folder: str, width: int) -> None:
        super().__init__()
        self.folder = folder
        self.model = build_model(config_at(folder, width)).train()

    def forward(self, tokens: Tensor) -> Tensor:
        """Map token ids (B, T) to logits (B, T, vocabulary)."""
        logits: Tensor = self.model(input_ids=tokens, use_cache=False).logits
        return logits

    def save_pretrained(self, folder: str | Path) -> None:
        """Write it as a Hugging Face folder, with the tokenizer and the like of the one that it was built after."""
        with quiet_transformers():
            self.model.save_pretrained(folder)  # type: ignore[operator]
        copy_companions(Path(folder), Source(Path(self.folder), read_config(Path(self.folder)), {}))


def config_at(folder: str | Path, width: int) -> dict[str, Any]:
    """A folder's config.json with another hidden size, and all that goes with it."""
    config, hidden = read_config(Path(folder)), hidden_size(folder)
    now = parts_of(config)
    if width == hidden:
        return config
    ratio = Fraction(width, hidden)
    for part, size in now.items():
        if (size * ratio).denominator != 1:
            raise MupscaleError(
                f"{folder} cannot have hidden size {width}: at hidden size {hidden} its {PARTS[part]} is {size}, so "
                f"here it would be {float(size * ratio):g}. Choose a multiple of {hidden // math.gcd(*now.values())}"
            )
    return wide_config(config, Times(ratio, ratio, ratio, ratio, fresh=True))


@checks_arguments
def hidden_size(folder: str | Path) -> int:
    """The hidden size that a folder's config.json tells.

    >>> import json, pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = (pathlib.Path(folder) / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_embd": 16}))
    ...     hidden_size(folder)
    16
    """
    config = read_config(Path(folder))
    sizes = parts_of(config)
    if "hidden" not in sizes:
        raise MupscaleError(f"config.json in {folder} has no hidden size that can change")
    return sizes["hidden"]


@checks_arguments
def load_language_model(folder: str | Path) -> tuple[LanguageModel, int]:
    """The folder's model with its own weights, in float32, and its hidden size.

    >>> import tempfile
    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     GPT2LMHeadModel(GPT2Config(n_embd=8, n_head=2, n_layer=1, vocab_size=11)).save_pretrained(folder)
    ...     load_language_model(folder)[1]
    8
    """
    source, width = open_source(folder), hidden_size(folder)
    model = LanguageModel(str(source.folder), width)
    model.model.load_state_dict(load_pretrained(source, torch.float32)[0].state_dict())
    return model, width


@checks_arguments
def load_language_optimizer(
    folder: str | Path, model: LanguageModel, optimizer_class: type[Optimizer]
) -> Optimizer | None:
    """The optimizer.pt that a Trainer left beside the model, as an optimizer of this class; None if there is none."""
    try:
        path = find_optimizer_file(folder)
    except MupscaleError:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a rate of 0 at the end of a schedule, which a recipe's takes the place of
        optimizer = resume_optimizer(path, model.model, optimizer_class)
    for group in optimizer.param_groups:
        group["param_names"] = [f"model.{name}" for name in group["param_names"]]
    return optimizer
