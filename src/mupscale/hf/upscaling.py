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
from typing import Any

import torch

from mupscale.core import Plan
from mupscale.growth import GaussianNoise, Noise, check_noise
from mupscale.hf.describe import PlannedArchitecture, Times, architecture_of, memory, require_transformers
from mupscale.hf.files import (
    RECORD_FILE,
    GrowthStep,
    Record,
    Source,
    WeightShard,
    arrange_shards,
    open_source,
    shorten_number,
    size_in_words,
    write_index,
    write_shards,
)
from mupscale.hf.training import check_optimizer_file, widen_optimizer_file
from mupscale.hf.verification import Comparison, find_record, is_exact, needed_bytes
from mupscale.hf.verification import verify as compare
from mupscale.system import MupscaleError, appearing, open_display, replace_text

DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64")}
_COMPANIONS = (".json", ".txt", ".model", ".jinja", ".vocab", ".bpe", ".tiktoken")
_OF_THE_SMALL_ONE = ("config.json", RECORD_FILE, "trainer_state.json", "all_results.json", "train_results.json")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True)
class Upscaled:
    """What was written. `comparison`: of the two models, where they were compared; else `unverified` says why not."""

    path: Path
    times: Times
    numbers: tuple[int, int]
    bytes: int
    files: int
    comparison: Comparison | None = None
    unverified: str = ""

    def __str__(self) -> str:
        before, after = map(shorten_number, self.numbers)
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
    models on a few tokens if both fit into memory; an architecture that is not described must be compared. note: called
    with a line before the comparison.

    >>> import tempfile, transformers
    >>> folder = tempfile.TemporaryDirectory()
    >>> config = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, n_positions=16, vocab_size=11)
    >>> transformers.GPT2LMHeadModel(config).save_pretrained(f"{folder.name}/small")
    >>> upscaled = upscale(f"{folder.name}/small", f"{folder.name}/wide", times=2, progress=False)
    >>> upscaled.comparison.ok
    True
    >>> transformers.AutoConfig.from_pretrained(f"{folder.name}/wide").n_embd
    16
    >>> folder.cleanup()
    """
    out, opened, times = Path(out), open_source(source), Times.of(times)
    _check_place(out, opened)
    prepared = _prepare(
        opened, out, times, noise, seed, shard_size, _dtype(dtype), None if optimizer is None else Path(optimizer)
    )
    if not verify:
        prepared.architecture.check_unverified()
    try:
        with appearing(out) as folder:
            comparison, why = _write(prepared, folder, verify, threads, progress, note or (lambda line: None))
    except OSError as error:
        raise MupscaleError(_failure_message(out, error)) from None
    return Upscaled(out, times, prepared.numbers, prepared.bytes, len(prepared.shards), comparison, why)


@dataclass(frozen=True)
class _Prepared:
    """All that is settled before the first tensor is read.

    plan: by the names in the files. recorded_plan: by the model's, where mupscale.json must hold it.
    """

    source: Source
    architecture: PlannedArchitecture
    config: dict[str, Any]
    plan: Plan
    recorded_plan: Plan | None
    before: Record | None
    shards: list[WeightShard]
    noise: GaussianNoise
    growth: GrowthStep
    seed: int
    optimizer: Path | None

    @property
    def numbers(self) -> tuple[int, int]:
        """How many entries all tensors have, before and after."""
        tensors = [tensor for shard in self.shards for tensor in shard.tensors.values()]
        return sum(tensor.source.numel for tensor in tensors), sum(tensor.target.numel for tensor in tensors)

    @property
    def bytes(self) -> int:
        """Of the weights' files."""
        return sum(shard.bytes for shard in self.shards)

    @property
    def noisy(self) -> bool:
        """Whether the wide model computes another function."""
        return any(self.noise.of(name) for name in self.plan.parameters)

    def record(self, growth: GrowthStep) -> Record:
        """mupscale.json of the wide checkpoint."""
        plan = self.recorded_plan
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
) -> _Prepared:
    architecture = architecture_of(source.config)
    recorded_plan = architecture.plan_to_record(source.config, times, fresh=noise != 0)
    config = architecture.wide_config(source.config, times)
    plan = architecture.plan_files(source.config, times, source.shapes, recorded=recorded_plan)
    if dtype is not None:
        fields = [name for name in ("dtype", "torch_dtype") if name in config] or ["dtype"]
        config.update(dict.fromkeys(fields, str(dtype).removeprefix("torch.")))
    gaussian = check_noise(noise, plan)
    if not isinstance(gaussian, GaussianNoise):
        raise MupscaleError(
            "signal-normalised noise needs whole tensors, and a checkpoint is widened in pieces: use GaussianNoise, "
            "with the constants that SignalNoise found in memory (.effective) if need be"
        )
    optimizer = None if optimizer is None else _find_optimizer_file(optimizer)
    if optimizer is not None:
        check_optimizer_file(optimizer, source, times, recorded_plan)
    shards = arrange_shards(source, plan, dtype=dtype, shard_size=shard_size)
    growth, before = GrowthStep(times, gaussian.std, seed, gaussian.unit), find_record(source)
    prepared = _Prepared(
        source, architecture, config, plan, recorded_plan, before, shards, gaussian, growth, seed, optimizer
    )
    _check_space(prepared, out)
    return prepared


def _find_optimizer_file(path: Path) -> Path:
    file = path / "optimizer.pt" if path.is_dir() else path
    if not file.is_file():
        raise MupscaleError(f"there is no saved optimizer at {file}")
    return file


def _write(
    prepared: _Prepared, folder: Path, verify: bool, threads: int | None, progress: bool, note: Callable[[str], None]
) -> tuple[Comparison | None, str]:
    """Everything that belongs into the output's folder; the comparison, or why there is none."""
    _write_companions(prepared, folder)
    comparison, why = None, "verification is off"
    for noise in _noises(prepared):
        growth = prepared.growth if noise is not None or not prepared.noisy else GrowthStep(prepared.growth.times)
        prepared.record(growth).save(folder)
        shards, plan, seed = prepared.shards, prepared.plan, prepared.seed
        with _bar(prepared.bytes, progress) as advance:
            write_shards(shards, folder, plan, noise=noise, seed=seed, threads=threads, advance=advance)
        if verify:
            comparison, why = _compare(prepared, folder, exact=noise is None, note=note)
    if prepared.optimizer is not None:
        target, times = folder / "optimizer.pt", prepared.growth.times
        widen_optimizer_file(prepared.optimizer, target, prepared.source, times, prepared.recorded_plan)
    return comparison, why


def _noises(prepared: _Prepared) -> list[GaussianNoise | None]:
    """The noise of each time that the weights are written: what needs evidence is first compared without any."""
    if not prepared.noisy:
        return [None]
    return [None, prepared.noise] if prepared.architecture.evidence.required else [prepared.noise]


def _write_companions(prepared: _Prepared, folder: Path) -> None:
    """Config, index, tokenizer and the like."""
    replace_text(folder / "config.json", json.dumps(prepared.config, indent=2, ensure_ascii=False) + "\n")
    write_index(prepared.shards, folder)
    for file in _companion_files(prepared.source):
        target = folder / file.relative_to(prepared.source.folder)
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, target)


def _companion_files(source: Source) -> list[Path]:
    """Small files that are the same for the wide model: tokenizer, generation config, chat templates, its own code."""
    folder, kinds = source.folder, (*_COMPANIONS, *([".py"] if source.config.get("auto_map") else []))
    files = [f for f in folder.iterdir() if f.suffix in kinds and f.is_file()]
    own = [f for f in files if f.name not in _OF_THE_SMALL_ONE and not f.name.endswith(".index.json")]
    templates = (folder / "additional_chat_templates").glob("*.jinja")
    return sorted(f for f in (*own, *templates) if not f.stem.lower().startswith("readme"))


def _compare(
    prepared: _Prepared, folder: Path, *, exact: bool, note: Callable[[str], None]
) -> tuple[Comparison | None, str]:
    """Compare the two models, if they fit into memory; a difference where there must be none is an error."""
    try:
        require_transformers()
    except MupscaleError as error:
        return None, str(error)
    evidence, source, wide = prepared.architecture.evidence, prepared.source, open_source(folder)
    steps = evidence.training_steps if exact else 0
    dtypes = evidence.dtypes if exact else ("float32",)
    dtype = next((d for d in dtypes if memory.fits(needed_bytes(source, wide, d, steps))), None)
    if dtype is None:
        needed = size_in_words(needed_bytes(source, wide, "float32", steps))
        if exact:
            prepared.architecture.check_too_large_to_train(needed)
        return None, f"the two models need {needed} of memory, and so much is not free"
    note(f"comparing the two models in {dtype}")
    comparison = compare(source, wide, dtype=dtype, train=steps, plan=prepared.recorded_plan)
    if not comparison.ok and not evidence.required and comparison.rows[0].ok and _is_rounded(prepared):
        return None, (
            "its tensors are the small one's, but rounding them to 16 bits moves the outputs by more than can be told "
            "from a mistake, as a router that then chooses other experts does"
        )
    if not comparison.ok:
        verdict = " ".join(comparison.verdict.split())
        raise MupscaleError(f"the wide model is not what it should be and was not kept: {verdict}")
    return comparison, ""


def _is_rounded(prepared: _Prepared) -> bool:
    """Whether numbers of 16 bits cannot hold what the small ones become."""
    tensors = [tensor for shard in prepared.shards for tensor in shard.tensors.values()]
    return any(
        t.target.dtype.itemsize == 2 and (t.source.dtype != t.target.dtype or not is_exact({"": t.entry}))
        for t in tensors
        if t.source.dtype.is_floating_point
    )


def _dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    name = str(dtype).removeprefix("torch.")
    if dtype is not None and name not in DTYPES:
        raise MupscaleError(f"the dtype of a checkpoint is {', '.join(DTYPES)}, not {name}")
    return None if dtype is None else DTYPES[name]


def _check_place(out: Path, source: Source) -> None:
    if out.is_symlink() or (out.exists() and (not out.is_dir() or any(out.iterdir()))):
        raise MupscaleError(f"{out} exists already: remove it, or choose another name")
    here, there = out.resolve(), source.folder.resolve()
    if there == here or there in here.parents:
        raise MupscaleError(f"{out} lies inside the checkpoint {source.folder} itself: choose a place beside it")


def _check_space(prepared: _Prepared, out: Path) -> None:
    """Before hours of writing; the disk may still fill up meanwhile."""
    needed = prepared.bytes + sum(file.stat().st_size for file in _companion_files(prepared.source))
    if prepared.optimizer is not None:
        before, after = prepared.numbers
        needed += prepared.optimizer.stat().st_size * after // max(1, before)
    parent = next(p for p in out.absolute().parents if p.exists())
    if (free := shutil.disk_usage(parent).free) < needed:
        raise MupscaleError(
            f"the wide checkpoint needs {size_in_words(needed)} and the disk of {parent} has {size_in_words(free)} "
            f"left: free some space, or choose another disk"
        )


def _failure_message(out: Path, error: OSError) -> str:
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
