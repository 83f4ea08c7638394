"""Upscaling a checkpoint on disk: Meta-algorithm 'Upscaling procedure' from one folder into another.

Everything is checked first; the output is made in a hidden folder beside its place and appears under its name complete.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from mupscale.core import Plan
from mupscale.growth import GaussianNoise, Noise, Operator, check_noise, replica_in_words
from mupscale.hf.deepening import DeepeningJob
from mupscale.hf.describe import (
    AskedGrowth,
    HowDeep,
    Size,
    Times,
    check_fresh_plan,
    check_nothing_missing,
    experts_of,
    family_of_config,
    memory,
    require_transformers,
    runs_trusted_code,
    settle_experts,
    settle_growth,
)
from mupscale.hf.files import (
    GrowthStep,
    Record,
    Source,
    WeightShard,
    arrange_shards,
    bytes_bar,
    check_place,
    check_space,
    dtype_of_output,
    failure_of_writing,
    open_source,
    plan_growth,
    size_in_words,
    write_companions,
    write_model_card,
    write_shards,
)
from mupscale.hf.training import check_optimizer_file, find_optimizer_file, widen_optimizer_file
from mupscale.hf.upscaled import Upscaled
from mupscale.hf.verification import Comparison, find_record, is_exact, needed_bytes
from mupscale.hf.verification import verify as compare
from mupscale.system import MupscaleError, ReplicaWarning, appearing, checks_arguments, warn

_STEPS = 5  # of training, in which models are compared that no miniature stood for


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
    deepen: HowDeep = "identity",
    noise: Noise | None = None,
    exact: bool = False,
    seed: int = 0,
    shard_size: int | str = "5GB",
    dtype: str | torch.dtype | None = None,
    optimizer: str | Path | None = None,
    verify: bool = True,
    trust_remote_code: bool = False,
    threads: int | None = None,
    progress: bool = True,
    note: Callable[[str], None] | None = None,
) -> Upscaled:
    """Write the checkpoint, `times` (2) as wide, into the folder `out`: trained units stay, with new ones beside them.

    hidden … kv: sizes of the wide model, instead of times; what is not named stays; of a model of several parts
    {"text": 1024}. grow: `Fresh()`, the default, which takes any wider size; or `Copies(noise)`, for which `noise=` is
    short, in multiples of a fresh initialisation's. exact: copies without noise, which compute the same for ever, for
    verification. layers: how many it gets, new ones being what deepen says (`deepen_checkpoint`); with layers alone the
    width stays. experts: how many copies in place of each feed-forward layer (LLaMA and Mistral as Mixtral, Qwen3 as
    Qwen3-MoE), or of a mixture's experts, with top_k of them active for a token, and a router that is drawn, or zero if
    exact. dtype: of the output, else each tensor's own. optimizer: a saved one that goes along. verify: compare
    both, if memory allows; if no miniature of it could be run, they must be. trust_remote_code: run the checkpoint's
    own code. note: called with lines about what is done, and what to keep in mind, which are warnings otherwise.

    >>> import tempfile, transformers
    >>> folder = tempfile.TemporaryDirectory()
    >>> config = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, n_positions=16, vocab_size=11)
    >>> transformers.GPT2LMHeadModel(config).save_pretrained(f"{folder.name}/small")
    >>> upscale(f"{folder.name}/small", f"{folder.name}/wide", times=2, progress=False).comparison.ok
    True
    >>> folder.cleanup()
    """
    small, out, note = open_source(source), Path(out), note or _warn_of_replica
    sizes = {"hidden": hidden, "ffn": ffn, "heads": heads, "kv": kv}
    if layers is not None or experts is not None or top_k is not None:
        growth = GrowthStep(Times(), seed=seed, layers=layers, deepen=deepen)
        if layers is None:
            counts = settle_experts(small.config, experts or 0, top_k, small.folder, exact=exact)
            growth = replace(growth, experts=counts)
        elif experts or top_k:
            raise MupscaleError("more layers and experts are two growths: make one, and then the other")
        is_sized = times is not None or any(size is not None for size in sizes.values())
        width = {"times": times, **sizes, "dtype": dtype, "grow": grow, "noise": noise}
        width["exact"] = (exact and (is_sized or experts is None)) or None
        width["threads"] = threads
        job = DeepeningJob(small, out, growth, shard_size, optimizer, verify, progress)
        return _wider_and_deeper(job, width, note)
    how: dict[str, Any] = {"grow": grow, "noise": noise, "exact": exact}
    asked = settle_growth(small.config, times=times, sizes=sizes, **how)
    if not exact and asked.is_replica:
        note(replica_in_words())
    prepared = _prepare(small, out, asked, seed, shard_size, dtype_of_output(dtype), optimizer)
    return _carry_out(prepared, out, verify, threads, progress, note)


def _warn_of_replica(line: str) -> None:
    """What a caller who reads no lines must hear."""
    if line == replica_in_words():
        warn(line, ReplicaWarning)


def _wider_and_deeper(job: DeepeningJob, width: Mapping[str, Any], note: Callable[[str], None]) -> Upscaled:
    """Wider first, where a width is asked for, so that new layers are drawn at the new width; then deeper."""
    width = {name: value for name, value in width.items() if value is not None}
    sized, wide = {"times", "hidden", "ffn", "heads", "kv"} & width.keys(), list[Upscaled]()
    if not sized and {"grow", "noise", "exact"} & width.keys():
        raise MupscaleError(
            "noise= and grow= are for a wider model, which layers= or experts= alone do not make. Give times= as well"
        )

    def widen(folder: Path) -> None:
        unsized = {} if sized else {"times": 1, "exact": True}
        asked = {**unsized, **width, "seed": job.growth.seed, "optimizer": job.optimizer}
        wide.append(upscale(job.source.folder, folder, **asked, verify=False, progress=job.progress, note=note))

    made = job.run(widen if sized or "dtype" in width else None, note)
    sizes, experts = {**(wide[0].sizes if wide else {}), "layers": made.layers}, job.growth.experts
    if experts is not None:
        sizes["experts"] = (experts_of(job.source.config)[0], experts.experts)
    times, fresh = (wide[0].times, wide[0].fresh) if wide else (Times(), None)
    written = made.numbers, made.bytes, made.files, made.comparison, made.unverified
    how = None if job.growth.layers is None else made.how
    return Upscaled(made.path, times, *written, fresh, sizes, how, job.optimizer is not None)


@dataclass(frozen=True)
class _Prepared:
    """All that is settled before the first tensor is read.

    plan: by the names in the files. recorded_plan: by the model's, which mupscale.json holds.
    """

    source: Source
    config: dict[str, Any]
    plan: Plan
    recorded_plan: Plan
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
    def sizes(self) -> dict[str, tuple[int, int]]:
        """Of the parts that can grow, before and after."""
        now, then = (family_of_config(config).parts() for config in (self.source.config, self.config))
        return {part: (size, then[part]) for part, size in now.items()}

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
        return (self.before or Record(self.source.config)).then(growth, self.recorded_plan)


def _prepare(
    source: Source,
    out: Path,
    asked: AskedGrowth,
    seed: int,
    shard_size: int | str,
    dtype: torch.dtype | None,
    optimizer: str | Path | None,
) -> _Prepared:
    check_place(out, source)
    family, times, fresh = family_of_config(source.config), asked.times, asked.fresh
    check_nothing_missing(source.config, source.shapes, source.folder)
    measured = fresh is not None or asked.noise != 0
    before = find_record(source)
    first = before if measured else None  # from whose first model spreads are counted
    plan, recorded_plan = plan_growth(first, source.config, times, source.shapes, initial=measured)
    config = family.wide_config(times)
    check_fresh_plan(plan, fresh)
    if dtype is not None:
        fields = [name for name in ("dtype", "torch_dtype") if name in config] or ["dtype"]
        config.update(dict.fromkeys(fields, str(dtype).removeprefix("torch.")))
    gaussian = check_noise(asked.noise, plan)
    if not isinstance(gaussian, GaussianNoise):
        raise MupscaleError(
            "signal-normalised noise needs whole tensors, but a checkpoint is widened in pieces. Use GaussianNoise, "
            "with the constants that SignalNoise finds in memory (.effective) if you need them"
        )
    file = None if optimizer is None else find_optimizer_file(optimizer)
    if file is not None:
        check_optimizer_file(file, source, times, recorded_plan, grow=fresh)
    shards = arrange_shards(source, plan, dtype=dtype, shard_size=shard_size)
    growth = GrowthStep(times, gaussian.std, seed, gaussian.unit, fresh, family_of_config(config).sizes())
    growth = replace(growth, from_first=first is not None)
    prepared = _Prepared(source, config, plan, recorded_plan, before, shards, gaussian, growth, seed, file)
    few, many = prepared.numbers
    family.check_grown(plan, times)
    check_space(out, source, prepared.bytes, 0 if file is None else file.stat().st_size * many // max(1, few))
    return prepared


def _carry_out(
    prepared: _Prepared, out: Path, verify: bool, threads: int | None, progress: bool, note: Callable[[str], None]
) -> Upscaled:
    if not verify and not prepared.plan.checked:
        raise MupscaleError(
            f"no miniature of '{prepared.source.model_type}' could be run, so that only verification shows whether it "
            f"was widened rightly: let it verify"
        )
    try:
        with appearing(out) as folder:
            comparison, why = _write(prepared, folder, verify, threads, progress, note)
            checked = f"not made, since {why}." if comparison is None else comparison.verdict
            write_model_card(folder, out.name, prepared.source, [prepared.growth], prepared.sizes, checked)
    except OSError as error:
        raise MupscaleError(failure_of_writing(out, error)) from None
    growth, written = prepared.growth, (prepared.numbers, prepared.bytes, len(prepared.shards))
    carried = prepared.optimizer is not None
    return Upscaled(out, growth.times, *written, comparison, why, growth.fresh, prepared.sizes, optimizer=carried)


def _write(
    prepared: _Prepared, folder: Path, verify: bool, threads: int | None, progress: bool, note: Callable[[str], None]
) -> tuple[Comparison | None, str]:
    """Everything that belongs into the output's folder; the comparison, or why there is none."""
    write_companions(folder, prepared.source, prepared.config, prepared.shards)
    comparison, why = None, "verification is off"
    shards, plan, seed, fresh = prepared.shards, prepared.plan, prepared.seed, prepared.growth.fresh
    if verify and fresh is not None and not prepared.plan.checked:
        _show_by_copies(prepared, note)
    for noise in _noises(prepared):
        growth = prepared.growth if noise is not None or not prepared.noisy else GrowthStep(prepared.growth.times)
        prepared.record(growth).save(folder)
        with bytes_bar(prepared.bytes, progress) as advance:
            write_shards(shards, folder, plan, noise=noise, grow=fresh, seed=seed, threads=threads, advance=advance)
        if verify:
            comparison, why = _compare(prepared, folder, exact=noise is None, note=note)
    if comparison is None and fresh is not None and fresh.lossless:
        why = f"{why}{_not_lossless(prepared)}"
    if prepared.optimizer is not None:
        target, times = folder / "optimizer.pt", prepared.growth.times
        widen_optimizer_file(prepared.optimizer, target, prepared.source, times, prepared.recorded_plan, grow=fresh)
    return comparison, why


def _not_lossless(prepared: _Prepared) -> str:
    """What is known without a comparison of why the function did not stay; empty where nothing is."""
    reasons = family_of_config(prepared.source.config).obstacles(prepared.growth.times, prepared.plan)
    return f"; it is not lossless, since {reasons[0]}" if reasons else ""


def _show_by_copies(prepared: _Prepared, note: Callable[[str], None]) -> None:
    """Where modules were asked what is output and what is input: copies of the same parts must train alike."""
    note("checking the plan with copies, in training")
    times = prepared.growth.times.as_copies()
    with tempfile.TemporaryDirectory() as folder:
        upscale(prepared.source.folder, Path(folder) / "copies", times=times, exact=True, progress=False)


def _noises(prepared: _Prepared) -> list[GaussianNoise | None]:
    """The noise of each time that the weights are written: what needs evidence is first compared without any."""
    if not prepared.noisy:
        return [None]
    return [prepared.noise] if prepared.plan.checked else [None, prepared.noise]


def _compare(
    prepared: _Prepared, folder: Path, *, exact: bool, note: Callable[[str], None]
) -> tuple[Comparison | None, str]:
    """Compare the two models, if they fit into memory; a difference where there must be none is an error."""
    try:
        require_transformers()
    except MupscaleError as error:
        return None, str(error)
    required, source, wide = not prepared.plan.checked, prepared.source, open_source(folder)
    steps = _STEPS if required and exact and prepared.growth.fresh is None else 0
    dtypes = ("float64", "float32") if required and exact else ("float32",)
    dtype = next((d for d in dtypes if memory.fits(needed_bytes(source, wide, d, steps))), None)
    if dtype is None:
        needed = needed_bytes(source, wide, "float32", steps)
        if exact and required:
            raise MupscaleError(
                f"no miniature of '{source.model_type}' could be run, so that both models must be compared in "
                f"training, which needs {size_in_words(needed)} of memory: use a larger machine"
            )
        return None, f"the two models need {memory.shortage(needed)}"
    note(f"comparing the two models in {dtype}")
    comparison = compare(source, wide, dtype=dtype, train=steps, plan=prepared.recorded_plan)
    if not comparison.ok and not required and comparison.rows[0].ok and _is_rounded(prepared):
        return None, (
            "its tensors match the small model's, but rounding to 16 bits moves the outputs too much to rule out a "
            "mistake (a router may choose different experts)"
        )
    if not comparison.ok:
        verdict = " ".join(comparison.verdict.split())
        raise MupscaleError(f"the wide model failed its check and was not kept: {verdict}")
    return comparison, ""


def _is_rounded(prepared: _Prepared) -> bool:
    """Whether numbers of 16 bits cannot hold what the small ones become."""
    tensors = [tensor for shard in prepared.shards for tensor in shard.tensors.values()]
    return any(
        t.target.dtype.itemsize == 2 and (t.source.dtype != t.target.dtype or not is_exact({"": t.entry}))
        for t in tensors
        if t.source.dtype.is_floating_point
    )
