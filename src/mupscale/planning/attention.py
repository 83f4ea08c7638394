"""Attention heads: recognised from a module's own attributes, so that whole heads are copied.

If the number of heads grows, its units are blocks of head_dim. With grouped queries, the query heads of one
key/value head form one block: query and key/value heads that are copied each on their own pass every static
check, and diverge at the first optimizer step. If head_dim grows, units are copied one by one, and the attention's
scale decides: 1/head_dim needs nothing, 1/√head_dim needs the missing 1/√k folded into the query projection.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from torch import nn

from mupscale.core import Number, Role, multiplier, naming, tidy
from mupscale.planning.role_registry import Roles, is_torchs_own, registered
from mupscale.system import MupscaleError, ways_out

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
        raise MupscaleError(
            f"{where} goes from {small.heads} heads of {few or 'head_dim'} to {large.heads} of "
            f"{many or 'head_dim'}, but its query, key, value and output projections were not recognised by "
            f"name ({', '.join(projections.linears)}){ways_out('; ', roles=say_it)}"
        )
    assert few is not None  # complete projections tell it
    assert many is not None
    if few != many:
        return _growing_head_dim(narrow, wide, projections, small, large, multiplier(few, many), where)
    return _growing_heads(narrow, wide, projections, small, large, few, where)


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
    narrow: nn.Module,
    wide: nn.Module,
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
    heads, kv_heads = int(small.heads), int(small.kv_heads)
    group = heads // kv_heads if kv_grow == grow else 1
    query, key = group * head_dim, head_dim
    sections = ((heads * head_dim, query), *((kv_heads * head_dim, key),) * 2)
    roles: dict[str, Role] = {}
    change: list[tuple[tuple[str, ...], Callable[[Role], Role]]] = [
        (projections.query, lambda role: role.blocks(out=query)),
        (projections.key_value, lambda role: role.blocks(out=key)),
        (projections.out, lambda role: role.blocks(in_=query)),
        (
            projections.fused,
            (lambda role: role.blocks(out=key)) if group == 1 else (lambda role: replace(role, out_sections=sections)),
        ),
    ]
    if kv_grow == 1 and grow != 1 and projections.fused:
        raise MupscaleError(
            f"{where}: query heads grow and key/value heads do not, in one fused projection. It would need two "
            "learning rates in one tensor. Grow both, or use separate projections"
        )
    for names, edit in change:
        for name in names:
            by_head = (lambda role: role.blocks(out=query + 2 * key)) if _FUSED_BY_HEAD.search(name) else edit
            roles.update(_edited(narrow, wide, name, by_head))
    for name, norm in projections.norms.items():  # a norm across all heads sits on the heads' wire
        last = name.rsplit(".", 1)[-1]
        block = query if _QUERY_NORM.match(last) else key if _KEY_NORM.match(last) else None
        if block is not None:
            for parameter, _ in norm.named_parameters(recurse=False):
                roles[f"{name}.{parameter}"] = Role(out=0, out_block=block)
    return roles


def _growing_head_dim(
    narrow: nn.Module,
    wide: nn.Module,
    projections: _Projections,
    small: _Attention,
    large: _Attention,
    grow: Number,
    where: str,
) -> Roles:
    roles: dict[str, Role] = {}
    why = f"{where}: heads and head_dim both grow. Grow only one of them" if small.heads != large.heads else ""
    for name in (*projections.query, *projections.key_value, *projections.fused, *projections.out) if why else ():
        roles.update(_edited(narrow, wide, name, lambda role: replace(role, uncopyable=why)))
    if small.scale is None or large.scale is None:
        # nothing said: 1/head_dim is taken for granted, and verify tells if it is not so; new units have no such check
        unsaid = (
            f"{where}: head_dim grows {grow} times but no attribute gives the scale ({', '.join(SCALE)}); set one, "
        )
        unsaid += "or choose a width at which head_dim stays and there are more heads"
        return {**roles, **_fresh_refused(narrow, wide, projections, unsaid)}
    ratio = large.scale / small.scale
    if math.isclose(ratio, 1 / grow, rel_tol=1e-6):
        return {**roles, **_kept_logits(narrow, wide, projections, 1 / ratio, where)}
    fold = 1 / (float(grow) * ratio)
    norms = [name for name in projections.norms if _QUERY_NORM.match(name.rsplit(".", 1)[-1])]
    if norms:  # a factor before a norm would be normalised away
        gains = [f"{name}.{p}" for name in norms for p, _ in projections.norms[name].named_parameters(recurse=False)]
        if not gains:
            raise MupscaleError(
                f"{where}: head_dim grows {grow} times and the scale goes from {small.scale:.6g} to {large.scale:.6g}; "
                f"the missing factor {fold:.6g} belongs in the gain of '{norms[0]}', which has no gain. Add one, or "
                "let attention scale as 1/head_dim"
            )
        return {**roles, **dict.fromkeys(gains, Role(out=0, fold=fold, keep=1 / ratio))}
    if projections.fused:
        raise MupscaleError(
            f"{where}: head_dim grows {grow} times and the scale goes from {small.scale:.6g} to {large.scale:.6g}, not "
            f"to {small.scale / float(grow):.6g} (as 1/head_dim), so the query part of one fused tensor would need its "
            "own learning rate. Let attention scale as 1/head_dim (attention_multiplier in mupscale.models.GPT2), or "
            "grow the number of heads"
        )
    if not projections.query:
        query = f"pass roles= for all of it, with fold={fold:.6g} for the query's weight and bias"
        raise MupscaleError(
            f"{where}: head_dim grows {grow} times and the scale goes from {small.scale:.6g} to {large.scale:.6g}; the "
            f"missing factor {fold:.6g} belongs in the query projection, which was not recognised by name "
            f"({', '.join(projections.linears)}). Let attention scale as 1/head_dim{ways_out(', or ', roles=query)}"
        )
    for name in projections.query:
        roles.update(_edited(narrow, wide, name, lambda role: replace(role, fold=fold, keep=1 / ratio, uncopyable=why)))
    return roles


def _kept_logits(
    narrow: nn.Module, wide: nn.Module, projections: _Projections, keep: float, where: str
) -> dict[str, Role]:
    """Where head_dim grows and the scale shrinks with it: the old units' queries make up for it, once copies do not."""
    norms = [name for name in projections.norms if _QUERY_NORM.match(name.rsplit(".", 1)[-1])]
    gains = [f"{name}.{p}" for name in norms for p, _ in projections.norms[name].named_parameters(recurse=False)]
    if gains:
        return dict.fromkeys(gains, Role(out=0, keep=keep))
    if norms or projections.fused or not projections.query:
        why = (
            f"{where}: head_dim grows, but the queries are not separate, so their old units cannot make up for the new "
            "scale"
        )
        return _fresh_refused(narrow, wide, projections, f"{why}. Grow the number of heads instead")
    roles: dict[str, Role] = {}
    for name in projections.query:
        roles.update(_edited(narrow, wide, name, lambda role: replace(role, keep=keep)))
    return roles


def _fresh_refused(narrow: nn.Module, wide: nn.Module, projections: _Projections, why: str) -> dict[str, Role]:
    roles: dict[str, Role] = {}
    for name in (*projections.query, *projections.fused):
        roles.update(_edited(narrow, wide, name, lambda role: replace(role, unplaceable=why)))
    return roles


def _edited(narrow: nn.Module, wide: nn.Module, name: str, edit: Callable[[Role], Role]) -> Roles:
    """The roles that a descendant has anyway, each edited, under its dotted name."""
    small, large = naming.modules(narrow)[name], naming.modules(wide)[name]
    function = registered(small)
    assert function is not None  # a linear layer
    return {f"{name}.{parameter}": edit(role) for parameter, role in function(small, large).items()}
