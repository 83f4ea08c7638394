"""Short runs of transformers' Trainer in which a small Llama may grow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers


def small_llama() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=24,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=2,
        vocab_size=31,
        max_position_embeddings=16,
    )
    return transformers.LlamaForCausalLM(config).double()


class Texts(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(31, (8,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


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
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=4,
        weight_decay=0.1,
        adam_epsilon=1e-3,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **{
            "max_grad_norm": 0.5,
            "learning_rate": 1e-2,
            "save_strategy": "no",
            "lr_scheduler_type": "cosine",
            **settings,
        },
    )
    data = {"train_dataset": Texts(), "eval_dataset": Texts()}
    trainer = transformers.Trainer(
        model or small_llama(), arguments, **data, callbacks=list(callbacks), optimizers=optimizers
    )
    where = callbacks[0].resume(trainer) if resume is True else str(resume) if resume else None
    trainer.train(resume_from_checkpoint=where)
    return trainer


def rates(trainer: Any) -> list[float]:
    return [entry["learning_rate"] for entry in trainer.state.log_history if "loss" in entry]


def losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
