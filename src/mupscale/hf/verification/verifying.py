"""Does a wide checkpoint compute, and go on computing, what the small one does? And if not, where does it begin?"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from mupscale.core import Entry, Plan
from mupscale.growth import widen
from mupscale.hf.describe import Batch, make_batches, memory, runs_trusted_code, with_layers
from mupscale.hf.files import Source, open_source
from mupscale.hf.training import match_plan
from mupscale.hf.verification import weights
from mupscale.hf.verification.comparison import RANDOM, TOLERANCE, Comparison, ComparisonRow
from mupscale.hf.verification.fresh_growth import FreshGrowth
from mupscale.hf.verification.joint_training import compare_training
from mupscale.hf.verification.loading import Loaded, load_pretrained
from mupscale.hf.verification.model_outputs import OutputComparison, compare_outputs, first_difference
from mupscale.hf.verification.relation import Relation, relate
from mupscale.planning import Difference, KeepDouble
from mupscale.planning import plan as plan_of_modules
from mupscale.system import MupscaleError, checks_arguments

_BATCHES = 8  # of training, used in turn
_FILES_ADVICE = (
    "It does not match the small one, grown as mupscale.json says: the file was changed or trained since, SMALL is a "
    "different checkpoint, or a different description made it."
)

Checkpoint = str | Path | Source | nn.Module


@runs_trusted_code
@checks_arguments
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
    trust_remote_code: bool = False,
) -> Comparison:
    """Compare two checkpoints (folders, or models already built): their files, their outputs, their training.

    The tensors of WIDE are compared with those of SMALL, grown as mupscale.json says, noise included. Both models then
    compute on the same random tokens, pixels or `text`. train: so many steps of AdamW with weight decay, an eps that
    matters and clipping that binds. tolerance: by default 1e-10 in float64, 1e-4 in float32 (ten times that after
    training), also for files that had to round; the weights before rounding, grown once more in memory, must be closer.
    With noise, fresh units or copied layers the two are not meant to compute the same: the table tells how far outputs
    moved, which is fine while they are finite and the files are what the record says, or within a tolerance that is
    given. Without the noise, outputs and training must be the same; so must outputs with new units silenced or, of a
    lossless growth, with norms' eps scaled. plan: by its names, without a record. trust_remote_code: run SMALL's code.

    >>> import tempfile, transformers, mupscale.hf
    >>> folder = tempfile.TemporaryDirectory()
    >>> config = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, n_positions=16, vocab_size=11)
    >>> transformers.GPT2LMHeadModel(config).save_pretrained(f"{folder.name}/small")
    >>> _ = mupscale.hf.upscale(f"{folder.name}/small", f"{folder.name}/wide", times=2, exact=True, verify=False)
    >>> [(row.what, row.ok) for row in verify(f"{folder.name}/small", f"{folder.name}/wide").rows]
    [('tensors in the files', True), ('logits', True)]
    >>> folder.cleanup()
    """
    _check_arguments(tolerance, tokens, train)
    built = next((model for model in (small, wide) if isinstance(model, nn.Module)), None)
    precision = _precision(dtype if built is None else next(built.parameters()).dtype)
    relation = None if built is not None else relate(open_source(small), open_source(wide), plan)  # type: ignore[arg-type]
    rows, first = ([], None) if relation is None else _compare_files(relation)
    ours, theirs, notes = _both_models(small, wide, relation, precision, train, device)
    batches = _batches(ours, relation, max(2, min(train + 1, _BATCHES)), tokens, seed, text, device, trust_remote_code)
    with KeepDouble() if precision == torch.float64 else nullcontext():
        if relation is not None and relation.deepened and relation.deepened_after_fresh is None:
            allowed = _limit_of_layers(relation, precision) if tolerance is None else tolerance
            told = _compare_layers(relation, ours, theirs, batches, rows, first, allowed, notes, train)
        else:
            plan = _plan_between(ours, theirs, relation, plan)
            limits, pair = _limits(relation, plan, precision, tolerance), _Pair(ours, theirs, plan, relation, batches)
            told = _compare_pair(pair, rows, first, limits, train, notes)
    return replace(told, inputs=RANDOM if text is None else "the text")


def _check_arguments(tolerance: float | None, tokens: int, train: int) -> None:
    if tolerance is not None and not tolerance >= 0:
        raise MupscaleError(f"the tolerance is {tolerance}, but must be 0 or more")
    if train < 0 or tokens < 2:
        raise MupscaleError(f"there is nothing to compare in {tokens} tokens and {train} steps: give 2 and 0 or more")


@dataclass(frozen=True)
class _Pair:
    """The two models, the plan between them, and what they are run on."""

    small: nn.Module
    wide: nn.Module
    plan: Plan
    relation: Relation | None
    batches: list[Batch]

    @property
    def noisy(self) -> bool:
        """Whether the wide model has noise in its weights."""
        return self.relation is not None and self.relation.noisy

    @property
    def fresh(self) -> FreshGrowth | None:
        """What there is to know of new units, where there are any."""
        fresh = None if self.relation is None else self.relation.fresh
        if self.relation is None or fresh is None:
            return None
        return FreshGrowth(self.relation, fresh, self.plan)

    def compare_outputs(self) -> OutputComparison:
        """On the first batches."""
        old_units = None if self.fresh is None else self.fresh.relation.old_units
        return compare_outputs(self.small, self.wide, self.batches[:2], old_units)


class _Limits(NamedTuple):
    """How far things may differ: outputs as they are, outputs without noise or rounding, outputs in training."""

    as_they_are: float
    without_noise: float
    in_training: float
    rounded: bool = False  # whether the files could not hold the grown weights exactly


def _compare_pair(
    pair: _Pair, rows: list[ComparisonRow], first: Difference | None, limits: _Limits, train: int, notes: list[str]
) -> Comparison:
    """Copies, with noise or without, or fresh units."""
    if pair.fresh is not None:
        return _compare_fresh(pair, pair.fresh, rows, first, limits, train, notes)
    losses, first = _compare_models(pair, rows, first, limits, train)
    return Comparison(tuple(rows), losses, first, pair.noisy, tuple(notes))


def _compare_models(
    pair: _Pair, rows: list[ComparisonRow], first: Difference | None, limits: _Limits, train: int
) -> tuple[tuple[float, float], Difference | None]:
    """Outputs and training, as more rows; the losses, and the first difference."""
    outputs = pair.compare_outputs()
    if outputs.constant:
        _refuse_constant(pair)
    movers = [] if pair.relation is None else pair.relation.movers
    note = f"moved by {' and '.join(movers)}" if movers else ""
    rows += [ComparisonRow(what, off, limits.as_they_are, note) for what, off in outputs.differences.items()]
    without = f", without the {' and '.join(movers)}" if movers else ", before rounding" if limits.rounded else ""
    without = "" if pair.plan.mup else without  # which no copies stand for
    if without and first is None:  # the files are compared with it; that config and plan are right shows without it
        widen(pair.small, pair.wide, pair.plan)
        exact = pair.compare_outputs().differences
        rows += [ComparisonRow(f"{what}{without}", off, limits.without_noise) for what, off in exact.items()]
    if first is None and not all(row.ok for row in rows if not row.note):
        first = first_difference(pair.small, pair.wide, pair.batches[:2], pair.plan, limits.without_noise)
    if train and all(row.ok for row in rows):
        row, first = compare_training(pair.small, pair.wide, pair.plan, pair.batches, train, limits.in_training)
        rows.append(replace(row, what=f"{row.what}{without}"))
    return outputs.losses, first


def _compare_fresh(
    pair: _Pair,
    fresh: FreshGrowth,
    rows: list[ComparisonRow],
    first: Difference | None,
    limits: _Limits,
    train: int,
    notes: list[str],
) -> Comparison:
    """Outputs as they are, and once more where they must be the same."""
    outputs = pair.compare_outputs()
    if outputs.constant:
        _refuse_constant(pair)
    limit = limits.without_noise if fresh.same_as_they_are else limits.as_they_are
    rows += [ComparisonRow(what, off, limit, fresh.note) for what, off in outputs.differences.items()]
    what, moved = max(outputs.differences.items(), key=lambda item: item[1])
    if fresh.condition and first is None:  # it is done on weights grown anew, which says nothing of files that differ
        fresh.silence(pair.small, pair.wide)
        same = pair.compare_outputs().differences
        rows += [ComparisonRow(f"{what}{fresh.condition}", off, limits.without_noise) for what, off in same.items()]
    notes = [*notes, *fresh.notes(train, same=all(row.ok for row in rows[2:]))]
    told = fresh.as_recorded(what, moved)
    return Comparison(tuple(rows), outputs.losses, first, notes=tuple(notes), as_recorded=told)


def _compare_layers(
    relation: Relation,
    small: nn.Module,
    deep: nn.Module,
    batches: list[Batch],
    rows: list[ComparisonRow],
    first: Difference | None,
    allowed: float,
    notes: list[str],
    train: int,
) -> Comparison:
    """Outputs as more rows: the same where new layers are identity and experts copies, moved where anything is not.

    Training is never compared: new layers and experts learn what the small model has not.
    """
    outputs = compare_outputs(small, deep, batches[:2], None if relation.fresh is None else relation.old_units)
    movers = relation.movers
    note = f"moved by {' and '.join(movers)}" if movers else ""
    rows = [*rows, *(ComparisonRow(what, off, allowed, note) for what, off in outputs.differences.items())]
    what, moved = max(outputs.differences.items(), key=lambda item: item[1])
    move = "moves" if movers == ["noise"] else "move"
    told = f"{' and '.join(movers)} {move} {what} by {moved:.1%}" if movers else ""
    if not movers and all(row.ok for row in rows):
        if any(growth.layers is not None for growth in relation.growths):
            notes = [*notes, "New layers write nothing into the residual stream yet, so the function is the same."]
        if any(growth.experts is not None for growth in relation.growths):
            notes = [*notes, "All copies of an expert compute the same, so the function is the same."]
    if train:
        notes = [*notes, "Training is not compared: new layers and experts learn from the first step on."]
    return Comparison(tuple(rows), outputs.losses, first, notes=tuple(notes), as_recorded=told)


def _limit_of_layers(relation: Relation, precision: torch.dtype) -> float:
    """How far the outputs of a model with more layers may differ."""
    if relation.movers:
        return math.inf
    plans = [step.plan for step in relation.steps() if not step.plan.has_new_parts]
    entries = {f"{n} {name}": entry for n, plan in enumerate(plans) for name, entry in plan.parameters.items()}
    return max(TOLERANCE[precision], 8 * _rounding_of_files(relation, entries))


def _refuse_constant(pair: _Pair) -> None:
    """An error where outputs that do not depend on the input would be equal with a wrong plan, too."""
    if pair.relation is not None and not pair.plan.checked:
        raise MupscaleError(
            f"the outputs of {pair.relation.small.folder} are all alike, so comparing them shows nothing, and its "
            f"plan could not be tried on a miniature: take a checkpoint with weights in it"
        )


def needed_bytes(small: Source, wide: Source, dtype: str | torch.dtype = "float32", train: int = 0) -> int:
    """Memory that verify takes for both models; training works on copies, with gradients and two moments."""
    numbers = sum(stored.numel for source in (small, wide) for stored in source.tensors.values())
    return numbers * _precision(dtype).itemsize * (5 if train else 1)


def _precision(dtype: str | torch.dtype) -> torch.dtype:
    precision = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if precision not in TOLERANCE:
        raise MupscaleError(f"models are compared in float32 or float64, not in {dtype}")
    return precision


def _compare_files(relation: Relation) -> tuple[list[ComparisonRow], Difference | None]:
    """One row for all tensors; the first that is wrong is named."""
    steps = list(relation.steps())
    limit = weights.rounding_limit(relation.small, relation.wide)
    is_kept = relation.fresh is not None and (len(steps) == 1 or relation.deepened_after_fresh is not None)
    exact = 0.0 if is_kept else limit
    worst, old, new, first = 0.0, 0.0, 0.0, None
    parts = [n for n in ("layers", "experts") if any(getattr(growth, n) for growth in relation.growths)]
    newer = " and ".join(parts) or "units"
    for off in weights.tensor_differences(relation.small, relation.wide, steps):
        worst, old, new = max(worst, off.whole), max(old, off.old), max(new, off.new)
        if first is None and not (off.whole <= limit and off.old <= exact):
            first = Difference(off.name, "parameter", off.whole, _FILES_ADVICE)
    if relation.fresh is None and not relation.deepened:
        return [ComparisonRow("tensors in the files", worst, limit)], first
    return [
        ComparisonRow("old weights in the files", old, exact),
        ComparisonRow(f"new {newer} in the files", new, limit, "as recorded" if relation.deepened else "as drawn"),
    ], first


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
        shortage = memory.shortage(needed_bytes(relation.small, relation.wide, precision, train))
        if shortage and device is None:
            name = str(precision).removeprefix("torch.")
            raise MupscaleError(f"comparing the two models in {name} takes {shortage}")
    loaded = []
    for checkpoint in (small, wide) if relation is None else (relation.small, relation.wide):
        if isinstance(checkpoint, nn.Module):
            loaded.append(Loaded(checkpoint, ()))
        else:
            loaded.append(load_pretrained(open_source(checkpoint), precision, device=device))
    notes = []
    if unused := loaded[0].unused:
        more = f" and {len(unused) - 1} more" if len(unused) > 1 else ""
        kind = type(loaded[0].model).__name__
        notes.append(f"Not in the outputs: '{unused[0]}'{more}, which {kind} does not use.")
    for one in loaded:
        if hasattr(one.model.config, "use_cache"):
            one.model.config.use_cache = False
    return loaded[0].model, loaded[1].model, notes


def _plan_between(ours: nn.Module, theirs: nn.Module, relation: Relation | None, plan: Plan | None) -> Plan:
    if relation is not None:
        plan = match_plan(ours, relation.whole_plan())
        if (deeper := relation.deepened_after_fresh) is not None:
            plan = with_layers(plan, deeper.deepen, deeper.layers or 0)
    elif plan is None:
        plan = plan_of_modules(ours, theirs)
    plan.check(ours, "narrow")
    plan.check(theirs)
    return plan


def _limits(relation: Relation | None, plan: Plan, precision: torch.dtype, tolerance: float | None) -> _Limits:
    """The tolerance, where one is given; else what the computation rounds, and what the files had to round."""
    noisy = relation is not None and (relation.noisy or relation.fresh is not None)
    if tolerance is not None:
        return _Limits(tolerance, tolerance, tolerance)
    exact, trained = TOLERANCE[precision], TOLERANCE[precision] * (10 if precision == torch.float32 else 1)
    rewritten = noisy and not (relation is not None and relation.fresh is not None and relation.fresh.lossless)
    eps = 0.0 if relation is None or rewritten else _rounding_of_files(relation, plan.parameters)
    rounded = max(exact, 8 * eps)
    if relation is not None and relation.fresh is not None:  # new units are not drawn again in memory
        return _Limits(math.inf if noisy else rounded, rounded, max(trained, 32 * eps))
    return _Limits(math.inf if noisy else rounded, exact, trained, rounded=rounded > exact)


def _rounding_of_files(relation: Relation, entries: Mapping[str, Entry]) -> float:
    """The relative error of weights that the wide files cannot hold exactly; 0 where they can."""
    few, many = (
        {stored.dtype for stored in source.tensors.values() if stored.dtype.is_floating_point}
        for source in (relation.small, relation.wide)
    )
    if relation.fresh is None and weights.is_exact(entries) and few == many:
        return 1e-4 if torch.float16 in many and entries else 0.0  # whose smallest numbers lose bits even so
    return max(torch.finfo(dtype).eps for dtype in many)


def _batches(
    model: nn.Module,
    relation: Relation | None,
    count: int,
    tokens: int,
    seed: int,
    text: str | Path | None,
    device: str | None,
    trust_remote_code: bool,
) -> list[Batch]:
    words = None if text is None else _read_text(Path(text))
    folder = None if relation is None else relation.small.folder
    trusted = {"trust_remote_code": trust_remote_code}
    batches = make_batches(model, count, tokens, seed=seed, text=words, folder=folder, **trusted)
    dtype = next(model.parameters()).dtype
    return [
        {name: value.to(device, dtype if value.is_floating_point() else None) for name, value in batch.items()}
        for batch in batches
    ]


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise MupscaleError(f"the text {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise MupscaleError(f"{path} is no text in UTF-8") from None
