"""Models with new parts, layers or experts: what each comes from, what it starts with, and who cannot have them.

docs/experts.md says what stays exact of a mixture, and which factors follow.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from mupscale.core import Axis, Constants, Entry, Initial, Plan, Shape, TensorSource, naming
from mupscale.growth import DEPTH_OPERATORS, Deepen, Place
from mupscale.hf.building import Config, sketch_model, transformers_config
from mupscale.hf.config_family import ConfigFamily, names_in_model
from mupscale.hf.config_fields import Times
from mupscale.hf.miniatures import LAYER, LAYERS, find_residual_writers
from mupscale.system import MupscaleError, as_asked

_FIRST_ALONE = re.compile(r".*\.relative_attention_bias\..*")  # which the first layer has for all
_WRITTEN_OUT = ("layer_types", "mlp_layer_types", "no_rope_layers")  # what a config may leave to transformers
_NUMBERS_OF_LAYERS = ("mlp_only_layers", "moe_layers")
_NO_LAYERS = re.compile(  # lists that may be as long as there are layers, and are of something else
    r"architectures|time_step_limit|(mlp|ssm)_multipliers|.*(token|label|conv|tdnn|kernel|stride|stage|channel|patch).*"
)


def layers_of(config: Config) -> int | None:
    """How many layers a config says a model has (of an encoder and a decoder, the first); None where it does not."""
    counts = [config[name] for name in LAYERS if isinstance(config.get(name), int)]
    return counts[0] if counts else None


def called(how: Deepen) -> str:
    """What new layers are, as the caller says it."""
    return as_asked(f"'{how}'", f"--deepen {how}")


def layer_origins(names: Collection[str], how: Deepen, layers: int) -> dict[str, TensorSource]:
    """Of every tensor of the deep model, or of its files, the shallow one's that it is, or is a copy of or like."""
    matches = {match[0]: match for match in _matches(names)}
    counts = {match["list"]: 0 for match in matches.values()}
    for match in matches.values():
        counts[match["list"]] = max(counts[match["list"]], int(match["number"]) + 1)
    places = {path: DEPTH_OPERATORS[how].places(count, layers) for path, count in counts.items()}
    if not DEPTH_OPERATORS[how].copies:
        places |= {path: _not_after_the_first(places[path]) for path in _lists_whose_first_lacks(matches.values())}
    origins: dict[str, TensorSource] = {}
    for name in names:
        if name not in matches:
            origins[name] = TensorSource(name)
            continue
        match = matches[name]
        for number, place in enumerate(places[match["list"]]):
            if place.block == int(match["number"]) and not (place.is_new and _FIRST_ALONE.fullmatch(name)):
                deep = f"{match['list']}.{number}.{match['local']}"
                origins[deep] = TensorSource(name, "copy" if place.is_new else "old")
    return origins


def _matches(names: Iterable[str]) -> list[re.Match[str]]:
    return [match for name in names if (match := LAYER.fullmatch(name))]


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


def plan_layers(shapes: Mapping[str, Shape], how: Deepen, layers: int, first: Config, times: Times) -> Plan:
    """What every tensor of the deep files is made of; what is drawn is so as by the model's own initialisation.

    shapes: of the shallow files, or of its model's parameters. first, times: the config of the first small model, with
    the layers that there are since, and by how much this one is wider.
    """
    sources, initial, copies = layer_origins(shapes, how, layers), dict[str, Initial](), DEPTH_OPERATORS[how].copies
    if not copies:
        plan, model, writers = ConfigFamily(first).plan(times), sketch_model(first), find_residual_writers(first)[0]
        in_model = names_in_model(model, shapes)
        for name, source in sources.items():
            own = in_model[source.name].names[0]
            if not source.is_new or own not in plan.names:  # the latter are constants
                continue
            law = plan.initial.get(plan.names[own], Initial())
            if own in writers:
                sources[name] = TensorSource(source.name, "silent", writers[own])
            elif law.means and len(means := {*law.means}) == 1:  # a pattern, which has none, is the old layer's
                sources[name], initial[name] = TensorSource(source.name, "drawn"), Initial(law.std or 0.0, (*means,))
    entries = {n: Entry(shapes[s.name], shapes[s.name], names=(n,), source=s) for n, s in sources.items()}
    return Plan(entries, {}, initial, mup=not copies)


def plan_layers_of_model(config: Config, how: Deepen, layers: int, first: Config, times: Times) -> Plan:
    """The same by the names of the model of a config: of parameters, and of the buffers that are saved with them."""
    shallow, deep = sketch_model(config), sketch_model(deep_config(config, how, layers))
    shapes = {name: tuple(tensor.shape) for name, tensor in shallow.state_dict().items()}
    plan = plan_layers(shapes, how, layers, first, times)
    tied = {group[0]: group for group in naming.aliases(deep.named_parameters(remove_duplicate=False))}
    parameters = {name: replace(plan[name], names=group) for name, group in tied.items()}
    known = {alias for group in tied.values() for alias in group}
    buffers = {name: entry for name, entry in plan.parameters.items() if name not in known}
    return replace(plan, parameters=parameters, buffers=buffers)


def deep_config(config: Config, how: Deepen, layers: int) -> dict[str, Any]:
    """The config with more layers, and with every setting that tells of single layers."""
    before = layers_of(config)
    if before is None:
        raise MupscaleError(f"this config.json of a {config.get('model_type')} model does not say how many layers")
    places, deep = DEPTH_OPERATORS[how].places(before, layers), dict(config)
    fitting: Sequence[Place] = places  # of layers by what they hold, which the model tells
    if not DEPTH_OPERATORS[how].copies and _lists_whose_first_lacks(_matches(naming.parameters(sketch_model(config)))):
        fitting = _not_after_the_first(places)
    loaded = vars(transformers_config(config))
    for name, value in {**loaded, **config}.items():
        if name in _NUMBERS_OF_LAYERS and isinstance(value, list):
            deep[name] = _places_of(places, value)
        elif isinstance(value, list) and len(value) == before and (name in config or name in _WRITTEN_OUT):
            like = places if len({*map(str, value[:2])}) == 1 else fitting
            deep[name] = value if _NO_LAYERS.fullmatch(name) else [value[place.block] for place in like]
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


def _places_of(places: Sequence[Place], blocks: Collection[int]) -> list[int]:
    return [number for number, place in enumerate(places) if place.block in blocks]


_ONE_FOR_EACH_LAYER = re.compile(r"layer_weights")  # the weights of a sum over what all layers give


def check_depth(config: Config, how: Deepen, layers: int, names: Collection[str], folder: object) -> None:
    """An error where this checkpoint cannot be made so deep in this way."""
    kind, operator = str(config.get("model_type")), DEPTH_OPERATORS[how]
    if not operator.copies:
        written, reasons = find_residual_writers(config)
        if reasons or not written:
            stack = "" if _misfit(config, "stack", layers) else f": take {called('stack')}, which changes the function"
            why = next(iter(reasons.values()), "no layer writes into a residual stream")
            raise MupscaleError(f"layers of {kind} cannot start as identity: {why}{stack}")
    if weighted := [name for name in names if _ONE_FOR_EACH_LAYER.fullmatch(name)]:
        raise MupscaleError(
            f"'{weighted[0]}' of {folder} weighs the output of each layer (use_weighted_layer_sum in config.json), and "
            "more layers would change the weights. Load the base model without its head, and deepen that"
        )
    if layers <= (most := _most_layers(config, names, folder)):
        raise MupscaleError(f"{folder} has {most} layers. A deeper model needs more than that, not {layers}")
    if odd := _misfit(config, how, layers):
        instead = f"take {called('identity')}"
        raise MupscaleError(
            f"layers of {kind} do not all hold the same tensors, so new ones modelled on those of {folder} ('{how}') "
            f"would be incomplete: {odd}{f'; {instead}' if operator.copies else ''}"
        )


def _misfit(config: Config, how: Deepen, layers: int) -> str:
    """What the deep model's layers hold that those which they are made after do not, or the reverse; or nothing."""
    models = map(sketch_model, (config, deep_config(config, how, layers)))
    shallow, deep = ([name for name, _ in model.named_parameters(remove_duplicate=False)] for model in models)
    made = layer_origins(shallow, how, layers)
    if lacking := [name for name in deep if name not in made]:
        return f"nothing would be '{lacking[0]}'"
    surplus = made.keys() - deep
    return f"the model with {layers} layers has no '{min(surplus)}'" if surplus else ""


def _most_layers(config: Config, names: Collection[str], folder: object) -> int:
    """How many layers the longest list has, by the files and by the config."""
    numbers: dict[str, set[int]] = {}
    for match in _matches(names):
        numbers.setdefault(match["list"], set()).add(int(match["number"]))
    told = {config[field] for field in LAYERS if isinstance(config.get(field), int)}
    whole = all(found == set(range(len(found))) and len(found) in told for found in numbers.values())
    if len(numbers) > 1 + bool(config.get("is_encoder_decoder")):
        raise MupscaleError(
            f"{folder} has its layers in {len(numbers)} stages or parts, such as {min(numbers)}, which cannot be "
            "deepened: only one stack of layers can, or an encoder and a decoder"
        )
    if not numbers or not whole:
        says = " and ".join(map(str, sorted(told))) or "nothing"
        raise MupscaleError(
            f"the layers of {folder} were not found: its config says {says}, but its files have "
            f"{sum(map(len, numbers.values()))} in {', '.join(sorted(numbers)) or 'no list'}"
        )
    return max(map(len, numbers.values()))


_FEED_FORWARD = re.compile(r"(?P<layer>.*\.layers\.\d+)\.mlp\.(?P<part>gate|up|down)_proj\.weight")
_EXPERT = re.compile(r"(?P<list>.*\.experts)\.(?P<number>\d+)\.(?P<local>.*)")
_STACK_OR_ROUTER = re.compile(r".*\.(gate\.weight|experts\.\w+)")
_UNLIKE = ("attention_bias", "mlp_bias", "use_sliding_window")  # settings that the mixture has no counterpart of


class _Mixture(NamedTuple):
    """How a mixture calls things: its class, the module with router and experts, its parts, the number of experts."""

    architecture: str
    module: str
    parts: dict[str, str]
    number: str


_MIXTRAL_PARTS = {"gate": "w1", "up": "w3", "down": "w2"}
_QWEN_PARTS = {part: f"{part}_proj" for part in _MIXTRAL_PARTS}
_MIXTURES = {
    "mixtral": _Mixture("MixtralForCausalLM", "block_sparse_moe", _MIXTRAL_PARTS, "num_local_experts"),
    "qwen3_moe": _Mixture("Qwen3MoeForCausalLM", "mlp", _QWEN_PARTS, "num_experts"),
}
_OUT_OF = {"llama": "mixtral", "mistral": "mixtral", "qwen3": "qwen3_moe"}
_MORE: dict[str, dict[str, Any]] = {
    "mixtral": {"router_jitter_noise": 0.0},
    "qwen3_moe": {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
}


@dataclass(frozen=True)
class ExpertCounts:
    """How many experts a mixture gets, how many of them are active for a token, and how a new router starts."""

    experts: int
    top_k: int
    router: Literal["drawn", "silent"] = "drawn"

    def keeps_function(self, config: Config) -> bool:
        """Whether the mixture computes what the model of this config does: each copy of an active expert is active."""
        few, active = experts_of(config)
        return few == 1 or self.top_k * few == active * self.experts


def experts_of(config: Config) -> tuple[int, int]:
    """The number of experts, and of active ones, of a model; (1, 1) of a dense one."""
    if config.get("model_type") not in _MIXTURES:
        return 1, 1
    numbers = {**vars(transformers_config(config)), **config}
    return numbers[_number(numbers)], numbers["num_experts_per_tok"]


def _number(config: Config) -> str:
    """What a mixture's config calls the number of its experts: versions of transformers differ."""
    own = _MIXTURES[config["model_type"]].number
    return own if own in config else "num_local_experts"


def settle_experts(
    config: Config, experts: int, top_k: int | None, folder: object, *, exact: bool = False, layers: int | None = None
) -> ExpertCounts:
    """What is meant, where this checkpoint can become such a mixture; an error that says why not, otherwise."""
    kind = str(config.get("model_type"))
    if layers is not None:
        raise MupscaleError("more layers and experts are two growths: make one, and then the other")
    if kind not in _OUT_OF and kind not in _MIXTURES:
        raise MupscaleError(
            "experts can be made from LLaMA and Mistral (as Mixtral) and Qwen3 (as Qwen3-MoE), and added to Mixtral "
            f"and Qwen3-MoE, not from {kind}"
        )
    if kind in _OUT_OF and (odd := [name for name in _UNLIKE if config.get(name)]):
        raise MupscaleError(f"'{odd[0]}' in config.json of {folder} is set, but {_OUT_OF[kind]} does not support it")
    few, active = experts_of(config)
    if experts <= few or experts % few:
        more = "2 or more" if few == 1 else f"a multiple of its {few}, so that every expert is copied equally often"
        raise MupscaleError(f"{folder} cannot have {experts} experts: give {as_asked('experts=', '--experts')} {more}")
    top_k = top_k or (2 if few == 1 else active * experts // few)
    settled = ExpertCounts(experts, top_k, "silent" if exact else "drawn")
    if not 1 <= settled.top_k <= experts:
        raise MupscaleError(f"{settled.top_k} of {experts} experts cannot be active: give 1 to {experts}")
    return settled


def experts_config(config: Config, asked: ExpertCounts) -> dict[str, Any]:
    """config.json of the mixture."""
    kind = str(config.get("model_type"))
    if kind in _MIXTURES:
        number = _number({**vars(transformers_config(config)), **config})
        return {**config, number: asked.experts, "num_experts_per_tok": asked.top_k}
    mixture = _MIXTURES[_OUT_OF[kind]]
    numbers = {mixture.number: asked.experts, "num_experts_per_tok": asked.top_k}
    size = {"moe_intermediate_size": config["intermediate_size"]} if _OUT_OF[kind] == "qwen3_moe" else {}
    names = {"model_type": _OUT_OF[kind], "architectures": [mixture.architecture]}
    return {**config, **names, **numbers, "output_router_logits": False, **size, **_MORE[_OUT_OF[kind]]}


def plan_experts_files(shapes: Mapping[str, Shape], config: Config, asked: ExpertCounts) -> Plan:
    """What every tensor of the mixture's files is made of, by the smaller model's shapes and config."""
    kind, few = str(config.get("model_type")), experts_of(config)[0]
    times, entries, initial = asked.experts // few, dict[str, Entry](), dict[str, Initial]()
    for name, shape in shapes.items():
        if kind in _MIXTURES:
            if match := _EXPERT.fullmatch(name):
                for copy in range(times):
                    copied = f"{match['list']}.{int(match['number']) * times + copy}.{match['local']}"
                    entries[copied] = Entry(shape, shape, source=TensorSource(name, "expert" if copy else "old"))
            elif _STACK_OR_ROUTER.fullmatch(name) and shape[0] == few:
                entries[name] = Entry(shape, (asked.experts, *shape[1:]), {0: Axis(times)})
            else:
                entries[name] = Entry(shape, shape)
        elif match := _FEED_FORWARD.fullmatch(name):
            mixture = _MIXTURES[_OUT_OF[kind]]
            module, part = f"{match['layer']}.{mixture.module}", mixture.parts[match["part"]]
            for number in range(asked.experts):
                expert = f"{module}.experts.{number}.{part}.weight"
                entries[expert] = Entry(shape, shape, source=TensorSource(name, "expert"))
            if match["part"] == "up":
                router = f"{module}.gate.weight"
                entries[router] = Entry(shape, (asked.experts, shape[1]), source=TensorSource(name, asked.router))
                initial[router] = Initial(float(config.get("initializer_range", 0.02)), (0.0,))
        else:
            entries[name] = Entry(shape, shape)
    return Plan({n: replace(e, names=(n,)) for n, e in entries.items()}, {}, initial)


def plan_mixture(
    config: Config, shapes: Mapping[str, Shape], asked: ExpertCounts
) -> tuple[Plan, dict[str, tuple[str, ...]]]:
    """The plan by the models' own names, and of each parameter that joins several of the smaller model's, all of them.

    transformers stacks experts, and joins gate and up. shapes: of the smaller model's files.
    """
    files, times = plan_experts_files(shapes, config, asked), asked.experts // experts_of(config)[0]
    small, large = sketch_model(config), sketch_model(experts_config(config, asked))
    before, after = (names_in_model(m, names) for m, names in ((small, shapes), (large, files.parameters)))
    made: dict[str, dict[str, TensorSource]] = {}
    for name, source in files.sources.items():
        own = before[source.name].names[0]
        made.setdefault(after[name].names[0], {}).setdefault(own, source)
    ours, entries, joined = naming.parameters(small), dict[str, Entry](), dict[str, tuple[str, ...]]()
    tied = {group[0]: group for group in naming.aliases(large.named_parameters(remove_duplicate=False))}
    shared = times if times < asked.experts or asked.router == "drawn" else asked.top_k
    for name, p in naming.parameters(large).items():
        origins = made.get(name, {name: TensorSource()})
        (own, source), wide = next(iter(origins.items())), tuple(p.shape)
        has_rows = name in ours and tuple(ours[name].shape) != wide  # of which no side of a weight is a width
        is_shared = has_rows or (source.is_taken and (source.is_new or ".experts." in name))
        entries[name] = Entry(
            tuple(ours[own].shape),
            wide,
            {0: Axis(times)} if has_rows else {},
            Constants(depth=shared if is_shared else 1),
            tied[name],
            TensorSource("" if own == name else own, source.kind),
        )
        if len(origins) > 1:
            joined[name] = tuple(origins)
    return Plan(entries), joined
