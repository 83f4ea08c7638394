"""Checkpoints with more layers: many architectures, per-layer settings, and what is refused."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import mupscale as mu
from hf_models import CONFIGS, EAGER, build, inputs, loss, outputs, randomised, tiny
from hf_trainer_runs import decayed
from mupscale import Copies, Fresh, hf
from mupscale.cli.command_table import main
from mupscale.hf.depths import deep_config, layer_origins
from mupscale.hf.miniatures import find_residual_writers
from mupscale.hf.record import Record
from mupscale.hf.source import open_source
from mupscale.hf.verifying import _compare_optimizer, relate
from mupscale.planning import KeepDouble, in_double
from mupscale.system import MupscaleError
from refusals import refuses
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
    return json.loads((folder / "config.json").read_text())


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
    stacked = hf.upscale(tmp_path / "small", tmp_path / "deep", layers=4, deepen="stack", shard_size="4kB")
    assert stacked.difference > 1e-3
    assert stacked.files > 1
    assert "copied layers move" in str(stacked)
    assert "copied layers move" in hf.verify(tmp_path / "small", tmp_path / "deep").verdict


@pytest.mark.slow
def test_a_first_layer_that_holds_less_is_not_copied(tmp_path: Path) -> None:
    """ModernBERT's has no norm, and a copy of it would lack one elsewhere; no message sends one on to the next."""
    saved("modernbert", tmp_path / "small")
    for how in ("stack", "interleaved"):
        with pytest.raises(MupscaleError, match=r"do not all hold the same .*attn_norm.weight'; take 'identity'"):
            hf.upscale(tmp_path / "small", tmp_path / "deep", layers=4, deepen=how)  # type: ignore[arg-type]
    hf.upscale(tmp_path / "small", tmp_path / "deep", layers=3)
    both = hf.upscale(tmp_path / "deep", tmp_path / "large", times=2, layers=5, exact=True)  # once more, and wider
    assert both.comparison.ok
    saved("modernbert", tmp_path / "one", num_hidden_layers=1)
    with pytest.raises(MupscaleError, match=r"nothing would be 'model.layers.1.attn_norm.weight'$"):
        hf.upscale(tmp_path / "one", tmp_path / "other", layers=2)


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
    refuses(r"layers 3 and the small one .* layers 2", hf.verify, tmp_path / "small", tmp_path / "deep")


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
    refuses("are for a wider model", hf.upscale, tmp_path / "llama", tmp_path / "other", layers=3, noise=1.0)
    refuses("are for a wider model", hf.inspect, tmp_path / "llama", layers=3, grow=Fresh())
    config = stored(tmp_path / "llama")
    (tmp_path / "llama" / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(MupscaleError, match=r"layers of .* were not found: its config says 3, but its files have 2"):
        hf.upscale(tmp_path / "llama", tmp_path / "other", layers=4)
    assert not (tmp_path / "other").exists()
    opt, _ = tiny("opt", do_layer_norm_before=False)
    build(opt).save_pretrained(tmp_path / "opt")  # type: ignore[operator]
    saved("wav2vec2", tmp_path / "wav2vec2", do_stable_layer_norm=False)
    for name in ("opt", "wav2vec2"):
        refuses(f"layers of {name} cannot .*post-norm", hf.upscale, tmp_path / name, tmp_path / "other", layers=4)
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


# --- More width and more layers in one go, in either order, with the optimizer; the command; the model card.
TOKENS = {"input_ids": torch.arange(14).view(2, 7) % 11}


def trained(name: str, folder: Path, trainer_groups: bool = False) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """A model and an optimizer that has taken two steps, saved."""
    config, _ = tiny(name)
    model = randomised(build(config))
    groups: Any = decayed(model) if trainer_groups else model.parameters()
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    batches = inputs(config)
    train(model, optimizer, batches)
    model.save_pretrained(folder)  # type: ignore[operator]
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    return model, optimizer, batches


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Any]) -> None:
    for batch in batches:
        optimizer.zero_grad()
        loss(model, batch).backward()
        optimizer.step()


def loaded(folder: Path, like: nn.Module) -> nn.Module:
    model: nn.Module = type(like).from_pretrained(folder, attn_implementation="eager")  # type: ignore[attr-defined]
    return model.eval()


@pytest.mark.quick("gpt2-identity", "mixtral-stack")
@pytest.mark.parametrize("how", ["identity", "stack"])
@pytest.mark.parametrize("name", ["gpt2", "mixtral"])
def test_the_optimizer_goes_on_as_in_memory(name: str, how: Any, tmp_path: Path) -> None:
    """The file's state and three steps of training are those of mu.upscale."""
    small, optimizer, batches = trained(name, tmp_path / "small", trainer_groups=name == "gpt2")
    file = tmp_path / "small" / "optimizer.pt"
    hf.upscale(tmp_path / "small", tmp_path / "deep", layers=3, deepen=how, optimizer=file, verify=False)
    deep = loaded(tmp_path / "deep", small)
    resumed = hf.resume_optimizer(tmp_path / "deep", deep, torch.optim.AdamW)
    other = loaded(tmp_path / "deep", small)
    grow: Any = mu.Identity() if how == "identity" else mu.Stack()
    plan = mu.plan_depth(small.eval(), other, grow=grow, inputs=batches[0])
    expected = mu.growth.grow_optimizer(optimizer, small, other, plan)
    theirs = dict(other.named_parameters())
    for parameter, p in deep.named_parameters():
        ours, state = resumed.state.get(p, {}), expected.state.get(theirs[parameter], {})
        assert ours.keys() == state.keys()
        assert all(torch.equal(torch.as_tensor(ours[key]), torch.as_tensor(state[key])) for key in state)
    for model, each in ((deep, resumed), (other, expected)):
        train(model, each, batches)
    torch.testing.assert_close(dict(deep.named_parameters()), theirs, rtol=1e-5, atol=1e-6)


def test_the_trainers_own_optimizer_takes_the_file(tmp_path: Path) -> None:
    """Two groups, with and without weight decay, stay two groups in the model's order."""
    small, _, _ = trained("gpt2", tmp_path / "small", trainer_groups=True)
    hf.upscale(tmp_path / "small", tmp_path / "deep", layers=3, optimizer=tmp_path / "small", verify=False)
    deep = loaded(tmp_path / "deep", small)
    optimizer = torch.optim.AdamW(decayed(deep), lr=1e-2)
    optimizer.load_state_dict(torch.load(tmp_path / "deep" / "optimizer.pt"))
    old = torch.load(tmp_path / "small" / "optimizer.pt")["state"]
    first = deep.get_parameter("transformer.h.0.attn.c_attn.weight")
    assert any(torch.equal(optimizer.state[first]["exp_avg"], state["exp_avg"]) for state in old.values())
    assert deep.get_parameter("transformer.h.2.attn.c_attn.weight") not in optimizer.state


def test_width_and_depth_in_one_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The function stays, the optimizer comes along, and record and card tell of both."""
    small, optimizer, _ = trained("llama", tmp_path / "small")
    words = ["upscale", str(tmp_path / "small"), str(tmp_path / "large"), "--times", "2", "--exact", "--layers", "5"]
    assert main([*words, "--optimizer-state", str(tmp_path / "small" / "optimizer.pt")]) == 0
    said = capsys.readouterr().out
    assert "kv 2 → 4) and 2 → 5 layers (identity)" in said.replace("\n", " ")
    assert "with copies (hidden 16 → 32" in said
    assert "equivalent" in said
    report = hf.verify(tmp_path / "small", tmp_path / "large", dtype="float64")
    assert report.ok
    assert [row.what for row in report.rows[:2]] == ["copied weights in the files", "new layers in the files"]
    assert report.rows[2].what == "optimizer.pt"
    assert report.rows[2].difference < 1e-7
    assert "Not compared" not in report.verdict
    assert max(row.difference for row in report.rows if "files" not in row.what) < 1e-12
    assert [(g.times.hidden, g.layers) for g in Record.load(tmp_path / "large").growths] == [(2, None), (1, 5)]
    card = (tmp_path / "large" / "README.md").read_text()
    assert "made wider and deeper" in card
    assert "layers 2 → 5" in card
    assert not list((tmp_path / "large").glob(".*"))
    large = loaded(tmp_path / "large", small)
    groups = hf.param_groups(tmp_path / "large", large, torch.optim.AdamW, lr=1.0)
    rates = {name: group["lr"] for group in groups for name, _ in group["params"]}
    assert rates["model.layers.1.mlp.up_proj.weight"] == rates["model.layers.0.mlp.up_proj.weight"] == 0.5
    resumed = hf.resume_optimizer(tmp_path / "large", large, torch.optim.AdamW)
    narrow = optimizer.state[small.get_parameter("model.norm.weight")]["exp_avg"]
    wide = resumed.state[large.get_parameter("model.norm.weight")]["exp_avg"]
    torch.testing.assert_close(wide, narrow.repeat_interleave(2) / 2)
    assert large.get_parameter("model.layers.1.mlp.up_proj.weight") not in resumed.state
    assert resumed.state[large.get_parameter("model.layers.2.mlp.up_proj.weight")]


@pytest.mark.slow
def test_either_order_and_once_more(tmp_path: Path) -> None:
    """Deeper then wider, wider then deeper: the function stays, and new layers have μP's spread at their width."""
    config, _ = tiny("llama", hidden_size=64, intermediate_size=64)
    randomised(build(config)).save_pretrained(tmp_path / "small")  # type: ignore[operator]
    hf.upscale(tmp_path / "small", tmp_path / "deep", layers=3, verify=False)
    hf.upscale(tmp_path / "deep", tmp_path / "deep-wide", times=4, verify=False, progress=False, exact=True)
    hf.upscale(tmp_path / "small", tmp_path / "wide", times=4, verify=False, progress=False, exact=True)
    hf.upscale(tmp_path / "wide", tmp_path / "wide-deep", layers=4, seed=1, verify=False)
    hf.upscale(tmp_path / "wide-deep", tmp_path / "more", layers=6, deepen="stack", verify=False)
    for small, large in (("small", "deep-wide"), ("small", "wide-deep"), ("wide-deep", "more")):
        report = hf.verify(tmp_path / small, tmp_path / large, dtype="float64")
        assert report.ok, (small, large)
        assert ("copied layers move" in report.verdict) == (large == "more")
    tensors = {}
    for folder, new in (("deep", 2), ("wide-deep", 1)):
        model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / folder)
        tensors[folder] = model.get_parameter(f"model.layers.{new}.mlp.up_proj.weight").detach()
    assert float(tensors["deep"].std()) == pytest.approx(0.02, rel=0.05)
    assert float(tensors["wide-deep"].std()) == pytest.approx(0.01, rel=0.05)


@pytest.mark.parametrize("lossless", [True, False])
def test_outputs_are_compared_also_where_fresh_units_and_layers_came_at_once(lossless: bool, tmp_path: Path) -> None:
    """With the norms' eps scaled, or the new units silenced; only new layers alone are said to keep the function."""
    config, _ = tiny("llama")
    randomised(build(config)).save_pretrained(tmp_path / "small")  # type: ignore[operator]
    asked: dict[str, Any] = {"times": 2, "layers": 3, "grow": mu.Fresh(lossless=lossless)}
    made = hf.upscale(tmp_path / "small", tmp_path / "large", **asked, progress=False)
    rows = {row.what: row for row in made.comparison.rows}
    row = rows["logits, eps scaled" if lossless else "logits, new units silent"]
    assert row.difference < row.tolerance == 1e-4
    assert ("lossless: logits move by" in made.comparison.verdict) == lossless
    told = str(hf.inspect(tmp_path / "small", **asked)) + (tmp_path / "large" / "README.md").read_text(encoding="utf-8")
    assert " ".join(told.split()).count("stream yet, so they change nothing at first") == 2
    assert "so the function stays the same" not in " ".join(told.split())


@pytest.mark.slow
def test_noise_fresh_units_and_dtypes(tmp_path: Path) -> None:
    trained("llama", tmp_path / "small")
    common: dict[str, Any] = {"layers": 3, "progress": False}
    noisy = hf.upscale(tmp_path / "small", tmp_path / "noisy", times=2, noise=0.1, **common)
    assert "noise moves logits" in str(noisy)
    fresh = hf.upscale(tmp_path / "small", tmp_path / "fresh", hidden=24, heads=6, kv=2, grow=mu.Fresh(), **common)
    assert "they move logits" in str(fresh)
    assert fresh.sizes["layers"] == (2, 3)
    half = hf.upscale(tmp_path / "small", tmp_path / "half", dtype="bfloat16", **common)
    assert half.comparison is not None
    assert {stored.dtype for stored in open_source(tmp_path / "half").tensors.values()} == {torch.bfloat16}
    alone = hf.upscale(tmp_path / "small", tmp_path / "alone", **common)
    assert alone.times.hidden == 1
    assert "2 → 3 layers" in str(alone)


def test_wrong_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained("gpt2", tmp_path / "small")
    small, out = str(tmp_path / "small"), str(tmp_path / "out")
    for words, sentence in (
        (["--layers", "2"], "A deeper model needs more than that"),
        (["--layers", "3", "--noise", "1"], "give a width as well (--times 2)"),
        (["--how", "stack"], "add --layers N"),
        (["--deepen", "stack"], "add --layers N"),
        (["--layers", "3", "--how", "stack", "--deepen", "identity"], "give one of them"),
        (["--layers", "3", "--deepen", "sideways"], "identity, stack or interleaved"),
        (["--layers", "3", "--optimizer-state", f"{small}/config.json"], "was not written by torch.save"),
        (["--layers", "3", "--optimizer-state", f"{small}/none.pt"], "no saved optimizer"),
    ):
        assert main(["upscale", small, out, *words]) in (1, 2)
        said = " ".join(capsys.readouterr().err.split())
        assert sentence in said, said
        assert "Traceback" not in said
    refuses(r"give a width as well \(times=2\)", hf.upscale, small, out, layers=3, noise=1.0)
    assert [file.name for file in tmp_path.iterdir()] == ["small"]
    assert main(["inspect", small, "--layers", "1"]) == 1
    assert main(["inspect", small, "--layers", "4", "--how", "interleaved"]) == 0
    assert "each behind its layer" in capsys.readouterr().out


def test_an_optimizer_of_another_model_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    trained("gpt2", tmp_path / "small")
    stranger = nn.Linear(3, 3)
    torch.save(torch.optim.AdamW(stranger.parameters()).state_dict(), tmp_path / "other.pt")
    with pytest.raises(MupscaleError, match="it belongs to a different model"):
        hf.upscale(tmp_path / "small", tmp_path / "deep", layers=3, optimizer=tmp_path / "other.pt")
    assert not (tmp_path / "deep").exists()


GROWTHS: dict[str, dict[str, Any]] = {
    "fresh": {"times": 2},
    "noise": {"times": 2, "noise": 0.5},
    "deeper": {"layers": 3},
    "wider and deeper": {"times": 2, "layers": 3, "deepen": "stack"},
    "experts": {"experts": 4},
    "several": {"times": 2, "exact": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", GROWTHS)
def test_verify_compares_a_saved_optimizer(name: str, tmp_path: Path) -> None:
    """Its state and its rates; a number that was changed is named, and seen without the small one's, too."""
    trained("llama", tmp_path / "small")
    told: dict[str, Any] = {"optimizer": tmp_path / "small", "verify": False, "progress": False}
    hf.upscale(tmp_path / "small", tmp_path / "large", **GROWTHS[name], **told)
    if name == "several":  # and then fresh units, and more layers
        for out, asked in (("wider", {"hidden": 48, "heads": 12, "kv": 6}), ("deeper", {"layers": 3})):
            told["optimizer"] = tmp_path / "large"
            hf.upscale(tmp_path / "large", tmp_path / out, **asked, **told)
            shutil.rmtree(tmp_path / "large")
            (tmp_path / out).rename(tmp_path / "large")
    file = tmp_path / "large" / "optimizer.pt"
    relation = relate(*(open_source(tmp_path / folder) for folder in ("small", "large")))

    def compared() -> tuple[float, str]:
        rows: list[Any] = []
        first = _compare_optimizer(relation, rows, notes)
        return (math.inf if not rows else rows[0].difference), str(first)

    notes: list[str] = []
    assert compared()[0] < 1e-7
    content = torch.load(file)
    content["param_groups"][0]["lr"] *= 1.01
    torch.save(content, file)
    assert compared()[0] == pytest.approx(0.01)
    content["param_groups"][0]["lr"] /= 1.01
    next(iter(content["state"].values()))["exp_avg"].view(-1)[0] += 1.0
    torch.save(content, file)
    assert "/exp_avg" in compared()[1]
    assert not notes
    (tmp_path / "small" / "optimizer.pt").unlink()
    assert compared()[0] == math.inf
    assert not notes


# --- Checkpoints as mixtures of experts: the function, the optimizer and training stay where they can; what is refused.
KINDS = {"llama": "MixtralForCausalLM", "mistral": "MixtralForCausalLM", "qwen3": "Qwen3MoeForCausalLM"}


def load(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, **EAGER).eval()


def steps(model: Any, optimizer: Any, config: Any, count: int) -> list[torch.Tensor]:
    """Logits before each of so many steps, and after the last."""
    seen = []
    for number in range(count + 1):
        optimizer.zero_grad()
        logits = outputs(model, inputs(config)[0])[0]
        seen.append(logits.detach())
        if number < count:
            (logits - 1).square().mean().backward()
            optimizer.step()
    return seen


def saved_trained(name: str, folder: Path, count: int = 2, **more: Any) -> tuple[Any, Any, Any]:
    """A trained checkpoint with its optimizer: config, model and optimizer, as they are loaded."""
    config, _ = tiny(name, **more)
    model = randomised(build(config)).double()
    made = [torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, weight_decay=0.1)]
    with KeepDouble():
        steps(model, made[0], config, count)
        model.save_pretrained(folder)
        torch.save(made[0].state_dict(), folder / "optimizer.pt")
        model = load(folder)
    made.append(torch.optim.AdamW(model.parameters(), lr=1e-2))
    made[1].load_state_dict(made[0].state_dict())
    return config, model, made[1]


def apart(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("name", ["llama", "qwen3", pytest.param("mistral", marks=pytest.mark.slow)])
def test_the_function_stays_and_the_optimizer_goes_along(name: str, tmp_path: Path) -> None:
    """Experts have the state of their layer, by the share of its gradient that they get; all then learn."""
    config, small, before = saved_trained(name, tmp_path / "small")
    asked = {"optimizer": tmp_path / "small" / "optimizer.pt", "progress": False}
    made = hf.upscale(tmp_path / "small", tmp_path / "mixture", experts=4, **asked)
    assert made.comparison is not None
    assert made.sizes["experts"] == (1, 4)
    with KeepDouble():
        mixture = load(tmp_path / "mixture")
        assert type(mixture).__name__ == KINDS[name]
        after = hf.resume_optimizer(tmp_path / "mixture", mixture, torch.optim.AdamW)
        ours, theirs = dict(small.named_parameters()), dict(mixture.named_parameters())
        path = "model.layers.0.mlp"
        gate, up, down = (before.state[ours[f"{path}.{part}_proj.weight"]] for part in ("gate", "up", "down"))
        both, last = (after.state[theirs[f"{path}.experts.{part}"]] for part in ("gate_up_proj", "down_proj"))
        for key, share in (("exp_avg", 4), ("exp_avg_sq", 16)):
            assert torch.equal(both[key][3], torch.cat([gate[key], up[key]]) / share)
            assert torch.equal(last[key][0], down[key] / share)
        groups = hf.param_groups(tmp_path / "mixture", mixture, torch.optim.AdamW, lr=1e-2, eps=1e-3)
        assert sorted({(group["lr"], group["eps"]) for group in groups}) == [(1e-2, 2.5e-4), (1e-2, 1e-3)]
        seen = steps(mixture, after, config, 1)
        assert apart(seen[:1], [outputs(small, inputs(config)[0])[0].detach()]) < 1e-12
    assert not torch.equal(theirs[f"{path}.experts.down_proj"][0], theirs[f"{path}.experts.down_proj"][1])
    card = (tmp_path / "mixture" / "README.md").read_text(encoding="utf-8")
    assert "made a mixture of experts with mupscale: experts 1 → 4" in card
    assert "optimizer.pt" in card
    assert f'transformers.{KINDS[name]}.from_pretrained("mixture")' in card
    with pytest.raises(MupscaleError, match=rf"'model\.layers\.0\.mlp\.gate_proj.weight'.* Load it as {KINDS[name]}"):
        hf.param_groups(tmp_path / "mixture", small, torch.optim.AdamW, lr=1e-2)


@pytest.mark.parametrize("times", [None, pytest.param(2, marks=pytest.mark.slow)])
def test_a_zero_router_trains_as_the_dense_model_does(times: int | None, tmp_path: Path) -> None:
    """--exact: with rates, moments and eps by the number of active experts; also where the width grows as well.

    The router stays frozen: rounding would break the ties between experts.
    """
    config, small, before = saved_trained("qwen3", tmp_path / "small")
    asked = {"optimizer": tmp_path / "small" / "optimizer.pt", "progress": False, "exact": True, "times": times}
    hf.upscale(tmp_path / "small", tmp_path / "mixture", experts=4, top_k=2, **asked)
    assert hf.verify(tmp_path / "small", tmp_path / "mixture", dtype="float64").ok
    with KeepDouble():
        mixture = load(tmp_path / "mixture")
        after = hf.resume_optimizer(tmp_path / "mixture", mixture, torch.optim.AdamW)
        for name, p in mixture.named_parameters():
            p.requires_grad_(not name.endswith(".mlp.gate.weight"))
        assert apart(steps(small, before, config, 3), steps(mixture, after, config, 3)) < 1e-10


@pytest.mark.slow
def test_more_experts_of_a_mixture(tmp_path: Path) -> None:
    """Each is copied, with its row of the router; with as many more active the function and training stay."""
    config, small, before = saved_trained("mixtral", tmp_path / "small", num_local_experts=2, num_experts_per_tok=1)
    asked = {"optimizer": tmp_path / "small" / "optimizer.pt", "progress": False}
    hf.upscale(tmp_path / "small", tmp_path / "more", experts=4, **asked)
    assert json.loads((tmp_path / "more" / "config.json").read_text())["num_experts_per_tok"] == 2
    with KeepDouble():
        more = load(tmp_path / "more")
        after = hf.resume_optimizer(tmp_path / "more", more, torch.optim.AdamW)
        assert apart(steps(small, before, config, 3), steps(more, after, config, 3)) < 1e-10
    made = hf.upscale(tmp_path / "small", tmp_path / "less", experts=4, top_k=3, progress=False)
    assert "copied experts move" in str(made)
    refuses("a multiple of its 2", hf.upscale, tmp_path / "small", tmp_path / "odd", experts=3)


@pytest.mark.slow
def test_a_mixture_grows_on(tmp_path: Path) -> None:
    """Rates count from the dense model on."""
    saved_trained("llama", tmp_path / "small")
    hf.upscale(tmp_path / "small", tmp_path / "mixture", experts=3, top_k=2, progress=False, verify=False)
    hf.upscale(tmp_path / "mixture", tmp_path / "wide", times=2, exact=True, progress=False, verify=False)
    hf.upscale(tmp_path / "wide", tmp_path / "deep", layers=3, progress=False, verify=False)
    assert hf.verify(tmp_path / "small", tmp_path / "deep").ok
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "deep")
    rules = hf.plan(tmp_path / "deep", model).rules
    expert, router = (rules[f"model.layers.2.mlp.{name}"] for name in ("experts.down_proj", "gate.weight"))
    assert (expert.out, expert.in_, expert.depth) == (2, 2, 3)
    assert (router.out, router.in_, router.depth) == (1, 2, 1)


@pytest.mark.slow
def test_wider_by_fresh_units_and_a_mixture_in_one_command(tmp_path: Path) -> None:
    """Router and experts have the rates of their width, and the optimizer fits the mixture."""
    saved_trained("qwen3", tmp_path / "small")
    asked = {"optimizer": tmp_path / "small" / "optimizer.pt", "progress": False, "dtype": "bfloat16"}
    made = hf.upscale(tmp_path / "small", tmp_path / "both", times=2, experts=4, **asked)
    assert "and 1 → 4 experts" in str(made)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "both")
    rules = hf.plan(tmp_path / "both", model).rules
    expert, router = (rules[f"model.layers.0.mlp.{name}"] for name in ("experts.gate_up_proj", "gate.weight"))
    assert (expert.out, expert.in_, expert.depth) == (2, 2, 4)
    assert (router.out, router.in_, router.depth) == (1, 2, 1)
    assert len(hf.resume_optimizer(tmp_path / "both", model, torch.optim.AdamW).state) > 20
    assert hf.verify(tmp_path / "small", tmp_path / "both").ok


@pytest.mark.slow
@pytest.mark.parametrize("exact", [True, False])
def test_a_mixture_wider_and_with_more_experts_in_one_command(exact: bool, tmp_path: Path) -> None:
    """Rows of routers are copied after they have grown; without noise or fresh units training stays."""
    config, small, before = saved_trained("mixtral", tmp_path / "small", num_local_experts=3, num_experts_per_tok=2)
    asked = {"optimizer": tmp_path / "small" / "optimizer.pt", "progress": False, "exact": exact}
    hf.upscale(tmp_path / "small", tmp_path / "both", times=2, experts=6, **asked)
    assert hf.verify(tmp_path / "small", tmp_path / "both", dtype="float64").ok
    with KeepDouble():
        both = load(tmp_path / "both")
        after = hf.resume_optimizer(tmp_path / "both", both, torch.optim.AdamW)
        router = both.get_parameter("model.layers.0.mlp.gate.weight")
        for rows in (router.detach(), after.state[router]["exp_avg"]):
            assert torch.equal(rows[::2], rows[1::2])
            assert not torch.equal(rows[0], rows[2])
        if exact:
            assert apart(steps(small, before, config, 3), steps(both, after, config, 3)) < 1e-10


def test_an_optimizer_that_keeps_less_than_a_number_for_each_weight_is_refused_at_once(tmp_path: Path) -> None:
    _, small, _ = saved_trained("llama", tmp_path / "small", 0)
    optimizer = torch.optim.Adafactor(small.parameters(), lr=1e-2)
    for p in small.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    with pytest.raises(MupscaleError, match="Start a new optimizer for the mixture"):
        hf.upscale(tmp_path / "small", tmp_path / "mixture", experts=4, optimizer=tmp_path / "optimizer.pt")
    assert not (tmp_path / "mixture").exists()


def test_verify_finds_a_changed_expert(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    saved_trained("llama", tmp_path / "small", 0)
    hf.upscale(tmp_path / "small", tmp_path / "mixture", experts=2, top_k=1, progress=False, verify=False)
    tensors = load_file(tmp_path / "mixture" / "model.safetensors")
    tensors["model.layers.1.block_sparse_moe.experts.1.w2.weight"][0, 0] += 1
    save_file(tensors, tmp_path / "mixture" / "model.safetensors", {"format": "pt"})
    told = hf.verify(tmp_path / "small", tmp_path / "mixture")
    assert not told.ok
    assert "model.layers.1.block_sparse_moe.experts.1.w2.weight" in str(told)


def test_the_command_and_what_it_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved_trained("llama", tmp_path / "small")
    saved_trained("llama", tmp_path / "biased", mlp_bias=True)
    saved_trained("gpt2", tmp_path / "gpt2")
    words = ["upscale", str(tmp_path / "small"), str(tmp_path / "out")]
    for more, sentence in (
        (["--experts", "1"], "give --experts 2 or more"),
        (["--experts", "4", "--top-k", "5"], "5 of 4 experts cannot be active"),
        (["--top-k", "2"], "give --experts 2 or more"),
        (["--experts", "4", "--layers", "4"], "make one, and then the other"),
        (["--experts", "4", "--noise", "0.1"], "Noise among experts is for models in memory"),
    ):
        assert main([*words, *more]) in (1, 2)
        assert sentence in " ".join(capsys.readouterr().err.split())
    for name, sentence in (("gpt2", "not from gpt2"), ("biased", "'mlp_bias' in config.json")):
        refuses(sentence, hf.upscale, tmp_path / name, tmp_path / "out", experts=4)
    assert not (tmp_path / "out").exists()
    assert main([*words, "--experts", "3", "--top-k", "1"]) == 0
    assert "parameters with 1 → 3 experts" in " ".join(capsys.readouterr().out.split())
    assert main(["verify", str(tmp_path / "small"), str(tmp_path / "out")]) == 0
