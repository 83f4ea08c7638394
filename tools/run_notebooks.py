"""Run the notebooks in docs/notebooks and keep what they print and draw: python tools/run_notebooks.py

Cells run in this process, as the tests run them; no Jupyter is needed.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

NOTEBOOKS = sorted((Path(__file__).parents[1] / "docs" / "notebooks").glob("*.ipynb"))


def run_cell(source: str, scope: dict[str, Any]) -> list[dict[str, Any]]:
    """The outputs of a cell, as a notebook stores them."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(source, "<cell>", "exec"), scope)
    outputs: list[dict[str, Any]] = []
    if text := printed.getvalue():
        outputs.append({"output_type": "stream", "name": "stdout", "text": text.splitlines(keepends=True)})
    for number in plt.get_fignums():
        picture = io.BytesIO()
        plt.figure(number).savefig(picture, format="png", dpi=80, bbox_inches="tight", metadata={"Software": None})
        data = {"image/png": base64.b64encode(picture.getvalue()).decode()}
        outputs.append({"output_type": "display_data", "metadata": {}, "data": data})
    plt.close("all")
    return outputs


def main() -> None:
    """Every notebook, from its first cell to its last."""
    for path in NOTEBOOKS:
        notebook = json.loads(path.read_text(encoding="utf-8"))
        scope: dict[str, Any] = {"__name__": "__main__"}
        code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
        for number, cell in enumerate(code, 1):
            cell["outputs"], cell["execution_count"] = run_cell("".join(cell["source"]), scope), number
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        print(f"{path.name}: {len(code)} cells")


if __name__ == "__main__":
    main()
