"""Transfer checks and comparisons of rule sets: verdicts on made-up numbers; real runs, cut and taken up again."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mupscale.core import RuleSet
from mupscale.study import StudySettings, compare_rules, nothing_finished, rules_table, training, transfer_check
from mupscale.study.contenders import COPIES
from mupscale.study.paper import Protocol
from mupscale.study.transfer import RULES_FILE, RuleComparison, judge_transfer, measure_transfer, rules_in_words
from mupscale.system import MupscaleError
from mupscale.train import Growth, Recipe, Spec, run_recipe
from small_runs import ADAMW, GENTLE, MLP, metrics, recipe, refused

GRID = [0.1, 0.2, 0.4, 0.8, 1.6]


def line(width: Any, best: float, xs: list[float] = GRID, **how: Any) -> dict[str, Any]:
    """Losses of three seeds with their lowest at one value. but: other losses, by value's place and seed."""
    at, height, spread, seeds = xs.index(best), how.get("height", 0.1), how.get("spread", 0.0), how.get("seeds", 3)
    losses = [[1 + height * (i - at) ** 2 + seed * spread for seed in range(seeds)] for i in range(len(xs))]
    for (place, seed), loss in how.get("but", {}).items():
        losses[place][seed] = loss
    return {"width": width, "from": width, "points": [{"x": x, "losses": losses[i]} for i, x in enumerate(xs)]}


LR, OVER, NONE = "the best learning rate", "over grown widths 128 … 256", [0.0, 1.0, 2.0]
VERDICTS: dict[str, tuple[list[dict[str, Any]], list[str]]] = {
    "it stays": ([line(128, 0.4), line(256, 0.4)], [f"{LR}, 0.4, does not move {OVER}: it transfers"]),
    "a step, with its ratio and price": (
        [line(128, 0.4, height=0.04), line(256, 0.8, height=0.04), line(512, 0.8, height=0.04)],
        [
            "taking the best learning rate of width 128, 0.4, to width 512 costs 4.0% of the loss there",
            f"{LR} moves by at most 1 grid step (×2) over grown widths 128 … 512: the optimum transfers",
        ],
    ),
    "a step that costs more": (
        [line(128, 0.4), line(256, 0.8)],
        ["*costs 10.0% of the loss there", "*the optimum does not transfer, since that costs more than 5% of the loss"],
    ),
    "a step in between": ([line(128, 0.4), line(256, 0.8), line(512, 0.4)], ["*", "*does not transfer*"]),
    "a step to the edge": (
        [line(128, 0.8, height=0.01), line(256, 1.6, height=0.01)],
        ["*", "*whether it transfers cannot be seen on the edge", "*at width 256*"],
    ),
    "to and fro, as far as it goes": (
        [line(128, 0.4), line(256, 0.2), line(512, 0.8), line(1024, 0.4)],
        ["the best learning rate of width 128, 0.4, is the best at width 1024, too", "*2 grid steps*"],
    ),
    # seeds differ from each other, and agree on the best or not
    "seeds agree": ([line(128, 0.2), line(256, 0.8, spread=0.3)], ["*", "*the optimum does not transfer"]),
    "a seed does not": (
        [line(128, 0.2), line(256, 0.8, spread=0.3, but={(1, 0): 0.9})],
        ["*", "*not every seed agrees, so the optimum may transfer"],
    ),
    "one seed is no excuse": (
        [line(128, 0.2, seeds=1), line(256, 0.8, spread=0.3, seeds=1)],
        ["*", "*the optimum does not transfer"],
    ),
    "where a seed diverged is not the best": (
        [line(128, 0.8), line(256, 0.8, but={(3, 1): None, (2, 0): 0.99})],
        ["taking the best learning rate of width 128, 0.8, to width 256 diverges there", "*at most 1 grid step*"],
    ),
    "a width where all diverged": (
        [line(128, 0.4), line(256, 0.4), line(512, 0.4, but={(i, seed): None for i in range(5) for seed in range(3)})],
        ["at width 512 every learning rate tried diverged", f"*{OVER}: it transfers"],
    ),
    "on the edge": (
        [line(128, 1.6), line(256, 1.6)],
        [
            "*whether it transfers cannot be seen on the edge",
            f"{LR} lies on the edge of the grid at width 128, 256: try a wider range",
        ],
    ),
    "on the other edge": ([line(128, 0.1), line(256, 0.1)], ["*", "*"]),
    "one width": ([line(128, 0.4)], ["*give two or more"]),
    "one value": ([line(128, 0.4, [0.4]), line(256, 0.4, [0.4])], []),
    "widths by name": (
        [line({"head_dim": 4}, 0.4), line({"head_dim": 8}, 0.4)],
        ["*over grown widths head_dim 4 … head_dim 8*"],
    ),
    "noise: more than a step": (
        [line(128, 0.2), line(256, 0.4), line(512, 0.8)],
        [
            "*costs 40.0% of the loss there",
            "the best noise moves by 2 grid steps (×2 each) over grown widths 128 … 512 (0.2 at 128, 0.4 at 256, "
            "0.8 at 512): the optimum does not transfer",
        ],
    ),
    "noise: none is no edge": ([line(128, 0.0, NONE), line(256, 0.0, NONE)], ["*"]),
    "noise: from none there is no ratio": ([line(128, 0.0, NONE), line(256, 1.0, NONE)], ["*", "*1 grid step over*"]),
}


@pytest.mark.parametrize("case", VERDICTS)
def test_the_verdict(case: str) -> None:
    """What transferring costs is said before how far the optimum moves; * stands for any words."""
    lines, wanted = VERDICTS[case]
    axis = "noise" if case.startswith("noise") else "lr"
    found = judge_transfer({"lr": [], "noise": [], axis: lines})
    assert len(found) == len(wanted)
    for one, words in zip(found, wanted, strict=True):
        assert re.fullmatch(".*".join(map(re.escape, words.split("*"))), one), one


# ---------------------------------------------------------------------------------------------- real runs

SMALL: dict[str, Any] = {"lrs": [0.001, 0.004], "noises": [0.0, 0.3], "lr": 0.004, "noise": 0.3, "seeds": 2}


def small(**changes: Any) -> Recipe:
    grown = [Growth(at=6, width=16, noise=0.1, lr=0.001)]
    return recipe(**{"optimizer": GENTLE, "steps": 14, "grow": grown, **changes})


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("check")
    return out, transfer_check(small(), widths=[16, 8], out=out, **SMALL)


def test_a_real_check_writes_its_numbers(checked: tuple[Path, dict[str, Any]]) -> None:
    out, values = checked
    assert json.loads((out / "transfer-check.json").read_text()) == values
    assert (values["times"], values["steps"], values["unit"]) == (2, 8, "init")
    assert values["fixed"] == {"lr": 0.004, "noise": 0.3}
    for axis, xs in {"lr": [0.001, 0.004], "noise": [0.0, 0.3]}.items():
        assert [(entry["width"], entry["from"]) for entry in values[axis]] == [(16, 8), (32, 16)]
        for entry in values[axis]:
            assert [point["x"] for point in entry["points"]] == xs
            assert all(math.isfinite(loss) for point in entry["points"] for loss in point["losses"])
    assert len(values["verdict"]) >= 2


def test_a_pipe_is_told_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("mupscale.system.terminal.SECONDS_BETWEEN_LINES", 0.0)
    asked: dict[str, Any] = {**SMALL, "widths": [8], "lrs": [0.004], "noises": [0.3], "seeds": 1}
    transfer_check(small(), out=tmp_path / "told", note=print, **asked)
    told = capsys.readouterr().out.splitlines()
    assert [line for line in told if not line.startswith("step ")] == [
        "width 8: 1 base model",
        "width 8 → 16: 1 trial × 1 seed",
    ]
    assert [line.split()[1] for line in told if line.startswith("step ")] == [
        *(f"{step}/6" for step in range(1, 7)),
        *(f"{step}/8" for step in range(1, 9)),
    ]
    transfer_check(small(), out=tmp_path / "silent", **asked)
    assert capsys.readouterr() == ("", "")


def test_the_shared_point_is_one_trial_and_seeds_differ(checked: tuple[Path, dict[str, Any]]) -> None:
    _, values = checked
    by_lr, by_noise = values["lr"][0]["points"][1], values["noise"][0]["points"][1]
    assert by_lr["losses"] == by_noise["losses"]
    assert len(set(by_lr["losses"])) == 2


def test_a_trial_is_what_a_single_run_gives(checked: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    out, values = checked
    protocol = Protocol(small(), "train")
    system = protocol.system(StudySettings()).smaller(8)
    small_base = system.base_model(0.002, seed=1)
    base = metrics(out / "stretches" / protocol.folder_name(small_base), "train")[-1]
    assert (base["step"], base["lr"], base["width"]) == (6, 0.002, 8)
    single = protocol.recipe_of(system.leaf(COPIES, 0.002, 0.001, 0.3, 1), out / "stretches")
    assert (single.width, single.steps, single.noise, single.grow) == (16, 8, 0.3, [])
    run_recipe(recipe(**{**vars(single), "out": str(tmp_path / "single"), "log_every": 1}))
    assert metrics(tmp_path / "single", "train")[-1]["loss"] == pytest.approx(
        values["lr"][0]["points"][0]["losses"][1], rel=1e-9
    )


def test_models_grow_as_the_recipes_do(
    checked: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A check of fresh units trains with fresh units, at any width, and varies the learning rate alone."""
    assert checked[1]["growth"] == "copies"
    trained = watched(monkeypatch)
    fresh = small(grow=[Growth(at=6, width=12, lr=0.001, how="fresh", outgoing=0.5)])
    values = transfer_check(fresh, widths=[8], lrs=[0.001], lr=0.001, seeds=1, out=tmp_path)
    assert (values["growth"], values["noise"]) == ("fresh", [])
    assert not any("noise" in sentence for sentence in values["verdict"])
    (base,), (grown,) = trained
    assert (base.width, grown.width, grown.how, grown.outgoing) == (8, 12, "fresh", 0.5)
    with pytest.raises(MupscaleError, match=r"grows by fresh units, which take no noise: leave noises and noise out"):
        transfer_check(fresh, widths=[8], out=tmp_path, **SMALL)


def test_what_is_done_is_kept_and_only_what_is_new_is_trained(
    checked: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, values = checked
    trained = watched(monkeypatch)
    more = {**SMALL, "noises": [0.0, 0.3, 1.0]}
    again = transfer_check(small(), widths=[8, 16], out=out, **more)
    assert again["lr"] == values["lr"]
    assert [point["x"] for point in again["noise"][0]["points"]] == [0.0, 0.3, 1.0]
    assert counts(trained) == [2, 2]  # one new trial at each width
    assert transfer_check(small(), widths=[8, 16], out=out, **more) == again
    assert len(trained) == 2
    again = transfer_check(small(), widths=[8], out=out, **{**SMALL, "seeds": 3})
    assert [point["losses"][:2] for point in again["lr"][0]["points"]] == [
        point["losses"] for point in values["lr"][0]["points"]
    ]
    assert counts(trained) == [2, 2, 3, 3]  # bases, of which two are read, and three trials with the new seed


@pytest.mark.slow
def test_a_check_that_was_cut_goes_on_at_the_width_where_it_was(
    tmp_path: Path, checked: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Cut(Exception): ...

    def cut(recipes: list[Recipe], _: Any) -> None:
        if recipes[0].width == 32:
            raise Cut

    with monkeypatch.context() as patched:
        watched(patched, cut)
        with pytest.raises(Cut):
            transfer_check(small(), widths=[8, 16], out=tmp_path, **SMALL)
    trained = watched(monkeypatch)
    assert transfer_check(small(), widths=[8, 16], out=tmp_path, **SMALL) == checked[1]
    assert counts(trained) == [6]


def watched(
    monkeypatch: pytest.MonkeyPatch, look: Callable[[list[Recipe], dict[str, Any]], object] = lambda *_: None
) -> list[list[Recipe]]:
    """The runs that each call of the engine is given from here on; look: is shown them, and the call's options."""
    trained, whole = list[list[Recipe]](), training.train_many

    def train(recipes: list[Recipe], **options: Any) -> Any:
        trained.append(recipes)
        look(recipes, options)
        return whole(recipes, **options)

    monkeypatch.setattr(training, "train_many", train)
    return trained


def counts(trained: list[list[Recipe]]) -> list[int]:
    return [len(recipes) for recipes in trained]


# ---------------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"recipe": small(grow=[])}, "this recipe has 0"),
        ({"widths": []}, "needs base widths"),
        ({"seeds": 0}, "seeds is 0"),
        ({"lrs": []}, "lrs= is a tuple, but must be one learning rate or more"),
        ({"lr": 0.0}, "lrs[0] is 0.0, but must be a number above 0"),
        ({"noise": -1.0}, "is -1.0, but must be a number that is finite and 0 or more"),
        ({"widths": [{"width": 8}]}, "must be of the same form"),
    ],
)
def test_mistakes_are_told_before_anything_is_trained(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with refused(said):
        transfer_check(**{"recipe": small(), "widths": [8, 16], "out": tmp_path, **SMALL, **changes})
    assert not list(tmp_path.iterdir())


@pytest.mark.quick("model")
@pytest.mark.parametrize(
    ("other", "rate"),
    [(small(), {"base_lr": 0.01}), (small(model=Spec(MLP.class_path, {**MLP.init_args, "depth": 4})), {})],
    ids=["base_lr", "model"],
)
def test_another_recipe_in_the_same_folder_is_trained_and_never_taken_for_the_first(
    other: Recipe, rate: dict[str, float], tmp_path: Path
) -> None:
    asked: dict[str, Any] = {**SMALL, "widths": [8], "seeds": 1, "lrs": [0.004], "noises": [0.3]}
    first = transfer_check(small(), out=tmp_path / "both", **asked)
    second = transfer_check(other, out=tmp_path / "both", **asked, **rate)
    assert second == transfer_check(other, out=tmp_path / "alone", **asked, **rate) != first
    assert transfer_check(small(), out=tmp_path / "both", **asked) == first


def test_a_base_model_that_diverges_ends_the_check(tmp_path: Path) -> None:
    with refused("diverged at learning rate 1e+30"):
        transfer_check(small(optimizer=Spec("torch.optim.SGD", {"lr": 1e30})), widths=[8], out=tmp_path, **SMALL)


def test_trials_that_diverge_are_recorded_as_none(tmp_path: Path) -> None:
    sgd = Spec("torch.optim.SGD", {"lr": 0.1})
    asked: dict[str, Any] = {**SMALL, "lrs": [0.1, 3e38], "noises": [], "widths": [8], "seeds": 1}
    values = transfer_check(small(optimizer=sgd), out=tmp_path, **asked)
    fine, lost = values["lr"][0]["points"]
    assert lost["losses"] == [None]
    assert fine["losses"] != [None]


def test_a_damaged_file_of_losses_costs_training_alone(
    checked: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, values = checked
    (out / "losses-transfer.json").write_text("{")
    trained = watched(monkeypatch)
    assert transfer_check(small(), widths=[8, 16], out=out, **SMALL) == values
    assert counts(trained) == [6, 6]


# ---------------------------------------------------------------------------------------------- rule sets

RATES = [2.0**n for n in range(-3, 4)]


def size(width: int, best: float, seeds: int = 3, spread: float = 0.0, bend: float = 0.1) -> dict[str, Any]:
    """Parabolas in log2 of the rate; each seed's lowest lies `spread` beyond that of the one before."""
    losses = [[2 + bend * (n - best - seed * spread) ** 2 for seed in range(seeds)] for n in range(-3, 4)]
    return {"size": width, "points": [{"x": x, "losses": part} for x, part in zip(RATES, losses, strict=True)]}


def test_the_numbers_of_parabolas_are_exact() -> None:
    """The best rate moves by 1.5 doublings, and costs are read off the grid."""
    numbers = measure_transfer([size(8, 0.0), size(16, 9.0), size(32, 1.5)])
    assert numbers["moved"] == {"mean": pytest.approx(1.5, abs=1e-12), "error": pytest.approx(0, abs=1e-12)}
    lowest = 2 + 0.1 * 0.25
    assert numbers["lowest"]["mean"] == pytest.approx(lowest)
    wrong = (2 + 0.1 * (0.25 + 2.25) / 2) / lowest - 1  # between two points of the grid, linearly
    assert numbers["wrong_rate"]["mean"] == pytest.approx(wrong)
    assert numbers["transferred"]["mean"] == pytest.approx((2 + 0.1 * 2.25) / lowest - 1)


def test_error_bars_are_those_of_the_mean_over_seeds() -> None:
    numbers = measure_transfer([size(8, 0.0), size(32, 0.0, spread=0.3)])
    assert numbers["moved"] == {"mean": pytest.approx(0.3), "error": pytest.approx(0.3 / 3**0.5)}
    assert measure_transfer([size(8, 0.0, seeds=1), size(32, 1.0, seeds=1)])["moved"]["error"] is None


def test_negative_losses_are_compared_by_their_difference() -> None:
    sizes = [lowered(line(128, 0.4), 5.0), lowered(line(256, 0.8), 5.0)]
    said = judge_transfer({"lr": sizes, "noise": []})
    assert said[0] == "taking the best learning rate of width 128, 0.4, to width 256 ends 0.1 higher in loss there"
    assert said[1].endswith("the optimum does not transfer, since every seed ends higher there")
    numbers = measure_transfer(sizes, "difference")
    assert numbers["transferred"]["mean"] == pytest.approx(0.1)
    rules = {"default": {"sizes": [{**size, "size": size["width"]} for size in sizes], "numbers": numbers}}
    values = {"over": "width", "lrs": GRID, "gap": "difference", "rules": rules}
    assert "the smallest size's best rate costs, in loss" in rules_table(values)
    assert "costs least with default: 0.1 ± 0 in loss" in rules_in_words(values)[0]


def lowered(entry: dict[str, Any], by: float) -> dict[str, Any]:
    points = [{"x": point["x"], "losses": [loss - by for loss in point["losses"]]} for point in entry["points"]]
    return {**entry, "points": points}


def test_where_everything_diverged_that_is_what_is_said() -> None:
    lost = [{"width": 128, "size": 128, "points": [{"x": x, "losses": [None]} for x in GRID]}] * 2
    assert nothing_finished(lost)
    assert judge_transfer({"lr": lost, "noise": []}) == [
        "every learning rate tried diverged at every width: give smaller learning rates (StudySettings.grown_lrs)"
    ]
    numbers = measure_transfer(lost)
    values = {"over": "width", "lrs": GRID, "rules": {"default": {"sizes": lost, "numbers": numbers}}}
    assert rules_in_words(values) == ["every run diverged: give smaller learning rates (StudySettings.lrs)"]


def test_what_diverges_is_said_and_not_counted() -> None:
    small, large = size(8, 0.0), size(32, -1.0)
    large["points"][3]["losses"][1] = None  # at the small one's best
    numbers = measure_transfer([small, large])
    assert numbers["transferred"]["mean"] is None
    assert numbers["moved"]["mean"] is not None
    for point in large["points"]:
        point["losses"] = [None] * 3
    assert {one["mean"] for one in measure_transfer([small, large]).values()} == {None}


def test_what_is_said_of_rule_sets() -> None:
    """Which costs least, who does as well within the errors, and where the grid ends."""

    def values(**best: tuple[float, float]) -> dict[str, Any]:
        made = {name: [size(8, 0.0, spread=0.2), size(32, at, bend=bend)] for name, (at, bend) in best.items()}
        rules = {name: {"sizes": lines, "numbers": measure_transfer(lines)} for name, lines in made.items()}
        return {"over": "width", "lrs": RATES, "rules": rules}

    (told,) = rules_in_words(values(far=(2.0, 0.1), near=(0.0, 0.1), same=(0.0, 0.2)))
    assert told.startswith("from width 8 to 32, taking the best rate along costs least with near: 0 ± 0 % of the loss")
    assert told.endswith("within the errors, as little with same")
    edge = "the best rate lies on the edge of the grid at width 32: try a wider range (StudySettings.lrs)"
    assert rules_in_words(values(far=(3.0, 0.1), near=(0.0, 0.1)))[1:] == [f"with far {edge}"]
    assert rules_in_words(values(far=(3.0, 0.1), farther=(3.0, 0.2)))[1:] == [f"with every rule set {edge}"]


def compare(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    one = recipe(width=8, steps=4, optimizer=ADAMW, grow=[])
    told: dict[str, Any] = {"rules": [RuleSet(), RuleSet("fixed")], "lrs": [0.01, 0.02, 0.04], "seeds": 2}
    if not changes.keys() & {"batches", "durations"}:
        told["widths"] = [4, 8]
    return compare_rules(one, out=tmp_path / "out", **{**told, **changes})


def test_rule_sets_are_compared_and_runs_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = compare(tmp_path)
    assert json.loads((tmp_path / "out" / RULES_FILE).read_text()) == values
    assert list(values["rules"]) == ["default", "decay=fixed"]
    for lines in values["rules"].values():
        assert [one["size"] for one in lines["sizes"]] == [4, 8]
        assert all(len(point["losses"]) == 2 for one in lines["sizes"] for point in one["points"])
    assert values["rules"]["default"]["sizes"] != values["rules"]["decay=fixed"]["sizes"]
    assert values["verdict"][0].startswith("from width 4 to 8, taking the best rate along costs least with ")
    assert [line.split()[0] for line in rules_table(values).splitlines()[-2:]] == ["default", "decay=fixed"]
    monkeypatch.setattr(training, "train_many", lambda *args, **more: pytest.fail("trained again"))
    assert compare(tmp_path) == values


def test_rule_sets_that_coincide_share_their_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the base width decay is the same under every rule, to the bit; what is said of all runs is said once."""
    said = list[str]()
    trained = watched(monkeypatch, lambda _, options: options["note"]("one run at a time: a reason"))
    rules = [RuleSet(), RuleSet("fixed"), RuleSet("fixed", batch="none")]
    values = compare(tmp_path, rules=rules, note=said.append)
    assert counts(trained) == [6, 6, 6]
    assert [text for text in said if text.endswith(", reused")] == [
        "decay=fixed, width 4: 3 rates × 2 seeds, reused",
        "decay=fixed,batch=none, width 4: 3 rates × 2 seeds, reused",
        "decay=fixed,batch=none, width 8: 3 rates × 2 seeds, reused",
    ]
    assert said.count("one run at a time: a reason") == 1
    alone = compare(tmp_path / "alone", rules=[RuleSet("fixed")])
    assert alone["rules"]["decay=fixed"] == values["rules"]["decay=fixed"]
    one = recipe(width=8, steps=4, optimizer=ADAMW, grow=[])
    table = RuleComparison(one, rules, [0.01, 0.02, 0.04], widths=[4, 8], seeds=2).describe("serial")
    rows = {line.partition("  ")[0]: line.split() for line in table.splitlines()}
    assert rows["decay=fixed, width 8"][3:5] == ["6", "models"]
    assert rows["decay=fixed, width 4"][3:5] == ["0", "models"]


def test_the_best_rate_at_each_size_is_told() -> None:
    """Of the mean over seeds; a rate at which a seed diverged is not the best."""
    small, large, lost = size(8, 0.0, spread=0.2), size(32, 2.0), size(64, 2.0)
    large["points"][5]["losses"][1] = None
    for point in lost["points"]:
        point["losses"] = [None] * 3
    lines = {"sizes": [small, large, lost], "numbers": measure_transfer([small, large])}
    table = rules_table({"over": "width", "rules": {"default": lines}}).splitlines()
    assert [re.split(r"  +", line) for line in table[-2:]] == [
        ["best rate tried", "width 8", "width 32", "width 64"],
        ["default", "1", "2", "diverges"],
    ]


@pytest.mark.parametrize(("sizes", "lrs"), [({"batches": [4, 16]}, [2.0, 1.0]), ({"durations": [4, 16]}, [1.0, 0.5])])
def test_over_batches_and_durations_hyperparameters_follow(sizes: dict[str, Any], lrs: list[float]) -> None:
    """lr ∝ √batch and duration^-1/2, from the first of them on; a larger batch takes fewer steps."""
    rules = [RuleSet(duration=0.5), RuleSet(batch="none")]
    compared = RuleComparison(recipe(width=8, steps=4, optimizer=ADAMW, grow=[]), rules, [0.01, 0.02, 0.04], **sizes)
    seen = [compared.ground.recipe_of(leaves[0], Path()) for _, _, leaves in compared.runs()]
    (first, second), others = seen[:2], seen[2:]
    ratio = second.optimizer.init_args["lr"] / first.optimizer.init_args["lr"]
    assert ratio == pytest.approx(2.0 if "batches" in sizes else 0.5)
    assert others[1].optimizer.init_args["lr"] == others[0].optimizer.init_args["lr"]
    assert first.optimizer.init_args["lr"] == 0.01
    assert [run.steps * run.batch for run in (first, second)] == ([16, 16] if "batches" in sizes else [32, 128])
    costs = [compared.ground.cost(leaves[0]) / compared.ground.cost_per_step(8) for _, _, leaves in compared.runs()]
    assert costs == 2 * ([2.0, 2.0] if "batches" in sizes else [4.0, 16.0])


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"widths": [8]}, "two or more widths, or batches, or durations"),
        ({"widths": [4, 8], "batches": [4, 8]}, "give one list"),
        ({"lrs": [0.1, 0.2]}, "three learning rates"),
        ({"rules": []}, "a rule set"),
    ],
)
def test_too_little_to_compare_is_refused(changes: dict[str, Any], told: str, tmp_path: Path) -> None:
    with pytest.raises(MupscaleError, match=told):
        compare(tmp_path, **changes)
