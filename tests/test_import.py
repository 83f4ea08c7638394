"""`import mupscale` is light: torch, numpy and safetensors, and nothing of the extras."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

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
    order = ["errors", "files", "seeds", "rules", "axes", "roles", "names", "heads", "sharded", "plan", "walk"]
    order += ["traits", "optim", "schedule", "widen", "noise", "upscale", "family", "recorder", "verify", "figures"]
    order += ["coords", "checkpoint", "flops"]
    for position, module in enumerate(order):
        source = (Path(__file__).parents[1] / "src" / "mupscale" / f"{module}.py").read_text()
        for node in ast.parse(source).body:  # imports inside functions are lazy on purpose
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("mupscale"):
                imported = [node.module.partition(".")[2]] if "." in node.module else [a.name for a in node.names]
                assert set(imported) <= set(order[:position]), f"{module} imports {imported}"


@pytest.mark.parametrize(
    ("package", "order"),
    [
        ("data", "stream embedded tabular images documents tokenizer shards split pack text"),
        ("train", "recipe loss parallel folder progress tensorboard snapshot evaluate start loop curves"),
        (
            "sweep",
            "space findings update alike outcome replicas program graph stack memory work passage together serial "
            "engine storage pruning study workers search",
        ),
        (
            "method",
            "transfer stages settings summary drift costs verdict peers check workshop tuning large estimate run",
        ),
        ("report", "words drawing markup facts gain sweeps curves transfer page compare"),
        (
            "theory",
            "program reveal kets real estimate optimizers weights network examples conditions study sweep pictures "
            "commands",
        ),
        (
            "hf",
            "growth wires architecture precision tensors source models record generic parameters saved optimizer "
            "training trainer shards stream weights relation inspect compare upscale commands",
        ),
    ],
)
def test_imports_within_a_package_go_one_way(package: str, order: str) -> None:
    """No circles, imports for types included."""
    modules = order.split()
    within = {"hf": {"architectures": "architecture"}}.get(package, {})  # a folder, right after what it is made of
    folder = Path(__file__).parents[1] / "src" / "mupscale" / package
    assert {path.stem for path in folder.glob("*.py")} == {*modules, "__init__"}
    for position, module in enumerate(modules):
        for node in ast.walk(ast.parse((folder / f"{module}.py").read_text())):
            name = node.module if isinstance(node, ast.ImportFrom) else None
            if name and name.startswith(f"mupscale.{package}"):
                parts = name.split(".")[2:3] or [alias.name for alias in node.names]
                parts = [within.get(part, part) for part in parts]
                assert set(parts) <= set(modules[:position]), f"{module} imports {parts}"


def test_packages_go_one_way() -> None:
    """Data, training, sweeps, the method, its report: each knows those before it alone; the core knows none of them."""
    packages = ["data", "train", "sweep", "method", "report", "theory", "hf"]
    source = Path(__file__).parents[1] / "src" / "mupscale"
    for position, package in enumerate(packages):
        later = tuple(f"mupscale.{name}" for name in packages[position + 1 :])
        for path in (source / package).glob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                name = node.module if isinstance(node, ast.ImportFrom) else None
                assert not (name and later and name.startswith(later)), f"{package}/{path.name} imports {name}"
