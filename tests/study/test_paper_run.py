"""A whole run of the paper's comparison: every number in its summary is that of an ordinary run; costs are equal."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch

from mupscale.growth import SignalNoise
from mupscale.study import (
    Cell,
    ContenderRuns,
    Space,
    StudySummary,
    Sweep,
    SweepJob,
    Tried,
    estimate_paper,
    paper,
    run_paper,
)
from mupscale.study.contenders import COPIES, contender_named
from mupscale.study.paper import Choice, PaperStudy
from mupscale.system.errors import MupscaleError
from mupscale.system.seeds import derive
from mupscale.train import Growth, Recipe, Schedule, Seeds, Spec, find_checkpoint, read_snapshot, run_recipe
from paper_runs import (
    BASE_STEPS,
    STEPS,
    WIDE_STEPS,
    facts,
    names_of,
    quiet,
    read,
    run_quietly,
    runs_of,
    settings,
    small,
)
from small_runs import ADAMW, column, metrics, recipe

EXACT = {"rel": 0, "abs": 1e-9}
SETTINGS = settings(lrs=[0.01, 0.02], noises=[0.02, 0.05])  # of which the first noise helps these models a little


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("paper") / "run"


@pytest.fixture(scope="module")
def done(folder: Path) -> StudySummary:
    torch.set_num_threads(1)
    return run_paper(small(), SETTINGS, folder, note=quiet)


@pytest.fixture(scope="module")
def study(folder: Path) -> PaperStudy:
    """The same, to ask it where things are."""
    return PaperStudy(small(), SETTINGS, folder, quiet)


def prepared(folder: Path, of: Recipe | None = None, **changes: Any) -> PaperStudy:
    """A study that is told what to train."""
    return PaperStudy(of or small(), settings(**{"seeds": 1, **changes}), folder, quiet)


def train(study: PaperStudy, choice: Choice) -> dict[str, ContenderRuns]:
    """The contenders with these values, as if tuning had chosen them."""
    study.trainer.make_folder()
    return {runs.name: runs for runs in study._train_contenders(choice)}


def trained(out: Path, **changes: Any) -> list[float]:
    """The training losses, step by step, of `train` with a recipe written by hand."""
    optimizer = Spec(ADAMW.class_path, {**ADAMW.init_args, "lr": changes.pop("lr")})
    run_recipe(recipe(out, **{"base": 4, "init_at": 4, "optimizer": optimizer, **changes}))
    return [float(loss) for loss in column(out, "loss")]


def from_base(study: PaperStudy, base_lr: float, seed: int, narrow: Any = 8, **changes: Any) -> dict[str, Any]:
    """What a run that starts from a base model has in its recipe."""
    seeds = Seeds(init=seed, data=seed + 10_000, noise=seed, dropout=seed)
    system = study.system if narrow == 8 else study.system.smaller(narrow)
    start = study.trainer.recipe_of(system.base_model(base_lr, seed)).out
    return {"start": start, "how": "copies", "seeds": seeds, "steps": WIDE_STEPS, **changes}


def choice_of(summary: StudySummary) -> Choice:
    return Choice(**summary.answer["choice"])


# ------------------------------------------------------------------------------------------------ what is in the folder


def test_everything_is_in_the_folder(done: StudySummary, folder: Path) -> None:
    assert {path.name for path in folder.iterdir()} >= {"stretches", "summary.json", "coordinates.json", "study.db"}
    runs = list((folder / "stretches").iterdir())
    assert len(runs) == 1 + 5 * 2  # a small model; base, from-scratch, -changed, continued, copies with two seeds
    assert all(metrics(run, "end")[0]["status"] == "finished" for run in runs)
    assert not list(folder.rglob("*.tmp"))
    assert not list(folder.rglob("stacks/*"))


def test_the_summary_is_read_back_as_it_was(done: StudySummary, folder: Path) -> None:
    assert read(folder) == done
    assert (done.preset, done.measure) == ("paper", "training loss")
    assert done.coords is not None
    assert done.recipe == {**small().to_json(), "out": ".", "from": None}


def test_runs_come_in_the_order_of_the_comparison(done: StudySummary) -> None:
    assert names_of(done) == [
        "base",
        "from-scratch",
        "from-scratch-changed",
        "continued",
        "copies-without-noise",
        "copies",
    ]
    assert [stage.name for stage in done.stages] == [
        "sweep-1-width-4",
        "small-width-4",
        "sweep-2-width-4",
        "base",
        "from-scratch",
        "continued",
        "copies",
    ]


def test_a_width_too_small_to_trust_is_warned_of(done: StudySummary) -> None:
    assert any("width 4 may be too small to trust" in sentence for sentence in done.notes)


# ------------------------------------------------------------------------------------------------ the numbers


def test_the_choice_is_the_best_of_the_sweeps(done: StudySummary) -> None:
    first, second = done.tuned
    assert (first.width, first.start, second.width, second.start) == (4, None, 8, 4)
    lowest = min(second.trials, key=lambda trial: trial.loss or 9.0)
    choice = choice_of(done)
    assert (choice.lr, choice.noise) == (lowest.lr, lowest.noise) == (second.lr, second.noise)
    assert choice.noise > 0
    assert choice.base_lr == min(first.trials, key=lambda trial: trial.loss or 9.0).lr
    assert choice.plain is None
    assert choice.constants is None


def test_a_trial_of_sweep_2_is_an_ordinary_run(done: StudySummary, study: PaperStudy, tmp_path: Path) -> None:
    """Upscaling procedure, Step 0: the small base model, upscaled with a cell's noise and learning rate."""
    trial = done.tuned[1].best
    start = from_base(study, choice_of(done).base_lr, 0, narrow=4, width=8, lr=trial.lr, noise=trial.noise)
    losses = trained(tmp_path / "trial", **start)
    assert trial.loss == pytest.approx(fmean(losses[WIDE_STEPS * 9 // 10 :]), **EXACT)
    assert [loss for _, loss in trial.curve] == pytest.approx(losses, **EXACT)


def test_the_base_model_is_an_ordinary_run(done: StudySummary, tmp_path: Path) -> None:
    for seed, curve in enumerate(runs_of(done, "base").curves):
        same = Seeds(seed, seed, seed, seed)
        losses = trained(tmp_path / str(seed), width=8, steps=BASE_STEPS, seeds=same, lr=choice_of(done).base_lr)
        assert curve.losses == pytest.approx(losses, **EXACT)


@pytest.mark.parametrize("name", ["copies", "copies-without-noise"])
def test_upscaled_models_are_ordinary_runs_with_and_without_noise(
    done: StudySummary, study: PaperStudy, tmp_path: Path, name: str
) -> None:
    """Steps 2 to 4; and (d), read off the narrow model, is what the wide one does (Equivalence at zero noise)."""
    runs, choice = runs_of(done, name), choice_of(done)
    assert (runs.width, runs.steps, runs.lr) == (16, WIDE_STEPS, choice.lr)
    assert runs.noise == (choice.noise if name == "copies" else 0)
    assert runs.points[-1].losses == [curve.final() for curve in runs.curves]
    for curve in runs.curves:
        out = tmp_path / str(curve.seed)
        start = from_base(study, choice.base_lr, curve.seed, width=16, lr=runs.lr, noise=runs.noise)
        losses = trained(out, **start)
        assert curve.steps == list(range(1, WIDE_STEPS + 1))
        assert curve.losses == pytest.approx(losses, **EXACT)
        assert curve.held_out_steps[-1] == WIDE_STEPS
        assert curve.held_out_losses[-1] == pytest.approx(column(out, "loss", "eval")[-1], **EXACT)


def test_from_scratch_with_the_change_of_the_upscaled_run(done: StudySummary, tmp_path: Path) -> None:
    """(b): the rate changes after the same part of the run."""
    plain, changed = runs_of(done, "from-scratch"), runs_of(done, "from-scratch-changed")
    at = round(changed.steps * BASE_STEPS / STEPS)
    assert changed.change == (at, choice_of(done).lr)
    grow = [Growth(at=at, width=16, lr=choice_of(done).lr, how="copies")]
    losses = trained(tmp_path / "b", width=16, steps=changed.steps, lr=choice_of(done).base_lr, grow=grow)
    assert changed.curves[0].losses == pytest.approx(losses, **EXACT)
    assert plain.curves[0].losses[:at] == changed.curves[0].losses[:at]
    assert plain.curves[0].losses[at + 1] != changed.curves[0].losses[at + 1]


@pytest.mark.slow
def test_baselines_with_the_learning_rate_that_is_best_without_noise(tmp_path: Path) -> None:
    """(b′), (c′), (c″), (e′); and where the upscaled model keeps the base model's rate, (b) is (a)."""
    study, lr = prepared(tmp_path / "run"), 0.01
    models = train(study, Choice(lr, lr, 0.1, "init", own_lr=lr / 8))
    assert models["from-scratch-changed"].curves == models["from-scratch"].curves
    own, rest, late = (models[name] for name in ("from-scratch-own", "continued-late", "copies-own"))
    halfway = {"lr": lr, "grow": [Growth(at=own.change[0], width=16, lr=lr / 8, how="copies")]} if own.change else {}
    assert own.curves[0].losses == pytest.approx(trained(tmp_path / "b", width=16, steps=own.steps, **halfway), **EXACT)
    assert (models["continued"].lr, models["continued-own"].lr) == (lr, lr / 8)
    assert models["continued"].curves != models["continued-own"].curves
    assert (rest.lr, rest.change) == (lr, (rest.steps // 2, lr / 8))
    start = from_base(study, lr, 0, width=8, lr=lr, grow=[Growth(at=rest.steps // 2, width=8, lr=lr / 8, how="copies")])
    losses = trained(tmp_path / "c", **{**start, "steps": rest.steps})
    assert rest.curves[0].losses == pytest.approx(losses, **EXACT)
    at = WIDE_STEPS // 2
    assert (late.lr, late.change, late.noise) == (lr, (at, lr / 8), 0.1)
    start = from_base(study, lr, 0, width=16, lr=lr, noise=0.1)
    losses = trained(tmp_path / "e", **start, grow=[Growth(at=at, width=16, lr=lr / 8, how="copies")])
    assert late.curves[0].losses == pytest.approx(losses, **EXACT)
    assert late.curves[0].losses[:at] == models["copies"].curves[0].losses[:at]
    assert late.curves[0].losses[at + 1] != models["copies"].curves[0].losses[at + 1]


OWN = {"from-scratch-own", "continued-own", "continued-late", "copies-own"}


@pytest.mark.parametrize(
    ("zero", "contenders", "named"),
    [
        (0.05, [], set()),
        (0.02, [], OWN),
        (0.1, [], OWN),
        (0.02, ["from-scratch", "copies-own"], set()),
        (0.02, ["from-scratch-own", "copies-own"], {"from-scratch-own", "copies-own"}),
        (0.02, ["continued-own", "copies"], {"continued-own"}),
    ],
)
def test_own_rates_count_where_the_grid_tells_them_apart_and_a_baseline_has_one(
    zero: float, contenders: list[str], named: set[str], tmp_path: Path
) -> None:
    """0.06 is between two rates of the grid, 0.05 the nearer: with it all would be trained twice for nothing."""
    study = prepared(tmp_path / "run", grown_lrs=[0.02, 0.05, 0.1], contenders=contenders)
    trials = [Tried(lr, 0.0, [float(lr != zero)]) for lr in (0.02, 0.05, 0.1)]
    sweep = Sweep("sweep-2", trials, 8, 4, Space((0.02, 0.05, 0.1)))
    choice = study._choose(Cell(0.06, 1.0), 0.01, sweep)
    assert choice.own_lr == (zero if named else None)
    assert {one.name for one in study.contenders if study._plan(one, choice)} & OWN == named


# ------------------------------------------------------------------------------------------------ what they cost


def cost(summary: StudySummary, name: str) -> float:
    """FLOPs of one run."""
    return runs_of(summary, name).points[-1].cost


def test_baselines_cost_what_they_are_compared_with(done: StudySummary) -> None:
    wide, narrow = cost(done, "copies") / WIDE_STEPS, cost(done, "base") / BASE_STEPS
    assert wide > 2 * narrow
    assert done.large.base_cost == cost(done, "base")
    whole = cost(done, "base") + cost(done, "copies")
    assert abs(cost(done, "from-scratch") - whole) <= wide
    assert cost(done, "from-scratch-changed") == cost(done, "from-scratch")
    assert abs(cost(done, "continued") - cost(done, "copies")) <= narrow


def test_a_stage_costs_what_its_runs_say(done: StudySummary, folder: Path) -> None:
    stages = {stage.name: stage.cost for stage in done.stages}
    ends = {run.name: metrics(run, "end")[0]["flops"] for run in (folder / "stretches").iterdir()}
    patterns = {"small-width-4": "width-4-", "base": "width-8-lr-0.01-steps-10", "copies": "width-16-copies"}
    patterns |= {"from-scratch": "width-16-lr", "continued": f"width-8-lr-{choice_of(done).lr:g}-steps-5"}
    for name, beginning in patterns.items():
        assert stages[name] == sum(flops for run, flops in ends.items() if run.startswith(beginning)), name
    assert all(stage.seconds > 0 for stage in done.stages)


def test_a_dry_run_tells_what_the_run_will_cost_and_writes_nothing(done: StudySummary, tmp_path: Path) -> None:
    lines = estimate_paper(small(), SETTINGS, tmp_path / "never").splitlines()
    assert not list(tmp_path.iterdir())
    trained = {"from-scratch": 2 / 3, "continued": 1 / 3, "copies": 1 / 2}  # one rate is best for all
    total = 0.0
    for stage, line in zip(done.stages, lines, strict=False):
        planned = (stage.cost or 0.0) / trained.get(stage.name, 1)
        assert line.startswith(f"{stage.name} ")
        assert f" {planned:.3g} FLOPs" in line
        total += planned
    assert ["together", f"{total:.3g}", "FLOPs"] in [line.split()[:3] for line in lines]


def test_a_dry_run_of_what_cannot_be_stacked_with_a_sweep_at_the_large_width(tmp_path: Path) -> None:
    rms = Spec("torch.optim.RMSprop", {"lr": 0.01})
    how = settings(contenders=["net2net"], seeds=1, sampler="random", trials=7)
    lines = estimate_paper(small(optimizer=rms), how, tmp_path / "never").splitlines()
    counts = {line.split()[0]: line.split()[1] for line in lines if "FLOPs" in line and "together" not in line}
    assert counts == {
        "small-width-4": "1",
        "sweep-2-width-4": "7",
        "base": "1",
        "copies": "1",
        "net2net-width-16": "7",
        "net2net": "1",
    }


# ------------------------------------------------------------------------------------------------ other ways to run it


@pytest.mark.slow
def test_with_a_schedule_upscaling_without_noise_is_a_run_of_its_own(tmp_path: Path) -> None:
    """The first steps of a longer cosine are not those of a short one."""
    cosine = small(schedule=Schedule("cosine"))
    study = prepared(tmp_path / "run", cosine, contenders=["continued", "copies-without-noise"])
    exact = train(study, Choice(0.01, 0.02, 0.1, "init"))["copies-without-noise"]
    start = from_base(study, 0.01, 0, width=16, lr=0.02, schedule=Schedule("cosine"))
    assert exact.curves[0].losses == pytest.approx(trained(tmp_path / "wide", **start), **EXACT)
    assert [stage.name for stage in study._stages()] == ["base", "continued", "copies-without-noise", "copies"]


SGD = Spec("torch.optim.SGD", {"lr": 0.02})
SIGNAL: dict[str, tuple[Recipe, dict[str, Any]]] = {
    "mlp": (small(growth={"at": 20, "noise_unit": "signal"}, steps=40), {}),
    "resnet": (
        small("resnet", width=4, base=2, init_at=2, batch=16, steps=12, optimizer=SGD,
              growth={"at": 4, "width": 8, "noise_unit": "signal"}),
        {"widths": [2]},
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", ["mlp", pytest.param("resnet", marks=pytest.mark.slow)])
def test_signal_noise_is_tuned_small_and_its_constants_transferred(tmp_path: Path, kind: str) -> None:
    """Appendix 'Alternative algorithm: signal-normalized noise', 'Modification to Step 0'."""
    signal, changes = SIGNAL[kind]
    study = prepared(tmp_path / "run", signal, small_seeds=2, noises=[0.2], **changes)
    (tuned_at,) = study.small
    study.trainer.make_folder()
    study._train_small(tuned_at, 0.01)
    sweep = Sweep("sweep-2", [Tried(0.02, 0.1, [1.0])], 8, 4)
    choice = study._choose(Cell(0.03, 0.2), 0.01, sweep)
    found = []
    for seed in (0, 1):
        noise = SignalNoise(0.2)
        model = signal.family().build(tuned_at.narrow).to(signal.dtype())
        kept = study.trainer.recipe_of(tuned_at.base_model(0.01, seed)).out
        read_snapshot(find_checkpoint(str(kept))).restore_model(model)
        signal.family().upscale(model, width=tuned_at.wide, noise=noise, seed=derive(seed, "start"))
        assert isinstance(noise.effective.std, dict)
        found.append(noise.effective.std)
    assert found[0] != found[1]
    for name, constant in choice.constants.items():
        assert constant == pytest.approx(fmean(one[name] for one in found), rel=1e-12)
    assert any(constant > 0 for constant in choice.constants.values())
    ours, plain = study._plan(COPIES, choice), study._plan(contender_named("copies-plain"), choice)
    made = study.trainer.recipe_of(ours.stretch(0))
    assert (made.noise, made.noise_unit, made.width) == (choice.constants, "theory", signal.grow[0].width)
    level = plain.stretch(0).noise
    assert isinstance(level, dict)  # of plain transfer, whose noise is half of the extrapolated one
    assert level == pytest.approx({name: constant / 2 for name, constant in choice.constants.items()})


@pytest.mark.slow
def test_an_extrapolated_value_has_the_plain_one_beside_it(tmp_path: Path) -> None:
    study = prepared(tmp_path / "run", contenders=["continued", "copies-plain"])
    study.trainer.make_folder()
    choice = Choice(0.01, 0.03, 0.2, "init", plain=(0.1, 0.02))
    study.sentences = ["plain transfer has 0.1"]
    summary = study._summarise(choice)
    copies, plain = runs_of(summary, "copies"), runs_of(summary, "copies-plain")
    assert (copies.noise, copies.lr) == (0.2, 0.03)
    assert (plain.noise, plain.lr) == (0.1, 0.02)
    assert copies.curves != plain.curves
    assert summary.notes == ["plain transfer has 0.1"]
    assert any("plain transfer, not extrapolated" in sentence for sentence in summary.sentences)


@pytest.mark.slow
def test_two_small_widths_are_tuned_narrowest_first_and_what_moved_is_said(tmp_path: Path) -> None:
    how = settings(widths=[4, 2], lrs=[0.01, 0.02], grown_lrs=[0.02, 0.05], noises=[0.1], contenders=["copies"])
    summary = run_quietly(tmp_path / "run", small(), replace(how, seeds=1))
    assert [(sweep.name, sweep.start) for sweep in summary.tuned] == [
        ("sweep-1-width-4", None),
        ("sweep-2-width-2", 2),
        ("sweep-2-width-4", 4),
    ]
    assert any("width 2" in sentence and "width 4" in sentence for sentence in summary.notes)


@pytest.mark.slow
def test_zero_noise_chosen_means_that_the_upscaled_model_is_the_base_model_continued(tmp_path: Path) -> None:
    study = prepared(tmp_path / "run", contenders=["continued", "copies-without-noise", "copies-own"], seeds=2)
    study.trainer.make_folder()
    summary = study._summarise(Choice(0.01, 0.02, 0.0, "init", own_lr=0.01))
    copies = runs_of(summary, "copies")
    assert copies.curves == runs_of(summary, "copies-without-noise").curves
    assert copies.label == "(e) grown from copies, width 16, for which the sweep chose no noise"
    assert not list((tmp_path / "run" / "stretches").glob("width-16-*"))
    assert names_of(summary) == ["base", "continued", "copies-without-noise", "copies"]
    assert summary.sentences[0].startswith("Growing does not pay here")


@pytest.mark.slow  # test_protocol has growth by heads for every change
def test_gpt_2_grows_by_heads_through_the_whole_comparison(tmp_path: Path) -> None:
    heads = Spec("mupscale.models.GPT2", {"vocab": 11, "context": 6, "layers": 1, "head_dim": 4})
    sizes: dict[str, Any] = {"width": {"heads": 2}, "base": {"heads": 1}, "init_at": {"heads": 1}}
    gpt = small("gpt2-heads", model=heads, **sizes, steps=20, growth={"at": 8, "width": {"heads": 4}})
    summary = run_quietly(tmp_path / "run", gpt, settings(widths=[{"heads": 1}], seeds=1))
    assert [sweep.width for sweep in summary.tuned] == [{"heads": 2}]
    assert runs_of(summary, "copies").width == {"heads": 4}
    assert len(list((tmp_path / "run" / "stretches").glob("width-heads1-lr-*"))) == 1
    assert read(tmp_path / "run") == summary


@pytest.mark.slow
def test_what_cannot_be_stacked_is_trained_one_run_at_a_time(tmp_path: Path) -> None:
    said: list[str] = []
    rms = small(optimizer=Spec("torch.optim.RMSprop", {"lr": 0.01}), steps=16, growth={"at": 8})
    how = settings(seeds=2, noises=[0.1], contenders=["continued"], grown_lrs=[0.01])
    summary = run_paper(rms, how, tmp_path / "run", note=said.append)
    assert any("one run at a time" in text for text in said)
    assert all(curve.status == "finished" for curve in runs_of(summary, "copies").curves)
    assert facts(run_paper(rms, how, tmp_path / "run", note=quiet)) == facts(summary)


@pytest.mark.slow
def test_the_measure_may_be_the_held_out_loss(tmp_path: Path) -> None:
    how = settings(measure="held-out", seeds=1, contenders=["copies"])
    summary = run_quietly(tmp_path / "run", small(), how)
    trial = summary.tuned[0].best
    assert summary.tuned[0].measure == "held-out"
    assert trial.loss != pytest.approx(fmean(loss for _, loss in trial.curve[-3:]), rel=1e-6)
    assert names_of(summary) == ["base", "copies"]


@pytest.mark.slow
@pytest.mark.parametrize("how", [{"sampler": "random", "trials": 5}, {"pruner": "halving"}], ids=["random", "pruned"])
def test_sweeps_may_draw_their_trials_or_stop_some(tmp_path: Path, how: dict[str, Any]) -> None:
    asked = settings(**how, grown_lrs=[0.001, 0.01, 0.05], seeds=1, contenders=["copies"])
    summary = run_quietly(tmp_path / "run", small(steps=40, growth={"at": 20}), asked)
    (search,) = summary.tuned
    assert search.sampler == how.get("sampler", "grid")
    assert len(search.trials) == how.get("trials", 9)
    assert any(trial.status == "stopped" for trial in search.trials) == ("pruner" in how)
    assert (runs_of(summary, "copies").lr, runs_of(summary, "copies").noise) == (search.lr, search.noise)


# ------------------------------------------------------------------------------------------------ others on request


@pytest.mark.slow
def test_net2net_and_naive_widening_on_request(tmp_path: Path) -> None:
    study = prepared(tmp_path / "run", contenders=["net2net", "naive-widening"], noises=[0.1], grown_lrs=[0.02, 0.04])
    models = train(study, Choice(0.01, 0.02, 0.3, "init"))
    net2net, naive = models["net2net"], models["naive-widening"]
    (swept,) = study.sweeps
    assert (swept.name, swept.width, swept.start) == ("net2net-width-16", 16, 8)
    assert (net2net.noise, net2net.lr) == (swept.best.noise, swept.best.lr)
    start = from_base(study, 0.01, 0, width=16, how="net2net", lr=net2net.lr, noise=net2net.noise)
    assert net2net.curves[0].losses == pytest.approx(trained(tmp_path / "n", **start), **EXACT)
    start = from_base(study, 0.01, 0, width=16, base=8, how="naive", lr=0.02, noise=0.3)
    assert naive.curves[0].losses == pytest.approx(trained(tmp_path / "w", **start), **EXACT)
    (run,) = (tmp_path / "run" / "stretches").glob("width-16-naive-*")
    made = Recipe.from_json(json.loads((run / "recipe.json").read_text()))
    narrow, wide = small().family().plan(8), made.family().plan(16)
    assert all(wide.parameters[name].rule == narrow.parameters[name].rule for name in narrow.parameters)
    assert any(entry.rule.in_ == 2 for entry in narrow.parameters.values())
    stages = [stage.name for stage in study._stages()]
    assert stages == ["base", "copies", "naive-widening", "net2net-width-16", "net2net"]


# ------------------------------------------------------------------------------------------------ what goes wrong


@pytest.mark.parametrize(
    ("of", "changes"),
    [
        (small(model=Spec("paper_runs.Brittle", {"limit": 6}), optimizer=SGD), {}),
        # a training loss that is finite, and what is measured is not
        (small(data=Spec("paper_runs.Untested")), {"measure": "held-out"}),
    ],
    ids=["always", "held out"],
)
def test_a_base_model_that_diverges_is_one_sentence(of: Recipe, changes: dict[str, Any], tmp_path: Path) -> None:
    study = prepared(tmp_path / "run", of, **changes)
    with pytest.raises(MupscaleError, match=r"base model of width 8 diverged with every seed at learning rate 0.1"):
        train(study, Choice(0.1, 0.1, 0.1, "init"))


@pytest.mark.slow
def test_a_seed_with_which_the_base_model_diverges_is_left_out(tmp_path: Path) -> None:
    unlucky = small(data=Spec("paper_runs.Unlucky"))
    study = prepared(tmp_path / "run", unlucky, seeds=3, contenders=["continued"])
    study.trainer.make_folder()
    summary = study._summarise(Choice(0.01, 0.02, 0.1, "init"))
    base, copies = runs_of(summary, "base"), runs_of(summary, "copies")
    assert [curve.status for curve in base.curves] == ["finished", "diverged", "finished"]
    assert [curve.seed for curve in copies.curves] == [0, 2]
    assert any("base: 1 of 3 seeds diverged" in sentence for sentence in summary.notes)


def test_a_small_base_model_that_diverges_is_one_sentence(tmp_path: Path) -> None:
    broken = small(optimizer=Spec("torch.optim.SGD", {"lr": 0.1}))
    with pytest.raises(MupscaleError, match="small base model of width 4 diverged at learning rate 1e"):
        run_quietly(tmp_path / "run", broken, settings(lrs=[1e200]))


@pytest.mark.parametrize("kind", [pytest.param("gpt2-heads", marks=pytest.mark.slow), "mlp"])
def test_the_embeddings_factor_is_tuned_at_the_small_width_and_taken_along(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sweep 1 tries each factor with each rate; all that is trained afterwards has the best one."""

    def scored(job: SweepJob, *_: Any, **__: Any) -> Sweep:
        """A sweep whose losses are read off the recipes: the MLP has no embeddings to train."""
        losses = {cell: 1 / job.recipes(cell)[0].rules.embeddings + cell.lr for cell in job.space.cells}
        return Sweep(job.name, [Tried(*cell, [x]) for cell, x in losses.items()], second=job.space.second)

    if kind == "mlp":
        monkeypatch.setattr(paper, "run_sweep", scored)
        monkeypatch.setattr(PaperStudy, "_train_small", lambda *_: None)
    how = settings(lrs=[0.01, 0.02], embeddings=[0.5, 8.0], grown_lrs=[0.02], noises=[0.3])
    tuned = PaperStudy(small(kind), replace(how, storage=f"journal:{tmp_path}/log"), tmp_path / "run", quiet)
    tuned.tune()
    first, second = tuned.sweeps
    losses = {trial.cell: trial.loss or 0 for trial in first.trials}
    assert losses.keys() == {(lr, factor) for lr in (0.01, 0.02) for factor in (0.5, 8.0)}
    assert len(set(losses.values())) == 4
    assert tuned.recipe.rules.embeddings == min(losses, key=lambda cell: losses[cell]).noise
    assert (first.second, second.second) == ("embeddings", "noise")
    assert tuned.trainer.recipe_of(tuned.system.base_model(0.01, 0)).rules == tuned.recipe.rules
