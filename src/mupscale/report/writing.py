"""The report of a run, or of several: one HTML file that needs nothing else, and its pictures as PNG and SVG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mupscale.method import Summary
from mupscale.system import MupscaleError, replace_text


def write_report(runs: Sequence[str | Path], out: str | Path | None = None) -> Path:
    """Write the report of finished runs of the method, several side by side, and give the path of its page.

    Args:
        runs: folders of runs, each with a summary.json
        out: folder for index.html and the pictures; RUN/report for one run, report for several

    >>> from tempfile import TemporaryDirectory
    >>> from mupscale.method import Choice
    >>> choice = Choice(base_lr=0.1, lr=0.05, noise=0.3, unit="init")
    >>> summary = Summary("demo", "mupscale run recipe.yaml", {}, {}, [], choice, [], [], verdict=["Widening pays."])
    >>> with TemporaryDirectory() as folder:
    ...     path = summary.save(Path(folder))
    ...     page = write_report([folder]).read_text(encoding="utf-8")
    >>> "<h1>demo</h1>" in page, "Widening pays." in page
    (True, True)
    """
    from mupscale.report import page, side_by_side, transfer

    if not runs:
        raise MupscaleError("a report needs at least one run: mupscale report RUN")
    folders = [Path(run) for run in runs]
    summaries = [Summary.load(folder) for folder in folders]
    folder = Path(out) if out is not None else (folders[0] / "report" if len(folders) == 1 else Path("report"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if len(folders) == 1:
            text = page.make_run_page(summaries[0], transfer.load_transfer_check(folders[0]), folder)
        else:
            text = side_by_side.make_comparison_page(summaries, folders, folder)
        replace_text(folder / "index.html", text)
    except OSError as error:
        raise MupscaleError(f"the report cannot be written to {folder} ({error.strerror})") from None
    return folder / "index.html"
