"""Tiny random models of many architectures, for the tests of mupscale.hf; import transformers first."""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import mupscale as mu
from mupscale import Plan, hf
from mupscale.checks import Report
from mupscale.hf import Upscaled
from mupscale.hf.building import quiet_transformers
from mupscale.hf.config_family import ConfigFamily
from mupscale.hf.config_fields import Times
from mupscale.planning import KeepDouble, relative_difference

transformers.logging.set_verbosity_error()

ADAMW: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-3}

CLASSES = 3

EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}  # what computes in float64, too

VOCAB, POSITIONS = 29, 24
SIZES = {"hidden_size": 16, "intermediate_size": 20, "num_attention_heads": 4, "num_hidden_layers": 2}
TEXT = {**SIZES, "vocab_size": VOCAB, "max_position_embeddings": POSITIONS}
GROUPED = {**TEXT, "num_key_value_heads": 2}
GPT = {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": POSITIONS, "vocab_size": VOCAB}
_LARGER = {**TEXT, "hidden_size": 32, "intermediate_size": 20}  # heads of 8 units, of which a part is rotated
_SCALED: dict[str, Any] = {**GROUPED, "head_dim": 6, "query_pre_attn_scalar": 3}
_WINDOW = {**GROUPED, "sliding_window": 4}
_PADDED = {**TEXT, "pad_token_id": 1}
_IMAGES = {"image_size": 8, "patch_size": 4, "num_channels": 2, "encoder_stride": 4}

Named = tuple[str, str, dict[str, Any]]
"""The prefix of a model's classes, its head, and its config."""

FIRST: dict[str, Named] = {
    "gpt2": ("GPT2", "LMHeadModel", GPT),
    "llama": ("Llama", "ForCausalLM", GROUPED),
    "mistral": ("Mistral", "ForCausalLM", _WINDOW),
    "qwen2": ("Qwen2", "ForCausalLM", GROUPED),
    "qwen3": ("Qwen3", "ForCausalLM", {**GROUPED, "head_dim": 6}),
    "gemma": ("Gemma", "ForCausalLM", {**TEXT, "num_key_value_heads": 1, "head_dim": 6}),
    "gemma2": ("Gemma2", "ForCausalLM", {**_SCALED, "sliding_window": 4, "attn_logit_softcapping": 2.0}),
    "phi": ("Phi", "ForCausalLM", TEXT),
    "gpt_neox": ("GPTNeoX", "ForCausalLM", _LARGER),
    "opt": ("OPT", "ForCausalLM", {**TEXT, "ffn_dim": 20, "word_embed_proj_dim": 16}),
    "olmo2": ("Olmo2", "ForCausalLM", GROUPED),
    "mixtral": ("Mixtral", "ForCausalLM", {**GROUPED, "num_local_experts": 4}),
    "bert": ("Bert", "ForMaskedLM", TEXT),
    "vit": ("ViT", "ForImageClassification", {**SIZES, **_IMAGES}),
}
"""By model_type, with its usual head. All tests run with these every time."""

_TWO_STACKS: dict[str, Any] = {"d_model": 16, "encoder_ffn_dim": 20, "decoder_ffn_dim": 14, "vocab_size": VOCAB}
_TWO_STACKS |= {"encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 2}
_FEW: dict[str, Any] = {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2}
_LOCAL: dict[str, Any] = {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}
_EXPERTS = {**_FEW, "moe_intermediate_size": 12}
_LATENT: dict[str, Any] = {"q_lora_rank": 8, "kv_lora_rank": 6, "qk_rope_head_dim": 4, "qk_nope_head_dim": 2}
_LATENT |= {"v_head_dim": 6, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
_LATENT |= {**TEXT, "n_shared_experts": 2, "first_k_dense_replace": 1}
_DISTIL = {"dim": 16, "hidden_dim": 20, "n_layers": 2, "n_heads": 4}
_MULTIPLIED = {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5}
_OWN_FFN: dict[str, Any] = {"num_local_experts": 4, "intermediate_size_mlp": 14, "moe_layers": [0]}
_MAMBA = {"hidden_size": 16, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 4, "n_groups": 2, "state_size": 3}
_LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 3, "linear_value_head_dim": 5}
_NEXT = {**_EXPERTS, **_LINEAR, "head_dim": 8, "shared_expert_intermediate_size": 14}
_NEXT |= {"layer_types": ["linear_attention", "full_attention"]}
_SPOKEN = {**_TWO_STACKS, "num_mel_bins": 5, "max_source_positions": 6, "max_target_positions": POSITIONS}
_SPOKEN |= {"bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
_SOUND: dict[str, Any] = {
    **SIZES,
    "vocab_size": VOCAB,
    "conv_dim": [6, 10],
    "conv_kernel": [4, 3],
    "conv_stride": [2, 2],
}
_SOUND |= {"apply_spec_augment": False, "layerdrop": 0.0, "num_conv_pos_embeddings": 4}
_SOUND |= {"num_conv_pos_embedding_groups": 2, "num_codevectors_per_group": 5, "codevector_dim": 8}
_SOUND |= {"proj_codevector_dim": 6, "classifier_proj_size": 7, "xvector_output_dim": 9}
_SOUND |= {"tdnn_dim": [8, 8], "tdnn_kernel": [2, 1], "tdnn_dilation": [1, 1]}
_TABLE = {"d_model": 16, "d_kv": 6, "d_ff": 20, "num_layers": 2, "num_heads": 4, "vocab_size": VOCAB}
_SLOPES = {"d_model": 16, "n_layers": 2, "n_heads": 4, "vocab_size": VOCAB, "max_seq_len": 24}

MORE: dict[str, Named] = {
    "smollm3": ("SmolLM3", "ForCausalLM", {**GROUPED, "no_rope_layers": [1, 0]}),
    "granite": ("Granite", "ForCausalLM", {**GROUPED, **_MULTIPLIED}),
    "phi3": ("Phi3", "ForCausalLM", GROUPED),
    "starcoder2": ("Starcoder2", "ForCausalLM", _WINDOW),
    "cohere": ("Cohere", "ForCausalLM", {**GROUPED, "logit_scale": 0.5}),
    "cohere2": ("Cohere2", "ForCausalLM", {**_WINDOW, "logit_scale": 0.5}),
    "stablelm": ("StableLm", "ForCausalLM", GROUPED),
    "gemma3_text": ("Gemma3", "ForCausalLM", _SCALED),
    "olmo3": ("Olmo3", "ForCausalLM", _WINDOW),
    "qwen2_moe": (
        "Qwen2Moe",
        "ForCausalLM",
        {**_EXPERTS, "shared_expert_intermediate_size": 14, "mlp_only_layers": [1]},
    ),
    "qwen3_moe": ("Qwen3Moe", "ForCausalLM", {**_EXPERTS, "head_dim": 6, "mlp_only_layers": [1]}),
    "olmoe": ("Olmoe", "ForCausalLM", _FEW),
    "granitemoe": ("GraniteMoe", "ForCausalLM", _LOCAL),
    "roberta": ("Roberta", "ForMaskedLM", _PADDED),
    "xlm-roberta": ("XLMRoberta", "ForMaskedLM", _PADDED),
    "camembert": ("Camembert", "ForMaskedLM", _PADDED),
    "distilbert": (
        "DistilBert",
        "ForMaskedLM",
        {**_DISTIL, "vocab_size": VOCAB, "max_position_embeddings": POSITIONS},
    ),
    "modernbert": ("ModernBert", "ForMaskedLM", {**TEXT, "local_attention": 4}),
    "electra": ("Electra", "ForMaskedLM", {**TEXT, "embedding_size": 12}),
    "gpt_oss": ("GptOss", "ForCausalLM", {**_LOCAL, "head_dim": 6, "sliding_window": 4}),
    "llama4_text": ("Llama4", "ForCausalLM", {**GROUPED, **_OWN_FFN, "head_dim": 4}),
    "deepseek_v2": ("DeepseekV2", "ForCausalLM", _LATENT),
    "deepseek_v3": ("DeepseekV3", "ForCausalLM", {**_LATENT, "num_key_value_heads": 4, "n_group": 2, "topk_group": 1}),
    "falcon": (
        "Falcon",
        "ForCausalLM",
        {**TEXT, "new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 20},
    ),
    "t5": ("T5", "ForConditionalGeneration", _TABLE),
    "bart": ("Bart", "ForConditionalGeneration", {**_TWO_STACKS, "max_position_embeddings": POSITIONS}),
    "bloom": ("Bloom", "ForCausalLM", {"hidden_size": 16, "n_layer": 2, "n_head": 4, "vocab_size": VOCAB}),
    "mpt": ("Mpt", "ForCausalLM", _SLOPES),
    "mamba2": ("Mamba2", "ForCausalLM", {**_MAMBA, "chunk_size": 4, "vocab_size": VOCAB}),
    "qwen3_next": ("Qwen3Next", "ForCausalLM", _NEXT),
    "whisper": ("Whisper", "ForConditionalGeneration", _SPOKEN),
    "wav2vec2": ("Wav2Vec2", "ForCTC", _SOUND),
}
"""Those that most tests take with make test-slow."""

TIMES = {"bloom": "hidden=2,ffn=2", "mpt": "hidden=2,ffn=2"}
"""By which these grow in tests of all architectures, where it is not by 2: ALiBi's heads grow wider, not more."""

CONFIGS = {**FIRST, **MORE}

OTHER_NAMES = {"gemma3_text": "Gemma3Text", "llama4_text": "Llama4Text"}
"""Prefixes of config classes that are not those of the models."""

HEADS = {
    "gemma3_text": ["TextForSequenceClassification", "TextModel"],
    "llama4_text": ["TextModel"],
    "t5": ["ForQuestionAnswering", "Model"],
    "bart": ["ForQuestionAnswering", "Model"],
    "whisper": ["ForAudioClassification", "Model"],
}
"""Heads of architectures whose module has models of another config, too."""


def each(names: Iterable[Any] | None = None) -> list[Any]:
    """Parameters for a test: architectures (or tuples that begin with one), those of MORE with make test-slow."""
    cases = list(CONFIGS if names is None else names)
    first = [case[0] if isinstance(case, tuple) else case for case in cases]
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=[pytest.mark.slow] * (name in MORE))
        for case, name in zip(cases, first, strict=True)
    ]


def tiny(name: str, head: str | None = None, **config: Any) -> tuple[Any, type[nn.Module]]:
    """A small config and its model's class; `head`: how the class's name goes on after the prefix, as ForCausalLM."""
    prefix, usual, sizes = CONFIGS[name]
    cls = getattr(transformers, prefix + (usual if head is None else head))
    labels = 2 if cls.__name__.endswith("ForQuestionAnswering") else CLASSES
    common = {"pad_token_id": None, "use_cache": False, "num_labels": labels, "architectures": [cls.__name__]}
    given = {**common, **sizes, **config, **EAGER}
    if "layer_types" in given:
        given["layer_types"] = given["layer_types"][: given["num_hidden_layers"]]
    return getattr(transformers, f"{OTHER_NAMES.get(name, prefix)}Config")(**given), cls


def heads_of(name: str) -> list[str]:
    """How the names of transformers' models of an architecture go on after the prefix, but for the usual one."""
    if name in HEADS:
        return HEADS[name]
    prefix, usual, _ = CONFIGS[name]
    module = getattr(transformers, prefix + usual).__module__
    named = {n: c for n, c in vars(sys.modules[module]).items() if inspect.isclass(c) and c.__module__ == module}
    public = [n for n, c in named.items() if issubclass(c, transformers.PreTrainedModel) and hasattr(transformers, n)]
    return sorted(n.removeprefix(prefix) for n in public if n != prefix + usual and not n.endswith("PreTrainedModel"))


def build(config: Any) -> nn.Module:
    """The model that a config (or its dict) names, in the default dtype, buffers included."""
    if isinstance(config, dict):
        known = {k: v for k, v in config.items() if k not in ("model_type", "transformers_version")}
        config = type(transformers.AutoConfig.for_model(config["model_type"]))(**{**known, **EAGER})
    return getattr(transformers, config.architectures[0])(copy.deepcopy(config))


@torch.no_grad()
def randomised(model: nn.Module, seed: int = 0, size: float = 0.3) -> nn.Module:
    """Weights well away from what a fresh model has: no bias is 0 and no gain 1, so that everything matters."""
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        noise = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype) * size
        p.copy_(p + noise if p.dim() < 2 else noise)
    return model


def save(
    folder: Path, name: str = "llama", head: str | None = None, dtype: torch.dtype = torch.float32, **config: Any
) -> nn.Module:
    """A tiny random model, saved by transformers itself."""
    model = randomised(build(tiny(name, head, **config)[0])).to(dtype)
    with quiet_transformers():
        model.save_pretrained(folder)  # type: ignore[operator]
    return model


def grow(source: Path, out: Path, **options: Any) -> Upscaled:
    """A checkpoint grown without a word; by copies without noise, if nothing else is asked for."""
    is_exact = not options.keys() & {"grow", "noise", "exact", "layers", "experts"}
    given = {"verify": False, "progress": False, **({"exact": True} if is_exact else {}), **options}
    return hf.upscale(source, out, **given)


def shapes(model: nn.Module, *, every_name: bool = False) -> dict[str, tuple[int, ...]]:
    """Of its parameters, tied ones once or under all their names."""
    return {n: tuple(p.shape) for n, p in model.named_parameters(remove_duplicate=not every_name)}


def inputs(config: Any, count: int = 2, batch: int = 2, length: int = 7, seed: int = 0) -> list[dict[str, Tensor]]:
    """Random batches as the model's keyword arguments."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        if config.model_type == "vit":
            size = (batch, config.num_channels, config.image_size, config.image_size)
            given = {"pixel_values": _random(size, generator)}
            if config.architectures[0].endswith("ForMaskedImageModeling"):
                given["bool_masked_pos"] = torch.rand((batch, 4), generator=generator) < 0.5
        elif config.model_type == "wav2vec2":
            given = {"input_values": _random((batch, 64), generator)}
        else:
            tokens = torch.randint(0, VOCAB, (batch, length), generator=generator)
            if config.architectures[0].endswith("ForMultipleChoice"):
                tokens = tokens.unsqueeze(1).expand(-1, 2, -1).clone()
                tokens[:, 1] = tokens[:, 1].flip(-1)
            given = {"input_ids": tokens}
            if config.is_encoder_decoder:
                given["decoder_input_ids"] = tokens.flip(-1)
            if config.model_type == "whisper":
                del given["input_ids"]
                shape = (batch, config.num_mel_bins, 2 * config.max_source_positions)
                given["input_features"] = _random(shape, generator)
            if config.architectures[0] == "WhisperForAudioClassification":
                del given["decoder_input_ids"]
        made.append(given)
    return made


def _random(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(torch.get_default_dtype())


def outputs(model: nn.Module, batch: dict[str, Tensor]) -> list[Tensor]:
    """Every floating-point tensor that the model returns; float64 stays float64 on the way."""
    with KeepDouble():
        return list(_tensors(model(**batch, return_dict=True)))


def _tensors(found: Any) -> Iterator[Tensor]:
    if isinstance(found, Tensor):
        if found.is_floating_point():
            yield found
    elif isinstance(found, dict):
        for value in found.values():
            yield from _tensors(value)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """A loss that all the model's outputs enter, with something to learn: each is drawn towards numbers of its own."""
    total = torch.zeros(())
    for output in outputs(model, batch):
        generator = torch.Generator().manual_seed(output.numel())
        target = torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output.dtype)
        total = total + (output - target).square().mean()
    return total


def usual_times(name: str, times: Any = None) -> Times:
    """By which an architecture grows in tests: 2, if nothing else is asked for or needed."""
    return Times.of(TIMES.get(name, 2) if times is None else times)


def averaged(model: nn.Module, batch: Any, outputs: Any) -> dict[str, Tensor]:
    """A hook: hidden states among the outputs are averaged over their units, so that they do not grow."""
    return {
        name: t if name.endswith("logits") else t.mean(-1)
        for name, t in outputs.items()
        if isinstance(t, Tensor) and t.is_floating_point()
    }


class Pair:
    """A small model, its config as config.json has it, and the wide model made of it in memory, in float64."""

    def __init__(
        self, name: str, times: Any = None, change: Callable[[Plan], Plan] | None = None, **config: Any
    ) -> None:
        self.config, self.cls = tiny(name, **config)
        self.json, self.times = self.as_given(self.config.to_dict()), usual_times(name, times)
        self.family: ConfigFamily = ConfigFamily(self.json)
        self.small = randomised(build(self.json))
        self.wide = build(self.family.wide_config(self.times))
        is_bare = self.cls.__name__.endswith("Model") and not self.cls.__name__.endswith(("HeadModel", "HeadsModel"))
        for model in (self.small, self.wide) if is_bare or self.config.is_encoder_decoder else ():
            model.register_forward_hook(averaged)
        self.plan = self.family.plan(self.times, initial=False)
        if change is not None:
            self.plan = change(self.plan)
        mu.widen(self.small, self.wide, self.plan)
        self.batches = inputs(self.config)

    def as_given(self, config: dict[str, Any]) -> dict[str, Any]:
        """The small model's config.json."""
        return config

    def compare(self) -> float:
        """The largest relative difference of any output."""
        with torch.no_grad():
            both = [outputs(model.eval(), self.batches[0]) for model in (self.small, self.wide)]
        assert len(both[0]) == len(both[1]) > 0
        return max(relative_difference(a, b) for a, b in zip(*both, strict=True))

    def optimizer(self, cls: type[torch.optim.Optimizer], hyper: dict[str, Any]) -> torch.optim.Optimizer:
        """What has an offset and a fold gets no decay."""
        named = list(self.small.named_parameters())
        groups = [
            {"params": [p for n, p in named if not self.plan[n].shift]},
            {"params": [p for n, p in named if self.plan[n].shift], "weight_decay": 0.0},
        ]
        return cls([group for group in groups if group["params"]], **hyper)

    def train(self, cls: type[torch.optim.Optimizer] = torch.optim.AdamW, *, steps: int = 10, **hyper: Any) -> Report:
        """Both side by side, with clipping that binds."""
        how = {"optimizer": self.optimizer(cls, hyper or ADAMW), "steps": steps, "clip": 0.3, "tolerance": 1e-10}
        return mu.verify(self.small, self.wide, self.plan, self.batches, loss, **how)
