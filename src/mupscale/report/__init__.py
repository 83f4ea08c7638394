"""The page of a study, or of several, and its pictures; it is drawn of a StudySummary and knows no preset.

page: the files, and what stands where (page.html: the markup, style.css: its looks)
pictures: how contenders look; loss against cost, training, the gain; tuning (and transfer): the other pictures
"""

from mupscale.report.page import write_report
from mupscale.report.tuning import save_transfer_picture

__all__ = ["save_transfer_picture", "write_report"]
