"""The runs that the paper's protocol consists of, as ordinary recipes: small and large, tuned, upscaled, compared with.

A recipe with one growth event says it all: the base model trains at `width` up to the growth, the wide one has the
growth's width and trains from there to the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mupscale.core import WholeWidth, Width
from mupscale.sweep import Cell
from mupscale.system import MupscaleError
from mupscale.train import Growth, LoadedRecipe, NoiseLevel, Recipe, Seeds

POINTS = 40  # of a run's curve at least, where it has so many steps: final losses are means over the last tenth
_AFTER = 10_000  # added to the seed of the data's order after upscaling, where all runs go on with other batches


@dataclass(frozen=True)
class Protocol(LoadedRecipe):
    """What is trained, for how long, and where it is kept; `folder` is the run's own."""

    folder: Path

    def __post_init__(self) -> None:
        recipe = self.recipe
        if len(recipe.grow) != 1:
            raise MupscaleError(
                f"the method upscales once, so its recipe needs one growth event, and this one has {len(recipe.grow)}: "
                f"write grow: [{{at: STEPS OF THE BASE MODEL, width: WIDE}}]"
            )
        if recipe.start is not None:
            raise MupscaleError(
                "mupscale run trains its own base model, so its recipe cannot start from a checkpoint (from); to "
                "upscale yours with what a run has found: mupscale train RECIPE --from PATH --width W --noise X"
            )
        if self.growth.how != "copies":
            raise MupscaleError(
                f"the method tunes the noise of copies, and the growth's how is {self.growth.how}; fresh units have no "
                f"noise to tune: train the recipe with mupscale train"
            )
        if recipe.width == self.growth.width:
            raise MupscaleError(f"the recipe's growth keeps the width at {recipe.width}: there is nothing to upscale")

    @property
    def growth(self) -> Growth:
        """The growth event."""
        return self.recipe.grow[0]

    @property
    def base_steps(self) -> int:
        """Steps of a base model."""
        return self.growth.at

    @property
    def wide_steps(self) -> int:
        """Steps of an upscaled model."""
        return self.recipe.steps - self.growth.at

    @property
    def wide(self) -> WholeWidth:
        """The width k·n."""
        return self.growth.width

    def upscaled_width(self, width: WholeWidth) -> WholeWidth:
        """k times a small width, k as between the recipe's two widths."""
        base, small = Width.of(self.recipe.width), Width.of(width)
        small.check_form(base, "the small width", "the recipe's width")
        return small.scaled_as(base, Width.of(self.wide)).whole

    def times(self, width: WholeWidth, factor: int) -> WholeWidth:
        """A width so many times as large, in the sizes that grow."""
        narrow = Width.of(width)
        return narrow.times(factor, narrow.growing(Width.of(self.upscaled_width(width)))).whole

    def check_all_small(self, widths: Sequence[WholeWidth]) -> None:
        """All of the widths to tune at, before anything is trained."""
        if len({Width.of(width, "the small width", whole=True) for width in widths}) < len(widths):
            raise MupscaleError(f"method.widths is {list(widths)}, but small widths must differ from each other")
        for width in widths:
            self.check_small(width)

    def check_small(self, width: WholeWidth) -> None:
        """A small width is one, or the error says why not."""
        Width.of(width, "the small width", whole=True)
        wide = self.upscaled_width(width)
        try:
            self.recipe.family().widening(width, wide)
        except MupscaleError:
            raise
        except Exception as error:  # the model's own
            raise MupscaleError(
                f"the model cannot be built at the small width {width} and at {wide}: "
                f"{type(error).__name__}: {' '.join(str(error).split())}"
            ) from None

    # ------------------------------------------------------------------------------------------- recipes

    def fresh(self, width: WholeWidth, lr: float, steps: int, seed: int, out: str | None = None) -> Recipe:
        """A model from its initialisation; in the run's folder, under a name, if it has one."""
        seeds = self._seeds(seed)
        every = near_divisor(steps, min(self.recipe.log_every, steps // POINTS))
        return self._make(width=width, steps=steps, seeds=seeds, lr=lr, log_every=every, out=self._at(out, seed))

    def with_drop(self, recipe: Recipe, at: int, lr: float) -> Recipe:
        """The same run with another learning rate from a step on, which is a growth to the width it has."""
        return replace(recipe, grow=[Growth(at=at, width=recipe.width, lr=lr)])

    def after(
        self, start: str, width: WholeWidth, lr: float, steps: int, seed: int, noise: NoiseLevel, out: str | None = None
    ) -> Recipe:
        """A model that starts from those under another name, upscaled to `width` if that is wider."""
        seeds = replace(self._seeds(seed), data=self._seeds(seed).data + _AFTER)
        unit = "theory" if isinstance(noise, dict) else self.growth.unit
        return self._make(
            width=width,
            steps=steps,
            seeds=seeds,
            lr=lr,
            start=self._at(start, seed),
            noise=noise,
            noise_unit=unit,
            log_every=self.points_apart,
            evaluation=replace(self.recipe.evaluation, every=self.evaluations_apart),
            out=self._at(out, seed),
        )

    @property
    def points_apart(self) -> int:
        """Steps between two points of the curve of whatever starts from a base model; the upscaled end on one."""
        return near_divisor(self.wide_steps, min(self.recipe.log_every, self.wide_steps // POINTS))

    @property
    def evaluations_apart(self) -> int:
        """Steps between two evaluations of these."""
        return near_divisor(self.wide_steps, self.recipe.evaluation.every or self.wide_steps)

    @property
    def exact_is_a_beginning(self) -> bool:
        """Whether the first steps of a longer run are those of a short one, with a point at the short one's end."""
        return self.recipe.schedule.kind == "constant" and self.wide_steps % self.points_apart == 0

    def small(self, width: WholeWidth, lr: float, seed: int) -> Recipe:
        """A small base model, which Sweep 2 upscales."""
        return self.fresh(width, lr, self.base_steps, seed, small_name(width))

    def trial(self, width: WholeWidth, cell: Cell, seed: int) -> Recipe:
        """A trial of Sweep 2: a small base model upscaled, with this noise and learning rate."""
        return self.after(small_name(width), self.upscaled_width(width), cell.lr, self.wide_steps, seed, cell.noise)

    def _make(self, *, lr: float, **changes: Any) -> Recipe:
        arguments = {**self.recipe.optimizer.init_args, "lr": lr}
        return replace(self.recipe, optimizer=replace(self.recipe.optimizer, init_args=arguments), grow=[], **changes)

    def _at(self, name: str | None, seed: int) -> str | None:
        return None if name is None else str(self.folder / name / f"seed-{seed}")

    def _seeds(self, seed: int) -> Seeds:
        first = self.recipe.seeds
        return Seeds(first.init + seed, first.data + seed, first.noise + seed, first.dropout + seed)

    # ------------------------------------------------------------------------------------------- what they cost

    def equal_cost(self, steps: int, width: WholeWidth, other: WholeWidth) -> int:
        """How many steps at another width cost as much as so many at this one; as many where that is not known."""
        ours, theirs = self.flops_per_step(width), self.flops_per_step(other)
        return steps if ours is None or theirs is None else max(1, round(steps * ours / theirs))


def near_divisor(steps: int, most: int) -> int:
    """The largest number up to `most`, and not far below it, that divides the steps; `most` where there is none."""
    most = max(1, most)
    return next((every for every in range(most, most // 4, -1) if steps % every == 0), most)


def small_name(width: WholeWidth) -> str:
    """Where small base models are kept."""
    return f"small/width-{Width.of(width).label}"
