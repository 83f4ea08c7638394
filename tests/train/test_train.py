"""The loop: growth without a kink, the rates it sets, the seeds it keeps apart, and the numbers it tells."""

from __future__ import annotations

import importlib
import math
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import _get_current_dispatch_mode

import mupscale as mu
import small_runs
from mupscale.models import mlp_flops
from mupscale.system.seeds import derive
from mupscale.train import Checkpoints, Evaluation, Growth, Recipe, Schedule, Seeds, Spec, cross_entropy, run_recipe
from small_runs import ADAMW, CLASSES, CONTEXT, FEATURES, SGD, by_hand, column, copies, metrics, recipe
from terminals import on_a_terminal
from toys import Toy
from weights import identical

EXACT = 1e-10
upscale_module = importlib.import_module("mupscale.growth.upscaling")
COSINE = Schedule("cosine", warmup=4, floor=0.1)
WSD = Schedule("wsd", warmup=3, decay=6, floor=0.2)
TELLING = ("loss", "lr", "grad_norm", "accuracy")  # what a growth without noise must not change


def grown(widths: Any, times: int) -> Any:
    return {n: w * times for n, w in widths.items()} if isinstance(widths, dict) else widths * times


def largest_difference(out: Path, other: Path) -> float:
    """Over all that both runs logged at the same steps: losses, rates, gradient norms, evaluations."""
    ours, theirs = ([r for r in metrics(folder) if r["kind"] in ("train", "eval")] for folder in (out, other))
    assert [(r["kind"], r["step"]) for r in ours] == [(r["kind"], r["step"]) for r in theirs]
    return max(abs(a[name] - b[name]) for a, b in zip(ours, theirs, strict=True) for name in TELLING if name in a)


# ------------------------------------------------------------------------------------------------ growth

GROWTHS: dict[str, dict[str, Any]] = {
    "mlp, AdamW, cosine": {"clip": 0.05, "schedule": COSINE},
    "mlp, AdamW, wsd, accumulated": {"accumulate": 2, "schedule": WSD},
    "mlp, SGD": {"optimizer": SGD, "clip": 0.1, "schedule": WSD},
    "mlp, its author's init at another width": {"base": 2, "init_at": 32, "clip": 0.05},
    "gpt2, more heads, AdamW": {"kind": "gpt2-heads", "clip": 0.3, "schedule": COSINE},
    "gpt2, more heads, SGD, accumulated": {"kind": "gpt2-heads", "optimizer": SGD, "clip": 0.3, "accumulate": 4},
    "gpt2, larger heads, AdamW": {"kind": "gpt2-dims", "clip": 0.3, "schedule": WSD},
    "gpt2, larger heads, SGD": {"kind": "gpt2-dims", "optimizer": SGD, "clip": 0.3},
    "resnet, SGD": {"kind": "resnet", "optimizer": SGD, "clip": 0.5, "schedule": COSINE, "steps": 12},
    "resnet, AdamW": {"kind": "resnet", "optimizer": small_runs.GENTLE, "accumulate": 2, "steps": 12},
}


AGAIN = {"gpt2, more heads, SGD, accumulated", "gpt2, larger heads, AdamW", "resnet, AdamW", "resnet, SGD"}
"""Slow: each of their models and each of their optimizers grows in another of the runs, or in growth's tests."""


@pytest.mark.quick("gpt2, more heads, AdamW", "mlp, its author's init*", "mlp, AdamW, wsd*", "mlp, SGD")
@pytest.mark.parametrize(
    "what",
    [pytest.param(what, id=name, marks=pytest.mark.slow if name in AGAIN else ()) for name, what in GROWTHS.items()],
)
def test_growth_without_noise_leaves_no_kink(tmp_path: Path, what: dict[str, Any]) -> None:
    """Losses, gradient norms and evaluations are those of the run that does not grow, after two events as well."""
    plain = recipe(tmp_path / "plain", **what)
    events = [Growth(5, grown(plain.width, 2), how="copies"), Growth(9, grown(plain.width, 6), how="copies")]
    if what.get("kind") == "resnet":
        events = events[:1]
    run_recipe(plain)
    run_recipe(replace(plain, grow=events, out=str(tmp_path / "grown")))
    assert largest_difference(tmp_path / "grown", tmp_path / "plain") < EXACT
    losses = column(tmp_path / "plain", "loss")
    assert min(losses) < losses[0] - 0.02  # there is a curve that could have a kink
    widths = column(tmp_path / "grown", "width")
    assert widths[4:6] == [plain.width, events[0].width]
    assert widths[-1] == events[-1].width
    flops = column(tmp_path / "grown", "flops")
    assert flops[5] - flops[4] > 1.2 * (flops[4] - flops[3]) > 0


@contextmanager
def rates_seen() -> Iterator[list[list[tuple[float, float]]]]:
    """For every optimizer step, the groups' rates and factors."""
    seen: list[list[tuple[float, float]]] = []

    def look(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        seen.append([(group["lr"], group["lr_factor"]) for group in optimizer.param_groups])

    handle = register_optimizer_step_pre_hook(look)
    try:
        yield seen
    finally:
        handle.remove()


@pytest.mark.quick("AdamW-cosine", "SGD-wsd")
@pytest.mark.parametrize("schedule", [Schedule(), COSINE, WSD], ids=["constant", "cosine", "wsd"])
@pytest.mark.parametrize("optimizer", [ADAMW, SGD], ids=["AdamW", "SGD"])
def test_growth_with_a_rate_of_its_own(tmp_path: Path, schedule: Schedule, optimizer: Spec) -> None:
    """From there on every group has lr × its factor × the schedule's multiple, after a second event as well."""
    events = [copies(5, 16, lr=0.007), copies(9, 32), copies(12, 64, lr=0.003)]
    plain = recipe(tmp_path, schedule=schedule, optimizer=optimizer, grow=events)
    with rates_seen() as seen:
        result = run_recipe(plain)
    first = optimizer.init_args["lr"]
    rates = [first] * 5 + [0.007] * 7 + [0.003] * 8
    widths = [8] * 5 + [16] * 4 + [32] * 3 + [64] * 8
    expected = [rate * schedule.at(step, 20) for step, rate in enumerate(rates)]
    assert column(tmp_path, "lr") == expected
    assert column(tmp_path, "width") == widths
    assert column(tmp_path, "lr", "grow") == [0.007, 0.007, 0.003]
    family = plain.family()
    for step, groups in enumerate(seen):
        model = family.build(widths[step])
        factors = {g["lr_factor"] for g in family.param_groups(model, plain.optimizer_class(), lr=1.0)}
        assert {factor for _, factor in groups} == factors  # powers of two
        assert all(lr == expected[step] * factor for lr, factor in groups)
    assert len({factor for _, factor in seen[-1]}) > 1
    assert result.width == 64


def test_a_run_is_what_one_would_write_by_hand(tmp_path: Path) -> None:
    """The library's parts in a bare loop give the same weights, bit for bit, noise and dropout included."""
    what = recipe(
        None, "dropping", clip=0.5, schedule=COSINE, grow=[Growth(6, 16, noise=0.5, lr=0.01)], seeds=Seeds(3, 4, 5, 6)
    )
    what = replace(what, data=Spec("small_runs.Rows"))
    result = run_recipe(what)

    family = mu.Family(lambda width: small_runs.Dropping(width), base=4)
    model = family.init(8, seed=3).double()
    hyper = {**ADAMW.init_args, "betas": (0.9, 0.95)}
    optimizer = family.optimizer(model, torch.optim.AdamW, **hyper)
    by_hand(what, model, optimizer, 0.02, range(6))
    wide: Any = family.upscale(model, optimizer, width=16, noise=0.5, lr=0.01, seed=derive(5, "grow", 6))
    by_hand(what, *wide, 0.01, range(6, 20))
    assert identical(result.model, wide[0])


# ------------------------------------------------------------------------------------------------ seeds and stream


def watched(**changes: Any) -> Recipe:
    """Nothing is learnt, so that weights tell of initialisation and noise alone, and losses of everything."""
    frozen = Spec("torch.optim.SGD", {"lr": 0.0})
    grow = [Growth(3, 16, noise=0.5)]
    return recipe(None, "dropping", data=Spec("small_runs.Watched"), optimizer=frozen, grow=grow, steps=6, **changes)


def act(what: Recipe, out: Path) -> dict[str, Any]:
    """A run's initial weights, its rows, the noise it was given and its losses."""
    small_runs.Watched.seen = []
    result = run_recipe(replace(what, out=str(out), checkpoints=Checkpoints(every=2, keep=9)))
    cost = what.batch // what.accumulate
    before = small_runs.tensors(out / "checkpoints" / small_runs.step(2))
    readout, narrow = result.model.get_submodule("readout").weight, before["model/readout.weight"]
    copied = narrow.repeat_interleave(2, 1) / 2 if what.grow else narrow
    return {
        "init": before["model/second.weight"],
        "data": [rows for rows in small_runs.Watched.seen if len(rows) == cost],
        "noise": (readout - copied).detach(),
        "dropout": column(out, "loss"),
    }


def same(a: Any, b: Any) -> bool:
    return torch.allclose(a, b, rtol=0, atol=1e-12) if isinstance(a, Tensor) else bool(a == b)


def test_each_seed_changes_what_it_is_for_and_nothing_else(tmp_path: Path) -> None:
    first = act(watched(), tmp_path / "first")
    again = act(watched(), tmp_path / "again")
    assert all(same(first[name], again[name]) for name in first)
    for which in ("init", "data", "noise", "dropout"):
        other = act(watched(seeds=Seeds(**{which: 1})), tmp_path / which)
        for name in ("init", "data", "noise"):
            assert same(first[name], other[name]) == (name != which), (which, name)
        changed = [a != b for a, b in zip(first["dropout"], other["dropout"], strict=True)]
        assert changed == ([False] * 3 if which == "noise" else [True] * 3) + [True] * 3


def test_the_data_goes_on_undisturbed_by_growth_and_by_accumulation(tmp_path: Path) -> None:
    expected = small_runs.Rows().to(torch.device("cpu"))
    rows = [expected.batch(0, 8 * step, 8)[1].tolist() for step in range(6)]
    labels = expected.split.train_y
    for number, changes in enumerate([{"grow": []}, {}, {"accumulate": 4}]):
        seen = act(replace(watched(), **changes), tmp_path / str(number))["data"]
        flat = [row for part in seen for row in part]
        assert [labels[flat[8 * step : 8 * step + 8]].tolist() for step in range(6)] == rows
        assert len(set(flat)) == 48  # of an epoch of 80, none comes twice


# ------------------------------------------------------------------------------------------------ steps


def test_accumulation_changes_nothing(tmp_path: Path) -> None:
    for parts in (1, 2, 8):
        run_recipe(recipe(tmp_path / str(parts), clip=0.05, accumulate=parts))
    for parts in (2, 8):
        assert largest_difference(tmp_path / str(parts), tmp_path / "1") < 1e-12


def test_clipping_clips(tmp_path: Path) -> None:
    """With SGD without momentum a step is as long as the clipped gradient; the norm that is logged is the whole one."""
    sgd = Spec("torch.optim.SGD", {"lr": 0.5})
    what = recipe(tmp_path / "a", optimizer=sgd, base=8, steps=1, clip=0.01)
    before = what.family().init(8, seed=0).double()
    after = run_recipe(what).model
    pairs = zip(after.parameters(), before.parameters(), strict=True)
    moved = sum((p - q).square().sum().item() for p, q in pairs)
    assert math.sqrt(moved) == pytest.approx(0.5 * 0.01, rel=1e-4)
    assert column(tmp_path / "a", "grad_norm")[0] > 0.02
    run_recipe(replace(what, clip=1e9, out=str(tmp_path / "b")))
    run_recipe(replace(what, clip=None, out=str(tmp_path / "c")))
    assert column(tmp_path / "b", "grad_norm") == column(tmp_path / "a", "grad_norm")
    assert "grad_norm" not in metrics(tmp_path / "c", "train")[0]


dtypes: list[tuple[torch.dtype, torch.dtype, str]] = []


def noted(outputs: Tensor, targets: Tensor) -> Tensor:
    """The usual loss, which notes in what precision it was asked for."""
    dtypes.append((outputs.dtype, targets.dtype, torch.get_float32_matmul_precision()))
    return cross_entropy(outputs, targets)


@pytest.mark.parametrize(
    ("precision", "dtype", "matmul"),
    [
        ("fp32", torch.float32, "highest"),
        ("tf32", torch.float32, "high"),
        ("bf16", torch.bfloat16, "high"),
        ("fp64", torch.float64, "highest"),
    ],
)
def test_precisions(tmp_path: Path, precision: str, dtype: torch.dtype, matmul: str) -> None:
    """What is computed in, in training and in evaluation; weights and their growth stay in float32 (or float64)."""
    dtypes.clear()
    before = torch.get_float32_matmul_precision()
    what = recipe(tmp_path, precision=precision, loss="test_train.noted", grow=[Growth(5, 16, noise=0.1)])
    result = run_recipe(what)
    assert set(dtypes) == {(dtype, torch.int64, matmul)}
    assert {p.dtype for p in result.model.parameters()} == {what.dtype()}
    assert torch.get_float32_matmul_precision() == before
    losses = column(tmp_path, "loss")
    assert sum(losses[-5:]) < sum(losses[:5]) - 0.1


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_compiled_run_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    """Compiled anew for the wide model; to the same numbers."""
    if backend == "inductor" and not shutil.which("g++"):
        pytest.skip("there is no C++ compiler")
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    what = recipe(tmp_path / "eager", steps=4, grow=[Growth(2, 16, noise=0.1)], evaluation=Evaluation(), clip=0.1)
    run_recipe(what)
    torch._dynamo.utils.counters.clear()
    run_recipe(replace(what, compile=True, out=str(tmp_path / "compiled")))
    assert largest_difference(tmp_path / "compiled", tmp_path / "eager") < EXACT
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


def test_a_run_in_a_thread(tmp_path: Path) -> None:
    """Signals reach the main thread alone, and a run elsewhere must not try."""
    thread = threading.Thread(target=run_recipe, args=(recipe(tmp_path, steps=3),))
    thread.start()
    thread.join()
    assert metrics(tmp_path, "end")[0]["status"] == "finished"


def test_a_run_that_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = run_recipe(recipe(None, checkpoints=Checkpoints(every=2)))
    assert (result.status, result.step, result.width, result.out) == ("finished", 20, 8, None)
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------------------------ schedules


def test_the_warm_up_is_linear_and_reaches_one() -> None:
    assert {Schedule().at(step, 20) for step in range(20)} == {1.0}
    for kind in ("constant", "cosine", "wsd"):
        schedule = Schedule(kind, warmup=4)  # type: ignore[arg-type]
        assert [schedule.at(step, 20) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_a_cosine_falls_from_one_to_its_floor() -> None:
    schedule = Schedule("cosine", warmup=2, floor=0.1)
    values = [schedule.at(step, 12) for step in range(2, 13)]
    assert values[0] == 1.0
    assert values[5] == pytest.approx(0.55)  # half-way
    assert values[-1] == pytest.approx(0.1, abs=1e-15)
    assert values == sorted(values, reverse=True)
    assert len(set(values)) == len(values)
    assert schedule.at(100, 12) == pytest.approx(0.1, abs=1e-15)  # a run that went on longer than it said
    quarter = 0.1 + 0.9 * (1 + math.sqrt(0.5)) / 2
    assert Schedule("cosine", floor=0.1).at(5, 20) == pytest.approx(quarter)


def test_warm_up_stable_decay() -> None:
    schedule = Schedule("wsd", warmup=2, decay=4, floor=0.5)
    assert [schedule.at(step, 10) for step in range(10)] == pytest.approx([0.5, 1, 1, 1, 1, 1, 0.9, 0.8, 0.7, 0.6])
    assert schedule.at(10, 10) == 0.5
    assert Schedule("wsd").at(9, 10) == 1.0


# ------------------------------------------------------------------------------------------------ evaluation


@pytest.mark.parametrize(("kind", "batch"), [("gpt2-heads", 5), ("dropping", None), ("mlp", 1), ("mlp", 1000)])
def test_an_evaluation_is_the_mean_over_the_held_out_data(tmp_path: Path, kind: str, batch: int | None) -> None:
    """Whatever the batches, the last one smaller; in eval mode, after which training goes on."""
    what = recipe(tmp_path, kind, steps=5, evaluation=Evaluation(every=2, batch=batch))
    result = run_recipe(what)
    data = what.make_data().to(torch.device("cpu"), torch.float64)
    ((x, y),) = data.evaluation(10**6)
    assert result.model.training
    with torch.no_grad():
        logits = result.model.eval()(x).flatten(0, -2)
    records = metrics(tmp_path, "eval")
    assert [record["step"] for record in records] == [2, 4, 5]
    assert records[-1]["loss"] == pytest.approx(float(F.cross_entropy(logits, y.flatten())), rel=1e-12)
    assert records[-1]["accuracy"] == pytest.approx(float((logits.argmax(-1) == y.flatten()).double().mean()))


def test_targets_that_are_no_classes_and_a_loss_of_ones_own(tmp_path: Path) -> None:
    model = Spec("mupscale.models.MLP", {"d_in": FEATURES, "d_out": FEATURES, "depth": 3, "activation": "tanh"})
    what = recipe(tmp_path, model=model, data=Spec("small_runs.Curve"), loss="small_runs.squared", grow=[copies(9, 16)])
    result = run_recipe(what)
    split = small_runs.Curve().to(torch.device("cpu"), torch.float64).split
    record = metrics(tmp_path, "eval")[-1]
    expected = (result.model(split.test_x) - split.test_y).square().mean().item()
    assert record["loss"] == pytest.approx(expected, rel=1e-12)
    assert "accuracy" not in record
    losses = column(tmp_path, "loss")
    assert losses[-1] < losses[0]


def pair(width: int) -> Toy:
    """Outputs that are no tensor: only the loss knows what to do with them."""
    return Toy(lambda own, x: (own.inner(x), 7), inner=small_runs.Dropping(width, p=0.0))


def of_pair(outputs: tuple[Tensor, int], targets: Tensor) -> Tensor:
    """The loss of the first."""
    return cross_entropy(outputs[0], targets)


def test_outputs_that_only_the_loss_understands(tmp_path: Path) -> None:
    what = recipe(tmp_path / "pair", model=Spec("test_train.pair"), loss="test_train.of_pair")
    assert run_recipe(what).status == "finished"
    run_recipe(recipe(tmp_path / "plain", model=Spec("small_runs.Dropping", {"p": 0.0})))
    for name in ("loss", "flops"):
        assert column(tmp_path / "pair", name) == column(tmp_path / "plain", name)
    assert "accuracy" not in metrics(tmp_path / "pair", "eval")[0]


# ------------------------------------------------------------------------------------------------ metrics


def test_a_record_has_its_fields(tmp_path: Path) -> None:
    grow = [Growth(8, 16, noise=0.5, noise_unit="signal")]
    run_recipe(recipe(tmp_path, clip=1.0, grow=grow, evaluation=Evaluation(every=10), log_every=5))
    where = {"kind", "step", "samples", "flops", "seconds"}
    fields = {
        "train": where | {"loss", "lr", "width", "grad_norm"},
        "eval": where | {"loss", "accuracy"},
        "grow": where | {"width", "noise", "noise_unit", "shrink", "lr", "how", "outgoing", "spread", "deepen"},
        "end": where | {"status"},
    }
    records = metrics(tmp_path)
    told = " ".join(f"{record['kind']}-{record['step']}" for record in records)
    assert told == "train-5 grow-8 train-10 eval-10 train-15 train-20 eval-20 end-20"
    assert all(set(record) == fields[record["kind"]] for record in records)
    (grown,) = (record for record in records if record["kind"] == "grow")
    assert grown == {**grown, "width": 16, "how": "copies", "noise": 0.5, "noise_unit": "signal", "lr": 0.02}
    assert all(record["samples"] == 8 * record["step"] for record in records)
    seconds = [record["seconds"] for record in records]
    assert seconds == sorted(seconds)
    assert seconds[-1] > 0


def test_a_line_is_the_mean_over_its_steps(tmp_path: Path) -> None:
    """The last line over what is left; growth in the middle of a line's steps is no break."""
    what = recipe(tmp_path / "1", clip=0.1, grow=[Growth(9, 16, noise=0.3)])
    run_recipe(what)
    run_recipe(replace(what, log_every=7, out=str(tmp_path / "7")))
    assert column(tmp_path / "7", "step") == [7, 14, 20]
    for name in ("loss", "grad_norm"):
        each = column(tmp_path / "1", name)
        means = [sum(part) / len(part) for part in (each[:7], each[7:14], each[14:])]
        assert column(tmp_path / "7", name) == pytest.approx(means, rel=1e-14)
    assert column(tmp_path / "7", "lr") == [column(tmp_path / "1", "lr")[s - 1] for s in (7, 14, 20)]


def test_flops_of_an_mlp_add_up_over_growth(tmp_path: Path) -> None:
    run_recipe(recipe(tmp_path, grow=[copies(4, 16), copies(10, 48)], accumulate=2))
    phases = {8: 4, 16: 6, 48: 10}
    total = sum(mlp_flops(FEATURES, width, CLASSES, depth=3) * 8 * steps for width, steps in phases.items())
    assert column(tmp_path, "flops")[-1] == total
    assert column(tmp_path, "flops")[3] == mlp_flops(FEATURES, 8, CLASSES, depth=3) * 8 * 4
    assert column(tmp_path, "flops", "grow")[0] == column(tmp_path, "flops")[3]


def test_text_is_counted_in_tokens(tmp_path: Path) -> None:
    run_recipe(recipe(tmp_path, "gpt2-heads", steps=3))
    assert column(tmp_path, "tokens") == [step * 8 * CONTEXT for step in (1, 2, 3)]
    assert "samples" not in metrics(tmp_path, "train")[-1]


class Choosy(small_runs.Dropping):
    """A model that looks at the values, so that its cost cannot be counted without any."""

    def forward(self, x: Tensor) -> Tensor:
        if not bool(x.isfinite().all()):
            raise ValueError("no")
        return super().forward(x)


class Uncountable(small_runs.Dropping):
    """A model that does not run where torch counts."""

    def forward(self, x: Tensor) -> Tensor:
        if _get_current_dispatch_mode() is not None:
            raise RuntimeError("kernels of its own")
        return super().forward(x)


def test_a_model_that_looks_at_values_is_built_to_be_counted_and_one_that_cannot_be_has_no_cost(tmp_path: Path) -> None:
    for model in ("small_runs.Dropping", "test_train.Choosy", "test_train.Uncountable"):
        run_recipe(recipe(tmp_path / model, model=Spec(model), steps=2))
    plain, choosy, unknown = (column(out, "flops") for out in sorted(tmp_path.iterdir()))
    assert choosy == plain != [None, None]
    assert unknown == [None, None]


# ------------------------------------------------------------------------------------------------ what a person sees


def test_plain_lines_where_there_is_no_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_recipe(recipe(tmp_path, grow=[Growth(5, 16, noise=0.25, lr=0.5)], steps=12))
    lines = capsys.readouterr().out.splitlines()
    last = metrics(tmp_path, "train")[-1]["loss"]
    held_out = metrics(tmp_path, "eval")[-1]
    assert any(line.startswith("step 5  grown from width 8 to 16, noise 0.25, lr 0.5") for line in lines)
    (line,) = (line for line in lines if line.startswith(f"step 12/12  loss {last:.4f}  "))
    assert line.split("  ")[-1].split()[1:] in (["samples/s"], ["k", "samples/s"])
    assert lines[-1] == f"step 12/12  held-out loss {held_out['loss']:.4f}, accuracy {held_out['accuracy']:.1%}"
    assert len(lines) < 8  # not a line for every step


def test_speed_is_told_in_round_units() -> None:
    from mupscale.train.callbacks import describe_speed

    speeds = {3.0: "3 tokens/s", 4200.0: "4.2 k tokens/s", 1.25e6: "1.25 M tokens/s", 7e9: "7 G tokens/s"}
    assert {value: describe_speed(value, "tokens").strip() for value in speeds} == speeds
    assert describe_speed(0.0, "tokens") == ""


def test_a_bar_on_a_terminal(tmp_path: Path) -> None:
    pytest.importorskip("rich")
    what = recipe(tmp_path / "run", data=Spec("small_runs.Slow"), grow=[copies(5, 16)], steps=40, log_every=5)
    text = on_a_terminal(lambda: run_recipe(what))
    assert f"loss {column(tmp_path / 'run', 'loss')[-1]:.4f}" in text
    assert "samples/s" in text
    assert "40/40" in text
    assert "left 0:00:0" in re.sub(r"\x1b\[[0-9;]*m", "", text)
    assert "grown from width 8 to 16" in text
    assert "held-out loss" in text
    assert "\x1b[?25l" in text  # the cursor is hidden while the bar moves
    assert text.rstrip().rfind("\x1b[?25h") > text.rfind("\x1b[?25l")  # and comes back


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    what = recipe(tmp_path, tensorboard=True, clip=1.0, grow=[copies(5, 16)], checkpoints=Checkpoints(every=8, keep=9))
    run_recipe(what)
    for name in (16, 20):
        (tmp_path / "checkpoints" / small_runs.step(name)).unlink()
    run_recipe(what, resume=True)  # from step 8, as after a kill
    board = EventAccumulator(str(tmp_path)).Reload()
    losses = [(event.step, event.value) for event in board.Scalars("train/loss")]
    assert losses == [(r["step"], pytest.approx(r["loss"])) for r in metrics(tmp_path, "train")]
    assert {"train/grad_norm", "train/lr", "train/flops", "eval/accuracy", "grow/noise"} <= set(board.Tags()["scalars"])
