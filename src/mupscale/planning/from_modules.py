"""Two models side by side: which axes of each parameter grow, what they are to it, and so its Rule.

Only a module's type can tell which axis is its output: a Linear stores (out, in), an Embedding (tokens, out),
transformers' Conv1D (in, out), a ConvTranspose (in, out/groups, …). A registry has that, which users extend. Whether
an axis grows is read off the shapes. Copies want whole multiples, fresh units whole blocks; under μP alone nothing is
copied or placed, so any size will do. What names and attributes say of heads, bare parameters and norms is a first
guess, which a run may contradict.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from fnmatch import fnmatchcase
from fractions import Fraction
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrizations
from torch.nn.utils.spectral_norm import SpectralNorm

from mupscale.core import (
    Axis,
    Entry,
    Number,
    Plan,
    Role,
    check_dtype,
    check_same_names,
    copy_model,
    index_of_old,
    multiplier,
    naming,
    plain_type,
    shapes_in_words,
    tidy,
    whole_blocks,
)
from mupscale.planning.state_spaces import state_space_roles
from mupscale.system import (
    MupscaleError,
    PlanError,
    as_asked,
    checks_arguments,
    name_of_group,
    pattern_of_name,
    ways_out,
)

Roles = Mapping[str, Role]
RoleFunction = Callable[[Any, Any], Roles]
"""From the narrow and the wide module of one kind to the roles of its parameters and buffers, by local name.

A name may be dotted, to speak for a child's parameter; what a parent says goes before what the child says.
"""

_REGISTRY: dict[type[nn.Module], RoleFunction] = {}

OUTPUT = Role(out=0)
MATRIX = Role(out=0, in_=1)


@checks_arguments
def register_roles(module: type[nn.Module], function: RoleFunction | None = None, /, **roles: Role) -> None:
    """Teach the library a module type: `register_roles(Experts, w_up=Role(out=1, in_=2))`, or give a function.

    Roles by name are added to what is known of the class or of the class it is derived from; a function stands alone.

    >>> import torch
    >>> import mupscale as mu
    >>> class Experts(nn.Module):
    ...     def __init__(self, width: int) -> None:
    ...         super().__init__()
    ...         self.up = nn.Parameter(torch.zeros(3, width, width))  # expert, output, input
    >>> mu.register_roles(Experts, up=mu.Role(out=1, in_=2))
    >>> mu.plan(Experts(4), Experts(8))["up"].rule
    Rule(out=2, in_=2, fold=1)
    """
    if (function is None) == (not roles):
        raise MupscaleError("register_roles takes either a function, or one Role per parameter name")
    inherited = next((_REGISTRY[cls] for cls in module.__mro__ if cls in _REGISTRY), None)
    if function is None and inherited is not None:
        _REGISTRY[module] = lambda narrow, wide: {**inherited(narrow, wide), **roles}
    else:
        _REGISTRY[module] = function if function is not None else lambda narrow, wide: roles


def registered(module: nn.Module) -> RoleFunction | None:
    """The role function of the nearest registered base class; classes of other packages are known by their names."""
    for cls in type(module).__mro__:
        if cls in _REGISTRY:
            return _REGISTRY[cls]
        if cls.__name__ == "Conv1D" and hasattr(module, "nf"):
            return lambda narrow, wide: {"weight": Role(out=1, in_=0), "bias": OUTPUT}
        if cls.__name__ == "MuReadout" and hasattr(module, "width_mult"):
            return _mup_readout
    return None


def is_torchs_own(module: nn.Module) -> bool:
    """Whether the module is, or is derived from, one of torch's registered layers."""
    return any(cls in _REGISTRY and cls.__module__.startswith("torch.") for cls in type(module).__mro__)


def _mup_readout(narrow: Any, wide: Any) -> Roles:
    """The `mup` package's readouts divide by the width in forward: what is left for the weight is fold = in_."""
    ratio = _mup_multiplier(narrow, "narrow") / _mup_multiplier(wide, "wide")
    undone: Callable[[Number, Number], Number] = lambda out, in_: in_ if math.isclose(ratio, in_) else ratio  # noqa: E731
    weight = replace(MATRIX, fold=undone, keep=undone)
    return {"weight": weight, "bias": OUTPUT}


def _mup_multiplier(readout: Any, side: str) -> float:
    """What forward multiplies a MuReadout's input by."""
    if not hasattr(readout.weight, "infshape"):
        raise MupscaleError(
            f"the {side} model has a {type(readout).__name__} without base shapes: call mup.set_base_shapes(model, "
            "base) first, with one base for both models (rescale_params=False if the weights are already trained)"
        )
    return float(readout.output_mult / readout.width_mult())


def _grouped(weight: Role) -> RoleFunction:
    """Of convolutions and GroupNorms, whose channels lie in groups."""

    def roles(narrow: Any, wide: Any) -> Roles:
        why = _split_groups(narrow, wide)
        return {"weight": replace(weight, why_not=(why, why)), "bias": replace(OUTPUT, why_not=(why, why))}

    return roles


def _conv_transpose(narrow: nn.ConvTranspose2d, wide: nn.ConvTranspose2d) -> Roles:
    per_group = {m.in_channels // m.groups for m in (narrow, wide)}
    if narrow.groups != wide.groups and len(per_group) > 1:
        raise MupscaleError(
            f"{type(narrow).__name__} goes from {narrow.groups} to {wide.groups} groups and from {narrow.in_channels} "
            f"to {wide.in_channels} inputs, so its first axis is output and input at once. Keep the number of groups, "
            "or the inputs of each"
        )
    outputs = narrow.groups != wide.groups or (per_group == {1} and narrow.groups > 1)  # an input is its group's own
    return _grouped(Role(out=(0, 1)) if outputs else Role(out=1, in_=0))(narrow, wide)


def _split_groups(narrow: Any, wide: Any) -> str:
    """Groups of one channel (depthwise) grow like channels; larger ones would need blocks all along the wire."""
    few, many = (getattr(m, "groups", None) or m.num_groups for m in (narrow, wide))
    channels, wide_channels = (
        m.num_channels if isinstance(m, nn.GroupNorm) else max(m.in_channels, m.out_channels) for m in (narrow, wide)
    )
    if many == few or (channels == few and (many % few == 0 or wide_channels == many)):
        return ""
    return (
        f"{type(narrow).__name__} goes from {few} to {many} groups of more than one channel, and copying channels one "
        f"by one would split or mix its groups"
        f"{ways_out(keep='keep the number of groups', roles='pass roles= with blocks for all on these channels')}"
    )


def _layer_norm(narrow: nn.LayerNorm, wide: nn.LayerNorm) -> Roles:
    every = Role(out=tuple(range(len(narrow.normalized_shape))))
    return {"weight": every, "bias": every}


def _recurrent(narrow: nn.RNNBase, wide: nn.RNNBase) -> Roles:
    """Gates are packed along the output axis; copying units one by one keeps each gate's slice together."""
    return {name: MATRIX if p.dim() == 2 else OUTPUT for name, p in narrow.named_parameters(recurse=False)}


def _whole_heads(narrow: nn.MultiheadAttention, wide: nn.MultiheadAttention) -> str:
    """How the width is to be chosen so that heads stay as they are."""
    head, width = narrow.head_dim, wide.embed_dim
    if width % head == 0:
        return f"Grow num_heads instead ({narrow.num_heads} → {width // head})"
    below = width // head * head
    grows = width > narrow.embed_dim
    first = below if below > (narrow.embed_dim if grows else 0) else below + head
    return (
        f"Choose a multiple of {head} for the width, such as {first} or {first + head}, with num_heads of "
        f"{first // head} or {first // head + 1}"
    )


def _multihead_attention(narrow: nn.MultiheadAttention, wide: nn.MultiheadAttention) -> Roles:
    if wide.head_dim != narrow.head_dim:
        raise MupscaleError(
            f"nn.MultiheadAttention with head_dim {narrow.head_dim} → {wide.head_dim}: its attention scales as "
            "1/√head_dim, so the query part of one packed tensor would need its own learning rate. "
            f"{_whole_heads(narrow, wide)}"
        )
    head = narrow.head_dim
    heads_out, bias = Role(out=0, in_=1, out_block=head), Role(out=0, out_block=head)
    projections = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")
    return {
        **dict.fromkeys(projections, heads_out),
        "in_proj_bias": bias,
        "bias_k": Role(out=2, out_block=head),
        "bias_v": Role(out=2, out_block=head),
        "out_proj.weight": Role(out=0, in_=1, in_block=head),
        "out_proj.bias": OUTPUT,
    }


def _length_one(out: Number, in_: Number) -> float:
    """Copies of a vector of length one are longer, unless each is divided by this root."""
    return 1 / math.sqrt(out)


_SINGULAR_VECTOR = Role(out=0, fold=_length_one)


def _singular_vectors(module: nn.Module) -> Roles:
    """Those that a spectral norm keeps: as a parametrization in itself, as a hook in the module whose weight it has."""
    if isinstance(module, parametrizations._SpectralNorm):
        return {"_u": _SINGULAR_VECTOR, "_v": _SINGULAR_VECTOR}
    hooks = (hook for hook in module._forward_pre_hooks.values() if isinstance(hook, SpectralNorm))
    return {f"{hook.name}_{side}": _SINGULAR_VECTOR for hook in hooks for side in ("u", "v")}


register_roles(nn.Linear, weight=MATRIX, bias=OUTPUT)
register_roles(nn.Bilinear, weight=Role(out=0, in_=(1, 2)), bias=OUTPUT)
register_roles(nn.Embedding, weight=Role(out=1))
register_roles(nn.EmbeddingBag, weight=Role(out=1))
register_roles(nn.RMSNorm, _layer_norm)
register_roles(nn.LayerNorm, _layer_norm)
register_roles(nn.GroupNorm, _grouped(OUTPUT))
register_roles(nn.PReLU, weight=OUTPUT)
register_roles(nn.RNNBase, _recurrent)
register_roles(nn.RNNCellBase, _recurrent)
register_roles(nn.MultiheadAttention, _multihead_attention)
register_roles(  # BatchNorm and InstanceNorm of every dimension
    nn.modules.batchnorm._NormBase, weight=OUTPUT, bias=OUTPUT, running_mean=OUTPUT, running_var=OUTPUT
)
for _module in (nn.Conv1d, nn.Conv2d, nn.Conv3d):
    register_roles(_module, _grouped(MATRIX))
for _transposed in (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d):
    register_roles(_transposed, _conv_transpose)


How = Literal["copies", "fresh", "mup"]
"""What the wide model's other units are: copies of the old ones, fresh ones beside them, or all of them fresh."""


ONE_DEPTH = (
    "the two models must have the same class and depth; only widths may differ. To add blocks, make the plan with "
    "mupscale.plan_depth, where blocks= says which they are, or use a Family whose base names both sizes as "
    "your function does, for example {'hidden': 64, 'layers': 4}"
)


def find_uneven(narrow: nn.Module, wide: nn.Module) -> str:
    """The first parameter with a size that is no whole multiple of the narrow model's, with both shapes; or nothing."""
    theirs = naming.parameters(wide)
    pairs = [(name, p.shape, theirs[name].shape) for name, p in naming.parameters(narrow).items() if name in theirs]
    for name, small, large in pairs:
        if any(n and m % n for n, m in zip(small, large, strict=False)):
            return f"'{name}' of shape {tuple(small)} → {tuple(large)}"
    return ""


def most_common_ratio(sizes: Iterable[tuple[int, int]]) -> Fraction:
    """By what the most sizes grow, of these pairs; by the larger ratio where two are as common, and 1 for none."""
    ratios = Counter(Fraction(wide, n) for n, wide in sizes if n and wide and n != wide)
    return max(ratios, key=lambda ratio: (ratios[ratio], ratio), default=Fraction(1))


def paired_sizes(narrow: nn.Module, wide: nn.Module) -> Iterator[tuple[int, int]]:
    """The sizes of parameters that both models have, in pairs."""
    theirs = naming.parameters(wide)
    for name, p in naming.parameters(narrow).items():
        if name in theirs and not (is_lazy(p) or is_lazy(theirs[name])):
            yield from zip(p.shape, theirs[name].shape, strict=False)


def count_staying(n: int, wide: int, times: Fraction) -> int:
    """How many of n units stay, if the others grow so many times and there are `wide` then; 0 where none fit."""
    if times <= 1:
        return 0
    staying = (times * n - wide) / (times - 1)
    return int(staying) if staying.denominator == 1 and 0 < staying < n else 0


def joins_what_stays(narrow: nn.Module, wide: nn.Module) -> bool:
    """Whether some size looks like whole widths that grow as most sizes do, and a part that stays."""
    sizes = list(paired_sizes(narrow, wide))
    times = most_common_ratio(sizes)
    unit = math.gcd(*(n for n, m in sizes if m != n and m == n * times))
    staying = [(n, count_staying(n, m, times)) for n, m in sizes]
    return any(count and (n - count) % unit == 0 for n, count in staying)


def why_joined(name: str, n: int, wide: int, times: Fraction) -> str:
    """In words, that inputs are a concatenation of units that grow so many times and some that stay; else nothing."""
    staying = count_staying(n, wide, times)
    if not staying:
        return ""
    batch = "pass a batch, inputs=, and a run of the model shows it"
    role = f"say it: mupscale.Role(out=0, in_=1, in_block=(({n - staying}, 1), ({staying}, 0))) if the latter come last"
    ways = ways_out(inputs=batch, roles=role, apart="give each part a layer of its own, and add what the layers give")
    return (
        f"'{name}' reads {n} → {wide} inputs: a concatenation of {n - staying} → {wide - staying} that grow with the "
        f"model and {staying} that {'stays' if staying == 1 else 'stay'}. Where these lie is not known{ways}"
    )


def check_axis(
    name: str, small: Tensor, large: Tensor, dim: int, role: Role, how: How, times: Fraction = Fraction(1)
) -> None:
    """Refuse an axis that cannot grow in this way from the narrow tensor to the wide one, with the reason.

    times: by what most sizes of the model grow.
    """
    n, wide = small.shape[dim], large.shape[dim]
    where = f"'{name}' of shape {tuple(small.shape)} → {tuple(large.shape)}"
    if how == "mup":
        return
    if wide < n:
        raise MupscaleError(f"{where}: dimension {dim} becomes narrower. The target must be at least as wide")
    is_input = dim in role.dims(small.dim())[1]
    staying = (role.in_axis if is_input else role.out_axis).staying
    if staying and not is_input:
        raise MupscaleError(
            f"{where}: along dimension {dim}, {staying} of the outputs {'stays' if staying == 1 else 'stay'} while the "
            "others grow. Only inputs can do that: give these outputs a layer of their own"
        )
    if how == "copies" and (n <= staying or (wide - staying) % (n - staying)):
        if is_input and not staying and (joined := why_joined(name, n, wide, times)):
            raise PlanError(joined)
        fits = ", ".join(str(n * k) for k in (2, 3, 4)) if n else "none"
        fresh = as_asked("grow=mupscale.Fresh()", "--how fresh")
        raise MupscaleError(
            f"{where}: dimension {dim} does not grow by a whole multiple. Sizes that fit: {fits}, … (if the axis joins "
            "a width with a part that does not grow, none fits: give each part its own layer)"
            f"{ways_out('. ', fresh=f'Fresh units fit any larger width: {fresh}')}"
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
                    if block:
                        whole_blocks(axis, length, block)
            except MupscaleError as error:
                alike = [(units, other) for _, units, _, other in growing if other.times == axis.times]
                raise MupscaleError(f"'{name}', dimension {dim}: {error}{_sizes_that_fit(n, alike)}") from None


def _sizes_that_fit(n: int, alike: Sequence[tuple[int, Axis]]) -> str:
    """The sizes nearest to the one asked for, of an axis of n units, at which no axis that grows alike is cut."""
    each = (axis.sections or ((units, axis.block),) for units, axis in alike)
    parts = [(length, block) for sections in each for length, block in sections if block]
    if any(length % block for length, block in parts):
        return ""
    times, common = Fraction(alike[0][1].times), math.gcd(*(length // block for length, block in parts))
    factors = [Fraction(k, common) for k in (math.floor(times * common), math.ceil(times * common)) if k > common]
    width = min(units for units, _ in alike)
    fits, widths = (" or ".join(str(units * factor) for factor in factors) for units in (n, width))
    return f"; take {fits}" + (f", that is {widths} instead of {width * times}" if width != n else "")


def check_read_widths(entries: Mapping[str, Entry], told: Collection[str], buffers: Mapping[str, Entry]) -> None:
    """Refuse an input axis that grows by a factor by which nothing in the model grows that could be read.

    A width that is joined with inputs that do not grow is such an axis: where its old units lie cannot be told.
    told: parameters whose roles the user gave, who knows better. buffers: which may write units, too.
    """
    grown = {Fraction(e.axes[d].times) for e in (*entries.values(), *buffers.values()) for d in e.out if d in e.axes}
    times = most_common_ratio(pair for e in entries.values() for pair in zip(e.narrow, e.wide, strict=True))
    for name, entry in entries.items():
        for d in entry.in_:
            if name not in told and entry.axes[d].times != 1 and Fraction(entry.axes[d].times) not in grown:
                if joined := why_joined(name, entry.narrow[d], entry.wide[d], times):
                    raise PlanError(joined)
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
    walk = _Walk(narrow, wide, roles or {}, how, is_width, assume)
    parameters = walk.entries("parameters")
    check_blocks(parameters, how)
    check_certain(walk.uncertain)
    told = {name for name, entry in parameters.items() if any(find_role(walk.overrides, n) for n in entry.names)}
    if not assume:
        check_tables_are_read(walk.small, parameters, told)
    parameters = walk.fold_tied_readouts(parameters)
    buffers = walk.entries("buffers")
    check_blocks(buffers, how)
    names = dict.fromkeys(name for kind in ("parameters", "buffers") for name, _ in _named(walk.narrow, kind))
    for pattern in walk.overrides:  # one that names nothing is a typing error, not a wish
        if pattern not in names and not any(fnmatchcase(name, pattern) for name in names):
            raise MupscaleError(f"roles: the pattern '{pattern}' matches no parameter or buffer of the model")
    if how == "fresh":
        walk.check_kept(parameters)
        check_read_widths(parameters, told, buffers)
    norms = norms_over_widths(walk.small, parameters) if how == "fresh" else {}
    for name in (n for n, kind in norms.items() if kind != "bias" and not parameters[n].offset):
        path, _, local = name.rpartition(".")
        parameters[name] = parameters[name].with_constants(offset=_offset_of_gain(walk.small[path], local))
    return Plan(parameters, buffers, mup=how != "copies").with_initial("norm", norms)


def folds_of_buffers(narrow: nn.Module, wide: nn.Module, roles: Mapping[str, Role]) -> dict[str, Number]:
    """By the name of each buffer into which its module, or the user, says that a constant is folded, that constant."""
    with suppress(MupscaleError):  # what cannot be copied is said where the plan is made
        walk = _Walk(narrow, wide, roles, "copies", lambda name, dim: False, assume=True)
        return {name: entry.fold for name, entry in walk.entries("buffers").items() if entry.fold != 1}
    return {}


class _Walk:
    """Two modules side by side, and the role of everything in them."""

    def __init__(
        self,
        narrow: nn.Module,
        wide: nn.Module,
        overrides: Mapping[str, Role],
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
        check_same_names("the narrow model", self.small, "the wide model", self.large, ONE_DEPTH, what="module")
        for path, module in self.small.items():
            ours, theirs, where = plain_type(module), plain_type(self.large[path]), path or "the model"
            if ours is not theirs:
                raise MupscaleError(
                    f"'{where}' is a {ours.__name__} in the narrow model and a {theirs.__name__} in the wide one; "
                    f"{ONE_DEPTH}"
                )
            if ours.__module__.startswith("torch.ao.nn") and ".quantized" in ours.__module__:
                raise MupscaleError(
                    f"'{where}' is a quantised {ours.__name__}: only floating-point weights can be widened. Widen the "
                    "model first, then quantise the wide one"
                )
        self.times = most_common_ratio(paired_sizes(self.narrow, self.wide))
        self.roles = self._collect_roles()

    def _collect_roles(self) -> dict[str, Role]:
        """What the modules say, parents before children."""
        resolved: dict[str, Role] = {}
        for path, module in self.small.items():
            prefix = f"{path}." if path else ""
            roles: dict[str, Role] = {}
            try:
                if (function := registered(module)) is not None:
                    roles.update(function(module, self.large[path]))
                parts = {**_singular_vectors(module), **state_space_roles(module, self.large[path])}
                roles = {**head_roles(module, self.large[path], path), **parts, **roles}
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
            grown = small if self.how == "fresh" else entry.widened(small, is_buffer=True)
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
                check_axis(name, small, large, d, role, self.how, self.times)
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
            n, wide, axis = small.shape[d], large.shape[d], role.out_axis if d in out else role.in_axis
            if n == wide:
                axis = Axis()
            elif self.assume:  # where they are tried, sections are parts of any width, and no slip passes
                axis = axis.at(n)
            times = multiplier(n - axis.staying, wide - axis.staying)
            axes[d] = replace(axis, times=times, side="out" if d in out else "in")
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
        known = "pass Role(…, fold=…, keep=…) if you know what to multiply the weights of old units by"
        copies = as_asked("grow=mupscale.Copies(noise=1.0)", "--how copies --noise 1")
        for name in entries:
            if name not in self.unkept:
                continue
            if self.assume:  # and a run has looked for the constant
                raise MupscaleError(
                    f"'{name}' has a constant that fresh units cannot keep: beside new units, as in a softmax over "
                    "units, the old ones no longer compute what they did, whatever the constant is. Copies work, at "
                    f"whole multiples of the width ({copies}){ways_out(', or ', roles=known)}"
                )
            raise MupscaleError(
                f"'{name}' has fold={float(entries[name].fold):.6g} for copies; say what to multiply the weights "
                f"of old units by if the other units are fresh: Role(…, fold=…, keep=…). With a batch (inputs=) and a "
                "wide model at a whole multiple of the width, a run finds it"
            )


def find_role(roles: Mapping[str, Role], name: str) -> Role | None:
    """The role of the first pattern that the name fits."""
    return next((role for pattern, role in roles.items() if fnmatchcase(name, pattern)), None)


def _named(model: nn.Module, kind: str) -> list[tuple[str, Tensor]]:
    method = model.named_parameters if kind == "parameters" else model.named_buffers
    return [(naming.canonical(name), tensor) for name, tensor in method(remove_duplicate=False)]


HEADS = ("num_heads", "n_heads", "n_head", "nhead", "num_attention_heads", "heads")
HEAD_DIM = ("head_dim", "d_head", "dim_head", "head_size", "attention_head_size")
SCALE = ("scale", "scaling", "attention_scale", "softmax_scale", "attn_scale")

_QUERY = re.compile(r"(to_|w|w_)?(q|query|queries)(_proj|_lin|_linear)?", re.I)
_KEY_VALUE = re.compile(r"(to_|w|w_)?(k|v|key|value|keys|values|kv)(_proj|_lin|_linear)?", re.I)
_FUSED = re.compile(r"c_attn|in_proj|query_key_value|(to_|w|w_)?qkv(_proj|_lin|_linear)?", re.I)
_OUT = re.compile(r"o|out|wo|w_o|c_proj|proj|dense|to_out|output|(o|out)_(proj|lin|linear)", re.I)
_BY_HEAD = "query_key_value"  # GPT-NeoX, BLOOM, Falcon: q, k and v of each head together


class _Heads:
    """What an attention module and the sizes of its projections tell of its heads.

    heads, kv_heads, size: None where they cannot be told; a fraction of heads in a wide model that would cut one.
    query, key_value, fused, out: linear layers by what they project to, as relative dotted names. is_complete: whether
    their names tell all of them apart.
    """

    def __init__(self, module: nn.Module) -> None:
        config = getattr(module, "config", None) if "attention" in type(module).__name__.lower() else None

        def attribute(names: Sequence[str]) -> Any:
            """The first of these that the module, or an attention module's `config`, has as a positive int."""
            values = (getattr(holder, name, None) for holder in (module, config) for name in names)
            return next((v for v in values if isinstance(v, int) and not isinstance(v, bool) and v > 0), None)

        self.heads: Any = attribute(HEADS)
        self.kv_heads: Any = self.heads
        self.size = attribute(HEAD_DIM)
        if self.heads is None and self.size is None:
            return
        scales = [getattr(module, name, None) for name in SCALE]
        self.scale: Any = next((s for s in scales if isinstance(s, int | float) and s is not True and s > 0), None)
        children: dict[str, Any] = dict(naming.modules(module))
        self.linears = {
            name: (child.weight.shape if hasattr(child, "nf") else child.weight.shape[::-1])  # units read, and given
            for name, child in children.items()
            if name and (isinstance(child, nn.Linear) or (type(child).__name__ == "Conv1D" and hasattr(child, "nf")))
        }
        self.query, self.key_value, self.fused, self.out = (
            [name for name in self.linears if pattern.fullmatch(name.split(".")[0])]
            for pattern in (_QUERY, _KEY_VALUE, _FUSED, _OUT)
        )
        self.is_complete = len(self.out) == 1 and bool(self.fused or (self.query and self.key_value))
        if self.is_complete:
            units = self.linears[self.out[0]][0]
            if self.heads is None:
                self.heads = multiplier(self.size, units)
            else:
                self.size = max(1, units // self.heads)
            rows: Any = self.linears[(self.fused or self.key_value)[0]][1]
            if self.fused:
                rows = (rows - units) // 2
            elif "kv" in self.key_value[0]:
                rows //= 2
            self.kv_heads = multiplier(self.size, rows)


def _gains_of(module: nn.Module, letter: str) -> list[str]:
    """The parameters of norms of queries or keys, by the letter that the norms' names begin with."""
    names = re.compile(rf"(.*\.)?{letter}\w*_?norm\.\w+", re.I)
    return [name for name, _ in module.named_parameters() if names.fullmatch(name)]


def head_roles(narrow: nn.Module, wide: nn.Module, path: str) -> Roles:
    """Roles for the projections of an attention module whose heads or head_dim grow; empty for anything else.

    Heads are copied whole. If their number grows, units are blocks of head_dim; the query heads of one key/value head
    form one block, since heads that are copied each on their own pass every static check and diverge at the first step.
    If head_dim grows, units are copied one by one, and what the attention's scale lacks goes into the queries.
    """
    small, large = _Heads(narrow), _Heads(wide)
    within = (_Heads(child) for child in narrow.modules() if child is not narrow)
    if is_torchs_own(narrow) or small.heads is None or large.heads is None or any(h.heads is not None for h in within):
        return {}  # also a container that merely knows the number of heads
    same_heads = (small.heads, small.kv_heads) == (large.heads, large.kv_heads)
    if not small.linears or (same_heads and small.size == large.size) or small.heads != int(small.heads):
        return {}
    where = f"attention '{path}'" if path else "the attention module"
    if not small.is_complete:
        raise _needs_run(
            f"{where} goes from {small.heads} heads of {small.size or 'head_dim'} to {large.heads} of "
            f"{large.size or 'head_dim'}, but its query, key, value and output projections were not recognised by "
            f"name ({', '.join(small.linears)})"
        )

    def edited(names: Iterable[str], **change: Any) -> Roles:
        """The roles that these descendants have anyway, changed, under dotted names."""
        pairs = {name: tuple(naming.modules(model)[name] for model in (narrow, wide)) for name in names}
        own = {name: function(*pair) for name, pair in pairs.items() if (function := registered(pair[0])) is not None}
        return {f"{n}.{parameter}": replace(role, **change) for n in own for parameter, role in own[n].items()}

    if small.size != large.size:
        return _wider_heads(edited, small, large, narrow, where)
    grow, kv_grow = multiplier(small.heads, large.heads), multiplier(small.kv_heads, large.kv_heads)
    if kv_grow not in (1, grow) or (kv_grow != grow and small.fused):
        raise _needs_run(
            f"{where}: query heads grow {grow} times and key/value heads {kv_grow} times"
            f"{', in one fused projection' * bool(small.fused)}. Grow both by the same factor (whole groups)"
        )
    heads, kv_heads, key = int(small.heads), int(small.kv_heads), int(small.size)
    query = key * (heads // kv_heads if kv_grow == grow else 1)
    parts = ((heads * key, query), *((kv_heads * key, key),) * 2)
    return {
        **edited(small.query, out_block=query),
        **edited(small.key_value, out_block=key),
        **edited(small.out, in_block=query),
        **edited(small.fused, out_block=key if query == key else parts),
        **edited((n for n in small.fused if n.endswith(_BY_HEAD)), out_block=query + 2 * key),
        # a norm across all heads sits on the heads' wire
        **dict.fromkeys(_gains_of(narrow, "q"), Role(out=0, out_block=query)),
        **dict.fromkeys(_gains_of(narrow, "k"), Role(out=0, out_block=key)),
    }


def _wider_heads(edited: Callable[..., Roles], small: _Heads, large: _Heads, narrow: nn.Module, where: str) -> Roles:
    """What the scale lacks is folded into the queries; beside fresh units, old ones make up for all of its change."""
    grow = multiplier(small.size, large.size)
    if small.heads != large.heads:
        both = f"{where}: heads and head_dim both grow. Grow only one of them"
        return edited((*small.query, *small.key_value, *small.fused, *small.out), why_not=(both, both))
    # nothing said: 1/head_dim is taken for granted, and verify tells if it is not so; new units have no such check
    change = float(small.scale / large.scale) if small.scale and large.scale else 0.0
    fold = change / float(grow) if change else 1.0
    fold = 1.0 if math.isclose(fold, 1.0, rel_tol=1e-6) else fold
    gains = _gains_of(narrow, "q")  # a factor before a norm would be normalised away
    normed = gains or any(re.fullmatch(r"q\w*_?norm", name) for name, _ in narrow.named_children())
    takers = dict.fromkeys(gains, Role(out=0)) if normed else {} if small.fused else edited(small.query)
    if change and takers:
        return {name: replace(role, fold=fold, keep=change) for name, role in takers.items()}
    if fold != 1:
        raise _needs_run(
            f"{where}: head_dim grows {grow} times and the scale goes from {small.scale:.6g} to {large.scale:.6g}, not "
            f"to {small.scale / float(grow):.6g} (as 1/head_dim). The missing factor {fold:.6g} belongs in the "
            "queries, which are not separate, or go through a norm without a gain. Let attention scale as 1/head_dim "
            "(attention_multiplier in mupscale.models.GPT2), or grow the number of heads"
        )
    why = (
        f"{where}: head_dim grows {grow} times, and old units cannot make up for the new scale: the queries are not "
        f"separate, or no attribute gives it ({', '.join(SCALE)}). Grow the number of heads instead"
    )
    return edited((*small.query, *small.fused), why_not=("", why))


def _needs_run(why: str) -> PlanError:
    batch = "pass a small batch, inputs=, and a run of the model shows it"
    return PlanError(f"{why}{ways_out('. Or ', inputs=batch, roles='pass roles= with blocks (docs/extending.md)')}")


_SHOWN = 3  # groups of parameters that a message names
_GAINS = {"gain", "gains", "gamma", "layerscale", "scale"}
_ADDED = re.compile(
    r"pos(itions?)?|(abs(olute)?_?)?"
    r"(pos(ition(al|s)?)?|temporal|time|patch|cls|class|dist|mask|reg(ister)?s?|bos|sep|pad|segment)"
    r"_?(emb(ed(ding)?)?s?|encodings?|tokens?)(_?table)?"
)


def is_certain_output(module: nn.Module, name: str, tensor: Tensor, dim: int) -> bool:
    """Whether the axis of a module's parameter holds the parameter's units, as its name or the module's class says."""
    plain = name.lower()
    if "bias" in plain.split("_") or (dim == tensor.dim() - 1 and tensor.dim() > 1 and _ADDED.fullmatch(plain)):
        return True
    is_gain = plain.replace("_", "") in _GAINS or "norm" in type(module).__name__.lower()
    return is_gain and tensor.squeeze().dim() <= 1


_Call = Callable[[Tensor, Mapping[str, Tensor]], Tensor]
_Answer = TypeVar("_Answer")


def _ask_alone(module: nn.Module, ask: Callable[[_Call], _Answer], otherwise: _Answer) -> _Answer:
    """What is found by calling a leaf module by itself on some numbers, with given weights; otherwise, if it fails.

    It is a copy in float64 and with memory that is called; no weight of the model changes, and no random state.
    """
    if next(module.children(), None) is not None:
        return otherwise
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        try:
            alone = copy_model(module).to_empty(device="cpu").double().eval()
            theirs = dict(module.named_buffers())
            for name, tensor in (*alone.named_parameters(), *alone.named_buffers()):
                known = name in theirs and not theirs[name].is_meta
                tensor.copy_(theirs[name] if known else 0.5 + torch.rand(tensor.shape))
            return ask(lambda x, weights: functional_call(alone, dict(weights), (x.clone(),)))
        except Exception:  # it takes other arguments, cannot be copied, or keeps its weights elsewhere
            return otherwise


def in_groups(names: Mapping[str, str], most: int) -> str:
    """Names of parameters, each with a remark, in words: those that differ in numbers alone together."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, remark in names.items():
        groups.setdefault((pattern_of_name(name), remark), []).append(name)
    shown = [f"'{name_of_group(alike)}'{remark}" for (_, remark), alike in list(groups.items())[:most]]
    return ", ".join(shown) + (f" and {len(groups) - most} more" if len(groups) > most else "")


def check_certain(uncertain: Mapping[str, tuple[str, int]]) -> None:
    """Refuse parameters of which nobody can tell whether they are read along their width or give it, all at once.

    uncertain: by name, in which kind of module it is and how it grows, in words; and along which dimension.
    """
    if not uncertain:
        return
    shown = in_groups({name: f" (in {what})" for name, (what, _) in uncertain.items()}, _SHOWN)
    first, (what, dim) = next(iter(uncertain.items()))
    alike = [n for n, (kind, _) in uncertain.items() if (pattern_of_name(n), kind) == (pattern_of_name(first), what)]
    local = first.rpartition(".")[2]
    pattern = f"*.{local}" if len(alike) > 1 and not local.isdigit() else first
    batch = "pass a small batch, inputs="
    say_it = (
        f"make the plan (mupscale.plan) or the Family with roles={{'{pattern}': mupscale.Role(out={dim})}} if it "
        f"is added or multiplied, and Role(in_={dim}) if it is summed over"
    )
    raise PlanError(
        f"the modules do not show whether {shown} is added to (or multiplied with) hidden units, or "
        f"summed over them{ways_out('. To show it, ', inputs=batch, roles=say_it)}"
    )


def check_tables_are_read(
    modules: Mapping[str, nn.Module], entries: Mapping[str, Entry], told: Collection[str]
) -> None:
    """Refuse tables whose units no weight reads: then their products are summed over the width (word2vec).

    modules: the narrow model's, by path. told: parameters whose roles the user gave.
    """
    tables = [
        name
        for name, entry in entries.items()
        if isinstance(modules.get(name.rpartition(".")[0]), nn.Embedding | nn.EmbeddingBag) and entry.out
    ]
    if len(tables) < 2 or any(entry.in_ for entry in entries.values()) or any(name in told for name in tables):
        return
    batch = "pass a batch, inputs=, and the model itself shows it"
    role = f"pass roles={{'{tables[1]}': mupscale.Role(in_=1)}} where they are summed over, and Role(out=1) where not"
    raise PlanError(
        f"no weight of the model reads the units of '{tables[0]}' and '{tables[1]}', so their products may be summed "
        f"over the width. The sum then grows with the width{ways_out(inputs=batch, roles=role)}"
    )


def norm_before(modules: Mapping[str, nn.Module], readout: str, width: int) -> list[str]:
    """The parameters of the norm that is the last module with parameters before the readout.

    modules: the narrow model's, by path. readout: the name of the tied weight. width: how many units the norm is over.
    """
    others = {
        path: own
        for path, module in modules.items()
        if path != readout.rpartition(".")[0] and not isinstance(module, nn.Embedding | nn.EmbeddingBag)
        if (own := dict(module.named_parameters(prefix=path, recurse=False)))
    }
    last = list(others)[-1] if others else ""
    listed = any(isinstance(modules[last[:at]], nn.ModuleList | nn.ModuleDict) for at, c in enumerate(last) if c == ".")
    is_norm = "norm" in type(modules[last]).__name__.lower() and all(p.shape == (width,) for p in others[last].values())
    if is_norm and not listed:  # the last of a list of layers may be followed by one that was registered before them
        return list(others[last])
    raise PlanError(
        f"'{readout}' is tied to the embedding, so a norm with a gain must come just before it and take its 1/k, but "
        f"the last module ('{last}', a {type(modules[last]).__name__}) is none that is known to"
        + ways_out(
            inputs="pass a small batch, inputs=, and a run shows where the 1/k fits",
            roles="name the norm, roles={'NORM.*': mupscale.Role(out=0, fold=lambda out, in_: 1 / out)}",
            untie="untie the readout, or end the model with a LayerNorm or RMSNorm",
        )
    )


_SHIFT = 3.0


def norms_over_widths(modules: Mapping[str, nn.Module], entries: Mapping[str, Entry]) -> dict[str, str]:
    """By the name of each parameter of a norm over an axis that grows: "layer", "rms", "group" (its gain) or "bias".

    modules: the narrow model's, by path. A norm that has statistics for every unit of its own is none here.
    """
    kinds = {}
    for name, entry in entries.items():
        path, _, _ = name.rpartition(".")
        grows = any(axis.times != 1 for axis in entry.axes.values())
        if grows and path in modules and len(entry.narrow) == 1 and (kind := kind_of_norm(modules[path])):
            first = next(local for local, _ in modules[path].named_parameters(recurse=False))
            kinds[name] = kind if name == f"{path}.{first}".strip(".") else "bias"
    return kinds


def _offset_of_gain(module: nn.Module, name: str) -> int:
    """What a norm adds to the gain that it stores: 1 where its output is zero at a gain of −1, else 0."""
    own = dict(module.named_parameters(recurse=False))
    values = {n: torch.full(p.shape, -1.0 if n == name else 0.0).double() for n, p in own.items()}
    x = (2, own[name].numel())
    return _ask_alone(module, lambda call: int(not call(torch.randn(x).double(), values).any()), 0)


def kind_of_norm(module: nn.Module) -> str:
    """What a norm does to the axis it is over: "layer", "rms" or "group"; "" for what is none.

    A module that is none of torch's is called with a gain of 1: outputs of a norm are as large for larger inputs, of
    mean square 1, and each depends on all inputs. Only one that takes other arguments is told by its class's name.
    """
    for kind, cls in (("layer", nn.LayerNorm), ("rms", nn.RMSNorm), ("group", nn.GroupNorm)):
        if isinstance(module, cls):
            return kind
    zeros = {name: torch.zeros(p.shape).double() for name, p in module.named_parameters(recurse=False)}
    gain, units = next(((name, values.shape) for name, values in zeros.items()), ("", torch.Size()))
    if isinstance(module, nn.modules.batchnorm._NormBase) or len(units) != 1 or units[0] < 2:
        return ""
    ones = {**zeros, gain: torch.ones(units).double()}

    def kind_when_called(call: _Call) -> str:  # with the gain less without, since some gains are 1 + weight
        return _kind_of_function(lambda x: torch.sub(call(x, ones), call(x, zeros)), units[0])

    name = type(module).__name__.lower()
    told = "rms" if "rms" in name and "norm" in name else "layer" if "layernorm" in name else ""
    return _ask_alone(module, kind_when_called, told)


def bare_norms(modules: Mapping[str, nn.Module], widths: Collection[int]) -> dict[str, str]:
    """By path, what norms without a gain do that take units of one of these numbers."""
    found = {}
    for path, module in modules.items():
        if "norm" in type(module).__name__.lower() and not module.state_dict():
            for units in widths:
                with suppress(Exception):  # it takes another number of units
                    if units > 1 and (kind := _kind_of_function(module, units)):
                        found[path] = kind
    return found


def _kind_of_function(normed: Callable[[Tensor], Tensor], units: int) -> str:
    def are_close(left: Tensor, right: Tensor) -> bool:
        return left.shape == right.shape and float((left - right).abs().max()) <= 0.02 * float(left.abs().max())

    x = torch.randn(4, units, generator=torch.Generator().manual_seed(0)).double()
    y, other = normed(x), normed(torch.cat([x[:, :1] * 9 * _SHIFT, x[:, 1:]], dim=1))
    is_norm = are_close(y, normed(x * _SHIFT)) and not are_close(y[:, 1:], other[:, 1:])
    if not is_norm or not math.isclose(float(y.square().mean()), 1.0, rel_tol=0.05):
        return ""
    return "layer" if are_close(y, normed(x + _SHIFT)) else "rms"
