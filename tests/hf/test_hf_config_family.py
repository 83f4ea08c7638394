"""A checkpoint as a family over its config: what miniatures show holds at its own size, beside what tables say."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

from test_hf_architectures import MORE, VARIANTS  # noqa: E402

import hf_models as models  # noqa: E402
import mupscale as mu  # noqa: E402
from mupscale import Plan  # noqa: E402
from mupscale.core import Axis, Entry  # noqa: E402
from mupscale.hf.describe import config_family, from_modules  # noqa: E402
from mupscale.hf.describe.config_fields import wide_config  # noqa: E402
from mupscale.hf.describe.multipliers import Ratios, Times  # noqa: E402
from slow_cases import with_slow  # noqa: E402

TELLING = ("llama-kv-grows-less",)
BY_HAND = ("mpt-clipped",)  # clip_qkv, a number that has to shrink as heads become wider, is no size
PENDING = (
    "smollm3",
    "bart",
    "mamba2",
    "wav2vec2",
    "gemma3-untied",
    "qwen2_moe-tied",
    "olmoe-tied",
    "granitemoe-tied",
    "distilbert-untied",
    "modernbert-untied",
    "modernbert-biases",
    "electra-untied",
    "electra-large",
    "electra-discriminator",
    "gpt_oss-tied",
    "llama4-plain",
    "deepseek_v2-no-rank",
    "deepseek_v2-experts",
    "deepseek_v3-experts",
    "falcon-untied",
    "falcon-one-kv-head",
    "falcon-all-heads",
    "falcon-serial",
    "falcon-alibi",
    "t5-gated",
    "bart-untied",
    "bloom-untied",
    "mpt-untied",
    "mpt-scaled",
    "mamba2-tied",
    "qwen3_next-tied",
    "qwen3_next-full",
    "whisper-untied",
    "wav2vec2-large",
)
"""Not compared at a larger size yet. As they are, all are planned exactly by running."""


def enlarged(config: dict[str, Any], times: int = 4) -> dict[str, Any]:
    """The config of a model whose parts have more units, as real ones have beside those of the tests."""
    return {**config, **{name: times * size for name, size in config_family._dims(config)}}


def told(entry: Entry) -> tuple[Any, ...]:
    """What decides on copies, without names and what stays."""
    grown = {d: axis for d, axis in entry.axes.items() if axis.times != 1}
    sides = [tuple(d for d in side if d in grown) for side in (entry.out, entry.in_)]
    return grown, sides, pytest.approx(float(entry.fold)), entry.offset if entry.fold != 1 else 0


class Real(models.Pair):
    """A model larger than its miniatures, widened by what these show."""

    def __init__(self, name: str, times: Any, **config: Any) -> None:
        self.config, self.cls = models.tiny(name, **config)
        self.json, self.times = enlarged(self.config.to_dict()), models.usual_times(name, times)
        self.plan = config_family.plan_by_miniatures(self.json, self.times)
        self.small = models.randomised(models.build(self.json), size=0.1)
        self.wide = models.build(wide_config(self.json, self.times, wider_heads=True))
        if self.config.is_encoder_decoder:
            for model in (self.small, self.wide):
                model.register_forward_hook(models.averaged)
        self.batches = models.inputs(self.small.config)  # type: ignore[arg-type]
        mu.widen(self.small, self.wide, self.plan)

    def plan_of_table(self) -> Plan:
        return models.DESCRIPTIONS[str(self.json["model_type"])].plan(self.json, self.times, models.shapes(self.small))


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    "variant", with_slow([v for v in {**VARIANTS, **MORE} if v not in (*BY_HAND, *PENDING)], TELLING)
)
def test_miniatures_show_what_tables_say_or_another_plan_that_is_exact(variant: str) -> None:
    name, times, config = {**VARIANTS, **MORE}[variant]
    pair = Real(name, times, **{"num_hidden_layers": 2 if variant == name else 1, **config})
    if any(told(pair.plan[n]) != told(entry) for n, entry in pair.plan_of_table().parameters.items()):
        assert pair.compare() <= 1e-10
        assert pair.train(steps=2).ok


def test_a_real_size_is_planned_on_miniatures_that_have_all_kinds_of_layers() -> None:
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "num_hidden_layers": 6, "layer_types": 2 * kinds}
    window = {"use_sliding_window": True, "sliding_window": 4}
    sizes = {"hidden_size": 1024, "intermediate_size": 3000, "vocab_size": 151936, **window}
    config: dict[str, Any] = {"model_type": "qwen2", **heads, **sizes}
    first, second = config_family.miniatures(config, Times.of(2))
    assert (first["hidden_size"], second["hidden_size"]) == (32, 64)
    assert (first["num_hidden_layers"], first["layer_types"], first["vocab_size"]) == (3, kinds, 64)
    plan = config_family.plan_by_miniatures(config, Times.of(2))
    assert plan["model.layers.5.self_attn.q_proj.weight"].axes[0] == Axis(2, 512)
    assert plan["model.layers.5.self_attn.k_proj.weight"].axes[0] == Axis(2, 128)
    assert plan["model.layers.5.mlp.down_proj.weight"].axes == {0: Axis(2), 1: Axis(2)}


@pytest.mark.slow
def test_a_model_that_nobody_described_and_that_is_too_large_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its experts are bare parameters, of which the modules tell nothing."""
    sizes = {"hidden_size": 128, "intermediate_size": 96, "moe_intermediate_size": 64, "num_attention_heads": 4}
    more = {"num_key_value_heads": 2, "num_hidden_layers": 2, "num_experts": 4, "num_experts_per_tok": 2}
    config = {"model_type": "flex_olmo", **sizes, **more, "vocab_size": 64, "pad_token_id": None}
    monkeypatch.setattr(from_modules, "_FEW", 10)
    plan = from_modules.plan_by_modules(config, Times.of(2), fresh=False)
    assert (plan.checked, plan.tried_by) == (True, "small members")
    experts = plan["model.layers.1.mlp.experts.gate_up_proj"]
    assert (experts.out, experts.in_) == ((1,), (2,))
    half = Fraction(3, 2)
    ratios = from_modules.plan_by_modules(config, Ratios(half, half, half, half), fresh=False)
    assert ratios["model.layers.1.mlp.experts.gate_up_proj"].axes == {1: Axis(half), 2: Axis(half)}
