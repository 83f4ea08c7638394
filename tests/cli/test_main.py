"""The command line: recipes with options on top of them, one line for every mistake, exit statuses."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from commands import refused, told
from mupscale import __version__
from mupscale.cli import main
from mupscale.cli.command_table import COMMANDS
from mupscale.cli.own_modules import finding_own_modules
from mupscale.cli.training import read_recipe, read_run
from mupscale.system.errors import MupscaleError
from mupscale.train import Growth

MINE = """\
import os, signal
import torch
from torch import nn
from mupscale.data import Split, Table

class Net(nn.Module):
    def __init__(self, d_model, d_in=5, *, classes: int = 3, gain: float | None = 2.0):
        super().__init__()
        self.first, self.last = nn.Linear(d_in, d_model), nn.Linear(d_model, classes)
        self.gain = gain

    def forward(self, x):
        return self.last(self.first(x).relu())

class Passing(Net):
    def __init__(self, d_model: int, **more):
        super().__init__(d_model, **more)

class Heads(nn.Module):
    def __init__(self, heads: int, head_dim: int, d_in: int = 5):
        super().__init__()
        self.body = Net(heads * head_dim, d_in)

    def forward(self, x):
        return self.body(x)

def build(d_model: int, d_in: int = 5) -> Net:
    return Net(d_model, d_in)

class Points(Table):
    def __init__(self, count: int = 256):
        x = torch.randn(count, 5, generator=torch.Generator().manual_seed(0))
        y = x[:, :3].argmax(1)
        super().__init__(Split(x, y, x[:64], y[:64]), 3)

class Interrupted(Points):
    def examples(self, rows):
        self.count = getattr(self, "count", 0) + 1
        if self.count == 15 and not os.path.exists("interrupted"):
            open("interrupted", "w").close()
            os.kill(os.getpid(), signal.SIGINT)
        return super().examples(rows)
"""
RECIPE = """\
model:
  class_path: mine.Net
data:
  class_path: mine.Points
optimizer:
  class_path: torch.optim.AdamW
  init_args: {lr: 0.01, weight_decay: 1e-3}
width: {d_model: 64}
base: {d_model: 64}
steps: 40
batch: 32
grow:
- {at: 20, width: {d_model: 128}, noise: 0.5, lr: 0.004}
"""


@pytest.fixture
def here(here: Path) -> Iterator[Path]:
    """A folder of one's own to work in, with a module and a recipe."""
    (here / "mine.py").write_text(MINE)
    (here / "mine.yaml").write_text(RECIPE)
    with finding_own_modules():  # as in a command
        yield here
    sys.modules.pop("mine", None)


# ------------------------------------------------------------------------------------------------ help


def test_overview_names_all_commands(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for words in ([], ["--help"], ["-h"], ["help"]):
        shown = told(capsys, words)
        assert all(name in shown and command.summary in shown for name, command in COMMANDS.items())
    with monkeypatch.context() as patched:
        patched.setenv("COLUMNS", "80")
        assert max(map(len, told(capsys, "--help").splitlines())) <= 80
    assert "Exit status: 0 done; 1 refused" in shown
    assert "tokenize" in told(capsys, "data")
    assert told(capsys, "--version") == f"mupscale {__version__}\n"


def test_help_teaches_and_fits(capsys: pytest.CaptureFixture[str]) -> None:
    shown = told(capsys, "train --help-all")
    assert "mupscale train recipes/" in shown
    assert len(shown.splitlines()) < 140
    assert "torch.nn" not in shown  # no list of all modules there are
    for text in (
        "--optimizer",
        "--seeds.data",
        "--from",
        "--resume",
        "--print-config",
        "when and how to grow",
        "torchrun",
    ):
        assert text in shown
    assert "steps of linear warm-up (default: 0)" in shown
    assert "default: null" not in shown
    assert "--steps N" in told(capsys, "resume --help")
    assert "--vocab N" in told(capsys, "data tokenize --help")


def test_help_of_a_class(capsys: pytest.CaptureFixture[str]) -> None:
    shown = told(capsys, "train --model.help mupscale.models.MLP")
    assert "--model.depth" in shown
    assert "--model.width" not in shown


# ------------------------------------------------------------------------------------------------ recipes and options


def test_every_field_can_be_overridden(here: Path) -> None:
    words = ["mine.yaml", "--optimizer.lr", "0.5", "--model.classes=7", "--seeds.data", "3", "--schedule.kind", "wsd"]
    words += ["--checkpoints.minutes", "2.5", "--clip", "1", "--compile", "true", "--from", "other", "--noise", "1e-1"]
    recipe, options = read_recipe(words)
    assert recipe.optimizer.init_args["lr"] == 0.5
    assert recipe.optimizer.init_args["weight_decay"] == 1e-3
    assert recipe.model.init_args["classes"] == 7
    assert recipe.model.init_args["gain"] == 2.0
    assert read_recipe(["mine.yaml", "--model.gain", "null"])[0].model.init_args["gain"] is None
    assert (recipe.seeds.data, recipe.seeds.init) == (3, 0)
    assert (recipe.schedule.kind, recipe.checkpoints.minutes, recipe.clip) == ("wsd", 2.5, 1.0)
    assert (recipe.compile, recipe.start, recipe.noise) == (True, "other", 0.1)
    assert options["resume"] is options["overwrite"] is False
    assert read_recipe(["mine.yaml", "--resume"])[1]["resume"]
    assert read_recipe(["mine.yaml", "--overwrite"])[1]["overwrite"]


def test_options_may_stand_anywhere(here: Path) -> None:
    expected = read_recipe(["mine.yaml", "--steps", "50", "--resume"])
    assert read_recipe(["--steps", "50", "mine.yaml", "--resume"]) == expected
    assert read_recipe(["--resume", "--steps=50", "--config", "mine.yaml"]) == expected
    assert read_recipe(["--resume", "mine.yaml", "--steps=50"]) == expected


def test_later_recipes_take_precedence(here: Path) -> None:
    (here / "more.yaml").write_text("steps: 60\noptimizer: {init_args: {lr: 0.7}}\nclip: 3\n")
    recipe, _ = read_recipe(["mine.yaml", "more.yaml"])
    assert (recipe.steps, recipe.clip, recipe.batch) == (60, 3.0, 32)
    assert recipe.optimizer.init_args["lr"] == 0.7
    assert recipe.optimizer.init_args["weight_decay"] == 1e-3
    assert recipe.out == str(Path("runs", "mine+more"))
    (here / "more.yaml").write_text("steps: 60\n")
    assert read_recipe(["more.yaml", "mine.yaml"])[0].steps == 40


def test_growth_given_anew_replaces_and_plus_appends(here: Path) -> None:
    first = Growth(20, {"d_model": 128}, lr=0.004, how="copies", noise=0.5)
    anew = "[{at: 10, width: {d_model: 256}}]"
    (here / "anew.yaml").write_text(f"grow: {anew}\n")
    assert read_recipe(["mine.yaml"])[0].grow == [first]
    assert read_recipe(["mine.yaml", "--grow", anew])[0].grow == [Growth(10, {"d_model": 256}, how="fresh")]
    assert read_recipe(["mine.yaml", "anew.yaml"])[0].grow == [Growth(10, {"d_model": 256}, how="fresh")]
    assert read_recipe(["mine.yaml", "--grow", "[]"])[0].grow == []
    more = read_recipe(["mine.yaml", "--grow+", "{at: 30, width: {d_model: 256}}"])[0].grow
    assert more == [first, Growth(30, {"d_model": 256}, how="fresh")]


def test_another_class_keeps_the_arguments_that_it_has_too(here: Path) -> None:
    """A number is a float where its type says so, as in the files of earlier runs, whose stretches it names."""
    sgd = read_recipe(["mine.yaml", "--optimizer", "SGD", "--optimizer.momentum=0"])[0].optimizer
    assert sgd.class_path == "torch.optim.SGD"
    assert [sgd.init_args[name] for name in ("lr", "weight_decay")] == [0.01, 1e-3]
    assert "eps" not in sgd.init_args
    assert [repr(sgd.init_args[name]) for name in ("momentum", "dampening")] == ["0.0", "0.0"]


def test_a_mapping_for_a_section_goes_into_it_and_any_other_replaces(here: Path) -> None:
    (here / "more.yaml").write_text("schedule: {kind: wsd, decay: 3}\n")
    recipe = read_recipe(["mine.yaml", "more.yaml", "--schedule", "{warmup: 2}", "--schedule.decay", "4"])[0]
    assert (recipe.schedule.kind, recipe.schedule.warmup, recipe.schedule.decay) == ("wsd", 2, 4)


def test_out_is_named_after_the_recipe(here: Path) -> None:
    assert read_recipe(["mine.yaml"])[0].out == str(Path("runs", "mine"))
    assert read_recipe(["mine.yaml", "--out", "elsewhere"])[0].out == "elsewhere"
    assert read_recipe(["mine.yaml", "--out", "none"])[0].out is None


def test_a_module_of_ones_own_in_every_form(here: Path) -> None:
    """A class without types, one that passes its arguments on, and a function; none is told its width twice."""
    for path, args in (
        ("mine.Net", {"d_in": 5, "classes": 3, "gain": 2.0}),
        ("mine.Passing", {"d_in": 5, "classes": 3, "gain": 2.0}),
        ("mine.build", {"d_in": 5}),
    ):
        recipe, _ = read_recipe(["mine.yaml", "--model", path])
        assert (recipe.model.class_path, recipe.model.init_args) == (path, args)
        assert recipe.family().build({"d_model": 16}).first.weight.shape == (16, 5)


def test_widths_by_other_names(here: Path) -> None:
    """`width` may name any arguments; wherever it is given, they are known before the model is read."""
    assert read_recipe(["mine.yaml", "--width.d_model", "32"])[0].width == {"d_model": 32}
    width = ["--width", "{heads: 4}", "--base", "{heads: 4}", "--grow", "[]"]
    recipe, _ = read_recipe(["mine.yaml", "--model", "mine.Heads", "--model.head_dim", "8", *width])
    assert (recipe.width, recipe.model.init_args) == ({"heads": 4}, {"head_dim": 8, "d_in": 5})
    both = ["--width", "{heads: 4, head_dim: 8}", "--base", "{heads: 4, head_dim: 8}", "--grow", "[]"]
    recipe, _ = read_recipe(["mine.yaml", "--model", "mine.Heads", *both])
    assert recipe.model.init_args == {"d_in": 5}
    assert recipe.family().build(recipe.width).body.first.weight.shape == (32, 5)
    (here / "heads.yaml").write_text("model: {class_path: mine.Heads, init_args: {head_dim: 8}}\nwidth: {heads: 2}\n")
    recipe, _ = read_recipe(["mine.yaml", "heads.yaml", "--base", "{heads: 2}", "--grow", "[]"])
    assert (recipe.width, recipe.model.init_args) == ({"heads": 2}, {"head_dim": 8, "d_in": 5})


# ------------------------------------------------------------------------------------------------ mistakes

OPTIMIZER = "optimizer is Adm, but must be the import path of a class; did you mean torch.optim.Adam?"
OPTIONS = {
    "--print_config --stesp 3": "there is no option --stesp; did you mean --steps?",
    "--log-evry 3": "there is no option --log-evry; did you mean --log-every?",
    "--widht 3": "there is no option --widht; did you mean --width?",
    "--optimizr.lr 3": "there is no option --optimizr.lr; did you mean --optimizer.lr?",
    "--schedule.knid wsd": "there is no option --schedule.knid; did you mean --schedule.kind?",
    "--optimizer.lrr 3": "torch.optim.AdamW has no argument lrr; did you mean lr?",
    "--model.clases 3": "mine.Net has no argument clases; did you mean classes?",
    "--model.d_model 3": (
        "model.d_model cannot be given here: the recipe's own entries, such as width, set it. Remove it from model"
    ),
    "--steps many": "'steps' is 'many', but must be a whole number",
    "--width wide": "'width' is 'wide', but must be a whole number or a mapping",
    "--width '{'": "'width' is '{', but must be a whole number or a mapping",
    "--optimizer.lr fast": "'optimizer.lr' is 'fast', but must be a number",
    "--optimizer.betas '[0.9]'": "'optimizer.betas' is [0.9], but must be a list of 2",
    "--model.classes x": "'model.classes' is 'x', but must be a whole number",
    "--tensorboard maybe": "'tensorboard' is 'maybe', but must be true or false",
    "--compile maybe": (
        "'compile' is 'maybe', but must be true or false or default, reduce-overhead, max-autotune or never"
    ),
    "--precision fp8": "'precision' is 'fp8', but must be fp32, tf32, bf16 or fp64",
    "--grow '[{at: a, width: 3}]'": "'grow[0].at' is 'a', but must be a whole number",
    "--grow '[{at: 5, widht: 3}]'": "there is no field 'grow[0].widht'; did you mean width?",
    "--schedule cosine": "'schedule' is 'cosine', but must be a mapping",
    "--seeds 3": "'seeds' is 3, but must be a mapping",
    "--grow 5": "'grow[0]' is 5, but must be a mapping",
    "--model mine.Nett": "model: 'mine.Nett' cannot be imported: module 'mine' has no attribute 'Nett'",
    "--model nowhere.Net": "model: 'nowhere.Net' cannot be imported: No module named 'nowhere'",
    "--model broken.Net": "model: broken.Net cannot be imported: it broke",
    "--model torch.optim.SGD": "model: torch.optim.SGD is no torch.nn.Module",
    "--optimizer Adm": OPTIMIZER,
    "--steps": "--steps needs a value",
    "--steps --resume": "--steps needs a value",
    "--resume=yes": "--resume takes no value: leave out =yes",
    "--optimizer.help Adm": OPTIMIZER,
    "--model torch.nn.Linear": "in_features must be given for model (torch.nn.Linear)",
    "other.yaml": "there is no recipe other.yaml",
    "--config other.yaml": "there is no recipe other.yaml",
    "mlp-covtype-tyni": "there is no recipe mlp-covtype-tyni; did you mean mlp-covtype-tiny, which ships?",
}


@pytest.mark.parametrize(("words", "said"), OPTIONS.items(), ids=OPTIONS)
def test_a_wrong_option_gets_one_line(here: Path, capsys: pytest.CaptureFixture[str], words: str, said: str) -> None:
    (here / "broken.py").write_text("raise RuntimeError('it broke')\n")
    assert refused(capsys, ["train", "mine.yaml", *shlex.split(words)], 2) == f"mupscale train: {said}"


FILES = [
    ("steps: 40", "stesp: 40", "there is no field 'stesp'; did you mean steps?"),
    ("steps: 40\n", "", "'steps' is missing"),
    ("batch: 32", "batch: 32\nschedule: {knid: wsd}", "there is no field 'schedule.knid'; did you mean kind?"),
    ("batch: 32", "batch: 32\nschedule: 3", "'schedule' is 3, but must be a mapping"),
    (
        "class_path: mine.Net",
        "class: mine.Net",
        "model takes class_path and init_args, but not class: name its class first (--model CLASS)",
    ),
    ("\n  class_path: mine.Points", " 3", "data is 3, but must be a mapping of class_path and init_args"),
    ("mine.Points", "mine.Net", "data: mine.Net is no mupscale.data.Data"),
    (
        "{d_model: 64}",
        "{d_model: 64",
        "wrong.yaml, line 9, column 5 is not valid YAML: expected ',' or '}', but got ':'",
    ),
    (RECIPE, "- 1\n", "wrong.yaml holds no options: it must be a YAML mapping such as 'width: 512'"),
    (RECIPE, "", "wrong.yaml holds no options: it must be a YAML mapping such as 'width: 512'"),
]


@pytest.mark.parametrize(("old", "new", "said"), FILES, ids=[said[:30] for *_, said in FILES])
def test_a_wrong_recipe_gets_one_line(
    here: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, said: str
) -> None:
    assert old in RECIPE
    (here / "wrong.yaml").write_text(RECIPE.replace(old, new, 1))
    assert refused(capsys, ["train", "wrong.yaml"], 2) == f"mupscale train: {said}"


def test_commands_get_one_line(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, ["trian"], 2) == "mupscale: there is no command trian; did you mean train?"
    assert refused(capsys, ["theory"], 2).endswith("did you mean limit?")
    assert "did you mean data tokenize?" in refused(capsys, ["data", "tokenise"], 2)
    assert "give a recipe" in refused(capsys, ["train"], 2)
    (here / "wrong.yaml").write_bytes(b"\xff\xfe\xfa")
    assert "wrong.yaml is not UTF-8 text" in refused(capsys, ["train", "wrong.yaml"], 2)
    assert refused(capsys, ["resume", "nowhere"], 2).startswith("mupscale resume: nowhere is not the folder of a run")
    assert "give the folder of one run" in refused(capsys, ["resume"], 2)
    assert (
        refused(capsys, ["data", "tokenize", "mine.py"], 2)
        == "mupscale data tokenize: give SOURCE and OUT, not mine.py"
    )


def test_what_the_library_refuses_has_status_1(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    growth = ["--grow", "[{at: 20, width: {d_model: 100}, how: copies}]"]
    said = refused(capsys, ["train", "mine.yaml", *growth], 1)
    assert said.startswith(
        "mupscale train: growth at step 20: d_model 100 is not a multiple of 64. Choose 64 or 128, or grow"
    )


def test_debug_shows_where_an_error_comes_from(here: Path) -> None:
    with pytest.raises(MupscaleError):
        main(["train", "mine.yaml", "--steps", "x", "--debug"])


def test_only_the_first_process_complains(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    assert main(["train", "mine.yaml", "--steps", "x"]) == 2
    assert main(["train", "mine.yaml", "--steps", "0"]) == 1
    assert capsys.readouterr().err == ""


def test_ctrl_c_before_training(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "slow.py").write_text("raise KeyboardInterrupt\n")
    assert refused(capsys, "train mine.yaml --model slow.Net", 130) == "mupscale train: interrupted"


# ------------------------------------------------------------------------------------------------ training


def records(run: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_train_and_its_folder(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "mine.yaml"]) == 0
    run = here / "runs" / "mine"
    assert records(run)[-1]["status"] == "finished"
    assert json.loads((run / "recipe.json").read_text())["model"]["class_path"] == "mine.Net"
    said = refused(capsys, ["train", "mine.yaml"], 1)
    assert "holds a run at step 40 already" in said
    assert main(["train", "mine.yaml", "--steps", "50", "--resume"]) == 0
    assert records(run)[-1]["step"] == 50


def test_a_diverged_run_has_status_3(here: Path) -> None:
    assert main(["train", "mine.yaml", "--optimizer.lr", "1e30", "--grow", "[]"]) == 3
    assert records(here / "runs" / "mine")[-1]["status"] == "diverged"


def test_ctrl_c_and_resume(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Interrupted, extended and resumed: the same weights as a run that never was."""
    run = here / "runs" / "mine"
    assert main(["train", "mine.yaml", "--steps", "60", "--out", "whole"]) == 0
    shown = told(capsys, "train mine.yaml --data mine.Interrupted", 130)
    assert records(run)[-1]["status"] == "interrupted"
    assert f"mupscale resume {run.relative_to(here)}\n" in shown
    stopped = int(str(records(run)[-1]["step"]))
    assert stopped < 20
    assert "optimizer cannot change in the middle of a run" in refused(
        capsys, ["resume", str(run), "--optimizer.lr", "1"], 2
    )
    assert "did you mean --steps?" in refused(capsys, ["resume", str(run), "--step", "60"], 2)
    shutil.copytree(run, here / "copy")
    assert "add --trust mine" in refused(capsys, ["resume", "copy", "--steps", "60"], 1)
    assert main(["resume", str(run), "--steps", "60", "--log_every", "20"]) == 0
    losses = [[r["loss"] for r in records(path) if r["kind"] == "eval"] for path in (here / "whole", run)]
    assert losses[0] == losses[1] != []


def test_resume_reads_the_run_as_it_is(here: Path) -> None:
    """A recipe made in Python is not filled up with defaults, and a folder that was moved is where it is."""
    recipe, _ = read_recipe(["mine.yaml"])
    saved = recipe.to_json()
    saved["optimizer"]["init_args"] = {"lr": 0.01}
    (here / "moved").mkdir()
    (here / "moved" / "recipe.json").write_text(json.dumps(saved))
    again = read_run(
        ["moved", "--trust", "mine", "--grow+", "{at: 30, width: {d_model: 256}}", "--evaluation.every", "7"]
    )
    assert again.optimizer.init_args == {"lr": 0.01}
    assert again.out == "moved"
    assert [growth.at for growth in again.grow] == [20, 30]
    assert (again.evaluation.every, again.checkpoints, again.steps) == (7, recipe.checkpoints, 40)
    (here / "moved" / "recipe.json").write_text("{")
    with pytest.raises(MupscaleError, match=r"recipe\.json is damaged"):
        read_run(["moved"])


def test_tokenize_and_info(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "text.txt").write_text("to be or not to be, that is the question\n" * 50)
    assert main(["data", "tokenize", "text.txt", "tokens"]) == 0
    assert "bytes" in told(capsys, "data info tokens")
    assert "nowhere" in refused(capsys, ["data", "info", "nowhere"], 1)
    assert "mupscale data tokenize text.txt FOLDER" in refused(capsys, ["data", "info", "text.txt"], 1)


@pytest.mark.slow
def test_as_a_module_with_several_processes(here: Path) -> None:
    """torchrun's way in, with a model from the current folder; a mistake is said once."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    words = ["-m", "mupscale", "train", "mine.yaml", "--device", "cpu", "--out", "run"]
    done = subprocess.run([*torchrun, *words], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert records(here / "run")[-1]["status"] == "finished"
    assert main(["train", "mine.yaml", "--out", "alone"]) == 0
    two, one = ([r["loss"] for r in records(here / name) if r["kind"] == "train"] for name in ("run", "alone"))
    torch.testing.assert_close(two, one, rtol=1e-3, atol=1e-5)
