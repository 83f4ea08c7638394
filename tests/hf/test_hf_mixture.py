"""Checkpoints as mixtures of experts: the function, the optimizer and training stay where they can; what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from hf_models import EAGER, build, inputs, outputs, randomised, tiny
from mupscale import hf
from mupscale.cli.command_table import main
from mupscale.planning import KeepDouble
from mupscale.system import MupscaleError

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


def saved(name: str, folder: Path, count: int = 2, **more: Any) -> tuple[Any, Any, Any]:
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
    config, small, before = saved(name, tmp_path / "small")
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
    config, small, before = saved("qwen3", tmp_path / "small")
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
    config, small, before = saved("mixtral", tmp_path / "small", num_local_experts=2, num_experts_per_tok=1)
    asked = {"optimizer": tmp_path / "small" / "optimizer.pt", "progress": False}
    hf.upscale(tmp_path / "small", tmp_path / "more", experts=4, **asked)
    assert json.loads((tmp_path / "more" / "config.json").read_text())["num_experts_per_tok"] == 2
    with KeepDouble():
        more = load(tmp_path / "more")
        after = hf.resume_optimizer(tmp_path / "more", more, torch.optim.AdamW)
        assert apart(steps(small, before, config, 3), steps(more, after, config, 3)) < 1e-10
    made = hf.upscale(tmp_path / "small", tmp_path / "less", experts=4, top_k=3, progress=False)
    assert "copied experts move" in str(made)
    with pytest.raises(MupscaleError, match="a multiple of its 2"):
        hf.upscale(tmp_path / "small", tmp_path / "odd", experts=3)


@pytest.mark.slow
def test_a_mixture_grows_on(tmp_path: Path) -> None:
    """Rates count from the dense model on."""
    saved("llama", tmp_path / "small")
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
    saved("qwen3", tmp_path / "small")
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
    config, small, before = saved("mixtral", tmp_path / "small", num_local_experts=3, num_experts_per_tok=2)
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
    _, small, _ = saved("llama", tmp_path / "small", 0)
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

    saved("llama", tmp_path / "small", 0)
    hf.upscale(tmp_path / "small", tmp_path / "mixture", experts=2, top_k=1, progress=False, verify=False)
    tensors = load_file(tmp_path / "mixture" / "model.safetensors")
    tensors["model.layers.1.block_sparse_moe.experts.1.w2.weight"][0, 0] += 1
    save_file(tensors, tmp_path / "mixture" / "model.safetensors", {"format": "pt"})
    told = hf.verify(tmp_path / "small", tmp_path / "mixture")
    assert not told.ok
    assert "model.layers.1.block_sparse_moe.experts.1.w2.weight" in str(told)


def test_the_command_and_what_it_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved("llama", tmp_path / "small")
    saved("llama", tmp_path / "biased", mlp_bias=True)
    saved("gpt2", tmp_path / "gpt2")
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
        with pytest.raises(MupscaleError, match=sentence):
            hf.upscale(tmp_path / name, tmp_path / "out", experts=4)
    assert not (tmp_path / "out").exists()
    assert main([*words, "--experts", "3", "--top-k", "1"]) == 0
    assert "parameters with 1 → 3 experts" in " ".join(capsys.readouterr().out.split())
    assert main(["verify", str(tmp_path / "small"), str(tmp_path / "out")]) == 0
