"""What modules say of themselves by their names and attributes: heads, bare parameters, norms. A run may contradict it.

Heads are copied whole. If their number grows, units are blocks of head_dim. With grouped queries, the query heads of
one key/value head form one block: query and key/value heads that are copied each on their own pass every static check,
and diverge at the first optimizer step. If head_dim grows, units are copied one by one, and the attention's scale
decides: 1/head_dim needs nothing, 1/√head_dim needs the missing 1/√k folded into the query projection.

A bias, a gain and a table of positions have their units along the one axis that grows. A vector that is multiplied with
the hidden units and summed (`h @ q`, a low-rank factor) has the same shape and is an input. So what is not certain is
refused, unless the plan is tried on a batch before it is used.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call

from mupscale.core import Entry, Number, Role, copy_model, multiplier, naming, shapes_in_words, tidy
from mupscale.planning.role_registry import Roles, is_torchs_own, registered
from mupscale.system import MupscaleError, PlanError, name_of_group, pattern_of_name, ways_out

HEADS = ("num_heads", "n_heads", "n_head", "nhead", "num_attention_heads", "heads")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "kv_heads")
HEAD_DIM = ("head_dim", "d_head", "dim_head", "head_size", "attention_head_size")
SCALE = ("scale", "scaling", "attention_scale", "softmax_scale", "attn_scale")

_QUERY = re.compile(r"^(to_|w|w_)?(q|query|queries)(_proj|_lin|_linear)?$", re.I)
_KEY_VALUE = re.compile(r"^(to_|w|w_)?(k|v|key|value|keys|values|kv)(_proj|_lin|_linear)?$", re.I)
_FUSED = re.compile(r"^(c_attn|in_proj|query_key_value|(to_|w|w_)?qkv(_proj|_lin|_linear)?)$", re.I)
_FUSED_BY_HEAD = re.compile(r"(^|\.)query_key_value$")  # GPT-NeoX, BLOOM, Falcon: q, k and v of each head together
_KEY_AND_VALUE = re.compile(r"(^|[._])(to_|w)?kv", re.I)
_OUT = re.compile(r"^(o|out|wo|w_o|c_proj|proj|dense|to_out|output|(o|out)_(proj|lin|linear))$", re.I)
_QUERY_NORM, _KEY_NORM = re.compile(r"^q\w*_?norm$", re.I), re.compile(r"^k\w*_?norm$", re.I)


@dataclass(frozen=True)
class _Attention:
    """What an attention module says of itself."""

    heads: Number  # in a wide model that would cut one, a fraction
    kv_heads: Number
    head_dim: int | None
    scale: float | None

    @classmethod
    def of(cls, module: nn.Module) -> _Attention | None:
        heads: Number | None = _attribute(module, HEADS)
        kv_heads: Number | None = _attribute(module, KV_HEADS)
        head_dim = _attribute(module, HEAD_DIM)
        if heads is None and head_dim is not None:
            heads, kv_heads = _Projections.of(module).heads(head_dim, kv_heads)
        if heads is None:
            return None
        values = (getattr(module, name, None) for name in SCALE)
        scale = next((float(v) for v in values if isinstance(v, int | float) and v is not True and v > 0), None)
        return cls(heads, heads if kv_heads is None else kv_heads, head_dim, scale)

    @property
    def is_whole(self) -> bool:
        return self.heads == int(self.heads) and self.kv_heads == int(self.kv_heads)


def _attribute(module: nn.Module, names: Sequence[str]) -> int | None:
    """The first of these that the module has as a positive int; an attention module's `config` is asked too."""
    holders = [module]
    if "attention" in type(module).__name__.lower() and hasattr(module, "config"):
        holders.append(module.config)  # type: ignore[arg-type]
    for holder in holders:
        for name in names:
            value = getattr(holder, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None


def attention_roles(narrow: nn.Module, wide: nn.Module, path: str) -> Roles:
    """Roles for the projections of an attention module whose heads or head_dim grow; empty for anything else."""
    inner = _inner_attention(narrow)
    small, large = (_Attention.of(model.get_submodule(inner)) for model in (narrow, wide))
    if small is None or large is None or is_torchs_own(narrow) or not small.is_whole:
        return {}
    if not inner and any(_Attention.of(child) is not None for child in narrow.modules() if child is not narrow):
        return {}  # a container that merely knows the number of heads
    projections = _Projections.of(narrow)
    few, many = (a.head_dim or p.head_dim(a) for a, p in ((small, projections), (large, _Projections.of(wide))))
    same_heads = (small.heads, small.kv_heads) == (large.heads, large.kv_heads)
    if same_heads and (few is None or many is None or few == many):
        return {}
    where = f"attention '{path}'" if path else "the attention module"
    if not same_heads and not projections.complete:
        if few is None and "att" not in type(narrow).__name__.lower():
            return {}  # heads of another kind
        block = few or "head_dim"
        name = f"{path}.NAME.weight" if path else "NAME.weight"
        say_it = (
            f"say which is which with roles={{'{name}': Role(out=0, in_=1, out_block={block})}} for query, key and "
            f"value and in_block={block} for the output projection, and likewise for their biases"
        )
        raise PlanError(
            f"{where} goes from {small.heads} heads of {few or 'head_dim'} to {large.heads} of "
            f"{many or 'head_dim'}, but its query, key, value and output projections were not recognised by "
            f"name ({', '.join(projections.linears)}){ways_out('; ', roles=say_it)}"
        )
    assert few is not None  # complete projections tell it
    assert many is not None

    def edited(names: Iterable[str], **change: Any) -> Roles:
        """The roles that these descendants have anyway, changed, under dotted names."""
        pairs = {name: tuple(naming.modules(model)[name] for model in (narrow, wide)) for name in names}
        own = {name: function(*pair) for name, pair in pairs.items() if (function := registered(pair[0])) is not None}
        return {f"{n}.{parameter}": replace(role, **change) for n in own for parameter, role in own[n].items()}

    if few != many:
        return _growing_head_dim(edited, projections, small, large, multiplier(few, many), where)
    return _growing_heads(edited, projections, small, large, few, where)


def _inner_attention(module: nn.Module) -> str:
    """The child that knows the heads, where its output projection lies beside it (BERT's attention.self), or ''."""
    children = [name for name, child in module.named_children() if _Attention.of(child) is not None]
    if len(children) != 1 or is_torchs_own(module) or is_torchs_own(module.get_submodule(children[0])):
        return ""
    projections = _Projections.of(module.get_submodule(children[0]))
    beside = bool(projections.fused or (projections.query and projections.key_value)) and not projections.out
    return children[0] if beside and _Projections.of(module).complete else ""


@dataclass(frozen=True)
class _Projections:
    """The linear layers of an attention module by what they project to, as relative dotted names."""

    query: tuple[str, ...]
    key_value: tuple[str, ...]
    fused: tuple[str, ...]
    out: tuple[str, ...]
    linears: Mapping[str, nn.Module]
    norms: Mapping[str, nn.Module]

    @classmethod
    def of(cls, module: nn.Module) -> _Projections:
        inside = {name: m for name, m in naming.modules(module).items() if name}
        linears = {name: m for name, m in inside.items() if _is_linear(m)}
        norms = {name: m for name, m in inside.items() if "norm" in name.lower() and hasattr(m, "weight")}

        def matching(pattern: re.Pattern[str]) -> tuple[str, ...]:
            return tuple(n for n in linears if any(pattern.match(part) for part in n.split(".")))

        inner, out = (_QUERY, _KEY_VALUE, _FUSED), matching(_OUT)
        homes = {_home(name, pattern) for pattern in inner for name in matching(pattern)}
        beside = tuple(name for name in out if _home(name, _OUT) in homes)  # not an MLP's c_proj
        query, key_value, fused = map(matching, inner)
        out = beside or out
        places = {(home := _home(name, _OUT), name.removeprefix(home).strip(".").split(".")[0]) for name in out}
        if len(places) > len({home for home, _ in places}):
            out = ()  # one of them is another's, such as a model's own readout
        return cls(query, key_value, fused, out, linears, norms)._by_order_if_unnamed()

    def _by_order_if_unnamed(self) -> _Projections:
        """Two unnamed linear layers are qkv and output, four are q, k, v and output."""
        names = tuple(self.linears)
        if self.query or self.key_value or self.fused or self.out:
            return self
        if len(names) == 2:
            return replace(self, fused=names[:1], out=names[1:])
        if len(names) == 4:
            return replace(self, query=names[:1], key_value=names[1:3], out=names[3:])
        return self

    @property
    def complete(self) -> bool:
        return bool(self.out) and bool(self.fused or (self.query and self.key_value))

    def named_norms(self, pattern: re.Pattern[str]) -> list[str]:
        return [name for name in self.norms if pattern.match(name.rsplit(".", 1)[-1])]

    def gains(self, pattern: re.Pattern[str]) -> list[str]:
        """The parameters of norms that are called so."""
        return [f"{n}.{p}" for n in self.named_norms(pattern) for p, _ in self.norms[n].named_parameters(recurse=False)]

    def head_dim(self, attention: _Attention) -> int | None:
        """head_dim as the projections' sizes give it, for modules that do not store it."""
        if self.query:
            return int(_out_features(self.linears[self.query[0]]) // attention.heads)
        if self.fused:
            return int(_out_features(self.linears[self.fused[0]]) // (attention.heads + 2 * attention.kv_heads))
        return None

    def heads(self, head_dim: int, kv_heads: Number | None) -> tuple[Number | None, Number | None]:
        """The heads, and those of keys and values, as sizes and names give them; none where these do not tell."""
        is_named = any(
            _QUERY.match(part) or _FUSED.match(part) for n in self.query + self.fused for part in n.split(".")
        )
        if not is_named or not self.complete:
            return None, None
        if self.query:
            heads = multiplier(head_dim, _out_features(self.linears[self.query[0]]))
            both = 2 if _KEY_AND_VALUE.search(self.key_value[0]) else 1
            kv = kv_heads or multiplier(both * head_dim, _out_features(self.linears[self.key_value[0]]))
        else:
            heads = multiplier(head_dim, _in_features(self.linears[self.out[0]]))
            rows = multiplier(head_dim, _out_features(self.linears[self.fused[0]]))
            kv = kv_heads or tidy((rows - heads) / Fraction(2))
        return (heads, kv) if heads > 0 and kv > 0 else (None, None)


def _home(name: str, pattern: re.Pattern[str]) -> str:
    """The path of the module in which the part of the name that matches lies."""
    parts = name.split(".")
    return ".".join(parts[: next(i for i, part in enumerate(parts) if pattern.match(part))])


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or (type(module).__name__ == "Conv1D" and hasattr(module, "nf"))


def _out_features(module: nn.Module) -> int:
    return int(module.out_features if isinstance(module, nn.Linear) else module.nf)  # type: ignore[arg-type]


def _in_features(module: nn.Module) -> int:
    return int(module.in_features if isinstance(module, nn.Linear) else module.weight.shape[0])  # type: ignore[index]


def _growing_heads(
    edited: Callable[..., Roles],
    projections: _Projections,
    small: _Attention,
    large: _Attention,
    head_dim: int,
    where: str,
) -> Roles:
    grow, kv_grow = multiplier(small.heads, large.heads), multiplier(small.kv_heads, large.kv_heads)
    if kv_grow not in (1, grow):
        raise MupscaleError(
            f"{where}: query heads grow {grow} times and key/value heads {kv_grow} times. Grow both by the same factor "
            "(whole groups), or keep the key/value heads as they are"
        )
    if kv_grow == 1 and grow != 1 and projections.fused:
        raise MupscaleError(
            f"{where}: query heads grow and key/value heads do not, in one fused projection. It would need two "
            "learning rates in one tensor. Grow both, or use separate projections"
        )
    heads, kv_heads = int(small.heads), int(small.kv_heads)
    group = heads // kv_heads if kv_grow == grow else 1
    query, key = group * head_dim, head_dim
    sections = ((heads * head_dim, query), *((kv_heads * head_dim, key),) * 2)
    by_head = [name for name in projections.fused if _FUSED_BY_HEAD.search(name)]
    roles = {
        **edited(projections.query, out_block=query),
        **edited(projections.key_value, out_block=key),
        **edited(projections.out, in_block=query),
        **edited(projections.fused, out_block=key if group == 1 else sections),
        **edited(by_head, out_block=query + 2 * key),
    }
    for pattern, block in ((_QUERY_NORM, query), (_KEY_NORM, key)):  # a norm across all heads sits on the heads' wire
        roles |= dict.fromkeys(projections.gains(pattern), Role(out=0, out_block=block))
    return roles


def _growing_head_dim(
    edited: Callable[..., Roles],
    projections: _Projections,
    small: _Attention,
    large: _Attention,
    grow: Number,
    where: str,
) -> Roles:
    """What the scale lacks is folded into the queries; beside fresh units, old ones make up for all of its change."""
    query, fused = projections.query, projections.fused
    both = f"{where}: heads and head_dim both grow. Grow only one of them" if small.heads != large.heads else ""
    roles = edited((*query, *projections.key_value, *fused, *projections.out), why_not=(both, both)) if both else {}
    if small.scale is None or large.scale is None:
        # nothing said: 1/head_dim is taken for granted, and verify tells if it is not so; new units have no such check
        why = (
            f"{where}: head_dim grows {grow} times but no attribute gives the scale ({', '.join(SCALE)}); set one, or "
            "choose a width at which head_dim stays and there are more heads"
        )
        return {**roles, **edited((*query, *fused), why_not=(both, both or why))}
    ratio = large.scale / small.scale
    fold = 1 / (float(grow) * ratio)
    fold = 1.0 if math.isclose(fold, 1.0, rel_tol=1e-6) else fold
    norms, gains = projections.named_norms(_QUERY_NORM), projections.gains(_QUERY_NORM)
    if gains:  # a factor before a norm would be normalised away
        return {**roles, **dict.fromkeys(gains, Role(out=0, fold=fold, keep=1 / ratio))}
    if query and not norms and not fused:
        return {**roles, **edited(query, fold=fold, keep=1 / ratio, why_not=(both, both))}
    if fold == 1:
        why = (
            f"{where}: head_dim grows, but the queries are not separate, so their old units cannot make up for the new "
            "scale. Grow the number of heads instead"
        )
        return {**roles, **edited((*query, *fused), why_not=(both, both or why))}
    lacking = f"its query projection was not recognised by name ({', '.join(projections.linears)})"
    if fused:
        lacking = "the query part of one fused tensor would need its own learning rate"
    if norms:
        lacking = f"'{norms[0]}', which its queries go through, has no gain"
    ways = f"pass roles= for all of it, with fold={fold:.6g} for the query's weight and bias"
    raise MupscaleError(
        f"{where}: head_dim grows {grow} times and the scale goes from {small.scale:.6g} to {large.scale:.6g}, not to "
        f"{small.scale / float(grow):.6g} (as 1/head_dim). The missing factor {fold:.6g} belongs in the queries, but "
        f"{lacking}. Let attention scale as 1/head_dim (attention_multiplier in mupscale.models.GPT2), or grow the "
        f"number of heads{'' if norms or fused else ways_out(', or ', roles=ways)}"
    )


_SHOWN = 3  # groups of parameters that a message names
_GAINS = {"gain", "gains", "gamma", "layerscale", "scale"}
_ADDED = re.compile(
    r"pos(itions?)?|(abs(olute)?_?)?"
    r"(pos(ition(al|s)?)?|temporal|time|patch|cls|class|dist|mask|reg(ister)?s?|bos|sep|pad|segment)"
    r"_?(emb(ed(ding)?)?s?|encodings?|tokens?)(_?table)?"
)


def is_certain_output(module: nn.Module, name: str, tensor: Tensor, dim: int) -> bool:
    """Whether the axis of a module's parameter holds the parameter's units, by its name or by what the module does."""
    plain = name.lower()
    if "bias" in plain.split("_"):
        return True
    if dim == tensor.dim() - 1 and tensor.dim() > 1 and _ADDED.fullmatch(plain):
        return True
    if tensor.squeeze().dim() > 1:
        return False
    is_gain = plain.replace("_", "") in _GAINS or "norm" in type(module).__name__.lower()
    return is_gain or (tensor.dim() == 1 and acts_unit_by_unit(module, name))


def acts_unit_by_unit(module: nn.Module, name: str) -> bool:
    """Whether each entry of a leaf module's vector changes its own unit of the module's output and no other."""
    if (vector := module._parameters.get(name)) is None:
        return False
    n = vector.numel()
    for shape, dim in (((3, n), 1), ((2, 3, n), 2), ((2, n, 3, 3), 1), ((2, n, 3), 1)):

        def is_its_own(call: _Call, shape: tuple[int, ...] = shape, dim: int = dim) -> bool | None:
            x, drawn = torch.randn(shape).double(), 0.5 + torch.rand(n).double()
            y, other = (call(x, {name: values}) for values in (drawn, drawn + (torch.arange(n) == 0)))
            if not isinstance(y, Tensor) or y.shape != x.shape:
                return None
            differ = (y != other).transpose(0, dim).flatten(1).any(1)
            return bool(differ[0]) and not bool(differ[1:].any())

        if (answer := _ask_alone(module, is_its_own, None)) is not None:
            return answer
    return False


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


class Uncertain(NamedTuple):
    """A parameter that may be read along its width or give it: of which kind of module, and how it grows."""

    kind: str
    narrow: tuple[int, ...]
    wide: tuple[int, ...]
    dim: int


def check_certain(uncertain: Mapping[str, Uncertain]) -> None:
    """Refuse parameters of which nobody can tell whether they are read along their width or give it, all at once."""
    if not uncertain:
        return
    groups: dict[tuple[str, Uncertain], list[str]] = {}
    for name, each in uncertain.items():
        groups.setdefault((pattern_of_name(name), each), []).append(name)
    shown = [
        f"'{name_of_group(names)}' (in {each.kind}, {shapes_in_words(each.narrow, each.wide)})"
        for (_, each), names in list(groups.items())[:_SHOWN]
    ]
    more = f" and {len(groups) - _SHOWN} more" if len(groups) > _SHOWN else ""
    (_, first), names = next(iter(groups.items()))
    local = names[0].rpartition(".")[2]
    pattern = f"*.{local}" if len(names) > 1 and not local.isdigit() else names[0]
    parts = "; a weight_norm's gain wants a fold of in_^-1/2, too" if first.kind == "ParametrizationList" else ""
    batch = "pass a small batch, inputs="
    say_it = (
        f"make the plan (mupscale.plan) or the Family with roles={{'{pattern}': mupscale.Role(out={first.dim})}} if it "
        f"is added or multiplied, and Role(in_={first.dim}) if it is summed over{parts}"
    )
    raise PlanError(
        f"the modules do not show whether {', '.join(shown)}{more} is added to (or multiplied with) hidden units, or "
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


Modules = Mapping[str, nn.Module]


def norm_before(modules: Modules, readout: str, width: int) -> list[str]:
    """The parameters of the norm that is the last module with parameters before the readout.

    modules: the narrow model's, by path. readout: the name of the tied weight. width: how many units the norm is over.
    """
    readout_path = readout.rpartition(".")[0]
    last = ""
    for path, module in modules.items():
        own = [n for n, _ in module.named_parameters(recurse=False)]
        if own and path != readout_path and not isinstance(module, nn.Embedding | nn.EmbeddingBag):
            last = path
    what = f"'{readout}' is tied to the embedding, so a norm with a gain must come just before it and take its 1/k"
    line = "name the norm, roles={'NORM.*': mupscale.Role(out=0, fold=lambda out, in_: 1 / out)}"
    gains = _gains(modules, last, width)
    if beside := _norm_beside(modules, last, width):
        which = f"'{last}' or '{beside}'" if gains else f"'{beside}'"
        raise MupscaleError(f"{what}, which may be {which}{ways_out(untie='untie the readout', roles=line)}")
    if gains:
        return gains
    end = "untie the readout, or end the model with a LayerNorm or RMSNorm"
    raise MupscaleError(
        f"{what}. None was found ('{last}' is a {type(modules[last]).__name__}){ways_out(end=end, roles=line)}"
    )


def _gains(modules: Modules, path: str, width: int) -> list[str]:
    """The parameters of a norm over this width; none of any other module."""
    module = modules[path]
    own = {f"{path}.{n}": tuple(p.shape) for n, p in module.named_parameters(recurse=False)}
    is_norm = "norm" in type(module).__name__.lower() and all(shape == (width,) for shape in own.values())
    return list(own) if is_norm else []


def _norm_beside(modules: Modules, path: str, width: int) -> str:
    """A norm registered beside the list of layers in which the path lies, and so perhaps applied after it."""
    parts = path.split(".")
    for end in range(1, len(parts)):
        if isinstance(modules[".".join(parts[:end])], nn.ModuleList | nn.ModuleDict):
            parent = "".join(f"{part}." for part in parts[: end - 1])
            for name, _ in modules[parent.rstrip(".")].named_children():
                if _gains(modules, parent + name, width):
                    return parent + name
    return ""


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


def offset_of_gain(module: nn.Module, name: str) -> int:
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
    x = torch.randn(4, units, generator=torch.Generator().manual_seed(0)).double()
    y, other = normed(x), normed(torch.cat([x[:, :1] * 9 * _SHIFT, x[:, 1:]], dim=1))
    if not _are_close(y, normed(x * _SHIFT)) or _are_close(y[:, 1:], other[:, 1:]):
        return ""
    if not math.isclose(float(y.square().mean()), 1.0, rel_tol=0.05):
        return ""
    return "layer" if _are_close(y, normed(x + _SHIFT)) else "rms"


def _are_close(left: Tensor, right: Tensor) -> bool:
    return left.shape == right.shape and float((left - right).abs().max()) <= 0.02 * float(left.abs().max())
