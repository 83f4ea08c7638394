"""Attention heads: recognised from a module's own attributes, so that whole heads are copied.

If the number of heads grows, its units are blocks of head_dim; with grouped queries, the query heads of one
key/value head form one block (copying query and key/value heads each on their own passes every static check
and diverges at the first optimizer step). If head_dim grows, units are copied one by one, and the attention's
scale decides: 1/head_dim needs nothing, 1/√head_dim needs the missing 1/√k folded into the query projection.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from mupscale.axes import multiplier
from mupscale.errors import MupscaleError
from mupscale.roles import Role, Roles, registered
from mupscale.rules import Number

HEADS = ("num_heads", "n_heads", "n_head", "nhead", "num_attention_heads", "heads")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "kv_heads")
HEAD_DIM = ("head_dim", "d_head", "dim_head", "head_size", "attention_head_size")
SCALE = ("scale", "scaling", "attention_scale", "softmax_scale", "attn_scale")

_QUERY = re.compile(r"^(to_|w|w_)?(q|query|queries)(_proj|_lin|_linear)?$", re.I)
_KEY_VALUE = re.compile(r"^(to_|w|w_)?(k|v|key|value|keys|values|kv)(_proj|_lin|_linear)?$", re.I)
_FUSED = re.compile(r"^(c_attn|in_proj|query_key_value|(to_|w|w_)?qkv(_proj|_lin|_linear)?)$", re.I)
_OUT = re.compile(r"^(o|out|wo|w_o|c_proj|proj|dense|to_out|output|(o|out)_(proj|lin|linear))$", re.I)
_QUERY_NORM, _KEY_NORM = re.compile(r"^q\w*_?norm$", re.I), re.compile(r"^k\w*_?norm$", re.I)


@dataclass(frozen=True)
class _Attention:
    """What an attention module says of itself."""

    heads: int
    kv_heads: int
    head_dim: int | None
    scale: float | None

    @classmethod
    def of(cls, module: nn.Module) -> _Attention | None:
        heads = _attribute(module, HEADS)
        if heads is None:
            return None
        kv_heads, head_dim = _attribute(module, KV_HEADS), _attribute(module, HEAD_DIM)
        scale = next((float(v) for n in SCALE if isinstance(v := getattr(module, n, None), float)), None)
        return cls(heads, heads if kv_heads is None else kv_heads, head_dim, scale)


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
    small, large = _Attention.of(narrow), _Attention.of(wide)
    if small is None or large is None or registered(narrow) is not None:
        return {}
    if any(_Attention.of(child) is not None for child in narrow.modules() if child is not narrow):
        return {}  # a container that merely knows the number of heads
    projections = _Projections.of(narrow)
    head_dims = [a.head_dim or p.head_dim(a) for a, p in ((small, projections), (large, _Projections.of(wide)))]
    if None in head_dims or (small.heads == large.heads and head_dims[0] == head_dims[1]):
        return {}
    where = f"attention '{path}'" if path else "the attention module"
    if not projections.complete:
        raise MupscaleError(
            f"{where} goes from {small.heads} heads of {head_dims[0]} to {large.heads} of "
            f"{head_dims[1]}, but its query, key, value and output projections were not recognised by "
            f"name ({', '.join(projections.linears)}); "
            f'say which is which with roles={{"{path}.NAME.weight": Role(out=0, in_=1, out_block={head_dims[0]})}} '
            f"for query, key and value and in_block={head_dims[0]} for the output projection"
        )
    if head_dims[0] != head_dims[1]:
        return _growing_head_dim(narrow, wide, projections, small, large, multiplier(*head_dims), where)  # type: ignore[arg-type]
    assert head_dims[0] is not None
    return _growing_heads(narrow, wide, projections, small, large, head_dims[0], where)


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
        linears = {n: m for n, m in module.named_modules() if n and _is_linear(m)}
        norms = {n: m for n, m in module.named_modules() if n and "norm" in n.lower() and hasattr(m, "weight")}

        def matching(pattern: re.Pattern[str]) -> tuple[str, ...]:
            return tuple(n for n in linears if any(pattern.match(part) for part in n.split(".")))

        return cls(
            matching(_QUERY), matching(_KEY_VALUE), matching(_FUSED), matching(_OUT), linears, norms
        )._by_order_if_unnamed()

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
            return _out_features(self.linears[self.query[0]]) // attention.heads
        if self.fused:
            return _out_features(self.linears[self.fused[0]]) // (attention.heads + 2 * attention.kv_heads)
        return None


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or (type(module).__name__ == "Conv1D" and hasattr(module, "nf"))


def _out_features(module: nn.Module) -> int:
    return int(module.out_features if isinstance(module, nn.Linear) else module.nf)  # type: ignore[arg-type]


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
            f"{where}: query heads grow {grow} times and key/value heads {kv_grow} times; "
            f"grow both alike (whole groups) or leave the key/value heads as they are"
        )
    group = small.heads // small.kv_heads if kv_grow == grow else 1
    query, key = group * head_dim, head_dim
    sections = ((small.heads * head_dim, query), *((small.kv_heads * head_dim, key),) * 2)
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
            f"{where}: a fused projection whose query heads grow and whose key/value heads do not would need two "
            f"learning rates in one tensor; grow both, or use separate projections"
        )
    for names, edit in change:
        for name in names:
            roles.update(_edited(narrow, wide, name, edit))
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
    if small.heads != large.heads:
        raise MupscaleError(f"{where}: heads and head_dim both grow; grow one of them")
    if small.scale is None or large.scale is None:
        return {}  # nothing said: 1/head_dim is taken for granted, and verify tells if it is not so
    ratio = large.scale / small.scale
    if math.isclose(ratio, 1 / grow, rel_tol=1e-6):
        return {}
    if projections.fused:
        raise MupscaleError(
            f"{where}: head_dim grows {grow} times and the scale goes from {small.scale:.6g} to "
            f"{large.scale:.6g}, not to {small.scale / float(grow):.6g} (as 1/head_dim), which would "
            f"need another learning rate for the query part of one fused tensor. Let the attention scale as 1/head_dim "
            f"(attention_multiplier in mupscale.models.GPT2), or grow the number of heads"
        )
    fold = 1 / (float(grow) * ratio)
    roles: dict[str, Role] = {}
    for name in projections.query:
        roles.update(_edited(narrow, wide, name, lambda role: replace(role, fold=fold)))
    return roles


def _edited(narrow: nn.Module, wide: nn.Module, name: str, edit: Callable[[Role], Role]) -> Roles:
    """The roles that a descendant has anyway, each edited, under its dotted name."""
    small, large = narrow.get_submodule(name), wide.get_submodule(name)
    function = registered(small)
    assert function is not None  # a linear layer
    return {f"{name}.{parameter}": edit(role) for parameter, role in function(small, large).items()}
