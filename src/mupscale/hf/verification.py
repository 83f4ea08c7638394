"""Does a wide checkpoint compute, and go on computing, what the small one does? And if not, where does it begin?"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mupscale.checks import Difference, Recorder, first_module, relative_difference
from mupscale.checks import verify as train_both
from mupscale.core import Plan, naming
from mupscale.growth import widen
from mupscale.hf import models, weights
from mupscale.hf.architecture import CAUSAL
from mupscale.hf.generic import how_to_describe
from mupscale.hf.models import Batch
from mupscale.hf.parameters import decay_groups, named_as_in, shapes_of
from mupscale.hf.precision import KeepDouble
from mupscale.hf.relation import Relation, relate
from mupscale.hf.source import Source, open_source
from mupscale.planning import plan as plan_of_modules
from mupscale.system import MupscaleError, available_memory, generator

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}
_LR, _DECAY = 1e-3, 0.1
_BATCHES = 8  # of training, used in turn
_WITHOUT = ", without the noise"
_FILES_ADVICE = (
    "It is not the small one's copied and rescaled as mupscale.json says: the file was changed or trained on since, "
    "SMALL is not the checkpoint it was made from, or another description made it."
)

Checkpoint = str | Path | Source | nn.Module


@dataclass(frozen=True)
class Row:
    """One thing that was compared; difference: relative, the largest."""

    what: str
    difference: float
    tolerance: float
    note: str = ""

    @property
    def ok(self) -> bool:
        """Whether it is within the tolerance; what is not finite never is."""
        return math.isfinite(self.difference) and self.difference <= self.tolerance

    def cells(self) -> tuple[str, str, str, str]:
        """As text."""
        allowed = f"{self.tolerance:.0e}" if math.isfinite(self.tolerance) else "as the noise has it"
        return self.what, f"{self.difference:.1e}", allowed, (self.note or "same") if self.ok else "DIFFERENT"


@dataclass(frozen=True)
class Comparison:
    """What was compared, the loss of both models, and the first difference if there is one."""

    rows: tuple[Row, ...]
    losses: tuple[float, float]
    first: Difference | None = None
    noisy: bool = False
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether everything that was compared is as it should be."""
        return all(row.ok for row in self.rows) and self.first is None

    @property
    def verdict(self) -> str:
        """In words."""
        worst = max(self.rows, key=lambda row: row.difference if row.difference == row.difference else math.inf)
        losses = f"loss {self.losses[0]:.4g} and {self.losses[1]:.4g}"
        if not self.ok:
            lines = [f"NOT equivalent: {next((r.what for r in self.rows if not r.ok), worst.what)} differ ({losses})"]
            lines += [str(self.first)] if self.first is not None else []
        elif self.noisy:
            moved = next(row for row in self.rows if row.note)
            lines = [f"as recorded: the noise moves {moved.what} by {moved.difference:.1%} ({losses})"]
        else:
            lines = [f"equivalent: largest relative difference {worst.difference:.1e} ({losses})"]
        return "\n".join([*lines, *self.notes])

    def table(self) -> Any:
        """For a terminal, through rich."""
        from rich.table import Table

        table = Table("compared", "difference", "allowed", "")
        for row in self.rows:
            table.add_row(*row.cells(), style=None if row.ok else "bold red")
        return table

    def __str__(self) -> str:
        cells = [("compared", "difference", "allowed", ""), *(row.cells() for row in self.rows)]
        sizes = [max(len(line[i]) for line in cells) for i in range(4)]
        lines = ["  ".join(text.ljust(n) for text, n in zip(line, sizes, strict=True)).rstrip() for line in cells]
        return "\n".join([*lines, self.verdict])


def verify(
    small: Checkpoint,
    wide: Checkpoint,
    *,
    dtype: str | torch.dtype = "float32",
    text: str | Path | None = None,
    tokens: int = 64,
    train: int = 0,
    tolerance: float | None = None,
    seed: int = 0,
    plan: Plan | None = None,
    device: str | None = None,
) -> Comparison:
    """Compare two checkpoints (folders, or models already built): their files, their outputs, their training.

    The tensors of WIDE are compared with those of SMALL, grown as mupscale.json says, noise included. Both models then
    compute on the same random tokens, pixels or `text` (a file); every output counts, a hidden state with its copies.
    train: so many steps of AdamW with weight decay, an eps that matters and width-invariant clipping that binds.
    tolerance: by default 1e-10 in float64 and 1e-4 in float32 (ten times that after training), and more where the
    files themselves had to round, as bfloat16 must where a factor is no power of two.
    With noise the two are not meant to compute the same: the table tells how far the outputs moved, which is fine as
    long as they are finite and the files are what the record says, or within the tolerance if one is given. Without the
    noise, which is taken out of the wide model in memory, outputs and training must be the same.
    plan: from SMALL to WIDE by the model's own names, where there is no record of it.
    """
    if tolerance is not None and not tolerance >= 0:
        raise MupscaleError(f"a tolerance of {tolerance} allows nothing: give 0 or more")
    if train < 0 or tokens < 2:
        raise MupscaleError(f"there is nothing to compare in {tokens} tokens and {train} steps: give 2 and 0 or more")
    built = next((model for model in (small, wide) if isinstance(model, nn.Module)), None)
    precision = _dtype(dtype if built is None else next(built.parameters()).dtype)
    relation = None if built is not None else relate(open_source(small), open_source(wide), plan)  # type: ignore[arg-type]
    rows, first = ([], None) if relation is None else _compare_files(relation)
    noisy = relation is not None and relation.noisy
    ours, theirs, notes = _both_models(small, wide, relation, precision, train, device)
    plan = _plan_between(ours, theirs, relation, plan)
    given = None if tolerance is None else (tolerance, tolerance)
    allowed, allowed_in_training = given or _tolerances(None if noisy else relation, plan, precision)
    batches = _batches(ours, relation, max(2, min(train + 1, _BATCHES)), tokens, seed, text, device)
    with _kept(precision):
        measured, losses = _compare_outputs(ours, theirs, batches[:2])
        if relation is not None and not relation.described and _is_blank(ours, batches[0]):
            raise MupscaleError(
                f"the outputs of {relation.small.folder} are all alike, so that comparing them shows nothing, and "
                f"'{relation.small.model_type}' is not described: take a checkpoint with weights in it"
            )
        limit = math.inf if noisy and tolerance is None else allowed
        rows += [Row(what, off, limit, "moved by the noise" if noisy else "") for what, off in measured.items()]
        if noisy:  # the files are compared with it; that config and plan are right shows without it
            widen(ours, theirs, plan)
            measured, _ = _compare_outputs(ours, theirs, batches[:2])
            rows += [Row(f"{what}{_WITHOUT}", off, allowed) for what, off in measured.items()]
        if first is None and not all(row.ok for row in rows if not row.note):
            first = _first_difference(ours, theirs, batches[:2], plan, allowed)
        if train and all(row.ok for row in rows):
            row, first = _compare_training(ours, theirs, plan, batches, train, allowed_in_training)
            rows.append(replace(row, what=f"{row.what}{_WITHOUT}") if noisy else row)
    if first is not None and relation is not None and not relation.described:
        first = replace(first, advice=f"{first.advice} {how_to_describe(relation.small.config)}")
    return Comparison(tuple(rows), losses, first, noisy, tuple(notes))


def needed_bytes(small: Source, wide: Source, dtype: str | torch.dtype = "float32", train: int = 0) -> int:
    """Memory that verify takes for both models; training works on copies, with gradients and two moments."""
    numbers = sum(stored.numel for source in (small, wide) for stored in source.tensors.values())
    return numbers * _dtype(dtype).itemsize * (5 if train else 1)


def _dtype(dtype: str | torch.dtype) -> torch.dtype:
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if found not in TOLERANCE:
        raise MupscaleError(f"models are compared in float32 or float64, not in {dtype}")
    return found


def _kept(precision: torch.dtype) -> AbstractContextManager[Any]:
    return KeepDouble() if precision == torch.float64 else nullcontext()


def _compare_files(relation: Relation) -> tuple[list[Row], Difference | None]:
    """One row for all tensors; the first that is wrong is named."""
    steps = list(relation.steps())
    limit = weights.rounding(relation.small, relation.wide)
    worst, first = 0.0, None
    for name, off in weights.differences(relation.small, relation.wide, steps):
        worst = max(worst, off)
        if first is None and not off <= limit:
            first = Difference(name, "parameter", off, _FILES_ADVICE)
    return [Row("tensors in the files", worst, limit)], first


def _both_models(
    small: Checkpoint,
    wide: Checkpoint,
    relation: Relation | None,
    precision: torch.dtype,
    train: int,
    device: str | None,
) -> tuple[nn.Module, nn.Module, list[str]]:
    """The models themselves, and what there is to say of them."""
    if relation is not None:
        needed, free = needed_bytes(relation.small, relation.wide, precision, train), available_memory()
        if not models.fits(needed) and device is None:
            raise MupscaleError(
                f"comparing the two models in {str(precision).removeprefix('torch.')} takes {needed / 1e9:.1f} GB of "
                f"memory and {(free or 0) / 1e9:.1f} GB are free"
            )
    loaded = []
    for checkpoint in (small, wide) if relation is None else (relation.small, relation.wide):
        if isinstance(checkpoint, nn.Module):
            loaded.append(models.Loaded(checkpoint, ()))
        else:
            loaded.append(models.load(open_source(checkpoint), precision, device=device))
    notes = []
    if unused := loaded[0].unused:
        more = f" and {len(unused) - 1} more" if len(unused) > 1 else ""
        kind = type(loaded[0].model).__name__
        notes.append(f"Not in the outputs: '{unused[0]}'{more}, which {kind} has no use for.")
    for one in loaded:
        if hasattr(one.model.config, "use_cache"):
            one.model.config.use_cache = False
    return loaded[0].model, loaded[1].model, notes


def _plan_between(ours: nn.Module, theirs: nn.Module, relation: Relation | None, plan: Plan | None) -> Plan:
    if relation is not None:
        plan = named_as_in(ours, relation.plan_for(shapes_of(ours)))
    elif plan is None:
        plan = plan_of_modules(ours, theirs)
    plan.check(ours, "narrow")
    plan.check(theirs)
    return plan


def _tolerances(relation: Relation | None, plan: Plan, precision: torch.dtype) -> tuple[float, float]:
    """Of outputs and of training: what the computation rounds, and what the files had to round."""
    exact, trained = TOLERANCE[precision], TOLERANCE[precision] * (10 if precision == torch.float32 else 1)
    eps = 0.0 if relation is None else _rounded(relation, plan)
    return max(exact, 8 * eps), max(trained, 32 * eps)


def _rounded(relation: Relation, plan: Plan) -> float:
    """The relative error of weights that the wide files cannot hold exactly; 0 where they can."""
    few, many = (
        {stored.dtype for stored in source.tensors.values() if stored.dtype.is_floating_point}
        for source in (relation.small, relation.wide)
    )
    if weights.is_exact(plan.parameters) and few == many:
        return 1e-4 if torch.float16 in many else 0.0  # whose smallest numbers lose bits even so
    return max(torch.finfo(dtype).eps for dtype in many)


def _batches(
    model: nn.Module,
    relation: Relation | None,
    count: int,
    tokens: int,
    seed: int,
    text: str | Path | None,
    device: str | None,
) -> list[Batch]:
    words = None if text is None else _read_text(Path(text))
    folder = None if relation is None else relation.small.folder
    made = models.batches(model, count, tokens, seed=seed, text=words, folder=folder)
    dtype = next(model.parameters()).dtype
    return [
        {name: value.to(device, dtype if value.is_floating_point() else None) for name, value in batch.items()}
        for batch in made
    ]


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise MupscaleError(f"the text {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise MupscaleError(f"{path} is no text in UTF-8") from None


def _outputs(model: nn.Module, batch: Batch, which: str = "the model") -> dict[str, Tensor]:
    """Every tensor that a model gives out, by name; caches, inner states and losses are none of them."""
    try:
        found = model(**batch)
    except MupscaleError:
        raise
    except Exception as error:  # a model that does not run, as with a field of its config that should have grown
        first = (str(error).splitlines() or [""])[0]
        raise MupscaleError(f"{which} cannot be run ({type(error).__name__}: {first})") from None
    return {name: t for name, t in found.items() if isinstance(t, Tensor) and t.is_floating_point() and t.dim()}


@torch.no_grad()
def _compare_outputs(
    ours: nn.Module, theirs: nn.Module, batches: list[Batch]
) -> tuple[dict[str, float], tuple[float, float]]:
    """Largest relative difference of each output, and the mean loss of both models."""
    worst: dict[str, float] = {}
    losses = [0.0, 0.0]
    for batch in batches:
        small = _outputs(ours, batch, "the small model")
        wide = _outputs(theirs, batch, "the wide model")
        for name, tensor in small.items():
            off = relative_difference(_copied(tensor, wide[name]), wide[name]) if name in wide else math.inf
            worst[name] = max(worst.get(name, 0.0), off)
        for side, found in enumerate((small, _averaged(wide, _widths(small)))):
            losses[side] += float(_loss(ours, found, batch)) / len(batches)
    return worst, (losses[0], losses[1])


@torch.no_grad()
def _is_blank(model: nn.Module, batch: Batch) -> bool:
    """Whether the outputs do not depend on anything, as with weights that are all zero."""
    return all(bool((t == t.flatten()[0]).all()) for t in _outputs(model, batch).values())


def _copied(small: Tensor, wide: Tensor) -> Tensor:
    """A hidden state as the wide model should have it: every unit as often as the last axis has grown."""
    if small.shape[:-1] != wide.shape[:-1] or wide.shape[-1] % small.shape[-1]:
        raise MupscaleError(
            f"the outputs of the two models have shapes {tuple(small.shape)} and {tuple(wide.shape)}: WIDE is no "
            f"upscaled version of SMALL"
        )
    return small.repeat_interleave(wide.shape[-1] // small.shape[-1], -1)


def _widths(outputs: dict[str, Tensor]) -> dict[str, int]:
    return {name: t.shape[-1] for name, t in outputs.items()}


def _averaged(outputs: dict[str, Tensor], widths: dict[str, int]) -> dict[str, Tensor]:
    """The mean over each unit's copies: a readout that divides by the width, so that losses are the same."""
    return {
        name: t if t.shape[-1] == widths[name] else t.unflatten(-1, (widths[name], -1)).mean(-1)
        for name, t in outputs.items()
        if name in widths
    }


def _loss(model: nn.Module, outputs: dict[str, Tensor], batch: Batch) -> Tensor:
    """The next token's for a causal language model; else of targets drawn once for each output."""
    total: Tensor | None = None
    for name, t in outputs.items():
        if name == "logits" and type(model).__name__.endswith(CAUSAL) and t.dim() == 3:
            value = F.cross_entropy(t[:, :-1].flatten(0, -2), batch["input_ids"][:, 1:].flatten())
        elif "logits" in name and t.shape[-1] > 1 and t.dim() > 1:
            classes = torch.randint(t.shape[-1], t.shape[:-1], generator=generator(0, name)).to(t.device)
            value = F.cross_entropy(t.flatten(0, -2), classes.flatten())
        else:
            value = (t - torch.randn(t.shape, generator=generator(0, name)).to(t)).square().mean()
        total = value if total is None else total + value
    if total is None:
        raise MupscaleError(f"{type(model).__name__} gives out no tensor that could be compared")
    return total


def _first_difference(
    ours: nn.Module, theirs: nn.Module, batches: list[Batch], plan: Plan, tolerance: float
) -> Difference | None:
    for batch in batches:
        with torch.no_grad(), Recorder(ours) as small, Recorder(theirs) as wide:
            _outputs(ours, batch)
            _outputs(theirs, batch)
        if (found := first_module(small, wide, plan, tolerance)) is not None:
            return found
    return None


def _compare_training(
    ours: nn.Module, theirs: nn.Module, plan: Plan, batches: list[Batch], steps: int, tolerance: float
) -> tuple[Row, Difference | None]:
    """Both trained side by side: Theorem 'Dynamic equivalence' on the checkpoints themselves."""
    optimizer, clip = _optimizer(ours, batches[0])
    with torch.no_grad():
        widths = _widths(_outputs(ours, batches[0]))
    with _plain_outputs(ours, widths), _plain_outputs(theirs, widths):
        turns = (batches[i % len(batches)] for i in range(steps + 1))
        found = train_both(
            ours,
            theirs,
            plan,
            turns,
            lambda model, batch: _loss(model, model(**batch), batch),
            optimizer=optimizer,
            steps=steps,
            clip=clip,
            tolerance=tolerance,
        )
    return Row(f"outputs over {steps} steps of AdamW", found.max_relative_difference, tolerance), found.first


def _optimizer(model: nn.Module, batch: Batch) -> tuple[torch.optim.Optimizer, float]:
    """AdamW that decays all but biases and norms, eps a tenth of the gradients' size; half their norm to clip at."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    grads = torch.autograd.grad(_loss(model, _outputs(model, batch), batch), parameters, allow_unused=True)
    found = [g for g in grads if g is not None]
    norm = float(nn.utils.get_total_norm(found))
    eps = max(0.1 * norm / math.sqrt(sum(g.numel() for g in found)), 1e-12)
    named = naming.parameters(model)
    groups = [{**group, "params": [named[name] for name in group["params"]]} for group in decay_groups(model, _DECAY)]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=_LR, eps=eps), norm / 2


@contextmanager
def _plain_outputs(model: nn.Module, widths: dict[str, int]) -> Iterator[None]:
    """While it is entered, the model gives out a dict of tensors of the small model's shapes."""

    def plain(module: nn.Module, inputs: Any, found: Any) -> dict[str, Tensor]:
        return _averaged({name: t for name, t in found.items() if name in widths}, widths)

    handle = model.register_forward_hook(plain)
    try:
        yield
    finally:
        handle.remove()
