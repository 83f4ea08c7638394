"""Tiny configs of the architectures that most tests of mupscale.hf take with make test-slow."""

from __future__ import annotations

from typing import Any

VOCAB, POSITIONS = 29, 24

SIZES = {"hidden_size": 16, "intermediate_size": 20, "num_attention_heads": 4, "num_hidden_layers": 2}
TEXT = {**SIZES, "vocab_size": VOCAB, "max_position_embeddings": POSITIONS}
GROUPED = {**TEXT, "num_key_value_heads": 2}

_TWO_STACKS: dict[str, Any] = {
    "d_model": 16,
    "encoder_ffn_dim": 20,
    "decoder_ffn_dim": 14,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 2,
    "vocab_size": VOCAB,
}
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
    "modernbert": ("ModernBert", "ForMaskedLM", {**TEXT, "local_attention": 4}),
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
    "bart": ("Bart", "ForConditionalGeneration", {**_TWO_STACKS, "max_position_embeddings": POSITIONS}),
    "bloom": ("Bloom", "ForCausalLM", {"hidden_size": 16, "n_layer": 2, "n_head": 4, "vocab_size": VOCAB}),
    "mpt": ("Mpt", "ForCausalLM", {"d_model": 16, "n_layers": 2, "n_heads": 4, "vocab_size": VOCAB, "max_seq_len": 24}),
    "mamba2": (
        "Mamba2",
        "ForCausalLM",
        {
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "num_heads": 8,
            "head_dim": 4,
            "n_groups": 2,
            "state_size": 3,
            "chunk_size": 4,
            "vocab_size": VOCAB,
        },
    ),
    "qwen3_next": (
        "Qwen3Next",
        "ForCausalLM",
        {
            **GROUPED,
            **_EXPERTS,
            "head_dim": 8,
            "shared_expert_intermediate_size": 14,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 3,
            "linear_value_head_dim": 5,
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
    "whisper": (
        "Whisper",
        "ForConditionalGeneration",
        {
            **_TWO_STACKS,
            "num_mel_bins": 5,
            "max_source_positions": 6,
            "max_target_positions": POSITIONS,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 1,
        },
    ),
    "wav2vec2": (
        "Wav2Vec2",
        "ForCTC",
        {
            **SIZES,
            "vocab_size": VOCAB,
            "conv_dim": [6, 10],
            "conv_kernel": [4, 3],
            "conv_stride": [2, 2],
            "apply_spec_augment": False,
            "layerdrop": 0.0,
            "num_conv_pos_embeddings": 4,
            "num_conv_pos_embedding_groups": 2,
            "num_codevectors_per_group": 5,
            "codevector_dim": 8,
            "proj_codevector_dim": 6,
            "classifier_proj_size": 7,
            "tdnn_dim": [8, 8],
            "tdnn_kernel": [2, 1],
            "tdnn_dilation": [1, 1],
            "xvector_output_dim": 9,
        },
    ),
}
"""By model_type: the prefix of its classes, the usual head, and its config."""

TIMES = {"bloom": "hidden=2,ffn=2", "mpt": "hidden=2,ffn=2"}
"""By which these grow in tests of all architectures, where it is not by 2: ALiBi's heads grow wider, not more."""
