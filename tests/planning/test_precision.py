"""KeepDouble: no cast in modelling code takes a float64 tensor to less precision, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mupscale.planning import KeepDouble, tensors_in

X = torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4) / 3
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


@pytest.mark.parametrize("name", CASTS)
def test_a_cast_keeps_every_bit(name: str) -> None:
    lowered = CASTS[name](X)
    assert lowered.dtype != torch.float64
    assert not torch.equal(lowered.double(), X)
    with KeepDouble():
        kept = CASTS[name](X)
    assert kept.dtype == torch.float64
    assert torch.equal(kept, X)


@pytest.mark.parametrize("name", COMPUTED)
def test_an_operation_computes_in_double(name: str) -> None:
    lowered, plain = COMPUTED[name]
    assert not torch.equal(lowered(X).double(), plain(X))
    with KeepDouble():
        kept = lowered(X)
    assert kept.dtype == torch.float64
    assert torch.equal(kept, plain(X))


def test_what_is_less_already_stays() -> None:
    with KeepDouble():
        assert torch.arange(3).float().dtype == torch.float32
        assert SINGLE.to(torch.bfloat16).dtype == torch.bfloat16
        assert SINGLE.to(X).dtype == torch.float64
        assert torch.zeros(2, dtype=torch.float32).dtype == torch.float32
        assert X.long().dtype == torch.int64
        assert X.to(torch.complex64).is_complex()


@pytest.mark.parametrize("product", [torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, lambda a, b: a @ b])
def test_what_is_less_goes_along_in_a_product(product: Callable[[Tensor, Tensor], Tensor]) -> None:
    """As rotary frequencies, which a cast leaves in float64, and positions in float32 do in older transformers."""
    positions = torch.arange(8.0).view(2, 4)
    with KeepDouble():
        assert torch.equal(product(X.float(), positions.T), X @ positions.double().T)
        assert torch.equal(product(positions, X.float().T), positions.double() @ X.T)
        assert product(positions, positions.T).dtype == torch.float32
        assert torch.equal(F.linear(positions, X), positions.double() @ X.T)
        assert torch.einsum("ij,kj->ik", positions, X).dtype == torch.float64


def test_a_view_of_the_bits_is_no_cast() -> None:
    with KeepDouble():
        assert torch.equal(X.view(torch.float32), X.clone().view(torch.float32))
        assert X.view(torch.float32).shape == (3, 8)


def test_gradients_are_double_too() -> None:
    x = X.clone().requires_grad_()
    with KeepDouble():
        (x.float() ** 2).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, 2 * X)


@pytest.mark.parametrize("enabled", [True, False])
def test_autocast_leaves_double_alone(enabled: bool) -> None:
    layer = nn.Linear(4, 5).double()
    with KeepDouble(), torch.autocast("cpu", torch.bfloat16, enabled=enabled):
        y = layer(X)
        norm = F.layer_norm(y.float(), (5,))
    assert y.dtype == norm.dtype == torch.float64
    assert torch.equal(y, layer(X))


def test_outside_everything_is_as_before() -> None:
    with KeepDouble():
        pass
    assert X.float().dtype == torch.float32


def test_a_norm_of_transformers_computes_in_double() -> None:
    transformers = pytest.importorskip("transformers")
    norm = transformers.models.llama.modeling_llama.LlamaRMSNorm(4, eps=1e-6).double()
    exact = X * torch.rsqrt(X.pow(2).mean(-1, keepdim=True) + 1e-6)
    assert (norm(X) - exact).abs().max() > 1e-9
    with KeepDouble():
        assert (norm(X) - exact).abs().max() < 1e-15


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
