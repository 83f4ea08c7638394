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
    "mixture",
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


def test_a_new_architecture_is_one_file() -> None:
    """Every file of the folder has registered its architecture under a model_type of its own."""
    from mupscale.hf.describe import DESCRIPTIONS

    files = {path.stem for path in (ROOT / "describe" / "architectures").glob("*.py")} - {"__init__"}
    assert files <= {model_type.replace("-", "_") for model_type in DESCRIPTIONS}


def test_the_table_in_the_docs_has_every_description() -> None:
    """Each model_type once; what can be tied by its description, and what its description calls not lossless."""
    from mupscale.hf.describe import DESCRIPTIONS, Ratios

    text = (ROOT.parents[2] / "docs" / "huggingface-architectures.md").read_text(encoding="utf-8")
    head = "| architecture | `model_type` | copies | fresh | tied | optimizer | verified | notes |"
    lines = text[text.index(head) :].split("\n\n")[0].splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    named = [(kind.strip("`"), row) for row in rows for kind in row[1].split()]
    assert sorted(kind for kind, _ in named) == sorted(DESCRIPTIONS)
    for kind, row in named:
        description = DESCRIPTIONS[kind]
        assert (row[4] == "yes") == (description.tied is not None), kind
        config = {"model_type": kind}
        moves = bool(description.not_lossless(config, Ratios(hidden=2)))
        assert not (moves and row[3].startswith("lossless")), kind
        assert moves or row[3] != "`ffn` lossless", kind
