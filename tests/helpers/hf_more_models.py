"""Tiny configs of the architectures that most tests of mupscale.hf take with make test-slow."""

from __future__ import annotations

from typing import Any

VOCAB, POSITIONS = 29, 24

SIZES = {"hidden_size": 16, "intermediate_size": 20, "num_attention_heads": 4, "num_hidden_layers": 2}
TEXT = {**SIZES, "vocab_size": VOCAB, "max_position_embeddings": POSITIONS}
GROUPED = {**TEXT, "num_key_value_heads": 2}

_EXPERTS = {"moe_intermediate_size": 12, "num_experts": 4, "num_experts_per_tok": 2}

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
}
"""By model_type: the prefix of its classes, the usual head, and its config."""
