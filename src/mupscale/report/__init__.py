"""The page of a run, or of several, and its pictures.

writing: the files; loading: summaries from disk, and what they must hold; markup: HTML
page, side_by_side: the page of one run of the paper's method and of several; facts: its numbers as rows
loss_curves, gain, sweeps, transfer: its pictures
comparison_page, comparison_facts, comparison_tables: the page of a comparison, its sentences and its rows
comparison_picture, comparison_tuning: its pictures
"""

from mupscale.report.loading import load_summary
from mupscale.report.transfer import save_transfer_picture
from mupscale.report.writing import write_report

__all__ = [
    "load_summary",
    "save_transfer_picture",
    "write_report",
]
