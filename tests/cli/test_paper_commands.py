"""`mupscale run --paper`, `sweep` and `report` as a person meets them."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from commands import refused, told
from mupscale.cli import main
from mupscale.cli.arguments import UsageError
from mupscale.cli.command_lines import CommandLine
from mupscale.cli.studies import FAMILY, RUN, read_study
from mupscale.study import FamilySettings, StudySettings, run_paper, usual_contenders
from mupscale.train import Recipe
from paper_runs import Commanded, read, run_quietly, settings, small, written
from small_runs import metrics


def short(steps: int = 24) -> Recipe:
    return small(steps=steps, growth={"at": 10, "how": "fresh"})


pytestmark = pytest.mark.usefixtures("here")
SETTINGS = settings(lrs=[0.01, 0.02], grown_lrs=[0.05], noises=[1.0], contenders=["from-scratch", "continued"])


@pytest.fixture
def file(tmp_path: Path) -> str:
    return str(written(tmp_path / "recipe.yaml", short(), SETTINGS))


# ------------------------------------------------------------------------------------------------ run


@pytest.mark.quick("flags0")
@pytest.mark.parametrize("flags", [[], ["--paper"]])
def test_contenders_are_added_to_those_that_take_part_already(flags: list[str], tmp_path: Path) -> None:
    def asked(*words: str, how: StudySettings | None = None) -> list[str]:
        recipe = str(written(tmp_path / "other.yaml", short(), how))
        given = [recipe, *flags, *words]
        return read_study(RUN, given).settings.contenders

    usual = usual_contenders(paper=bool(flags))
    assert asked() == []  # which the preset reads as the usual ones
    assert asked("--study.contenders+", "net2net") == asked("--study.contenders+=net2net") == [*usual, "net2net"]
    assert asked("--study.contenders+", "net2net", how=SETTINGS) == [*SETTINGS.contenders, "net2net"]


def test_a_list_whose_default_is_computed_is_added_to_that_default(tmp_path: Path) -> None:
    recipe = str(written(tmp_path / "other.yaml", short()))
    lr = read_study(RUN, [recipe]).recipe.optimizer.init_args["lr"]
    grid = [lr * factor for factor in (0.25, 0.5, 1, 2, 4)]
    assert read_study(RUN, [recipe, "--study.lrs+", "[9, 10]"]).settings.lrs == [*grid, 9, 10]
    assert read_study(RUN, [recipe, "--study.lrs", "1", "--study.lrs+=2"]).settings.lrs == [1, 2]
    assert read_study(RUN, [recipe, "--study.grown-lrs+", "[9]"]).settings.grown_lrs == [*grid, 9]
    words = ["--family.sizes", "4,8", "--family.lrs+", "[9]", "--family.check_lrs+", "[8]", "--family.check+", "[4]"]
    family = read_study(FAMILY, [recipe, *words]).options["family"]
    assert family.lrs == [*grid[1:4], 9]
    assert family.check_lrs == [*grid[1:4], 8]
    assert family.check == [4]  # where empty means none


@pytest.mark.parametrize(
    ("line", "words", "meant"),
    [
        (RUN, ["--study.widths+", "[4]"], "1/4 of the base model's width"),
        (FAMILY, ["--family.tune", "true", "--family.check-lrs+", "[0.1]"], "the trunk's, times"),  # known when tuned
    ],
)
def test_a_list_whose_default_is_not_known_yet_is_not_added_to(
    line: CommandLine, words: list[str], meant: str, tmp_path: Path
) -> None:
    recipe = str(written(tmp_path / "other.yaml", short()))
    with pytest.raises(UsageError, match=rf"stands for a default \(.*{meant}.*\): give the whole list, --"):
        read_study(line, [recipe, *words])


# ------------------------------------------------------------------------------------------------ family


def test_short_options_of_a_family_are_its_own(file: str, tmp_path: Path) -> None:
    """The recipe's are about a checkpoint that is upscaled at the start, which no family does."""
    shared = {each.name for each in fields(Recipe)} & {each.name for each in fields(FamilySettings)}
    assert shared - {"schedule", "seeds"} == FAMILY.short.keys()  # of these two it uses the recipe's as well
    given = {"how": "copies", "noise": 2.0, "noise_unit": "theory", "deepen": "stack", "state": "reset"}
    words = [f"--{name}={value}" for name, value in given.items()]
    asked = read_study(FAMILY, [file, "--sizes", "4,8", *words])
    own = asked.options["family"]
    assert {name: getattr(own, name) for name in given} == given
    assert (asked.recipe.how, asked.recipe.noise, asked.recipe.state) == (None, 0.0, "keep")
    section = tmp_path / "section.yaml"
    section.write_text("family: {how: copies, noise: 3}\n")
    own = read_study(FAMILY, [file, str(section), "--sizes", "4,8", "--noise.last", "0.5"]).options["family"]
    assert (own.how, own.noise) == ("copies", {"last": 0.5})
    own = read_study(FAMILY, [file, "--sizes", "4,8", "--outgoing", "0.5"]).options["family"]
    assert own.outgoing == 0.5


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["family", "--noise", "1"], "how: fresh takes no noise: leave noise out, or use how: copies"),
        (["family", "--how", "copies", "--noise", "-1"], "noise is -1.0, but must be a number that is finite and 0 or"),
        (["family", "--how", "naive"], "'family.how' is 'naive', but must be fresh, lossless, copies or paired"),
        (
            ["family", "--study.seeds", "3"],
            "--study.seeds has no effect here: mupscale family does not use the section",
        ),
        (["train", "--study.seeds", "3"], "--study.seeds has no effect here: mupscale train does not use the section"),
        (["run", "--family.tune", "true"], "--family.tune has no effect here: mupscale run does not use the section"),
    ],
)
def test_options_that_a_command_would_not_use(
    words: list[str], message: str, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command, *options = words
    assert message in refused(capsys, [command, file, *options])


@pytest.mark.slow
@pytest.mark.usefixtures("pictures_without_pixels")
def test_a_whole_run_from_nothing_to_a_page(file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--paper", file, "--study.noises", "[1, 2]"]) == 0
    output = capsys.readouterr()
    folder = Path("runs/recipe")
    summary = read(folder)
    assert summary.name == "recipe"
    assert summary.command == f"mupscale run --paper {file} --study.noises '[1, 2]'"
    assert {trial.noise for trial in summary.tuned[-1].trials} == {0.0, 1.0, 2.0}
    page = (folder / "report" / "index.html").read_text()
    assert summary.sentences[0].split(":")[0] in page
    lines = output.out.splitlines()
    stages = [line for line in lines if line.partition(":")[0] in {stage.name for stage in summary.stages}]
    assert [line.partition(":")[0] for line in stages] == [stage.name for stage in summary.stages]
    at = lines.index("", len(stages))
    said = " ".join(" ".join(lines[at:]).split())
    for sentence in [*summary.sentences, *(f"Note: {note}" for note in summary.notes)]:
        assert sentence in said
    assert lines[-1] == f"Report: {folder / 'report' / 'index.html'}"
    checked = [line for line in lines if line.startswith("coordinate check: ")]
    assert len(checked) == 1
    assert lines[0].startswith("Note: The recipe grows with fresh units. The paper's method grows with copies")
    assert len(lines[:at]) == 2 * len(stages) + 2  # for each stage what is trained, and what came of it
    assert output.err == ""


def test_a_dry_run_prints_a_table_and_writes_nothing(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    lines = told(capsys, ["run", "--paper", file, "--dry-run", "--out", "never"]).splitlines()
    assert "grows with copies instead" in lines[-1]
    assert [line.split()[0] for line in lines[:8]] == [
        "sweep-1-width-4",
        "small-width-4",
        "sweep-2-width-4",
        "base",
        "from-scratch",
        "continued",
        "copies",
        "together",
    ]
    assert [path.name for path in Path().iterdir()] == ["recipe.yaml"]


@pytest.mark.parametrize(
    ("words", "status", "why"),
    [
        (["--grow", "[]"], 1, "needs one growth event, but this recipe has 0"),
        (["--study.sampler", "luck"], 2, "'study.sampler' is 'luck', but must be grid, random or tpe"),
        (["--study.seed", "3"], 2, "study.seed"),
    ],
)
def test_mistakes_are_one_sentence(
    file: str, capsys: pytest.CaptureFixture[str], words: list[str], status: int, why: str
) -> None:
    assert why in refused(capsys, ["run", "--paper", file, *words], status)
    assert [path.name for path in Path().iterdir()] == ["recipe.yaml"]


def test_a_transfer_check_says_what_the_growth_event_lacks(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    for given, lacking in (
        (["--grow", "[{at: 10, width: 16, noise: {n: 1}}]"], "sets no single noise: give --at-noise Y"),
        (["--grow", "[]", "--at-lr", "1", "--at-noise", "1"], "the recipe has no growth event"),
    ):
        assert lacking in refused(capsys, ["transfer-check", file, *given], 2)


def test_rule_sets_are_compared_from_the_command_line(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "give --compare, too" in refused(capsys, ["transfer-check", file, "--batches", "[4, 8]"], 2)
    said = refused(capsys, ["transfer-check", file, "--compare", "[decay=half]", "--widths", "[8, 16]"], 1)
    assert "choose from invariant, sqrt, fixed, inverse" in said
    short = ["--grow", "[]", "--steps", "3", "--study.seeds", "1", "--study.lrs", "[0.1, 0.2, 0.4]", "--out", "rules"]
    planned = ["transfer-check", file, "--compare", "[default, decay=fixed]", "--widths", "[8, 16]", *short]
    assert "decay=fixed, width 16" in told(capsys, [*planned, "--dry-run"])
    assert not Path("rules").exists()
    shown = told(capsys, ["transfer-check", file, "--compare", "[default, duration=0.3]", "--widths", "[4, 8]", *short])
    assert "best rate moves by" in shown
    assert "\nduration=0.3 " in shown
    assert list(json.loads(Path("rules/rules-check.json").read_text())["rules"]) == ["default", "duration=0.3"]


def test_a_transfer_check_takes_the_recipes_rate_and_says_what_its_figures_are(
    file: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    def check(recipe: Recipe, **given: Any) -> dict[str, Any]:
        asked.update(given, own=recipe.optimizer.init_args["lr"])
        measured = [{"points": [{"losses": [1.0]}]}]
        return {"times": 2.0, "steps": 30, "verdict": ["it transfers"], "lr": measured, "noise": []}

    monkeypatch.setattr("mupscale.study.transfer_check", check)
    monkeypatch.setattr("mupscale.report.save_transfer_picture", lambda check, folder: folder)
    planned = told(capsys, ["transfer-check", file, "--at-noise", "1", "--widths", "[4, 8]", "--dry-run"])
    assert [line.split("  ")[0] for line in planned.splitlines()[:2]] == ["4 → 8", "8 → 16"]
    assert not asked
    said = told(capsys, ["transfer-check", file, "--at-noise", "1"])
    assert "Widths are those of the grown models, 2 times" in said
    assert asked["lr"] == asked["own"]


def test_the_first_example_of_a_transfer_check_is_short_and_says_how_long_it_takes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    lines = told(capsys, "transfer-check --help").splitlines()
    example = next(line for line in lines if line.startswith("  mupscale transfer"))
    command, time = example.strip().split("  ", 1)
    assert time.strip() == "half a minute of one core"
    assert command in Path(__file__).parents[2].joinpath("docs/method.md").read_text(encoding="utf-8")  # measured


def test_train_takes_the_same_file_and_ignores_its_study(file: str) -> None:
    assert main(["train", file, "--out", "trained"]) == 0
    assert metrics(Path("trained"), "grow")[0]["width"] == 16
    assert "study" not in json.loads(Path("trained/recipe.json").read_text())


# ------------------------------------------------------------------------------------------------ sweep and report


@pytest.mark.slow  # tests/sweep has two workers for every change
@pytest.mark.parametrize("storage", ["study.db", "journal:study.log"])
def test_two_workers_from_two_folders_find_what_one_does(file: str, tmp_path: Path, storage: str) -> None:
    place = storage.replace("study", f"{tmp_path}/study")
    words = ["sweep", file, "--storage", place, "--worker"]
    both = [Commanded([*words, "--out", str(tmp_path / name)], tmp_path / f"log-{name}") for name in ("a", "b")]
    assert [worker.wait() for worker in both] == [0, 0]
    ends = [(tmp_path / f"log-{name}").read_text().splitlines()[-1] for name in ("a", "b")]
    assert ends[0] == ends[1]
    assert ends[0].startswith("For the large models: learning rate 0.0")
    alone = run_quietly(tmp_path / "alone", short(), SETTINGS)
    best = alone.answer["choice"]
    assert ends[0].endswith(f"learning rate {best['base_lr']:g}; to grow: noise {best['noise']:g}, lr {best['lr']:g}")


@pytest.mark.slow
def test_two_workers_may_share_a_folder(file: str, tmp_path: Path) -> None:
    words = ["sweep", file, "--worker", "--out", str(tmp_path / "run")]
    both = [Commanded(words, tmp_path / f"log-{name}") for name in ("a", "b")]
    assert [worker.wait() for worker in both] == [0, 0]
    assert len({(tmp_path / f"log-{name}").read_text().splitlines()[-1] for name in ("a", "b")}) == 1
    (small_base,) = (tmp_path / "run" / "stretches").iterdir()
    assert len(metrics(small_base, "train")) == 10


@pytest.mark.slow
@pytest.mark.usefixtures("pictures_without_pixels")
def test_a_run_takes_what_a_sweep_has_found(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    lines = told(capsys, ["sweep", file, "--out", "run"]).splitlines()
    assert lines[-1].startswith("For the large models: learning rate 0.0")
    assert not list(Path("run/stretches").glob("width-8-*"))
    asked = read_study(RUN, [file, "--out", "run"])
    lines: list[str] = []
    summary = run_paper(asked.recipe, asked.settings, "run", note=lines.append)
    assert sum(line.endswith(": done already") for line in lines) == 3
    assert told(capsys, "report run") == f"Report: {Path('run/report/index.html')}\n"
    assert summary.sentences[0].split(":")[0] in Path("run/report/index.html").read_text()


def test_a_report_of_nothing_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    lacking = "mupscale report: give the folder of at least one run, such as runs/mlp-covtype-demo"
    assert refused(capsys, "report", 2) == lacking
    assert refused(capsys, "report nowhere", 1).startswith("mupscale report: nowhere holds no study")


def test_torchrun_is_told_how_it_is_done(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "a study runs in one process" in refused(capsys, "run --paper mlp-covtype-tiny", 2)
