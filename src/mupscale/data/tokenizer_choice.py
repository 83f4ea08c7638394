"""Which tokenizer is meant, by a word in a recipe or by the file that packed tokens keep it in."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from mupscale.data.pretrained_tokenizer import PRETRAINED, PretrainedTokenizer
from mupscale.data.tokenizer import BPE, Bytes, Tokenizer, tokenizers_package
from mupscale.system import MupscaleError, read_regular

LARGEST_VOCABULARY = 10_000_000


def parse_tokenizer(spec: str) -> tuple[str, str]:
    """The kind of a tokenizer and what goes with it: bytes, bpe:8192, gpt2:FOLDER or hf:FOLDER."""
    kind, _, argument = spec.partition(":")
    if kind == "bpe" and argument.isdecimal() and int(argument) < 257:
        raise MupscaleError(
            f"a vocabulary of {argument} is too small: 256 bytes and the end of a text make 257 at least"
        )
    if kind == "bpe" and argument.isdecimal() and int(argument) > LARGEST_VOCABULARY:
        raise MupscaleError(f"a vocabulary of {argument} is too large: {LARGEST_VOCABULARY:,} tokens are the most")
    in_folder = argument != ""
    is_valid = {"bytes": argument == "", "bpe": argument.isdecimal(), "gpt2": in_folder, "hf": in_folder}
    if not is_valid.get(kind, False):
        raise MupscaleError(
            f"there is no tokenizer {spec!r}: take bytes, bpe:8192 (any size), gpt2:FOLDER or hf:FOLDER (its "
            f"tokenizer.json)"
        )
    return kind, argument


def tokenizer_name(spec: str) -> str:
    """A tokenizer's name wherever its files are."""
    kind, _ = parse_tokenizer(spec)
    return kind if kind in ("gpt2", "hf") else spec


def make_tokenizer(spec: str, texts: Iterable[str]) -> Tokenizer:
    """The tokenizer that `parse_tokenizer` explains; one that is learnt looks at the texts."""
    kind, argument = parse_tokenizer(spec)
    if kind == "bytes":
        return Bytes()
    if kind == "hf":
        return PretrainedTokenizer.in_folder(argument)
    return BPE.gpt2(argument) if kind == "gpt2" else BPE.learn(texts, int(argument))


def load_tokenizer(path: str | Path) -> Tokenizer:
    """A tokenizer from the file that its `to_json` was written to."""
    try:
        text = read_regular(path).decode("utf-8")
        content = json.loads(text)
        if content == {"mupscale": "bytes"}:
            return Bytes()
    except (OSError, ValueError, RecursionError, MupscaleError) as error:
        raise MupscaleError(f"the tokenizer {path} cannot be read: {error}") from None
    try:
        if isinstance(content, dict) and content.get("mupscale") == PRETRAINED:
            return PretrainedTokenizer(content["tokenizer"], int(content["end_of_text"]))
        return BPE(tokenizers_package().Tokenizer.from_str(text))
    except MupscaleError:
        raise
    except Exception as error:  # the library raises nothing more precise
        raise MupscaleError(f"{path} holds no tokenizer: {error}") from None
