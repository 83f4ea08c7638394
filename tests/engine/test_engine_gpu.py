"""The engine on CUDA: a graph of a step is the step, compiled or not, and a stack that is too large is cut up."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_engine import varied

from mupscale import checkpoint
from mupscale.engine import Outcome, RunStack, train_many
from mupscale.engine.many_runs import free_memory, runs_at_once
from mupscale.train import Evaluation, Growth, Recipe, Schedule, Spec, run_recipe
from small_runs import metrics

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

ADAMW = Spec("torch.optim.AdamW", {"lr": 0.01, "weight_decay": 0.1, "eps": 1e-4})
SGD = Spec("torch.optim.SGD", {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01})
KINDS: dict[str, dict[str, Any]] = {
    "mlp": {
        "model": Spec("mupscale.models.MLP", {"d_in": 54, "d_out": 7}),
        "data": Spec("mupscale.data.CoverTypeSample"),
        "batch": 64,
    },
    "gpt2": {
        "model": Spec("mupscale.models.GPT2", {"vocab": 257, "context": 32, "layers": 2, "head_dim": 8}),
        "data": Spec("mupscale.data.Shakespeare", {"context": 32}),
        "batch": 8,
    },
    "resnet": {
        "model": Spec("mupscale.models.ResNet18", {"classes": 10}),
        "data": Spec("mupscale.data.Shapes"),
        "batch": 8,
        "optimizer": SGD,
        "width": 4,
        "base": 4,
        "steps": 10,
    },
}


def recipe(kind: str = "mlp", **changes: Any) -> Recipe:
    usual: dict[str, Any] = {"optimizer": ADAMW, "width": 16, "base": 8, "steps": 50, "clip": 0.5, "precision": "fp64"}
    return Recipe(**{**usual, "device": "cuda", **KINDS[kind], **changes})


def far(ours: list[Outcome], theirs: list[Outcome]) -> float:
    """The largest difference in a loss, at a point or held out."""
    assert [(o.status, o.step, o.flops) for o in ours] == [(o.status, o.step, o.flops) for o in theirs]
    found = [
        abs(a - b) for o, t in zip(ours, theirs, strict=True) for (_, a), (_, b) in zip(o.curve, t.curve, strict=True)
    ]
    return max(found + [abs(o.scores["loss"] - t.scores["loss"]) for o, t in zip(ours, theirs, strict=True)])


@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_gives_the_losses_of_one_at_a_time(kind: str) -> None:
    recipes = varied(recipe(kind))
    asked: dict[str, Any] = {"points": recipes[0].steps, "evaluate": True}
    ours, theirs = (train_many(recipes, engine=engine, **asked) for engine in ("vectorised", "serial"))  # type: ignore[arg-type]
    near = 1e-5 if kind == "resnet" else 1e-7  # torch's fused step rounds more, and convolutions never twice alike
    assert far(ours, theirs) <= near
    on_cpu = train_many([replace(one, device="cpu") for one in recipes], engine="vectorised", **asked)
    assert far(ours, on_cpu) <= near / 100 if kind != "resnet" else near


@pytest.mark.parametrize("kind", ["mlp", "resnet"])
def test_a_graph_is_the_step_itself(kind: str) -> None:
    """With a schedule and a drop, which change what the graph reads, and after some of the runs have gone."""
    schedule, grow = Schedule("cosine", warmup=5), [Growth(at=20, width=16, lr=0.001)]
    recipes = varied(recipe(kind, width=16, steps=30, schedule=schedule, grow=grow), 4)
    device = torch.device("cuda", 0)
    graphed, eager = RunStack(recipes, device), RunStack(recipes, device)
    eager._replay = eager._take_step  # type: ignore[method-assign]
    near = 1e-6 if kind == "resnet" else 1e-12  # convolutions never give the same twice
    for count in (12, 13):
        assert (graphed.advance(count) - eager.advance(count)).abs().max() <= near
        assert graphed.norms is not None
        assert eager.norms is not None
        assert torch.allclose(graphed.norms, eager.norms, rtol=100 * near)
        assert graphed._graph is not None
        assert eager._graph is None
        for stack in (graphed, eager):
            stack.keep_runs([len(stack.recipes) - 1, 0])
    assert [a["loss"] for a in graphed.evaluate()] == pytest.approx([b["loss"] for b in eager.evaluate()], rel=near)
    for name, tensor in graphed.replicas.tensors().items():
        assert torch.allclose(tensor, eager.replicas.tensors()[name], rtol=1000 * near, atol=near), name


@pytest.mark.parametrize("precision", ["fp64", "fp32", "tf32", "bf16"])
@pytest.mark.parametrize("kind", ["mlp", "gpt2"])
def test_compiled_is_the_same_program(kind: str, precision: str) -> None:
    recipes = varied(recipe(kind, precision=precision))
    asked: dict[str, Any] = {"engine": "vectorised", "points": 5, "evaluate": True}
    plain = train_many(recipes, **asked)
    compiled = train_many([replace(one, compile=True) for one in recipes], **asked)
    assert far(compiled, plain) <= {"fp64": 1e-9, "fp32": 1e-2, "tf32": 5e-2, "bf16": 1e-1}[precision]
    assert plain[0].curve[-1][1] < plain[0].curve[0][1]


def test_a_compiled_stack_is_not_compiled_anew_before_half_of_its_runs_have_gone() -> None:
    """Nor captured; and what is left trains as in a stack that is not compiled, and shrinks at once."""
    from torch._dynamo.utils import counters  # takes seconds, which collecting the tests need not

    recipes, device = varied(recipe(), 6), torch.device("cuda", 0)
    compiled, plain = RunStack([replace(one, compile=True) for one in recipes], device), RunStack(recipes, device)
    made, graphs, shapes = [counters["stats"]["unique_graphs"]], [], []
    for rows in ([0, 1, 2, 3, 4, 5], [0, 2, 3, 4, 5], [4, 2, 1, 0], [0, 1, 3]):
        for stack in (compiled, plain):
            stack.keep_runs(rows)
        assert (compiled.advance(5) - plain.advance(5)).abs().max() <= 1e-9
        losses = [[scores["loss"] for scores in stack.evaluate()] for stack in (compiled, plain)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-9)
        assert compiled.finite_runs() == [True] * len(rows)
        made.append(counters["stats"]["unique_graphs"])
        graphs.append(compiled._graph)
        shapes.append((len(compiled.replicas), len(plain.replicas)))
    assert shapes == [(6, 6), (6, 5), (6, 4), (3, 3)]
    assert made[0] < made[1] == made[2] == made[3] < made[4]
    assert graphs[0] is not None
    assert graphs[0] is graphs[1] is graphs[2] is not graphs[3]


def test_a_stack_that_is_too_large_is_cut_up() -> None:
    """The estimate is told that there is more memory than there is; what fails is tried again with half."""
    recipes, said = varied(recipe(width=512, batch=8192, precision="fp32", steps=10), 8), list[str]()
    asked: dict[str, Any] = {"engine": "vectorised", "points": 10, "evaluate": True}
    expected = train_many(recipes, **asked)
    device = torch.device("cuda", 0)
    data = recipes[0].make_data().to(device, torch.float32)
    each = free_memory(device) // runs_at_once(recipes[0], device, data)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(device).total_memory
    taken = torch.cuda.memory_reserved(device)
    try:
        torch.cuda.set_per_process_memory_fraction((taken + 4 * each) / total, device)
        ours = train_many(recipes, **asked, memory=1 << 50, note=said.append)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
    assert any("do not fit into memory" in sentence for sentence in said)
    assert far(ours, expected) <= 1e-3


def test_the_estimate_holds() -> None:
    """As many runs as it says fit, and take a fair part of the memory."""
    device, one = torch.device("cuda", 0), recipe(width=64, batch=512, precision="fp32")
    data = one.make_data().to(device, torch.float32)
    limit = 1 << 30
    most = runs_at_once(one, device, data, limit)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    stack = RunStack(varied(one, most), device, data)
    stack.advance(3)
    taken = torch.cuda.max_memory_reserved(device) - before
    assert 0.1 * limit < taken < limit


def test_a_folder_goes_on_with_train(tmp_path: Path) -> None:
    base = recipe(log_every=10, evaluation=Evaluation(every=25))
    recipes = [replace(one, out=str(tmp_path / str(number))) for number, one in enumerate(varied(base))]
    train_many(recipes, engine="vectorised")
    for number, one in enumerate(recipes):
        run_recipe(replace(one, steps=80), resume=True)
        alone = tmp_path / f"alone-{number}"
        run_recipe(replace(one, steps=80, out=str(alone)))
        ours, theirs = ([r["loss"] for r in metrics(f, "train")] for f in (tmp_path / str(number), alone))
        assert ours == pytest.approx(theirs, rel=1e-7)


def language_models(count: int = 3, **changes: Any) -> list[Recipe]:
    model = Spec("mupscale.models.GPT2", {"vocab": 257, "context": 32, "layers": 2, "head_dim": 16})
    return varied(recipe("gpt2", model=model, width=32, base=16, precision="bf16", **changes), count)


@pytest.mark.parametrize("compiled", ["never", True])
def test_attention_goes_to_the_flash_kernel_with_the_runs_in_its_batch(compiled: Any) -> None:
    from torch.profiler import ProfilerActivity, profile

    stack = RunStack(language_models(compile=compiled), torch.device("cuda", 0))
    assert stack.vmapped.attention.folds
    stack.advance(3)
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiled:
        stack.advance(2)
        torch.cuda.synchronize()
    launches = {event.key: event.count for event in profiled.key_averages()}
    assert any("flash" in kernel for kernel in launches)
    softmax = sum(count for kernel, count in launches.items() if "softmax" in kernel.lower() and "orward" in kernel)
    assert softmax <= 2  # that of the loss, once a step; plain attention has one more in every layer


def test_flash_attention_gives_the_losses_of_one_at_a_time() -> None:
    recipes = language_models(compile="never", steps=20)
    asked: dict[str, Any] = {"points": recipes[0].steps, "evaluate": True}
    ours, theirs = (train_many(recipes, engine=engine, **asked) for engine in ("vectorised", "serial"))  # type: ignore[arg-type]
    assert far(ours, theirs) <= 2e-2  # both round to bf16


def test_a_stage_is_compiled_unasked_where_that_pays_and_stays_so(tmp_path: Path) -> None:
    device = torch.device("cuda", 0)
    short, long = RunStack(language_models(), device), RunStack(language_models(steps=10**7), device)
    never = RunStack(language_models(steps=10**7, compile="never"), device)
    assert (short._compiles, long._compiles, never._compiles) == (False, True, False)
    long.advance(2)
    long.save(tmp_path / "stack.safetensors", {})
    again = RunStack(language_models(steps=10**7, compile="never"), device)
    again.restore(checkpoint.load(tmp_path / "stack.safetensors"))
    assert again._compiles
    assert torch.equal(again.advance(3), long.advance(3))
