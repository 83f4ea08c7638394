"""The page of a comparison: the answer in a sentence, its three numbers, one picture, and the rest below."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from mupscale.plots import Gallery
from mupscale.report import comparison_facts as facts
from mupscale.report import comparison_tables as tables
from mupscale.report import comparison_tuning, markup
from mupscale.report.comparison_picture import draw_system
from mupscale.report.facts import format_values
from mupscale.report.side_by_side import tell_apart
from mupscale.study import StudySummary


def make_answer_page(summaries: Sequence[StudySummary], folders: Sequence[Path], out: Path) -> str:
    """The HTML of one comparison, or of several one below the other; the pictures go into the folder as well."""
    names = tell_apart([summary.name for summary in summaries], folders)
    alone = len(summaries) == 1
    galleries = [Gallery(out, "" if alone else f"{number}-{name}-") for number, name in enumerate(names, 1)]
    bodies = [_body(*item) for item in zip(names, summaries, galleries, strict=True)]
    body = bodies[0] if alone else "\n".join(f"<article>\n{one}\n</article>" for one in bodies)
    return markup.make_document(f"{', '.join(names)}: mupscale report", body)


def _body(name: str, summary: StudySummary, gallery: Gallery) -> str:
    parts = [
        _headline(name, summary),
        _main_picture(summary, gallery),
        _forecast(summary),
        _contenders(summary),
        _tuning(summary, gallery),
        _small_systems(summary, gallery),
        markup.make_bullets("To keep in mind", summary.notes, "warnings"),
        _costs(summary),
        _again(summary),
    ]
    return "\n".join(part for part in parts if part)


def _headline(name: str, summary: StudySummary) -> str:
    parts = [
        f"<header>\n<h1>{escape(name)}</h1>",
        markup.make_paragraph(facts.write_headline(summary), "answer"),
        markup.make_paragraph(_what_is_missing(summary), "lead"),
        markup.make_paragraph(facts.describe_what(summary), "muted"),
        "</header>",
        markup.make_cards(facts.list_cards(summary), "three"),
    ]
    return "\n".join(part for part in parts if part)


def _what_is_missing(summary: StudySummary) -> str:
    return "The large models are not trained: this is the forecast alone." if summary.large is None else ""


def _main_picture(summary: StudySummary, gallery: Gallery) -> str:
    measure = facts.name_measure(summary)
    if summary.large is None:
        drawn = _draw_small(summary, gallery)
    else:
        drawn = markup.make_picture(
            *draw_system(summary.large, gallery, "loss-against-cost", measure, summary.answer), kind="large"
        )
    return "\n".join(
        [
            drawn,
            *(markup.make_paragraph(sentence) for sentence in facts.describe_break_even(summary)),
            markup.make_bullets("How this was measured", facts.describe_measuring(summary)),
        ]
    )


def _draw_small(summary: StudySummary, gallery: Gallery) -> str:
    measure = facts.name_measure(summary)
    return markup.make_pictures(
        draw_system(runs, gallery, f"loss-against-cost-small-{number}", measure)
        for number, runs in enumerate(summary.small, start=1)
    )


def _forecast(summary: StudySummary) -> str:
    if summary.large is None:
        return markup.make_section(
            "The forecast", markup.make_table(tables.FORECAST_HEAD, tables.list_forecast(summary), kind="stacks")
        )
    return markup.make_section(
        "Forecast and outcome",
        markup.make_paragraph(str(summary.forecast["sentence"])),
        markup.make_paragraph(tables.count_held(summary)),
        markup.make_table(tables.HELD_HEAD, tables.list_held(summary), kind="stacks"),
    )


def _contenders(summary: StudySummary) -> str:
    title = "The contenders" if summary.large is not None else "The small contenders"
    systems = [summary.large] if summary.large is not None else summary.small
    drawn = [
        markup.make_table(tables.head_of_contenders(summary, runs), tables.list_contenders(runs), kind="stacks")
        for runs in systems
    ]
    note = "Costs include the base model where a contender starts from it."
    return markup.make_section(f"{title}, at the full budget", *drawn, markup.make_paragraph(note, "note"))


def _tuning(summary: StudySummary, gallery: Gallery) -> str:
    return markup.make_folded(
        "What was tuned",
        markup.make_paragraph(facts.describe_tuning(summary), "note"),
        markup.make_table(tables.TUNED_HEAD, tables.list_tuned(summary), kind="stacks"),
        markup.make_pictures(comparison_tuning.draw_tuning(summary, gallery)),
    )


def _small_systems(summary: StudySummary, gallery: Gallery) -> str:
    """What the forecast was made from, unless that is all there is."""
    if summary.large is None:
        return ""
    return markup.make_folded("What the forecast was made from", _draw_small(summary, gallery))


def _costs(summary: StudySummary) -> str:
    return markup.make_section(
        "What all of this cost",
        markup.make_paragraph(tables.describe_shares(summary)),
        markup.make_table(tables.STAGE_HEAD, tables.list_costs_by_stage(summary), kind="stacks"),
    )


def _again(summary: StudySummary) -> str:
    recipe = format_values({**summary.recipe, "study": summary.settings})
    return "\n".join(
        part
        for part in (
            markup.make_folded("The command", markup.make_code(summary.command)),
            markup.make_folded("The recipe", markup.make_code(recipe)),
        )
        if part
    )
