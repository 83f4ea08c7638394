"""The answer in words: does widening pay here, against the best of the honest baselines, and what is the gain made of.

Two models differ where the ranges over their seeds do not overlap; where they do, seeds with the same base model are
compared one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

from mupscale.core import Width
from mupscale.method.contender_types import Kind, PaperContender
from mupscale.method.contenders import CONTENDERS, UPSCALED, find_contender
from mupscale.method.costs import final_loss, first_below, flops_until, mean_curve, total_cost
from mupscale.method.summary import Curve, Runs
from mupscale.sweep import Sweep, sweep_remarks

TRUSTED = 64
"""Small widths below this are warned of."""
RISE = 0.01
"""Held-out loss that ends higher than its lowest by more than this part rises."""

Numbers = Mapping[str, float | None]

_PARTS = {"learning_rate": "the learning rate", "head_start": "the head start", "noise": "the noise"}


def write_verdict(runs: Sequence[Runs], costs: Numbers, gain: Numbers) -> list[str]:
    """Sentences about a comparison, the answer first.

    >>> def ends_at(name: str, loss: float) -> Runs:
    ...     return Runs(name, name, 128, 0.1, 9, None, [Curve(seed, "finished", [9], [loss]) for seed in (0, 1)])
    >>> runs = [ends_at("scratch", 0.5), ends_at("upscaled", 0.25)]
    >>> for sentence in write_verdict(runs, {}, {}):
    ...     print(sentence.replace(": ", ":\\n").replace(", and", ",\\nand"))
    Growing pays here:
    at equal FLOPs the upscaled model ends at a loss of 0.25 (0.25 to 0.25),
    and the best alternative, training from scratch, at 0.5 (0.5 to 0.5).
    """
    upscaled, ours = _named(runs, UPSCALED), _ours(runs)
    if upscaled is None:
        return ["Growing cannot be judged here: no upscaled model was trained."]
    if ours is None:
        return [
            f"Growing does not pay here: {_all(len(upscaled.curves))} of the upscaled model diverged, so try a "
            f"smaller learning rate or less noise (upscaled_lrs, noises)."
        ]
    best = _best(runs)
    if best is None:
        trained = [one.name for one in runs if _is(one, "baseline")]
        why = f"{' and '.join(trained)} diverged" if trained else "there is no baseline to compare with"
        return [
            f"Growing cannot be judged here: {_phrase(ours)} ends at a loss of {fmean(ours.finals()):.4g}, but {why}."
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


def _headline(ours: Runs, best: Runs) -> str:
    losses, theirs = ours.finals(), best.finals()
    if not _apart(losses, theirs):
        answer = "Growing makes no difference beyond the spread between seeds"
    else:
        answer = "Growing pays here" if max(losses) < min(theirs) else "Growing does not pay here"
    return (
        f"{answer}: at equal FLOPs {_phrase(ours)} ends at a loss of {_range(losses)}, and the best "
        f"alternative, {_phrase(best)}, at {_range(theirs)}."
    )


def _seed_by_seed(ours: Runs, best: Runs) -> list[str]:
    """Where the ranges overlap, but both start from the same base models, each seed compares like with like."""
    if not best.after_base or _apart(ours.finals(), best.finals()):
        return []
    training, held_out = (_differences(ours, best, end) for end in (Curve.final, Curve.final_held_out))
    if not training:
        return []
    more = f", and held out by {held_out}" if held_out else ""
    return [f"Seed by seed, both from the same base model, the upscaled one differs by {training}{more}."]


def _differences(ours: Runs, theirs: Runs, end: Callable[[Curve], float | None]) -> str:
    """Of the seeds that both have, if these are two or more."""
    mine, other = ({c.seed: loss for c in runs.curves if (loss := end(c)) is not None} for runs in (ours, theirs))
    differences = [mine[seed] - other[seed] for seed in mine.keys() & other.keys()]
    if len(differences) < 2:
        return ""
    span = " to ".join(_signed(f"{each:.2g}") for each in (min(differences), max(differences)))
    return f"{span} (lower with {sum(each < 0 for each in differences)} of {len(differences)} seeds)"


def _without_change(ours: Runs, upscaled: Runs) -> list[str]:
    """Where (e′) is the better one: (e), of which all that follows is told."""
    if ours is upscaled:
        return []
    finals, contender = upscaled.finals(), find_contender(ours.name)
    assert contender is not None
    if not finals:
        return [f"{contender.without}, {_all(len(upscaled.curves))} of the upscaled model diverged."]
    return [f"{contender.without} the upscaled model ends at {_range(finals)}; what follows is about that one."]


def _same_loss(upscaled: Runs, best: Runs, costs: Numbers) -> list[str]:
    """FLOPs to the same loss: what the better one needs to reach the final loss of the other, base model charged."""
    ours, theirs = fmean(upscaled.finals()), fmean(best.finals())
    better, worse = (upscaled, best) if ours <= theirs else (best, upscaled)
    whole, until = total_cost(worse, costs.get("base")), flops_until(better, max(ours, theirs))
    before = costs.get("base") if better.after_base else 0.0
    if whole is None or until is None or before is None or until + before <= 0:
        return []
    who, whose = ("The upscaled model", "that") if better is upscaled else ("That", "the upscaled model's")
    return [f"{who} reaches {whose} final loss {_times(whole / (until + before))} cheaper, the base model charged."]


def _held_out(runs: Sequence[Runs]) -> list[str]:
    """The same question of unseen data, each model where it does best: training on may fit the training set alone."""
    lowest = {one.name: min(loss for _, loss in held) for one in runs if (held := _held_out_curve(one))}
    grown, best = (_lowest_of(lowest, kind) for kind in ("grown", "baseline"))
    if grown is None or best is None:
        return []
    return [
        f"On held-out data the upscaled model's loss{grown.remark} comes down to {lowest[grown.name]:.4g}, that of the "
        f"best alternative, {best.phrase}, to {lowest[best.name]:.4g}."
    ]


def _lowest_of(losses: Mapping[str, float], kind: Kind) -> PaperContender | None:
    those = [one for name in losses if (one := find_contender(name)) is not None and one.kind == kind]
    return min(those, key=lambda one: losses[one.name], default=None)


def _as_the_paper_counts(upscaled: Runs, costs: Numbers) -> list[str]:
    """Speed-ups to the lowest loss from scratch (the paper's 'Evaluation criteria')."""
    lowest = costs.get("scratch_min_loss")
    if lowest is None or not upscaled.finals():
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
    scratch, upscaled = gain.get("scratch"), gain.get("upscaled")
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
        sentences.append("Without the baseline scratch-drop, the learning rate's part is counted in the head start.")
    if parts["noise"] <= 0:
        sentences.append("Noise does not help here: the upscaled model would end no higher without it.")
    return sentences


def _others(runs: Sequence[Runs]) -> list[str]:
    ends = [
        f"{one.phrase} ends at {_range(ours.finals()) if ours.finals() else 'nothing, for it diverged'}"
        for one in CONTENDERS
        if one.kind == "comparison" and (ours := _named(runs, one)) is not None
    ]
    return [f"For comparison: {'; '.join(ends)}."] if ends else []


def _one_seed(*compared: Runs) -> list[str]:
    if min(len(runs.finals()) for runs in compared) > 1:
        return []
    return ["This rests on one seed, so the spread between seeds is unknown: take 3 or more (seeds)."]


def write_warnings(sweeps: Sequence[Sweep], runs: Sequence[Runs]) -> list[str]:
    """What speaks against taking the numbers at their word.

    >>> lost = Runs("upscaled", "upscaled", 128, 0.1, 9, None, [Curve(0, "diverged", [], [])])
    >>> write_warnings([], [lost])
    ['upscaled: 1 of 1 seeds diverged']
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


def _diverged(runs: Sequence[Runs]) -> list[str]:
    sentences = []
    for one in runs:
        lost = [curve.seed for curve in one.curves if curve.status == "diverged"]
        if lost:
            rest = "" if len(lost) == len(one.curves) else "; means are over the others"
            sentences.append(f"{one.name}: {len(lost)} of {len(one.curves)} seeds diverged{rest}")
    return sentences


def _parting(runs: Sequence[Runs]) -> list[str]:
    """The paper's caution: the theory is about training, so look where held-out loss goes another way."""
    upscaled, best, sentences = _ours(runs) or _named(runs, UPSCALED), _best(runs), list[str]()
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


def _held_out_curve(runs: Runs | None) -> list[tuple[int, float]]:
    """Held-out loss against steps, mean over the seeds that came to their end."""
    ended = [] if runs is None else [curve for curve in runs.curves if curve.status != "diverged"]
    curves = [dict(zip(curve.held_out_steps, curve.held_out_losses, strict=True)) for curve in ended]
    common = set.intersection(*(set(curve) for curve in curves)) if curves else set()
    return [(step, fmean(curve[step] for curve in curves)) for step in sorted(common)]


def _best(runs: Sequence[Runs]) -> Runs | None:
    """The baseline with the lowest final loss."""
    return _lowest(runs, "baseline")


def _ours(runs: Sequence[Runs]) -> Runs | None:
    """The grown model that more seeds finish, and that then ends lower."""
    most = max((len(one.finals()) for one in runs if _is(one, "grown")), default=0)
    return _lowest([one for one in runs if len(one.finals()) == most], "grown")


def _lowest(runs: Sequence[Runs], kind: Kind) -> Runs | None:
    ended = [one for one in runs if _is(one, kind) and one.finals()]
    return min(ended, key=lambda one: fmean(one.finals()), default=None)


def _is(runs: Runs, kind: Kind) -> bool:
    contender = find_contender(runs.name)
    return contender is not None and contender.kind == kind


def _phrase(runs: Runs) -> str:
    """The model in a sentence."""
    contender = find_contender(runs.name)
    return runs.name if contender is None else contender.phrase


def _named(runs: Sequence[Runs], contender: PaperContender) -> Runs | None:
    return next((one for one in runs if one.name == contender.name), None)


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
