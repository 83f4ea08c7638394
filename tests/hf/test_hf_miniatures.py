"""Plans by miniatures, against transformers' own models that are larger: outputs, training, and what must fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import hf_models as models
from mupscale import Axis, Plan, UncheckedPlan
from mupscale.core import naming
from mupscale.hf import miniatures
from mupscale.hf.building import build_model
from mupscale.hf.config_family import ConfigFamily
from mupscale.hf.config_fields import Times
from mupscale.hf.miniatures import initial_laws
from mupscale.planning.trials import Trials
from slow_cases import with_slow

VARIANTS: dict[str, tuple[str, Any, dict[str, Any]]] = {
    **{name: (name, 2, {}) for name in models.FIRST},
    "gpt2-untied": ("gpt2", 3, {"tie_word_embeddings": False, "scale_attn_by_inverse_layer_idx": True}),
    "gpt2-n_inner": ("gpt2", "hidden=2,ffn=3,heads=2", {"n_inner": 20}),
    "gpt2-two-heads": ("gpt2", 2, {"head": "DoubleHeadsModel"}),
    "llama-tied-biases": ("llama", 3, {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama-head_dim": ("llama", "hidden=4,ffn=3,heads=2", {"head_dim": 6}),
    "llama-one-kv-head": ("llama", 2, {"num_key_value_heads": 1}),
    "llama-kv-stays": ("llama", "hidden=2,ffn=2,heads=2,kv=1", {}),
    "llama-kv-grows-less": ("llama", "hidden=4,heads=4,kv=2", {}),
    "llama-all-heads": ("llama", 2, {"num_key_value_heads": None}),
    "llama-ffn-alone": ("llama", "ffn=2", {"tie_word_embeddings": True}),
    "mistral-tied": ("mistral", "hidden=3,heads=2,kv=1", {"tie_word_embeddings": True}),
    "qwen2-tied": ("qwen2", "hidden=3,heads=2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", 2, {"attention_bias": True}),
    "qwen3-tied": ("qwen3", "hidden=3,heads=2,kv=1", {"tie_word_embeddings": True}),
    "gemma-4": ("gemma", 4, {"num_key_value_heads": 2}),
    "gemma-untied": ("gemma", "hidden=3,ffn=2,heads=2", {"tie_word_embeddings": False}),
    "gemma2": ("gemma2", 3, {}),
    "gemma2-untied": ("gemma2", 2, {"tie_word_embeddings": False}),
    "phi-tied": ("phi", "hidden=2,ffn=3,heads=4,kv=2", {"tie_word_embeddings": True, "num_key_value_heads": 2}),
    "phi-norms": ("phi", 3, {"qk_layernorm": True}),
    "gpt_neox-tied": ("gpt_neox", 2, {"tie_word_embeddings": True}),
    "gpt_neox-serial": ("gpt_neox", 3, {"use_parallel_residual": False, "attention_bias": False}),
    "opt-untied-post-norm": ("opt", 3, {"tie_word_embeddings": False, "do_layer_norm_before": False}),
    "opt-words": ("opt", 2, {"word_embed_proj_dim": 12}),
    "opt-350m": ("opt", 3, {"word_embed_proj_dim": 12, "do_layer_norm_before": False, "enable_bias": False}),
    "olmo2": ("olmo2", 2, {"attention_bias": True}),
    "olmo2-tied": ("olmo2", "hidden=2,ffn=3,heads=3,kv=1", {"tie_word_embeddings": True}),
    "mixtral-tied": ("mixtral", "hidden=2,ffn=3,heads=2,kv=1", {"tie_word_embeddings": True, "head_dim": 6}),
    "bert-untied": ("bert", "hidden=2,ffn=3,heads=2", {"tie_word_embeddings": False}),
    "bert-pretraining": ("bert", 3, {"head": "ForPreTraining"}),
    "vit-no-biases": ("vit", "hidden=2,ffn=3,heads=4", {"qkv_bias": False}),
    "vit-pixels": ("vit", 3, {"head": "ForMaskedImageModeling"}),
}

MORE: dict[str, tuple[str, Any, dict[str, Any]]] = {
    **{name: (name, None, {}) for name in models.MORE},
    "smollm3-untied": ("smollm3", "hidden=3,heads=2,kv=1", {"tie_word_embeddings": False, "attention_bias": True}),
    "granite-tied": ("granite", "hidden=2,ffn=3,heads=2,kv=1", {"tie_word_embeddings": True, "mlp_bias": True}),
    "phi3-tied": ("phi3", "hidden=3,ffn=2,heads=2", {"tie_word_embeddings": True}),
    "starcoder2-untied": ("starcoder2", 3, {"tie_word_embeddings": False, "use_bias": False}),
    "cohere-norms": ("cohere", "hidden=3,ffn=2,heads=2", {"use_qk_norm": True, "attention_bias": True}),
    "cohere-norms-kv-stays": ("cohere", "hidden=2,heads=2,kv=1", {"use_qk_norm": True}),
    "cohere-untied": ("cohere", 2, {"tie_word_embeddings": False}),
    "cohere2-untied": ("cohere2", 3, {"tie_word_embeddings": False}),
    "stablelm-tied": ("stablelm", 3, {"tie_word_embeddings": True, "use_qkv_bias": True}),
    "stablelm-parallel": ("stablelm", "hidden=2,heads=2,kv=1", {"use_parallel_residual": True}),
    "stablelm-norms": ("stablelm", "ffn=3", {"qk_layernorm": True}),
    "gemma3-untied": ("gemma3_text", "hidden=4,ffn=3,heads=2", {"tie_word_embeddings": False, "sliding_window": 4}),
    "olmo3-tied": ("olmo3", "hidden=2,ffn=3,heads=2,kv=1", {"tie_word_embeddings": True}),
    "qwen2_moe-tied": ("qwen2_moe", "hidden=2,ffn=3,heads=2", {"tie_word_embeddings": True, "qkv_bias": False}),
    "qwen3_moe-tied": ("qwen3_moe", "hidden=3,ffn=2,heads=2,kv=1", {"tie_word_embeddings": True}),
    "olmoe-tied": ("olmoe", "hidden=2,ffn=3,heads=2", {"tie_word_embeddings": True, "attention_bias": True}),
    "granitemoe-tied": ("granitemoe", "hidden=2,ffn=3,heads=2", {"tie_word_embeddings": True}),
    "roberta-untied": ("roberta", "hidden=2,ffn=3,heads=2", {"tie_word_embeddings": False}),
    "distilbert-untied": ("distilbert", "hidden=2,ffn=3,heads=2", {"tie_word_embeddings": False}),
    "modernbert-untied": (
        "modernbert",
        "hidden=3,ffn=2,heads=3",
        {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True, "norm_bias": True},
    ),
    "modernbert-biases": ("modernbert", 2, {"classifier_bias": True, "norm_bias": True, "decoder_bias": False}),
    "electra-untied": ("electra", "hidden=3,ffn=2,heads=3", {"tie_word_embeddings": False}),
    "electra-large": ("electra", 2, {"embedding_size": 16}),
    "electra-discriminator": ("electra", 2, {"head": "ForPreTraining"}),
    "gpt_oss-tied": ("gpt_oss", "hidden=3,ffn=2,heads=2,kv=1", {"tie_word_embeddings": True}),
    "llama4-plain": ("llama4_text", "hidden=2,ffn=3,heads=2,kv=1", {"moe_layers": [], "tie_word_embeddings": True}),
    "deepseek_v2-no-rank": ("deepseek_v2", "hidden=3,ffn=2,heads=2", {"q_lora_rank": None, "attention_bias": True}),
    "deepseek_v2-experts": ("deepseek_v2", 2, {"first_k_dense_replace": 0, "tie_word_embeddings": True}),
    "deepseek_v3-experts": ("deepseek_v3", 2, {"first_k_dense_replace": 0, "attention_bias": True}),
    "falcon-untied": ("falcon", "hidden=3,ffn=2,heads=3", {"tie_word_embeddings": False, "bias": True}),
    "falcon-one-kv-head": ("falcon", 2, {"new_decoder_architecture": False, "multi_query": True}),
    "falcon-all-heads": ("falcon", 2, {"new_decoder_architecture": False, "multi_query": False, "num_kv_heads": None}),
    "falcon-serial": (
        "falcon",
        2,
        {"new_decoder_architecture": False, "multi_query": False, "num_kv_heads": None, "parallel_attn": False},
    ),
    "falcon-alibi": (
        "falcon",
        "ffn=3",
        {"new_decoder_architecture": False, "alibi": True, "multi_query": False, "num_kv_heads": None},
    ),
    "t5-gated": ("t5", "hidden=3,ffn=2,heads=2", {"feed_forward_proj": "gated-gelu"}),
    "bart-untied": ("bart", "hidden=2,ffn=3,heads=2", {"tie_word_embeddings": False}),
    "bloom-untied": ("bloom", "hidden=3", {"tie_word_embeddings": False}),
    "mpt-untied": ("mpt", "hidden=3", {"tie_word_embeddings": False}),
    "mpt-clipped": ("mpt", "hidden=2", {"attn_config": {"clip_qkv": 0.5, "softmax_scale": 0.7}}),
    "mpt-scaled": ("mpt", "hidden=4", {"attn_config": {"softmax_scale": 0.7}}),
    "mamba2-tied": ("mamba2", 3, {"tie_word_embeddings": True, "use_bias": True, "n_groups": 1}),
    "mamba2-no-bias": ("mamba2", "hidden=2,heads=2", {"use_conv_bias": False, "n_groups": 8}),
    "qwen3_next-tied": ("qwen3_next", "hidden=3,ffn=2,heads=2,kv=1", {"tie_word_embeddings": True}),
    "qwen3_next-full": (
        "qwen3_next",
        "hidden=2,ffn=3,heads=2",
        {"attention_bias": True, "layer_types": ["full_attention"], "mlp_only_layers": [0]},
    ),
    "whisper-untied": ("whisper", "hidden=2,ffn=3,heads=2", {"tie_word_embeddings": False}),
    "wav2vec2-large": (
        "wav2vec2",
        "hidden=3,ffn=2,heads=3",
        {"do_stable_layer_norm": True, "feat_extract_norm": "layer", "conv_bias": True, "adapter_attn_dim": 4},
    ),
}


# The same function, and the same training.


TELLING = ("llama-kv-grows-less", "gemma-untied", "falcon-one-kv-head", "deepseek_v2-no-rank")
"""One for each mechanism: grouped heads, folds of tied and scaled embeddings, heads in one matrix, latent attention.
The others run with make test-slow."""


def enlarged(config: dict[str, Any], times: int = 4) -> dict[str, Any]:
    """The config of a model whose parts have more units, as real ones have beside those of the tests."""
    return {**config, **{name: times * size for name, size in miniatures._dims(config)}}


UNSEEN = pytest.mark.filterwarnings("ignore:.*it changes no output on the batch")
"""The embedding of wav2vec2's masked frames, and BART's second one."""


class Larger(models.Pair):
    """A model larger than its miniatures."""

    def as_given(self, config: dict[str, Any]) -> dict[str, Any]:
        return enlarged(config)


@pytest.mark.usefixtures("float64")
@UNSEEN
@pytest.mark.parametrize("variant", with_slow([*VARIANTS, *MORE], TELLING))
def test_outputs_and_steps_of_adamw_are_the_same(variant: str) -> None:
    """Models of several times the miniatures' sizes; those of two layers have one that is neither first nor last."""
    name, times, config = {**VARIANTS, **MORE}[variant]
    pair = Larger(name, times, **{"num_hidden_layers": 3 if variant == name and name in models.FIRST else 1, **config})
    assert pair.plan.checked
    assert pair.compare() <= 1e-10
    assert pair.train(steps=3).ok


@pytest.mark.slow
def test_a_real_size_is_planned_on_miniatures_that_have_all_kinds_of_layers() -> None:
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "num_hidden_layers": 6, "layer_types": 2 * kinds}
    window = {"use_sliding_window": True, "sliding_window": 4}
    sizes = {"hidden_size": 1024, "intermediate_size": 3000, "vocab_size": 151936, **window}
    config: dict[str, Any] = {"model_type": "qwen2", **heads, **sizes}
    first, second = miniatures.miniature_configs(config, Times.of(2))
    assert (first["hidden_size"], second["hidden_size"]) == (32, 64)
    assert (first["num_hidden_layers"], first["layer_types"], first["vocab_size"]) == (3, kinds, 64)
    plan = ConfigFamily(config).plan(Times.of(2))
    assert plan["model.layers.5.self_attn.q_proj.weight"].axes[0] == Axis(2, 512, side="out")
    assert plan["model.layers.5.self_attn.k_proj.weight"].axes[0] == Axis(2, 128, side="out")
    assert plan["model.layers.5.mlp.down_proj.weight"].axes == {0: Axis(2, side="out"), 1: Axis(2, side="in")}
    assert plan.fresh["model.layers.5.mlp.down_proj.weight"] == pytest.approx(0.02 / 2**0.5, rel=1e-12)


def test_what_is_learnt_serves_every_size_of_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3}
    ConfigFamily({**config, "hidden_size": 256, "intermediate_size": 512}).plan(Times.of(3), initial=False)
    monkeypatch.setattr(miniatures.planning, "plan", None)  # nothing is run once more
    plan = ConfigFamily({**config, "hidden_size": 512, "intermediate_size": 1024}).plan(Times.of(3), initial=False)
    assert plan["model.layers.2.self_attn.q_proj.weight"].axes[0] == Axis(3, 256, side="out")


EXPERTS: dict[str, Any] = {"model_type": "qwen3_moe", "hidden_size": 512, "moe_intermediate_size": 256, "head_dim": 128}
EXPERTS |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 128, "num_experts_per_tok": 8}


def test_many_experts_are_a_few_in_a_miniature() -> None:
    assert miniatures.miniature_configs(EXPERTS, Times.of(2))[0]["num_experts"] == 4


def test_feed_forward_layers_are_smaller_still_in_a_miniature() -> None:
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 2}
    config = {"model_type": "llama", "hidden_size": 1024, "intermediate_size": 3584, **heads}
    first, second = miniatures.miniature_configs(config, Times.of(2))
    assert (first["hidden_size"], second["hidden_size"]) == (128, 256)
    assert (first["intermediate_size"], second["intermediate_size"]) == (32, 64)


@pytest.mark.slow
def test_many_experts_are_planned_on_a_few() -> None:
    plan = ConfigFamily({**EXPERTS, "num_hidden_layers": 4}).plan(Times.of(2), initial=False)
    assert plan["model.layers.3.mlp.experts.gate_up_proj"].narrow[0] == 128


def test_the_last_layer_may_have_a_role_of_its_own() -> None:
    """BART's last norm takes the 1/k of the tied readout; layers between the first and the last are like neither."""
    config = {"model_type": "bart", "d_model": 64, "encoder_layers": 1, "decoder_layers": 5, "vocab_size": 29}
    sizes = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
    names = {f"model.decoder.layers.{n}.final_layer_norm.weight": n for n in range(5)}
    like = miniatures.counterparts({**config, **sizes}, names, {n: i for n, i in names.items() if i < 3})
    assert [names[of] for of in like.values()] == [0, 1, 1, 1, 2]


@pytest.mark.parametrize("name", with_slow(models.CONFIGS, ("t5", "modernbert")))
def test_initial_values_are_those_that_transformers_draws(name: str) -> None:
    """Of a model that is larger and deeper than its miniatures: T5's and ModernBERT's follow from its sizes."""
    changed = {n: 5 for n in ("num_hidden_layers", "n_layer", "n_layers", "num_layers") if n in models.CONFIGS[name][2]}
    kinds = {"layer_types", "no_rope_layers"} & models.CONFIGS[name][2].keys()
    config = enlarged(models.tiny(name, **({} if kinds else changed))[0].to_dict())
    laws = initial_laws(config)
    torch.manual_seed(0)
    for parameter, p in naming.parameters(build_model(config)).items():
        found, slack = float(p.detach().std(correction=0)), 6 / p.numel() ** 0.5
        law = laws[parameter]
        if not law.means:  # taken as built
            continue
        if law.std == 0:
            assert law.means[0] == pytest.approx(float(p.detach().flatten()[0])), parameter
        elif p.numel() > 64:
            assert law.std == pytest.approx(found, rel=slack + 0.02), parameter
            assert law.means[0] == pytest.approx(float(p.detach().mean()), abs=2 * slack * found), parameter


def test_what_a_run_does_not_show_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(config: Any) -> Any:
        model = build_model(config)
        model.unused = nn.Linear(model.config.hidden_size, model.config.hidden_size)  # type: ignore[union-attr, arg-type]
        return model

    monkeypatch.setattr(miniatures, "build_model", build)
    monkeypatch.setattr(miniatures, "sketch_model", build)
    config = models.tiny("llama", vocab_size=13)[0].to_dict()
    with pytest.warns(UncheckedPlan, match=r"of 'llama' the batch does not show .* for 'unused.weight': .* decide$"):
        miniatures.plan_by_miniatures(config, Times.of(2))


# Controls that must fail.


FOLDED = ("gpt2", "gpt2-two-heads", "llama-tied-biases", "gemma", "gemma-untied", "bert")


def without(constants: dict[str, int]) -> Callable[[Plan], Plan]:
    return lambda plan: Plan({n: e.with_constants(**constants) for n, e in plan.parameters.items()})


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("variant", with_slow(FOLDED, ("gpt2",)))
def test_a_fold_or_an_offset_left_out_shows(variant: str) -> None:
    name, times, config = VARIANTS[variant]
    for constants in ({"fold": 1}, *([{"offset": 0}] if variant == "gemma" else [])):
        assert models.Pair(name, times, without(constants), **config).compare() > 1e-3


@pytest.mark.slow
@pytest.mark.usefixtures("float64")
def test_gemmas_scale_is_a_buffer_of_the_dtype_the_model_is_built_in() -> None:
    """√hidden, rounded to float32 in a model built in float32 and converted later: build it in float64."""
    pair = models.Pair("gemma", 2)
    built = [m.model.embed_tokens.embed_scale for m in (pair.small, pair.wide)]  # type: ignore[union-attr]
    assert [b.dtype for b in built] == [torch.float64] * 2
    assert pair.compare() <= 1e-10
    for buffer in built:
        buffer.copy_(buffer.float().double())
    assert 1e-10 < pair.compare() < 1e-6


def test_a_miniature_runs_in_short_chunks() -> None:
    """Mamba 2 makes tensors of chunk × chunk × heads × states, of gigabytes at the 256 of its default."""
    config = {"model_type": "mamba2", "hidden_size": 32, "num_heads": 8, "head_dim": 8, "num_hidden_layers": 2}
    assert miniatures.shallow_config({**config, "n_groups": 1, "vocab_size": 64})["chunk_size"] == 4


def test_many_heads_of_a_state_space_are_read_off_their_modules() -> None:
    """Mamba 2 of published sizes was refused after minutes: a search over orders of 24 heads and more gave up."""
    config = {"model_type": "mamba2", "hidden_size": 96, "num_heads": 24, "head_dim": 8, "num_hidden_layers": 1}
    config |= {"state_size": 16, "n_groups": 1, "chunk_size": 256, "vocab_size": 64, "expand": 2}
    plan = ConfigFamily(config).plan(Times.of(2), initial=False)
    assert plan.tried_by == "small members"
    mixer = "backbone.layers.0.mixer"
    parts = ((192, 192), (192, 192), (16, 16), (16, 16), (24, 24))
    assert plan[f"{mixer}.in_proj.weight"].axes[0].sections == parts
    assert plan[f"{mixer}.A_log"].axes[0].block == 24
    assert plan[f"{mixer}.out_proj.weight"].axes[1].block == 192


def test_a_miniature_forgets_no_head_within_a_token() -> None:
    """Decays of exp(log 24) and more left no gradient, so that longer and longer batches were tried."""
    config = {"model_type": "mamba2", "hidden_size": 48, "num_heads": 24, "head_dim": 4, "num_hidden_layers": 1}
    config |= {"state_size": 4, "n_groups": 1, "chunk_size": 4, "vocab_size": 64, "expand": 2}
    narrow, wide, batch = miniatures._pair(config, Times.of(2))
    assert Trials(batch).look(narrow, wide).strong is None


def test_a_size_that_follows_the_hidden_size_is_as_small_in_a_miniature() -> None:
    """DeBERTa's pooler kept the real size, and the miniature did not run."""
    config = transformers.DebertaV2Config(
        hidden_size=48, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4, vocab_size=29
    )
    named = {**config.to_dict(), "architectures": ["DebertaV2ForSequenceClassification"]}
    small = miniatures.miniature_configs(named, Times.of(2))[0]
    assert small["pooler_hidden_size"] == small["hidden_size"] < 48
    miniatures.batch_for(build_model(small))
    assert ConfigFamily(named).wide_config(Times.of(2))["pooler_hidden_size"] == 96
