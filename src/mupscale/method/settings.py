"""What the method needs to know beside a training recipe: where to tune, over what, and what to compare with."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args, get_type_hints

from mupscale.core import WholeWidth
from mupscale.method.contenders import DEFAULT_BASELINES, Baseline, has_own_rates
from mupscale.sweep import Space
from mupscale.system import MupscaleError


@dataclass(frozen=True)
class Method:
    """The section `method` of a recipe, for `mupscale run`: the paper's Steps 0 to 4.

    The recipe itself says the rest: width n, steps up to its one growth event (the base model's), the width k·n it
    grows to, and the steps from there on. The noise and the learning rate of the growth are what the method finds.

    Args:
        widths: small widths n₀ to tune at, e.g. [64]; with two, how the optimum moves between them counts
        lrs: learning rates of Sweep 1, at the base width; none takes the optimizer's own
        upscaled_lrs: learning rates of Sweep 2, after upscaling
        noises: noise levels of Sweep 2, in the growth's unit; 0 is always one of them
        seeds: how many seeds the large models train with
        sweep_seeds: how many seeds each trial of a sweep trains with
        measure: the loss that sweeps minimise: train, or held-out
        sampler: grid (every cell), random, or tpe
        trials: how many trials random and tpe take
        pruner: none, median, or halving (successive halving): stop trials that fall behind
        baselines: what the upscaled model is compared with (scratch-drop brings (b′), continued (c′) and (c″),
            and each of them (e′)); net2net and naive only on request
        engine: auto trains many models as one where that works, vectorised nowhere else, serial one at a time
        storage: where studies are kept: none for a SQLite file in the run's folder, journal:PATH, or a database URL
        retries: how often a trial whose worker died is trained again: none for without limit
    """

    widths: list[WholeWidth]
    upscaled_lrs: list[float]
    noises: list[float]
    lrs: list[float] = field(default_factory=list)
    seeds: int = 3
    sweep_seeds: int = 1
    measure: Literal["train", "held-out"] = "train"
    sampler: Literal["grid", "random", "tpe"] = "grid"
    trials: int | None = None
    pruner: Literal["none", "median", "halving"] = "none"
    baselines: list[Baseline] = field(default_factory=lambda: list(DEFAULT_BASELINES))
    engine: Literal["auto", "vectorised", "serial"] = "auto"
    storage: str | None = None
    retries: int | None = None

    def __post_init__(self) -> None:
        if not self.widths:
            raise MupscaleError("method.widths needs at least one small width to tune at, such as [64]")
        self._check_words()
        for name in ("seeds", "sweep_seeds"):
            if getattr(self, name) < 1:
                raise MupscaleError(f"method.{name} is {getattr(self, name)}, but must be at least 1")
        if self.retries is not None and self.retries < 0:
            raise MupscaleError(f"method.retries is {self.retries}, but must be 0 or more, or none for without limit")
        if self.sampler != "grid" and (self.trials is None or self.trials < 1):
            raise MupscaleError(f"method.sampler {self.sampler} needs method.trials, how many to take")
        self._check_spaces()

    def _check_words(self) -> None:
        """Refuse words that no setting has: the command line does so itself, Python does not."""
        hints = get_type_hints(Method)
        choices = [(name, getattr(self, name)) for name in ("measure", "sampler", "pruner", "engine")]
        for name, word in [*choices, *(("baselines", word) for word in self.baselines)]:
            words = get_args(Baseline if name == "baselines" else hints[name])
            if word not in words:
                raise MupscaleError(f"method.{name}: {word!r} is none of {', '.join(words)}")

    def _check_spaces(self) -> None:
        """A space refuses learning rates and noise levels that cannot be."""
        self.sweep_2()
        if self.lrs:
            self.sweep_1()

    def sweep_1(self) -> Space:
        """Learning rates at n₀."""
        return Space(tuple(self.lrs))

    def sweep_2(self) -> Space:
        """Learning rates × noise levels for n₀ → k·n₀."""
        return Space(tuple(self.upscaled_lrs), tuple(self.noises))

    @property
    def has_own_rates(self) -> bool:
        """Whether a baseline, and so the upscaled model, is also trained with the rate that is best without noise."""
        return has_own_rates(self.baselines)

    def to_json(self) -> dict[str, Any]:
        """Plain values; without `retries` where there is no limit, as before there was one."""
        return {name: value for name, value in asdict(self).items() if name != "retries" or value is not None}
