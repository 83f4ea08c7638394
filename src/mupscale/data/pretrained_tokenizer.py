"""The tokenizer of a Hugging Face folder, read as data: its tokenizer.json, and never code."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mupscale.data.tokenizer import LibraryTokenizer, tokenizers_package
from mupscale.system import MupscaleError, read_json

PRETRAINED = "pretrained"  # in the file that packed tokens keep their tokenizer in


class PretrainedTokenizer(LibraryTokenizer):
    """A tokenizer.json of the tokenizers library, and the token that ends a text."""

    def __init__(self, content: Mapping[str, Any], end_of_text: int) -> None:
        try:
            super().__init__(tokenizers_package().Tokenizer.from_str(json.dumps(content)))
        except MupscaleError:
            raise
        except Exception as error:  # the library raises nothing more precise
            raise MupscaleError(f"this tokenizer.json holds no tokenizer: {error}") from None
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
    """The number of the token that ends a text."""
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
    raise MupscaleError(f"{folder} does not tell which token ends a text: give eos_token in its tokenizer_config.json")


def _optional(path: Path) -> Mapping[str, Any]:
    values = read_json(path) if path.is_file() else {}
    return values if isinstance(values, Mapping) else {}
