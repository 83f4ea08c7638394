"""Which axis of a parameter is its output and which its input, by module type: a registry that users extend.

Only the module type can tell: a Linear stores (out, in), an Embedding (tokens, out), transformers' Conv1D
(in, out), a ConvTranspose (in, out/groups, …). Whether an axis grows is read off the shapes, not here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from mupscale.core import Number, Role
from mupscale.system import MupscaleError, checks_arguments, ways_out

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
