"""What is installed: every extra brings what its docs page needs, and dependencies cover what the command line imports.

Bare environments are made without a network: links to those installed distributions, and no others, that pip would
install for a requirement.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

from commands import refused
from mupscale.cli.command_table import COMMANDS
from mupscale.system import EXTRAS

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
USERS = {"hf", "sweep", "plots", "text", "all"}
IMPORTED_AS = {"scikit-learn": "sklearn", "huggingface-hub": "huggingface_hub"}


def names_of(requirements: list[str]) -> set[str]:
    return {re.split(r"[\[<>=]", each)[0].lower() for each in requirements}


def test_messages_name_extras_that_remain() -> None:
    """In the sources, the recipes and the docs."""
    named = dict[str, set[str]]()
    for path in [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("recipes/*"), *ROOT.glob("src/**/*.py")]:
        for group in re.findall(r"(?:mupscale|'\.)\[([a-z,]+)\]'", path.read_text(encoding="utf-8")):
            named.setdefault(group, set()).add(path.name)
    assert not {word for group in named for word in group.split(",")} - USERS, named


def test_the_list_of_optional_packages_is_that_of_the_extras() -> None:
    extras = PROJECT["optional-dependencies"]
    assert set(extras) == {*USERS, "docs", "dev"}
    assert "mupscale[hf,sweep,plots,text]" in extras["all"]
    for package, extra in EXTRAS.items():
        assert package in {IMPORTED_AS.get(name, name) for name in names_of(extras[extra])}, f"{extra} lacks {package}"


def test_the_command_line_needs_no_extra() -> None:
    plain = {"jinja2", "pyyaml", "rich", "torch", "numpy", "safetensors"}
    assert names_of(PROJECT["dependencies"]) == plain


def test_the_wheel_has_every_file_of_the_package_and_the_recipes(tmp_path: Path) -> None:
    builder = pytest.importorskip("hatchling.builders.wheel").WheelBuilder(str(ROOT))
    (wheel,) = builder.build(directory=str(tmp_path), versions=["standard"])
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    files = {
        f"mupscale/{path.relative_to(place).as_posix()}"
        for place, pattern in ((ROOT / "src" / "mupscale", "**/*"), (ROOT, "recipes/*"))
        for path in place.glob(pattern)
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert packed == files


NEEDS = [(name, need) for name, command in COMMANDS.items() for need in command.needs]


@pytest.mark.parametrize(("command", "need"), NEEDS, ids=lambda value: value)
def test_what_a_command_will_need_is_asked_for_before_it_starts(
    command: str, need: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    package, _, option = need.partition(" ")
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.chdir(tmp_path)
    said = refused(capsys, f"{command} mlp-covtype-tiny {option} --out here", 1)
    assert said == f"mupscale {command}: this command needs {package}: pip install 'mupscale[{EXTRAS[package]}]'"
    assert not list(tmp_path.iterdir())


def test_several_packages_are_asked_for_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for package in ("matplotlib", "optuna"):
        monkeypatch.setitem(sys.modules, package, None)
    said = refused(capsys, "run mlp-covtype-tiny --paper --out none", 1)
    assert "needs matplotlib and optuna: pip install 'mupscale[plots,sweep]'" in said


def wanted(requirements: list[str]) -> set[str]:
    """The names of all distributions that pip would install for these requirements, as far as they are here."""
    from packaging.requirements import Requirement

    seen, found = set[str](), set[str]()
    left = [Requirement(each) for each in requirements]
    while left:
        asked = left.pop()
        for extra in ("", *asked.extras):
            if (key := f"{asked.name.lower()}[{extra}]") in seen:
                continue
            seen.add(key)
            try:
                needed = PROJECT_AS if asked.name == "mupscale" else distribution(asked.name).requires or []
            except PackageNotFoundError:  # of another system, or not installed here
                continue
            found.add(asked.name)
            each = (Requirement(text) for text in needed)
            left += [one for one in each if one.marker is None or one.marker.evaluate({"extra": extra})]
    return found - {"mupscale"}


PROJECT_AS = [
    *PROJECT["dependencies"],
    *(f"{each}; extra == '{extra}'" for extra, names in PROJECT["optional-dependencies"].items() for each in names),
]


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function from an extra to the interpreter of an environment that has mupscale, this extra, and nothing else."""
    pytest.importorskip("packaging")
    made = dict[str, Path]()

    def environment(extra: str) -> Path:
        if extra not in made:
            folder = tmp_path_factory.mktemp(f"bare-{extra or 'plain'}")
            subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
            packages = next(folder.glob("lib/python*/site-packages"))
            for name in wanted([f"mupscale[{extra}]" if extra else "mupscale"]):
                installed = distribution(name)
                for top in {
                    file.parts[0] for file in installed.files or () if file.parts[0] not in ("..", "__pycache__")
                }:
                    place = packages / top
                    if not place.exists():
                        place.symlink_to(Path(str(installed.locate_file(top))))
            (packages / "mupscale.pth").write_text(str(ROOT / "src"))
            made[extra] = folder / "bin" / "python"
        return made[extra]

    return environment


def run_bare(python: Path, folder: Path, code: str) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")} | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [python, "-c", code], cwd=folder, capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]


BLOCKS = """
import re
for block in re.findall(r"```python\\n(.*?)```", open({page!r}, encoding="utf-8").read(), re.S):
    exec(compile(block, {page!r}, "exec"), globals())
"""
COMMAND = "from mupscale.cli import main\nassert main({words!r}) == 0\n"
SHORT = """
import shlex
from mupscale.cli import main
short = "mlp-covtype-tiny --steps 40 --grow '[{at: 20, width: 64, noise: 1}]' --out study -q"
short += " --study.small-seeds 1 --study.lrs '[0.01]' --study.noises '[1.0]'"
"""
WITH_PLOTS = f"""{SHORT}
assert main(shlex.split(f"run {{short}} --study.seeds 1 --study.budgets '[1.0]'")) == 0
assert main(shlex.split("train mlp-covtype-tiny --steps 10 --grow [] --tensorboard true --out board -q")) == 0
assert main(["curves", "board", "--out", "curves.png"]) == 0
"""
WITH_SWEEP = f"""{SHORT}
assert main(shlex.split(f"sweep {{short}} --study.widths '[8]'")) == 0
"""
WITH_TEXT = """
import pyarrow, pyarrow.parquet
from mupscale.cli import main
pyarrow.parquet.write_table(pyarrow.table({"text": ["to be or not to be"] * 50, "y": [0, 1] * 25}), "t.parquet")
assert main(["data", "tokenize", "t.parquet", "tokens", "--vocab", "300"]) == 0
assert main(["data", "info", "t.parquet"]) == 0
"""
DOCS = {
    "": ["docs/start.md", "docs/your-model.md", "docs/training.md", "docs/your-data.md"],
    "hf": ["docs/huggingface.md", "docs/huggingface-training.md", "docs/huggingface-fresh.md"],
}
TRIED = {"": COMMAND.format(words=["train", "mlp-covtype-tiny", "--steps", "4", "--grow", "[]"])}
TRIED |= {"plots": WITH_PLOTS, "sweep": WITH_SWEEP, "text": WITH_TEXT}
CASES = [(extra, code) for extra, code in TRIED.items()]
CASES += [(extra, BLOCKS.format(page=str(ROOT / page))) for extra, pages in DOCS.items() for page in pages]


@pytest.mark.slow
@pytest.mark.parametrize(("extra", "code"), CASES)
def test_every_extra_brings_what_its_page_does(
    extra: str, code: str, bare: Callable[[str], Path], tmp_path: Path
) -> None:
    run_bare(bare(extra), tmp_path, code)


@pytest.mark.slow
def test_a_bare_environment_lacks_what_no_requirement_brings(bare: Callable[[str], Path], tmp_path: Path) -> None:
    """Else the cases above could not fail."""
    missing = [name for name in EXTRAS if name not in ("tokenizers", "pyarrow")]
    code = f"from importlib.util import find_spec\nassert not [n for n in {missing!r} if find_spec(n)]\n"
    run_bare(bare(""), tmp_path, code)
