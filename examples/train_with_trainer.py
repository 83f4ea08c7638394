"""The same with transformers' Trainer: a small Llama that grows on the way: python examples/train_with_trainer.py

The growth is one callback. Two sizes come out of the run: the small one is finished on a branch before it grows.
Stop it at any time, and the same command goes on.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import mupscale as mu
from mupscale import hf
from mupscale.data import tinyshakespeare


def read_text(context: int, held_out: bool) -> list[dict[str, torch.Tensor]]:
    """Windows of characters; the last tenth of the text is held out."""
    characters = tinyshakespeare()
    number = {character: place for place, character in enumerate(sorted(set(characters)))}
    ids = torch.tensor([number[character] for character in characters])
    part = ids[len(ids) * 9 // 10 :] if held_out else ids[: len(ids) * 9 // 10]
    rows = part[: len(part) // context * context].view(-1, context)
    return [{"input_ids": row, "labels": row} for row in rows]


def train(options: argparse.Namespace) -> Any:
    """The Trainer after the whole run; the two sizes are in OUT/sizes."""
    torch.manual_seed(0)
    sizes = {"hidden_size": options.width, "intermediate_size": 4 * options.width}
    heads = {"num_attention_heads": options.width // 16, "num_key_value_heads": options.width // 16}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, num_hidden_layers=options.layers, vocab_size=128))
    grow = hf.GrowTrainerCallback(at=options.grow_at, times=2, grow=mu.Fresh())
    arguments = TrainingArguments(
        output_dir=str(options.out),
        max_steps=options.steps,
        learning_rate=options.lr,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=options.steps // 20,
        weight_decay=0.1,
        per_device_train_batch_size=16,
        save_steps=options.every,
        logging_steps=options.every,
        eval_strategy="steps",
        eval_steps=options.every,
        report_to="none",
    )
    trainer = Trainer(
        model,
        arguments,
        train_dataset=read_text(options.context, held_out=False),
        eval_dataset=read_text(options.context, held_out=True)[:64],
        callbacks=[
            hf.BranchTrainerCallback(at=options.grow_at, steps=options.grow_at // 4),
            grow,
            hf.BranchTrainerCallback(at=options.steps, steps=options.steps // 4),
        ],
    )
    trainer.train(resume_from_checkpoint=grow.resume(trainer))
    return trainer


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python examples/train_with_trainer.py", description=__doc__)
    for name, value in (
        ("width", 64), ("grow-at", 300), ("layers", 4), ("context", 64), ("steps", 600), ("every", 100), ("lr", 3e-3)
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=type(value), default=value, help=f"(default: {value})")
    parser.add_argument("--out", type=Path, default=Path("runs/train-with-trainer"), help="the Trainer's folder")
    return parser.parse_args(words)


if __name__ == "__main__":
    train(parse())
