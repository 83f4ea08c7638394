"""Metrics for TensorBoard, where it is installed."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from mupscale.system import MupscaleError, check_installed


class TensorBoardWriter:
    """Writes every number of a record of metrics as `kind/name`."""

    def __init__(self, folder: Path, step: int) -> None:
        check_installed(["tensorboard"], "tensorboard: true")
        try:
            module = import_module("torch.utils.tensorboard")
        except ImportError:  # a part of it is missing
            raise MupscaleError("tensorboard: true needs tensorboard: pip install 'mupscale[plots]'") from None
        first = step + 1  # what a kill left of later steps comes again
        self.writer = module.SummaryWriter(str(folder), purge_step=first)

    def write(self, record: dict[str, Any]) -> None:
        """One record."""
        for name, value in record.items():
            if name != "step" and isinstance(value, int | float):
                self.writer.add_scalar(f"{record['kind']}/{name}", value, record["step"])

    def close(self) -> None:
        """Flush."""
        self.writer.close()
