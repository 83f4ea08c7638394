"""Comparisons that never were, for the tests of their page: plausible, and always the same."""

from __future__ import annotations

import random
from dataclasses import asdict, replace
from typing import Any

from mupscale.study import StudySettings, StudySummary, Sweep, SystemRuns, Tried, contender_named
from mupscale.study.contenders import IN_PAY, USUAL_IN_PAY
from mupscale.study.forecast import check_forecast, make_forecast
from mupscale.study.results import StageSpent
from mupscale.study.verdict import answer_comparison
from mupscale.study.wording import write_pay_words
from paper_runs import system_of
from summaries import stored
from summaries import write as write  # which tests of comparisons take from here

USUAL, ALL = USUAL_IN_PAY, IN_PAY
LRS = (0.002, 0.004, 0.008, 0.016, 0.032)
NOISES = (0.5, 1.0, 2.0, 4.0)
STEPS = 2000
SPENT = (
    *(("base-rates", 4e11, 12.0), ("rates", 6e12, 40.5), ("close", 2e12, 12.0), ("forecast-32", 3e12, 33.0)),
    *(("forecast-64", 9e12, 61.0), ("base", 2.4e13, 81.0), ("contenders", 4e14, 603.0)),
)
FINALS = {
    "from-scratch": (0.78, 0.63, 0.545),
    "continued": (0.585, 0.562, 0.548),
    "copies": (0.74, 0.60, 0.531),
    "fresh": (0.60, 0.555, 0.519),
    "fresh-trained": (0.605, 0.557, 0.521),
    "copies-shrunk": (0.72, 0.595, 0.533),
    "copies-without-noise": (0.68, 0.59, 0.546),
    "paired-noise": (0.70, 0.585, 0.533),
    "net2net": (0.76, 0.61, 0.537),
    "naive-widening": (0.79, 0.64, 0.551),
    "identity-blocks": (0.66, 0.58, 0.535),
    "copied-blocks": (0.65, 0.57, 0.532),
    "from-scratch-all-steps": (0.71, 0.58, 0.511),
}
"""Losses at the budgets: growing with fresh units crosses both others."""


def system(
    narrow: int = 256,
    names: tuple[str, ...] = USUAL,
    seeds: int = 2,
    *,
    lost: dict[str, int] | None = None,
    finals: dict[str, tuple[float, ...]] | None = None,
) -> SystemRuns:
    """Runs between a width and twice it. lost: how many seeds of a contender diverged at the last two budgets."""
    losses: dict[str, list[list[float | None]]] = {}
    for name in names:
        gone, chance = (lost or {}).get(name, 0), random.Random(f"{name} {narrow}")
        ends = (finals or FINALS)[name]
        first, *rest = [[end * (1 + 0.006 * chance.uniform(-1, 1)) for _ in range(seeds)] for end in ends]
        losses[name] = [[*first], *([*[None] * gone, *each[gone:]] for each in rest)]
    return system_of(losses, narrow=narrow, base_cost=8e9, full=1.26e11)


def tuned(name: str) -> Sweep:
    """A valley over learning rates, the largest of which diverged, and over noise where that is tuned."""
    noisy = contender_named(name).tunes_noise
    tried = [
        Tried(lr, noise, [None if lr > 0.03 and noise < 4 else 0.6 + 0.03 * i**2 + 0.01 * j**2 + 0.004 * len(name)])
        for j, noise in enumerate(NOISES if noisy else (0.0,), start=-2)
        for i, lr in enumerate(LRS, start=-2)
    ]
    return Sweep(name, tried, lr=0.008, noise=2.0 if noisy else 0.0)


def comparison(
    seeds: int = 2,
    names: tuple[str, ...] = USUAL,
    *,
    lost: dict[str, int] | None = None,
    large: SystemRuns | None = None,
    **changes: Any,
) -> StudySummary:
    """A model from width 256 to 1,024, tuned at width 32 and forecast from there and from 64."""
    small = [system(32, names, 3), system(64, names, 3)]
    large = large or system(256, names, seeds, lost=lost)
    forecast, answer = make_forecast(small, 256), answer_comparison(large)
    summary = StudySummary(
        name="mlp-covtype",
        preset="pay",
        command="mupscale run recipes/mlp-covtype.yaml --out runs/mlp-covtype",
        recipe=stored().recipe,
        settings=asdict(StudySettings(seeds=seeds, contenders=list(names), measure="held-out")),
        base={"from": None, "steps": STEPS, "lr": 0.008, "width": 256},
        tuned=[tuned(name) for name in ("base", *names) if name != "from-scratch-all-steps"],
        small=small,
        forecast={**forecast, "held": check_forecast(forecast, large, answer)},
        large=large,
        answer=answer,
        stages=[StageSpent(*spent) for spent in SPENT],
        notes=["grown from copies: the best learning rate, 0.016, is the highest tried; higher ones may be better"],
    )
    return write_pay_words(replace(summary, **changes))


def forecast_only(summary: StudySummary) -> StudySummary:
    """The same before its large models are trained."""
    forecast = {name: value for name, value in summary.forecast.items() if name != "held"}
    return write_pay_words(replace(summary, large=None, answer={}, forecast=forecast, stages=summary.stages[:5]))
