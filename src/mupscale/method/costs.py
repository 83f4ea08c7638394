"""What a run of the method cost and what it gained, from its own metrics: the paper's 'Evaluation criteria'.

A cost is None where a model's FLOPs cannot be counted or what it is made of was not trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean

from mupscale.method.contender_types import PaperContender
from mupscale.method.contenders import BASE, CONTENDERS, EXACT, SCRATCH, SCRATCH_DROP, UPSCALED
from mupscale.method.summary import Runs, StageCost
from mupscale.sweep import Sweep
from mupscale.system import MupscaleError

Points = list[tuple[int, float]]
_WITH_FINALS = {"baseline", "ablation", "grown"}  # kinds of contenders whose final losses are in the gain


def compute_costs(
    runs: Sequence[Runs], stages: Sequence[StageCost], sweeps: Sequence[Sweep]
) -> dict[str, float | None]:
    """FLOPs of tuning, of one base model and of one from-scratch model, and the speed-ups that follow.

    >>> from mupscale.method import Curve
    >>> def falls(name: str, end: float, flops: float) -> Runs:
    ...     curve = Curve(0, "finished", [50, 100], [(1 + end) / 2, end])
    ...     return Runs(name, name, 128, 0.1, 100, flops, [curve])
    >>> runs = [falls("base", 0.8, 1.0), falls("scratch", 0.5, 4.0), falls("upscaled", 0.0, 4.0)]
    >>> costs = compute_costs(runs, [], [])
    >>> costs["scratch_total"], costs["upscaled_to_scratch_loss"], costs["speedup_sunk"]
    (400.0, 200.0, 2.0)
    >>> round(costs["speedup_base_charged"], 2)  # the base model took 100 FLOPs
    1.33

    As in the paper, from scratch trains for as many steps as the upscaled model, and is charged for all of them; the
    upscaled one until it reaches the lowest loss of the other.
    """
    base, scratch, upscaled = (_named(runs, one) for one in (BASE, SCRATCH, UPSCALED))
    lowest = scratch_total = reached = None
    if scratch is not None and upscaled is not None:
        lowest = min((loss for step, loss in mean_curve(scratch) if step <= upscaled.steps), default=None)
        scratch_total = _cost(scratch, min(scratch.steps, upscaled.steps))
    if upscaled is not None and lowest is not None:
        reached = flops_until(upscaled, lowest)
    tuning = _total([stage.flops for stage in stages if stage.name.startswith(("sweep", "small"))])
    base_total = None if base is None else _cost(base, base.steps)
    return {
        "tuning": tuning,
        "base": base_total,
        "scratch_total": scratch_total,
        "scratch_min_loss": lowest,
        "upscaled_to_scratch_loss": reached,
        "speedup_sunk": _speedup(scratch_total, reached),
        "speedup_base_charged": _speedup(scratch_total, reached, base=base_total),
        "speedup_tuning_charged": _speedup(scratch_total, reached, tuning=tuning),
        "speedup_all_charged": _speedup(scratch_total, reached, base=base_total, tuning=tuning),
        "tuning_speedup": _tuning_speedup(upscaled, sweeps),
    }


def compute_gain(runs: Sequence[Runs]) -> dict[str, float | None]:
    """Final losses at equal FLOPs, and from scratch's minus the upscaled model's taken apart.

    learning_rate, head_start and noise add up to that difference; without scratch-drop the first is part of the second.

    >>> from mupscale.method import Curve
    >>> finals = {"scratch": 0.5, "scratch-drop": 0.45, "exact": 0.4, "upscaled": 0.25}
    >>> runs = [Runs(n, n, 128, 0.1, 9, None, [Curve(0, "finished", [9], [loss])]) for n, loss in finals.items()]
    >>> gain = compute_gain(runs)
    >>> [round(gain[part], 2) for part in ("learning_rate", "head_start", "noise")]
    [0.05, 0.05, 0.15]
    """
    finals = {one.key: final_loss(_named(runs, one)) for one in CONTENDERS if one.kind in _WITH_FINALS}
    scratch, drop, exact, upscaled = (finals[one.key] for one in (SCRATCH, SCRATCH_DROP, EXACT, UPSCALED))
    return {
        **finals,
        "learning_rate": _difference(scratch, drop),
        "head_start": _difference(scratch if drop is None else drop, exact),
        "noise": _difference(exact, upscaled),
    }


def final_loss(runs: Runs | None) -> float | None:
    """Mean over the seeds that came to their end."""
    finals = [] if runs is None else runs.finals()
    return fmean(finals) if finals else None


def mean_curve(runs: Runs) -> Points:
    """Training loss against steps, mean over the seeds that came to their end, at the steps that all of them have."""
    curves = [dict(zip(c.steps, c.losses, strict=True)) for c in runs.curves if c.status != "diverged"]
    common = set.intersection(*(set(curve) for curve in curves)) if curves else set()
    return [(step, fmean(curve[step] for curve in curves)) for step in sorted(common)]


def flops_until(runs: Runs, loss: float) -> float | None:
    """FLOPs of its own training until the mean curve first is at or below a loss; None if it never is."""
    step = first_below(mean_curve(runs), loss)
    return None if step is None else _cost(runs, step)


def first_below(curve: Points, loss: float) -> float | None:
    """The step at which a curve first is at or below a loss, between two points by a straight line.

    >>> first_below([(10, 3.0), (20, 1.0)], 2.0)
    15.0
    """
    if curve and curve[0][1] <= loss:
        return curve[0][0]
    for (step, above), (after, below) in pairwise(curve):
        if below <= loss:
            return step + (after - step) * (above - loss) / (above - below)
    return None


def total_speedup(scratch: float, upscaled: float, base: float = 0, tuning: float = 0) -> float:
    """How many times cheaper upscaling is than training the wide model from scratch (Appendix F.4).

    The arguments are costs in the same unit. `base` and `tuning` charge for the base model and for the sweep;
    zero takes them as already there.

    >>> total_speedup(scratch=12.0, upscaled=3.0), total_speedup(scratch=12.0, upscaled=3.0, base=1.0)
    (4.0, 3.0)
    """
    return _ratio(scratch, upscaled + base + tuning)


def tuning_speedup(at_target: float, at_small: float) -> float:
    """How many runs at the small width one run at the target width pays for (Appendix F.4, the table).

    The arguments are costs of one run, or of one sample, in the same unit.

    >>> tuning_speedup(at_target=118.0, at_small=5.0)
    23.6
    """
    return _ratio(at_target, at_small)


def _ratio(cost: float, other: float) -> float:
    if other <= 0:
        raise MupscaleError(f"a speedup needs a positive cost to compare with, not {other}")
    return cost / other


def total_cost(runs: Runs, base: float | None) -> float | None:
    """FLOPs of one whole run, with the base model's where it starts from it."""
    own = _cost(runs, runs.steps)
    if not runs.after_base:
        return own
    return None if own is None or base is None else own + base


def _cost(runs: Runs, steps: float) -> float | None:
    return None if runs.flops_per_step is None else runs.flops_per_step * steps


def _speedup(
    scratch: float | None, upscaled: float | None, base: float | None = 0.0, tuning: float | None = 0.0
) -> float | None:
    if scratch is None or upscaled is None or base is None or tuning is None or upscaled + base + tuning <= 0:
        return None
    return total_speedup(scratch, upscaled, base, tuning)


def _tuning_speedup(upscaled: Runs | None, sweeps: Sequence[Sweep]) -> float | None:
    """One step at k·n over one at the largest k·n₀: what tuning at the target, as Net2Net does, would cost more."""
    small = [
        trial.flops / (trial.steps * sweep.seeds)
        for sweep in sweeps
        for trial in sweep.trials
        if sweep.start is not None and trial.status == "finished" and trial.steps and trial.flops
    ]
    if upscaled is None or upscaled.flops_per_step is None or not small:
        return None
    return tuning_speedup(upscaled.flops_per_step, max(small))


def _named(runs: Sequence[Runs], contender: PaperContender) -> Runs | None:
    return next((one for one in runs if one.name == contender.name), None)


def _total(parts: Sequence[float | None]) -> float | None:
    counted = [part for part in parts if part is not None]
    return sum(counted) if len(counted) == len(parts) else None


def _difference(more: float | None, less: float | None) -> float | None:
    return None if more is None or less is None else more - less
