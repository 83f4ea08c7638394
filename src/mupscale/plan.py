"""A plan: for every parameter and buffer, how its axes are copied and which Rule it obeys.

It is made between two modules of one class, or between a family's base and any width; it is keyed by name and
lives beside the model, so it survives deepcopy, `.to()`, wrappers, sharding and a round trip through a file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from mupscale import names as naming
from mupscale.axes import Axis, multiplier
from mupscale.errors import MupscaleError
from mupscale.heads import attention_roles
from mupscale.roles import Role, registered
from mupscale.rules import Number, Rule
from mupscale.sharded import plain_type

Shape = tuple[int, ...]
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Entry:
    """One parameter or buffer: its shapes, its width axes by dimension, and what each dimension is to it."""

    narrow: Shape
    wide: Shape
    axes: Mapping[int, Axis] = field(default_factory=dict)
    out: tuple[int, ...] = ()
    in_: tuple[int, ...] = ()
    fold: Number = 1
    names: tuple[str, ...] = ()

    @property
    def rule(self) -> Rule:
        """The three numbers of this parameter."""
        return Rule(self._times(self.out), self._times(self.in_), self.fold)

    def _times(self, dims: tuple[int, ...]) -> Number:
        return math.prod((self.axes[d].times for d in dims if d in self.axes), start=1)

    @property
    def out_is_width(self) -> bool:
        """Whether the output axis is a width of the family, even where it does not grow in this plan."""
        return any(d in self.axes for d in self.out)

    @property
    def in_is_width(self) -> bool:
        """Whether the input axis is a width of the family."""
        return any(d in self.axes for d in self.in_)

    @property
    def init(self) -> float:
        """Factor of the initial standard deviation under μP."""
        return self.rule.init(out_is_width=self.out_is_width, in_is_width=self.in_is_width)

    def then(self, later: Entry) -> Entry:
        """This widening followed by a later one."""
        if self.wide != later.narrow or (self.out, self.in_) != (later.out, later.in_):
            raise MupscaleError(
                f"plans of different models do not compose: '{self.names[0]}' ends with shape {self.wide} "
                f"in the first and starts with {later.narrow} in the second"
            )
        axes = {d: self.axes.get(d, Axis()) * later.axes.get(d, Axis()) for d in sorted({*self.axes, *later.axes})}
        return replace(self, wide=later.wide, axes=axes, fold=_tidy(Fraction(1) * self.fold * later.fold))


@dataclass(frozen=True)
class Plan:
    """Entries by name, and (where known) the std that a fresh μP initialisation has at the wide width."""

    parameters: Mapping[str, Entry]
    buffers: Mapping[str, Entry] = field(default_factory=dict)
    fresh: Mapping[str, float] | None = None

    def __getitem__(self, name: str) -> Entry:
        entry = self.parameters.get(name) or self.buffers.get(name)
        if entry is None:
            raise MupscaleError(f"the plan has no parameter '{name}': it was made for another model")
        return entry

    def __iter__(self) -> Iterator[str]:
        return iter(self.parameters)

    def then(self, later: Plan) -> Plan:
        """First this plan, then the later one: μP at width n followed by widening to k·n is μP at k·n."""
        if self.parameters.keys() != later.parameters.keys():
            raise MupscaleError("plans of different models do not compose: their parameters have different names")
        return Plan(
            {name: entry.then(later.parameters[name]) for name, entry in self.parameters.items()},
            {name: entry.then(later.buffers[name]) for name, entry in self.buffers.items() if name in later.buffers},
            later.fresh,
        )

    @cached_property
    def names(self) -> dict[str, str]:
        """Every name of every parameter and buffer, tied ones under all of theirs → the name it has here."""
        entries = {**self.buffers, **self.parameters}
        return {alias: name for name, entry in entries.items() for alias in (name, *entry.names)}

    @property
    def rules(self) -> dict[str, Rule]:
        """The three numbers of every parameter."""
        return {name: entry.rule for name, entry in self.parameters.items()}

    def check(self, model: nn.Module, side: str = "wide") -> dict[str, nn.Parameter]:
        """The model's parameters by name, if they are the ones this plan is about; an error otherwise."""
        found = naming.parameters(model)
        _same_names("the plan", self.parameters, f"the {side} model", found, "make the plan for this model")
        for name, p in found.items():
            shape: Shape = getattr(self.parameters[name], side)
            if tuple(p.shape) != shape:
                raise MupscaleError(
                    f"this plan is for another model: '{name}' has shape {tuple(p.shape)} and the plan's {side} "
                    f"shape is {shape}"
                )
        return found

    def to_json(self) -> str:
        """Exact: from_json gives an equal plan."""
        sides = {"parameters": self.parameters, "buffers": self.buffers}
        content = {side: {n: _entry_to_json(e) for n, e in entries.items()} for side, entries in sides.items()}
        fresh = None if self.fresh is None else dict(self.fresh)
        return json.dumps({"format": _FORMAT, **content, "fresh": fresh}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan that to_json wrote."""
        try:
            content = json.loads(text)
            if content["format"] != _FORMAT:
                raise KeyError("format")
            sides = [{n: _entry_from_json(e) for n, e in content[s].items()} for s in ("parameters", "buffers")]
            return cls(sides[0], sides[1], content["fresh"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise MupscaleError(f"this is not a plan written by mupscale ({type(error).__name__}: {error})") from None

    def save(self, path: str | Path) -> None:
        """Write the JSON to a file."""
        Path(path).write_text(self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a file that `save` wrote."""
        try:
            return cls.from_json(Path(path).read_text())
        except OSError as error:
            raise MupscaleError(f"there is no plan to read at {path} ({error.strerror})") from None


_FORMAT = "mupscale.plan/1"


def plan(
    narrow: nn.Module,
    wide: nn.Module,
    *,
    roles: Mapping[str, Role] | None = None,
    fresh: nn.Module | Callable[[], nn.Module] | None = None,
) -> Plan:
    """How `narrow` widens to `wide`, two modules of one class; `wide` may be on the meta device.

    roles: by name pattern (`{"head.weight": Role(out=0, in_=1, in_block=49)}`), for what the modules cannot tell.
    fresh: a freshly built narrow model, or the function that builds it, so that noise can be given in units of
    the model's own initialisation.
    """
    made = build_plan(narrow, wide, roles=roles)
    if fresh is None:
        return made
    draws = [fresh(), fresh()] if not isinstance(fresh, nn.Module) else [fresh]
    for draw in draws:
        made.check(draw, "narrow")
    stds = initial_std([naming.parameters(draw) for draw in draws])
    return replace(made, fresh={name: std * made.parameters[name].init for name, std in stds.items()})


def initial_std(draws: list[dict[str, nn.Parameter]]) -> dict[str, float]:
    """Std of each parameter over freshly initialised models; 0 where it is constant, or the same in every draw."""
    stds = {}
    for name, first in draws[0].items():
        if len(draws) > 1 and all(torch.equal(first, draw[name]) for draw in draws[1:]):
            stds[name] = 0.0
        else:
            stds[name] = math.sqrt(sum(_variance(draw[name]) for draw in draws) / len(draws))
    return stds


def _variance(p: Tensor) -> float:
    return float(p.detach().double().var(correction=0)) if p.numel() else 0.0


def build_plan(
    narrow: nn.Module,
    wide: nn.Module,
    *,
    roles: Mapping[str, Role] | None = None,
    copying: bool = True,
    is_width: Callable[[str, int], bool] = lambda name, dim: False,
) -> Plan:
    """The one code path of widening (`copying`: integer multipliers) and of μP (real ones).

    is_width tells of axes that are widths of the family although they may not grow here.
    """
    if narrow is wide:
        raise MupscaleError("narrow and wide are one and the same module; build a second, wider one")
    walk = _Walk(narrow, wide, dict(roles or {}), copying, is_width)
    parameters = walk.entries("parameters")
    parameters = walk.fold_tied_readouts(parameters)
    buffers = walk.entries("buffers")
    walk.check_patterns_used()
    return Plan(parameters, buffers)


class _Walk:
    """Two modules side by side, and the role of everything in them."""

    def __init__(
        self,
        narrow: nn.Module,
        wide: nn.Module,
        overrides: dict[str, Role],
        copying: bool,
        is_width: Callable[[str, int], bool],
    ) -> None:
        self.narrow, self.wide = naming.unwrap(narrow), naming.unwrap(wide)
        self.small, self.large = naming.modules(narrow), naming.modules(wide)
        self.overrides, self.copying, self.is_width = overrides, copying, is_width
        self.used: set[str] = set()
        self.readouts: dict[str, tuple[str, Number]] = {}
        self._compare_modules()
        self.roles = self._collect_roles()

    def _compare_modules(self) -> None:
        advice = "the two models must be of one class and depth; only widths may differ"
        _same_names("the narrow model", self.small, "the wide model", self.large, advice, what="module")
        for path, module in self.small.items():
            ours, theirs = plain_type(module), plain_type(self.large[path])
            if ours is not theirs:
                raise MupscaleError(
                    f"'{path or 'the model'}' is a {ours.__name__} in the narrow model and a "
                    f"{theirs.__name__} in the wide one; {advice}"
                )
            if ours.__module__.startswith("torch.ao.nn") and ".quantized" in ours.__module__:
                raise MupscaleError(
                    f"'{path or 'the model'}' is a quantised {ours.__name__}: only floating-point weights can be "
                    f"widened; widen the model first and quantise the wide one"
                )

    def _collect_roles(self) -> dict[str, Role]:
        """What the modules say, parents before children."""
        resolved: dict[str, Role] = {}
        for path, module in self.small.items():
            prefix = f"{path}." if path else ""
            function = registered(module)
            try:
                if function is not None:
                    said = function(module, self.large[path])
                else:
                    said = attention_roles(module, self.large[path], path)
            except MupscaleError:
                if all(self._override(prefix + name) is not None for name, _ in module.named_parameters()):
                    continue
                raise
            for name, role in said.items():
                resolved.setdefault(prefix + naming.canonical(name), role)
        return resolved

    def _override(self, name: str) -> Role | None:
        for pattern, role in self.overrides.items():
            if fnmatchcase(name, pattern):
                self.used.add(pattern)
                return role
        return None

    def check_patterns_used(self) -> None:
        """A pattern that names nothing is a typing error, not a wish."""
        for pattern in self.overrides.keys() - self.used:
            raise MupscaleError(f"roles: the pattern '{pattern}' matches no parameter or buffer of the model")

    def entries(self, kind: str) -> dict[str, Entry]:
        small = dict(_named(self.narrow, kind))
        large = dict(_named(self.wide, kind))
        advice = "the two models must be of one class and depth; only widths may differ"
        _same_names("the narrow model", small, "the wide model", large, advice, what=kind[:-1])
        tied = {group[0]: group for group in naming.aliases(_named(self.narrow, kind))}
        tied_wide = {group[0]: group for group in naming.aliases(_named(self.wide, kind))}
        if tied != tied_wide and kind == "parameters":
            odd = next(g for g in sorted({*tied.values()} ^ {*tied_wide.values()}) if len(g) > 1)
            raise MupscaleError(f"'{odd[0]}' is tied to '{odd[1]}' in one of the two models only; tie both or none")
        return {first: self._entry(group, small[first], large[first]) for first, group in tied.items()}

    def _entry(self, group: tuple[str, ...], small: Tensor, large: Tensor) -> Entry:
        name = group[0]
        if is_lazy(small) or is_lazy(large):
            raise MupscaleError(f"'{name}' is not initialised yet; run the lazy module on a batch first")
        if isinstance(small, nn.Parameter):
            for tensor in (small, large):
                check_dtype(name, tensor)
        if small.dim() != large.dim():
            raise MupscaleError(
                f"'{name}' has {small.dim()} dimensions in the narrow model and {large.dim()} in the wide"
            )
        roles = {self._oriented(self._role(alias, small, large), alias, small, large) for alias in group}
        role = roles.pop() if len(roles) == 1 else self._tied_readout(group, roles, small, large)
        return self._with_axes(group, role, small, large)

    def _role(self, name: str, small: Tensor, large: Tensor) -> Role:
        role = self._override(name) or self.roles.get(name)
        if role is not None:
            return role
        grown = [d for d in range(small.dim()) if small.shape[d] != large.shape[d] or self.is_width(name, d)]
        if len(grown) <= 1:
            return Role(out=tuple(grown))
        path, _, local = name.rpartition(".")
        cls = type(self.small[path]).__name__
        line = f"mupscale.Role(out={grown[0]}, in_={grown[1]})"
        advice = f"pass roles={{'{name}': {line}}}"
        if local.isidentifier():  # not in a ParameterList
            advice = f"write mupscale.register_roles({cls}, {local}={line}) or {advice}"
        raise MupscaleError(
            f"'{name}' of shape {tuple(small.shape)} → {tuple(large.shape)} grows along dimensions "
            f"{grown}, and {cls} does not tell which is output and which is input: {advice}, "
            f"or the other way round"
        )

    def _oriented(self, role: Role, name: str, small: Tensor, large: Tensor) -> Role:
        """The role with its dimensions narrowed to those that are widths, and checked to cover all that grow."""
        out, in_ = role.dims(small.dim())
        if not role.fits(small.dim()):
            raise MupscaleError(
                f"'{name}' of shape {tuple(small.shape)} cannot have Role(out={role.out}, in_={role.in_}): each of "
                f"its dimensions is output or input once; give it a pattern of its own in roles="
            )
        for d in range(small.dim()):
            if small.shape[d] != large.shape[d]:
                if d not in out + in_:
                    raise MupscaleError(
                        f"'{name}' of shape {tuple(small.shape)} → {tuple(large.shape)} grows along "
                        f"dimension {d}, which is no width axis of it; keep that size, or say what it "
                        f"is with roles={{'{name}': Role(…)}}"
                    )
                self._check_growth(name, d, small, large, role)
        keep = {d for d in out + in_ if small.shape[d] != large.shape[d] or self.is_width(name, d)}
        return replace(role, out=tuple(d for d in out if d in keep), in_=tuple(d for d in in_ if d in keep))

    def _check_growth(self, name: str, d: int, small: Tensor, large: Tensor, role: Role) -> None:
        n, wide = small.shape[d], large.shape[d]
        if not self.copying:
            return
        where = f"'{name}' of shape {tuple(small.shape)} → {tuple(large.shape)}"
        if wide < n:
            raise MupscaleError(f"{where}: dimension {d} becomes narrower; the target must be at least as wide")
        if n == 0 or wide % n:
            fits = ", ".join(str(n * k) for k in (2, 3, 4)) if n else "none"
            raise MupscaleError(f"{where}: dimension {d} is no multiple; widths that fit are {fits}, …")
        if role.uncopyable:
            raise MupscaleError(f"{where}: {role.uncopyable}")

    def _tied_readout(self, group: tuple[str, ...], roles: set[Role], small: Tensor, large: Tensor) -> Role:
        """One tensor used as embedding and as readout: it widens as the embedding, the readout's 1/k is folded."""
        as_output = [r for r in roles if r.out and not r.in_]
        as_input = [r for r in roles if r.in_ and not r.out]
        if len(roles) != 2 or not as_output or not as_input or as_output[0].out != as_input[0].in_:
            raise MupscaleError(
                f"tied parameters {', '.join(group)} play roles that contradict each other "
                f"({' and '.join(f'out={r.out}, in_={r.in_}' for r in roles)}); untie them, or pass "
                f"roles= for all names"
            )
        times = multiplier(math.prod(small.shape), math.prod(large.shape))
        self.readouts[group[0]] = (next(n for n in group if self._reads_out(n)), times)
        return as_output[0]

    def _reads_out(self, name: str) -> bool:
        role = self._override(name) or self.roles.get(name)
        return role is not None and role.in_ != ()

    def _with_axes(self, group: tuple[str, ...], role: Role, small: Tensor, large: Tensor) -> Entry:
        out, in_ = role.dims(small.dim())
        axes: dict[int, Axis] = {}
        for d in out + in_:
            block = role.out_block if d in out else role.in_block
            times = multiplier(small.shape[d], large.shape[d])
            sections = role.out_sections if d in out and times != 1 else ()
            axes[d] = Axis(times, block if times != 1 else 1, sections)
            if self.copying and times != 1 and not sections and small.shape[d] % block:
                raise MupscaleError(
                    f"'{group[0]}': dimension {d} of {small.shape[d]} units does not divide into blocks of {block}"
                )
        entry = Entry(tuple(small.shape), tuple(large.shape), axes, out, in_, 1, group)
        fold = role.fold(entry.rule.out, entry.rule.in_) if callable(role.fold) else role.fold
        return replace(entry, fold=_tidy(fold))

    def fold_tied_readouts(self, entries: dict[str, Entry]) -> dict[str, Entry]:
        """A tied readout wants W/k where the embedding wants W: the norm before it takes the 1/k."""
        if any(role.fold != 1 for role in self.overrides.values()):
            return entries  # the user says where it goes
        for embedding, (readout, times) in self.readouts.items():
            width = entries[embedding].narrow[entries[embedding].out[0]]
            for name in self._norm_before(readout, width):
                entries[name] = replace(entries[name], fold=_tidy(Fraction(1) / times))
        return entries

    def _norm_before(self, readout: str, width: int) -> list[str]:
        """The parameters of the norm that is the last parametrised module before the readout."""
        readout_path = readout.rpartition(".")[0]
        last = ""
        for path, module in self.small.items():
            own = [n for n, _ in module.named_parameters(recurse=False)]
            if own and path != readout_path and not _is_embedding(module):
                last = path
        module = self.small[last]
        gains = {f"{last}.{n}": p for n, p in module.named_parameters(recurse=False)}
        if "norm" in type(module).__name__.lower() and all(tuple(p.shape) == (width,) for p in gains.values()):
            return list(gains)
        raise MupscaleError(
            f"'{readout}' is tied to the embedding, so its 1/k must be folded into a norm with a gain "
            f"just before it, and none was found ('{last}' is a {type(module).__name__}). Untie the readout, end the "
            f"model with a LayerNorm or RMSNorm, or name the norm: roles={{'NORM.*': "
            f"mupscale.Role(out=0, fold=lambda out, in_: 1 / out)}}"
        )


def check_dtype(name: str, tensor: Tensor) -> None:
    """Refuse what cannot be copied and scaled: integers, quantised and complex numbers, 8-bit floats."""
    if tensor.dtype not in _DTYPES:
        raise MupscaleError(
            f"'{name}' has dtype {tensor.dtype}: only floating-point parameters of 16 bits or more can be widened; "
            f"dequantise the model or convert it, as with model.to(torch.bfloat16)"
        )


def _is_embedding(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding | nn.EmbeddingBag)


def _named(model: nn.Module, kind: str) -> list[tuple[str, Tensor]]:
    method = model.named_parameters if kind == "parameters" else model.named_buffers
    return [(naming.canonical(name), tensor) for name, tensor in method(remove_duplicate=False)]


def _same_names(
    left: str,
    ours: Mapping[str, Any],
    right: str,
    theirs: Mapping[str, Any],
    advice: str,
    what: str = "parameter",
) -> None:
    for here, there, missing in (
        (left, right, ours.keys() - theirs.keys()),
        (right, left, theirs.keys() - ours.keys()),
    ):
        if missing:
            first = next(n for n in (*ours, *theirs) if n in missing)
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise MupscaleError(f"{there} lacks the {what} '{first}'{more} that {here} has: {advice}")


def _tidy(number: Number) -> Number:
    """An int where a number is one."""
    return int(number) if number == int(number) else number


def _number_to_json(number: Number) -> int | float | str:
    return f"{number.numerator}/{number.denominator}" if isinstance(number, Fraction) else number


def _number_from_json(number: int | float | str) -> Number:
    return Fraction(number) if isinstance(number, str) else number


def _entry_to_json(entry: Entry) -> dict[str, Any]:
    axes = [[d, _number_to_json(a.times), a.block, [list(s) for s in a.sections]] for d, a in entry.axes.items()]
    return {
        "narrow": list(entry.narrow),
        "wide": list(entry.wide),
        "axes": axes,
        "out": list(entry.out),
        "in": list(entry.in_),
        "fold": _number_to_json(entry.fold),
        "names": list(entry.names),
    }


def _entry_from_json(content: dict[str, Any]) -> Entry:
    axes = {
        d: Axis(_number_from_json(times), block, tuple((a, b) for a, b in sections))
        for d, times, block, sections in content["axes"]
    }
    return Entry(
        tuple(content["narrow"]),
        tuple(content["wide"]),
        axes,
        tuple(content["out"]),
        tuple(content["in"]),
        _number_from_json(content["fold"]),
        tuple(content["names"]),
    )
