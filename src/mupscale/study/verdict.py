"""Who ends lowest, at which cost, and the answer in words: of the preset `pay`, and as the paper counts.

A curve is a list of costs and losses, costs rising. Nothing is said about costs beyond the measured ones. Costs that
cannot be counted, or belong to what was not trained, are None.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any, Literal

from mupscale.core import Width
from mupscale.study.contenders import (
    BASE,
    CONTENDERS,
    CONTINUED,
    COPIES,
    COPIES_WITHOUT_NOISE,
    FROM_SCRATCH,
    FROM_SCRATCH_CHANGED,
    Contender,
    Kind,
    contender_named,
)
from mupscale.study.loss_gaps import GapKind, choose_gap_kind, format_gap, gap_above
from mupscale.study.results import BreakEven, ContenderRuns, Curve, Points, StageSpent, SystemRuns
from mupscale.study.space import Sweep, sweep_remarks
from mupscale.system import Diverged, recipe_entry

# ---------------------------------------------------------------------------------------------- loss against cost


@dataclass(frozen=True)
class CostRatio:
    """What one contender costs, over another, to the same loss: that of the one which ends higher.

    bound: '' for the value itself; 'at most' or 'at least' where the lower one is there already at its lowest cost.
    """

    value: float
    bound: Literal["", "at most", "at least"] = ""

    def __str__(self) -> str:
        digits = max(0, 1 - math.floor(math.log10(self.value))) if self.value > 0 else 2
        return f"{self.bound} {self.value:.{min(digits, 3)}f}".strip()


def loss_at(points: Points, cost: float) -> float | None:
    """The loss at a cost, straight over its logarithm between two points; None outside the measured ones."""
    if not points or not points[0][0] <= cost <= points[-1][0]:
        return None
    for (low, above), (high, below) in pairwise(points):
        if low <= cost <= high:
            return above + (below - above) * math.log(cost / low) / math.log(high / low)
    return points[0][1]


def cost_to_reach(points: Points, loss: float, *, by: Literal["logarithm", "steps"] = "logarithm") -> float | None:
    """The cost at which the loss first is as low as this; None if it never is. by: what it goes straight over."""
    if points and points[0][1] <= loss:
        return points[0][0]
    for (low, above), (high, below) in pairwise(points):
        if below <= loss and by == "steps":
            return low + (high - low) * (above - loss) / (above - below)
        if below <= loss:
            return float(low * (high / low) ** ((above - loss) / (above - below)))
    return None


def compare_costs(points: Points, other: Points) -> CostRatio | None:
    """What the first costs over the second, to the loss that the worse of them ends with; None without a loss."""
    if not points or not other:
        return None
    if points[-1][1] <= other[-1][1]:
        cost = cost_to_reach(points, other[-1][1])
        assert cost is not None
        return CostRatio(cost / other[-1][0], "at most" if cost == points[0][0] else "")
    cost = cost_to_reach(other, points[-1][1])
    assert cost is not None
    return CostRatio(points[-1][0] / cost, "at least" if cost == other[0][0] else "")


def find_break_even(points: Points, other: Points) -> BreakEven:
    """From which cost on the first is lower, up to the highest cost that both have."""
    costs = sorted({cost for cost, _ in (*points, *other)})
    gaps = [
        (cost, ours - theirs)
        for cost in costs
        if (ours := loss_at(points, cost)) is not None and (theirs := loss_at(other, cost)) is not None
    ]
    if not gaps:
        return BreakEven("unknown")
    if gaps[-1][1] >= 0:
        return BreakEven("early" if any(gap < 0 for _, gap in gaps) else "never")
    last = max((number for number, (_, gap) in enumerate(gaps) if gap >= 0), default=None)
    if last is None:
        return BreakEven("always", gaps[0][0])
    (low, above), (high, below) = gaps[last], gaps[last + 1]
    return BreakEven("from", low * (high / low) ** (above / (above - below)))


# ---------------------------------------------------------------------------------------------- does growing pay?


def answer_comparison(runs: SystemRuns) -> dict[str, Any]:
    """What the large models say, as plain values.

    decision: grow, continued or from-scratch, whichever ends lowest at the full budget; None where the seeds cannot
    tell the lowest from the next of these three. winner: the contender with the lowest loss; None likewise. sentence:
    in words. grown: the best grown model. cost_charged, cost_there: what it costs over starting over, to the
    same loss, with the base model's training charged and with the base model already there. above_continued: by how
    much it ends above the base model continued (negative: below). gap: whether that is a share of the loss, or a
    difference. break_even: by rival, from which cost on it is lower, in these two ways. Contenders that cost more than
    the others are no part of it.
    """
    finals = {one.name: one.final for one in runs.contenders if one.final is not None}
    judged = [one for one in runs.contenders if one.name in finals and not one.contender.full_steps]
    if not judged:
        raise Diverged(
            f"every contender diverged: give smaller learning rates ({recipe_entry('study.lrs')}), or look at the base "
            "model's curve"
        )
    gap = choose_gap_kind(loss for one in runs.contenders for loss in one.finals)
    ranked = sorted(judged, key=lambda one: finals[one.name])
    best = next((one.name for one in ranked if one.contender.is_grown), None)
    kinds = ["grow" if one.contender.is_grown else one.name for one in ranked]
    rivals = [one for one, kind in zip(ranked, kinds, strict=True) if kind != kinds[0]]
    values: dict[str, Any] = {
        "decision": kinds[0] if all(is_clear(ranked[0], rival) for rival in rivals) else None,
        "winner": ranked[0].name if all(is_clear(ranked[0], other) for other in ranked[1:]) else None,
        "ranking": [one.name for one in ranked],
        "diverged": [one.name for one in runs.contenders if one.final is None],
        "grown": best,
        "cost_charged": None,
        "cost_there": None,
        "above_continued": None,
        "gap": gap,
        "break_even": {},
    }
    if best is not None:
        ways = ["charged", "there"] if runs.base_cost is not None else ["there"]
        rival_names = [name for name in (CONTINUED.name, FROM_SCRATCH.name) if runs.get(name) is not None]
        both = {
            name: {way: [runs.curve(one, charged=way == "charged") for one in (best, name)] for way in ways}
            for name in rival_names
        }
        if FROM_SCRATCH.name in finals:
            ratios = {way: compare_costs(*curves) for way, curves in both[FROM_SCRATCH.name].items()}
            values |= {f"cost_{way}": ratio and asdict(ratio) for way, ratio in ratios.items()}
        if CONTINUED.name in finals:
            values["above_continued"] = gap_above(finals[best], finals[CONTINUED.name], gap)
        values["break_even"] = {
            name: {way: asdict(find_break_even(*curves)) for way, curves in by_way.items()}
            for name, by_way in both.items()
        }
    return {**values, "sentence": _write_sentence(runs, finals, values)}


def is_clear(lower: ContenderRuns, higher: ContenderRuns, at: int = -1) -> bool:
    """Whether seeds tell two contenders apart: with every one of several the first is lower, or none of its is higher.

    Contenders of one base model are compared seed by seed, others by their ranges. at: which of the budgets.
    """
    ours, theirs = lower.points[at].losses, higher.points[at].losses
    pairs = [(a, b) for a, b in zip(ours, theirs, strict=False) if a is not None and b is not None]
    if len(pairs) < 2:
        return False
    if lower.contender.from_base and higher.contender.from_base:
        return all(a < b for a, b in pairs)
    return max(a for a, _ in pairs) < min(b for _, b in pairs)


def _write_sentence(runs: SystemRuns, finals: Mapping[str, float], values: Mapping[str, Any]) -> str:
    first, *others = map(contender_named, values["ranking"])
    gap: GapKind = values["gap"]

    def above(one: Contender) -> str:
        return format_gap(gap_above(finals[one.name], finals[first.name], gap), gap)

    if runs.seeds < 2 and others:
        return (
            f"With one seed, {first.phrase} ends lowest, {others[0].phrase} {above(others[0])} higher: more seeds tell "
            f"whether that holds."
        )
    if values["decision"] is None:
        rival = next(one for one in others if not (first.is_grown and one.is_grown))
        return (
            f"Too close to call: {first.phrase} and {rival.phrase} end within what the seeds differ by, "
            f"{above(rival)} apart at the same cost."
        )
    if not first.is_grown:
        if values["grown"] is None:
            return f"{first.advice}: every grown model diverged."
        grown = contender_named(values["grown"])
        return f"{first.advice}: at the same cost {grown.phrase} ends {above(grown)} higher."
    judged = {one.name: one for one in runs.contenders}
    alike = [one for one in others if one.is_grown and not is_clear(judged[first.name], judged[one.name])]
    advice = first.advice + "".join(f" or {one.brief_phrase.removeprefix('growing ')}" for one in alike)
    advice += " (the seeds do not tell them apart)" if alike else ""
    parts = []
    if (ratio := values["cost_charged"] or values["cost_there"]) is not None:
        charged = "" if values["cost_charged"] else ", not counting the base model"
        parts.append(f"the same loss for {CostRatio(**ratio)} of the cost of starting over{charged}")
    if values["above_continued"] is not None:
        even = values["break_even"][CONTINUED.name]
        always = (even.get("charged") or even["there"])["kind"] == "always"
        where = "at every budget" if always else "though it is lower at small budgets"
        parts.append(f"continuing the base model ends {above(CONTINUED)} higher, {where}")
    whose = f". {first.phrase.capitalize()}" if alike else ""  # the figures are of one of them
    return f"{advice}{whose}: {'; '.join(parts)}." if parts else f"{advice}."


# ---------------------------------------------------------------------------------------------- as the paper counts


def compute_costs(
    runs: Sequence[ContenderRuns], stages: Sequence[StageSpent], sweeps: Sequence[Sweep]
) -> dict[str, float | None]:
    """FLOPs of tuning, of one base model and of one from-scratch model, and the speed-ups that follow.

    These are the paper's 'Evaluation criteria': from scratch trains for as many steps as the upscaled model, and is
    charged for all of them; the upscaled one until it reaches the lowest loss of the other.
    """
    base, scratch, upscaled = (_named(runs, one) for one in (BASE, FROM_SCRATCH, COPIES))
    lowest = scratch_total = reached = None
    if scratch is not None and upscaled is not None:
        lowest = min((loss for step, loss in mean_curve(scratch) if step <= upscaled.steps), default=None)
        scratch_total = _cost(scratch, min(scratch.steps, upscaled.steps))
    if upscaled is not None and lowest is not None:
        reached = _cost_until(upscaled, lowest)
    parts = [stage.cost for stage in stages if stage.name.startswith(("sweep", "small"))]
    tuning = None if None in parts else sum(part or 0.0 for part in parts)
    base_total = None if base is None else _cost(base, base.steps)
    # one step at k·n over one at the largest k·n₀: what tuning at the target, as Net2Net does, would cost more
    small = [
        trial.cost / (trial.steps * len(trial.losses))
        for sweep in sweeps
        for trial in sweep.trials
        if sweep.start is not None and trial.status == "finished" and trial.steps and trial.cost
    ]
    return {
        "tuning": tuning,
        "base": base_total,
        "scratch_total": scratch_total,
        "scratch_min_loss": lowest,
        "upscaled_to_scratch_loss": reached,
        "speedup_sunk": speedup(scratch_total, reached),
        "speedup_base_charged": speedup(scratch_total, reached, base_total),
        "speedup_tuning_charged": speedup(scratch_total, reached, tuning),
        "speedup_all_charged": speedup(scratch_total, reached, base_total, tuning),
        "tuning_speedup": speedup(None if upscaled is None else upscaled.cost_per_step, max(small, default=None)),
    }


def speedup(cost: float | None, *others: float | None) -> float | None:
    """How many times cheaper others are together (Appendix F.4); None where a cost is not known, or they have none."""
    known = [other for other in others if other is not None]
    if cost is None or len(known) < len(others) or sum(known) <= 0:
        return None
    return cost / sum(known)


def compute_gain(runs: Sequence[ContenderRuns]) -> dict[str, float | None]:
    """Final losses at equal FLOPs, and from scratch's minus the upscaled model's taken apart.

    learning_rate, head_start and noise add up to that difference; without from-scratch-changed the first is part of the
    second.
    """
    judged = [one for one in CONTENDERS if one.kind in ("baseline", "ablation", "grown")]
    finals = {one.name: _mean_final(_named(runs, one)) for one in judged}
    scratch, changed, exact, upscaled = (
        finals[one.name] for one in (FROM_SCRATCH, FROM_SCRATCH_CHANGED, COPIES_WITHOUT_NOISE, COPIES)
    )
    pairs = {
        "learning_rate": (scratch, changed),
        "head_start": (scratch if changed is None else changed, exact),
        "noise": (exact, upscaled),
    }
    return {**finals, **{name: None if None in pair else pair[0] - pair[1] for name, pair in pairs.items()}}  # type: ignore[operator]


def mean_curve(runs: ContenderRuns | None, *, held_out: bool = False) -> list[tuple[int, float]]:
    """Loss against steps, mean over the seeds that came to their end, at the steps that all of them have."""
    ended = [] if runs is None else [curve for curve in runs.curves if curve.status != "diverged"]
    curves = [
        dict(zip(one.held_out_steps, one.held_out_losses, strict=True))
        if held_out
        else dict(zip(one.steps, one.losses, strict=True))
        for one in ended
    ]
    common = set.intersection(*(set(curve) for curve in curves)) if curves else set()
    return [(step, fmean(curve[step] for curve in curves)) for step in sorted(common)]


def _cost_until(runs: ContenderRuns, loss: float) -> float | None:
    """FLOPs of its own training until the mean curve first is at or below a loss; None if it never is."""
    step = cost_to_reach(mean_curve(runs), loss, by="steps")
    return None if step is None else _cost(runs, step)


def _cost(runs: ContenderRuns, steps: float) -> float | None:
    return None if runs.cost_per_step is None else runs.cost_per_step * steps


def _mean_final(runs: ContenderRuns | None) -> float | None:
    """Over the seeds that came to their end."""
    return fmean(runs.finals) if runs is not None and runs.finals else None


def _named(runs: Sequence[ContenderRuns], contender: Contender) -> ContenderRuns | None:
    return next((one for one in runs if one.name == contender.name), None)


# ------------------------------------------------------------------------------------------- the paper's, in words

TRUSTED = 64
"""Small widths below this are warned of."""
RISE = 0.01
"""Held-out loss that ends higher than its lowest by more than this part rises."""

Numbers = Mapping[str, float | None]


def write_verdict(runs: Sequence[ContenderRuns], costs: Numbers, gain: Numbers) -> list[str]:
    """Sentences about the paper's comparison, the answer first.

    It is against the best of the honest baselines. Two models differ where the ranges over their seeds do not overlap;
    where they do, seeds with the same base model are compared one by one.
    """
    upscaled, ours, best = _named(runs, COPIES), _ours(runs), _lowest(runs, "baseline")
    if upscaled is None:
        return ["Growing cannot be judged here: no upscaled model was trained."]
    lost = "the one run" if len(upscaled.curves) == 1 else f"all {len(upscaled.curves)} runs"
    if ours is None:
        return [
            f"Growing does not pay here: {lost} of the upscaled model diverged, so try a smaller learning "
            f"rate or less noise ({recipe_entry('study.grown_lrs')}, {recipe_entry('study.noises')})."
        ]
    subject = ours.contender.paper.subject
    if best is None:
        trained = [one.name for one in runs if one.contender.kind == "baseline"]
        why = f"{' and '.join(trained)} diverged" if trained else "there is no baseline to compare with"
        return [f"Growing cannot be judged here: {subject} ends at a loss of {fmean(ours.finals):.4g}, but {why}."]
    pays, loses = max(ours.finals) < min(best.finals), max(best.finals) < min(ours.finals)
    answer = "Growing pays here" if pays else "Growing does not pay here"
    if not pays and not loses:
        answer = "Growing makes no difference beyond the spread between seeds"
    told = [
        f"{answer}: at equal FLOPs {subject} ends at a loss of {_range(ours.finals)}, and the "
        f"best alternative, {best.contender.paper.subject}, at {_range(best.finals)}."
    ]
    # where the ranges overlap, but both start from the same base models, each seed compares like with like
    training, held_out = (_differences(ours, best, end) for end in (Curve.final, Curve.final_held_out))
    if training and best.contender.from_base and not (pays or loses):
        more = f", and held out by {held_out}" if held_out else ""
        told.append(f"Seed by seed, both from the same base model, the upscaled one differs by {training}{more}.")
    # FLOPs to the same loss: what the better one needs to reach the final loss of the other, base model charged
    better, worse = (ours, best) if fmean(ours.finals) <= fmean(best.finals) else (best, ours)
    charged = {one.name: costs.get("base") if one.contender.from_base else 0.0 for one in (better, worse)}
    whole, before = _cost(worse, worse.steps), charged[worse.name]
    if whole is not None and before is not None:
        ratio = speedup(whole + before, _cost_until(better, fmean(worse.finals)), charged[better.name])
        who, whose = ("The upscaled model", "that") if better is ours else ("That", "the upscaled model's")
        if ratio is not None:
            told.append(
                f"{who} reaches {whose} final loss {_times(ratio)} cheaper, with the base model's cost included."
            )
    # the same question of unseen data, each model where it does best: training on may fit the training set alone
    grown, rival = (_lowest(runs, kind, _lowest_held_out) for kind in ("grown", "baseline"))
    if grown is not None and rival is not None:
        remark = " (changed halfway)" if grown.contender.paper.change else ""
        told.append(
            f"On held-out data the upscaled model's loss{remark} comes down to {_lowest_held_out(grown):.4g}, that "
            f"of the best alternative, {rival.contender.paper.subject}, to {_lowest_held_out(rival):.4g}."
        )
    if ours is not upscaled:  # (e′) is the better one, and (e) is what all that follows is told of
        without = f"Without the change halfway, {lost} of the upscaled model diverged."
        if upscaled.finals:
            end = f"Without the change halfway the upscaled model ends at {_range(upscaled.finals)}"
            without = f"{end}; what follows is about that one."
        told.append(without)
    lowest = costs.get("scratch_min_loss")
    if lowest is not None and upscaled.finals:  # the paper's 'Evaluation criteria'
        ways = {
            "speedup_sunk": "if you already have the base model",
            "speedup_base_charged": "with its cost included",
            "speedup_all_charged": "with the cost of tuning included as well",
        }
        speedups = [f"{_times(ratio)} {how}" for name, how in ways.items() if (ratio := costs.get(name)) is not None]
        target = f"the lowest loss of as many steps from scratch, {lowest:.4g}"
        if cost_to_reach(mean_curve(upscaled), lowest, by="steps") is None:
            told.append(
                f"As the paper counts: in its {upscaled.steps} steps the upscaled model does not reach {target}."
            )
        elif speedups:
            told.append(f"As the paper counts: the speed-up to {target}, is {', '.join(speedups)}.")
    told += _parts(gain)
    ends = [
        f"{one.paper.subject} ends at {_range(beside.finals) if beside.finals else 'nothing, for it diverged'}"
        for one in CONTENDERS
        if one.kind == "beside" and (beside := _named(runs, one)) is not None
    ]
    told += [f"For comparison: {'; '.join(ends)}."] if ends else []
    if min(len(ours.finals), len(best.finals)) == 1:
        told.append("This rests on one seed, so the spread between seeds is unknown: take 3 or more (seeds).")
    return told


def _differences(ours: ContenderRuns, theirs: ContenderRuns, end: Callable[[Curve], float | None]) -> str:
    """Of the seeds that both have, if these are two or more."""
    mine, other = ({c.seed: loss for c in runs.curves if (loss := end(c)) is not None} for runs in (ours, theirs))
    differences = [mine[seed] - other[seed] for seed in mine.keys() & other.keys()]
    if len(differences) < 2:
        return ""
    span = " to ".join(_signed(f"{each:.2g}") for each in (min(differences), max(differences)))
    return f"{span} (lower with {sum(each < 0 for each in differences)} of {len(differences)} seeds)"


def _parts(gain: Numbers) -> list[str]:
    scratch, upscaled = gain.get(FROM_SCRATCH.name), gain.get(COPIES.name)
    names = {"learning_rate": "the learning rate", "head_start": "the head start", "noise": "the noise"}
    parts = {name: value for name in names if (value := gain.get(name)) is not None}
    if scratch is None or upscaled is None or not {"head_start", "noise"} <= parts.keys():
        return []
    total = scratch - upscaled
    are_shares = total > 0 and all(abs(value) <= total for value in parts.values())  # else some outweigh the whole
    shares = [
        f"{_signed(f'{value:.3g}')}{_signed(f' ({value / total:.0%})') if are_shares else ''} is {names[name]}"
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


def write_warnings(sweeps: Sequence[Sweep], runs: Sequence[ContenderRuns]) -> list[str]:
    """What speaks against taking the numbers of the paper's comparison at their word."""
    tuned_at = [Width.of(sweep.width if sweep.start is None else sweep.start) for sweep in sweeps]
    # by parts of a width nobody knows it
    small = [str(width) for width in dict.fromkeys(tuned_at) if width.is_plain and width.size < TRUSTED]
    sentences = [
        f"the small width {name} may be too small to trust what is tuned there: the paper advises about 100 units and "
        f"more"
        for name in small
    ]
    sentences += [f"{sweep.name}: {finding}" for sweep in sweeps for finding in sweep_remarks(sweep)]
    for one in runs:
        lost = sum(curve.status == "diverged" for curve in one.curves)
        if lost:
            rest = "" if lost == len(one.curves) else "; means are over the others"
            sentences.append(f"{one.name}: {lost} of {len(one.curves)} seeds diverged{rest}")
    # the paper's caution: the theory is about training, so look where held-out loss goes another way
    upscaled, best = _ours(runs) or _named(runs, COPIES), _lowest(runs, "baseline")
    held, other = mean_curve(upscaled, held_out=True), mean_curve(best, held_out=True)
    if upscaled is None or not held:
        return sentences
    advice = "the method looks at training alone, and the paper advises caution where the two part"
    (at, lowest), (_, last) = min(held, key=lambda point: point[1]), held[-1]
    after = [loss for step, loss in mean_curve(upscaled) if step >= at]
    if last > lowest + RISE * abs(lowest) and len(after) > 1 and after[-1] < after[0]:
        sentences.append(
            f"the upscaled model's held-out loss rises from {lowest:.4g} at step {at} to {last:.4g} while its training "
            f"loss falls: {advice}"
        )
    ours, theirs = _mean_final(upscaled), _mean_final(best)
    if best and other and ours is not None and theirs is not None and ours < theirs and last > other[-1][1]:
        sentences.append(
            f"the upscaled model ends with a higher held-out loss than {best.contender.paper.subject} ({last:.4g} "
            f"against {other[-1][1]:.4g}), though its training loss is lower: {advice}"
        )
    return sentences


def _ours(runs: Sequence[ContenderRuns]) -> ContenderRuns | None:
    """The grown model that more seeds finish, and that then ends lower."""
    most = max((len(one.finals) for one in runs if one.contender.kind == "grown"), default=0)
    return _lowest([one for one in runs if len(one.finals) == most], "grown")


def _lowest(
    runs: Sequence[ContenderRuns], kind: Kind, loss: Callable[[ContenderRuns], float | None] = _mean_final
) -> ContenderRuns | None:
    """The contender of a kind with the lowest loss, by default its mean final one."""
    losses = [(low, one) for one in runs if one.contender.kind == kind and (low := loss(one)) is not None]
    return min(losses, key=lambda pair: pair[0])[1] if losses else None


def _lowest_held_out(one: ContenderRuns) -> float | None:
    return min((loss for _, loss in mean_curve(one, held_out=True)), default=None)


def _range(losses: Sequence[float]) -> str:
    mean = f"{fmean(losses):.4g}"
    return mean if len(losses) == 1 else f"{mean} ({min(losses):.4g} to {max(losses):.4g})"


def _times(ratio: float) -> str:
    return f"{ratio:.{2 if ratio < 1 else 1 if ratio < 100 else 0}f}×"


def _signed(number: str) -> str:
    return number if "e" in number else number.replace("-", "−")
