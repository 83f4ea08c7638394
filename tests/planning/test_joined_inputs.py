"""Layers that read units that grow beside inputs that do not, such as both ends of an edge and its length."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mupscale as mu
from exactness import assert_exact

NODES = torch.randn(6, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
ORDERS: dict[str, Callable[[Tensor, Tensor, Tensor], list[Tensor]]] = {
    "last": lambda ours, theirs, length: [ours, theirs, length],
    "first": lambda ours, theirs, length: [length, ours, theirs],
    "between": lambda ours, theirs, length: [ours, length, theirs],
}
SECTIONS = {
    "last": ((16, 1), (1, 0)),
    "first": ((1, 0), (16, 1)),
    "between": ((8, 1), (1, 0), (8, 1)),
}
KNOWN = pytest.mark.filterwarnings("ignore:.*reads inputs that grow and inputs that do not")


class Messages(nn.Module):
    """One layer of a graph network: messages along a ring, from both nodes and their distance."""

    def __init__(self, width: int, order: str) -> None:
        super().__init__()
        self.order = order
        self.message, self.update = nn.Linear(2 * width + 1, width), nn.Linear(2 * width, width)

    def forward(self, h: Tensor, length: Tensor) -> Tensor:
        edge = torch.cat(ORDERS[self.order](h, h.roll(1, 0), length), -1)
        return h + self.update(torch.cat([h, self.message(edge).tanh()], -1)).tanh()


class GraphNetwork(nn.Module):
    def __init__(self, width: int, order: str = "last") -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(5, width), nn.Linear(width, 3)
        self.layers = nn.ModuleList(Messages(width, order) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        h, length = self.enter(x).tanh(), (x - x.roll(1, 0)).square().sum(-1, keepdim=True)
        for layer in self.layers:
            h = layer(h, length)
        return self.leave(h)


def pair(width: int, order: str = "last") -> tuple[GraphNetwork, GraphNetwork]:
    torch.manual_seed(0)
    return GraphNetwork(8, order).double(), GraphNetwork(width, order).double()


def assert_same(narrow: nn.Module, wide: nn.Module) -> None:
    assert torch.allclose(narrow(NODES), wide(NODES), rtol=1e-10, atol=1e-12)


@KNOWN
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("width", [16, 24])
def test_copies_divide_the_weights_of_inputs_that_grow_and_no_others(width: int, order: str) -> None:
    """It was refused. A run shows where the input lies that does not grow."""
    narrow, wide = pair(width, order)
    plan = mu.plan(narrow, wide, inputs=NODES)
    entry = plan["layers.1.message.weight"]
    assert (entry.axes[1].sections, entry.rule.in_) == (SECTIONS[order], width // 8)
    mu.widen(narrow, wide, plan)
    assert_same(narrow, wide)
    place = {"last": -1, "first": 0, "between": 8}[order]
    wide_place = {"last": -1, "first": 0, "between": width}[order]
    ours, theirs = narrow.layers[1].message.weight, wide.layers[1].message.weight
    assert torch.equal(theirs[:, wide_place], ours[:, place].repeat_interleave(width // 8))


@KNOWN
@pytest.mark.parametrize("grow", [mu.Copies(noise=0.5, paired=True), mu.Copies(noise=0.5)])
def test_copies_with_noise_grow(grow: mu.Copies) -> None:
    """Paired noise sums to 0 over the copies of each input: there is none on the weights of what is not copied."""
    narrow, wide = pair(16)
    grown, optimizer = mu.upscale(
        narrow, wide, optimizer=torch.optim.AdamW(narrow.parameters(), lr=1e-3), inputs=NODES, grow=grow
    )
    assert not torch.equal(grown.layers[0].message.weight[0], grown.layers[0].message.weight[1])
    if grow.paired:
        assert_same(narrow, grown)
    grown(NODES).square().sum().backward()
    optimizer.step()


@KNOWN
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("width", [11, 12, 16])
def test_fresh_units_grow_to_any_width_and_keep_the_function_where_they_are_silent(width: int, order: str) -> None:
    narrow, wide = pair(width, order)
    silent = mu.Fresh(outgoing=0.0)
    plan = mu.plan(narrow, wide, inputs=NODES, grow=silent)
    times = Fraction(width, 8)
    assert plan["layers.0.message.weight"].rule == mu.Rule(out=times, in_=times)
    optimizer = torch.optim.AdamW(narrow.parameters(), lr=1e-3)
    narrow(NODES).square().sum().backward()
    optimizer.step()
    wide, optimizer = mu.upscale(narrow, wide, plan, optimizer=optimizer, grow=silent)
    assert_same(narrow, wide)
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    assert rates[id(wide.layers[0].message.weight)] == pytest.approx(1e-3 / float(times))
    wide(NODES).square().sum().backward()
    optimizer.step()


def test_two_growths_are_one() -> None:
    with warnings.catch_warnings(action="ignore"):
        first, second, both = (
            mu.plan(GraphNetwork(a), GraphNetwork(b), inputs=NODES.float()) for a, b in ((4, 8), (8, 24), (4, 24))
        )
    assert first.then(second)["layers.0.message.weight"] == both["layers.0.message.weight"]
    assert mu.Plan.from_json(both.to_json()) == both
    assert "inputs that do not grow train at the rate of those beside them" in " ".join(str(both).split())


@KNOWN
def test_a_role_says_where_the_inputs_lie() -> None:
    narrow, wide = pair(12)
    role = mu.Role(out=0, in_=1, in_block=((16, 1), (1, 0)))
    for inputs in (None, NODES):
        plan = mu.plan(narrow, wide, roles={"*.message.weight": role}, inputs=inputs, grow=mu.Fresh())
        assert plan["layers.0.message.weight"].axes[1].times == Fraction(3, 2)
    refused = mu.Role(out=0, in_=1, out_block=((7, 1), (1, 0)))
    with pytest.raises(mu.MupscaleError, match="1 of the outputs stays while the others grow"):
        mu.plan(nn.Linear(5, 8), nn.Linear(5, 15), roles={"weight": refused})


@pytest.mark.parametrize("grow", [mu.Copies(), mu.Fresh()])
def test_modules_alone_do_not_tell_where_the_inputs_lie(grow: Any) -> None:
    with pytest.raises(mu.PlanError) as refused:
        mu.plan(*pair(16), grow=grow)
    assert str(refused.value) == (
        "'layers.0.message.weight' reads 17 → 33 inputs: a concatenation of 16 → 32 that grow with the model and 1 "
        "that stays. Where these lie is not known: pass a batch, inputs=, and a run of the model shows it, or say it: "
        "mupscale.Role(out=0, in_=1, in_block=((16, 1), (1, 0))) if the latter come last, or give each part a layer of "
        "its own, and add what the layers give"
    )


def mean_square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.SGD])
def test_training_is_not_that_of_the_narrow_model_and_it_is_said_why(kind: Any) -> None:
    """One tensor has one rate. All else is exact: with longer steps for the column that stays, training is the same."""
    narrow, wide = pair(16)
    with pytest.warns(UserWarning, match=r"'layers\.0\.message\.weight' \(and 1 more\) reads inputs that grow and"):
        plan = mu.plan(narrow, wide, inputs=NODES)
    optimizer = kind(narrow.parameters(), lr=1e-2)
    mean_square(narrow, NODES).backward()
    optimizer.step()
    wide, its_optimizer = mu.upscale(narrow, wide, plan, optimizer=optimizer, exact=True)

    report = mu.verify(narrow, wide, plan, [NODES], mean_square, optimizer=optimizer, steps=5)
    assert not report.ok
    assert "A parameter has one learning rate" in str(report)

    for _ in range(5):
        for model, one in ((narrow, optimizer), (wide, its_optimizer)):
            one.zero_grad()
            mean_square(model, NODES).backward()
            columns = [layer.message.weight[:, -1] for layer in wide.layers]
            before = [column.detach().clone() for column in columns]
            one.step()
            for column, old in zip(columns, before, strict=True):
                column.data.copy_(old + 2 * (column.data - old))
    assert_same(narrow, wide)


@KNOWN
def test_a_family_learns_it_for_every_width() -> None:
    family = mu.Family(GraphNetwork, 8, inputs=NODES.float())
    assert family.plan(20)["layers.0.message.weight"].rule.in_ == Fraction(5, 2)
    narrow = family.init(8).double()
    wide, _ = family.upscale(narrow, width=12, grow=mu.Fresh(outgoing=0.0))
    assert_same(narrow, wide)


class SkipConnections(nn.Module):
    """A convolution reads what came in beside units that are often zero; the head reads flattened positions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, width, 3, padding=1)
        self.again, self.leave = nn.Conv2d(width + 2, width, 3, padding=1), nn.Linear(width * 16 + 5, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = (self.enter(x) - 1.0).relu()
        h = self.again(torch.cat([h, x[:, 1:]], 1)).relu()
        return self.leave(torch.cat([h.flatten(1), x.new_ones(len(x), 5)], 1))


class Densely(nn.Module):
    """Every layer reads what came in and all layers before it; one is a GRU's cell, and one a parameter."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, width), nn.GRUCell(width + 5, width)
        self.third, self.leave = nn.Parameter(torch.randn(2 * width + 5, width)), nn.Linear(3 * width + 5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([x, self.first(x).tanh()], -1)
        x = torch.cat([x, self.second(x, x[:, 5:])], -1)
        return self.leave(torch.cat([x, (x @ self.third).tanh()], -1))


@KNOWN
@pytest.mark.parametrize("width", [8, 6])
@pytest.mark.parametrize(("kind", "batch"), [(SkipConnections, (3, 3, 4, 4)), (Densely, (7, 5))])
def test_other_layers_that_read_inputs_that_do_not_grow(kind: Any, batch: tuple[int, ...], width: int) -> None:
    """Units that are zero on the batch look alike, so that it is the arguments that tell how they lie."""
    torch.manual_seed(0)
    narrow, wide, x = kind(4).double(), kind(width).double(), torch.randn(batch, dtype=torch.float64)
    grow = mu.Copies() if width == 8 else mu.Fresh(outgoing=0.0)
    plan = mu.plan(narrow, wide, inputs=x, grow=grow)
    wide, _ = mu.upscale(narrow, wide, plan, grow=grow, exact=width == 8)
    assert torch.allclose(narrow(x), wide(x), rtol=1e-10, atol=1e-12)


class Slices(nn.Module):
    """One layer whose outputs are cut into w, w and 2w units, and one that reads all three in another order."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.enter, self.leave = nn.Linear(5, 4 * width), nn.Linear(4 * width, 3)

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = self.enter(x).split([self.width, self.width, 2 * self.width], -1)
        return self.leave(torch.cat([c.tanh(), a * b, a.relu()], -1))


@pytest.mark.parametrize("width", [8, 6])
def test_slices_of_unequal_lengths_grow(width: int) -> None:
    narrow, wide = Slices(4).double(), Slices(width).double()
    if width == 8:
        plan = mu.plan(narrow, wide, inputs=NODES)
        mu.widen(narrow, wide, plan)
        assert_exact(narrow, wide, plan, NODES)
    else:
        silent = mu.Fresh(outgoing=0.0)
        wide, _ = mu.upscale(narrow, wide, mu.plan(narrow, wide, inputs=NODES, grow=silent), grow=silent)
        assert_same(narrow, wide)
