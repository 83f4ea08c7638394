"""Twenty kills at random moments each, of everything that writes: what comes in the end is as if nothing had happened.

Which moments they are is printed as the seed of a generator, with which a failure can be repeated (MUPSCALE_SEED).
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_files
from mupscale import checkpoint
from mupscale.cli import main
from mupscale.data import tinyshakespeare
from mupscale.study import StudySummary, Sweep, SweepJob, run_pay, run_sweep
from mupscale.system import parse_record
from mupscale.train import Checkpoints, Evaluation, Growth, Recipe, Spec, find_checkpoint, run_recipe
from paper_runs import SPACE, Sitting, compare_quietly, count_changes, few, growing, results, sweep_job, two_seeds
from processes import DEADLINE, PROCESSES
from small_runs import Child, assert_same_run, die_at, recipe
from weights import take_step

pytestmark = pytest.mark.faults
KILLS = 20


@pytest.fixture
def chance() -> random.Random:
    """Moments by chance."""
    seed = int(os.environ.get("MUPSCALE_SEED", random.randrange(10**6)))
    print(f"MUPSCALE_SEED={seed}")
    return random.Random(seed)


def kill_again_and_again(start: Callable[[], Any], chance: random.Random, longest: float) -> int:
    """Start a process and kill it after a while, twenty times; how often that was before its end."""
    kills = 0
    for _ in range(20 * KILLS):
        process = start()
        time.sleep(chance.uniform(0, longest))
        if process.is_alive():
            os.kill(process.pid, signal.SIGKILL)
        process.join(DEADLINE)
        kills += process.exitcode == -signal.SIGKILL
        if kills == KILLS:
            break
    return kills


def start_and_wait(target: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """A process that has said that it began."""
    began = PROCESSES.Event()
    process = PROCESSES.Process(target=target, args=arguments, kwargs={"began": began, **named})
    process.start()
    began.wait(DEADLINE)
    return process


def no_leftovers(folder: Path) -> bool:
    """Whether nothing half-written lies in a folder, nor the lock of a process that is dead."""
    return not [path for path in folder.rglob(".*") if path.name != ".lock" or path.parent.name == "checkpoints"]


@pytest.mark.parametrize("axis", ["width", "depth"])
def test_training_with_growth(axis: str, tmp_path: Path, chance: random.Random) -> None:
    small = {"width": 8, "layers": 2}
    deep = {
        "model": Spec("deep_models.ResidualTable", {"d_in": 6, "d_out": 3}),
        "width": small,
        "base": small,
        "grow": [Growth(10, depth=4, how="identity"), Growth(31, width=16, depth=6, noise=0.3, deepen="stack")],
    }
    wide = {"grow": [Growth(10, 16, noise=0.5), Growth(31, 32, noise=0.3)]}

    def eventful(out: Path) -> Recipe:
        slow = Spec("small_runs.Slow", {"seconds": 0.02})
        often = {"checkpoints": Checkpoints(every=3), "evaluation": Evaluation(every=5), "log_every": 2}
        return recipe(out, data=slow, steps=60, **often, **(deep if axis == "depth" else wide))

    run_recipe(eventful(tmp_path / "whole"))
    out = tmp_path / "run"

    def start() -> Any:
        return Child(eventful(out), tmp_path / "output", resume=True).process

    assert kill_again_and_again(start, chance, 1.5) >= KILLS // 2  # it may have come to its end before the twentieth
    run_recipe(eventful(out), resume=True)
    assert_same_run(out, tmp_path / "whole")
    assert no_leftovers(out)


def test_a_comparison(tmp_path: Path, chance: random.Random) -> None:
    whole = compare_quietly(tmp_path / "whole")

    def start() -> Any:
        return Sitting(tmp_path / "run", growing(), few(), tmp_path / "output", run=run_pay).process

    assert kill_again_and_again(start, chance, 4.0) >= 1
    assert results(compare_quietly(tmp_path / "run")) == results(whole)
    assert no_leftovers(tmp_path / "run")


def slow_sweep() -> SweepJob:
    return sweep_job(partial(two_seeds, data=Spec("small_runs.Slow", {"seconds": 0.01}), steps=40), steps=40)


def work(place: str, folder: Path, worker: bool) -> None:
    torch.set_num_threads(1)
    run_sweep(slow_sweep(), place, worker=worker, folder=folder, at_once=2, note=lambda text: None)


@pytest.mark.parametrize("kind", ["sqlite", "journal"])
def test_a_sweep_with_two_workers(kind: str, tmp_path: Path, chance: random.Random) -> None:
    """One of the two is killed each time, now this one, now that one; the sweep is complete in the end."""
    whole = run_sweep(slow_sweep(), str(tmp_path / "whole.db"), note=print)
    place = f"{'journal:' if kind == 'journal' else ''}{tmp_path}/study"
    both: list[Any] = [None, None]

    def begin(number: int) -> None:
        both[number] = PROCESSES.Process(target=work, args=(place, tmp_path / "run", bool(number)))
        both[number].start()

    for _ in range(KILLS):
        for number in (0, 1):
            if both[number] is None or not both[number].is_alive():
                begin(number)
        time.sleep(chance.uniform(0, 1.5))
        unlucky = both[chance.randrange(2)]
        if unlucky.is_alive():
            os.kill(unlucky.pid, signal.SIGKILL)
            unlucky.join(DEADLINE)
    for process in both:
        process.join(DEADLINE)
    found: Sweep = run_sweep(slow_sweep(), place, note=print)
    assert [trial.cell for trial in found.trials] == SPACE.cells
    for one, other in zip(found.trials, whole.trials, strict=True):
        assert one.status == other.status == "finished"
        assert one.losses == pytest.approx(other.losses, rel=1e-9)


def widen(source: Path, out: Path) -> None:
    from mupscale import hf

    torch.set_num_threads(1)
    hf.upscale(source, out, times=2, seed=0, noise=0.5)


def test_upscale(tmp_path: Path, chance: random.Random) -> None:
    """There is no wide checkpoint, or the whole one; the next start clears what the killed one left."""
    transformers = pytest.importorskip("transformers")
    sizes = {"n_embd": 192, "n_head": 4, "n_layer": 4, "vocab_size": 4000, "n_positions": 64}
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).save_pretrained(tmp_path / "small")
    widen(tmp_path / "small", tmp_path / "whole")
    took = time.monotonic()
    widen(tmp_path / "small", tmp_path / "again")
    took = time.monotonic() - took
    out, kills = tmp_path / "wide", 0
    while kills < KILLS:
        process = PROCESSES.Process(target=widen, args=(tmp_path / "small", out))
        process.start()
        time.sleep(chance.uniform(0, 1.5 * took))
        if process.is_alive():
            os.kill(process.pid or 0, signal.SIGKILL)
        process.join(DEADLINE)
        kills += 1
        if out.exists():
            assert contents(out) == contents(tmp_path / "whole")
            shutil.rmtree(out)
    widen(tmp_path / "small", out)
    assert contents(out) == contents(tmp_path / "whole") == contents(tmp_path / "again")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "small", "whole", "wide"]


def contents(folder: Path) -> dict[str, bytes]:
    """All files of a folder but the model card."""
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir()) if p.is_file() and p.suffix != ".md"}


def trainer_run(folder: Path, seconds: float = 0.0, began: Any = None, branches: bool = False) -> None:
    """A run of transformers' Trainer whose model grows, from wherever its folder stands; branches: with two sizes."""
    import transformers

    from mupscale import hf

    class Texts(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
        def __len__(self) -> int:
            return 64

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            time.sleep(seconds)
            tokens = torch.randint(31, (8,), generator=torch.Generator().manual_seed(index))
            return {"input_ids": tokens, "labels": tokens}

    torch.set_num_threads(1)
    torch.manual_seed(0)
    widths = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(**widths, num_hidden_layers=2, vocab_size=31, attention_dropout=0.1)
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=30,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        weight_decay=0.1,
        lr_scheduler_type="constant" if branches else "cosine",
        max_grad_norm=0.5,
        save_steps=3,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    grow = hf.GrowTrainerCallback(at=10, times=2, noise=0.5)
    sizes = [hf.BranchTrainerCallback(at, steps=5) for at in (10, 30)] if branches else []
    callbacks = [*sizes[:1], grow, *sizes[1:]]
    trainer = transformers.Trainer(
        transformers.LlamaForCausalLM(config), arguments, train_dataset=Texts(), callbacks=callbacks
    )
    if began is not None:
        began.set()
    trainer.train(resume_from_checkpoint=grow.resume(trainer))


@pytest.mark.parametrize("branches", [False, True])
def test_a_trainer_run_with_growth(branches: bool, tmp_path: Path, chance: random.Random) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    trainer_run(tmp_path / "whole", branches=branches)
    out = tmp_path / "run"

    start = partial(start_and_wait, trainer_run, out, 0.01, branches=branches)
    assert kill_again_and_again(start, chance, 1.0) >= 5
    trainer_run(out, branches=branches)
    for name in ("hidden-16-layers-2", "hidden-32-layers-2") if branches else ():
        file = Path("sizes", name, "model.safetensors")
        assert (out / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()
    for step in (12, 30):
        for name in ("model.safetensors", "mupscale.json"):
            file = Path(f"checkpoint-{step}", name)
            assert (out / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()
        ours, theirs = (
            torch.load(place / f"checkpoint-{step}" / "optimizer.pt", weights_only=True)
            for place in (out, tmp_path / "whole")
        )
        assert ours["param_groups"] == theirs["param_groups"]
        torch.testing.assert_close(ours["state"], theirs["state"], rtol=0, atol=0)


def own_loop_run(folder: Path, seconds: float = 0.0, began: Any = None) -> StudySummary:
    """A family and its check in a loop of one's own, from wherever its folder stands."""
    from torch import nn

    import mupscale as mu
    from mupscale.study import FamilySettings, OwnLoop

    torch.set_num_threads(1)
    x = torch.randn(40, 5, generator=torch.Generator().manual_seed(0))

    def train(model: nn.Module, optimizer: Any, steps: int, schedule: Callable[[int], float]) -> None:
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
        for _ in range(steps):
            time.sleep(seconds)
            rows = torch.randint(30, (8,))
            take_step(optimizer, nn.functional.mse_loss(model(x[rows]), x[rows].sin()))
            scheduler.step()

    def held_out(model: nn.Module) -> torch.Tensor:
        return nn.functional.mse_loss(model(x[30:]), x[30:].sin())

    def build(width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, 5))

    family = mu.Family(build, base=4, inputs=x[:8])
    make = lambda model, lr: family.optimizer(model, torch.optim.AdamW, lr=lr)  # noqa: E731
    loop = OwnLoop(family, train, held_out, make, lr=0.02, folder=folder, save_every=7, note=lambda text: None)
    if began is not None:
        began.set()
    return loop.train_family(FamilySettings(sizes=[4, 8, 12], budget=40, check=[12]))


def test_a_family_in_a_loop_of_ones_own(tmp_path: Path, chance: random.Random) -> None:
    whole, out = own_loop_run(tmp_path / "whole", 0.001), tmp_path / "run"

    start = partial(start_and_wait, own_loop_run, out, 0.001)
    assert kill_again_and_again(start, chance, 0.3) >= 5
    assert own_loop_run(out, 0.001).large == whole.large
    for size in ("4", "8", "12"):
        ours, theirs = (find_checkpoint(place / "sizes" / size) for place in (out, tmp_path / "whole"))
        assert ours.read_bytes() == theirs.read_bytes()
    assert no_leftovers(out)


def command(words: list[str], prepare: Callable[[], object]) -> None:
    """A command line in a process of its own."""
    torch.set_num_threads(1)
    prepare()
    sys.exit(main(words))


def run_words(kind: str, folder: Path) -> list[str]:
    """`mupscale run RECIPE --from PATH --width W`, from a checkpoint of one's own or a Hugging Face folder."""
    settings = {"widths": [4], "lrs": [0.02], "noises": [0.5], "seeds": 1, "small_seeds": 1, "budgets": [0.5, 1.0]}
    if kind == "mine":
        own = growing(width=16, grow=[], steps=16)
        model = own.family().init(8)
        checkpoint.save(folder / "mine.safetensors", model, own.family().optimizer(model, torch.optim.AdamW, lr=0.02))
        values = {**own.to_json(), "study": {**settings, "base_steps": 9}}
        start = ["--from", str(folder / "mine.safetensors"), "--from-width", "8"]
    else:
        base = hf_files.folder_with_tokenizer(folder / "model")
        (folder / "text.txt").write_text(tinyshakespeare()[:20_000])
        arguments = {"tokens": f"{folder}/tokens", "source": f"{folder}/text.txt", "tokenizer": f"hf:{base}"}
        values = {
            "data": {"class_path": "mupscale.data.Text", "init_args": {**arguments, "context": 8}},
            "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.003}},
            "steps": 24,
            "batch": 4,
            "device": "cpu",
            "study": {**settings, "widths": [8], "lrs": [0.003], "base_steps": 16},
        }
        start = ["--from", str(base), "--width", "32"]
    (folder / "recipe.yaml").write_text(
        json.dumps({name: value for name, value in values.items() if value is not None})
    )
    return ["run", str(folder / "recipe.yaml"), *start, "--out"]


@pytest.mark.parametrize("kind", ["mine", "hugging-face"])
def test_a_comparison_from_a_checkpoint(kind: str, tmp_path: Path, chance: random.Random) -> None:
    """Killed twenty times, each a little later; what it finds in the end is the same."""
    words = run_words(kind, tmp_path)

    def ends_with(folder: Path, prepare: Callable[[], object]) -> int | None:
        process = PROCESSES.Process(target=command, args=([*words, str(folder)], prepare))
        process.start()
        process.join(DEADLINE)
        return process.exitcode

    whole, run = tmp_path / "whole", tmp_path / "run"
    assert ends_with(whole, partial(count_changes, str(whole), str(tmp_path / "count"))) == 0
    count = int((tmp_path / "count").read_text())
    for _ in range(KILLS):
        at = chance.randrange(1, max(3, count // KILLS))
        assert ends_with(run, partial(die_at, str(run), at)) == -signal.SIGKILL
    assert ends_with(run, int) == 0
    ours, theirs = (results(summary_of(folder)) for folder in (run, whole))
    assert ours == theirs


def summary_of(folder: Path) -> StudySummary:
    """A comparison's summary, wherever its folder lies."""
    text = (folder / "summary.json").read_text().replace(str(folder), "FOLDER")
    return parse_record(StudySummary, json.loads(text))
