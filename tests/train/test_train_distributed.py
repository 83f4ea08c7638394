"""Training with two processes on gloo: the run of one process, under DDP and FSDP2, from growth to resume to failure.

Both processes are started once and act out every scenario; the tests compare what they left with one process.
"""

import faulthandler
import fcntl
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from mupscale.system.errors import MupscaleError
from mupscale.train import (
    Checkpoints,
    Evaluation,
    Growth,
    Recipe,
    Result,
    Schedule,
    Spec,
    cross_entropy,
    read_snapshot,
    run_recipe,
)
from mupscale.train.run_folder import RunFolder, find_checkpoint
from processes import run_in_processes
from small_runs import CLASSES, FEATURES, WORDS, Normed, Rows, copies, timeless
from toys import Toy
from weights import difference, identical, whole

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="torch.distributed with gloo is not available"
)

WORLD = 2
TOLERANCE = 1e-10
KINDS = ["tied", "mlp"]  # a tied readout; sizes that two processes cannot share evenly
ALL = [*KINDS, "nested", "thin"]  # blocks within blocks; fewer units than processes
MODES = ["ddp", "fsdp"]
TRAINED = [*product(KINDS, MODES), ("nested", "fsdp"), ("thin", "fsdp")]
RESUMED = [*product([*KINDS, "normed"], MODES), ("thin", "fsdp")]
FROM_ANOTHER = [("tied", "ddp", "fsdp"), *((*each, "one") for each in product(KINDS, MODES))]
FAILURES = {"ddp": ["blocked", "full-0", "metrics"], "fsdp": ["blocked", "full-0", "full-1"]}
AGAIN = {
    *("trained-tied-ddp", "trained-nested-fsdp", "trained-thin-fsdp", "trained-normed-ddp", "trained-normed-fsdp"),
    *("resumed-tied-ddp-ddp", "resumed-tied-ddp-one", "resumed-tied-fsdp-one", "resumed-tied-fsdp-fsdp"),
    *("resumed-thin-fsdp-fsdp", "resumed-mlp-ddp-one", "resumed-normed-ddp-ddp", "resumed-normed-fsdp-fsdp"),
    *("fresh-tied-ddp", "fresh-tied-fsdp", "fresh-mlp-ddp", "fresh-still-ddp", "fresh-normed-ddp", "depth-fsdp"),
    *(
        "fresh-normed-fsdp",
        "failed-mlp-fsdp-full-0",
        "failed-mlp-fsdp-blocked",
        "failed-mlp-ddp-blocked",
        "diverged-nested-ddp",
        "refused-mlp-ddp",
    ),
}
"""Scenarios for the slow tests: the same with the other model or in the other mode is acted out for every change."""
SECONDS = 600  # after which a scenario that hangs is a failure


# ---------------------------------------------------------------------------------------------- what is trained


def nested(width: int) -> Toy:
    """Lists of blocks inside lists of blocks."""

    def block() -> Toy:
        parts = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        return Toy(lambda own, x: x + sum(part(x).tanh() for part in own.parts), parts=parts)

    def run(model: Toy, x: Tensor) -> Tensor:
        x = model.first(x)
        for each in model.blocks:
            x = each(x)
        out: Tensor = model.last(x)
        return out

    blocks = nn.ModuleList(block() for _ in range(2))
    return Toy(run, first=nn.Linear(FEATURES, width), last=nn.Linear(width, CLASSES), blocks=blocks)


SCRIPT: list[Callable[[], None]] = []  # what this process does in its next training steps, one by one


def hooked(outputs: Any, targets: Tensor) -> Tensor:
    """Cross-entropy, in the middle of which something may happen."""
    if SCRIPT and torch.is_grad_enabled():
        SCRIPT.pop(0)()
    return cross_entropy(outputs, targets)


def in_step(number: int, action: Callable[[], None]) -> None:
    """Let this happen in the run's step of this number, in this process."""
    SCRIPT[:] = [lambda: None] * (number - 1) + [action]


SIZES = {"d_in": FEATURES, "d_out": CLASSES}
SPECS = {
    "mlp": Spec("mupscale.models.MLP", {**SIZES, "depth": 3, "activation": "tanh"}),
    "tied": Spec("mupscale.models.GPT2", {**WORDS, "head_dim": 3}),
    "thin": Spec("mupscale.models.MLP", {**SIZES, "depth": 2, "activation": "tanh"}),
    "normed": Spec("small_runs.Normed"),  # whose buffers every process fills from its own examples
    "still": Spec("small_runs.Normed", {"momentum": 0.0}),
    "nested": Spec(f"{__name__}.nested"),
    "deep": Spec("deep_models.ResidualTable", SIZES),
}


def recipe(kind: str, out: Path | None, **changes: Any) -> Recipe:
    """Seven steps with two growth events, the first with noise."""
    small = {"tied": 6, "thin": 1}.get(kind, 3)
    values: dict[str, Any] = {
        "model": SPECS[kind],
        "data": Spec(f"small_runs.{'Words' if kind == 'tied' else 'Rows'}"),
        "optimizer": Spec("torch.optim.AdamW", {"lr": 0.02, "weight_decay": 0.2, "eps": 1e-2}),
        "width": small,
        "base": small,
        "steps": 7,
        "batch": 8,
        "accumulate": 1 if kind == "normed" else 2,
        "grow": [Growth(2, 2 * small, noise=0.5), copies(4, 6 * small)],
        "schedule": Schedule("cosine", warmup=2, floor=0.1),
        "clip": 0.2,
        "precision": "fp64",
        "evaluation": Evaluation(every=4, batch=5),  # of 21 rows, the last is alone
        "checkpoints": Checkpoints(every=3, keep=9),
        "log_every": 2,
        "device": "cpu",
        "out": None if out is None else str(out),
    }
    values |= changes
    return Recipe(**{**values, "parallel": "fsdp" if values.get("parallel") == "fsdp" else "ddp"})


# ---------------------------------------------------------------------------------------------- what is told of a run


def weights(result: Result) -> dict[str, Tensor]:
    """Parameters, buffers and optimizer state of the model that a run ended with."""
    told = {name: whole(p) for name, p in result.model.named_parameters()}
    told |= {name: b.clone() for name, b in result.model.named_buffers()}
    for name, p in result.model.named_parameters():
        told |= {f"{name}/{key}": whole(value) for key, value in result.optimizer.state[p].items()}
    return told


def is_sharded(tensor: Tensor) -> bool:
    """Whether a process holds its part alone: not even the memory of more (but for what makes parts equal)."""
    if not hasattr(tensor, "to_local"):
        return False
    part = -(-tensor.shape[0] // WORLD) * tensor[0].numel()
    held = tensor.to_local().untyped_storage().nbytes() // tensor.element_size()
    return len(tensor.to_local()) <= -(-tensor.shape[0] // WORLD) and held <= part


def sharded(result: Result) -> list[bool]:
    """Of all weights, and of all state."""
    parameters = list(result.model.parameters())
    state = [value for p in parameters for value in result.optimizer.state[p].values() if value.dim()]
    return [all(map(is_sharded, parameters)), len(state) == 2 * len(parameters) and all(map(is_sharded, state))]


def told(result: Result) -> dict[str, Any]:
    return {"status": result.status, "step": result.step, "weights": weights(result), "sharded": sharded(result)}


def failure(action: Callable[[], Any]) -> str:
    """What a run that must fail says."""
    try:
        action()
    except MupscaleError as error:
        return str(error)
    raise AssertionError("this should have failed")


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def prepare(action: Callable[[], Any]) -> None:
    """What one process does and all have."""
    if rank() == 0:
        action()
    if dist.is_initialized():
        dist.barrier()


def cut_short(run: Path, copy: Path, step: int = 3) -> Path:
    """The folder of a run as a kill would have left it: while it wrote a checkpoint, some way after another."""
    (copy / "checkpoints" / ".step-000000006.tmp" / "shards").mkdir(parents=True)
    for name in ("recipe.json", "metrics.jsonl"):
        shutil.copy(run / name, copy)
    found = next(path for path in (run / "checkpoints").iterdir() if path.name.startswith(f"step-{step:09d}"))
    (shutil.copytree if found.is_dir() else shutil.copy)(found, copy / "checkpoints" / found.name)
    return copy


def kept(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


APPEARED: list[tuple[str, list[str]]] = []  # names that files and folders were given in a renaming, and what they held


def watch(event: str, arguments: tuple[Any, ...]) -> None:
    """For sys.addaudithook."""
    if event == "os.rename" and not Path(arguments[1]).exists():
        source = Path(arguments[0])
        held = (str(path.relative_to(source)) for path in source.rglob("*") if path.is_file())
        APPEARED.append((Path(arguments[1]).name, sorted(held)))


# ---------------------------------------------------------------------------------------------- scenarios


def trained(folder: Path, kind: str, mode: str) -> dict[str, Any]:
    """From beginning to end."""
    APPEARED.clear()
    run = told(run_recipe(recipe(kind, folder / f"{kind}-{mode}", parallel=mode)))
    return {**run, "appeared": list(APPEARED)}


def grown_afresh(folder: Path, kind: str, mode: str) -> dict[str, Any]:
    """By fresh units, to widths that are no multiples; "still" has weights and old statistics that do not move."""
    frozen = {"optimizer": Spec("torch.optim.SGD", {"lr": 0.0})} if kind == "still" else {}
    first, second = (9, 15) if kind == "tied" else (5, 8)
    grow = [Growth(2, first, how="fresh"), Growth(4, second, how="fresh", outgoing=0.5)]
    return told(run_recipe(recipe(kind, folder / f"{kind}-{mode}-fresh", parallel=mode, grow=grow, **frozen)))


def grown_in_depth(folder: Path, mode: str) -> dict[str, Any]:
    """More blocks as identity, then more width and copies of blocks."""
    small = {"width": 4, "layers": 2}
    grow = [Growth(2, depth=3, how="identity"), Growth(4, width=8, depth=4, deepen="stack")]
    more: dict[str, Any] = {"parallel": mode, "width": small, "base": small, "grow": grow}
    return told(run_recipe(recipe("deep", folder / f"deep-{mode}", **more)))


def resumed(folder: Path, kind: str, mode: str, source: str) -> dict[str, Any]:
    """From the checkpoint after three steps of the run that `source` names."""
    out = folder / f"{kind}-{mode}-from-{source}"
    prepare(lambda: cut_short(folder / f"{kind}-{source}", out))
    return told(run_recipe(recipe(kind, out, parallel=mode, checkpoints=Checkpoints(every=3, keep=1)), resume=True))


def started(folder: Path, kind: str, mode: str, source: str) -> dict[str, Any]:
    """From the model that another run ended with, upscaled."""
    width, out = (72 if kind == "tied" else 36), folder / f"{kind}-{mode}-started-{source}"
    more = {"start": str(folder / f"{kind}-{source}"), "noise": 0.3, "grow": [], "width": width, "steps": 4}
    return told(run_recipe(recipe(kind, out, parallel=mode, **more)))


def diverged(folder: Path, kind: str, mode: str) -> dict[str, Any]:
    """The loss is infinite or no number after a step or two, and the model is to grow before that would be logged."""
    sgd = Spec("torch.optim.SGD", {"lr": 1e300})
    more: dict[str, Any] = {"optimizer": sgd, "clip": None, "log_every": 10, "evaluation": Evaluation()}
    return told(run_recipe(recipe(kind, folder / f"{kind}-{mode}-diverged", parallel=mode, **more)))


def hooked_recipe(kind: str, out: Path | None, **changes: Any) -> Recipe:
    """Seven steps without growth, in the middle of which something may happen."""
    more: dict[str, Any] = {"loss": f"{__name__}.hooked", "grow": [], "evaluation": Evaluation(), "accumulate": 1}
    return recipe(kind, out, **more, **changes)


def stopped(folder: Path, kind: str, mode: str) -> dict[str, Any]:
    """One process is asked to stop in the third step; all stop where they next log, and can go on."""
    more: dict[str, Any] = {"parallel": mode, "log_every": 5, "checkpoints": Checkpoints(every=0)}
    never = run_recipe(hooked_recipe(kind, None, **more))
    stopping = hooked_recipe(kind, folder / f"{kind}-{mode}-stopped", **more)
    if rank() == 1:
        in_step(3, lambda: signal.raise_signal(signal.SIGTERM))
    first = run_recipe(stopping)
    left = kept(folder / f"{kind}-{mode}-stopped")
    return {"never": told(never), "first": told(first), "then": told(run_recipe(stopping, resume=True)), "left": left}


def failed(folder: Path, kind: str, mode: str, how: str) -> dict[str, Any]:
    """Nothing can be written any more from the fifth step on; later it can again."""
    out = folder / f"{kind}-{mode}-{how}"
    log_every = 1 if how == "metrics" else 100
    begin = hooked_recipe(kind, out, parallel=mode, log_every=log_every, checkpoints=Checkpoints(every=3))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, limits[1]))

    def block() -> None:
        (out / "checkpoints").rename(out / "aside")
        (out / "checkpoints").touch()

    def unblock() -> None:
        if how == "blocked":
            (out / "checkpoints").unlink()
            (out / "aside").rename(out / "checkpoints")

    culprit = 1 if how == "full-1" else 0
    if rank() == culprit:
        in_step(5, block if how == "blocked" else fill)
    try:
        said = failure(lambda: run_recipe(begin))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        SCRIPT.clear()
    prepare(unblock)
    left = kept(out)
    return {"said": said, "left": left, "then": told(run_recipe(begin, resume=True))}


def refused(folder: Path, kind: str, mode: str) -> dict[str, Any]:
    """Runs that cannot begin."""
    done, file, lost = (folder / f"{kind}-{mode}{ending}" for ending in ("", "-file", "-lost"))
    truncated = folder / f"{kind}-{mode}-truncated"

    def damage() -> None:
        file.touch()
        for copy in (truncated, lost):
            cut_short(done, copy)
            path = min((copy / "checkpoints").rglob("s*.safetensors"))
            os.truncate(path, path.stat().st_size // 2) if copy == truncated else path.unlink()

    prepare(damage)
    said = {
        "shares": failure(lambda: run_recipe(recipe(kind, None, parallel=mode, batch=6, accumulate=2))),
        "taken": failure(lambda: run_recipe(recipe(kind, done, parallel=mode))),
        "folder": failure(lambda: run_recipe(recipe(kind, file / "run", parallel=mode))),
        "other": failure(lambda: run_recipe(recipe(kind, done, parallel=mode, clip=1.0), resume=True)),
        "truncated": failure(lambda: run_recipe(recipe(kind, truncated, parallel=mode), resume=True)),
    }
    if mode == "fsdp":
        said["lost"] = failure(lambda: run_recipe(recipe(kind, lost, parallel=mode), resume=True))
    return said


SCENARIOS: dict[str, tuple[Any, ...]] = {}
for kind, mode in [*TRAINED, *product(["normed"], MODES)]:
    SCENARIOS[f"trained-{kind}-{mode}"] = (trained, kind, mode)
for kind, mode, source in [*((*each, each[1]) for each in RESUMED), *FROM_ANOTHER]:
    SCENARIOS[f"resumed-{kind}-{mode}-{source}"] = (resumed, kind, mode, source)
for mode in MODES:
    SCENARIOS[f"diverged-nested-{mode}"] = (diverged, "nested", mode)
    SCENARIOS[f"stopped-mlp-{mode}"] = (stopped, "mlp", mode)
    SCENARIOS[f"refused-mlp-{mode}"] = (refused, "mlp", mode)
    for how in FAILURES[mode]:
        SCENARIOS[f"failed-mlp-{mode}-{how}"] = (failed, "mlp", mode, how)
SCENARIOS |= {
    f"fresh-{kind}-{mode}": (grown_afresh, kind, mode) for kind in (*KINDS, "still", "normed") for mode in MODES
}
SCENARIOS |= {f"depth-{mode}": (grown_in_depth, mode) for mode in MODES}
SCENARIOS["started-mlp-fsdp"] = (started, "mlp", "fsdp", "fsdp")


def cells(scenario: str, values: Iterable[tuple[str, ...]]) -> list[Any]:
    """What a test is called with, marked slow where the scenario of that name is."""
    return [pytest.param(*one, marks=pytest.mark.slow if scenario.format(*one) in AGAIN else ()) for one in values]


def process(number: int, folder: Path, wanted: set[str]) -> None:
    """One of the two processes."""
    sys.addaudithook(watch)
    with open(folder / f"stack-{number}.txt", "w") as stack:
        os.dup2(stack.fileno(), 2)  # what C++ says before it aborts
        faulthandler.enable(stack)
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder / 'rendezvous'}",
            rank=number,
            world_size=WORLD,
            timeout=timedelta(seconds=SECONDS),
        )
        for name, (function, *arguments) in SCENARIOS.items():
            if name not in wanted:
                continue
            faulthandler.dump_traceback_later(SECONDS, exit=True, file=stack)
            torch.manual_seed(100 + number)  # nothing may depend on the processes' own random numbers
            torch.save(function(folder, *arguments), folder / f"{name}-{number}.pt")
        dist.destroy_process_group()
        faulthandler.cancel_dump_traceback_later()


class Results:
    """What the two processes left, and what one process gets."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def of(self, name: str, numbers: Iterable[int] = range(WORLD)) -> list[dict[str, Any]]:
        paths = [self.folder / f"{name}-{number}.pt" for number in numbers]
        if not all(path.exists() for path in paths):
            said = "\n".join(path.read_text() for path in sorted(self.folder.glob("*.txt")))
            pytest.fail(f"the processes did not get this far:\n{said}")
        return [torch.load(path, weights_only=True) for path in paths]

    def one(self, kind: str) -> dict[str, Tensor]:
        """The weights and the state that one process comes to."""
        told: dict[str, Tensor] = self.of(f"trained-{kind}-one", [0])[0]["weights"]
        return told


def act_out(folder: Path, wanted: set[str]) -> None:
    """All that is wanted, in one process and in two; what goes wrong there is told by the tests that miss something.

    One of the two ended by SIGABRT in one of 70 runs on an x86 machine, and said nothing: where a signal ends a
    process, all is acted out once more. What the first time said stays beside it.
    """
    folder.mkdir()
    torch.set_num_threads(1)
    for kind in ALL:
        if any(name.startswith(f"trained-{kind}-") for name in wanted):
            torch.save(trained(folder, kind, "one"), folder / f"trained-{kind}-one-0.pt")
    for kind in (*KINDS, "still"):
        torch.save(grown_afresh(folder, kind, "one"), folder / f"fresh-{kind}-one-0.pt")
    torch.save(grown_in_depth(folder, "one"), folder / "depth-one-0.pt")
    alone = folder.with_name("one-process")
    shutil.copytree(folder, alone)
    if in_two_processes(folder, wanted) is not None:
        folder.rename(folder.with_name("ended-by-a-signal"))
        alone.rename(folder)
        in_two_processes(folder, wanted)


def in_two_processes(folder: Path, wanted: set[str]) -> str | None:
    """Act it out there; the signal that ended one of the processes, if one did."""
    from torch.multiprocessing.spawn import ProcessException, ProcessExitedException

    try:
        run_in_processes(process, (folder, wanted), WORLD)
    except ProcessException as error:
        (folder / "failure.txt").write_text(str(error))
        return error.signal_name if isinstance(error, ProcessExitedException) else None
    return None


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Acted out once, whichever worker of pytest-xdist comes first."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "two-processes"
    with open(folder.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            slow = any(item.get_closest_marker("slow") for item in request.session.items)
            act_out(folder, set(SCENARIOS) if slow else set(SCENARIOS) - AGAIN)
    return Results(folder)


def same_metrics(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> bool:
    """All of them, to rounding."""
    for a, b in zip(ours, theirs, strict=True):
        words = [name for name, value in b.items() if not isinstance(value, int | float)]
        assert [a.pop(name) for name in words] == [b.pop(name) for name in words]
        assert a == pytest.approx(b, rel=TOLERANCE)
    return len(ours) > 0


def modes(scenario: str) -> pytest.MarkDecorator:
    """A test for each mode of a scenario."""
    return pytest.mark.parametrize("mode", cells(scenario, [(mode,) for mode in MODES]))


both = pytest.mark.parametrize("mode", MODES)


@pytest.mark.parametrize(("kind", "mode"), cells("trained-{}-{}", TRAINED))
def test_two_processes_train_to_the_weights_of_one(kind: str, mode: str, results: Results) -> None:
    """Optimizer state, losses, gradient norms and evaluations, too, and all through the growth events."""
    alone = timeless(results.folder / f"{kind}-one")
    assert [(r["step"], r["noise"]) for r in alone if r["kind"] == "grow"] == [(2, 0.5), (4, 0.0)]
    assert all(record["grad_norm"] > 0.2 for record in alone if record["kind"] == "train"), "nothing is clipped"
    for two in results.of(f"trained-{kind}-{mode}"):
        assert two["status"] == "finished"
        assert difference(two["weights"], results.one(kind)) <= TOLERANCE
        assert two["sharded"] == [mode == "fsdp"] * 2  # no process keeps the memory of more than its part
    assert same_metrics(timeless(results.folder / f"{kind}-{mode}"), alone)


@pytest.mark.parametrize(
    ("name", "folder", "mode"),
    [
        pytest.param(name, folder, mode, marks=pytest.mark.slow if f"{name}-{mode}" in AGAIN else ())
        for mode in MODES
        for name, folder in (("depth", "deep-{}"), *((f"fresh-{kind}", f"{kind}-{{}}-fresh") for kind in KINDS))
    ],
)
def test_growth_of_other_kinds_trains_to_the_weights_of_one(
    name: str, folder: str, mode: str, results: Results
) -> None:
    (one,) = results.of(f"{name}-one", [0])
    for two in results.of(f"{name}-{mode}"):
        assert two["status"] == "finished"
        assert difference(two["weights"], one["weights"]) <= TOLERANCE
    assert same_metrics(timeless(results.folder / folder.format(mode)), timeless(results.folder / folder.format("one")))


@modes("trained-normed-{}")
def test_all_evaluate_with_the_running_statistics_that_are_saved(mode: str, results: Results) -> None:
    """BatchNorm's differ from process to process; those of the first are the model's, under FSDP as under DDP."""
    first, second = results.of(f"trained-normed-{mode}")
    assert identical(first["weights"], second["weights"])
    assert difference(first["weights"], results.of("trained-normed-ddp")[0]["weights"]) <= TOLERANCE
    told = [record for record in timeless(results.folder / f"normed-{mode}") if record["kind"] == "eval"][-1]
    model, data = Normed(18).double(), Rows().to(torch.device("cpu"), torch.float64).split
    read_snapshot(find_checkpoint(results.folder / f"normed-{mode}")).restore_model(model)
    with torch.no_grad():
        outputs = model.eval()(data.test_x)
    assert told["loss"] == pytest.approx(float(cross_entropy(outputs, data.test_y)), rel=TOLERANCE)
    assert told["accuracy"] == pytest.approx(float((outputs.argmax(-1) == data.test_y).double().mean()))


@modes("fresh-still-{}")
def test_statistics_of_new_channels_are_those_of_one_process(mode: str, results: Results) -> None:
    """Fresh units are drawn alike, and every process measures their statistics on the same coming batches."""
    (one,) = results.of("fresh-still-one", [0])
    statistics = one["weights"]["norm.running_mean"], one["weights"]["norm.running_var"]
    new = torch.tensor([place for place in range(8) if place not in (0, 1, 3, 4, 6)])  # of 8 after the last growth
    assert bool((statistics[0][new] != 0).all())
    assert bool(((statistics[1][new] - 1).abs() > 1e-3).all())
    for two in results.of(f"fresh-still-{mode}"):
        assert two["status"] == "finished"
        assert difference(two["weights"], one["weights"]) <= TOLERANCE
    alone, together = (
        [r for r in timeless(results.folder / f"still-{m}-fresh") if r["kind"] == "eval"] for m in ("one", mode)
    )
    assert same_metrics(together, alone)


@pytest.mark.slow
def test_a_batchnorm_grown_afresh_trains_the_same_under_ddp_and_fsdp(results: Results) -> None:
    ours, theirs = results.of("fresh-normed-fsdp"), results.of("fresh-normed-ddp")
    assert {two["status"] for two in (*ours, *theirs)} == {"finished"}
    assert identical(ours[0]["weights"], ours[1]["weights"])
    assert ours[0]["sharded"] == [True, True]
    assert difference(ours[0]["weights"], theirs[0]["weights"]) <= TOLERANCE


@pytest.mark.parametrize(("kind", "mode"), cells("resumed-{0}-{1}-{1}", RESUMED))
def test_resuming_in_two_processes_is_exact(kind: str, mode: str, results: Results) -> None:
    """Bit for bit: weights, state and every line of metrics; a growth comes before and one after the checkpoint.

    Of checkpoints the last is kept, and one that was being written is removed.
    """
    whole_runs, resumed_runs = results.of(f"trained-{kind}-{mode}"), results.of(f"resumed-{kind}-{mode}-{mode}")
    for uninterrupted, two in zip(whole_runs, resumed_runs, strict=True):
        assert two["status"] == "finished"
        assert identical(two["weights"], uninterrupted["weights"])
    out = results.folder / f"{kind}-{mode}-from-{mode}"
    assert timeless(out) == timeless(results.folder / f"{kind}-{mode}")
    assert kept(out) == [f"step-000000007{'' if mode == 'fsdp' else '.safetensors'}"]


@pytest.mark.parametrize(("kind", "mode", "source"), cells("resumed-{}-{}-{}", FROM_ANOTHER))
def test_a_checkpoint_of_one_process_or_of_shards_is_resumed_in_two(
    kind: str, mode: str, source: str, results: Results
) -> None:
    for two in results.of(f"resumed-{kind}-{mode}-{source}"):
        assert difference(two["weights"], results.one(kind)) <= TOLERANCE
        assert two["sharded"] == [mode == "fsdp"] * 2


@pytest.mark.parametrize(("kind", "mode"), cells("trained-{}-{}", product(KINDS, MODES)))
def test_a_checkpoint_of_two_processes_is_resumed_in_one(kind: str, mode: str, results: Results) -> None:
    results.of(f"trained-{kind}-{mode}")
    one = resumed(results.folder, kind, "one", mode)
    assert difference(one["weights"], results.one(kind)) <= TOLERANCE
    assert same_metrics(timeless(results.folder / f"{kind}-one-from-{mode}"), timeless(results.folder / f"{kind}-one"))


def test_a_run_starts_from_shards_in_one_process_and_in_two(results: Results) -> None:
    """Model and optimizer state are upscaled, to what comes from a checkpoint that is one file."""
    runs, folder = results.of("started-mlp-fsdp"), results.folder
    expected = started(folder, "mlp", "one", "one")["weights"]
    assert difference(started(folder, "mlp", "one", "fsdp")["weights"], expected) <= TOLERANCE
    for two in runs:
        assert difference(two["weights"], expected) <= TOLERANCE
        assert two["sharded"] == [True, True]
    assert same_metrics(timeless(folder / "mlp-fsdp-started-fsdp"), timeless(folder / "mlp-one-started-one"))


def test_fsdp_checkpoints_are_shards_in_safetensors_that_appear_when_they_are_whole(results: Results) -> None:
    """A header, and a file from each process with its part of every tensor; the tied weight is there once.

    They appear in one renaming, by one process, when the files of all are there.
    """
    from safetensors import safe_open

    first, second = results.of("trained-tied-fsdp")
    files = ["header.safetensors", *(f"shards/shard-0000{i}-model-00001-of-00001.safetensors" for i in (1, 2))]
    checkpoints = [(name, held) for name, held in first["appeared"] if name.startswith("step-")]
    assert checkpoints == [(f"step-00000000{step}", files) for step in (3, 6, 7)]
    assert second["appeared"] == []
    for shard in files[1:]:
        with safe_open(results.folder / "tied-fsdp" / "checkpoints" / "step-000000007" / shard, framework="pt") as file:
            names = set(file.keys())
            assert file.get_tensor("model.h.0.mlp.c_fc.weight").shape == (72, 36)
            assert file.get_tensor("optimizer.h.0.mlp.c_fc.weight/exp_avg").shape == (72, 36)
        assert "model.wte.weight" in names
        assert "model.lm_head.weight" not in names


@modes("diverged-nested-{}")
def test_a_run_that_diverges_ends_so_in_all_processes(mode: str, results: Results) -> None:
    for two in results.of(f"diverged-nested-{mode}"):
        assert two["status"] == "diverged"
        assert two["step"] == 2
    records = timeless(results.folder / f"nested-{mode}-diverged")
    assert records[-1] == {**records[-1], "kind": "end", "status": "diverged", "step": 2, "at": 2}
    assert kept(results.folder / f"nested-{mode}-diverged") == []


@both
def test_all_processes_stop_when_one_is_asked_to(mode: str, results: Results) -> None:
    """Where they next log, with a checkpoint, from which they go on exactly."""
    for two in results.of(f"stopped-mlp-{mode}"):
        assert (two["first"]["status"], two["first"]["step"]) == ("interrupted", 5)
        assert two["never"]["sharded"] == [mode == "fsdp"] * 2  # also without any growth
        assert [Path(name).stem for name in two["left"]] == ["step-000000005"]
        assert two["then"]["status"] == "finished"
        assert identical(two["then"]["weights"], two["never"]["weights"])


@pytest.mark.parametrize(
    ("mode", "how"), cells("failed-mlp-{}-{}", [(mode, how) for mode in MODES for how in FAILURES[mode]])
)
def test_all_processes_say_that_nothing_can_be_written(mode: str, how: str, results: Results) -> None:
    """Whichever of them it is that cannot; the checkpoint before is whole, and nothing else is left."""
    runs = results.of(f"failed-mlp-{mode}-{how}")
    what = "metrics.jsonl" if how == "metrics" else "the checkpoint .*step-000000006"
    reason = "File exists|Not a directory" if how == "blocked" else "File too large"
    for two in runs:
        assert re.search(f"{what}.*({reason})", two["said"])
        assert "\n" not in two["said"]
        assert two["said"] == runs[0]["said"]
        assert [Path(name).stem for name in two["left"]] == ["step-000000003"]
        assert two["then"]["status"] == "finished"


@modes("refused-mlp-{}")
def test_all_processes_say_why_a_run_cannot_begin(mode: str, results: Results) -> None:
    expected = {
        "shares": "a batch of 6 in 2 parts (accumulate) cannot be shared evenly by 2 processes",
        "taken": "holds a run at step 7 already: resume it (resume=True), start over",
        "folder": "Not a directory",
        "other": "is a checkpoint of another recipe: clip is 0.2 there and 1.0 here",
        "truncated": "is not a whole checkpoint",
    }
    if mode == "fsdp":
        expected["lost"] = "is not a whole checkpoint: the shard with a part of 'model.layers.0.bias' is missing"
    for two in results.of(f"refused-mlp-{mode}"):
        assert two.keys() == expected.keys()
        for name, words in expected.items():
            assert words in two[name]
            assert "\n" not in two[name]


# ---------------------------------------------------------------------------------------------- torchrun itself

PROGRAM = """
import faulthandler, json, sys
from mupscale.train import Recipe, run_recipe

faulthandler.dump_traceback_later(SECONDS, exit=True)
for path in sys.argv[1:]:
    with open(path) as file:
        run_recipe(Recipe.from_json(json.load(file)))
"""


@pytest.mark.slow  # tests/cli runs two processes for every change
def test_torchrun(tmp_path: Path) -> None:
    """Two runs after each other, with growth: one to its end under DDP, one under FSDP until Ctrl-C."""
    covtype: dict[str, Any] = {
        "model": Spec("mupscale.models.MLP", {"d_in": 54, "d_out": 7}),
        "data": Spec("mupscale.data.CoverTypeSample"),
        "grow": [Growth(3, 6, noise=0.5)],
        "steps": 6,
        "evaluation": Evaluation(batch=1000),
        "checkpoints": Checkpoints(every=0),
    }
    short = recipe("mlp", tmp_path / "short", **covtype)
    endless = recipe("mlp", tmp_path / "endless", **{**covtype, "steps": 10**6}, parallel="fsdp")
    (tmp_path / "program.py").write_text(PROGRAM.replace("SECONDS", str(SECONDS)))
    for name, made in (("short", short), ("endless", endless)):
        (tmp_path / f"{name}.json").write_text(json.dumps(made.to_json()))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={WORLD}"]
    command += [str(tmp_path / name) for name in ("program.py", "short.json", "endless.json")]
    with open(tmp_path / "output.txt", "w") as output:
        launcher = subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, "OMP_NUM_THREADS": "1"})
        try:
            while not any(record["kind"] == "grow" for record in RunFolder(tmp_path / "endless").records()):
                assert launcher.poll() is None, (tmp_path / "output.txt").read_text()
                time.sleep(0.05)
            launcher.send_signal(signal.SIGINT)
            launcher.wait(SECONDS)
        finally:
            launcher.kill()
    run_recipe(recipe("mlp", tmp_path / "alone", **covtype))
    assert same_metrics(timeless(tmp_path / "short"), timeless(tmp_path / "alone"))
    end = timeless(tmp_path / "endless")[-1]
    assert end["status"] == "interrupted"
    assert kept(tmp_path / "endless") == [f"step-{end['step']:09d}"]
    said = (tmp_path / "output.txt").read_text()
    assert said.count(f"interrupted after step {end['step']}; go on with: mupscale resume") == 1
    again = run_recipe(recipe("mlp", tmp_path / "endless", **{**covtype, "steps": end["step"] + 2}), resume=True)
    assert (again.status, again.width) == ("finished", 6)
