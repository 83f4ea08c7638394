"""Every Python block of the README and the docs runs as written, in the order of its page, and so do the notebooks."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
DEAR = {
    "any-model.md",
    "depth.md",
    "huggingface.md",
    "huggingface-fresh.md",
    "huggingface-training.md",
    "own-loop.md",
    "theory.md",
    "your-model.md",
}
"""Pages whose blocks take a second and more each: they run with the slow tests."""
NOTEBOOKS = sorted((ROOT / "docs").glob("**/*.ipynb"))


@pytest.fixture(autouse=True)
def architectures_stay() -> Iterator[None]:
    """What a page registers is forgotten after it, so that no other test meets it."""
    from mupscale.hf.config_family import GIVEN

    yield
    GIVEN.clear()


@pytest.mark.filterwarnings("error::mupscale.theory.FewSamples")  # a limit that is shown is a good one
@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=pytest.mark.slow if page.name in DEAR else (), id=page.name) for page in PAGES]
)
def test_python_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {"__name__": "__main__"}
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.S):
        exec(compile(block, page.name, "exec"), scope)


@pytest.mark.filterwarnings("error::mupscale.theory.FewSamples")  # a limit that is shown is a good one
@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_run(notebook: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {"__name__": "__main__"}
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), notebook.name, "exec"), scope)
    assert scope["plt"].get_fignums()
    scope["plt"].close("all")


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_small_and_were_run_in_order(notebook: Path) -> None:
    text = notebook.read_text(encoding="utf-8")
    assert len(text) < 150_000
    code = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1)), "python tools/run_notebooks.py"


README_COMMANDS = re.findall(r"^    (mupscale [^#\n]+?) *(?:#.*)?$", (ROOT / "README.md").read_text(), re.M)


def test_readme_commands_and_extras_exist() -> None:
    from mupscale.cli.command_table import COMMANDS

    assert len(README_COMMANDS) >= 5
    assert {command.split()[1] for command in README_COMMANDS} <= {name.split()[0] for name in COMMANDS}
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for named in re.findall(r"'\.\[([a-z,]+)\]'", "".join(page.read_text() for page in PAGES)):
        assert set(named.split(",")) <= set(extras), named


@pytest.mark.slow
@pytest.mark.parametrize("command", README_COMMANDS)
def test_readme_commands_run(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each by itself, in an empty folder with the recipes and, where it is asked for, a checkpoint."""
    from mupscale.cli import main

    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    words = shlex.split(command)[1:]
    if "path/to/checkpoint" in words:
        transformers = pytest.importorskip("transformers")
        config = transformers.GPT2Config(n_embd=32, n_head=4, n_layer=2, vocab_size=97, n_positions=64)
        transformers.GPT2LMHeadModel(config).save_pretrained("path/to/checkpoint")
        if words[0] == "verify":
            assert main(shlex.split("upscale path/to/checkpoint path/to/wide --times 2 --noise 0.3 --seed 0")) == 0
    assert main(words) == 0


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    named = re.findall(r"(?:`|^    )make ([a-z-]+)", "\n".join(page.read_text() for page in PAGES), re.M)
    assert len(set(named)) >= 5
    for target in set(named):
        assert re.search(rf"^{target}:", makefile, re.M), target
