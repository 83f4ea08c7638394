"""Studies small enough for a test: the paper's comparison, "does growing pay?", a sweep; systems of made-up losses."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from mupscale.cli import main
from mupscale.data.stream import Batch
from mupscale.models import MLP
from mupscale.study import (
    Cell,
    ContenderRuns,
    Space,
    StudySettings,
    StudySummary,
    SweepJob,
    SystemRuns,
    contender_named,
    load_summary,
    run_paper,
    run_pay,
)
from mupscale.study.results import BudgetPoint
from mupscale.system.errors import MupscaleError
from mupscale.train import Growth, Recipe, Seeds, Spec
from processes import Child
from small_runs import ADAMW, CLASSES, FEATURES, Rows, at_changes, recipe

STEPS, BASE_STEPS, WIDE_STEPS = 30, 10, 20
SPACE = Space((0.001, 0.01, 0.1), (0.0, 1.0))


class Brittle(MLP):
    """A model that diverges where it is wider than it may be."""

    def __init__(self, width: int, limit: int) -> None:
        super().__init__(FEATURES, width, CLASSES)
        self.broken = width > limit

    def forward(self, x: Tensor) -> Tensor:
        """Logits, or what no training survives."""
        return super().forward(x) * (1e100 if self.broken else 1.0)


class Unlucky(Rows):
    """Data in whose order under seed 1 comes something that no model survives."""

    def batch(self, seed: int, start: int, count: int) -> Batch:
        """Some rows."""
        x, y = super().batch(seed, start, count)
        return (x * float("nan") if seed == 1 and start > 50 else x), y


class Untested(Rows):
    """Data that no held-out loss can be measured on."""

    def evaluation(self, batch: int) -> Iterator[Batch]:
        """Rows that are no numbers."""
        for x, y in super().evaluation(batch):
            yield x * float("nan"), y


class Uncounted(MLP):
    """A model whose FLOPs cannot be counted: it does not run where torch counts them."""

    def __init__(self, width: int) -> None:
        super().__init__(FEATURES, width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        if _get_current_dispatch_mode() is not None:
            raise RuntimeError("kernels of its own, which nobody can look into")
        return super().forward(x)


def small(kind: str = "mlp", **changes: Any) -> Recipe:
    """A base model of width 8 for 10 steps, and one of width 16 for 20 more."""
    growth = changes.pop("growth", {})
    grow = [Growth(**{"at": BASE_STEPS, "width": 16, "how": "copies", **growth})]
    return recipe(kind=kind, **{"width": 8, "base": 4, "init_at": 4, "steps": STEPS, "grow": grow, **changes})


def settings(**changes: Any) -> StudySettings:
    """Two learning rates and two noise levels after growing, at width 4; two seeds, and no Sweep 1."""
    usual: dict[str, Any] = {"widths": [4], "lrs": [0.01], "grown_lrs": [0.02, 0.05], "noises": [0.1, 0.3], "seeds": 2}
    return StudySettings(**{**usual, "small_seeds": 1, **changes})


def quiet(text: str) -> None:
    """Say nothing."""


def run_quietly(folder: Path, recipe: Recipe | None = None, how: StudySettings | None = None) -> StudySummary:
    """A whole run, its sweeps in a journal, which is faster than a database."""
    how = how or settings()
    return run_paper(
        recipe or small(), replace(how, storage=how.storage or f"journal:{folder}/study.log"), folder, note=quiet
    )


def growing(**changes: Any) -> Recipe:
    """A base model of width 8 for 9 steps, and 16 more after it grows to 16."""
    usual = {"width": 8, "base": 4, "init_at": 4, "steps": 25, "grow": [Growth(at=9, width=16, how="copies")]}
    return recipe(**{**usual, **changes})


def few(**changes: Any) -> StudySettings:
    """Two learning rates and one noise at width 4; two budgets and seeds."""
    usual: dict[str, Any] = {"widths": [4], "lrs": [0.02, 0.05], "noises": [0.5], "budgets": [0.5, 1.0], "seeds": 2}
    return StudySettings(**{**usual, "small_seeds": 2, **changes})


def least(**changes: Any) -> StudySettings:
    """One learning rate and one seed of each."""
    return few(**{"seeds": 1, "small_seeds": 1, "lrs": [0.02], **changes})


def compare_quietly(folder: Path, of: Recipe | None = None, how: StudySettings | None = None, **more: Any) -> Any:
    """A whole comparison."""
    return run_pay(of or growing(), how or few(), folder, note=quiet, **more)


def system_of(
    losses: Mapping[str, list[list[float | None]]],
    *,
    narrow: int = 64,
    base_cost: float | None = 100.0,
    full: float = 400.0,
) -> SystemRuns:
    """A system with these losses by contender, budget (1/4, 1/2, 1 of them) and seed; each costs up to so much."""
    contenders = []
    for name, by_budget in losses.items():
        cost = full if contender_named(name).from_base else full + (base_cost or 0.0)
        parts = [0.25, 0.5, 1.0][-len(by_budget) :]
        points = [BudgetPoint(part, 10, part * cost, each) for part, each in zip(parts, by_budget, strict=True)]
        contenders.append(ContenderRuns(name, 2 * narrow, 0.01, 0.0, points))
    return SystemRuns(narrow, 2 * narrow, base_cost, "FLOPs", contenders)


def two_seeds(cell: Cell, optimizer: Spec = ADAMW, **changes: Any) -> list[Recipe]:
    """What a cell of a sweep stands for."""
    made = Spec(optimizer.class_path, {**optimizer.init_args, "lr": cell.lr})
    return [recipe(optimizer=made, seeds=Seeds(init=seed, data=seed), **changes) for seed in range(2)]


def sweep_job(recipes: Callable[[Cell], list[Recipe]] = two_seeds, **changes: Any) -> SweepJob:
    """Six cells of two seeds."""
    usual = {"name": "s", "width": 8, "start": None, "space": SPACE, "recipes": recipes, "steps": 20}
    return SweepJob(**{**usual, **changes})


def runs_of(summary: StudySummary, name: str) -> ContenderRuns:
    """A contender's runs, which are there."""
    runs = summary.large.get(name)
    assert runs is not None, name
    return runs


def names_of(summary: StudySummary) -> list[str]:
    """Who took part."""
    return [runs.name for runs in summary.large.contenders]


def read(folder: Path) -> StudySummary:
    """What a run has written."""
    return load_summary(folder)


def histories(run: Path) -> dict[Path, int]:
    """When the metrics of each stretch were last written."""
    return {path.relative_to(run): path.stat().st_mtime_ns for path in run.glob("stretches/*/metrics.jsonl")}


def facts(summary: StudySummary) -> dict[str, Any]:
    """All of a summary but the clock, its name, and where sweeps are kept; and settings as a command calls them."""
    values: dict[str, Any] = json.loads(json.dumps(asdict(summary)).replace("StudySettings.", "study."))
    values["settings"].pop("storage", None)
    for part in (*values["stages"], *values["tuned"]):
        del part["seconds"]
    return {name: value for name, value in values.items() if name not in ("name", "command")}


def results(summary: StudySummary) -> dict[str, Any]:
    """The same without the stages, a part of whose costs a kill has paid twice, and what is said of their time."""
    told = {name: value for name, value in facts(summary).items() if name != "stages"}
    told["measured"] = [sentence for sentence in told["measured"] if "of the time" not in sentence]
    return told


def written(path: Path, recipe: Recipe, how: StudySettings | None = None) -> Path:
    """A recipe as a file, which is YAML since it is JSON."""
    values = {name: value for name, value in recipe.to_json().items() if value is not None}
    if how is not None:
        values["study"] = {name: value for name, value in asdict(how).items() if value is not None}
    path.write_text(json.dumps(values, indent=1))
    return path


# ------------------------------------------------------------------------------------------------ in a process


class Sitting(Child):
    """A run in a process of its own, which something may happen to: `prepare` is called in it first.

    run: what is called with recipe, settings and folder.
    """

    def __init__(
        self,
        folder: Path,
        recipe: Recipe,
        how: Any,
        output: Path,
        prepare: Callable[[], object] = int,
        run: Callable[..., object] = run_paper,
    ) -> None:
        super().__init__(output, _sit, folder, recipe, how, prepare, run)


class Commanded(Child):
    """The command `mupscale` in a process that need not load torch first.

    interrupt_at: words of its output, just after which somebody presses Ctrl-C.
    """

    def __init__(self, words: Sequence[str], output: Path, interrupt_at: str = "") -> None:
        super().__init__(output, _command, list(words), interrupt_at)


def _sit(folder: Path, recipe: Recipe, how: Any, prepare: Callable[[], object], run: Callable[..., object]) -> None:
    prepare()
    try:
        run(recipe, how, folder)
    except MupscaleError as error:
        print(f"error: {error}", flush=True)
        sys.exit(1)


def _command(words: list[str], interrupt_at: str) -> None:
    if interrupt_at:
        soon = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))
        sys.stdout = _Watching(sys.stdout, interrupt_at, soon.start)
    sys.exit(main(words))


class _Watching:
    """Output that notes whether some words have been said, and calls a function when they are."""

    def __init__(self, stream: Any, words: str, then: Callable[[], object] = int) -> None:
        self.stream, self.words, self.then, self.said = stream, words, then, False

    def write(self, text: str) -> int:
        """Write, and look."""
        if not self.said and self.words in text:
            self.said = True
            self.then()
        return int(self.stream.write(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def die_after_words(words: str, batches: int) -> None:
    """Kill this process where it asks for the so-many-th batch after it has said these words."""
    output = sys.stdout = _Watching(sys.stdout, words)
    examples, count = Rows.examples, 0

    def counted(self: Rows, rows: Tensor) -> Any:
        nonlocal count
        count += output.said and len(rows) > 1  # one row alone is for the model's cost
        if count == batches:
            os.kill(os.getpid(), signal.SIGKILL)
        return examples(self, rows)

    Rows.examples = counted  # type: ignore[method-assign]


def count_whole(place: Path, recipe: Recipe, how: Any, run: Callable[..., object] = run_paper) -> tuple[Path, int]:
    """The folder of an uninterrupted run, and how often it changed something there."""
    prepare = partial(count_changes, str(place / "run"), str(place / "count"))
    assert Sitting(place / "run", recipe, how, place / "log", prepare, run).wait() == 0, (place / "log").read_text()
    return place / "run", int((place / "count").read_text())


def count_changes(folder: str, into: str) -> None:
    """Note how often this process changes something in the folder: the numbers that `die_at` takes."""
    seen = list[int]()
    at_changes(folder, seen.append)
    Finalize(None, lambda: Path(into).write_text(str(len(seen))), exitpriority=1)
