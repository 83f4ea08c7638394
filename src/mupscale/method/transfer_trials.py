"""The transfer check: do the best learning rate and noise stay where they are as widths grow?

The paper's 'Verification of hyperparameter transfer': base models of several widths n are upscaled to k·n, with one
hyperparameter varied and the other fixed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mupscale.core import WholeWidth, Width
from mupscale.engine import Engine, Outcome, lowest_loss_bar, train_many
from mupscale.method.protocol import Protocol
from mupscale.method.transfer_verdict import judge_transfer
from mupscale.sweep import Cell, Space, check_learning_rates
from mupscale.system import MupscaleError, read_json, write_json, writes_into
from mupscale.train import MAY_CHANGE, Recipe

FILE = "transfer-check.json"
_NOT_COMPARED = {*MAY_CHANGE, "width", "grow", "from", "from_width", "noise", "noise_unit"}  # trials have their own


@writes_into("out")
def transfer_check(
    recipe: Recipe,
    *,
    widths: Sequence[WholeWidth],
    lrs: Sequence[float],
    noises: Sequence[float],
    lr: float,
    noise: float,
    out: Path,
    seeds: int = 3,
    base_lr: float | None = None,
    engine: Engine = "auto",
    note: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Loss against learning rate at the fixed noise, and against noise at the fixed learning rate, at each width.

    The recipe's growth says how many times wider models become, how long base models train and how long upscaled ones
    do. The result is also written to `out`; trials that are there already are not trained again.

    Args:
        recipe: a recipe with one growth event
        widths: base widths to compare, two or more
        lrs, noises: what is varied; lr, noise: what the other one is fixed at meanwhile
        base_lr: the base models' learning rate; none takes the optimizer's
        note: is told what is done, line by line; without one, nothing shows how far it is

    >>> from mupscale.train import Growth, Recipe, Spec
    >>> recipe = Recipe(
    ...     model=Spec("mupscale.models.MLP", {"d_in": 54, "d_out": 7}),
    ...     data=Spec("mupscale.data.CoverTypeSample"),
    ...     optimizer=Spec("torch.optim.SGD", {"lr": 0.1}),
    ...     width=8, base=4, steps=12, batch=10, grow=[Growth(at=4, width=16)],
    ... )
    >>> transfer_check(recipe, widths=[], lrs=[0.05, 0.1], noises=[0.3], lr=0.05, noise=0.3, out=Path("runs/check"))
    Traceback (most recent call last):
    mupscale.system.errors.MupscaleError: a transfer check needs base widths, two or more, such as [64, 128]
    """
    rate = float(recipe.optimizer.init_args["lr"] if base_lr is None else base_lr)
    check = _Check(Protocol(recipe, Path(out) / "transfer"), seeds, rate, engine, note)
    if not widths:
        raise MupscaleError("a transfer check needs base widths, two or more, such as [64, 128]")
    values = check.compare(widths, _cells_by_axis(lrs, noises, lr, noise), {"lr": lr, "noise": noise})
    values["verdict"] = judge_transfer(values)
    write_json(Path(out) / FILE, values)
    return values


def _cells_by_axis(lrs: Sequence[float], noises: Sequence[float], lr: float, noise: float) -> dict[str, list[Cell]]:
    """What is tried, with one hyperparameter varied and the other fixed; a space refuses values that cannot be."""
    space = Space(tuple(lrs), (*noises, noise))
    check_learning_rates([lr])
    return {
        "lr": [Cell(x, float(noise)) for x in space.lrs],
        "noise": [Cell(float(lr), x) for x in sorted({float(x) for x in noises})],
    }


@dataclass(frozen=True)
class _Check:
    """One check: its settings, and the trials of a width, written to the folder as they are done."""

    protocol: Protocol
    seeds: int
    base_lr: float
    engine: Engine
    note: Callable[[str], None] | None

    def __post_init__(self) -> None:
        if self.seeds < 1:
            raise MupscaleError(f"seeds is {self.seeds}, but a transfer check needs at least 1")

    def say(self, text: str) -> None:
        """Tell whoever wants to know."""
        if self.note is not None:
            self.note(text)

    def compare(
        self, widths: Sequence[WholeWidth], sweeps: Mapping[str, Sequence[Cell]], fixed: Mapping[str, float]
    ) -> dict[str, Any]:
        """The result as plain values, with a line for each width and hyperparameter that is varied."""
        protocol = self.protocol
        cells = list(dict.fromkeys(cell for line in sweeps.values() for cell in line))
        values: dict[str, Any] = {
            "times": Width.of(protocol.wide).size / Width.of(protocol.recipe.width).size,
            "steps": protocol.wide_steps,
            "fixed": dict(fixed),
            "unit": protocol.growth.unit,
            **{axis: [] for axis in sweeps},
        }
        for width in widths:
            protocol.check_small(width)
        for width in sorted(widths, key=lambda width: Width.of(width).size):
            losses = self.train_width(width, cells)
            for axis, line in sweeps.items():
                points = [{"x": getattr(cell, axis), "losses": losses[cell]} for cell in line]
                values[axis].append({"width": protocol.upscaled_width(width), "from": width, "points": points})
        return values

    def train_width(self, width: WholeWidth, cells: Sequence[Cell]) -> dict[Cell, list[float | None]]:
        """The final training losses of each cell by seed; None for those that diverged."""
        path = self.protocol.folder / f"width-{Width.of(width).label}.json"
        done = self._read_trials(path, width)
        missing = [cell for cell in cells if cell not in done]
        if missing:
            self._write_trials(path, width, done)  # nobody with other settings may take up what is begun here
            self._train_bases(width)
            wide = self.protocol.upscaled_width(width)
            self.say(f"width {Width.of(width)} → {Width.of(wide)}: {len(missing)} trials × {self.seeds} seeds")
            recipes = [self.protocol.trial(width, cell, seed) for cell in missing for seed in range(self.seeds)]
            save = path.with_suffix(".stack.safetensors")
            outcomes = iter(self._train(recipes, save))
            done |= {cell: [next(outcomes).loss for _ in range(self.seeds)] for cell in missing}
            self._write_trials(path, width, done)
        return done

    def _write_trials(self, path: Path, width: WholeWidth, done: Mapping[Cell, list[float | None]]) -> None:
        trials = [{**cell._asdict(), "losses": losses} for cell, losses in done.items()]
        write_json(path, {"asked": self._settings(width), "trials": trials})

    def _train_bases(self, width: WholeWidth) -> None:
        self.say(f"width {Width.of(width)}: {self.seeds} base models")
        recipes = [self.protocol.small(width, self.base_lr, seed) for seed in range(self.seeds)]
        save = self.protocol.folder / f"base-{Width.of(width).label}.stack.safetensors"
        for outcome in self._train(recipes, save, resume=True):
            if outcome.status != "finished":
                raise MupscaleError(
                    f"the base model of width {Width.of(width)} diverged at learning rate {self.base_lr:g}: take a "
                    f"smaller one (--optimizer.lr)"
                )

    def _train(self, recipes: Sequence[Recipe], save: Path, *, resume: bool = False) -> list[Outcome]:
        with lowest_loss_bar(recipes[0].steps, len(recipes), visible=self.note is not None) as tell:
            return train_many(
                recipes,
                engine=self.engine,
                resume=resume,
                save=save,
                on_point=tell,
                note=self.say,
                data=self.protocol.data,
            )

    def _settings(self, width: WholeWidth) -> dict[str, Any]:
        """All that a trial depends on beside its cell, as JSON gives it back."""
        protocol = self.protocol
        recipe = {name: value for name, value in protocol.recipe.to_json().items() if name not in _NOT_COMPARED}
        steps = {"base steps": protocol.base_steps, "upscaled steps": protocol.wide_steps}
        own = {"unit": protocol.growth.unit, "from": width, "to": protocol.upscaled_width(width)}
        more = {"seeds in all": self.seeds, "base_lr": self.base_lr}
        settings: dict[str, Any] = json.loads(json.dumps({**recipe, **steps, **own, **more}))
        return settings

    def _read_trials(self, path: Path, width: WholeWidth) -> dict[Cell, list[float | None]]:
        """The trials of this width that are in the folder already."""
        if not path.exists():
            return {}
        try:
            values = read_json(path)
            theirs = dict(values["asked"])
            trials = {Cell(float(t["lr"]), float(t["noise"])): list(t["losses"]) for t in values["trials"]}
        except (OSError, ValueError, KeyError, TypeError, MupscaleError) as error:
            raise MupscaleError(f"{path} is damaged ({error}): remove it, and its trials are made again") from None
        ours = self._settings(width)
        if differing := sorted(name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name)):
            raise MupscaleError(
                f"{path} is of a check with other settings ({', '.join(differing)}): choose another folder (--out)"
            )
        return trials
