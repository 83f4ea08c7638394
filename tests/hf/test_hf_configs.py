"""Configs and files as transformers has them: every head, names in files, fields that are left out or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import hf_models as models
from mupscale import Rule
from mupscale.core.axes import expand
from mupscale.hf.building import sketch_model
from mupscale.hf.config_family import ConfigFamily
from mupscale.hf.config_fields import Times
from refusals import refuses
from slow_cases import with_slow

HEADS = [(name, head) for name in models.CONFIGS for head in models.heads_of(name)]
FEW_HEADS = (("bert", "ForNextSentencePrediction"), ("llama", "ForSequenceClassification"), ("vit", "Model"))

SHOWS_LESS = pytest.mark.filterwarnings("ignore:of '.*' the batch does not show:mupscale.UncheckedPlan")
"""BART's shared table is unused where nothing is tied, and wav2vec 2.0 masks in training alone."""


# Every class.


@SHOWS_LESS
@pytest.mark.quick("gpt2-*", "bert-*", "mixtral-Model")
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("case", with_slow(HEADS, FEW_HEADS), ids="-".join)
def test_every_head_and_none(case: tuple[str, str]) -> None:
    """All classes that transformers has for the architecture, the model alone included."""
    name, head = case
    config = {"pad_token_id": 0} if head.endswith("ForSequenceClassification") else {}
    pair = models.Pair(name, head=head, num_hidden_layers=1, **config)
    assert pair.compare() <= 1e-10
    report = pair.train(steps=3)
    assert report.ok, str(report)
    assert all(abs(a - b) <= 1e-10 * abs(a) for a, b in report.losses)


# Names in files, and what transformers makes of them.


@SHOWS_LESS
@pytest.mark.quick("True-gpt_neox")
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", with_slow(models.CONFIGS, ("gpt_neox", "mixtral")))
@pytest.mark.parametrize("tied", [False, True])
def test_a_file_widened_tensor_by_tensor_is_the_wide_model(name: str, tied: bool, tmp_path: Path) -> None:
    """Files have names of their own (Mixtral, GPT-NeoX, ViT): by those the same model comes out."""
    if name in ("vit", "wav2vec2") and tied:
        pytest.skip("has no readout to tie")
    times = "hidden=2,ffn=3,heads=2" if name == "mixtral" else None  # whose gate and up are one tensor in the model
    pair = models.Pair(name, times, **({} if name in ("vit", "wav2vec2") else {"tie_word_embeddings": tied}))
    pair.small.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    tensors = load_file(tmp_path / "model.safetensors")
    plan = pair.family.plan_files(pair.times, {n: tuple(t.shape) for n, t in tensors.items()}, initial=False)
    wide = {}
    for file_name, tensor in tensors.items():
        entry = plan[plan.names[file_name]]
        out = torch.empty(entry.wide, dtype=tensor.dtype)
        wide[file_name] = expand(tensor, entry.axes, out, entry.rule.weight) + entry.shift
    save_file(wide, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(ConfigFamily(config).wide_config(pair.times)))
    loaded, info = pair.cls.from_pretrained(
        tmp_path, dtype=torch.float64, attn_implementation="eager", output_loading_info=True
    )
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    expected = dict(pair.wide.named_parameters())
    assert loaded.state_dict().keys() == pair.wide.state_dict().keys()
    for parameter, value in loaded.named_parameters():
        torch.testing.assert_close(value, expected[parameter], rtol=1e-15, atol=0, msg=parameter)
    assert models.shapes(loaded) == models.shapes(pair.wide)  # tied where it was


def test_files_of_gpt2_may_lack_the_prefix() -> None:
    config, _ = models.tiny("gpt2")
    shapes = models.shapes(models.build(config))
    bare = {n.removeprefix("transformer."): s for n, s in shapes.items()}
    old = {**bare, "h.0.attn.bias": (1, 1, 24, 24), "h.0.attn.masked_bias": (), "lm_head.weight": (models.VOCAB, 16)}
    family = ConfigFamily(config.to_dict())
    plan, whole = (family.plan_files(Times.of(2), names, initial=False) for names in (old, shapes))
    for name, entry in whole.parameters.items():
        found = plan[name.removeprefix("transformer.")]
        assert (found.rule, found.axes, found.wide) == (entry.rule, entry.axes, entry.wide)
    assert plan["wte.weight"].names == ("wte.weight", "lm_head.weight")


@pytest.mark.quick("True-bert-*gamma*")
@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("bert", "LayerNorm.gamma", "LayerNorm.weight"),
        ("bert", "LayerNorm.beta", "LayerNorm.bias"),
        ("gpt_neox", "embed_out.weight", "lm_head.weight"),
    ],
)
@pytest.mark.parametrize("tied", [False, True])
def test_older_names(name: str, old: str, new: str, tied: bool) -> None:
    config, _ = models.tiny(name, tie_word_embeddings=tied)
    shapes = models.shapes(models.build(config), every_name=True)
    assert any(new in n for n in shapes)
    renamed = {n.replace(new, old): s for n, s in shapes.items()}
    plans = [ConfigFamily(config.to_dict()).plan_files(Times.of(2), s, initial=False) for s in (shapes, renamed)]
    assert [*plans[0].rules.values()] == [*plans[1].rules.values()]


# Configs.


ABSENT: list[tuple[str, str, dict[str, Any]]] = [
    ("gpt2", "n_inner", {}),
    ("gpt2", "tie_word_embeddings", {}),
    ("llama", "num_key_value_heads", {}),
    ("llama", "head_dim", {}),
    ("llama", "tie_word_embeddings", {}),
    ("mistral", "num_key_value_heads", {"num_attention_heads": 8}),
    ("mistral", "head_dim", {}),
    ("qwen2", "num_key_value_heads", {"num_attention_heads": 32, "hidden_size": 64}),
    ("qwen3", "head_dim", {}),
    ("gemma", "head_dim", {}),
    ("gemma", "tie_word_embeddings", {}),
    ("gemma2", "num_key_value_heads", {}),
    ("phi", "num_key_value_heads", {}),
    ("gpt_neox", "tie_word_embeddings", {}),
    ("opt", "word_embed_proj_dim", {}),
    ("opt", "tie_word_embeddings", {}),
    ("opt", "ffn_dim", {}),
    ("olmo2", "num_key_value_heads", {}),
    ("mixtral", "num_key_value_heads", {"num_attention_heads": 8}),
    ("bert", "tie_word_embeddings", {}),
    ("bert", "intermediate_size", {}),
    ("vit", "pooler_output_size", {"head": "Model"}),
    ("smollm3", "num_key_value_heads", {}),
    ("granite", "num_key_value_heads", {}),
    ("cohere2", "tie_word_embeddings", {}),
    ("gemma3_text", "head_dim", {}),
    ("qwen2_moe", "shared_expert_intermediate_size", {}),
    ("qwen3_moe", "moe_intermediate_size", {}),
    ("distilbert", "hidden_dim", {}),
    ("electra", "embedding_size", {}),
]


@pytest.mark.parametrize(("name", "field", "config"), models.each(ABSENT))
@pytest.mark.parametrize("null", [False, True])
def test_fields_that_config_json_leaves_out(name: str, field: str, config: dict[str, Any], null: bool) -> None:
    """Absent or null, they mean to us what they mean to transformers, before and after growing."""
    made, _ = models.tiny(name, config.pop("head", None) if "head" in config else None, **config)
    given = {k: v for k, v in made.to_dict().items() if k != field}
    if null:
        given[field] = None
    sketches = []
    with torch.device("meta"):
        try:
            sketches.append(models.build(given))
        except Exception as error:
            if not null:
                raise
            pytest.skip(f"transformers itself does not take it: {error}")
        sketches.append(models.build(ConfigFamily(given).wide_config(models.usual_times(name))))
    whole = ConfigFamily(made.to_dict()).wide_config(models.usual_times(name))
    grown = [models.shapes(sketch) for sketch in (sketches[1], sketch_model(whole))]
    assert grown[0] == grown[1] or models.shapes(sketches[0]) != models.shapes(sketch_model(made.to_dict()))
    assert {n: len(s) for n, s in grown[0].items()} == {n: len(s) for n, s in models.shapes(sketches[0]).items()}


GPT2 = {"model_type": "gpt2", "n_embd": 16, "n_head": 4, "n_layer": 1}
REFUSED: list[tuple[dict[str, Any], Any, str]] = [
    ({"hidden_size": "16"}, 2, "transformers refuses this config.json"),
    ({"num_attention_heads": 0}, 2, "transformers (refuses|cannot build)"),
    ({"num_attention_heads": 3}, 2, "transformers (refuses|cannot build)"),
    ({}, "heads=3", "transformers refuses .*not a multiple"),
    ({"pruned_heads": {"0": [1]}}, 2, "heads were pruned"),
    ({**GPT2, "add_cross_attention": True}, 2, "attends to an encoder"),
    (GPT2, "hidden=2,heads=4", "head_dim is n_embd / n_head.*heads=2"),
    (GPT2, "hidden=2,heads=2,kv=1", "Leave kv out of times="),
]


@pytest.mark.parametrize(("config", "times", "message"), REFUSED)
def test_configs_that_cannot_grow_are_refused(config: dict[str, Any], times: Any, message: str) -> None:
    llama = {"hidden_size": 16, "intermediate_size": 20, "num_attention_heads": 4, "num_key_value_heads": 2}
    whole = {"model_type": "llama", "num_hidden_layers": 1, "vocab_size": 11, **llama, **config}
    family = ConfigFamily(config if config.get("model_type") == "gpt2" else whole)
    error = refuses(message, family.plan, Times.of(times), initial=False)
    assert "\n" not in error


SHOWN: list[Any] = [
    ("opt", {"_remove_final_layer_norm": True}, 2, r"no copies|tied|norm"),
    ("mpt", {}, 2, "no copies of the narrow one's"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "config", "times", "message"), SHOWN)
def test_what_a_run_shows_to_be_impossible_is_refused(
    name: str, config: dict[str, Any], times: Any, message: str
) -> None:
    """ALiBi's slopes follow from the number of heads; a readout that is the embedding needs a norm before it."""
    family = ConfigFamily(models.tiny(name, num_hidden_layers=1, **config)[0].to_dict())
    error = refuses(message, family.plan, Times.of(times), initial=False)
    assert "roles=" not in error  # which is none of upscale's arguments, and no option
    assert "inputs=" not in error


def test_the_wide_config_keeps_the_rest_and_its_order() -> None:
    config = {"a": 1, "model_type": "llama", "hidden_size": 16, "intermediate_size": 20, "num_attention_heads": 4}
    config |= {"num_key_value_heads": 2, "rope_theta": 1e4}
    before, wide = dict(config), ConfigFamily(config).wide_config(Times.of(2))
    grown = {"hidden_size": 32, "intermediate_size": 40, "num_attention_heads": 8, "num_key_value_heads": 4}
    assert wide == {**config, **grown}
    assert list(wide) == list(config)
    assert ConfigFamily(config).wide_config(Times.of("hidden=2"))["head_dim"] == 4
    assert ConfigFamily(config).wide_config(Times(ffn=2, fresh=True))["intermediate_size"] == 40
    assert config == before


def test_masks_in_old_files_stay_as_they_are() -> None:
    config = models.tiny("gpt2")[0].to_dict()
    masks = {"h.0.attn.bias": (1, 1, 6, 6), "h.0.attn.masked_bias": (), "wte.weight": (models.VOCAB, 16)}
    plan = ConfigFamily(config).plan_files(Times.of(2), masks)
    for name in ("h.0.attn.bias", "h.0.attn.masked_bias"):
        assert (plan[name].wide, plan.fresh[name], plan.rules[name]) == (masks[name], 0, Rule())


def test_numbers_that_json_lacks() -> None:
    """transformers writes them as an object; its own reader takes them back, and so does ours."""
    config = transformers.Mamba2Config(
        hidden_size=16, num_hidden_layers=1, vocab_size=29, state_size=3, num_heads=8, head_dim=4, n_groups=1
    )
    written = json.loads(config.to_json_string())
    assert written["time_step_limit"] == [0.0, {"__float__": "Infinity"}]
    assert sketch_model(written).config.time_step_limit[1] == float("inf")  # type: ignore[union-attr, index]
