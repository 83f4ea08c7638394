"""Mixtures of experts: out of a dense model, or with more experts. Their config, the tensors of their files, the plan.

docs/experts.md says what stays exact, and which factors follow.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from mupscale.core import Axis, Constants, Entry, Initial, Plan, Shape, TensorSource, naming
from mupscale.hf.describe.building import Config, sketch_model, transformers_config
from mupscale.hf.describe.config_family import InModel, names_in_model
from mupscale.system import MupscaleError, as_asked

_FEED_FORWARD = re.compile(r"(?P<layer>.*\.layers\.\d+)\.mlp\.(?P<part>gate|up|down)_proj\.weight")
_EXPERT = re.compile(r"(?P<list>.*\.experts)\.(?P<number>\d+)\.(?P<local>.*)")
_STACK_OR_ROUTER = re.compile(r".*\.(gate\.weight|experts\.\w+)")
_UNLIKE = ("attention_bias", "mlp_bias", "use_sliding_window")  # settings that the mixture has no counterpart of


class _Mixture(NamedTuple):
    """How a mixture calls things: its class, the module with router and experts, its parts, the number of experts."""

    model_type: str
    architecture: str
    module: str
    parts: dict[str, str]
    number: str
    more: dict[str, Any]


_MIXTRAL = _Mixture(
    "mixtral",
    "MixtralForCausalLM",
    "block_sparse_moe",
    {"gate": "w1", "up": "w3", "down": "w2"},
    "num_local_experts",
    {"router_jitter_noise": 0.0},
)
_QWEN3_MOE = _Mixture(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    "mlp",
    {part: f"{part}_proj" for part in ("gate", "up", "down")},
    "num_experts",
    {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
)
_OUT_OF = {"llama": _MIXTRAL, "mistral": _MIXTRAL, "qwen3": _QWEN3_MOE}
_MIXTURES = {mixture.model_type: mixture for mixture in (_MIXTRAL, _QWEN3_MOE)}


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
    """What is meant, where this checkpoint can become such a mixture; an error that says why not, otherwise.

    >>> settle_experts({"model_type": "gpt2"}, 4, 2, "small")
    Traceback (most recent call last):
    mupscale.system.errors.MupscaleError: experts can be made from LLaMA and Mistral (as Mixtral) and Qwen3 (as ...
    """
    kind = str(config.get("model_type"))
    if layers is not None:
        raise MupscaleError("more layers and experts are two growths: make one, and then the other")
    if kind not in _OUT_OF and kind not in _MIXTURES:
        raise MupscaleError(
            "experts can be made from LLaMA and Mistral (as Mixtral) and Qwen3 (as Qwen3-MoE), and added to Mixtral "
            f"and Qwen3-MoE, not from {kind}"
        )
    if kind in _OUT_OF and (odd := [name for name in _UNLIKE if config.get(name)]):
        raise MupscaleError(
            f"'{odd[0]}' in config.json of {folder} is set, but {_OUT_OF[kind].model_type} does not support it"
        )
    few, active = experts_of(config)
    if experts <= few or experts % few:
        more = "2 or more" if few == 1 else f"a multiple of its {few}, so that every expert is copied equally often"
        raise MupscaleError(f"{folder} cannot have {experts} experts: give {as_asked('experts=', '--experts')} {more}")
    settled = ExpertCounts(
        experts, top_k or (2 if few == 1 else active * experts // few), "silent" if exact else "drawn"
    )
    if not 1 <= settled.top_k <= experts:
        raise MupscaleError(f"{settled.top_k} of {experts} experts cannot be active: give 1 to {experts}")
    return settled


def experts_config(config: Config, asked: ExpertCounts) -> dict[str, Any]:
    """config.json of the mixture."""
    kind = str(config.get("model_type"))
    if kind in _MIXTURES:
        number = _number({**vars(transformers_config(config)), **config})
        return {**config, number: asked.experts, "num_experts_per_tok": asked.top_k}
    mixture = _OUT_OF[kind]
    numbers = {mixture.number: asked.experts, "num_experts_per_tok": asked.top_k}
    size = {"moe_intermediate_size": config["intermediate_size"]} if mixture is _QWEN3_MOE else {}
    names = {"model_type": mixture.model_type, "architectures": [mixture.architecture]}
    return {**config, **names, **numbers, "output_router_logits": False, **size, **mixture.more}


def plan_experts_files(shapes: Mapping[str, Shape], config: Config, asked: ExpertCounts) -> Plan:
    """What every tensor of the mixture's files is made of: the smaller model's, a copy, or a router, drawn or zero.

    shapes: of the files of the smaller model, which has this config.
    """
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
            mixture = _OUT_OF[kind]
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

    shapes: of the tensors in the smaller model's files. transformers stacks experts, and joins gate and up.
    """
    files, times = plan_experts_files(shapes, config, asked), asked.experts // experts_of(config)[0]
    small, large = sketch_model(config), sketch_model(experts_config(config, asked))
    before, after = (names_in_model(m, names) or {} for m, names in ((small, shapes), (large, files.parameters)))
    made: dict[str, dict[str, TensorSource]] = {}
    for name, source in files.sources.items():
        own = before.get(source.name, InModel((source.name,))).names[0]
        made.setdefault(after.get(name, InModel((name,))).names[0], {}).setdefault(own, source)
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
