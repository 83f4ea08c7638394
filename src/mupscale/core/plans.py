"""A plan: for every parameter and buffer, what it is made of, how its axes are copied and which Rule it obeys.

It is made between two modules of one class, or between a family's base and any width; it is keyed by the larger model's
names and lives beside the model, so it survives deepcopy, `.to()`, wrappers, sharding and a round trip through a file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mupscale.core import naming
from mupscale.core.entries import Entry, Initial, Shape, TensorSource
from mupscale.core.rules import Number, Rule
from mupscale.system import (
    MupscaleError,
    html_table,
    name_of_group,
    parse_json,
    parse_record,
    pattern_of_name,
    read_regular,
    replace_text,
    terminal_width,
    text_table,
    told_fields,
    wrap_text,
)

HEADER = ("parameter", "shape", "out", "in", "fold", "weight ×", "lr × (Adam)", "lr × (SGD)")
BLOCK_HEADER = ("block", "comes from", "starts")
TriedBy = Literal["copies", "silent units", "small members"]
"""What was run to see that a plan is right."""

_TRIED: Mapping[TriedBy | None, str] = {
    None: "not tried yet: call mu.verify, or pass a batch (inputs=)",
    "silent units": "tried with the new units switched off: the outputs stay the same",
    "small members": "copies tried on small members of the family: exact",
}
_SHAPES = 5  # columns of the first part, where the table is cut in two
_WIDTH, _UNLIMITED = 80, 1 << 20


def shapes_in_words(narrow: tuple[int, ...], wide: tuple[int, ...]) -> str:
    """A shape before and after, or once where it stays."""
    before, after = ("×".join(map(str, shape)) or "1" for shape in (narrow, wide))
    return before if before == after else f"{before} → {after}"


def block_rows(plan: Plan) -> list[tuple[str, ...]]:
    """One row for each block of the larger model, under BLOCK_HEADER."""
    patterns = {pattern_of_name(path): path.count(".") + 1 for path in plan.moved}
    starts = {"old": "as it was", "copy": "a copy", "expert": "a copy", "drawn": "drawn"}
    starts["silent"] = "new, and writes nothing yet"
    rows: dict[str, tuple[str, set[str]]] = {}
    for name, source in plan.sources.items():
        for pattern, length in patterns.items():
            path = ".".join(name.split(".")[:length])
            if pattern_of_name(path) == pattern:
                rows.setdefault(path, (source.name.removesuffix(name.removeprefix(path)), set()))[1].add(source.kind)
    return [(path, old, starts[max(kinds, key=list(starts).index)]) for path, (old, kinds) in rows.items()]


def blocks_in_words(plan: Plan) -> str:
    """What there is to know of the blocks besides."""
    rules, kinds = plan.rules.values(), {name: source.kind for name, source in plan.sources.items()}
    if "expert" in kinds.values():
        share = max(source.value for source in plan.sources.values() if source.kind == "expert")
        function = (
            f"the function changes, since {share:.0%} of their entries are drawn" if share else "the function stays"
        )
        shared = _short(max(rule.depth * rule.out for rule in rules))
        return f"experts are copies, among which a gradient is shared ({shared}): {function}"
    said = ["blocks are copied: the function changes"]
    if silent := sorted({pattern_of_name(name) for name, kind in kinds.items() if kind == "silent"}):
        said = ["new blocks write nothing yet: the function stays", f"what writes into the stream: {', '.join(silent)}"]
    return "; ".join(said + ["learning rates follow the depth"] * any(rule.depth != 1 for rule in rules))


def _short(number: Number) -> str:
    return f"{float(number):.4g}"


_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Plan:
    """Entries by name, and what is known of the values that parameters start with.

    mup: whether the wide model's new units start afresh (μP) or as copies (widening), for optimizers whose step is
    relative to the weights; for all others the two are one.
    tried_by: what was run to see that this plan is right: copies, the old units with silent ones beside them, or copies
    between small members of a family; None if nothing was.

    >>> import mupscale as mu
    >>> plan = mu.plan(nn.Linear(4, 8), nn.Linear(4, 16))
    >>> {name: entry.wide for name, entry in plan.parameters.items()}
    {'weight': (16, 4), 'bias': (16,)}
    >>> mu.Plan.from_json(plan.to_json()) == plan
    True
    """

    parameters: Mapping[str, Entry]
    buffers: Mapping[str, Entry] = field(default_factory=dict)
    initial: Mapping[str, Initial] = field(default_factory=dict)
    mup: bool = False
    tried_by: TriedBy | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        known = {name: one for name, one in self.initial.items() if one != _UNKNOWN}  # so that plans can be compared
        object.__setattr__(self, "initial", known)

    def __getitem__(self, name: str) -> Entry:
        entry = self.parameters.get(name) or self.buffers.get(name)
        if entry is None:
            raise MupscaleError(f"the plan has no parameter '{name}': it was made for a different model")
        return entry

    def __str__(self) -> str:
        """A table that fits the terminal, 80 where there is none; of a plan for new blocks, a table of the blocks."""
        header, rows, words = self._table()
        width = terminal_width() or _WIDTH
        if self.has_new_parts:
            return f"{text_table(header, rows, left=3)}\n{wrap_text(words)}"
        whole = text_table(header, rows, left=2, width=_UNLIMITED)
        if max(map(len, whole.splitlines())) > width:
            shapes = text_table(header[:_SHAPES], [row[:_SHAPES] for row in rows], left=2, width=width)
            factors = text_table(
                (header[0], *header[_SHAPES:]), [(row[0], *row[_SHAPES:]) for row in rows], width=width
            )
            whole = f"{shapes}\n\n{factors}\n"
        return f"{whole}\n{wrap_text(words, width)}"

    def _repr_html_(self) -> str:
        return html_table(*self._table())

    def _table(self) -> tuple[tuple[str, ...], list[tuple[str, ...]], str]:
        if self.has_new_parts:
            return BLOCK_HEADER, block_rows(self), blocks_in_words(self)
        groups: dict[tuple[str, Shape, Shape, Rule], list[str]] = {}  # of parameters that are alike
        for name, entry in self.parameters.items():
            groups.setdefault((pattern_of_name(name), entry.narrow, entry.wide, entry.rule), []).append(name)
        rows = []
        for (_, narrow, wide, rule), names in groups.items():
            numbers = (rule.out, rule.in_, rule.fold, rule.weight, rule.lr(m=0), rule.lr(m=1))
            rows.append((name_of_group(names), shapes_in_words(narrow, wide), *map(_short, numbers)))
        copies = "axes tried with copies, at a whole multiple: exact" if self.mup else "copies tried: exact"
        words = _TRIED.get(self.tried_by, copies)
        if self.joined:
            joined = ", ".join(dict.fromkeys(map(pattern_of_name, self.joined)))
            words += f"; but inputs that do not grow train at the rate of those beside them that do: {joined}"
        return HEADER, rows, words

    @property
    def joined(self) -> tuple[str, ...]:
        """Parameters that read inputs that grow and inputs that do not, for which they have one learning rate."""
        entries = self.parameters.items()
        return tuple(name for name, entry in entries if any(entry.axes[d].staying for d in entry.in_))

    @property
    def checked(self) -> bool:
        """Whether models were run to see that this plan is right."""
        return self.tried_by is not None

    @cached_property
    def fresh(self) -> dict[str, float] | None:
        """Initial.std by name; None where no initialisation is known."""
        return {n: one.std for n, one in self.initial.items() if one.std is not None} or None

    @cached_property
    def means(self) -> dict[str, tuple[float, ...]] | None:
        """Initial.means by name; None where no initialisation is known."""
        known = {n: one.means for n, one in self.initial.items() if one.means is not None}
        return known if self.fresh is not None else None

    @cached_property
    def patterned(self) -> tuple[str, ...]:
        """Parameters that grow and start as a pattern: new units take the values that the wide model is built with."""
        means = self.means or {}
        return tuple(n for n, e in self.parameters.items() if means.get(n) == () and e.stacked.narrow != e.wide)

    @cached_property
    def norms(self) -> dict[str, str]:
        """Initial.norm of the parameters of norms."""
        return {name: one.norm for name, one in self.initial.items() if one.norm}

    @cached_property
    def past_norms(self) -> dict[str, tuple[int, ...]] | None:
        """Initial.past_norms of the parameters that have such dimensions; None if no run has shown it."""
        if all(one.past_norms is None for one in self.initial.values()):
            return None
        return {name: one.past_norms for name, one in self.initial.items() if one.past_norms}

    def with_initial(
        self, what: Literal["std", "means", "norm", "past_norms", "drawn_as"], values: Mapping[str, Any] | None
    ) -> Plan:
        """The plan with this field of Initial, by parameter; with None it is no longer known of any."""
        unsaid = () if what == "past_norms" and values is not None else getattr(Initial(), what)
        known = {} if values is None else values
        told = {n: replace(self.initial.get(n, _UNKNOWN), **{what: known.get(n, unsaid)}) for n in self.parameters}
        return replace(self, initial=told)

    def with_laws(self, laws: Mapping[str, Initial]) -> Plan:
        """The plan with the laws that these parameters start by; what else is known of them stays."""
        known = {name: self.initial.get(name, _UNKNOWN) for name in self.parameters}
        for name in laws.keys() & known.keys():
            own = known[name]
            known[name] = replace(laws[name], norm=own.norm, past_norms=own.past_norms, drawn_as=own.drawn_as)
        return replace(self, initial=known)

    def drawn_as(self, name: str) -> str:
        """The name by which this parameter's random numbers are drawn: its own, or Initial.drawn_as."""
        return self.initial.get(name, _UNKNOWN).drawn_as or name

    @cached_property
    def sources(self) -> dict[str, TensorSource]:
        """What every parameter and buffer of the larger model is made of; the smaller one's tensors by name."""
        return {n: replace(e.source, name=e.source.name or n) for n, e in {**self.buffers, **self.parameters}.items()}

    @cached_property
    def moved(self) -> dict[str, str]:
        """From the path of a part of the larger model to that of the part it comes from, where the two differ."""
        moved = {}
        for name, source in self.sources.items():
            ours, theirs = name.split("."), source.name.split(".")
            while ours and theirs and ours[-1] == theirs[-1]:
                del ours[-1], theirs[-1]
            if ours:
                moved[".".join(ours)] = ".".join(theirs)
        return moved

    @property
    def has_new_parts(self) -> bool:
        """Whether the larger model has parts, such as blocks, that the smaller one lacks."""
        return any(source.is_new for source in self.sources.values())

    def __iter__(self) -> Iterator[str]:
        return iter(self.parameters)

    def then(self, later: Plan) -> Plan:
        """First this plan, then the later one: μP at width n followed by widening to k·n is μP at k·n."""
        before = {name: later.sources[name].name for name in (*later.parameters, *later.buffers)}
        if self.parameters.keys() != {before[name] for name in later.parameters}:
            raise MupscaleError("plans of different models do not compose: their parameters have different names")
        initial = {
            n: self.initial.get(before[n], _UNKNOWN).then(later.initial.get(n, _UNKNOWN), is_wider=e.narrow != e.wide)
            for n, e in later.parameters.items()
        }
        return Plan(
            {name: self.parameters[before[name]].then(entry) for name, entry in later.parameters.items()},
            {n: self.buffers[before[n]].then(entry) for n, entry in later.buffers.items() if before[n] in self.buffers},
            initial,
            self.mup,
            later.tried_by if self.checked else None,
        )

    @cached_property
    def names(self) -> dict[str, str]:
        """Every name of every parameter and buffer, tied ones under all of theirs → the name it has here."""
        entries = {**self.buffers, **self.parameters}
        return {alias: name for name, entry in entries.items() for alias in (name, *entry.names)}

    @cached_property
    def old_names(self) -> dict[str, str]:
        """Every name of every tensor of the smaller model, tied ones under all of theirs → its name in sources."""
        return {self.old_path(alias): self.sources[name].name for alias, name in self.names.items()}

    def old_path(self, path: str) -> str:
        """Where in the smaller model that is which a module or tensor of this path in the larger one comes from."""
        part = next((moved for moved in self.moved if f"{path}.".startswith(f"{moved}.")), "")
        return self.moved.get(part, "") + path.removeprefix(part)

    def norm_weights(self, p: float) -> dict[str, float]:
        """Rule.norm of every parameter."""
        return {name: entry.rule.norm(p) for name, entry in self.parameters.items()}

    @property
    def rules(self) -> dict[str, Rule]:
        """The three numbers of every parameter."""
        return {name: entry.rule for name, entry in self.parameters.items()}

    def check(self, model: nn.Module, side: str = "wide", *, is_fresh: bool = False) -> dict[str, nn.Parameter]:
        """The model's parameters by name, if they are the ones this plan is about; an error otherwise.

        side: "wide", or "narrow" for the smaller model, whose parameters come by the names of what is made of them.
        is_fresh: whether it was given as the freshly built narrow model.
        """
        found = naming.parameters(model)
        names = {name: name if side == "wide" else self.sources[name].name for name in self.parameters}
        asked = dict.fromkeys(names.values())
        check_same_names("the plan", asked, f"the {side} model", found, "make the plan for this model")
        parameters = {name: found[names[name]] for name in (found if side == "wide" else names)}
        for name, p in parameters.items():
            shape: Shape = getattr(self.parameters[name], side)
            if tuple(p.shape) != shape:
                if is_fresh:
                    raise MupscaleError(
                        f"fresh= builds another model than the one that grows: '{names[name]}' has shape "
                        f"{tuple(p.shape)} there and {shape} in that one. Build it at that model's size"
                    )
                raise MupscaleError(
                    f"this plan is for a different model: '{name}' has shape {tuple(p.shape)} but the plan's {side} "
                    f"shape is {shape}"
                )
        return parameters

    def to_json(self) -> str:
        """Exact: from_json gives an equal plan."""
        return json.dumps({"format": _FORMAT, **told_fields(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan that to_json wrote."""
        try:
            content = parse_json(text, "it")
            if content.pop("format") != _FORMAT:
                raise KeyError("format")
            return parse_record(cls, content)
        except (MupscaleError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise MupscaleError(f"this is not a plan written by mupscale ({type(error).__name__}: {error})") from None

    def save(self, path: str | Path) -> None:
        """Write the JSON to a file."""
        replace_text(Path(path), self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a file that `save` wrote."""
        try:
            return cls.from_json(read_regular(path).decode("utf-8"))
        except UnicodeDecodeError as error:
            raise MupscaleError(f"{path} is not a plan: it is not UTF-8 text ({error.reason})") from None
        except OSError as error:
            raise MupscaleError(f"there is no plan to read at {path} ({error.strerror})") from None


_FORMAT = "mupscale.plan/2"
_UNKNOWN = Initial()


def check_same_names(
    left: str, ours: Mapping[str, Any], right: str, theirs: Mapping[str, Any], advice: str, what: str = "parameter"
) -> None:
    """An error that names the first parameter (or other thing) which one of two models has and the other lacks.

    left, right: what the two are, in the message. advice: what to do about it.
    """
    for here, there, missing in (
        (left, right, ours.keys() - theirs.keys()),
        (right, left, theirs.keys() - ours.keys()),
    ):
        if missing:
            first = next(n for n in (*ours, *theirs) if n in missing)
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise MupscaleError(f"{there} lacks the {what} '{first}'{more} that {here} has: {advice}")


def check_dtype(name: str, tensor: Tensor) -> None:
    """Refuse what cannot be copied and scaled: integers, quantised and complex numbers, 8-bit floats."""
    if tensor.dtype not in _DTYPES:
        remedy = "dequantise the model or convert it, as with model.to(torch.bfloat16)"
        if tensor.is_complex():
            remedy = "keep its real and imaginary parts as two parameters, and let forward call torch.complex"
        raise MupscaleError(
            f"'{name}' has dtype {tensor.dtype}: only floating-point parameters of 16 bits or more can be widened. "
            f"Remedy: {remedy}"
        )
