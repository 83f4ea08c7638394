"""The same on CUDA: exact continuation, fused and capturable optimizers, draws equal to the CPU's. `pytest -m gpu`"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mupscale as mu
from mupscale.models import GPT2, MLP, ResNet18
from toys import Toy
from weights import take_step
from zoo import ARCHITECTURES, TRAININGS, train_pair

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]
cross_entropy = torch.nn.functional.cross_entropy
DEVICE = "cuda"


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("training", ["SGD-momentum", "AdamW", "Adafactor", "RMSprop", "Muon"])
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
        output = m(x)
        take_step(o, cross_entropy(output, y))
        return output.detach()

    for _ in range(5):
        step(model, optimizer)
    wide, wide_optimizer = family.upscale(model, optimizer, width=96, exact=True)
    assert {p.device.type for p in wide.parameters()} == {"cuda"}
    for _ in range(10):
        torch.testing.assert_close(step(wide, wide_optimizer), step(model, optimizer), rtol=1e-3, atol=1e-4)
    steps = {s["step"].device.type for s in wide_optimizer.state.values()}
    assert steps == ({"cpu"} if "foreach" in flags else {"cuda"})


def small_gpts(**more: Any) -> mu.Family:
    return mu.Family(lambda heads: GPT2(32, 16, layers=2, heads=heads, head_dim=8, **more), base=2)


def trained(
    family: mu.Family, dtype: torch.dtype = torch.float32
) -> tuple[torch.nn.Module, torch.optim.Optimizer, torch.Tensor]:
    """A model on the device after a few steps, its optimizer and the tokens that it learns."""
    torch.manual_seed(0)
    tokens = torch.randint(0, 32, (8, 16)).to(DEVICE)
    model = family.init(2, seed=1).to(DEVICE, dtype)
    optimizer = family.optimizer(model, torch.optim.AdamW, lr=3e-3, weight_decay=0.1, fused=DEVICE == "cuda")
    for _ in range(5):
        step(model, optimizer, tokens)
    return model, optimizer, tokens


def step(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor, *, autocast: bool = False
) -> float:
    with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
        logits = model(tokens)
    return take_step(optimizer, cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten()))


def old_part(wide: torch.Tensor, entry: mu.Entry) -> torch.Tensor:
    return wide.cpu()[mu.index_of_old(entry.narrow, entry.axes)]


GROWTHS = {  # and the rounding that is allowed: of a mean that is summed in another order, and of a spectral norm
    "fresh": (mu.Fresh(), 0),
    "outgoing": (mu.Fresh(outgoing=0.0), 0),
    "lossless": (mu.Fresh(lossless=True), 1e-5),
    "noise": (mu.Copies(0.5), 1e-6),
    "signal noise": (mu.Copies(mu.SignalNoise(0.3)), 1e-4),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", GROWTHS)
def test_what_is_drawn_is_what_is_drawn_on_the_cpu(name: str, dtype: torch.dtype) -> None:
    """To the bit where nothing is summed, whatever the device."""
    (grow, rounding), family = GROWTHS[name], small_gpts()
    model, heads = family.init(2, seed=1).to(dtype), 3 if isinstance(grow, mu.Fresh) else 4
    on_cpu, _ = family.upscale(model, width=heads, grow=grow, seed=3)
    on_device, _ = family.upscale(model.to(DEVICE), width=heads, grow=grow, seed=3)
    rtol = 1e-2 if rounding and dtype == torch.bfloat16 else rounding
    for ours, theirs in zip(on_cpu.parameters(), on_device.parameters(), strict=True):
        assert theirs.device.type == DEVICE
        torch.testing.assert_close(ours, theirs.cpu(), rtol=rtol, atol=rounding and 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_old_weights_and_their_state_stay_on_the_device(dtype: torch.dtype) -> None:
    family = small_gpts()
    model, optimizer, tokens = trained(family, dtype)
    wide, wide_optimizer = family.upscale(model, optimizer, width=3, grow=mu.Fresh(), seed=3)
    plan, ours = family.widening(model, wide, grow=mu.Fresh()), dict(model.named_parameters())
    for name, p in wide.named_parameters():
        entry, state = plan.parameters[name], wide_optimizer.state[p]
        assert (p.device.type, p.dtype) == (DEVICE, dtype)
        assert entry.keep == 1
        assert torch.equal(old_part(p.detach(), entry), ours[name].detach().cpu())
        for key in ("exp_avg", "exp_avg_sq"):
            assert state[key].device.type == DEVICE
            assert torch.equal(old_part(state[key], entry), optimizer.state[ours[name]][key].cpu())
    losses = [step(wide, wide_optimizer, tokens) for _ in range(20)]
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.usefixtures("float64")
def test_lossless_growth_on_the_device_keeps_the_function() -> None:
    family = small_gpts()
    model, optimizer, tokens = trained(family, torch.float64)
    for module in model.modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.eps = 1e-30
    wide, _ = family.upscale(model, optimizer, width=3, grow=mu.Fresh(lossless=True))
    for module in wide.modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.eps = 1e-30
    torch.testing.assert_close(wide(tokens), model(tokens), rtol=1e-10, atol=1e-10)


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")  # torch.compile's advice
@pytest.mark.parametrize("autocast", [False, True])
def test_a_compiled_model_grows_by_fresh_units(autocast: bool) -> None:
    """Compiled before and after: the names have a prefix, and the losses are those of the plain model, in bf16 too."""
    losses = {}
    for compiled in (False, True):
        family = small_gpts()
        model, optimizer, tokens = trained(family)
        model = torch.compile(model) if compiled else model
        wide, wide_optimizer = family.upscale(model, optimizer, width=3, grow=mu.Fresh(), seed=3)
        wide = torch.compile(wide) if compiled else wide
        losses[compiled] = [step(wide, wide_optimizer, tokens, autocast=autocast) for _ in range(5)]
    assert losses[True] == pytest.approx(losses[False], rel=3e-2 if autocast else 1e-3)
    assert losses[True][-1] < losses[True][0]


def test_statistics_of_new_channels_on_the_device() -> None:
    family = mu.Family(lambda width: ResNet18(width, classes=3), base=4, init_at=4)
    model, batches = family.init(4).to(DEVICE), [torch.randn(8, 3, 8, 8).to(DEVICE) for _ in range(2)]
    wide, _ = family.upscale(model, width=6, grow=mu.Fresh())
    before = wide.get_buffer("bn1.running_mean").clone()
    mu.measure_statistics(wide, batches, family.widening(model, wide, grow=mu.Fresh()))
    after, old = wide.get_buffer("bn1.running_mean"), mu.index_of_old((4,), {0: mu.Axis(1.5)})[0]
    new = torch.ones(6, dtype=torch.bool)
    new[old] = False
    assert after.device.type == DEVICE
    assert torch.equal(after.cpu()[old], before.cpu()[old])
    assert bool((after.cpu()[new] != before.cpu()[new]).all())


def noisy(width: int) -> torch.nn.Module:
    """Noise on a latent that does not grow, which the device draws."""

    def forward(model: Any, x: torch.Tensor) -> torch.Tensor:
        latent = model.b(torch.tanh(model.a(x)))
        return model.c(latent + torch.randn_like(latent))

    return Toy(forward, a=torch.nn.Linear(5, width), b=torch.nn.Linear(width, 3), c=torch.nn.Linear(3, 2)).cuda()


@pytest.mark.parametrize("learn", [False, True])
def test_a_plan_by_running_draws_the_same_at_both_widths_and_leaves_the_device_as_it_was(learn: bool) -> None:
    narrow, wide = noisy(8), noisy(16)
    x, before = torch.randn(4, 5, device="cuda"), torch.cuda.get_rng_state()
    roles = {"a.weight": mu.Role(out=0, out_block=4), "a.bias": mu.Role(out=0, out_block=4)} if learn else None
    assert mu.plan(narrow, wide, inputs=x, roles=roles).checked
    assert torch.equal(before, torch.cuda.get_rng_state())


@pytest.mark.parametrize("flags", [{"fused": True}, {"capturable": True}, {"foreach": True}])
def test_a_state_is_loaded_into_its_own_optimizer_on_cuda(flags: dict[str, Any], tmp_path: Any) -> None:
    model = MLP(8, 16, 3).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **flags)
    take_step(optimizer, model(torch.randn(4, 8, device="cuda")).sum())
    path = mu.save(tmp_path / "file", model, optimizer)
    mu.load(path, model, torch.optim.AdamW(model.parameters(), lr=1e-2, **flags))
    with pytest.raises(mu.MupscaleError, match="another optimizer"):
        mu.load(path, model, torch.optim.SGD(model.parameters(), lr=1e-2))
