"""Tiny configs of the architectures that most tests of mupscale.hf take with make test-slow."""

from __future__ import annotations

from typing import Any

VOCAB, POSITIONS = 29, 24

SIZES = {"hidden_size": 16, "intermediate_size": 20, "num_attention_heads": 4, "num_hidden_layers": 2}
TEXT = {**SIZES, "vocab_size": VOCAB, "max_position_embeddings": POSITIONS}
GROUPED = {**TEXT, "num_key_value_heads": 2}

_EXPERTS = {"moe_intermediate_size": 12, "num_experts": 4, "num_experts_per_tok": 2}
_LATENT = {
    "q_lora_rank": 8,
    "kv_lora_rank": 6,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 2,
    "v_head_dim": 6,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}

MORE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "smollm3": ("SmolLM3", "ForCausalLM", {**GROUPED, "no_rope_layers": [1, 0]}),
    "granite": (
        "Granite",
        "ForCausalLM",
        {**GROUPED, "embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5},
    ),
    "phi3": ("Phi3", "ForCausalLM", GROUPED),
    "starcoder2": ("Starcoder2", "ForCausalLM", {**GROUPED, "sliding_window": 4}),
    "cohere": ("Cohere", "ForCausalLM", {**GROUPED, "logit_scale": 0.5}),
    "cohere2": ("Cohere2", "ForCausalLM", {**GROUPED, "sliding_window": 4, "logit_scale": 0.5}),
    "stablelm": ("StableLm", "ForCausalLM", GROUPED),
    "gemma3_text": ("Gemma3", "ForCausalLM", {**GROUPED, "head_dim": 6, "query_pre_attn_scalar": 3}),
    "olmo3": ("Olmo3", "ForCausalLM", {**GROUPED, "sliding_window": 4}),
    "qwen2_moe": (
        "Qwen2Moe",
        "ForCausalLM",
        {**GROUPED, **_EXPERTS, "shared_expert_intermediate_size": 14, "mlp_only_layers": [1]},
    ),
    "qwen3_moe": ("Qwen3Moe", "ForCausalLM", {**GROUPED, **_EXPERTS, "head_dim": 6, "mlp_only_layers": [1]}),
    "olmoe": ("Olmoe", "ForCausalLM", {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2}),
    "granitemoe": ("GraniteMoe", "ForCausalLM", {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "roberta": ("Roberta", "ForMaskedLM", {**TEXT, "pad_token_id": 1}),
    "xlm-roberta": ("XLMRoberta", "ForMaskedLM", {**TEXT, "pad_token_id": 1}),
    "camembert": ("Camembert", "ForMaskedLM", {**TEXT, "pad_token_id": 1}),
    "distilbert": (
        "DistilBert",
        "ForMaskedLM",
        {
            "dim": 16,
            "hidden_dim": 20,
            "n_layers": 2,
            "n_heads": 4,
            "vocab_size": VOCAB,
            "max_position_embeddings": POSITIONS,
        },
    ),
    "electra": ("Electra", "ForMaskedLM", {**TEXT, "embedding_size": 12}),
    "gpt_oss": (
        "GptOss",
        "ForCausalLM",
        {**GROUPED, "head_dim": 6, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4},
    ),
    "llama4_text": (
        "Llama4",
        "ForCausalLM",
        {**GROUPED, "head_dim": 4, "num_local_experts": 4, "intermediate_size_mlp": 14, "moe_layers": [0]},
    ),
    "deepseek_v2": ("DeepseekV2", "ForCausalLM", {**TEXT, **_LATENT}),
    "deepseek_v3": (
        "DeepseekV3",
        "ForCausalLM",
        {**TEXT, **_LATENT, "num_key_value_heads": 4, "n_group": 2, "topk_group": 1},
    ),
    "falcon": (
        "Falcon",
        "ForCausalLM",
        {**TEXT, "new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 20},
    ),
    "t5": (
        "T5",
        "ForConditionalGeneration",
        {"d_model": 16, "d_kv": 6, "d_ff": 20, "num_layers": 2, "num_heads": 4, "vocab_size": VOCAB},
    ),
    "bart": (
        "Bart",
        "ForConditionalGeneration",
        {
            "d_model": 16,
            "encoder_ffn_dim": 20,
            "decoder_ffn_dim": 14,
            "encoder_layers": 1,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 2,
            "vocab_size": VOCAB,
            "max_position_embeddings": POSITIONS,
        },
    ),
}
"""By model_type: the prefix of its classes, the usual head, and its config."""
