"""The page of a study, or of several side by side: the answer first, then what it rests on, and how to do it again.

One HTML file that needs nothing else; its pieces are the macros of page.html, and its pictures lie beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, NamedTuple

from mupscale.plots import Gallery
from mupscale.report import pictures, tuning
from mupscale.study import StudySummary, format_width, format_widths, load_summary, what_was_measured
from mupscale.system import VERSION, MupscaleError, make_folder, replace_text, words, writing_into


def write_report(runs: Sequence[str | Path], out: str | Path | None = None) -> Path:
    """Write the report of studies, and give the path of its page; several stand side by side.

    Args:
        runs: folders of studies, each with a summary.json
        out: folder for index.html and the pictures; RUN/report for one run, report for several
    """
    if not runs:
        raise MupscaleError("a report needs at least one run: mupscale report RUN")
    folders = [Path(run) for run in runs]
    summaries = [load_summary(folder) for folder in folders]
    folder = Path(out) if out is not None else (folders[0] / "report" if len(folders) == 1 else Path("report"))
    try:
        with writing_into(folder.parent if out is None else folder):
            replace_text(make_folder(folder) / "index.html", make_page(summaries, folders, folder))
    except OSError as error:
        raise MupscaleError(f"the report cannot be written to {folder} ({error.strerror})") from None
    return folder / "index.html"


class PagePart(NamedTuple):
    """A part of a page, as HTML: with a heading, without one, or folded away behind its title."""

    title: str
    inside: Any
    kind: Literal["open", "bare", "folded"] = "open"


@cache
def _html() -> Any:
    """The macros of page.html; what they give is escaped, and whatever is joined to it will be."""
    from jinja2 import Environment

    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.globals["zip"] = zip
    return environment.from_string(files("mupscale.report").joinpath("page.html").read_text(encoding="utf-8")).module


def make_page(summaries: Sequence[StudySummary], folders: Sequence[Path], out: Path) -> str:
    """The HTML; the pictures go into the folder as well."""
    html = _html()
    names = tell_apart([summary.name for summary in summaries], folders)
    alone = len(names) == 1
    galleries = [Gallery(out, "" if alone else f"{number}-{name}-") for number, name in enumerate(names, 1)]
    parts = [
        list(list_parts(summary, tuning.load_transfer_check(folder), gallery, alone))
        for summary, folder, gallery in zip(summaries, folders, galleries, strict=True)
    ]
    answers = [(summary.sentences, _describe(summary)) for summary in summaries]
    if alone:
        body = [html.header(names[0], *answers[0], summaries[0].cards), *(html.part(*part) for part in parts[0])]
    else:
        headers = html.headers(names, list(zip(names, answers, strict=True)), list(_card_rows(summaries)))
        body = [headers, *(html.part(*part) for part in _side_by_side(names, parts))]
    style = files("mupscale.report").joinpath("style.css").read_text(encoding="utf-8")
    return str(html.document(f"{', '.join(names)}: mupscale report", style, VERSION, body))


def tell_apart(names: Sequence[str], folders: Sequence[Path]) -> list[str]:
    """What tells runs apart: their names, with their folders where two have the same, or else numbers."""
    paths = [folder.resolve() for folder in folders]
    for more in ([""] * len(names), [path.name for path in paths], [f"{p.parent.name}/{p.name}" for p in paths]):
        longer = [f"{name} ({extra})" if extra else name for name, extra in zip(names, more, strict=True)]
        if len(set(longer)) == len(longer):
            return longer
    return [f"{name} ({number})" for number, name in enumerate(names, start=1)]


# ------------------------------------------------------------------------------------------- one run, or several


def _describe(summary: StudySummary) -> str:
    specs = [summary.recipe.get(part) for part in ("model", "data", "optimizer")]
    names = [str(spec.get("class_path", "")).rpartition(".")[2] for spec in specs if isinstance(spec, Mapping)]
    if summary.large is not None:
        names.append(f"width {format_widths(summary.large)}")
    elif "width" in summary.base:
        names.append(f"width {format_width(summary.base['width'])}")
    return " · ".join(name for name in names if name)


def _card_rows(summaries: Sequence[StudySummary]) -> Iterator[list[str]]:
    cards = [{card.what: card for card in summary.cards} for summary in summaries]
    for what in dict.fromkeys(what for by_what in cards for what in by_what):
        found = [by_what.get(what) for by_what in cards]
        yield [what, *(card.number + (f" ({card.more})" if card.more else "") if card else "" for card in found)]


def _side_by_side(names: Sequence[str], runs: Sequence[Sequence[PagePart]]) -> Iterator[PagePart]:
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
        insides = [_html().joined([part.inside for part in parts if part.title == title]) for parts in runs]
        yield PagePart(title, _html().columns(names, insides), kinds[title])


# --------------------------------------------------------------------------------------------- what it shows


def list_parts(
    summary: StudySummary, check: dict[str, Any] | None, gallery: Gallery, is_alone: bool
) -> Iterator[PagePart]:
    """What there is to show of a run, in its order; is_alone: whether it has the width of the page."""
    yield from _main_pictures(summary, gallery, is_alone)
    html, measured = _html(), "How this was measured"
    about = html.bullets(measured, summary.measured)
    yield PagePart(measured, about + html.bullets("To keep in mind", summary.notes, "warnings"), "bare")
    if (gain := summary.answer.get("gain")) is not None:
        about = html.paragraph(pictures.describe_gain(gain))
        yield PagePart("Where the gain comes from", about + html.pictures(pictures.draw_gain(gain, gallery)))
    for table in summary.tables:
        about = html.joined(map(html.paragraph, table.about)) + html.table(table.head, table.rows)
        yield PagePart(table.title, about + html.paragraph(table.note, "note"), "folded" if table.folded else "open")
    drawn = html.pictures(tuning.draw_tuning(summary.tuned, gallery, summary.base.get("lr")))
    yield PagePart("What was tuned", drawn + html.table(*tuning.list_tuned(summary.tuned)), "folded")
    if summary.large is not None:
        yield PagePart("Small models behind the forecast", _small(summary, gallery), "folded")
    yield from _checks(summary, check, gallery)
    yield PagePart("What this study cost", html.table(["stage", "cost", "share", "time"], list(_stages(summary))))
    yield PagePart("The command", html.code(summary.command), "folded")
    yield PagePart("The recipe", html.code(_recipe(summary)), "folded")


def _main_pictures(summary: StudySummary, gallery: Gallery, is_alone: bool) -> Iterator[PagePart]:
    """Loss against cost. Where there is one budget, and curves, these are the better picture of it."""
    title, large = "Loss against cost", summary.large
    if large is None:
        yield PagePart(title, _small(summary, gallery))
        return
    has_curves = any(one.curves for one in large.contenders)
    if not has_curves or any(len(one.points) > 1 for one in large.contenders):
        shape, kind = (pictures.WIDE, "large") if is_alone else (pictures.HALF, "")
        drawn = pictures.draw_system(large, gallery, "loss-against-cost", summary.measure, summary.answer, shape)
        yield PagePart(title, _html().picture(*drawn, kind=kind))
    if has_curves:
        yield PagePart("Training", _html().pictures(pictures.draw_loss_curves(large, gallery, summary.answer)))


def _small(summary: StudySummary, gallery: Gallery) -> Any:
    return _html().pictures(
        pictures.draw_system(runs, gallery, f"loss-against-cost-small-{number}", summary.measure, {})
        for number, runs in enumerate(summary.small, start=1)
    )


def _stages(summary: StudySummary) -> Iterator[list[str]]:
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
        yield row("Total", total, sum(stage.seconds for stage in summary.stages))


def _recipe(summary: StudySummary) -> str:
    import yaml

    used = {  # where lists are empty, what they stood for
        "widths": [runs.narrow for runs in summary.small],
        "lrs": list(summary.tuned[0].grid.lrs) if summary.tuned else [],
    }
    settings = {name: used[name] if name in used and value == [] else value for name, value in summary.settings.items()}
    values = {**summary.recipe, "family" if summary.preset == "family" else "study": settings}
    return str(yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=100))


# ------------------------------------------------------------------------------------------------ checks


def _checks(summary: StudySummary, check: dict[str, Any] | None, gallery: Gallery) -> Iterator[PagePart]:
    """What transfer-check found, and how outputs change with the width."""
    html = _html()
    if check is not None:
        sentences = html.joined(map(html.paragraph, [what_was_measured(check), *check.get("verdict", [])]))
        yield PagePart("Transfer check", sentences + html.pictures(tuning.draw_transfer(check, gallery)))
    if summary.coords is None or not summary.coords.rows:
        return
    rows = [replace(row, module=row.module.replace("$", "")) for row in summary.coords.rows]  # no formulas
    coords = replace(summary.coords, rows=rows, title=summary.coords.title.replace("$", ""))
    widths = ", ".join(words.format_count(width) for width in coords.widths)
    what = "How much each layer's output changes in the first steps of training"
    sentence = f"{what}, at widths {widths}: {coords.outcome}."
    alt = f"Coordinate check, {coords.title}. {sentence}"
    picture = gallery.draw("coordinates", alt, sentence, lambda ax: coords.sketch(ax, narrow=True), size=(4.8, 4.4))
    layers = [(x.module, str(x.size), str(x.change), x.verdict) for x in coords.layers]
    head = ("layer", "size, power of the width", "change, power of the width", "verdict")
    by_layer = html.part("Layer by layer", html.table(head, layers), "folded")
    yield PagePart("Coordinate check", html.pictures([picture]) + by_layer)
