"""A checkpoint on disk with more layers: blocks that start as identity, or copies, from one folder into another."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mupscale.growth import DepthOperator, Identity, Stack
from mupscale.hf.describe import in_one_line, require_transformers, transformers_config
from mupscale.hf.files import (
    RECORD_FILE,
    DeepTensor,
    Source,
    check_place,
    check_space,
    open_source,
    write_companions,
    write_deep_weights,
)
from mupscale.hf.verification import difference_of_checkpoints
from mupscale.system import MupscaleError, appearing

HowDeep = Literal["identity", "stack", "interleaved"]
"""What new layers are."""

_LAYER = re.compile(r"(?P<list>(?:.*\.)?(?:layers|layer|h))\.(?P<number>\d+)\.(?P<local>.+)")
_COUNTS = ("num_hidden_layers", "n_layer")
_EXPERTS = (r"block_sparse_moe\.experts\.\d+\.w2", r"mlp\.experts\.(\d+\.)?down_proj")
_LLAMA = (r"self_attn\.o_proj", r"mlp\.down_proj", *_EXPERTS)
_NORMS = (r"post_attention_layernorm", r"post_feedforward_layernorm")
WRITERS: dict[str, tuple[tuple[str, ...], float]] = {
    **dict.fromkeys(("llama", "mistral", "mixtral", "qwen2", "qwen3", "gemma"), (_LLAMA, 0.0)),
    **dict.fromkeys(("smollm3", "granite", "cohere", "cohere2", "phi3", "stablelm", "olmoe"), (_LLAMA, 0.0)),
    **dict.fromkeys(("olmo2", "olmo3"), (_NORMS, 0.0)),
    **dict.fromkeys(("gemma2", "gemma3_text"), (_NORMS, -1.0)),
    "starcoder2": ((r"self_attn\.o_proj", r"mlp\.c_proj"), 0.0),
    "falcon": ((r"self_attention\.dense", r"mlp\.dense_4h_to_h"), 0.0),
    "phi": ((r"self_attn\.dense", r"mlp\.fc2"), 0.0),
    "gpt_neox": ((r"attention\.dense", r"mlp\.dense_4h_to_h"), 0.0),
    "opt": ((r"self_attn\.out_proj", r"fc2"), 0.0),
    "gpt2": ((r"attn\.c_proj", r"mlp\.c_proj"), 0.0),
    "vit": ((r"attention\.output\.dense", r"output\.dense", r"attention\.o_proj", r"mlp\.fc2"), 0.0),
}
"""Of each architecture, the modules of a layer that write into the residual stream, and the value at which they do not.

The tests compare it with what `mupscale.plan_depth` finds by running small models."""
_POST_NORM = ("bert", "roberta", "distilbert", "electra")
_ZERO_GAINS = ("gemma", "gemma2", "gemma3_text")  # which store a gain without its 1
_FIXED = re.compile(r".*(attn|attention)\.(masked_)?bias|.*rotary_emb\.inv_freq")  # constants of the model, no weights


@dataclass(frozen=True)
class Deepened:
    """What was written. difference: of the outputs of the two models, relative to their size; None if not compared."""

    path: Path
    layers: tuple[int, int]
    how: HowDeep
    difference: float | None

    def __str__(self) -> str:
        differ = "not compared" if self.difference is None else f"outputs differ by {self.difference:.2g} of their size"
        return f"{self.path}: {self.layers[0]} layers are {self.layers[1]} ({self.how}); {differ}"


def deepen_checkpoint(
    source: str | Path | Source,
    out: str | Path,
    *,
    layers: int,
    how: HowDeep = "identity",
    seed: int = 0,
    shard_size: int | str = "5GB",
    verify: bool = True,
) -> Deepened:
    """Write the checkpoint with so many layers into the folder `out`.

    how: identity (new layers write nothing into the residual stream, the function stays), stack (all layers again on
    top) or interleaved (each copy behind its layer). verify: load both models, run them on a batch, and tell how far
    their outputs differ; new layers that are to be identity and are not are an error.

    >>> import tempfile, transformers
    >>> folder = tempfile.TemporaryDirectory()
    >>> config = transformers.GPT2Config(n_embd=8, n_layer=2, n_head=2, n_positions=16, vocab_size=11)
    >>> transformers.GPT2LMHeadModel(config).save_pretrained(f"{folder.name}/small")
    >>> deepen_checkpoint(f"{folder.name}/small", f"{folder.name}/deep", layers=3).layers
    (2, 3)
    >>> folder.cleanup()
    """
    out, opened = Path(out), open_source(source)
    check_place(out, opened)
    operator = _operator(opened, how)
    before = _count(opened)
    if layers <= before:
        raise MupscaleError(f"{opened.folder} has {before} layers, and a deeper model more than that, not {layers}")
    tensors = _deep_tensors(opened, operator, before, layers)
    check_space(out, opened, sum(tensor.stored.bytes for tensor in tensors.values()))
    difference = None
    try:
        with appearing(out) as folder:
            write_companions(folder, opened, _deep_config(opened, operator, before, layers), _NO_INDEX)
            write_deep_weights(folder, tensors, shard_size, seed)
            if verify:
                difference = difference_of_checkpoints(opened, open_source(folder))
                if how == "identity" and not difference < _ROUNDING:
                    raise MupscaleError(
                        f"the deep model's outputs differ by {difference:.2g} from the shallow one's, so its new "
                        f"layers are not identity; nothing has been written"
                    )
    except OSError as error:
        raise MupscaleError(f"{out} cannot be written: {error.strerror or error}") from None
    return Deepened(out, (before, layers), how, difference)


_ROUNDING = 1e-4  # of the outputs' size, in float32
_NO_INDEX: list[Any] = [None]  # the index is written with the weights


def _operator(source: Source, how: HowDeep) -> DepthOperator:
    kind = source.model_type
    if (source.folder / RECORD_FILE).exists():
        raise MupscaleError(f"{source.folder} was widened before: make the first checkpoint deeper, then widen that")
    if how not in ("identity", "stack", "interleaved"):
        raise MupscaleError(f"new layers are identity, stack or interleaved, not {how!r}")
    if how != "identity":
        return Stack("interleaved" if how == "interleaved" else "appended")
    if kind in _POST_NORM or (kind == "opt" and not source.config.get("do_layer_norm_before", True)):
        raise MupscaleError(
            f"layers of {kind} normalise the stream after what they add to it (post-norm), so that no layer can leave "
            f"it as it is: take --how stack, which changes the function"
        )
    if kind not in WRITERS:
        raise MupscaleError(
            f"what writes into the residual stream of {kind} is not described: load the model and use "
            f"mupscale.deepen(shallow, deep, inputs=batch), which finds it by running; or take --how stack"
        )
    return Identity()


def _count(source: Source) -> int:
    """How many layers there are, by the config and by the files."""
    field = next((name for name in _COUNTS if isinstance(source.config.get(name), int)), None)
    numbers = {int(match["number"]) for name in source.tensors if (match := _LAYER.fullmatch(name))}
    lists = {match["list"] for name in source.tensors if (match := _LAYER.fullmatch(name))}
    if field is None or len(lists) != 1 or numbers != set(range(source.config[field])):
        raise MupscaleError(
            f"the layers of {source.folder} are not found: its config says {source.config.get(field or _COUNTS[0])}, "
            f"and its files have {len(numbers)} in {', '.join(sorted(lists)) or 'no list'}"
        )
    return int(source.config[field])


def _deep_tensors(source: Source, operator: DepthOperator, before: int, layers: int) -> dict[str, DeepTensor]:
    places = operator.places(before, layers)
    tensors: dict[str, DeepTensor] = {}
    for name, stored in source.tensors.items():
        match = _LAYER.fullmatch(name)
        if match is None:
            tensors[name] = DeepTensor(stored)
            continue
        for number, place in enumerate(places):
            if place.block == int(match["number"]):
                deep = f"{match['list']}.{number}.{match['local']}"
                new = place.is_new and not operator.copies
                tensors[deep] = _new_tensor(source, match["local"], stored) if new else DeepTensor(stored)
    return tensors


def _new_tensor(source: Source, local: str, stored: Any) -> DeepTensor:
    """A tensor of a layer that starts as identity: silent, constant, or drawn as the config says."""
    patterns, value = WRITERS[source.model_type]
    if _FIXED.fullmatch(local):
        return DeepTensor(stored)
    if any(re.fullmatch(rf"{pattern}(\.weight|\.bias)?", local) for pattern in patterns):
        return DeepTensor(stored, mean=value)
    if len(stored.shape) > 1:
        fields = [name for name in ("initializer_range", "init_std") if name in source.config]
        return DeepTensor(stored, mean=0.0, std=float(source.config[fields[0]] if fields else 0.02))
    is_gain = local.endswith("weight") and source.model_type not in _ZERO_GAINS
    return DeepTensor(stored, mean=1.0 if is_gain else 0.0)


def _deep_config(source: Source, operator: DepthOperator, before: int, layers: int) -> dict[str, Any]:
    """The config with more layers, and with every setting that is a list of one entry for each layer."""
    require_transformers()
    config = dict(source.config)
    places = operator.places(before, layers)
    try:
        loaded = vars(transformers_config(source.config))
    except Exception as error:
        raise MupscaleError(f"transformers cannot read the config of {source.folder}: {in_one_line(error)}") from None
    for name, value in {**loaded, **config}.items():
        per_layer = isinstance(value, list) and len(value) == before and (name in config or name == "layer_types")
        if per_layer and name not in ("architectures",):
            config[name] = [value[place.block] for place in places]
    for name in _COUNTS:
        if name in config:
            config[name] = layers
    return config
