"""A growth that fails halfway leaves the larger model as it was, or void: never half of a model without a word."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mupscale as mu
from mupscale.growth import operators, optimizer_state, upscale_untried, writing
from mupscale.optim import GroupBuilder
from toys import Toy
from weights import take_step


class Own(mu.Fresh):
    """An operator of the user's own, which is not one of those that write straight into the model."""


X = torch.ones(2, 3)
SEAMS: tuple[tuple[Any, str], ...] = (
    *((cls, method) for cls in (mu.Copies, mu.Fresh) for method in ("parameter", "buffer", "state")),
    (operators.Operator, "buffer"),
    (writing, "copy_into"),
    (writing, "check_written"),
    (writing, "materialize"),
    (writing, "check_dtype"),
    (optimizer_state, "state_factor"),
    (optimizer_state, "laid_out_like"),
    (GroupBuilder, "add"),
    (nn.Parameter, "requires_grad_"),
    (nn.Parameter, "fill_"),
)


class Injected(Exception):
    """What a seam raises."""


@contextmanager
def failing(at: int | None) -> Iterator[list[int]]:
    """Every seam counts its calls; the call of this number fails, half of the time after its work."""
    calls = [0]

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            number, calls[0] = calls[0], calls[0] + 1
            if number == at and number % 2:
                raise Injected
            result = function(*args, **kwargs)
            if number == at:
                raise Injected
            return result

        return call

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in SEAMS:
            patch.setattr(owner, name, counted(getattr(owner, name)))
        yield calls


def net(width: int = 4, blocks: int = 1) -> nn.Module:
    """Residual blocks between two layers, and a buffer."""

    def forward(model: Any, x: Tensor) -> Tensor:
        x = model.first(x)
        for block in model.blocks:
            x = x + block(x)
        return model.last(x) - model.mean

    within = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(blocks))
    last = nn.Linear(width, 2, bias=False)
    return Toy(forward, first=nn.Linear(3, width), last=last, blocks=within, mean=torch.zeros(2))


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return net(8)


def _widened(grow: mu.Operator, build: Callable[[], nn.Module] = lambda: net(8)) -> Any:
    return build, lambda small: mu.plan(small, net(8), fresh=net, grow=grow), grow


def _deepened(grow: mu.Identity | mu.Stack, operator: mu.Operator) -> Any:
    return lambda: net(4, 2), lambda small: mu.plan_depth(small, net(4, 2), grow=grow, inputs=X), operator


GROWTHS: dict[str, Callable[[], Any]] = {
    "copies": lambda: _widened(mu.Copies(noise=1.0)),
    "copies without memory": lambda: _widened(mu.Copies(noise=1.0), on_meta),
    "fresh units": lambda: _widened(mu.Fresh()),
    "an operator of one's own": lambda: _widened(Own()),
    "silent blocks": lambda: _deepened(mu.Identity(), mu.Fresh()),
    "copied blocks": lambda: _deepened(mu.Stack(), mu.Copies()),
}


def tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


@pytest.mark.parametrize("name", GROWTHS)
def test_all_or_nothing(name: str) -> None:
    torch.manual_seed(0)
    small = net()
    optimizer = torch.optim.SGD(small.parameters(), lr=0.1, momentum=0.9)
    take_step(optimizer, small(X).square().mean())
    small.first.weight.requires_grad_(False)
    build, make_plan, grow = GROWTHS[name]()
    plan, seen, large = make_plan(small), set[str](), build()
    with failing(None) as calls:
        upscale_untried(small, large, plan, optimizer, grow=grow)
    for number in range(calls[0]):
        large = build()
        before = {n: (t.detach().clone(), t.requires_grad) for n, t in tensors(large).items()}
        with failing(number), pytest.raises(Injected) as caught:
            upscale_untried(small, large, plan, optimizer, grow=grow)
        after = tensors(large)
        if all(t.is_meta or (not before[n][0].is_meta and torch.equal(t, before[n][0])) for n, t in after.items()):
            assert all(t.requires_grad == before[n][1] for n, t in after.items())
            seen.add("unchanged")
        else:
            assert all(t.isnan().all() for t in after.values() if t.is_floating_point()), f"call {number}"
            assert "it is unusable now" in caught.value.__notes__[0]
            seen.add("void")
    assert seen == {"unchanged", "void"}


def test_noise_that_fails_leaves_a_void_model(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = net(8)
    plan, given = mu.plan(net(), wide, fresh=net), iter(range(2))
    monkeypatch.setattr(writing, "add_noise", lambda *args: next(given))
    with pytest.raises(StopIteration) as caught:
        mu.perturb(wide, plan, 1.0)
    assert "it is unusable now" in caught.value.__notes__[0]
    assert all(p.isnan().all() for p in wide.parameters())
