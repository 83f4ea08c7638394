"""A whole run of the method: every number in its summary is that of an ordinary training run, and costs are equal."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch

from method_runs import BASE_STEPS, STEPS, WIDE_STEPS, facts, quiet, run_quietly, settings, small
from mupscale.growth.noise import SignalNoise
from mupscale.method.contender_training import train_contenders
from mupscale.method.dry_run import estimate_run, outline_stages, short_flops
from mupscale.method.method_run import MethodRun
from mupscale.method.other_widenings import check_random_copies, load_trained
from mupscale.method.pipeline import run_method
from mupscale.method.protocol import Protocol
from mupscale.method.settings import Method
from mupscale.method.summary import Summary
from mupscale.method.tuning import Tuned, tune
from mupscale.system.errors import MupscaleError
from mupscale.system.seeds import derive
from mupscale.train import Growth, Recipe, Schedule, Seeds, Spec, run_recipe
from small_runs import ADAMW, column, metrics, recipe

EXACT = {"rel": 0, "abs": 1e-9}
LRS = [0.01, 0.02]
NOISES = [0.02, 0.05]  # of which the first helps these models a little


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("method") / "run"


@pytest.fixture(scope="module")
def done(folder: Path) -> Summary:
    torch.set_num_threads(1)
    return run_quietly(folder, small(), settings(lrs=LRS, noises=NOISES))


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Tuned:
    """What the sweeps find, for tests that put other learning rates into it."""
    torch.set_num_threads(1)
    run = MethodRun(small(), settings(lrs=[], seeds=1), tmp_path_factory.mktemp("tuned") / "run", quiet)
    run.open()
    return tune(run)


def trained(out: Path, **changes: Any) -> list[float]:
    """The training losses, step by step, of `train` with a recipe written by hand."""
    optimizer = Spec(ADAMW.class_path, {**ADAMW.init_args, "lr": changes.pop("lr")})
    run_recipe(recipe(out, base=4, init_at=4, optimizer=optimizer, **changes))
    return [float(loss) for loss in column(out, "loss")]


def from_base(folder: Path, seed: int, **changes: Any) -> dict[str, Any]:
    """What a run that starts from a base model of the method has in its recipe."""
    seeds = Seeds(init=seed, data=seed + 10_000, noise=seed, dropout=seed)
    return {"start": str(folder / "base" / f"seed-{seed}"), "seeds": seeds, "steps": WIDE_STEPS, **changes}


# ------------------------------------------------------------------------------------------------ what is in the folder


def test_everything_is_in_the_folder(done: Summary, folder: Path) -> None:
    kept = {path.name for path in folder.iterdir()}
    models = {"base", "scratch", "scratch-drop", "continued", "upscaled", "small"}
    assert models | {"method.json", "stages.json", "summary.json", "study.db"} <= kept
    for name in models - {"small"}:
        assert sorted(path.name for path in (folder / name).iterdir()) == ["seed-0", "seed-1"]
    assert metrics(folder / "small" / "width-4" / "seed-0", "end")[0]["status"] == "finished"
    assert not list(folder.rglob("*.tmp"))
    assert not list(folder.rglob("stacks/*"))


def test_the_summary_is_read_back_as_it_was(done: Summary, folder: Path) -> None:
    assert json.dumps(Summary.load(folder).to_json()) == json.dumps(done.to_json())
    assert done.coords is not None
    assert done.recipe == {**small().to_json(), "out": "."}


def test_runs_come_in_the_order_of_the_comparison(done: Summary) -> None:
    assert [runs.name for runs in done.runs] == ["base", "scratch", "scratch-drop", "continued", "exact", "upscaled"]
    assert [stage.name for stage in done.stages] == [
        "sweep-1-width-4",
        "small-width-4",
        "sweep-2-width-4",
        "base",
        "scratch",
        "continued",
        "upscaled",
    ]


# ------------------------------------------------------------------------------------------------ the numbers


def test_the_choice_is_the_best_of_the_sweeps(done: Summary) -> None:
    first, second = done.sweeps
    lowest = min(second.trials, key=lambda trial: trial.loss or 9.0)
    assert (done.choice.lr, done.choice.noise) == (lowest.lr, lowest.noise)
    assert done.choice.noise > 0
    assert done.choice.base_lr == min(first.trials, key=lambda trial: trial.loss or 9.0).lr
    assert done.choice.plain is None
    assert done.choice.constants is None


def test_a_trial_of_sweep_2_is_an_ordinary_run(done: Summary, folder: Path, tmp_path: Path) -> None:
    """Upscaling procedure, Step 0: the small base model, upscaled with a cell's noise and learning rate."""
    trial = done.sweeps[1].best
    start = from_base(folder, 0, width=8, lr=trial.lr, noise=trial.noise)
    losses = trained(tmp_path / "trial", **{**start, "start": str(folder / "small" / "width-4" / "seed-0")})
    assert trial.loss == pytest.approx(fmean(losses[WIDE_STEPS * 9 // 10 :]), **EXACT)
    assert [loss for _, loss in trial.curve] == pytest.approx(losses, **EXACT)


def test_the_base_model_is_an_ordinary_run(done: Summary, tmp_path: Path) -> None:
    base = done.get("base")
    assert base is not None
    for seed, curve in enumerate(base.curves):
        same = Seeds(seed, seed, seed, seed)
        losses = trained(tmp_path / str(seed), width=8, steps=BASE_STEPS, seeds=same, lr=done.choice.base_lr)
        assert curve.losses == pytest.approx(losses, **EXACT)


@pytest.mark.parametrize("name", ["upscaled", "exact"])
def test_upscaled_models_are_ordinary_runs_with_and_without_noise(
    done: Summary, folder: Path, tmp_path: Path, name: str
) -> None:
    """Steps 2 to 4; and (d), read off the narrow model, is what the wide one does (Equivalence at zero noise)."""
    runs = done.get(name)
    assert runs is not None
    assert (runs.width, runs.steps, runs.lr) == (16, WIDE_STEPS, done.choice.lr)
    assert runs.noise == (done.choice.noise if name == "upscaled" else 0)
    for curve in runs.curves:
        out = tmp_path / str(curve.seed)
        losses = trained(out, **from_base(folder, curve.seed, width=16, lr=runs.lr, noise=runs.noise))
        assert curve.steps == list(range(1, WIDE_STEPS + 1))
        assert curve.losses == pytest.approx(losses, **EXACT)
        assert curve.held_out_steps[-1] == WIDE_STEPS
        assert curve.held_out_losses[-1] == pytest.approx(column(out, "loss", "eval")[-1], **EXACT)


@pytest.mark.slow
def test_from_scratch_with_the_drop_of_the_upscaled_run(done: Summary, tmp_path: Path) -> None:
    """(b): the rate drops after the same part of the run."""
    plain, drop = done.get("scratch"), done.get("scratch-drop")
    assert plain is not None
    assert drop is not None
    assert drop.drop == round(drop.steps * BASE_STEPS / STEPS)
    assert drop.drop_lr == done.choice.lr
    grow = [{"at": drop.drop, "width": 16, "lr": drop.drop_lr}]
    values = recipe(tmp_path / "b", width=16, base=4, init_at=4, steps=drop.steps).to_json()
    values["optimizer"]["init_args"]["lr"] = done.choice.base_lr
    run_recipe(Recipe.from_json({**values, "grow": grow}))
    assert drop.curves[0].losses == pytest.approx(column(tmp_path / "b", "loss"), **EXACT)
    assert plain.curves[0].losses[: drop.drop] == drop.curves[0].losses[: drop.drop]
    assert plain.curves[0].losses[drop.drop + 1] != drop.curves[0].losses[drop.drop + 1]


@pytest.mark.slow
def test_baselines_with_the_learning_rate_that_is_best_without_noise(tmp_path: Path) -> None:
    """(b′), (c′), (e′); and where the upscaled model keeps the base model's rate, (b) is (a) and not trained again."""
    run = MethodRun(small(), settings(lrs=LRS, seeds=1), tmp_path / "run", lambda text: None)
    run.open()
    tuned = tune(run)
    lr = tuned.choice.base_lr
    changed = replace(tuned, choice=replace(tuned.choice, lr=lr), zero_lr=lr / 8)
    models = {runs.name: runs for runs in train_contenders(run, changed)[0]}
    plain, drop, own = (models[name] for name in ("scratch", "scratch-drop", "scratch-own"))
    assert drop.curves == plain.curves
    assert not (tmp_path / "run" / "scratch-drop").exists()
    assert (drop.drop_lr, own.drop_lr, own.drop) == (lr, lr / 8, drop.drop)
    grow = [{"at": own.drop, "width": 16, "lr": lr / 8}]
    values = recipe(tmp_path / "b", width=16, base=4, init_at=4, steps=own.steps).to_json()
    values["optimizer"]["init_args"]["lr"] = lr
    run_recipe(Recipe.from_json({**values, "grow": grow}))
    assert own.curves[0].losses == pytest.approx(column(tmp_path / "b", "loss"), **EXACT)
    assert (models["continued"].lr, models["continued-own"].lr) == (lr, lr / 8)
    assert models["continued"].curves != models["continued-own"].curves
    rest = models["continued-late"]
    assert (rest.lr, rest.drop, rest.drop_lr) == (lr, rest.steps // 2, lr / 8)
    start = from_base(tmp_path / "run", 0, width=8, lr=lr)
    losses = trained(tmp_path / "c", **{**start, "steps": rest.steps}, grow=[Growth(at=rest.drop, width=8, lr=lr / 8)])
    assert rest.curves[0].losses == pytest.approx(losses, **EXACT)
    late = models["upscaled-own"]
    assert (late.lr, late.drop, late.drop_lr, late.noise) == (lr, WIDE_STEPS // 2, lr / 8, tuned.choice.noise)
    start = from_base(tmp_path / "run", 0, width=16, lr=lr, noise=late.noise)
    losses = trained(tmp_path / "e", **start, grow=[Growth(at=late.drop, width=16, lr=lr / 8)])
    assert late.curves[0].losses == pytest.approx(losses, **EXACT)
    assert late.curves[0].losses[: late.drop] == models["upscaled"].curves[0].losses[: late.drop]
    assert late.curves[0].losses[late.drop + 1] != models["upscaled"].curves[0].losses[late.drop + 1]


OWN = {"scratch-own", "continued-own", "continued-late", "upscaled-own"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("zero", "named"), [(0.05, False), (0.02, True), pytest.param(0.1, True, marks=pytest.mark.slow)]
)
def test_an_extrapolated_rate_and_the_grid_s_next_to_it_are_not_trained_apart(
    tuned: Tuned, tmp_path: Path, zero: float, named: bool
) -> None:
    """0.06 is between two rates of the grid, 0.05 the nearer: with it all would be trained twice for nothing."""
    method = settings(upscaled_lrs=[0.02, 0.05, 0.1], lrs=[], seeds=1)
    run = MethodRun(small(), method, tmp_path / "run", quiet)
    run.open()
    changed = replace(tuned, choice=replace(tuned.choice, lr=0.06, noise=1.0), zero_lr=zero)
    names = {runs.name for runs in train_contenders(run, changed)[0]}
    assert {"scratch-drop", "continued", "upscaled"} <= names
    assert names & OWN == (OWN if named else set())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("baselines", "own"),
    [
        (["scratch"], set()),
        (["scratch-drop"], {"scratch-own", "upscaled-own"}),
        (["continued"], {"continued-own", "continued-late", "upscaled-own"}),
    ],
)
def test_the_upscaled_model_has_the_rates_that_its_baselines_have(
    tuned: Tuned, tmp_path: Path, baselines: list[str], own: set[str]
) -> None:
    method = settings(upscaled_lrs=[0.02, 0.05], lrs=[], seeds=1, baselines=baselines)
    run = MethodRun(small(), method, tmp_path / "run", quiet)
    run.open()
    changed = replace(tuned, choice=replace(tuned.choice, lr=0.05, noise=1.0), zero_lr=0.02)
    names = {runs.name for runs in train_contenders(run, changed)[0]}
    assert names & OWN == own
    planned = {stage.name: stage.runs for stage in outline_stages(run.protocol, method)}
    assert planned["upscaled"] == 1 + bool(own)


# ------------------------------------------------------------------------------------------------ what they cost


def cost(summary: Summary, name: str) -> float:
    """FLOPs of one run."""
    runs = summary.get(name)
    assert runs is not None
    assert runs.flops_per_step is not None
    return runs.flops_per_step * runs.steps


def test_baselines_cost_what_they_are_compared_with(done: Summary) -> None:
    wide, narrow = cost(done, "upscaled") / WIDE_STEPS, cost(done, "base") / BASE_STEPS
    assert wide > 2 * narrow
    whole = cost(done, "base") + cost(done, "upscaled")
    assert abs(cost(done, "scratch") - whole) <= wide
    assert cost(done, "scratch-drop") == cost(done, "scratch")
    assert abs(cost(done, "continued") - cost(done, "upscaled")) <= narrow


def test_a_stage_costs_what_its_runs_say(done: Summary, folder: Path) -> None:
    stages = {stage.name: stage.flops for stage in done.stages}
    for name, parts in {"base": ["base"], "scratch": ["scratch", "scratch-drop"], "upscaled": ["upscaled"]}.items():
        ends = [metrics(folder / part / f"seed-{seed}", "end")[0]["flops"] for part in parts for seed in (0, 1)]
        assert stages[name] == sum(ends)
    assert all(stage.seconds > 0 for stage in done.stages)


def test_a_dry_run_tells_what_the_run_will_cost_and_writes_nothing(done: Summary, tmp_path: Path) -> None:
    recipe, method = small(), settings(lrs=LRS, noises=NOISES)
    table = estimate_run(recipe, method, tmp_path / "never")
    assert not list(tmp_path.iterdir())
    protocol = Protocol(recipe, tmp_path)
    trained = {"scratch": 2 / 3, "continued": 1 / 3, "upscaled": 1 / 2}  # one rate is best for all
    total = 0.0
    for stage, planned in zip(done.stages, outline_stages(protocol, method), strict=True):
        assert stage.name == planned.name
        each = protocol.flops_per_step(planned.width)
        assert each is not None
        cost = each * planned.steps * planned.runs
        assert stage.flops == pytest.approx(cost * trained.get(stage.name, 1))
        (line,) = [line for line in table.splitlines() if line.startswith(f"{stage.name} ")]
        assert short_flops(cost) in line
        total += cost
    assert short_flops(total) in table.splitlines()[-1]


def test_a_dry_run_of_what_cannot_be_counted_or_stacked(tmp_path: Path) -> None:
    rms = Spec("torch.optim.RMSprop", {"lr": 0.01})
    table = estimate_run(small(optimizer=rms), settings(baselines=["continued"], seeds=1), tmp_path / "never")
    assert table.splitlines()[-1].startswith("all")


# ------------------------------------------------------------------------------------------------ other ways to run it


@pytest.mark.slow
def test_with_a_schedule_upscaling_without_noise_is_a_run_of_its_own(tmp_path: Path) -> None:
    """The first steps of a longer cosine are not those of a short one."""
    cosine = small(schedule=Schedule("cosine"), steps=30, growth={"at": 10})
    method = settings(seeds=1, baselines=["continued"])
    summary = run_quietly(tmp_path / "run", cosine, method)
    exact = summary.get("exact")
    assert exact is not None
    begun = from_base(tmp_path / "run", 0, width=16, lr=exact.lr, steps=20, schedule=Schedule("cosine"))
    assert exact.curves[0].losses == pytest.approx(trained(tmp_path / "wide", **begun), **EXACT)
    assert [stage.name for stage in summary.stages] == [
        planned.name for planned in outline_stages(Protocol(cosine, tmp_path), method) if planned.name != "upscaled"
    ]  # where noise 0 is chosen, (e) is (d)


SGD = Spec("torch.optim.SGD", {"lr": 0.02})
SIGNAL: dict[str, tuple[Recipe, Method]] = {
    "mlp": (
        small(growth={"at": 20, "unit": "signal"}, steps=80),
        settings(lrs=[0.01], noises=[0.05, 0.2], sweep_seeds=2, seeds=1, baselines=["scratch"]),
    ),
    "resnet": (
        small("resnet", width=4, base=2, init_at=2, batch=16, steps=12, optimizer=SGD,
              growth={"at": 4, "width": 8, "unit": "signal"}),
        settings(widths=[2], upscaled_lrs=[0.02], noises=[0.1], sweep_seeds=2, seeds=1, baselines=[]),
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", ["mlp", pytest.param("resnet", marks=pytest.mark.slow)])
def test_signal_noise_is_tuned_small_and_its_constants_transferred(tmp_path: Path, kind: str) -> None:
    """Appendix 'Alternative algorithm: signal-normalized noise', 'Modification to Step 0'."""
    signal, method = SIGNAL[kind]
    summary = run_quietly(tmp_path / "run", signal, method)
    choice, upscaled, small_width = summary.choice, summary.get("upscaled"), method.widths[0]
    assert choice.unit == "signal"
    assert choice.noise in method.noises
    assert choice.constants is not None
    assert upscaled is not None
    assert upscaled.noise == choice.constants
    found = []
    for seed in (0, 1):
        noise, trained_at = SignalNoise(choice.noise), replace(signal, width=small_width, grow=[])
        model = load_trained(replace(trained_at, out=str(tmp_path / f"run/small/width-{small_width}/seed-{seed}")))
        wide = Protocol(signal, tmp_path).upscaled_width(small_width)
        signal.family().upscale(model, width=wide, noise=noise, seed=derive(seed, "start"))
        assert noise.effective is not None
        assert isinstance(noise.effective.std, dict)
        found.append(noise.effective.std)
    assert found[0] != found[1]
    for name, constant in choice.constants.items():
        assert constant == pytest.approx(fmean(one[name] for one in found), rel=1e-12)
    assert any(constant > 0 for constant in choice.constants.values())
    made = Recipe.from_json(json.loads((tmp_path / "run/upscaled/seed-0/recipe.json").read_text()))
    assert (made.noise, made.noise_unit, made.width) == (choice.constants, "theory", signal.grow[0].width)


@pytest.mark.slow
def test_signal_noise_extrapolated_from_two_widths_has_its_plain_constants_beside_it(tmp_path: Path) -> None:
    signal = small(growth={"at": 20, "unit": "signal"}, steps=80)
    method = settings(widths=[2, 4], upscaled_lrs=[0.02, 0.05, 0.1], noises=[0.1, 0.3, 1.0], seeds=1, baselines=[])
    summary = run_quietly(tmp_path / "run", signal, method)
    choice, plain, upscaled = summary.choice, summary.get("upscaled-plain"), summary.get("upscaled")
    assert choice.plain is not None
    assert choice.constants is not None
    assert upscaled is not None
    assert plain is not None
    assert upscaled.noise == choice.constants
    assert isinstance(plain.noise, dict)
    for name, constant in plain.noise.items():
        assert constant == pytest.approx(choice.constants[name] * choice.plain[0] / choice.noise)


@pytest.mark.slow
def test_two_small_widths_transfer_the_extrapolated_value_with_the_plain_one_beside_it(tmp_path: Path) -> None:
    method = settings(widths=[4, 2], upscaled_lrs=[0.02, 0.05, 0.1], noises=[0.1, 0.3, 1.0], seeds=1)
    method = replace(method, baselines=["continued"])
    summary = run_quietly(tmp_path / "run", small(steps=40, growth={"at": 20}), method)
    choice, upscaled, plain = summary.choice, summary.get("upscaled"), summary.get("upscaled-plain")
    best = summary.sweeps[-1].best
    assert [sweep.start for sweep in summary.sweeps] == [2, 4]
    assert choice.plain == (best.noise, best.lr)
    assert choice.plain != (choice.noise, choice.lr)
    assert upscaled is not None
    assert plain is not None
    assert (upscaled.noise, upscaled.lr) == (choice.noise, choice.lr)
    assert (plain.noise, plain.lr) == choice.plain
    assert any("plain transfer has" in sentence for sentence in summary.warnings)
    assert any("plain transfer, not extrapolated" in sentence for sentence in summary.verdict)


def test_zero_noise_selected_means_that_upscaling_does_not_pay(tmp_path: Path) -> None:
    method = settings(noises=[300.0], baselines=["continued"])
    summary = run_quietly(tmp_path / "run", small(), method)
    exact, upscaled = summary.get("exact"), summary.get("upscaled")
    assert exact is not None
    assert upscaled is not None
    assert summary.choice.noise == 0
    assert upscaled.curves == exact.curves
    assert upscaled.label.startswith("(e)")
    assert not (tmp_path / "run" / "upscaled").exists()
    assert any("zero noise: upscaling does not pay here" in sentence for sentence in summary.warnings)
    assert summary.verdict[0].startswith("Growing does not pay here")


@pytest.mark.slow  # test_protocol has growth by heads for every change
def test_gpt_2_grows_by_heads_through_the_whole_method(tmp_path: Path) -> None:
    heads = Spec("mupscale.models.GPT2", {"vocab": 11, "context": 6, "layers": 1, "head_dim": 4})
    sizes: dict[str, Any] = {"width": {"heads": 2}, "base": {"heads": 1}, "init_at": {"heads": 1}}
    gpt = small("gpt2-heads", model=heads, **sizes, steps=20, growth={"at": 8, "width": {"heads": 4}})
    summary = run_quietly(tmp_path / "run", gpt, settings(widths=[{"heads": 1}], seeds=1))
    assert [sweep.width for sweep in summary.sweeps] == [{"heads": 2}]
    assert summary.get("upscaled").width == {"heads": 4}  # type: ignore[union-attr]
    assert (tmp_path / "run" / "small" / "width-heads1" / "seed-0").is_dir()
    assert Summary.load(tmp_path / "run") == Summary.from_json(json.loads(json.dumps(summary.to_json())))


@pytest.mark.slow
def test_what_cannot_be_stacked_is_trained_one_run_at_a_time(tmp_path: Path) -> None:
    said: list[str] = []
    rms = small(optimizer=Spec("torch.optim.RMSprop", {"lr": 0.01}), steps=16, growth={"at": 8})
    method = settings(seeds=2, noises=[0.1], baselines=["continued"], upscaled_lrs=[0.01])
    summary = run_method(rms, method, tmp_path / "run", note=said.append)
    assert any("one run at a time" in text for text in said)
    one = summary.get("upscaled")
    assert one is not None
    assert all(curve.status == "finished" for curve in one.curves)
    assert facts(run_quietly(tmp_path / "run", rms, method)) == facts(summary)


@pytest.mark.slow
def test_the_measure_may_be_the_held_out_loss(tmp_path: Path) -> None:
    summary = run_quietly(tmp_path / "run", small(steps=30), settings(measure="held-out", seeds=1, baselines=[]))
    trial = summary.sweeps[0].best
    assert summary.sweeps[0].measure == "held-out"
    assert trial.loss != pytest.approx(fmean(loss for _, loss in trial.curve[-3:]), rel=1e-6)
    assert [runs.name for runs in summary.runs] == ["base", "upscaled"]


# ------------------------------------------------------------------------------------------------ others on request


def test_net2net_and_naive_widening_on_request(tmp_path: Path) -> None:
    method = settings(seeds=1, baselines=["net2net", "naive"], noises=[0.1], upscaled_lrs=[0.02, 0.04])
    summary = run_quietly(tmp_path / "run", small(steps=40, growth={"at": 20}), method)
    net2net, naive = summary.get("net2net"), summary.get("naive")
    assert net2net is not None
    assert naive is not None
    swept = summary.sweeps[-1]
    assert (swept.name, swept.width, swept.start) == ("net2net-width-16", 16, 8)
    assert (net2net.noise, net2net.lr) == (swept.best.noise, swept.best.lr)
    assert all(curve.status == "finished" for curve in (*net2net.curves, *naive.curves))
    made = Recipe.from_json(json.loads((tmp_path / "run/naive/seed-0/recipe.json").read_text()))
    narrow, wide = small().family().plan(8), made.family().plan(16)
    assert all(wide.parameters[name].rule == narrow.parameters[name].rule for name in narrow.parameters)
    assert any(entry.rule.in_ == 2 for entry in narrow.parameters.values())
    assert [stage.name for stage in summary.stages][-3:] == ["naive", "net2net-width-16", "net2net"]
    assert (summary.costs["tuning_speedup"] or 0.0) > 2  # over tuning at the large width, as Net2Net does
    assert not any("small width 8" in sentence for sentence in summary.warnings)


def test_net2net_refuses_a_model_with_norms(tmp_path: Path) -> None:
    gpt = small("gpt2-heads", width=8, base=4, init_at=None)
    with pytest.raises(MupscaleError, match="leave net2net out"):
        run_quietly(tmp_path / "run", gpt, settings(baselines=["net2net"]))
    assert not (tmp_path / "run").exists()  # before anything is trained
    with pytest.raises(
        MupscaleError, match=r"a norm over the width computes \('.*'\).*: leave net2net out of method.baselines"
    ):
        check_random_copies(gpt, 16)


# ------------------------------------------------------------------------------------------------ what goes wrong


def test_all_trials_diverged_is_one_sentence(tmp_path: Path) -> None:
    broken = small(optimizer=Spec("torch.optim.SGD", {"lr": 0.1}))
    with pytest.raises(MupscaleError, match=r"sweep-2-width-4: all 4 trials diverged.*below 1e"):
        run_quietly(tmp_path / "run", broken, settings(upscaled_lrs=[1e150, 1e160], noises=[0.1]))


def test_a_base_model_that_always_diverges_is_one_sentence(tmp_path: Path) -> None:
    """The small one does not, so that only the large one is in the way."""
    broken = small(model=Spec("method_runs.Brittle", {"limit": 6}), optimizer=Spec("torch.optim.SGD", {"lr": 0.1}))
    with pytest.raises(MupscaleError, match=r"base model of width 8 diverged with every seed at learning rate 0.1"):
        run_quietly(tmp_path / "run", broken, settings(widths=[2], noises=[0.1]))


@pytest.mark.slow
def test_a_seed_with_which_the_base_model_diverges_is_left_out(tmp_path: Path) -> None:
    unlucky = small(data=Spec("method_runs.Unlucky"), steps=30)
    summary = run_quietly(tmp_path / "run", unlucky, settings(seeds=3, baselines=["continued"]))
    upscaled, base = summary.get("upscaled"), summary.get("base")
    assert upscaled is not None
    assert base is not None
    assert [curve.status for curve in base.curves] == ["finished", "diverged", "finished"]
    assert [curve.seed for curve in upscaled.curves] == [0, 2]
    assert any("base: 1 of 3 seeds diverged" in sentence for sentence in summary.warnings)


def test_a_small_base_model_that_diverges_is_one_sentence(tmp_path: Path) -> None:
    broken = small(optimizer=Spec("torch.optim.SGD", {"lr": 1e200}))
    with pytest.raises(MupscaleError, match="small base model of width 4 diverged at learning rate 1e"):
        run_quietly(tmp_path / "run", broken)


@pytest.mark.slow
def test_a_width_too_small_to_trust_is_warned_of(done: Summary) -> None:
    assert any("width 4 may be too small to trust" in sentence for sentence in done.warnings)
