"""Two models at a third size: fresh units at widths between multiples, and plans of large models from miniatures."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mupscale as mu
from exactness import assert_exact
from mupscale.models import GPT2
from mupscale.planning import KeepDouble, comparing, in_double, tensors_in
from mupscale.planning.comparing import compare_copies
from mupscale.planning.making_plans import plan_and_look
from mupscale.planning.miniatures import Resizing, find_miniatures
from patterns import PATTERNS
from refusals import refuses
from toys import of, toy

X = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
TOKENS = torch.randint(0, 40, (2, 8), generator=torch.Generator().manual_seed(0))
BETWEEN = {
    "einsum heads grow, (model, dim, heads)",
    "bare weights, W @ x",
    "across units, divided by the root mean square",
    "image, flattened to channels and places",
}


def shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(t.shape) for name, t in model.state_dict().items()}


def gpt(width: int, layers: int = 4) -> nn.Module:
    return GPT2(vocab=600, context=16, width=width, layers=layers, head_dim=8).double()


@pytest.mark.parametrize("pattern", [one for one in PATTERNS if one.name in BETWEEN], ids=lambda one: one.name)
def test_between_multiples_a_run_shows_what_it_shows_at_a_multiple(pattern: Any) -> None:
    torch.manual_seed(0)
    batch = in_double(pattern.inputs())
    narrow, between, multiple = (pattern.build(k).double() for k in (2, 3, 4))
    plan, other = (mu.plan(narrow, wide, inputs=batch, grow=mu.Fresh()) for wide in (between, multiple))
    assert plan.checked
    for name, entry in plan.parameters.items():
        assert (entry.out, entry.in_) == (other[name].out, other[name].in_), name
        assert {d: axis.block for d, axis in entry.axes.items()} == {d: a.block for d, a in other[name].axes.items()}


@toy(lambda width, scale: of(a=(3, width), b=nn.Parameter(torch.randn(width, 2)), scale=scale))
def folded(m: Any, x: Tensor) -> Tensor:
    """A constant of the width in the forward pass, whose power a run at twice the size has to show."""
    return torch.tanh(m.a(x)) @ m.b * m.scale


def test_a_constant_is_kept_by_its_power_of_the_width_and_one_of_no_power_is_refused() -> None:
    narrow, wide = (folded(width, width**-0.5).double() for width in (8, 12))
    plan = mu.plan(narrow, wide, inputs=X, grow=mu.Fresh())
    assert float(plan["b"].keep) == pytest.approx(1.5**0.5, rel=1e-12)
    for name, p in wide.named_parameters():
        entry = plan[name]
        p.data.zero_()[mu.index_of_old(entry.narrow, entry.axes)] = narrow.get_parameter(name).data * float(entry.keep)
    assert torch.allclose(narrow(X), wide(X), rtol=0, atol=1e-10)
    wide.scale = -1.0
    refuses("follows no power of the width", mu.plan, narrow, wide, inputs=X, grow=mu.Fresh())


@toy(lambda width: of(a=(3, width), b=nn.Parameter(torch.randn(2 * width, 2)), n=width))
def switched(m: Any, x: Tensor) -> Tensor:
    """Units in another order at some widths, so that what holds at twice the size does not hold in between."""
    h = torch.tanh(m.a(x))
    parts = torch.stack([h, h.square()], -1 if m.n % 16 else -2)
    return parts.flatten(-2) @ m.b


def test_what_holds_at_twice_the_size_alone_is_refused() -> None:
    assert mu.plan(switched(16), switched(32), inputs=X.float(), grow=mu.Fresh()).checked
    with pytest.raises(mu.MupscaleError, match="That is from a run at twice the size"):
        mu.plan(switched(16), switched(24), inputs=X.float(), grow=mu.Fresh())


def test_a_copy_has_the_sizes_that_its_author_would_give_it_and_no_weights_of_the_model() -> None:
    narrow, wide = gpt(16), gpt(24)
    sizes = Resizing(narrow, wide)
    before = copy.deepcopy(narrow.state_dict())
    assert shapes(sizes.copy(narrow, Fraction(2))) == shapes(gpt(32))
    assert shapes(sizes.copy(wide, Fraction(1, 3), sizes.thinned())) == shapes(gpt(8, layers=2))
    assert all(torch.equal(before[name], value) for name, value in narrow.state_dict().items())
    refuses("cannot become 1/3 times as large", sizes.copy, narrow, Fraction(1, 3))


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every model counts as large."""
    monkeypatch.setattr(comparing, "LARGE", 0)


@pytest.mark.parametrize(("width", "grow"), [(64, mu.Copies()), (64, mu.Fresh()), (48, mu.Fresh())])
def test_a_miniature_shows_the_plan_of_the_models(width: int, grow: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    narrow, wide = gpt(32), gpt(width)
    whole = mu.plan(narrow, wide, inputs=TOKENS, grow=grow)
    monkeypatch.setattr(comparing, "LARGE", 0)
    monkeypatch.setattr("mupscale.planning.making_plans.plan_and_look", _of_miniatures(len(list(narrow.parameters()))))
    plan = mu.plan(narrow, wide, inputs=TOKENS, grow=grow)
    assert plan == whole
    assert (plan.checked, plan.tried_by, plan.past_norms) == (True, whole.tried_by, whole.past_norms)
    if grow.needs_multiples:
        assert_exact(narrow, wide, plan, TOKENS)


def _of_miniatures(most: int) -> Any:
    """The search, of models with fewer parameters alone."""

    def search(narrow: nn.Module, *others: Any) -> Any:
        assert len(list(narrow.parameters())) < most, "the models themselves were searched"
        return plan_and_look(narrow, *others)

    return search


def test_a_wrong_constant_or_order_at_full_size_is_named() -> None:
    torch.manual_seed(0)
    narrow, wide = gpt(16, layers=3), gpt(32, layers=3)
    plan = mu.plan(narrow, wide)
    assert not compare_copies(narrow, wide, plan, TOKENS).reason
    for name in ("h.2.mlp.c_proj.weight", "h.1.attn.c_attn.weight", "ln_f.weight", "wpe.weight"):
        entry = plan[name]
        off = {**plan.parameters, name: entry.with_constants(fold=entry.fold * 1.2)}
        assert compare_copies(narrow, wide, replace(plan, parameters=off), TOKENS).reason, name
    entry = plan["h.1.attn.c_attn.weight"]
    axes = {d: replace(axis, block=1) for d, axis in entry.axes.items()}
    off = {**plan.parameters, "h.1.attn.c_attn.weight": replace(entry, axes=axes)}
    assert "differs from the narrow one's" in compare_copies(narrow, wide, replace(plan, parameters=off), TOKENS).reason


@pytest.mark.parametrize("large", [0, comparing.LARGE], ids=["in blocks", "in float64"])
def test_a_comparison_leaves_no_model_in_memory(large: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its hooks would keep the models of a family's check until the process ends."""
    monkeypatch.setattr(comparing, "LARGE", large)
    narrow, wide = gpt(16), gpt(32)
    pairs, make = list[weakref.ref[Any]](), comparing.GenericPair

    def made(*args: Any, **kwargs: Any) -> Any:
        pair = make(*args, **kwargs)
        pairs.append(weakref.ref(pair))
        return pair

    monkeypatch.setattr(comparing, "GenericPair", made)
    assert not compare_copies(narrow, wide, mu.plan(narrow, wide), TOKENS).reason
    gc.collect()
    assert [pair() for pair in pairs] == [None]


@toy(lambda width, number, odd, flag: of(number=number, odd=odd, flag=flag, a=(width, 2 * width), b=(width, width)))
def block(m: Any, x: Tensor) -> Tensor:
    """A gate whose halves lie in pairs or one behind the other, by a flag or by nothing but its position."""
    y = m.a(x)
    in_pairs = m.flag or m.number == m.odd
    u, v = (y[..., ::2], y[..., 1::2]) if in_pairs else y.chunk(2, -1)
    return x + m.b(torch.tanh(u) * v)


class Blocks(nn.Module):
    def __init__(self, width: int, odd: int, flags: tuple[bool, ...]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, width), nn.Linear(width, 2)
        self.blocks = nn.ModuleList(block(width, number, odd, flag) for number, flag in enumerate(flags))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize(("odd", "flags"), [(2, (False,) * 5), (-1, (True, False) * 3)])
def test_kinds_of_blocks_are_told_apart_and_a_misleading_miniature_is_given_up(
    odd: int, flags: tuple[bool, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block that is another one by its position alone shows in no miniature, but in the check at full size."""
    torch.manual_seed(0)
    narrow, wide = (Blocks(width, odd, flags).double() for width in (8, 16))
    searched = list[int]()

    def search(narrow: nn.Module, *others: Any) -> Any:
        searched.append(len(narrow.blocks))  # type: ignore[arg-type]
        return plan_and_look(narrow, *others)

    monkeypatch.setattr("mupscale.planning.making_plans.plan_and_look", search)
    plan = mu.plan(narrow, wide, inputs=X)
    assert searched == ([2, 5] if odd == 2 else [4])
    assert_exact(narrow, wide, plan, X)


def test_lists_of_one_length_lose_the_same_blocks_and_names_are_found_again() -> None:
    narrow, wide = gpt(32), gpt(64)
    mini = next(find_miniatures(narrow, wide, TOKENS))
    tables = {"wte.weight": (64, 16), "lm_head.weight": (64, 16)}  # for tokens below 64, which the batch is changed to
    assert shapes(mini.narrow) == {**shapes(gpt(16, 2)), **tables}
    assert mini.originals["h.0.attn.c_attn.weight"] == [f"h.{i}.attn.c_attn.weight" for i in range(3)]
    assert mini.originals["h.1.attn.c_attn.weight"] == ["h.3.attn.c_attn.weight"]
    assert sorted(name for names in mini.originals.values() for name in names) == sorted(narrow.state_dict())


# --- KeepDouble: no cast in modelling code takes a float64 tensor to less precision, and nothing else changes.
NUMBERS = torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4) / 3
SINGLE = torch.zeros(1, dtype=torch.float32)

CASTS: dict[str, Callable[[Tensor], Tensor]] = {
    "float": lambda x: x.float(),
    "half": lambda x: x.half(),
    "bfloat16": lambda x: x.bfloat16(),
    "to": lambda x: x.to(torch.float32),
    "to dtype=": lambda x: x.to(dtype=torch.bfloat16),
    "to device and dtype": lambda x: x.to("cpu", torch.float32),
    "to another": lambda x: x.to(SINGLE),
    "type_as": lambda x: x.type_as(SINGLE),
    "type": lambda x: x.type(torch.float16),
    "type by name": lambda x: x.type("torch.FloatTensor"),
}
COMPUTED: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    **{name: (cast, lambda x: x) for name, cast in CASTS.items()},
    "softmax": (lambda x: F.softmax(x, dim=-1, dtype=torch.float32), lambda x: F.softmax(x, dim=-1)),
    "softmax input=": (lambda x: F.softmax(input=x, dim=-1, dtype=torch.float), lambda x: F.softmax(x, dim=-1)),
    "torch.softmax": (lambda x: torch.softmax(x, -1, torch.float32), lambda x: torch.softmax(x, -1)),
    "torch.softmax input=": (
        lambda x: torch.softmax(input=x, dim=-1, dtype=torch.float32),
        lambda x: torch.softmax(x, -1),
    ),
    "sum": (lambda x: x.sum(-1, dtype=torch.float32), lambda x: x.sum(-1)),
    "zeros_like": (lambda x: torch.zeros_like(x, dtype=torch.float32).add_(x), lambda x: x),
    "new_zeros": (lambda x: x.new_zeros(3, 4, dtype=torch.float16).add_(x), lambda x: x),
}


@pytest.mark.parametrize("name", COMPUTED)
def test_a_cast_keeps_every_bit_and_an_operation_computes_in_double(name: str) -> None:
    lowered, plain = COMPUTED[name]
    assert not torch.equal(lowered(NUMBERS).double(), plain(NUMBERS))
    with KeepDouble():
        kept = lowered(NUMBERS)
    assert kept.dtype == torch.float64
    assert torch.equal(kept, plain(NUMBERS))


def test_what_is_less_already_stays() -> None:
    with KeepDouble():
        assert torch.arange(3).float().dtype == torch.float32
        assert SINGLE.to(torch.bfloat16).dtype == torch.bfloat16
        assert SINGLE.to(NUMBERS).dtype == torch.float64
        assert torch.zeros(2, dtype=torch.float32).dtype == torch.float32
        assert NUMBERS.long().dtype == torch.int64
        assert NUMBERS.to(torch.complex64).is_complex()


@pytest.mark.parametrize("product", [torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, lambda a, b: a @ b])
def test_what_is_less_goes_along_in_a_product(product: Callable[[Tensor, Tensor], Tensor]) -> None:
    """As rotary frequencies, which a cast leaves in float64, and positions in float32 do in older transformers."""
    positions = torch.arange(8.0).view(2, 4)
    with KeepDouble():
        assert torch.equal(product(NUMBERS.float(), positions.T), NUMBERS @ positions.double().T)
        assert torch.equal(product(positions, NUMBERS.float().T), positions.double() @ NUMBERS.T)
        assert product(positions, positions.T).dtype == torch.float32
        assert torch.equal(F.linear(positions, NUMBERS), positions.double() @ NUMBERS.T)
        assert torch.einsum("ij,kj->ik", positions, NUMBERS).dtype == torch.float64


def test_a_view_of_the_bits_is_no_cast() -> None:
    with KeepDouble():
        assert torch.equal(NUMBERS.view(torch.float32), NUMBERS.clone().view(torch.float32))
        assert NUMBERS.view(torch.float32).shape == (3, 8)


def test_gradients_are_double_too() -> None:
    x = NUMBERS.clone().requires_grad_()
    with KeepDouble():
        (x.float() ** 2).sum().backward()
    assert torch.equal(x.grad, 2 * NUMBERS)


@pytest.mark.parametrize("enabled", [True, False])
def test_autocast_leaves_double_alone(enabled: bool) -> None:
    layer = nn.Linear(4, 5).double()
    with KeepDouble(), torch.autocast("cpu", torch.bfloat16, enabled=enabled):
        y = layer(NUMBERS)
        norm = F.layer_norm(y.float(), (5,))
    assert y.dtype == norm.dtype == torch.float64
    assert torch.equal(y, layer(NUMBERS))


def test_a_norm_of_transformers_computes_in_double() -> None:
    transformers = pytest.importorskip("transformers")
    norm = transformers.models.llama.modeling_llama.LlamaRMSNorm(4, eps=1e-6).double()
    exact = NUMBERS * torch.rsqrt(NUMBERS.pow(2).mean(-1, keepdim=True) + 1e-6)
    assert (norm(NUMBERS) - exact).abs().max() > 1e-9
    with KeepDouble():
        assert (norm(NUMBERS) - exact).abs().max() < 1e-15


def test_a_field_that_cannot_be_read_is_left_out_of_what_a_model_holds() -> None:
    """As of a config whose values differ by layer."""

    @dataclass
    class Config:
        table: Tensor
        head_dim: int = 4

        def __getattribute__(self, name: str) -> Any:
            if name == "head_dim":
                raise RuntimeError("it differs by layer")
            return super().__getattribute__(name)

    table = torch.ones(2)
    assert tensors_in({"config": Config(table)}) == [table]
