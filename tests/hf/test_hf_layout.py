"""Inside mupscale.hf imports go one way, and siblings in other folders are asked through their package."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import mupscale.hf

ROOT = Path(mupscale.hf.__file__).parent
ORDER = [
    "describe",
    "files",
    "training",
    "verification",
    "depth_overview",
    "inspection",
    "upscaled",
    "deepening",
    "upscaling",
    "language_model",
]


def imports(path: Path) -> list[tuple[str, str]]:
    nodes = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.ImportFrom)]
    return [(node.module or "", alias.name) for node in nodes for alias in node.names]


def test_imports_go_one_way_through_the_packages() -> None:
    for path in sorted(ROOT.glob("**/*.py")):
        part = path.relative_to(ROOT).parts[0].removesuffix(".py")
        for module, name in imports(path):
            inner = module.removeprefix("mupscale.hf").lstrip(".").split(".")
            if not module.startswith("mupscale.hf") or inner[0] == part or part == "__init__":
                continue
            where = f"{path.relative_to(ROOT)} imports {name} from {module}"
            assert inner[0] in ORDER[: ORDER.index(part)], where
            assert len(inner) == 1, f"{where}: ask mupscale.hf.{inner[0]}"
            assert name in importlib.import_module(module).__all__, where
