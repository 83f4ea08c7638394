"""The same on CUDA: exact continuation, fused and capturable optimizers, noise equal to the CPU's. `pytest -m gpu`"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mupscale as mu
from mupscale.models import GPT2, MLP
from zoo import ARCHITECTURES, TRAININGS, train_pair

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]
cross_entropy = torch.nn.functional.cross_entropy


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("training", ["SGD-momentum", "AdamW", "Adafactor", "RMSprop", "Muon-reference"])
@pytest.mark.parametrize("architecture", ["mlp", "gpt2-heads", "resnet18", "grouped-queries", "lstm"])
def test_dynamic_equivalence_on_cuda(architecture: str, training: str) -> None:
    with torch.device("cuda"):
        outcome = train_pair(ARCHITECTURES[architecture], TRAININGS[training], clip=0.5)
    assert outcome.difference <= 1e-9
    assert outcome.losses[-1] < 0.9 * outcome.losses[0]


@pytest.mark.parametrize("flags", [{"fused": True}, {"capturable": True}, {"foreach": True}])
def test_upscale_keeps_device_and_flags(flags: dict[str, Any]) -> None:
    family = mu.Family(lambda width: MLP(8, width, 3), base=16)
    model = family.init(32).cuda()
    optimizer = family.optimizer(model, torch.optim.AdamW, lr=1e-2, weight_decay=0.1, **flags)
    x, y = torch.randn(16, 8, device="cuda"), torch.randint(0, 3, (16,), device="cuda")

    def step(m: torch.nn.Module, o: torch.optim.Optimizer) -> torch.Tensor:
        o.zero_grad()
        output = m(x)
        cross_entropy(output, y).backward()
        o.step()
        return output.detach()

    for _ in range(5):
        step(model, optimizer)
    wide, wide_optimizer = family.upscale(model, optimizer, width=96)
    assert wide_optimizer is not None
    assert {p.device.type for p in wide.parameters()} == {"cuda"}
    for _ in range(10):
        torch.testing.assert_close(step(wide, wide_optimizer), step(model, optimizer), rtol=1e-3, atol=1e-4)
    steps = {s["step"].device.type for s in wide_optimizer.state.values()}
    assert steps == ({"cpu"} if "foreach" in flags else {"cuda"})


def test_noise_is_the_same_as_on_the_cpu() -> None:
    family = mu.Family(lambda heads: GPT2(32, 16, layers=1, heads=heads, head_dim=8), base=2)
    model = family.init(2, seed=1)
    on_cpu, _ = family.upscale(model, width=4, noise=0.5, seed=3)
    on_cuda, _ = family.upscale(model.cuda(), width=4, noise=0.5, seed=3)
    for ours, theirs in zip(on_cpu.parameters(), on_cuda.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs.cpu(), rtol=1e-6, atol=1e-7)


def test_signal_noise_on_cuda() -> None:
    family = mu.Family(lambda width: MLP(8, width, 3), base=16)
    model = family.init(512).cuda()
    noise = mu.SignalNoise(0.3)
    family.upscale(model, width=1024, noise=noise)
    assert noise.effective is not None
    assert all(value > 0 for value in noise.effective.std.values())  # type: ignore[union-attr]
