"""A study is a tree of training stretches: what one is, what identifies it, and how budgets branch off a trunk.

constant ──┬───────────┬──────────────────────┐
           └ decay ¼   └── decay ½            └────── decay, full budget
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

from mupscale.core import RuleSet, WholeWidth, Width
from mupscale.growth import GrowthSettings
from mupscale.system import MupscaleError, told_fields
from mupscale.train import Schedule, TunedAt

DECAY = 4
"""The decay is one part in so many of a budget."""


@dataclass(frozen=True, kw_only=True)
class Stretch(GrowthSettings):
    """One model size, trained for some steps under one piece of a schedule, from where its parent ended.

    The fields of `GrowthSettings` say how the model grows on the way from its parent.

    Args:
        width: the size it trains at
        steps: for how many steps
        lr: the learning rate, at the base width
        schedule: its piece of a schedule, as multiples of lr
        seed: of everything that is drawn
        order: which order of the data it sees; every stretch of a path has its own
        parent: the stretch whose end it starts from; without one it starts from an initialisation, or from `start`
        start: of a checkpoint from outside the study, which has no steps of its own: what its trainer calls it
        state: whether it keeps the state of its parent's optimizer, or resets it
        base: the width whose rates it has, where that is not the recipe's
        change: a step, and the learning rate from there on
        rules, batch: those that it trains with, where they are not the recipe's
        tuned_at: the batch and duration that lr is meant for, where the rules are to make it that of its own
    """

    width: WholeWidth
    steps: int
    lr: float
    schedule: Schedule = field(default_factory=Schedule)
    seed: int = 0
    order: int = 0
    parent: Stretch | None = None
    start: str | None = None
    how: str = "copies"
    state: Literal["keep", "reset"] = "keep"
    base: WholeWidth | None = None
    change: tuple[int, float] | None = None
    rules: RuleSet | None = None
    batch: int | None = None
    tuned_at: TunedAt | None = None

    def then(self, **changes: Any) -> Stretch:
        """The next stretch of the same model: same size, rate and seed, and the next order of the data."""
        new: dict[str, Any] = {"order": self.order + 1, "state": "keep", "change": None, "start": None}
        new |= {**GrowthSettings(how="copies").growth_settings, "noise_unit": self.noise_unit}
        return replace(self, parent=self, **{**new, **changes})

    def decayed(self, steps: int, floor: float = 0.0) -> Stretch:
        """The next stretch, in which the rate falls to its floor."""
        return self.then(steps=steps, schedule=Schedule("wsd", decay=steps, floor=floor))

    @property
    def is_grown(self) -> bool:
        return self.parent is not None and Width.of(self.parent.width) != Width.of(self.width)

    @property
    def path(self) -> list[Stretch]:
        return [*(self.parent.path if self.parent is not None else ()), self]

    @cached_property
    def key(self) -> str:
        """A hash of all that determines its result: its own fields and its parent's key."""
        return hash_values(told_fields(replace(self, parent=None)) | {"parent": self.parent and self.parent.key})

    @property
    def label(self) -> str:
        """The beginning of its folder's name, for a person who looks for it."""
        how = f"{self.how}-" if self.is_grown else ""
        return f"width-{Width.of(self.width).label}-{how}lr-{self.lr:g}-steps-{self.steps}-seed-{self.seed}"


def hash_values(values: Any) -> str:
    """Sixteen letters that other values do not have."""
    text = json.dumps(values, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def list_stretches(leaves: Iterable[Stretch]) -> list[Stretch]:
    """All that these leaves stand on, each once, parents before their children."""
    found: dict[str, Stretch] = {}
    for leaf in leaves:
        for stretch in leaf.path:
            found.setdefault(stretch.key, stretch)
    return list(found.values())


def list_waves(leaves: Iterable[Stretch]) -> Iterator[list[Stretch]]:
    """The same in waves: the parents of each wave are in earlier ones."""
    waves: dict[int, list[Stretch]] = {}
    for stretch in list_stretches(leaves):
        waves.setdefault(len(stretch.path), []).append(stretch)
    for depth in sorted(waves):
        yield waves[depth]


# ---------------------------------------------------------------------------------------------- budgets


def branch_off(first: Stretch, steps: int, budgets: Sequence[float], kind: str, own: Schedule) -> dict[float, Stretch]:
    """A leaf for every budget of a run that begins as `first` does and has so many steps at its full budget.

    Under wsd they share a constant phase, from which their decays branch off. Under other schedules a shorter run is
    no part of a longer one. kind: wsd, cosine, or recipe; own: the recipe's schedule.
    """
    if kind != "wsd":
        schedule = own if kind == "recipe" else Schedule("cosine", warmup=own.warmup, floor=own.floor)
        return {part: replace(first, steps=round(part * steps), schedule=schedule) for part in budgets}
    leaves: dict[float, Stretch] = {}
    trunk, done = None, 0
    for part in budgets:
        total = round(part * steps)
        decay = total // DECAY
        constant, warmup = total - decay - done, own.warmup if trunk is None else 0
        if decay < 1 or constant < 1 or warmup >= constant:
            raise MupscaleError(
                f"a budget of {part:g} is {total} steps, too few for warm-up ({own.warmup}), a constant phase and a "
                f"decay over the last quarter: give more steps, larger budgets or fewer steps of warm-up"
            )
        piece: dict[str, Any] = {"steps": constant, "schedule": Schedule(warmup=warmup)}
        trunk = replace(first, **piece) if trunk is None else trunk.then(**piece, order=trunk.order + 2)
        leaves[part] = trunk.decayed(decay, own.floor)
        done += constant
    return leaves


class Candidate(NamedTuple):
    """A run that is tuned: the leaf it is judged by first, None where that is not done, and its end."""

    early: Stretch | None
    full: Stretch


def plan_candidate(first: Stretch, steps: int, part: float, kind: str, own: Schedule) -> Candidate:
    """A run of so many steps that is judged after a part of its budget, and at its end; 1: only there."""
    if kind != "wsd":
        return Candidate(None, branch_off(first, steps, [1.0], kind, own)[1.0])
    decay = Schedule("wsd", decay=max(1, steps // DECAY), floor=own.floor)
    if part == 1:
        return Candidate(None, replace(first, steps=steps, schedule=replace(decay, warmup=own.warmup)))
    early = branch_off(first, steps, [part], kind, own)[part]
    trunk = early.parent
    assert trunk is not None
    return Candidate(early, trunk.then(steps=steps - trunk.steps, schedule=decay, order=trunk.order + 2))
