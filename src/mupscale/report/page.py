"""The page of one run: the answer first, then the pictures it rests on, the costs, and how to do it again."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

from mupscale.checks import CoordCheck, Row
from mupscale.method import Summary
from mupscale.plots import Gallery, words
from mupscale.report import curves, facts, gain, markup, sweeps, transfer
from mupscale.system import MupscaleError


def page(summary: Summary, check: dict[str, Any] | None, folder: Path) -> str:
    """The HTML; the pictures go into the folder as well. check: what transfer-check found."""
    gallery = Gallery(folder)
    body = [
        _headline(summary),
        _training(summary, gallery),
        markup.section(
            "Where the gain comes from",
            markup.paragraph(gain.in_words(summary)),
            markup.pictures(gain.pictures(summary, gallery)),
        ),
        _costs(summary),
        _tuning(summary, gallery),
        _transfer(check, gallery),
        _coordinates(summary, gallery),
        _again(summary),
    ]
    return markup.document(f"{summary.name}: mupscale report", "\n".join(part for part in body if part))


def verdict(summary: Summary) -> list[str]:
    """The answer in words, the first sentence the headline."""
    return [str(sentence) for sentence in summary.verdict] or ["This run gives no verdict."]


def _headline(summary: Summary) -> str:
    first, *more = verdict(summary)
    return "\n".join(
        [
            f"<header>\n<h1>{escape(summary.name)}</h1>",
            markup.paragraph(first, "answer"),
            *(markup.paragraph(sentence, "lead") for sentence in more),
            markup.paragraph(facts.setting(summary), "muted"),
            "</header>",
            markup.cards(_cards(summary)),
            markup.bullets("To keep in mind", summary.warnings, "warnings"),
        ]
    )


_FINALS = {
    "upscaled": "Final loss, upscaled",
    "upscaled-own": "Final loss, upscaled and changed halfway",
    "scratch": "Final loss, from scratch",
}


def _cards(summary: Summary) -> list[tuple[str, str, str]]:
    choice, items = summary.choice, []
    if "speedup_base_charged" in summary.costs:
        number, sunk, everything = (
            facts.cost(summary, f"speedup_{how}") for how in ("base_charged", "sunk", "all_charged")
        )
        more = f"base model charged; {sunk} if it is there already, {everything} with tuning charged, too"
        more = "" if number in ("not reached", "unknown") else more
        items.append(("Speed-up to the from-scratch model's lowest loss", number, more))
    for name, what in _FINALS.items():
        runs = summary.get(name)
        if runs is not None:
            mean, _, spread = facts.final(summary, name).partition(" (")
            seeds = len(runs.finals())
            over = f"{spread.rstrip(')')} over {seeds} seeds" if spread else ("one seed" if seeds == 1 else "")
            items.append((what, mean, over))
    noise, unit = facts.noise(summary)
    items.append(("Chosen noise", noise, unit))
    plain = f"; plain transfer: {words.setting(choice.plain[1])}" if choice.plain is not None else ""
    more = f"after upscaling; {words.setting(choice.base_lr)} before{plain}"
    items.append(("Chosen learning rate", words.setting(choice.lr), more))
    flops, seconds = facts.total(summary)
    if summary.stages:
        items.append(("All of this took", words.duration(seconds), words.flops(flops) if flops is not None else ""))
    return items


def _training(summary: Summary, gallery: Gallery) -> str:
    drawn = list(curves.pictures(summary, gallery))
    unknown = not any(picture.name.startswith("training-flops") for picture in drawn)
    note = "Costs of these models are not known, so there is no picture against FLOPs." if unknown and drawn else ""
    return markup.section(
        "Training",
        markup.pictures(drawn) or markup.paragraph("There are no losses to draw."),
        markup.paragraph(note, "note"),
        markup.table(facts.FINALS_HEAD, facts.finals(summary)),
        markup.paragraph(
            "Final training loss: mean over the last tenth of the steps, and over the seeds that finished "
            "(smallest to largest). The cost of a run leaves out that of the base model it may start from.",
            "note",
        ),
    )


def _costs(summary: Summary) -> str:
    return markup.section(
        "Costs",
        markup.side_by_side(
            markup.table(("what", "how much"), [(what, value) for _, what, value in facts.costs(summary)]),
            markup.table(("stage", "FLOPs", "time"), facts.stages(summary)),
        ),
    )


def _tuning(summary: Summary, gallery: Gallery) -> str:
    rows = []
    for sweep in summary.sweeps:
        best = sweeps.best_of(sweep)
        counts = [sum(t.status == status for t in sweep.trials) for status in ("finished", "diverged", "pruned")]
        found = [words.setting(best.lr), words.setting(best.noise), words.loss(best.loss)] if best else ["", "", ""]
        flops = words.flops(sweep.flops) if sweep.flops else "unknown"
        rows.append([sweep.name, *map(words.count, counts), *found, flops])
    head = ("sweep", "finished", "diverged", "pruned", "best learning rate", "best noise", "its loss", "FLOPs")
    constants = summary.choice.constants or {}
    return markup.section(
        "Tuning",
        markup.pictures(sweeps.pictures(summary, gallery)),
        markup.table(head, rows),
        markup.folded(
            "Noise per parameter, as transferred",
            markup.table(("parameter", "noise"), [(str(name), words.setting(v)) for name, v in constants.items()]),
        ),
    )


def _transfer(check: dict[str, Any] | None, gallery: Gallery) -> str:
    if check is None:
        return ""
    sentences = [markup.paragraph(str(sentence)) for sentence in check.get("verdict", [])]
    return markup.section("Transfer check", *sentences, markup.pictures(transfer.pictures(check, gallery)))


def _coordinates(summary: Summary, gallery: Gallery) -> str:
    if not summary.coords or not summary.coords.get("rows"):
        return ""
    check = _check(summary.coords)
    verdict = "flat" if check.ok else "not flat"
    widths = ", ".join(words.count(width) for width in check.widths)
    said = f"How much each layer's output changes in the first steps of training, at widths {widths}: {verdict}."
    picture = gallery.adopt(
        "coordinates", f"Coordinate check, {check.title}. {said}", said, lambda path: check.plot(path, narrow=True)
    )
    rows = [(x.module, f"{x.size_power:+.2f}", f"{x.change_power:+.2f}", x.verdict) for x in check.layers]
    head = ("layer", "size, power of the width", "change, power of the width", "verdict")
    return markup.section(
        "Coordinate check", markup.pictures([picture]), markup.folded("Layer by layer", markup.table(head, rows))
    )


def _check(values: dict[str, Any]) -> CoordCheck:
    try:
        rows = [Row(**{**row, "module": str(row["module"]).replace("$", "")}) for row in values["rows"]]
        return CoordCheck(rows, str(values.get("title", "")).replace("$", ""))
    except (KeyError, TypeError) as error:
        raise MupscaleError(f"the coordinate check in summary.json is damaged ({error}): run it again") from None


def _again(summary: Summary) -> str:
    recipe = markup.folded("The recipe", markup.code(facts.recipe(summary)))
    return markup.section("To do it again", markup.code(summary.command), recipe)
