"""Upscaling a checkpoint on disk: Meta-algorithm 'Upscaling procedure' from one folder into another.

Everything is checked first; the output is made in a hidden folder beside its place and appears under its name complete.
"""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mupscale.core import Plan
from mupscale.growth import GaussianNoise, Noise, checked
from mupscale.hf.architectures import known
from mupscale.hf.growth import Times
from mupscale.hf.optimizer import check_optimizer_file, widen_optimizer_file
from mupscale.hf.record import FILE, Growth, Record
from mupscale.hf.relation import recorded
from mupscale.hf.shards import Shard, arrange, in_short, size_in_words, write_index
from mupscale.hf.source import Source, open_source
from mupscale.hf.stream import write_shards
from mupscale.system import MupscaleError, appearing, open_display, replace_text

if TYPE_CHECKING:
    from mupscale.hf.verification import Comparison

DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64")}
_BESIDE = (".json", ".txt", ".model", ".jinja", ".vocab", ".bpe", ".tiktoken")
_OF_THE_SMALL_ONE = ("config.json", FILE, "trainer_state.json", "all_results.json", "train_results.json")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_STEPS = 5  # of training, for architectures that are not described


@dataclass(frozen=True)
class Upscaled:
    """What was made. `comparison`: of the two models, where they were compared; else `unverified` says why not."""

    path: Path
    times: Times
    numbers: tuple[int, int]
    bytes: int
    files: int
    comparison: Comparison | None = None
    unverified: str = ""

    def __str__(self) -> str:
        before, after = map(in_short, self.numbers)
        size = f"{size_in_words(self.bytes)} in {self.files} file{'s' * (self.files != 1)}"
        checked = f"not verified: {self.unverified}" if self.comparison is None else self.comparison.verdict
        return f"{self.path}: {before} → {after} numbers with --times {self.times}, {size}\n{checked}"


def upscale(
    source: str | Path,
    out: str | Path,
    *,
    times: int | str | Times = 2,
    noise: Noise = 0.0,
    seed: int = 0,
    shard_size: int | str = "5GB",
    dtype: str | torch.dtype | None = None,
    optimizer: str | Path | None = None,
    verify: bool = True,
    threads: int | None = None,
    progress: bool = True,
    note: Callable[[str], None] | None = None,
) -> Upscaled:
    """Write the checkpoint, wider, into the folder `out`: without noise it computes the same function.

    noise: in multiples of a fresh initialisation's, the same for any shard size and number of threads. dtype: of the
    output, which else keeps each tensor's. optimizer: a saved torch optimizer to widen, too. verify: compare the two
    models on a few tokens if both fit into memory; an architecture that is not described must be compared. note: told
    of what happens once.
    """
    out, opened, times = Path(out), open_source(source), Times.of(times)
    _check_place(out, opened)
    work = _prepare(
        opened, out, times, noise, seed, shard_size, _dtype(dtype), None if optimizer is None else Path(optimizer)
    )
    if work.undescribed and not verify:
        raise MupscaleError(
            f"'{opened.model_type}' is not described, so that only verification shows whether it was widened rightly: "
            f"let it verify, or describe the architecture (mupscale.hf.register)"
        )
    try:
        with appearing(out) as folder:
            found, why = _make(work, folder, verify, threads, progress, note or (lambda line: None))
    except OSError as error:
        raise MupscaleError(_failure(out, error)) from None
    return Upscaled(out, times, work.numbers, work.bytes, len(work.shards), found, why)


@dataclass(frozen=True)
class _Work:
    """All that is known before the first tensor is read.

    plan: by the names in the files. of_model: by the model's, where the architecture is not described.
    """

    source: Source
    config: dict[str, Any]
    plan: Plan
    of_model: Plan | None
    before: Record | None
    shards: list[Shard]
    noise: GaussianNoise
    growth: Growth
    seed: int
    optimizer: Path | None

    @property
    def undescribed(self) -> bool:
        """Whether the plan is the modules' word alone."""
        return self.of_model is not None

    @property
    def numbers(self) -> tuple[int, int]:
        """How many entries all tensors have, before and after."""
        jobs = [job for shard in self.shards for job in shard.tensors.values()]
        return sum(job.source.numel for job in jobs), sum(job.target.numel for job in jobs)

    @property
    def bytes(self) -> int:
        """Of the weights' files."""
        return sum(shard.bytes for shard in self.shards)

    @property
    def noisy(self) -> bool:
        """Whether the wide model computes another function."""
        return any(self.noise.of(name) for name in self.plan.parameters)

    def record(self, growth: Growth) -> Record:
        """mupscale.json of the wide checkpoint."""
        plan = self.of_model
        return self.before.then(growth, plan) if self.before else Record(self.source.config, (growth,), plan)


def _prepare(
    source: Source,
    out: Path,
    times: Times,
    noise: Noise,
    seed: int,
    shard_size: int | str,
    dtype: torch.dtype | None,
    optimizer: Path | None,
) -> _Work:
    architecture, of_model = known(source.model_type), None
    if architecture is not None:
        config = architecture.wide_config(source.config, times)
        plan = architecture.plan(source.config, times, source.shapes)
    else:
        from mupscale.hf.generic import plan_by_modules, plan_for_files

        config, of_model = plan_by_modules(source.config, times, fresh=noise != 0)
        plan = plan_for_files(source.config, of_model, source.shapes)
    if dtype is not None:
        fields = [name for name in ("dtype", "torch_dtype") if name in config] or ["dtype"]
        config.update(dict.fromkeys(fields, str(dtype).removeprefix("torch.")))
    given = checked(noise, plan)
    if not isinstance(given, GaussianNoise):
        raise MupscaleError(
            "signal-normalised noise needs whole tensors, and a checkpoint is widened in pieces: use GaussianNoise, "
            "with the constants that SignalNoise found in memory (.effective) if need be"
        )
    if optimizer is not None:
        optimizer = optimizer / "optimizer.pt" if optimizer.is_dir() else optimizer
        if not optimizer.is_file():
            raise MupscaleError(f"there is no saved optimizer at {optimizer}")
        check_optimizer_file(optimizer, source, times, of_model)
    shards = arrange(source, plan, dtype=dtype, shard_size=shard_size)
    growth, before = Growth(times, given.std, seed, given.unit), recorded(source)
    work = _Work(source, config, plan, of_model, before, shards, given, growth, seed, optimizer)
    _check_space(work, out)
    return work


def _make(
    work: _Work, folder: Path, verify: bool, threads: int | None, progress: bool, note: Callable[[str], None]
) -> tuple[Comparison | None, str]:
    """Everything that belongs into the output's folder; the comparison, or why there is none."""
    _write_beside(work, folder)
    steps = [None, work.noise] if work.undescribed and work.noisy else [work.noise if work.noisy else None]
    found, why = None, "verification is off"
    for noise in steps:  # what is not described is verified before noise hides what may be wrong
        growth = work.growth if noise is not None or not work.noisy else Growth(work.growth.times)
        work.record(growth).save(folder)
        with _bar(work.bytes, progress) as advance:
            write_shards(work.shards, folder, work.plan, noise=noise, seed=work.seed, threads=threads, advance=advance)
        if verify:
            found, why = _verified(work, folder, exact=noise is None, note=note)
    if work.optimizer is not None:
        widen_optimizer_file(work.optimizer, folder / "optimizer.pt", work.source, work.growth.times, work.of_model)
    return found, why


def _write_beside(work: _Work, folder: Path) -> None:
    """Config, index, tokenizer and the like."""
    replace_text(folder / "config.json", json.dumps(work.config, indent=2, ensure_ascii=False) + "\n")
    write_index(work.shards, folder)
    for file in _beside(work.source):
        target = folder / file.relative_to(work.source.folder)
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, target)


def _beside(source: Source) -> list[Path]:
    """Small files that are the same for the wide model: tokenizer, generation config, chat templates, its own code."""
    folder, kinds = source.folder, (*_BESIDE, *([".py"] if source.config.get("auto_map") else []))
    found = [f for f in folder.iterdir() if f.suffix in kinds and f.is_file()]
    own = [f for f in found if f.name not in _OF_THE_SMALL_ONE and not f.name.endswith(".index.json")]
    templates = (folder / "additional_chat_templates").glob("*.jinja")
    return sorted(f for f in (*own, *templates) if not f.stem.lower().startswith("readme"))


def _verified(work: _Work, folder: Path, *, exact: bool, note: Callable[[str], None]) -> tuple[Comparison | None, str]:
    """Compare the two models, if they fit into memory; a difference where there must be none is an error."""
    try:
        from mupscale.hf.models import fits, require_transformers

        require_transformers()
    except MupscaleError as error:
        return None, str(error)
    from mupscale.hf.verification import needed_bytes, verify

    steps = _STEPS if work.undescribed and exact else 0
    dtypes, wide = (("float64", "float32") if steps else ("float32",)), open_source(folder)
    dtype = next((d for d in dtypes if fits(needed_bytes(work.source, wide, d, steps))), None)
    if dtype is None:
        needed = size_in_words(needed_bytes(work.source, wide, "float32", steps))
        if steps:
            raise MupscaleError(
                f"'{work.source.model_type}' is not described, so that both models must be compared in training, which "
                f"needs {needed} of memory: use a larger machine, or describe the architecture (mupscale.hf.register)"
            )
        return None, f"the two models need {needed} of memory, and so much is not free"
    note(f"comparing the two models in {dtype}")
    found = verify(work.source, wide, dtype=dtype, train=steps, plan=work.of_model)
    if not found.ok and not work.undescribed and found.rows[0].ok and _rounds(work):
        return None, (
            "its tensors are the small one's, but rounding them to 16 bits moves the outputs by more than can be told "
            "from a mistake, as a router that then chooses other experts does"
        )
    if not found.ok:
        verdict = " ".join(found.verdict.split())
        raise MupscaleError(f"the wide model is not what it should be and was not kept: {verdict}")
    return found, ""


def _rounds(work: _Work) -> bool:
    """Whether numbers of 16 bits cannot hold what the small ones become."""
    from mupscale.hf.weights import is_exact

    jobs = [job for shard in work.shards for job in shard.tensors.values() if job.source.dtype.is_floating_point]
    return any(
        job.target.dtype.itemsize == 2 and (job.source.dtype != job.target.dtype or not is_exact({"": job.entry}))
        for job in jobs
    )


def _dtype(given: str | torch.dtype | None) -> torch.dtype | None:
    name = str(given).removeprefix("torch.")
    if given is not None and name not in DTYPES:
        raise MupscaleError(f"the dtype of a checkpoint is {', '.join(DTYPES)}, not {name}")
    return None if given is None else DTYPES[name]


def _check_place(out: Path, source: Source) -> None:
    if out.is_symlink() or (out.exists() and (not out.is_dir() or any(out.iterdir()))):
        raise MupscaleError(f"{out} exists already: remove it, or choose another name")
    here, there = out.resolve(), source.folder.resolve()
    if there == here or there in here.parents:
        raise MupscaleError(f"{out} lies inside the checkpoint {source.folder} itself: choose a place beside it")


def _check_space(work: _Work, out: Path) -> None:
    """Before hours of writing; the disk may still fill up meanwhile."""
    needed = work.bytes + sum(file.stat().st_size for file in _beside(work.source))
    if work.optimizer is not None:
        before, after = work.numbers
        needed += work.optimizer.stat().st_size * after // max(1, before)
    parent = next(p for p in out.absolute().parents if p.exists())
    if (free := shutil.disk_usage(parent).free) < needed:
        raise MupscaleError(
            f"the wide checkpoint needs {size_in_words(needed)} and the disk of {parent} has {size_in_words(free)} "
            f"left: free some space, or choose another disk"
        )


def _failure(out: Path, error: OSError) -> str:
    what = "the disk is full" if error.errno in _FULL else f"{error.strerror or error}"
    where = f" ({error.filename})" if error.filename else ""
    return f"{out} could not be written: {what}{where}; nothing was left behind"


@contextmanager
def _bar(total: int, visible: bool) -> Iterator[Callable[[int], None]]:
    """Bytes and time left, where stderr is a terminal and rich is installed."""
    columns = ("wide bar", "bytes", "bytes/s", "left", "time left")
    display = open_display(columns, total, visible=visible, transient=True)
    try:
        yield display.advance
    finally:
        display.close()
