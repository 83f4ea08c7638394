"""What the paper's comparison says beside its verdict, in words: cards, tables, and how it was measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from statistics import fmean
from typing import Any

from mupscale.plots import words
from mupscale.study.contenders import COPIES, COPIES_OWN, FROM_SCRATCH, contender_or_stranger
from mupscale.study.results import Card, ContenderRuns, PageTable, StudySummary, SystemRuns
from mupscale.study.wording import format_width, list_contenders

_COSTS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("base", "The base model, one run", words.format_flops),
    ("tuning", "Tuning: all sweeps and their small base models", words.format_flops),
    ("scratch_total", "The wide model from scratch, for as many steps as the upscaled one", words.format_flops),
    ("scratch_min_loss", "Its lowest training loss in these steps", words.format_loss),
    ("upscaled_to_scratch_loss", "The upscaled model, until it reaches that loss", words.format_flops),
    ("speedup_sunk", "Speed-up if the base model is there already", words.format_factor),
    ("speedup_base_charged", "Speed-up with the base model's cost included", words.format_factor),
    ("speedup_all_charged", "Speed-up with the cost of the base model and of tuning included", words.format_factor),
    ("tuning_speedup", "Tuning runs small for the price of one at the target width", words.format_factor),
)
_REACHED = {"upscaled_to_scratch_loss", "speedup_sunk", "speedup_base_charged", "speedup_all_charged"}
_UNITS = {
    "init": "1 is as much as a fresh initialisation has",
    "theory": "in the paper's constants",
    "signal": "relative to the spectral norm of each weight",
}


def write_paper_words(summary: StudySummary) -> StudySummary:
    """The summary with its cards and tables; its sentences are the verdict's.

    answer holds costs and choice. It gets reference: the loss that speed-ups are about, as a line for the pictures.
    """
    answer, large = summary.answer, summary.large
    assert large is not None
    lowest = answer["costs"].get("scratch_min_loss")
    reference = {"loss": lowest, "label": "(a)'s lowest in (e)'s steps"}
    return replace(
        summary,
        cards=[*_speed_up(answer["costs"]), *_final_losses(large), *_chosen(answer["choice"])],
        measured=list(_measuring(summary, large)),
        tables=list(_tables(answer, large)),
        answer={**answer, "reference": reference} if words.is_finite_number(lowest) else answer,
    )


def _speed_up(costs: Mapping[str, Any]) -> Iterator[Card]:
    if "speedup_base_charged" not in costs:
        return
    number, sunk, everything = (_cost(costs, f"speedup_{how}") for how in ("base_charged", "sunk", "all_charged"))
    more = f"base model's cost included; {sunk} if it is there already, {everything} with that of tuning included, too"
    known = number not in ("not reached", "unknown")
    yield Card("Speed-up to the from-scratch model's lowest loss", number, more if known else "")


def _cost(costs: Mapping[str, Any], key: str) -> str:
    """One of them; without a number it says whether the loss was not reached or the cost is not known."""
    value = costs.get(key)
    if words.is_finite_number(value):
        return next(shown for name, _, shown in _COSTS if name == key)(value)
    reachable = words.is_finite_number(costs.get("scratch_total"))
    return "not reached" if key in _REACHED and reachable else "unknown"


def _final_losses(large: SystemRuns) -> Iterator[Card]:
    """From scratch, the best of the other baselines, and what was grown."""
    baselines = [one for one in large.contenders if contender_or_stranger(one.name).kind == "baseline"]
    best = min((one for one in baselines if one.finals), key=lambda one: fmean(one.finals), default=None)
    shown: dict[str, ContenderRuns | None] = {"from scratch": large.get(FROM_SCRATCH.name)}
    if best is not None and best.name != FROM_SCRATCH.name:
        shown[f"best alternative: {contender_or_stranger(best.name).label}"] = best
    shown |= {"upscaled": large.get(COPIES.name), "upscaled, rate changed halfway": large.get(COPIES_OWN.name)}
    for what, runs in shown.items():
        if runs is not None:
            mean, _, spread = words.format_spread(runs.finals).partition(" (")
            seeds = len(runs.finals)
            over = f"{spread.rstrip(')')} over {seeds} seeds" if spread else "one seed" if seeds == 1 else ""
            yield Card(f"Final loss, {what}", mean if seeds else "diverged", over)


def _chosen(choice: Mapping[str, Any]) -> Iterator[Card]:
    """Noise and learning rate after the growth, and what one small width alone would transfer."""
    noise, rate = ("", "") if choice["plain"] is None else map(words.format_setting, choice["plain"])
    more = _UNITS.get(choice["unit"], f"unit {choice['unit']}")
    yield Card("Chosen noise", words.format_setting(choice["noise"]), f"{more}{_plain(noise)}")
    before = words.format_setting(choice["base_lr"])
    more = f"after upscaling; {before} before{_plain(rate)}"
    yield Card("Chosen learning rate", words.format_setting(choice["lr"]), more)


def _plain(value: str) -> str:
    return f"; plain transfer: {value}" if value else ""


def _measuring(summary: StudySummary, large: SystemRuns) -> Iterator[str]:
    small = " and ".join(format_width(width) for width in summary.settings["widths"])
    seeds = summary.settings["small_seeds"]
    over = "held-out" if summary.settings.get("measure") == "held-out" else "training"
    yield f"Tuned at width {small}, by the {over} loss, with {'one seed' if seeds == 1 else f'{seeds} seeds'} a trial."
    count = max(len(one.points[-1].losses) for one in large.contenders)
    mean = "A line is the mean over those that finished, its band their range."
    yield f"Seeds: {count}. {mean}" if count > 1 else "Seeds: one, so nothing is known about chance."
    yield "Final loss: the mean of the training loss over the last tenth of the steps."


def _tables(answer: Mapping[str, Any], large: SystemRuns) -> Iterator[PageTable]:
    yield list_contenders("The models", large, "training loss")
    costs = answer["costs"]
    rows = [[what, _cost(costs, key)] for key, what, _ in _COSTS if key in costs]
    if rows:
        yield PageTable("Costs and speed-ups", ["what", "how much"], rows)
    constants = answer["choice"].get("constants") or {}
    if constants:
        values = [[str(name), words.format_setting(value)] for name, value in constants.items()]
        yield PageTable("Noise per parameter, as transferred", ["parameter", "noise"], values, folded=True)
