"""Many runs as one program: the same numbers as one at a time, whatever differs between them and however they end."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.flop_counter import FlopCounterMode

from mupscale import checkpoint
from mupscale.engine import NotStackable, Outcome, RunStack, lowest_loss_bar, train_many
from mupscale.engine.many_runs import even_share, free_memory, read_outcome, runs_at_once
from mupscale.system.errors import MupscaleError
from mupscale.train import Checkpoints, Evaluation, Growth, Recipe, Schedule, Seeds, Spec, run_recipe
from refusals import refuses
from slow_cases import with_slow
from small_runs import ADAMW, CLASSES, FEATURES, KINDS, SGD, Rows, checkpoints, column, metrics, recipe, step, tensors

HERE = __name__
CPU = torch.device("cpu")
TOLERANCE = 1e-12
CLIPPED = {"clip": 0.05}  # far below the norms of these models, so that it binds at every step


def optimizer(name: str, **hyper: Any) -> Spec:
    return Spec(f"torch.optim.{name}", hyper)


def varied(base: Recipe, count: int = 3) -> list[Recipe]:
    """Runs that differ in learning rate, weight decay, eps and the seeds of weights and data."""
    made = []
    for number in range(count):
        own = {name: base.optimizer.init_args.get(name) for name in ("lr", "weight_decay", "eps")}
        changed = {name: value * (1 + 0.5 * number) for name, value in own.items() if value is not None}
        given = replace(base.optimizer, init_args={**base.optimizer.init_args, **changed})
        made.append(replace(base, optimizer=given, seeds=Seeds(init=number, data=number % 2, noise=number)))
    return made


def rated(base: Recipe, *rates: float) -> list[Recipe]:
    """Runs that differ in learning rate alone."""
    given = base.optimizer.init_args
    return [replace(base, optimizer=replace(base.optimizer, init_args={**given, "lr": lr})) for lr in rates]


def far(ours: Sequence[Outcome], theirs: Sequence[Outcome]) -> float:
    """The largest difference of two engines in a loss, at a point or held out; relative where losses are large."""
    found = [0.0]
    for a, b in zip(ours, theirs, strict=True):
        assert (a.status, a.step, a.flops, len(a.curve)) == (b.status, b.step, b.flops, len(b.curve))
        assert a.scores.keys() == b.scores.keys()
        found += [abs(x - y) / max(1.0, abs(y)) for (_, x), (_, y) in zip(a.curve, b.curve, strict=True)]
        found += [abs(a.scores[name] - b.scores[name]) / max(1.0, abs(b.scores[name])) for name in a.scores]
    return max(found)


def both(recipes: Sequence[Recipe], **asked: Any) -> tuple[list[Outcome], list[Outcome]]:
    asked = {"points": recipes[0].steps, "evaluate": True, **asked}
    return train_many(recipes, engine="vectorised", **asked), train_many(recipes, engine="serial", **asked)


# ------------------------------------------------------------------------------------------------ the same numbers


class Smooth(nn.Module):
    """No unit of which is ever dead, so that no gradient is ever zero."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.readout = nn.Linear(FEATURES, width), nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.readout(self.first(x).tanh())
        return out


class Smoothing(Smooth):
    """A model with a buffer that it puts in the place of the old one, and looks at while it is evaluated."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.register_buffer("mean", torch.zeros(FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.8 * self.mean + 0.2 * x.mean(0)
        return super().forward(x - self.mean)


UNTIED = replace(KINDS["gpt2-heads"]["model"], init_args={**KINDS["gpt2-heads"]["model"].init_args, "tied": False})
DROP = [Growth(at=10, width=8, lr=0.001), Growth(at=15, width=8)]
OWN_LOSS = {
    "loss": "small_runs.squared",
    "data": Spec("small_runs.Curve"),
    "model": Spec("mupscale.models.MLP", {"d_in": FEATURES, "d_out": FEATURES, "depth": 3}),
}
CASES: dict[str, dict[str, Any]] = {  # every update itself is held against torch's in test_updates
    "SGD, decay": {"optimizer": optimizer("SGD", lr=0.2, weight_decay=0.1)},
    "Nesterov": {"optimizer": optimizer("SGD", lr=0.1, momentum=0.8, nesterov=True, weight_decay=0.1)},
    "Adam, decay": {"optimizer": optimizer("Adam", lr=0.02, weight_decay=0.3, eps=0.01)},
    "AMSGrad": {"optimizer": optimizer("Adam", lr=0.02, amsgrad=True, weight_decay=0.3, eps=0.01)},
    "AdamW": {"clip": None},
    "AdamW, foreach": {"optimizer": replace(ADAMW, init_args={**ADAMW.init_args, "foreach": False})},
    "cosine": {"schedule": Schedule("cosine", warmup=5, floor=0.1)},
    "wsd": {"schedule": Schedule("wsd", warmup=3, decay=7)},
    "drop": {"grow": DROP, "schedule": Schedule("cosine"), "steps": 20},
    "drop alone": {"grow": DROP[:1], "steps": 20},
    "own loss": OWN_LOSS,
    "tied": {"kind": "gpt2-heads"},
    "untied": {"kind": "gpt2-heads", "model": UNTIED},
    "growing heads' size": {"kind": "gpt2-dims", "optimizer": SGD},
    "resnet, SGD": {"kind": "resnet", "optimizer": SGD, "steps": 4},
    "norms, AdamW": {"kind": "normed"},
    "a buffer that is replaced": {"model": Spec(f"{HERE}.Smoothing")},
}


@pytest.mark.quick("Nesterov", "Adam, decay", "AdamW", "wsd", "drop", "own loss", "tied", "norms*", "a buffer*")
@pytest.mark.parametrize("what", CASES)
def test_a_stack_gives_the_losses_of_one_at_a_time(what: str) -> None:
    """Whatever the optimizer, the schedule and the model, whose buffers held-out scores are computed with."""
    recipes = varied(recipe(**{"steps": 10, **CLIPPED, **CASES[what]}))
    if what.startswith("drop"):  # at another step in every run
        recipes[1] = replace(recipes[1], grow=[Growth(at=7, width=8, lr=0.0)])
        recipes[2] = replace(recipes[2], grow=[])
    ours, theirs = both(recipes)
    assert far(ours, theirs) <= TOLERANCE
    assert len(ours[0].curve) == recipes[0].steps
    assert len({outcome.curve[-1][1] for outcome in ours}) == 3
    assert ours[0].scores.keys() == ({"loss"} if what == "own loss" else {"loss", "accuracy"})


@pytest.mark.quick("more runs than streams")
@pytest.mark.parametrize("streams", [1, 2, 3], ids=["one for all", "more runs than streams", "one for each"])
def test_batches_that_are_made_ahead_are_the_same(streams: int) -> None:
    """As on a GPU; over the ends of epochs, and where somebody asks to stop in between."""
    asked = [
        replace(one, seeds=replace(one.seeds, data=number % streams))
        for number, one in enumerate(varied(recipe(batch=70)))
    ]
    ahead, one_by_one = RunStack(asked, torch.device("cpu")), RunStack(asked, torch.device("cpu"))
    ahead._prefetch_bytes = 1 << 20
    asked_for, batches = list[int](), ahead.data.batches
    ahead.data.batches = lambda seeds, start, count: asked_for.append(count) or batches(seeds, start, count)  # type: ignore[method-assign, func-returns-value]
    stops = iter([False] * 20 + [True])
    for count in (5, 17, 40):
        ours, theirs = ahead.advance(count, lambda: next(stops)), one_by_one.advance(count)
        assert torch.equal(ours, theirs[: len(ours)])
    assert ahead.step == 5 + 17 + 1
    assert 70 * 17 > ahead.data.size > 70
    assert sorted(set(asked_for)) == [70, 70 * 4, 70 * 16, 70 * 39]


def test_batch_norms_buffers_are_each_runs_own() -> None:
    recipes = varied(recipe(kind="normed", optimizer=SGD, steps=5))
    stack = RunStack(recipes, CPU)
    stack.advance(5)
    for row, one in enumerate(recipes):
        model, alone = stack.export(row)[0], run_recipe(one).model
        for (name, ours), theirs in zip(model.named_buffers(), alone.buffers(), strict=True):
            assert torch.allclose(ours.double(), theirs.double(), rtol=0, atol=TOLERANCE), name


@pytest.fixture(scope="module")
def base_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs to start from, with momentum and moments in their checkpoints."""
    torch.set_num_threads(1)
    made = {}
    for name, spec in {"AdamW": ADAMW, "SGD": replace(SGD, init_args={**SGD.init_args, "dampening": 0.3})}.items():
        made[name] = tmp_path_factory.mktemp("bases") / name
        run_recipe(recipe(made[name], optimizer=spec, steps=15))
    return made


NOISES: dict[str, list[tuple[Any, str]]] = {
    "levels": [(0.0, "init"), (0.3, "init"), (1.0, "init")],
    "units": [(0.2, "theory"), (0.05, "signal"), (0.3, "init")],
    "seeds": [(0.3, "init"), (0.3, "init"), (0.3, "init")],
    "by name": [({"hidden.0.weight": 0.3}, "theory"), ({"readout.weight": 0.3}, "signal"), (0.0, "init")],
}


@pytest.mark.quick("AdamW-units", "AdamW-by name")
@pytest.mark.parametrize("noises", NOISES)
@pytest.mark.parametrize("name", with_slow(["AdamW", "SGD"], ["AdamW"]))
def test_upscaled_runs_start_from_checkpoints_with_their_optimizers_state(
    name: str, noises: str, base_runs: dict[str, Path]
) -> None:
    """The trials of Sweep 2: one base model, several levels of noise, seeds of noise."""
    names = dict(torch.nn.Module.named_parameters(recipe().family().build(8)))
    known = [n for n in names if n.endswith("weight")]
    spec = ADAMW if name == "AdamW" else replace(SGD, init_args={**SGD.init_args, "dampening": 0.3})
    base = recipe(optimizer=spec, width=16, steps=10, start=str(base_runs[name]), how="copies", **CLIPPED)
    recipes = []
    for one, (noise, unit) in zip(varied(base), NOISES[noises], strict=True):
        if isinstance(noise, dict):
            noise = dict(zip(known, noise.values(), strict=False))
        seeds = replace(one.seeds, init=0)
        recipes.append(replace(one, noise=noise, noise_unit=unit, seeds=seeds))  # type: ignore[arg-type]
    ours, theirs = both(recipes)
    assert far(ours, theirs) <= TOLERANCE
    fresh = train_many([replace(r, start=None, noise=0.0) for r in recipes], points=10, engine="vectorised")
    assert far([replace(o, scores={}) for o in ours], fresh) > 1e-3


def test_runs_from_checkpoints_and_from_nothing_in_one_stack(base_runs: dict[str, Path]) -> None:
    """Some with the moments of 15 steps, one with none: bias correction is each run's own."""
    fresh = recipe(steps=10)
    ours, theirs = both([replace(fresh, start=str(base_runs["AdamW"])), fresh])
    assert far(ours, theirs) <= TOLERANCE


@pytest.mark.slow
def test_hyperparameters_that_only_some_recipes_give_are_torchs_own_in_the_others() -> None:
    bare = optimizer("AdamW", lr=0.02)
    recipes = [recipe(optimizer=bare), recipe(optimizer=optimizer("AdamW", lr=0.02, weight_decay=5.0, eps=0.1))]
    for order in (recipes, recipes[::-1]):
        ours, theirs = both(order)
        assert far(ours, theirs) <= TOLERANCE


@pytest.mark.quick("lr")
@pytest.mark.parametrize("factor", ["lr", "weight_decay", "eps", "norm"])
def test_the_comparison_would_see_a_wrong_factor(factor: str) -> None:
    right = recipe(steps=20, **CLIPPED)
    made = []
    for wrong in (1.0, 1.01):
        stack = RunStack([right], CPU)
        last = stack.replicas.layout.segments[-1]
        changed = replace(last, **{factor: wrong * getattr(last, factor)})
        segments = (*stack.replicas.layout.segments[:-1], changed)
        stack.replicas.layout = replace(stack.replicas.layout, segments=segments)
        stack._reset_rows()
        made.append(stack.advance(20))
    assert (made[0] - made[1]).abs().max() > 1e5 * TOLERANCE


# ------------------------------------------------------------------------------------------------ curves and points


@pytest.mark.quick("7-1-*", "10-3-*")
@pytest.mark.parametrize(
    ("steps", "points", "expected"),
    [(1, 40, [1]), (7, 1, [7]), (7, 100, [1, 2, 3, 4, 5, 6, 7]), (10, 3, [3, 6, 9, 10]), (45, 2, [22, 44, 45])],
)
def test_points_of_a_curve(steps: int, points: int, expected: list[int]) -> None:
    """The last step is always one; a point is the mean since the one before."""
    recipes, heard = varied(recipe(steps=steps), 2), list[tuple[int, dict[int, float]]]()
    ours, theirs = both(
        recipes, points=points, evaluate=False, on_point=lambda at, values: heard.append((at, {**values}))
    )
    assert far(ours, theirs) <= TOLERANCE
    assert [at for at, _ in ours[0].curve] == expected
    assert heard[: len(expected)] == [(at, {n: ours[n].curve[i][1] for n in (0, 1)}) for i, at in enumerate(expected)]
    assert ours[0].scores == theirs[0].scores == {}
    assert ours[0].loss == pytest.approx(theirs[0].loss)
    refuses("at least one", train_many, recipes, points=0)
    assert train_many([]) == []


@pytest.mark.quick("vectorised")
@pytest.mark.parametrize("engine", ["vectorised", "serial"])
def test_data_that_is_loaded_already(engine: Any) -> None:
    recipes, data = varied(recipe(steps=5)), Rows()
    unknown = [replace(one, data=Spec("small_runs.Rows", {"no such": 1})) for one in recipes]  # never made again
    assert far(train_many(unknown, engine=engine, data=data), train_many(recipes, engine=engine)) == 0
    refuses("the runs differ in data", train_many, [recipes[0], unknown[1]], engine=engine, data=data)


# ------------------------------------------------------------------------------------------------ stopped early


@pytest.mark.parametrize("engine", ["vectorised", "serial"])
def test_runs_that_are_stopped_at_a_rung_leave_the_others_as_they_are(engine: Any) -> None:
    recipes = varied(recipe(steps=50, **CLIPPED), 5)
    asked: list[tuple[int, set[int]]] = []

    def decide(at: int, values: Mapping[int, float]) -> list[int]:
        asked.append((at, set(values)))
        return [number for number in ([0, 3] if at < 20 else [1]) if number in values] + [99]

    ours = train_many(recipes, engine=engine, points=10, rungs=[9, 31, 50], prune=decide, evaluate=True)
    alone = train_many(recipes, engine="vectorised", points=10, evaluate=True)
    assert [(o.status, o.step) for o in ours] == [
        (f, s)
        for f, s in zip(["pruned", "pruned", "finished", "pruned", "finished"], [10, 30, 50, 10, 50], strict=True)
    ]
    assert {at for at, _ in asked} == {10, 30}
    if engine == "vectorised":
        assert asked == [(10, {0, 1, 2, 3, 4}), (30, {1, 2, 4})]
    assert far([ours[2], ours[4]], [alone[2], alone[4]]) <= TOLERANCE
    assert ours[1].loss is None
    assert [at for at, _ in ours[1].curve] == [5, 10, 15, 20, 25, 30]
    assert ours[0].flops == pytest.approx((alone[0].flops or 0) * 10 / 50)


def test_who_is_gone_costs_nothing_more() -> None:
    """Matrix products alone are counted, each with all of its operands: so by rows, exactly."""
    stack, spent = RunStack(varied(recipe(), 6), CPU), []
    for rows in ([0, 1, 2, 3, 4, 5], [5, 2, 0]):
        stack.keep_runs(rows)
        stack.advance(1)  # the first step finds out how to cut the stack into blocks
        with FlopCounterMode(display=False) as counter:
            losses = stack.advance(1)
        assert losses.shape == (1, len(rows))
        assert all(len(tensor) == len(rows) for tensor in stack.replicas.tensors().values())
        spent.append(counter.get_total_flops())
    assert spent[1] == spent[0] / 2 > 0


@pytest.mark.parametrize("kind", ["mlp", "normed"])
def test_kept_rows_keep_all_that_is_theirs(kind: str) -> None:
    recipes = varied(recipe(kind=kind, steps=30, grow=[] if kind == "normed" else [Growth(12, 8, lr=0.01)]), 4)
    whole, cut = RunStack(recipes, CPU), RunStack(recipes, CPU)
    expected = whole.advance(20)
    first = cut.advance(10)
    cut.keep_runs([3, 1])
    assert (torch.cat([first[:, [3, 1]], cut.advance(10)]) - expected[:, [3, 1]]).abs().max() <= TOLERANCE
    assert [r.seeds.init for r in cut.recipes] == [3, 1]
    ours, theirs = cut.evaluate(), whole.evaluate()
    assert ours[0]["loss"] == pytest.approx(theirs[3]["loss"], abs=TOLERANCE)


# ------------------------------------------------------------------------------------------------ rows for nobody


class Dear(RunStack):
    """A stack that keeps its shape as a compiled one does, and makes batches ahead as on a GPU."""

    shapes: list[tuple[int, int]]  # runs and rows, whenever some of the runs have gone

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._keep_row_count, self._prefetch_bytes = True, 1 << 20

    def keep_runs(self, rows: Sequence[int]) -> None:
        super().keep_runs(rows)
        Dear.shapes.append((len(self.recipes), len(self.replicas)))


@pytest.fixture
def shapes() -> list[tuple[int, int]]:
    """Those that the test's stacks go through."""
    Dear.shapes = []
    return Dear.shapes


def scheduled(kind: str, count: int, streams: int) -> list[Recipe]:
    """Runs with all that a row has of its own: a schedule, drops of the rate, clipping, so many streams of data."""
    changes = {"optimizer": SGD} if kind == "normed" else {}
    base = varied(recipe(kind=kind, steps=40, schedule=Schedule("cosine", warmup=3), **CLIPPED, **changes), count)
    return [
        replace(
            one, seeds=replace(one.seeds, data=row % streams), grow=[Growth(7 + row, one.width, lr=0.01 + row / 99)]
        )
        for row, one in enumerate(base)
    ]


def assert_same_steps(ours: RunStack, theirs: RunStack, count: int) -> None:
    """LossesAndNorms and norms of the next steps, and then all else that can be asked of a run."""
    far_off = [(ours.advance(count) - theirs.advance(count)).abs().max()]
    assert ours.norms is not None
    assert theirs.norms is not None
    far_off.append(((ours.norms - theirs.norms) / theirs.norms).abs().max())
    assert ours.recipes == theirs.recipes
    assert ours.finite_runs() == theirs.finite_runs() == [True] * len(theirs.recipes)
    for row, (a, b) in enumerate(zip(ours.evaluate(), theirs.evaluate(), strict=True)):
        assert a == pytest.approx(b, abs=TOLERANCE)
        assert ours.rate(row) == theirs.rate(row)
        (model, optimizer), (their_model, their_optimizer) = ours.export(row), theirs.export(row)
        held, expected = model.state_dict(), their_model.state_dict()
        far_off += [(held[name] - expected[name]).abs().max() for name in expected]
        state, their_state = optimizer.state_dict(), their_optimizer.state_dict()
        assert state["param_groups"] == their_state["param_groups"]
        for number, moments in their_state["state"].items():
            far_off += [(state["state"][number][name] - moments[name]).abs().max() for name in moments]
    assert all(float(distance) <= TOLERANCE for distance in far_off)


@pytest.mark.quick("mlp-3-1", "normed-5-None")
@pytest.mark.parametrize("cached", [None, 1])
@pytest.mark.parametrize("streams", [1, 3, 5])
@pytest.mark.parametrize("kind", ["mlp", "normed"])
def test_where_a_shape_is_dear_runs_go_and_their_rows_stay(
    kind: str, streams: int, cached: int | None, shapes: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Again and again: before the first step, in another order, in blocks, and with as many runs as streams."""
    if cached is not None:
        monkeypatch.setattr("mupscale.engine.stack._CACHED", cached)
    recipes = scheduled(kind, 10, streams)
    ours, theirs = Dear(recipes, CPU), RunStack(recipes, CPU)
    for rows in ([*range(9, -1, -1)], [0, 2, 3, 4, 5, 6, 7, 9], [7, 6, 5, 2, 1, 0], [4, 0, 1, 2, 3], [3, 0], [1]):
        blocks, flat = ours._blocks, ours.replicas.flat
        for stack in (ours, theirs):
            stack.keep_runs(rows)
        assert_same_steps(ours, theirs, 4)
        assert len(theirs.replicas) == len(rows)
        assert len(ours._blocks or ()) == (2 if cached and len(ours.replicas) > 8 else 1)
        if len(rows) in (8, 6):  # where a graph or a compiled step would look for it
            assert ours.replicas.flat is flat
            assert ours._blocks is blocks
    assert shapes == [(10, 10), (8, 10), (6, 10), (5, 5), (2, 2), (1, 1)]


@pytest.mark.quick("normed")
@pytest.mark.parametrize("kind", ["mlp", "normed"])
def test_a_row_for_nobody_may_hold_anything(kind: str, shapes: list[tuple[int, int]]) -> None:
    recipes = scheduled(kind, 5, 2)
    ours, theirs = Dear(recipes, CPU), RunStack(recipes, CPU)
    for stack in (ours, theirs):
        stack.advance(5)
        stack.keep_runs([0, 3, 4])
    for tensor in ours.replicas.tensors().values():
        if tensor.is_floating_point():
            tensor[1], tensor[2] = float("nan"), float("inf")
    assert_same_steps(ours, theirs, 9)
    assert shapes == [(3, 5)]
    assert ours.replicas.finite_rows() == [True, False, False, True, True]


@pytest.mark.quick("normed")
@pytest.mark.parametrize("kind", ["mlp", "normed"])
def test_a_file_holds_the_runs_alone(kind: str, tmp_path: Path, shapes: list[tuple[int, int]]) -> None:
    recipes = scheduled(kind, 5, 2)
    ours = Dear(recipes, CPU)
    ours.advance(5)
    ours.keep_runs([1, 4, 2])
    assert shapes == [(3, 5)]
    ours.advance(4)
    ours.save(tmp_path / "stack", {})
    saved, gone = checkpoint.load(tmp_path / "stack"), ours.replicas.flat.detach()[3].clone()
    assert {len(tensor) for tensor in saved.model.values()} == {3}
    other, whole = RunStack([recipes[row] for row in (1, 4, 2)], CPU), RunStack(recipes, CPU)
    other.restore(saved)
    assert_same_steps(ours, other, 5)
    for stack in (ours, other):
        stack.restore(saved)
        assert stack.step == 9
    assert not torch.equal(ours.replicas.flat.detach()[3], gone)  # it has gone on, and is nobody's to restore
    assert_same_steps(ours, other, 9)
    start = whole.replicas.flat.detach().clone()
    refuses("not where these runs stood", whole.restore, saved)
    assert torch.equal(whole.replicas.flat, start)


# ------------------------------------------------------------------------------------------------ memory is short


@pytest.mark.slow
def test_parts_when_memory_is_short_give_the_same() -> None:
    recipes, said = varied(recipe(steps=20, **CLIPPED), 5), list[str]()
    data = Rows().to(CPU, torch.float64)
    most = runs_at_once(recipes[0], CPU, data, memory=1 << 17)
    assert 1 < most < 5
    asked: dict[str, Any] = {"engine": "vectorised", "points": 20, "evaluate": True}
    heard: list[list[int]] = []
    ours = train_many(
        recipes, **asked, memory=1 << 17, note=said.append, on_point=lambda at, values: heard.append(list(values))
    )
    assert far(ours, train_many(recipes, **asked)) <= TOLERANCE
    share = even_share(5, most)
    assert heard[0] == list(range(share))
    assert max(map(len, heard)) == share
    assert said == [f"{even_share(5, most)} of 5 runs at a time: more need more memory"]
    assert far(train_many(recipes, **asked, memory=1, note=said.append), ours) <= TOLERANCE


def test_how_many_runs_fit() -> None:
    """More of smaller ones; in proportion to memory; as many as one would count by hand, within a factor of two."""
    data = Rows().to(CPU, torch.float64)
    at = {width: runs_at_once(recipe(width=width, batch=1), CPU, data, 1 << 30) for width in (8, 64, 256)}
    assert at[8] > 4 * at[64] > 16 * at[256]
    assert runs_at_once(recipe(width=256, batch=1), CPU, data, 1 << 31) == pytest.approx(2 * at[256], abs=1)
    weights = (
        8 * 256 * (FEATURES + 256 + CLASSES)
    )  # bytes: parameters, gradients, two moments, and as much to work with
    assert 0.7 * (1 << 30) / (16 * weights) < at[256] < 0.7 * (1 << 30) / (8 * weights)
    large = runs_at_once(recipe(width=8, batch=4096), CPU, data, 1 << 30)
    activations = 8 * 4096 * (3 * 8 + FEATURES + CLASSES)
    assert 0.7 * (1 << 30) / (6 * activations) < large < 0.7 * (1 << 30) / (1.5 * activations)
    assert free_memory(CPU) > 1 << 20
    assert [even_share(*those) for those in [(10, 10), (10, 9), (10, 3), (1, 5), (7, 1)]] == [10, 5, 3, 1, 1]


def test_measuring_what_a_step_keeps_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autograd holds an operation's own result for ever if a hook hands it back: every stack would leave a step's."""
    seen, hooks = list[StorageWeakRef](), torch.autograd.graph.saved_tensors_hooks

    def spying(pack: Any, unpack: Any) -> Any:
        def noted(tensor: torch.Tensor) -> Any:
            seen.append(StorageWeakRef(tensor.untyped_storage()))
            return pack(tensor)

        return hooks(noted, unpack)

    monkeypatch.setattr(torch.autograd.graph, "saved_tensors_hooks", spying)
    runs_at_once(recipe(), CPU, Rows().to(CPU, torch.float64), 1 << 30)
    assert seen
    assert all(storage.expired() for storage in seen)


# ------------------------------------------------------------------------------------------------ the fallback


class Choosing(Smooth):
    """A model that looks at its numbers to know what to do."""

    def __init__(self, width: int, when: str = "always") -> None:
        super().__init__(width)
        self.when = when

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        if (self.when == "always" or not self.training) and h.mean() > 0:
            h = -h
        out: Tensor = self.readout(h)
        return out


class Idle(Smooth):
    """A model with a layer that nothing goes through; torch's optimizers pass it over, decay included."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.idle = nn.Linear(width, width)


class Frozen(Smooth):
    """A model of which a part does not train."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.first.weight.requires_grad_(False)


UNFIT: dict[str, tuple[dict[str, Any], str]] = {
    "dropout": ({"model": Spec("small_runs.Dropping")}, "cannot run small_runs.Dropping"),
    "RMSprop": ({"optimizer": optimizer("RMSprop", lr=0.01)}, "RMSprop is not"),
    "choosing": ({"model": Spec(f"{HERE}.Choosing")}, "data-dependent control flow"),
    "choosing at evaluation": ({"model": Spec(f"{HERE}.Choosing", {"when": "evaluation"})}, "data-dependent"),
    "idle": ({"model": Spec(f"{HERE}.Idle")}, "has no part in the loss"),
    "frozen": ({"model": Spec(f"{HERE}.Frozen")}, "'first.weight' does not train"),
    "accumulate": ({"accumulate": 2}, "accumulate"),
    "growth": ({"grow": [Growth(5, 16)]}, "cannot grow in the middle"),
    "noise": ({"grow": [Growth(5, 8, noise=0.1)]}, "cannot grow in the middle"),
}


@pytest.mark.quick("dropout", "RMSprop", "choosing at evaluation", "idle", "frozen", "accumulate", "noise")
@pytest.mark.parametrize("what", UNFIT)
def test_what_vmap_cannot_serve_is_trained_one_at_a_time_and_said(what: str) -> None:
    changes, reason = UNFIT[what]
    recipes, said = rated(recipe(steps=10, **changes), 0.01, 0.02), list[str]()
    with pytest.raises(NotStackable, match=reason):
        train_many(recipes, engine="vectorised")
    ours = train_many(recipes, points=10, evaluate=True, note=said.append)
    (sentence,) = said
    assert sentence.startswith("one run at a time: ")
    assert reason in sentence
    for outcome, one in zip(ours, recipes, strict=True):
        alone = run_recipe(replace(one, log_every=1))
        assert outcome.status == alone.status == "finished"
        assert len(outcome.curve) == 10
    assert far(ours, train_many(recipes, engine="serial", points=10, evaluate=True)) == 0


@pytest.mark.parametrize(
    ("change", "named"),
    [({"width": 16}, "width"), ({"batch": 4}, "batch"), ({"clip": 1.0}, "clip"), ({"steps": 9}, "steps")],
)
def test_runs_that_differ_in_what_is_shared(change: dict[str, Any], named: str) -> None:
    recipes, said = [recipe(steps=10), recipe(**{"steps": 10, **change})], list[str]()
    with pytest.raises(NotStackable, match=f"the runs differ in {named}"):
        train_many(recipes, engine="vectorised")
    ours = train_many(recipes, note=said.append)
    assert f"differ in {named}" in said[0]
    assert far(ours, train_many(recipes, engine="serial")) == 0


def test_a_mistake_is_said_as_train_says_it() -> None:
    """Not taken for a reason to fall back: one at a time it would be the same mistake."""
    few = replace(KINDS["mlp"]["model"], init_args={**KINDS["mlp"]["model"].init_args, "d_out": 2})
    with pytest.raises(MupscaleError, match=r"the model has 2 outputs, but the data has 3 classes") as found:
        train_many(varied(recipe(model=few)), engine="vectorised")
    assert not isinstance(found.value, NotStackable)
    refuses("there is no checkpoint", train_many, [recipe(start="nowhere")])


# ------------------------------------------------------------------------------------------------ diverged


@pytest.mark.quick("3")
@pytest.mark.parametrize("points", [50, 3])
def test_diverged_runs_are_told_with_their_step_and_disturb_nobody(points: int) -> None:
    base = recipe(optimizer=optimizer("SGD", lr=0.1, momentum=0.9), steps=50)
    recipes = rated(base, 0.1, 1e200, 0.05, 1e40, 1e100)
    ours, theirs = both(recipes, points=points)
    assert far(ours, theirs) <= TOLERANCE
    assert [outcome.status for outcome in ours] == ["finished", "diverged", "finished", "diverged", "diverged"]
    assert 1 < ours[1].step <= ours[4].step < ours[3].step < 50
    assert ours[1].loss is None
    quiet = train_many([recipes[0], recipes[2]], engine="vectorised", points=points, evaluate=True)
    assert far([ours[0], ours[2]], quiet) <= TOLERANCE


def test_all_diverge() -> None:
    ours, theirs = both(rated(recipe(optimizer=optimizer("SGD", lr=0.1), steps=30), 1e200, 1e250))
    assert far(ours, theirs) <= TOLERANCE
    assert {outcome.status for outcome in ours} == {"diverged"}


def test_weights_that_break_where_the_loss_does_not(tmp_path: Path) -> None:
    """At the last step: its loss is finite, and the weights it leaves are not."""
    base = recipe(tmp_path / "a", optimizer=optimizer("SGD", lr=0.1), steps=6)
    drop = [Growth(at=5, width=8, lr=1e308)]
    for engine in ("vectorised", "serial"):
        out = [str(tmp_path / engine / name) for name in "ab"]
        recipes = [replace(base, out=out[0], grow=drop), replace(base, out=out[1])]
        broken, well = train_many(recipes, engine=engine)  # type: ignore[arg-type]
        assert (broken.status, broken.step, well.status) == ("diverged", 7, "finished")
        assert metrics(Path(out[0]), "end")[0]["at"] == 7
        assert not (tmp_path / engine / "a" / "checkpoints" / step(6)).exists()
        assert read_outcome(recipes[0]) == broken


# ------------------------------------------------------------------------------------------------ runs with a folder


def foldered(folder: Path, **changes: Any) -> list[Recipe]:
    """Runs with a schedule, clipping and a drop, in which no interval fits another."""
    usual = {
        "steps": 26,
        "schedule": Schedule("cosine", warmup=4),
        "grow": [Growth(at=11, width=8, lr=0.01), Growth(at=14, width=8)],
        "log_every": 4,
        "evaluation": Evaluation(every=7, batch=5),
    }
    recipes = varied(recipe(folder, **{**usual, **CLIPPED, **changes}))
    return [replace(one, out=str(folder / str(number))) for number, one in enumerate(recipes)]


def assert_same_folders(ours: Path, theirs: Path) -> None:
    """The same lines of metrics, but for rounding and the clock."""
    assert [p.name for p in sorted(ours.iterdir())] == [p.name for p in sorted(theirs.iterdir())]
    for name in ("0", "1", "2"):
        mine, yours = metrics(ours / name), metrics(theirs / name)
        assert [list(record) for record in mine] == [list(record) for record in yours]
        for a, b in zip(mine, yours, strict=True):
            for key in a.keys() - {"seconds"}:
                close = pytest.approx(b[key], abs=TOLERANCE) if isinstance(b[key], float) else b[key]
                assert a[key] == close, key


@pytest.mark.quick("AdamW")
@pytest.mark.parametrize("spec", [ADAMW, SGD], ids=["AdamW", "SGD"])
def test_a_folder_is_one_that_train_could_have_written(tmp_path: Path, spec: Spec) -> None:
    """Every line of metrics, and a checkpoint from which `train` goes on as if it had been there all along."""
    recipes = foldered(tmp_path / "together", optimizer=spec, schedule=Schedule(), checkpoints=Checkpoints(every=0))
    train_many(recipes, engine="vectorised")
    for one in recipes:
        run_recipe(replace(one, out=str(one.out).replace("together", "alone")))
    assert_same_folders(tmp_path / "together", tmp_path / "alone")
    assert {record["kind"] for record in metrics(tmp_path / "together" / "0")} == {"train", "eval", "grow", "end"}
    assert len(column(tmp_path / "together" / "0", "grad_norm")) == 7
    ours, theirs = (tensors(tmp_path / who / "1" / "checkpoints" / step(26)) for who in ("together", "alone"))
    assert ours.keys() == theirs.keys()
    assert max(float((ours[name].double() - theirs[name].double()).abs().max()) for name in ours) <= TOLERANCE
    for who in ("together", "alone"):
        for one in recipes:
            run_recipe(replace(one, out=str(one.out).replace("together", who), steps=40), resume=True)
    assert_same_folders(tmp_path / "together", tmp_path / "alone")


def test_resume_skips_what_is_finished(tmp_path: Path) -> None:
    recipes = foldered(tmp_path)
    first = train_many(recipes[:2])
    before = [(tmp_path / name / "metrics.jsonl").read_text() for name in "01"]
    ours = train_many(recipes, resume=True)
    assert [(tmp_path / name / "metrics.jsonl").read_text() for name in "01"] == before
    assert ours[:2] == first == [read_outcome(one) for one in recipes[:2]]
    assert ours[2].status == "finished"
    assert train_many(recipes, resume=True) == ours


@pytest.mark.quick("serial")
@pytest.mark.parametrize("engine", ["vectorised", "serial"])
def test_a_folder_that_holds_a_run_is_never_written_over(tmp_path: Path, engine: Any) -> None:
    recipes = foldered(tmp_path)
    train_many(recipes, engine=engine)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    others = rated(recipes[1], 0.5)
    longer, shorter = replace(recipes[2], out=str(tmp_path / "3")), replace(recipes[1], steps=20)
    for asked, resume, said in [
        (recipes, False, "holds a run already: resume it"),
        (others, False, "holds a run already"),
        ([recipes[0], longer, *others], True, "holds a run of another recipe: optimizer is"),
        ([shorter], True, "stands at step 26, beyond the 20 steps asked for"),
        ([recipes[0], longer, replace(longer, seeds=Seeds(7))], True, "two runs have the folder"),
    ]:
        refuses(said, train_many, asked, engine=engine, resume=resume)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    (tmp_path / "0" / "recipe.json").write_text("{")
    refuses(r"recipe\.json cannot be read as a recipe", train_many, recipes, engine=engine, resume=True)


def test_some_with_a_folder_and_some_without(tmp_path: Path) -> None:
    recipes = [recipe(tmp_path / "a", steps=6), recipe(steps=6)]
    with pytest.raises(NotStackable, match="some of the runs have a folder"):
        train_many(recipes, engine="vectorised")
    assert not (tmp_path / "a").exists()
    assert [outcome.status for outcome in train_many(recipes, note=lambda text: None)] == ["finished"] * 2


def test_old_checkpoints_are_forgotten(tmp_path: Path) -> None:
    """As `train` does: a run that was begun one at a time may have left some."""
    one = recipe(tmp_path / "0", steps=9, checkpoints=Checkpoints(every=2, keep=2))
    run_recipe(replace(one, steps=7))
    train_many([one], engine="vectorised", resume=True)
    assert checkpoints(tmp_path / "0") == [step(7), step(9)]
    run_recipe(replace(one, out=str(tmp_path / "alone")))
    assert metrics(tmp_path / "0", "train")[-1]["loss"] == pytest.approx(
        metrics(tmp_path / "alone", "train")[-1]["loss"], abs=TOLERANCE
    )


def test_a_diverged_run_leaves_its_history(tmp_path: Path) -> None:
    base = recipe(tmp_path / "x", optimizer=optimizer("SGD", lr=0.1), steps=20)
    for engine in ("vectorised", "serial"):
        recipes = [replace(r, out=str(tmp_path / engine / str(n))) for n, r in enumerate(rated(base, 0.1, 1e12))]
        train_many(recipes, engine=engine)  # type: ignore[arg-type]
    ours, theirs = (metrics(tmp_path / engine / "1") for engine in ("vectorised", "serial"))
    assert ours[-1]["status"] == theirs[-1]["status"] == "diverged"
    assert ours[-1]["at"] == theirs[-1]["at"]
    assert [r["step"] for r in ours if r["kind"] == "train"] == [r["step"] for r in theirs if r["kind"] == "train"]


# ------------------------------------------------------------------------------------------------ what it needs


@pytest.mark.slow
def test_data_and_engine_need_torch_alone(tmp_path: Path) -> None:
    heavy = ["optuna", "rich", "matplotlib", "yaml", "tensorboard", "transformers"]
    heavy += ["tokenizers", "pyarrow", "datasets"]
    (tmp_path / "t.txt").write_text("some words to pack, and some more\n\n" * 9)
    script = (
        f"import sys\nfor name in {heavy}: sys.modules[name] = None\n"
        "import mupscale.engine, mupscale.study\n"
        "from mupscale.train import Recipe, Spec\n"
        "from mupscale.data import Shakespeare, Text\nfrom mupscale.data.packing import pack\n"
        "pack('t.txt', 'out'); Shakespeare(64).batch(0, 0, 2); Text('out', context=8).batch(0, 0, 2)\n"
        "model, data = Spec('mupscale.models.MLP', {'d_in': 54, 'd_out': 7}), Spec('mupscale.data.CoverTypeSample')\n"
        "recipe = Recipe(model, data, Spec('torch.optim.SGD', {'lr': 0.1}), 8, 8, 3, 4, device='cpu')\n"
        "print([o.status for o in mupscale.engine.train_many([recipe, recipe], engine='vectorised')])"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert result.stdout.strip() == "['finished', 'finished']", result.stderr


def test_without_eps_only_what_is_trained_must_be_finite() -> None:
    """Between parameters lie columns without gradients, where Adam without eps divides nothing by nothing."""
    bare = Spec("torch.optim.AdamW", {"lr": 0.02, "eps": 0.0})
    made = recipe(steps=30, optimizer=bare, model=Spec(f"{__name__}.Smooth"), data=Spec("small_runs.Rows"))
    ours = train_many([made], engine="vectorised", evaluate=True)
    assert ours[0].status == "finished"
    assert far(ours, train_many([made], engine="serial", evaluate=True)) <= TOLERANCE


# ------------------------------------------------------------------------------------------------ what a person sees


@pytest.fixture
def all_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mupscale.system.terminal.SECONDS_BETWEEN_LINES", -1.0)


@pytest.mark.usefixtures("all_lines")
def test_runs_of_one_program_are_one_bar_of_steps(capsys: pytest.CaptureFixture[str]) -> None:
    with lowest_loss_bar(20, 2) as tell:
        tell(10, {0: 0.5, 1: 0.25})
        tell(15, {0: math.nan})
        tell(20, {0: 0.125})
    assert capsys.readouterr().out.splitlines() == ["step 10/20  loss 0.2500", "step 20/20  loss 0.1250"]


@pytest.mark.usefixtures("all_lines")
def test_runs_after_others_count_those_that_are_done(capsys: pytest.CaptureFixture[str]) -> None:
    shown: list[Any] = []
    with lowest_loss_bar(20, 4) as tell:
        update = tell.display.update
        tell.display.update = lambda done, line, **rest: (shown.append(done), update(done, line, **rest))  # type: ignore[method-assign,func-returns-value,assignment]
        tell(10, {0: 0.5, 1: 0.25})
        tell(20, {0: 0.5})
        tell(10, {2: 0.25})
        tell(10, {3: 0.25})
        tell(20, {3: 0.25})
    assert shown == [5, 10, 12.5, 17.5, 20]  # in steps of all of them
    assert capsys.readouterr().out.splitlines() == [
        "step 10/20  loss 0.2500",
        "step 20/20  loss 0.5000",
        "2 of 4 runs done, step 10/20  loss 0.2500",
        "3 of 4 runs done, step 10/20  loss 0.2500",
        "3 of 4 runs done, step 20/20  loss 0.2500",
    ]
