"""Comparing rule sets: the three numbers on curves made up for them, and real runs, taken up again."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from mupscale.core import RuleSet
from mupscale.engine import train_many
from mupscale.study import compare_rules, rules_table, training
from mupscale.study.rule_comparison import RULES_FILE, RuleComparison, measure_transfer, rules_in_words
from mupscale.system import MupscaleError
from small_runs import ADAMW, recipe

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
    trained, said = list[int](), list[str]()

    def counting(recipes: Any, **more: Any) -> Any:
        trained.append(len(recipes))
        more["note"]("one run at a time: a reason")
        return train_many(recipes, **more)

    monkeypatch.setattr(training, "train_many", counting)
    rules = [RuleSet(), RuleSet("fixed"), RuleSet("fixed", batch="none")]
    values = compare(tmp_path, rules=rules, note=said.append)
    assert trained == [6, 6, 6]
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
