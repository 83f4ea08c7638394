"""The coordinate check: flat under μP and not under the standard parametrisation, for the paper's three models.

Rates, steps and widths are such that finite widths show little: the readout's start, whose share in the change of the
logits shrinks as width^(-1/2), is what remains.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import mupscale as mu
from mupscale.checks.coordinates import CoordCheck, Layer, Measurement, Power, fit_power
from mupscale.models import GPT2, MLP, ResNet18
from mupscale.system.errors import MupscaleError
from slow_cases import with_slow
from toys import classify, language

MLPS = mu.Family(lambda width: MLP(20, width, 5), base=64)


def vectors(count: int = 4) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(32, 20), torch.randint(5, (32,))) for _ in range(count)]


def powers(check: CoordCheck) -> dict[str, float]:
    return {layer.module: layer.change.exponent for layer in check.layers}


@pytest.mark.quick("AdamW")
@pytest.mark.parametrize(("optimizer", "lr"), [(torch.optim.AdamW, 1e-2), (torch.optim.SGD, 0.3)], ids=["AdamW", "SGD"])
def test_mlp(optimizer: type[Optimizer], lr: float) -> None:
    data, widths = vectors(), [64, 128, 256, 512]
    mup = mu.coord_check(MLPS, widths, data, classify, optimizer, lr=lr)
    assert mup.ok, str(mup)
    assert [layer.module for layer in mup.layers] == [f"layers.{i}" for i in range(4)]
    standard = mu.coord_check(MLPS, widths, data, classify, optimizer, parametrization="standard", lr=lr)
    assert standard.outcome == "not flat", str(standard)
    assert max(map(abs, powers(mup).values())) < 0.12
    if optimizer is torch.optim.AdamW:
        assert powers(standard)["layers.1"] > 0.7
    else:
        assert powers(standard)["layers.0"] < -0.35


@pytest.mark.slow
def test_resnet18() -> None:
    family = mu.Family(lambda width: ResNet18(width, classes=5), base=8, init_at=8)
    data = [(torch.randn(32, 3, 8, 8), torch.randint(5, (32,)))]
    arguments: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "seeds": 2}
    mup = mu.coord_check(family, [8, 16, 32], data, classify, torch.optim.SGD, **arguments)
    assert mup.ok, str(mup)
    arguments["parametrization"] = "standard"
    standard = mu.coord_check(family, [8, 16, 32], data, classify, torch.optim.SGD, **arguments)
    assert powers(standard)["fc"] > 0.4, str(standard)


@pytest.mark.slow
def test_gpt2_with_growing_head_dim() -> None:
    """The tied readout's 1/k lies in the last norm, whose output is looked at without it."""
    family = mu.Family(
        lambda width: GPT2(32, 16, layers=2, heads=2, head_dim=width // 2, attention_multiplier=4.0), base=32
    )
    data = [torch.randint(32, (8, 17)) for _ in range(2)]
    mup = mu.coord_check(family, [64, 128, 256], data, language, torch.optim.AdamW, lr=2e-3)
    assert mup.ok, str(mup)
    assert {"wte", "ln_f", "lm_head", "h.1.attn.c_attn"} <= powers(mup).keys()
    standard = mu.coord_check(
        family, [64, 128, 256], data, language, torch.optim.AdamW, lr=2e-3, parametrization="standard"
    )
    assert powers(standard)["h.0.mlp.c_proj"] > 1, str(standard)
    assert powers(standard)["lm_head"] > 0.35, str(standard)


def test_wrong_roles_are_seen() -> None:
    """A hidden matrix taken for an input layer keeps its rate, and what it does grows with the width."""
    family = mu.Family(
        lambda width: MLP(20, width, 5), base=64, roles={"layers.1.weight": mu.Role(out=0, in_=1, fold=lambda o, i: i)}
    )
    check = mu.coord_check(family, [64, 128, 256], vectors(), classify, torch.optim.AdamW, lr=1e-2)
    assert check.outcome == "not flat"
    assert next(layer.module for layer in check.layers if layer.verdict != "flat") == "layers.1"


def test_a_multiplier_in_forward_with_its_fold_is_flat() -> None:
    """As MuReadout of the mup package: W/N in forward, fold = in_; the output is looked at as it is."""

    class MuReadout(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x / self.in_features * 64)

    def build(width: int) -> nn.Module:
        return nn.Sequential(
            nn.Linear(20, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), MuReadout(width, 5, bias=False)
        )

    roles = {"4.weight": mu.Role(out=0, in_=1, fold=lambda out, in_: in_)}
    family = mu.Family(build, base=64, roles=roles)
    check = mu.coord_check(family, [64, 128, 256, 512], vectors(), classify, torch.optim.AdamW, lr=1e-2)
    assert check.ok, str(check)


def test_dropout_does_not_count_as_change() -> None:
    def build(width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(20, width), nn.Dropout(0.5), nn.Linear(width, 5))

    check = mu.coord_check(mu.Family(build, base=16), [16, 32], vectors(), classify, torch.optim.SGD, lr=0.0)
    assert {row.change for row in check.rows} == {0.0}
    assert check.ok


def test_rows_are_measured_on_the_first_batch_at_every_step() -> None:
    check = mu.coord_check(MLPS, [64, 128], vectors(), classify, torch.optim.SGD, lr=0.1, steps=3, seeds=2)
    assert len(check.rows) == 2 * 2 * 4 * 4  # widths, seeds, steps and the start, layers
    assert check.widths == [64, 128]
    for row in check.rows:
        assert (row.change == 0) == (row.step == 0)
        assert row.size > 0
    torch.manual_seed(0)
    x = vectors()[0][0]
    expected = float(MLPS.init(64, seed=1).layers[0](x).square().mean().sqrt().detach())
    found = next(r for r in check.rows if (r.width, r.seed, r.step, r.module) == (64, 1, 0, "layers.0"))
    assert found.size == pytest.approx(expected, rel=1e-5)
    assert check.mean("layers.0", 64, 0, "size") == pytest.approx(
        sum(r.size for r in check.rows if (r.width, r.step, r.module) == (64, 0, "layers.0")) / 2
    )


def test_dtype_and_named_widths() -> None:
    family = mu.Family(lambda first, second: MLP(20, [first, second], 5), base={"first": 16, "second": 32})
    data = [(x.double(), y) for x, y in vectors(1)]
    widths = [{"first": 16, "second": 32}, {"first": 32, "second": 64}]
    check = mu.coord_check(family, widths, data, classify, torch.optim.SGD, lr=0.1, steps=1, dtype=torch.float64)
    assert check.widths == [32, 64]


def made(
    change: dict[str, list[float]],
    size: dict[str, list[float]] | None = None,
    losses: Sequence[list[float]] = ([1.0, 1.0],) * 3,
) -> CoordCheck:
    """A check whose layers change by these amounts at widths 1, 4, 16, and whose losses go so step by step."""
    rows = []
    for module, values in change.items():
        sizes = (size or {}).get(module, [1.0] * 3)
        for width, value, large, several in zip((1, 4, 16), values, sizes, losses, strict=True):
            rows += [Measurement(width, 0, s, module, large, value * (s > 0), x) for s, x in enumerate(several)]
    return CoordCheck(rows, "made up")


def test_powers_and_verdicts() -> None:
    check = made(
        {
            "still": [0, 0, 0],
            "flat": [2, 2, 2],
            "grows": [1, 2, 4],
            "vanishes": [1, 1 / 4, 1 / 16],
            "dies": [1, 1, 0],
            "explodes": [1, 1, math.inf],
            "large": [1, 1, 1],
            "small": [1, 1, 1],
        },
        size={"large": [1, 4, 16], "small": [1, 1 / 2, 1 / 4]},
    )
    by_name = {layer.module: layer for layer in check.layers}
    assert by_name["grows"].change.exponent == pytest.approx(0.5)
    assert by_name["vanishes"].change.exponent == pytest.approx(-1)
    assert by_name["large"].size.exponent == pytest.approx(1)
    assert {name: layer.verdict for name, layer in by_name.items()} == {
        "still": "flat",
        "flat": "flat",
        "grows": "grows",
        "vanishes": "vanishes",
        "dies": "vanishes",
        "explodes": "grows",
        "large": "grows",
        "small": "flat",  # a readout may start near zero
    }
    assert check.outcome == "not flat"


def test_the_table_reads_well() -> None:
    check = made({"short": [2, 2, 2], "a.longer.name": [1, 2, 4]})
    first, head, *lines = str(check).splitlines()
    assert first == check.verdict == "made up: NOT flat over widths 1, 4, 16"
    assert first in check._repr_html_()
    assert head.split() == ["module", "size", "∝", "width^", "change", "∝", "width^", "verdict"]
    assert " ".join(lines[0].split()) == "short +0.00 ± 0.00 +0.00 ± 0.00 flat"
    assert " ".join(lines[1].split()) == "a.longer.name +0.00 ± 0.00 +0.50 ± 0.00 grows"
    assert len({line.index("+0.00") for line in lines[:2]}) == 1
    assert lines[2:] == [
        "flat: power of the size at most 0.2 (it may shrink), of the change within ±0.2; ±: one standard error"
    ]
    rows = [Measurement(width, seed, 1, "hidden", 1.0, 1.0) for width in (64.0, 128.0) for seed in range(2)]
    assert CoordCheck(rows, "μP").verdict == "μP: flat over widths 64, 128"


@pytest.mark.quick("many")
@pytest.mark.parametrize(
    "change",
    [
        {"flat": [2.0, 2, 2]},
        {"grows": [1.0, 2, 4], "flat": [2, 2, 2]},
        {f"layer.{i}": [1.0, 4 + i, 16] for i in range(12)},
        {"still": [0.0, 0, 0], "explodes": [1, 1, math.inf], "lost": [1, math.nan, 1]},
        {"still": [0.0, 0, 0]},
        {"bent": [1.0, 4, 3], "flat": [2, 2, 2]},
    ],
    ids=["flat", "one", "many", "odd", "nothing", "noisy"],
)
@pytest.mark.filterwarnings("error")
def test_plot(tmp_path: Path, change: dict[str, list[float]]) -> None:
    pytest.importorskip("matplotlib")
    path = made(change).plot(tmp_path / "pictures" / "check.png")
    assert path == tmp_path / "pictures" / "check.png"
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG")
    assert len(content) > 5000


@pytest.mark.parametrize(
    ("widths", "batches", "parametrization", "words"),
    [
        ([64], 4, "mup", "two widths and one batch"),
        ([64, 128], 0, "mup", "two widths and one batch"),
        ([64, 128], 4, "ntk", "is 'ntk', but must be 'mup' or 'standard'"),
        ([64, 64], 1, "mup", r"compares models of different sizes.* let each differ from the others"),
        ([{"first": 16, "second": 32}] * 2, 1, "mup", r"compares models of different sizes"),
    ],
)
def test_errors(widths: Any, batches: int, parametrization: Any, words: str) -> None:
    with pytest.raises(MupscaleError, match=words):
        mu.coord_check(
            MLPS, widths, vectors(batches), classify, torch.optim.SGD, lr=0.1, parametrization=parametrization
        )


EVERY_OPTIMIZER: dict[type[torch.optim.Optimizer], dict[str, float]] = {
    torch.optim.SGD: {"lr": 0.3, "momentum": 0.9},
    torch.optim.Adam: {"lr": 3e-3},
    torch.optim.AdamW: {"lr": 3e-3},
    torch.optim.NAdam: {"lr": 3e-3},
    torch.optim.RMSprop: {"lr": 1e-3},
    torch.optim.Adagrad: {"lr": 1e-2},
    torch.optim.Adamax: {"lr": 3e-3},
    torch.optim.Adadelta: {"lr": 1.0, "eps": 1e-4},
    torch.optim.Rprop: {"lr": 1e-3},
    torch.optim.ASGD: {"lr": 0.3},
    torch.optim.Adafactor: {"lr": 0.05},
}


@pytest.mark.quick("SGD", "AdamW", "Adafactor")
@pytest.mark.parametrize(
    "optimizer", with_slow(EVERY_OPTIMIZER, list(EVERY_OPTIMIZER)[::2]), ids=lambda optimizer: optimizer.__name__
)
def test_flat_under_every_optimizer(optimizer: type[torch.optim.Optimizer]) -> None:
    """Adafactor's step is relative to the weights: under μP its rate for hidden matrices is ∝ in_^-1/2."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 20, generator=generator)
    y = (x @ torch.randn(20, 5, generator=generator)).argmax(1)
    family = mu.Family(lambda width: MLP(20, width, 5, activation="tanh"), base=64)
    check = mu.coord_check(family, [64, 128, 512], [(x, y)], classify, optimizer, **EVERY_OPTIMIZER[optimizer])
    assert max(abs(layer.change.exponent) for layer in check.layers) < 0.1, str(check)


@pytest.mark.slow
def test_over_depth_blocks_at_the_same_part_of_the_way_are_compared(tmp_path: Path) -> None:
    """Block 1 of 2 is block 6 of 12: what it reads changes as much under the rule, and more without it."""

    def deep_family(rule: Any) -> mu.Family:
        return mu.Family(
            lambda width, depth: GPT2(11, 8, width=width, head_dim=4, layers=depth),
            base={"width": 16, "depth": 2},
            inputs=torch.zeros(1, 8, dtype=torch.int64),
            rules=mu.RuleSet(depth=rule),
        )

    torch.manual_seed(0)
    depths, data = [{"width": 16, "depth": depth} for depth in (12, 2)], [torch.randint(11, (4, 8))] * 3
    arguments: dict[str, Any] = {"lr": 1e-3, "steps": 3, "seeds": 1}
    under, without = (
        mu.coord_check(deep_family(rule), depths, data, language, torch.optim.AdamW, **arguments)
        for rule in ("complete", "none")
    )
    assert under.widths == [2, 12]
    assert "over depth 2, 12" in under.verdict
    assert "\nmodule           size ∝ depth^" in str(under)
    assert {name.split(".")[1] for name in powers(under) if name.startswith("h.")} == {"0", "1"}
    assert abs(powers(under)["h.1.ln_1"]) < 0.2, str(under)
    assert powers(without)["h.1.ln_1"] - powers(under)["h.1.ln_1"] > 0.15, str(without)
    assert under.plot(tmp_path / "depth.png").stat().st_size > 5000


class ResidualMLP(nn.Module):
    """Pre-norm blocks."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, width), nn.LayerNorm(width), nn.Linear(width, 3)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))
            for _ in range(depth)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(self.norm(x))


@pytest.mark.slow
def test_the_members_that_the_page_on_depth_takes_are_flat_under_the_rule() -> None:
    """At a width of 8, and over depths 2 and 8 alone, these data are not."""
    page = Path(__file__).parents[2] / "docs" / "depth.md"
    example = re.search(r'\[\{"width": (\d+), "depth": d\} for d in \(([\d, ]+)\)\]', page.read_text(encoding="utf-8"))
    assert example is not None
    width, depths = int(example[1]), [int(depth) for depth in example[2].split(",")]
    torch.manual_seed(8)
    x, y = torch.randn(32, 6), torch.randint(3, (32,))
    family = mu.Family(ResidualMLP, base={"width": width, "depth": 2}, inputs=x, rules=mu.RuleSet(depth="complete"))
    members = [{"width": width, "depth": depth} for depth in depths]
    check = mu.coord_check(family, members, [(x, y)], classify, torch.optim.AdamW, lr=1e-2)
    assert check.ok, str(check)


@pytest.mark.parametrize(
    ("sizes", "why"),
    [
        ([(16, 2), (32, 8)], r"by different factors here \(width 16, depth 2; width 32, depth 8\)"),
        ([(8, 2), (16, 2), (8, 4)], "by different factors"),
        ([(16, 2), (32, 4)], "and one of them is a number of layers"),
    ],
    ids=["factors", "in turn", "together"],
)
def test_width_and_depth_at_once_are_refused(sizes: list[tuple[int, int]], why: str) -> None:
    """A power of two sizes has no meaning, and the table would call it one of the width."""
    widths, x = [{"width": width, "depth": depth} for width, depth in sizes], torch.randn(4, 6)
    family = mu.Family(ResidualMLP, base={"width": 8, "depth": 2}, inputs=x, rules=mu.RuleSet(depth="none"))
    with pytest.raises(MupscaleError, match=rf"and width and depth differ {why}.*; vary one size at a time"):
        mu.coord_check(
            family, widths, [(x, torch.zeros(4).long())], classify, torch.optim.SGD, lr=0.1, steps=1, seeds=1
        )


def noisy_check(seed: int, widths: list[int], **arguments: Any) -> CoordCheck:
    """Of a family that is right, on data that is drawn afresh."""
    torch.manual_seed(seed)
    x, y = torch.randn(32, 6), torch.randint(3, (32,))
    family = mu.Family(lambda width: MLP(6, width, 3), base=64, inputs=x)
    return mu.coord_check(family, widths, [(x, y)], classify, torch.optim.AdamW, lr=1e-3, **arguments)


@pytest.mark.slow  # the verdicts of made-up measurements are below
def test_chance_is_not_taken_for_a_wrong_family() -> None:
    """Two seeds at two widths measure mostly noise; further apart, or with more seeds, the same family is flat."""
    few = [noisy_check(seed, [64, 128]) for seed in range(8)]
    assert "too noisy to tell" in {check.outcome for check in few} <= {"flat", "too noisy to tell"}
    noisy = next(seed for seed, check in enumerate(few) if not check.ok)
    advice = "take widths further apart, more seeds, or a smaller learning rate\n"
    assert f"too noisy to tell over widths 64, 128: {advice}" in str(few[noisy])
    assert noisy_check(noisy, [64, 512]).ok
    assert noisy_check(noisy, [64, 128], seeds=8).ok
    assert noisy_check(noisy, [64, 128], parametrization="standard").outcome == "not flat"


def test_errors_of_powers_come_from_seeds_and_from_the_fit() -> None:
    """As a least-squares fit of all points has it."""
    seeds = fit_power({1: [1.0, math.e**0.2], math.e: [1.0, math.e**0.2]})
    assert seeds.freedom == 2
    assert seeds.error == pytest.approx(math.sqrt(4 * 0.1**2 / 2 / (4 * 0.5**2)), rel=0.01)
    bent = fit_power({1: [1.0], math.e: [math.e**0.3], math.e**2: [1.0]})
    assert (bent.exponent, bent.freedom) == (pytest.approx(0), 1)
    assert bent.error == pytest.approx(math.sqrt((0.2**2 + 2 * 0.1**2) / 1 / 2))
    assert bent.margin == pytest.approx(12.71 * bent.error)


@pytest.mark.parametrize(
    ("change", "verdict"), [([1.0, 1.2], "too noisy"), ([1.0, 1.1], "too noisy"), ([1.0, 0.0], "vanishes")], ids=str
)
def test_one_seed_at_two_widths_has_no_error_bar(change: list[float], verdict: str) -> None:
    rows = [Measurement(width, 0, 1, "hidden", 1.0, value) for width, value in zip((1, 2), change, strict=True)]
    check = CoordCheck(rows, "made up", axis="depth")
    assert [layer.verdict for layer in check.layers] == [verdict]
    if verdict == "too noisy":
        assert "values of depth further apart, more seeds, or a smaller learning rate" in check.verdict
        assert re.search(r"\+0\.(26|14) ± \?", str(check))


def check_at(lr: float, parametrization: Any = "mup") -> CoordCheck:
    """Of a family that is right, under plain SGD; at 64 its loss falls up to a rate of about 1."""
    torch.manual_seed(0)
    x, y = torch.randn(64, 12), torch.randn(64, 2)
    family = mu.Family(lambda width: MLP(12, width, 2, depth=3), base=64, inputs=x[:4])

    def squares(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return (model(batch[0]) - batch[1]).square().mean()

    arguments: dict[str, Any] = {"lr": lr, "parametrization": parametrization}
    return mu.coord_check(family, [64, 128, 256, 512], [(x, y)], squares, torch.optim.SGD, **arguments)


@pytest.mark.quick("10.0")
@pytest.mark.parametrize("lr", [5.0, 10.0])
def test_a_learning_rate_that_no_width_bears_is_not_blamed_on_the_width(lr: float, tmp_path: Path) -> None:
    check = check_at(lr)
    assert check.outcome == "learning rate too large"
    assert not check.ok
    assert re.search(
        r"^μP, SGD: learning rate too large to tell over widths 64, 128, 256, 512: at width 64 the loss goes from "
        r"[\d.]+ to \S+ within 4 steps; take a smaller one\n",
        str(check),
    )
    assert {layer.verdict for layer in check.layers} == {"no verdict"}
    assert "seeds" not in check.verdict
    assert "inf" not in str(check).split("\n", 1)[1]
    assert check.plot(tmp_path / "check.png").stat().st_size > 5000


def test_a_family_that_diverges_at_large_widths_alone_is_not_flat() -> None:
    """The rate is fine at the base width, so the width is what does it."""
    check = check_at(1.0, "standard")
    assert check.outcome == "not flat", str(check)
    at = {width: [row.loss or 0 for row in check.rows if (row.width, row.step) == (width, 4)] for width in (64, 512)}
    assert max(at[64]) < 2 < min(at[512])


FINE, RISING, LOST = [1.0, 0.9, 0.8], [1.0, 2.5, 0.9], [1.0, math.nan, math.nan]


@pytest.mark.parametrize(
    ("losses", "outcome"),
    [
        ((FINE, FINE, FINE), "not flat"),
        ((FINE, FINE, RISING), "not flat"),
        ((FINE, LOST, LOST), "not flat"),
        ((RISING, LOST, LOST), "learning rate too large"),
        ((LOST, FINE, FINE), "learning rate too large"),
        ((FINE, RISING, FINE), "learning rate too large"),
        (([-1.0, -0.5], [-1.0, -2.0], [-1.0, -2.0]), "not flat"),
        (([-1.0, 0.5], [-1.0, 0.5], [-1.0, 0.5]), "learning rate too large"),
        (([math.nan] * 2, [math.nan] * 2, [math.nan] * 2), "not flat"),
    ],
    ids=["none", "largest", "larger", "all", "smallest", "middle", "negative", "negative all", "from the start"],
)
def test_the_rate_is_to_blame_where_losses_rise_at_the_smallest_width_or_not_at_the_largest(
    losses: tuple[list[float], ...], outcome: str
) -> None:
    assert made({"hidden": [1, 2, 4]}, losses=losses).outcome == outcome
    assert made({"hidden": [2, 2, 2]}, losses=losses).outcome == "flat"


def test_activations_that_are_not_finite_tell_it_without_losses() -> None:
    values = [(0, 1.0, 0.0), (1, math.inf, math.inf)]
    rows = [Measurement(width, 0, step, "h", size, change) for width in (1, 2) for step, size, change in values]
    check = CoordCheck(rows, "made up")
    assert check.outcome == "learning rate too large"
    assert "at width 1 activations are not finite after 1 step; take a smaller one" in check.verdict
    assert str(check).splitlines()[2].split() == ["h", "not", "finite", "not", "finite", "no", "verdict"]


@pytest.mark.parametrize(
    ("size", "change", "verdict"),
    [
        (Power(0.0, 0.01, 6), Power(0.1, 4.08, 6), "too noisy"),
        (Power(0.1, 0.3, 6), Power(0.0, 0.01, 6), "too noisy"),
        (Power(-2.0, 0.3, 6), Power(0.0, 0.01, 6), "flat"),  # it shrinks for sure
        (Power(-0.39, 0.16, 6), Power(-0.15, 0.13, 6), "flat"),
        (Power(0.1, 4.08, 6), Power(3.0, 0.1, 6), "grows"),
    ],
    ids=["change", "size", "shrinks", "readout", "sure of the change"],
)
def test_what_is_less_certain_than_the_band_is_wide_is_not_called_flat(
    size: Power, change: Power, verdict: str
) -> None:
    assert Layer("hidden", size, change).verdict == verdict
