"""BLOOM: ALiBi, a norm at the embedding, queries, keys and values of each head side by side.

ALiBi gives each head a slope that follows from the number of heads. So copies make the heads wider, not more, with
constants in their weights for the attention's scale, which follows from their size. Fresh heads come between the old
ones, whose slopes stay theirs while the number of heads is a power of two.
"""

from dataclasses import replace

from mupscale.core import Number
from mupscale.hf.describe.architecture import Architecture, Config, Wires
from mupscale.hf.describe.architectures.falcon import FALCON
from mupscale.hf.describe.multipliers import Ratios, Times
from mupscale.hf.describe.registry import register
from mupscale.system import setting


def why_not_with_alibi(heads: int, times: Times) -> str:
    """What ALiBi leaves to growth: wider heads by copies, twice as many (four, …) by fresh units."""
    if not isinstance(times, Ratios):
        if times.heads == 1:
            return ""
        wider = setting("times", f"hidden={times.hidden},ffn={times.hidden},heads=1")
        return (
            "the slopes of ALiBi follow from the number of heads, so a copied head cannot keep its slope. Keep the "
            f"number of heads and make them wider, as in {wider}"
        )
    doubled = isinstance(times.heads, int) and times.heads.bit_count() == 1 and heads.bit_count() == 1
    if times.hidden == times.heads and (doubled or times.heads == 1):
        return ""
    if times.hidden != times.heads:
        return (
            "new units inside a head would change what it attends to: let heads and hidden units grow by the same "
            "factor"
        )
    return (
        f"the slopes of ALiBi follow from the number of heads, and those of {heads} heads are among those of "
        f"{heads * times.heads} only if both numbers are powers of two. Let hidden and heads grow 2 or 4 times, or "
        f"make heads wider by copies ({setting('times', 'hidden=2,ffn=2,heads=1')})"
    )


def folds_of_wider_heads(packed: str, out: str, times: Times, power: float = 0.25) -> dict[str, Number]:
    """Queries and keys take back what larger heads add to their product; values come with them in one tensor.

    power: 1/4 where the model divides by the root of the heads' size, 1/2 where its scale is given.
    """
    if times.heads != 1 or times.hidden == 1:
        return {}
    return {packed: float(times.hidden) ** -power, out: float(times.hidden) ** power}


def _wires(wires: Wires, config: Config) -> Wires:
    queries = replace(wires["queries"], last=True)
    many = queries.times != 1 and queries.block != 1  # heads, each with its query, key and value
    return {"queries": queries, "qkv": queries * 3 if many else replace(queries, size=3 * queries.size)}


def _refuse(config: Config, times: Times) -> str:
    return why_not_with_alibi(BLOOM.number(config, "n_head"), times)


BLOOM = register(
    Architecture(
        "bloom",
        tensors=FALCON.tensors,
        tied=FALCON.tied,
        ffn=None,
        heads="n_head",
        defaults={"hidden_size": 64, "n_head": 8, "initializer_range": 0.02},
        wider_heads=True,
        wires=_wires,
        folds=lambda config, times: folds_of_wider_heads("*.query_key_value.*", "*.self_attention.dense.weight", times),
        refuse=_refuse,
        not_lossless=lambda config, times: "a norm comes at the embedding" if times.hidden != 1 else "",
    )
)
