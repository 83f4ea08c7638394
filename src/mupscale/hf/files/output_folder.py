"""The folder of a wide checkpoint: whether it may stand there and has room, and what lies beside the weights."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from mupscale.hf.files.record import RECORD_FILE
from mupscale.hf.files.shards import WeightShard, size_in_words, write_index
from mupscale.hf.files.source import Source
from mupscale.system import MupscaleError, is_taken, make_folder, open_display, open_file, replace_text

_DTYPES: dict[str, torch.dtype] = {n: getattr(torch, n) for n in ("float32", "bfloat16", "float16", "float64")}
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_COMPANIONS = (".json", ".txt", ".model", ".jinja", ".vocab", ".bpe", ".tiktoken")
_OF_THE_SMALL_ONE = ("config.json", RECORD_FILE, "trainer_state.json", "all_results.json", "train_results.json")


def check_place(out: Path, source: Source) -> None:
    """Refuse a place where something is already, or that lies inside the checkpoint itself."""
    if is_taken(out):
        raise MupscaleError(f"{out} already exists. Remove it, or choose a different name")
    here, there = out.resolve(), source.folder.resolve()
    if there == here or there in here.parents:
        raise MupscaleError(f"{out} lies inside the checkpoint {source.folder}. Choose a folder outside it")


def check_space(out: Path, source: Source, weights: int, optimizer: int = 0) -> None:
    """Refuse a disk without room, before hours of writing; it may still fill up meanwhile.

    weights, optimizer: bytes of these files.
    """
    needed = weights + optimizer + sum(file.stat().st_size for file in _companion_files(source))
    parent = next(p for p in out.absolute().parents if p.exists())
    if (free := shutil.disk_usage(parent).free) < needed:
        raise MupscaleError(
            f"the wide checkpoint needs {size_in_words(needed)} and the disk of {parent} has {size_in_words(free)} "
            "left. Free some space, or choose a different disk"
        )


def write_companions(folder: Path, source: Source, config: Mapping[str, Any], shards: Sequence[WeightShard]) -> None:
    """Config, index, tokenizer and the like."""
    replace_text(folder / "config.json", json.dumps(config, indent=2, ensure_ascii=False) + "\n")
    write_index(shards, folder)
    copy_companions(folder, source)


def copy_companions(folder: Path, source: Source) -> None:
    """Tokenizer, generation config and the like of a checkpoint, which fit it at any width."""
    for file in _companion_files(source):
        target = folder / file.relative_to(source.folder)
        make_folder(target.parent)
        with open(file, "rb") as here, open_file(target, "wb") as there:
            shutil.copyfileobj(here, there)


def _companion_files(source: Source) -> list[Path]:
    """Small files that are the same for the wide model: tokenizer, generation config, chat templates, its own code."""
    folder, kinds = source.folder, (*_COMPANIONS, *([".py"] if source.config.get("auto_map") else []))
    files = [f for f in folder.iterdir() if f.suffix in kinds and f.is_file()]
    own = [f for f in files if f.name not in _OF_THE_SMALL_ONE and not f.name.endswith(".index.json")]
    templates = (folder / "additional_chat_templates").glob("*.jinja")
    found = sorted(f for f in (*own, *templates) if not f.stem.lower().startswith("readme"))
    for file in found:
        _check_stays_inside(file, folder)
    return found


def _check_stays_inside(file: Path, folder: Path) -> None:
    """A link may lead to another file of the checkpoint, or into the hub's own store: nothing else is copied."""
    there, home = file.resolve(), folder.resolve()
    homes = [home, *([home.parents[1] / "blobs"] if home.parent.name == "snapshots" else [])]
    if not any(there.is_relative_to(place) for place in homes):
        raise MupscaleError(
            f"{file} is a link to {there}, outside the checkpoint, and is not copied. If the file belongs to the "
            "checkpoint, put the file itself there. Otherwise remove the link"
        )


def dtype_of_output(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """The dtype that a name means, of those that a checkpoint may be written in; None stays None."""
    name = str(dtype).removeprefix("torch.")
    if dtype is not None and name not in _DTYPES:
        raise MupscaleError(f"the dtype of a checkpoint is {', '.join(_DTYPES)}, not {name}")
    return None if dtype is None else _DTYPES[name]


def failure_of_writing(out: Path, error: OSError) -> str:
    """What to say where a checkpoint could not be written."""
    what = "the disk is full" if error.errno in _FULL else f"{error.strerror or error}"
    where = f" ({error.filename})" if error.filename else ""
    return f"{out} could not be written: {what}{where}; nothing was left behind"


@contextmanager
def bytes_bar(total: int, visible: bool) -> Iterator[Callable[[int], None]]:
    """Bytes and time left, where stderr is a terminal and rich is installed; yields what to call with bytes."""
    columns = ("wide bar", "bytes", "bytes/s", "left", "time left")
    display = open_display(columns, total, visible=visible, transient=True)
    try:
        yield display.advance
    finally:
        display.close()
