"""A dense checkpoint as a mixture of experts: each expert a copy of the feed-forward layer, with a fresh router."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from mupscale.core import Entry, Initial, Plan, TensorSource
from mupscale.hf.describe import Config, make_batches, memory, require_transformers
from mupscale.hf.files import (
    Source,
    arrange_shards,
    bytes_bar,
    check_place,
    check_space,
    failure_of_writing,
    open_source,
    write_companions,
    write_shards,
)
from mupscale.hf.verification import compare_outputs, find_record, load_pretrained, needed_bytes
from mupscale.system import MupscaleError, appearing, checks_arguments, setting

__all__ = ["Mixture", "add_experts"]

_FEED_FORWARD = re.compile(r"(?P<layer>.*\.layers\.\d+)\.mlp\.(?P<part>gate|up|down)_proj\.weight")
_TOLERANCE = 1e-4  # relative, in float32


class _Target(NamedTuple):
    """How a mixture calls things: its class, the module with router and experts, its parts, the number of experts."""

    model_type: str
    architecture: str
    module: str
    parts: dict[str, str]
    number: str
    more: dict[str, Any]


_MIXTRAL = _Target(
    "mixtral",
    "MixtralForCausalLM",
    "block_sparse_moe",
    {"gate": "w1", "up": "w3", "down": "w2"},
    "num_local_experts",
    {"router_jitter_noise": 0.0},
)
_QWEN3_MOE = _Target(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    "mlp",
    {part: f"{part}_proj" for part in ("gate", "up", "down")},
    "num_experts",
    {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
)
_TARGETS = {"llama": _MIXTRAL, "mistral": _MIXTRAL, "qwen3": _QWEN3_MOE}
_UNLIKE = ("attention_bias", "mlp_bias", "use_sliding_window")  # settings that the mixture has no counterpart of


@dataclass(frozen=True)
class Mixture:
    """What was written. difference: the largest relative one of any output; None if the models were not compared."""

    path: Path
    model_type: str
    experts: int
    active: int
    bytes: int
    difference: float | None = None

    def __str__(self) -> str:
        checked = "not compared" if self.difference is None else f"the same function, to {self.difference:.1e}"
        return f"{self.path}: {self.model_type} with {self.experts} experts, {self.active} active; {checked}"


@checks_arguments
def add_experts(
    source: str | Path | Source,
    out: str | Path,
    *,
    experts: int,
    active: int = 2,
    seed: int = 0,
    shard_size: int | str = "5GB",
    optimizer: str | Path | None = None,
    verify: bool = True,
    progress: bool = True,
    note: Callable[[str], None] = lambda line: None,
) -> Mixture:
    """Write a LLaMA, Mistral or Qwen3 checkpoint as Mixtral or Qwen3-MoE into the folder `out`.

    Every expert is a copy of its layer's feed-forward part, and the weights of the active ones sum to 1, so that the
    function stays. Routers are drawn with the config's std; experts come to differ by the tokens that they are sent.
    optimizer: refused, since the state of one layer does not say what that of its experts is.

    >>> import tempfile, transformers
    >>> folder = tempfile.TemporaryDirectory()
    >>> sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2}
    >>> config = transformers.LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=11)
    >>> transformers.LlamaForCausalLM(config).save_pretrained(f"{folder.name}/small")
    >>> mixture = add_experts(f"{folder.name}/small", f"{folder.name}/mixture", experts=4, progress=False)
    >>> mixture.model_type, mixture.difference < 1e-5
    ('mixtral', True)
    >>> folder.cleanup()
    """
    small, folder = open_source(source), Path(out)
    target = _check(small, experts, active, optimizer)
    check_place(folder, small)
    same = Plan({name: Entry(shape, shape, names=(name,)) for name, shape in small.shapes.items()})
    parts = _parts(small, target, experts)
    shards = arrange_shards(small, same, parts=parts, seed=seed, shard_size=shard_size)
    size = sum(shard.bytes for shard in shards)
    try:
        with appearing(folder) as place:
            check_space(place, small, size, 0)
            write_companions(place, small, _config(small.config, target, experts, active), shards)
            with bytes_bar(size, progress) as advance:
                write_shards(shards, place, same, advance=advance)
            difference = _compare(small, open_source(place), note) if verify else None
    except OSError as error:
        raise MupscaleError(failure_of_writing(folder, error)) from None
    return Mixture(folder, target.model_type, experts, active, size, difference)


def _check(small: Source, experts: int, active: int, optimizer: object) -> _Target:
    kind = str(small.config.get("model_type"))
    if kind not in _TARGETS:
        raise MupscaleError(
            f"experts can be made from LLaMA and Mistral (as Mixtral) and Qwen3 (as Qwen3-MoE), not from {kind}"
        )
    if odd := [name for name in _UNLIKE if small.config.get(name)]:
        raise MupscaleError(
            f"'{odd[0]}' in config.json of {small.folder} is set, but {_TARGETS[kind].model_type} does not support it"
        )
    if experts < 2 or not 1 <= active <= experts:
        raise MupscaleError(
            f"{experts} experts with {active} active: give 2 or more experts, of which at least 1 is active"
        )
    if find_record(small) is not None:
        raise MupscaleError(
            f"{small.folder} has grown before, and its record is for a dense model. Add experts first, then grow"
        )
    if optimizer is not None:
        raise MupscaleError(
            "optimizer state is not carried over to experts, since each sees different gradients from the first step. "
            f"Leave {setting('optimizer')} out, and start a new optimizer"
        )
    return _TARGETS[kind]


def _config(config: Config, target: _Target, experts: int, active: int) -> dict[str, Any]:
    size = {"moe_intermediate_size": config["intermediate_size"]} if target is _QWEN3_MOE else {}
    names = {"model_type": target.model_type, "architectures": [target.architecture]}
    numbers = {target.number: experts, "num_experts_per_tok": active, "output_router_logits": False}
    return {**config, **names, **numbers, **size, **target.more}


def _parts(small: Source, target: _Target, experts: int) -> Plan:
    """What each tensor of the mixture is made of; routers are drawn."""
    law, tensors, routers = Initial(float(small.config.get("initializer_range", 0.02))), dict[str, Entry](), []
    for name, shape in small.shapes.items():
        match = _FEED_FORWARD.fullmatch(name)
        if match is None:
            tensors[name] = Entry(shape, shape)
            continue
        module = f"{match['layer']}.{target.module}"
        for number in range(experts):
            expert = f"{module}.experts.{number}.{target.parts[match['part']]}.weight"
            tensors[expert] = Entry(shape, shape, source=TensorSource(name, "copy"))
        if match["part"] == "up":
            routers.append(f"{module}.gate.weight")
            tensors[routers[-1]] = Entry(shape, (experts, shape[1]), source=TensorSource(name, "drawn"))
    return Plan(tensors, initial=dict.fromkeys(routers, law))


def _compare(small: Source, mixture: Source, note: Callable[[str], None]) -> float | None:
    """The largest difference of any output, where both models fit into memory; one that must not be is an error."""
    require_transformers()
    if not memory.fits(needed_bytes(small, mixture)):
        return None
    note("comparing the two models in float32")
    ours, theirs = (load_pretrained(source, torch.float32).model for source in (small, mixture))
    difference = max(compare_outputs(ours, theirs, make_batches(ours)).differences.values())
    if not difference <= _TOLERANCE:
        raise MupscaleError(
            f"the mixture was not kept, since its outputs differ by {difference:.1e}: some setting in config.json has "
            f"a different meaning in {mixture.model_type}"
        )
    return difference
