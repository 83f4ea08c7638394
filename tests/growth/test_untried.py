"""Fresh units by a plan that nobody has tried: a warning without a batch, an error where a batch shows it is wrong."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import mupscale as mu
from refusals import refuses
from resizing import without_resizing
from toys import Toy
from weights import unchanged

SILENT = mu.Fresh(outgoing=0)
IMAGES = torch.randn(4, 3, 4, 4, generator=torch.Generator().manual_seed(0))
TEXT = torch.randn(4, 5, 3, generator=torch.Generator().manual_seed(0))


def flattened(channels: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, channels, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(channels * 16, 5))


def grouped(channels: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, channels, 3),
        nn.GroupNorm(2, channels),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(channels, 5),
    )


def heads(width: int) -> nn.Module:
    """Heads of four, which no attribute tells."""

    def forward(model: Any, x: Tensor) -> Tensor:
        parts = model.qkv(model.first(x)).chunk(3, -1)
        q, k, v = (part.view(*x.shape[:2], -1, 4).transpose(1, 2) for part in parts)
        return model.last(scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(*x.shape[:2], -1))

    return Toy(forward, first=nn.Linear(3, width), qkv=nn.Linear(width, 3 * width), last=nn.Linear(width, 2))


MODELS: dict[str, tuple[Callable[[int], nn.Module], Tensor]] = {"flatten": (flattened, IMAGES), "heads": (heads, TEXT)}


def difference(narrow: nn.Module, wide: nn.Module, x: Tensor) -> float:
    return float(((wide(x) - narrow(x)).norm() / narrow(x).norm()).detach())


@pytest.mark.parametrize("grow", [SILENT, mu.Fresh(lossless=True)])
@pytest.mark.parametrize("width", [12, 16])
@pytest.mark.parametrize("name", MODELS)
def test_without_a_batch_it_warns_once(name: str, width: int, grow: mu.Fresh) -> None:
    build, _ = MODELS[name]
    with pytest.warns(mu.UncheckedPlan, match="this growth has not been tried: .* Pass inputs=") as caught:
        mu.upscale(build(8), build(width), fresh=lambda: build(8), grow=grow)
    assert len(caught) == 1
    with pytest.warns(mu.UncheckedPlan, match="this growth has not been tried"):
        mu.Family(build, base=8).upscale(build(8), width=width, grow=grow)


@pytest.mark.parametrize("name", MODELS)
def test_a_batch_that_comes_after_the_plan_tries_it(name: str) -> None:
    build, x = MODELS[name]
    narrow, wide = build(8), build(12)
    plan = mu.plan(narrow, wide, fresh=lambda: build(8), grow=SILENT)
    with unchanged(wide):
        refuses("with its old units alone", mu.upscale, narrow, wide, plan, grow=SILENT, inputs=x)
    refuses("with its old units alone", mu.Family(build, base=8).upscale, narrow, width=12, grow=SILENT, inputs=x)


def test_what_a_batch_has_shown_warns_no_more() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for build in (grouped, lambda width: nn.Sequential(nn.Flatten(), nn.Linear(48, width), nn.Linear(width, 2))):
            plan = mu.plan(build(8), build(12), fresh=lambda build=build: build(8), grow=SILENT)
            mu.upscale(build(8), build(12), plan, grow=SILENT, inputs=IMAGES)
            mu.upscale(build(8), build(12), fresh=lambda build=build: build(8), grow=SILENT, inputs=IMAGES)
            mu.Family(build, base=8).upscale(build(8), width=12, grow=SILENT, inputs=IMAGES)


ROLES: dict[str, dict[str, mu.Role]] = {
    "flatten": {"3.weight": mu.Role(out=0, in_=1, in_block=16)},
    "heads": {
        "qkv.weight": mu.Role(out=0, in_=1, out_block=4),
        "qkv.bias": mu.Role(out=0, out_block=4),
        "last.weight": mu.Role(out=0, in_=1, in_block=4),
    },
}


@pytest.mark.parametrize(
    ("name", "said", "roles"),
    [
        ("flatten", "up to '0', .* '3' ", "{'3.weight': mupscale.Role(out=0, in_=1, in_block=…)}"),
        ("heads", "up to 'qkv', .* 'last' ", "{'last.weight': mupscale.Role(out=0, in_=1, in_block=…)}"),
    ],
)
def test_blocks_between_multiples_are_named_and_each_remedy_helps(name: str, said: str, roles: str) -> None:
    build, x = MODELS[name]
    narrow = build(8)
    given: dict[str, Any] = {"inputs": x, "fresh": lambda: build(8), "grow": SILENT}
    match = rf"{said}\(weight .* → .*a flatten or in heads"
    with without_resizing(), pytest.raises(mu.MupscaleError, match=match) as refused:
        mu.upscale(narrow, build(12), **given)
    assert "leave out inputs=" not in str(refused.value)
    assert f"roles={roles}" in str(refused.value)
    plan = mu.plan(narrow, build(12), roles=ROLES[name], **given)
    for wide in (
        mu.upscale(narrow, build(12), plan, grow=SILENT)[0],
        mu.upscale(narrow, build(16), **given)[0],
        mu.Family(build, base=8, inputs=x).upscale(narrow, width=12, grow=SILENT)[0],
    ):
        assert difference(narrow, wide, x) < 1e-6


def recurrent(width: int, norm: bool = False) -> nn.Module:
    """Channels and rows of an image, flattened, are what an LSTM reads in both directions."""

    def forward(model: Any, x: Tensor) -> Tensor:
        x = model.norm(torch.tanh(model.conv(x)).transpose(1, -1)).transpose(1, -1)
        return model.head(model.rnn(x.permute(0, 3, 1, 2).flatten(2))[0][:, -1])

    rnn = nn.LSTM(4 * width, width, batch_first=True, bidirectional=True)
    norms = centred(width) if norm else nn.Identity()
    return Toy(forward, conv=nn.Conv2d(3, width, 1), norm=norms, rnn=rnn, head=nn.Linear(2 * width, 2))


def centred(width: int) -> nn.Module:
    """A gain behind a constant that depends on the width."""
    return Toy(lambda m, x: x * m.gain / len(m.gain), gain=nn.Parameter(torch.ones(width)))


@pytest.mark.filterwarnings("ignore:the batch does not show")  # the last step alone is read, backwards the first one
def test_the_module_that_reads_the_blocks_is_named_whatever_it_is_and_the_role_helps() -> None:
    x = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    given: dict[str, Any] = {"inputs": x, "fresh": lambda: recurrent(4), "grow": SILENT}
    match = r"they agree up to 'conv', and 'rnn' .* roles={'rnn\.weight_ih_l0': mupscale\.Role\(.* in_block="
    with without_resizing():
        refuses(match, mu.plan, recurrent(4), recurrent(6), **given)
        names, role = ("rnn.weight_ih_l0", "rnn.weight_ih_l0_reverse"), mu.Role(out=0, in_=1, in_block=4)
        assert mu.plan(recurrent(4), recurrent(6), **given, roles=dict.fromkeys(names, role)).checked


def rounded(width: int) -> nn.Module:
    """heads, and a layer whose size is rounded up to a multiple of 8."""
    model, hidden = heads(width), 8 * math.ceil(width / 6)
    model.add_module("last", nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, 2)))
    return model


def test_a_rounded_size_is_named_with_what_helps_and_it_helps() -> None:
    """At twice the width it is no multiple, so that no run finds the heads; a family with another base does."""
    narrow = rounded(8)
    with without_resizing(), pytest.raises(mu.MupscaleError, match="is the first to differ") as refused:
        mu.upscale(narrow, rounded(16), inputs=TEXT, fresh=lambda: rounded(8))
    for said in (
        "'last.0.weight' of shape (16, 8) → (24, 16) does not",
        "a base at which it is not",
        "docs/extending.md",
    ):
        assert said in str(refused.value)
    assert "At a whole multiple" not in str(refused.value)
    match = r"'last\.0\.weight'.* not rounded, such as 12 or 24. The base may differ"
    refuses(match, mu.Family, rounded, base=8, inputs=TEXT)
    mu.Family(rounded, base=12, inputs=TEXT).upscale(narrow, width=16)


def test_a_module_without_a_matrix_is_named_too_and_no_block_is_advised() -> None:
    x = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    match = r"'norm' is the first to differ \(by .*\)\. Either it is a norm"
    with without_resizing(), pytest.raises(mu.MupscaleError, match=match) as refused:
        mu.plan(recurrent(4, norm=True), recurrent(6, norm=True), inputs=x, grow=SILENT)
    assert "roles=" not in str(refused.value)
