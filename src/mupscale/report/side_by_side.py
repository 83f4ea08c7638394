"""Several runs side by side: their answers, a table with a column a run, and their pictures next to each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from html import escape
from pathlib import Path

from mupscale.method import RANKED, Summary
from mupscale.plots import Gallery, Picture, words
from mupscale.report import facts, gain, loss_curves, markup, sweeps
from mupscale.report.page import answer_sentences


def make_side_by_side_page(summaries: Sequence[Summary], folders: Sequence[Path], out: Path) -> str:
    """The HTML; the pictures of all runs go into the folder as well."""
    names = tell_apart([summary.name for summary in summaries], folders)
    galleries = [Gallery(out, prefix=f"{number}-{name}-") for number, name in enumerate(names, 1)]
    drawn = [_drawn(summary, gallery) for summary, gallery in zip(summaries, galleries, strict=True)]
    body = [
        f"<header>\n<h1>{len(summaries)} runs side by side</h1>\n</header>",
        _answers(names, summaries),
        markup.make_section("In numbers", _table(names, summaries)),
        *(_row(title, names, [pictures[kind] for pictures in drawn]) for kind, title in enumerate(_TITLES)),
        markup.make_section("To do it again", *(_again(*pair) for pair in zip(names, summaries, strict=True))),
    ]
    return markup.make_document(f"{', '.join(names)}: mupscale report", "\n".join(part for part in body if part))


def tell_apart(names: Sequence[str], folders: Sequence[Path]) -> list[str]:
    """What tells runs apart: their names, with their folders where two have the same, or else numbers."""
    paths = [folder.resolve() for folder in folders]
    for more in ([""] * len(names), [path.name for path in paths], [f"{p.parent.name}/{p.name}" for p in paths]):
        longer = [f"{name} ({extra})" if extra else name for name, extra in zip(names, more, strict=True)]
        if len(set(longer)) == len(longer):
            return longer
    return [f"{name} ({number})" for number, name in enumerate(names, start=1)]


def _answers(names: Sequence[str], summaries: Sequence[Summary]) -> str:
    inside = "\n".join(
        f'<div class="card"><div class="what">{escape(name)}</div>'
        f"{''.join(markup.make_paragraph(sentence) for sentence in answer_sentences(summary))}"
        f"{markup.make_paragraph(facts.describe_setting(summary), 'muted')}</div>"
        for name, summary in zip(names, summaries, strict=True)
    )
    return f'<div class="columns">\n{inside}\n</div>'


def _table(names: Sequence[str], summaries: Sequence[Summary]) -> str:
    return markup.make_table(("", *names), _rows(summaries), kind="wide", numbers=False)


def _rows(summaries: Sequence[Summary]) -> Iterable[list[str]]:
    def row(what: str, value: Callable[[Summary], str]) -> list[str]:
        return [what, *(value(summary) for summary in summaries)]

    for key, what, _ in _all_costs(summaries):
        yield row(what, lambda summary, key=key: facts.format_cost(summary, key) if key in summary.costs else "")  # type: ignore[misc]
    for one in RANKED:
        if one.heading and any(summary.get(one.name) for summary in summaries):
            what = f"Final loss, {one.heading}"
            yield row(what, lambda summary, name=one.name: facts.format_final(summary, name))  # type: ignore[misc]
    yield row("Chosen noise", lambda summary: f"{facts.describe_noise(summary)[0]} ({summary.choice.unit})")
    yield row("Chosen learning rate", lambda summary: words.format_setting(summary.choice.lr))
    yield row("Base model's learning rate", lambda summary: words.format_setting(summary.choice.base_lr))
    yield row("All stages, FLOPs", lambda summary: words.format_flops(facts.sum_stages(summary)[0]))
    yield row("All stages, time", lambda summary: words.format_duration(facts.sum_stages(summary)[1]))
    yield row("Warnings", lambda summary: " ".join(map(str, summary.warnings)) or "none")


def _all_costs(summaries: Sequence[Summary]) -> list[tuple[str, str, str]]:
    """Speed-ups first."""
    costs = {key: (key, what, value) for summary in summaries for key, what, value in facts.list_costs(summary)}
    return sorted(costs.values(), key=lambda item: "speedup" not in item[0])


_TITLES = ("Training", "Held-out data", "Where the gain comes from", "Tuning")


def _drawn(summary: Summary, gallery: Gallery) -> list[list[Picture]]:
    """Pictures of a run, one list for each title."""
    losses = list(loss_curves.draw_loss_curves(summary, gallery))
    training = [picture for picture in losses if "-training-" in picture.name]
    held_out = [picture for picture in losses if picture not in training]
    return [training, held_out, list(gain.draw_gain(summary, gallery)), list(sweeps.draw_sweeps(summary, gallery))]


def _row(title: str, names: Sequence[str], pictures: Sequence[Sequence[Picture]]) -> str:
    """A column of pictures a run, so that those of one kind lie side by side."""
    if not any(pictures):
        return ""
    none = markup.make_paragraph("none", "muted")
    columns = "\n".join(
        f"<div><h3>{escape(name)}</h3>{''.join(map(markup.make_picture, column)) or none}</div>"
        for name, column in zip(names, pictures, strict=True)
    )
    return markup.make_section(title, f'<div class="columns stacked">\n{columns}\n</div>')


def _again(name: str, summary: Summary) -> str:
    recipe = markup.make_folded("The recipe", markup.make_code(facts.format_recipe(summary)))
    return f"<h3>{escape(name)}</h3>" + "\n".join([markup.make_code(summary.command), recipe])
