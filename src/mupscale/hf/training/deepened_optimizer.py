"""A saved torch optimizer, for a model with more layers: old ones keep their state, copies have that of their layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from mupscale.core import naming
from mupscale.hf.describe import HowDeep, deep_config, depth_operator, layer_origins, sketch_model
from mupscale.hf.files import Source
from mupscale.hf.training.saved_optimizer import read_optimizer
from mupscale.hf.training.widened_optimizer import StateTensor, write_optimizer
from mupscale.system import MupscaleError


def deepen_optimizer_file(path: str | Path, out: str | Path, source: Source, *, layers: int, how: HowDeep) -> None:
    """Write the optimizer state at `path` for the model with so many layers to `out`, with names.

    source: the shallow checkpoint. Layers that start as identity have no state, as with a fresh optimizer; those that
    are copies have their layer's. All are in the groups of the layer that they come from.
    """
    write_optimizer(Path(out), *_prepare(Path(path), source, layers, how))


def check_deepened_optimizer(path: str | Path, source: Source, *, layers: int, how: HowDeep) -> None:
    """Raise what deepen_optimizer_file would, before the weights are written."""
    _prepare(Path(path), source, layers, how)


def _prepare(
    path: Path, source: Source, layers: int, how: HowDeep
) -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]]]:
    """The deep groups, and by name and key what becomes of each part of the state."""
    shallow = sketch_model(source.config)
    deep = naming.parameters(sketch_model(deep_config(source.config, how, layers)))
    origins = layer_origins(naming.parameters(shallow), how, layers)
    if strangers := deep.keys() - origins.keys():
        raise MupscaleError(f"'{min(strangers)}' of the deep model does not come from any parameter of {source.folder}")
    saved = read_optimizer(path, shallow, mmap=True)
    groups, start = [], 0
    for held, hyper in saved.groups:
        names = [name for name in deep if origins[name].name in held]
        groups.append({**hyper, "params": list(range(start, start + len(names))), "param_names": names})
        start += len(names)
    carried = [n for n in deep if depth_operator(how).copies or not origins[n].is_new]
    states = {name: saved.states[origins[name].name] for name in carried if origins[name].name in saved.states}
    return groups, {name: {key: _kept(value) for key, value in state.items()} for name, state in states.items()}


def _kept(value: Any) -> Any:
    """A tensor of the state as it is; every name gets a copy of its own."""
    if not isinstance(value, Tensor):
        return value
    return StateTensor(value, tuple(value.shape), lambda out: out.copy_(value))
