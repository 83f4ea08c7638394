"""`import mupscale` is light: torch, numpy and safetensors, and nothing of the extras."""

from __future__ import annotations

import subprocess
import sys

HEAVY = ["matplotlib", "optuna", "transformers", "tokenizers", "rich", "jsonargparse", "yaml", "sklearn", "datasets"]


def test_import_needs_no_extras() -> None:
    script = f"import sys, mupscale; print([name for name in {HEAVY} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_public_names() -> None:
    import mupscale

    assert sorted(mupscale.__all__) == mupscale.__all__
    for name in mupscale.__all__:
        assert (getattr(mupscale, name).__doc__ or "").strip(), f"{name} has no docstring"


def test_imports_go_one_way() -> None:
    """Each module of the core imports only those before it: widths → axes and roles → rules → plan → the rest."""
    import ast
    from pathlib import Path

    order = ["errors", "files", "seeds", "rules", "axes", "roles", "names", "heads", "sharded", "plan", "walk"]
    order += ["traits", "optim", "schedule", "widen", "noise", "upscale", "family", "recorder", "verify", "figures"]
    order += ["coords", "checkpoint", "flops"]
    for position, module in enumerate(order):
        source = (Path(__file__).parents[1] / "src" / "mupscale" / f"{module}.py").read_text()
        for node in ast.parse(source).body:  # imports inside functions are lazy on purpose
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("mupscale"):
                imported = [node.module.partition(".")[2]] if "." in node.module else [a.name for a in node.names]
                assert set(imported) <= set(order[:position]), f"{module} imports {imported}"
