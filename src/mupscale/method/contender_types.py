"""What a comparison at full size is made of: the tuned values, how one model is trained, and what a contender is.

The contenders themselves are in contenders.py.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from mupscale.core import WholeWidth, Width
from mupscale.method.protocol import Protocol
from mupscale.method.summary import Choice
from mupscale.sweep import Cell
from mupscale.train import NoiseLevel, Recipe

Kind = Literal["base", "baseline", "ablation", "grown", "comparison"]
Dashes = str | tuple[int, tuple[int, ...]]


@dataclass(frozen=True)
class ComparisonSetup:
    """The protocol, what tuning chose, and which baselines are asked for.

    own_lr: the learning rate that is best without noise, where that is another one than the chosen.
    """

    protocol: Protocol
    choice: Choice
    own_lr: float | None
    baselines: Sequence[str]

    @property
    def narrow(self) -> WholeWidth:
        """The base model's width n."""
        return self.protocol.recipe.width

    @property
    def wide(self) -> WholeWidth:
        """The width k·n."""
        return self.protocol.wide

    @property
    def noise(self) -> NoiseLevel:
        """The chosen noise: one number, or constants per parameter."""
        return self.choice.constants or self.choice.noise

    @property
    def lr_without_noise(self) -> float:
        """own_lr, for contenders that are planned only where there is one."""
        assert self.own_lr is not None
        return self.own_lr

    @property
    def scratch_steps(self) -> int:
        """Steps at the wide width that cost as much as the base model and the upscaled one together."""
        protocol = self.protocol
        return protocol.wide_steps + protocol.equal_cost(protocol.base_steps, self.narrow, self.wide)

    @property
    def continued_steps(self) -> int:
        """Steps at the narrow width that cost as much as the upscaled model."""
        return self.protocol.equal_cost(self.protocol.wide_steps, self.wide, self.narrow)

    def with_cell(self, cell: Cell) -> ComparisonSetup:
        """The same with another learning rate and noise in place of the chosen ones."""
        return replace(self, choice=replace(self.choice, lr=cell.lr, noise=cell.noise, constants=None))

    def start_file(self, name: str, seed: int) -> Path:
        """Where the wide model is written that a contender starts from, if it is widened in another way."""
        return self.protocol.folder / name / f"start-{seed}.safetensors"

    # ------------------------------------------------------------------------------------------- ways to train

    def train_fresh(
        self, name: str, width: WholeWidth, steps: int, change: tuple[int, float] | None = None
    ) -> Training:
        """From initialisation with the base model's learning rate. change: a step, and the rate from there on."""
        lr = self.choice.base_lr

        def make_recipe(seed: int) -> Recipe:
            recipe = self.protocol.fresh(width, lr, steps, seed, name)
            return recipe if change is None else self.protocol.with_drop(recipe, *change)

        return Training(width, lr, steps, make_recipe).with_change(change)

    def train_from_base(
        self, name: str, width: WholeWidth, steps: int, *, lr: float | None = None, noise: NoiseLevel = 0.0
    ) -> Training:
        """From the base model, upscaled if the width is wider, with the chosen learning rate unless one is given."""
        rate = self.choice.lr if lr is None else lr

        def make_recipe(seed: int) -> Recipe:
            return self.protocol.after("base", width, rate, steps, seed, noise, name)

        return Training(width, rate, steps, make_recipe, noise)

    def change_halfway(self, training: Training) -> Training:
        """The same, changed halfway to the learning rate that is best without noise."""
        change = (training.steps // 2, self.lr_without_noise)

        def make_recipe(seed: int) -> Recipe:
            return self.protocol.with_drop(training.make_recipe(seed), *change)

        return replace(training, make_recipe=make_recipe).with_change(change)


@dataclass(frozen=True)
class Training:
    """How a model of the comparison is trained: what the summary says of it, and the recipe of each seed.

    shares: the model whose runs it has, as far as its own steps go, so that nothing is trained for it.
    """

    width: WholeWidth
    lr: float
    steps: int
    make_recipe: Callable[[int], Recipe]
    noise: NoiseLevel = 0.0
    drop: int | None = None
    drop_lr: float | None = None
    shares: str | None = None

    def with_change(self, change: tuple[int, float] | None) -> Training:
        """The same, saying that the learning rate changes at a step."""
        return self if change is None else replace(self, drop=change[0], drop_lr=change[1])


@dataclass(frozen=True)
class GainMark:
    """A contender in the picture of the gain: a baseline is a line across it, a grown model a point at its right end.

    words: for the line, and for those who cannot see the picture. tick: below the point. caption: of the point.
    """

    words: str
    tick: str = ""
    caption: str = ""


@dataclass(frozen=True, kw_only=True)
class PaperContender:
    """A model of the comparison: what it is called, how it looks, when and how it is trained.

    Args:
        name: in JSON and as a folder
        kind: base; baseline (the verdict takes the best of them); ablation (takes the gain apart); grown (what the
            verdict is about); comparison (mentioned beside it)
        label: in tables, where {width} becomes its width
        short: in a legend
        phrase: in a sentence
        heading: after 'Final loss, ' in a table or on a card; empty where it has no row of its own
        color: of its curve
        dashes: of its curve, as matplotlib takes them
        stage: in which it is trained, with others as one program
        plan: how it is trained, from the tuned values; None where they leave nothing to train
        after_base: whether it starts from the base model, whose cost then belongs to it
        asked_by: the word of `method.baselines` that asks for it; None: it is always trained
        own_rate: whether it has the learning rate that is best without noise, so that it is left out where none is
        own_sweep: whether noise and learning rate are tuned for it at the wide width
        write_start: writes the wide model that it starts from, given a base model's recipe
        check: refuses a model that it is not defined for, before anything is trained
        label_without_noise: the label where tuning chose no noise
        remark: what to add where a sentence speaks of 'the upscaled model'
        without: what begins a sentence about the upscaled model that this one is a variant of
        gain_mark: in the picture of the gain
        on_card: whether its final loss is on a card at the top of the page
        sets_zoom: whether a zoomed picture makes room for its curve
    """

    name: str
    kind: Kind
    label: str
    short: str
    phrase: str
    heading: str
    color: str
    dashes: Dashes = "-"
    stage: str
    plan: Callable[[ComparisonSetup], Training | None]
    after_base: bool
    asked_by: str | None = None
    own_rate: bool = False
    own_sweep: bool = False
    write_start: Callable[[ComparisonSetup, Recipe, Path], None] | None = None
    check: Callable[[Protocol], None] | None = None
    label_without_noise: str = ""
    remark: str = ""
    without: str = ""
    gain_mark: GainMark | None = None
    on_card: bool = False
    sets_zoom: bool = True

    @property
    def key(self) -> str:
        """Its name in the summary's gain."""
        return self.name.replace("-", "_")

    def sweep_name(self, width: WholeWidth) -> str:
        """What its own sweep at the wide width is called."""
        return f"{self.name}-width-{Width.of(width).label}"

    def plan_if_asked(self, comparison: ComparisonSetup) -> Training | None:
        """How it is trained; None where it is not asked for, or the tuned values leave nothing to train."""
        has_rate = not self.own_rate or comparison.own_lr is not None
        return self.plan(comparison) if has_rate and self.is_asked_for(comparison.baselines) else None

    def is_asked_for(self, baselines: Container[str]) -> bool:
        """Whether it is trained with these baselines, tuning permitting."""
        return self.asked_by is None or self.asked_by in baselines
