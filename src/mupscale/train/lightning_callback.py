"""Growth in the middle of a run of Lightning's Trainer: network, optimizer and schedule, where they are."""

from __future__ import annotations

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
    settings = {"depth": depth, "grow": grow, "noise": noise, "lr": lr, "seed": seed}
    growth = _NetworkGrowth(at, family, width, attribute, settings, None if folder is None else Path(folder))
    return _callback_class()(growth)


def _callback_class() -> Any:
    """A subclass of Lightning's Callback, under whichever name it is installed."""
    for name in ("lightning.pytorch", "pytorch_lightning"):
        try:
            base = import_module(name).Callback
            break
        except ImportError:
            continue
    else:
        raise MupscaleError("lightning_growth needs Lightning: pip install lightning")

    class GrowNetwork(base):  # type: ignore[misc, valid-type]
        def __init__(self, growth: _NetworkGrowth) -> None:
            self.growth = growth

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            self.growth.after_step(trainer, pl_module)

    return GrowNetwork


class _NetworkGrowth:
    """The growth itself, once."""

    def __init__(
        self,
        at: int,
        family: Family,
        width: WidthLike | None,
        attribute: str,
        settings: dict[str, Any],
        folder: Path | None,
    ) -> None:
        self.at, self.family, self.width, self.attribute = at, family, width, attribute
        self.settings, self.folder, self.done = settings, folder, False

    def after_step(self, trainer: Any, module: Any) -> None:
        """Grow, if this was the step."""
        if self.done or trainer.global_step < self.at:
            return
        if trainer.world_size > 1 or len(trainer.optimizers) != 1:
            raise MupscaleError("lightning_growth grows a network in one process, with one optimizer")
        self.done = True
        self._save(trainer, "narrow")
        optimizer, network = trainer.optimizers[0], getattr(module, self.attribute)
        wide, grown = self.family.upscale(network, optimizer, width=self.width, **self.settings)
        assert grown is not None
        for config in trainer.lr_scheduler_configs:
            widened = widen_scheduler(config.scheduler, grown)
            for inner in getattr(widened, "_schedulers", ()):  # of SequentialLR: they act on Lightning's optimizer, too
                inner.optimizer = optimizer
            kept = ("optimizer", "step")
            config.scheduler.__dict__.update({n: v for n, v in vars(widened).items() if n not in kept})
            config.scheduler.__class__ = type(widened)  # which may have a floor for each group
        optimizer.param_groups, optimizer.state = grown.param_groups, grown.state
        setattr(module, self.attribute, wide)
        self._save(trainer, "wide")

    def _save(self, trainer: Any, which: str) -> None:
        if self.folder is not None:
            trainer.save_checkpoint(self.folder / f"step-{trainer.global_step}-{which}.ckpt")
