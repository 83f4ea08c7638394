"""A family: μP init measured from the author's own, groups at every width, exact upscaling in mid-training."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

import mupscale as mu
from mupscale.models import GPT2, MLP, ResNet18
from refusals import refuses
from toys import Toy
from weights import identical, take_step, unchanged

INIT_AT = 64
D_IN, D_OUT = 54, 7


class Net(nn.Module):
    """Input, hidden and readout layer with an optional initialisation of every matrix and norm gain."""

    def __init__(self, width: int, init: Callable[[Tensor], Any] | None = None, gain: Callable[..., Any] | None = None):
        super().__init__()
        self.input = nn.Linear(D_IN, width)
        self.norm = nn.LayerNorm(width)
        self.hidden = nn.Linear(width, width)
        self.readout = nn.Linear(width, D_OUT)
        for p in self.parameters():
            if p.dim() == 2 and init is not None:
                init(p)
        if gain is not None:
            gain(self.norm.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.readout(torch.relu(self.hidden(self.norm(self.input(x)))))


def gpt2(width: int, vocab: int = 11) -> GPT2:
    return GPT2(vocab, 16, layers=1, heads=2, head_dim=width // 2, attention_multiplier=2.0)


INITS: dict[str, Callable[[int], nn.Module]] = {
    "pytorch": Net,
    "xavier": lambda width: Net(width, nn.init.xavier_uniform_),
    "orthogonal": lambda width: Net(width, nn.init.orthogonal_),
    "gpt2": lambda width: Net(width, lambda p: nn.init.normal_(p, 0.0, 0.02)),
}


def author_std(build: Callable[[int], nn.Module], name: str, width: int = INIT_AT) -> float:
    """Std of the author's initialisation over many draws, measured here and not by the library."""
    values = []
    for seed in range(100, 120):
        torch.manual_seed(seed)
        values.append(build(width).get_parameter(name).detach().double().flatten())
    return float(torch.cat(values).std())


def std(model: nn.Module, name: str) -> float:
    return float(model.get_parameter(name).detach().double().std())


def batches(dtype: torch.dtype = torch.float32, count: int = 4, d_in: int = D_IN) -> list[tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(1)
    return [
        (torch.randn(16, d_in, generator=g, dtype=dtype), torch.randint(D_OUT, (16,), generator=g))
        for _ in range(count)
    ]


def step(model: nn.Module, opt: Optimizer, batch: tuple[Tensor, Tensor]) -> Tensor:
    out: Tensor = model(batch[0])
    take_step(opt, F.cross_entropy(out, batch[1]))
    return out.detach()


def test_named_widths() -> None:
    """Heads are copied whole; sizes may grow alone, and an axis that does not grow today is a width all the same."""

    def build(d_model: int, heads: int) -> GPT2:
        return GPT2(11, 8, layers=1, heads=heads, head_dim=d_model // heads)

    family = mu.Family(build, base={"d_model": 16, "heads": 4})
    assert family.init_at == {"d_model": 64, "heads": 16}
    model = family.init({"d_model": 32, "heads": 8}, seed=0)
    entry = family.plan({"d_model": 32, "heads": 8}).parameters["h.0.attn.c_attn.weight"]
    assert (entry.rule.out, entry.rule.in_, entry.axes[0].block) == (2, 2, 4)
    wide, _ = family.upscale(model, width={"d_model": 64, "heads": 16}, exact=True)
    tokens = torch.randint(11, (2, 8))
    torch.testing.assert_close(wide(tokens), model(tokens))
    family = mu.Family(lambda first, second: MLP(5, [first, second], 3), base={"first": 8, "second": 8})
    for first, second in ((32, 8), (8, 16)):
        entry = family.plan({"first": first, "second": second}).parameters["layers.1.weight"]
        assert (entry.rule.out, entry.rule.in_) == (second / 8, first / 8)
        assert (entry.out, entry.in_) == ((0,), (1,))


def test_float_widths() -> None:
    family = mu.Family(lambda width: MLP(5, int(32 * width), 3), base=0.25)
    assert family.init_at == 0.25
    rule = family.plan(1.0).parameters["layers.1.weight"].rule
    assert (rule.out, rule.in_) == (4, 4)
    model, x = family.init(0.5, seed=3), torch.randn(2, 5)
    wide, _ = family.upscale(model, width=1.0, exact=True)
    torch.testing.assert_close(wide(x), model(x), rtol=1e-4, atol=1e-5)


# initialisation


@pytest.mark.parametrize("build", INITS.values(), ids=INITS)
def test_at_init_at_the_authors_init_is_taken_bit_for_bit(build: Callable[[int], nn.Module]) -> None:
    for base, init_at in ((16, None), (64, None), (128, 100)):
        family = mu.Family(build, base=base, init_at=init_at)
        torch.manual_seed(5)
        author = build(init_at or 64)
        assert identical(family.init(init_at or 64, seed=5), author)


@pytest.mark.quick("pytorch-32", "gpt2-256")
@pytest.mark.parametrize("width", [32, 256])
@pytest.mark.parametrize("build", INITS.values(), ids=INITS)
def test_init_std_follows_the_rule_at_other_widths(build: Callable[[int], nn.Module], width: int) -> None:
    model = mu.Family(build, base=16).init(width, seed=1)
    r = width / INIT_AT
    factors = {"input.weight": 1.0, "hidden.weight": r**-0.5, "readout.weight": 1 / r}
    for name, factor in factors.items():
        assert std(model, name) == pytest.approx(author_std(build, name) * factor, rel=0.03), name
    for name in ("input.bias", "hidden.bias"):
        assert std(model, name) == pytest.approx(author_std(build, name), rel=0.15), name
    assert torch.equal(model.get_parameter("norm.weight"), torch.ones(width))
    assert torch.equal(model.get_parameter("norm.bias"), torch.zeros(width))


@pytest.mark.parametrize("width", [16, 512])
def test_gains_around_one_keep_their_mean(width: int) -> None:
    family = mu.Family(lambda w: Net(w, gain=lambda p: nn.init.normal_(p, 1.0, 0.02)), base=16)
    gain = family.init(width, seed=0).get_parameter("norm.weight").detach()
    assert float(gain.mean()) == pytest.approx(1.0, abs=0.02)
    assert 0.013 < float(gain.std()) < 0.027


def test_deterministic_parameters_are_untouched() -> None:
    def build(width: int) -> nn.Module:
        table = torch.sin(torch.outer(torch.arange(9.0), torch.arange(float(width))))
        return Toy(None, table=nn.Parameter(table), linear=nn.Linear(width, width))

    model = mu.Family(build, base=16, roles={"table": mu.Role(out=1)}).init(128)
    assert torch.equal(model.get_parameter("table"), build(128).get_parameter("table"))


def test_tied_readout_halves_the_last_gain_where_the_width_doubles() -> None:
    """Constant parameters are multiplied by fold alone, and so is the std of random ones that only have an output."""
    family = mu.Family(lambda d: gpt2(d, vocab=50), base=16)
    for width in (16, 64, 256):
        model = family.init(width)
        assert torch.equal(model.get_parameter("ln_f.weight"), torch.full((width,), INIT_AT / width))
        assert torch.equal(model.get_parameter("h.0.ln_1.weight"), torch.ones(width))
        assert std(model, "wte.weight") == pytest.approx(0.02, rel=0.04)
        assert std(model, "h.0.mlp.c_fc.weight") == pytest.approx(0.02 * (width / INIT_AT) ** -0.5, rel=0.04)
        assert model.get_submodule("lm_head").weight is model.get_submodule("wte").weight


def test_convolutions_and_batchnorm() -> None:
    family = mu.Family(lambda w: ResNet18(w, classes=5), base=8, init_at=8)
    model = family.init(32)
    assert std(model, "conv1.weight") == pytest.approx(math.sqrt(2 / (8 * 9)), rel=0.1)
    assert std(model, "layer3.0.conv2.weight") == pytest.approx(math.sqrt(2 / (32 * 9)) / 2, rel=0.05)
    assert std(model, "fc.weight") == pytest.approx(math.sqrt(1 / (3 * 64)) / 4, rel=0.1)
    assert torch.equal(model.get_parameter("bn1.weight"), torch.ones(32))


@pytest.mark.quick("2")
@pytest.mark.parametrize("width", [1, 2, 3])
def test_tiny_tensors_are_rescaled_without_accidents(width: int) -> None:
    """Two entries that happen to be close must not be blown up to reach a spread about their mean."""
    family = mu.Family(lambda w: Net(w, lambda p: nn.init.normal_(p, 0.0, 0.02)), base=1)
    expected = 0.02 * math.sqrt(INIT_AT / width)
    for seed in range(30):
        hidden = family.init(width, seed).get_parameter("hidden.weight").detach()
        assert float(hidden.square().mean().sqrt()) == pytest.approx(expected, rel=0.03)


def test_base_one_and_the_papers_constants() -> None:
    default = mu.Family(lambda w: MLP(D_IN, w, D_OUT), base=1)
    assert default.init_at == 64
    assert default.init(1).layers[1].weight.shape == (1, 1)
    paper = mu.Family(lambda w: MLP(D_IN, w, D_OUT), base=1, init_at=100)
    assert std(paper.init(400), "layers.1.weight") == pytest.approx(1 / math.sqrt(3 * 100) / 2, rel=0.03)
    assert std(paper.init(400), "layers.3.weight") == pytest.approx(1 / math.sqrt(3 * 100) / 4, rel=0.03)
    rules = paper.plan(400).rules
    assert (rules["layers.1.weight"].out, rules["layers.1.weight"].in_) == (400, 400)
    groups = {g["params"][0][0]: g for g in paper.param_groups(paper.init(400), torch.optim.SGD, lr=0.1)}
    assert groups["layers.0.weight"]["lr"] == pytest.approx(0.1 * 400)
    assert groups["layers.1.weight"]["lr"] == pytest.approx(0.1)
    assert groups["layers.3.weight"]["lr"] == pytest.approx(0.1 / 400)


def test_same_seed_same_weights_and_nothing_else_is_drawn_from() -> None:
    """What is random and has no width is drawn as at `init_at`; no two members share memory."""
    family = mu.Family(Net, base=16)
    torch.manual_seed(7)
    reference, before = Net(INIT_AT), torch.get_rng_state()
    for width in (16, 256):
        assert torch.equal(family.init(width, seed=7).get_parameter("readout.bias"), reference.readout.bias)
    a, b, c = family.init(32, seed=0), family.init(32, seed=0), family.init(32, seed=1)
    family.upscale(a, width=64, noise=1.0)
    assert identical(a, b)
    for name, p in a.named_parameters():
        assert torch.equal(p, c.get_parameter(name)) == name.startswith("norm"), name
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(99)
    assert identical(mu.Family(Net, base=16).init(32, seed=0), a)
    with torch.no_grad():
        a.get_parameter("hidden.weight").zero_()
    assert b.get_parameter("hidden.weight").any()


@pytest.mark.parametrize("value", ["item", "numpy"])
def test_a_build_function_that_needs_values(value: str) -> None:
    """It cannot run on the meta device, so the model is built for real; the global generator stays as it is."""

    def build(width: int) -> nn.Module:
        n = torch.tensor([width])
        return MLP(D_IN, int(n.item() if value == "item" else n.numpy()[0]), D_OUT)

    before = torch.get_rng_state()
    family = mu.Family(build, base=16)
    model = family.init(32)
    opt = family.optimizer(model, torch.optim.SGD, lr=0.1)
    step(model, opt, batches()[0])
    wide, wide_opt = family.upscale(model, opt, width=64, exact=True)
    x = batches()[0][0]
    torch.testing.assert_close(wide(x), model(x))
    assert wide_opt is not None
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("kind", ["plain tensor", "constant", "of the width"])
def test_values_that_no_checkpoint_holds(kind: str) -> None:
    """Upscaling must look at the values that the wide model would compute for itself, on the meta device or not."""

    class Scaled(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.net = MLP(D_IN, width, D_OUT)
            value = torch.tensor(width**0.5 if kind == "of the width" else 2.0)
            if kind == "plain tensor":
                self.scale = value
            else:
                self.register_buffer("scale", value, persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x) * self.scale

    family = mu.Family(Scaled, base=16)
    model = family.init(16)
    if kind == "of the width":
        refuses(r"'scale' .* depends on the width and is not saved", family.upscale, model, width=32, exact=True)
    else:
        wide, _ = family.upscale(model, width=32, exact=True)
        x = batches()[0][0]
        torch.testing.assert_close(wide(x), model(x))


@pytest.mark.parametrize(
    ("build", "arguments", "message"),
    [
        (lambda w: MLP(5, 8, 3), {"base": 16}, "does build use its argument"),
        (lambda w: [MLP(5, w, 3)], {"base": 16}, "returned list for width 16, not an nn.Module"),
        (lambda w: MLP(5, w, 3), {"base": -16}, "base is a positive width"),
        (lambda w: MLP(5, w, 3), {"base": -16, "init_at": 16}, "base is a positive width"),
        (lambda w: MLP(5, w, 3), {"base": 16, "init_at": 0}, "init_at is a positive width"),
        (lambda w: MLP(5, w, 3), {"base": "16"}, "base= is '16', but must be a number"),
        (lambda w: MLP(5, w, 3), {"base": {}}, "base is a positive width"),
    ],
)
def test_what_is_no_family_is_refused(
    build: Callable[[int], nn.Module], arguments: dict[str, Any], message: str
) -> None:
    refuses(message, mu.Family, build, **arguments)


def two_sizes(width: int, ffn: int) -> nn.Module:
    """One residual block, of two sizes that show in the shapes."""

    def forward(model: Any, x: Tensor) -> Tensor:
        x = model.read(x)
        return model.head(x + model.down(model.up(x).relu()))

    parts = {"read": nn.Linear(5, width), "up": nn.Linear(width, ffn), "down": nn.Linear(ffn, width)}
    return Toy(forward, **parts, head=nn.Linear(width, 2))


def with_default(width: int, ffn: int = 32) -> nn.Module:
    return two_sizes(width, ffn)


@pytest.mark.parametrize("build", [two_sizes, with_default], ids=["needed", "default"])
@pytest.mark.parametrize("width", [32, {"width": 32}, {"wide": 32, "ffn": 64}], ids=["bare", "one", "misspelt"])
def test_a_width_that_does_not_name_all_sizes_is_refused(build: Callable[..., nn.Module], width: Any) -> None:
    """A default of the author's would be a size that stays as it is, without a word."""
    family = mu.Family(build, base={"width": 16, "ffn": 32})
    model = family.init({"width": 16, "ffn": 32})
    asked: list[Callable[[], object]] = [
        lambda: family.init(width),
        lambda: family.plan(width),
        lambda: family.upscale(model, width=width, exact=True),
        lambda: family.check_growth({"width": 16, "ffn": 32}, width),
    ]
    sentence = (
        f"the sizes of this family are width and ffn, but {width} does not name them all. Write "
        f"{{'width': 32, 'ffn': 64}}"
    )
    for ask in asked:
        refuses(f"^{re.escape(sentence)}$", ask)


def test_an_error_in_the_authors_code_is_shown() -> None:
    def build(width: int) -> nn.Module:
        raise ZeroDivisionError("the author's own")

    with pytest.raises(ZeroDivisionError, match="the author's own"):
        mu.Family(build, base=16)


# optimizers


def test_at_the_base_every_factor_is_one() -> None:
    family = mu.Family(gpt2, base=16)
    plan = family.plan(16)
    for name, rule in plan.rules.items():
        assert (rule.out, rule.in_, rule.fold) == (1, 1, 1), name
    (group,) = family.param_groups(family.init(16), torch.optim.AdamW, lr=0.1, weight_decay=0.2, eps=1e-3)
    assert (group["lr"], group["weight_decay"], group["eps"]) == (0.1, 0.2, 1e-3)
    assert (group["lr_factor"], group["weight_decay_factor"], group["eps_factor"]) == (1, 1, 1)


# upscaling


OPTIMIZERS: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 0.02, "weight_decay": 0.5, "eps": 1e-3}),
    "sgd": (torch.optim.SGD, {"lr": 0.3, "momentum": 0.9, "weight_decay": 0.02}),
}


@pytest.mark.parametrize(("optimizer", "hyper"), OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_upscaling_without_noise_goes_on_exactly(
    float64: None, optimizer: type[Optimizer], hyper: dict[str, Any]
) -> None:
    """Theorem 'Dynamic equivalence': mid-training, under a schedule whose initial_lr is carried along."""

    def decay(epoch: int) -> float:
        return 0.97**epoch

    family = mu.Family(Net, base=4, init_at=4)
    model = family.init(8)
    opt = family.optimizer(model, optimizer, **hyper)
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, decay)
    data = batches(torch.float64)
    for i in range(10):
        step(model, opt, data[i % 4])
        schedule.step()
    wide, wide_opt = family.upscale(model, opt, width=24, exact=True)
    for name, p in wide.named_parameters():
        group = next(g for g in wide_opt.param_groups if any(q is p for q in g["params"]))
        assert group["initial_lr"] == pytest.approx(hyper["lr"] * group["lr_factor"]), name
        assert group["lr"] == pytest.approx(hyper["lr"] * decay(10) * group["lr_factor"])
    wide_schedule = torch.optim.lr_scheduler.LambdaLR(wide_opt, decay, last_epoch=schedule.last_epoch - 1)
    losses = []
    for i in range(10):
        ours, theirs = step(model, opt, data[i % 4]), step(wide, wide_opt, data[i % 4])
        schedule.step()
        wide_schedule.step()
        assert float((ours - theirs).norm() / ours.norm()) < 1e-11, i
        losses.append(float(F.cross_entropy(ours, data[i % 4][1])))
    assert losses[-1] < 0.9 * losses[0]


def test_lr_replaces_the_rate_in_units_of_the_base() -> None:
    family = mu.Family(Net, base=4)
    model = family.init(8)
    opt = family.optimizer(model, torch.optim.AdamW, lr=0.02)
    torch.optim.lr_scheduler.StepLR(opt, 5)
    wide, wide_opt = family.upscale(model, opt, width=24, lr=5e-3, exact=True)
    expected = {
        id(p): g["lr"] for g in family.optimizer(wide, torch.optim.AdamW, lr=5e-3).param_groups for p in g["params"]
    }
    for group in wide_opt.param_groups:
        assert group.get("initial_lr", group["lr"]) == group["lr"]
        for p in group["params"]:
            assert group["lr"] == pytest.approx(expected[id(p)])
    assert {g["lr"] for g in opt.param_groups} == {0.02, 0.01}
    own = torch.optim.AdamW(model.parameters(), lr=0.02)  # not the family's, so that lr= is at the model's own width
    _, wide_opt = family.upscale(model, own, width=24, lr=6e-3, exact=True)
    assert sorted({g["lr"] for g in wide_opt.param_groups}) == pytest.approx([2e-3, 6e-3])


def test_the_wide_model_shares_no_memory_with_the_narrow_one() -> None:
    family = mu.Family(Net, base=4)
    model = family.init(8)
    opt = family.optimizer(model, torch.optim.AdamW, lr=0.02)
    step(model, opt, batches()[0])
    with unchanged(model, opt):
        noisy, noisy_opt = family.upscale(model, opt, width=24, noise=0.5, seed=1)
        for p in noisy.parameters():
            noisy_opt.state[p]["step"] += 5
            noisy_opt.state[p]["exp_avg"].fill_(1.0)
        step(noisy, noisy_opt, batches()[0])


def test_dtypes_frozen_parameters_and_modes_are_kept_one_by_one() -> None:
    family = mu.Family(lambda w: nn.Sequential(nn.Linear(3, w), nn.BatchNorm1d(w), nn.Linear(w, 2)), base=4)
    model = family.init(4).to(torch.bfloat16)
    model.get_submodule("1").double().eval()
    model.get_submodule("0").requires_grad_(False)
    optimizer = family.optimizer(model, torch.optim.SGD, lr=0.1, momentum=0.9)
    wide, _ = family.upscale(model, optimizer, width=8, noise=0.1)
    assert {n for n, p in wide.named_parameters() if p.dtype == torch.float64} == {"1.weight", "1.bias"}
    assert {n: b.dtype for n, b in wide.named_buffers()} == {n: b.dtype for n, b in model.named_buffers()}
    assert {n for n, p in wide.named_parameters() if not p.requires_grad} == {"0.weight", "0.bias"}
    assert [n for n, m in wide.named_modules() if not m.training] == ["1"]


@pytest.mark.parametrize("wrap", [nn.DataParallel, lambda m: torch.compile(m, backend="eager")], ids=["dp", "compile"])
def test_wrapped_models(wrap: Callable[[nn.Module], nn.Module]) -> None:
    family = mu.Family(Net, base=4)
    model = family.init(8)
    wrapped = wrap(model)
    opt = family.optimizer(wrapped, torch.optim.AdamW, lr=0.02)
    assert family.plan(wrapped) == family.plan(8)
    step(model, opt, batches()[0])
    wide, wide_opt = family.upscale(wrapped, opt, width=16, exact=True)
    plain, _ = family.upscale(model, opt, width=16, exact=True)
    assert type(wide) is Net
    assert identical(wide, plain)
    assert len(wide_opt.state) == len(list(model.parameters()))


@pytest.mark.parametrize("base", [16, {"width": 16}])
def test_a_plan_is_made_once_for_each_width(base: Any) -> None:
    """It is asked for at every step, to clip; that of a model is that of its width."""
    built = []

    def build(width: int) -> nn.Module:
        built.append(width)
        return MLP(3, width, 2)

    family = mu.Family(build, base)
    width = {"width": 48} if isinstance(base, dict) else 48
    first = family.plan(width)
    count = len(built)
    assert family.plan(width) is first
    assert len(built) == count
    assert family.plan(family.init(width)) == first


def test_the_default_of_init_at_counts_the_width_of_matrices() -> None:
    """Not heads: 64 of these would be a model of another size."""
    assert mu.Family(lambda heads: MLP(5, 16 * heads, 3), base={"heads": 2}).init_at == {"heads": 4}
    assert mu.Family(lambda heads: MLP(5, 64 * heads, 3), base=2).init_at == 2
    assert mu.Family(lambda width: MLP(5, width, 3), base=8).init_at == 64
    assert mu.Family(lambda width: MLP(5, width // 2, 3), base=8).init_at == 64


def block(heads: int, ffn: int, within: int | None = None) -> nn.Module:
    """Attention and a feed-forward layer, each with a size of its own."""

    def forward(model: Any, tokens: Tensor) -> Tensor:
        x = model.embed(tokens)
        x = x + model.attention(x, x, x, need_weights=False)[0]
        return model.out(x + model.down(torch.tanh(model.up(x))))

    d = 4 * heads
    attention = nn.MultiheadAttention(d, within or heads, batch_first=True)
    parts = {"embed": nn.Embedding(11, d), "out": nn.Linear(d, 11), "attention": attention}
    return Toy(forward, **parts, up=nn.Linear(d, ffn), down=nn.Linear(ffn, d))


def test_a_check_holds_for_the_sizes_that_grew_in_it() -> None:
    """Growing both sizes says nothing of growing one of them, which may cut heads in other places."""
    family = mu.Family(block, base={"heads": 2, "ffn": 8})
    tokens = torch.randint(0, 11, (2, 6))
    wide = {"heads": 4, "ffn": 16}
    assert not family.widening({"heads": 2, "ffn": 8}, wide).checked
    family.check(tokens, ["ffn"])
    assert family.widening({"heads": 2, "ffn": 8}, {"heads": 2, "ffn": 16}).checked
    assert not family.widening({"heads": 2, "ffn": 8}, wide).checked
    assert not family.widening({"heads": 2, "ffn": 8}, {"heads": 4, "ffn": 8}).checked
    model = family.init({"heads": 2, "ffn": 8})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        family.upscale(model, width={"heads": 2, "ffn": 16}, exact=True)
        with pytest.raises(mu.UncheckedPlan):
            family.upscale(model, width=wide, exact=True)
        family.upscale(block(2, 8), width={"heads": 2, "ffn": 16}, exact=True)  # built elsewhere, and alike
        assert family.width_of(block(2, 8, within=4)) is None  # with heads that no member has
        family.check(tokens)
        family.upscale(model, width=wide, exact=True)


def test_plans_of_a_family_say_what_was_tried() -> None:
    x, tried = torch.randn(4, 3), "copies tried on small members of the family: exact"
    with_batch, checked = (mu.Family(lambda width: MLP(3, width, 2), 16, inputs=inputs) for inputs in (x, None))
    assert "not tried yet" in str(checked.plan(32))
    checked.check(x)
    for family in (with_batch, checked):
        for plan in (family.plan(32), family.plan(family.init(32)), family.widening(16, 32)):
            assert str(plan).endswith(tried)
            assert mu.Plan.from_json(plan.to_json()).tried_by == "small members"
    family = mu.Family(block, base={"heads": 2, "ffn": 8}, inputs=torch.randint(0, 11, (2, 6)))
    for heads, ffn, is_tried in ((4, 16, True), (2, 8, True), (1, 4, True), (4, 8, False)):
        assert family.plan({"heads": heads, "ffn": ffn}).checked == is_tried


def test_spreads_are_known_where_a_parameter_is_a_single_number() -> None:
    """At a width of 1: one number is random, too, and no draw tells its spread."""

    def build(width: int) -> nn.Module:
        shapes = (5, width), (width, width), (width, 1)
        layers = [nn.Linear(a, b, bias=False) for a, b in shapes]
        for layer in layers:
            nn.init.normal_(layer.weight, std=0.5)
        return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])

    family = mu.Family(build, base=1, init_at=1)
    assert list(family.at(0).initial_std().values()) == pytest.approx([0.5] * 3, rel=0.25)
    spreads = [float(p.detach().square().mean().sqrt()) for p in family.init(256).parameters()]
    assert spreads == pytest.approx([0.5, 0.5 / 16, 0.5 / 256], rel=0.3)


def test_a_model_that_somebody_else_built_is_recognised_by_its_shapes() -> None:
    """So that a family that was tried does not warn of it; warnings are errors here."""
    x = torch.randn(4, 5)
    family = mu.Family(two_sizes, base={"width": 8, "ffn": 32}, inputs=x)
    model = two_sizes(16, 64)
    optimizer = family.optimizer(model, torch.optim.AdamW, lr=0.1)
    wide, _ = family.upscale(model, optimizer, width={"width": 24, "ffn": 96})
    assert wide.get_parameter("up.weight").shape == (96, 24)
    assert family.width_of(two_sizes(16, 33)) == mu.core.Width.of({"width": 16, "ffn": 33})


def test_a_size_that_is_rounded_is_refused_when_the_family_is_made() -> None:
    """And not in the middle of a run."""

    def build(width: int) -> nn.Module:
        return two_sizes(width, 32 * (8 * width // 3 // 32 + 1))

    match = r"\(192, 64\) → \(352, 128\) does not grow .* rounded up, build it as a"
    refuses(match, mu.Family, build, base=64, inputs=torch.randn(4, 5))


@pytest.mark.parametrize("grouped", [False, True])
def test_a_member_grown_to_the_base_is_resumed_and_clipped_without_a_word(tmp_path: Path, grouped: bool) -> None:
    """All factors are one there, up to rounding, and a new optimizer has fewer groups than the grown one."""
    x = torch.randn(8, D_IN)
    family = mu.Family(Net, base=49, inputs=x)
    small = family.init(3)

    def optimizer_of(model: nn.Module) -> Optimizer:
        parts = [[p for p in model.parameters() if (p.dim() > 1) is matrix] for matrix in (True, False)]
        groups = [{"params": part, "weight_decay": 0.1 * i} for i, part in enumerate(parts)]
        return family.optimizer(model, torch.optim.AdamW, lr=1e-3, groups=groups if grouped else None)

    def train(model: nn.Module, optimizer: Optimizer | None) -> None:
        for _ in range(4):
            optimizer.zero_grad()
            (1e3 * model(x)).square().mean().backward()
            mu.clip_grad_norm_(model, 1.0, optimizer)
            optimizer.step()

    model, optimizer = family.upscale(small, optimizer_of(small), width=49)
    train(model, optimizer)
    path = mu.save(tmp_path / "base", model, optimizer, family.plan(model))
    again = Net(49)
    resumed = optimizer_of(again)
    assert len(resumed.param_groups) < len(optimizer.param_groups)
    mu.load(path, again, resumed)
    train(model, optimizer)
    train(again, resumed)
    assert identical(model, again)
