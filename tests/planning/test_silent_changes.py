"""What changes although a plan stands its check is said: outputs that grow, and losses that modules keep."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import TransformerEncoderLayer as Encoder

import mupscale as mu
from mupscale.models import MLP
from resizing import without_resizing

X = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))


def classes(scale: int) -> nn.Module:
    """Twice as many classes where the width is twice as large, which nobody wanted."""
    return MLP(3, 8 * scale, 5 * scale)


GROWTHS: dict[str, Callable[..., Any]] = {
    "copies": lambda **given: mu.upscale(classes(1), classes(2), inputs=X, **given),
    "fresh units": lambda **given: mu.upscale(
        classes(1), classes(2), inputs=X, grow=mu.Fresh(), fresh=lambda: classes(1), **given
    ),
    "between multiples": lambda **given: mu.upscale(
        classes(2), classes(3), inputs=X, grow=mu.Fresh(), fresh=lambda: classes(2), **given
    ),
    "a family": lambda: mu.Family(classes, base=1, inputs=X),
}


@pytest.mark.parametrize("growth", GROWTHS)
def test_an_output_that_grows_is_said(growth: str) -> None:
    with pytest.warns(UserWarning, match=r"output 0 of the model grows from \d+ to \d+, written by 'layers.3.weight'"):
        GROWTHS[growth]()


def test_one_who_wants_it_says_so() -> None:
    roles = {"layers.3.weight": mu.Role(out=0, in_=1)}  # as the warning writes it
    with pytest.warns(UserWarning, match=r"roles=\{'layers.3.weight': mupscale.Role\(out=0, in_=1\)\}"):
        mu.plan(classes(1), classes(2), inputs=X)
    assert mu.plan(classes(1), classes(2), inputs=X, roles=roles).checked
    assert mu.Family(classes, base=8, inputs=X, roles=roles).plan(16).checked


class Flat(nn.Module):
    """Channels that a flatten hides from the layer that reads them, handed out beside the scores."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, width, 1), nn.Linear(4 * width, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.conv(x))
        return self.head(h.flatten(1)), h


@pytest.mark.quick("channels", "lstm")
@pytest.mark.parametrize(
    ("build", "x"),
    [
        (Flat, torch.randn(2, 3, 2, 2)),
        (lambda width: nn.LSTM(3, width, batch_first=True), torch.randn(2, 5, 3)),
        (lambda width: nn.Sequential(nn.Linear(3, width), Encoder(width, 2, 2 * width, batch_first=True)), X[None]),
    ],
    ids=["channels", "lstm", "encoder"],
)
def test_hidden_units_that_are_handed_out_are_no_such_outputs(build: Callable[[int], nn.Module], x: Tensor) -> None:
    assert mu.plan(build(8), build(16), inputs=x).checked


class Regularised(nn.Module):
    """A loss on activations, which is kept on a module for whoever trains the model."""

    def __init__(self, width: int, how: str = "sum", where: str = "attribute") -> None:
        super().__init__()
        self.how, self.where, self.a, self.b = how, where, nn.Linear(3, width), nn.Linear(width, 2)
        self.a.losses = []

    def forward(self, x: Tensor) -> Any:
        h = torch.tanh(self.a(x))
        loss = getattr(h.square(), self.how)()
        y: Tensor = self.b(h)
        if self.where == "attribute":
            self.loss = loss
        elif self.where == "list":
            self.a.losses = [loss]
        elif self.where == "detached":
            self.loss = loss.detach()
        return Output(y, loss) if self.where == "outputs" else y


@dataclass
class Output:
    scores: Tensor
    loss: Tensor


@pytest.mark.parametrize(("where", "name"), [("attribute", "'loss'"), ("list", r"'a.losses\[0\]'")])
def test_a_loss_that_is_kept_on_a_module_and_grows_is_said(where: str, name: str) -> None:
    with pytest.warns(UserWarning, match=rf"{name}, which .* in the narrow model and .* in the wide one. .*a mean"):
        mu.plan(Regularised(4, where=where), Regularised(8, where=where), inputs=X)
    with pytest.warns(UserWarning, match=name):
        mu.Family(lambda width: Regularised(width, where=where), base=4, inputs=X)


def test_a_mean_is_none_and_so_is_what_has_no_gradient() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for arguments in (("mean",), ("sum", "detached")):
            assert mu.plan(Regularised(4, *arguments), Regularised(8, *arguments), inputs=X).checked


def test_a_loss_in_the_outputs_is_compared_as_they_are() -> None:
    """A dataclass is looked into, too."""
    with pytest.raises(mu.MupscaleError, match=r"in any order that was tried|times the narrow one's"):
        mu.plan(Regularised(4, where="outputs"), Regularised(8, where="outputs"), inputs=X)
    assert mu.plan(Regularised(4, "mean", "outputs"), Regularised(8, "mean", "outputs"), inputs=X).checked


@pytest.mark.parametrize("build", [lambda n: nn.LSTM(3, n), lambda n: MLP(3, n, n)], ids=["lstm", "mlp"])
def test_the_old_units_of_an_output_that_grows_show_whether_fresh_ones_leave_them(build: Any) -> None:
    """Between multiples, where there are no copies; nothing else was compared, and a wrong reason was given."""
    assert mu.plan(build(8), build(12), inputs=X, grow=mu.Fresh()).tried_by == "silent units"


class Doubled(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.a = nn.Linear(3, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.a(x)] * 2, -1)


def test_outputs_that_tell_nothing_are_the_reason() -> None:
    said = "every output of the model grows, to a size that no layer has"
    with without_resizing(), pytest.raises(mu.MupscaleError, match=said):
        mu.plan(Doubled(8), Doubled(12), inputs=X, grow=mu.Fresh())
