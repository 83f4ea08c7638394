"""The same with Lightning: the GPT of examples/train.py grows on the way: python examples/train_with_lightning.py

The growth is one callback; the module holds the network as its attribute `model`. You need `pip install lightning`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import lightning
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import mupscale as mu
from mupscale.data import tinyshakespeare
from mupscale.train import lightning_growth
from train import GPT, Text, evaluate, loss_of, make_scheduler


class Batches(Dataset[tuple[Tensor, Tensor]]):
    """The batches of a text, one for each step."""

    def __init__(self, text: Text, steps: int) -> None:
        self.text, self.steps = text, steps

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, step: int) -> tuple[Tensor, Tensor]:
        return self.text.draw(step)


class Module(lightning.LightningModule):  # type: ignore[misc]
    """What Lightning trains: a network of the family, its optimizer and its schedule."""

    def __init__(self, family: mu.Family, options: argparse.Namespace) -> None:
        super().__init__()
        self.family, self.options = family, options
        self.model = family.init(options.width, seed=0)

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        """The loss of a batch."""
        loss = loss_of(self.model, batch)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> Any:
        """AdamW with μP's rates, and a warm-up with a cosine."""
        rates = {"lr": self.options.lr, "betas": (0.9, 0.95), "weight_decay": 0.1}
        optimizer = self.family.optimizer(self.model, torch.optim.AdamW, **rates)
        scheduler = make_scheduler(optimizer, self.options.steps // 20, self.options.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        """By a norm that does not depend on the width."""
        mu.clip_grad_norm_(self.model, 1.0, self.family.plan(self.model))


def train(options: argparse.Namespace) -> tuple[Module, float]:
    """The whole run; the module at its end, and its held-out loss."""
    text = Text(tinyshakespeare(), 16, options.context, "cpu")

    def build(width: int) -> GPT:
        return GPT(width, len(text.vocabulary), options.context, options.layers)

    family = mu.Family(build, base=options.width, inputs=text.draw(0)[0][:2])
    grow = lightning_growth(options.grow_at, family, options.grow_to, grow=mu.Fresh(), folder=options.out)
    module = Module(family, options)
    trainer = lightning.Trainer(
        max_steps=options.steps,
        callbacks=[grow],
        default_root_dir=options.out,
        logger=False,
        enable_checkpointing=False,
        accelerator="cpu",
    )
    trainer.fit(module, DataLoader(Batches(text, options.steps), batch_size=None))
    loss = evaluate(module.model, text)
    print(f"held out {loss:.3f}, {sum(p.numel() for p in module.model.parameters()):,} parameters")
    return module, loss


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python examples/train_with_lightning.py", description=__doc__)
    for name, value in (
        ("width", 64), ("grow-to", 128), ("grow-at", 300), ("layers", 4), ("context", 64), ("steps", 600), ("lr", 3e-3)
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=type(value), default=value, help=f"(default: {value})")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/train-with-lightning"), help="folder of the module's files"
    )
    return parser.parse_args(words)


if __name__ == "__main__":
    train(parse())
