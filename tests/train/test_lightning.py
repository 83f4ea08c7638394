"""Growth in the middle of a run of Lightning's Trainer, with the real package where it is installed."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    lightning = pytest.importorskip("lightning.pytorch")

import mupscale as mu
from mupscale.models import MLP
from mupscale.train import lightning_growth

FAMILY = mu.Family(lambda width: MLP(5, width, 3).double(), base=8)


class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.model = FAMILY.init(8, seed=0).double()

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self.model(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        optimizer = FAMILY.optimizer(self.model, torch.optim.AdamW, lr=0.05, weight_decay=0.1, eps=1e-3)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def train(*callbacks: Any) -> Module:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 5, generator=generator, dtype=torch.float64)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x[:, :3].argmax(1)), batch_size=8)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    trainer = lightning.Trainer(max_steps=12, callbacks=list(callbacks), **quiet, enable_model_summary=False)
    module = Module()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, loader)
    return module


def test_a_network_grows_and_goes_on_exactly(tmp_path: Path) -> None:
    alone = train()
    grown = train(lightning_growth(5, FAMILY, 16, folder=tmp_path))
    assert grown.model.layers[1].weight.shape == (16, 16)
    x = torch.randn(7, 5, dtype=torch.float64)
    torch.testing.assert_close(grown.model(x), alone.model(x), rtol=1e-10, atol=1e-10)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-5-narrow.ckpt", "step-5-wide.ckpt"]
