"""A checkpoint on disk with more layers, or with experts, from one folder into another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mupscale.hf.describe import (
    HowDeep,
    Times,
    check_depth,
    check_nothing_missing,
    experts_of,
    family_of_config,
    layers_of,
    memory,
    plan_mixture,
    require_transformers,
)
from mupscale.hf.files import (
    DeepTensor,
    GrowthStep,
    NewTensor,
    Record,
    Source,
    bytes_bar,
    check_place,
    check_space,
    failure_of_writing,
    open_source,
    write_companions,
    write_deep_weights,
    write_model_card,
)
from mupscale.hf.training import (
    check_deepened_optimizer,
    check_optimizer_file,
    deepen_optimizer_file,
    find_optimizer_file,
    widen_optimizer_file,
)
from mupscale.hf.verification import Comparison, find_record, needed_bytes
from mupscale.hf.verification import verify as compare
from mupscale.system import MupscaleError, appearing, checks_arguments, remove

Widen = Callable[[Path], object]
"""Writes a wider checkpoint into a folder, before it becomes deeper."""
_WIDE = ".wide"

__all__ = ["Deepened", "DeepeningJob", "deepen_checkpoint"]


@dataclass(frozen=True)
class Deepened:
    """What was written. `comparison`: of the two models, where they were compared; else `unverified` says why not.

    numbers: entries of all tensors, before and after.
    """

    path: Path
    layers: tuple[int, int]
    how: HowDeep
    numbers: tuple[int, int]
    bytes: int
    files: int
    comparison: Comparison | None = None
    unverified: str = ""

    @property
    def difference(self) -> float | None:
        """The largest relative difference of any output; None if the models were not compared."""
        if self.comparison is None:
            return None
        return max(row.difference for row in self.comparison.rows if not row.what.endswith("in the files"))

    def __str__(self) -> str:
        checked = f"not verified: {self.unverified}" if self.comparison is None else self.comparison.verdict
        return f"{self.path}: {self.layers[0]} layers are {self.layers[1]} ({self.how})\n{checked}"


@checks_arguments
def deepen_checkpoint(
    source: str | Path | Source,
    out: str | Path,
    *,
    layers: int,
    how: HowDeep = "identity",
    seed: int = 0,
    shard_size: int | str = "5GB",
    optimizer: str | Path | None = None,
    verify: bool = True,
    progress: bool = True,
    note: Callable[[str], None] | None = None,
) -> Deepened:
    """Write the checkpoint with so many layers into the folder `out`.

    how: identity (new layers write nothing into the residual stream, the function stays), stack (all layers again on
    top) or interleaved (each copy behind its layer). optimizer: a saved torch optimizer, whose state goes along.
    verify: compare the two models if both fit into memory; new layers that are to be identity and are not are an error.
    note: called with a line before the comparison. `hf.upscale(…, layers=…)` makes a checkpoint wider and deeper.

    >>> import tempfile, transformers
    >>> folder = tempfile.TemporaryDirectory()
    >>> config = transformers.GPT2Config(n_embd=8, n_layer=2, n_head=2, n_positions=16, vocab_size=11)
    >>> transformers.GPT2LMHeadModel(config).save_pretrained(f"{folder.name}/small")
    >>> deepened = deepen_checkpoint(f"{folder.name}/small", f"{folder.name}/deep", layers=3, progress=False)
    >>> deepened.layers, deepened.comparison.ok
    ((2, 3), True)
    >>> folder.cleanup()
    """
    growth = GrowthStep(Times(), seed=seed, layers=layers, deepen=how)
    job = DeepeningJob(open_source(source), Path(out), growth, shard_size, optimizer, verify, progress)
    return job.run(note=note or (lambda line: None))


@dataclass(frozen=True)
class DeepeningJob:
    """A checkpoint that is to become deeper or a mixture, or first wider and then that, and all that was asked for."""

    source: Source
    out: Path
    growth: GrowthStep
    shard_size: int | str = "5GB"
    optimizer: str | Path | None = None
    verify: bool = True
    progress: bool = True

    @property
    def layers(self) -> int:
        """How many layers it gets."""
        return self.growth.layers or layers_of(self.source.config) or 0

    def run(self, widen: Widen | None = None, note: Callable[[str], None] = lambda line: None) -> Deepened:
        """Write it; `widen` writes what becomes deeper, where that is not the checkpoint itself."""
        before, how = self.source, self.growth.deepen
        check_place(self.out, before)
        find_record(before)
        file = None if self.optimizer is None else find_optimizer_file(self.optimizer)
        if self.growth.experts is None:
            check_depth(before.config, how, self.layers, before.tensors, before.folder)
        elif file is not None:
            plan, joined = plan_mixture(before.config, before.shapes, self.growth.experts)
            check_optimizer_file(file, before, Times(), plan, joined=joined)
        if file is not None and self.growth.experts is None:
            check_deepened_optimizer(file, before, layers=self.layers, how=how)
        try:
            with appearing(self.out) as folder:
                if widen is not None:
                    widen(folder / _WIDE)
                    file = file and folder / _WIDE / "optimizer.pt"
                shallow = before if widen is None else open_source(folder / _WIDE)
                return self._write(folder, shallow, file, note)
        except OSError as error:
            raise MupscaleError(failure_of_writing(self.out, error)) from None

    def _write(self, folder: Path, shallow: Source, optimizer: Path | None, note: Callable[[str], None]) -> Deepened:
        growth, record = self.growth, find_record(shallow)
        config = growth.config_after(shallow.config)
        planned = growth.new_tensors(shallow.shapes, shallow.config, record)
        check_nothing_missing(config, planned, f"the checkpoint that grew {growth}")
        tensors = {}
        for name, one in planned.items():
            stored, new = shallow.tensors[one.origin], None
            if one.mean is not None:
                new = NewTensor(name, one.mean, one.std, growth.seed, growth.draws)
                stored = replace(stored, shape=one.shape or stored.shape)
            tensors[name] = DeepTensor(stored, new, one.rows)
        size = sum(tensor.bytes for tensor in tensors.values())
        check_space(folder, shallow, size, 0 if optimizer is None else optimizer.stat().st_size * 2)
        write_companions(folder, shallow, config, _NO_INDEX)
        plan, joined = (
            (None, {}) if growth.experts is None else plan_mixture(shallow.config, shallow.shapes, growth.experts)
        )
        grown = (record or Record(shallow.config)).then(growth, plan)
        grown.save(folder)
        with bytes_bar(size, self.progress) as advance:
            files = write_deep_weights(folder, tensors, self.shard_size, advance)
        target = folder / "optimizer.pt"
        if optimizer is not None and plan is not None:
            widen_optimizer_file(optimizer, target, shallow, Times(), plan, joined=joined)
        elif optimizer is not None:
            deepen_optimizer_file(optimizer, target, shallow, layers=self.layers, how=growth.deepen)
        comparison, why = self._compare(folder, note) if self.verify else (None, "verification is off")
        checked = f"not made, since {why}." if comparison is None else comparison.verdict
        self._write_card(folder, shallow, grown, checked)
        remove(folder / _WIDE)
        few, many = sum(t.numel for t in self.source.tensors.values()), sum(t.numel for t in tensors.values())
        counts = (layers_of(self.source.config) or 0, self.layers)
        return Deepened(self.out, counts, growth.deepen, (few, many), size, files, comparison, why)

    def _compare(self, folder: Path, note: Callable[[str], None]) -> tuple[Comparison | None, str]:
        """Compare the first and the last model, if they fit into memory; a difference that must not be is an error."""
        try:
            require_transformers()
        except MupscaleError as error:
            return None, str(error)
        deep = open_source(folder)
        if shortage := memory.shortage(needed_bytes(self.source, deep)):
            return None, f"the two models need {shortage}"
        note("comparing the two models in float32")
        comparison = compare(self.source, deep)
        if not comparison.ok:
            verdict = " ".join(comparison.verdict.split())
            raise MupscaleError(f"the larger model failed its check and was not kept: {verdict}")
        return comparison, ""

    def _write_card(self, folder: Path, shallow: Source, grown: Record, checked: str) -> None:
        """What was done since the checkpoint that was given."""
        steps = grown.growths[-1 if shallow is self.source else -2 :]
        now, then = (family_of_config(c.config).parts() for c in (self.source, shallow))
        sizes: dict[str, Any] = {part: (size, then[part]) for part, size in now.items()}
        sizes["layers"] = (layers_of(self.source.config), self.layers)
        if self.growth.experts is not None:
            sizes["experts"] = (experts_of(self.source.config)[0], self.growth.experts.experts)
        write_model_card(folder, self.out.name, self.source, steps, sizes, checked)


_NO_INDEX: list[Any] = [None]  # the index is written with the weights
