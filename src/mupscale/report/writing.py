"""The report of a run, or of several: one HTML file that needs nothing else, and its pictures as PNG and SVG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mupscale.comparison import ComparisonSummary
from mupscale.method import Summary
from mupscale.report.loading import load_summary
from mupscale.system import MupscaleError, make_folder, replace_text, writing_into


def write_report(runs: Sequence[str | Path], out: str | Path | None = None) -> Path:
    """Write the report of finished runs, and give the path of its page.

    Runs of the paper's method stand side by side, comparisons one below the other; the two do not mix.

    Args:
        runs: folders of runs, each with a summary.json
        out: folder for index.html and the pictures; RUN/report for one run, report for several

    >>> from tempfile import TemporaryDirectory
    >>> from mupscale.method import Choice
    >>> choice = Choice(base_lr=0.1, lr=0.05, noise=0.3, unit="init")
    >>> summary = Summary("demo", "mupscale run recipe.yaml", {}, {}, [], choice, [], [], verdict=["Growing pays."])
    >>> with TemporaryDirectory() as folder:
    ...     path = summary.save(Path(folder))
    ...     page = write_report([folder]).read_text(encoding="utf-8")
    >>> "<h1>demo</h1>" in page, "Growing pays." in page
    (True, True)
    """
    if not runs:
        raise MupscaleError("a report needs at least one run: mupscale report RUN")
    folders = [Path(run) for run in runs]
    summaries = [load_summary(folder) for folder in folders]
    _check_one_kind(summaries, folders)
    folder = Path(out) if out is not None else (folders[0] / "report" if len(folders) == 1 else Path("report"))
    try:
        with writing_into(folder.parent if out is None else folder):
            replace_text(make_folder(folder) / "index.html", _make_page(summaries, folders, folder))
    except OSError as error:
        raise MupscaleError(f"the report cannot be written to {folder} ({error.strerror})") from None
    return folder / "index.html"


def _check_one_kind(summaries: Sequence[Summary | ComparisonSummary], folders: Sequence[Path]) -> None:
    """Refuse a page of two kinds of runs."""
    is_comparison = [isinstance(summary, ComparisonSummary) for summary in summaries]
    if any(is_comparison) and not all(is_comparison):
        raise MupscaleError(
            f"{folders[is_comparison.index(True)]} is a comparison and {folders[is_comparison.index(False)]} a run of "
            f"the paper's method: a page shows one kind, so make one for each (mupscale report RUN)"
        )


def _make_page(summaries: Sequence[Summary | ComparisonSummary], folders: Sequence[Path], out: Path) -> str:
    """The HTML that this kind of summaries has."""
    from mupscale.report import comparison_page, page, side_by_side, transfer

    comparisons = [summary for summary in summaries if isinstance(summary, ComparisonSummary)]
    runs = [summary for summary in summaries if isinstance(summary, Summary)]
    if comparisons:
        return comparison_page.make_answer_page(comparisons, folders, out)
    if len(runs) == 1:
        return page.make_run_page(runs[0], transfer.load_transfer_check(folders[0]), out)
    return side_by_side.make_side_by_side_page(runs, folders, out)
