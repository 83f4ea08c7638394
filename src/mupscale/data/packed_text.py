"""Packed text as a person handles it: make it with `tokenize`, look at it with `info`."""

from __future__ import annotations

import json
from inspect import signature
from pathlib import Path
from typing import Any

from mupscale.data.documents import SUFFIXES, Errors
from mupscale.data.own_tables import TableFile
from mupscale.data.packing import pack, shown_progress
from mupscale.data.shards import PARTS, TOKENIZER, Index
from mupscale.data.tokenizer_choice import load_tokenizer
from mupscale.system import MupscaleError, printable, show


def tokenize(
    source: str,
    out: str,
    *,
    vocab: int | None = None,
    gpt2: str | None = None,
    field: str = "text",
    validation: float = 0.005,
    shard_tokens: int = 100_000_000,
    workers: int | None = None,
    split_seed: int = 0,
    errors: Errors = "strict",
) -> Path:
    """Tokenize text once, for all training runs on it; run again after an interruption, it goes on where it was.

    Tokens are bytes, unless --vocab or --gpt2 say otherwise.

    Args:
        source: a .txt, .jsonl, .jsonl.gz or .parquet file, a folder or a quoted glob of them, or datasets:NAME:CONFIG,
            e.g. datasets:HuggingFaceFW/fineweb-edu:CC-MAIN-2013-20
        out: folder for the packed tokens
        vocab: learn a byte-pair encoding of so many tokens from the training documents, e.g. 8192
        gpt2: take GPT-2's tokenizer, from the folder with its encoder.json and vocab.bpe
        field: where JSON lines, Parquet and datasets have the text
        validation: share of the documents kept for validation; a single document keeps its last tenth
        shard_tokens: tokens after which a new file is begun
        workers: how many threads tokenize; all cores if not given
        split_seed: which documents are kept for validation
        errors: whether text that is not valid UTF-8 is refused (strict) or gets a replacement character (replace)

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = Path(folder, "text.txt").write_text("To be, or not to be, that is the question.")
        ...     _ = tokenize(f"{folder}/text.txt", f"{folder}/tokens")
        tokenizer   bytes, 257 tokens, stored as uint16
        source      text.txt, 42 bytes
        train       39 tokens, documents: 1, files: 1
        validation  5 tokens, documents: 1, files: 1
        begins      To be, or not to be, that is the quest<|endoftext|>
    """
    if vocab is not None and gpt2 is not None:
        raise MupscaleError("--vocab learns a tokenizer and --gpt2 takes one that is there: give one of them")
    spec = f"bpe:{vocab}" if vocab is not None else f"gpt2:{gpt2}" if gpt2 is not None else "bytes"
    parts: dict[str, Any] = {"validation": validation, "split_seed": split_seed, "shard_tokens": shard_tokens}
    with shown_progress() as progress:
        pack(source, out, spec, field=field, errors=errors, workers=workers, progress=progress, **parts)
    info(out)
    return Path(out)


def info(tokens: str, **table: Any) -> None:
    """Print what a folder of packed tokens holds, or what a table in a file becomes.

    Args:
        tokens: the folder, or a CSV or Parquet file
        table: how to read a table: what `TableFile` takes

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     source = Path(folder, "lines.jsonl")
        ...     _ = source.write_text('{"text": "one"}\\n{"text": "two"}\\n')
        ...     info(str(pack(str(source), Path(folder, "tokens"))))
        tokenizer   bytes, 257 tokens, stored as uint16
        source      lines.jsonl, 32 bytes
        train       4 tokens, documents: 1, files: 1
        validation  4 tokens, documents: 1, files: 1
        begins      two<|endoftext|>
    """
    folder, usual = Path(tokens).expanduser(), signature(TableFile).parameters
    given = {name: value for name, value in table.items() if value != usual[name].default}
    if folder.is_file():
        try:
            read = TableFile(tokens, **table)
        except MupscaleError as error:
            text = f". If it is text, and no table: mupscale data tokenize {tokens} FOLDER"
            raise MupscaleError(f"{error}{text if folder.name.endswith(SUFFIXES) else ''}") from None
        return _show_table(read, {"path": tokens, **given})
    if not folder.exists():
        raise MupscaleError(f"there is no file or folder {tokens}")
    index = Index.read(folder)
    if given:
        raise MupscaleError(f"{tokens} is a folder of tokens, so {', '.join(given)} is of no use: it is for tables")
    shards = {part: index.open(folder, part) for part in PARTS}
    rows = {
        "tokenizer": f"{index.made_from.get('tokenizer', '?')}, {index.vocab_size:,} tokens, stored as {index.dtype}",
        "source": f"{index.made_from.get('source', '?')}, {index.made_from.get('source_bytes', 0):,} bytes",
    }
    for part in PARTS:
        rows[part] = f"{index.tokens(part):,} tokens, documents: {index.documents(part):,}, files: {len(shards[part])}"
    if index.empty:
        rows["skipped"] = f"{index.empty:,} empty documents"
    beginning = load_tokenizer(folder / TOKENIZER).decode(shards["train"][0][:400].tolist())
    lines = [printable(line) for line in beginning.strip().splitlines()[:4]]
    show(*(f"{name:<12}{printable(value)}" for name, value in rows.items()))
    show(f"{'begins':<12}" + "\n            ".join(lines))
    return None


def _show_table(table: TableFile, given: dict[str, Any]) -> None:
    """What a recipe has to say about a table, and what to look at before it does. given: what it was made with."""
    task = f"classification: {', '.join(table.labels)}" if table.labels else "regression, standardised"
    rows = {
        "rows": f"{table.size:,} to train on, {len(table.split.test_y):,} held out",
        "inputs": ", ".join(table.inputs),
        "target": task,
        "the data": f"{{class_path: mupscale.data.TableFile, init_args: {json.dumps(given)}}}",
        "the model": f"d_in: {len(table.inputs)}, d_out: {len(table.labels) or 1}",
        "the loss": "mupscale.train.cross_entropy (the default)" if table.labels else "torch.nn.functional.mse_loss",
    }
    show(*(f"{name:<12}{printable(value)}" for name, value in rows.items()))
