"""Steps 1 to 4 at full size, and the honest baselines: what else the same FLOPs could have bought."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from mupscale.engine import Outcome
from mupscale.method import peers
from mupscale.method.stages import label
from mupscale.method.summary import Curve, Runs
from mupscale.method.tuning import Tuned
from mupscale.method.workshop import Workshop
from mupscale.sweep import Cell, Sweep
from mupscale.system import MupscaleError
from mupscale.train import NoiseLevel, Recipe, RunFolder, Width

POINTS = 400
"""Of a curve in the summary, at most."""

LABELS = {
    "base": "base model, width {width}",
    "scratch": "(a) from scratch, width {width}",
    "scratch-drop": "(b) from scratch, with the same change of the learning rate",
    "scratch-own": "(b′) from scratch, changed to the learning rate that is best without noise",
    "continued": "(c) base model continued, width {width}",
    "continued-own": "(c′) base model continued, with the learning rate that is best without noise",
    "continued-late": "(c″) base model continued, changed halfway to the learning rate that is best without noise",
    "exact": "(d) upscaled without noise, width {width}",
    "upscaled": "(e) upscaled with noise, width {width}",
    "upscaled-own": "(e′) upscaled with noise, changed halfway to the learning rate that is best without noise",
    "upscaled-plain": "(e″) upscaled, plain transfer",
    "net2net": "Net2Net, tuned at width {width}",
    "naive": "naive widening, width {width}",
}
_Asked = tuple[Width, int, float, NoiseLevel]  # width, steps, learning rate and noise
NO_NOISE = "(e) upscaled, width {width}, for which the sweep chose no noise"


def train_large(shop: Workshop, tuned: Tuned) -> tuple[list[Runs], list[Sweep]]:
    """All large models, in the order of LABELS; and Net2Net's sweep at the large width, if it is asked for."""
    large = _Large(shop, tuned)
    base = large.base()
    parts = [base, *large.scratch(), *large.continued(), *large.upscaled(), *large.naive(), *large.net2net()]
    by_name = {runs.name: runs for runs in parts}
    return [by_name[name] for name in LABELS if name in by_name], large.swept


@dataclass
class _Large:
    shop: Workshop
    tuned: Tuned

    def __post_init__(self) -> None:
        self.protocol, self.choice = self.shop.protocol, self.tuned.choice
        self.asked = self.shop.method.baselines
        self.width, self.wide = self.shop.recipe.width, self.protocol.wide
        self.own_lr = self._own_lr()
        self.swept: list[Sweep] = []

    def _own_lr(self) -> float | None:
        """The learning rate of (b′), (c′), (c″) and (e′), if the sweep's grid tells it from the chosen one.

        That lies between two of the grid's where it is extrapolated from several small widths. (e′) has it if a
        baseline has, so that none has more choice than another.
        """
        if not self.shop.method.has_own_rates:
            return None
        nearest = min(self.shop.method.upscaled_lrs, key=lambda lr: abs(math.log(lr / self.choice.lr)))
        return None if self.tuned.zero_lr == nearest else self.tuned.zero_lr

    def base(self) -> Runs:
        """The base model; seeds with which it diverges cannot be upscaled."""
        steps, lr = self.protocol.base_steps, self.choice.base_lr
        recipes = [self.protocol.fresh(self.width, lr, steps, seed, "base") for seed in range(self.shop.method.seeds)]
        outcomes = self.shop.train("base", {"base": recipes})["base"]
        self.seeds = [seed for seed, outcome in enumerate(outcomes) if outcome.status == "finished"]
        if not self.seeds:
            raise MupscaleError(
                f"the base model of width {label(self.width)} diverged with every seed at learning rate {lr:g}: let "
                f"Sweep 1 (method.lrs) choose among smaller ones"
            )
        return self._runs("base", self.width, lr, steps, outcomes, range(len(outcomes)))

    def scratch(self) -> Iterator[Runs]:
        """(a), (b) and (b′): the wide model from scratch, for what the base model and the upscaled one cost together.

        Where the learning rate does not change after all, (b) is (a), and need not be trained.
        """
        base, after = self.protocol.base_steps, self.protocol.wide_steps
        steps = after + self.protocol.equal_cost(base, self.width, self.wide)
        drop = max(1, min(steps - 1, round(steps * base / (base + after))))
        seeds, lr, rates = range(self.shop.method.seeds), self.choice.base_lr, dict[str, float]()
        if "scratch" in self.asked:
            rates["scratch"] = lr
        if "scratch-drop" in self.asked:
            rates["scratch-drop"] = self.choice.lr
            if self.own_lr is not None:
                rates["scratch-own"] = self.own_lr
        recipes = dict[str, list[Recipe]]()
        for name, rate in rates.items():
            fresh = [self.protocol.fresh(self.wide, lr, steps, seed, name) for seed in seeds]
            if name == "scratch":
                recipes[name] = fresh
            elif rate != lr or "scratch" not in rates:
                recipes[name] = [self.protocol.with_drop(recipe, drop, rate) for recipe in fresh]
        outcomes = self.shop.train("scratch", recipes)
        for name, rate in rates.items():
            made = self._runs(name, self.wide, lr, steps, outcomes[name if name in outcomes else "scratch"], seeds)
            yield made if name == "scratch" else replace(made, drop=drop, drop_lr=rate)

    def continued(self) -> Iterator[Runs]:
        """(c), (c′), (c″): the base model goes on at its own width, for what the upscaled one costs; and (d).

        Without noise the wide model computes what the narrow one does, step by step, so it need not be trained: (d) is
        read off the first steps of (c), unless a schedule makes these other ones.
        """
        if "continued" not in self.asked:
            return
        after = self.protocol.wide_steps
        steps = self.protocol.equal_cost(after, self.wide, self.width)
        rates = {"continued": self.choice.lr}
        if self.own_lr is not None:
            rates["continued-own"] = self.own_lr
            if steps > 1:
                rates["continued-late"] = self.choice.lr
        recipes = self._from_base({name: (self.width, steps, lr, 0.0) for name, lr in rates.items()})
        outcomes = self.shop.train("continued", self._changed(recipes, "continued-late"))
        for name, lr in rates.items():
            yield self._runs(name, self.width, lr, steps, outcomes[name], self.seeds, after_base=True)
        lr, short = self.choice.lr, outcomes["continued"]
        if not self.protocol.exact_is_a_beginning:
            short = self.shop.train("exact", self._from_base({"exact": (self.width, after, lr, 0.0)}))["exact"]
        names = ["exact", "upscaled"] if self.choice.noise == 0 else ["exact"]
        for name in names:
            yield self._runs(name, self.wide, lr, after, short, self.seeds, after_base=True)

    def upscaled(self) -> Iterator[Runs]:
        """(e): Meta-algorithm 'Upscaling procedure'; (e′); with the plain transfer beside an extrapolated one.

        (e′) is to (e) what (b′) is to (a): noise may want a large rate, which is not the one to end with.
        """
        chosen: dict[str, tuple[NoiseLevel, float]] = {}
        if self.choice.noise > 0 or "continued" not in self.asked:
            chosen["upscaled"] = (self.choice.constants or self.choice.noise, self.choice.lr)
        steps = self.protocol.wide_steps
        if self.choice.noise > 0 and self.own_lr is not None and steps > 1:
            chosen["upscaled-own"] = chosen["upscaled"]
        if self.choice.plain is not None and self.choice.plain[0] > 0:
            chosen["upscaled-plain"] = (self._plain_level(self.choice.plain[0]), self.choice.plain[1])
        recipes = self._from_base({name: (self.wide, steps, lr, noise) for name, (noise, lr) in chosen.items()})
        outcomes = self.shop.train("upscaled", self._changed(recipes, "upscaled-own"))
        for name, (noise, lr) in chosen.items():
            made = self._runs(name, self.wide, lr, steps, outcomes[name], self.seeds, after_base=True)
            yield replace(made, noise=noise)

    def _plain_level(self, noise: float) -> NoiseLevel:
        """Signal-normalised noise transfers as constants, which are proportional to it."""
        constants, extrapolated = self.choice.constants, self.choice.noise
        return noise if constants is None else {name: c * noise / extrapolated for name, c in constants.items()}

    def naive(self) -> Iterator[Runs]:
        """Copied and perturbed, but trained as if the width were the same: the narrow model's rates, decay and eps."""
        if "naive" not in self.asked:
            return
        steps, base = self.protocol.wide_steps, self.protocol.upscaled_width(self.shop.recipe.base)
        recipes = []
        for seed in self.seeds:
            start = self._start("naive", seed)
            if not start.exists():
                noise = self.choice.constants or self.choice.noise
                peers.naive_start(self._base(seed), self.protocol.growth, noise, start)
            recipe = self.protocol.after("base", self.wide, self.choice.lr, steps, seed, 0.0, "naive")
            recipes.append(replace(recipe, base=base, init_at=None, start=str(start)))
        outcomes = self.shop.train("naive", {"naive": recipes})["naive"]
        made = self._runs("naive", self.wide, self.choice.lr, steps, outcomes, self.seeds, after_base=True)
        yield replace(made, noise=self.choice.constants or self.choice.noise)

    def net2net(self) -> Iterator[Runs]:
        """Net2Net: random copies, noise and learning rate tuned where it is expensive, at the wide width itself."""
        if "net2net" not in self.asked:
            return
        steps, space = self.protocol.wide_steps, self.shop.method.sweep_2()

        def started(seed: int, cell: Cell, out: str | None) -> Recipe:
            start = self._start("net2net", seed)
            if not start.exists():
                peers.net2net_start(self._base(seed), self.wide, start)
            recipe = self.protocol.after("base", self.wide, cell.lr, steps, seed, cell.noise, out)
            return replace(recipe, start=str(start))

        tuned_with = self.seeds[: self.shop.method.sweep_seeds]
        name = f"net2net-width-{label(self.wide)}"
        found = self.shop.sweep(
            name, self.wide, self.width, space, lambda cell: [started(seed, cell, None) for seed in tuned_with]
        )
        self.swept.append(found)
        best = found.best
        recipes = [started(seed, best.cell, "net2net") for seed in self.seeds]
        outcomes = self.shop.train("net2net", {"net2net": recipes})["net2net"]
        made = self._runs("net2net", self.wide, best.lr, steps, outcomes, self.seeds, after_base=True)
        yield replace(made, noise=best.noise)

    def _base(self, seed: int) -> Recipe:
        return self.protocol.fresh(self.width, self.choice.base_lr, self.protocol.base_steps, seed, "base")

    def _start(self, name: str, seed: int) -> Path:
        return self.shop.folder / name / f"start-{seed}.safetensors"

    def _from_base(self, asked: Mapping[str, _Asked]) -> dict[str, list[Recipe]]:
        """Runs that start from the base models, by name."""
        return {
            name: [self.protocol.after("base", width, lr, steps, seed, noise, name) for seed in self.seeds]
            for name, (width, steps, lr, noise) in asked.items()
        }

    def _changed(self, recipes: Mapping[str, list[Recipe]], name: str) -> dict[str, list[Recipe]]:
        """The same with those of a name changed halfway to the rate that is best without noise."""
        lr, late = self.own_lr, recipes.get(name, [])
        if lr is None or not late:
            return dict(recipes)
        return {**recipes, name: [self.protocol.with_drop(recipe, recipe.steps // 2, lr) for recipe in late]}

    def _runs(
        self,
        name: str,
        width: Width,
        lr: float,
        steps: int,
        outcomes: Sequence[Outcome],
        seeds: Sequence[int],
        *,
        after_base: bool = False,
    ) -> Runs:
        curves = [curve_of(outcome, seed, steps) for outcome, seed in zip(outcomes, seeds, strict=True)]
        cost = self.protocol.flops_per_step(width)
        shown = NO_NOISE if name == "upscaled" and self.choice.noise == 0 else LABELS[name]
        made = Runs(name, shown.format(width=label(width)), width, lr, steps, cost, curves, after_base)
        change = next(iter(outcomes[0].recipe.grow), None)
        return made if change is None else replace(made, drop=change.at, drop_lr=change.lr)


def curve_of(outcome: Outcome, seed: int, steps: int) -> Curve:
    """A seed's curve from its run's metrics up to so many steps, thinned to what a picture can show.

    A run that diverged later than that did not diverge.
    """
    status = "finished" if outcome.step > steps + 1 else outcome.status
    records = RunFolder(str(outcome.recipe.out)).records()
    held = [r for r in records if r["kind"] == "eval" and r["loss"] is not None and r["step"] <= steps]
    points, losses = thinned([(step, loss) for step, loss in outcome.curve if step <= steps])
    accuracy = [r["accuracy"] for r in held if "accuracy" in r]
    return Curve(seed, status, points, losses, [r["step"] for r in held], [r["loss"] for r in held], accuracy)


def thinned(curve: Sequence[tuple[int, float]], most: int = POINTS) -> tuple[list[int], list[float]]:
    """At most so many points, each the mean of those it stands for."""
    together = max(1, math.ceil(len(curve) / most))
    parts = [curve[start : start + together] for start in range(0, len(curve), together)]
    return [part[-1][0] for part in parts], [fmean(loss for _, loss in part) for part in parts]
