"""Upscaling a checkpoint on disk: Meta-algorithm 'Upscaling procedure' from one folder into another.

Everything is checked first; the output is made in a hidden folder beside its place and appears under its name complete.
"""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from mupscale import system
from mupscale.core import RuleSet
from mupscale.growth import Deepen, Fresh, Noise, Operator, SignalNoise, replica_in_words
from mupscale.hf import output_folder
from mupscale.hf.building import Config, memory_shortage, runs_trusted_code
from mupscale.hf.config_family import ConfigFamily, check_nothing_missing
from mupscale.hf.config_fields import Size, Times, parts_and_stages, sizes_of
from mupscale.hf.depths import experts_of, layers_of
from mupscale.hf.groups import find_optimizer_file, grow_optimizer_file
from mupscale.hf.record import GrowthStep, PlannedGrowth, Record, plan_growths, settle_growth
from mupscale.hf.source import Source, open_source
from mupscale.hf.stream import BYTES, WideTensor, arrange_shards, shorten_number, write_index, write_shards
from mupscale.hf.verifying import Comparison, find_record, is_exact, needed_bytes
from mupscale.hf.verifying import verify as compare
from mupscale.system import MupscaleError, checks_arguments, warn

__all__ = ["Upscaled"]

_DTYPES: dict[str, torch.dtype] = {n: getattr(torch, n) for n in ("float32", "bfloat16", "float16", "float64")}
_BAR = ("wide bar", "bytes", "bytes/s", "left", "time left")
_OF_OPTIMIZER = "optimizer.pt: the saved optimizer, grown too; mupscale.hf.resume_optimizer reads it"


@dataclass(frozen=True)
class Upscaled:
    """What was written. `comparison`: of the two models, where they were compared; else `unverified` says why not.

    optimizer: whether a saved optimizer went along.
    """

    path: Path
    times: Times
    numbers: tuple[int, int]
    bytes: int
    files: int
    comparison: Comparison | None = None
    unverified: str = ""
    fresh: Fresh | None = None
    sizes: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    deepen: Deepen | None = None
    optimizer: bool = False

    @property
    def layers(self) -> tuple[int, int] | None:
        """How many there are, before and after; None if the number stays."""
        return self.sizes.get("layers")

    @property
    def difference(self) -> float | None:
        """The largest relative difference of any output; None if the models were not compared."""
        if self.comparison is None:
            return None
        return max(row.difference for row in self.comparison.rows if not row.what.endswith("in the files"))

    def __str__(self) -> str:
        before, after = map(shorten_number, self.numbers)
        size = f"{shorten_number(self.bytes, BYTES)} in {self.files} file{'s' * (self.files != 1)}"
        checked = f"not verified: {self.unverified}" if self.comparison is None else self.comparison.verdict
        changed = {part: f"{part} {a} → {b}" for part, (a, b) in self.sizes.items() if a != b}
        wider = [words for part, words in changed.items() if part not in ("layers", "experts")]
        how = f"{'copies' if self.fresh is None else 'fresh units'} ({', '.join(wider) or 'of the same sizes'})"
        more = {"layers": f" ({self.deepen})"} if self.deepen is not None else {"experts": ""}
        for part, by in ((part, by) for part, by in more.items() if part in self.sizes):
            grown = f"{' → '.join(map(str, self.sizes[part]))} {part}{by}"
            how = f"{how} and {grown}" if wider else grown
        optimizer = f"{_OF_OPTIMIZER}\n" if self.optimizer else ""
        return f"{self.path}: {before} → {after} parameters with {how}, {size}\n{optimizer}{checked}"


@runs_trusted_code
@checks_arguments
def upscale(
    source: str | Path | Source,
    out: str | Path,
    *,
    times: int | str | Mapping[str, int] | Times | None = None,
    hidden: Size | None = None,
    ffn: Size | None = None,
    heads: Size | None = None,
    kv: Size | None = None,
    layers: int | None = None,
    experts: int | None = None,
    top_k: int | None = None,
    grow: Operator | None = None,
    deepen: Deepen = "identity",
    noise: Noise | None = None,
    exact: bool = False,
    seed: int = 0,
    shard_size: int | str = "5GB",
    dtype: str | torch.dtype | None = None,
    optimizer: str | Path | None = None,
    rules: RuleSet | None = None,
    verify: bool = True,
    trust_remote_code: bool = False,
    overwrite: bool = False,
    threads: int | None = None,
    progress: bool = True,
    note: Callable[[str], None] | None = None,
) -> Upscaled:
    """Write the checkpoint, `times` (2) as wide, into the folder `out`: trained units stay, with new ones beside them.

    hidden … kv: sizes of the wide model, instead of times; what is not named stays; of a model of several parts
    {"text": 1024}. grow: `Fresh()`, the default, which takes any wider size; or `Copies(noise)`, for which `noise=` is
    short, in multiples of a fresh initialisation's. exact: copies without noise, which compute the same for ever, for
    verification. layers: how many it gets; with layers alone the width stays. deepen: what new ones are, identity (they
    write nothing into the residual stream, so the function stays), stack (all layers again on top) or interleaved (each
    copy behind its layer). experts: how many copies in place of each feed-forward layer (LLaMA and Mistral as Mixtral,
    Qwen3 as Qwen3-MoE), or of a mixture's experts, with top_k of them active for a token, and a router that is drawn,
    or zero if exact. dtype: of the output, else each tensor's own. optimizer: a saved one that goes along, and rules:
    by which its weight decay grows. verify: compare both, if memory allows. trust_remote_code: run the checkpoint's own
    code. overwrite: replace what stands at `out`, once the new folder is finished, if mupscale wrote it. note: called
    with lines about what is done, and what to keep in mind, which are warnings otherwise.

    >>> import tempfile, transformers
    >>> folder = tempfile.TemporaryDirectory()
    >>> config = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, n_positions=16, vocab_size=11)
    >>> transformers.GPT2LMHeadModel(config).save_pretrained(f"{folder.name}/small")
    >>> upscale(f"{folder.name}/small", f"{folder.name}/wide", times=2, progress=False).comparison.ok
    True
    >>> folder.cleanup()
    """
    small, out, told = open_source(source), Path(out), note
    note = note or (lambda line: None)
    sizes_asked = {"hidden": hidden, "ffn": ffn, "heads": heads, "kv": kv}
    asked: dict[str, Any] = {"times": times, "sizes": sizes_asked, "grow": grow, "noise": noise, "exact": exact}
    asked |= {"seed": seed, "layers": layers, "deepen": deepen, "experts": experts, "top_k": top_k}
    width, *deeper = settle_growth(small.config, small.tensors, small.folder, **asked)
    if not exact and width.is_replica:
        note(replica_in_words())
        if told is None:  # a caller who reads no lines must hear it, too
            warn(replica_in_words(), system.ReplicaWarning)
    place = system.place_for(out, overwrite)
    before = _check(small, out, width, optimizer, rules)
    width = replace(width, sizes=sizes_of(width.config_after(small.config)))
    steps = plan_growths([width, *deeper], small.config, small.shapes, before)
    width.grow.check(steps[0].plan)
    config, name = dict(steps[-1].config), str(dtype).removeprefix("torch.")
    if dtype is not None and name not in _DTYPES:
        raise MupscaleError(f"the dtype of a checkpoint is {', '.join(_DTYPES)}, not {name}")
    if dtype is not None:
        fields = [field for field in ("dtype", "torch_dtype") if field in config] or ["dtype"]
        config.update(dict.fromkeys(fields, name))
    file = None if optimizer is None else find_optimizer_file(optimizer)
    if file is not None:
        grow_optimizer_file(file, None, small, steps, rules=rules)
    is_deeper_alone = bool(deeper) and width.times == Times() and dtype is None and not width.draws
    record = before.then(steps[-1].growth, steps[-1].by_model) if is_deeper_alone else steps[-1].record
    record = record if rules is None else replace(record, decay=rules.decay)
    if deeper:
        check_nothing_missing(config, steps[-1].shapes, f"the checkpoint that grew {deeper[0]}")
    shards = arrange_shards(small, steps, dtype=_DTYPES.get(name), shard_size=shard_size)
    ConfigFamily(small.config).check_grown(steps[0].plan, width.times)
    tensors = [tensor for shard in shards for tensor in shard.tensors.values()]
    few, many = sum(t.numel for t in small.tensors.values()), sum(t.target.numel for t in tensors)
    total, sizes = sum(shard.bytes for shard in shards), _sizes(small.config, config)
    needed = total + (0 if file is None else file.stat().st_size * many // max(1, few))
    needed += sum(file.stat().st_size for file in output_folder.companion_files(small))
    parent = next(p for p in out.absolute().parents if p.exists())
    if (free := shutil.disk_usage(parent).free) < needed:  # it may still fill up meanwhile
        raise MupscaleError(
            f"the wide checkpoint needs {shorten_number(needed, BYTES)} and the disk of {parent} has "
            f"{shorten_number(free, BYTES)} left. Free some space, or choose a different disk"
        )
    comparison, why = None, "verification is off"
    try:
        with system.appearing(place) as folder:
            system.replace_text(folder / "config.json", json.dumps(config, indent=2, ensure_ascii=False) + "\n")
            write_index(shards, folder)
            output_folder.copy_companions(folder, small)
            record.save(folder)
            with system.Display(_BAR, total, visible=progress, transient=True) as bar:
                write_shards(shards, folder, threads=threads, advance=bar.advance)
            if verify:
                comparison, why = _compare(small, folder, steps, tensors, note)
            if comparison is None and width.fresh is not None and width.fresh.lossless:
                reasons = ConfigFamily(small.config).obstacles(width.times, steps[0].plan)
                why += f"; it is not lossless, since {reasons[0]}" if reasons else ""
            if file is not None:
                grown_file = folder / output_folder.OPTIMIZER_FILE
                grow_optimizer_file(file, grown_file, small, steps, rules=rules)
                replace(record, optimizer=system.sha256_of(grown_file)).save(folder)
            checked = f"not made, since {why}." if comparison is None else comparison.verdict
            growths = record.growths[len(before.growths) :]
            output_folder.write_model_card(folder, out.name, small, config, growths, sizes, checked)
        if place != out:
            system.replace_folder(place, out)
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        what = "the disk is full" if is_full else f"{error.strerror or error}"
        where = f" ({error.filename})" if error.filename else ""
        raise MupscaleError(f"{out} could not be written: {what}{where}; nothing was left behind") from None
    written = (few, many), total, len(shards), comparison, why, width.fresh, sizes
    return Upscaled(out, width.times, *written, None if layers is None else deepen, file is not None)


def _check(small: Source, out: Path, width: GrowthStep, optimizer: str | Path | None, rules: RuleSet | None) -> Record:
    """Refuse what cannot be done; the growths of the checkpoint so far."""
    if isinstance(getattr(width.grow, "noise", None), SignalNoise):
        raise MupscaleError(
            "signal-normalised noise needs whole tensors, but a checkpoint is widened in pieces. Use GaussianNoise, "
            "with the constants that SignalNoise finds in memory (.effective) if you need them"
        )
    if rules is not None and optimizer is None:
        saved = system.as_asked("optimizer=", "--optimizer-state")
        raise MupscaleError(f"rules are about an optimizer's decay: give the saved optimizer, too ({saved})")
    source, target = small.folder.resolve(), out.resolve()
    if source in (target, *target.parents):
        raise MupscaleError(f"{out} lies inside the checkpoint {small.folder}. Choose a folder outside it")
    if target in source.parents:
        raise MupscaleError(f"{out} holds the checkpoint {small.folder}. Choose a different folder")
    check_nothing_missing(small.config, small.shapes, small.folder)
    return find_record(small) or Record(small.config)


def _sizes(before: Config, after: Config) -> dict[str, tuple[int, int]]:
    """Of the parts that can grow, before and after; of layers and experts where there are more."""
    pair = before, after
    now, then = map(parts_and_stages, pair)
    counts = {"layers": [layers_of(one) or 0 for one in pair], "experts": [experts_of(one)[0] for one in pair]}
    grown = {name: (few, many) for name, (few, many) in counts.items() if few != many}
    return {**{part: (size, then[part]) for part, size in now.items()}, **grown}


def _compare(
    small: Source,
    folder: Path,
    steps: Sequence[PlannedGrowth],
    tensors: Sequence[WideTensor],
    note: Callable[[str], None],
) -> tuple[Comparison | None, str]:
    """Compare the two models, if they fit into memory; a difference where there must be none is an error."""
    wide = open_source(folder)
    if shortage := memory_shortage(needed_bytes(small, wide)):
        return None, f"the two models need {shortage}"
    note("comparing the two models in float32")
    comparison = compare(small, wide, plan=steps[0].by_model)
    short = [t for t in tensors if t.source.dtype.is_floating_point and t.target.dtype.itemsize == 2]
    is_rounded = any(t.source.dtype != t.target.dtype or not is_exact({"": t.entry}) for t in short)
    if not comparison.ok and comparison.rows[0].ok and is_rounded:
        return None, (
            "its tensors match the small model's, but rounding to 16 bits moves the outputs too much to rule out a "
            "mistake (a router may choose different experts)"
        )
    if not comparison.ok:
        verdict = " ".join(comparison.verdict.split())
        kind = "wide" if len(steps) == 1 else "larger"
        raise MupscaleError(f"the {kind} model failed its check and was not kept: {verdict}")
    return comparison, ""
