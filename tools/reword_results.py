"""The words of the stored studies in results/, from their numbers, as the package says them now.

    python tools/reword_results.py

tests/report/test_results.py compares them, so this is run whenever the words of a study change.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from mupscale.study import load_summary
from mupscale.study.wording import write_paper_words, write_pay_words

RESULTS = Path(__file__).parents[1] / "results"
WRITE = {"pay": write_pay_words, "paper": write_paper_words}


def reword(path: Path) -> None:
    """Write the words of one summary again, in one line or in many as it was; everything else stays."""
    summary, text = load_summary(path.parent), path.read_text(encoding="utf-8")
    stored, told = json.loads(text), asdict(WRITE[summary.preset](summary))
    stored |= {name: told[name] for name in ("sentences", "cards", "measured", "tables", "stages")}
    layout = {"separators": (",", ":")} if text.count("\n") == 1 else {"indent": 1}
    text = json.dumps(stored, ensure_ascii=text.isascii(), **layout)  # type: ignore[arg-type]
    path.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    for path in sorted(RESULTS.glob("*/summary.json")):
        reword(path)
