"""Checkpoints as files, written without transformers: LLaMA-shaped random tensors, in one file or in shards."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from mupscale.core import Entry, Plan
from mupscale.data import tinyshakespeare
from mupscale.hf.config_family import ConfigFamily
from mupscale.hf.config_fields import Times
from mupscale.system import make_header

TOKENS = 90  # of the tokenizer in `folder_with_tokenizer`


def llama_config(**changed: Any) -> dict[str, Any]:
    """A config.json: two key/value groups of two heads of four units."""
    sizes = {"hidden_size": 16, "intermediate_size": 12, "num_attention_heads": 4, "num_key_value_heads": 2}
    more = {"num_hidden_layers": 2, "vocab_size": 11, "initializer_range": 0.02, "tie_word_embeddings": False}
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **sizes, **more, **changed}


def llama_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """By the names of LlamaForCausalLM; a tied readout is left out, as save_pretrained does."""
    hidden, ffn, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    keys = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    for i in range(config["num_hidden_layers"]):
        block = {
            **{f"self_attn.{n}_proj.weight": (hidden if n in "qo" else keys, hidden) for n in "qkvo"},
            **{f"mlp.{n}_proj.weight": (ffn, hidden) for n in ("gate", "up")},
            "mlp.down_proj.weight": (hidden, ffn),
            **{f"{n}_layernorm.weight": (hidden,) for n in ("input", "post_attention")},
        }
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in block.items()}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    return shapes


def llama_tensors(config: dict[str, Any], dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, Tensor]:
    """Random ones."""
    shapes = llama_shapes(config)
    generator = torch.Generator().manual_seed(seed)
    made = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
    return {name: tensor.to(dtype) for name, tensor in made.items()}


def write_checkpoint(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], shards: int = 1) -> Path:
    """config.json and the weights, through safetensors itself."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    names = list(tensors)
    files = {name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        save_file({n: tensors[n] for n in names if files[n] == file}, folder / file, metadata={"format": "pt"})
    write_index(folder, files)
    return folder


def write_index(folder: Path, files: Any, name: str = "model.safetensors.index.json") -> None:
    """An index of shards."""
    (folder / name).write_text(json.dumps({"metadata": {}, "weight_map": files}))


def write_llama(folder: Path, dtype: torch.dtype = torch.float32, shards: int = 1, **changed: Any) -> dict[str, Tensor]:
    """A small LLaMA checkpoint; returns its tensors."""
    config = llama_config(**changed)
    tensors = llama_tensors(config, dtype)
    write_checkpoint(folder, config, tensors, shards)
    return tensors


def edit(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Change the tensors of a checkpoint of one file."""
    file = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def edit_json(file: Path, **fields: Any) -> None:
    """Change fields of a JSON file, such as config.json."""
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def write_zeros(folder: Path, **changed: Any) -> None:
    """A LLaMA of zeros, of any size: it takes no room on the disk."""
    config = llama_config(**changed)
    shapes = llama_shapes(config)
    first, _ = make_header({name: (torch.float32, shape) for name, shape in shapes.items()}, {"format": "pt"})
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    with open(folder / "model.safetensors", "wb") as file:
        file.write(first)
        file.truncate(len(first) + 4 * sum(math.prod(shape) for shape in shapes.values()))


def read_checkpoint(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder's safetensors files, through safetensors itself."""
    found: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            assert file.metadata() == {"format": "pt"}
            names = list(file.keys())
            assert not found.keys() & {*names}
            found |= {name: file.get_tensor(name) for name in names}
    return found


def folder_with_tokenizer(path: Path, kind: str = "llama") -> Path:
    """A model of hidden size 16 with fresh weights, and a tokenizer."""
    import tokenizers
    import transformers

    torch.manual_seed(0)
    if kind == "llama":
        config = transformers.LlamaConfig(
            hidden_size=16, intermediate_size=24, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=1
        )
    else:
        config = transformers.GPT2Config(n_embd=16, n_head=4, n_layer=1)
    config.vocab_size, config.max_position_embeddings = TOKENS, 32
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=TOKENS, show_progress=False, special_tokens=["</s>"])
    tokenizer.train_from_iterator([tinyshakespeare()[:4000]], trainer)
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "</s>"}}))
    return path


def plan_wrongly(monkeypatch: pytest.MonkeyPatch, pattern: str, change: Callable[[Entry], Entry]) -> None:
    """Let every plan of a checkpoint be wrong in the tensors of this name."""
    right = ConfigFamily.plan

    def wrong(self: ConfigFamily, times: Times, *, initial: bool = True) -> Plan:
        plan = right(self, times, initial=initial)
        changed = {n: change(e) for n, e in plan.parameters.items() if fnmatchcase(n, pattern)}
        assert changed
        return replace(plan, parameters={**plan.parameters, **changed})

    monkeypatch.setattr(ConfigFamily, "plan", wrong)
