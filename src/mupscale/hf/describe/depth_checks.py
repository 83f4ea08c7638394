"""Which checkpoints cannot become deeper, or not in the way that is asked for, and why."""

from __future__ import annotations

import re
from collections.abc import Collection

from mupscale.growth import Deepen
from mupscale.hf.describe.building import Config, sketch_model
from mupscale.hf.describe.depths import called, deep_config, depth_operator, layer_origins
from mupscale.hf.describe.miniatures import LAYER, LAYERS, find_residual_writers
from mupscale.system import MupscaleError

_ONE_FOR_EACH_LAYER = re.compile(r"layer_weights")  # the weights of a sum over what all layers give


def check_depth(config: Config, how: Deepen, layers: int, names: Collection[str], folder: object) -> None:
    """An error where this checkpoint cannot be made so deep in this way."""
    kind, operator = str(config.get("model_type")), depth_operator(how)
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
    before = _counts(config, names, folder)
    if layers <= max(before.values()):
        raise MupscaleError(
            f"{folder} has {max(before.values())} layers. A deeper model needs more than that, not {layers}"
        )
    if odd := _misfit(config, how, layers):
        instead = f"take {called('identity')}"
        raise MupscaleError(
            f"layers of {kind} do not all hold the same tensors, so new ones modelled on those of {folder} ('{how}') "
            f"would be incomplete: {odd}{f'; {instead}' if operator.copies else ''}"
        )


def _misfit(config: Config, how: Deepen, layers: int) -> str:
    """What the deep model's layers hold that those which they are made after do not, or the reverse; or nothing."""
    shallow, deep = (
        [name for name, _ in sketch_model(made).named_parameters(remove_duplicate=False)]
        for made in (config, deep_config(config, how, layers))
    )
    made = layer_origins(shallow, how, layers)
    if lacking := [name for name in deep if name not in made]:
        return f"nothing would be '{lacking[0]}'"
    surplus = made.keys() - deep
    return f"the model with {layers} layers has no '{min(surplus)}'" if surplus else ""


def _counts(config: Config, names: Collection[str], folder: object) -> dict[str, int]:
    """How many layers each list has, by the files and by the config."""
    numbers: dict[str, set[int]] = {}
    for name in names:
        if match := LAYER.fullmatch(name):
            numbers.setdefault(match["list"], set()).add(int(match["number"]))
    told = {config[field] for field in LAYERS if isinstance(config.get(field), int)}
    whole = all(found == set(range(len(found))) and len(found) in told for found in numbers.values())
    if not numbers or not whole or len(numbers) > 1 + bool(config.get("is_encoder_decoder")):
        says = " and ".join(map(str, sorted(told))) or "nothing"
        raise MupscaleError(
            f"the layers of {folder} were not found: its config says {says}, but its files have "
            f"{sum(map(len, numbers.values()))} in {', '.join(sorted(numbers)) or 'no list'}"
        )
    return {path: len(found) for path, found in numbers.items()}
