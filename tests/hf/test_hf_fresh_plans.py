"""Every described architecture grown by fresh units in memory: old units stay, and the function where that can be."""

from __future__ import annotations

import math
import warnings
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")

import hf_models as models  # noqa: E402
import mupscale as mu  # noqa: E402
from mupscale.checks import relative_difference  # noqa: E402
from mupscale.hf.describe import DESCRIPTIONS, Ratios, times_to  # noqa: E402

HALF = Fraction(3, 2)
EVERYTHING = {"hidden": HALF, "ffn": HALF, "heads": HALF}

LOSSLESS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gpt2": ("gpt2", EVERYTHING, {}),
    "gpt2-untied": ("gpt2", {**EVERYTHING, "ffn": 1}, {"tie_word_embeddings": False}),
    "gpt2-two-heads": ("gpt2", EVERYTHING, {"head": "DoubleHeadsModel"}),
    "llama": ("llama", EVERYTHING, {}),
    "llama-tied-biases": ("llama", EVERYTHING, {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama-head_dim": (
        "llama",
        {"hidden": Fraction(21, 16)},
        {"head_dim": 6, "num_attention_heads": 3, "num_key_value_heads": 3},
    ),
    "llama-kv-stays": ("llama", {"hidden": HALF, "heads": HALF, "kv": 1}, {}),
    "llama-one-kv-head": ("llama", {"hidden": HALF, "heads": HALF, "kv": 1}, {"num_key_value_heads": 1}),
    "llama-times-2": ("llama", {"hidden": 2, "ffn": 3, "heads": 2}, {}),
    "llama-classifier": (
        "llama",
        EVERYTHING,
        {"head": "ForSequenceClassification", "tie_word_embeddings": True, "pad_token_id": 0},
    ),
    "llama-base": ("llama", EVERYTHING, {"head": "Model"}),
    "mistral": ("mistral", EVERYTHING, {}),
    "qwen2": ("qwen2", EVERYTHING, {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"hidden": Fraction(19, 16), "ffn": Fraction(21, 20), "heads": HALF}, {"attention_bias": True}),
    "gemma": ("gemma", {"hidden": HALF, "heads": HALF, "kv": 1}, {}),
    "gemma-untied": ("gemma", EVERYTHING, {"tie_word_embeddings": False, "num_key_value_heads": 4}),
    "gemma2": ("gemma2", EVERYTHING, {}),
    "phi": ("phi", EVERYTHING, {}),
    "phi-tied": ("phi", EVERYTHING, {"tie_word_embeddings": True, "qk_layernorm": True}),
    "gpt_neox": ("gpt_neox", EVERYTHING, {}),
    "gpt_neox-serial": ("gpt_neox", EVERYTHING, {"tie_word_embeddings": True, "use_parallel_residual": False}),
    "opt": ("opt", EVERYTHING, {}),
    "opt-words": ("opt", EVERYTHING, {"word_embed_proj_dim": 12}),
    "olmo2-hidden": ("olmo2", {"hidden": HALF, "ffn": 2}, {"head_dim": 4, "tie_word_embeddings": True}),
    "mixtral": ("mixtral", EVERYTHING, {}),
    "vit": ("vit", EVERYTHING, {}),
    "vit-pixels": ("vit", EVERYTHING, {"head": "ForMaskedImageModeling"}),
}

EXACT: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "bert": ("bert", {"ffn": HALF}, {}),
    "bert-pretraining": ("bert", {"ffn": 2}, {"head": "ForPreTraining"}),
    "opt-350m": ("opt", {"ffn": HALF}, {"word_embed_proj_dim": 12, "do_layer_norm_before": False}),
    "llama-heads": ("llama", {"ffn": HALF, "heads": HALF, "kv": 1}, {"head_dim": 4, "hidden_size": 48}),
    "gemma2-heads": ("gemma2", {"ffn": HALF, "heads": HALF}, {"hidden_size": 48}),
    "vit-heads": ("vit", {"heads": HALF}, {}),
}
"""Models whose hidden size stays."""


class Grown:
    """A small model in float64 and the wide one with fresh units."""

    def __init__(
        self, name: str, ratios: dict[str, Any], grow: mu.Fresh, config: dict[str, Any], seed: int = 0
    ) -> None:
        self.config, _ = models.tiny(name, **{"num_hidden_layers": 1, **config})
        self.architecture, self.json = DESCRIPTIONS[name], self.config.to_dict()
        self.times = Ratios(**{"kv": ratios.get("heads", 1), **ratios})
        self.small = models.randomised(models.build(self.config)).eval()
        self.wide = models.build(self.architecture.wide_config(self.json, self.times)).eval()
        self.plan = self.architecture.plan(self.json, self.times, models.shapes(self.small))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what cannot be lossless
            mu.upscale(self.small, self.wide, self.plan, grow=grow, seed=seed)
        self.batch = models.inputs(self.config)[0]

    def difference(self) -> float:
        """Of the outputs, relative to their size; of hidden states, the old units count."""
        with torch.no_grad():
            small, wide = (models.outputs(model, self.batch) for model in (self.small, self.wide))
        return max(relative_difference(a, self._old(b, a)) for a, b in zip(small, wide, strict=True))

    def _old(self, wide: Tensor, small: Tensor) -> Tensor:
        n = small.shape[-1]
        return wide if wide.shape == small.shape else wide[..., mu.core.places(mu.Axis(self.times.hidden), n)]


def with_tiny_eps(model: nn.Module, eps: float = 1e-30) -> None:
    for module in model.modules():
        for name in ("eps", "variance_epsilon"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, eps)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("variant", LOSSLESS)
def test_lossless_growth_keeps_the_outputs(variant: str) -> None:
    name, ratios, config = LOSSLESS[variant]
    grown = Grown(name, ratios, mu.Fresh(lossless=True), config)
    for model in (grown.small, grown.wide):
        with_tiny_eps(model)
    assert grown.difference() <= 1e-10


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("variant", EXACT)
def test_silent_new_units_keep_the_outputs_where_no_norm_reads_them(variant: str) -> None:
    name, ratios, config = EXACT[variant]
    assert Grown(name, ratios, mu.Fresh(outgoing=0.0), config).difference() <= 1e-12
    assert Grown(name, ratios, mu.Fresh(), config).difference() > 1e-6
