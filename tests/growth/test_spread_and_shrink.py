"""Fresh units as large as trained ones have become, and copies of a network that is shrunk."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mupscale as mu
from mupscale.core import is_new
from mupscale.engine import train_many
from mupscale.growth import GrowthSettings
from mupscale.models import GPT2, MLP
from mupscale.train import run_recipe
from refusals import refuses
from small_runs import ADAMW, GENTLE, recipe

pytestmark = pytest.mark.usefixtures("float64")
TRAINED = mu.Fresh(spread="trained")


class Packed(nn.Module):
    """Two parts of one projection, of which the second starts at three times the spread of the first."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.into = nn.Linear(3, width)
        self.pair = nn.Linear(width, 2 * width, bias=False)
        self.out = nn.Linear(width, 2)
        with torch.no_grad():
            self.pair.weight.normal_(std=width**-0.5)
            self.pair.weight[width:] *= 3

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.pair(torch.tanh(self.into(x))).chunk(2, dim=-1)
        return self.out(value * torch.sigmoid(gate))  # type: ignore[no-any-return]


def trained_for_long(model: nn.Module, factors: dict[str, float]) -> nn.Module:
    """The model with some of its weights multiplied, as training makes them larger."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(factors.get(name, 1.0))
    return model


def rms(tensor: Tensor) -> float:
    return float(tensor.detach().square().mean().sqrt())


def grown(narrow: nn.Module, wide: nn.Module, fresh: nn.Module, operator: mu.Operator) -> dict[str, Tensor]:
    plan = mu.plan(narrow, wide, fresh=fresh, grow=operator, inputs=torch.randn(4, 3))
    mu.upscale(narrow, wide, plan, grow=operator, seed=5)
    return {name: p.detach().clone() for name, p in wide.named_parameters()}


def test_what_is_drawn_has_the_trained_spread_carried_to_the_wide_width() -> None:
    """Of a hidden matrix √(n/N) of the entries' root mean square, of a readout n/N, of input weights all of it."""
    n, wider = 32, 48
    torch.manual_seed(0)
    narrow, fresh = MLP(3, n, 2, depth=3), MLP(3, n, 2, depth=3)
    names = [name for name, p in narrow.named_parameters() if p.dim() == 2]
    first, hidden, readout = names
    trained_for_long(narrow, {first: 9.0, hidden: 2.0, readout: 5.0})
    initial = grown(narrow, MLP(3, wider, 2, depth=3), fresh, mu.Fresh())
    trained = grown(narrow, MLP(3, wider, 2, depth=3), fresh, TRAINED)
    weights = dict(narrow.named_parameters())
    carried = {first: 1.0, hidden: math.sqrt(n / wider), readout: n / wider}
    plan = mu.plan(narrow, MLP(3, wider, 2, depth=3), fresh=fresh, grow=TRAINED)
    for name in names:
        ratio = trained[name] / initial[name]
        is_drawn = (ratio - 1).abs() > 1e-9  # old entries are the same in both
        expected = rms(weights[name]) * carried[name] / plan.fresh[name]  # type: ignore[index]
        assert is_drawn.any()
        assert torch.allclose(ratio[is_drawn], torch.tensor(expected), rtol=1e-10)


def test_each_part_of_a_packed_projection_has_its_own() -> None:
    torch.manual_seed(0)
    n, wider = 32, 64
    narrow, fresh = Packed(n), Packed(n)
    with torch.no_grad():
        narrow.pair.weight[:n] *= 4
    initial, trained = (grown(narrow, Packed(wider), fresh, operator) for operator in (mu.Fresh(), TRAINED))
    ratio = trained["pair.weight"] / initial["pair.weight"]
    for part, half in enumerate(ratio.chunk(2)):
        drawn = half[(half - 1).abs() > 1e-9]
        assert len(drawn) >= wider * wider - n * n
        assert float(drawn.max() - drawn.min()) < 1e-9
        new = trained["pair.weight"][part * wider : (part + 1) * wider][is_new(mu.Axis(2), n)]
        old = narrow.pair.weight[part * n : (part + 1) * n]
        assert rms(new) == pytest.approx(rms(old) / math.sqrt(2), rel=0.05)


def test_rows_of_padding_do_not_count_and_constants_stay() -> None:
    """An embedding of which half the rows are zero; gains and biases of new units start as they always do."""
    torch.manual_seed(0)
    narrow, fresh, wide = (
        GPT2(vocab=16, context=4, layers=1, head_dim=4, width=width, heads=width // 4) for width in (8, 8, 12)
    )
    with torch.no_grad():
        narrow.wte.weight.mul_(7.0)[::2] = 0.0
        narrow.ln_f.weight.fill_(3.0)
    tokens = torch.randint(0, 16, (2, 4))
    plan = mu.plan(narrow, wide, fresh=fresh, grow=TRAINED, inputs=tokens)
    mu.upscale(narrow, wide, plan, grow=TRAINED)
    new = is_new(plan["wte.weight"].axes[1], 8)
    assert torch.equal(wide.wte.weight[::2], torch.zeros(8, 12))
    assert rms(wide.wte.weight[1::2][:, new]) == pytest.approx(rms(narrow.wte.weight[1::2]), rel=0.5)
    fold = float(plan["ln_f.weight"].fold)
    assert torch.allclose(wide.ln_f.weight[new], torch.tensor(fold))


@pytest.mark.parametrize("has_norms", [True, False])
def test_shrunk_copies(has_norms: bool) -> None:
    """Matrices and embeddings are multiplied; gains stay, and so do biases where the model has norms."""
    torch.manual_seed(0)
    if has_norms:
        sizes = {"vocab": 16, "context": 4, "layers": 1, "head_dim": 4}
        narrow, fresh, wide = (GPT2(**sizes, width=width, heads=width // 4) for width in (8, 8, 16))
        inputs = torch.randint(0, 16, (2, 4))
    else:
        narrow, fresh, wide = (MLP(3, width, 2, depth=3) for width in (8, 8, 16))  # type: ignore[assignment]
        inputs = torch.randn(4, 3)
    with torch.no_grad():
        for p in narrow.parameters():
            p.add_(torch.randn_like(p))
    plan = mu.plan(narrow, wide, fresh=fresh, inputs=inputs)
    mu.upscale(narrow, wide, plan, grow=mu.Copies(shrink=0.7))
    shrunk = set()
    for name, p in narrow.named_parameters():
        copied, now = plan[name].widened(p.detach()), dict(wide.named_parameters())[name]
        factor = 1.0 if torch.allclose(now, copied, rtol=1e-12) else 0.7
        assert torch.allclose(now, factor * copied, rtol=1e-12), name
        if factor != 1:
            shrunk.add(name)
    matrices = {name for name, p in narrow.named_parameters() if p.dim() > 1}
    assert shrunk == matrices if has_norms else shrunk == set(dict(narrow.named_parameters()))


def test_noise_is_added_after_shrinking_and_is_as_large_as_before() -> None:
    torch.manual_seed(0)
    narrow, fresh = MLP(3, 8, 2), MLP(3, 8, 2)
    plain, shrunk = (grown(narrow, MLP(3, 16, 2), fresh, mu.Copies(noise=1.0, shrink=shrink)) for shrink in (1.0, 0.5))
    copied = grown(narrow, MLP(3, 16, 2), fresh, mu.Copies(noise=1e-300))
    for name, weight in plain.items():
        assert torch.allclose(weight - copied[name], shrunk[name] - 0.5 * copied[name], atol=1e-12)


def test_bad_values_are_refused() -> None:
    refuses("shrink= is 0, but must be a number above 0 and at most 1", mu.Copies, shrink=0)
    refuses("shrink= is 1.5, but must be", mu.Copies, shrink=1.5)
    refuses("spread= is 'big', but must be", mu.Fresh, spread="big")
    fresh = GrowthSettings(how="fresh", shrink=0.5)
    refuses("how: fresh takes no shrink: leave shrink out, or use how: copies", fresh.build_operator)
    for setting in ({"shrink": 0.5}, {"spread": "trained"}, {"outgoing": 0.5}, {"noise": 1.0}):
        blocks = GrowthSettings(how="identity", **setting)  # type: ignore[arg-type]
        refuses(f"how: identity is for new blocks and takes no {next(iter(setting))}", blocks.build_operator)
    copies = GrowthSettings(how="copies", noise=1.0, spread="trained")
    refuses("how: copies takes no spread: leave spread out, or use how: ", copies.build_operator)


def test_words_of_recipes() -> None:
    settings = GrowthSettings(how="copies", noise=1.0, shrink=0.7)
    assert settings.build_operator() == mu.Copies(noise=mu.GaussianNoise(1.0), shrink=0.7)
    assert settings.in_words == "noise 1, shrink 0.7"
    trained = GrowthSettings(how="fresh", spread="trained")
    assert trained.build_operator() == TRAINED
    assert trained.in_words == "fresh units, spread trained"
    assert replace(trained, how="lossless").build_operator() == mu.Fresh(lossless=True, spread="trained")


@pytest.mark.parametrize("settings", [{"how": "fresh", "spread": "trained"}, {"how": "copies", "shrink": 0.5}])
def test_a_stack_of_runs_grows_as_each_run_alone(tmp_path: Path, settings: dict[str, Any]) -> None:
    run_recipe(recipe(tmp_path / "base", steps=6))
    grown = {"start": str(tmp_path / "base"), "width": 16, "steps": 4, **settings}
    runs = [recipe(tmp_path / name, optimizer=adamw, **grown) for name, adamw in (("a", ADAMW), ("b", GENTLE))]
    stacked = train_many(runs, note=lambda line: None, engine="vectorised")
    assert all((tmp_path / name / "checkpoints").exists() for name in ("a", "b"))
    alone = train_many([replace(run, out=None) for run in runs], note=lambda line: None, engine="serial")
    assert [one.loss for one in stacked] == pytest.approx([one.loss for one in alone], rel=1e-5)


@pytest.mark.parametrize(
    ("flags", "operator"),
    [
        (["--how", "copies", "--noise", "1", "--shrink", "0.7"], mu.Copies(noise=mu.GaussianNoise(1.0), shrink=0.7)),
        (["--spread", "trained"], mu.Fresh(spread="trained")),
    ],
)
def test_on_the_command_line_and_in_the_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], operator: mu.Operator
) -> None:
    """Written, recorded, shown and verified; what `verify` compares is grown once more by the record."""
    transformers = pytest.importorskip("transformers")
    from mupscale.cli.command_table import main
    from mupscale.hf.record import Record

    config = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, n_positions=16, vocab_size=11)
    small, wide = str(tmp_path / "small"), str(tmp_path / "wide")
    transformers.GPT2LMHeadModel(config).save_pretrained(small)
    assert main(["upscale", small, wide, "--times", "2", *flags]) == 0
    (step,) = Record.load(tmp_path / "wide").growths
    assert step.grow == operator
    assert main(["verify", small, wide]) == 0
    assert main(["inspect", small, "--times", "2", *flags]) == 0
    assert "trained" in capsys.readouterr().out if "--spread" in flags else True
