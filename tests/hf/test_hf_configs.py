"""Descriptions of architectures against transformers: names in files, configs with and without fields, inits."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

transformers = pytest.importorskip("transformers")

import hf_models as models  # noqa: E402
import mupscale as mu  # noqa: E402
from mupscale import Rule  # noqa: E402
from mupscale.core import naming  # noqa: E402
from mupscale.core.axes import expand  # noqa: E402
from mupscale.hf.describe.multipliers import Times  # noqa: E402
from mupscale.hf.describe.registry import DESCRIPTIONS  # noqa: E402

HEADS = [
    pytest.param(*case.values, marks=case.marks if number % 2 == 0 else pytest.mark.slow)
    for number, case in enumerate(
        models.each((name, head) for name in models.CONFIGS for head in models.heads_of(name))
    )
]


# Every class.


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(("name", "head"), HEADS)
def test_every_head_and_none(name: str, head: str) -> None:
    """All classes that transformers has for the architecture, the model alone included."""
    config = {"pad_token_id": 0} if head.endswith("ForSequenceClassification") else {}
    pair = models.Pair(name, head=head, num_hidden_layers=1, **config)
    assert pair.compare() <= 1e-10
    report = pair.train(steps=3)
    assert report.ok, str(report)
    assert all(abs(a - b) <= 1e-10 * abs(a) for a, b in report.losses)


# Names in files, and what transformers makes of them.


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", models.each())
@pytest.mark.parametrize("tied", [False, True])
def test_a_file_widened_tensor_by_tensor_is_the_wide_model(name: str, tied: bool, tmp_path: Path) -> None:
    """Files have names of their own (Mixtral, GPT-NeoX, ViT): by those the same model comes out."""
    if DESCRIPTIONS[name].tied is None and tied:
        pytest.skip("has no readout to tie")
    pair = models.Pair(name, **({} if DESCRIPTIONS[name].tied is None else {"tie_word_embeddings": tied}))
    pair.small.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    tensors = load_file(tmp_path / "model.safetensors")
    plan = pair.architecture.plan(config, pair.times, {n: tuple(t.shape) for n, t in tensors.items()})
    wide = {}
    for file_name, tensor in tensors.items():
        entry = plan[plan.names[file_name]]
        out = torch.empty(entry.wide, dtype=tensor.dtype)
        wide[file_name] = expand(tensor, entry.axes, out, entry.rule.weight) + entry.shift
    save_file(wide, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(pair.architecture.wide_config(config, pair.times)))
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
    plan = DESCRIPTIONS["gpt2"].plan(config.to_dict(), Times.of(2), old)
    whole = DESCRIPTIONS["gpt2"].plan(config.to_dict(), Times.of(2), shapes)
    for name, entry in whole.parameters.items():
        found = plan[name.removeprefix("transformer.")]
        assert (found.rule, found.axes, found.wide) == (entry.rule, entry.axes, entry.wide)
    assert plan["wte.weight"].names == ("wte.weight", "lm_head.weight")


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
    plans = [DESCRIPTIONS[name].plan(config.to_dict(), Times.of(2), s) for s in (shapes, renamed)]
    assert [*plans[0].rules.values()] == [*plans[1].rules.values()]


def test_mixtrals_experts_in_files_and_in_the_model() -> None:
    """Gate and up projection are one tensor in the model, and are copied half by half."""
    config, _ = models.tiny("mixtral")
    plan = DESCRIPTIONS["mixtral"].plan(
        config.to_dict(),
        Times.of("hidden=2,ffn=3,heads=2"),
        {
            "model.layers.0.block_sparse_moe.experts.0.w1.weight": (20, 16),
            "model.layers.0.block_sparse_moe.experts.0.w2.weight": (16, 20),
            "model.layers.0.block_sparse_moe.experts.0.w3.weight": (20, 16),
            "model.layers.0.block_sparse_moe.gate.weight": (4, 16),
            "model.layers.0.mlp.experts.gate_up_proj": (4, 40, 16),
            "model.layers.0.mlp.experts.down_proj": (4, 16, 20),
            "model.layers.0.mlp.gate.weight": (4, 16),
        },
    )
    up, down, router = Rule(3, 2), Rule(2, 3), Rule(1, 2)
    assert [*plan.rules.values()] == [up, down, up, router, up, down, router]


# Configs.


@pytest.mark.parametrize("name", models.each())
def test_defaults_are_those_of_transformers(name: str) -> None:
    architecture, theirs = DESCRIPTIONS[name], type(models.tiny(name)[0])()
    fields = {architecture.hidden, architecture.heads, architecture.std, *architecture.defaults}
    for field in fields - {"n_inner"}:
        assert architecture.value({}, field) == getattr(theirs, field), field
    heads = getattr(theirs, architecture.heads)
    assert architecture.head_size({}) == (
        getattr(theirs, architecture.head_dim or "head_dim", None) or theirs.hidden_size // heads
    )
    assert architecture.kv_heads({}) == getattr(theirs, "num_key_value_heads", heads)
    if architecture.tied is not None:
        assert architecture.tied.default == theirs.tie_word_embeddings


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
    architecture, given = DESCRIPTIONS[name], {k: v for k, v in made.to_dict().items() if k != field}
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
        sketches.append(models.build(architecture.wide_config(given, models.usual_times(name))))
    plan = architecture.plan(given, models.usual_times(name), models.shapes(sketches[0]))
    plan.check(sketches[0], "narrow")
    plan.check(sketches[1])


@pytest.mark.parametrize("tied", [None, False, True])
@pytest.mark.parametrize("name", models.each(n for n in models.CONFIGS if DESCRIPTIONS[n].tied is not None))
def test_what_is_tied_is_what_transformers_ties(name: str, tied: bool | None) -> None:
    for head in [None, *models.heads_of(name)]:
        config, _ = models.tiny(name, head, **({} if tied is None else {"tie_word_embeddings": tied}))
        with torch.device("meta"):
            model = models.build(config)
        groups = [{*group} for group in naming.aliases(model.named_parameters(remove_duplicate=False))]
        architecture, given = DESCRIPTIONS[name], config.to_dict()
        assert architecture.tied is not None
        if tied is None:
            given.pop("tie_word_embeddings", None)
        readouts = {*architecture.tied.readouts}
        assert architecture.is_tied(given) == any(group & readouts and group - readouts for group in groups), head
        plan = architecture.plan(given, models.usual_times(name), models.shapes(model, every_name=True))
        ours = [{*entry.names} for entry in plan.parameters.values()]
        assert all(any(names <= group for group in groups) for names in ours)
        assert all(group in ours for group in groups) or not architecture.is_tied(given)


@pytest.mark.parametrize(
    ("name", "times", "config"),
    [
        ("llama", "heads=3", {}),
        ("gemma2", "heads=3", {"head_dim": 6}),
        ("phi", "hidden=2", {"qk_layernorm": True}),
    ],
)
def test_what_transformers_refuses_is_refused_first(name: str, times: str, config: dict[str, Any]) -> None:
    made, _ = models.tiny(name, **config)
    architecture, given = DESCRIPTIONS[name], made.to_dict()
    with pytest.raises(mu.MupscaleError):
        architecture.wide_config(given, Times.of(times))
    forced = replace(architecture, divisible=False, refuse=lambda config, times: "")
    wide = forced.wide_config(given, Times.of(times))
    with pytest.raises(Exception, match=r"not a multiple|different model"):
        forced.plan(given, Times.of(times), models.shapes(models.build(made))).check(models.build(wide))


# Initialisation.


PATTERN = "encoder.embed_positions.weight"
"""Of Whisper: it starts as a pattern, and gets no noise."""

OTHER_TIMES = {"bloom": "hidden=4", "mpt": "hidden=4", "mamba2": "4"}


@pytest.mark.parametrize("name", models.each())
def test_fresh_weights_have_the_described_size(name: str) -> None:
    """std of transformers' own initialisation of the narrow model, times μP's factor at the wide width."""
    std, times = DESCRIPTIONS[name].std, Times.of(OTHER_TIMES.get(name, "hidden=4,ffn=9,heads=4"))
    for head in (None, models.headless(name), *(["ForMaskedImageModeling"] if name == "vit" else [])):
        config, _ = models.tiny(name, head, **{std: 0.1})
        model, architecture = models.build(config), DESCRIPTIONS[name]
        plan = architecture.plan(config.to_dict(), times, models.shapes(model))
        assert plan.fresh is not None
        for parameter, p in model.named_parameters():
            found, expected = float(p.detach().std(correction=0)), plan.fresh[parameter]
            unplanned = name == "whisper" and parameter.endswith(PATTERN)
            if found == 0 or unplanned or (name == "wav2vec2" and not plan[parameter].axes):
                assert expected == 0, parameter
            else:
                slack = 5 / (2 * p.numel()) ** 0.5
                assert found * plan[parameter].init == pytest.approx(expected, rel=slack), parameter


def test_numbers_that_json_lacks() -> None:
    """transformers writes them as an object; its own reader takes them back, and so does ours."""
    from mupscale.hf.describe.building import sketch_model

    config = transformers.Mamba2Config(
        hidden_size=16, num_hidden_layers=1, vocab_size=29, state_size=3, num_heads=8, head_dim=4, n_groups=1
    )
    written = json.loads(config.to_json_string())
    assert written["time_step_limit"] == [0.0, {"__float__": "Infinity"}]
    assert sketch_model(written).config.time_step_limit[1] == float("inf")  # type: ignore[union-attr, index]
