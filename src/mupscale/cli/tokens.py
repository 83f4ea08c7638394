"""The commands `mupscale data …`: tokenize, info."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mupscale.cli.arguments import make_parser, parse_arguments

TOKENIZE = """\
Turn text into tokens, once: a folder of memory-mapped shards and an index, which mupscale.data.Text reads.

  mupscale data tokenize books.jsonl.gz data/books --vocab 8192     with a BPE trained on the text itself
  mupscale data tokenize 'web/*.parquet' data/web --gpt2 gpt2-bpe   with GPT-2's, from encoder.json and vocab.bpe"""

INFO = """\
What a folder of tokens holds, or what a table in a file becomes.

  mupscale data info data/books
  mupscale data info plants.csv --target kind --skip id --missing mean"""


def tokenize_command(words: list[str]) -> int:
    """mupscale data tokenize SOURCE OUT."""
    from mupscale.data import tokenize

    return _call("data tokenize", "SOURCE OUT [--option VALUE …]", TOKENIZE, tokenize, words)


def info_command(words: list[str]) -> int:
    """mupscale data info FOLDER or FILE."""
    from mupscale.data import info

    return _call("data info", "FOLDER | FILE [--target COLUMN] [--option VALUE …]", INFO, info, words)


def _call(command: str, usage: str, about: str, function: Callable[..., Any], words: list[str]) -> int:
    """A function with its own parameters as options."""
    parser = make_parser(command, usage, about)
    parser.add_function_arguments(function, as_group=False, as_positional=True)
    function(**parse_arguments(parser, words).as_dict())
    return 0
