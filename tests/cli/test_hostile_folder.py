"""Somebody else's files are data: every command that reads such a file, on a folder made to do harm, with links or not.

Whatever a command writes or removes there, nothing elsewhere changes.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

import torch

import hostile_folders
import paper_runs
from commands import refused, told
from hf_files import llama_config, llama_tensors, write_checkpoint
from mupscale import Role, hf
from mupscale.cli import main
from mupscale.data.documents import Corpus
from mupscale.hf.config_family import GIVEN
from mupscale.report import save_transfer_picture
from mupscale.study import ContenderRuns, StudySummary, SystemRuns, run_sweeps, transfer_check
from mupscale.study.results import BudgetPoint
from mupscale.system import MupscaleError
from mupscale.train import run_recipe

RECIPE = "mlp-covtype-tiny"


@pytest.fixture
def folder(here: Path) -> Iterator[Path]:
    """Where the files are, and the current folder; nothing of it is ever run."""
    (here / "payload.py").write_text("open('ran', 'w')\n")
    yield here
    assert not list(here.rglob("ran"))
    assert "payload" not in sys.modules


@pytest.mark.parametrize(
    "words",
    [
        ["resume"],
        ["report"],
        ["curves"],
        ["train", RECIPE, "--out", "new", "--width", "64", "--from"],
        ["run", RECIPE, "--out", "new", "--width", "64", "--dry-run", "--from"],
    ],
    ids=lambda words: " ".join(words[:1]),
)
def test_folders_of_runs(folder: Path, capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    for run in hostile_folders.hostile_runs(folder / "runs"):
        refused(capsys, [*words, str(run)])


def test_trust_is_asked_for_by_name(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = {run.name: str(run) for run in hostile_folders.hostile_runs(folder / "runs")}
    assert "os.system" in (said := refused(capsys, ["resume", runs["system"]]))
    assert "--trust os" in said
    assert "os.system is neither a mupscale.data.Data" in refused(capsys, ["resume", runs["system"], "--trust", "os"])
    assert "--trust payload" in refused(capsys, ["resume", runs["imports"]])
    assert "must be at most 16,777,216" in refused(capsys, ["resume", runs["endless"]])


@pytest.mark.parametrize("words", [["inspect"], ["upscale"], ["verify"]], ids=lambda words: words[0])
def test_checkpoints(folder: Path, capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    for checkpoint in hostile_folders.hostile_checkpoints(folder / "checkpoints"):
        more = {"inspect": [], "upscale": ["wide", "--no-verify"], "verify": [str(checkpoint)]}[words[0]]
        refused(capsys, [*words, str(checkpoint), *more])
        assert not Path("wide").exists()


@pytest.mark.parametrize("words", [["train"], ["run", "--paper"]])
def test_recipes(folder: Path, capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    for recipe in hostile_folders.hostile_recipes(folder / "recipes"):
        refused(capsys, [*words, str(recipe)])


def test_a_file_with_the_name_of_a_recipe_that_ships(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is not the recipe that was asked for."""
    (folder / RECIPE).write_text("model: {class_path: payload.Net}\n")
    assert "mupscale.models.MLP" in told(capsys, ["train", RECIPE, "--print-config"])


def test_texts(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = [refused(capsys, ["data", "tokenize", str(path), "out"]) for path in hostile_folders.hostile_texts(folder)]
    assert "more than 200 times as many" in said[0]


def test_pickled_code(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = hostile_folders.pickled_code(folder)
    said = refused(capsys, ["train", RECIPE, "--from", str(weights), "--from_width", "32", "--width", "64"])
    assert "which is code" in said


FROM = ["--width", "64", "--from_width", "32", "--from", "HERE"]
TAKES_A_FOLDER = {
    "inspect": ["inspect", "HERE"],
    "upscale": ["upscale", "HERE", "wide", "--no-verify"],
    "verify": ["verify", "HERE", "HERE"],
    "train": ["train", RECIPE, "--out", "new", *FROM],
    "run": ["run", RECIPE, "--out", "new", "--dry-run", *FROM],
    "resume": ["resume", "HERE"],
    "report": ["report", "HERE"],
    "curves": ["curves", "HERE"],
    "data info": ["data", "info", "HERE"],
}


@pytest.mark.quick("train", "upscale", "resume", "inspect")
@pytest.mark.parametrize("words", TAKES_A_FOLDER.values(), ids=TAKES_A_FOLDER)
@pytest.mark.filterwarnings("ignore:.*single process.*")
def test_folders_of_torch_distributed(folder: Path, capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    for checkpoint in hostile_folders.hostile_dcp_folders(folder / "dcp"):
        command = [str(checkpoint) if word == "HERE" else word for word in words]
        is_clean = checkpoint.name in ("second", "step-000000001")  # its own index
        if words[0] in ("inspect", "verify") and is_clean:
            assert ("model.weight" if words[0] == "inspect" else "are those of") in told(capsys, command)
        else:
            refused(capsys, [*command])


def test_a_name_that_looks_like_markup(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In a table it is shown as it is written, control characters written out."""
    config = {**llama_config(), "num_hidden_layers": 1}
    write_checkpoint(folder / "odd", config, {"[/]weight\x1b[2J\nforged": torch.ones(16, 16)})
    hf.register("llama", {"*forged": Role(out=0, in_=1)})
    try:
        assert main(["inspect", "odd"]) == 0
    finally:
        GIVEN.clear()
    assert r"[/]weight\x1b[2J\nforged" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------ links

MINE = {**hostile_folders.RECIPE, "device": "cpu", "log_every": 1, "callbacks": ["mupscale.train.JsonLines"]}


def contents(folder: Path) -> dict[str, bytes | None]:
    """All that is in a folder, links not followed."""
    paths = sorted(folder.rglob("*"))
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in paths}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Somebody's run, whole."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    folder.mkdir()
    (folder / "recipe.json").write_text(json.dumps(MINE))
    assert main(["resume", str(folder)]) == 0
    runs = [ContenderRuns("fresh", 16, 0.1, 0.0, [BudgetPoint(1.0, 9, 9.0, [0.5])])]
    large = SystemRuns(8, 16, None, "FLOPs", runs)
    StudySummary("demo", "", "pay", {}, {}, ["Growing pays."], large=large).save(folder)
    return folder


@pytest.fixture
def victim(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The user's own run, a report and files, in which nothing may change; beside it, `foreign` is a copy."""
    monkeypatch.chdir(tmp_path)
    folder, foreign = tmp_path / "victim", tmp_path / "foreign"
    for place in (folder, foreign):
        shutil.copytree(trained, place)
    for name in ("index.html", "letter", "curves.png", ".x.12345.tmp"):
        (folder / name).write_text("dear")
    before = contents(folder)
    yield folder
    assert contents(folder) == before


def link(path: Path, target: Path) -> None:
    """A link where something else may be."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.symlink_to(target)


GO_ON = ["resume", "foreign", "--steps", "6", "--checkpoints.every", "1", "--checkpoints.keep", "1"]


@pytest.mark.parametrize(
    ("place", "target"),
    [
        (".lock", "letter"),
        (".lock", "new"),
        ("checkpoints", "checkpoints"),
        ("checkpoints", "."),
        ("metrics-copy.jsonl", "letter"),
        ("metrics-copy.jsonl", "new"),
    ],
)
def test_a_run_that_goes_on(victim: Path, place: str, target: str, capsys: pytest.CaptureFixture[str]) -> None:
    link(Path("foreign", place), victim / target)
    assert f"foreign/{place} is a link to {victim / target}, and links inside" in refused(capsys, GO_ON, 1)


@pytest.mark.parametrize("words", [["resume", "foreign", "--steps", "3"], ["train", "r.yaml", "--out", "foreign"]])
def test_links_that_are_replaced(victim: Path, words: list[str]) -> None:
    """Of files that are written anew, and checkpoints that are removed: the link itself is."""
    Path("r.yaml").write_text(json.dumps({**MINE, "steps": 3}))
    for name in ("metrics.jsonl", "recipe.json"):
        link(Path("foreign", name), victim / name)
    for name in ("step-000000001.safetensors", "step-000000002.safetensors"):
        link(Path("foreign", "checkpoints", name), victim / "checkpoints" / "step-000000002.safetensors")
    more = ["--checkpoints.keep", "1", *(["--overwrite"] if words[0] == "train" else [])]
    assert main([*words, *more]) == 0
    assert not any(path.is_symlink() for path in Path("foreign").rglob("*"))


def test_a_pipe_of_metrics_is_not_waited_for(victim: Path) -> None:
    Path("foreign/metrics.jsonl").unlink()
    os.mkfifo("foreign/metrics.jsonl")
    assert main(["curves", "foreign"]) == 1
    assert main(GO_ON) == 0


@pytest.mark.quick("report")
@pytest.mark.parametrize("place", ["foreign/report", "report"])
def test_a_report(victim: Path, place: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Beside a run, and of several in the current folder; a folder that was named is as good as it is."""
    link(Path(place), victim)
    words = ["report", "foreign"] if place == "foreign/report" else ["report", "foreign", "foreign"]
    assert f"{place} is a link to" in refused(capsys, words, 1)
    Path("mine").mkdir()
    link(Path("named"), Path("mine"))
    assert main([*words, "--out", "named"]) == 0
    assert Path("mine/index.html").is_file()


@pytest.mark.slow
def test_pictures(victim: Path) -> None:
    """Of a report, of curves and of a transfer check: a link of their name is replaced."""
    Path("foreign/report").mkdir()
    names = ["index.html", "transfer-check.png", "transfer-check.svg"]
    for name in names:
        link(Path("foreign/report", name), victim / "letter")
    link(Path("curves.png"), victim / "curves.png")
    assert main(["report", "foreign"]) == 0
    assert main(["curves", "foreign"]) == 0
    points = [{"x": x, "losses": [x]} for x in (0.5, 1.0)]
    lines = [{"width": width, "points": points} for width in (8, 16)]
    save_transfer_picture({"lr": lines, "noise": lines, "fixed": {"lr": 1.0, "noise": 1.0}}, Path("foreign/report"))
    for path in [Path("curves.png"), *(Path("foreign/report", name) for name in names)]:
        assert path.is_file()
        assert not path.is_symlink()


@pytest.mark.slow
def test_pictures_need_no_latex(victim: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A matplotlibrc in the current folder may ask for it, with a preamble of its own."""
    from matplotlib import rc_context, texmanager

    monkeypatch.delattr(texmanager.TexManager, "make_dvi")
    with rc_context({"text.usetex": True}):
        assert main(["curves", "foreign"]) == 0
        assert main(["report", "foreign"]) == 0


@pytest.mark.parametrize("place", [".lock", "stacks", "stretches"])
def test_a_comparison(victim: Path, place: str) -> None:
    Path("compared").mkdir()
    link(Path("compared", place), victim / "letter" if "." in place else victim)
    with pytest.raises(MupscaleError, match=r"is a link to|is damaged"):
        paper_runs.compare_quietly(Path("compared"), how=paper_runs.least())


@pytest.mark.parametrize("place", ["sweeps", "study.db", ".lock"])
def test_a_sweep(victim: Path, place: str) -> None:
    Path("tuned").mkdir()
    link(Path("tuned", place), victim if place == "sweeps" else victim / "new")
    with pytest.raises(MupscaleError, match=f"{place} is a link to"):
        run_sweeps(paper_runs.small(), paper_runs.settings(), "tuned", note=paper_runs.quiet)


def test_a_transfer_check(victim: Path) -> None:
    Path("checked").mkdir()
    link(Path("checked", "stretches"), victim)
    with pytest.raises(MupscaleError, match="stretches is a link to"):
        transfer_check(
            paper_runs.small(), widths=[4, 8], lrs=[0.1, 0.2], noises=[0.3], lr=0.1, noise=0.3, out=Path("checked")
        )


@pytest.mark.parametrize("place", [".lock", "train-00000.bin", "tokens"])
def test_packed_text(victim: Path, place: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where it goes on, which cuts shards back to what was noted."""
    Path("text.txt").write_text("to be or not to be\n" * 50)
    if place == "tokens":  # which was named
        Path("mine").mkdir()
        link(Path("tokens"), Path("mine"))
        assert main(["data", "tokenize", "text.txt", "tokens"]) == 0
        return
    assert main(["data", "tokenize", "text.txt", "tokens"]) == 0
    index = json.loads(Path("tokens/index.json").read_text())
    begun = {**index["made_from"], "source_modified": Corpus("text.txt").modified}
    shards = {"train": [{"file": "train-00000.bin", "tokens": 1, "documents": 0}], "validation": []}
    values = {"begun_with": begun, "after": [0, 0], "empty": 0, "shards": shards}
    Path("tokens/progress.json").write_text(json.dumps(values))
    Path("tokens/index.json").unlink()
    link(Path("tokens", place), victim / "letter")
    assert f"{place} is a link to" in refused(capsys, "data tokenize text.txt tokens", 1)


def test_a_callback_of_ones_own_may_write_where_it_is_told(victim: Path) -> None:
    callback = {"class_path": "mupscale.train.JsonLines", "init_args": {"path": "all"}}
    Path("all").symlink_to("copy")
    run_recipe(paper_runs.small(grow=[], out="mine", callbacks=[callback]))
    assert Path("copy").read_text().count("\n")


# ------------------------------------------------------------------------------------------------ upscale


@pytest.fixture
def small(victim: Path) -> Path:
    return write_checkpoint(victim.parent / "small", llama_config(), llama_tensors(llama_config()))


UPSCALE = ["upscale", "small", "wide", "--no-verify"]


@pytest.mark.parametrize("name", [".wide.mupscale-partial", ".wide.mupscale-partial.json"])
def test_upscale_empties_no_folder(victim: Path, small: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What an earlier version would have cleared is left alone, and a link in the place of the note is refused."""
    is_note = name.endswith(".json")
    link(Path(name), victim / "letter" if is_note else victim)
    assert main(UPSCALE) == int(is_note)
    assert Path("wide").exists() != is_note
    assert "is a link to" in capsys.readouterr().err or not is_note
    assert Path(name).is_symlink()


@pytest.mark.parametrize("folder", ["../victim", "victim", ".wide.mupscale-partial-0123456789abcdef"])
@pytest.mark.parametrize("number", ["right", "wrong", None])
def test_upscale_clears_nothing_that_it_has_not_made(
    victim: Path, small: Path, folder: str, number: str | None
) -> None:
    """Whatever somebody has written into the note."""
    planted = Path(".wide.mupscale-partial-0123456789abcdef")
    planted.symlink_to(victim)
    real = Path(".wide.mupscale-partial-fedcba9876543210")
    real.mkdir()
    (real / "letter").write_text("dear")
    values = {"folder": folder, "number": {"right": victim.stat().st_ino, "wrong": 1}.get(str(number))}
    if number == "wrong":
        values["folder"] = real.name
    Path(".wide.mupscale-partial.json").write_text(json.dumps(values))
    assert main(UPSCALE) == 0
    assert (real / "letter").read_text() == "dear"
    assert planted.is_symlink()
    assert not Path(".wide.mupscale-partial.json").exists()


def test_overwriting_keeps_what_has_a_name_that_it_might_need(victim: Path, small: Path) -> None:
    assert main(UPSCALE) == 0
    link(Path(".wide.old"), victim)
    assert main([*UPSCALE, "--overwrite"]) == 0
    assert sorted(p.name for p in Path().iterdir()) == [".wide.old", "foreign", "small", "victim", "wide"]
    link(Path(".wide.new"), victim)
    assert main([*UPSCALE, "--overwrite"]) == 0
    assert Path(".wide.new").is_symlink()
    assert Path("wide/mupscale.json").is_file()
