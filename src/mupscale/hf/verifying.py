"""Does a wide checkpoint compute, and go on computing, what the small one does? And if not, where does it begin?

First how it came from the small one: the growths that lie between them, their plans, and what they move. The tensors of
its files are the small one's, grown, with what was drawn for them; they are compared one at a time.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mupscale import planning, system
from mupscale.checks import Difference, first_differing_module
from mupscale.checks import verify as train_both
from mupscale.core import Axis, Entry, Plan, RuleSet, expand, index_of_old, naming, places
from mupscale.growth import EPS, Copies, Fresh, Part, as_noise, is_replica, upscale_untried, widen, word_of_operator
from mupscale.hf import building
from mupscale.hf.building import Config
from mupscale.hf.config_family import ConfigFamily
from mupscale.hf.config_fields import PARTS, Times, grown, parts_of, sizes_of
from mupscale.hf.depths import experts_of, layers_of
from mupscale.hf.groups import compare_optimizer_file, match_plan
from mupscale.hf.output_folder import OPTIMIZER_FILE
from mupscale.hf.record import RECORD_FILE, GrowthStep, History, PlannedGrowth, Record, names_after, plan_growths, trace
from mupscale.hf.source import Source, StoredTensor, open_source
from mupscale.hf.starting_values import ALLOWED, compare_start
from mupscale.optim import decay_groups, read_optimizer
from mupscale.system import MupscaleError, as_asked, checks_arguments, generator, html_table, text_table, wrap_text

_AT_A_TIME = 1 << 22  # entries that are compared in double precision at a time


@dataclass(frozen=True)
class TensorDifference:
    """How far a tensor is from what it should be, relatively: all of it, its old units' weights, and all others.

    A tensor of a new layer has new ones alone.
    """

    name: str
    whole: float
    old: float
    new: float


def tensor_differences(small: Source, wide: Source, steps: Sequence[PlannedGrowth]) -> Iterator[TensorDifference]:
    """Of each tensor of the wide checkpoint from what the small one becomes by these steps."""
    names, held = names_after(small.tensors, steps), wide.tensors
    for one, other, which, whose in ((names, held, "wide", "small"), (held, names, "small", "wide")):
        if lacking := {*one} - {*other}:
            raise _unrelated(f"the {which} one lacks '{min(lacking)}', which the {whose} one has")
    limit = rounding_limit(small, wide)
    for name in names:
        yield _difference(name, small, wide.tensors[name], trace(name, steps), limit)


def _difference(name: str, small: Source, grown: StoredTensor, history: History, limit: float) -> TensorDifference:
    """Of several growths the dtypes between them are not on record, so the dtype that fits counts."""
    stored, ways, drawn = small.tensors[history.name], history.ways, history.drawn
    narrow, wide = stored.read() if drawn is None else None, grown.read()
    best = TensorDifference(name, math.inf, math.inf, math.inf)
    for between in dict.fromkeys((stored.dtype, grown.dtype, torch.bfloat16, torch.float16)):
        first = between if ways else grown.dtype
        expected = narrow if drawn is None else drawn.whole(history.shape, first)
        assert expected is not None
        for number, (step, planned) in enumerate(ways, 1):
            expected = _grown(name, expected, planned, step, grown.dtype if number == len(ways) else between)
        if expected.shape != wide.shape:
            raise _unrelated(f"'{name}' should have shape {tuple(expected.shape)}, but has {tuple(wide.shape)}")
        whole = _relative_difference(expected, wide)
        once = len(ways) + (drawn is not None) <= 1
        if whole < best.whole or once:
            both = (0.0, whole) if history.in_new_part else (whole, 0.0)
            if not history.in_new_part and any(not step.growth.grow.needs_multiples for step, _ in ways):
                old = torch.ones(ways[0][0].plan[ways[0][1]].narrow, dtype=torch.bool)  # or copies of old ones
                for entry, is_copied in ((s.plan[planned], s.growth.grow.needs_multiples) for s, planned in ways):
                    among = torch.zeros(entry.wide, dtype=torch.bool)
                    if not is_copied:
                        among[index_of_old(entry.narrow, entry.axes)] = old
                    old = expand(old, entry.axes) if is_copied else among
                new = _relative_difference(expected[~old], wide[~old])
                both = _relative_difference(expected[old], wide[old]), new
            best = TensorDifference(name, whole, *both)
        if best.whole <= limit or once:
            break
    return best


def rounding_limit(small: Source, wide: Source) -> float:
    """What the differences may be where another machine rounds otherwise: in float32, which 16 bits hardly show."""
    dtypes = {stored.dtype for source in (small, wide) for stored in source.tensors.values()}
    eps = (torch.finfo(d).eps / (1 if d.itemsize > 2 else 8) for d in dtypes if d.is_floating_point)
    return max(eps, default=0.0)


def is_exact(entries: Mapping[str, Entry]) -> bool:
    """Whether nothing is rounded: every factor is a power of two, and nothing is added."""
    return all(math.frexp(entry.rule.weight)[0] == 0.5 and not entry.shift for entry in entries.values())


def _grown(name: str, narrow: Tensor, planned: str, step: PlannedGrowth, dtype: torch.dtype) -> Tensor:
    entry = step.plan[planned]
    if tuple(narrow.shape) != entry.narrow:
        raise MupscaleError(f"'{name}' has shape {tuple(narrow.shape)}, but should have {entry.narrow} by the config")
    if not narrow.is_floating_point():
        return narrow
    exact = dtype
    if not isinstance(step.growth.grow, Fresh):
        exact = torch.promote_types(narrow.dtype, torch.float32)
        narrow = narrow.to(exact)
    out = torch.empty(entry.wide, dtype=exact)
    if (built := step.built.get(planned)) is not None:
        out.copy_(built)
    step.growth.grow.parameter(out, narrow, Part(planned, step.plan, step.growth.seed))
    return out.to(dtype)


def _relative_difference(expected: Tensor, actual: Tensor) -> float:
    """‖expected − actual‖ / ‖expected‖; infinite where anything is not finite."""
    off = norm = 0.0
    for a, b in zip(expected.flatten().split(_AT_A_TIME), actual.flatten().split(_AT_A_TIME), strict=True):
        off += float((a.double() - b.double()).square().sum())
        norm += float(a.double().square().sum())
    value = math.sqrt(off / norm) if norm and off == off else math.sqrt(off)
    return value if value == value else math.inf


@dataclass(frozen=True)
class Relation:
    """Two checkpoints, and the growths that lead from the one to the other.

    plan: of all of them in one, where the caller or mupscale.json has it. before: how the small one had grown. record:
    mupscale.json of the wide one, if there is one.
    """

    small: Source
    wide: Source
    growths: tuple[GrowthStep, ...]
    plan: Plan | None = None
    before: Record | None = None
    record: Record | None = None

    @property
    def times(self) -> Times:
        return reduce(lambda total, growth: total * growth.times, self.growths, Times())

    @property
    def draws(self) -> list[str]:
        """What makes copies differ, in words: noise, shrinking, or the operator's own word."""
        grown = [g.grow for g in self.growths if g.is_width and g.fresh is None and not is_replica(g.grow)]
        words = list[str]()
        for operator in grown:
            if type(operator) is not Copies:
                words.append(word_of_operator(operator))
                continue
            words += [] if as_noise(operator.noise).is_none else ["noise"]
            words += [] if operator.shrink == 1 else ["shrinking"]
        return list(dict.fromkeys(words))

    @property
    def fresh(self) -> Fresh | None:
        """How it last grew by fresh units; None where all growths are copies."""
        return next((growth.fresh for growth in reversed(self.growths) if growth.fresh is not None), None)

    @property
    def deepened(self) -> tuple[GrowthStep, ...]:
        return tuple(growth for growth in self.growths if not growth.is_width)

    @property
    def deepened_after_fresh(self) -> GrowthStep | None:
        """The growth to more layers that are identity, where one by fresh units came before it, and no other."""
        if len(self.growths) != 2 or self.growths[0].fresh is None:
            return None
        later = self.growths[1]
        return later if later.layers is not None and later.deepen == "identity" else None

    @property
    def movers(self) -> list[str]:
        """What makes the larger model compute something else, in words."""
        stacked, routed, config = any(growth.deepen != "identity" for growth in self.deepened), False, self.small.config
        for growth in self.deepened:
            routed = routed or (growth.experts is not None and not growth.experts.keeps_function(config))
            config = growth.config_after(config)
        movers = ["copied layers"] * stacked + ["copied experts"] * routed
        return movers + self.draws + ["fresh units"] * (self.fresh is not None)

    def old_units(self, n: int) -> Tensor:
        """Where the n hidden units of the small model lie in the wide one; of copies, the first."""
        units, size = torch.arange(n), n
        for growth in self.growths:
            units = places(Axis(growth.times.hidden), size)[units]
            size = grown(size, growth.times.hidden)
        return units

    @cached_property
    def steps(self) -> list[PlannedGrowth]:
        recorded = self.plan if len(self.growths) == 1 else None
        return plan_growths(self.growths, self.small.config, self.small.shapes, self.before, recorded)

    def whole_plan(self) -> Plan:
        """All that became wider, by the names of the small model's parameters."""
        if self.plan is not None:
            return self.plan
        return ConfigFamily(self.small.config).plan(self.times, initial=self.fresh is not None)


def find_record(source: Source) -> Record | None:
    """mupscale.json beside a checkpoint, if it is there; refused where it tells of another model than config.json."""
    record = Record.find(source.folder)
    if record is None:
        return None
    advice = f"copy the right {RECORD_FILE} there, or remove it to count learning rates from this checkpoint"
    if not _becomes(record.config, record.growths, source.config):
        first, now = _sizes_in_words(record.config), _sizes_in_words(source.config)
        raise MupscaleError(
            f"{source.folder / RECORD_FILE} describes a model that grew {record.in_words} from {first}, but "
            f"config.json beside it has {now}: {advice}"
        )
    if (tied := ConfigFamily(record.config).is_tied()) != ConfigFamily(source.config).is_tied():
        raise MupscaleError(
            f"by {source.folder / RECORD_FILE} the model's readout was {'' if tied else 'not '}"
            f"its embedding when it grew, and by config.json beside it that has changed: {advice}"
        )
    return record


def relate(small: Source, wide: Source, plan: Plan | None = None) -> Relation:
    """The growths from the one to the other by mupscale.json and both configs, or an error that says what is wrong.

    plan: between the two, where there is no record of it.
    """
    record = Record.find(wide.folder)
    became = record is not None and any(growth.experts is not None for growth in record.growths)
    if small.model_type != wide.model_type and not became:
        raise _unrelated(f"the small one is a {small.model_type} model and the wide one a {wide.model_type}")
    if record is None:
        if plan is not None:
            return Relation(small, wide, (GrowthStep(Times()),), plan)
        return Relation(small, wide, (GrowthStep(_times_between(small, wide)),))
    before = Record.find(small.folder)
    count = len(record.growths)
    starts = range(count + 1) if before is None else [len(before.growths)]
    for start in starts:
        growths = record.growths[start:]
        if _becomes(small.config, growths, wide.config):
            whole = plan if plan is not None else record.plan if start == 0 and len(growths) == 1 else None
            return Relation(small, wide, growths, whole, before or _before(record, start), record)
    raise _unrelated(
        f"by its {RECORD_FILE} it grew {record.in_words} from {_sizes_in_words(record.config)}, and the small one "
        f"has {_sizes_in_words(small.config)}"
    )


def _before(record: Record, start: int) -> Record | None:
    """What mupscale.json of the small model would say, by the wide one's, where later growths count from the first."""
    before, config = None, dict(record.config)
    for growth in record.growths[:start] if any(growth.draws for growth in record.growths[start:]) else ():
        plan = ConfigFamily(config).plan(growth.times, initial=False) if growth.is_width else None
        before, config = (before or Record(config)).then(growth, plan), growth.config_after(config)
    return before


def _unrelated(why: str) -> MupscaleError:
    return MupscaleError(f"the wide checkpoint is not an upscaled version of the small one: {why}")


def _sizes(config: Config) -> dict[str, Any]:
    layers = layers_of(config)
    experts = {} if (counts := experts_of(config)) == (1, 1) else dict(zip(("experts", "top_k"), counts, strict=True))
    return {**sizes_of(config), **({} if layers is None else {"layers": layers}), **experts}


def _becomes(config: Config, growths: tuple[GrowthStep, ...], other: Config) -> bool:
    """Whether these growths lead to the other's sizes, as far as both say them: one may leave out what follows."""
    with suppress(MupscaleError):  # which cannot grow so
        one = reduce(lambda grown, growth: growth.config_after(grown), growths, config)
        ours, theirs = _sizes(one), _sizes(other)
        same = all(ours[name] == theirs[name] for name in ours.keys() & theirs.keys())
        return same and one.get("model_type") == other.get("model_type")
    return False


def _sizes_in_words(config: Config) -> str:
    return ", ".join(f"{name} {size}" for name, size in _sizes(config).items())


def _times_between(small: Source, wide: Source) -> Times:
    """Without a record: by the ratios of the configs."""
    few, many = (parts_of(source.config) for source in (small, wide))
    known = "hidden" in few and few.keys() == many.keys() <= PARTS.keys()
    if known and all(many[name] % size == 0 for name, size in few.items()):
        ratios = {name: many[name] // size for name, size in few.items()}
        times = Times.named({"ffn": ratios["hidden"], **ratios})
        if _becomes(small.config, (GrowthStep(times),), wide.config):
            return times
    raise _unrelated(f"it has {_sizes_in_words(wide.config)} and the small one {_sizes_in_words(small.config)}")


TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}
"""How far outputs may differ, by the dtype that they are computed in."""


@dataclass(frozen=True)
class ComparisonRow:
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
        allowed = f"{self.tolerance:.0e}" if self.tolerance else "no bit"
        if math.isinf(self.tolerance):
            allowed = "as it comes"
        what = self.what.removeprefix("outputs over ")  # so that a row fits 80 columns
        return what, f"{self.difference:.1e}", allowed, (self.note or "same") if self.ok else "DIFFERENT"


RANDOM = "random inputs"


@dataclass(frozen=True)
class Comparison:
    """What was compared, the loss of both models, and the first difference if there is one.

    as_recorded: what to say, where all is well, of a model that is not meant to compute what the small one does.
    inputs: what the losses are of; those of random inputs are not shown.
    """

    rows: tuple[ComparisonRow, ...]
    losses: tuple[float, float]
    first: Difference | None = None
    notes: tuple[str, ...] = ()
    as_recorded: str = ""
    inputs: str = RANDOM

    @property
    def ok(self) -> bool:
        """Whether everything that was compared is as it should be."""
        return all(row.ok for row in self.rows) and self.first is None

    @property
    def verdict(self) -> str:
        """In words."""
        worst = max(self.rows, key=lambda row: row.difference if row.difference == row.difference else math.inf)
        losses = f"on {self.inputs}"
        if self.inputs != RANDOM:
            losses = f"loss of {self.inputs}: {self.losses[0]:.4g} and {self.losses[1]:.4g}"
        if not self.ok:
            lines = [f"NOT equivalent: {next((r.what for r in self.rows if not r.ok), worst.what)} differ ({losses})"]
            lines += [str(self.first)] if self.first is not None else []
        elif self.as_recorded:
            lines = [f"as recorded: {self.as_recorded} ({losses})"]
        else:
            lines = [f"equivalent: largest relative difference {worst.difference:.1e} ({losses})"]
        return "\n".join([*lines, *self.notes])

    def table(self) -> str:
        """What was compared, as text."""
        return text_table(_HEADER, [row.cells() for row in self.rows], left=4)

    def __str__(self) -> str:
        return f"{self.table()}\n{wrap_text(self.verdict)}"

    def _repr_html_(self) -> str:
        """For a notebook."""
        return html_table(_HEADER, [row.cells() for row in self.rows], self.verdict)


_HEADER = ("compared", "difference", "allowed", "")


def load_pretrained(
    source: Source, dtype: torch.dtype, *, device: str | torch.device | None = None
) -> tuple[nn.Module, list[str]]:
    """The model of a checkpoint, in evaluation mode, with eager attention; and tensors that it has no use for.

    Every parameter comes from the files, never from a random initial value; they may hold more than the model uses.
    """
    folder, cls = source.folder, building.model_class(source.config)
    config = building.transformers_config(source.config)
    try:
        with building.quiet_transformers():
            how = {"dtype": dtype, "attn_implementation": "eager", "local_files_only": True}
            model, info = cls.from_pretrained(folder, config=config, output_loading_info=True, **how)
    except Exception as error:  # whatever it raises of files, shapes and configs
        raise MupscaleError(f"transformers cannot load {folder}: {building.in_one_line(error)}") from None
    for kind, lack in (("missing_keys", "lacks"), ("mismatched_keys", "has another shape for")):
        names = sorted(str(n[0] if isinstance(n, tuple) else n) for n in info.get(kind, ()))
        if names:
            raise MupscaleError(
                f"{folder} {lack} '{names[0]}'{_more(names)}, which {cls.__name__} would fill with random values: the "
                f"files and config.json do not belong together"
            )
    loaded, sketch = dict(model.named_parameters(remove_duplicate=False)), building.sketch_model(source.config)
    for tied in naming.aliases(sketch.named_parameters(remove_duplicate=False)):  # which it unties where values differ
        if any(loaded.get(name) is not loaded.get(tied[0]) for name in tied):
            raise MupscaleError(
                f"{folder} holds different numbers for '{tied[0]}' and '{tied[1]}', which are one tensor by "
                "config.json (tie_word_embeddings): the files and config.json do not belong together"
            )
    model = model.eval() if device is None else model.eval().to(device)
    return model, sorted(info.get("unexpected_keys", ()))


def _more(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""


_UNIT = 1e-4  # of a length, in float32

_CAUSAL = ("ForCausalLM", "LMHeadModel", "DoubleHeadsModel")  # endings of names of classes that predict the next token


class OutputComparison(NamedTuple):
    """Largest relative difference of each output, and the mean loss of both models."""

    differences: dict[str, float]
    losses: tuple[float, float]

    @property
    def worst(self) -> tuple[str, float]:
        """The output that differs most, and by how much."""
        return max(self.differences.items(), key=lambda item: item[1])


@torch.no_grad()
def compare_outputs(
    ours: nn.Module,
    theirs: nn.Module,
    batches: list[building.Batch],
    old_units: Callable[[int], Tensor] | None = None,
    plan: Plan | None = None,
) -> OutputComparison:
    """Run both models on these batches.

    old_units: from a number of hidden units to their places beside new ones. plan: of copies, which tells their places.
    """
    worst: dict[str, float] = {}
    losses = [0.0, 0.0]
    for batch in batches:
        small = run_model(ours, batch, "the small model")
        wide = run_model(theirs, batch, "the wide model")
        means = dict[str, Tensor]()
        for name, tensor in small.items():
            off = math.inf
            if name in wide:
                copies = _copies(wide[name], tensor.shape, plan, old_units)
                off = planning.relative_difference(tensor.unsqueeze(-1).expand_as(copies), copies)
                means[name] = copies.mean(-1)
            worst[name] = max(worst.get(name, 0.0), off)
        for side, outputs in enumerate((small, means)):
            losses[side] += float(loss_of(ours, outputs, batch)) / len(batches)
    return OutputComparison(worst, (losses[0], losses[1]))


def run_model(model: nn.Module, batch: building.Batch, which: str = "the model") -> dict[str, Tensor]:
    """Every tensor that a model gives out, by name; caches, inner states and losses are none of them."""
    try:
        outputs = model(**batch)
    except MupscaleError:
        raise
    except Exception as error:  # a model that does not run, as with a field of its config that should have grown
        raise MupscaleError(f"{which} cannot be run ({building.in_one_line(error)})") from None
    return {name: t for name, t in outputs.items() if isinstance(t, Tensor) and t.is_floating_point() and t.dim()}


def _copies(
    wide: Tensor, small: torch.Size, plan: Plan | None, old_units: Callable[[int], Tensor] | None = None
) -> Tensor:
    """An output of the wide model with one dimension more, the copies of each hidden unit: their mean is the unit.

    They lie where most weights of such sizes have them. Those of a vector of length 1, whose length stays, are smaller
    by the root of their number, by which they are multiplied here. old_units: where new ones are beside them.
    """
    if old_units is not None and wide.shape[:-1] == small[:-1] and wide.shape[-1] > small[-1]:
        wide = wide.index_select(-1, old_units(small[-1]).to(wide.device))
    n, times = small[-1], wide.shape[-1] // small[-1]
    if wide.shape[:-1] != small[:-1] or wide.shape[-1] % n:
        raise MupscaleError(
            f"the outputs of the two models have shapes {tuple(small)} and {tuple(wide.shape)}: WIDE is not an "
            "upscaled version of SMALL"
        )
    if times == 1:
        return wide.unsqueeze(-1)
    places = Counter(
        (axis.block, axis.sections)
        for entry in ({} if plan is None else plan.parameters).values()
        for d, axis in entry.axes.items()
        if (entry.narrow[d], entry.wide[d]) == (n, wide.shape[-1])
    )
    axis = Axis(times, *max(places, key=places.__getitem__, default=(1, ())))
    order = axis.source(n).argsort(stable=True).to(wide.device)
    copies: Tensor = wide.index_select(-1, order).unflatten(-1, (n, times))
    return copies * times**0.5 if planning.has_length_one(wide, slack=_UNIT) else copies


def loss_of(model: nn.Module, outputs: dict[str, Tensor], batch: building.Batch) -> Tensor:
    """The next token's for a causal language model; else of targets drawn once for each output."""
    total: Tensor | None = None
    for name, t in outputs.items():
        if name == "logits" and type(model).__name__.endswith(_CAUSAL) and t.dim() == 3:
            value = F.cross_entropy(t[:, :-1].flatten(0, -2), batch["input_ids"][:, 1:].flatten())
        elif "logits" in name and t.shape[-1] > 1 and t.dim() > 1:
            classes = torch.randint(t.shape[-1], t.shape[:-1], generator=generator(0, name)).to(t.device)
            value = F.cross_entropy(t.flatten(0, -2), classes.flatten())
        else:
            value = (t - torch.randn(t.shape, generator=generator(0, name)).to(t)).square().mean()
        total = value if total is None else total + value
    if total is None:
        raise MupscaleError(f"{type(model).__name__} returns no tensor to compare")
    return total


_LR, _DECAY = 1e-3, 0.1


def compare_training(
    ours: nn.Module, theirs: nn.Module, plan: Plan, batches: list[building.Batch], steps: int, tolerance: float
) -> tuple[ComparisonRow, Difference | None]:
    """Both trained side by side: Theorem 'Dynamic equivalence' on the checkpoints themselves."""
    optimizer, clip = _optimizer(ours, batches[0])
    with torch.no_grad():
        shapes = {name: t.shape for name, t in run_model(ours, batches[0]).items()}

    def plain(module: nn.Module, inputs: Any, outputs: Any) -> dict[str, Tensor]:
        """Tensors of the small model's shapes alone: means over copies."""
        return {name: _copies(t, shapes[name], plan).mean(-1) for name, t in outputs.items() if name in shapes}

    def loss(model: nn.Module, batch: building.Batch) -> Tensor:
        return loss_of(model, model(**batch), batch)

    how: dict[str, Any] = {"optimizer": optimizer, "steps": steps, "clip": clip, "tolerance": tolerance}
    how["in_float64"] = False  # in the precision of the comparison, for which there is memory
    turns = (batches[i % len(batches)] for i in range(steps + 1))
    with ours.register_forward_hook(plain), theirs.register_forward_hook(plain):
        report = train_both(ours, theirs, plan, turns, loss, **how)
    what = f"outputs over {steps} steps of AdamW"
    return ComparisonRow(what, report.max_relative_difference, tolerance), report.first


def _optimizer(model: nn.Module, batch: building.Batch) -> tuple[torch.optim.Optimizer, float]:
    """AdamW that decays all but biases and norms, eps a tenth of the gradients' size; half their norm to clip at."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    grads = torch.autograd.grad(loss_of(model, run_model(model, batch), batch), parameters, allow_unused=True)
    present = [g for g in grads if g is not None]
    norm = float(nn.utils.get_total_norm(present))
    eps = max(0.1 * norm / math.sqrt(sum(g.numel() for g in present)), 1e-12)
    named = naming.parameters(model)
    groups = [{**group, "params": [named[name] for name in group["params"]]} for group in decay_groups(model, _DECAY)]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=_LR, eps=eps), norm / 2


_OF_EPS = 1e-3  # by which the norms' eps may move the outputs of a growth that is called lossless
_OF_ROUNDING = 2**-8  # of two numbers in bfloat16, at most
_BATCHES = 8  # of training, used in turn
_OF_STATE = 1e-6  # what state in float32 may be rounded by
_STATE_ADVICE = (
    "The wide optimizer's file does not hold what the small one's becomes: it was changed or trained since, or another "
    "saved optimizer was grown."
)
_FILES_ADVICE = (
    "It does not match the small one, grown as mupscale.json says: the file was changed or trained since, SMALL is a "
    "different checkpoint, or a different description made it."
)


_START_ADVICE = (
    "{why}, by transformers' own initialisation and μP's factor. The law that new units were drawn from is wrong: "
    "please report it, with config.json."
)


@building.runs_trusted_code
@checks_arguments
def verify(
    small: str | Path | Source,
    wide: str | Path | Source,
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
    """Compare two checkpoints: their files, their outputs, their training.

    The tensors of WIDE are compared with those of SMALL, grown as mupscale.json says, noise included; and so is a saved
    optimizer (optimizer.pt), with its groups and hyperparameters, or by its checksum in mupscale.json where SMALL holds
    none. Both models then compute on the same random tokens, pixels or `text`.
    train: so many steps of AdamW with weight decay, an eps that matters and clipping that binds. tolerance: by default
    1e-10 in float64, 1e-4 in float32 (ten times that after training), also for files that had to round. With noise,
    fresh units or copied layers the two are not meant to compute the same: the table tells how far outputs moved, which
    is fine while they are finite and the files are what the record says, or within a tolerance that is given. Without
    the noise, outputs and training must be the same; so must outputs with new units silenced or, of a lossless growth,
    with norms' eps scaled. plan: by its names, without a record. trust_remote_code: run SMALL's code.

    >>> import tempfile, transformers, mupscale.hf
    >>> folder = tempfile.TemporaryDirectory()
    >>> config = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, n_positions=16, vocab_size=11)
    >>> transformers.GPT2LMHeadModel(config).save_pretrained(f"{folder.name}/small")
    >>> _ = mupscale.hf.upscale(f"{folder.name}/small", f"{folder.name}/wide", times=2, exact=True, verify=False)
    >>> [(row.what, row.ok) for row in verify(f"{folder.name}/small", f"{folder.name}/wide").rows]
    [('tensors in the files', True), ('logits', True)]
    >>> folder.cleanup()
    """
    if tolerance is not None and not tolerance >= 0:
        raise MupscaleError(f"the tolerance is {tolerance}, but must be 0 or more")
    if train < 0 or tokens < 2:
        raise MupscaleError(f"there is nothing to compare in {tokens} tokens and {train} steps: give 2 and 0 or more")
    precision, relation = _precision(dtype), relate(open_source(small), open_source(wide), plan)
    rows, first = _compare_files(relation)
    shortage = building.memory_shortage(needed_bytes(relation.small, relation.wide, precision, train))
    if shortage and device is None:
        name = str(precision).removeprefix("torch.")
        raise MupscaleError(f"comparing the two models in {name} takes {shortage}")
    loaded, notes = [load_pretrained(one, precision, device=device) for one in (relation.small, relation.wide)], []
    (ours, unused), (theirs, _) = loaded
    if unused:
        kind = type(ours).__name__
        notes.append(f"Not in the outputs: '{unused[0]}'{_more(unused)}, which {kind} does not use.")
    config: Any
    for config in (ours.config, theirs.config):
        if hasattr(config, "use_cache"):
            config.use_cache = False
    unlike = _compare_optimizer(relation, rows, notes)
    first = first or unlike
    try:
        words = None if text is None else Path(text).read_text(encoding="utf-8")
    except OSError as error:
        raise MupscaleError(f"the text {text} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise MupscaleError(f"{text} is no text in UTF-8") from None
    given: dict[str, Any] = {"text": words, "folder": relation.small.folder, "seed": seed}
    given["trust_remote_code"] = trust_remote_code
    batches = [
        {n: t.to(device, precision if t.is_floating_point() else None) for n, t in batch.items()}
        for batch in building.make_batches(ours, max(2, min(train + 1, _BATCHES)), tokens, **given)
    ]
    pair = _Pair(ours, theirs, relation, batches, train, rows, first, notes)
    with planning.KeepDouble() if precision == torch.float64 else nullcontext():
        plan = None
        if not relation.deepened or relation.deepened_after_fresh is not None:
            plan = match_plan(ours, relation.whole_plan())
            plan = plan.then(relation.steps[-1].by_model) if relation.deepened_after_fresh is not None else plan
            plan.check(ours, "narrow")
            plan.check(theirs)
        told = pair.compare(plan, _limits(relation, plan, precision, tolerance))
    return replace(told, inputs=RANDOM if text is None else "the text")


class _Limits(NamedTuple):
    """How far things may differ: outputs as they are, outputs without noise or rounding, outputs in training."""

    as_they_are: float
    without_noise: float
    in_training: float
    rounded: bool = False  # whether the files could not hold the grown weights exactly


@dataclass
class _Pair:
    """The two models, what they are run on, for how many steps they are trained, and what has been found so far."""

    small: nn.Module
    wide: nn.Module
    relation: Relation
    batches: list[building.Batch]
    train: int
    rows: list[ComparisonRow]
    first: Difference | None
    notes: list[str]

    def _outputs(self, plan: Plan | None = None) -> OutputComparison:
        old_units = None if self.relation.fresh is None else self.relation.old_units
        return compare_outputs(self.small, self.wide, self.batches[:2], old_units, plan)

    def _add(self, outputs: OutputComparison, allowed: float, note: str = "", condition: str = "") -> None:
        each = outputs.differences.items()
        self.rows += [ComparisonRow(f"{what}{condition}", off, allowed, note) for what, off in each]

    def _comparison(self, outputs: OutputComparison, as_recorded: str = "") -> Comparison:
        return Comparison(tuple(self.rows), outputs.losses, self.first, tuple(self.notes), as_recorded)

    def compare(self, plan: Plan | None, limits: _Limits) -> Comparison:
        """Outputs and training: of copies, with noise or without, or of fresh units.

        plan: None for more layers or experts, the training of which is never compared: they learn what is new.
        """
        if self.relation.fresh is not None and plan is not None:
            return self._compare_fresh(self.relation.fresh, plan, limits)
        outputs, movers = self._outputs(plan), " and ".join(self.relation.movers)
        self._add(outputs, limits.as_they_are, f"moved by {movers}" if movers else "")
        if plan is None:
            return self._compare_layers(outputs, movers)
        without = f", without the {movers}" if movers else ", before rounding" if limits.rounded else ""
        without = "" if plan.mup else without  # which no copies stand for
        if without and self.first is None:  # the files are compared with it; config and plan show without it
            widen(self.small, self.wide, plan)
            self._add(self._outputs(plan), limits.without_noise, condition=without)
        if self.first is None and not all(row.ok for row in self.rows if not row.note):
            for batch in self.batches[:2]:
                with torch.no_grad(), planning.Recorder(self.small) as small, planning.Recorder(self.wide) as wide:
                    run_model(self.small, batch)
                    run_model(self.wide, batch)
                self.first = self.first or first_differing_module(small, wide, plan, limits.without_noise)
        if self.train and all(row.ok for row in self.rows):
            trained = self.small, self.wide, plan, self.batches, self.train, limits.in_training
            row, self.first = compare_training(*trained)
            self.rows.append(replace(row, what=f"{row.what}{without}"))
        what, moved = next(iter(outputs.differences.items()))
        return self._comparison(
            outputs, f"the {movers} {_move(movers)} {what} by {moved:.1%}" if self.relation.draws else ""
        )

    def _compare_fresh(self, fresh: Fresh, plan: Plan, limits: _Limits) -> Comparison:
        """Outputs as they are, and once more where they must be the same: with new units silent, or eps scaled."""
        relation, obstacles = self.relation, ["it grew several times"]  # why no new units can keep the function
        is_deeper = relation.deepened_after_fresh is not None
        if len(relation.growths) == 1 or is_deeper:
            obstacles = ConfigFamily(relation.small.config).obstacles(relation.growths[0].times, plan)
        why = "".join(obstacles[:1]) + (f" (and {len(obstacles) - 1} more)" if len(obstacles) > 1 else "")
        # no norm reads the new units, and they are silent
        is_same = (fresh.lossless or fresh.outgoing == 0) and not plan.norms and not obstacles
        outputs, start, parted = self._outputs(), len(self.rows), None
        note = "moved by the norms' eps" if fresh.lossless and not obstacles else "moved by the new units"
        note = "" if is_same else note
        self._add(outputs, limits.without_noise if is_same else limits.as_they_are, note)
        is_told = not is_same and not obstacles  # by a second comparison
        if is_told and self.first is None:  # on weights grown anew, which says nothing of files that differ
            if not fresh.lossless:
                upscale_untried(self.small, self.wide, plan, grow=Fresh(lossless=True))  # the outputs are compared next
            for name in (name for name, kind in plan.norms.items() if kind != "bias"):
                entry, module = plan.parameters[name], self.wide.get_submodule(name.rpartition(".")[0])
                for attribute in EPS:  # by n/N, as lossless growth divides what it is added to
                    if isinstance(eps := getattr(module, attribute, None), float):
                        setattr(module, attribute, eps * entry.narrow[0] / entry.wide[0])
            condition = ", eps scaled" if fresh.lossless else ", new units silent"
            self._add(self._outputs(), limits.without_noise, condition=condition)
        same = all(row.ok for row in self.rows[start:])
        if not same and is_told:
            parted = planning.find_parting(self.small, self.wide, self.batches[0], plan, limits.without_noise)
        if parted is not None and parted.relative < _OF_ROUNDING:
            self.notes.append(
                f"With the new units switched off, {parted}. A difference this small comes from a constant that the "
                "model rounds, such as √hidden in bfloat16. Grow hidden 4 times, at which it is exact."
            )
        elif not same:
            where = "" if parted is None else f": {parted}"
            self.notes.append(
                f"New units change the function even when they are switched off{where}. A norm over all units, also "
                "one of a weight (weight_norm), or a constant of the width comes before that. Grow by copies "
                f"({as_asked('grow=mupscale.Copies()', '--how copies')}), or keep hidden as it is."
            )
        if any(name.endswith("running_var") for name in relation.small.shapes):
            said = "New channels of BatchNorm have the running mean 0 and variance 1 of a fresh one"
            until = ": outputs mean little until it has trained on, or mupscale.measure_statistics has run batches"
            self.notes.append(f"{said}{'' if same and fresh.lossless else until}.")
        if obstacles and not fresh.lossless:
            self.notes.append(f"Not compared with the new units switched off: {why}.")
        if is_deeper:
            self.notes.append("New layers write nothing into the residual stream yet, so they change nothing at first.")
        if self.train:
            self.notes.append("Training is not compared: new units learn what the small model cannot.")
        what, moved = outputs.worst
        times = ["√(n/N) for the norms"] if fresh.lossless and plan.norms else []
        if scaled := [name for name, entry in plan.parameters.items() if entry.keep != 1]:
            times.append(f"a constant in {', '.join(scaled[:2])}{' …' if len(scaled) > 2 else ''}")
        gains = f" (times {' and '.join(times)}, see inspect)" if times else ""
        kept = f"the old weights are unchanged to the bit{gains}, the new units as drawn at μP's scale"
        if is_same:
            return self._comparison(outputs, f"{kept}; {what} are the same ({moved:.1e})")
        if not fresh.lossless:
            return self._comparison(outputs, f"{kept}; they move {what} by {moved:.1%}")
        if obstacles:
            return self._comparison(outputs, f"{kept}; it is not lossless, since {why}: {what} move by {moved:.1%}")
        if moved > _OF_EPS:
            why = "activations are small compared with the norms' eps, as in a model that has hardly been trained"
            return self._comparison(outputs, f"{kept}; it is not lossless, since {why}: {what} move by {moved:.1%}")
        return self._comparison(outputs, f"{kept}, lossless: {what} move by {moved:.1e}, through the norms' eps")

    def _compare_layers(self, outputs: OutputComparison, movers: str) -> Comparison:
        """Outputs: the same where new layers are identity and experts copies, moved where anything is not."""
        what, moved = outputs.worst
        told = f"{movers} {_move(movers)} {what} by {moved:.1%}" if movers else ""
        if not movers and all(row.ok for row in self.rows):
            if any(growth.layers is not None for growth in self.relation.growths):
                self.notes.append("New layers write nothing into the residual stream yet, so the function is the same.")
            if any(growth.experts is not None for growth in self.relation.growths):
                self.notes.append("All copies of an expert compute the same, so the function is the same.")
        if self.train:
            self.notes.append("Training is not compared: new layers and experts learn from the first step on.")
        return self._comparison(outputs, told)


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
    """A row for all tensors, or for the old and the new, and one for how new units start; what is wrong is named."""
    steps = relation.steps
    limit = rounding_limit(relation.small, relation.wide)
    is_kept = relation.fresh is not None and (len(steps) == 1 or relation.deepened_after_fresh is not None)
    exact = 0.0 if is_kept else limit
    worst, old, new, first = 0.0, 0.0, 0.0, None
    parts = ["units"] if relation.fresh is not None else []
    parts += [n for n in ("layers", "experts") if any(getattr(growth, n) for growth in relation.growths)]
    copied = any(growth.is_width and growth.fresh is None for growth in relation.growths)
    for off in tensor_differences(relation.small, relation.wide, steps):
        worst, old, new = max(worst, off.whole), max(old, off.old), max(new, off.new)
        if first is None and not (off.whole <= limit and off.old <= exact):
            first = Difference(off.name, "parameter", off.whole, _FILES_ADVICE + _right_after(relation))
    if relation.fresh is None and not relation.deepened:
        return [ComparisonRow("tensors in the files", worst, limit)], first
    rows = [
        ComparisonRow(f"{'copied' if copied else 'old'} weights in the files", old, exact),
        ComparisonRow(
            f"new {' and '.join(parts)} in the files", new, limit, "as recorded" if relation.deepened else "as drawn"
        ),
    ]
    if first is None and relation.fresh is not None:  # else they were changed or trained since
        start = compare_start(relation.small, relation.wide, steps)
        if start.tensors:
            what = f"start of new units ({start.tensors} {'tensors' if start.tensors > 1 else 'tensor'})"
            rows.append(ComparisonRow(what, start.errors, ALLOWED, "standard errors"))
        if not start.ok:
            first = Difference(start.name, "the start of", start.errors, _START_ADVICE.format(why=start.why))
    return rows, first


def _compare_optimizer(relation: Relation, rows: list[ComparisonRow], notes: list[str]) -> Difference | None:
    """A row for the saved optimizer beside the wide checkpoint, or a note that nothing says what it should be."""
    small, wide = (source.folder / OPTIMIZER_FILE for source in (relation.small, relation.wide))
    recorded = "" if relation.record is None else relation.record.optimizer
    times = math.prod(growth.scale_lr for growth in relation.growths)
    note = "" if times == 1 else f"rates × {times:.3g}"
    if not wide.exists():
        if not recorded:
            return None
        rows.append(ComparisonRow(OPTIMIZER_FILE, math.inf, _OF_STATE, "missing"))
        lost = (
            f"{RECORD_FILE} says that it was written to {relation.wide.folder}. Copy it from there, or grow it again."
        )
        return Difference(OPTIMIZER_FILE, "file", math.inf, lost)
    if not small.exists() and not recorded:
        notes.append(f"Not compared: {OPTIMIZER_FILE}, since {relation.small.folder} holds none.")
        return None

    advice = _STATE_ADVICE
    if not small.exists():
        name, far, note = OPTIMIZER_FILE, 0.0 if system.sha256_of(wide) == recorded else math.inf, "as recorded"
    else:
        try:
            found = read_optimizer(wide, building.sketch_model(relation.wide.config), mmap=True)
            rules = RuleSet() if relation.record is None else RuleSet(decay=relation.record.decay)
            name, far = compare_optimizer_file(small, found, relation.small, relation.steps, rules)
        except MupscaleError as error:
            name, far, advice = OPTIMIZER_FILE, math.inf, f"It cannot be compared: {error}."
    rows.append(ComparisonRow(OPTIMIZER_FILE, far, _OF_STATE, note))
    if far <= _OF_STATE:
        return None
    return Difference(name, "file" if name == OPTIMIZER_FILE else "optimizer", far, advice + _right_after(relation))


def _right_after(relation: Relation) -> str:
    """Where a growth in a Trainer's run left the wide checkpoint, if WIDE is a later one."""
    small = relation.small.folder
    grown = small.with_name(small.name.removeprefix("narrow-"))
    is_another = grown != small and grown.is_dir() and not grown.samefile(relation.wide.folder)
    return f" {grown} is the checkpoint right after the growth." if is_another else ""


def _limits(relation: Relation, plan: Plan | None, precision: torch.dtype, tolerance: float | None) -> _Limits:
    """The tolerance, where one is given; else what the computation rounds, and what the files had to round."""
    moved, fresh = bool(relation.movers), relation.fresh
    if tolerance is not None:
        return _Limits(tolerance, tolerance, tolerance)
    exact, trained = TOLERANCE[precision], TOLERANCE[precision] * (10 if precision == torch.float32 else 1)
    rewritten = moved and not (fresh is not None and fresh.lossless)
    plans = [step.plan for step in relation.steps if not step.plan.has_new_parts] if plan is None else [plan]
    entries = {f"{n} {name}": entry for n, one in enumerate(plans) for name, entry in one.parameters.items()}
    eps = 0.0 if rewritten else _rounding_of_files(relation, entries)
    rounded = max(exact, 8 * eps)
    if fresh is not None:  # new units are not drawn again in memory
        return _Limits(math.inf, rounded, max(trained, 32 * eps))
    return _Limits(math.inf if moved else rounded, exact, trained, rounded=rounded > exact)


def _rounding_of_files(relation: Relation, entries: Mapping[str, Entry]) -> float:
    """The relative error of weights that the wide files cannot hold exactly; 0 where they can."""
    stored = (source.tensors.values() for source in (relation.small, relation.wide))
    few, many = ({tensor.dtype for tensor in each if tensor.dtype.is_floating_point} for each in stored)
    if relation.fresh is None and is_exact(entries) and few == many:
        return 1e-4 if torch.float16 in many and entries else 0.0  # whose smallest numbers lose bits even so
    return max(torch.finfo(dtype).eps for dtype in many)


def _move(movers: str) -> str:
    """The verb behind what moves outputs."""
    return "moves" if movers in ("noise", "shrinking") else "move"
