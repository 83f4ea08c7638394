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
from deep_models import ResidualTable
from mupscale.models import MLP
from mupscale.train import lightning_growth
from refusals import refuses

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


def train(*callbacks: Any, module: Any = None) -> Any:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 5, generator=generator, dtype=torch.float64)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x[:, :3].argmax(1)), batch_size=8)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    trainer = lightning.Trainer(max_steps=12, callbacks=list(callbacks), **quiet, enable_model_summary=False)
    module = Module() if module is None else module
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, loader)
    return module


def test_a_network_grows_and_goes_on_exactly(tmp_path: Path) -> None:
    alone = train()
    grown = train(lightning_growth(5, FAMILY, 16, grow=mu.Copies(), folder=tmp_path))
    assert grown.model.layers[1].weight.shape == (16, 16)
    x = torch.randn(7, 5, dtype=torch.float64)
    torch.testing.assert_close(grown.model(x), alone.model(x), rtol=1e-10, atol=1e-10)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-5-narrow.ckpt", "step-5-wide.ckpt"]


def test_a_network_becomes_deeper_and_wider(tmp_path: Path) -> None:
    """The function stays where it grows; both files hold the module, before and after, and the deep one loads again."""
    family = mu.Family(
        lambda width, layers: ResidualTable(5, 3, width, layers).double(),
        base={"width": 8, "layers": 2},
        inputs=torch.randn(4, 5, dtype=torch.float64),
    )

    class Deepening(Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = family.init({"width": 8, "layers": 2}, seed=0).double()

        def configure_optimizers(self) -> Any:
            return family.optimizer(self.model, torch.optim.AdamW, lr=0.05, eps=1e-3)

    callbacks = [
        lightning_growth(5, family, depth=4, folder=tmp_path),
        lightning_growth(8, family, {"width": 16, "layers": 6}, grow=(mu.Copies(), mu.Identity()), folder=tmp_path),
    ]
    grown = train(*callbacks, module=Deepening())
    x = torch.randn(7, 5, dtype=torch.float64)
    for step, before, after in ((5, (8, 2), (8, 4)), (8, (8, 4), (16, 6))):
        outputs = []
        for which, (width, layers) in (("narrow", before), ("wide", after)):
            model = family.build({"width": width, "layers": layers})
            saved = torch.load(tmp_path / f"step-{step}-{which}.ckpt", weights_only=False)["state_dict"]
            model.load_state_dict({name.removeprefix("model."): value for name, value in saved.items()})
            outputs.append(model(x))
        torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-12, atol=1e-12)
    assert sum(name.endswith("2.weight") or "blocks.5" in name for name, _ in grown.model.named_parameters())
    refuses("give width, depth, or both", lightning_growth, 5, family)
