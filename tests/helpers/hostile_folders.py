"""A folder of files that somebody prepared to do harm, made on the spot. Whatever runs leaves a file named `ran`."""

from __future__ import annotations

import gzip
import json
import os
import pickle
from pathlib import Path
from typing import Any

import torch

from hf_files import llama_config, llama_shapes, llama_tensors, write_checkpoint
from mupscale.train import save_dcp

MLP = {"class_path": "mupscale.models.MLP", "init_args": {"d_in": 54, "d_out": 7}}
DATA = {"class_path": "mupscale.data.CoverTypeSample", "init_args": {}}
SGD = {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}}
RECIPE = {"model": MLP, "data": DATA, "optimizer": SGD, "width": 8, "base": 8, "steps": 2, "batch": 20}


def hostile_runs(folder: Path) -> list[Path]:
    """Folders of runs whose recipes, metrics or checkpoints are meant to be loaded."""
    trace = str(folder / "ran")
    recipes: dict[str, Any] = {
        "system": {**RECIPE, "data": {"class_path": "os.system", "init_args": {"command": f"touch {trace}"}}},
        "makes-a-folder": {**RECIPE, "model": {"class_path": "os.mkdir", "init_args": {"path": trace}}},
        "writes": {
            **RECIPE,
            "data": {"class_path": "mupscale.system.replace_text", "init_args": {"path": trace, "text": "x"}},
        },
        "packs": {
            **RECIPE,
            "data": {"class_path": "mupscale.data.Text", "init_args": {"tokens": trace, "source": __file__}},
        },
        "imports": {**RECIPE, "loss": "payload.loss"},
        "grows-by-a-class": {**RECIPE, "grow": [{"class_path": "payload.Growth", "init_args": {}}]},
        "names-with-colours": {**RECIPE, "model": {"class_path": "\x1b[31m.x", "init_args": {}}},
        "endless": {**RECIPE, "batch": 10**12},
        "nothing": 5,
    }
    made = []
    for name, values in recipes.items():
        run = folder / name
        (run / "checkpoints").mkdir(parents=True)
        (run / "recipe.json").write_text(json.dumps(values))
        (run / "metrics.jsonl").write_text('{"kind": "train", "step": null, "loss": 1}\n')
        (run / "summary.json").write_text(json.dumps({"name": "\x1b[2J", "recipe": values}))
        (run / "transfer-check.json").write_text('{"lr": 5}')
        made.append(run)
    pipe = folder / "pipes"
    (pipe / "checkpoints").mkdir(parents=True)
    for name in ("recipe.json", "summary.json", "checkpoints/step-000000002.safetensors"):
        os.mkfifo(pipe / name)
    return [*made, pipe]


def hostile_checkpoints(folder: Path) -> list[Path]:
    """Folders of Hugging Face checkpoints."""
    config, tensors = {**llama_config(), "max_position_embeddings": 64}, llama_tensors(llama_config())
    configs = {
        "layers": {**config, "num_hidden_layers": 10**9},
        "code": {**config, "model_type": "evil", "auto_map": {"AutoModelForCausalLM": "payload.Net"}},
        "text": {**config, "hidden_size": "many"},
        "colours": {**config, "model_type": "\x1b[31mred"},
    }
    made = [write_checkpoint(folder / name, values, tensors) for name, values in configs.items()]
    (folder / "code" / "payload.py").write_text(f"open({str(folder / 'ran')!r}, 'w')\n")
    deep = write_checkpoint(folder / "deep", config, tensors)
    (deep / "config.json").write_text("[" * 100_000)
    pipe = write_checkpoint(folder / "pipe", config, tensors)
    (pipe / "config.json").unlink()
    os.mkfifo(pipe / "config.json")
    weights = write_checkpoint(folder / "pipe-of-weights", config, tensors)
    (weights / "model.safetensors").unlink()
    os.mkfifo(weights / "model.safetensors")
    names = list(llama_shapes(llama_config()))
    odd = {f"[/]{name}\x1b[2J\n" if name == names[0] else name: tensor for name, tensor in tensors.items()}
    return [*made, deep, pipe, weights, write_checkpoint(folder / "names", config, odd)]


def hostile_recipes(folder: Path) -> list[Path]:
    """Recipes in YAML that stand for more than they say."""
    folder.mkdir(exist_ok=True)
    texts = {
        "digits": f"steps: {'9' * 5000}\n",
        "python": f"model: !!python/object/apply:os.system ['touch {folder / 'ran'}']\n",
        "list": "[1, 2]",
        "bytes": "\x00\x01",
    }
    paths = [folder / f"{name}.yaml" for name in texts]
    for path, text in zip(paths, texts.values(), strict=True):
        path.write_text(text)
    return paths


def hostile_texts(folder: Path) -> list[Path]:
    """Sources of text: a file that unpacks a thousandfold, lines that are deep, no documents."""
    folder.mkdir(exist_ok=True)
    packed = folder / "bomb.jsonl.gz"
    packed.write_bytes(gzip.compress(b'{"text": "' + b"0" * 80_000_000))
    deep = folder / "deep.jsonl"
    deep.write_text("[" * 100_000 + "\n")
    digits = folder / "digits.jsonl"
    digits.write_text(f'{{"text": {"9" * 5000}}}\n')
    return [packed, deep, digits]


class Harmful:
    """Makes a folder `ran` where it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder / "ran"),)


def pickled_code(folder: Path) -> Path:
    """Weights of torch.save that are code."""
    torch.save({"weight": Harmful(folder)}, folder / "weights.pt")
    return folder / "weights.pt"


def hostile_dcp_folders(folder: Path) -> list[Path]:
    """Folders of torch.distributed.checkpoint with code in one index or the other, alone and as a run's checkpoint."""
    run = folder / "run"
    run.mkdir(parents=True)
    (run / "recipe.json").write_text(json.dumps(RECIPE))
    made = []
    for step, place in enumerate([folder / "first", folder / "second", run / "checkpoints" / "step-000000001"]):
        save_dcp(place, torch.nn.Linear(2, 1))
        index = pickle.loads((place / ".metadata").read_bytes())
        index.storage_meta = 5  # which torch's own reader fails on, and looks for the second index then
        (place / ".metadata").write_bytes(pickle.dumps(Harmful(folder) if step == 0 else index))
        (place / "__0.metadata").write_bytes(pickle.dumps(Harmful(folder)))
        made.append(place)
    return [*made, run, run / "checkpoints"]
