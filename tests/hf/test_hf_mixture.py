"""Dense checkpoints as mixtures of experts: the function stays, transformers loads them, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from hf_models import EAGER, build, inputs, outputs, randomised, tiny  # noqa: E402
from mupscale import hf  # noqa: E402
from mupscale.cli.command_table import main  # noqa: E402
from mupscale.planning import KeepDouble  # noqa: E402
from mupscale.system import MupscaleError  # noqa: E402

KINDS = {"llama": "MixtralForCausalLM", "mistral": "MixtralForCausalLM", "qwen3": "Qwen3MoeForCausalLM"}


def saved(name: str, folder: Path, **config: Any) -> Any:
    small, _ = tiny(name, **config)
    randomised(build(small)).double().save_pretrained(folder)  # type: ignore[operator]
    return small


@pytest.mark.quick("llama", "qwen3")
@pytest.mark.parametrize("name", KINDS)
def test_the_function_stays_and_experts_come_to_differ(name: str, tmp_path: Path) -> None:
    """In float64 to 1e-12; all experts are alike at the start, and after a step they and the routers have moved."""
    config = saved(name, tmp_path / "small")
    mixture = hf.add_experts(tmp_path / "small", tmp_path / "mixture", experts=4, active=2, progress=False)
    assert mixture.difference is not None
    assert mixture.difference < 1e-5
    kinds = (type(build(config)), getattr(transformers, KINDS[name]))
    with KeepDouble():
        small, experts = (
            kind.from_pretrained(tmp_path / folder, dtype=torch.float64, **EAGER).eval()
            for kind, folder in zip(kinds, ("small", "mixture"), strict=True)
        )
        for batch in inputs(config):
            before, after = outputs(small, batch)[0].detach(), outputs(experts, batch)[0].detach()
            assert float((before - after).abs().max()) < 1e-12 * (1 + float(before.abs().max()))
        optimizer = torch.optim.AdamW(experts.parameters(), lr=1e-2)
        (outputs(experts, inputs(config)[0])[0] - 1).square().mean().backward()
        optimizer.step()
    down = next(p for n, p in experts.named_parameters() if n.endswith("experts.down_proj"))
    assert not torch.equal(down[0], down[1])
    router = next(p for n, p in experts.named_parameters() if n.endswith(".gate.weight"))
    assert 0.005 < float(router.detach().std()) < 0.05


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:of 'mixtral' the batch does not show")  # a router of one active expert
def test_a_mixture_grows_in_width(tmp_path: Path) -> None:
    saved("llama", tmp_path / "small")
    hf.add_experts(tmp_path / "small", tmp_path / "mixture", experts=3, active=1, progress=False)
    hf.upscale(tmp_path / "mixture", tmp_path / "wide", times=2, progress=False, exact=True)


def test_the_command_and_what_it_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("jsonargparse")
    saved("llama", tmp_path / "small")
    saved("llama", tmp_path / "biased", mlp_bias=True)
    saved("gpt2", tmp_path / "gpt2")
    words = ["upscale", str(tmp_path / "small"), str(tmp_path / "out")]
    for more, sentence in (
        (["--experts", "1"], "1 experts with 2 active"),
        (["--experts", "4", "--active", "5"], "4 experts with 5"),
        (["--active", "2"], "add --experts N"),
        (["--experts", "4", "--times", "2"], "one after the other"),
        (["--experts", "4", "--layers", "4"], "one after the other"),
        (["--experts", "4", "--optimizer", "x.pt"], "not carried over to experts"),
    ):
        assert main([*words, *more]) in (1, 2)
        assert sentence in " ".join(capsys.readouterr().err.split())
    for name, sentence in (("gpt2", "not from gpt2"), ("biased", "'mlp_bias' in config.json")):
        with pytest.raises(MupscaleError, match=sentence):
            hf.add_experts(tmp_path / name, tmp_path / "out", experts=4)
    assert not (tmp_path / "out").exists()
    assert main([*words, "--experts", "3", "--active", "1"]) == 0
    assert "mixtral with 3 experts, 1 active; the same function" in " ".join(capsys.readouterr().out.split())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_local_experts"] == 3
    hf.upscale(tmp_path / "small", tmp_path / "wide-small", times=2, progress=False, verify=False, exact=True)
    with pytest.raises(MupscaleError, match="has grown before"):
        hf.add_experts(tmp_path / "wide-small", tmp_path / "other", experts=4)
