"""More width and more layers in one go, in either order, with the optimizer; the command; the model card."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import mupscale as mu
from hf_models import build, inputs, loss, randomised, tiny
from mupscale import hf
from mupscale.cli.command_table import main
from mupscale.hf.record import Record
from mupscale.hf.relation import relate
from mupscale.hf.source import open_source
from mupscale.hf.verifying import _compare_optimizer
from mupscale.system import MupscaleError

TOKENS = {"input_ids": torch.arange(14).view(2, 7) % 11}


def trained(name: str, folder: Path, trainer_groups: bool = False) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """A model and an optimizer that has taken two steps, saved."""
    config, _ = tiny(name)
    model = randomised(build(config))
    groups: Any = model.parameters()
    if trainer_groups:
        named = dict(model.named_parameters())
        groups = [{**g, "params": [named[n] for n in g["params"]]} for g in hf.decay_groups(model, 0.1)]
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
    named = dict(deep.named_parameters())
    groups: Any = [{**g, "params": [named[n] for n in g["params"]]} for g in hf.decay_groups(deep, 0.1)]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
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
    assert made.comparison is not None
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
    with pytest.raises(mu.MupscaleError, match=r"give a width as well \(times=2\)"):
        hf.upscale(small, out, layers=3, noise=1.0)
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
    """Its state and its rates; a number that was changed is named, and where there is nothing to compare it says so."""
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
    compared()
    assert notes == [f"Not compared: optimizer.pt, since {tmp_path / 'small'} holds none."]
