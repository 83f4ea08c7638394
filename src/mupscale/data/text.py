"""Text to train on: windows of packed tokens, read from where they lie."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mupscale.data.documents import Corpus, Errors, source_name
from mupscale.data.packing import (
    INDEX,
    TOKENIZER,
    DocumentSplit,
    Index,
    Windows,
    check_packed_with,
    pack,
    shown_progress,
)
from mupscale.data.stream import Batch, Data
from mupscale.data.tokenizer import Bytes, Tokenizer, load_tokenizer, tokenizer_name
from mupscale.system import MupscaleError


class TokenWindows(Data):
    """Windows of a stream of tokens; the targets are the same window one token on."""

    unit = "tokens"
    rows_on = torch.device("cpu")

    def __init__(
        self, train: list[NDArray[Any]], validation: list[NDArray[Any]], context: int, vocab_size: int
    ) -> None:
        if context < 1:
            raise MupscaleError(f"context is {context}, but a window has at least one token")
        self._train, self._validation = Windows(train, context), Windows(validation, context)
        for part, windows in (("training", self._train), ("validation", self._validation)):
            if not len(windows):
                raise MupscaleError(
                    f"the {part} text has {windows.tokens} tokens, too few for a window of {context} and the one after "
                    f"it: take a smaller context, or pack more text for {part}"
                )
        self.per_example, self.classes = context, vocab_size

    @property
    def size(self) -> int:
        return len(self._train)

    def examples(self, rows: Tensor) -> Batch:
        return self._batch(self._train, rows)

    def evaluation(self, batch: int) -> Iterator[Batch]:
        for rows in torch.arange(len(self._validation)).split(batch):
            yield self._batch(self._validation, rows)

    def _batch(self, windows: Windows, rows: Tensor) -> Batch:
        tokens = torch.from_numpy(windows.take(rows.cpu().numpy()))
        if self.device.type == "cuda":  # narrow integers travel, and nobody waits for them
            tokens = tokens.pin_memory().to(self.device, non_blocking=True)
        x, y = (part.to(self.device, torch.int64) for part in (tokens[:, :-1], tokens[:, 1:]))
        return x, y


class Text(TokenWindows):
    """Packed tokens, made from a source on first use or by `mupscale data tokenize` beforehand.

    Of several processes that use it first, one packs and the others wait.

    Args:
        tokens: folder of the packed tokens
        context: tokens in a window
        source: what to pack if the folder is not there: a .txt, .jsonl, .jsonl.gz or .parquet file, a folder or a glob
            of them, or datasets:NAME:CONFIG
        tokenizer: bytes, bpe:8192 to learn one of that size, gpt2:FOLDER, or hf:FOLDER (of any Hugging Face model, its
            tokenizer.json); bytes if not given, or what is there
        field: where JSON lines, Parquet and datasets have the text
        validation: share of the documents kept for validation; a single document keeps its last tenth
        split_seed: which documents are kept for validation
        errors: whether text that is not valid UTF-8 is refused (strict) or gets a replacement character (replace)
    """

    def __init__(
        self,
        tokens: str,
        *,
        context: int = 1024,
        source: str | None = None,
        tokenizer: str | None = None,
        field: str = "text",
        validation: float = 0.005,
        split_seed: int = 0,
        errors: Errors = "strict",
    ) -> None:
        folder = Path(tokens).expanduser()
        options: dict[str, Any] = {"field": field, "validation": validation, "split_seed": split_seed}
        if source is not None and not (folder / INDEX).exists():
            with shown_progress() as progress:
                pack(source, folder, tokenizer or "bytes", errors=errors, progress=progress, **options)
        index = Index.read(folder)
        if tokenizer is not None:
            check_packed_with(folder, index.made_from, {"tokenizer": tokenizer_name(tokenizer)})
        if source is not None:
            options = {"source": source_name(source), **options}
            check_packed_with(folder, index.made_from, options)
            if not source.startswith("datasets:") and Path(source).expanduser().exists():  # it may be gone by now
                check_packed_with(folder, index.made_from, {"source_fingerprint": Corpus(source).fingerprint})
        super().__init__(index.open(folder, "train"), index.open(folder, "validation"), context, index.vocab_size)
        self._folder = folder

    @classmethod
    def writes_to(cls, arguments: Mapping[str, Any]) -> Path | None:
        """The folder that would be packed: there is a source, and no packed tokens yet."""
        if arguments.get("source") is None:
            return None
        folder = Path(str(arguments.get("tokens"))).expanduser()
        return None if (folder / INDEX).exists() else folder

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the packed text; training does not need it."""
        return load_tokenizer(self._folder / TOKENIZER)


def tinyshakespeare() -> str:
    """The text of Tiny Shakespeare: 1.1 MB of plays in the public domain, collected by Andrej Karpathy.

    >>> print(tinyshakespeare()[:50])
    First Citizen:
    Before we proceed any further, hear
    """
    return resources.files("mupscale.data").joinpath("tinyshakespeare.txt").read_text(encoding="utf-8")


class Shakespeare(TokenWindows):
    """Tiny Shakespeare, which ships with the package, as bytes in memory; its last tenth is for validation.

    Args:
        context: bytes in a window

    Example:
        >>> x, y = Shakespeare(context=8).batch(seed=0, start=0, count=2)
        >>> x.shape, bool((x[:, 1:] == y[:, :-1]).all())  # targets are the next tokens
        (torch.Size([2, 8]), True)
    """

    def __init__(self, context: int = 256) -> None:
        self.tokenizer = Bytes()
        ends = np.array([self.tokenizer.end_of_text], np.uint16)
        texts = dict(DocumentSplit(seed=0, below=None)(tinyshakespeare()))
        parts = {part: np.append(self.tokenizer.encode_batch([text])[0], ends) for part, text in texts.items()}
        super().__init__([parts["train"]], [parts["validation"]], context, self.tokenizer.vocab_size)
