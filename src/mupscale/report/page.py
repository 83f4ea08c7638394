"""The page of a study, or of several side by side: the answer first, then what it rests on, and how to do it again."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, Literal, NamedTuple

from mupscale.checks import CoordCheck, Measurement
from mupscale.plots import Gallery, words
from mupscale.report import gain, loss_curves, markup, transfer, tuning
from mupscale.report.cost_picture import HALF, WIDE, draw_system
from mupscale.study import Card, PageTable, StudySummary, format_width, format_widths
from mupscale.system import MupscaleError


class PagePart(NamedTuple):
    """A part of a page: with a heading, without one, or folded away behind its title."""

    title: str
    inside: str
    kind: Literal["open", "bare", "folded"] = "open"


def make_page(summaries: Sequence[StudySummary], folders: Sequence[Path], out: Path) -> str:
    """The HTML; the pictures go into the folder as well."""
    names = tell_apart([summary.name for summary in summaries], folders)
    alone = len(names) == 1
    galleries = [Gallery(out, "" if alone else f"{number}-{name}-") for number, name in enumerate(names, 1)]
    parts = [
        list(list_parts(summary, transfer.load_transfer_check(folder), gallery, alone))
        for summary, folder, gallery in zip(summaries, folders, galleries, strict=True)
    ]
    if alone:
        body = [_header(names[0], summaries[0]), *map(_make_part, parts[0])]
    else:
        body = [_headers(names, summaries), *_side_by_side(names, parts)]
    return markup.make_document(f"{', '.join(names)}: mupscale report", "\n".join(part for part in body if part))


def tell_apart(names: Sequence[str], folders: Sequence[Path]) -> list[str]:
    """What tells runs apart: their names, with their folders where two have the same, or else numbers."""
    paths = [folder.resolve() for folder in folders]
    for more in ([""] * len(names), [path.name for path in paths], [f"{p.parent.name}/{p.name}" for p in paths]):
        longer = [f"{name} ({extra})" if extra else name for name, extra in zip(names, more, strict=True)]
        if len(set(longer)) == len(longer):
            return longer
    return [f"{name} ({number})" for number, name in enumerate(names, start=1)]


# ------------------------------------------------------------------------------------------- one run, or several


def _header(name: str, summary: StudySummary) -> str:
    cards = [(card.what, card.number, card.more) for card in summary.cards]
    return "\n".join(
        [f"<header>\n<h1>{escape(name)}</h1>", *_sentences(summary), "</header>", markup.make_cards(cards)]
    )


def _sentences(summary: StudySummary) -> list[str]:
    first, *more = summary.sentences or ["This run gives no answer."]
    return [
        markup.make_paragraph(first, "answer"),
        *(markup.make_paragraph(sentence, "lead") for sentence in more),
        markup.make_paragraph(_describe(summary), "muted"),
    ]


def _describe(summary: StudySummary) -> str:
    """What was trained, in a line: model, data, optimizer, widths."""
    specs = [summary.recipe.get(part) for part in ("model", "data", "optimizer")]
    names = [str(spec.get("class_path", "")).rpartition(".")[2] for spec in specs if isinstance(spec, Mapping)]
    if summary.large is not None:
        names.append(f"width {format_widths(summary.large)}")
    elif "width" in summary.base:
        names.append(f"width {format_width(summary.base['width'])}")
    return " · ".join(name for name in names if name)


def _make_part(part: PagePart) -> str:
    if part.kind == "bare":
        return part.inside
    return (markup.make_folded if part.kind == "folded" else markup.make_section)(part.title, part.inside)


def _headers(names: Sequence[str], summaries: Sequence[StudySummary]) -> str:
    answers = [
        f'<div class="card"><div class="what">{escape(name)}</div>{"".join(_sentences(summary))}</div>'
        for name, summary in zip(names, summaries, strict=True)
    ]
    cards = [{card.what: card for card in summary.cards} for summary in summaries]
    rows = [
        [what, *(_in_a_cell(by_what[what]) if what in by_what else "" for by_what in cards)]
        for what in dict.fromkeys(what for by_what in cards for what in by_what)
    ]
    return "\n".join(
        [
            f"<header>\n<h1>{len(names)} runs side by side</h1>\n</header>",
            markup.make_columns(answers),
            markup.make_section("In numbers", markup.make_table(["", *names], rows, kind="wide", numbers=False)),
        ]
    )


def _in_a_cell(card: Card) -> str:
    return f"{card.number} ({card.more})" if card.more else card.number


def _side_by_side(names: Sequence[str], runs: Sequence[Sequence[PagePart]]) -> Iterator[str]:
    """A column a run, so that parts of one title lie beside each other; one that a run alone has stays in its place."""
    kinds = {part.title: part.kind for parts in runs for part in parts if part.inside}
    titles: list[str] = []
    for parts in runs:
        at = 0
        for title in (part.title for part in parts if part.inside):
            if title not in titles:
                titles.insert(at, title)
            at = titles.index(title) + 1
    for title in titles:
        inside = ["".join(part.inside for part in parts if part.title == title) for parts in runs]
        none = markup.make_paragraph("none", "muted")
        columns = [f"<h3>{escape(name)}</h3>{one or none}" for name, one in zip(names, inside, strict=True)]
        yield _make_part(PagePart(title, markup.make_columns(columns, "stacked"), kinds[title]))


# --------------------------------------------------------------------------------------------- what it shows


def list_parts(
    summary: StudySummary, check: dict[str, Any] | None, gallery: Gallery, is_alone: bool
) -> Iterator[PagePart]:
    """What there is to show of a run, in its order; is_alone: whether it has the width of the page."""
    yield from _main_pictures(summary, gallery, is_alone)
    about = markup.make_bullets("How this was measured", summary.measured)
    yield PagePart(
        "How this was measured", about + markup.make_bullets("To keep in mind", summary.notes, "warnings"), "bare"
    )
    if "gain" in summary.answer:
        drawn = markup.make_pictures(gain.draw_gain(summary.answer["gain"], gallery))
        yield PagePart(
            "Where the gain comes from", markup.make_paragraph(gain.describe_gain(summary.answer["gain"])) + drawn
        )
    for table in summary.tables:
        yield PagePart(table.title, _table(table), "folded" if table.folded else "open")
    drawn = markup.make_pictures(tuning.draw_tuning(summary.tuned, gallery, summary.base.get("lr")))
    yield PagePart("What was tuned", drawn + markup.make_table(*tuning.list_tuned(summary.tuned)), "folded")
    if summary.large is not None:
        yield PagePart("The small models that the forecast was made from", _small(summary, gallery), "folded")
    yield from _checks(summary, check, gallery)
    yield PagePart("What all of this cost", markup.make_table(["stage", "cost", "share", "time"], _stages(summary)))
    yield PagePart("The command", markup.make_code(summary.command), "folded")
    yield PagePart("The recipe", markup.make_code(_recipe(summary)), "folded")


def _main_pictures(summary: StudySummary, gallery: Gallery, is_alone: bool) -> Iterator[PagePart]:
    """Loss against cost. Where there is one budget, and curves, these are the better picture of it."""
    title, large = "Loss against cost", summary.large
    if large is None:
        yield PagePart(title, _small(summary, gallery))
        return
    has_curves = any(one.curves for one in large.contenders)
    if not has_curves or any(len(one.points) > 1 for one in large.contenders):
        shape, kind = (WIDE, "large") if is_alone else (HALF, "")
        drawn = draw_system(large, gallery, "loss-against-cost", summary.measure, summary.answer, shape)
        yield PagePart(title, markup.make_picture(*drawn, kind=kind))
    if has_curves:
        yield PagePart("Training", markup.make_pictures(loss_curves.draw_loss_curves(large, gallery, summary.answer)))


def _small(summary: StudySummary, gallery: Gallery) -> str:
    return markup.make_pictures(
        draw_system(runs, gallery, f"loss-against-cost-small-{number}", summary.measure, {})
        for number, runs in enumerate(summary.small, start=1)
    )


def _table(table: PageTable) -> str:
    about = "".join(map(markup.make_paragraph, table.about))
    return about + markup.make_table(table.head, table.rows) + markup.make_paragraph(table.note, "note")


def _stages(summary: StudySummary) -> Iterator[list[str]]:
    """A row per stage, and the total."""
    unit = next((runs.unit for runs in (summary.large, *summary.small) if runs is not None), "FLOPs")
    costs = [stage.cost for stage in summary.stages if stage.cost is not None]
    total = sum(costs) if len(costs) == len(summary.stages) else None

    def row(label: str, cost: float | None, seconds: float) -> list[str]:
        shown = f"{words.format_count(cost)} {unit}" if unit != "FLOPs" else words.format_flops(cost)
        share = f"{100 * cost / total:.0f} %" if cost is not None and total else words.UNKNOWN
        return [label, "unknown" if cost is None else shown, share, words.format_duration(seconds)]

    for stage in summary.stages:
        yield row(stage.label or stage.name, stage.cost, stage.seconds)
    if len(summary.stages) > 1:
        yield row("Together", total, sum(stage.seconds for stage in summary.stages))


def _recipe(summary: StudySummary) -> str:
    """As YAML where PyYAML is there; JSON is YAML, too."""
    values = {**summary.recipe, "study": summary.settings}
    try:
        import yaml
    except ImportError:
        return json.dumps(values, indent=2, ensure_ascii=False)
    return str(yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=100))


# ------------------------------------------------------------------------------------------------ checks


def _checks(summary: StudySummary, check: dict[str, Any] | None, gallery: Gallery) -> Iterator[PagePart]:
    """What transfer-check found, and how outputs change with the width."""
    if check is not None:
        sentences = "".join(markup.make_paragraph(str(sentence)) for sentence in check.get("verdict", []))
        yield PagePart("Transfer check", sentences + markup.make_pictures(transfer.draw_transfer(check, gallery)))
    if not summary.coords or not summary.coords.get("rows"):
        return
    coords = _read_coords(summary.coords)
    widths = ", ".join(words.format_count(width) for width in coords.widths)
    what = "How much each layer's output changes in the first steps of training"
    sentence = f"{what}, at widths {widths}: {coords.outcome}."
    alt = f"Coordinate check, {coords.title}. {sentence}"
    picture = gallery.adopt("coordinates", alt, sentence, lambda path: coords.plot(path, narrow=True))
    rows = [(x.module, str(x.size), str(x.change), x.verdict) for x in coords.layers]
    head = ("layer", "size, power of the width", "change, power of the width", "verdict")
    layers = markup.make_folded("Layer by layer", markup.make_table(head, rows))
    yield PagePart("Coordinate check", markup.make_pictures([picture]) + layers)


def _read_coords(values: dict[str, Any]) -> CoordCheck:
    try:
        rows = [Measurement(**{**row, "module": str(row["module"]).replace("$", "")}) for row in values["rows"]]
        return CoordCheck(rows, str(values.get("title", "")).replace("$", ""))
    except (KeyError, TypeError) as error:
        raise MupscaleError(f"the coordinate check in summary.json is damaged ({error}): run it again") from None
