"""Two models side by side: which axes of each parameter grow, what they are to it, and so its Rule.

Copies want whole multiples, fresh units want whole blocks. Under μP alone nothing is copied or placed, so any size will
do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from fnmatch import fnmatchcase
from fractions import Fraction
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from mupscale.core import (
    Axis,
    Entry,
    Number,
    Plan,
    Role,
    check_dtype,
    check_same_names,
    index_of_old,
    multiplier,
    naming,
    plain_type,
    shapes_in_words,
    tidy,
    whole_blocks,
)
from mupscale.planning.first_guesses import (
    check_certain,
    check_tables_are_read,
    head_roles,
    is_certain_output,
    norm_before,
    norms_over_widths,
    offset_of_gain,
)
from mupscale.planning.role_registry import registered
from mupscale.system import MupscaleError, PlanError, as_asked, ways_out

How = Literal["copies", "fresh", "mup"]
"""What the wide model's other units are: copies of the old ones, fresh ones beside them, or all of them fresh."""


ONE_DEPTH = (
    "the two models must have the same class and depth; only widths may differ. To add blocks, make the plan with "
    "mupscale.plan_depth, where blocks= says which they are, or use a Family whose base names both: {'width': 64, "
    "'depth': 4}"
)


def find_uneven(narrow: nn.Module, wide: nn.Module) -> str:
    """The first parameter with a size that is no whole multiple of the narrow model's, with both shapes; or nothing."""
    theirs = naming.parameters(wide)
    pairs = [(name, p.shape, theirs[name].shape) for name, p in naming.parameters(narrow).items() if name in theirs]
    for name, small, large in pairs:
        if any(n and m % n for n, m in zip(small, large, strict=False)):
            return f"'{name}' of shape {tuple(small)} → {tuple(large)}"
    return ""


def check_axis(name: str, small: Tensor, large: Tensor, dim: int, role: Role, how: How) -> None:
    """Refuse an axis that cannot grow in this way from the narrow tensor to the wide one, with the reason."""
    n, wide = small.shape[dim], large.shape[dim]
    where = f"'{name}' of shape {tuple(small.shape)} → {tuple(large.shape)}"
    if how == "mup":
        return
    if wide < n:
        raise MupscaleError(f"{where}: dimension {dim} becomes narrower. The target must be at least as wide")
    if how == "copies" and (n == 0 or wide % n):
        fits = ", ".join(str(n * k) for k in (2, 3, 4)) if n else "none"
        raise MupscaleError(
            f"{where}: dimension {dim} does not grow by a whole multiple. Sizes that fit: {fits}, … (if the axis joins "
            "a width with a part that does not grow, none fits: give each part its own layer). Fresh units fit any "
            f"larger width: {as_asked('grow=mupscale.Fresh()', '--how fresh')}"
        )
    if n == 0:
        raise MupscaleError(f"{where}: dimension {dim} has no units to grow from")
    if why := role.why_not[how == "fresh"]:
        raise MupscaleError(f"{where}: {why}")


def check_blocks(entries: Mapping[str, Entry], how: How) -> None:
    """Refuse an axis whose blocks do not fit into it, or would be cut in the wide one, with sizes at which none is."""
    growing = [(name, e.narrow[d], d, axis) for name, e in entries.items() for d, axis in e.axes.items()]
    for name, n, dim, axis in growing if how != "mup" else ():
        if axis.times == 1:
            continue
        if axis.sections and (whole := sum(length for length, _ in axis.sections)) != n:
            as_parts = "pass a batch, inputs=, to try them as parts of the whole"
            raise MupscaleError(
                f"'{name}': dimension {dim} has {n} units, but the sections of its role add up to {whole}. Give "
                f"sections for this width{ways_out(', or ', inputs=as_parts)}"
            )
        if how == "copies" and not axis.sections and n % axis.block:
            raise MupscaleError(f"'{name}': dimension {dim} of {n} units does not divide into blocks of {axis.block}")
        if how == "fresh":
            try:
                for length, block in axis.sections or ((n, axis.block),):
                    whole_blocks(axis, length, block)
            except MupscaleError as error:
                alike = [(units, other) for _, units, _, other in growing if other.times == axis.times]
                raise MupscaleError(f"'{name}', dimension {dim}: {error}{_sizes_that_fit(n, alike)}") from None


def _sizes_that_fit(n: int, alike: Sequence[tuple[int, Axis]]) -> str:
    """The sizes nearest to the one asked for, of an axis of n units, at which no axis that grows alike is cut."""
    parts = [part for units, axis in alike for part in axis.sections or ((units, axis.block),)]
    if any(length % block for length, block in parts):
        return ""
    times, common = Fraction(alike[0][1].times), math.gcd(*(length // block for length, block in parts))
    factors = [Fraction(k, common) for k in (math.floor(times * common), math.ceil(times * common)) if k > common]
    width = min(units for units, _ in alike)
    fits, widths = (" or ".join(str(units * factor) for factor in factors) for units in (n, width))
    return f"; take {fits}" + (f", that is {widths} instead of {width * times}" if width != n else "")


def check_read_widths(
    entries: Mapping[str, Entry], told: Collection[str], buffers: Mapping[str, Entry] = MappingProxyType({})
) -> None:
    """Refuse an input axis that grows by a factor by which nothing in the model grows that could be read.

    A width that is joined with inputs that do not grow is such an axis: where its old units lie cannot be told.
    told: parameters whose roles the user gave, who knows better. buffers: which may write units, too.
    """
    grown = {Fraction(e.axes[d].times) for e in (*entries.values(), *buffers.values()) for d in e.out if d in e.axes}
    for name, entry in entries.items():
        for d in entry.in_:
            if name not in told and entry.axes[d].times != 1 and Fraction(entry.axes[d].times) not in grown:
                raise MupscaleError(
                    f"'{name}' reads {entry.narrow[d]} → {entry.wide[d]} inputs, but nothing in the model grows by "
                    "that factor. Does it join a width with a part that does not grow? Give each part its own layer"
                )


def build_plan(
    narrow: nn.Module,
    wide: nn.Module,
    *,
    roles: Mapping[str, Role] | None = None,
    how: How = "copies",
    is_width: Callable[[str, int], bool] = lambda name, dim: False,
    assume: bool = False,
) -> Plan:
    """The one code path of widening by copies (integer multipliers), by fresh units and of μP (real ones).

    is_width tells of axes that are widths of the family although they may not grow here.
    assume: take parameters that nobody can tell for outputs, in a plan that is tried before it is used.
    """
    if narrow is wide:
        raise MupscaleError("narrow and wide are the same module. Build a second, wider one")
    walk = _Walk(narrow, wide, dict(roles or {}), how, is_width, assume)
    parameters = walk.entries("parameters")
    check_blocks(parameters, how)
    check_certain(walk.uncertain)
    if not assume:
        check_tables_are_read(walk.small, parameters, walk.told(parameters))
    parameters = walk.fold_tied_readouts(parameters)
    buffers = walk.entries("buffers")
    check_blocks(buffers, how)
    walk.check_patterns_used()
    if how == "fresh":
        walk.check_kept(parameters)
        check_read_widths(parameters, walk.told(parameters), buffers)
    norms = norms_over_widths(walk.small, parameters) if how == "fresh" else {}
    for name in (n for n, kind in norms.items() if kind != "bias" and not parameters[n].offset):
        path, _, local = name.rpartition(".")
        parameters[name] = parameters[name].with_constants(offset=offset_of_gain(walk.small[path], local))
    return Plan(parameters, buffers, mup=how != "copies").with_initial("norm", norms)


class _Walk:
    """Two modules side by side, and the role of everything in them."""

    def __init__(
        self,
        narrow: nn.Module,
        wide: nn.Module,
        overrides: dict[str, Role],
        how: How,
        is_width: Callable[[str, int], bool],
        assume: bool,
    ) -> None:
        self.narrow, self.wide = naming.unwrap(narrow), naming.unwrap(wide)
        self.small, self.large = naming.modules(narrow), naming.modules(wide)
        self.overrides, self.how, self.is_width, self.assume = overrides, how, is_width, assume
        self.readouts: dict[str, tuple[str, Number, Number]] = {}
        self.unkept: set[str] = set()
        self.uncertain: dict[str, tuple[str, int]] = {}
        self._compare_modules()
        self.roles = self._collect_roles()

    def _compare_modules(self) -> None:
        check_same_names("the narrow model", self.small, "the wide model", self.large, ONE_DEPTH, what="module")
        for path, module in self.small.items():
            ours, theirs = plain_type(module), plain_type(self.large[path])
            if ours is not theirs:
                raise MupscaleError(
                    f"'{path or 'the model'}' is a {ours.__name__} in the narrow model and a "
                    f"{theirs.__name__} in the wide one; {ONE_DEPTH}"
                )
            if ours.__module__.startswith("torch.ao.nn") and ".quantized" in ours.__module__:
                raise MupscaleError(
                    f"'{path or 'the model'}' is a quantised {ours.__name__}: only floating-point weights can be "
                    "widened. Widen the model first, then quantise the wide one"
                )

    def _collect_roles(self) -> dict[str, Role]:
        """What the modules say, parents before children."""
        resolved: dict[str, Role] = {}
        for path, module in self.small.items():
            prefix = f"{path}." if path else ""
            roles: dict[str, Role] = {}
            try:
                if (function := registered(module)) is not None:
                    roles.update(function(module, self.large[path]))
                roles = {**head_roles(module, self.large[path], path), **roles}
            except Exception as error:  # a refusal, or whatever a function that somebody registered raises
                names = {name: prefix + naming.canonical(name) for name, _ in module.named_parameters()}
                given = {name: self._override(full) for name, full in names.items()}
                told = (given[n] or resolved.get(full) or roles.get(n) for n, full in names.items())
                with_blocks = any(role and role.has_blocks_or_fold for role in given.values())
                if not (self.assume or with_blocks or all(told)):
                    if isinstance(error, MupscaleError):
                        raise
                    raise MupscaleError(
                        f"the function that gives the roles of '{path or 'the model'}' ({type(module).__name__}) "
                        f"fails: {type(error).__name__}: {error}"
                    ) from error.__cause__
            for name, role in roles.items():
                resolved.setdefault(prefix + naming.canonical(name), role)
        return resolved

    def _override(self, name: str) -> Role | None:
        return find_role(self.overrides, name)

    def check_patterns_used(self) -> None:
        """A pattern that names nothing is a typing error, not a wish."""
        names = {name: None for kind in ("parameters", "buffers") for name, _ in _named(self.narrow, kind)}
        for pattern in self.overrides:
            if pattern not in names and not any(fnmatchcase(name, pattern) for name in names):
                raise MupscaleError(f"roles: the pattern '{pattern}' matches no parameter or buffer of the model")

    def entries(self, kind: str) -> dict[str, Entry]:
        small = dict(_named(self.narrow, kind))
        large = dict(_named(self.wide, kind))
        check_same_names("the narrow model", small, "the wide model", large, ONE_DEPTH, what=kind[:-1])
        tied = {group[0]: group for group in naming.aliases(_named(self.narrow, kind))}
        tied_wide = {group[0]: group for group in naming.aliases(_named(self.wide, kind))}
        if tied != tied_wide and kind == "parameters":
            odd = next(g for g in sorted({*tied.values()} ^ {*tied_wide.values()}) if len(g) > 1)
            raise MupscaleError(f"'{odd[0]}' is tied to '{odd[1]}' in only one of the two models. Tie both or neither")
        entries = {first: self._entry(group, small[first], large[first]) for first, group in tied.items()}
        if kind == "parameters" or self.how == "mup":
            return entries
        return {n: entry for n, entry in entries.items() if not self._is_own(n, entry, small[n], large[n])}

    def _is_own(self, name: str, entry: Entry, small: Tensor, large: Tensor) -> bool:
        """Whether the wide model computes a buffer of its own, such as √width, that is not what growing this one gives.

        What makes up for it is in the parameters, which only a trial can show: an error where there is none.
        """
        path, _, local = name.rpartition(".")
        saved = local not in self.small[path]._non_persistent_buffers_set
        constant = entry.narrow == entry.wide and small.numel() != 1  # a single number may be √width
        if saved or constant or self._override(name) is not None:
            return False
        if not small.is_meta and not large.is_meta:
            at_old = large[index_of_old(entry.narrow, entry.axes)] if self.how == "fresh" else large
            grown = small if self.how == "fresh" else entry.widened(small, factor=entry.rule.weight)
            if torch.equal(grown, at_old.to(grown)):
                return False
            if self.assume:
                return True
        elif entry.narrow == entry.wide:
            return self.assume
        elif not small.is_meta and small.unique().numel() <= 1:
            return False
        copy_it = f"pass roles={{'{name}': mupscale.Role(out={entry.out})}} to copy it anyway"
        raise MupscaleError(
            f"the buffer '{name}' of shape {entry.narrow} → {entry.wide} depends on the width and is not saved with "
            "the model (persistent=False). The wide model would lose its copy when it is built again. For rotary "
            "frequencies, grow the number of heads instead of head_dim. Otherwise register it with "
            f"persistent=True{ways_out(', or ', roles=copy_it)}"
        )

    def _entry(self, group: tuple[str, ...], small: Tensor, large: Tensor) -> Entry:
        name = group[0]
        if is_lazy(small) or is_lazy(large):
            raise MupscaleError(f"'{name}' is not initialised yet. Run the lazy module on a batch first")
        if isinstance(small, nn.Parameter):
            for tensor in (small, large):
                check_dtype(name, tensor)
        if small.dim() != large.dim():
            raise MupscaleError(
                f"'{name}' has {small.dim()} dimensions in the narrow model and {large.dim()} in the wide"
            )
        roles = {alias: self._oriented(self._role(alias, small, large), alias, small, large) for alias in group}
        given = [roles[alias] for alias in group if self._override(alias) is not None]
        for alias in group:  # a role given for one name serves for others that are used alike
            if self._override(alias) is None:
                alike = (role for role in given if (role.out, role.in_) == (roles[alias].out, roles[alias].in_))
                roles[alias] = next(alike, roles[alias])
        role = roles[name] if len({*roles.values()}) == 1 else self._tied_readout(roles, small, large)
        return self._with_axes(group, role, small, large)

    def _role(self, name: str, small: Tensor, large: Tensor) -> Role:
        role = self._override(name) or self.roles.get(name)
        if role is not None:
            return role
        grown = [d for d in range(small.dim()) if small.shape[d] != large.shape[d] or self.is_width(name, d)]
        path, _, local = name.rpartition(".")
        kind, sizes = type(self.small[path]).__name__, shapes_in_words(tuple(small.shape), tuple(large.shape))
        if len(grown) > 1:
            line = f"mupscale.Role(out={grown[0]}, in_={grown[1]})"
            linear = f"if dimension {grown[1]} is summed over, as in nn.Linear, and the other way round if not"
            batch = "pass a batch, inputs=, and a run of the model shows it"
            ways = ways_out(inputs=batch, roles=f"pass roles={{'{name}': {line}}} {linear}")
            raise PlanError(
                f"'{name}' of shape {sizes} grows along dimensions {grown}, but {kind} does not show which is output "
                f"and which is input{ways}"
            )
        is_doubtful = bool(grown) and isinstance(small, nn.Parameter) and not self.assume
        if is_doubtful and not is_certain_output(self.small[path], local, small, grown[0]):
            self.uncertain[name] = f"{kind}, {sizes}", grown[0]
        return Role(out=tuple(grown))

    def _oriented(self, role: Role, name: str, small: Tensor, large: Tensor) -> Role:
        """The role with its dimensions narrowed to those that are widths, and checked to cover all that grow."""
        out, in_ = role.dims(small.dim())
        if not role.fits(small.dim()):
            raise MupscaleError(
                f"'{name}' of shape {tuple(small.shape)} cannot have Role(out={role.out}, in_={role.in_}): each "
                "dimension is output or input, once. Give it its own pattern in roles="
            )
        for d in range(small.dim()):
            if small.shape[d] != large.shape[d]:
                if d not in out + in_:
                    if (given := self._override(name)) is not None:
                        raise MupscaleError(
                            f"the role given for '{name}', {given}, leaves out dimension {d}, which grows: "
                            f"{tuple(small.shape)} → {tuple(large.shape)}. Say whether that is out= or in_=, or leave "
                            "the role out"
                        )
                    say_it = f"say what it is with roles={{'{name}': Role(…)}}"
                    what = "a number of classes or of positions"
                    if isinstance(self.small[name.rpartition(".")[0]], nn.Embedding):
                        what = "the vocabulary, or a number of positions"
                    raise MupscaleError(
                        f"'{name}' of shape {tuple(small.shape)} → {tuple(large.shape)} grows along dimension {d}, "
                        f"from {small.shape[d]} to {large.shape[d]}, but that dimension is not a width: is it {what}? "
                        f"Keep that size{ways_out(', or ', roles=say_it)}"
                    )
                check_axis(name, small, large, d, role, self.how)
        keep = {d for d in out + in_ if small.shape[d] != large.shape[d] or self.is_width(name, d)}
        return replace(role, out=tuple(d for d in out if d in keep), in_=tuple(d for d in in_ if d in keep))

    def _tied_readout(self, roles: Mapping[str, Role], small: Tensor, large: Tensor) -> Role:
        """One tensor used as embedding and as readout: it widens as the embedding, the readout's 1/k is folded.

        roles: by all names of the tensor.
        """
        group, distinct = tuple(roles), {*roles.values()}
        as_output = [r for r in distinct if r.out and not r.in_]
        as_input = [r for r in distinct if r.in_ and not r.out]
        if len(distinct) != 2 or not as_output or not as_input or as_output[0].out != as_input[0].in_:
            raise MupscaleError(
                f"tied parameters {', '.join(group)} have contradictory roles "
                f"({'; '.join(f'{name}: {role}' for name, role in roles.items())}); untie "
                f"them{ways_out(', or ', roles='pass one role for all names in roles=')}"
            )
        own = self._with_axes(group, as_output[0], small, large)  # its constants meet the readout, too
        times = multiplier(math.prod(small.shape), math.prod(large.shape))
        fold = as_input[0].fold
        divided = Fraction(1) * (fold(1, times) if callable(fold) else fold)
        summed = Fraction(1) * times * own.fold
        if not math.isclose(summed, divided) or self.how == "fresh":  # a MuSharedReadout divides by its width itself
            told = ((name, self._override(name) or self.roles.get(name)) for name in group)
            readout = next(name for name, role in told if role is not None and role.in_ != ())
            self.readouts[group[0]] = (readout, tidy(summed / divided), tidy(divided / own.keep))
        return as_output[0]

    def _with_axes(self, group: tuple[str, ...], role: Role, small: Tensor, large: Tensor) -> Entry:
        out, in_ = role.dims(small.dim())
        axes: dict[int, Axis] = {}
        for d in out + in_:
            times, axis = multiplier(small.shape[d], large.shape[d]), role.out_axis if d in out else role.in_axis
            if times != 1 and self.assume:  # where they are tried, sections are parts of any width, and no slip passes
                axis = axis.at(small.shape[d])
            axes[d] = replace(axis if times != 1 else Axis(), times=times, side="out" if d in out else "in")
        entry = Entry(tuple(small.shape), tuple(large.shape), axes, names=group)
        fold, keep = (f(entry.rule.out, entry.rule.in_) if callable(f) else f for f in (role.fold, role.keep))
        if keep is None and fold != 1:
            self.unkept.add(group[0])
        keep = tidy(1 if keep is None else keep)
        return entry.with_constants(fold=tidy(fold or 1), keep=keep, offset=role.offset)

    def fold_tied_readouts(self, entries: dict[str, Entry]) -> dict[str, Entry]:
        """A tied readout wants W/k where the embedding wants W: the norm before it takes the 1/k.

        Beside fresh units, the old ones' gains stay, unless the model divides by its width itself.
        """
        for embedding, (readout, times, keep) in self.readouts.items():
            others = {name: entry for name, entry in entries.items() if name != embedding}
            norm = [
                name
                for name, entry in others.items()
                if (role := self._override(name)) and role.fold != 1 and math.isclose(entry.fold * times, 1)
            ]
            if not norm and (times != 1 or keep != 1):
                width = entries[embedding].narrow[entries[embedding].out[0]]
                with suppress(PlanError) if self.assume else nullcontext():  # a run shows what takes it
                    norm = norm_before(self.small, readout, width)
                entries.update({name: entries[name].with_constants(fold=tidy(Fraction(1) / times)) for name in norm})
            self.unkept -= set(norm)  # the user may have said where the fold goes
            unsaid = [name for name in norm if (role := self._override(name)) is None or role.keep is None]
            entries.update({name: entries[name].with_constants(keep=keep) for name in unsaid})
        return entries

    def check_kept(self, entries: Mapping[str, Entry]) -> None:
        """Beside fresh units, a constant that copies need folded in may be another one, which has to be told."""
        remedy = (
            "The batch shows no such factor: new units change what the model computes from the old ones, as a softmax "
            "over units does. Copies fit at whole multiples of the width"
            if self.assume
            else "With a batch (inputs=) and a wide model at a whole multiple of the width, a run finds it"
        )
        for name in entries:
            if name in self.unkept:
                raise MupscaleError(
                    f"'{name}' has fold={float(entries[name].fold):.6g} for copies; say what to multiply the weights "
                    f"of old units by if the other units are fresh: Role(…, fold=…, keep=…). {remedy}"
                )

    def told(self, entries: Mapping[str, Entry]) -> set[str]:
        """Parameters whose roles the user gave."""
        return {name for name, entry in entries.items() if any(self._override(alias) for alias in entry.names)}


def find_role(roles: Mapping[str, Role], name: str) -> Role | None:
    """The role of the first pattern that the name fits."""
    return next((role for pattern, role in roles.items() if fnmatchcase(name, pattern)), None)


def _named(model: nn.Module, kind: str) -> list[tuple[str, Tensor]]:
    method = model.named_parameters if kind == "parameters" else model.named_buffers
    return [(naming.canonical(name), tensor) for name, tensor in method(remove_duplicate=False)]
