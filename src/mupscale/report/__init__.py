"""The page of a run, or of several, and its pictures.

writing: the files; page, side_by_side: the page of one run and of several; facts, markup: numbers as rows, and HTML
loss_curves, gain, sweeps, transfer: the pictures
"""

from mupscale.report.transfer import save_transfer_picture
from mupscale.report.writing import write_report

__all__ = [
    "save_transfer_picture",
    "write_report",
]
