"""What other code for μP and for widening gets wrong, each mistake a test."""

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.nn import functional as F

import mupscale as mu
from mupscale.growth.upscaling import grow_optimizer
from mupscale.models import GPT2, MLP

K = 4
TOKENS = torch.randint(11, (8, 6), generator=torch.Generator().manual_seed(3))
X = torch.randn(16, 5, generator=torch.Generator().manual_seed(4), dtype=torch.float64)


def gpt2(head_dim: int) -> GPT2:
    return GPT2(11, 6, layers=1, heads=2, head_dim=head_dim, attention_multiplier=1.0)


def mlp(width: int) -> MLP:
    return MLP(5, width, 3, activation="tanh")


def language(model: nn.Module, batch: Any = None) -> Tensor:
    return F.cross_entropy(model(TOKENS[:, :-1]).flatten(0, 1), TOKENS[:, 1:].flatten())


def regression(model: nn.Module, batch: Any = None) -> Tensor:
    return (model(X) - X[:, :3].sin()).square().mean()


def train(model: nn.Module, optimizer: optim.Optimizer, loss: Callable[..., Tensor], steps: int = 10) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def equal(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def factors(model: nn.Module, plan: mu.Plan) -> dict[str, float]:
    groups = mu.param_groups(model, plan, optim.AdamW, lr=1.0)
    return {name: group["lr"] for group in groups for name, _ in group["params"]}


# ------------------------------------------------------------------------------- metadata that does not stay


@pytest.fixture
def pair(float64: None) -> tuple[nn.Module, nn.Module, mu.Plan]:
    narrow, wide = gpt2(2), gpt2(2 * K)
    return narrow, wide, mu.plan(narrow, wide)


def test_metadata_lost_by_deepcopy(pair: Any) -> None:
    narrow, wide, plan = pair
    copied, copied_plan = copy.deepcopy(wide), copy.deepcopy(plan)
    assert factors(copied, copied_plan) == factors(wide, plan)
    assert len(set(factors(copied, plan).values())) > 1
    mu.widen(copy.deepcopy(narrow), copied, plan)
    torch.testing.assert_close(copied(TOKENS), narrow(TOKENS), rtol=1e-12, atol=1e-12)


def test_metadata_lost_by_to_empty(pair: Any) -> None:
    """A model that was sketched on the meta device, given memory by torch or by widen itself."""
    narrow, wide, plan = pair
    with torch.device("meta"):
        sketches = [gpt2(2 * K), gpt2(2 * K)]
    expected = weights(mu.widen(narrow, wide, plan))
    assert factors(sketches[0], plan) == factors(wide, plan)
    emptied = sketches[0].to_empty(device="cpu")
    emptied.lm_head.weight = emptied.wte.weight  # to_empty unties
    assert equal(weights(mu.widen(narrow, emptied, plan)), expected)
    assert equal(weights(mu.widen(narrow, sketches[1], plan)), expected)
    assert sketches[1].lm_head.weight is sketches[1].wte.weight


def test_metadata_lost_by_functional_call(pair: Any) -> None:
    """The weights that functional_call gets are plain tensors: nothing in forward asks them for their width."""
    narrow, wide, plan = pair
    mu.widen(narrow, wide, plan)
    tensors = {name: p.detach().clone().requires_grad_() for name, p in wide.named_parameters()}
    out = torch.func.functional_call(wide, tensors, (TOKENS,), tie_weights=True)
    torch.testing.assert_close(out, narrow(TOKENS), rtol=1e-12, atol=1e-12)
    rates = factors(wide, plan)
    optimizer = optim.SGD([{"params": [t], "lr": 0.1 * rates[name]} for name, t in tensors.items()])
    out.square().mean().backward()
    optimizer.step()
    moved = torch.func.functional_call(wide, tensors, (TOKENS,), tie_weights=True)
    assert not torch.equal(moved, out)


@pytest.mark.skipif(not dist.is_available(), reason="torch.distributed is not available")
def test_metadata_lost_by_fsdp2(pair: Any, tmp_path: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    narrow, wide, plan = pair
    expected, rates = weights(mu.widen(narrow, copy.deepcopy(wide), plan)), factors(wide, plan)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1)
    try:
        fully_shard(wide, mesh=init_device_mesh("cpu", (1,)))
        assert factors(wide, plan) == rates
        assert mu.plan(narrow, wide) == plan
        mu.widen(narrow, wide, plan)
        assert equal([p.full_tensor() for p in wide.parameters()], expected)
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
def test_compiled_models_failing_on_orig_mod(pair: Any) -> None:
    narrow, wide, plan = pair
    rates = factors(wide, plan)
    small, large = torch.compile(narrow, backend="eager"), torch.compile(wide, backend="eager")
    assert mu.plan(small, large) == plan == mu.plan(narrow, large)
    optimizer = optim.AdamW(small.named_parameters(), lr=0.01)
    assert all(name.startswith("_orig_mod.") for name in optimizer.param_groups[0]["param_names"])
    train(small, optimizer, language, 2)
    mu.widen(small.state_dict(), large, plan)
    grown = mu.make_optimizer(large, plan, optim.AdamW, lr=0.01)
    mu.widen_optimizer(optimizer.state_dict(), grown, plan)
    assert factors(large, plan) == rates
    train(small, optimizer, language, 2)
    train(large, grown, language, 2)
    assert mu.clip_grad_norm_(large, 1.0, plan).item() > 0
    torch.testing.assert_close(large(TOKENS), small(TOKENS), rtol=1e-10, atol=1e-10)


def test_weights_silently_rescaled_when_base_shapes_are_set_after_loading(tmp_path: Path) -> None:
    """A plan is read off shapes alone: made before or after weights are loaded, it is the same and touches none."""
    family = mu.Family(gpt2, base=2)
    model = family.init(8, seed=1)
    path = mu.save(tmp_path / "model.ckpt", model)
    loaded = gpt2(8)
    before = family.plan(loaded)
    mu.load(path, loaded)
    saved = weights(loaded)
    assert equal(saved, weights(model))
    after = family.plan(loaded)
    family.optimizer(loaded, optim.AdamW, lr=0.1)
    mu.plan(gpt2(4), loaded, fresh=gpt2(4))
    family.widening(loaded, 16)
    assert before == after == family.plan(8)
    assert equal(weights(loaded), saved)


# ------------------------------------------------------------------------------- optimizers


def test_an_lr_given_as_a_tensor_mutated_in_place() -> None:
    family = mu.Family(mlp, base=4)
    model, lr = family.init(16), torch.tensor(0.1)
    for optimizer in (optim.AdamW, optim.SGD):
        family.param_groups(model, optimizer, lr=lr)
        made = family.optimizer(model, optimizer, lr=lr, foreach=False)
        schedule = optim.lr_scheduler.ExponentialLR(made, 0.5)
        made.step()
        schedule.step()
        assert lr.item() == pytest.approx(0.1)
        for group in made.param_groups:
            assert float(group["lr"]) == pytest.approx(0.05 * group["lr_factor"])


def test_the_step_tensor_shared_with_the_wide_optimizer(float64: None) -> None:
    narrow, wide = mlp(4), mlp(4 * K)
    optimizer = optim.AdamW(narrow.named_parameters(), lr=0.01)
    train(narrow, optimizer, regression, 5)
    plan = mu.plan(narrow, wide)
    for source in (optimizer, optimizer.state_dict()):
        grown = mu.widen_optimizer(source, mu.make_optimizer(wide, plan, optim.AdamW, lr=0.01), plan)
        memory = {v.data_ptr() for state in optimizer.state.values() for v in state.values()}
        assert not memory & {v.data_ptr() for state in grown.state.values() for v in state.values()}
        train(wide, grown, regression, 2)
        assert {float(state["step"]) for state in optimizer.state.values()} == {5.0}
        assert {float(state["step"]) for state in grown.state.values()} == {7.0}


def test_the_step_tensor_cast_to_bf16_where_it_sticks() -> None:
    """In bf16, 256 + 1 is 256."""
    narrow, wide = mlp(4).bfloat16(), mlp(4 * K).bfloat16()
    optimizer = optim.AdamW(narrow.parameters(), lr=1e-3)
    x = X.bfloat16()
    narrow(x).square().mean().backward()
    optimizer.step()
    for state in optimizer.state.values():
        state["step"].fill_(300.0)
    plan = mu.plan(narrow, wide)
    _, grown = mu.upscale(narrow, wide, plan, optimizer, exact=True)
    assert grown is not None
    wide(x).square().mean().backward()
    grown.step()
    for state in grown.state.values():
        assert state["step"].dtype == torch.float32
        assert state["step"].item() == 301.0
        assert state["exp_avg"].dtype == torch.bfloat16


def after_twenty_steps(optimizer: type[optim.Optimizer], drop: tuple[str, ...] = (), **hyper: Any) -> float:
    """Relative output difference between the narrow model going on and the wide one; `drop`: left unscaled."""
    narrow, wide = mlp(4), mlp(4 * K)
    small = optimizer(narrow.parameters(), **hyper)
    train(narrow, small, regression, 10)
    plan = mu.plan(narrow, wide)
    mu.widen(narrow, wide, plan)
    large = grow_optimizer(small, narrow, wide, plan)
    for group in large.param_groups:
        group.update({name: hyper[name] for name in drop})
    started = regression(narrow).item()
    train(narrow, small, regression, 20)
    train(wide, large, regression, 20)
    assert regression(narrow).item() < 0.98 * started, "the model does not learn"
    return (wide(X) - narrow(X)).norm().item() / narrow(X).norm().item()


@pytest.mark.parametrize("optimizer", [optim.SGD, optim.Adam])
def test_coupled_weight_decay_not_scaled(optimizer: type[optim.Optimizer], float64: None) -> None:
    hyper = {"lr": 0.05, "weight_decay": 0.02}
    assert after_twenty_steps(optimizer, **hyper) <= 1e-10
    assert after_twenty_steps(optimizer, drop=("weight_decay",), **hyper) > 1e-3


@pytest.mark.parametrize("optimizer", [optim.Adam, optim.AdamW, optim.RMSprop])
def test_eps_not_scaled(optimizer: type[optim.Optimizer], float64: None) -> None:
    hyper = {"lr": 0.01, "eps": 1e-2}
    assert after_twenty_steps(optimizer, **hyper) <= 1e-10
    assert after_twenty_steps(optimizer, drop=("eps",), **hyper) > 1e-2


def test_unsupported_optimizers_accepted(float64: None) -> None:
    """Any optimizer whose scaling is not known is refused, and so is state that is not."""

    class Novel(optim.Optimizer):
        def __init__(self, params: Any, lr: float = 1e-3) -> None:
            super().__init__(params, {"lr": lr})

        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    self.state[p]["curvature"] = p.grad**2

    narrow, wide = mlp(4), mlp(4 * K)
    plan = mu.plan(narrow, wide)
    for refused in (Novel, optim.RAdam, optim.LBFGS):
        with pytest.raises(mu.MupscaleError, match=refused.__name__):
            mu.param_groups(wide, plan, refused, lr=0.1)
    mu.register_optimizer(Novel, degree=0, eps=())
    optimizer = Novel(narrow.parameters())
    train(narrow, optimizer, regression, 1)
    with pytest.raises(mu.MupscaleError, match="'curvature' is unknown"):
        mu.upscale(narrow, wide, plan, optimizer, exact=True)


def test_rmsprops_square_avg_scaled_as_a_first_moment(float64: None) -> None:
    narrow, wide = mlp(4), mlp(4 * K)
    plan = mu.plan(narrow, wide)
    optimizer = optim.RMSprop(narrow.parameters(), lr=0.01, centered=True, momentum=0.5)
    train(narrow, optimizer, regression, 3)
    _, grown = mu.upscale(narrow, wide, plan, optimizer, exact=True)
    assert grown is not None
    small, large = optimizer.state[narrow.layers[1].weight], grown.state[wide.layers[1].weight]
    for key, degree in (("square_avg", 2), ("grad_avg", 1), ("momentum_buffer", 0)):
        torch.testing.assert_close(large[key][::K, ::K], small[key] / K**degree, rtol=1e-14, atol=0)
    assert after_twenty_steps(optim.RMSprop, lr=0.01, centered=True, momentum=0.5) <= 1e-10


def test_clipping(pair: Any) -> None:
    narrow, wide, plan = pair
    optimizer = optim.SGD(narrow.parameters(), lr=0.5, momentum=0.9)
    train(narrow, optimizer, language)
    mu.widen(narrow, wide, plan)
    report = mu.verify(narrow, wide, plan, [None], language, optimizer=optimizer, steps=20, clip=0.05)
    assert report.ok, report
    wide_optimizer = grow_optimizer(optimizer, narrow, wide, plan)
    for model, opt in ((narrow, optimizer), (wide, wide_optimizer)):
        for _ in range(5):
            opt.zero_grad()
            language(model).backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            assert norm > 0.05, "nothing is clipped"
            opt.step()
    difference = (wide(TOKENS) - narrow(TOKENS)).norm().item() / narrow(TOKENS).norm().item()
    assert difference > 1e-3, "plain clipping would do"


# ------------------------------------------------------------------------------- weights


@pytest.mark.parametrize("k", [2, 8])
def test_injected_noise_divided_by_k(k: int, float64: None) -> None:
    """Level 1 is the std of a fresh μP initialisation at the wide width, however the narrow model came to be."""
    family = mu.Family(mlp, base=16)
    narrow = family.init(16, seed=0)
    still, _ = family.upscale(narrow, width=16 * k, exact=True)
    noisy, _ = family.upscale(narrow, width=16 * k, noise=1.0)
    fresh = family.init(16 * k, seed=1)
    for name in ("layers.1.weight", "layers.2.weight"):
        delta = noisy.get_parameter(name) - still.get_parameter(name)
        assert delta.std().item() == pytest.approx(fresh.get_parameter(name).std().item(), rel=0.1)
    theory = copy.deepcopy(still)
    mu.perturb(theory, family.widening(narrow, theory), mu.GaussianNoise(0.3, unit="theory"))
    delta = theory.layers[1].weight - still.layers[1].weight
    assert delta.std().item() == pytest.approx(0.3 / math.sqrt(16 * k), rel=0.1)


class Positions(nn.Module):
    """A learned table of positions with a leading axis of 1, as in ViT."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.positions = nn.Parameter(0.1 * torch.randn(1, 6, width))
        self.mix = nn.Linear(width, width)
        self.out = nn.Linear(width, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.out(torch.tanh(self.mix(self.embed(tokens) + self.positions)))
        return out


def test_parameters_of_shape_1_T_d_skipped_without_a_word(float64: None) -> None:
    narrow, wide = Positions(4), Positions(4 * K)
    plan = mu.plan(narrow, wide)
    assert plan.rules["positions"] == mu.Rule(out=K, in_=1)
    mu.widen(narrow, wide, plan)
    assert torch.equal(wide.positions, narrow.positions.repeat_interleave(K, 2))
    optimizer = optim.Adam(narrow.parameters(), lr=0.01, weight_decay=0.1, eps=1e-3)
    loss = lambda model, batch=None: model(TOKENS).square().mean()  # noqa: E731
    report = mu.verify(narrow, wide, plan, [None], loss, optimizer=optimizer, steps=20)
    assert report.ok, report
    family = mu.Family(Positions, base=4)
    assert family.plan(16).rules["positions"] == mu.Rule(out=4, in_=1)
    assert family.init(64).positions.std().item() == pytest.approx(0.1, rel=0.15)


class Decoder(nn.Module):
    """Input and output channels of the transposed convolution grow by different factors."""

    def __init__(self, channels: tuple[int, int]) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, channels[0], 1)
        self.up = nn.ConvTranspose2d(*channels, 2, stride=2)
        self.last = nn.Conv2d(channels[1], 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.tanh(self.up(torch.tanh(self.first(x)))))
        return out


def test_conv_transposes_fan_in_read_from_the_wrong_axis(float64: None) -> None:
    narrow, wide = Decoder((4, 3)), Decoder((4 * 2, 3 * 5))
    plan = mu.plan(narrow, wide)
    assert plan.rules["up.weight"] == mu.Rule(out=5, in_=2)
    assert plan["up.weight"].init == pytest.approx(2**-0.5)
    mu.widen(narrow, wide, plan)
    images = torch.randn(4, 2, 3, 3)
    loss = lambda model, batch=None: (model(images) - 1).square().mean()  # noqa: E731
    optimizer = optim.Adam(narrow.parameters(), lr=0.01, weight_decay=0.1, eps=1e-3)
    report = mu.verify(narrow, wide, plan, [None], loss, optimizer=optimizer, steps=20)
    assert report.ok, report
    noise = mu.perturb(copy.deepcopy(wide), plan, mu.GaussianNoise(1.0, unit="theory"))
    assert noise.of("up.weight") == 1.0
    before = wide.up.weight.detach().clone()
    mu.perturb(wide, plan, mu.GaussianNoise({"up.weight": 1.0}, unit="theory"))
    assert (wide.up.weight - before).std().item() == pytest.approx((8 * 4) ** -0.5, rel=0.15)  # 8 channels, 4 taps


def test_extra_layers_of_the_target_left_as_noise() -> None:
    narrow, wide = (MLP(5, width, 3, depth=depth) for width, depth in ((4, 3), (16, 5)))
    before = weights(wide)
    with pytest.raises(mu.MupscaleError, match=r"narrow model lacks the module 'layers\.3'.*depth"):
        mu.plan(narrow, wide)
    plan = mu.plan(narrow, MLP(5, 16, 3, depth=3))
    with pytest.raises(mu.MupscaleError, match=r"'layers\.3\.weight'"):
        mu.widen(narrow, wide, plan)
    with pytest.raises(mu.MupscaleError, match=r"'layers\.3\.weight'"):
        mu.widen(narrow.state_dict(), wide, plan)
    assert equal(weights(wide), before)


class FixedReadout(nn.Module):
    """A projection that is no parameter reads the hidden units."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a = nn.Linear(5, width)
        self.register_buffer("fixed", torch.randn(width, 3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.a(x)) @ self.get_buffer("fixed")


def test_a_fixed_projection_is_divided_as_a_trained_one_is() -> None:
    narrow, wide = FixedReadout(4).double(), FixedReadout(8).double()
    grown = mu.widen(narrow, wide, mu.plan(narrow, wide, inputs=X))
    assert torch.allclose(grown(X), narrow(X), rtol=1e-12)


class TiedBehindRoot(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed, self.norm, self.readout = (
            nn.Embedding(11, width),
            nn.LayerNorm(width),
            nn.Linear(width, 11, bias=False),
        )
        self.readout.weight = self.embed.weight


def test_beside_fresh_units_the_norm_makes_up_for_what_the_tied_embedding_keeps() -> None:
    root = mu.Role(out=1, fold=lambda out, in_: out**-0.5, keep=lambda out, in_: out**-0.5)  # a model times √width
    plan = mu.plan(TiedBehindRoot(8), TiedBehindRoot(32), roles={"embed.weight": root}, grow=mu.Fresh())
    kept = {name: float(entry.keep) for name, entry in plan.parameters.items()}
    assert kept == {"embed.weight": 0.5, "norm.weight": 2.0, "norm.bias": 2.0}
