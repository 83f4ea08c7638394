"""Checkpoints with more layers: many architectures, per-layer settings, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_models import CONFIGS, EAGER, build, inputs, loss, randomised, tiny
from mupscale import Copies, Fresh, hf
from mupscale.hf.depths import deep_config, layer_origins
from mupscale.hf.miniatures import find_residual_writers
from mupscale.hf.source import open_source
from mupscale.planning import KeepDouble, in_double
from mupscale.system import MupscaleError
from slow_cases import with_slow

POST_NORM = ("bert", "roberta", "xlm-roberta", "camembert", "distilbert", "electra", "bart")
RESIDUAL = sorted({*CONFIGS} - {*POST_NORM})
PRE_NORM: dict[str, dict[str, Any]] = {"wav2vec2": {"do_stable_layer_norm": True, "adapter_attn_dim": 3}}
FEW = ("t5", "modernbert")
COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")


def saved(name: str, folder: Path, dtype: torch.dtype = torch.float32, **config: Any) -> Any:
    made, _ = tiny(name, **PRE_NORM.get(name, {}) | config)
    model = randomised(build(made)).to(dtype)
    model.save_pretrained(folder)  # type: ignore[operator]
    return made


def stored(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return content


@pytest.mark.quick("t5")
@pytest.mark.parametrize("name", with_slow(RESIDUAL, FEW))
def test_identity_keeps_the_function(name: str, tmp_path: Path) -> None:
    """In float64 to 1e-12; layers keep their kinds, and each kind its place."""
    config = saved(name, tmp_path / "small", torch.float64)
    deepened = hf.upscale(tmp_path / "small", tmp_path / "deep", layers=5, verify=False)
    assert deepened.layers == (1 if name == "whisper" else 2, 5)  # whose decoder has 2
    report = hf.verify(tmp_path / "small", tmp_path / "deep", dtype="float64")
    assert report.ok
    assert max(row.difference for row in report.rows) < 1e-12
    assert "the function is the same" in report.verdict
    content = stored(tmp_path / "deep")
    assert 5 in [content.get(name) for name in COUNTS]
    if types := vars(config).get("layer_types"):
        blocks = (0, 1, 1, 1, 1) if name == "modernbert" else (0, 0, 1, 1, 1)  # whose first has no norm
        assert content["layer_types"] == [types[number] for number in blocks]


@pytest.mark.parametrize("name", with_slow(RESIDUAL, ("gpt2",)))
def test_old_layers_have_their_gradients_and_new_ones_learn(name: str, tmp_path: Path) -> None:
    """In float64: output projections move at the first step, all other weights of new layers at the second."""
    config = saved(name, tmp_path / "small", torch.float64)
    hf.upscale(tmp_path / "small", tmp_path / "deep", layers=3, verify=False)
    kind = type(build(config))
    batch, plain = in_double(inputs(config, count=1)[0]), {"dtype": torch.float64, **EAGER}
    with KeepDouble():
        shallow, deep = (kind.from_pretrained(tmp_path / n, **plain).eval() for n in ("small", "deep"))  # type: ignore[attr-defined]
        for model in (shallow, deep):
            loss(model, batch).backward()
        ours, theirs = dict(shallow.named_parameters()), dict(deep.named_parameters())
        origins = layer_origins(list(ours), "identity", 3)
        for new, p in theirs.items():
            if not origins[new].is_new and (old := ours[origins[new].name].grad) is not None:
                torch.testing.assert_close(p.grad, old, rtol=1e-10, atol=1e-12)
        before = {n: p.detach().clone() for n, p in theirs.items() if origins[n].is_new}
        optimizer = torch.optim.SGD(deep.parameters(), lr=0.5)
        optimizer.step()
        moved = {n for n, p in before.items() if not torch.equal(theirs[n], p)}
        assert moved == find_residual_writers(stored(tmp_path / "deep"))[0].keys() & before.keys()
        optimizer.zero_grad()
        loss(deep, batch).backward()
        optimizer.step()
    stuck = {n for n, p in before.items() if torch.equal(theirs[n], p)}
    assert not {n for n in stuck if not n.endswith("bias")}


@pytest.mark.parametrize("name", with_slow(RESIDUAL, ("gemma2",)))
def test_new_layers_start_as_the_models_own_initialisation(name: str, tmp_path: Path) -> None:
    """What is not silent has the mean and the spread that transformers gives a fresh model; nothing is trained."""
    wide = {"hidden_size": 64, "d_model": 64, "n_embd": 64, "num_heads": 32 if name == "mamba2" else 4}
    wide = {field: size for field, size in wide.items() if field in CONFIGS[name][2]}
    config = saved(name, tmp_path / "small", **wide)
    hf.upscale(tmp_path / "small", tmp_path / "deep", layers=3, verify=False)
    fresh = build(config)
    theirs = type(fresh).from_pretrained(tmp_path / "deep", dtype=torch.float32)  # type: ignore[attr-defined]
    origins = layer_origins(list(dict(fresh.named_parameters())), "identity", 3)
    silent = find_residual_writers(config.to_dict())[0]
    drawn = {n: o.name for n, o in origins.items() if o.is_new}
    assert drawn
    for new, old in drawn.items():
        ours, initial = theirs.get_parameter(new).detach(), fresh.get_parameter(old).detach()
        if old in silent:
            assert (ours == silent[old]).all()
        elif float(initial.std()) == 0 or initial.numel() == 1:
            assert torch.equal(ours, initial), new
        else:
            few = 6 / initial.numel() ** 0.5
            assert float(ours.std()) == pytest.approx(float(initial.std()), rel=few + 0.05), new
            assert abs(float(ours.mean() - initial.mean())) < few * float(initial.std()), new


@pytest.mark.parametrize("name", with_slow(POST_NORM, ("bert",)))
def test_post_norm_is_refused_and_stacks(name: str, tmp_path: Path) -> None:
    saved(name, tmp_path / "small")
    with pytest.raises(
        MupscaleError, match=rf"layers of {name} cannot .* normalises the stream .*post-norm.*take 'stack'"
    ):
        hf.upscale(tmp_path / "small", tmp_path / "deep", layers=4)
    assert not (tmp_path / "deep").exists()
    stacked = hf.upscale(tmp_path / "small", tmp_path / "deep", layers=4, deepen="stack")
    assert stacked.difference is not None
    assert stacked.difference > 1e-3
    assert "copied layers move" in str(stacked)


@pytest.mark.slow
def test_a_first_layer_that_holds_less_is_not_copied(tmp_path: Path) -> None:
    """ModernBERT's has no norm, and a copy of it would lack one elsewhere; no message sends one on to the next."""
    saved("modernbert", tmp_path / "small")
    for how in ("stack", "interleaved"):
        with pytest.raises(MupscaleError, match=r"do not all hold the same .*attn_norm.weight'; take 'identity'"):
            hf.upscale(tmp_path / "small", tmp_path / "deep", layers=4, deepen=how)  # type: ignore[arg-type]
    hf.upscale(tmp_path / "small", tmp_path / "deep", layers=3)
    both = hf.upscale(tmp_path / "deep", tmp_path / "large", times=2, layers=5, exact=True)  # once more, and wider
    assert both.comparison is not None
    assert both.comparison.ok
    saved("modernbert", tmp_path / "one", num_hidden_layers=1)
    with pytest.raises(MupscaleError, match=r"nothing would be 'model.layers.1.attn_norm.weight'$"):
        hf.upscale(tmp_path / "one", tmp_path / "other", layers=2)


def test_stack_says_by_how_much_outputs_change(tmp_path: Path) -> None:
    saved("llama", tmp_path / "small")
    stacked = hf.upscale(tmp_path / "small", tmp_path / "deep", layers=4, deepen="stack", shard_size="4kB")
    assert stacked.difference is not None
    assert stacked.difference > 0.01
    assert len(list((tmp_path / "deep").glob("model-*.safetensors"))) > 1
    report = hf.verify(tmp_path / "small", tmp_path / "deep")
    assert report.ok
    assert "copied layers move logits by" in report.verdict


@pytest.mark.slow
def test_settings_of_single_layers(tmp_path: Path) -> None:
    """Lists of numbers of layers, every how many have experts, and how many plain ones come first."""
    saved("qwen3_moe", tmp_path / "moe", mlp_only_layers=[], decoder_sparse_step=2)
    hf.upscale(tmp_path / "moe", tmp_path / "deep", layers=5)
    assert (stored(tmp_path / "deep")["mlp_only_layers"], stored(tmp_path / "deep")["decoder_sparse_step"]) == (
        [0, 1],
        1,
    )
    saved("deepseek_v2", tmp_path / "first")
    with pytest.raises(MupscaleError, match="first 1 layers of this model are plain"):
        hf.upscale(tmp_path / "first", tmp_path / "stacked", layers=4, deepen="stack")
    hf.upscale(tmp_path / "first", tmp_path / "doubled", layers=4, deepen="interleaved")
    assert stored(tmp_path / "doubled")["first_k_dense_replace"] == 2


def test_verification_sees_what_was_changed(tmp_path: Path) -> None:
    """A layer that writes, an old weight, and a drawn one: each is named; without a record there is no relation."""
    from safetensors.torch import load_file, save_file

    saved("llama", tmp_path / "small")
    hf.upscale(tmp_path / "small", tmp_path / "deep", layers=3, verify=False)
    file = tmp_path / "deep" / "model.safetensors"
    right = load_file(file)
    for name in ("2.mlp.down_proj", "0.mlp.up_proj", "2.mlp.up_proj"):
        wrong = {n: t + 0.1 if n == f"model.layers.{name}.weight" else t for n, t in right.items()}
        save_file(wrong, file, metadata={"format": "pt"})
        report = hf.verify(tmp_path / "small", tmp_path / "deep")
        assert not report.ok
        assert name in report.verdict
    save_file(right, file, metadata={"format": "pt"})
    assert hf.verify(tmp_path / "small", tmp_path / "deep").ok
    (tmp_path / "deep" / "mupscale.json").unlink()
    with pytest.raises(MupscaleError, match=r"layers 3 and the small one .* layers 2"):
        hf.verify(tmp_path / "small", tmp_path / "deep")


def test_lists_of_a_config_that_are_as_long_as_there_are_layers(tmp_path: Path) -> None:
    """Convolutions, limits and tokens are not the layers', however many there are of each."""
    saved("wav2vec2", tmp_path / "sound")
    hf.upscale(tmp_path / "sound", tmp_path / "deep", layers=3, deepen="stack", verify=False)
    assert [stored(tmp_path / "deep")[field] for field in ("conv_dim", "tdnn_kernel")] == [[6, 10], [2, 1]]
    deep = deep_config({"model_type": "mamba2", "num_hidden_layers": 2, "time_step_limit": [0.0, 9.0]}, "stack", 4)
    assert deep["time_step_limit"] == [0.0, 9.0]


def test_refused(tmp_path: Path) -> None:
    saved("llama", tmp_path / "llama")
    for layers in (1, 2):
        with pytest.raises(MupscaleError, match=f"has 2 layers. A deeper model needs more than that, not {layers}"):
            hf.upscale(tmp_path / "llama", tmp_path / "other", layers=layers)
    with pytest.raises(MupscaleError, match="deepen= is 'sideways', but must be 'identity', 'stack' or 'interleaved'"):
        hf.upscale(tmp_path / "llama", tmp_path / "other", layers=3, deepen="sideways")  # type: ignore[arg-type]
    with pytest.raises(MupscaleError, match="are for a wider model"):
        hf.upscale(tmp_path / "llama", tmp_path / "other", layers=3, noise=1.0)
    with pytest.raises(MupscaleError, match="are for a wider model"):
        hf.inspect(tmp_path / "llama", layers=3, grow=Fresh())
    config = stored(tmp_path / "llama")
    (tmp_path / "llama" / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(MupscaleError, match=r"layers of .* were not found: its config says 3, but its files have 2"):
        hf.upscale(tmp_path / "llama", tmp_path / "other", layers=4)
    assert not (tmp_path / "other").exists()
    opt, _ = tiny("opt", do_layer_norm_before=False)
    build(opt).save_pretrained(tmp_path / "opt")  # type: ignore[operator]
    saved("wav2vec2", tmp_path / "wav2vec2", do_stable_layer_norm=False)
    for name in ("opt", "wav2vec2"):
        with pytest.raises(MupscaleError, match=f"layers of {name} cannot .*post-norm"):
            hf.upscale(tmp_path / name, tmp_path / "other", layers=4)
    weighted = {"architectures": ["WhisperForAudioClassification"], "use_weighted_layer_sum": True}
    whisper, _ = tiny("whisper", **weighted, classifier_proj_size=6)
    build(whisper).save_pretrained(tmp_path / "whisper")  # type: ignore[operator]
    with pytest.raises(MupscaleError, match=r"'layer_weights' of .* weighs the output of each layer"):
        hf.upscale(tmp_path / "whisper", tmp_path / "other", layers=4)


def test_inspection(tmp_path: Path) -> None:
    saved("gemma2", tmp_path / "small")
    shown = str(hf.inspect(tmp_path / "small", layers=5))
    assert "layers 2 → 5 (identity): the trained ones become layers 0, 2 of the large model" in shown
    assert re.search(r"post_attention_layernorm\.weight +3 +-1\n", shown)
    saved("llama", tmp_path / "llama")
    both = hf.inspect(tmp_path / "llama", layers=4, times=2, deepen="stack")
    assert both.steps[-1].plan.sources["model.layers.3.mlp.up_proj.weight"].name == "model.layers.1.mlp.up_proj.weight"
    assert "all layers again on top" in str(both)
    assert "--times 2" in str(hf.inspect(tmp_path / "llama", grow=Copies(0.3)))  # what noise is measured by is known
    hf.upscale(tmp_path / "llama", tmp_path / "deep", layers=3, verify=False)
    assert "grown before, to 3 layers (identity)" in str(hf.inspect(tmp_path / "deep"))
    assert open_source(tmp_path / "deep").config["num_hidden_layers"] == 3
