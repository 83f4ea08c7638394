"""peft: adapters on small models of transformers, whose own weights are frozen."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from third_party import MODELS, Model, at, by, find

TOKENS = 13


def texts() -> dict[str, Any]:
    return {
        "input_ids": torch.randint(0, TOKENS, (2, 6), generator=torch.Generator().manual_seed(0)),
        "use_cache": False,
        "return_dict": False,
    }


def llama(k: int, layers: int = 2) -> nn.Module:
    """Two layers or more, 2k heads of 8 in k groups."""
    sizes = {"hidden_size": 16 * k, "intermediate_size": 32 * k, "vocab_size": TOKENS, "max_position_embeddings": 16}
    sizes |= {"num_attention_heads": 4 * k, "num_key_value_heads": 2 * k, "head_dim": 8, "num_hidden_layers": layers}
    return find("transformers:LlamaForCausalLM")(find("transformers:LlamaConfig")(**sizes))


def gpt2(k: int, layers: int = 2) -> nn.Module:
    """Two layers or more, 2k heads of 8; its projections are stored transposed."""
    config = find("transformers:GPT2Config")(
        vocab_size=TOKENS, n_embd=16 * k, n_layer=layers, n_head=2 * k, n_positions=16, bos_token_id=0, eos_token_id=0
    )
    return find("transformers:GPT2LMHeadModel")(config)


def adapted(
    name: str, kind: str, base: Any = llama, *, refused: str = "", why: str = "", training: bool = True, **options: Any
) -> None:
    """The base model with adapters that peft's config of this kind describes, in training mode or not."""

    def build(k: int, layers: int = 2) -> nn.Module:
        config = find(f"peft:{kind}")(task_type="CAUSAL_LM", **at(k, options))
        model: nn.Module = find("peft:get_peft_model")(base(k, layers), config)
        return model.train(mode=training)

    MODELS.append(Model("peft", name, build, texts, refused, why, lambda: build(1, layers=4)))


PROJECTIONS = ["q_proj", "v_proj", "down_proj"]

adapted("LoRA on Llama", "LoraConfig", r=2, target_modules=PROJECTIONS)
adapted("LoRA on every linear layer", "LoraConfig", r=2, target_modules="all-linear")
adapted("LoRA on GPT-2", "LoraConfig", gpt2, r=2, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True)
adapted("LoRA, its rank grows", "LoraConfig", r=by(2), lora_alpha=by(4), target_modules=PROJECTIONS)
adapted("LoRA scaled by the root of its rank", "LoraConfig", r=2, use_rslora=True, target_modules=PROJECTIONS)
adapted("LoRA and the embedding", "LoraConfig", r=2, target_modules=["q_proj", "embed_tokens"])
adapted("LoRA and trained norms", "LoraConfig", r=2, target_modules=["q_proj"], modules_to_save=["norm"])
adapted("DoRA on Llama", "LoraConfig", r=2, use_dora=True, target_modules=PROJECTIONS)
adapted("DoRA on GPT-2", "LoraConfig", gpt2, r=2, use_dora=True, target_modules=["c_fc"], fan_in_fan_out=True)
adapted("IA3", "IA3Config", target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"])
adapted("LoHa", "LoHaConfig", r=2, target_modules=PROJECTIONS)
adapted("LoHa, in evaluation mode", "LoHaConfig", training=False, r=2, target_modules=PROJECTIONS)
adapted(
    "LoKr",
    "LoKrConfig",
    r=2,
    target_modules=PROJECTIONS,
    refused="lacks the parameter or buffer",
    why="factorises sizes, and has other parameters at another width",
)
adapted("AdaLoRA", "AdaLoraConfig", init_r=2, target_r=2, total_step=10, target_modules=PROJECTIONS)
adapted("OFT", "OFTConfig", oft_block_size=4, target_modules=PROJECTIONS)
adapted("VeRA", "VeraConfig", r=4, target_modules=["q_proj"])
adapted(
    "FourierFT",
    "FourierFTConfig",
    n_frequency=10,
    target_modules=["q_proj"],
    refused="does not run on the batch in float64",
    why="asks for float32 inside; and its frequencies are those of the width",
)
adapted("prompt tuning", "PromptTuningConfig", num_virtual_tokens=3)
adapted("layer norm tuning", "LNTuningConfig", target_modules=["norm", "input_layernorm"])
