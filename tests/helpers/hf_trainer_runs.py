"""Short runs of transformers' Trainer in which a small Llama may grow."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import transformers

from mupscale.optim import decay_groups


def small_llama() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=2, vocab_size=31, max_position_embeddings=16)
    return transformers.LlamaForCausalLM(config).double()


def examples(rows: Iterable[torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Texts to train on."""
    return [{"input_ids": row, "labels": row} for row in rows]


def decayed(model: torch.nn.Module, decay: float = 0.1) -> list[dict[str, Any]]:
    """The Trainer's own groups."""
    named = dict(model.named_parameters())
    return [{**group, "params": [named[n] for n in group["params"]]} for group in decay_groups(model, decay)]


def arguments(folder: Path, **settings: Any) -> Any:
    """On the CPU, without a word or a checkpoint if nothing else is asked for; every loss is logged."""
    usual = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "dataloader_pin_memory": False}
    usual |= {"logging_steps": 1, "save_strategy": "no", "weight_decay": 0.1, "adam_epsilon": 1e-3}
    return transformers.TrainingArguments(output_dir=str(folder), **{**usual, **settings})


def train(
    folder: Path,
    *callbacks: Any,
    steps: int = 10,
    model: Any = None,
    resume: bool | Path = False,
    optimizers: Any = (None, None),
    **settings: Any,
) -> Any:
    """The Trainer after its run; resume: as its first callback says, or from this folder."""
    usual = {"max_grad_norm": 0.5, "learning_rate": 1e-2, "lr_scheduler_type": "cosine"}
    given = arguments(folder, max_steps=steps, per_device_train_batch_size=4, **{**usual, **settings})
    texts = examples(torch.randint(31, (8,), generator=torch.Generator().manual_seed(n)) for n in range(64))
    data = {"train_dataset": texts, "eval_dataset": texts}
    trainer = transformers.Trainer(
        model or small_llama(), given, **data, callbacks=list(callbacks), optimizers=optimizers
    )
    where = callbacks[0].resume(trainer) if resume is True else str(resume) if resume else None
    trainer.train(resume_from_checkpoint=where)
    return trainer


def rates(trainer: Any) -> list[float]:
    return [entry["learning_rate"] for entry in trainer.state.log_history if "loss" in entry]


def losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
