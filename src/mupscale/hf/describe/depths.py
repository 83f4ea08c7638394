"""Models with more layers: which layer each one comes from, what new ones start with, and what their config says."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from mupscale.core import Shape, naming
from mupscale.growth import DepthOperator, Identity, Place, Stack
from mupscale.hf.describe.building import Config, sketch_model, transformers_config
from mupscale.hf.describe.config_family import family_of_config
from mupscale.hf.describe.file_names import InModel, names_in_model
from mupscale.hf.describe.miniatures import LAYER, LAYERS, find_residual_writers
from mupscale.hf.describe.multipliers import Times
from mupscale.system import MupscaleError, as_asked

HowDeep = Literal["identity", "stack", "interleaved"]
"""What new layers are."""

_FIRST_ALONE = re.compile(r".*\.relative_attention_bias\..*")  # which the first layer has for all
_WRITTEN_OUT = ("layer_types", "mlp_layer_types", "no_rope_layers")  # what a config may leave to transformers
_NUMBERS_OF_LAYERS = ("mlp_only_layers", "moe_layers")
_NO_LAYERS = re.compile(  # lists that may be as long as there are layers, and are of something else
    r"architectures|time_step_limit|(mlp|ssm)_multipliers|.*(token|label|conv|tdnn|kernel|stride|stage|channel|patch).*"
)


class LayerOrigin(NamedTuple):
    """The tensor of the shallow checkpoint that one of the deep one is, or, where it is new, is a copy of or like."""

    name: str
    is_new: bool


@dataclass(frozen=True)
class LayerTensor:
    """A tensor of the deep checkpoint: the shallow one's that it is, or is shaped as.

    mean, std: where it is new, what it is drawn from; a constant for a std of 0. None for a copy. shape: where it is
    another than that tensor's. rows: how many copies of each of its rows there are.
    """

    origin: str
    is_new: bool = False
    mean: float | None = None
    std: float = 0.0
    shape: Shape | None = None
    rows: int = 1


def depth_operator(how: str) -> DepthOperator:
    """The operator that a word names.

    >>> depth_operator("interleaved")
    Stack(order='interleaved')
    """
    operators = {"identity": Identity(), "stack": Stack("appended"), "interleaved": Stack("interleaved")}
    if how not in operators:
        raise MupscaleError(f"new layers are identity, stack or interleaved, not {how!r}")
    return operators[how]


def layers_of(config: Config) -> int | None:
    """How many layers a config says a model has (of an encoder and a decoder, the first); None where it does not.

    >>> layers_of({"model_type": "gpt2", "n_layer": 12})
    12
    """
    counts = [config[name] for name in LAYERS if isinstance(config.get(name), int)]
    return counts[0] if counts else None


def called(how: HowDeep) -> str:
    """What new layers are, as the caller says it."""
    return as_asked(f"'{how}'", f"--deepen {how}")


def layer_origins(names: Collection[str], how: HowDeep, layers: int) -> dict[str, LayerOrigin]:
    """Of every tensor of the deep model, or of its files, the shallow one's that it is or is made after.

    >>> layer_origins(["h.0.up.weight", "norm.weight"], "identity", 2)["h.1.up.weight"]
    LayerOrigin(name='h.0.up.weight', is_new=True)
    """
    matches = {name: match for name in names if (match := LAYER.fullmatch(name))}
    counts = {match["list"]: 0 for match in matches.values()}
    for match in matches.values():
        counts[match["list"]] = max(counts[match["list"]], int(match["number"]) + 1)
    places = {path: depth_operator(how).places(count, layers) for path, count in counts.items()}
    if not depth_operator(how).copies:
        places |= {path: _not_after_the_first(places[path]) for path in _lists_whose_first_lacks(matches.values())}
    origins: dict[str, LayerOrigin] = {}
    for name in names:
        if name not in matches:
            origins[name] = LayerOrigin(name, is_new=False)
            continue
        match = matches[name]
        for number, place in enumerate(places[match["list"]]):
            if place.block == int(match["number"]) and not (place.is_new and _FIRST_ALONE.fullmatch(name)):
                deep = f"{match['list']}.{number}.{match['local']}"
                origins[deep] = LayerOrigin(name, place.is_new)
    return origins


def _lists_whose_first_lacks(matches: Collection[re.Match[str]]) -> list[str]:
    """Lists of layers of which the first holds a part of what all others do, as where the embedding has a norm."""
    held: dict[str, dict[int, set[str]]] = {}
    for match in matches:
        held.setdefault(match["list"], {}).setdefault(int(match["number"]), set()).add(match["local"])
    others = {path: [names for number, names in layers.items() if number] for path, layers in held.items()}
    return [path for path, rest in others.items() if rest and all(held[path].get(0, set()) < names for names in rest)]


def _not_after_the_first(places: Sequence[Place]) -> list[Place]:
    """New layers go with the nearest that is shaped as they are, which the first is not."""
    return [Place(1, is_new=True) if place.is_new and place.block == 0 else place for place in places]


def plan_layers(
    shapes: Mapping[str, Shape], how: HowDeep, layers: int, first: Config, times: Times
) -> dict[str, LayerTensor]:
    """What every tensor of the deep files is: copied, constant, or drawn as the model's own initialisation would.

    shapes: of the shallow files, or of its model's parameters. first, times: the config of the first small model, with
    the layers that there are since, and by how much this one is wider.

    >>> first = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1}
    >>> shapes = {"h.0.mlp.c_fc.weight": (8, 32), "h.0.mlp.c_proj.weight": (32, 8)}
    >>> tensors = plan_layers(shapes, "identity", 2, first, Times())
    >>> tensors["h.1.mlp.c_fc.weight"].std, tensors["h.1.mlp.c_proj.weight"].std
    (0.02, 0.0)
    """
    origins = layer_origins(shapes, how, layers)
    if depth_operator(how).copies:
        return {name: LayerTensor(*origin) for name, origin in origins.items()}
    plan, model = family_of_config(first).plan(times), sketch_model(first)
    in_model = names_in_model(model, shapes) or {name: InModel((name,)) for name in shapes}
    writers = find_residual_writers(first)[0]
    tensors: dict[str, LayerTensor] = {}
    for name, origin in origins.items():
        own = in_model[origin.name].names[0]
        if not origin.is_new or own not in plan.names:  # the latter are constants
            tensors[name] = LayerTensor(*origin)
        elif own in writers:
            tensors[name] = LayerTensor(*origin, mean=writers[own])
        else:
            mean = (plan.means or {}).get(plan.names[own], (0.0,))
            std = (plan.fresh or {}).get(plan.names[own], 0.0)
            tensors[name] = LayerTensor(*origin, mean=mean[0] if len(set(mean)) == 1 else None, std=std)
    return tensors


def writers_of(config: Config, names: Collection[str]) -> dict[str, dict[str, float]]:
    """By the path of each layer, what in it writes into the residual stream, and the value at which it does not.

    >>> config = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1}
    >>> writers_of(config, ["transformer.h.0.mlp.c_fc.weight", "transformer.h.0.mlp.c_proj.weight"])
    {'transformer.h.0': {'mlp.c_proj.weight': 0.0}}
    """
    found, written = find_residual_writers(config)[0], dict[str, dict[str, float]]()
    for name in names:
        if name in found and (match := LAYER.fullmatch(name)):
            written.setdefault(f"{match['list']}.{match['number']}", {})[match["local"]] = found[name]
    return written


def deep_config(config: Config, how: HowDeep, layers: int) -> dict[str, Any]:
    """The config with more layers, and with every setting that tells of single layers.

    >>> deep_config({"model_type": "gpt2", "n_layer": 2}, "stack", 4)["n_layer"]
    4
    """
    before = layers_of(config)
    if before is None:
        raise MupscaleError(f"this config.json of a {config.get('model_type')} model does not say how many layers")
    places, deep = depth_operator(how).places(before, layers), dict(config)
    loaded = vars(transformers_config(config))
    for name, value in {**loaded, **config}.items():
        if name in _NUMBERS_OF_LAYERS and isinstance(value, list):
            deep[name] = _places_of(places, value)
        elif isinstance(value, list) and len(value) == before and (name in config or name in _WRITTEN_OUT):
            fitting = places if len({*map(str, value[:2])}) == 1 else _fitting_places(config, how, places)
            deep[name] = value if _NO_LAYERS.fullmatch(name) else [value[place.block] for place in fitting]
    if (step := loaded.get("decoder_sparse_step", 1)) > 1:
        plain = [n for n in range(before) if (n + 1) % step or n in (loaded.get("mlp_only_layers") or [])]
        deep |= {"mlp_only_layers": _places_of(places, plain), "decoder_sparse_step": 1}
    if first := loaded.get("first_k_dense_replace"):
        dense = _places_of(places, range(first))
        if dense != list(range(len(dense))):
            raise MupscaleError(
                f"the first {first} layers of this model are plain and all others have experts, which stacked layers "
                f"cannot keep. Use {called('interleaved')}, or identity"
            )
        deep["first_k_dense_replace"] = len(dense)
    return {**deep, **{name: layers for name in LAYERS if isinstance(config.get(name), int)}}


def _fitting_places(config: Config, how: HowDeep, places: Sequence[Place]) -> Sequence[Place]:
    """The places of layers by what they hold, which the model tells."""
    if depth_operator(how).copies:
        return places
    names = list(naming.parameters(sketch_model(config)))
    lacks = _lists_whose_first_lacks([match for name in names if (match := LAYER.fullmatch(name))])
    return _not_after_the_first(places) if lacks else places


def _places_of(places: Sequence[Place], blocks: Collection[int]) -> list[int]:
    return [number for number, place in enumerate(places) if place.block in blocks]
