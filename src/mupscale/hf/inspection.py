"""What will happen to a checkpoint, before it happens: every tensor's axes, its Rule, and the factors that follow."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from mupscale import system
from mupscale.core import Axis, DecayRule, Entry, Plan, RuleSet, shapes_in_words
from mupscale.growth import DEPTH_OPERATORS, Deepen, Fresh, FreshTensor, NewTensor, Operator, Part
from mupscale.hf.building import runs_trusted_code
from mupscale.hf.config_family import ConfigFamily
from mupscale.hf.config_fields import Size, Times, sizes_of
from mupscale.hf.depths import experts_of, layers_of
from mupscale.hf.record import PlannedGrowth, Record, plan_growths, settle_growth, then_parts
from mupscale.hf.source import Source, open_source
from mupscale.hf.stream import shorten_number
from mupscale.hf.verifying import find_record
from mupscale.optim import DECAY_RULE, Traits, change_of_decay, default_hyper, inexact_in_words, traits_of
from mupscale.system import MupscaleError, checks_arguments

_COPIED = {"stack": "all layers again on top", "interleaved": "each behind its layer"}


@dataclass(frozen=True)
class InspectionRow:
    """Tensors that differ in their layer alone.

    label: their name with the layers as a range. values: what they are filled with, where they grow by fresh units.
    decay_change: by what weight decay differs from the one with which copies are exact.
    """

    name: str
    label: str
    entry: Entry
    factors: Mapping[str, float | tuple[float, ...]]
    values: FreshTensor | None = None
    decay_change: float = 1.0

    @property
    def output(self) -> str:
        """How its output axes grow, in words."""
        return ", ".join(_axis(self.entry.axes[d]) for d in self.entry.out)

    @property
    def new_units(self) -> str:
        """What fresh units start as, in words; "–" where nothing grows or units are copied."""
        values = self.values
        if values is None or self.entry.narrow == self.entry.wide:
            return "–"
        if values.new_outputs != "drawn":
            return "0" if values.new_outputs == "zero" else "mean of the old"
        law = values.law
        mean = "|".join(f"{m:.3g}" for m in law.means or ()) if any(law.means or ()) else ""
        spread = "|".join(f"{std:.3g}" for std in law.spreads) if any(law.spreads) else ""
        if spread and values.spread == "trained":
            spread = "trained"
        return f"{mean} ± {spread}".strip() if spread else mean or "0"

    @property
    def outgoing(self) -> str:
        """How much of that leads from new units to old ones."""
        reads = any(self.entry.axes[d].times != 1 for d in self.entry.in_)
        return "–" if self.values is None or not reads else f"{self.values.outgoing:g}×"

    def cells(self) -> tuple[str, ...]:
        """As text, in the table's columns."""
        rule, shape = self.entry.rule, shapes_in_words(self.entry.narrow, self.entry.wide)
        written = [_short(self.entry.fold), _short(rule.weight)]
        if self.values is not None:
            written = [f"{_short(self.values.keep)}×", self.new_units, self.outgoing]
        input_ = ", ".join(_axis(self.entry.axes[d]) for d in self.entry.in_)
        factors = map(_short, self.factors.values())
        return self.label, shape, self.output, input_, _short(rule.out), _short(rule.in_), *written, *factors


@dataclass(frozen=True)
class Inspection:
    """The rows, and around them: which sizes of the config change, and how large the model becomes.

    steps: first it grows in width, if only by 1. record: of earlier growths. mixture: where it gets experts, the rows
    of the whole growth by the names in the model, which stacks them.
    """

    source: Source
    steps: tuple[PlannedGrowth, ...]
    record: Record | None
    optimizer: str
    rows: tuple[InspectionRow, ...]
    mixture: tuple[InspectionRow, ...] = ()
    decay: DecayRule = RuleSet.decay

    @property
    def fresh(self) -> Fresh | None:
        """How it grows by fresh units; None for copies."""
        return self.steps[0].growth.fresh

    @property
    def numbers(self) -> tuple[int, int]:
        """Of parameters, before and after."""
        few, many = (e.narrow for e in self.steps[0].plan.parameters.values()), self.steps[-1].plan.parameters.values()
        return sum(map(math.prod, few)), sum(math.prod(e.wide) for e in many)

    @cached_property
    def sizes(self) -> dict[str, tuple[Any, Any]]:
        """What of the config changes as it grows in width, of a part with its name before it."""
        config, wide = self.source.config, self.steps[0].config
        sizes = {n: (config.get(n), v) for n, v in wide.items() if config.get(n) != v and not isinstance(v, dict)}
        before, after = sizes_of(config), sizes_of(wide)
        return sizes | {n: (a, after[n]) for n, a in before.items() if "." in n and a != after[n]}

    @property
    def groups(self) -> int:
        """How many parameter groups the optimizer will have; what it cannot train (Muon: no matrix) is in none."""
        rows = self.mixture or self.rows
        trained = [row.factors for row in rows if all(value == value for value in row.factors.values())]
        return len({tuple(factors.items()) for factors in trained})

    @property
    def _deeper(self) -> PlannedGrowth | None:
        return self.steps[1] if len(self.steps) > 1 else None

    @property
    def _is_wider(self) -> bool:
        return self._deeper is None or self.steps[0].growth.times != Times() or self.fresh is not None

    @property
    def _experts(self) -> list[InspectionRow]:
        """What shares its gradient with copies of itself, and so has other factors than its width gives."""
        return [row for row in self.mixture if row.entry.constants.depth != 1]

    def summary(self) -> list[str]:
        """A few sentences."""
        few, many = map(shorten_number, self.numbers)
        times = self.steps[0].growth.times
        how = [f"--times {times}" if self.fresh is None else "fresh units"] if self._is_wider else []
        how += [] if self._deeper is None else ["experts" if self.mixture else "more layers"]
        lines = [f"{self.source.model_type} (planned by running miniatures of it), {few} → {many} parameters with "]
        lines[0] += " and ".join(how)
        if self._deeper is not None:
            lines += self._of_experts() if self.mixture else self._of_layers()
        if self._is_wider:
            lines += [", ".join(f"{name} {a} → {b}" for name, (a, b) in self.sizes.items()), *self._of_units()]
        if self.record is not None:
            spreads = "" if self.fresh is None else ", and so does the scale of new units"
            lines.append(
                f"it has grown before, {self.record.in_words}: param_groups counts from the first model{spreads}, and "
                "the factors shown here count from this one"
            )
        if self._is_wider:
            rest = (
                "fold: a constant stored in the weight; weight: the factor of the copied weights"
                if self.fresh is None
                else "old: the factor of old weights; new units: what new weights start as (mean ± standard "
                "deviation); to old: the scale of the weights from new units into old ones"
            )
            lines.append(
                "columns: output and input: how much that axis grows (by 64: in blocks of 64 units, such as a head); "
                f"out and in: the same as numbers; {rest}"
            )
        if self._is_wider or self.mixture:
            groups = f"{self.optimizer} gets {self.groups} parameter group{'s' * (self.groups != 1)}"
            groups += "; its factors are in the last columns" if self._is_wider else ""
            groups += "; the table of experts has theirs" if self._experts else ""
            groups += "" if self.decay == RuleSet.decay else f"; weight decay follows the rule '{self.decay}'"
            lines.append(groups)
        changes = dict[tuple[str, float], list[str]]()
        for row in self.rows:
            changes.setdefault((self.decay, row.decay_change), []).append(row.label)
        inexact = inexact_in_words(changes) if self._is_wider and self.fresh is None else ""
        return [*lines, inexact] if inexact else lines

    def _of_units(self) -> list[str]:
        """What is done with old units and with new ones."""
        if self.fresh is None:
            folds = [row.label for row in self.rows if row.entry.fold != 1]
            return [f"a constant is stored in {', '.join(folds)} (column fold)"] if folds else []
        kept = [row.label for row in self.rows if row.values is not None and _short(row.values.keep) != _short(1)]
        but = ", but for those below" if kept else ""
        lines = [
            f"old weights stay as they are{but}, in the places of their units; new ones are drawn from the model's own "
            "initialisation at μP's scale for the wide size (new units), or start at a constant"
        ]
        lines += [f"old weights are multiplied in {', '.join(kept)} (column old)"] if kept else []
        if self.fresh.lossless:
            width, family = self.steps[0], ConfigFamily(self.source.config)
            losses = family.obstacles(width.growth.times, width.plan)
            stays = "lossless: the function stays the same, up to the eps of the norms"
            lines.append(f"not lossless, since {'; '.join(losses)}" if losses else stays)
        return lines

    def _of_layers(self) -> list[str]:
        growth, before = self.steps[-1].growth, layers_of(self.source.config) or 0
        how, layers = growth.deepen, growth.layers or 0
        old = [n for n, place in enumerate(DEPTH_OPERATORS[how].places(before, layers)) if not place.is_new]
        runs = [[n for _, n in run] for _, run in groupby(enumerate(old), lambda pair: pair[1] - pair[0])]
        ranges = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)
        start = "write nothing into the residual stream yet, so they change nothing at first"
        return [
            f"layers {before} → {layers} ({how}): the trained ones become layers {ranges} of the large model. "
            "The table lists the others, which are new",
            f"new layers {f'are copies, {_COPIED[how]}, which changes the function' if how in _COPIED else start}",
            "more layers change no learning rate",
        ]

    def _of_experts(self) -> list[str]:
        (few, _), counts, config = experts_of(self.source.config), self.steps[-1].growth.experts, self.source.config
        assert counts is not None
        changed = "no output" if counts.keeps_function(config) else "the outputs"
        return [
            f"experts {few} → {counts.experts}, of which a token uses {counts.top_k}: a checkpoint of "
            f"{self.steps[-1].config['model_type']}",
            f"experts are copies of {'the feed-forward layer' if few == 1 else 'experts'}, which changes {changed}",
        ]

    def __str__(self) -> str:
        """The table, in two parts where the terminal is too narrow for one, and the summary."""
        tables = [self.table()] if self._is_wider else []
        tables += [] if self._deeper is None else [_table_of_new(self._deeper.plan)]
        if experts := [(row.label, *map(_short, row.factors.values())) for row in self._experts]:
            tables.append(system.text_table(("experts, in the model", *_factor_names(self.mixture)), experts, left=1))
        return "\n".join(["\n\n".join(tables), *map(system.wrap_text, self.summary())])

    def _repr_html_(self) -> str:
        """For a notebook."""
        return system.html_table(self._header, [row.cells() for row in self.rows], "; ".join(self.summary()))

    def table(self, width: int | None = None) -> str:
        """As text; where it is wider than `width` (by default the terminal's), shapes first, then numbers."""
        header, rows = self._header, [row.cells() for row in self.rows]
        width = system.terminal_width() if width is None else width
        whole = system.text_table(header, rows, left=4)
        if width is None or max(map(len, whole.splitlines())) <= width:
            return whole
        shapes = system.text_table(header[:4], [row[:4] for row in rows], left=4, width=width)
        numbers = [(row[0], *row[4:]) for row in rows]
        return f"{shapes}\n\n{system.text_table((header[0], *header[4:]), numbers, width=width)}"

    @property
    def _header(self) -> tuple[str, ...]:
        filled = ("fold", "weight") if self.fresh is None else ("old", "new units", "to old")
        return ("tensors", "shape", "output", "input", "out", "in", *filled, *_factor_names(self.rows))


def _factor_names(rows: Sequence[InspectionRow]) -> list[str]:
    return [name.replace("weight_decay", "decay") for name in (rows[0].factors if rows else ())]


def _table_of_new(plan: Plan) -> str:
    """New tensors that start alike, by their layers or experts."""
    merged: dict[tuple[str, str], list[str]] = {}
    for name in (name for name, source in plan.sources.items() if source.is_new):
        tensor, start = NewTensor.of(name, plan, 0), "copies"
        if tensor is not None:
            spread = f" ± {tensor.std:.3g}" if tensor.std else ""
            start = f"{tensor.mean:g}{spread}".removeprefix("0 ")
        merged.setdefault((system.pattern_of_name(name), start), []).append(name)
    rows = [(system.name_of_group(names), str(len(names)), start) for (_, start), names in merged.items()]
    return system.text_table(("new tensors", "count", "start as"), rows, left=1)


@runs_trusted_code
@checks_arguments
def inspect(
    path: str | Path | Source,
    *,
    times: int | str | Mapping[str, int] | Times | None = None,
    hidden: Size | None = None,
    ffn: Size | None = None,
    heads: Size | None = None,
    kv: Size | None = None,
    layers: int | None = None,
    grow: Operator | None = None,
    deepen: Deepen = "identity",
    experts: int | None = None,
    top_k: int | None = None,
    optimizer: str | type[Optimizer] = "AdamW",
    rules: RuleSet | None = None,
    trust_remote_code: bool = False,
) -> Inspection:
    """How a checkpoint would be upscaled: nothing but headers and config.json is read.

    times … top_k, trust_remote_code: as in `upscale`. optimizer: for which factors are shown, by these rules.

    >>> import tempfile, transformers
    >>> folder = tempfile.TemporaryDirectory()
    >>> config = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, n_positions=16, vocab_size=11)
    >>> transformers.GPT2LMHeadModel(config).save_pretrained(folder.name)
    >>> print(inspect(folder.name, times=2).summary()[0])
    gpt2 (planned by running miniatures of it), 1.104 k → 3.744 k parameters with fresh units
    >>> folder.cleanup()
    """
    source, rules = open_source(path), rules or RuleSet()
    classes = {n.lower(): c for n, c in vars(torch.optim).items() if isinstance(c, type) and issubclass(c, Optimizer)}
    cls = classes.get(optimizer.lower()) if isinstance(optimizer, str) else optimizer
    if cls is None:
        raise MupscaleError(
            f"torch has no optimizer '{optimizer}'; it has AdamW, SGD, Adam, Adafactor, Muon and others"
        )
    sizes = {"hidden": hidden, "ffn": ffn, "heads": heads, "kv": kv}
    asked: dict[str, Any] = {"times": times, "sizes": sizes, "grow": grow, "layers": layers, "deepen": deepen}
    growths = settle_growth(source.config, source.tensors, source.folder, **asked, experts=experts, top_k=top_k)
    record = find_record(source)
    steps = plan_growths(growths, source.config, source.shapes, record)
    plan, width = steps[0].plan, growths[0]
    width.grow.check(plan)
    ConfigFamily(source.config).check_grown(plan, width.times)
    traits, hyper = traits_of(cls), {**default_hyper(cls, {}), DECAY_RULE: rules.decay}
    mixture = list[InspectionRow]()
    if growths[-1].experts is not None:
        mixture = _rows(then_parts(steps[0].by_model, steps[-1].by_model), traits, hyper)
    rows = _rows(plan, traits, hyper, width.fresh)
    return Inspection(source, tuple(steps), record, cls.__name__, tuple(rows), tuple(mixture), rules.decay)


def _rows(
    plan: Plan, optimizer_traits: Traits, hyper: Mapping[str, Any], fresh: Fresh | None = None
) -> list[InspectionRow]:
    merged: dict[tuple[Any, ...], list[str]] = {}
    filled = {} if fresh is None else {name: fresh.tensor(Part(name, plan, seed=0)) for name in plan.parameters}
    for name, entry in plan.parameters.items():
        key: tuple[Any, ...] = (
            system.pattern_of_name(name),
            entry.narrow,
            entry.wide,
            entry.rule,
            tuple(entry.axes.items()),
        )
        if (values := filled.get(name)) is not None:
            key += (values.law, values.keep, values.outgoing, values.new_outputs)
        merged.setdefault(key, []).append(name)
    rows = []
    for (label, *_), names in merged.items():
        entry = plan.parameters[names[0]]
        fits, factors = not optimizer_traits.matrices_only or len(entry.narrow) == 2, optimizer_traits.hyper
        factors_of = {n: factor(entry, hyper) if fits else float("nan") for n, factor in factors.items() if n in hyper}
        change = 1.0
        if hyper[DECAY_RULE] != "invariant" and fits and "weight_decay" in factors_of:
            change = change_of_decay(label, entry, hyper, optimizer_traits)
            factors_of["weight_decay"] *= change
        rows.append(InspectionRow(label, system.name_of_group(names), entry, factors_of, filled.get(names[0]), change))
    return rows


def _axis(axis: Axis) -> str:
    blocks = [block for _, block in axis.sections] or [axis.block]
    by = "" if blocks == [1] or axis.times == 1 else f" by {'|'.join(map(str, blocks))}"
    return f"{axis.times}×{by}"


def _short(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(_short, value))
    return "–" if value != value else f"{float(value):.4g}"
