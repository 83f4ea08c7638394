"""Two checkpoints of one width, loaded and run on the same batch: how far their outputs differ."""

from __future__ import annotations

import torch

from mupscale.hf.describe import make_batches
from mupscale.hf.files import Source
from mupscale.hf.verification.loading import load_pretrained
from mupscale.hf.verification.model_outputs import compare_outputs


def difference_of_checkpoints(ours: Source, theirs: Source) -> float:
    """The largest relative difference of any output, in float32.

    >>> import tempfile, transformers
    >>> from mupscale.hf.files import open_source
    >>> folder = tempfile.TemporaryDirectory()
    >>> config = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, n_positions=16, vocab_size=11)
    >>> transformers.GPT2LMHeadModel(config).save_pretrained(folder.name)
    >>> difference_of_checkpoints(open_source(folder.name), open_source(folder.name))
    0.0
    >>> folder.cleanup()
    """
    small, large = (load_pretrained(source, torch.float32).model for source in (ours, theirs))
    return max(compare_outputs(small, large, make_batches(small)).differences.values())
