"""Flash attention for a stack: the runs are folded into its batch.

Under vmap, torch's scaled_dot_product_attention takes the plain way: two products and a softmax in memory. The flash
kernel itself has a rule for vmap, which folds the runs into the batch. While `folded_attention` is in force, calls
that the kernel can answer go to it directly; all others go the way they went before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

_LOW = (torch.bfloat16, torch.float16)
_plain_attention = F.scaled_dot_product_attention


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """What F.scaled_dot_product_attention computes, by the flash kernel where it can."""
    if torch.is_autocast_enabled("cuda"):
        low = torch.get_autocast_dtype("cuda")
        query, key, value = query.to(low), key.to(low), value.to(low)
    if attn_mask is None and not dropout_p and flash_can_answer(query, key, value, is_causal):
        out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, is_causal, scale=scale
        )[0]
        return out
    more: dict[str, Any] = {"attn_mask": attn_mask, "dropout_p": dropout_p, "is_causal": is_causal}
    return _plain_attention(query, key, value, **more, scale=scale, enable_gqa=enable_gqa)


def flash_can_answer(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> bool:
    """Whether the flash kernel takes these as they are, and masks as torch does.

    >>> import torch
    >>> one = torch.zeros(2, 4, 16, 32, device="meta", dtype=torch.bfloat16)
    >>> flash_can_answer(one, one, one, is_causal=True)  # only on a GPU
    False
    """
    heads = query.dim() == 4 and query.shape[1] == key.shape[1] == value.shape[1]
    sizes = query.shape[-1] == key.shape[-1] == value.shape[-1] <= 256 and query.shape[-1] % 8 == 0
    square = query.shape[-2] == key.shape[-2] or not is_causal  # the kernel aligns the mask at the other end
    dtypes = query.dtype == key.dtype == value.dtype and query.dtype in _LOW
    return query.is_cuda and heads and sizes and square and dtypes


@contextmanager
def folded_attention(enabled: bool) -> Iterator[None]:
    """While this is in force, attention goes to the flash kernel where that can answer it."""
    if not enabled:
        yield
        return
    before = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = _attention
    try:
        yield
    finally:
        F.scaled_dot_product_attention = before
