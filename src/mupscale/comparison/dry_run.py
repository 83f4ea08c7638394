"""What a comparison would train, without training it: runs, steps and cost of every stage."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mupscale.comparison.contenders import Contender
from mupscale.comparison.pipeline import ComparisonRun
from mupscale.comparison.settings import ComparisonSettings
from mupscale.comparison.system import System
from mupscale.core import Width
from mupscale.train import Recipe


def describe_plan(
    recipe: Recipe,
    settings: ComparisonSettings,
    folder: str | Path,
    *,
    base_name: str = "",
    notes: Sequence[str] = (),
) -> str:
    """A table of stages, for `mupscale run --dry-run`; nothing is written. base_name, notes: as in `run_comparison`.

    >>> from mupscale.train import Growth, Spec
    >>> recipe = Recipe(
    ...     model=Spec("mupscale.models.MLP", {"d_in": 54, "d_out": 7}),
    ...     data=Spec("mupscale.data.CoverTypeSample"),
    ...     optimizer=Spec("torch.optim.SGD", {"lr": 0.1}),
    ...     width=16, base=4, steps=120, batch=10, grow=[Growth(at=60, width=64)],
    ... )
    >>> print(describe_plan(recipe, ComparisonSettings(widths=[8], seeds=2), "runs/demo"))
    tuning, 8 → 32           45 runs   5.57e+08 FLOPs   46.2%
    forecast, 8 → 32         39 runs   2.17e+08 FLOPs   18.0%
    large, 16 → 64           26 runs   4.32e+08 FLOPs   35.8%
    together                           1.21e+09 FLOPs
    steps at the full budget: from scratch 67, continued 488, grown from copies 60, grown with fresh units 60
    tuning costs at most that: candidates that are 10 % behind after 0.25 of the budget go no further
    """
    run = ComparisonRun(recipe, settings, Path(folder), lambda text: None, False, base_name, list(notes))
    large, small, contenders = run.plan()
    rows = []
    rows.append(_tuning_row(small[0], settings, contenders))
    rows += [_row("forecast", one, contenders, settings.small_seeds) for one in small]
    rows.append(_row("large", large, contenders, settings.seeds))
    total = sum(cost for _, _, cost in rows)
    unit = large.costs.unit
    lines = [f"{name:<22}{count:>5} runs  {_short(cost)} {unit}  {cost / total:6.1%}" for name, count, cost in rows]
    steps = ", ".join(f"{one.label} {large.steps(one):,}" for one in contenders)
    lines += [f"{'together':<22}{'':>10}  {_short(total)} {unit}", f"steps at the full budget: {steps}"]
    if small[0].tuning_legs(contenders[0]).first is not None:
        lines.append(
            f"tuning costs at most that: candidates that are {100 * settings.prune:g} % behind after "
            f"{settings.budgets[0]:g} of the budget go no further"
        )
    return "\n".join([*lines, *(f"Note: {note}" for note in run.notes)])


def _tuning_row(system: System, settings: ComparisonSettings, contenders: list[Contender]) -> tuple[str, int, float]:
    """One seed of every candidate, all to the end, not counting the seeds that close ones get."""
    rates = len(settings.rates(1.0))
    base = system.base_cost or 0.0
    count, cost = 2 * rates, rates * base * 4 / 3
    for one in contenders:
        if one.tuned_as is None:
            cells = rates * (len(settings.noises) if one.tunes_noise else 1)
            share = system.tuning_legs(one).steps / system.steps(one)
            count, cost = count + cells, cost + cells * share * _full_cost(system, one)
    return f"tuning, {_label(system)}", count, cost


def _row(name: str, system: System, contenders: list[Contender], seeds: int) -> tuple[str, int, float]:
    base = 0.0 if system.base is not None else system.base_cost or 0.0
    count, cost = seeds * (system.base is None), seeds * base
    for one in contenders:
        each = sum(leg.steps for leg in system.legs(one)) / system.steps(one)
        count += seeds * len(system.settings.budgets)
        cost += seeds * each * _full_cost(system, one)
    return f"{name}, {_label(system)}", count, cost


def _full_cost(system: System, one: Contender) -> float:
    return system.steps(one) * system.costs.of(system.wide if one.is_wide else system.narrow)


def _label(system: System) -> str:
    return f"{Width.of(system.narrow)} → {Width.of(system.wide)}"


def _short(cost: float) -> str:
    return f"{cost:9.3g}"
