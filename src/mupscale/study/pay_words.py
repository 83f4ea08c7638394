"""What a comparison says, in words: its sentence, the three numbers of it, tables, and how it was measured."""

from __future__ import annotations

from dataclasses import replace

from mupscale.study.results import StudySummary


def write_words(summary: StudySummary) -> StudySummary:
    """The summary with its sentences, cards and tables."""
    sentence = summary.forecast["sentence"] if summary.large is None else summary.answer["sentence"]
    return replace(summary, sentences=[str(sentence)])
