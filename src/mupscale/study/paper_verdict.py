"""What the paper's comparison cost and what it gained, and the answer in words.

The costs are those of the paper's 'Evaluation criteria'; one is None where a model's FLOPs cannot be counted or what it
is made of was not trained. The verdict is against the best of the honest baselines. Two models differ where the ranges
over their seeds do not overlap; where they do, seeds with the same base model are compared one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from statistics import fmean

from mupscale.core import Width
from mupscale.study.contenders import (
    BASE,
    CONTENDERS,
    COPIES,
    COPIES_WITHOUT_NOISE,
    FROM_SCRATCH,
    FROM_SCRATCH_CHANGED,
    Contender,
    Kind,
    contender_named,
)
from mupscale.study.results import ContenderRuns, Curve, StageSpent
from mupscale.sweep import Sweep, sweep_remarks
from mupscale.system import MupscaleError

Points = list[tuple[int, float]]
_WITH_FINALS = {"baseline", "ablation", "grown"}  # kinds of contenders whose final losses are in the gain


def compute_costs(
    runs: Sequence[ContenderRuns], stages: Sequence[StageSpent], sweeps: Sequence[Sweep]
) -> dict[str, float | None]:
    """FLOPs of tuning, of one base model and of one from-scratch model, and the speed-ups that follow.

    >>> from mupscale.study import BudgetPoint
    >>> def falls(name: str, end: float, flops: float) -> ContenderRuns:
    ...     curve = Curve(0, "finished", [50, 100], [(1 + end) / 2, end])
    ...     points = [BudgetPoint(1.0, 100, 100 * flops, [end])]
    ...     return ContenderRuns(name, 128, 0.1, 0.0, points, cost_per_step=flops, curves=[curve])
    >>> runs = [falls("base", 0.8, 1.0), falls("from-scratch", 0.5, 4.0), falls("copies", 0.0, 4.0)]
    >>> costs = compute_costs(runs, [], [])
    >>> costs["scratch_total"], costs["upscaled_to_scratch_loss"], costs["speedup_sunk"]
    (400.0, 200.0, 2.0)
    >>> round(costs["speedup_base_charged"], 2)  # the base model took 100 FLOPs
    1.33

    As in the paper, from scratch trains for as many steps as the upscaled model, and is charged for all of them; the
    upscaled one until it reaches the lowest loss of the other.
    """
    base, scratch, upscaled = (_named(runs, one) for one in (BASE, FROM_SCRATCH, COPIES))
    lowest = scratch_total = reached = None
    if scratch is not None and upscaled is not None:
        lowest = min((loss for step, loss in mean_curve(scratch) if step <= upscaled.steps), default=None)
        scratch_total = _cost(scratch, min(scratch.steps, upscaled.steps))
    if upscaled is not None and lowest is not None:
        reached = flops_until(upscaled, lowest)
    tuning = _total([stage.cost for stage in stages if stage.name.startswith(("sweep", "small"))])
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


def compute_gain(runs: Sequence[ContenderRuns]) -> dict[str, float | None]:
    """Final losses at equal FLOPs, and from scratch's minus the upscaled model's taken apart.

    learning_rate, head_start and noise add up to that difference; without from-scratch-changed the first is part of the
    second.

    >>> from mupscale.study import BudgetPoint
    >>> finals = {"from-scratch": 0.5, "from-scratch-changed": 0.45, "copies-without-noise": 0.4, "copies": 0.25}
    >>> runs = [ContenderRuns(n, 128, 0.1, 0.0, [BudgetPoint(1.0, 9, 9.0, [loss])]) for n, loss in finals.items()]
    >>> gain = compute_gain(runs)
    >>> [round(gain[part], 2) for part in ("learning_rate", "head_start", "noise")]
    [0.05, 0.05, 0.15]
    """
    finals = {one.name: final_loss(_named(runs, one)) for one in CONTENDERS if one.kind in _WITH_FINALS}
    scratch, drop, exact, upscaled = (
        finals[one.name] for one in (FROM_SCRATCH, FROM_SCRATCH_CHANGED, COPIES_WITHOUT_NOISE, COPIES)
    )
    return {
        **finals,
        "learning_rate": _difference(scratch, drop),
        "head_start": _difference(scratch if drop is None else drop, exact),
        "noise": _difference(exact, upscaled),
    }


def final_loss(runs: ContenderRuns | None) -> float | None:
    """Mean over the seeds that came to their end."""
    finals = [] if runs is None else runs.finals
    return fmean(finals) if finals else None


def mean_curve(runs: ContenderRuns) -> Points:
    """Training loss against steps, mean over the seeds that came to their end, at the steps that all of them have."""
    curves = [dict(zip(c.steps, c.losses, strict=True)) for c in runs.curves if c.status != "diverged"]
    common = set.intersection(*(set(curve) for curve in curves)) if curves else set()
    return [(step, fmean(curve[step] for curve in curves)) for step in sorted(common)]


def flops_until(runs: ContenderRuns, loss: float) -> float | None:
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


def total_cost(runs: ContenderRuns, base: float | None) -> float | None:
    """FLOPs of one whole run, with the base model's where it starts from it."""
    own = _cost(runs, runs.steps)
    if not contender_named(runs.name).from_base:
        return own
    return None if own is None or base is None else own + base


def _cost(runs: ContenderRuns, steps: float) -> float | None:
    return None if runs.cost_per_step is None else runs.cost_per_step * steps


def _speedup(
    scratch: float | None, upscaled: float | None, base: float | None = 0.0, tuning: float | None = 0.0
) -> float | None:
    if scratch is None or upscaled is None or base is None or tuning is None or upscaled + base + tuning <= 0:
        return None
    return total_speedup(scratch, upscaled, base, tuning)


def _tuning_speedup(upscaled: ContenderRuns | None, sweeps: Sequence[Sweep]) -> float | None:
    """One step at k·n over one at the largest k·n₀: what tuning at the target, as Net2Net does, would cost more."""
    small = [
        trial.cost / (trial.steps * sweep.seeds)
        for sweep in sweeps
        for trial in sweep.trials
        if sweep.start is not None and trial.status == "finished" and trial.steps and trial.cost
    ]
    if upscaled is None or upscaled.cost_per_step is None or not small:
        return None
    return tuning_speedup(upscaled.cost_per_step, max(small))


def _named(runs: Sequence[ContenderRuns], contender: Contender) -> ContenderRuns | None:
    return next((one for one in runs if one.name == contender.name), None)


def _total(parts: Sequence[float | None]) -> float | None:
    counted = [part for part in parts if part is not None]
    return sum(counted) if len(counted) == len(parts) else None


def _difference(more: float | None, less: float | None) -> float | None:
    return None if more is None or less is None else more - less


# ---------------------------------------------------------------------------------------------- in words

TRUSTED = 64
"""Small widths below this are warned of."""
RISE = 0.01
"""Held-out loss that ends higher than its lowest by more than this part rises."""

Numbers = Mapping[str, float | None]

_PARTS = {"learning_rate": "the learning rate", "head_start": "the head start", "noise": "the noise"}


def write_verdict(runs: Sequence[ContenderRuns], costs: Numbers, gain: Numbers) -> list[str]:
    """Sentences about a comparison, the answer first.

    >>> from mupscale.study import BudgetPoint
    >>> def ends_at(name: str, loss: float) -> ContenderRuns:
    ...     curves = [Curve(seed, "finished", [9], [loss]) for seed in (0, 1)]
    ...     return ContenderRuns(name, 128, 0.1, 0.0, [BudgetPoint(1.0, 9, 9.0, [loss, loss])], curves=curves)
    >>> runs = [ends_at("from-scratch", 0.5), ends_at("copies", 0.25)]
    >>> for sentence in write_verdict(runs, {}, {}):
    ...     print(sentence.replace(": ", ":\\n").replace(", and", ",\\nand"))
    Growing pays here:
    at equal FLOPs the upscaled model ends at a loss of 0.25 (0.25 to 0.25),
    and the best alternative, training from scratch, at 0.5 (0.5 to 0.5).
    """
    upscaled, ours = _named(runs, COPIES), _ours(runs)
    if upscaled is None:
        return ["Growing cannot be judged here: no upscaled model was trained."]
    if ours is None:
        return [
            f"Growing does not pay here: {_all(len(upscaled.curves))} of the upscaled model diverged, so try a "
            f"smaller learning rate or less noise (study.grown_lrs, study.noises)."
        ]
    best = _best(runs)
    if best is None:
        trained = [one.name for one in runs if _is(one, "baseline")]
        why = f"{' and '.join(trained)} diverged" if trained else "there is no baseline to compare with"
        return [
            f"Growing cannot be judged here: {_phrase(ours)} ends at a loss of {fmean(ours.finals):.4g}, but {why}."
        ]
    return [
        _headline(ours, best),
        *_seed_by_seed(ours, best),
        *_same_loss(ours, best, costs),
        *_held_out(runs),
        *_without_change(ours, upscaled),
        *_as_the_paper_counts(upscaled, costs),
        *_parts(gain),
        *_others(runs),
        *_one_seed(ours, best),
    ]


def _headline(ours: ContenderRuns, best: ContenderRuns) -> str:
    losses, theirs = ours.finals, best.finals
    if not _apart(losses, theirs):
        answer = "Growing makes no difference beyond the spread between seeds"
    else:
        answer = "Growing pays here" if max(losses) < min(theirs) else "Growing does not pay here"
    return (
        f"{answer}: at equal FLOPs {_phrase(ours)} ends at a loss of {_range(losses)}, and the best "
        f"alternative, {_phrase(best)}, at {_range(theirs)}."
    )


def _seed_by_seed(ours: ContenderRuns, best: ContenderRuns) -> list[str]:
    """Where the ranges overlap, but both start from the same base models, each seed compares like with like."""
    if not contender_named(best.name).from_base or _apart(ours.finals, best.finals):
        return []
    training, held_out = (_differences(ours, best, end) for end in (Curve.final, Curve.final_held_out))
    if not training:
        return []
    more = f", and held out by {held_out}" if held_out else ""
    return [f"Seed by seed, both from the same base model, the upscaled one differs by {training}{more}."]


def _differences(ours: ContenderRuns, theirs: ContenderRuns, end: Callable[[Curve], float | None]) -> str:
    """Of the seeds that both have, if these are two or more."""
    mine, other = ({c.seed: loss for c in runs.curves if (loss := end(c)) is not None} for runs in (ours, theirs))
    differences = [mine[seed] - other[seed] for seed in mine.keys() & other.keys()]
    if len(differences) < 2:
        return ""
    span = " to ".join(_signed(f"{each:.2g}") for each in (min(differences), max(differences)))
    return f"{span} (lower with {sum(each < 0 for each in differences)} of {len(differences)} seeds)"


def _without_change(ours: ContenderRuns, upscaled: ContenderRuns) -> list[str]:
    """Where (e′) is the better one: (e), of which all that follows is told."""
    if ours is upscaled:
        return []
    finals, without = upscaled.finals, "Without the change halfway"
    if not finals:
        return [f"{without}, {_all(len(upscaled.curves))} of the upscaled model diverged."]
    return [f"{without} the upscaled model ends at {_range(finals)}; what follows is about that one."]


def _same_loss(upscaled: ContenderRuns, best: ContenderRuns, costs: Numbers) -> list[str]:
    """FLOPs to the same loss: what the better one needs to reach the final loss of the other, base model charged."""
    ours, theirs = fmean(upscaled.finals), fmean(best.finals)
    better, worse = (upscaled, best) if ours <= theirs else (best, upscaled)
    whole, until = total_cost(worse, costs.get("base")), flops_until(better, max(ours, theirs))
    before = costs.get("base") if contender_named(better.name).from_base else 0.0
    if whole is None or until is None or before is None or until + before <= 0:
        return []
    who, whose = ("The upscaled model", "that") if better is upscaled else ("That", "the upscaled model's")
    return [f"{who} reaches {whose} final loss {_times(whole / (until + before))} cheaper, the base model charged."]


def _held_out(runs: Sequence[ContenderRuns]) -> list[str]:
    """The same question of unseen data, each model where it does best: training on may fit the training set alone."""
    lowest = {one.name: min(loss for _, loss in held) for one in runs if (held := _held_out_curve(one))}
    grown, best = (_lowest_of(lowest, kind) for kind in ("grown", "baseline"))
    if grown is None or best is None:
        return []
    return [
        f"On held-out data the upscaled model's loss{grown.remark} comes down to {lowest[grown.name]:.4g}, that of the "
        f"best alternative, {best.subject}, to {lowest[best.name]:.4g}."
    ]


def _lowest_of(losses: Mapping[str, float], kind: Kind) -> Contender | None:
    those = [one for one in map(contender_named, losses) if one.kind == kind]
    return min(those, key=lambda one: losses[one.name], default=None)


def _as_the_paper_counts(upscaled: ContenderRuns, costs: Numbers) -> list[str]:
    """Speed-ups to the lowest loss from scratch (the paper's 'Evaluation criteria')."""
    lowest = costs.get("scratch_min_loss")
    if lowest is None or not upscaled.finals:
        return []
    ways = {
        "speedup_sunk": "with the base model already there",
        "speedup_base_charged": "with it charged",
        "speedup_all_charged": "with tuning charged too",
    }
    speedups = [f"{_times(speedup)} {how}" for name, how in ways.items() if (speedup := costs.get(name)) is not None]
    target = f"the lowest loss of as many steps from scratch, {lowest:.4g}"
    if first_below(mean_curve(upscaled), lowest) is None:
        return [f"As the paper counts: in its {upscaled.steps} steps the upscaled model does not reach {target}."]
    return [f"As the paper counts: the speed-up to {target}, is {', '.join(speedups)}."] if speedups else []


def _parts(gain: Numbers) -> list[str]:
    """How much is the learning rate, the head start and the noise."""
    scratch, upscaled = gain.get(FROM_SCRATCH.name), gain.get(COPIES.name)
    parts = {name: value for name in _PARTS if (value := gain.get(name)) is not None}
    if scratch is None or upscaled is None or not {"head_start", "noise"} <= parts.keys():
        return []
    total = scratch - upscaled
    are_shares = total > 0 and all(abs(value) <= total for value in parts.values())  # else some outweigh the whole
    shares = [
        f"{_signed(f'{value:.3g}')}{_signed(f' ({value / total:.0%})') if are_shares else ''} is {_PARTS[name]}"
        for name, value in parts.items()
    ]
    whole = f"Of the {'gain' if total > 0 else 'difference'} of {_signed(f'{total:.3g}')} over training from scratch"
    sentences = [f"{whole}, {', '.join(shares[:-1])} and {shares[-1]}."]
    if "learning_rate" not in parts:
        sentences.append(
            "Without the contender from-scratch-changed, the learning rate's part is counted in the head start."
        )
    if parts["noise"] <= 0:
        sentences.append("Noise does not help here: the upscaled model would end no higher without it.")
    return sentences


def _others(runs: Sequence[ContenderRuns]) -> list[str]:
    ends = [
        f"{one.subject} ends at {_range(ours.finals) if ours.finals else 'nothing, for it diverged'}"
        for one in CONTENDERS
        if one.kind == "beside" and (ours := _named(runs, one)) is not None
    ]
    return [f"For comparison: {'; '.join(ends)}."] if ends else []


def _one_seed(*compared: ContenderRuns) -> list[str]:
    if min(len(runs.finals) for runs in compared) > 1:
        return []
    return ["This rests on one seed, so the spread between seeds is unknown: take 3 or more (seeds)."]


def write_warnings(sweeps: Sequence[Sweep], runs: Sequence[ContenderRuns]) -> list[str]:
    """What speaks against taking the numbers at their word.

    >>> from mupscale.study import BudgetPoint
    >>> curves = [Curve(0, "diverged", [], [])]
    >>> lost = ContenderRuns("copies", 128, 0.1, 0.0, [BudgetPoint(1.0, 9, 9.0, [None])], curves=curves)
    >>> write_warnings([], [lost])
    ['copies: 1 of 1 seeds diverged']
    """
    return [
        *_small_widths(sweeps),
        *(f"{sweep.name}: {finding}" for sweep in sweeps for finding in sweep_remarks(sweep)),
        *_diverged(runs),
        *_parting(runs),
    ]


def _small_widths(sweeps: Sequence[Sweep]) -> list[str]:
    """Transfer is a statement about wide models."""
    tuned_at = [sweep.width if sweep.start is None else sweep.start for sweep in sweeps]
    widths = {str(width): width for width in (Width.of(each) for each in tuned_at if each)}
    return [
        f"the small width {name} may be too small to trust what is tuned there: the paper advises about 100 units and "
        f"more"
        for name, width in widths.items()
        if width.is_plain and width.size < TRUSTED  # of a width by parts nobody here knows the whole
    ]


def _diverged(runs: Sequence[ContenderRuns]) -> list[str]:
    sentences = []
    for one in runs:
        lost = [curve.seed for curve in one.curves if curve.status == "diverged"]
        if lost:
            rest = "" if len(lost) == len(one.curves) else "; means are over the others"
            sentences.append(f"{one.name}: {len(lost)} of {len(one.curves)} seeds diverged{rest}")
    return sentences


def _parting(runs: Sequence[ContenderRuns]) -> list[str]:
    """The paper's caution: the theory is about training, so look where held-out loss goes another way."""
    upscaled, best, sentences = _ours(runs) or _named(runs, COPIES), _best(runs), list[str]()
    held = _held_out_curve(upscaled)
    if upscaled is None or not held:
        return []
    advice = "the method looks at training alone, and the paper advises caution where the two part"
    (at, lowest), (_, last) = min(held, key=lambda point: point[1]), held[-1]
    after = [loss for step, loss in mean_curve(upscaled) if step >= at]
    if last > lowest + RISE * abs(lowest) and len(after) > 1 and after[-1] < after[0]:
        sentences.append(
            f"the upscaled model's held-out loss rises from {lowest:.4g} at step {at} to {last:.4g} while its training "
            f"loss falls: {advice}"
        )
    ours, theirs, other = final_loss(upscaled), final_loss(best), _held_out_curve(best)
    if best and other and ours is not None and theirs is not None and ours < theirs and last > other[-1][1]:
        sentences.append(
            f"the upscaled model ends with a higher held-out loss than {_phrase(best)} ({last:.4g} against "
            f"{other[-1][1]:.4g}), though its training loss is lower: {advice}"
        )
    return sentences


def _held_out_curve(runs: ContenderRuns | None) -> list[tuple[int, float]]:
    """Held-out loss against steps, mean over the seeds that came to their end."""
    ended = [] if runs is None else [curve for curve in runs.curves if curve.status != "diverged"]
    curves = [dict(zip(curve.held_out_steps, curve.held_out_losses, strict=True)) for curve in ended]
    common = set.intersection(*(set(curve) for curve in curves)) if curves else set()
    return [(step, fmean(curve[step] for curve in curves)) for step in sorted(common)]


def _best(runs: Sequence[ContenderRuns]) -> ContenderRuns | None:
    """The baseline with the lowest final loss."""
    return _lowest(runs, "baseline")


def _ours(runs: Sequence[ContenderRuns]) -> ContenderRuns | None:
    """The grown model that more seeds finish, and that then ends lower."""
    most = max((len(one.finals) for one in runs if _is(one, "grown")), default=0)
    return _lowest([one for one in runs if len(one.finals) == most], "grown")


def _lowest(runs: Sequence[ContenderRuns], kind: Kind) -> ContenderRuns | None:
    ended = [one for one in runs if _is(one, kind) and one.finals]
    return min(ended, key=lambda one: fmean(one.finals), default=None)


def _is(runs: ContenderRuns, kind: Kind) -> bool:
    return contender_named(runs.name).kind == kind


def _phrase(runs: ContenderRuns) -> str:
    """The model in a sentence."""
    return contender_named(runs.name).subject


def _apart(losses: Sequence[float], others: Sequence[float]) -> bool:
    """Whether the ranges do not overlap."""
    return max(losses) < min(others) or max(others) < min(losses)


def _range(losses: Sequence[float]) -> str:
    mean = f"{fmean(losses):.4g}"
    return mean if len(losses) == 1 else f"{mean} ({min(losses):.4g} to {max(losses):.4g})"


def _times(ratio: float) -> str:
    return f"{ratio:.{2 if ratio < 1 else 1 if ratio < 100 else 0}f}×"


def _signed(number: str) -> str:
    return number if "e" in number else number.replace("-", "−")


def _all(count: int) -> str:
    return "the one run" if count == 1 else f"all {count} runs"
