"""The report of a study, or of several: one HTML file that needs nothing else, and its pictures as PNG and SVG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mupscale.report.loading import load_summary
from mupscale.system import MupscaleError, make_folder, replace_text, writing_into


def write_report(runs: Sequence[str | Path], out: str | Path | None = None) -> Path:
    """Write the report of studies, and give the path of its page; several stand side by side.

    Args:
        runs: folders of studies, each with a summary.json
        out: folder for index.html and the pictures; RUN/report for one run, report for several

    >>> from tempfile import TemporaryDirectory
    >>> from mupscale.study import StudySummary
    >>> summary = StudySummary("demo", "mupscale run recipe.yaml", "pay", {}, {}, sentences=["Growing pays."])
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
    folder = Path(out) if out is not None else (folders[0] / "report" if len(folders) == 1 else Path("report"))
    from mupscale.report.page import make_page

    try:
        with writing_into(folder.parent if out is None else folder):
            replace_text(make_folder(folder) / "index.html", make_page(summaries, folders, folder))
    except OSError as error:
        raise MupscaleError(f"the report cannot be written to {folder} ({error.strerror})") from None
    return folder / "index.html"
