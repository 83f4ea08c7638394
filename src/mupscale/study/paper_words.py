"""What the paper's comparison says, in words: cards and tables."""

from __future__ import annotations

from mupscale.study.results import StudySummary


def write_words(summary: StudySummary) -> StudySummary:
    """The summary with its cards and tables."""
    return summary
