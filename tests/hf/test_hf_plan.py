"""By how much a checkpoint grows, and the records of growths."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_models as models
import mupscale as mu
from hf_files import read_checkpoint
from mupscale import MupscaleError, Plan, hf
from mupscale.core import index_of_old
from mupscale.hf.building import sketch_model
from mupscale.hf.config_family import ConfigFamily
from mupscale.hf.config_fields import Times
from mupscale.hf.groups import match_plan
from mupscale.hf.record import GrowthStep, Record, count_from_first, plan_growths
from mupscale.hf.source import open_source
from refusals import refuses

LLAMA = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 20, "num_attention_heads": 4, "head_dim": 4}


# Growth.


@pytest.mark.parametrize(
    ("given_", "expected"),
    [
        (2, Times(2, 2, 2, 2)),
        ("3", Times(3, 3, 3, 3)),
        ("hidden=2,ffn=3,heads=2", Times(2, 3, 2, 2)),
        (" hidden = 2 , heads = 4 , kv = 2", Times(2, 1, 4, 2)),
        ("heads=2,kv=1", Times(1, 1, 2, 1)),
        ({"ffn": 2}, Times(1, 2, 1, 1)),
        (Times(ffn=5), Times(1, 5, 1, 1)),
    ],
)
def test_what_times_may_be(given_: Any, expected: Times) -> None:
    assert Times.of(given_) == expected
    assert Times.of(str(expected)) == expected


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        (0, "hidden cannot grow 0 times"),
        (1.5, "hidden cannot grow 1.5 times"),
        (True, "hidden cannot grow True times"),
        ("1.5", "'1.5' is not a whole number"),
        ("-2", "'-2' is not a whole number"),
        ("hidden=2,ffn", "'' is not a whole number"),
        ("width=2", "names 'width', which does not grow"),
        ("heads=2,kv=3", r"cannot grow 3 times while heads grow 2 times.*\(kv=2\).*\(kv=1\)"),
        ("kv=2", "cannot grow 2 times while heads grow 1 times"),
        ("2" * 5 + "x", "not a whole number"),
    ],
)
def test_what_times_may_not_be(given_: Any, message: str) -> None:
    refuses(message, Times.of, given_)


def test_growths_multiply() -> None:
    assert Times.of(2) * Times.of("ffn=3,heads=2,kv=1") == Times(2, 6, 4, 2)


@pytest.mark.quick("heads=2,kv=1-2")
@pytest.mark.parametrize("first", ["2", "heads=2,kv=1"])
@pytest.mark.parametrize("second", ["heads=2,kv=1", "ffn=3"])
def test_growing_twice_is_growing_once(first: str, second: str) -> None:
    """In a record that holds its plan, and in one that does not."""
    config = {**LLAMA, "num_key_value_heads": 2, "num_hidden_layers": 1, "vocab_size": 11, "tie_word_embeddings": True}
    one, two = (GrowthStep(Times.of(times)) for times in (first, second))
    middle = one.config_after(config)
    plans = [ConfigFamily(c).plan(step.times, initial=False) for c, step in ((config, one), (middle, two))]
    record = Record(config).then(one, plans[0]).then(two, plans[1])
    at_once = ConfigFamily(config).plan(one.times * two.times, initial=False)
    assert record.plan.rules == at_once.rules == Record(config, (one, two)).whole_plan().rules
    assert two.config_after(middle) == ConfigFamily(config).wide_config(one.times * two.times)


def test_a_record_follows_more_layers() -> None:
    config = {**LLAMA, "num_key_value_heads": 2, "num_hidden_layers": 1, "vocab_size": 11}
    wider, deeper = GrowthStep(Times.of(2)), GrowthStep(Times(), layers=3)
    record = plan_growths([wider, deeper], config, None)[-1].record
    whole = Record(config, (wider, deeper)).whole_plan()
    assert record.plan.parameters == whole.parameters


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, '{"format": "mupscale.hf/2", "growths": [], "config": [], "plan": null}'],
    ids=["too deep", "no config"],
)
def test_a_record_that_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "mupscale.json").write_text(text)
    refuses(r"is not a mupscale.json of this version .*Copy the one", Record.load, tmp_path)


GROWTH = {"times": {"hidden": 2, "ffn": 2, "heads": 2, "kv": 2}, "noise": 0, "seed": 0, "unit": "init"}
ENDLESS: dict[str, tuple[list[dict[str, Any]], str]] = {
    "growths": ([GROWTH] * 101, "it lists 101 growths, more than 100"),
    "layers": ([{**GROWTH, "how": "identity", "layers": 10**9}], "layers is 1000000000, more than 10,000"),
    "experts": (
        [{**GROWTH, "how": "experts", "experts": 10**9, "top_k": 1, "router": "x"}],
        "experts is 1000000000, more than 10,000",
    ),
    "times": ([{**GROWTH, "times": {"hidden": 10**4000}}], "hidden grew more than 1,000,000 times"),
    "a power of ten": ([{**GROWTH, "times": {"hidden": "1e999999999"}}], "is no ratio of whole numbers"),
}


@pytest.mark.parametrize("kind", ENDLESS)
def test_a_record_that_would_take_for_ever(tmp_path: Path, kind: str) -> None:
    growths, said = ENDLESS[kind]
    content = {"format": "mupscale.hf/2", "growths": growths, "config": LLAMA, "plan": None}
    (tmp_path / "mupscale.json").write_text(json.dumps(content))
    refuses(f"is not a mupscale.json of this version .*{said}.*Copy the one", Record.load, tmp_path)


# --- Checkpoints that grow more than once: what noise and new units are drawn from counts from the first model.
TIED = {"tie_word_embeddings": True}
NOISY, FRESH = mu.Copies(0.5), mu.Fresh()
GATE = "model.layers.0.mlp.gate_proj.weight"


def grown(config: Mapping[str, Any], times: Times) -> tuple[Plan, dict[str, Any]]:
    """The plan of a growth, and the config after it."""
    return ConfigFamily(config).plan(times), ConfigFamily(config).wide_config(times)


def spreads(plan: Plan | None) -> dict[str, float]:
    return dict(plan.fresh)


def check_same_start(counted: Plan, once: Plan) -> None:
    """Spreads and means alike, up to the rounding of a few products."""
    assert spreads(counted) == pytest.approx(spreads(once), rel=1e-12, abs=0)
    if counted.means is not None:
        for name, means in counted.means.items():
            assert means == pytest.approx(once.means[name], rel=1e-12), name


def save(folder: Path, name: str = "llama", **config: Any) -> Path:
    """A small random model."""
    models.randomised(models.build(models.tiny(name, **config)[0])).save_pretrained(folder)  # type: ignore[operator]
    return folder


def grow(source: Path, out: Path, operator: mu.Operator, **options: Any) -> Path:
    given = {"times": 2, "verify": False, "progress": False, **options}
    return hf.upscale(source, out, grow=operator, exact=operator == mu.Copies(), **given).path


def grow_twice(folder: Path, first: mu.Operator, second: mu.Operator, **config: Any) -> tuple[Path, Path, Path]:
    small = save(folder / "small", **config)
    wide = grow(small, folder / "wide", first, seed=1)
    return small, wide, grow(wide, folder / "wider", second, seed=2)


# Plans.


@pytest.mark.filterwarnings("ignore:of 'wav2vec2' the batch does not show:mupscale.UncheckedPlan")
@pytest.mark.parametrize(
    ("name", "changed"),
    [*(pytest.param(n, {}, marks=pytest.mark.slow) for n in models.CONFIGS), ("llama", TIED)],
)
def test_the_start_is_that_of_one_growth(name: str, changed: dict[str, Any]) -> None:
    """Also where the sizes in a config set the spread (T5's), and where the norm of a tied readout starts below 1."""
    config, twice = models.tiny(name, **changed)[0].to_dict(), models.usual_times(name)
    for first in (twice, twice.for_units(fresh=True)):
        for second in (twice, twice.for_units(fresh=True)):
            try:
                plan, _ = grown(grown(config, first)[1], second)
            except MupscaleError:  # which takes no fresh units
                assert first.fresh or second.fresh
                assert name in ("bloom", "mpt", "wav2vec2")
                continue
            counted = count_from_first(Record(config, (GrowthStep(first),)), plan)
            once = grown(config, first * second)[0]
            check_same_start(counted, once)
            check_same_start(count_from_first(Record(config, (GrowthStep(first),)), counted), once)
            assert spreads(plan) != pytest.approx(spreads(once), rel=1e-2, abs=0)
            assert replace(counted, initial=plan.initial) == plan


@pytest.mark.slow
@pytest.mark.parametrize("first", ["heads=2,kv=1", "hidden=3,heads=2", "ffn=3"])
@pytest.mark.parametrize("second", ["2", "hidden=2,heads=2", "ffn=3"])
def test_sizes_that_grow_apart(first: str, second: str) -> None:
    """And in blocks that do not compose, where key/value heads grow in one of the two alone."""
    config = models.tiny("llama", head_dim=4, hidden_size=24)[0].to_dict()
    one, two = Times.of(first), Times.of(second)
    plan = grown(grown(config, one)[1], two)[0]
    check_same_start(count_from_first(Record(config, (GrowthStep(one),)), plan), grown(config, one * two)[0])


def test_more_layers_change_no_spread() -> None:
    """Neither alone nor between two growths by width; what a config says of all its layers is as it was."""
    config = models.tiny("gpt2")[0].to_dict()
    deeper, twice = GrowthStep(Times(), layers=4), GrowthStep(Times.of(2))
    deep = deeper.config_after(config)
    plan, wide = grown(deep, twice.times)
    assert count_from_first(Record(config, (deeper,)), plan) == plan
    once = grown(deep, Times.of(4))[0]
    for growths in ((twice, deeper), (deeper, twice)):
        check_same_start(count_from_first(Record(config, growths), grown(wide, twice.times)[0]), once)


def test_plans_by_a_models_own_names() -> None:
    """As a callback has them, tied as the model is; a plan without initial values stays."""
    config = models.tiny("llama", **TIED)[0].to_dict()
    wide = ConfigFamily(config).wide_config(Times.of(2))
    plan = match_plan(models.build(wide), ConfigFamily(wide).plan(Times.of(2)))
    record = Record(config, (GrowthStep(Times.of(2)),))
    counted = spreads(count_from_first(record, plan))
    assert counted[GATE] == pytest.approx(0.02 / math.sqrt(4))
    assert counted["model.embed_tokens.weight"] == 0.02
    unknown = plan.with_initial("std", None)
    assert count_from_first(record, unknown) is unknown


# Files.


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_new_units_have_the_spread_that_one_growth_gives_them(tmp_path: Path, name: str) -> None:
    """Measured on the files, whose config says 0.02 throughout."""
    sizes = {"gpt2": {"n_embd": 64, "n_layer": 1}}.get(
        name, {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, **TIED}
    )
    _, wide, wider = grow_twice(tmp_path, FRESH, FRESH, name=name, **sizes)
    before, small = open_source(wide), Record.load(wide).config
    plan = ConfigFamily(before.config).plan_files(Times.of(2), before.shapes)
    once = spreads(ConfigFamily(small).plan_files(Times.of(4), models.shapes(sketch_model(small))))
    measured = 0
    for tensor, p in read_checkpoint(wider).items():
        entry = plan[tensor]
        new = torch.ones(entry.wide, dtype=torch.bool)
        new[index_of_old(entry.narrow, entry.axes)] = False
        if p.dim() == 2 and (count := int(new.sum())) > 1000:
            assert float(p[new].std()) == pytest.approx(once[tensor], rel=6 / math.sqrt(2 * count)), tensor
            measured += 1
    assert measured >= 5


@pytest.mark.quick("first0-*")
@pytest.mark.parametrize(
    ("first", "second"),
    [
        (FRESH, FRESH),
        (NOISY, NOISY),
        (NOISY, FRESH),
        pytest.param(FRESH, NOISY, marks=pytest.mark.slow),
        pytest.param(mu.Copies(), mu.Fresh(lossless=True), marks=pytest.mark.slow),
    ],
)
def test_they_are_verified_with_the_spread_that_was_written(
    tmp_path: Path, first: mu.Operator, second: mu.Operator
) -> None:
    """From the first model and from the second, also where that has lost its record; another spread is an error."""
    small, wide, wider = grow_twice(tmp_path, first, second, **TIED)
    assert hf.verify(small, wider).ok
    assert hf.verify(wide, wider).ok
    lost = Path(shutil.copytree(wide, tmp_path / "lost"))
    (lost / "mupscale.json").unlink()
    assert hf.verify(lost, wider).ok
    wrong = grow(lost, tmp_path / "wrong", second, seed=2)  # counted from where it grew, for want of a record
    shutil.copy(wider / "mupscale.json", wrong)
    assert not hf.verify(wide, wrong).ok
    assert not hf.verify(small, wrong).ok


@pytest.mark.slow
def test_wider_and_deeper_and_wider_again(tmp_path: Path) -> None:
    small = save(tmp_path / "small", "gpt2")
    wide = grow(small, tmp_path / "wide", NOISY)
    deep = grow(wide, tmp_path / "deep", FRESH, layers=3, verify=True)
    last = grow(deep, tmp_path / "last", FRESH, times="3")
    assert hf.verify(small, last).ok
    assert hf.verify(deep, last).ok


def test_what_is_said_of_the_spread(tmp_path: Path) -> None:
    """By inspect."""
    small = save(tmp_path / "small")
    wide = grow(small, tmp_path / "wide", mu.Copies())
    found = hf.inspect(wide, times=2, grow=FRESH)
    row = next(row for row in found.rows if "gate_proj" in row.name or "gate_proj" in row.label)
    assert row.new_units == "± 0.01"
    assert "param_groups counts from the first model, and so does the scale of new units" in " ".join(found.summary())


@pytest.mark.slow
def test_the_optimizers_state_does_not_depend_on_it(tmp_path: Path) -> None:
    small = save(tmp_path / "small")
    wide = grow(small, tmp_path / "wide", FRESH)
    model = models.build(json.loads((wide / "config.json").read_text()))
    optimizer = torch.optim.AdamW(model.parameters())
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    grow(wide, tmp_path / "counted", FRESH, optimizer=tmp_path / "optimizer.pt")
    (wide / "mupscale.json").unlink()
    grow(wide, tmp_path / "alone", FRESH, optimizer=tmp_path / "optimizer.pt")
    one, other = (torch.load(tmp_path / folder / "optimizer.pt") for folder in ("counted", "alone"))
    assert one["param_groups"] == other["param_groups"]
    for key, state in one["state"].items():
        assert all(torch.equal(state[name], other["state"][key][name]) for name in state)
