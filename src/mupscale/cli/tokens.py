"""The commands `mupscale data …`: tokenize, info."""

from __future__ import annotations

from mupscale.cli.command_lines import CommandLine, Option, Section

TOKENIZE = CommandLine(
    "data tokenize",
    "tokenize text and store the tokens",
    "SOURCE OUT [--option VALUE …]",
    """\
Turn text into tokens, once: a folder of memory-mapped shards and an index, which mupscale.data.Text reads.

  mupscale data tokenize books.jsonl.gz data/books --vocab 8192     with a BPE trained on the text itself
  mupscale data tokenize 'web/*.parquet' data/web --gpt2 gpt2-bpe   with GPT-2's, from encoder.json and vocab.bpe""",
    (Section("mupscale.data.tokenize"),),
    resumable=True,
    calls="mupscale.data.tokenize",
)

INFO = CommandLine(
    "data info",
    "show what a folder of tokens, or a CSV or Parquet file, holds",
    "FOLDER | FILE [--target COLUMN] [--option VALUE …]",
    """\
What a folder of tokens holds, or what a table in a file becomes.

  mupscale data info data/books
  mupscale data info plants.csv --target kind --skip id --missing mean""",
    (
        Option("tokens", str, "the folder, or a CSV or Parquet file"),
        Section("mupscale.data.TableFile", skip=frozenset({"path"})),
    ),
    calls="mupscale.data.info",
)
