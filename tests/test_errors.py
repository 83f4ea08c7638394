"""Bad input gets one clear sentence, by the name of what is wrong, and changes nothing."""

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import mupscale as mu
from mupscale.models import GPT2, MLP


def snapshot(thing: Any) -> Any:
    """Everything that must not change, as plain copies."""
    if isinstance(thing, nn.Module):
        return {name: tensor.detach().clone() for name, tensor in thing.state_dict().items()}
    if isinstance(thing, optim.Optimizer):
        return copy.deepcopy(thing.state_dict())
    return thing.read_bytes() if isinstance(thing, Path) else copy.deepcopy(thing)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a.nan_to_num(7.5), b.nan_to_num(7.5))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@contextmanager
def refused(*parts: str, unchanged: tuple[Any, ...] = ()) -> Iterator[None]:
    """A MupscaleError in one sentence or two that has all these parts, after which nothing has changed."""
    before = [snapshot(thing) for thing in unchanged]
    with pytest.raises(mu.MupscaleError) as raised:
        yield
    message = str(raised.value)
    for part in parts:
        assert part in message, message
    assert "\n" not in message
    assert 20 < len(message) < 450
    assert all(same(snapshot(thing), saved) for thing, saved in zip(unchanged, before, strict=True)), "it changed"


def mlp(width: int = 4, **more: Any) -> MLP:
    return MLP(5, width, 3, **more)


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


def test_widths_that_do_not_divide() -> None:
    narrow, wide = mlp(4), mlp(6)
    with refused("'layers.0.weight'", "(4, 5) → (6, 5)", "dimension 0", "8, 12, 16", unchanged=(narrow, wide)):
        mu.plan(narrow, wide)


def test_heads_that_do_not_divide() -> None:
    sizes: dict[str, Any] = {"layers": 1, "head_dim": 2}
    narrow, wide = GPT2(7, 4, heads=2, **sizes), GPT2(7, 4, heads=3, **sizes)
    with refused("(7, 4) → (7, 6)", "multiple", unchanged=(narrow, wide)):
        mu.plan(narrow, wide)


def test_a_narrower_target() -> None:
    narrow, wide = mlp(8), mlp(4)
    with refused("'layers.0.weight'", "(8, 5) → (4, 5)", "narrower", "at least as wide", unchanged=(narrow, wide)):
        mu.plan(narrow, wide)


@pytest.mark.parametrize("swap", [False, True], ids=["extra", "missing"])
def test_missing_or_extra_parameters(swap: bool) -> None:
    narrow, wide = mlp(4, bias=False), mlp(8, bias=True)
    if swap:
        narrow, wide = mlp(4, bias=True), mlp(8, bias=False)
    with refused("lacks the parameter 'layers.0.bias' and 3 more", "only widths", unchanged=(narrow, wide)):
        mu.plan(narrow, wide)


def test_missing_parameters_of_a_state_dict(ready: Any) -> None:
    narrow, wide, plan, *_ = ready
    state = dict(narrow.state_dict())
    del state["layers.3.bias"]
    with refused("the state dict lacks 'layers.3.bias'", unchanged=(wide,)):
        mu.widen(state, wide, plan)


def test_extra_parameters_of_a_state_dict(ready: Any) -> None:
    narrow, wide, plan, *_ = ready
    state = {**narrow.state_dict(), "layers.4.weight": torch.zeros(3, 3)}
    with refused("'layers.4.weight'", "does not have", unchanged=(wide,)):
        mu.widen(state, wide, plan)


def test_missing_statistics_of_a_state_dict() -> None:
    def normed(width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(5, width), nn.BatchNorm1d(width), nn.Linear(width, 3))

    narrow, wide = normed(4), normed(8)
    plan = mu.plan(narrow, wide)
    state = {name: tensor for name, tensor in narrow.state_dict().items() if name != "1.running_var"}
    with refused("lacks the buffer '1.running_var'", unchanged=(wide,)):
        mu.widen(state, wide, plan)


def test_shapes_of_a_state_dict(ready: Any) -> None:
    _, wide, plan, *_ = ready
    with refused("'layers.0.weight'", "(2, 5)", "(4, 5)", unchanged=(wide,)):
        mu.widen(mlp(2).state_dict(), wide, plan)


@pytest.mark.parametrize("depths", [(4, 5), (5, 4)], ids=["deeper", "shallower"])
def test_different_depth(depths: tuple[int, int]) -> None:
    narrow, wide = (mlp(width, depth=depth) for width, depth in zip((4, 8), depths, strict=True))
    with refused("lacks the module 'layers.4'", "the same class and depth", unchanged=(narrow, wide)):
        mu.plan(narrow, wide)


def test_different_classes() -> None:
    narrow, wide = nn.Sequential(nn.Linear(5, 4), nn.ReLU()), nn.Sequential(nn.Linear(5, 8), nn.Tanh())
    with refused("'1' is a ReLU", "a Tanh in the wide", unchanged=(narrow, wide)):
        mu.plan(narrow, wide)


def test_one_and_the_same_model() -> None:
    narrow = mlp()
    with refused("the same module", "Build a second", unchanged=(narrow,)):
        mu.plan(narrow, narrow)


# ---------------------------------------------------------------------------------------------- optimizers


def test_an_unknown_optimizer(ready: Any) -> None:
    class Ours(optim.Adam):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    narrow, wide, plan, *_ = ready
    unknown = trained(narrow, Ours)
    line = "mupscale.register_optimizer(Ours, degree=m"
    with refused("unknown optimizer Ours", line, unchanged=(narrow, wide)):
        mu.param_groups(wide, plan, Ours, lr=0.1)
    with refused("unknown optimizer Ours", line, unchanged=(narrow, wide, unknown)):
        mu.upscale(narrow, wide, plan, unknown, exact=True)
    onto = Ours(wide.named_parameters())
    with refused("unknown optimizer Ours", line, unchanged=(narrow, wide, unknown, onto)):
        mu.widen_optimizer(unknown, onto, plan)


def test_an_optimizer_that_cannot_follow(ready: Any) -> None:
    narrow, wide, plan, *_ = ready
    optimizer = trained(narrow, optim.RAdam)
    with refused("RAdam cannot follow the width", "Use AdamW", unchanged=(narrow, wide, optimizer)):
        mu.upscale(narrow, wide, plan, optimizer, noise=0.1)


def test_state_that_is_not_known(ready: Any) -> None:
    class Ours(optim.Adam):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    mu.register_optimizer(Ours, degree=0, decoupled=False, state={"exp_avg": 1})
    narrow, wide, plan, *_ = ready
    optimizer = trained(narrow, Ours)
    with refused("'layers.0.weight'", "'exp_avg_sq' is unknown", "state={'exp_avg_sq'", unchanged=(wide, optimizer)):
        mu.upscale(narrow, wide, plan, optimizer, exact=True)


def test_an_optimizer_of_another_model(ready: Any) -> None:
    narrow, wide, plan, *_ = ready
    stranger = trained(mlp())
    with refused("that is not the narrow model's", unchanged=(narrow, wide, stranger)):
        mu.upscale(narrow, wide, plan, stranger, exact=True)


# ---------------------------------------------------------------------------------------------- dtypes


class Scaled(nn.Module):
    """A layer whose weight is stored in any dtype."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.first = nn.Linear(5, width)
        self.stored = nn.Parameter(torch.ones(width).to(dtype), requires_grad=False)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.complex64, torch.float8_e4m3fn, torch.bool], ids=str)
@pytest.mark.parametrize("sides", ["both", "narrow", "wide"])
def test_unsupported_dtypes(dtype: torch.dtype, sides: str) -> None:
    narrow = Scaled(4, torch.float32 if sides == "wide" else dtype)
    wide = Scaled(8, torch.float32 if sides == "narrow" else dtype)
    with refused("'stored'", str(dtype), "floating-point", "real and imaginary" if dtype.is_complex else "dequantise"):
        mu.plan(narrow, wide)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_unsupported_dtypes_after_the_plan(dtype: torch.dtype, ready: Any) -> None:
    narrow, wide, plan, *_ = ready
    state = narrow.state_dict()
    state["layers.3.bias"] = state["layers.3.bias"].to(dtype)
    with refused("'layers.3.bias'", str(dtype), unchanged=(wide,)):
        mu.widen(state, wide, plan)
    narrow.layers[3].bias = nn.Parameter(narrow.layers[3].bias.detach().to(dtype), requires_grad=False)
    with refused("'layers.3.bias'", str(dtype), unchanged=(wide,)):
        mu.widen(narrow, wide, plan)


@pytest.mark.filterwarnings("ignore")
def test_quantised_weights() -> None:
    """torch's dynamic quantisation packs weights away, where no list of parameters shows them."""
    try:
        narrow, wide = (
            torch.ao.quantization.quantize_dynamic(mlp(width), {nn.Linear}, dtype=torch.qint8) for width in (4, 8)
        )
    except (AttributeError, RuntimeError) as error:
        pytest.skip(f"no quantised engine here: {error}")
    assert not list(narrow.parameters())
    with refused("'layers.0' is a quantised Linear", "quantise the wide one"):
        mu.plan(narrow, wide)


@pytest.mark.filterwarnings("ignore")
def test_a_quantised_state_dict(ready: Any) -> None:
    narrow, wide, plan, *_ = ready
    state = {
        name: torch.quantize_per_tensor(tensor, 0.1, 0, torch.qint8) for name, tensor in narrow.state_dict().items()
    }
    with refused("'layers.0.weight'", "torch.qint8", "dequantise", unchanged=(wide,)):
        mu.widen(state, wide, plan)


def test_a_quantised_model_is_not_the_plans(ready: Any) -> None:
    narrow, wide, plan, *_ = ready
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            packed = torch.ao.quantization.quantize_dynamic(narrow, {nn.Linear}, dtype=torch.qint8)
        except (AttributeError, RuntimeError) as error:
            pytest.skip(f"no quantised engine here: {error}")
    with refused("lacks the parameter 'layers.0.weight'", unchanged=(wide,)):
        mu.widen(packed, wide, plan)


# ---------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("source", ["module", "state dict", "upscale"])
def test_nan_in_the_source(value: float, source: str, ready: Any) -> None:
    narrow, wide, plan, optimizer, _ = ready
    with torch.no_grad():
        narrow.layers[3].weight[2, 1] = value  # the last of the weights, so that the others could have been written
    with refused("'layers.3.weight'", "NaN or infinite", "before it diverged", unchanged=(narrow, wide, optimizer)):
        if source == "upscale":
            mu.upscale(narrow, wide, plan, optimizer, exact=True)
        else:
            mu.widen(narrow if source == "module" else narrow.state_dict(), wide, plan)


def test_opposite_infinities_in_the_source(ready: Any) -> None:
    narrow, wide, plan, *_ = ready
    with torch.no_grad():
        narrow.layers[2].weight[0, 0], narrow.layers[2].weight[1, 1] = float("inf"), float("-inf")
    with refused("'layers.2.weight'", "NaN or infinite", unchanged=(wide,)):
        mu.widen(narrow, wide, plan)


def test_large_but_finite_weights_are_no_nan() -> None:
    """A sum that overflows does not make its terms infinite."""
    narrow, wide = mlp(4), mlp(8)
    with torch.no_grad():
        narrow.layers[1].weight.fill_(3e38)
    assert torch.isfinite(mu.widen(narrow, wide, mu.plan(narrow, wide)).layers[1].weight).all()


def test_nan_in_a_buffer() -> None:
    def normed(width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(5, width), nn.BatchNorm1d(width), nn.Linear(width, 3))

    narrow, wide = normed(4), normed(8)
    plan = mu.plan(narrow, wide)
    narrow[1].running_var[3] = float("nan")
    with refused("'1.running_var'", "NaN or infinite", unchanged=(wide,)):
        mu.widen(narrow, wide, plan)


def test_nan_in_the_optimizers_state(ready: Any) -> None:
    narrow, wide, plan, optimizer, wide_optimizer = ready
    optimizer.state[narrow.layers[3].bias]["exp_avg"][1] = float("nan")
    with refused("'layers.3.bias/exp_avg'", "NaN or infinite", unchanged=(wide, wide_optimizer)):
        mu.widen_optimizer(optimizer, wide_optimizer, plan, narrow=narrow)
    with refused("'layers.3.bias/exp_avg'", "NaN or infinite", unchanged=(wide,)):
        mu.upscale(narrow, wide, plan, optimizer, exact=True)


@pytest.mark.parametrize("level", [-0.1, float("nan"), float("inf")])
def test_negative_noise(level: float, ready: Any) -> None:
    narrow, wide, plan, optimizer, _ = ready
    with refused("0 or more", str(level), unchanged=(wide,)):
        mu.perturb(wide, plan, level)
    with refused("0 or more", str(level), unchanged=(wide, optimizer)):
        mu.upscale(narrow, wide, plan, optimizer, noise=level)
    with refused("0 or more", str(level)):
        mu.GaussianNoise({"layers.0.weight": level})
    with refused("0 or more", str(level)):
        mu.SignalNoise(level)


def test_noise_without_a_unit(ready: Any) -> None:
    narrow, wide, *_ = ready
    plan = mu.plan(narrow, wide)
    with refused("fresh=build", 'unit="theory"', unchanged=(wide,)):
        mu.perturb(wide, plan, 0.1)
    with refused("fresh=build", 'unit="theory"'):
        mu.upscale(narrow, copy.deepcopy(wide).to("meta"), plan, noise=0.1)


def test_noise_for_another_model(ready: Any) -> None:
    narrow, wide, plan, *_ = ready
    noise = mu.GaussianNoise({"layers.0.weight": 0.1, "layers.7.weight": 0.1})
    with refused("'layers.7.weight'", "different model", unchanged=(wide,)):
        mu.perturb(wide, plan, noise)
    with refused("'layers.7.weight'", "different model", unchanged=(wide,)):
        mu.upscale(narrow, wide, plan, noise=noise)


# ---------------------------------------------------------------------------------------------- plans and files


def test_a_plan_for_another_model(ready: Any) -> None:
    narrow, wide, _, optimizer, wide_optimizer = ready
    deeper = mu.plan(mlp(4, depth=5), mlp(8, depth=5), fresh=lambda: mlp(4, depth=5))
    wider = mu.plan(mlp(4), mlp(12), fresh=mlp)
    other = mu.plan(mlp(2), mlp(8), fresh=lambda: mlp(2))
    everything = (narrow, wide, optimizer, wide_optimizer)
    names = ("'layers.4.weight' and 1 more", "make the plan for this model")
    shapes = ("'layers.0.weight' has shape (8, 5)", "(12, 5)", "different model")
    for bad, parts in ((deeper, names), (wider, shapes)):
        with refused(*parts, unchanged=everything):
            mu.widen(narrow, wide, bad)
        with refused(*parts, unchanged=everything):
            mu.perturb(wide, bad, 0.1)
        with refused(*parts, unchanged=everything):
            mu.param_groups(wide, bad, optim.AdamW)
        with refused(*parts, unchanged=everything):
            mu.clip_grad_norm_(wide, 1.0, bad)
        with refused(*parts, unchanged=everything):
            mu.upscale(narrow, wide, bad, optimizer, exact=True)
        with refused(*parts, unchanged=everything):
            mu.verify(narrow, wide, bad, [torch.randn(2, 5)], lambda model, x: model(x).mean())
    with refused("'layers.0.weight' has shape (4, 5)", "(2, 5)", unchanged=everything):
        mu.widen(narrow, wide, other)
    with refused("which parameter is which in the narrow optimizer", "pass narrow=", unchanged=everything):
        mu.widen_optimizer(optimizer, wide_optimizer, other)
    named = optim.AdamW(narrow.named_parameters())
    named.state.update(optimizer.state)
    with refused("'layers.0.weight/exp_avg'", "(4, 5)", "(2, 5)", unchanged=everything):
        mu.widen_optimizer(named.state_dict(), wide_optimizer, other)
    with refused("'layers.0.weight' has shape (8, 5)", "(12, 5)", unchanged=everything):
        mu.widen_optimizer(named, wide_optimizer, wider)
    shallow = mu.plan(mlp(4, depth=3), mlp(8, depth=3))
    with refused("'layers.3.weight'", "different model", unchanged=everything):
        mu.widen_optimizer(optimizer, wide_optimizer, shallow)


@pytest.mark.parametrize("keep", [0, 4, 8, 100, 0.5, 0.9, -1])
def test_a_truncated_checkpoint(keep: float, ready: Any, tmp_path: Path) -> None:
    _, wide, plan, _, optimizer = ready
    whole = mu.save(tmp_path / "whole.ckpt", mlp(8), mu.make_optimizer(mlp(8), plan, optim.AdamW), plan).read_bytes()
    length = int(keep * len(whole)) if isinstance(keep, float) else keep
    path = tmp_path / "truncated.ckpt"
    path.write_bytes(whole[:length])
    with refused("truncated.ckpt is not a whole checkpoint", "truncated", unchanged=(wide, optimizer, path)):
        mu.load(path, wide, optimizer)


def test_a_checkpoint_of_another_model(ready: Any, tmp_path: Path) -> None:
    narrow, wide, _, optimizer, wide_optimizer = ready
    path = mu.save(tmp_path / "narrow.ckpt", narrow, optimizer)
    with refused("'layers.0.weight' has shape (4, 5) there and (8, 5) here", unchanged=(wide, wide_optimizer, path)):
        mu.load(path, wide, wide_optimizer)
    deeper = mlp(4, depth=5)
    with refused("another model", "'layers.4.bias' is in one of the two only", unchanged=(deeper, path)):
        mu.load(path, deeper)
    again = mlp(4)
    with refused("of another optimizer", unchanged=(again, wide_optimizer, path)):
        mu.load(path, again, wide_optimizer)


def test_a_checkpoint_without_an_optimizer(ready: Any, tmp_path: Path) -> None:
    _, wide, _, _, wide_optimizer = ready
    path = mu.save(tmp_path / "weights.ckpt", mlp(8))
    with refused("holds no optimizer state", "load it without", unchanged=(wide, wide_optimizer, path)):
        mu.load(path, wide, wide_optimizer)


def test_no_checkpoint(ready: Any, tmp_path: Path) -> None:
    wide = ready[1]
    with refused("there is no checkpoint at", "nowhere.ckpt", unchanged=(wide,)):
        mu.load(tmp_path / "nowhere.ckpt", wide)
    with refused("there is no file at", "nowhere.pt"):
        mu.load_torch(tmp_path / "nowhere.pt")


@pytest.mark.parametrize("keep", [0, 10, 0.5, 0.99])
def test_a_truncated_torch_file(keep: float, ready: Any, tmp_path: Path) -> None:
    torch.save(ready[3].state_dict(), tmp_path / "whole.pt")
    whole = (tmp_path / "whole.pt").read_bytes()
    path = tmp_path / "optimizer.pt"
    path.write_bytes(whole[: int(keep * len(whole)) if isinstance(keep, float) else keep])
    with refused("optimizer.pt cannot be loaded", unchanged=(path,)):
        mu.load_torch(path)


def test_a_truncated_plan(ready: Any) -> None:
    text = ready[2].to_json()
    for broken in (text[: len(text) // 2], "", "{}", "[]", text.replace("mupscale.plan/2", "mupscale.plan/99")):
        with refused("not a plan written by mupscale"):
            mu.Plan.from_json(broken)


class Marked(nn.Module):
    """A model with values that no state dict holds."""

    def __init__(self, width: int, *, plain: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, width), nn.Linear(width, 3)
        self.register_buffer("scale", torch.full((3,), 2.0), persistent=False)
        if plain:
            self.shift = torch.ones(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scaled: torch.Tensor = self.b(self.a(x)) * self.scale
        return scaled


def test_values_that_a_wide_model_without_memory_cannot_have() -> None:
    narrow = Marked(4, plain=False)
    with torch.device("meta"):
        wide, with_plain = Marked(8, plain=False), Marked(8, plain=True)
    plan = mu.plan(narrow, wide)
    with refused("'scale'", "not in the state dict", "real device"):
        mu.widen(narrow.state_dict(), wide, plan)
    with refused("'shift' is a plain tensor", "real device"):
        mu.widen(narrow, with_plain, plan)
    mu.widen(narrow, wide, plan)
    x = torch.randn(2, 5)
    torch.testing.assert_close(wide(x), narrow(x))
