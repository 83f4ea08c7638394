"""Models of the `mup` package are planned, widened, verified and trained on as they are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mupscale as mu
from refusals import refuses
from slow_cases import with_slow

mup = pytest.importorskip("mup")

VOCAB, BASE, NARROW, WIDE = 11, 8, 16, 48
OPTIMIZERS = {"adam": mup.MuAdam, "adamw": mup.MuAdamW, "sgd": mup.MuSGD}


class MLP(nn.Module):
    def __init__(self, width: int, output_mult: float = 2.0) -> None:
        super().__init__()
        self.first, self.hidden = nn.Linear(5, width), nn.Linear(width, width)
        self.head = mup.MuReadout(width, 3, output_mult=output_mult)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.hidden(torch.tanh(self.first(x)))))


class Transformer(nn.Module):
    """One block, two heads whose head_dim grows, attention that scales as 1/head_dim, as mup wants it."""

    def __init__(self, width: int, *, shared: bool = True, final_norm: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.norm = nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.last = nn.LayerNorm(width) if final_norm else nn.Identity()
        make = mup.MuSharedReadout(self.embed.weight, bias=False) if shared else mup.MuReadout(width, VOCAB)
        self.head = make

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        y = self.norm(x)
        q, k, v = (f(y).unflatten(-1, (2, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))
        attention = torch.softmax(4 * q @ k.transpose(-1, -2) / q.shape[-1], -1)
        x = x + self.out((attention @ v).transpose(1, 2).flatten(2))
        return self.head(self.last(x + self.down(F.gelu(self.up(x)))))


def prepared(build, width: int, device: str = "cpu") -> nn.Module:
    """A model at a width with the base shapes of BASE."""
    shapes = mup.make_base_shapes(build(BASE), build(2 * BASE))
    with torch.device(device):
        return mup.set_base_shapes(build(width), shapes)


BUILDS = {
    "mlp": MLP,
    "readout": lambda width: Transformer(width, shared=False),
    "shared readout": Transformer,
    "shared readout after a norm": lambda width: Transformer(width, final_norm=True),
}


def batches(build, steps: int = 20) -> list[tuple[Tensor, Tensor]]:
    if build is MLP:
        return [(torch.randn(8, 5), torch.randint(3, (8,))) for _ in range(steps)]
    tokens = [torch.randint(VOCAB, (4, 7)) for _ in range(steps)]
    return [(t[:, :-1], t[:, 1:].flatten()) for t in tokens]


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, -2), batch[1])


def train(model: nn.Module, optimizer: torch.optim.Optimizer, data: list[tuple[Tensor, Tensor]]) -> list[float]:
    losses = []
    for batch in data:
        optimizer.zero_grad()
        value = loss(model, batch)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses


def optimizer_of(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    hyper = {"lr": 0.1, "momentum": 0.9} if kind == "sgd" else {"lr": 1e-2, "eps": 1e-4}
    return OPTIMIZERS[kind](model.parameters(), weight_decay=0.05, **hyper)


@pytest.mark.quick("readout-adamw", "shared readout after a norm-sgd", "mlp-sgd")
@pytest.mark.parametrize("kind", with_slow(OPTIMIZERS, ["adamw", "sgd"]))
@pytest.mark.parametrize("name", BUILDS)
def test_training_goes_on_as_the_narrow_model_would(name: str, kind: str, float64: None) -> None:
    build = BUILDS[name]
    narrow, wide = prepared(build, NARROW), prepared(build, WIDE, "meta")
    optimizer, data = optimizer_of(kind, narrow), batches(build, 30)
    train(narrow, optimizer, data[:10])
    plan = mu.plan(narrow, wide)
    wide, wide_optimizer = mu.upscale(narrow, wide, plan, optimizer, exact=True)
    report = mu.verify(narrow, wide, plan, data[10:], loss, optimizer=optimizer, steps=20)
    assert report.ok, str(report)
    small, large = train(narrow, optimizer, data[10:]), train(wide, wide_optimizer, data[10:])
    assert torch.allclose(torch.tensor(small), torch.tensor(large), rtol=1e-10, atol=0)
    assert max(small) - min(small) > 0.01


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("name", BUILDS)
def test_the_wide_rates_are_those_of_mups_own_optimizer(name: str, kind: str) -> None:
    build = BUILDS[name]
    narrow, wide = prepared(build, NARROW), prepared(build, WIDE, "meta")
    wide, grown = mu.upscale(narrow, wide, mu.plan(narrow, wide), optimizer_of(kind, narrow), exact=True)
    theirs = optimizer_of(kind, wide)
    settings = [{p: g for g in o.param_groups for p in g["params"]} for o in (grown, theirs)]
    exact = ("lr",) if kind == "adam" else ("lr", "weight_decay")  # MuAdam scales a coupled decay as a decoupled one
    for parameter in wide.parameters():
        for key in exact:
            assert settings[0][parameter][key] == pytest.approx(settings[1][parameter][key]), (key, parameter.shape)


@pytest.mark.parametrize("name", ["mlp", "readout"])
def test_a_readout_is_folded_by_its_growth_and_only_so_exact(name: str, float64: None) -> None:
    build = BUILDS[name]
    narrow, wide = prepared(build, NARROW), prepared(build, WIDE)
    assert mu.plan(narrow, wide).parameters["head.weight"].rule == mu.Rule(1, 3, 3)
    unfolded = mu.plan(narrow, wide, roles={"head.weight": mu.Role(out=0, in_=1)})
    mu.widen(narrow, wide, unfolded)
    report = mu.verify(narrow, wide, unfolded, batches(build), loss, steps=0)
    assert report.max_relative_difference > 0.1
    assert report.first.name == "head"


def test_a_shared_readout_needs_no_fold_in_a_norm() -> None:
    build = BUILDS["shared readout after a norm"]
    plan = mu.plan(prepared(build, NARROW), prepared(build, WIDE))
    assert {float(entry.fold) for entry in plan.parameters.values()} == {1.0}
    assert plan.parameters["embed.weight"].names == ("embed.weight", "head.weight")


def test_readouts_whose_multipliers_differ_still_agree(float64: None) -> None:
    """Another output_mult is one more constant in forward, which the weight takes back."""
    narrow, wide = prepared(MLP, NARROW), prepared(lambda width: MLP(width, output_mult=0.5), WIDE)
    plan = mu.plan(narrow, wide)
    assert plan.parameters["head.weight"].fold == pytest.approx(12)
    mu.widen(narrow, wide, plan)
    assert mu.verify(narrow, wide, plan, batches(MLP), loss, optimizer=torch.optim.AdamW, lr=1e-2, eps=1e-4).ok


def test_other_bases_leave_the_rest_to_the_norm(float64: None) -> None:
    """A shared readout that divides by more than the growth: the norm before it takes what is left."""
    build = BUILDS["shared readout after a norm"]
    narrow = prepared(build, NARROW)
    wide = mup.set_base_shapes(build(WIDE), mup.make_base_shapes(build(2 * BASE), build(4 * BASE)))
    plan = mu.plan(narrow, wide)
    assert plan.parameters["last.weight"].fold == 0.5
    mu.widen(narrow, wide, plan)
    assert mu.verify(narrow, wide, plan, batches(build), loss, optimizer=torch.optim.AdamW, lr=1e-2, eps=1e-4).ok


@pytest.mark.parametrize("name", ["mlp", "shared readout"])
@pytest.mark.parametrize("side", ["narrow", "wide"])
def test_without_base_shapes_the_error_says_what_to_call(name: str, side: str) -> None:
    build = BUILDS[name]
    narrow = build(NARROW) if side == "narrow" else prepared(build, NARROW)
    wide = build(WIDE) if side == "wide" else prepared(build, WIDE)
    refuses(rf"the {side} model has a Mu\w+ without base shapes.*set_base_shapes", mu.plan, narrow, wide)


@pytest.mark.parametrize("name", BUILDS)
def test_parameters_keep_their_base_shapes(name: str) -> None:
    build = BUILDS[name]
    narrow, wide = prepared(build, NARROW), prepared(build, WIDE, "meta")
    expected = {n: p.infshape for n, p in wide.named_parameters()}
    mu.widen(narrow, wide, mu.plan(narrow, wide))
    assert {n: p.infshape for n, p in wide.named_parameters()} == expected
    assert not any(p.is_meta for p in wide.parameters())
    assert expected["embed.weight" if name != "mlp" else "first.weight"].width_mult() == WIDE / BASE


@pytest.mark.quick("mlp-adam", "shared readout-sgd")
@pytest.mark.parametrize("kind", ["adam", "sgd"])
@pytest.mark.parametrize("name", ["mlp", "shared readout"])
def test_a_family_of_mup_models_has_mups_rates_and_upscales(name: str, kind: str, float64: None) -> None:
    """Where build sets the base shapes itself, μP by the family is μP by mup."""
    build = BUILDS[name]
    family = mu.Family(lambda width: prepared(build, width), base=BASE)
    model = family.init(NARROW)
    kinds = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}
    optimizer = family.optimizer(model, kinds[kind], lr=0.01)
    theirs = OPTIMIZERS[kind](model.parameters(), lr=0.01)
    rates = [{p: g["lr"] for g in o.param_groups for p in g["params"]} for o in (optimizer, theirs)]
    assert {p: pytest.approx(rate) for p, rate in rates[0].items()} == rates[1]
    data = batches(build)
    train(model, optimizer, data[:5])
    wide, wide_optimizer = family.upscale(model, optimizer, width=WIDE, exact=True)
    small, large = train(model, optimizer, data), train(wide, wide_optimizer, data)
    assert torch.allclose(torch.tensor(small), torch.tensor(large), rtol=1e-10, atol=0)


def test_a_family_whose_build_sets_no_base_shapes_is_refused() -> None:
    refuses("without base shapes", mu.Family(MLP, base=BASE).plan, WIDE)


@pytest.mark.parametrize("name", BUILDS)
def test_a_batch_plans_mups_models_as_their_modules_do(name: str) -> None:
    """Its layers look for what the package put on parameters, which copies for the runs keep."""
    build = BUILDS[name]
    narrow, wide, between = (prepared(build, width) for width in (NARROW, WIDE, NARROW + BASE))
    x = batches(build, 1)[0][0]
    plan = mu.plan(narrow, wide, inputs=x)
    assert plan.checked
    assert plan.parameters == mu.plan(narrow, wide).parameters
    units = {"fresh": lambda: prepared(build, NARROW), "inputs": x, "grow": mu.Fresh()}
    if name == "mlp":  # the others' heads are wider, which is for copies
        assert mu.plan(narrow, between, **units).tried_by == "silent units"
    assert mu.Family(lambda width: prepared(build, width), base=BASE, inputs=x).plan(WIDE).checked


@pytest.mark.parametrize("build", [MLP, Transformer])
def test_a_batch_without_base_shapes_is_told_in_mups_own_words(build) -> None:
    with pytest.raises(mu.MupscaleError, match=r"does not run on the batch \(AssertionError: .*set_base_shapes"):
        mu.plan(build(NARROW), build(WIDE), inputs=batches(build, 1)[0][0])
