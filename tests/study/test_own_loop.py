"""A study in a loop of one's own: it trains what one would have trained by hand, once, and goes on after a kill."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import mupscale as mu
from mupscale.models import MLP
from mupscale.report import write_report
from mupscale.study import FamilySettings, OwnLoop, StudySettings, load_summary
from mupscale.study.own_loop import _LoopGround
from mupscale.study.tree import Stretch
from mupscale.system import MupscaleError, derive, seeded
from mupscale.train import Schedule, find_checkpoint
from paper_runs import quiet

X = torch.randn(40, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = X.sin().sum(1, keepdim=True)
LR = 0.02
Rates = Callable[[int], float]


class Killed(BaseException):
    pass


def build(width: int) -> nn.Module:
    return MLP(5, width, 1, depth=3, activation="tanh").double()


class Deep(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, width), nn.Linear(width, 1)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Tanh(), nn.Linear(width, width)) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        """A residual stream."""
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)


def train(model: nn.Module, optimizer: Optimizer, steps: int, schedule: Rates) -> None:
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    for _ in range(steps):
        rows = torch.randint(30, (8,))
        optimizer.zero_grad()
        nn.functional.mse_loss(model(X[rows]), Y[rows]).backward()
        optimizer.step()
        scheduler.step()


def held_out(model: nn.Module) -> Tensor:
    assert not model.training
    return nn.functional.mse_loss(model(X[30:]), Y[30:])


@pytest.fixture(scope="module")
def family() -> mu.Family:
    return mu.Family(build, base=4, inputs=X[:8])


@pytest.fixture(scope="module")
def deep_family() -> mu.Family:
    return mu.Family(lambda width, depth: Deep(width, depth).double(), base={"width": 4, "depth": 2}, inputs=X[:8])


def adamw(family: mu.Family, model: nn.Module, lr: float) -> Optimizer:
    return family.optimizer(model, torch.optim.AdamW, lr=lr, weight_decay=0.1, eps=1e-3)


def loop_in(folder: Path, family: mu.Family, **given: Any) -> OwnLoop:
    """One that says nothing."""
    usual = {"train": train, "held_out": held_out, "make_optimizer": partial(adamw, family), "lr": LR, "note": quiet}
    return OwnLoop(family, folder=folder, **{**usual, **given})


def base_model(family: mu.Family, width: Any = 8) -> tuple[nn.Module, Optimizer]:
    model = family.init(width)
    optimizer = adamw(family, model, LR)
    with seeded(0):
        train(model, optimizer, 12, lambda step: 1.0)
    return model, optimizer


SIZES = FamilySettings(sizes=[4, 8, 12], budget=24)
PAY = StudySettings(widths=[4], lrs=[LR], noises=[1.0], budgets=[0.5, 1.0], seeds=2, small_seeds=1)


def weights_of(path: Path) -> dict[str, Tensor]:
    return mu.load(find_checkpoint(path)).model


# ------------------------------------------------------------------------------------------------ a family


def test_every_size_is_what_training_by_hand_gives(family: mu.Family, tmp_path: Path) -> None:
    """Trunk and decay of the smallest size, then the trunk grown; bit for bit, from the seeds that are documented."""
    summary = loop_in(tmp_path, family).train_family(SIZES)
    model = family.init(4, seed=0)
    optimizer = adamw(family, model, LR)
    with seeded(derive(0, "stretch", 0, 0)):
        train(model, optimizer, 18, lambda step: 1.0)
    wide, wide_optimizer = family.upscale(model, optimizer, width=8, grow=mu.Fresh(), lr=LR, seed=0)
    decay = Schedule("wsd", decay=6)
    for group in optimizer.param_groups:
        del group["initial_lr"]
    with seeded(derive(0, "stretch", 1, 0)):
        train(model, optimizer, 6, lambda step: decay.at(step, 6))
    for name, value in weights_of(tmp_path / "sizes" / "4").items():
        assert torch.equal(value, model.state_dict()[name]), name
    rows = summary.tables[0].rows
    steps = int(rows[1][2].split(" + ")[0])
    with seeded(derive(0, "stretch", 2, 0)):
        train(wide, wide_optimizer, steps, lambda step: 1.0)
    found = [weights_of(path.parent) for path in (tmp_path / "stretches").glob("width-8-fresh-*/end.json")]
    assert any(all(torch.equal(value, wide.state_dict()[name]) for name, value in one.items()) for one in found)
    assert float(rows[0][6]) == pytest.approx(held_out(model.eval()).item(), rel=1e-3)


@pytest.mark.usefixtures("pictures_without_pixels")
def test_what_was_trained_is_not_trained_again(family: mu.Family, tmp_path: Path) -> None:
    """Nor is a prefix; one more size trains its trunk and its branch alone."""
    called: list[int] = []

    def counting(model: nn.Module, optimizer: Optimizer, steps: int, schedule: Rates) -> None:
        called.append(steps)
        train(model, optimizer, steps, schedule)

    said: list[str] = []
    loop = loop_in(tmp_path, family, train=counting, note=said.append)
    first = loop.train_family(SIZES)
    assert len(called) == 2 + 6, "first steps are tried twice, and later once"
    assert loop.train_family(SIZES).large == first.large
    assert len(called) == 2 + 6 + 1
    loop.train_family(FamilySettings(sizes=[4, 8, 12, 16], budget=24))
    assert len(called) == 2 + 6 + 1 + 1 + 2
    told = [text for text in said if "2 steps of train at width 4" in text]
    assert [text.partition(":")[0].strip() for text in told[1:]] == 2 * [
        "6 finished stretches are reused where they are needed"
    ]
    sizes = [text.partition(":")[0].strip() for text in said if text.startswith("  size")]
    reused = [f"size {size} is reused, and not trained again" for size in (4, 8, 12)]
    assert sizes == [f"size {size} is finished" for size in (4, 8, 12)] + 2 * reused + ["size 16 is finished"]
    assert load_summary(tmp_path).sentences[0].startswith("Four sizes for 0.")
    page = write_report([tmp_path]).read_text(encoding="utf-8")
    assert "Four sizes for" in page
    assert "size 12" in page


@pytest.mark.quick("5")
@pytest.mark.parametrize("save_every", [None, 5])
def test_a_killed_family_goes_on_to_the_same_bits(family: mu.Family, tmp_path: Path, save_every: int | None) -> None:
    calls = 0

    def dying(model: nn.Module, optimizer: Optimizer, steps: int, schedule: Rates) -> None:
        nonlocal calls
        calls += 1
        train(model, optimizer, steps, schedule)
        if calls % 3 == 0:
            raise Killed

    sizes = FamilySettings(sizes=[4, 8], budget=24)
    whole = loop_in(tmp_path / "whole", family, save_every=save_every).train_family(sizes)
    for _ in range(20):
        try:
            again = loop_in(tmp_path / "run", family, train=dying, save_every=save_every).train_family(sizes)
        except Killed:
            continue
        break
    assert calls > 3
    assert again.large == whole.large
    for size in ("4", "8"):
        ours, theirs = (find_checkpoint(tmp_path / run / "sizes" / size) for run in ("run", "whole"))
        assert ours.read_bytes() == theirs.read_bytes()


def test_a_family_that_grows_in_depth_from_a_model_of_ones_own(deep_family: mu.Family, tmp_path: Path) -> None:
    sizes: list[Any] = [{"width": 4, "depth": 2}, {"width": 8, "depth": 4}]
    start = base_model(deep_family, sizes[0])
    before = copy.deepcopy(start[0].state_dict())
    settings = FamilySettings(sizes=sizes, budget=60, sunk=True)
    loop = loop_in(tmp_path, deep_family)
    loop.train_family(settings, start, width=sizes[0], trained=12)
    assert all(torch.equal(value, before[name]) for name, value in start[0].state_dict().items())
    grown = loop.load_size(sizes[1])
    assert sum(isinstance(each, nn.Tanh) for each in grown.modules()) == 4
    assert not grown.training


@pytest.mark.parametrize("sunk", [False, True])
def test_steps_and_flops_count_the_same_training(family: mu.Family, tmp_path: Path, sunk: bool) -> None:
    """Of a model that is brought along both count all of it, or neither does; and the log says which."""
    said: list[str] = []
    loop = loop_in(tmp_path, family, note=said.append)
    loop.train_family(FamilySettings(sizes=[8, 12], budget=60, sunk=sunk), base_model(family), width=8, trained=12)
    told = json.loads((tmp_path / "sizes" / "8" / "size.json").read_text())
    ground = _LoopGround(loop._recipe(8, 1), "held-out")
    assert told["flops"] == told["steps"] * ground.cost_per_step(8)
    assert told["examples"] == 8 * told["steps"]
    assert told["steps"] == 60
    whose = "none of the steps" if sunk else "the 12 steps"
    assert f"  steps and FLOPs from the start include {whose} of the model that the trunk starts from" in said


# ------------------------------------------------------------------------------------------------ does growing pay?


@pytest.mark.slow
def test_a_comparison_is_judged_by_the_held_out_function_and_has_its_page(family: mu.Family, tmp_path: Path) -> None:
    def by_size(model: nn.Module) -> float:
        return 1.0 / sum(p.numel() for p in model.parameters())  # the wide ones win, whatever they have learnt

    start = base_model(family)
    before = copy.deepcopy(start[0].state_dict())
    loop = loop_in(tmp_path, family, train=lambda model, optimizer, steps, schedule: None, held_out=by_size)
    summary = loop.compare(8, 16, trained=12, steps=16, start=start, settings=PAY)
    assert all(torch.equal(value, before[name]) for name, value in start[0].state_dict().items())
    assert load_summary(tmp_path) == summary
    assert summary.answer["ranking"][-1] == "continued"
    assert summary.large.unit == "FLOPs"
    for one in summary.large.contenders:
        assert one.points[-1].cost + summary.large.charge(one) == pytest.approx(
            summary.large.contenders[0].points[-1].cost, rel=0.1
        )
    assert "The contenders (ways to train) at the full budget" in str(summary)


@pytest.mark.slow
def test_continuing_and_exact_copies_begin_with_the_model_that_was_brought(family: mu.Family, tmp_path: Path) -> None:
    """Trained not at all they are the same function; a rate that was tuned reaches both, whatever a scheduler left."""
    start = base_model(family)
    for group in start[1].param_groups:
        group["initial_lr"] *= 2  # as in the middle of a cosine
    seen: list[float] = []

    def watched(model: nn.Module, optimizer: Optimizer, steps: int, schedule: Rates) -> None:
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        group = optimizer.param_groups[0]
        seen.append(group["lr"] / group["lr_factor"])

    names = ["continued", "copies-without-noise"]
    settings = StudySettings(widths=[4], lrs=[LR / 2], budgets=[0.5, 1.0], seeds=1, small_seeds=1, contenders=names)
    summary = loop_in(tmp_path, family, train=watched).compare(
        8, 16, trained=12, steps=16, start=start, settings=settings
    )
    expected = held_out(start[0].eval()).item()
    for one in summary.large.contenders:
        assert one.finals == pytest.approx([expected], rel=1e-9)
    first_steps = [LR] * 2
    assert seen == pytest.approx([*first_steps, *[LR / 2] * (len(seen) - 2)])


@pytest.mark.slow
def test_numbers_are_widths_at_the_depth_of_the_base(deep_family: mu.Family, tmp_path: Path) -> None:
    loop = loop_in(tmp_path, deep_family)
    loop.train_family(FamilySettings(sizes=[4, 6], budget=8))
    model = loop.load_size(6)
    assert isinstance(model, Deep)
    assert (model.first.out_features, len(model.blocks)) == (6, 2)


def test_depth_alone_compares_what_new_blocks_are(deep_family: mu.Family, tmp_path: Path) -> None:
    few, many = {"width": 8, "depth": 2}, {"width": 8, "depth": 4}
    settings = StudySettings(widths=[{"width": 4, "depth": 2}], lrs=[LR], budgets=[1.0], seeds=1, small_seeds=1)
    said: list[str] = []
    loop = loop_in(tmp_path, deep_family, note=said.append)
    summary = loop.compare(few, many, trained=12, steps=12, settings=settings)
    (at,) = (number for number, text in enumerate(said) if text.startswith("  the first run tells the time"))
    assert said[at - 2].startswith("1/6 ")
    assert said[at - 1].startswith("  2 steps of train at width 4, depth 2, taken twice, ended the same to the bit.")
    assert re.search(r" \(about \d+% of all the training is done, about .* left\)$", said[at])
    assert {*summary.answer["ranking"]} == {"from-scratch", "continued", "identity-blocks", "copied-blocks"}
    finals = {one.name: one.final for one in summary.large.contenders}  # type: ignore[union-attr]
    assert finals["identity-blocks"] != finals["copied-blocks"]
    with pytest.raises(MupscaleError, match=r"depth alone grows, and fresh is about new units: take from from-scratch"):
        loop.compare(few, many, trained=12, steps=12, settings=StudySettings(contenders=["continued", "fresh"]))
    wrong = StudySettings(contenders=["continued", "copied-blocks"])
    with pytest.raises(MupscaleError, match=r"a width grows, and copied-blocks is about new blocks"):
        loop.compare(few, {"width": 16, "depth": 4}, trained=12, steps=12, settings=wrong)


def test_every_contender_warms_up_where_it_begins_and_only_there(family: mu.Family, tmp_path: Path) -> None:
    seen: list[list[float]] = []

    def watched(model: nn.Module, optimizer: Optimizer, steps: int, schedule: Rates) -> None:
        seen.append([schedule(step) for step in range(min(2, steps))])

    settings = StudySettings(
        widths=[4], lrs=[LR], budgets=[1.0], seeds=1, small_seeds=1, contenders=["continued", "fresh"]
    )
    start = base_model(family)
    loop = loop_in(tmp_path, family, train=watched, warmup=2)
    loop.compare(8, 16, trained=12, steps=16, start=start, settings=settings)
    begun = [rates for rates in seen if rates == [0.5, 1.0]]
    assert len(begun) == 1 + 2 + 2 + 2, "the small base model; both tuned, forecast and large"
    with pytest.raises(MupscaleError, match=r"too few for warm-up \(1000\)"):
        loop_in(tmp_path / "long", family, warmup=1000).compare(8, 16, trained=1200, steps=16, settings=settings)
    assert not (tmp_path / "long").exists()


# ------------------------------------------------------------------------------------------------ what is refused


def test_what_cannot_be_studied_is_said(family: mu.Family, tmp_path: Path) -> None:
    loop = loop_in(tmp_path, family)
    with pytest.raises(MupscaleError, match=r"not the family's at width 4: .*'layers.0.weight' has shape \(8, 5\)"):
        loop.compare(4, 16, trained=12, steps=16, start=base_model(family))
    with pytest.raises(MupscaleError, match="naive-widening works only with a recipe"):
        loop.compare(8, 16, trained=12, steps=16, settings=StudySettings(contenders=["continued", "naive-widening"]))

    def build_rounded(width: int) -> nn.Module:
        hidden = -(-width // 6) * 16
        return nn.Sequential(nn.Linear(5, width), nn.Linear(width, hidden), nn.Linear(hidden, 1)).double()

    rounded = mu.Family(build_rounded, base=48, inputs=X[:4])
    small = (
        r"^the small model of width 8 cannot grow to 16 with copies: .* give other small widths in "
        r"StudySettings.widths, or leave copies out of StudySettings.contenders$"
    )
    settings = StudySettings(widths=[8], contenders=["continued", "copies"])
    with pytest.raises(MupscaleError, match=small) as said:
        loop_in(tmp_path, rounded).compare(16, 32, trained=12, steps=16, settings=settings)
    assert "grow=" not in str(said.value)
    torchs = loop_in(tmp_path, family, make_optimizer=lambda model, lr: torch.optim.SGD(model.parameters(), lr))
    with pytest.raises(MupscaleError, match=r"a plain SGD, .* same learning rates.*family.optimizer\(model, SGD"):
        torchs.train_family(SIZES)
    with pytest.raises(MupscaleError, match="give the sizes and the budget of each"):
        loop.train_family(FamilySettings(sizes=[4, 8]))
    plain = mu.Family(build, base=4)
    with pytest.raises(MupscaleError, match=r"give the family a batch \(inputs=\), or the loop flops="):
        loop_in(tmp_path, plain).train_family(SIZES)
    assert not tmp_path.joinpath("stretches").exists()
    changed = Stretch(width=4, steps=4, lr=LR, change=(2, LR / 2))
    trainer = _LoopGround(loop._recipe(4, 4)).make_trainer(tmp_path, "none", "auto", print, 1)
    with pytest.raises(MupscaleError, match=r"cannot train what a recipe can: change \(2, 0.01\)"):
        trainer.train([changed])
    with pytest.raises(MupscaleError, match=r"train has failed: FileNotFoundError: .*my-data"):
        loop_in(tmp_path / "files", family, train=lambda *given: open("my-data")).train_family(SIZES)  # noqa: SIM115
    mute = loop_in(tmp_path, family, train=lambda *given: None, held_out=lambda model: None)
    with pytest.raises(MupscaleError, match="held_out returned NoneType, but must return the loss"):
        mute.train_family(SIZES)


def test_a_loss_that_is_not_finite_has_diverged(family: mu.Family, tmp_path: Path) -> None:
    def lost(model: nn.Module) -> float:
        return float("nan") if sum(p.numel() for p in model.parameters()) > 200 else 1.0

    summary = loop_in(tmp_path, family, train=lambda *given: None, held_out=lost).train_family(SIZES)
    assert [row[6] for row in summary.tables[0].rows] == ["1.000", "1.000", "diverged"]


@pytest.mark.slow
def test_costs_are_counted_on_a_batch_or_given(family: mu.Family, tmp_path: Path) -> None:
    given = {"train": lambda *given: None, "held_out": lambda model: 1.0}
    counted = loop_in(tmp_path / "a", family, **given, batch=16).train_family(SIZES)
    each = 6 * (5 * 4 + 4 * 4 + 4) * 16
    assert counted.large.contenders[1].points[-1].cost == each * 24
    told = loop_in(tmp_path / "b", family, **given, flops=lambda width: 7.0 * width).train_family(SIZES)
    assert told.large.contenders[1].points[-1].cost == 7 * 4 * 24


def test_a_changed_loop_is_never_taken_for_the_one_that_was_trained(family: mu.Family, tmp_path: Path) -> None:
    """Nor is what it has trained lost: changed back, it finds its own."""

    def make(factor: list[float]) -> Callable[..., None]:
        def shrink(model: nn.Module, optimizer: Optimizer, steps: int, schedule: Rates) -> None:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter *= factor[0]

        return shrink

    sizes, said = FamilySettings(sizes=[4, 8], budget=24), list[str]()
    for factor in (0.5, 0.5, 0.25, 0.5):
        loop_in(tmp_path, family, train=make([factor]), note=said.append).train_family(sizes)
    ends = [json.loads(path.read_text()) for path in (tmp_path / "stretches").glob("*/end.json")]
    assert len(ends) == 8
    assert len({end["key"] for end in ends}) == 4
    told = [text.strip().partition(": ") for text in said if "finished stretches are" in text]
    heads = ["are reused where they are needed", "are not used", "are reused where they are needed"]
    assert [head for head, _, _ in told] == [f"4 finished stretches {head}" for head in heads]
    assert told[1][2].startswith("the first 2 steps of train at width 4 end at held-out loss ")


def test_a_loop_that_leaves_its_schedule_out_is_told(family: mu.Family, tmp_path: Path) -> None:
    said: list[str] = []
    loop = loop_in(tmp_path, family, train=lambda model, optimizer, steps, schedule: None, note=said.append)
    loop.train_family(FamilySettings(sizes=[8, 16], budget=20))
    assert any("train has not called schedule" in line for line in said)


def test_a_size_that_the_model_cannot_have_is_refused_before_the_first_is_trained(tmp_path: Path) -> None:
    def build_heads(width: int) -> nn.Module:
        if width % 8:
            raise ValueError("heads of 8 units")
        return build(width)

    family = mu.Family(build_heads, base=8, inputs=X[:8])
    loop = loop_in(tmp_path, family, train=lambda *given: pytest.fail("trained"), flops=lambda width: 1.0)
    with pytest.raises((MupscaleError, ValueError), match="heads of 8"):
        loop.train_family(FamilySettings(sizes=[8, 20], budget=20))


def test_rules_are_part_of_what_is_trained_and_the_rate_is_the_optimizers(tmp_path: Path) -> None:
    def loop(lr: float = LR, **rules: Any) -> OwnLoop:
        return loop_in(tmp_path, mu.Family(build, base=4, inputs=X[:8], rules=mu.RuleSet(**rules)), lr=lr)

    assert loop()._make_identity().family != loop(decay="fixed")._make_identity().family
    model = loop().family.init(8)
    optimizer = adamw(loop().family, model, LR / 2)
    with pytest.raises(MupscaleError, match=r"OwnLoop has lr=0.02, and the optimizer that you bring is at 0.01"):
        loop()._starting(loop()._recipe(8, 4), (model, optimizer), 8, 0)
    loop(LR / 2)._starting(loop(LR / 2)._recipe(8, 4), (model, optimizer), 8, 0)
