"""Many architectures grown by fresh units in memory: old units stay, and the function where that can be."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hf_models as models
import mupscale as mu
from mupscale import MupscaleError, Plan
from mupscale.core import index_of_old, places
from mupscale.hf.config_family import ConfigFamily
from mupscale.hf.multipliers import Times, times_to
from mupscale.planning import relative_difference
from slow_cases import with_slow

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
        {"hidden_size": 48, "head_dim": 6, "num_attention_heads": 3, "num_key_value_heads": 3},
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

MORE_LOSSLESS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "smollm3": ("smollm3", EVERYTHING, {}),
    "granite": ("granite", {"hidden": HALF, "heads": HALF, "kv": 1}, {"tie_word_embeddings": True}),
    "phi3": ("phi3", EVERYTHING, {}),
    "starcoder2": ("starcoder2", EVERYTHING, {}),
    "cohere": ("cohere", EVERYTHING, {}),
    "cohere-norms": ("cohere", {"hidden": HALF, "heads": HALF, "kv": 1}, {"use_qk_norm": True}),
    "cohere2": ("cohere2", EVERYTHING, {}),
    "stablelm": ("stablelm", EVERYTHING, {"use_parallel_residual": True}),
    "gemma3_text": ("gemma3_text", EVERYTHING, {}),
    "olmo3-hidden": ("olmo3", {"hidden": HALF, "ffn": 2}, {"head_dim": 4}),
    "qwen2_moe": ("qwen2_moe", {"hidden": HALF, "ffn": 2, "heads": HALF}, {}),
    "qwen3_moe": ("qwen3_moe", {"hidden": HALF, "ffn": HALF, "heads": HALF}, {"tie_word_embeddings": True}),
    "granitemoe": ("granitemoe", EVERYTHING, {}),
    "gpt_oss": ("gpt_oss", EVERYTHING, {}),
    "llama4_text": ("llama4_text", {"hidden": HALF, "ffn": HALF, "heads": HALF, "kv": 1}, {}),
    "deepseek_v2": ("deepseek_v2", EVERYTHING, {}),
    "deepseek_v3": ("deepseek_v3", EVERYTHING, {"first_k_dense_replace": 0}),
    "falcon": ("falcon", EVERYTHING, {}),
    "falcon-one-kv-head": ("falcon", {"hidden": 2, "heads": 2}, {"new_decoder_architecture": False}),
    "t5": ("t5", EVERYTHING, {}),
    "qwen3_next": ("qwen3_next", {"hidden": HALF, "ffn": HALF, "heads": HALF}, {}),
    "qwen3_next-full": (
        "qwen3_next",
        {"hidden": HALF, "ffn": HALF, "heads": HALF},
        {"layer_types": ["full_attention"]},
    ),
}

MORE_EXACT: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "roberta": ("roberta", {"ffn": HALF}, {}),
    "distilbert": ("distilbert", {"ffn": HALF}, {}),
    "electra": ("electra", {"ffn": HALF}, {}),
    "modernbert": ("modernbert", {"ffn": HALF}, {}),
    "olmoe": ("olmoe", {"ffn": HALF}, {}),
    "bart": ("bart", {"ffn": HALF}, {}),
    "whisper": ("whisper", {"ffn": HALF}, {}),
    "wav2vec2": ("wav2vec2", {"ffn": HALF}, {}),
    "stablelm-norms": ("stablelm", {"ffn": HALF}, {"qk_layernorm": True}),
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


FEW = ("llama-kv-stays", "gpt_neox", "vit")


class Grown:
    """A small model in float64 and the wide one with fresh units."""

    def __init__(
        self,
        name: str,
        ratios: dict[str, Any],
        grow: mu.Fresh,
        config: dict[str, Any],
        change: Callable[[Plan], Plan] = lambda plan: plan,
    ) -> None:
        self.config, _ = models.tiny(name, **{"num_hidden_layers": 1, **config})
        self.times = Times(**{"kv": ratios.get("heads", 1), **ratios}, fresh=True)
        family = ConfigFamily(self.config.to_dict())
        self.small = models.randomised(models.build(self.config)).eval()
        self.wide = models.build(family.wide_config(self.times)).eval()
        self.plan = change(family.plan(self.times))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what cannot be lossless
            mu.upscale(self.small, self.wide, self.plan, grow=grow)
        self.batch = models.inputs(self.config)[0]

    def difference(self) -> float:
        """Of the outputs, relative to their size; of hidden states, the old units count."""
        with torch.no_grad():
            small, wide = (models.outputs(model, self.batch) for model in (self.small, self.wide))
        return max(relative_difference(a, self._old(b, a)) for a, b in zip(small, wide, strict=True))

    def _old(self, wide: Tensor, small: Tensor) -> Tensor:
        return wide if wide.shape == small.shape else wide[..., places(mu.Axis(self.times.hidden), small.shape[-1])]


def with_tiny_eps(model: nn.Module, eps: float = 1e-30) -> None:
    for module in model.modules():
        for name in ("eps", "variance_epsilon"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, eps)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("variant", with_slow([*LOSSLESS, *MORE_LOSSLESS], FEW))
def test_lossless_growth_keeps_the_outputs(variant: str) -> None:
    name, ratios, config = {**LOSSLESS, **MORE_LOSSLESS}[variant]
    grown = Grown(name, ratios, mu.Fresh(lossless=True), config)
    for model in (grown.small, grown.wide):
        with_tiny_eps(model)
    assert grown.difference() <= 1e-10


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("variant", with_slow([*EXACT, *MORE_EXACT], ("bert", "vit-heads")))
def test_silent_new_units_keep_the_outputs_where_no_norm_reads_them(variant: str) -> None:
    name, ratios, config = {**EXACT, **MORE_EXACT}[variant]
    assert Grown(name, ratios, mu.Fresh(outgoing=0.0), config).difference() <= 1e-12
    assert Grown(name, ratios, mu.Fresh(), config).difference() > 1e-6


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("variant", with_slow([*LOSSLESS, *EXACT, *MORE_LOSSLESS, *MORE_EXACT], FEW))
def test_old_weights_lie_where_they_belong(variant: str) -> None:
    name, ratios, config = {**LOSSLESS, **EXACT, **MORE_LOSSLESS, **MORE_EXACT}[variant]
    grown = Grown(name, ratios, mu.Fresh(), config)
    wide = dict(grown.wide.named_parameters())
    for parameter, p in grown.small.named_parameters():
        entry = grown.plan[parameter]
        kept = p * float(entry.keep) + float(entry.offset) * (float(entry.keep) - 1) if entry.keep != 1 else p
        assert torch.equal(wide[parameter][index_of_old(entry.narrow, entry.axes)], kept), parameter


def without_keep(plan: Plan) -> Plan:
    return replace(plan, parameters={n: e.with_constants(keep=1) for n, e in plan.parameters.items()})


def folded(plan: Plan) -> Plan:
    """As if old units were copies, too."""
    return replace(plan, parameters={n: e.with_constants(keep=e.fold) for n, e in plan.parameters.items()})


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("variant", "change"),
    [
        pytest.param("gemma", without_keep, marks=pytest.mark.slow),
        ("gemma-untied", without_keep),
        pytest.param("gemma", folded, marks=pytest.mark.slow),
        ("gpt2", folded),
    ],
)
def test_a_wrong_factor_of_old_weights_shows(variant: str, change: Callable[[Plan], Plan]) -> None:
    name, ratios, config = LOSSLESS[variant]
    grown = Grown(name, ratios, mu.Fresh(lossless=True), config, change)
    for model in (grown.small, grown.wide):
        with_tiny_eps(model)
    assert grown.difference() > 1e-2


@pytest.mark.usefixtures("float64")
def test_a_mean_in_place_of_zero_shows() -> None:
    """LLaMA's norms do not centre."""

    def centring(plan: Plan) -> Plan:
        return plan.with_initial("norm", dict.fromkeys(plan.norms, "layer"))

    name, ratios, config = LOSSLESS["llama"]
    assert Grown(name, ratios, mu.Fresh(lossless=True), config, centring).difference() > 1e-2


@pytest.mark.slow
def test_a_tied_final_norm_keeps_its_old_gains_and_folds_new_ones() -> None:
    family = ConfigFamily(models.tiny("gemma")[0].to_dict())
    plan = family.plan(Times(hidden=4, ffn=4, heads=4, kv=1, fresh=True))
    norm, embedding = plan["model.norm.weight"], plan["model.embed_tokens.weight"]
    # √4 / 4 for new ones; √4, which the embedding took, for old
    assert (norm.fold, norm.keep) == (pytest.approx(0.5), pytest.approx(2))
    assert (embedding.fold, embedding.keep) == (pytest.approx(0.5), pytest.approx(0.5))
    assert plan.means is not None
    assert plan.means["model.norm.weight"] == (pytest.approx(-0.5),)  # 1 + w is a half
    llama = ConfigFamily(models.tiny("llama", tie_word_embeddings=True)[0].to_dict())
    norm = llama.plan(Times(hidden=4, heads=4, kv=4, fresh=True), initial=False)["model.norm.weight"]
    assert (norm.fold, norm.keep) == (pytest.approx(0.25), 1)


SIZES = {"hidden": 1024, "ffn": 2816, "heads": 16, "kv": 4}


@pytest.mark.parametrize(
    ("wanted", "fresh", "message"),
    [
        ({"hidden": 512}, True, "hidden=512 is smaller than the model's hidden size, 1024"),
        (
            {"hidden": 1500},
            False,
            "not a whole multiple of 1024, .* Fresh units fit any larger size: grow=mupscale.Fresh",
        ),
        ({"hidden": 1024}, True, "nothing would grow: the model has hidden 1024, ffn 2816, heads 16, kv 4 already"),
        ({"heads": 18}, True, "heads=18 cuts a group: each key/value head serves 4 heads. Choose heads=20"),
        ({"heads": 22}, True, "Choose heads=20 or 24"),
        ({"heads": 24, "kv": 5}, True, "16 heads with 4 key/value heads cannot become 24 with 5"),
        ({"heads": 32, "kv": 6}, True, "in whole groups of 4, or stay .4. .* Choose 32 heads with 8, or 32 with 4"),
        ({"ffn": True}, True, "ffn= takes the size of the feed-forward layers of the wide model, as in ffn=5632"),
        ({"ffn": 0}, True, "ffn= takes the size"),
    ],
)
def test_sizes_that_cannot_be(wanted: dict[str, int], fresh: bool, message: str) -> None:
    with pytest.raises(MupscaleError, match=message):
        times_to(wanted, SIZES, fresh=fresh)


def test_key_value_heads_may_stay() -> None:
    assert times_to({"heads": 24, "kv": 4}, SIZES, fresh=True) == Times(heads=HALF, fresh=True)
    assert times_to({"heads": 24}, SIZES, fresh=True) == Times(heads=HALF, kv=HALF, fresh=True)
    assert times_to({"heads": 32, "ffn": 5632}, SIZES, fresh=False).kv == 2


@pytest.mark.parametrize(
    ("ratios", "message"),
    [
        ({"hidden": Fraction(800, 768)}, "hidden=800 would cut a head of 64 units. Choose 832 with heads=13"),
        ({"hidden": Fraction(1000, 768)}, "Choose 960 with heads=15 or 1024 with heads=16"),
        ({"hidden": 2}, "let hidden and heads grow by the same factor, as in hidden=1536, heads=24"),
        ({"heads": 2, "kv": 2}, "as in hidden=1536, heads=24"),
        ({"hidden": 2, "heads": 2, "kv": 1}, "Leave kv out"),
    ],
)
def test_a_head_is_not_cut(ratios: dict[str, Any], message: str) -> None:
    config = {"model_type": "gpt2", "n_embd": 768, "n_head": 12}
    with pytest.raises(MupscaleError, match=message):
        ConfigFamily(config).wide_config(Times(**ratios, fresh=True))
