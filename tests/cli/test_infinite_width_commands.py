"""`mupscale limit …` as a person meets it: tables, pictures, results.json, and errors in one sentence."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import torch

from commands import refused, told
from mupscale.cli import main
from mupscale.cli.infinite_width import SWEEP as LINE
from mupscale.cli.infinite_width import print_comparison
from mupscale.study.space import Sweep
from mupscale.system import parse_record
from mupscale.theory import Estimate
from mupscale.theory.limit_study import LimitComparison, Measurements
from mupscale.theory.limit_study import sweep_limit as swept

MLP = ["limit", "mlp", "--samples", "1500", "--seeds", "2", "--networks", "3", "--steps", "2", "--after", "2"]
EXAMPLES = ["limit", "examples", "--networks", "4", "--steps", "3", "--after", "3"]
GROW = ["limit", "grow", "--samples", "400", "--steps", "1", "--after", "1", "--inputs", "2", "--networks", "2"]
pytestmark = pytest.mark.usefixtures("here")
SWEEP = ["limit", "sweep", "--samples", "600", "--steps", "1", "--after", "2", "--inputs", "2"]


def results(folder: str) -> dict[str, Any]:
    return dict(json.loads(Path(folder, "results.json").read_text()))


def pictures(folder: str) -> dict[str, bytes]:
    """The PNG files, which are all different, and have each an SVG beside them."""
    found = {path.stem: path.read_bytes() for path in Path(folder).glob("*.png")}
    assert all(picture.startswith(b"\x89PNG") and len(picture) > 5000 for picture in found.values())
    assert len(set(found.values())) == len(found)
    assert {path.stem for path in Path(folder).glob("*.svg")} == set(found)
    return found


# ------------------------------------------------------------------------------------------------ mlp


def test_mlp_prints_a_table_and_writes_pictures_and_results(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*MLP, "--widths", "32", "64", "--times", "2", "--noise", "0.5", "--activation", "relu"]) == 0
    said = capsys.readouterr()
    assert set(pictures("limit/mlp")) == {"loss", "error", "copies", "preactivations"}
    found = results("limit/mlp")
    met = found["meeting"]
    assert [each["width"] for each in met["finite"]] == [32, 64]
    assert found["settings"]["activation"] == "relu"
    assert found["settings"]["widths"] == [32, 64]
    assert len(met["limit"]["losses"]) == 2
    assert {len(each["losses"]) for each in met["finite"]} == {3}
    for cell in (
        "∞",
        "64",
        "128",
        f"{met['errors'][-1]:.2g}",
        f"n^{met['slope']:.2f}, give",
        "Results and pictures: limit/mlp",
    ):
        assert cell in said.out
    assert all("of 8 networks" in line for line in said.err.splitlines())  # where it takes longer than ten seconds


@pytest.mark.slow
def test_a_pipe_is_told_how_far_it_is(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("mupscale.system.terminal.SECONDS_BETWEEN_LINES", 0.0)
    assert main([*MLP, "--widths", "16", "--samples", "400"]) == 0
    assert capsys.readouterr().err.splitlines() == [f"{number} of 5 networks" for number in range(1, 6)]


@pytest.mark.quick("command1")
@pytest.mark.parametrize("command", [[*MLP, "--widths", "16", "32"], [*EXAMPLES, "--widths", "16"]])
def test_what_is_printed_fits_into_80_columns(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    said = told(capsys, [*command, "--out", "none"])
    shown = "".join(sign for sign in said if not unicodedata.combining(sign))  # the bar of σ̄
    assert max(map(len, shown.splitlines())) <= 80


def comparison_with(errors: dict[int, list[float]]) -> LimitComparison:
    """A comparison whose networks of each width are so far from the limit."""
    zero, none = Estimate(torch.zeros(2, 1, 1, 1)), Estimate(torch.zeros(2, 1))
    networks = [
        Measurements(n, Estimate(torch.tensor(off).reshape(-1, 1, 1, 1)), none, none, none, torch.zeros(1))
        for n, off in errors.items()
    ]
    return LimitComparison(
        1, 1.0, (), Measurements(None, zero, none, none, none, torch.zeros(1)), tuple(networks), none.mean
    )


def test_a_slope_that_may_be_none_is_called_so(capsys: pytest.CaptureFixture[str]) -> None:
    print_comparison(comparison_with({100: [0.1, 0.4], 400: [0.3, 0.4]}))
    assert "do not tell how fast they come closer as n grows (n^0." in capsys.readouterr().out
    print_comparison(comparison_with({100: [0.2, 0.21], 400: [0.1, 0.105]}))
    assert "Networks come closer as n^-0.50, give or take" in capsys.readouterr().out


def test_lists_can_be_written_with_spaces_commas_or_brackets(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And a command that is interrupted says so in a line."""
    given: list[Any] = []

    def look(experiment: Any, widths: Any, draws: Any) -> Any:
        given.append((widths, experiment.stages[1].noise, experiment.times, experiment.mlp.trained))
        raise KeyboardInterrupt

    monkeypatch.setattr("mupscale.theory.limit_study.compare_with_limit", look)
    for words in (
        ["--widths", "256", "512", "--noise", "0", "0.5", "1", "--times", "2", "3", "--frozen", "1"],
        ["--widths", "[256, 512]", "--noise", "[0, 0.5, 1]", "--times", "[2, 3]", "--frozen=1"],
        ["--widths=[256,512]", "--noise=0", "0.5", "1", "--frozen", "[1]", "--times", "2,3"],
    ):
        assert refused(capsys, ["limit", "mlp", *words], 130) == "mupscale limit mlp: interrupted"
        assert not any(Path("limit/mlp").iterdir())
    assert given == [([256, 512], [0.0, 0.5, 1.0], 6, [False, True, True])] * 3


def test_lists_take_negative_numbers_and_leaves_other_options_alone() -> None:
    read = LINE.read(["--lr", "0.5", "--noises", "-1", "-.5", "--lrs", "8", "--out", "there"])[1]
    assert (read.lr, read.noises, read.lrs, read.out) == (0.5, [-1, -0.5], [8], "there")


@pytest.mark.slow
def test_several_upscalings_frozen_layers_and_the_limit_alone(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--widths", "[]", "--times", "2", "2", "--frozen", "1", "3", "--noise", "0", "0.5", "0", "--out", "here"]
    said = told(capsys, [*MLP, *words, "--samples", "400"])
    assert set(pictures("here")) == {"loss", "copies", "preactivations"}
    met = results("here")["meeting"]
    assert (met["upscaled"], met["times"]) == ([2, 4], 4)
    other, same = (torch.tensor(met["limit"][name]).mean(0) for name in ("other", "same"))
    assert "Master theorem" not in said
    assert "latents are many for 400 samples" in said
    assert f"copies of a unit that part first, in the limit: {float((other / same).min()):.3f}" in said


# ------------------------------------------------------------------------------------------------ examples


@pytest.mark.slow
def test_examples_stand_beside_their_closed_forms(capsys: pytest.CaptureFixture[str]) -> None:
    said = told(capsys, [*EXAMPLES, "--widths", "64", "128", "--times", "3", "--revealed", "--out", "mine"])
    assert set(pictures("mine")) == {"example-1", "example-2", "error"}
    found = results("mine")
    assert found["settings"]["times"] == 3
    for number in ("1", "2"):
        example = found["examples"][number]
        assert example["difference"] < 1e-12
        assert len(example["closed_form"]) == 7
        assert example["times"] == 3
    changes = {(each["choice"], each["what"]): each["change"] for each in found["conditions"]}
    assert len(changes) == 8
    assert changes["example 1, γ↑ = matched_learning_rate", "output"] < 1e-12
    assert "Example 1" in said
    assert "Example 2" in said
    assert "printed condition" in said


@pytest.mark.slow
def test_an_input_of_zero_leaves_nothing_to_converge(capsys: pytest.CaptureFixture[str]) -> None:
    """Networks are at the limit at every width: no slope, and nothing to draw on log axes."""
    assert "Master theorem" not in told(capsys, [*EXAMPLES, "--widths", "16", "32", "--x", "0"])
    assert {path.stem for path in Path("limit/examples").glob("*.png")} == {"example-1", "example-2"}
    assert results("limit/examples")["examples"]["1"]["slope"] is None


# ------------------------------------------------------------------------------------------------ grow


@pytest.mark.slow
def test_copies_and_fresh_units_stand_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--widths", "16", "32", "--noises", "1", "--outgoing", "0", "--rates", "0.5", "1e9", "--out", "here"]
    said = told(capsys, [*GROW, *words])
    assert set(pictures("here")) == {"grow", "error"}
    found = results("here")
    ways = {(way["name"], way["stage"]["lr"]): way for way in found["ways"]}
    assert len(ways) == 6
    at_once = [ways[name, 0.5]["networks"][0][0] for name in ("fresh units, a = 0", "copies, no noise")]
    assert at_once[0] == pytest.approx(at_once[1], rel=1e-5)
    assert ways["fresh units, a = 0", 1e9]["networks"] is None
    assert any(name.startswith("fresh units, a = 0, 0.5 ×") for name in found["pictured"])
    assert any(name.startswith("copies") for name in found["pictured"])
    assert "Best fresh units, a = 0 at 0.5 times the base model's rate" in said
    assert "Networks of n = 32" in said
    assert said.count("diverged") == 6


@pytest.mark.slow
def test_no_multiple_leaves_fresh_units_alone(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*GROW, "--widths", "[]", "--times", "1.5"]
    assert "copies" not in told(capsys, [*words, "--outgoing", "1", "--rates", "0.5"])
    assert set(pictures("limit/grow")) == {"grow"}
    assert [way["name"] for way in results("limit/grow")["ways"]] == ["fresh units, a = 1"]
    assert "all 3 ways to grow have diverged" in refused(capsys, [*words, "--rates", "1e9", "--out", "lost"], 3)
    assert len(results("lost")["ways"]) == 3


# ------------------------------------------------------------------------------------------------ sweep


@pytest.mark.slow
def test_a_sweep_names_its_best_cell(capsys: pytest.CaptureFixture[str]) -> None:
    said = told(capsys, [*SWEEP, "--lrs", "0.1", "1e9", "--noises", "1", "--times", "2", "3"])
    assert set(pictures("limit/sweep")) == {"limit-times-2", "limit-times-3"}
    sweeps = [parse_record(Sweep, each) for each in results("limit/sweep")["sweeps"]]
    for sweep, width in zip(sweeps, ("2n", "3n"), strict=True):
        assert sweep.width == width
        assert sweep.space.noises == (0.0, 1.0)
        assert sum(trial.status == "diverged" for trial in sweep.trials) == 2
        assert f"{sweep.best.loss:.4g}" in said
        assert f"n → {width}: 2 of 4 trials diverged." in said


@pytest.mark.slow
def test_a_sweep_that_is_lost_leaves_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Here k = 3 diverges as a whole, and then every k."""
    lost = {3}

    def one(experiment: Any, lrs: Any, noises: Any, times: int, **rest: Any) -> Any:
        return swept(experiment, (1e9,) if times in lost else lrs, noises, times=times, **rest)

    monkeypatch.setattr("mupscale.theory.sweep_limit", one)
    words = [*SWEEP, "--lrs", "0.1", "--noises", "1", "--times", "3", "2"]
    said = told(capsys, words)
    assert set(pictures("limit/sweep")) == {"limit-times-2", "limit-times-3"}
    gone, found = (parse_record(Sweep, each) for each in results("limit/sweep")["sweeps"])
    assert {trial.status for trial in gone.trials} == {"diverged"}
    assert "all diverged" in said
    assert "n → 3n: 2 of 2 trials diverged." in said
    assert f"{found.best.loss:.4g}" in said

    lost.add(2)
    assert "all 2 trials diverged" in refused(capsys, [*words, "--out", "nothing"], 3)
    assert len(results("nothing")["sweeps"]) == 2


def test_a_sweep_says_where_latents_are_many(capsys: pytest.CaptureFixture[str]) -> None:
    said = told(capsys, [*SWEEP, "--lrs", "0.1", "--noises", "1", "--samples", "200"])
    assert "latents are many for 200 samples" in said


# ------------------------------------------------------------------------------------------------ mistakes


MISTAKES = {
    "mlp --widths a": "--widths[0] is 'a', but must be a whole number",
    "mlp --activation tan": "'tan' is no activation known here",
    "mlp --frozen 4": "--frozen names layer 4, but layers are numbered from 1 to 3",
    "mlp --noise -1": "--noise[0] is -1, but must be a number that is finite and 0 or more",
    "mlp --times 0": "--times is 0, but must be whole numbers of 1 or more",
    "mlp --networks 1": "--networks is 1, but must be 2 or more",
    "mlp --optimizer lion": "--optimizer is 'lion', but must be sgd, sign or adam",
    "mlp --samples 50": "50 samples",
    "mlp --lr -1": "--lr is -1, but must be a number that is finite and 0 or more",
    "examples --upscaled-lr -1": "--upscaled-lr is -1, but must be a number that is finite and 0 or more",
    "mlp --width 8": "there is no option --width; did you mean --widths?",
    "mlp --device tpu": "--device is tpu, but must be cpu or cuda",
    "mlp --inputs 0": "at least one input and one feature",
    "examples --noise 1 2": "--noise is '1,2', but must be four numbers, for the weights A B C D",
    "examples --after 0": "--after is 0, but must be 1 or more",
    "grow --times 1": "--times is 1, but must be more than 1",
    "grow --rates 0": "--rates[0] is 0, but must be a number above 0",
    "sweep --times 1": "--times is 1, but must be distinct numbers of 2 or more",
    "sweep --times 2 2": "--times is '2,2', but must be distinct numbers of 2 or more",
    "swep": "there is no command limit swep; did you mean limit sweep?",
}


@pytest.mark.parametrize(("words", "sentence"), MISTAKES.items())
def test_mistakes_are_one_sentence(words: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert sentence in refused(capsys, ["limit", *words.split()])


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["mlp", "--lr", "1e200", "--samples", "500"], "training has diverged"),
        (["sweep", "--lrs", "1e9", "--samples", "500", "--steps", "1", "--after", "1"], "all 7 trials diverged"),
    ],
)
def test_training_that_diverges_has_a_status_of_its_own(
    words: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(capsys, ["limit", *words], 3)
    assert said.startswith(f"mupscale limit {words[0]}: ")
    assert line in said


def test_a_folder_that_is_a_file_is_one_sentence_before_any_work(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("mupscale.theory.limit_study.compare_with_limit", None)
    Path("taken").write_text("")
    said = refused(capsys, [*MLP, "--widths", "[]", "--out", "taken"], 1)
    assert said == "mupscale limit mlp: the folder taken cannot be made: File exists; choose another"


def test_what_does_not_fit_into_memory_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def too_large(*args: Any, **rest: Any) -> Any:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 640000000000 bytes.")

    monkeypatch.setattr("mupscale.theory.limit_study.compare_with_limit", too_large)
    assert refused(capsys, MLP, 1).startswith(
        "mupscale limit mlp: this does not fit into memory: take smaller --widths"
    )
