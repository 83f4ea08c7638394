"""Memory for large tensors in large pages: most of the time of writing fresh memory goes into small page faults."""

from __future__ import annotations

import ctypes
import sys

import torch
from torch import Tensor

_HUGE_PAGE = 2 << 20
_MADV_HUGEPAGE = 14  # Linux


def empty_like(template: Tensor, device: torch.device) -> Tensor:
    """torch.empty_like on a device; on a Linux CPU the kernel is asked for huge pages, and may decline."""
    tensor = torch.empty_like(template, device=device)
    if tensor.is_cpu and sys.platform == "linux":
        start = -(-tensor.data_ptr() // _HUGE_PAGE) * _HUGE_PAGE
        stop = (tensor.data_ptr() + tensor.nbytes) // _HUGE_PAGE * _HUGE_PAGE
        if stop > start:
            ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), _MADV_HUGEPAGE)
    return tensor
