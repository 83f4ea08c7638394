"""A readout tied to an embedding: the norm before it, which takes the 1/k that the shared weight cannot have."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from mupscale.system import MupscaleError, ways_out

Modules = Mapping[str, nn.Module]


def norm_before(modules: Modules, readout: str, width: int) -> list[str]:
    """The parameters of the norm that is the last module with parameters before the readout.

    modules: the narrow model's, by path. readout: the name of the tied weight. width: how many units the norm is over.

    >>> model = nn.ModuleDict({"embed": nn.Embedding(9, 4), "norm": nn.LayerNorm(4), "readout": nn.Linear(4, 9)})
    >>> norm_before(dict(model.named_modules()), "readout.weight", 4)
    ['norm.weight', 'norm.bias']
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
