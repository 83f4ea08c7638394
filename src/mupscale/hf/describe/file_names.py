"""Which of the model's parameters a tensor in a file is: under another name, or several in a row."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True)
class InModel:
    """The parameters that a tensor in a file is made into.

    in_a_row: whether, of several, each is a part of the tensor along its first dimension, in this order.
    """

    names: tuple[str, ...]
    in_a_row: bool = True


def names_in_model(model: nn.Module, names: Iterable[str]) -> dict[str, InModel] | None:
    """By transformers' own table of what is called otherwise in files, or split; None where it has none.

    >>> from mupscale.hf.describe.building import sketch_model
    >>> names_in_model(sketch_model({"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 2}), ["wte.weight"])
    {'wte.weight': InModel(names=('transformer.wte.weight',), in_a_row=True)}
    """
    try:
        from transformers import conversion_mapping
        from transformers import core_model_loading as loading

        table = conversion_mapping.get_model_conversion_mapping(model)
        renamed = [change for change in table if isinstance(change, loading.WeightRenaming)]
        converted = [change for change in table if isinstance(change, loading.WeightConverter)]
        prefix, own = getattr(model, "base_model_prefix", None), model.state_dict()
        found = {n: loading.rename_source_key(n, renamed, converted, prefix, own) for n in names}
        return {n: _all_targets(first, pattern, converted) for n, (first, pattern) in found.items()}
    except (ImportError, AttributeError, TypeError):  # another version of transformers
        return None


def _all_targets(first: str, pattern: str | None, converted: Iterable[Any]) -> InModel:
    """All that a tensor is split into, where transformers' table names the first of them for it."""
    split = (change for change in converted if pattern in change.source_patterns and len(change.target_patterns) > 1)
    change = next(split, None)
    if change is None:
        return InModel((first,))
    targets = change.target_patterns
    plain = [type(each).__name__ in ("Chunk", "Split") and each.dim == 0 for each in change.operations]
    return InModel(tuple(first.replace(targets[0], each, 1) for each in targets), plain == [True])
