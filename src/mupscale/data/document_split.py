"""Which documents are for training and which for validation: a question to each text alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mupscale.data.shards import Part
from mupscale.system import MupscaleError, derive

_LARGEST = 1 << 63  # that a hash stays below


@dataclass(frozen=True)
class DocumentSplit:
    """A document is for validation if a hash of the seed and its text is below `below`.

    So the parts do not depend on the order of documents or on how they are read, and no copy of a training document is
    in the validation part. With `tail`, there is one document alone, and this share of it, its end, is for validation.
    """

    seed: int
    below: int
    tail: float = 0.0

    def __call__(self, text: str) -> list[tuple[Part, str]]:
        """The parts of a text, and what of it belongs to them."""
        if self.tail:
            cut = round(len(text) * (1 - self.tail))
            return [("train", text[:cut]), ("validation", text[cut:])]
        return [("validation" if _hash(self.seed, text) < self.below else "train", text)]


def find_split(texts: Iterable[str], validation: float, tail: float, seed: int) -> DocumentSplit:
    """The split that has about a share `validation` of the documents for validation, and at least one in each part.

    Looks at documents only until both parts have one, about 1 / validation of them.
    """
    if not (0 < validation < 1 and 0 < tail < 1):
        raise MupscaleError(f"validation is {validation} and tail {tail}, but both are shares between 0 and 1")
    below = round(validation * _LARGEST)
    lowest, highest, text = _LARGEST, -1, ""
    for text in texts:
        value = _hash(seed, text)
        lowest, highest = min(lowest, value), max(highest, value)
        if lowest < below <= highest:
            return DocumentSplit(seed, below)
    if highest < 0:
        raise MupscaleError("there is no document with any text in it: look at the source and at its text field")
    if lowest < highest:
        return DocumentSplit(seed, lowest + 1 if below <= lowest else highest)
    split = DocumentSplit(seed, below, tail)
    if not all(part for _, part in split(text)):
        raise MupscaleError(f"the only text, {text[:20]!r}, is too short to be cut into training and validation parts")
    return split


def _hash(seed: int, text: str) -> int:
    return derive(seed, "split", text)
