"""The page of a run, or of several, and its pictures."""

from mupscale.report.transfer import save_transfer_picture
from mupscale.report.writing import write_report

__all__ = [
    "save_transfer_picture",
    "write_report",
]
