"""MPT: ALiBi as in BLOOM, norms without biases, queries, keys and values one after the other in one projection."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mupscale.core import Number
from mupscale.hf.describe.architecture import Architecture, Config, Tied, Wires
from mupscale.hf.describe.architectures.bloom import folds_of_wider_heads, why_not_with_alibi
from mupscale.hf.describe.architectures.llama import HEADS, OTHERS
from mupscale.hf.describe.multipliers import Times
from mupscale.hf.describe.registry import register
from mupscale.hf.describe.wires import linear, table, vector


def _attention(config: Config) -> Mapping[str, Any]:
    return config.get("attn_config") or {}


def _wires(wires: Wires, config: Config) -> Wires:
    queries = replace(wires["queries"], last=True)
    return {"queries": queries, "qkv": queries | queries | queries}


def _folds(config: Config, times: Times) -> dict[str, Number]:
    power = 0.25 if _attention(config).get("softmax_scale") is None else 0.5
    return folds_of_wider_heads("*.attn.Wqkv.weight", "*.attn.out_proj.weight", times, power)


def _also(config: Config, times: Times) -> Config:
    """Queries, keys and values are cut off at a number that takes their constant, too."""
    clip, folds = _attention(config).get("clip_qkv"), _folds(config, times)
    if not clip or not folds:
        return {}
    return {"attn_config": {**_attention(config), "clip_qkv": clip * float(folds["*.attn.Wqkv.weight"])}}


def _refuse(config: Config, times: Times) -> str:
    return why_not_with_alibi(MPT.number(config, "n_heads"), times)


MPT = register(
    Architecture(
        "mpt",
        tensors={
            "*.attn.Wqkv.weight": linear("qkv", "hidden"),
            "*.attn.out_proj.weight": linear("hidden", "queries"),
            "*.ffn.up_proj.weight": linear("ffn", "hidden"),
            "*.ffn.down_proj.weight": linear("hidden", "ffn"),
            "*wte.weight": table("hidden"),
            "*norm_[12f].weight": vector("hidden").in_norm("layer"),
            **HEADS,
        },
        tied=Tied(
            embedding="*wte.weight",
            readouts=("lm_head.weight",),
            norm=("*norm_f.weight",),
            others=OTHERS,
            default=True,
        ),
        hidden="d_model",
        ffn=None,
        heads="n_heads",
        defaults={"d_model": 2048, "n_heads": 16, "initializer_range": 0.02},
        wider_heads=True,
        wires=_wires,
        folds=_folds,
        also=_also,
        refuse=_refuse,
    )
)
