"""The models of the experiments: shapes, sizes and the properties that others rely on."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from mupscale.models import GPT2, MLP, ResNet18
from mupscale.models.gpt2 import Attention
from mupscale.system.errors import MupscaleError


def tiny_gpt2(*, tied: bool = True, attention_multiplier: float | None = None) -> GPT2:
    torch.manual_seed(0)
    return GPT2(11, 8, layers=2, heads=2, head_dim=4, tied=tied, attention_multiplier=attention_multiplier).eval()


def linear_shapes(model: MLP) -> list[tuple[int, ...]]:
    return [tuple(layer.weight.shape) for layer in model.layers if isinstance(layer, nn.Linear)]


def count_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_mlp_has_one_width_or_one_per_layer() -> None:
    model = MLP(5, 16, 3)
    assert linear_shapes(model) == [(16, 5), (16, 16), (16, 16), (3, 16)]
    assert model(torch.zeros(2, 5)).shape == (2, 3)
    model = MLP(5, [8, 6], 3, bias=False)
    assert linear_shapes(model) == [(8, 5), (6, 8), (3, 6)]
    assert all("bias" not in name for name, _ in model.named_parameters())


@pytest.mark.parametrize(
    ("activation", "function"),
    [
        ("relu", torch.relu),
        ("tanh", torch.tanh),
        ("gelu", torch.nn.functional.gelu),
        ("linear", torch.clone),
    ],
)
def test_mlp_activates_between_layers_only(activation: str, function: Callable[[Tensor], Tensor]) -> None:
    model = MLP(5, 16, 3, depth=2, activation=activation)
    x = torch.randn(4, 5)
    torch.testing.assert_close(model(x), model.layers[1](function(model.layers[0](x))))


def test_models_of_standard_size_have_the_usual_number_of_parameters() -> None:
    with torch.device("meta"):
        assert count_parameters(ResNet18()) == 11_220_132
        assert count_parameters(GPT2(50257, 1024)) == 124_439_808


@pytest.mark.parametrize("image", [8, 9, 32])
def test_resnet18_takes_images_from_8_pixels(image: int) -> None:
    assert ResNet18(width=4, classes=7, in_channels=1)(torch.zeros(2, 1, image, image)).shape == (2, 7)


def test_gpt2_is_causal() -> None:
    model = tiny_gpt2()
    tokens = torch.randint(11, (1, 8))
    changed = tokens.clone()
    changed[0, 5] = (tokens[0, 5] + 1) % 11
    before, after = model(tokens), model(changed)
    assert before.shape == (1, 8, 11)
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])


def test_gpt2_tied_head_shares_the_embedding() -> None:
    tied, untied = tiny_gpt2(), tiny_gpt2(tied=False)
    assert tied.lm_head.weight is tied.wte.weight
    assert untied.lm_head.weight is not untied.wte.weight
    assert count_parameters(untied) - count_parameters(tied) == 11 * 8


def test_gpt2_attention_multiplier_replaces_the_square_root() -> None:
    def scales(model: GPT2) -> list[float]:
        return [part.scale for part in model.modules() if isinstance(part, Attention)]

    assert scales(tiny_gpt2()) == [0.5, 0.5]
    assert scales(tiny_gpt2(attention_multiplier=3.0)) == [0.75, 0.75]
    tokens = torch.randint(11, (1, 8))
    torch.testing.assert_close(tiny_gpt2()(tokens), tiny_gpt2(attention_multiplier=2.0)(tokens))
    assert not torch.equal(tiny_gpt2()(tokens), tiny_gpt2(attention_multiplier=3.0)(tokens))


def test_gpt2_attention_is_softmax_of_scaled_products() -> None:
    torch.manual_seed(0)
    attention = Attention(2, 4, bias=True, dropout=0.0, scale=0.3)
    x = torch.randn(1, 6, 8)
    query, key, value = attention.c_attn(x[0]).split(8, dim=-1)
    future = torch.ones(6, 6).triu(1).bool()
    heads = []
    for head in (slice(0, 4), slice(4, 8)):
        scores = 0.3 * query[:, head] @ key[:, head].T
        heads.append(scores.masked_fill(future, -math.inf).softmax(-1) @ value[:, head])
    torch.testing.assert_close(attention(x)[0], attention.c_proj(torch.cat(heads, dim=-1)))


def test_gpt2_residual_projections_start_smaller() -> None:
    torch.manual_seed(0)
    for name, parameter in GPT2(64, 64, layers=8, heads=4, head_dim=16).named_parameters():
        if name.endswith("c_proj.weight"):
            assert parameter.std().item() == pytest.approx(0.02 / 4, rel=0.05)
        elif parameter.dim() == 2:
            assert parameter.std().item() == pytest.approx(0.02, rel=0.05)
        else:
            assert torch.all(parameter == (0.0 if name.endswith("bias") else 1.0))


def test_gpt2_drops_out_in_training_only() -> None:
    model = GPT2(11, 8, layers=1, heads=2, head_dim=4, dropout=0.5)
    tokens = torch.randint(11, (1, 8))
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: MLP(5, 16, 3, activation="swish"), r"'swish'.*relu, tanh, gelu, linear"),
        (lambda: MLP(5, 16, 3, depth=0), "depth is 0"),
        (lambda: MLP(5, [16, 0], 3), r"\[5, 16, 0, 3\]"),
        (lambda: ResNet18(width=0), "0, 100 and 3"),
        (lambda: GPT2(11, 8, heads=0), "11, 8, 12, 0 and 64"),
        (lambda: tiny_gpt2()(torch.zeros(1, 9, dtype=torch.long)), r"9 tokens.*context is 8"),
    ],
)
def test_wrong_arguments_are_named_in_the_error(make: Callable[[], object], words: str) -> None:
    with pytest.raises(MupscaleError, match=words):
        make()
