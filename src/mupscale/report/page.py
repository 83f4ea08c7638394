"""The page of one run: the answer first, then the pictures it rests on, the costs, and how to do it again."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

from mupscale.checks import CoordCheck, Measurement
from mupscale.method import RANKED, Summary
from mupscale.plots import Gallery, words
from mupscale.report import facts, gain, loss_curves, markup, sweeps, transfer
from mupscale.system import MupscaleError


def make_run_page(summary: Summary, check: dict[str, Any] | None, folder: Path) -> str:
    """The HTML; the pictures go into the folder as well. check: what transfer-check found."""
    gallery = Gallery(folder)
    body = [
        _headline(summary),
        _training(summary, gallery),
        markup.make_section(
            "Where the gain comes from",
            markup.make_paragraph(gain.describe_gain(summary)),
            markup.make_pictures(gain.draw_gain(summary, gallery)),
        ),
        _costs(summary),
        _tuning(summary, gallery),
        _transfer(check, gallery),
        _coordinates(summary, gallery),
        _again(summary),
    ]
    return markup.make_document(f"{summary.name}: mupscale report", "\n".join(part for part in body if part))


def answer_sentences(summary: Summary) -> list[str]:
    """The answer in words, the first sentence the headline."""
    return [str(sentence) for sentence in summary.verdict] or ["This run gives no verdict."]


def _headline(summary: Summary) -> str:
    first, *more = answer_sentences(summary)
    return "\n".join(
        [
            f"<header>\n<h1>{escape(summary.name)}</h1>",
            markup.make_paragraph(first, "answer"),
            *(markup.make_paragraph(sentence, "lead") for sentence in more),
            markup.make_paragraph(facts.describe_setting(summary), "muted"),
            "</header>",
            markup.make_cards(_cards(summary)),
            markup.make_bullets("To keep in mind", summary.warnings, "warnings"),
        ]
    )


def _cards(summary: Summary) -> list[tuple[str, str, str]]:
    choice, items = summary.choice, []
    if "speedup_base_charged" in summary.costs:
        number, sunk, everything = (
            facts.format_cost(summary, f"speedup_{how}") for how in ("base_charged", "sunk", "all_charged")
        )
        more = f"base model charged; {sunk} if it is there already, {everything} with tuning charged, too"
        more = "" if number in ("not reached", "unknown") else more
        items.append(("Speed-up to the from-scratch model's lowest loss", number, more))
    for one in RANKED:
        runs = summary.get(one.name)
        if runs is not None and one.on_card:
            mean, _, spread = facts.format_final(summary, one.name).partition(" (")
            seeds = len(runs.finals())
            over = f"{spread.rstrip(')')} over {seeds} seeds" if spread else ("one seed" if seeds == 1 else "")
            items.append((f"Final loss, {one.heading}", mean, over))
    noise, unit = facts.describe_noise(summary)
    items.append(("Chosen noise", noise, unit))
    plain = f"; plain transfer: {words.format_setting(choice.plain[1])}" if choice.plain is not None else ""
    more = f"after upscaling; {words.format_setting(choice.base_lr)} before{plain}"
    items.append(("Chosen learning rate", words.format_setting(choice.lr), more))
    flops, seconds = facts.sum_stages(summary)
    if summary.stages:
        items.append(
            ("All of this took", words.format_duration(seconds), words.format_flops(flops) if flops is not None else "")
        )
    return items


def _training(summary: Summary, gallery: Gallery) -> str:
    drawn = list(loss_curves.draw_loss_curves(summary, gallery))
    unknown = not any(picture.name.startswith("training-flops") for picture in drawn)
    note = "Costs of these models are not known, so there is no picture against FLOPs." if unknown and drawn else ""
    return markup.make_section(
        "Training",
        markup.make_pictures(drawn) or markup.make_paragraph("There are no losses to draw."),
        markup.make_paragraph(note, "note"),
        markup.make_table(facts.FINALS_HEAD, facts.list_finals(summary)),
        markup.make_paragraph(
            "Final training loss: mean over the last tenth of the steps, and over the seeds that finished "
            "(smallest to largest). The cost of a run leaves out that of the base model it may start from.",
            "note",
        ),
    )


def _costs(summary: Summary) -> str:
    return markup.make_section(
        "Costs",
        markup.make_columns(
            markup.make_table(("what", "how much"), [(what, value) for _, what, value in facts.list_costs(summary)]),
            markup.make_table(("stage", "FLOPs", "time"), facts.list_stages(summary)),
        ),
    )


def _tuning(summary: Summary, gallery: Gallery) -> str:
    rows = []
    for sweep in summary.sweeps:
        best = sweeps.find_best(sweep)
        counts = [sum(t.status == status for t in sweep.trials) for status in ("finished", "diverged", "pruned")]
        optimum = (
            [words.format_setting(best.lr), words.format_setting(best.noise), words.format_loss(best.loss)]
            if best
            else ["", "", ""]
        )
        flops = words.format_flops(sweep.flops) if sweep.flops else "unknown"
        rows.append([sweep.name, *map(words.format_count, counts), *optimum, flops])
    head = ("sweep", "finished", "diverged", "pruned", "best learning rate", "best noise", "its loss", "FLOPs")
    constants = summary.choice.constants or {}
    return markup.make_section(
        "Tuning",
        markup.make_pictures(sweeps.draw_sweeps(summary, gallery)),
        markup.make_table(head, rows),
        markup.make_folded(
            "Noise per parameter, as transferred",
            markup.make_table(
                ("parameter", "noise"), [(str(name), words.format_setting(v)) for name, v in constants.items()]
            ),
        ),
    )


def _transfer(check: dict[str, Any] | None, gallery: Gallery) -> str:
    if check is None:
        return ""
    sentences = [markup.make_paragraph(str(sentence)) for sentence in check.get("verdict", [])]
    pictures = markup.make_pictures(transfer.draw_transfer(check, gallery))
    return markup.make_section("Transfer check", *sentences, pictures)


def _coordinates(summary: Summary, gallery: Gallery) -> str:
    if not summary.coords or not summary.coords.get("rows"):
        return ""
    check = _check(summary.coords)
    widths = ", ".join(words.format_count(width) for width in check.widths)
    what = "How much each layer's output changes in the first steps of training"
    sentence = f"{what}, at widths {widths}: {check.outcome}."
    picture = gallery.adopt(
        "coordinates",
        f"Coordinate check, {check.title}. {sentence}",
        sentence,
        lambda path: check.plot(path, narrow=True),
    )
    rows = [(x.module, str(x.size), str(x.change), x.verdict) for x in check.layers]
    head = ("layer", "size, power of the width", "change, power of the width", "verdict")
    layers = markup.make_folded("Layer by layer", markup.make_table(head, rows))
    return markup.make_section("Coordinate check", markup.make_pictures([picture]), layers)


def _check(values: dict[str, Any]) -> CoordCheck:
    try:
        rows = [Measurement(**{**row, "module": str(row["module"]).replace("$", "")}) for row in values["rows"]]
        return CoordCheck(rows, str(values.get("title", "")).replace("$", ""))
    except (KeyError, TypeError) as error:
        raise MupscaleError(f"the coordinate check in summary.json is damaged ({error}): run it again") from None


def _again(summary: Summary) -> str:
    recipe = markup.make_folded("The recipe", markup.make_code(facts.format_recipe(summary)))
    return markup.make_section("To do it again", markup.make_code(summary.command), recipe)
