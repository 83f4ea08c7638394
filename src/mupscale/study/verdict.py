"""The answer of a comparison: one sentence, the three numbers that it is made of, and the break-evens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from mupscale.study.budgets import BreakEven, CostRatio, compare_costs, find_break_even
from mupscale.study.contenders import CONTINUED, FROM_SCRATCH, contender_named
from mupscale.study.results import ContenderRuns, SystemRuns
from mupscale.system import MupscaleError


def answer_comparison(runs: SystemRuns) -> dict[str, Any]:
    """What the large models say, as plain values.

    decision: grow, continued or from-scratch, whichever ends lowest at the full budget; None where the seeds cannot
    tell the lowest from the next of these three. winner: the contender with the lowest loss; None likewise. sentence:
    in words. grown: the best grown model. cost_charged, cost_there: what it costs over starting over, to the
    same loss, with the base model's training charged and with the base model already there. above_continued: by how
    much of its loss it ends above the base model continued (negative: below). break_even: by rival, from which cost on
    it is lower, in these two ways. Contenders that cost more than the others are no part of it.

    >>> from mupscale.study import BudgetPoint
    >>> ends = {"from-scratch": 2.0, "continued": 1.5, "fresh": 1.0}
    >>> points = {name: [BudgetPoint(1.0, 10, 100.0, [end, end + 0.1])] for name, end in ends.items()}
    >>> contenders = [ContenderRuns(name, 64, 0.01, 0.0, each) for name, each in points.items()]
    >>> answer = answer_comparison(SystemRuns(32, 64, 50.0, "FLOPs", contenders))
    >>> answer["decision"], answer["ranking"]
    ('grow', ['fresh', 'continued', 'from-scratch'])
    """
    ended = [one for one in runs.contenders if one.final is not None and not contender_named(one.name).full_steps]
    grown = [one for one in ended if contender_named(one.name).is_grown]
    if not ended:
        raise MupscaleError(
            "every contender diverged: give smaller learning rates (study.lrs), or look at the base model's curve"
        )
    ranked = sorted(ended, key=_final)
    best = min(grown, key=_final) if grown else None
    values: dict[str, Any] = {
        "decision": _decide(ranked),
        "winner": ranked[0].name if all(is_clear(ranked[0], other) for other in ranked[1:]) else None,
        "ranking": [one.name for one in ranked],
        "diverged": [one.name for one in runs.contenders if one.final is None],
        "grown": None if best is None else best.name,
        "cost_charged": None,
        "cost_there": None,
        "above_continued": None,
        "break_even": {},
    }
    if best is not None:
        values |= _compare_grown(runs, best)
    return {**values, "sentence": write_sentence(runs, values)}


def _decide(ranked: Sequence[ContenderRuns]) -> str | None:
    """Between growing, by whatever way, and its rivals."""
    kinds = [_kind(one) for one in ranked]
    others = [one for one, kind in zip(ranked, kinds, strict=True) if kind != kinds[0]]
    return kinds[0] if all(is_clear(ranked[0], other) for other in others) else None


def _kind(one: ContenderRuns) -> str:
    return "grow" if contender_named(one.name).is_grown else one.name


def _compare_grown(runs: SystemRuns, best: ContenderRuns) -> dict[str, Any]:
    scratch = runs.get(FROM_SCRATCH.name)
    charged, there = (
        None
        if scratch is None or scratch.final is None
        else compare_costs(runs.curve(best.name, charged=way), runs.curve(FROM_SCRATCH.name, charged=way))
        for way in (True, False)
    )
    if runs.base_cost is None:
        charged = None
    continued = runs.get(CONTINUED.name)
    above = None if continued is None or continued.final is None else _final(best) / continued.final - 1
    even = {
        name: {
            way: asdict(find_break_even(runs.curve(best.name, charged=flag), runs.curve(name, charged=flag)))
            for way, flag in (("charged", True), ("there", False))
            if runs.base_cost is not None or not flag
        }
        for name in (CONTINUED.name, FROM_SCRATCH.name)
        if runs.get(name) is not None
    }
    return {
        "cost_charged": None if charged is None else asdict(charged),
        "cost_there": None if there is None else asdict(there),
        "above_continued": above,
        "break_even": even,
    }


def is_clear(lower: ContenderRuns, higher: ContenderRuns) -> bool:
    """Whether seeds tell two contenders apart: with every one of several the first is lower, or none of its is higher.

    Contenders of one base model are compared seed by seed, others by their ranges.
    """
    ours, theirs = lower.points[-1].losses, higher.points[-1].losses
    pairs = [(a, b) for a, b in zip(ours, theirs, strict=False) if a is not None and b is not None]
    if len(pairs) < 2:
        return False
    if contender_named(lower.name).from_base and contender_named(higher.name).from_base:
        return all(a < b for a, b in pairs)
    return max(a for a, _ in pairs) < min(b for _, b in pairs)


def write_sentence(runs: SystemRuns, values: dict[str, Any]) -> str:
    """The answer in words anyone understands."""
    names = values["ranking"]
    first = contender_named(names[0])
    if runs.seeds < 2 and len(names) > 1:
        after = contender_named(names[1]).phrase
        apart = _difference(runs, names[1], names[0])
        return f"With one seed {first.phrase} ends lowest, {after} {apart} higher: more seeds tell whether that holds."
    if values["decision"] is None:
        others = (contender_named(name) for name in names[1:])
        rival = next(one for one in others if not (first.is_grown and one.is_grown))
        return (
            f"Too close to call: {first.phrase} and {rival.phrase} end within what the seeds differ by, "
            f"{_difference(runs, rival.name, names[0])} apart at the same cost."
        )
    if not first.is_grown:
        grown = values["grown"]
        if grown is None:
            return f"{first.advice}: every grown model diverged."
        what = contender_named(grown).phrase
        return f"{first.advice}: at the same cost {what} ends {_difference(runs, grown, names[0])} higher."
    parts = []
    if (ratio := values["cost_charged"] or values["cost_there"]) is not None:
        charged = "" if values["cost_charged"] else ", not counting the base model"
        parts.append(f"the same loss for {describe_ratio(CostRatio(**ratio))} of the cost of starting over{charged}")
    if (runs.get(CONTINUED.name)) is not None and values["above_continued"] is not None:
        parts.append(_about_continuing(values))
    return f"{first.advice}: {'; '.join(parts)}." if parts else f"{first.advice}."


def _about_continuing(values: dict[str, Any]) -> str:
    even = values["break_even"][CONTINUED.name]
    kind = BreakEven(**(even.get("charged") or even["there"])).kind
    higher = _percent(1 / (1 + values["above_continued"]) - 1)
    if kind == "always":
        return f"continuing the base model ends {higher} higher, at every budget"
    return f"continuing the base model ends {higher} higher, though it is lower at small budgets"


def describe_ratio(ratio: CostRatio) -> str:
    """A ratio of costs for a sentence.

    >>> describe_ratio(CostRatio(0.7312)), describe_ratio(CostRatio(0.25, "at most"))
    ('0.73', 'at most 0.25')
    """
    digits = max(0, 1 - math.floor(math.log10(ratio.value))) if ratio.value > 0 else 2
    return f"{ratio.bound} {ratio.value:.{min(digits, 3)}f}".strip()


def _difference(runs: SystemRuns, higher: str, lower: str) -> str:
    above, below = runs.get(higher), runs.get(lower)
    assert above is not None
    assert below is not None
    return _percent(_final(above) / _final(below) - 1)


def _percent(part: float) -> str:
    """With two digits, and as many before the point as there are.

    >>> _percent(0.0123), _percent(1.634)
    ('1.2 %', '163 %')
    """
    return f"{100 * part:.0f} %" if abs(part) >= 0.1 else f"{100 * part:.2g} %"


def _final(one: ContenderRuns) -> float:
    assert one.final is not None
    return one.final
