"""Bad input gets one clear sentence, by the name of what is wrong, and changes nothing."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn, optim

import mupscale as mu
import weights
from mupscale.models import GPT2, MLP
from toys import Toy


@contextmanager
def refused(*parts: str, unchanged: tuple[Any, ...] = ()) -> Iterator[None]:
    """A MupscaleError in one sentence or two that has all these parts, after which nothing has changed."""
    with weights.unchanged(*unchanged), pytest.raises(mu.MupscaleError) as raised:
        yield
    message = str(raised.value)
    for part in parts:
        assert part in message, message
    assert "\n" not in message
    assert 20 < len(message) < 450


def mlp(width: int = 4, **more: Any) -> MLP:
    return MLP(5, width, 3, **more)


def gpt2(heads: int) -> GPT2:
    return GPT2(7, 4, layers=1, head_dim=2, heads=heads)


def normed(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(5, width), nn.BatchNorm1d(width), nn.Linear(width, 3))


def trained(model: nn.Module, cls: type[optim.Optimizer] = optim.AdamW, **hyper: Any) -> optim.Optimizer:
    optimizer = cls(model.parameters(), lr=0.01, **hyper)
    model(torch.randn(8, 5)).square().mean().backward()
    optimizer.step()
    return optimizer


@pytest.fixture
def ready() -> tuple[MLP, MLP, mu.Plan, optim.Optimizer, optim.Optimizer]:
    """A narrow and a wide model that both have trained, so that whatever is written over them shows."""
    narrow, wide = mlp(4), mlp(8)
    plan = mu.plan(narrow, wide, fresh=mlp)
    optimizer = trained(narrow)
    wide_optimizer = mu.make_optimizer(wide, plan, optim.AdamW, lr=0.01)
    wide(torch.randn(8, 5)).square().mean().backward()
    wide_optimizer.step()
    return narrow, wide, plan, optimizer, wide_optimizer


# ---------------------------------------------------------------------------------------------- models that do not fit

PAIRS: dict[str, tuple[Callable[[], tuple[nn.Module, nn.Module]], tuple[str, ...]]] = {
    "heads that do not divide": (lambda: (gpt2(2), gpt2(3)), ("(7, 4) → (7, 6)", "multiple")),
    "missing": (
        lambda: (mlp(4, bias=False), mlp(8)),
        ("lacks the parameter 'layers.0.bias' and 3 more", "only widths"),
    ),
    "deeper": (
        lambda: (mlp(4), mlp(8, depth=5)),
        ("lacks the module 'layers.4'", "class and depth; ", "example {'hidden'"),
    ),
    "one and the same": (lambda: (mlp(),) * 2, ("the same module", "Build a second")),
}


@pytest.mark.parametrize(("make", "parts"), PAIRS.values(), ids=PAIRS)
def test_models_that_do_not_fit(make: Callable[[], tuple[nn.Module, nn.Module]], parts: tuple[str, ...]) -> None:
    narrow, wide = make()
    with refused(*parts, unchanged=(narrow, wide)):
        mu.plan(narrow, wide)


def test_state_dicts_that_do_not_fit(ready: Any) -> None:
    narrow, wide, plan, *_ = ready
    state = narrow.state_dict()
    fewer = {name: tensor for name, tensor in state.items() if name != "layers.3.bias"}
    for given, parts in (
        (fewer, ("the state dict lacks 'layers.3.bias'",)),
        ({**state, "layers.4.weight": torch.zeros(3, 3)}, ("'layers.4.weight'", "does not have")),
        (mlp(2).state_dict(), ("'layers.0.weight'", "(2, 5)", "(4, 5)")),
    ):
        with refused(*parts, unchanged=(wide,)):
            mu.widen(given, wide, plan)
    narrow, wide = normed(4), normed(8)
    fewer = {name: tensor for name, tensor in narrow.state_dict().items() if name != "1.running_var"}
    with refused("lacks the buffer '1.running_var'", unchanged=(wide,)):
        mu.widen(fewer, wide, mu.plan(narrow, wide))


# ---------------------------------------------------------------------------------------------- optimizers


class Ours(optim.Adam):
    """One that nobody knows."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Registered(Ours):
    """One of whose state a part is known."""


def test_an_optimizer_that_cannot_follow(ready: Any) -> None:
    narrow, wide, plan, *_ = ready
    mu.register_optimizer(Registered, degree=0, decoupled="decoupled_weight_decay", state={"exp_avg": 1})
    for optimizer, parts in (
        (trained(narrow, Ours), ("unknown optimizer Ours", "mupscale.register_optimizer(Ours, degree=0")),
        (trained(narrow, optim.RAdam), ("RAdam cannot follow the width", "Use AdamW")),
        (trained(narrow, Registered), ("'layers.0.weight'", "'exp_avg_sq' is unknown", "state={'exp_avg_sq'")),
        (trained(mlp()), ("that is not the narrow model's",)),
    ):
        with refused(*parts, unchanged=(narrow, wide, optimizer)):
            mu.upscale(narrow, wide, plan, optimizer, exact=True)
    unknown, onto = trained(narrow, Ours), Ours(wide.named_parameters())
    with refused("unknown optimizer Ours", unchanged=(narrow, wide, unknown, onto)):
        mu.widen_optimizer(unknown, onto, plan)


# ---------------------------------------------------------------------------------------------- dtypes


def scaled(width: int, dtype: torch.dtype) -> nn.Module:
    """A layer whose weight is stored in any dtype."""
    stored = nn.Parameter(torch.ones(width).to(dtype), requires_grad=False)
    return Toy(None, first=nn.Linear(5, width), stored=stored)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.complex64, torch.float8_e4m3fn, torch.bool], ids=str)
def test_unsupported_dtypes(dtype: torch.dtype) -> None:
    remedy = "real and imaginary" if dtype.is_complex else "dequantise"
    for dtypes in ((dtype, dtype), (dtype, torch.float32), (torch.float32, dtype)):
        with refused("'stored'", str(dtype), "floating-point", remedy):
            mu.plan(scaled(4, dtypes[0]), scaled(8, dtypes[1]))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_unsupported_dtypes_after_the_plan(dtype: torch.dtype, ready: Any) -> None:
    narrow, wide, plan, *_ = ready
    bias = narrow.layers[3].bias.detach().to(dtype)
    with refused("'layers.3.bias'", str(dtype), unchanged=(wide,)):
        mu.widen({**narrow.state_dict(), "layers.3.bias": bias}, wide, plan)
    narrow.layers[3].bias = nn.Parameter(bias, requires_grad=False)
    with refused("'layers.3.bias'", str(dtype), unchanged=(wide,)):
        mu.widen(narrow, wide, plan)


@pytest.mark.filterwarnings("ignore")
def test_quantised_weights(ready: Any) -> None:
    """torch's dynamic quantisation packs weights away, where no list of parameters shows them."""
    narrow, wide, plan, *_ = ready
    state = {name: torch.quantize_per_tensor(value, 0.1, 0, torch.qint8) for name, value in narrow.state_dict().items()}
    with refused("'layers.0.weight'", "torch.qint8", "dequantise", unchanged=(wide,)):
        mu.widen(state, wide, plan)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            packed = [torch.ao.quantization.quantize_dynamic(one, {nn.Linear}, dtype=torch.qint8) for one in ready[:2]]
        except (AttributeError, RuntimeError) as error:
            pytest.skip(f"no quantised engine here: {error}")
    assert not list(packed[0].parameters())
    with refused("'layers.0' is a quantised Linear", "quantise the wide one"):
        mu.plan(*packed)
    with refused("lacks the parameter 'layers.0.weight'", unchanged=(wide,)):
        mu.widen(packed[0], wide, plan)


# ---------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_nan_in_the_source(value: float, ready: Any) -> None:
    narrow, wide, plan, optimizer, _ = ready
    with torch.no_grad():
        narrow.layers[3].weight[2, 1] = value  # the last of the weights, so that the others could have been written
        narrow.layers[3].weight[0, 0] = -value  # beside the opposite, the sum of both is NaN
    for call in (
        lambda: mu.upscale(narrow, wide, plan, optimizer, exact=True),
        lambda: mu.widen(narrow, wide, plan),
        lambda: mu.widen(narrow.state_dict(), wide, plan),
    ):
        with refused("'layers.3.weight'", "NaN or infinite", "before it diverged", unchanged=(narrow, wide, optimizer)):
            call()
    narrow.layers[3].weight.data[0, 0] = 0.0
    with refused("'layers.3.weight'", "NaN or infinite", unchanged=(wide,)):
        mu.widen(narrow, wide, plan)


def test_large_but_finite_weights_are_no_nan() -> None:
    """A sum that overflows does not make its terms infinite."""
    narrow, wide = mlp(4), mlp(8)
    with torch.no_grad():
        narrow.layers[1].weight.fill_(3e38)
    assert torch.isfinite(mu.widen(narrow, wide, mu.plan(narrow, wide)).layers[1].weight).all()


def test_nan_in_a_buffer_and_in_the_optimizers_state(ready: Any) -> None:
    narrow, wide = normed(4), normed(8)
    narrow[1].running_var[3] = float("nan")
    with refused("'1.running_var'", "NaN or infinite", unchanged=(wide,)):
        mu.widen(narrow, wide, mu.plan(narrow, wide))
    narrow, wide, plan, optimizer, wide_optimizer = ready
    optimizer.state[narrow.layers[3].bias]["exp_avg"][1] = float("nan")
    with refused("'layers.3.bias/exp_avg'", "NaN or infinite", unchanged=(wide, wide_optimizer)):
        mu.widen_optimizer(optimizer, wide_optimizer, plan, narrow=narrow)
    with refused("'layers.3.bias/exp_avg'", "NaN or infinite", unchanged=(wide,)):
        mu.upscale(narrow, wide, plan, optimizer, exact=True)


# ---------------------------------------------------------------------------------------------- plans


def test_a_plan_for_another_model(ready: Any) -> None:
    narrow, wide, _, optimizer, wide_optimizer = ready
    deeper = mu.plan(mlp(4, depth=5), mlp(8, depth=5), fresh=lambda: mlp(4, depth=5))
    wider = mu.plan(mlp(4), mlp(12), fresh=mlp)
    other = mu.plan(mlp(2), mlp(8), fresh=lambda: mlp(2))
    everything = (narrow, wide, optimizer, wide_optimizer)
    names = ("'layers.4.weight' and 1 more", "make the plan for this model")
    shapes = ("'layers.0.weight' has shape (8, 5)", "(12, 5)", "different model")
    batches = [torch.randn(2, 5)]
    calls: list[Callable[[mu.Plan], Any]] = [
        lambda bad: mu.widen(narrow, wide, bad),
        lambda bad: mu.perturb(wide, bad, 0.1),
        lambda bad: mu.param_groups(wide, bad, optim.AdamW),
        lambda bad: mu.clip_grad_norm_(wide, 1.0, bad),
        lambda bad: mu.upscale(narrow, wide, bad, optimizer, exact=True),
        lambda bad: mu.verify(narrow, wide, bad, batches, lambda model, x: model(x).mean()),
    ]
    for bad, parts in ((deeper, names), (wider, shapes)):
        for call in calls:
            with refused(*parts, unchanged=everything):
                call(bad)
    named = optim.AdamW(narrow.named_parameters())
    named.state.update(optimizer.state)
    onto = wide_optimizer
    shallow = mu.plan(mlp(4, depth=3), mlp(8, depth=3))
    refusals: list[tuple[Callable[[], Any], tuple[str, ...]]] = [
        (lambda: mu.widen(narrow, wide, other), ("'layers.0.weight' has shape (4, 5)", "(2, 5)")),
        (
            lambda: mu.widen_optimizer(optimizer, onto, other),
            ("which parameter is which in the narrow optimizer", "pass narrow="),
        ),
        (
            lambda: mu.widen_optimizer(named.state_dict(), onto, other),
            ("'layers.0.weight/exp_avg'", "(4, 5)", "(2, 5)"),
        ),
        (lambda: mu.widen_optimizer(named, onto, wider), ("'layers.0.weight' has shape (8, 5)", "(12, 5)")),
        (lambda: mu.widen_optimizer(optimizer, onto, shallow), ("'layers.3.weight'", "different model")),
    ]
    for refusal, parts in refusals:
        with refused(*parts, unchanged=everything):
            refusal()


def marked(width: int) -> Any:
    """A model with values that no state dict holds."""
    model = Toy(lambda m, x: m.b(m.a(x)) * m.scale, a=nn.Linear(5, width), b=nn.Linear(width, 3))
    model.register_buffer("scale", torch.full((3,), 2.0), persistent=False)
    return model


def test_values_that_a_wide_model_without_memory_cannot_have() -> None:
    narrow = marked(4)
    with torch.device("meta"):
        wide, with_plain = marked(8), marked(8)
        with_plain.shift = torch.ones(3)
    plan = mu.plan(narrow, wide)
    with refused("'scale'", "not in the state dict", "real device"):
        mu.widen(narrow.state_dict(), wide, plan)
    with refused("'shift' is a plain tensor", "real device"):
        mu.widen(narrow, with_plain, plan)
    mu.widen(narrow, wide, plan)
    x = torch.randn(2, 5)
    torch.testing.assert_close(wide(x), narrow(x))
