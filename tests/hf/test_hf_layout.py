"""Inside mupscale.hf imports go one way: what is known of a config, its files, training, comparing, and the verbs."""

from __future__ import annotations

import ast
from pathlib import Path

import mupscale.hf

ROOT = Path(mupscale.hf.__file__).parent
ORDER = [
    *("building", "built_values", "config_fields", "miniatures", "config_family", "depths"),
    *("source", "gguf_files", "record", "stream", "output_folder"),
    *("groups", "starting_values", "verifying", "trainer"),
    *("inspection", "upscaling", "language_model"),
]


def test_imports_go_one_way_through_the_modules() -> None:
    assert {path.stem for path in ROOT.glob("**/*.py")} == {*ORDER, "__init__"}
    for number, part in enumerate(ORDER):
        for node in ast.walk(ast.parse((ROOT / f"{part}.py").read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mupscale.hf"):
                inner = (node.module or "").removeprefix("mupscale.hf").lstrip(".")
                for name in [inner] if inner else [alias.name for alias in node.names]:
                    assert name in ORDER[:number], f"{part}.py:{node.lineno} imports from {name}"
