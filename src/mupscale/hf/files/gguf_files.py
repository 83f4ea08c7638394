"""GGUF: one file with config, tokenizer and mostly quantised weights, read through transformers' own loader."""

from __future__ import annotations

from contextlib import redirect_stderr
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import torch

from mupscale.hf.describe import in_one_line, quiet_transformers, require_transformers
from mupscale.hf.files.source import Source, TemporaryFolder, open_source
from mupscale.system import MupscaleError, checks_arguments, make_folder, require


@checks_arguments
def read_gguf(path: str | Path) -> Source:
    """A GGUF file as a checkpoint of float32 numbers, which `upscale`, `verify` and `inspect` take like a folder.

    Its weights are dequantised: what the file rounded stays rounded. They are in memory once, and then lie in a
    temporary folder as long as the result lives.

    >>> read_gguf("absent.gguf")
    Traceback (most recent call last):
    mupscale.system.errors.MupscaleError: there is no file at absent.gguf: give a GGUF file
    """
    file = Path(path)
    if not file.is_file():
        raise MupscaleError(f"there is no file at {path}: give a GGUF file")
    transformers = require_transformers()
    require("gguf", reason=f"reading {file.name} needs the package gguf")
    place = TemporaryFolder()
    folder = make_folder(Path(place.name) / file.stem)
    where = {"gguf_file": file.name, "local_files_only": True}
    try:
        with quiet_transformers(), redirect_stderr(StringIO()):  # its bar, which no setting turns off
            model = transformers.AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **where)
            _save(model, folder)
            transformers.AutoTokenizer.from_pretrained(file.parent, **where).save_pretrained(folder)
    except OSError as error:
        raise MupscaleError(
            f"{file} could not be unpacked into {place.name} ({in_one_line(error)}): if its disk is full, set TMPDIR "
            f"to a folder on a larger one"
        ) from None
    except Exception as error:  # whatever the loader makes of the file
        raise MupscaleError(f"transformers cannot read {file}: {in_one_line(error)}") from None
    opened = open_source(folder)
    return replace(opened, resources=(*opened.resources, place))


def _save(model: torch.nn.Module, folder: Path) -> None:
    """config.json and weights; save_pretrained refuses a model that came from a quantised file, dequantised or not."""
    from safetensors.torch import save_file

    config: Any = model.config
    del config.quantization_config
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    first = {tensor.data_ptr(): name for name, tensor in reversed(model.state_dict().items())}  # of tied ones
    tensors = {name: t.contiguous() for name, t in model.state_dict().items() if first[t.data_ptr()] == name}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
