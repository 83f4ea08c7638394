"""The page of a study, or of several, and its pictures; it is drawn of a StudySummary and knows no preset.

writing: the files; loading: summaries from disk, and what they must hold; markup: HTML
page: what stands where; looks: colours and names of contenders
cost_picture: loss against cost; loss_curves: training; gain, tuning, transfer: the other pictures
"""

from mupscale.report.loading import load_summary
from mupscale.report.transfer import save_transfer_picture
from mupscale.report.writing import write_report

__all__ = [
    "load_summary",
    "save_transfer_picture",
    "write_report",
]
