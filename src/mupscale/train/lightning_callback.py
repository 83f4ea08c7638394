"""Growth in the middle of a run of Lightning's Trainer: network, optimizer and schedule, where they are."""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from mupscale.core import WidthLike
from mupscale.family import Family
from mupscale.growth import DepthOperator, Operator
from mupscale.optim import widen_scheduler
from mupscale.system import MupscaleError


def lightning_growth(
    at: int,
    family: Family,
    width: WidthLike | None = None,
    *,
    depth: int | None = None,
    attribute: str = "model",
    grow: Operator | DepthOperator | tuple[Operator, DepthOperator] | None = None,
    noise: float | None = None,
    lr: float | None = None,
    seed: int = 0,
    folder: str | Path | None = None,
) -> Any:
    """A callback for Lightning's Trainer: after `at` optimizer steps the network grows to `width`, `depth` or both.

    family: of the network, which is the module's attribute of this name; its optimizer must hold that network's
    parameters alone. grow, noise, lr, seed: as in `Family.upscale`. folder: where to save the module before and after.

    >>> import sys
    >>> from mupscale.models import MLP
    >>> family = Family(lambda width: MLP(5, width, 3), base=64)
    >>> if "lightning" in sys.modules:  # where it is installed and imported
    ...     trainer = sys.modules["lightning"].Trainer(callbacks=[lightning_growth(1000, family, 512)])
    """
    if width is None and depth is None:
        raise MupscaleError("lightning_growth needs the size to grow to: give width, depth, or both")
    for name in ("lightning.pytorch", "pytorch_lightning"):
        with suppress(ImportError):
            callback: Any = import_module(name).Callback
            break
    else:
        raise MupscaleError("lightning_growth needs Lightning: pip install lightning")
    settings: dict[str, Any] = {"width": width, "depth": depth, "grow": grow, "noise": noise, "lr": lr, "seed": seed}

    class GrowNetwork(callback):  # type: ignore[misc]
        """The growth, once."""

        done = False

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            if self.done or trainer.global_step < at:
                return
            if trainer.world_size > 1 or len(trainer.optimizers) != 1:
                raise MupscaleError("lightning_growth grows a network in one process, with one optimizer")
            self.done = True
            self._save(trainer, "narrow")
            optimizer = trainer.optimizers[0]
            wide, grown = family.upscale(getattr(pl_module, attribute), optimizer, **settings)
            assert grown is not None
            for config in trainer.lr_scheduler_configs:
                scheduler, widened = config.scheduler, widen_scheduler(config.scheduler, grown)
                for inner in getattr(widened, "_schedulers", ()):  # of SequentialLR: they act on Lightning's, too
                    inner.optimizer = optimizer
                scheduler.__dict__.update({n: v for n, v in vars(widened).items() if n not in ("optimizer", "step")})
                scheduler.__class__ = type(widened)  # which may have a floor for each group
            optimizer.param_groups, optimizer.state = grown.param_groups, grown.state
            setattr(pl_module, attribute, wide)
            self._save(trainer, "wide")

        def _save(self, trainer: Any, which: str) -> None:
            if folder is not None:
                trainer.save_checkpoint(Path(folder) / f"step-{trainer.global_step}-{which}.ckpt")

    return GrowNetwork()
