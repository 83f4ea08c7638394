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
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call

from mupscale.core import Entry, Role, copy_model, multiplier, naming
from mupscale.planning.role_registry import Roles, is_torchs_own, registered
from mupscale.system import PlanError, name_of_group, pattern_of_name, ways_out

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
    """Roles for the projections of an attention module whose heads or head_dim grow; empty for anything else."""
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
    def are_close(left: Tensor, right: Tensor) -> bool:
        return left.shape == right.shape and float((left - right).abs().max()) <= 0.02 * float(left.abs().max())

    x = torch.randn(4, units, generator=torch.Generator().manual_seed(0)).double()
    y, other = normed(x), normed(torch.cat([x[:, :1] * 9 * _SHIFT, x[:, 1:]], dim=1))
    is_norm = are_close(y, normed(x * _SHIFT)) and not are_close(y[:, 1:], other[:, 1:])
    if not is_norm or not math.isclose(float(y.square().mean()), 1.0, rel_tol=0.05):
        return ""
    return "layer" if are_close(y, normed(x + _SHIFT)) else "rms"
