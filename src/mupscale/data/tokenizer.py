"""Text as numbers: GPT-2's byte-pair encoding, one learnt from a corpus, a Hugging Face folder's, or plain bytes."""

from __future__ import annotations

import hashlib
import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mupscale.system import MupscaleError, read_json, read_regular, require

END_OF_TEXT = "<|endoftext|>"
_LEARN_FROM = 100_000_000  # characters of the corpus: more changes a vocabulary little, and costs memory and time
_PIECE = 10_000  # characters at a time: fastest, and a long document keeps all cores busy


class Tokenizer(ABC):
    """What packing and reading need to know of a tokenizer."""

    vocab_size: int
    end_of_text: int

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        """The tokens of each text. What looks like a special token in it is text like any other."""

    @abstractmethod
    def decode(self, tokens: Sequence[int]) -> str:
        """The text of these tokens."""

    @abstractmethod
    def to_json(self) -> str:
        """All that `load_tokenizer` needs."""

    def pieces(self, text: str) -> Iterator[str]:
        """The text in parts whose tokens, one after the other, are those of the whole."""
        yield text

    @property
    def fingerprint(self) -> str:
        """The same for tokenizers that are the same."""
        return hashlib.blake2b(self.to_json().encode(), digest_size=16).hexdigest()


class Bytes(Tokenizer):
    """The bytes of UTF-8, and the end of a text."""

    vocab_size = 257
    end_of_text = 256

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def decode(self, tokens: Sequence[int]) -> str:
        shown = (END_OF_TEXT.encode() if token == self.end_of_text else bytes([token]) for token in tokens)
        return b"".join(shown).decode("utf-8", "replace")

    def to_json(self) -> str:
        return json.dumps({"mupscale": "bytes"})


class LibraryTokenizer(Tokenizer):
    """One of the `tokenizers` library, which takes special tokens in a text for text."""

    def __init__(self, tokenizer: Any) -> None:
        tokenizer.encode_special_tokens = True
        self._tokenizer = tokenizer

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(text.ids, np.uint32) for text in encoded]

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(map(int, tokens)), skip_special_tokens=False))


class BPE(LibraryTokenizer):
    """Byte-pair encoding on bytes with GPT-2's way to cut text into words; saved as the `tokenizers` library does."""

    def __init__(self, tokenizer: Any) -> None:
        tokenizer.add_special_tokens([END_OF_TEXT])
        super().__init__(tokenizer)
        self.vocab_size = int(tokenizer.get_vocab_size())
        self.end_of_text = int(tokenizer.token_to_id(END_OF_TEXT))

    @classmethod
    def gpt2(cls, folder: str | Path) -> BPE:
        """GPT-2's, from its two files, under either of the names they are known by."""
        tokenizers = tokenizers_package()
        folder, found = Path(folder).expanduser(), []
        for names in (_VOCAB_FILES, _MERGES_FILES):
            if not (files := [folder / name for name in names if (folder / name).is_file()]):
                raise MupscaleError(
                    f"the folder {folder} has no {' or '.join(names)}, which GPT-2's tokenizer is made of"
                )
            found.append(files[0])
        vocab, merges = found
        with _refusing(f"{vocab} and {merges} hold no byte-pair encoding"):
            model = tokenizers.models.BPE.from_file(str(vocab), str(merges))
        if model.token_to_id(END_OF_TEXT) is None:
            raise MupscaleError(f"{vocab} has no {END_OF_TEXT}, the token that GPT-2 ends a text with")
        return cls(_with_gpt2_words(model))

    @classmethod
    def learn(cls, texts: Iterable[str], vocab: int) -> BPE:
        """Learn the encoding from the first 100 million characters of these texts.

        The vocabulary has `vocab` tokens, the 256 bytes and the end of a text included; fewer where no pair repeats.
        """
        tokenizers = tokenizers_package()
        tokenizer = _with_gpt2_words(tokenizers.models.BPE())
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=vocab - 1,
            min_frequency=2,
            initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        tokenizer.train_from_iterator(_first_characters(texts), trainer)
        return cls(tokenizer)

    def to_json(self) -> str:
        return str(self._tokenizer.to_str())

    def pieces(self, text: str) -> Iterator[str]:
        start = 0
        while cut := _CUT.search(text, start + _PIECE):
            yield text[start : cut.start()]
            start = cut.start()
        yield text[start:]


# No word of GPT-2's goes on from what is no space to a space, so text can be cut there.
_CUT = re.compile(r"(?<=\S)(?=[ \n])")
_VOCAB_FILES, _MERGES_FILES = ("encoder.json", "vocab.json"), ("vocab.bpe", "merges.txt")


@contextmanager
def one_thread_each() -> Iterator[None]:
    """Let `encode_batch` use the thread that calls it and no more, for callers that bring their own threads."""
    variable = "TOKENIZERS_PARALLELISM"  # the one way to tell the library
    before = os.environ.get(variable)
    os.environ[variable] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[variable]
        else:
            os.environ[variable] = before


def tokenizers_package() -> Any:
    return require("tokenizers", reason="byte-pair encoding needs tokenizers")


@contextmanager
def _refusing(what: str) -> Iterator[None]:
    try:
        yield
    except MupscaleError:
        raise
    except Exception as error:  # the library raises nothing more precise
        raise MupscaleError(f"{what}: {error}") from None


def _with_gpt2_words(model: Any) -> Any:
    tokenizers = tokenizers_package()
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return tokenizer


def _first_characters(texts: Iterable[str]) -> Iterator[str]:
    left = _LEARN_FROM
    for text in texts:
        yield text[:left]
        left -= len(text)
        if left <= 0:
            return


PRETRAINED = "pretrained"  # in the file that packed tokens keep their tokenizer in


class PretrainedTokenizer(LibraryTokenizer):
    """A tokenizer.json of the tokenizers library, and the token that ends a text."""

    def __init__(self, content: Mapping[str, Any], end_of_text: int) -> None:
        with _refusing("this tokenizer.json holds no tokenizer"):
            super().__init__(tokenizers_package().Tokenizer.from_str(json.dumps(content)))
        self._content, self.end_of_text = content, end_of_text
        self.vocab_size = max(int(self._tokenizer.get_vocab_size()), end_of_text + 1)

    @classmethod
    def in_folder(cls, folder: str | Path) -> PretrainedTokenizer:
        """From a folder's tokenizer.json; its tokenizer_config.json or config.json tells what ends a text."""
        folder = Path(folder).expanduser()
        if not (folder / "tokenizer.json").is_file():
            raise MupscaleError(
                f"{folder} has no tokenizer.json: save it there with tokenizer.save_pretrained({str(folder)!r}), or "
                f"name another folder"
            )
        content = read_json(folder / "tokenizer.json")
        if not isinstance(content, dict):
            raise MupscaleError(f"{folder / 'tokenizer.json'} holds no tokenizer")
        return cls(content, _end_of_text(folder, content))

    def to_json(self) -> str:
        return json.dumps({"mupscale": PRETRAINED, "end_of_text": self.end_of_text, "tokenizer": self._content})


def _end_of_text(folder: Path, content: Mapping[str, Any]) -> int:
    settings = _optional(folder / "tokenizer_config.json")
    named = settings.get("eos_token") or settings.get("sep_token")  # encoders such as BERT end with a separator
    name = named.get("content") if isinstance(named, Mapping) else named
    for token in content.get("added_tokens") or []:
        if isinstance(token, Mapping) and name is not None and token.get("content") == name:
            return int(token["id"])
    vocabulary = (content.get("model") or {}).get("vocab")
    if isinstance(vocabulary, Mapping) and name in vocabulary:
        return int(vocabulary[name])
    number = _optional(folder / "config.json").get("eos_token_id")
    if isinstance(number, list) and number:
        number = number[0]
    if isinstance(number, int):
        return number
    raise MupscaleError(f"{folder} does not say which token ends a text: give eos_token in its tokenizer_config.json")


def _optional(path: Path) -> Mapping[str, Any]:
    values = read_json(path) if path.is_file() else {}
    return values if isinstance(values, Mapping) else {}


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
    with _refusing(f"{path} holds no tokenizer"):
        if isinstance(content, dict) and content.get("mupscale") == PRETRAINED:
            return PretrainedTokenizer(content["tokenizer"], int(content["end_of_text"]))
        return BPE(tokenizers_package().Tokenizer.from_str(text))
