"""The current folder may be a download: nothing there is imported but what a person names, and what that imports."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import hostile_folders
from hf_files import llama_config, llama_tensors, write_checkpoint
from mupscale.cli import main
from mupscale.cli.own_modules import OwnModules

SHADOWS = ("yaml", "rich", "torch", "numpy", "safetensors", "transformers", "difflib", "json")
OPTIONAL = ("dill", "triton", "pandas", "pyarrow", "optree", "cupy", "tabulate", "opt_einsum", "absent_package")


@pytest.fixture
def download(tmp_path: Path) -> Iterator[Path]:
    """A checkpoint, and a run's folder, with Python files beside it that leave a trace when they are run."""
    folder = write_checkpoint(tmp_path / "download", llama_config(), llama_tensors(llama_config()))
    for name in (*SHADOWS, *OPTIONAL, "mine", "beside", "other"):
        (folder / f"{name}.py").write_text(f"open(r'{tmp_path / 'ran'}', 'a').write('{name} ')\n")
    (folder / "recipe.json").write_text(json.dumps({**hostile_folders.RECIPE, "device": "cpu"}))
    yield folder
    for name in (*OPTIONAL, "mine", "beside", "other"):
        if str(folder) in str(getattr(sys.modules.get(name), "__file__", "")):
            del sys.modules[name]


def ran(download: Path) -> str:
    """The modules that were run."""
    trace = download.parent / "ran"
    return trace.read_text().strip() if trace.exists() else ""


@pytest.mark.slow
def test_python_m_runs_nothing_of_the_current_folder(download: Path) -> None:
    """Whatever torch and others look for that is not installed, though the recipe names torch and a module there."""
    (download / "mine.py").write_text("from mupscale.models import MLP as Net\n" + (download / "mine.py").read_text())
    write_recipe(download, "mine.Net")
    words = [sys.executable, "-m", "mupscale", "train", "mine.yaml"]
    done = subprocess.run(words, cwd=download, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "saved in run" in done.stdout
    assert ran(download) == "mine"


def test_only_what_is_named_is_found(download: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(download)
    before, finders = list(sys.path), list(sys.meta_path)
    for words, status in [
        (["inspect", "."], 0),
        (["recipes"], 0),
        (["inspect", ".", "--describe", "mine"], 0),
        (["resume", ".", "--trust", "other", "--steps", "1"], 0),
        (["train", "nowhere.yaml"], 2),
    ]:
        assert main(words) == status
        assert sys.path == before
        assert sys.meta_path == finders
    assert ran(download) == "mine"
    with pytest.raises(ImportError):
        __import__("other")


MINE = """
import importlib
import beside
from mupscale.models import MLP
try:
    import absent_package
except ImportError:
    pass
class Net(MLP):
    def __init__(self, d_in, d_out, width):
        importlib.import_module("later")
        super().__init__(d_in, width, d_out)
"""
LIBRARY = """
try:
    import dill
except ImportError:
    pass
"""


def write_recipe(folder: Path, class_path: str) -> None:
    values: dict[str, Any] = {**hostile_folders.RECIPE, "device": "cpu", "out": "run", "steps": 1}
    values["model"] = {**values["model"], "class_path": class_path}
    (folder / "mine.yaml").write_text(json.dumps(values))


def test_a_module_of_ones_own_imports_what_lies_beside_it_and_others_do_not(
    download: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once and later on; a library that it imports finds nothing there."""
    monkeypatch.chdir(download)
    monkeypatch.syspath_prepend(str(download.parent / "installed"))
    (download.parent / "installed").mkdir()
    (download.parent / "installed" / "a_library.py").write_text(LIBRARY)
    (download / "mine.py").write_text(MINE)
    (download / "beside.py").write_text("import a_library\n" + (download / "beside.py").read_text())
    (download / "later.py").write_text((download / "other.py").read_text().replace("other", "later"))
    write_recipe(download, "mine.Net")
    assert main(["train", "mine.yaml"]) == 0
    assert ran(download) == "beside absent_package later"
    assert main(["resume", "run", "--trust", "mine", "--steps", "2"]) == 0
    del sys.modules["later"], sys.modules["a_library"]


@pytest.mark.quick("package.nets.Net")
@pytest.mark.parametrize("name", ["package.nets.Net", "bare.nets.Net"])
def test_packages_of_ones_own(download: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """With an __init__.py and without."""
    monkeypatch.chdir(download)
    package = download / name.partition(".")[0]
    package.mkdir()
    if package.name == "package":
        (package / "__init__.py").touch()
    (package / "sizes.py").write_text("import beside\nFACTOR = 1\n")
    (package / "nets.py").write_text(
        "from .sizes import FACTOR\nfrom mupscale.models import MLP\n"
        "class Net(MLP):\n    def __init__(self, d_in, d_out, width): super().__init__(d_in, FACTOR * width, d_out)\n"
    )
    write_recipe(download, "mupscale.models.MLP")
    assert main(["train", "mine.yaml", "--model", name]) == 0
    assert ran(download) == "beside"
    for module in [module for module in sys.modules if module.partition(".")[0] == package.name]:
        del sys.modules[module]


SPAWNS = """
import multiprocessing, sys
from mupscale.cli.own_modules import allow_modules, finding_own_modules
if __name__ == "__main__":
    with finding_own_modules():
        allow_modules(["mine.Net"])
        import mine
        context = multiprocessing.get_context("spawn")
        child = context.Process(target=mine.work)
        child.start()
        child.join()
        sys.exit(child.exitcode)
"""


def test_processes_of_ones_own_module_find_it_and_nothing_else(download: Path) -> None:
    """A class of one's own may load its data in other processes, which are told its module, and not the folder."""
    (download.parent / "command.py").write_text(SPAWNS)
    (download / "beside.py").write_text("")
    (download / "multiprocessing.py").write_text((download / "other.py").read_text())
    (download / "mine.py").write_text("import beside, json\ndef work(): print(beside.__name__, __name__)\n")
    words = [sys.executable, str(download.parent / "command.py")]
    done = subprocess.run(words, cwd=download, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "beside mine\n", "")
    assert ran(download) == ""


def test_a_finder_answers_for_its_names_alone(download: Path) -> None:
    finder = OwnModules(str(download), ["mine", "torch"])
    assert finder.find_spec("mine") is not None
    assert finder.find_spec("beside") is None  # it is no module of that folder that asks
    assert finder.find_spec("mine.part", [str(download)]) is None
    for who, found in [("mine.part", True), ("torch.serialization", False), ("mineral", False)]:
        asked = eval("find('dill')", {"__name__": who, "find": finder.find_spec})
        assert (asked is not None) == found
        finder.names.discard("dill")
