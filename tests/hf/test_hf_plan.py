"""Wires, growth and descriptions of architectures, without transformers: a plan from a config, names and shapes."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mupscale import Axis, MupscaleError, Rule
from mupscale.core.axes import expand
from mupscale.hf.describe.architecture import Architecture
from mupscale.hf.describe.multipliers import Times
from mupscale.hf.describe.registry import DESCRIPTIONS, extend, register
from mupscale.hf.describe.wires import Layout, Wire, conv1d, linear, patches, readout, same, table, vector
from mupscale.hf.files.record import GrowthStep, Record

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
SHAPES = {
    "model.embed_tokens.weight": (7, 16),
    "model.layers.0.self_attn.q_proj.weight": (16, 16),
    "model.layers.0.self_attn.k_proj.weight": (8, 16),
    "model.layers.0.self_attn.o_proj.weight": (16, 16),
    "model.layers.0.mlp.down_proj.weight": (16, 20),
    "model.layers.0.input_layernorm.weight": (16,),
    "model.norm.weight": (16,),
    "lm_head.weight": (7, 16),
}


def llama() -> Architecture:
    found = DESCRIPTIONS.get("llama")
    assert found is not None
    return found


# Growth.


@pytest.mark.parametrize(
    ("given_", "expected"),
    [
        (2, Times(2, 2, 2, 2)),
        ("3", Times(3, 3, 3, 3)),
        ("hidden=2,ffn=3,heads=2", Times(2, 3, 2, 2)),
        (" hidden = 2 , heads = 4 , kv = 2", Times(2, 1, 4, 2)),
        ("heads=2,kv=1", Times(1, 1, 2, 1)),
        ({"ffn": 2}, Times(1, 2, 1, 1)),
        (Times(ffn=5), Times(1, 5, 1, 1)),
    ],
)
def test_what_times_may_be(given_: Any, expected: Times) -> None:
    assert Times.of(given_) == expected
    assert Times.of(str(expected)) == expected


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        (0, "hidden cannot grow 0 times"),
        (1.5, "hidden cannot grow 1.5 times"),
        (True, "hidden cannot grow True times"),
        ("1.5", "'1.5' is no whole number"),
        ("-2", "'-2' is no whole number"),
        ("hidden=2,ffn", "'' is no whole number"),
        ("width=2", "names 'width', which does not grow"),
        ("heads=2,kv=3", r"cannot grow 3 times while heads grow 2 times.*\(kv=2\).*\(kv=1\)"),
        ("kv=2", "cannot grow 2 times while heads grow 1 times"),
        ("2" * 5 + "x", "no whole number"),
    ],
)
def test_what_times_may_not_be(given_: Any, message: str) -> None:
    with pytest.raises(MupscaleError, match=message):
        Times.of(given_)


def test_growths_multiply() -> None:
    assert Times.of(2) * Times.of("ffn=3,heads=2,kv=1") == Times(2, 6, 4, 2)


# Wires.


def units(wire: Wire) -> list[int]:
    """Which narrow unit each wide unit copies."""
    source: list[int] = wire.axis.source(wire.size).tolist()
    return source


def test_a_wire_copies_in_blocks() -> None:
    assert units(Wire(3, 2)) == [0, 0, 1, 1, 2, 2]
    assert units(Wire(4, 2, block=2)) == [0, 1, 0, 1, 2, 3, 2, 3]
    assert Wire(4, 1, block=2).axis == Axis(1)


def test_units_kept_together() -> None:
    """A head's query, key and value side by side: (heads, 3, head_dim)."""
    heads, head_dim = 2, 2
    packed = torch.arange(heads * 3 * head_dim).view(heads, 3, head_dim)
    expected = packed.repeat_interleave(2, 0).flatten().tolist()
    assert units(Wire(heads * head_dim, 2, head_dim) * 3) == expected


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3))
def test_wires_packed_one_after_the_other(times: int, n: int, block: int, m: int, other: int) -> None:
    """q|k|v: each part is copied as it would be alone."""
    first, second = Wire(n * block, times, block), Wire(m * other, times, other)
    alone = (
        units(first) + [first.size + u for u in units(second)] + [first.size + second.size + u for u in units(second)]
    )
    assert units(first | second | second) == alone


def test_packed_wires_must_grow_alike() -> None:
    with pytest.raises(MupscaleError, match=r"grows 2 times with one that grows 1 times.*let both grow alike"):
        Wire(4, 2) | Wire(4, 1)


# Layouts.


@pytest.mark.parametrize(
    ("layout", "shape", "wide", "rule"),
    [
        (linear("ffn", "hidden"), (5, 4), (15, 8), Rule(3, 2)),
        (linear("ffn", "hidden"), (6, 5, 4), (6, 15, 8), Rule(3, 2)),
        (conv1d("hidden", "ffn"), (4, 5), (8, 15), Rule(3, 2)),
        (table("hidden"), (9, 4), (9, 8), Rule(2)),
        (vector("hidden"), (4,), (8,), Rule(2)),
        (vector("hidden"), (1, 1, 4), (1, 1, 8), Rule(2)),
        (patches("hidden"), (4, 3, 2, 2), (8, 3, 2, 2), Rule(2)),
        (readout("hidden"), (7, 4), (7, 8), Rule(1, 2)),
        (same(), (7,), (7,), Rule()),
        (same(), (), (), Rule()),
        (linear("hidden", "fixed"), (4, 3), (8, 3), Rule(2)),
        (linear("fixed", "hidden"), (3, 4), (3, 8), Rule(1, 2)),
    ],
)
def test_layouts(layout: Layout, shape: tuple[int, ...], wide: tuple[int, ...], rule: Rule) -> None:
    wires = {"hidden": Wire(4, 2), "ffn": Wire(5, 3), "fixed": Wire(3, width=False)}
    entry = layout.entry("w", shape, wires)
    assert (entry.narrow, entry.wide, entry.rule, entry.names) == (shape, wide, rule, ("w",))
    assert layout.narrowed("w", wide, wires) == shape
    assert set(entry.out + entry.in_) == set(entry.axes)
    assert tuple(expand(torch.zeros(shape), entry.axes, torch.zeros(wide)).shape) == wide


def test_what_reads_no_width_is_initialised_as_a_readout() -> None:
    """A projection to a size that never grows: μP's std falls as 1/k, not as 1/√k."""
    wires = {"hidden": Wire(4, 4), "fixed": Wire(3, width=False)}
    assert linear("fixed", "hidden").entry("w", (3, 4), wires).init == 1 / 4
    assert linear("hidden", "hidden").entry("w", (4, 4), wires).init == 1 / 2
    unchanged = {"hidden": Wire(4, 4), "fixed": Wire(3, 1)}  # a width that happens not to grow is still one
    assert linear("fixed", "hidden").entry("w", (3, 4), unchanged).init == 1 / 2


def test_tensors_that_do_not_fit_their_layout() -> None:
    wires = {"hidden": Wire(4, 2), "ffn": Wire(5, 3)}
    with pytest.raises(MupscaleError, match=r"'w' has shape \(5, 6\).*dimension 1 should be 'hidden' of 4 units"):
        linear("ffn", "hidden").entry("w", (5, 6), wires)
    with pytest.raises(MupscaleError, match=r"'w' has shape \(5,\).*description has 2 dimensions"):
        linear("ffn", "hidden").entry("w", (5,), wires)
    with pytest.raises(MupscaleError, match=r"'w' has shape \(\).*description has 1 dimensions"):
        vector("hidden").narrowed("w", (), wires)
    with pytest.raises(MupscaleError, match=r"'w' has shape \(15, 9\), and \(15, 8\) in the upscaled model"):
        linear("ffn", "hidden").narrowed("w", (15, 9), wires)
    with pytest.raises(MupscaleError, match="with the axis 'heads', which is not one of hidden, ffn"):
        vector("heads").entry("w", (4,), wires)


# Plans.


def test_the_plan_of_a_llama() -> None:
    plan = llama().plan(LLAMA, Times.of("hidden=2,ffn=3,heads=4,kv=2"), SHAPES)
    assert plan.rules == {
        "model.embed_tokens.weight": Rule(2),
        "model.layers.0.self_attn.q_proj.weight": Rule(4, 2),
        "model.layers.0.self_attn.k_proj.weight": Rule(2, 2),
        "model.layers.0.self_attn.o_proj.weight": Rule(2, 4),
        "model.layers.0.mlp.down_proj.weight": Rule(2, 3),
        "model.layers.0.input_layernorm.weight": Rule(2),
        "model.norm.weight": Rule(2),
        "lm_head.weight": Rule(1, 2),
    }
    q, k = (plan[f"model.layers.0.self_attn.{name}_proj.weight"] for name in "qk")
    assert (q.axes, q.wide) == ({0: Axis(4, 8), 1: Axis(2)}, (64, 32))  # whole groups of two heads of four units
    assert (k.axes, k.wide) == ({0: Axis(2, 4), 1: Axis(2)}, (16, 32))


def test_a_tied_readout_is_one_entry_and_its_fold_is_the_norms() -> None:
    tied = {**LLAMA, "tie_word_embeddings": True}
    plan = llama().plan(tied, Times.of(3), SHAPES)
    assert "lm_head.weight" not in plan.parameters
    assert plan["model.embed_tokens.weight"].names == ("model.embed_tokens.weight", "lm_head.weight")
    assert plan.rules["model.norm.weight"] == Rule(3, 1, Fraction(1, 3))
    assert {n for n, e in plan.parameters.items() if e.fold != 1} == {"model.norm.weight"}
    for classes in (["LlamaForSequenceClassification"], ["LlamaModel"]):
        other = llama().plan({**tied, "architectures": classes}, Times.of(3), SHAPES)
        assert all(e.fold == 1 for e in other.parameters.values())
    assert llama().plan({**tied, "architectures": None}, Times.of(3), SHAPES) == plan


@pytest.mark.parametrize("times", [2, 3, "hidden=2,ffn=3,heads=4,kv=2", "ffn=2"])
@pytest.mark.parametrize("tied", [False, True])
def test_the_plan_from_the_wide_shapes_is_the_same(times: Any, tied: bool) -> None:
    config, times = {**LLAMA, "tie_word_embeddings": tied}, Times.of(times)
    plan = llama().plan(config, times, SHAPES)
    wide = {name: plan[plan.names[name]].wide for name in SHAPES}
    assert llama().plan(config, times, wide, wide=True) == plan


@pytest.mark.parametrize("first", ["2", "heads=2,kv=1", "hidden=3,heads=2"])
@pytest.mark.parametrize("second", ["2", "heads=2,kv=1", "ffn=3"])
@pytest.mark.parametrize("tied", [False, True])
def test_growing_twice_is_growing_once(first: str, second: str, tied: bool) -> None:
    """Copies of copies lie where copies made at once lie, also where key/value heads grow in one of the two."""
    config = {**LLAMA, "tie_word_embeddings": tied, "hidden_size": 32, "head_dim": 4}
    shapes = {
        n: tuple(32 if (d, size) in ((0, 16), (1, 16)) else size for d, size in enumerate(s)) for n, s in SHAPES.items()
    }
    shapes["model.layers.0.self_attn.q_proj.weight"], shapes["model.layers.0.self_attn.o_proj.weight"] = (
        (16, 32),
        (32, 16),
    )
    one, two = Times.of(first), Times.of(second)
    early = llama().plan(config, one, shapes)
    middle = llama().wide_config(config, one)
    late = llama().plan(middle, two, {n: early[early.names[n]].wide for n in shapes})
    at_once = llama().plan(config, one * two, shapes)
    for name, entry in at_once.parameters.items():
        narrow = torch.arange(torch.Size(entry.narrow).numel(), dtype=torch.float64).view(entry.narrow)
        between = expand(narrow, early[name].axes, torch.empty(early[name].wide, dtype=torch.float64))
        twice = expand(between, late[name].axes, torch.empty(entry.wide, dtype=torch.float64))
        once = expand(narrow, entry.axes, torch.empty(entry.wide, dtype=torch.float64))
        assert torch.equal(once, twice), name
        assert early[name].rule * late[name].rule == entry.rule
    assert llama().wide_config(middle, two) == llama().wide_config(config, one * two)
    record = Record(config, (GrowthStep(one), GrowthStep(two)))
    assert record.plan_for({n: at_once[at_once.names[n]].wide for n in shapes}).rules == at_once.rules


def test_the_noise_a_fresh_initialisation_would_have() -> None:
    """The config's std times μP's factor; nothing for what starts constant."""
    plan = llama().plan({**LLAMA, "initializer_range": 0.1}, Times.of(4), SHAPES)
    assert plan.fresh is not None
    assert plan.fresh["model.layers.0.self_attn.q_proj.weight"] == pytest.approx(0.1 / 2)
    assert plan.fresh["lm_head.weight"] == pytest.approx(0.1 / 4)
    assert plan.fresh["model.embed_tokens.weight"] == pytest.approx(0.1)
    assert plan.fresh["model.norm.weight"] == 0


def test_masks_in_old_files_stay_as_they_are() -> None:
    gpt2 = DESCRIPTIONS.get("gpt2")
    assert gpt2 is not None
    config = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "architectures": ["GPT2LMHeadModel"]}
    masks = {"h.0.attn.bias": (1, 1, 6, 6), "h.0.attn.masked_bias": (), "wte.weight": (5, 8)}
    plan = gpt2.plan(config, Times.of(2), masks)
    assert plan.fresh is not None
    for name in ("h.0.attn.bias", "h.0.attn.masked_bias"):
        assert (plan[name].wide, plan.fresh[name], plan.rules[name]) == (masks[name], 0, Rule())


# Refusals.


def test_an_unknown_tensor_is_named_with_the_remedy() -> None:
    with pytest.raises(
        MupscaleError, match=r"'probe.weight' is a tensor.*mupscale.hf.extend\('llama', \{'probe.weight'"
    ):
        llama().plan(LLAMA, Times.of(2), {"probe.weight": (3, 16)})


def test_extend_and_register(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("llama", "mine"):  # as before, afterwards
        monkeypatch.setitem(DESCRIPTIONS, name, llama())
    extend("llama", {"probe.weight": readout("hidden")})
    assert llama().plan(LLAMA, Times.of(2), {"probe.weight": (3, 16)}).rules == {"probe.weight": Rule(1, 2)}
    register(replace(llama(), model_type="mine"))
    assert DESCRIPTIONS.get("mine") is not None
    with pytest.raises(MupscaleError, match=r"'yours' is not described yet: .*llama.* are; register it whole"):
        extend("yours", {})


@pytest.mark.parametrize(
    ("config", "times", "message"),
    [
        ({"hidden_size": None}, 2, "no usable 'hidden_size' .it is None"),
        ({"hidden_size": "16"}, 2, "no usable 'hidden_size' .it is '16'"),
        ({"num_attention_heads": 0}, 2, "no usable 'num_attention_heads' .it is 0"),
        (
            {"model_type": "phi", "num_key_value_heads": None, "num_attention_heads": 3},
            2,
            "hidden_size 16, which 3 heads do not divide",
        ),
        ({"num_key_value_heads": 3}, 2, "4 heads, which 3 key/value heads do not divide"),
        ({}, "heads=3", "heads of a llama model must divide its hidden_size, but 12 heads do not divide 16"),
        ({"pruned_heads": {"0": [1]}}, 2, "heads were pruned"),
        ({"model_type": "mistral", "hidden_size": "x"}, 2, "config.json of a mistral model"),
        ({"model_type": "gpt2", "n_embd": 16, "n_head": 4, "add_cross_attention": True}, 2, "attends to an encoder"),
        ({"model_type": "gpt2", "n_embd": 16, "n_head": 4}, "hidden=2", "head_dim is n_embd / n_head.*heads=2"),
        ({"model_type": "bert"}, "hidden=2,heads=2,kv=1", "Leave kv out of times="),
        ({"model_type": "opt", "do_layer_norm_before": False}, 2, "no norm with a gain.*Untie the readout"),
        ({"model_type": "opt", "_remove_final_layer_norm": True}, 2, "no norm with a gain"),
        ({"model_type": "opt", "layer_norm_elementwise_affine": False}, 2, "no norm with a gain"),
        ({"model_type": "opt", "word_embed_proj_dim": 32}, 2, "words of 32 units.*Grow by a different factor"),
        ({"model_type": "opt", "word_embed_proj_dim": "x"}, 2, "no usable 'word_embed_proj_dim' .it is 'x'"),
        ({"model_type": "vit", "hidden_size": []}, 2, "no usable 'hidden_size'"),
        ({"model_type": "gpt2", "n_embd": None}, 2, "no usable 'n_embd'"),
        ({"model_type": "phi", "qk_layernorm": True}, "hidden=2", "qk_layernorm keeps its head_dim only if"),
    ],
)
def test_configs_that_cannot_grow_are_refused(config: dict[str, Any], times: Any, message: str) -> None:
    config = {**LLAMA, "architectures": ["OPTForCausalLM"], **config}
    architecture = DESCRIPTIONS.get(config["model_type"])
    assert architecture is not None
    for make in (architecture.wide_config, lambda c, t: architecture.plan(c, t, {})):
        with pytest.raises(MupscaleError, match=message) as error:
            make(config, Times.of(times))
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"architectures": "LlamaForCausalLM"}, "not a list of class names .it is 'LlamaForCausalLM'"),
        ({"architectures": [5]}, "not a list of class names"),
        ({"initializer_range": "x"}, "'initializer_range' in config.json is not a number .it is 'x'"),
    ],
)
def test_fields_of_another_kind_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(MupscaleError, match=message):
        llama().plan({**LLAMA, **config}, Times.of(2), {})


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, '{"format": "mupscale.hf/1", "growths": [], "config": [], "plan": null}'],
    ids=["too deep", "no config"],
)
def test_a_record_that_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "mupscale.json").write_text(text)
    with pytest.raises(MupscaleError, match=r"is not a mupscale.json of this version .*Copy the one"):
        Record.load(tmp_path)


def test_what_does_not_touch_the_hidden_size_needs_no_fold() -> None:
    opt = DESCRIPTIONS.get("opt")
    assert opt is not None
    config = {**LLAMA, "model_type": "opt", "architectures": ["OPTForCausalLM"], "do_layer_norm_before": False}
    assert opt.wide_config(config, Times.of("ffn=2"))["ffn_dim"] == 2 * 3072
    untied = {**config, "tie_word_embeddings": False}
    assert opt.wide_config(untied, Times.of(2))["word_embed_proj_dim"] == 32


def test_the_wide_config_keeps_the_rest_and_its_order() -> None:
    config = {"a": 1, **LLAMA, "rope_theta": 1e4}
    wide = llama().wide_config(config, Times.of(2))
    grown = {"hidden_size": 32, "intermediate_size": 40, "num_attention_heads": 8, "num_key_value_heads": 4}
    assert wide == {**config, **grown}
    assert list(wide) == list(config)
    apart = llama().wide_config(config, Times.of("hidden=2"))
    assert apart["head_dim"] == 4
    assert config == {"a": 1, **LLAMA, "rope_theta": 1e4}
